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
def options(draw):
    """Up to two options, each with a value."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=2, unique=True))
    return {key: value for name in names for key, value in draw(st.sampled_from(OPTIONS[name])).items()}


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
    q, k, v = operands(rng, dtype, *shape, bounds[0][-1], bounds[1][-1], example.q.shape[-1], example.v.shape[-1])
    call = {"position": example.position, "return_lse": True, **own}
    found = rp.attention(q, k, v, segments=bounds, **call)
    for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True):
        alone = rp.attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], **call)
        assert_same_bits((found[0][:, :, a:b], found[1][:, :, a:b]), alone, (b - a, d - c))


@settings(max_examples=25, deadline=None)
@given(lengths(), options(), st.sampled_from(["none", "t5", "rotary", "both", "shaw"]), st.integers(0, 2**32 - 1))
def test_heads_and_channels_of_models(lengths, options, name, seed):
    """Grouped heads of 64 channels, sinks and factors on queries."""
    rng = np.random.default_rng(seed)
    bounds = tuple(np.cumsum([0, *own]) for own in lengths)
    q, k, v = operands(rng, np.float32, HEADS, 2, bounds[0][-1], bounds[1][-1], 64, 64)
    t5, rotary = rp.T5(rng.standard_normal((32, HEADS)).astype(np.float32)), rp.Rotary(64)
    shaw = rp.Shaw(*rng.standard_normal((2, 33, 64)).astype(np.float32))
    position = {"none": None, "t5": t5, "rotary": rotary, "both": (rotary, t5), "shaw": shaw}[name]
    call = {"position": position, "return_lse": True, "sinks": rng.standard_normal(HEADS).astype(np.float32), **options}
    factors = rng.random(q.shape[-2]).astype(np.float32)
    found = rp.attention(q, k, v, segments=bounds, query_scale=factors, **call)
    for (a, b), (c, d) in zip(*map(pairwise, bounds), strict=True):
        alone = rp.attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], query_scale=factors[a:b], **call)
        assert_same_bits((found[0][:, :, a:b], found[1][:, :, a:b]), alone, (b - a, d - c))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([1, 2, 5, 40]), st.sampled_from(["none", "t5", "rotary", "both"]), options(), st.data())
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
    found = rp.attention(q, k, v, offset=offsets, **call)
    assert np.isfinite(found[0]).all()
    for n, offset in enumerate(offsets):
        one = call | ({"key_lengths": call["key_lengths"][n]} if "key_lengths" in call else {})
        alone = rp.attention(q[n], k[n], v[n], offset=int(offset), **one)
        assert_same_bits((found[0][n], found[1][n]), alone, (n, offset))


def test_many_short_sequences(rng):
    """Ten thousand of 1 to 8 tokens, in little memory."""
    bounds = np.cumsum([0, *rng.integers(1, 9, 10_000)])
    q, k, v = rng.standard_normal((3, 2, bounds[-1], 16)).astype(np.float32)
    found = rp.attention(q, k, v, segments=bounds, position=rp.ALiBi())
    for n in rng.integers(0, 10_000, 50):
        own = slice(bounds[n], bounds[n + 1])
        np.testing.assert_array_equal(found[:, own], rp.attention(q[:, own], k[:, own], v[:, own], position=rp.ALiBi()))


def test_no_matrix_of_pairs(rng):
    """32 sequences of 4,096 tokens: a matrix of one of them would be 64 MiB."""
    bounds = np.arange(33) * 4096
    x = rng.standard_normal((1, 32 * 4096, 8)).astype(np.float32)
    t5 = rp.T5(rng.standard_normal((32, 1)).astype(np.float32))
    tracemalloc.start()
    try:
        rp.attention(x, x, x, segments=bounds, position=t5, window=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


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
        (None, {"mask": np.ones((5, 5), bool)}, False),
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
    expected = rp.attention(q, k, v, segments=bounds, return_lse=True)
    ran, run = [], launcher.run
    monkeypatch.setattr(launcher, "run", lambda *args: ran.append(args) or run(*args))
    monkeypatch.setattr(launcher, "CALL_FLOPS", 1e6)
    assert_same_bits(rp.attention(q, k, v, segments=bounds, return_lse=True), expected, "cut")
    assert len(ran) > 10
