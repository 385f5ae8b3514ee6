"""A prepared call gives the bits of `attention`, and refuses what it was not prepared for."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np.kernels._numba.plan.prepared import Prepared
from tests.compare import assert_refused, assert_same_bits
from tests.every import ATTENTION, remade
from tests.strategies import cases

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


@given(cases(small=False), st.sampled_from(DTYPES), st.sampled_from(rp.backend.HOST_BACKENDS))
def test_any_call(case, dtype, backend):
    """Prepared with operands of other numbers, for which the kernels must not be given the old ones."""
    computed = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (x.astype(dtype) for x in case.operands(computed))
    options = case.options(computed)
    lengths = options.pop("key_lengths")
    for name in ("sinks", "query_scale"):  # which nobody has prepared
        options.pop(name, None)
    ready = rp.prepare(*(np.full_like(x, np.nan) for x in (q, k, v)), **options, backend=backend)
    for key_lengths in dict.fromkeys((None, 0, case.k_len)):
        expected = rp.attention(q, k, v, **options, key_lengths=key_lengths, return_lse=True, backend=backend)
        assert_same_bits(ready(q, k, v, key_lengths=key_lengths, return_lse=True), expected)
    expected = rp.attention(q, k, v, **options, key_lengths=lengths, backend=backend)
    out = np.full_like(expected, np.nan)
    assert ready(q, k, v, key_lengths=lengths, out=out) is out
    assert_same_bits([out], [expected])
    last = [np.flip(x, -1) for x in (q, k, v)]  # other strides
    assert_same_bits([ready(*last)], [rp.attention(*last, **options, backend=backend)])


@pytest.fixture
def runs(monkeypatch):
    """How often the prepared record was used."""
    found, run = [], Prepared.run
    monkeypatch.setattr(Prepared, "run", lambda self, *rest: found.append(1) or run(self, *rest))
    return found


@pytest.mark.parametrize("shape", [(2, 3, 33, 8), (40, 16), (2, 2, 49, 32)])
@pytest.mark.parametrize("position", [None, rp.ALiBi(), rp.KERPLE(np.ones(1), np.ones(1))], ids=str)
def test_the_quick_way_is_taken(shape, position, rng, runs):
    """With and without lengths, for decoding, windows and all else; not where it would do something else."""
    if isinstance(position, rp.KERPLE) and len(shape) > 2:
        position = rp.KERPLE(np.ones(shape[1]), np.ones(shape[1]))
    q, k, v = rng.standard_normal((3, *shape)).astype(np.float32)
    for one in (q, q[..., :1, :].copy()):
        ready = rp.prepare(one, k, v, position=position, offset=3)
        for options in ({}, {"key_lengths": 7}, {"return_lse": True}):
            runs.clear()
            found = ready(one + 1, k, v, **options)
            assert len(runs) == 1
            expected = rp.attention(one + 1, k, v, position=position, offset=3, **options)
            assert_same_bits(
                found if isinstance(found, tuple) else [found], expected if isinstance(found, tuple) else [expected]
            )
    runs.clear()
    with rp.memory_limit(1 << 30):
        ready(one, k, v)
    assert not runs
    # What is too small for two threads is done by one, however many there may be.
    with rp.threads(1):
        ready(one, k, v)
    assert len(runs) == 1


@pytest.mark.parametrize("at", range(3))
def test_one_operand_that_lies_otherwise(at, rng, runs):
    """Other strides of one of the three, and memory that is not aligned: the numbers are what counts."""
    operands = rng.standard_normal((3, 2, 40, 8)).astype(np.float32)
    ready = rp.prepare(*operands)
    expected = ready(*operands)
    x = operands[at]
    across = x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    apart = np.zeros((2, 40, 16), np.float32)[..., ::2]
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    for other in (across, apart, odd):
        other[...] = x
        runs.clear()
        assert_same_bits([ready(*operands[:at], other, *operands[at + 1 :])], [expected])
        assert not runs


@pytest.mark.skipif(rp.get_num_threads() < 2, reason="there is one thread at most")
def test_a_plan_for_other_threads_is_not_used(rng, runs):
    q, k, v = rng.standard_normal((3, 8, 256, 64)).astype(np.float32)
    ready = rp.prepare(q, k, v)
    with rp.threads(1):
        found = ready(q, k, v)
    assert not runs
    assert_same_bits([ready(q, k, v)], [found])
    assert len(runs) == 1


@given(cases(small=False), st.sampled_from(rp.backend.HOST_BACKENDS), st.booleans())
def test_a_limit_of_memory_holds(case, backend, given_out):
    """What was prepared without a limit is refused as the call itself is, and writes nothing."""
    operands, options = case.operands(np.float32), case.options(np.float32)
    for name in ("sinks", "query_scale", "key_lengths"):
        options.pop(name, None)
    ready = rp.prepare(*operands, **options, backend=backend)
    out = np.full_like(ready(*operands), 7) if given_out else None
    refusals = []
    for call in (
        lambda: ready(*operands, out=out),
        lambda: rp.attention(*operands, out=out, **options, backend=backend),
    ):
        with rp.memory_limit(64), pytest.raises(rp.RelposMemoryError) as refusal:
            call()
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]
    assert out is None or (out == 7).all()


def test_terms_may_hand_operands_on(rng, runs):
    """Products and turns are of each call's own, also where the call was prepared with one array for all operands."""
    q, k, v = rng.standard_normal((3, 2, 2, 40, 8)).astype(np.float32)
    table = rng.standard_normal((2, 80, 8)).astype(np.float32)
    for position in (
        rp.Shaw(table[0, :79]),
        rp.Shaw(table[0, :3], table[0, :5]),
        rp.DeBERTa(table, table[::-1]),
        (rp.DeBERTa(table), rp.Shaw(table[:, :5])),
        rp.Rotary(),
        (rp.Rotary(layout="interleaved"), rp.Shaw(table[0, :79])),
        rp.ALiBi(form="key"),
        rp.FIRE(table[0, 0], table[0, 1], table[:, 2], np.ones(2, np.float32), 0.1, 5.0),
    ):
        ready = rp.prepare(q, q, q, position=position)
        for operands in ((q, k, v), (k[:, :, ::-1].copy(), v, q)):
            runs.clear()
            expected = rp.attention(*operands, position=position, return_lse=True)
            assert_same_bits(ready(*operands, return_lse=True), expected)
            assert len(runs) == 1


def test_queries_that_the_kernel_reads_from_a_copy(rng, runs):
    """Of another layout, or of several terms beside one another: they are copied in each call."""
    q, k, v = rng.standard_normal((3, 2, 2, 40, 8)).astype(np.float32)
    one, other = (rp.Shaw(x) for x in rng.standard_normal((2, 79, 8)).astype(np.float32))
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    shared, nowhere = np.broadcast_to(q[:1], q.shape), np.broadcast_to(np.full_like(q[:1], np.nan), q.shape)
    for x, first, position in (
        (q, np.full_like(q, np.nan), (one, other)),
        (turned, np.full_like(turned, np.nan), one),
        (shared, nowhere, one),
    ):
        assert x.strides == first.strides
        ready = rp.prepare(first, k, v, position=position)
        expected = rp.attention(x, k, v, position=position)
        runs.clear()
        assert_same_bits([ready(x, k, v)], [expected])
        assert len(runs) == 1


POSITIONS = {
    "none": lambda heads: None,
    "t5": lambda heads: rp.T5(np.random.default_rng(3).standard_normal((32, heads)).astype(np.float32)),
    "rotary": lambda heads: rp.Rotary(16),
    "both": lambda heads: (rp.Rotary(16), rp.ALiBi()),
    "shaw": lambda heads: rp.Shaw(np.random.default_rng(3).standard_normal((9, 16)).astype(np.float32)),
    "xpos": lambda heads: rp.XPos(16),
}
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (9, 2), "softcap": 3.0},
    "mask": {"mask": np.random.default_rng(4).random((3, 1, 1, 210)) < 0.9},
    "numbers": {"mask": np.random.default_rng(4).standard_normal((4, 1, 210)).astype(np.float32)},
    "everything": {},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("position", POSITIONS)
def test_lengths_and_offsets_that_change(position, options, dtype, rng):
    """In a cache of which each item has more keys every time, and beyond what anybody prepares for."""
    scheme, k_len = POSITIONS[position](4), 210 if "mask" in OPTIONS[options] else 100
    k, v = rng.standard_normal((2, 3, 2, k_len, 16)).astype(dtype)
    for q_len in (1, 12):
        q = rng.standard_normal((3, 4, q_len, 16)).astype(dtype)
        call = {"position": scheme, **OPTIONS[options]}
        ready = rp.prepare(*(np.full_like(x, np.nan) for x in (q, k, v)), **call, offset="end")
        lengths = rng.integers(q_len, k_len + 1, 3)
        for moved in (
            {"key_lengths": lengths},
            {"key_lengths": int(lengths[0])},
            {"key_lengths": lengths, "offset": lengths - q_len - 1},
            {"key_lengths": lengths, "offset": "end"},
            {"offset": lengths - q_len},
            {"offset": lengths.tolist()},
            {"offset": 7},
            {"offset": [-q_len, k_len, -5 * k_len]},
            {},
        ):
            expected = rp.attention(q, k, v, return_lse=True, **{"offset": "end", **call, **moved})
            assert_same_bits(ready(q, k, v, return_lse=True, **moved), expected)


def test_positions_that_are_given_stay_with_an_offset_that_moves(rng):
    q, k, v = rng.standard_normal((3, 2, 1, 6, 16)).astype(np.float32)
    q = q[:, :, :3]
    scheme = rp.Rotary(16, positions=rng.integers(0, 9, (2, 3)), key_positions=rng.integers(0, 9, (2, 6)))
    ready = rp.prepare(q, k, v, position=scheme)
    for moved in ({"offset": 1}, {"offset": "end", "key_lengths": 5}):
        assert_same_bits([ready(q, k, v, **moved)], [rp.attention(q, k, v, position=scheme, **moved)])
    with pytest.raises(rp.RelposError, match="belongs to the tokens of one call"):
        ready(q, k, v, offset=[1, 2])


def test_what_changes_is_put_into_records_that_are_kept(rng, monkeypatch):
    """Schemes are not lowered, and nothing is planned, again."""
    from relpos_np.kernels._numba.plan import sequences

    q, k = rng.standard_normal((3, 4, 1, 16)), rng.standard_normal((3, 2, 50, 16))
    call = {"position": (rp.T5(rng.standard_normal((32, 4)), bidirectional=False), rp.Rotary(16)), "causal": True}
    ready, lengths = rp.prepare(q, k, k, offset="end", **call), np.array([3, 50, 17])
    expected = rp.attention(q, k, k, key_lengths=lengths, offset="end", **call)
    large = np.float64(np.finfo(np.float64).max) ** 0.5
    far = rp.attention(large * q, large * k, k, key_lengths=lengths, offset="end", **call)
    with monkeypatch.context() as patch:
        patch.setattr(sequences, "attention", None)
        patch.setattr(sequences._Template, "__init__", None)
        np.testing.assert_array_equal(ready(q, k, k, key_lengths=lengths), expected)
    # But for rows that units of log 2 have no room for.
    np.testing.assert_array_equal(ready(large * q, large * k, k, key_lengths=lengths), far)
    with rp.threads(1):
        np.testing.assert_array_equal(ready(q, k, k, key_lengths=lengths), expected)
    for moved, message in (({"offset": [1, 2]}, "offset: batch axes"), ({"offset": 0.5}, "offset: expected")):
        with pytest.raises(rp.RelposError, match=message):
            ready(q, k, k, key_lengths=lengths, **moved)


@pytest.mark.parametrize("shape", [(2, 2, 40, 16), (40, 16), (2, 1, 40, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_that_turn(shape, dtype, rng, runs):
    """In the kernels, for windows and for few queries too."""
    q, k, v = rng.standard_normal((3, *shape)).astype(dtype)
    for one in (q, q[..., :1, :].copy()):
        for position in (rp.Rotary(), rp.Rotary(6, layout="interleaved"), (rp.Rotary(), rp.ALiBi())):
            ready = rp.prepare(*(np.full_like(x, np.nan) for x in (one, k, v)), position=position)
            runs.clear()
            found = ready(one, k, v, return_lse=True)
            assert runs or dtype not in (np.float32, np.float64)
            assert_same_bits(found, rp.attention(one, k, v, position=position, return_lse=True))


def test_operands_that_must_be_copied(rng):
    """Another byte order, and memory that is not aligned: later operands may be aligned."""
    q, k, v = rng.standard_normal((3, 2, 7, 5, 8)).astype(np.float32)
    expected = rp.attention(q, k, v)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    assert_same_bits([rp.prepare(*swapped)(*swapped)], [rp.attention(*swapped)])
    np.testing.assert_array_equal(rp.prepare(*swapped)(*swapped), expected)
    room = np.zeros((3, 2, 7, 10, 8), np.float32)
    room[..., ::2, :] = q, k, v
    odd = np.zeros(room.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(room.shape)
    assert not odd.flags.aligned
    ready = rp.prepare(*odd[..., ::2, :])
    np.testing.assert_array_equal(ready(*room[..., ::2, :]), expected)


@pytest.mark.parametrize("length", [64, 5000])
def test_nothing_to_attend_is_no_reason_to_warn(length):
    """Also where keys are attended in parts that are merged, on the quick way of a call that is made again."""
    q, k = np.ones((1, 1, 1), np.float32), np.ones((1, length, 1), np.float32)
    shut = np.zeros((1, length), bool)
    with np.errstate(all="raise"):
        for run in (
            partial(rp.prepare(q, k, k, mask=shut), q, k, k),
            partial(rp.prepare(q, k, k), q, k, k, key_lengths=0),
            *[partial(rp.attention, q, k, k, mask=shut)] * 6,
        ):
            out, lse = run(return_lse=True)
            assert (out == 0).all()
            assert (lse == -np.inf).all()


def test_what_it_keeps(rng):
    """The mask and what was made of tables, and not the operands."""
    import gc
    import weakref

    q, k, v = (np.array(x) for x in rng.standard_normal((3, 2, 30, 8)))
    mask, kept = rng.random((30, 30)) < 0.5, [weakref.ref(x) for x in (q, k, v)]
    expected = rp.attention(q, k, v, mask=mask, position=rp.T5(np.ones((32, 2))))
    again = [x.copy() for x in (q, k, v)]
    ready = rp.prepare(q, k, v, mask=mask, position=rp.T5(np.ones((32, 2))))
    del q, k, v, mask
    gc.collect()
    assert not any(one() is not None for one in kept)
    np.empty(1 << 16).fill(np.nan)
    assert_same_bits([ready(*again)], [expected])


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_arrays_are_used_as_they_were(name, variant):
    """Those of schemes and the mask, whatever is done to them later."""
    e, mine = testing.example(name, variant=variant, size="tiny"), []
    mask = np.eye(e.q.shape[-2], e.k.shape[-2], dtype=e.q.dtype)
    options = {name: x for name, x in e.kwargs.items() if name != "key_lengths"} | {"mask": mask}

    def changeable(_, x):
        mine.append(x.copy())
        return mine[-1]

    ready = rp.prepare(e.q, e.k, e.v, position=remade(e.position, changeable), **options)
    expected = rp.attention(e.q, e.k, e.v, position=e.position, **options)
    for x in (*mine, mask):
        np.multiply(x, 0.5, out=x)
    for lengths in (None, e.k.shape[-2]):
        assert_same_bits([ready(e.q, e.k, e.v, key_lengths=lengths)], [expected])


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_selected_keys_are_used_as_they_were(backend, rng):
    q, k, v = rng.standard_normal((3, 2, 6, 8))
    selected = np.array([[0, 1], [0, 2], [2, 3], [1, 4], [4, 5], [0, 5]])
    expected = rp.attention(q, k, v, selected=selected, backend=backend)
    ready = rp.prepare(q, k, v, selected=selected, backend=backend)
    selected[:] = 0
    assert_same_bits([ready(q, k, v)], [expected])


def test_out_may_overlap_nothing_that_is_read(rng):
    """None of the operands, not even in one byte. What the call was prepared with is not read again."""
    q, k, v = rng.standard_normal((3, 2, 6, 6))
    room = {name: np.zeros(200) for name in ("q", "k", "v")}
    mask, table = np.zeros((6, 6)), np.zeros((32, 2))
    own = {name: room[name][:72].reshape(2, 6, 6) for name in "qkv"}
    for name, x in zip("qkv", (q, k, v), strict=True):
        own[name][...] = x
    ready = rp.prepare(own["q"], own["k"], own["v"], mask=mask, position=rp.T5(table))
    for name, size in (("q", 72), ("k", 72), ("v", 72)):
        before = room[name].copy()
        for start in (0, size - 1):
            with pytest.raises(rp.RelposValueError, match="out: the array overlaps an input"):
                ready(own["q"], own["k"], own["v"], out=room[name][start : start + 72].reshape(2, 6, 6))
        np.testing.assert_array_equal(room[name], before)
        beside = room[name][size : size + 72].reshape(2, 6, 6)
        assert ready(own["q"], own["k"], own["v"], out=beside) is beside


def test_threads_share_it(rng):
    q, k, v = rng.standard_normal((3, 2, 300, 16))
    ready, expected = rp.prepare(q, k, v, causal=True), rp.attention(q, k, v, causal=True)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: ready(q, k, v), range(20)):
            assert_same_bits([found], [expected])


def test_items_that_operands_share_have_no_offset_each(rng):
    """As in a call of attention: queries, keys and values must have the same items."""
    q, k, v = (rng.standard_normal(shape) for shape in ((3, 1, 2, 8), (3, 1, 4, 8), (1, 1, 4, 8)))
    with pytest.raises(rp.RelposValueError, match="offset: one for each item needs q, k and v with the same batch"):
        rp.prepare(q, k, v)(q, k, v, offset=[0, 1, 2])


def test_refusals(rng):
    q, k, v = rng.standard_normal((3, 2, 5, 4))
    ready = rp.prepare(q, k, v)
    assert_refused(
        (lambda: ready(q[:, :4], k, v), r"q: the call was prepared for shape \(2, 5, 4\), found \(2, 4, 4\)"),
        (lambda: ready(q, k, v.astype(np.float32)), "v: the call was prepared for dtype float64, found float32"),
        (lambda: ready(q, k.tolist(), v), "k: expected a NumPy array, found list"),
        (lambda: ready(q, k, v, key_lengths=6), "key_lengths: expected 0 ... L_k = 5"),
        (lambda: ready(q, k, v, out=np.empty((2, 5, 3))), "out: expected shape"),
        (lambda: ready(q, k, v, out=q), "out: the array overlaps an input"),
        (lambda: rp.prepare(q, k, v, dropout=0.5), "dropout: prepare has no such argument"),
        (lambda: rp.prepare(q, k, v, key_lengths=2), "key_lengths: prepare has no such argument"),
        (lambda: rp.prepare(q, k[:, :, :3], v), "k: head_dim 3 differs"),
        (lambda: rp.prepare(q, k, v, position=3), "position: expected a scheme"),
        (lambda: pickle.dumps(ready), "prepare: a prepared call cannot be pickled"),
    )
