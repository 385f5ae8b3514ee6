"""Names, documentation, oracle and tests cannot drift apart."""

import ast
import inspect
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._contract.options import Options
from relpos_np._runtime.precision import PRECISIONS
from relpos_np.formulas import relshift
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.base import Scheme
from tests.every import ABSOLUTE, ATTENTION
from tests.naive.by_name import LOOPS

ROOT = Path(rp.__file__).parent.parent
DOCS = ROOT / "docs"
FUNCTIONS = [name for name in rp.__all__ if inspect.isfunction(getattr(rp, name))]
CLASSES = [info.cls for info in rp.SCHEMES.values()]
REFERENCE = sorted(rp.reference.__all__)

# What a checkout holds and an installed package does not.
checkout = pytest.mark.skipif(not DOCS.is_dir(), reason="not a checkout")


def sections(docstring):
    """Titles of numpydoc sections."""
    return re.findall(r"^ *([A-Z][A-Za-z ]+)\n *-{3,}$", inspect.cleandoc(docstring), re.MULTILINE)


def parameters(docstring):
    """Names in the Parameters section."""
    body = re.search(
        r"^Parameters\n-+\n(.*?)(?=^[A-Z][a-z ]+\n-{3,}|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL
    )
    if body is None:
        return set()
    lines = re.findall(r"^(\w[\w, ]*?)(?: :.*)?$", body[1], re.MULTILINE)
    return {name.strip() for line in lines for name in line.split(",")}


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
    assert "References" in sections(doc)
    taken = set(inspect.signature(info.cls).parameters)
    assert taken <= parameters(doc), taken - parameters(doc)
    assert not taken or "Raises" in sections(doc)


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
def test_scheme_has_a_gradient(name):
    """The way back of its lowering, or of its encoding; `test_gradients.py` compares all of them with differences."""
    cls = rp.SCHEMES[name].cls
    if rp.SCHEMES[name].kind == "attention":
        assert cls.lift is not Scheme.lift
    else:
        assert cls.gradient is not AbsoluteEncoding.gradient or not any(
            isinstance(x, np.ndarray) for x in vars(testing.example(name).encoding).values()
        ), "a trained array without a gradient"


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_scheme_has_an_example(name):
    for variant in rp.SCHEMES[name].variants or (None,):
        one = testing.example(name, variant=variant)
        assert isinstance(one.position or one.encoding, rp.SCHEMES[name].cls)


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


# Published models and their schemes, and formulas that somebody else wrote for them.
ELSEWHERE = ("docs/checkpoints.py", "tests/parity/test_gradients.py")


@checkout
def test_no_list_of_schemes_is_kept_by_hand():
    """No list, tuple, set or dict of the source names most of the schemes: they all come from the register."""
    named = {word: name for name, info in rp.SCHEMES.items() for word in (name, info.cls.__name__)}
    for path in sorted(
        p for folder in ("relpos_np", "tests", "docs", "asv_bench", "examples") for p in (ROOT / folder).rglob("*.py")
    ):
        if str(path.relative_to(ROOT)) in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                words = {getattr(x, "value", None) for x in ast.walk(node) if isinstance(x, ast.Constant)}
                words |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
                words |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                found = {named[word] for word in words if isinstance(word, str) and word in named}
                assert len(found) <= len(rp.SCHEMES) // 2, f"{path.name}, line {node.lineno}: {sorted(found)}"


@checkout
@pytest.mark.parametrize("name", [n for n in rp.__all__ if n not in {c.__name__ for c in CLASSES}])
def test_public_name_is_documented(name):
    assert re.search(rf"\brelpos_np\.{name}\b", (DOCS / "api.md").read_text(encoding="utf-8")) or name == "backend"


def test_all_is_importable_and_nothing_else_is_public():
    assert len(set(rp.__all__)) == len(rp.__all__)
    for module in (rp, rp.reference):
        for name in module.__all__:
            assert hasattr(module, name)
    public = {n for n in vars(rp) if not n.startswith("_") and not inspect.ismodule(getattr(rp, n))}
    assert public <= set(rp.__all__), public - set(rp.__all__)


@pytest.mark.parametrize(
    "function",
    [*(getattr(rp, n) for n in FUNCTIONS), *(getattr(rp.reference, n) for n in REFERENCE)],
    ids=[*FUNCTIONS, *(f"reference.{n}" for n in REFERENCE)],
)
def test_function_has_a_numpydoc_docstring(function):
    doc = function.__doc__
    assert doc
    assert doc.splitlines()[0].strip().endswith((".", ":"))
    taken = set(inspect.signature(function).parameters)
    if inspect.getmodule(function).__name__.endswith(("dense", "relshift")):
        return  # helpers of the formulas, described in a sentence
    assert taken <= parameters(doc), taken - parameters(doc)
    assert {"Returns", "Raises"} & set(sections(doc)) or not taken or function is rp.show_versions


def test_attention_explains_each_of_its_errors_and_shapes():
    doc = rp.attention.__doc__
    for word in ("(..., H, L_q, D)", "(..., H_kv, L_k, D)", "D_v", "-inf", "float16", "RelposError", ".. math::"):
        assert word in doc


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


def test_register_cannot_be_changed():
    with pytest.raises(TypeError):
        rp.SCHEMES["new"] = None
