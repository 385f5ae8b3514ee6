"""Several sequences in one call: bit for bit what calls of their own give, whatever lengths, schemes and options."""

import itertools
import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np._calls.packed import PackedCall
from relpos_np._contract.options import DEFAULTS
from tests.compare import assert_same_bits
from tests.every import RESTARTING
from tests.sizes import BLOCK_KEYS, EDGES

HEADS = 4
DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


# Options that a call of several sequences passes on, one of which is drawn with each other.
OPTIONS = {
    "causal": [{"causal": True}],
    "window": [{"window": 7}, {"window": (150, 0)}, {"window": (None, 3)}],
    "softcap": [{"softcap": 2.0}],
    "scale": [{"scale": 0.3}],
    "rule": [{"rule": rp.Chunked(5)}, {"rule": rp.Chunked(70, left=1)}, {"rule": rp.Dilated(2)}],
    "key_lengths": [{"key_lengths": "some"}],
    "mask": [{"mask": kind} for kind in ("keys", "first keys", "pairs", "heads", "rows", "numbers")],
    "precision": [{"precision": "medium"}, {"precision": "high"}],
}


def operands(rng, dtype, heads, kv_heads, q_len, k_len, depth, v_dim):
    """Two batch items; heads of a token lie side by side, as projections leave them."""
    shapes = (2, q_len, heads, depth), (2, k_len, kv_heads, depth), (2, k_len, kv_heads, v_dim)
    return [rng.standard_normal(shape).astype(dtype).swapaxes(1, 2) for shape in shapes]


@st.composite
def lengths(draw):
    """Lengths of queries and of keys: around blocks and tiles, and of any size; some sequences are empty."""
    any_length = st.one_of(st.integers(0, 40), st.sampled_from(EDGES))
    queries = draw(st.lists(any_length, min_size=1, max_size=7))
    if draw(st.booleans()):
        return queries, queries
    return queries, draw(st.lists(any_length, min_size=len(queries), max_size=len(queries)))


@st.composite
def options(draw, but=()):
    """Up to two options, each with a value."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS.keys() - set(but))), max_size=2, unique=True))
    return {key: value for name in names for key, value in draw(st.sampled_from(OPTIONS[name])).items()}


def drawn(options, rng, heads, bounds, dtype):
    """The options with masks and lengths of keys for all sequences, of these cumulative lengths."""
    (q_len, k_len), found = [int(x[-1]) for x in bounds], dict(options)
    if "key_lengths" in found:
        found |= {"key_lengths": rng.integers(0, np.diff(bounds[1]) + 1), "offset": "end"}
    shape = {"keys": (2, 1, 1, k_len), "first keys": (k_len,), "pairs": (2, 1, q_len, k_len), "rows": (2, 1, q_len, 1)}
    match options.get("mask") if isinstance(options.get("mask"), str) else None:
        case "numbers":
            found["mask"] = rng.standard_normal((1, q_len, k_len)).astype(dtype)
        case "first keys":
            found["mask"] = np.concatenate([np.arange(n) < rng.integers(n + 1) for n in np.diff(bounds[1])])
        case str(kind):
            found["mask"] = rng.random(shape.get(kind, (heads, q_len, k_len))) < 0.8
    return found


def alone(options, n, queries, keys):
    """The options of one sequence."""
    found = dict(options)
    if "key_lengths" in found:
        found["key_lengths"] = int(found["key_lengths"][n])
    if "mask" in found:
        rows = queries if found["mask"].ndim > 1 and found["mask"].shape[-2] > 1 else slice(None)
        columns = keys if found["mask"].shape[-1] > 1 else slice(None)
        found["mask"] = found["mask"][..., rows, columns] if found["mask"].ndim > 1 else found["mask"][columns]
    return found


def assert_separate(operands, bounds, options, position, rng, **rows):
    """Results and gradients are the bits of separate calls; those of tables add up.

    `rows`: options that have a number for each query in their last axis.
    """
    q, k, v = operands
    heads, computed = q.shape[-3], np.float64 if q.dtype == np.float64 else np.float32
    options = drawn(options, rng, heads, bounds, computed)
    call = {"position": position, **options, **rows}
    found = rp.attention(q, k, v, segments=bounds, return_lse=True, **call)
    grads = {
        "grad_out": rng.standard_normal(found[0].shape).astype(q.dtype),
        "grad_lse": rng.standard_normal(found[1].shape).astype(computed),
    }
    back, sums = rp.attention_vjp(q, k, v, segments=bounds, **grads, **call), {}
    for n, ((a, b), (c, d)) in enumerate(zip(*map(pairwise, bounds), strict=True)):
        own = {"position": position, **alone(options, n, slice(a, b), slice(c, d))}
        own |= {name: x[..., a:b] for name, x in rows.items()}
        parts = q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]
        one = rp.attention(*parts, return_lse=True, **own)
        assert_same_bits((found[0][:, :, a:b], found[1][:, :, a:b]), one, (b - a, d - c))
        slopes = {"grad_out": grads["grad_out"][:, :, a:b], "grad_lse": grads["grad_lse"][:, :, a:b]}
        one = rp.attention_vjp(*parts, **slopes, **own)
        these = back.q[:, :, a:b], back.k[:, :, c:d], back.v[:, :, c:d]
        assert_same_bits(these, (one.q, one.k, one.v), (b - a, d - c))
        for name, x in arrays_of(one):
            sums.setdefault(name, []).append(x.astype(np.float64))
    eps = np.finfo(computed).eps
    for name, x in arrays_of(back):
        size = sum(np.abs(part).max(initial=0.0) for part in sums[name])
        np.testing.assert_allclose(x, sum(sums[name]), rtol=0, atol=64 * eps * size, err_msg=str(name))


def arrays_of(grads):
    """Gradients of the arrays of each scheme."""
    schemes = grads.position if isinstance(grads.position, tuple) else (grads.position,)
    return [((n, name), x) for n, own in enumerate(schemes) for name, x in own.items()]


@pytest.mark.parametrize(("name", "variant"), RESTARTING, ids=lambda x: x or "")
@settings(max_examples=3, deadline=None)
@given(lengths(), options(), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_every_scheme(name, variant, lengths, options, dtype, seed):
    rng = np.random.default_rng(seed)
    computed = np.float64 if dtype == np.float64 else np.float32
    example = testing.example(name, variant=variant, size="tiny", dtype=computed)
    shape = example.q.shape[-3], example.k.shape[-3]
    bounds = tuple(np.cumsum([0, *own]) for own in lengths)
    own = {key: x for key, x in example.kwargs.items() if key in ("causal", "window")} | options
    x = operands(rng, dtype, *shape, bounds[0][-1], bounds[1][-1], example.q.shape[-1], example.v.shape[-1])
    assert_separate(x, bounds, own, example.position, rng)


@settings(max_examples=25, deadline=None)
@given(lengths(), options(), st.sampled_from(["none", "t5", "rotary", "both", "shaw"]), st.integers(0, 2**32 - 1))
def test_heads_and_channels_of_models(lengths, options, name, seed):
    """Grouped heads of 64 channels, and factors on queries."""
    rng = np.random.default_rng(seed)
    bounds = tuple(np.cumsum([0, *own]) for own in lengths)
    x = operands(rng, np.float32, HEADS, 2, bounds[0][-1], bounds[1][-1], 64, 64)
    t5, rotary = rp.T5(rng.standard_normal((32, HEADS)).astype(np.float32)), rp.Rotary(64)
    shaw = rp.Shaw(*rng.standard_normal((2, 33, 64)).astype(np.float32))
    position = {"none": None, "t5": t5, "rotary": rotary, "both": (rotary, t5), "shaw": shaw}[name]
    sinks = rng.standard_normal((2, HEADS, x[0].shape[-2])).astype(np.float32)
    factors = rng.random(x[0].shape[-2]).astype(np.float32)
    assert_separate(x, bounds, options, position, rng, sinks=sinks, query_scale=factors)


@pytest.mark.parametrize("band", [{"causal": True}, {"window": (126, 27)}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_of_tiles_that_a_band_cuts(dtype, band, rng):
    """Blocks of queries, and so the tiles that a band cuts, are others than those of one sequence."""
    ends = np.cumsum([0, 303, 121, 340, 284, 481, 409, 97])
    q, k, v = (x[0] for x in operands(rng, dtype, 4, 2, ends[-1], ends[-1], 24, 24))
    call = {"position": rp.T5(rng.standard_normal((32, 4), dtype=np.float32)), "return_lse": True, **band}
    found = rp.attention(q, k, v, segments=ends, **call)
    for own in map(slice, ends, ends[1:]):
        out, lse = rp.attention(q[:, own], k[:, own], v[:, own], **call)
        assert_same_bits((found[0][:, own], found[1][:, own]), (out, lse))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("of_keys", [True, False])
def test_masks_that_hide_the_first_keys(of_keys, rows, rng):
    """Tiles begin at the first key that is left, as in calls of their own; with one query too, whatever the mask."""
    bounds = np.arange(4) * rows, np.cumsum([0, 300, 250, 40])
    mask = rng.random((2, 1, 1 if of_keys else 3 * rows, 590)) < 0.8
    for start in bounds[1][:-1]:
        mask[..., start : start + 7] = False
    x = operands(rng, np.float32, HEADS, 2, 3 * rows, 590, 64, 64)
    assert_separate(x, bounds, {"mask": mask}, rp.Rotary(64), rng)


def test_gradients_of_what_keys_meet(rng):
    """Sums of few numbers lose what they lose in a call of their own, beside sequences where that is kept."""
    lengths = (np.cumsum([0, 200, 600, 30]),) * 2
    tables = rng.standard_normal((2, HEADS, 8, 64)).astype(np.float32)
    x = operands(rng, np.float32, HEADS, HEADS, 830, 830, 64, 64)
    assert_separate(x, lengths, {}, rp.DeBERTa(*tables), rng)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 40]),
    st.sampled_from(["none", "t5", "rotary", "both"]),
    options(but=("key_lengths", "mask")),
    st.data(),
)
def test_items_with_an_offset_each(q_len, name, options, data):
    """Caches of another length in each item, of which no key behind the last query's is read."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    k_len = data.draw(st.sampled_from([40, BLOCK_KEYS + 1, 700, 3500]))
    offsets = rng.integers(0, k_len - q_len + 1, 6)
    q, k, v = (
        rng.standard_normal((6, heads, n, 64)).astype(np.float32) for heads, n in ((4, q_len), (2, k_len), (2, k_len))
    )
    for x, n in zip((*k, *v), (*offsets, *offsets), strict=True):
        x[:, n + q_len :] = np.nan
    t5, rotary = rp.T5(rng.standard_normal((32, 4)).astype(np.float32), bidirectional=False), rp.Rotary(64)
    position = {"none": None, "t5": t5, "rotary": rotary, "both": (rotary, t5)}[name]
    call = {"position": position, "return_lse": True, **options, "causal": True}
    if data.draw(st.booleans()):
        call["key_lengths"] = offsets + q_len
    if data.draw(st.booleans()):
        call |= {"rule": rp.Prefix(rng.integers(0, offsets + q_len + 1)), "causal": False, "window": None}
    if data.draw(st.booleans()):
        call["mask"] = rng.random((6, 1, 1, k_len)) < 0.9
    found = rp.attention(q, k, v, offset=offsets, **call)
    grad_out, grad_lse = (rng.standard_normal(x.shape).astype(np.float32) for x in found)
    del call["return_lse"]
    back = rp.attention_vjp(q, k, v, offset=offsets, grad_out=grad_out, grad_lse=grad_lse, **call)
    assert all(np.isfinite(x).all() for x in (found[0], back.q, back.k, back.v))
    for n, offset in enumerate(offsets):
        own = {"offset": int(offset), **call}
        own |= {"key_lengths": call["key_lengths"][n]} if "key_lengths" in call else {}
        own |= {"mask": call["mask"][n]} if "mask" in call else {}
        own |= {"rule": rp.Prefix(int(call["rule"].lengths[n]))} if isinstance(call.get("rule"), rp.Prefix) else {}
        alone = rp.attention(q[n], k[n], v[n], return_lse=True, **own)
        assert_same_bits((found[0][n], found[1][n]), alone, (n, offset))
        alone = rp.attention_vjp(q[n], k[n], v[n], grad_out=grad_out[n], grad_lse=grad_lse[n], **own)
        assert_same_bits((back.q[n], back.k[n], back.v[n]), (alone.q, alone.k, alone.v), (n, offset))


@pytest.mark.parametrize("q_len", [1, 70])
def test_items_at_several_distances(q_len, rng):
    """Batch axes of which operands are a part."""
    x, y = rng.standard_normal((2, 2, 6, HEADS, 90, 16)).astype(np.float32)
    q, k, v = x[:, :3, :, :q_len], y[:, 2:5], y[:, ::2]
    offsets = rng.integers(0, 90, (2, 3))
    found = rp.attention(q, k, v, position=rp.ALiBi(), causal=True, offset=offsets)
    for at in np.ndindex(2, 3):
        own = rp.attention(q[at], k[at], v[at], position=rp.ALiBi(), causal=True, offset=int(offsets[at]))
        assert_same_bits(found[at], own)


def test_many_short_sequences(rng):
    """Ten thousand of 1 to 8 tokens, in little memory."""
    bounds = np.cumsum([0, *rng.integers(1, 9, 10_000)])
    q, k, v = rng.standard_normal((3, 2, bounds[-1], 16)).astype(np.float32)
    found = rp.attention(q, k, v, segments=bounds, position=rp.ALiBi())
    for n in rng.integers(0, 10_000, 50):
        own = slice(bounds[n], bounds[n + 1])
        np.testing.assert_array_equal(found[:, own], rp.attention(q[:, own], k[:, own], v[:, own], position=rp.ALiBi()))


def test_gradients_of_many_short_sequences(rng):
    bounds = np.cumsum([0, *rng.integers(1, 9, 10_000)])
    x = rng.standard_normal((2, bounds[-1], 16))
    call = {"position": rp.T5(rng.standard_normal((32, 2)))}
    found = rp.attention_vjp(x, x, x, grad_out=x, segments=bounds, **call)
    for n in rng.integers(0, 10_000, 20):
        own = x[:, bounds[n] : bounds[n + 1]]
        alone = rp.attention_vjp(own, own, own, grad_out=own, **call)
        for name in "qkv":
            np.testing.assert_array_equal(getattr(found, name)[:, bounds[n] : bounds[n + 1]], getattr(alone, name))
    # As the same sequences padded to one length.
    item, at = np.repeat(np.arange(10_000), np.diff(bounds)), np.arange(bounds[-1])
    padded = np.zeros((10_000, 2, 8, 16))
    padded[item, :, at - bounds[item]] = x.swapaxes(0, 1)
    whole = rp.attention_vjp(padded, padded, padded, grad_out=padded, key_lengths=np.diff(bounds), **call, offset=0)
    np.testing.assert_allclose(found.position["table"], whole.position["table"], rtol=1e-11, atol=1e-10)


def test_no_matrix_of_pairs(rng):
    """32 sequences of 4,096 tokens: a matrix of one of them would be 64 MiB."""
    bounds = np.arange(33) * 4096
    x = rng.standard_normal((1, 32 * 4096, 8)).astype(np.float32)
    t5 = rp.T5(rng.standard_normal((32, 1)).astype(np.float32))
    tracemalloc.start()
    try:
        rp.attention(x, x, x, segments=bounds, position=t5, window=64)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        rp.attention_vjp(x, x, x, grad_out=x, segments=bounds, position=t5, window=64)
        peak_of_gradients = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert peak_of_gradients < 48 << 20


def test_dropout_draws_for_one_sequence_after_the_other(rng):
    bounds = [0, 20, 21, 60]
    q, k, v = rng.standard_normal((3, HEADS, 60, 16)).astype(np.float32)
    found = rp.attention(q, k, v, segments=bounds, dropout=0.5, rng=np.random.default_rng(1))
    draws = np.random.default_rng(1)
    for own in itertools.starmap(slice, pairwise(bounds)):
        alone = rp.attention(q[:, own], k[:, own], v[:, own], dropout=0.5, rng=draws)
        np.testing.assert_array_equal(found[:, own], alone)


@pytest.mark.parametrize(
    ("position", "options", "at_once"),
    [
        (None, {}, True),
        (rp.T5(np.ones((32, 4))), {"softcap": 2.0}, True),
        ((rp.ALiBi(), rp.Rotary(8)), {"causal": True}, True),
        (rp.ALiBi(form="key"), {}, False),
        (testing.example("fire", size="tiny").position, {}, False),
        (None, {"mask": np.ones((5, 5), bool)}, True),
        (rp.Rotary(frequencies=np.ones(4)), {"key_lengths": [2, 3]}, True),
        (None, {"rule": rp.Chunked(2)}, True),
        (None, {"dropout": 0.5}, False),
        (None, {"backend": "numpy"}, False),
    ],
)
def test_what_is_done_at_once(position, options, at_once):
    q = np.ones((4, 5, 8))
    packed = PackedCall(q, q, q, position, DEFAULTS | {"segments": [0, 2, 5], **options})
    assert (packed.sequences() is not None) == at_once


def test_work_that_takes_long_is_cut(rng, monkeypatch):
    """Into several calls of the kernel, between which signals are seen; with the same bits."""
    from relpos_np.kernels._numba.launch import launcher

    bounds = np.cumsum([0, 300, 20, 250, 100, 3, 90])
    q, k, v = rng.standard_normal((3, 4, bounds[-1], 64)).astype(np.float32)
    shaw = rp.Shaw(rng.standard_normal((33, 64)).astype(np.float32))
    call = {"segments": bounds, "position": (shaw, rp.T5(rng.standard_normal((32, 4)).astype(np.float32)))}
    expected = rp.attention(q, k, v, return_lse=True, **call)
    grads = rp.attention_vjp(q, k, v, grad_out=q, **call)
    ran, run = [], launcher.run
    monkeypatch.setattr(launcher, "run", lambda *args: ran.append(args) or run(*args))
    monkeypatch.setattr(launcher, "CALL_FLOPS", 1e6)
    assert_same_bits(rp.attention(q, k, v, return_lse=True, **call), expected, "cut")
    assert len(ran) > 10
    ran.clear()
    cut = rp.attention_vjp(q, k, v, grad_out=q, **call)
    assert_same_bits((cut.q, cut.k, cut.v), (grads.q, grads.k, grads.v), "cut")
    assert len(ran) > 20


def test_sums_by_distance_are_held_for_some_sequences_at_once(rng, monkeypatch):
    from relpos_np.kernels._numba.plan import sequence_gradients

    bounds = np.cumsum([0, 70, 20, 70, 5, 90, 20])
    q, k, v = rng.standard_normal((3, 4, bounds[-1], 64))
    call = {"segments": bounds, "position": (rp.Shaw(rng.standard_normal((181, 64))), rp.ALiBi(slopes=np.ones(4)))}
    found = rp.attention_vjp(q, k, v, grad_out=q, **call)
    monkeypatch.setattr(sequence_gradients, "PARTIAL_BYTES", 1 << 19)
    parts = rp.attention_vjp(q, k, v, grad_out=q, **call)
    assert_same_bits((found.q, found.k, found.v), (parts.q, parts.k, parts.v), "parts")
    for (name, x), (_, y) in zip(arrays_of(found), arrays_of(parts), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12, err_msg=str(name))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_near_the_ends_of_the_dtype(dtype, rng):
    """Rows that units of log 2 have no room for, in some of the sequences."""
    bounds, large = np.array([0, 5, 12, 20]), np.finfo(dtype).max / 4
    x = rng.standard_normal((2, 20, 8)).astype(dtype)
    mask = rng.choice(np.array([0.0, large, -large, -np.inf], dtype), (20, 20))
    call = {"position": rp.T5(rng.standard_normal((32, 2)).astype(dtype)), "grad_out": x}
    found = rp.attention_vjp(x, x, x, segments=bounds, mask=mask, **call)
    for a, b in pairwise(bounds):
        own = x[:, a:b]
        alone = rp.attention_vjp(own, own, own, mask=mask[a:b, a:b], **{**call, "grad_out": own})
        for name in "qkv":
            np.testing.assert_array_equal(getattr(found, name)[:, a:b], getattr(alone, name))


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_of_keys_without_a_place_for_the_queries(causal, rng):
    q, k = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 9, 8))
    call = {"segments": ([0, 1, 3], [0, 4, 9]), "key_lengths": [3, 5]}
    if causal:
        with pytest.raises(rp.RelposValueError, match=r'key_lengths: a segment has .* pass offset="end"'):
            rp.attention(q, k, k, causal=True, **call)
        found = rp.attention(q, k, k, causal=True, offset="end", **call)
    else:
        found = rp.attention(q, k, k, **call)
    np.testing.assert_array_equal(found[:, :1], rp.attention(q[:, :1], k[:, :3], k[:, :3]))
