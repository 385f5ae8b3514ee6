"""Calls with many sequences whose form was met before, with other lengths, give the bits of calls that were not met."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.kernels._numba.plan import division, sequences
from relpos_np.kernels._numba.plan.sequences import PlannedSequences, PreparedSequences
from tests.compare import assert_same_bits
from tests.test_paged import DEPTH, HEADS, POSITIONS
from tests.test_prepared import DTYPES
from tests.test_repeated import known

__all__ = ["known"]

OPTIONS = [{}, {"causal": True}, {"window": (9, 3)}, {"softcap": 2.0}, {"sinks": True}]


@pytest.fixture
def runs(monkeypatch):
    """How often what was planned before was used."""
    found, run = [], PlannedSequences.run
    monkeypatch.setattr(PlannedSequences, "run", lambda self, *rest: found.append(1) or run(self, *rest))
    return found


def first(function, *operands, **call):
    """The call as if none like it had been met."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("form", "form_of_sequences"):
            patch.setattr(repeated, name, lambda *_, **__: None)
        return function(*operands, **call)


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
        if "sinks" in options:
            options["sinks"] = np.random.default_rng(seed).standard_normal(HEADS)
        expected = first(function, *operands, **lengths, **options)
        for _ in range(2):
            assert_same_bits(function(*operands, **lengths, **options), expected)
            # The same numbers elsewhere.
            operands = [x if isinstance(x, rp.Quantized) else x.copy(order="K") for x in operands]


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


def moved(x):
    """The same numbers elsewhere, which lie as they do here."""
    found = np.empty((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]), x.dtype).swapaxes(-3, -2)
    found[...] = x
    return found


@pytest.fixture
def plans(monkeypatch):
    """How often where sequences stand was planned."""
    found, plan = [], PreparedSequences.groups
    monkeypatch.setattr(PreparedSequences, "groups", lambda *x: found.append(1) or plan(*x))
    return found


def calls_of_steps(kind, dtype, rng):
    """A function of operands, operands, and the arrays of integers that say where sequences are."""
    heads = (
        moved(rng.standard_normal((4, 300, 16)).astype(dtype)),
        moved(rng.standard_normal((2, 300, 16)).astype(dtype)),
    )
    if kind == "segments":
        places = [np.array([0, 3, 3, 40, 41, 42, 300])]
        return (lambda q, k, v, **given: rp.attention(q, k, v, segments=places[0], **given)), (*heads, heads[1]), places
    q, k = rng.standard_normal((5, 4, 2, 16)).astype(dtype), rng.standard_normal((5, 2, 300, 16)).astype(dtype)
    places = [np.array([2, 300, 0, 17, 280])]
    if kind == "items":
        call = {"key_lengths": places[0], "offset": "end"}
        return (lambda q, k, v, **given: rp.attention(q, k, v, **call, **given)), tuple(map(moved, (q, k, k))), places
    pages = moved(rng.standard_normal((25, 2, 16, 16)).astype(dtype)).swapaxes(1, 2)
    places.append(np.stack([rng.permutation(25)[:19] for _ in range(5)]))
    call = {"key_lengths": places[0], "block_table": places[1]}
    return (lambda q, k, v, **given: rp.paged_attention(q, k, v, **call, **given)), (moved(q), pages, pages), places


@pytest.mark.parametrize("kind", ["segments", "items", "pages"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "position", [None, rp.ALiBi(), rp.Rotary(16), (rp.T5(np.ones((32, 4), np.float32)), rp.Rotary(8))]
)
def test_layers_of_a_step(kind, dtype, position, rng, plans):
    """The places of sequences are planned once for all layers, and anew when they have changed, even in place."""
    call, operands, places = calls_of_steps(kind, dtype, rng)
    elsewhere = [x.swapaxes(1, 2) if kind == "pages" and n else x for n, x in enumerate(operands)]
    layers = [[moved(x * x.dtype.type(n)) for x in elsewhere] for n in range(1, 4)]
    if kind == "pages":
        layers = [[q, k.swapaxes(1, 2), v.swapaxes(1, 2)] for q, k, v in layers]

    def step():
        expected = [first(call, *x, position=position, return_lse=True) for x in layers]
        plans.clear()
        for x, wanted in zip(layers, expected, strict=True):
            assert_same_bits(call(*x, position=position, return_lse=True), wanted)
            assert_same_bits([call(*x, position=position)], wanted[:1])

    step()
    for x in (*places, *places):
        # The same numbers of pages, items and tokens, in another order.
        x[...] = np.r_[0, np.sort(rng.integers(0, 300, len(x) - 2)), 300] if kind == "segments" else np.roll(x, 1)
        step()
        assert len(plans) == 2  # with log-sum-exps, and without
        step()
        assert not plans
    with rp.threads(1):
        step()


def test_steps_hold_no_operands(rng, monkeypatch):
    """And no more than the last of them is kept, as long as their forms are."""
    monkeypatch.setattr(repeated, "STEPS", 3)
    kept = []
    for n in range(4):
        call, operands, places = calls_of_steps("segments", np.float32, rng)
        kept += map(weakref.ref, operands)
        places[0][1] = n
        for _ in range(4):
            call(*operands, position=rp.ALiBi())
        assert len(repeated._steps) <= 3
    del operands, call
    gc.collect()
    assert not any(x() is not None for x in kept)
    monkeypatch.setattr(repeated, "MOST", 0)
    x = np.ones((1, 1, 1))
    rp.attention(x, x, x)
    assert not repeated._steps


def test_steps_at_the_same_time(rng):
    """Calls of several threads do not write to the same records."""
    call, operands, _ = calls_of_steps("segments", np.float32, rng)
    layers = [[moved(x * x.dtype.type(n)) for x in operands] for n in range(1, 9)]
    expected = [first(call, *x) for x in layers]

    def many(_):
        for x, wanted in zip(layers * 5, expected * 5, strict=True):
            assert_same_bits([call(*x)], [wanted])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))


def test_a_table_that_was_changed_is_not_read_for_another(rng):
    """A step that was met is attended by the table of the call that asks for it."""
    pages, table = rng.standard_normal((6, 4, 2, 8)), np.arange(6).reshape(2, 3)
    q, own = rng.standard_normal((2, 2, 1, 8)), table.copy()
    call = {"key_lengths": [9, 12], "position": rp.ALiBi()}
    expected = rp.paged_attention(q, pages, pages, block_table=own, **call)
    for _ in range(4):
        rp.paged_attention(q, pages, pages, block_table=table, **call)
    table[...] = table[::-1].copy()
    assert_same_bits([rp.paged_attention(q, pages, pages, block_table=own, **call)], [expected])
