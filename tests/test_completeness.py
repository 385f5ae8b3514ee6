"""Names, documentation, oracle and tests cannot drift apart."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.base import Scheme
from tests import naive, test_schemes, test_schemes_bias

ROOT = Path(rp.__file__).parent.parent
DOCS = ROOT / "docs"
ORACLE = {
    "plain": naive.attention,
    "shaw": naive.shaw,
    "t5": naive.t5,
    "transformer_xl": naive.transformer_xl,
    "rotary": naive.rotary,
    "xpos": naive.xpos,
    "window": naive.window_bias,
    "swin_v2": naive.swin_v2,
    "beit": naive.beit,
    "decomposed": naive.decomposed,
    "neighborhood": naive.neighborhood,
    "irpe": naive.irpe,
    "alibi": naive.alibi,
    "kerple": naive.kerple,
    "layout": naive.layout,
    "deberta": naive.deberta,
    "graph": naive.graph_labels,
    "cope": naive.cope,
    "wavlm": naive.wavlm,
    "fire": naive.fire,
    "sandwich": naive.sandwich,
    "tisa": naive.tisa,
    "sinusoidal": naive.sinusoidal,
    "learned": naive.learned,
}
FUNCTIONS = [name for name in rp.__all__ if inspect.isfunction(getattr(rp, name))]
CLASSES = [info.cls for info in rp.SCHEMES.values()]
REFERENCE = sorted(rp.reference.__all__)

IDENTITIES = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_schemes*.py"))

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
def test_scheme_is_in_the_readme(name):
    if (ROOT / "README.md").is_file():
        assert f"| `{rp.SCHEMES[name].cls.__name__}` |" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", rp.SCHEMES)
def test_scheme_has_loops_and_identities(name):
    """A witness in tests/naive that cites a paper, and a place in the tests of identities."""
    assert name in ORACLE, "write the loops in tests/naive first"
    assert re.search(r"\b(19|20)\d\d\b", ORACLE[name].__doc__)
    assert inspect.getmodule(ORACLE[name]).__name__.startswith("tests.naive.")
    assert rp.SCHEMES[name].cls.__name__ in IDENTITIES


def test_every_variant_is_tested():
    for info in rp.SCHEMES.values():
        for variant in info.variants:
            if variant not in {"swin", "video", "rstt", "clip", "exact"}:
                assert variant in IDENTITIES, f"{info.name}: {variant}"


@checkout
@pytest.mark.parametrize("name", rp.SCHEMES)
def test_scheme_has_a_page(name):
    info = rp.SCHEMES[name]
    page = DOCS / info.docs
    assert page.is_file()
    text = page.read_text(encoding="utf-8")
    assert f"relpos_np.{info.cls.__name__}" in text
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert info.docs.removesuffix(".md") in index


@checkout
def test_no_page_without_a_scheme():
    assert {f"schemes/{p.name}" for p in (DOCS / "schemes").glob("*.md")} == {s.docs for s in rp.SCHEMES.values()}


@checkout
@pytest.mark.parametrize("name", [n for n in rp.__all__ if n not in {c.__name__ for c in CLASSES}])
def test_public_name_is_documented(name):
    assert re.search(rf"\brelpos_np\.{name}\b", (DOCS / "api.md").read_text(encoding="utf-8")) or name == "backend"


def test_all_is_sorted_and_importable():
    # Sorted as ruff sorts __all__: constants, classes, then functions.
    order = sorted(rp.__all__, key=lambda n: (0 if n.isupper() and len(n) > 2 else 1 if n[0].isupper() else 2, n))
    order.sort(key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert list(rp.__all__) == order
    assert len(set(rp.__all__)) == len(rp.__all__)
    for name in rp.__all__:
        assert hasattr(rp, name)
    assert list(rp.reference.__all__) == REFERENCE
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


def test_schemes_print_what_they_are():
    """A repr names the class and shapes, never the numbers."""
    schemes = test_schemes.every_scheme(__import__("numpy").random.default_rng(0)).values()
    biases = test_schemes_bias.every_bias(__import__("numpy").random.default_rng(0)).values()
    for scheme in (*schemes, *biases, rp.Sinusoidal(8), rp.LearnedAbsolute(__import__("numpy").ones((3, 2)))):
        assert repr(scheme).startswith(f"{type(scheme).__name__}(")
        assert len(repr(scheme)) < 160


def test_register_cannot_be_changed():
    with pytest.raises(TypeError):
        rp.SCHEMES["new"] = None
