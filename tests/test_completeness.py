"""Names, documentation, oracle and tests cannot drift apart."""

import copy
import inspect
import pickle
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._contract.options import Options
from relpos_np._runtime.precision import PRECISIONS
from relpos_np.formulas import relshift
from tests.compare import assert_same_bits
from tests.every import ABSOLUTE, ATTENTION
from tests.naive.by_name import LOOPS

ROOT = Path(rp.__file__).parent.parent
DOCS = ROOT / "docs"
CLASSES = [info.cls for info in rp.SCHEMES.values()]

# What a checkout holds and an installed package does not.
checkout = pytest.mark.skipif(not DOCS.is_dir(), reason="not a checkout")


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_scheme(name):
    info = rp.SCHEMES[name]
    assert info.name == name
    assert info.cls.__name__ in rp.__all__
    assert getattr(rp, info.cls.__name__) is info.cls
    assert info.kind in {"attention", "absolute"}
    assert re.search(r"\b(19|20)\d\d\b", info.paper)
    assert set(info.backends) <= set(rp.backend.BACKENDS)
    assert "numpy" in info.backends
    assert all(info.models)
    assert info.models or name == "plain"
    doc = info.cls.__doc__
    assert ".. math::" in doc
    assert "    References\n" in doc
    assert not inspect.signature(info.cls).parameters or "    Raises\n" in doc


def words(hint):
    """What a Literal allows, also as one of several types."""
    return {w for part in (hint, *get_args(hint)) if get_origin(part) is Literal for w in get_args(part)}


@pytest.mark.parametrize("name", [name for name, info in rp.SCHEMES.items() if "__init__" in vars(info.cls)])
def test_type_checkers_know_the_words_that_a_constructor_takes(name):
    """Each of them is taken, and another is refused; none is left as a plain str."""
    cls = rp.SCHEMES[name].cls
    hints = get_type_hints(cls.__init__)
    assert str not in hints.values()
    for parameter, hint in hints.items():
        for word in words(hint) or ():
            assert refusal(cls, parameter, word) is None
        if words(hint):
            assert set(re.findall(r"'(\w+)'", refusal(cls, parameter, "?"))) == words(hint)


def refusal(cls, parameter, word):
    """What a constructor says against a word, whatever it says of the other arguments."""
    given = {n: p.default for n, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
    example = testing.example(next(n for n, i in rp.SCHEMES.items() if i.cls is cls))
    example = testing.arguments(example.position or example.encoding)
    try:
        cls(**given | example | {parameter: word})
    except rp.RelposError as error:
        found = str(error)
        return found.partition(";")[0] if found.startswith(f"{parameter}: expected one of") else None
    return None


def test_type_checkers_know_the_words_of_calls():
    hints = get_type_hints(Options, include_extras=False)
    assert words(hints["backend"]) == set(rp.backend.BACKENDS)
    assert words(hints["precision"]) == set(PRECISIONS)
    assert words(get_type_hints(rp.rel_shift)["variant"]) == set(relshift.VARIANTS)


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_scheme_has_loops(name):
    """A witness in tests/naive that cites a paper; tests/test_three_way.py compares it with everything."""
    scheme = testing.example(name)
    scheme = scheme.position or scheme.encoding
    assert name in LOOPS, f"write loops from the paper into tests/naive/{name}.py, under @witness({name!r})"
    assert re.search(r"\b(19|20)\d\d\b", LOOPS[name].__doc__), "which paper are the loops from?"
    missing = set(testing.arguments(scheme)) - set(inspect.signature(LOOPS[name]).parameters)
    assert not missing, f"the loops of {name} must take all arguments of the constructor, and lack {missing}"


@checkout
def test_what_is_written_from_the_register_is_up_to_date():
    spec = spec_from_file_location("relpos_docs_register", DOCS / "register.py")
    register = module_from_spec(spec)
    spec.loader.exec_module(register)
    for path, text in register.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `python docs/register.py`"


@checkout
@pytest.mark.parametrize("name", [n for n in rp.__all__ if n not in {c.__name__ for c in CLASSES}])
def test_public_name_is_documented(name):
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    assert re.search(rf"\brelpos_np\.{name}\b", pages) or name == "backend"


def test_all_is_importable_and_nothing_else_is_public():
    assert len(set(rp.__all__)) == len(rp.__all__)
    for module in (rp, rp.reference):
        for name in module.__all__:
            assert hasattr(module, name)
    public = {n for n in vars(rp) if not n.startswith("_") and not inspect.ismodule(getattr(rp, n))}
    assert public <= set(rp.__all__), public - set(rp.__all__)


def test_no_module_is_long():
    for path in Path(rp.__file__).parent.rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 600, f"{path.name} has {lines} lines"


def test_versions_name_the_installation(capsys, monkeypatch):
    import json

    monkeypatch.setenv("NUMBA_OPT", "3")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    rp.show_versions(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["relpos_np"] == rp.__version__
    assert {"python", "numpy", "numba", "processor", "kernels"} <= set(found)
    assert found["environment"]["NUMBA_OPT"] == "3"
    assert found["installed"] == str(Path(rp.__file__).parent)
    assert 1 <= found["processors"]["ours"] <= found["processors"]["here"]
    assert set(found["not_available"]) <= {"numba", "cuda"}
    rp.show_versions()
    printed = capsys.readouterr().out
    assert rp.__version__ in printed
    assert "hidden" not in printed


@pytest.mark.parametrize(("name", "variant"), ATTENTION + ABSOLUTE)
def test_schemes_print_what_they_are(name, variant):
    """A repr names the class and shapes, never the numbers."""
    one = testing.example(name, variant=variant)
    scheme = one.position or one.encoding
    assert repr(scheme).startswith(f"{type(scheme).__name__}(")
    assert len(repr(scheme)) < 160


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_copies_of_schemes_have_the_same_bits(name, variant):
    """Also what a scheme keeps of a call that it was in."""
    one = testing.example(name, variant=variant, size="tiny")
    expected = one.run("numba")
    for made in (pickle.loads(pickle.dumps(one.position)), copy.deepcopy(one.position), copy.copy(one.position)):
        assert repr(made) == repr(one.position)
        assert_same_bits(replace(one, position=made).run("numba"), expected)


def test_register_cannot_be_changed():
    with pytest.raises(TypeError):
        rp.SCHEMES["new"] = None
