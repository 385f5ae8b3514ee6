"""Attention over pages, which lie in any order, against attention over the same keys in a row."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import paged, testing
from tests.compare import assert_same_bits
from tests.every import RESTARTING

HEADS, DEPTH = 4, 16
POSITIONS = {
    "none": lambda rng: None,
    "t5": lambda rng: rp.T5(rng.standard_normal((32, HEADS)).astype(np.float32)),
    "rotary": lambda rng: rp.Rotary(DEPTH),
    "both": lambda rng: (rp.ALiBi(), rp.Rotary(DEPTH)),
    "shaw": lambda rng: rp.Shaw(*rng.standard_normal((2, 9, DEPTH)).astype(np.float32)),
    "deberta": lambda rng: rp.DeBERTa(*rng.standard_normal((2, HEADS, 8, DEPTH)).astype(np.float32)),
}


def cache(rng, lengths, page, kv_heads, depth, v_dim, dtype):
    """Pages in any order, those of nobody and rows behind the last key of NaN, and the keys and values of each item."""
    counts = [-(-n // page) for n in lengths]
    order = rng.permutation(sum(counts) + 2)
    table = np.full((len(lengths), max(counts, default=0) + 1), 1 << 40)
    pages = [np.full((len(order), page, kv_heads, d), np.nan, dtype) for d in (depth, v_dim)]
    items = [[rng.standard_normal((kv_heads, n, d)).astype(dtype) for n in lengths] for d in (depth, v_dim)]
    for b, count in enumerate(counts):
        table[b, :count], order = order[:count], order[count:]
    for x, own in zip(pages, items, strict=True):
        for b, n in enumerate(lengths):
            if n:
                rp.write_pages(own[b][None], x, block_table=table[b : b + 1], positions=[0])
    return *pages, table, list(zip(*items, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=4),
    st.sampled_from([1, 3, 16, 64, 300]),
    st.sampled_from([1, 2, 5, 30]),
    st.sampled_from([1, 2, HEADS]),
    st.sampled_from(sorted(POSITIONS)),
    st.sampled_from([{}, {"window": (9, 0)}, {"softcap": 2.0}, {"causal": True}, {"precision": "medium"}]),
    st.sampled_from([np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]),
    st.sampled_from(rp.backend.HOST_BACKENDS),
    st.integers(0, 2**32 - 1),
)
def test_pages_are_keys_in_a_row(lengths, page, q_len, kv_heads, name, options, dtype, backend, seed):
    rng = np.random.default_rng(seed)
    k, v, table, items = cache(rng, lengths, page, kv_heads, DEPTH, DEPTH, dtype)
    q = rng.standard_normal((len(lengths), HEADS, q_len, DEPTH)).astype(dtype)
    call = {"position": POSITIONS[name](rng), "backend": backend, **options}
    out, lse = rp.paged_attention(q, k, v, block_table=table, key_lengths=lengths, return_lse=True, **call)
    assert out.dtype == dtype
    call["backend"] = "numpy"
    # Sums in another order, rounded once more in half precision; "medium" products are of 8 bits.
    limit = {8: 1e-12, 4: 2e-5, 2: 2e-2}[dtype.itemsize] if options != {"precision": "medium"} else 0.1
    for b, (own_k, own_v) in enumerate(items):
        wide = (x.astype(np.float64 if dtype.itemsize == 8 else np.float32) for x in (q[b], own_k, own_v))
        expected = rp.attention(*wide, return_lse=True, **call)
        np.testing.assert_allclose(out[b].astype(np.float64), expected[0], rtol=limit, atol=limit)
        np.testing.assert_allclose(lse[b], expected[1], rtol=limit, atol=limit)


@pytest.mark.parametrize(("name", "variant"), RESTARTING, ids=lambda x: x or "")
@pytest.mark.parametrize("q_len", [1, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_every_scheme(name, variant, q_len, causal, rng):
    """An item has the bits of its own call, whatever other items and rows behind its last key hold."""
    e = testing.example(name, variant=variant, size="tiny", dtype="float64")
    lengths = [12, 40, 33]
    k, v, table, items = cache(rng, lengths, 8, e.k.shape[-3], e.k.shape[-1], e.v.shape[-1], np.float64)
    q = rng.standard_normal((3, e.q.shape[-3], q_len, e.q.shape[-1]))
    call = {"position": e.position, "causal": causal}
    out = rp.paged_attention(q, k, v, block_table=table, key_lengths=lengths, **call)
    for b, own in enumerate(items):
        np.testing.assert_allclose(out[b], rp.attention(q[b], *own, backend="numpy", **call), rtol=1e-10, atol=1e-11)
        assert_same_bits([out[b]], [rp.attention(q[b], *own, **call)])


@pytest.mark.parametrize(
    ("q_len", "position", "read"),
    [
        (1, None, True),
        (1, rp.T5(np.ones((32, HEADS))), True),
        (2, rp.Rotary(DEPTH), True),
        (3, None, True),
        (70, (rp.ALiBi(), rp.Rotary(DEPTH)), True),
        (1, rp.Shaw(np.ones((9, DEPTH), np.float32)), True),
        (20, rp.Shaw(*np.ones((2, 9, DEPTH), np.float32)), True),
        (1, rp.DeBERTa(*np.ones((2, HEADS, 8, DEPTH), np.float32)), False),
    ],
)
@pytest.mark.parametrize("by", [None, "token", "channel"])
def test_keys_are_not_gathered(q_len, position, read, by, rng, monkeypatch):
    """Unless something is made of them, or of codes for more than a few queries."""
    k, v, table, _ = cache(rng, [90, 77], 16, 2, DEPTH, DEPTH, np.float32)
    if by is not None:
        scale = np.ones((*k.shape[:3], 1) if by == "token" else (1, 1, 2, DEPTH))
        k, v = (rp.quantize(np.nan_to_num(x), scale=scale) for x in (k, v))
        read = read and q_len < 20 and not isinstance(position, rp.Shaw)
    gathered, gather = [], paged._gathered
    monkeypatch.setattr(paged, "_gathered", lambda x, *rest: gathered.append(x) or gather(x, *rest))
    q = rng.standard_normal((2, HEADS, q_len, DEPTH)).astype(np.float32)
    rp.paged_attention(q, k, v, block_table=table, key_lengths=[90, 77], position=position)
    assert bool(gathered) != read


@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_causal_queries_are_the_last_of_their_keys(q_len, rng):
    """Read in place, or gathered; also where the vectors of pages have their numbers apart from each other."""
    lengths = [40, 7, 16]
    k, v, table, items = cache(rng, lengths, 16, HEADS, DEPTH, DEPTH, np.float32)
    q = rng.standard_normal((3, HEADS, q_len, DEPTH)).astype(np.float32)
    call = {"block_table": table, "key_lengths": lengths, "position": rp.ALiBi(), "causal": True}
    found = rp.paged_attention(q, k, v, **call)
    for b, own in enumerate(items):
        expected = rp.attention(q[b], *own, position=rp.ALiBi(), causal=True, backend="numpy")
        np.testing.assert_allclose(found[b], expected, rtol=2e-5, atol=2e-6)
    for pages in ((np.asfortranarray(k), v), (k, np.asfortranarray(v))):
        np.testing.assert_allclose(rp.paged_attention(q, *pages, **call), found, rtol=2e-5, atol=2e-6)


def test_a_cache_that_grows(rng):
    """A prompt in chunks, then a token at a time, each written before it is attended."""
    x = rng.standard_normal((3, 1, HEADS, 50, DEPTH))
    k, v = np.full((2, 9, 8, HEADS, DEPTH), np.nan)
    table, position, start = np.array([[5, 2, 8, 0, 7, 1, 3]]), (rp.ALiBi(), rp.Rotary(DEPTH)), 0
    expected = rp.attention(*x, position=position, causal=True)
    for length in (20, 13, *[1] * 17):
        now = slice(start, start + length)
        for own, pages in ((x[1], k), (x[2], v)):
            rp.write_pages(own[:, :, now], pages, block_table=table, positions=[start])
        start += length
        found = rp.paged_attention(
            x[0][:, :, now], k, v, block_table=table, key_lengths=start, position=position, causal=True
        )
        np.testing.assert_allclose(found, expected[:, :, now], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_table": [[0, 3]]}, r"block_table: expected pages 0 \.\.\. 2, found 3"),
        ({"block_table": [[0, -1]]}, "found -1"),
        ({"block_table": [0, 1]}, r"block_table: expected shape \(1, M\)"),
        ({"block_table": [[0.0, 1.0]]}, "block_table: expected integers"),
        ({"key_lengths": 9}, "key_lengths: expected 0 ... L_k = 8"),
        ({"q": np.zeros((2, 1, 4))}, "q: expected shape"),
        ({"k_pages": np.zeros((3, 4, 2, 5))}, "k_pages: expected shape"),
        ({"v_pages": np.zeros((3, 4, 1, 4))}, "v_pages: expected shape"),
        ({"mask": np.ones((1, 8))}, "mask: paged_attention has no such argument"),
        ({"position": rp.Rotary(4, positions=np.arange(8))}, "position: .* belongs to the tokens of one call"),
    ],
)
def test_what_is_refused(change, words):
    pages = np.zeros((3, 4, 2, 4))
    call = {"q": np.zeros((1, 2, 1, 4)), "k_pages": pages, "v_pages": pages, "block_table": [[0, 1]], "key_lengths": 8}
    rp.paged_attention(**call)
    with pytest.raises(rp.RelposError, match=words):
        rp.paged_attention(**call | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": [7]}, r"block_table: expected pages 0 \.\.\. 2, found 9"),
        ({"positions": [11]}, r"positions: expected 0 \.\.\. 11, found 12"),
        ({"positions": [-1]}, "positions: expected 0 or more"),
        ({"positions": [[1, 1]]}, "two tokens have the same place"),
        ({"positions": [[1]]}, "positions: expected shape"),
        ({"x": np.zeros((1, 2, 2, 4), np.float32)}, "x: expected float64"),
        ({"x": np.zeros((1, 3, 2, 4))}, "does not belong to pages"),
    ],
)
def test_what_is_not_written(change, words):
    pages = np.full((3, 4, 2, 4), 7.0)
    call = {"x": np.zeros((1, 2, 2, 4)), "pages": pages, "block_table": [[0, 1, 9]], "positions": [0]}
    with pytest.raises(rp.RelposError, match=words):
        rp.write_pages(**call | change)
    assert (pages == 7.0).all()
