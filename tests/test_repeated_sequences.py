"""Calls with many sequences whose form was met before, with other lengths, give the bits of calls that were not met."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.kernels._numba.plan import division, sequences
from relpos_np.kernels._numba.plan.sequences import PreparedSequences
from tests.compare import assert_same_bits
from tests.test_paged import DEPTH, HEADS, POSITIONS
from tests.test_prepared import DTYPES
from tests.test_repeated import known

__all__ = ["known"]

OPTIONS = [{}, {"causal": True}, {"window": (9, 3)}, {"softcap": 2.0}]


@pytest.fixture
def runs(monkeypatch):
    """How often what was planned before was used."""
    found, run = [], PreparedSequences.run
    monkeypatch.setattr(PreparedSequences, "run", lambda self, *rest: found.append(1) or run(self, *rest))
    return found


def segments(draw, rng, dtype, reach):
    """Sequences one after the other, as heads of rows or rows of heads."""
    lengths = draw(st.lists(st.integers(0, reach), min_size=1, max_size=6).filter(any))
    x = rng.standard_normal((3, sum(lengths), HEADS, DEPTH)).astype(dtype)
    q, k, v = x.swapaxes(1, 2) if draw(st.booleans()) else np.ascontiguousarray(x.swapaxes(1, 2))
    return (q, k, v), {"segments": np.cumsum([0, *lengths])}


def items(draw, rng, dtype, reach):
    """One sequence in each item, which stand anywhere."""
    q_len = draw(st.sampled_from([1, 3, 20]))
    q, k, v = (rng.standard_normal((3, HEADS, n, DEPTH)).astype(dtype) for n in (q_len, reach, reach))
    offsets = draw(st.lists(st.integers(-q_len, reach), min_size=3, max_size=3))
    lengths = draw(st.lists(st.integers(0, reach), min_size=3, max_size=3))
    return (q, k, v), {"offset": np.array(offsets), **draw(st.sampled_from([{}, {"key_lengths": np.array(lengths)}]))}


def pages(draw, rng, dtype, reach):
    """Caches in pages of other sizes, and of other numbers."""
    q_len, size = draw(st.sampled_from([1, 3, 20])), draw(st.sampled_from([4, 16]))
    lengths = draw(st.lists(st.integers(0, reach), min_size=3, max_size=3).filter(any))
    count = -(-reach // size) + draw(st.integers(0, 2))
    table = rng.permutation(3 * count).reshape(3, count)
    k, v = rng.standard_normal((2, 3 * count, size, 2, DEPTH)).astype(dtype)
    q = rng.standard_normal((3, HEADS, q_len, DEPTH)).astype(dtype)
    return (q, k, v), {"block_table": table, "key_lengths": np.array(lengths)}


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([segments, items, pages]),
    st.sampled_from(sorted(POSITIONS)),
    st.sampled_from(OPTIONS),
    st.sampled_from(DTYPES),
    st.sampled_from([None, "int8", "float8_e4m3fn"]),
    st.sampled_from([30, 700]),
)
def test_any_lengths(data, kind, name, options, dtype, stored, reach):
    function = rp.paged_attention if kind is pages else rp.attention
    seed = data.draw(st.integers(0, 2**32 - 1))
    position = POSITIONS[name](np.random.default_rng(seed))
    options = {**options, "position": position, "backend": "numba", "return_lse": True}
    for seed in range(4):
        operands, lengths = kind(data.draw, np.random.default_rng(seed), dtype, reach)
        if stored is not None:
            operands = operands[0], *(rp.quantize(x, stored) for x in operands[1:])
        found = function(*operands, **lengths, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeated, "form_of_sequences", lambda *_, **__: None)
            assert_same_bits(found, function(*operands, **lengths, **options))


@pytest.mark.parametrize("kind", ["segments", "items", "pages"])
def test_the_quick_way_is_taken(kind, rng, runs, known):
    """From the third call on, with more rows or fewer, unless sequences are beyond what was planned for."""
    q, k, v = rng.standard_normal((3, HEADS, 60, DEPTH)).astype(np.float32)
    table = np.arange(6).reshape(2, 3)
    pools = rng.standard_normal((2, 6, 20, HEADS, DEPTH)).astype(np.float32)

    def call(*lengths):
        total = sum(lengths)
        if kind == "segments":
            return rp.attention(q[:, :total], k[:, :total], v[:, :total], segments=np.cumsum([0, *lengths]))
        one = np.stack([q[:, :1]] * 2)
        if kind == "items":
            both = np.stack([k, v])
            return rp.attention(one, both, both, offset=np.array(lengths) - 1, causal=True)
        return rp.paged_attention(one, *pools, block_table=table, key_lengths=lengths)

    for lengths in ((9, 16), (10, 3), (15, 14)):
        call(*lengths)
    assert len(runs) == 1
    call(16, 16)
    assert len(runs) == 2
    call(2, 33)
    assert len(runs) == 2 + (kind == "items")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("items", [1, 2, 5])
def test_heads_that_are_read_together(items, dtype, rng, monkeypatch):
    """Layouts change no bits: rows of several heads side by side are read in another order than rows of each alone."""
    heads, kv_heads, k_len = 10, 5, 450
    q = rng.standard_normal((items, heads, 1, 24)).astype(dtype)
    rows = rng.standard_normal((2, items, k_len, kv_heads, 24)).astype(dtype)
    strided = rows.swapaxes(2, 3)
    taken, choose = set(), division.heads_together
    monkeypatch.setattr(division, "heads_together", lambda *x: taken.add(n := choose(*x)) or n)
    for options in ({}, {"mask": rng.random(k_len) < 0.7}, {"position": rp.Rotary(24)}, {"window": (300, 0)}):
        call = {**options, "return_lse": True, "backend": "numba"}
        with rp.threads(1):
            found = rp.attention(q, *strided, **call)
            assert_same_bits(found, rp.attention(q, *np.ascontiguousarray(strided), **call))
    assert max(taken) > 1


def test_heads_side_by_side_whatever_was_met(rng, runs, known, monkeypatch):
    """What was planned for keys of one layout says nothing of how those of another are best read."""
    q, rows = rng.standard_normal((8, 4, 1, DEPTH)), rng.standard_normal((8, 64, 4, DEPTH))
    strided, taken, choose = rows.swapaxes(1, 2), [], sequences.heads_together
    monkeypatch.setattr(sequences, "heads_together", lambda *x: taken.append(choose(*x)) or taken[-1])
    with rp.threads(1):
        for x in (*[np.ascontiguousarray(strided)] * 3, strided):
            rp.attention(q, x, x, key_lengths=np.arange(57, 65), offset="end", causal=True)
    assert len(runs) == 2
    assert taken[-2] == 1 < taken[-1]
