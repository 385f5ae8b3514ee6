"""Models of ONNX: every scheme is one that onnxruntime and ONNX's own evaluator agree with, or is refused by name."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing import cases
from relpos_np.testing._sizes import lengths
from relpos_np.testing.example import build

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
reference = pytest.importorskip("onnx.reference")
op_run = pytest.importorskip("onnx.reference.op_run")
_state = runtime.capi.onnxruntime_pybind11_state
ERRORS = (_state.InvalidArgument, _state.RuntimeException)

# What has no nodes, and the word that its refusal must hold. A new scheme that is not here must become a model.
REFUSED = {
    "dape": "DAPE",
    "path": "PaTH",
    "selective": "Selective",
}
KNOWN = [name for name, info in rp.SCHEMES.items() if info.kind == "attention"]
PAIRS = [(name, variant) for name in KNOWN if name not in REFUSED for variant in rp.SCHEMES[name].variants or (None,)]
SYMBOLIC = ["plain", "t5", "shaw", "deberta", "kerple", "sandwich", "tisa", "alibi", "rotary"]


def session(model):
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class GatherElements(op_run.OpRun):
    """In place of the evaluator's own, which picks from at most 64 rows."""

    op_domain = ""

    def _run(self, data, indices, axis=0):
        return (np.take_along_axis(data, indices, axis),)


class Evaluator:
    """ONNX's own evaluator, which defines what nodes mean."""

    def __init__(self, model):
        self.model = reference.ReferenceEvaluator(model, new_ops=[GatherElements])

    @np.errstate(all="ignore")
    def run(self, names, inputs):
        return self.model.run(names, inputs)


def exported(one, **more):
    return rp.to_onnx(
        one.position, q=one.q.shape, k=one.k.shape, v=one.v.shape, dtype=one.q.dtype, **{**one.kwargs, **more}
    )


def feed(q, k, v, **more):
    return {"q": q, "k": k, "v": v, **more}


def operators(model):
    return [node.op_type for node in model.graph.node]


def close(found, q, k, v, *, dtype=None, **call):
    """Whether it is the float64 answer within a few roundings of the largest score."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    lse = isinstance(found, list) and len(found) == 2
    expected = rp.attention(*wide, backend="numpy", return_lse=lse, **call)
    scores = rp.logits(*wide[:2], backend="numpy", **{name: x for name, x in call.items() if name != "sinks"})
    finite = np.abs(scores[np.isfinite(scores)]).max(initial=1.0)
    largest = 1 + finite + np.abs(wide[0]).max() * np.abs(wide[1]).max()
    eps = np.finfo(np.float32 if q.dtype == np.float32 else np.float64).eps
    atol = 16 * eps * largest * max(1.0, np.abs(v).max())
    for actual, wanted in zip(found, expected if lse else [expected], strict=True):
        assert actual.dtype == q.dtype
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)


def test_no_scheme_is_forgotten():
    assert set(REFUSED) < set(KNOWN)
    assert len(KNOWN) - len(REFUSED) >= 15


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_nodes_is_refused_by_name(name):
    with pytest.raises(rp.RelposTypeError, match=f"position: {REFUSED[name]} cannot be a model"):
        exported(build(name, lengths(7, 7), dtype="float32", seed=0, variant=None))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_every_scheme(name, variant, dtype):
    """In onnxruntime, with every mask and size that its examples have."""
    found = 0
    for one in cases(name, variant=variant, dtype=dtype, long=False):
        if one.edge in ("nan_excluded", "blocks"):  # ONNX multiplies what is excluded by 0
            continue
        model = exported(one)
        (out,) = session(model).run(None, feed(one.q, one.k, one.v))
        assert out.dtype == one.q.dtype
        assert one.error(out) <= 1, one.where
        found += 1
    assert found >= 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_evaluator_agrees(name, variant, dtype):
    """Without and with the log-sum-exp."""
    one = build(name, lengths(5, 5), dtype=dtype, seed=1, variant=variant)
    for with_lse in (False, True):
        model = exported(one, return_lse=with_lse)
        onnx.checker.check_model(model, full_check=True)
        expected = one.run("numpy")[: 1 + with_lse]
        for found in (Evaluator(model), session(model)):
            for actual, wanted in zip(found.run(None, feed(one.q, one.k, one.v)), expected, strict=True):
                atol = 1e-5 if dtype == "float32" else 1e-13
                np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol * max(1, np.abs(wanted).max()))


OPTIONS = [
    {"causal": True},
    {"causal": True, "offset": 0},
    {"causal": True, "offset": -3},
    {"window": (4, 2)},
    {"window": (3, None), "causal": True},
    {"scale": 0.3},
    {"scale": -0.3},
    {"softcap": 1.5},
    {"softcap": 1.5, "causal": True},
    {"softcap": 1.5, "cap_order": "content", "window": 3},
    {"rule": rp.Chunked(4)},
    {"rule": rp.Dilated(2), "causal": True},
    {"rule": rp.Prefix(3)},
    {"key_lengths": np.array([3, 0]), "offset": 3},
    {"mask": "bool"},
    {"mask": "float"},
    {"mask": "float", "causal": True, "offset": 0},
    {"mask": "float", "softcap": 2.0},
    {"sinks": "heads"},
    {"sinks": "heads", "key_lengths": np.array([3, 0]), "offset": 3},
    {"selected": "keys"},
    {"query_scale": "queries"},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scheme", ["none", "t5", "rotary", "rotary_last", "shaw"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(rng, options, scheme, dtype):
    q, k, v = (rng.standard_normal((2, h, n, d)).astype(dtype) for h, n, d in ((4, 6, 8), (2, 9, 8), (2, 9, 5)))
    arrays = {
        "bool": rng.random((2, 4, 6, 9)) < 0.5,
        "float": np.where(rng.random((6, 9)) < 0.3, -np.inf, rng.standard_normal((6, 9))).astype(dtype),
        "heads": rng.standard_normal(4).astype(dtype),
        "keys": rng.integers(-1, 9, (2, 6, 3)),
        "queries": (1 + rng.random(6)).astype(dtype),
    }
    options = {name: arrays[x] if isinstance(x, str) and x in arrays else x for name, x in options.items()}
    position = {
        "none": None,
        "t5": rp.T5(rng.standard_normal((8, 4)).astype(dtype), max_distance=16),
        "rotary": rp.Rotary(4, layout="interleaved"),
        "rotary_last": rp.Rotary(channels=(2, 6), blocks=2),
        "shaw": rp.Shaw(rng.standard_normal((5, 8)).astype(dtype), rng.standard_normal((5, 5)).astype(dtype)),
    }[scheme]
    for with_lse in (False, True):
        model = rp.to_onnx(
            position, q=q.shape, k=k.shape, v=v.shape, dtype=dtype, return_lse=with_lse, opset=23 + with_lse, **options
        )
        for found in (session(model), Evaluator(model)):
            close(found.run(None, feed(q, k, v)), q, k, v, position=position, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_lengths_with_names(name, causal, dtype):
    """One model for every batch and length up to the longest; beyond it, and only there, an error."""
    for variant in rp.SCHEMES[name].variants or (None,):
        if (name, variant) == ("alibi", "key"):
            continue
        one = build(name, lengths(9, 9), dtype=dtype, seed=0, variant=variant)
        h, h_kv, d, d_v = one.q.shape[1], one.k.shape[1], one.q.shape[3], one.v.shape[3]
        model = rp.to_onnx(
            one.position,
            q=("b", h, "n", d),
            k=("b", h_kv, "m", d),
            v=("b", h_kv, "m", d_v),
            dtype=dtype,
            longest=12,
            causal=causal,
        )
        there, rng = session(model), np.random.default_rng(1)
        for batch, q_len, k_len in ((1, 1, 1), (2, 5, 5), (3, 12, 12), (1, 1, 12), (2, 4, 9), (1, 9, 4)):
            shapes = (batch, h, q_len, d), (batch, h_kv, k_len, d), (batch, h_kv, k_len, d_v)
            q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
            if name == "rotary" and q_len > k_len:
                with pytest.raises(ERRORS, match="out of"):
                    there.run(None, feed(q, k, v))
                continue
            close(there.run(None, feed(q, k, v)), q, k, v, position=one.position, causal=causal)
        if name != "plain":
            shapes = [(1, x.shape[1], 13, x.shape[3]) for x in (one.q, one.k, one.v)]
            q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
            with pytest.raises(ERRORS, match=r"out of|Updating cos_cache"):
                there.run(None, feed(q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lengths_of", ["numbers", "names"])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_cache_of_a_fixed_size(name, lengths_of, dtype):
    """Offsets and lengths of keys as inputs, by item: each item is the call of the keys that it has."""
    for variant in rp.SCHEMES[name].variants or (None,):
        if (name, variant) == ("alibi", "key"):
            continue
        one = build(name, lengths(9, 9), dtype=dtype, seed=0, variant=variant)
        h, h_kv, d, d_v = one.q.shape[1], one.k.shape[1], one.q.shape[3], one.v.shape[3]
        b, n, m = (3, 2, 9) if lengths_of == "numbers" else ("b", "n", "m")
        model = rp.to_onnx(
            one.position,
            q=(b, h, n, d),
            k=(b, h_kv, m, d),
            v=(b, h_kv, m, d_v),
            dtype=dtype,
            longest=None if lengths_of == "numbers" else 9,
            causal=True,
            inputs=("offset", "key_lengths"),
        )
        onnx.checker.check_model(model, full_check=True)
        rng = np.random.default_rng(1)
        q, k, v = (rng.standard_normal(x).astype(dtype) for x in ((3, h, 2, d), (3, h_kv, 9, d), (3, h_kv, 9, d_v)))
        for offset in (np.array([0, 3, 7]), np.array([5, 5, 1])):
            counts = offset + 2
            (found,) = session(model).run(None, feed(q, k, v, offset=offset, key_lengths=counts))
            for item, stop in enumerate(counts):
                own = q[item : item + 1], k[item : item + 1, :, :stop], v[item : item + 1, :, :stop]
                close([found[item : item + 1]], *own, position=one.position, causal=True)


def test_what_it_is_made_of(rng):
    """The operators of ONNX where they say it, the trained table as it is, and a length that both operands share."""
    table = rng.standard_normal((8, 4)).astype(np.float32)
    shape = ("b", 4, "n", 8)
    model = rp.to_onnx(rp.T5(table), q=shape, k=shape, v=shape, longest=64, causal=True)
    assert operators(model).count("Attention") == 1
    assert "Softmax" not in operators(model)
    assert any(np.array_equal(onnx.numpy_helper.to_array(x), table.T) for x in model.graph.initializer)
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}["is_causal"] == 1
    model = rp.to_onnx(rp.Rotary(), q=shape, k=shape, v=shape, longest=64)
    assert operators(model).count("RotaryEmbedding") == 2
    assert [x.version for x in rp.to_onnx(q=(1, 2, 3, 4), k=(1, 2, 3, 4), v=(1, 2, 3, 4), opset=24).opset_import] == [
        24
    ]


def test_inputs(rng):
    """Masks, lengths of keys and what a scheme holds of one call, as inputs."""
    q, k, v = (rng.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (6, 9, 9))
    mask, bias = rng.random((2, 1, 6, 9)) < 0.7, rng.standard_normal((2, 1, 6, 9)).astype(np.float32)
    counts, table = np.array([9, 4]), rng.standard_normal((8, 3)).astype(np.float32)
    model = rp.to_onnx(rp.T5(table), q=q.shape, k=k.shape, v=v.shape, inputs=("bool_mask", "float_mask", "key_lengths"))
    more = {"bool_mask": mask, "float_mask": bias, "key_lengths": counts}
    found = session(model).run(None, feed(q, k, v, **more))
    close(found, q, k, v, position=rp.T5(table), mask=np.where(mask, bias, -np.inf), key_lengths=counts, offset=3)

    gates = rng.random((2, 2, 3, 6)).astype(np.float32)
    wavlm = rp.WavLM(table, gates[0])
    model = rp.to_onnx(wavlm, q=q.shape, k=k.shape, v=v.shape, inputs=("gate",))
    for gate in gates:
        found = session(model).run(None, feed(q, k, v, gate=gate))
        close(found, q, k, v, position=rp.WavLM(table, gate))


class Own(rp.Scheme):
    """A scheme of somebody's own, right or with a table for too many heads."""

    def __init__(self, heads):
        self.table = np.arange(heads * 14, dtype=np.float32).reshape(heads, 14) / 8

    def scores(self, q, k, site):
        at = np.arange(site.k_len) - np.arange(site.q_len)[:, None] + site.q_len - 1
        return self.table[:, at].astype(site.dtype)

    def lower(self, q, k, site):
        index = rp.terms.Toeplitz(np.arange(site.q_len + site.k_len - 1), 14)
        return rp.terms.Terms(tables=(rp.terms.TableTerm(self.table.astype(site.dtype), index),))


def test_schemes_of_ones_own(rng):
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in SHAPES.values())
    found = session(rp.to_onnx(Own(4), **SHAPES)).run(None, feed(q, k, v))
    close(found, q, k, v, position=Own(4))
    with pytest.raises(rp.RelposValueError, match="Own"):
        rp.to_onnx(Own(3), **SHAPES)


SHAPES = {"q": (2, 4, 6, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 8)}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"q": (2, 4, 6)}, "q: expected a shape of four sizes"),
        ({"q": "bhld"}, "q: expected a shape of four sizes"),
        ({"q": (2, "h", 6, 8)}, "q: axis 1 cannot be 'h'"),
        ({"q": (2, 4, 0, 8)}, "q: axis 2"),
        ({"q": (2, 3, 6, 8)}, "heads"),
        ({"k": (2, 2, 9, 7)}, "head_dim"),
        ({"k": (1, 2, 9, 8)}, "k: expected 2 batch items like q, found 1"),
        ({"v": (2, 2, 8, 8)}, "v: expected length 9 like k, found 8"),
        ({"q": (2, 4, "n", 8)}, "longest: expected the longest of n"),
        ({"q": (2, 4, "n", 8), "longest": 8}, "longest"),
        ({"longest": 8}, "longest: 8 without a length that has a name"),
        ({"inputs": ("offset",), "offset": 3}, "offset: expected an option or an input, found both"),
        ({"inputs": ("offset",), "mask": np.ones((9, 9), bool)}, "mask: needs an offset that is part of the model"),
        ({"inputs": ("offset",), "position": rp.ALiBi(form="key")}, "position: ALiBi needs an offset that is part"),
        ({"opset": 22}, "opset: expected one of 23, 24, found 22"),
        ({"dtype": "float16"}, "dtype"),
        ({"inputs": "mask"}, "inputs: expected a sequence of names"),
        ({"inputs": ("mask", "mask")}, "inputs: expected each name once"),
        ({"inputs": ("mask",)}, "inputs: no scheme has an array 'mask'"),
        ({"inputs": ("table",), "position": rp.T5(np.ones((8, 4), np.float32))}, "position: T5 cannot be a model"),
        ({"inputs": ("key_lengths",), "key_lengths": 3}, "key_lengths: expected an option or an input"),
        ({"dropout": 0.5}, "dropout: to_onnx has no such argument"),
        ({"segments": np.array([0, 6])}, "segments: to_onnx has no such argument"),
        ({"offset": np.array([0, 1])}, "offset"),
        ({"position": np.zeros(3)}, "position: expected a scheme"),
        ({"q": (2, 4, "n", 8), "longest": 9, "key_lengths": 3}, "key_lengths: needs lengths that are numbers"),
        (
            {"q": (2, 4, "n", 8), "longest": 9, "position": rp.Rotary(positions=np.arange(9))},
            "position: Rotary needs lengths that are numbers",
        ),
        ({"q": (2, 4, "n", 8), "longest": 9, "position": rp.ALiBi(form="key")}, "position: ALiBi needs lengths"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change, error):
    with pytest.raises(rp.RelposError, match=error):
        rp.to_onnx(**{**SHAPES, **change})


def test_the_page_runs_and_says_what_is_refused():
    page = (Path(rp.__file__).parent.parent / "docs" / "onnx.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "onnx.md", "exec"), {})  # noqa: S102
    named = page.split("do something else: ")[1].split(".")[0]
    assert re.findall("`(.*?)`", named) == list(REFUSED.values())


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(rp.RelposImportError, match=r'pip install "relpos-np\[onnx\]"'):
        rp.to_onnx(**SHAPES)
