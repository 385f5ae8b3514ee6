"""What options of a call do that no call without them shows; generated calls of `strategies.py` have them as well."""

from itertools import pairwise

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._runtime import memory
from tests.compare import assert_same_bits

BACKENDS = rp.backend.HOST_BACKENDS
LENGTHS = (5, 0, 1, 30, 12)
BOUNDS = np.cumsum([0, *LENGTHS])


@pytest.fixture
def packed(rng):
    """Operands of packed sequences, fewer queries than keys in some."""
    q, k, v = rng.standard_normal((3, 2, 4, BOUNDS[-1], 8))
    return q, k[:, :2], v[:, :2]


def positions(heads=4):
    rng = np.random.default_rng(3)
    return {
        "none": None,
        "t5": rp.T5(rng.standard_normal((8, heads)), max_distance=20),
        "rotary": rp.Rotary(8),
        "values that turn": rp.Rotary(frequencies=rng.standard_normal(2), values=True, magnitude=1.25),
        "shaw": rp.Shaw(rng.standard_normal((9, 8)), rng.standard_normal((9, 8))),
        "alibi": rp.ALiBi(form="key"),
        "cope": rp.CoPE(rng.standard_normal((60, 8))),
        "two": (rp.T5(rng.standard_normal((8, heads)), max_distance=20), rp.ALiBi()),
    }


# ---------------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("name", positions())
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_segments_are_separate_calls(packed, name, backend, dtype):
    """Bit for bit, with options that belong to rows and to pairs, forward and back."""
    q, k, v = (x.astype(dtype) for x in packed)
    rng, length = np.random.default_rng(1), BOUNDS[-1]
    position, computed = positions()[name], np.float64 if dtype == "float64" else np.float32
    shared = {"position": position, "causal": True, "softcap": 4.0, "backend": backend}
    own = {
        "mask": rng.random((2, 1, length, length)) < 0.8,
        "sinks": rng.standard_normal((2, 4, length)).astype(computed),
        "query_scale": (1 + rng.random(length)).astype(computed),
    }

    def part(a, b):
        return {
            "mask": own["mask"][..., a:b, a:b],
            "sinks": own["sinks"][..., a:b],
            "query_scale": own["query_scale"][a:b],
        }

    out, lse = rp.attention(q, k, v, segments=BOUNDS, return_lse=True, **shared, **own)
    grads = rng.standard_normal(out.shape).astype(dtype), rng.standard_normal(lse.shape).astype(computed)
    found = rp.attention_vjp(q, k, v, segments=BOUNDS, grad_out=grads[0], grad_lse=grads[1], **shared, **own)
    for a, b in pairwise(BOUNDS):
        operands = [np.ascontiguousarray(x[..., a:b, :]) for x in (q, k, v)]
        expected = rp.attention(*operands, return_lse=True, **shared, **part(a, b))
        assert_same_bits((out[..., a:b, :], lse[..., a:b]), expected)
        one = rp.attention_vjp(
            *operands, grad_out=grads[0][..., a:b, :], grad_lse=grads[1][..., a:b], **shared, **part(a, b)
        )
        for letter in "qkv":
            assert_same_bits([getattr(found, letter)[..., a:b, :]], [getattr(one, letter)])
        np.testing.assert_array_equal(found.sinks[..., a:b], one.sinks)
        # Sums over items and heads, whose order may be another one.
        np.testing.assert_allclose(found.query_scale[a:b], one.query_scale, rtol=0, atol=400 * np.finfo(computed).eps)


def test_segments_of_other_lengths_of_keys(packed, rng):
    """Chunks of queries at the end of longer sequences, without axes of batch and heads too."""
    q, k, v = packed[0][:, :, :9], packed[1], packed[2]
    bounds = (np.array([0, 4, 4, 5, 9]), np.array([0, 20, 26, 40, 48]))
    target = np.full((2, 4, 9, 8), np.nan)
    out = rp.attention(q, k, v, segments=bounds, position=rp.ALiBi(), causal=True, out=target)
    assert out is target
    for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True):
        parts = q[..., a:b, :], k[..., c:d, :], v[..., c:d, :]
        np.testing.assert_array_equal(out[..., a:b, :], rp.attention(*parts, position=rp.ALiBi(), causal=True))
    flat = rp.attention(q[0, 0], k[0, 0], v[0, 0], segments=bounds, return_lse=True)
    np.testing.assert_array_equal(flat[0], rp.attention(q[:1, :1], k[:1, :1], v[:1, :1], segments=bounds)[0, 0])
    assert flat[1].shape == (9,)


def _network(rng):
    return rp.DAPE(rp.ALiBi(), *(rng.standard_normal(shape) for shape in ((4, 8), 4, (4, 4), 4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: {"position": rp.PoPE(rng.standard_normal((4, 8)))},
        lambda rng: {"position": rp.LieRE(rng.standard_normal((4, 2, 2)))},
        lambda rng: {"position": _network(rng)},
        lambda rng: {"position": rp.Selective(1), "causal": True},
        lambda rng: {"rule": rp.Chunked(5)},
        lambda rng: {"rule": rp.Prefix(3), "position": rp.ALiBi()},
    ],
    ids=["PoPE", "LieRE", "DAPE", "Selective", "chunks", "prefixes"],
)
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_segments_of_what_begins_anew(make, backend, packed, rng):
    """Schemes that hold nothing for the tokens of one call, and rules: as of separate calls."""
    call = {**make(rng), "backend": backend}
    out = rp.attention(*packed, segments=BOUNDS, **call)
    for a, b in pairwise(BOUNDS):
        np.testing.assert_array_equal(out[:, :, a:b], rp.attention(*(x[:, :, a:b] for x in packed), **call))


def test_segments_hold_nothing_of_all_pairs():
    """32 sequences of 128 tokens within what their rows need: a mask of all pairs would be 16 MiB."""
    length = 32 * 128
    q = np.random.default_rng(0).standard_normal((1, length, 16)).astype(np.float32)
    with rp.memory_limit(2 << 20):
        out = rp.attention(q, q, q, segments=np.arange(0, length + 1, 128), causal=True)
    expected = np.concatenate([rp.attention(x, x, x, causal=True) for x in np.split(q, 32, axis=1)], axis=1)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_beyond_any_number(backend, rng):
    """They are those without an end, as far as numbers go."""
    q = rng.standard_normal((1, 5, 4))
    expected = rp.attention(q, q, q, causal=True, backend=backend)
    assert_same_bits([rp.attention(q, q, q, window=(1 << 61, 0), backend=backend)], [expected])
    with pytest.raises(rp.RelposValueError, match=r"window: .* is too large"):
        rp.attention(q, q, q, window=10**30, backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": [0, 5]}, "segments: expected cumulative lengths from 0 to the 48 queries"),
        ({"segments": [0, 30, 20, 48]}, "segments: expected cumulative lengths"),
        ({"segments": [0.0, 48.0]}, "segments: expected integers"),
        ({"segments": ([0, 48], [0, 8, 48])}, "segments: 1 of queries, but 2 of keys"),
        ({"segments": ([0, 48],)}, "segments: expected cumulative lengths, or a pair"),
        ({"segments": [0, 48], "key_lengths": 3}, "key_lengths: expected one for each of 1 segments, of at most its k"),
        ({"segments": [0, 48], "key_lengths": [49]}, "key_lengths: expected one for each of 1 segments, of at most it"),
        ({"segments": [0, 48], "selected": np.zeros((48, 2), int)}, "selected: cannot be combined with segments"),
        ({"rule": rp.Prefix(3), "causal": True}, "would hide its prefix"),
        ({"rule": rp.Prefix(3), "window": (5, 0)}, "would hide its prefix"),
        ({"segments": [0, 48], "offset": np.array([0, 1])}, "offset: expected an integer"),
        (
            {"segments": [0, 48], "position": rp.Rotary(8, positions=np.arange(48))},
            "position: .* belongs to the tokens",
        ),
        ({"offset": [0, 1, 2]}, "offset: batch axes"),
        ({"offset": [0.5, 1.0]}, "offset: expected integers"),
        ({"offset": [0, 1], "position": rp.GraphLabels(np.zeros((48, 48), int), np.zeros((1, 4)))}, "position: "),
        ({"rule": "chunked"}, "rule: expected one such as relpos_np.Chunked, found str"),
        ({"rule": rp.Prefix(3), "causal": True}, "rule: Prefix"),
        ({"rule": rp.Prefix([1, 2, 3])}, "rule: batch axes"),
        ({"softcap": 0.0}, "softcap: expected a positive number"),
        ({"softcap": np.inf}, "softcap: expected a finite number"),
        ({"cap_order": np.array([])}, "cap_order: expected one of"),
        ({"dropout": np.array([])}, "dropout: expected a real number"),
        ({"softcap": 2.0, "cap_order": "mask"}, "cap_order: expected one of"),
        ({"cap_order": "content"}, "cap_order: 'content' without softcap"),
        ({"sinks": np.zeros(3)}, "sinks: shape"),
        ({"sinks": [0.0] * 4}, "sinks: expected a NumPy array"),
        ({"query_scale": np.ones(47)}, "query_scale: shape"),
        ({"selected": np.zeros((2, 47, 1), int)}, "selected: expected"),
        ({"selected": np.full((2, 48, 1), 48)}, "selected: expected -1 ... 47, found 48"),
        ({"selected": np.full((2, 48, 1), -2)}, "selected: expected -1 ... 47, found -2"),
        ({"selected": np.zeros((2, 48, 1))}, "selected: expected integers"),
    ],
)
def test_what_is_refused(packed, options, message):
    q, k, v = packed
    with pytest.raises(rp.RelposError, match=message):
        rp.attention(q, k, v, **options)
    with pytest.raises(rp.RelposError, match=message):
        rp.attention_vjp(q, k, v, grad_out=q, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rp.Chunked(0), "size: expected at least 1"),
        (lambda: rp.Chunked(2, left=-1), "left: expected at least 0"),
        (lambda: rp.Chunked(1 << 70), "size: "),
        (lambda: rp.Prefix(-1), "lengths: expected at least 0"),
        (lambda: rp.Prefix(1.5), "lengths: expected integers"),
        (lambda: rp.Dilated(0), "step: expected at least 1"),
        (lambda: rp.Dilated(True), "step: expected an integer"),
    ],
)
def test_rules_refuse(make, message):
    with pytest.raises(rp.RelposError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- offsets of items


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_for_each_item(backend, rng):
    """As calls of items with the same offset; other arrays go with them."""
    q, k, v = rng.standard_normal((3, 2, 3, 4, 9, 8))
    offsets = np.array([[0, 0, 5], [2, 2, 2]])
    options = {
        "key_lengths": rng.integers(3, 9, (2, 3)),
        "mask": rng.random((3, 1, 9, 9)) < 0.7,
        "sinks": rng.standard_normal((2, 1, 4, 9)),
        "query_scale": 1 + rng.random((1, 3, 1, 9)),
        "selected": rng.integers(-1, 9, (1, 3, 9, 4)),
        "rule": rp.Prefix(rng.integers(0, 9, (1, 3))),
    }
    shared = {"position": rp.ALiBi(), "backend": backend}
    out, lse = rp.attention(q, k, v, offset=offsets, return_lse=True, **options, **shared)
    grads = {"grad_out": rng.standard_normal(out.shape), "grad_lse": rng.standard_normal(lse.shape)}
    found = rp.attention_vjp(q, k, v, offset=offsets, **grads, **options, **shared)
    # Items share both, each along another axis.
    sinks, query_scale = np.zeros((2, 1, 4, 9)), np.zeros((1, 3, 1, 9))
    for b in np.ndindex(2, 3):
        own = {
            "key_lengths": options["key_lengths"][b],
            "mask": options["mask"][b[1]],
            "sinks": options["sinks"][b[0], 0],
            "query_scale": options["query_scale"][0, b[1]],
            "selected": options["selected"][0, b[1]],
            "rule": rp.Prefix(options["rule"].lengths[0, b[1]]),
        }
        call = {"offset": int(offsets[b]), **own, **shared}
        expected = rp.attention(q[b], k[b], v[b], return_lse=True, **call)
        np.testing.assert_allclose(out[b], expected[0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse[b], expected[1], rtol=0, atol=1e-13)
        one = rp.attention_vjp(q[b], k[b], v[b], **{name: x[b] for name, x in grads.items()}, **call)
        for letter in "qkv":
            np.testing.assert_allclose(getattr(found, letter)[b], getattr(one, letter), rtol=0, atol=1e-12)
        sinks[b[0], 0] += one.sinks
        query_scale[0, b[1]] += one.query_scale
    np.testing.assert_allclose(found.sinks, sinks, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.query_scale, query_scale, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(), (1,), (3,), (1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("offset", [None, 2, "items"])
def test_prefixes_belong_to_the_items_that_they_broadcast_to(offset, axes, backend, rng):
    """One for all items, for each along one of two batch axes, or for each; in one call, and in several."""
    q, k, v, grad = rng.standard_normal((4, 2, 3, 2, 9, 4))
    lengths = rng.permutation(9)[: np.prod(axes, dtype=int)].reshape(axes)
    offsets = np.broadcast_to(0 if offset is None else offset, (2, 3))
    if offset == "items":
        offsets = offset = np.array([[0, 0, 3], [1, 2, 2]])
    call = {"rule": rp.Prefix(lengths), "offset": offset, "backend": backend}
    out, found = rp.attention(q, k, v, **call), rp.attention_vjp(q, k, v, grad_out=grad, **call)
    for b in np.ndindex(2, 3):
        own = {"rule": rp.Prefix(np.broadcast_to(lengths, (2, 3))[b]), "offset": int(offsets[b]), "backend": backend}
        operands = q[b], k[b], v[b]
        np.testing.assert_allclose(out[b], rp.attention(*operands, **own), rtol=0, atol=1e-13)
        expected = rp.attention_vjp(*operands, grad_out=grad[b], **own)
        for letter in "qkv":
            np.testing.assert_allclose(getattr(found, letter)[b], getattr(expected, letter), rtol=0, atol=1e-13)


# ---------------------------------------------------------------------------------------------- gradients of masks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (4, 1, 9), (7, 9), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "cap_order": "content"}, {"causal": True}], ids=str)
def test_gradient_of_a_float_mask(backend, shape, options, rng):
    """By central differences; what excludes has none."""
    q, k, v = (rng.standard_normal((2, 4, n, 8)) for n in (7, 9, 9))
    mask = rng.standard_normal(shape)
    mask[..., 0, :1] = -np.inf if shape[-1] > 1 else mask[..., 0, :1]
    call = {"position": rp.ALiBi(), "backend": backend, **options}
    grads = {"grad_out": rng.standard_normal((2, 4, 7, 8)), "grad_lse": rng.standard_normal((2, 4, 7))}
    found = rp.attention_vjp(q, k, v, mask=mask, mask_gradient=True, **grads, **call)
    plain = rp.attention_vjp(q, k, v, mask=mask, **grads, **call)
    assert plain.mask is None
    np.testing.assert_allclose(found.q, plain.q, rtol=0, atol=1e-12)
    assert found.position.keys() == plain.position.keys()
    assert found.mask.shape == mask.shape
    assert (found.mask[np.isneginf(mask)] == 0).all()
    step = np.where(np.isneginf(mask), 0.0, rng.standard_normal(shape))

    def loss(far):
        out, lse = rp.attention(q, k, v, mask=mask + far * step, return_lse=True, **call)
        seen = np.isfinite(lse)
        return (out * grads["grad_out"]).sum() + (lse[seen] * grads["grad_lse"][seen]).sum()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert abs((found.mask * step).sum() - slope) < 1e-7 * (1 + abs(slope))


def test_gradient_of_a_mask_is_refused(rng):
    q = rng.standard_normal((2, 5, 4))
    mask = np.zeros((5, 5))
    for options, message in (
        ({"mask": mask > 0}, "mask_gradient: expected a float mask"),
        ({"mask": mask, "softcap": 1.0, "position": rp.ALiBi()}, "mask_gradient: no gradient where a cap"),
        ({"mask": mask, "segments": [0, 5]}, "mask_gradient: cannot be combined"),
        ({}, "mask: expected"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            rp.attention_vjp(q, q, q, grad_out=q, mask_gradient=True, **options)


# ---------------------------------------------------------------------------------------------- caps, sinks, rules


@pytest.mark.parametrize("name", [name for name, info in rp.SCHEMES.items() if info.kind == "attention"])
def test_a_cap_of_products_is_the_same_in_terms_or_refused(name):
    """Where positions are part of the product other than by turning queries and keys, nothing says what is capped."""
    e = testing.example(name, size="tiny", dtype="float64")
    call = {"position": e.position, "softcap": 0.5, "cap_order": "content", **e.kwargs}
    if name != "path":
        out, expected = (rp.attention(e.q, e.k, e.v, backend=b, **call) for b in ("terms", "numpy"))
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
        return
    for backend in BACKENDS:
        with pytest.raises(rp.RelposValueError, match='cap_order: "content" caps'):
            rp.attention(e.q, e.k, e.v, backend=backend, **call)
        with pytest.raises(rp.RelposValueError, match='cap_order: "content" caps'):
            rp.attention_vjp(e.q, e.k, e.v, grad_out=np.ones((*e.q.shape[:-1], e.v.shape[-1])), backend=backend, **call)
    with pytest.raises(rp.RelposValueError, match='cap_order: "content" caps'):
        rp.logits(e.q, e.k, **call)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_caps_of_scores_that_are_large_and_small(dtype, rng):
    """A cap keeps the digits of small scores and bounds large ones, infinite ones too."""
    q = np.array([1e-6, 1e-3, 0.3, 0.624, 0.626, 5.0, 40.0, 1e30])[:, None].astype(dtype)
    k = np.ones((1, 1), dtype)
    for backend in BACKENDS:
        _, lse = rp.attention(q, k, k, softcap=1.0, scale=1.0, return_lse=True, backend=backend)
        np.testing.assert_allclose(lse, np.tanh(q[:, 0].astype(np.float64)), rtol=4 * np.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_at_the_edges(backend):
    """Sinks that take nothing or all, and rows without keys."""
    q, k, v = np.zeros((4, 3, 2)), np.zeros((4, 3, 2)), np.ones((4, 3, 2))
    sinks = np.array([-np.inf, 0.0, 1e4, -1e4])
    out, lse = rp.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    np.testing.assert_allclose(out[:, 0, 0], [1.0, 0.75, 0.0, 1.0], rtol=1e-15)
    np.testing.assert_allclose(lse[:, 0], [np.log(3), np.log(4), 1e4, np.log(3)], rtol=1e-15)
    out, lse = rp.attention(q, k, v, sinks=sinks, key_lengths=0, return_lse=True, backend=backend)
    assert (out == 0).all()
    np.testing.assert_array_equal(lse[:, 0], sinks)
    grads = {"grad_out": v, "grad_lse": v[..., 0]}
    found = rp.attention_vjp(q, k, v, sinks=sinks, key_lengths=0, backend=backend, **grads)
    np.testing.assert_array_equal(found.sinks, [0.0, 3.0, 3.0, 3.0])
    assert (found.q == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"position": rp.ALiBi()}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nobody_asks_about_have_no_share_in_sinks(backend, options, bad, rng):
    """Their outputs may be NaN: with gradients of 0 they change nothing of that of a sink which all rows share."""
    q, k, v, grad = rng.standard_normal((4, 2, 2, 9, 4))
    mask = np.ones((9, 9), bool)
    mask[4:, 3], grad[..., :4, :] = False, 0
    for sinks in (rng.standard_normal(2), rng.standard_normal((2, 2, 9))):
        found = []
        for value in (0.5, bad):
            v[..., 3, :] = value  # attended by the first four rows only
            call = {"grad_out": grad, "sinks": sinks, "mask": mask, "backend": backend}
            found.append(rp.attention_vjp(q, k, v, **call, **options).sinks)
        assert np.isfinite(found[1]).all()
        np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_that_a_rule_excludes_reaches_nothing(backend, rng):
    q, k, v = rng.standard_normal((3, 4, 40, 8)).astype(np.float32)
    clean = rp.attention(q, k, v, rule=rp.Chunked(10), softcap=3.0, backend=backend, return_lse=True)
    grad = rng.standard_normal(q.shape).astype(np.float32)
    k[:, 20:30], v[:, 20:30] = np.nan, np.inf
    out, lse = rp.attention(q, k, v, rule=rp.Chunked(10), softcap=3.0, backend=backend, return_lse=True)
    for rows in (slice(0, 20), slice(30, 40)):
        np.testing.assert_array_equal(out[:, rows], clean[0][:, rows])
        np.testing.assert_array_equal(lse[:, rows], clean[1][:, rows])
    grad[:, 20:30] = 0
    found = rp.attention_vjp(q, k, v, grad_out=grad, rule=rp.Chunked(10), softcap=3.0, backend=backend)
    assert np.isfinite(found.k[:, :20]).all()
    assert np.isfinite(found.q[:, :20]).all()


def test_rules_need_no_memory_of_pairs():
    """20,000 keys: a mask of pairs would be 400 MB."""
    q = np.random.default_rng(0).standard_normal((1, 20_000, 8)).astype(np.float32)
    for rule in (rp.Chunked(64), rp.Prefix(100), rp.Dilated(1000)):
        with rp.memory_limit(24 << 20):
            out = rp.attention(q, q, q, rule=rule, window=(200, 200))
        rows = [0, 77, 9_999, 19_999]
        for i in rows:
            low, high = max(i - 200, 0), min(i + 201, 20_000)
            allowed = np.array([_allowed(rule, i, j) for j in range(low, high)])
            expected = rp.attention(q[:, i : i + 1], q[:, low:high], q[:, low:high], mask=allowed, backend="numpy")
            np.testing.assert_allclose(out[:, i], expected[:, 0], rtol=0, atol=1e-5)
    assert memory.limit() is None


def _allowed(rule, i, j):
    if isinstance(rule, rp.Chunked):
        return i // 64 == j // 64
    return j <= max(i, 99) if isinstance(rule, rp.Prefix) else (i - j) % 1000 == 0


# ---------------------------------------------------------------------------------------------- query temperature


def test_query_temperature():
    """By the formulas of the models, one position at a time."""
    n = np.array([0, 3, 4, 7, 8, 100])
    llama4 = [1 + 0.1 * np.log(1 + np.floor((x + 1) / 4)) for x in n]
    np.testing.assert_allclose(
        rp.reference.query_temperature(n, variant="llama4", length=4, strength=0.1), llama4, rtol=1e-15
    )
    found = rp.reference.query_temperature(n, variant="ministral3", length=4, strength=0.1)
    np.testing.assert_allclose(found, [1 + 0.1 * np.log(1 + x // 4) for x in n], rtol=1e-15)
    found = rp.reference.query_temperature(n, variant="inkling", length=4, strength=0.3)
    np.testing.assert_allclose(found, [1 + 0.3 * np.log(max(1, (x + 1) / 4)) for x in n], rtol=1e-15)
    found = rp.reference.query_temperature(n, variant="qwen", length=4)
    np.testing.assert_allclose(found, [max(1, np.log(x + 1) / np.log(4)) for x in n], rtol=1e-15)
    np.testing.assert_allclose(rp.reference.query_temperature(n, variant="ssmax", strength=0.4), 0.4 * np.log(n + 1))
    for options, message in (
        ({"variant": "llama"}, "variant: expected one of"),
        ({"variant": "llama4", "length": 4}, "strength: needed"),
        ({"variant": "llama4", "strength": 4.0}, "length: needed"),
        ({"variant": "qwen", "length": 1}, "length: expected more than 1"),
        ({"variant": "qwen", "length": 4, "strength": 1.0}, "strength: variant 'qwen' has none"),
        ({"variant": "ssmax", "length": 4}, "length: variant 'ssmax' has none"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            rp.reference.query_temperature(n, **options)
    with pytest.raises(rp.RelposError, match="positions: expected at least 0, found -1"):
        rp.reference.query_temperature(n - 1, variant="ssmax")
