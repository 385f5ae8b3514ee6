"""A call whose form was met before gives the bits of one that was not, and is refused what that is refused."""

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np import testing
from relpos_np._calls import repeated
from relpos_np._contract.options import DEFAULTS
from relpos_np._contract.terms import Dense, Toeplitz
from relpos_np.kernels._numba.simd import target
from tests.compare import assert_same_bits
from tests.every import ATTENTION, remade
from tests.strategies import cases
from tests.test_prepared import DTYPES, runs

__all__ = ["runs"]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The forms that are known, none at first."""
    found = {}
    monkeypatch.setattr(repeated, "_known", found)
    monkeypatch.setattr(repeated, "_steps", {})
    return found


def first(*operands, **options):
    """The call as if its form had not been met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated, "form", lambda *_, **__: None)
        return rp.attention(*operands, **options)


def met(*operands, **options):
    """A call whose form has been met twice."""
    for _ in range(2):
        rp.attention(*operands, **options)


@given(cases(small=False), st.sampled_from(DTYPES))
def test_any_call(case, dtype):
    """With other numbers than those with which its form was met."""
    computed = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (x.astype(dtype) for x in case.operands(computed))
    options = case.options(computed) | {"backend": "numba"}
    met(*(np.full_like(x, np.nan) for x in (q, k, v)), **options)
    expected = first(q, k, v, **options, return_lse=True)
    assert_same_bits(rp.attention(q, k, v, **options, return_lse=True), expected)
    out = np.full_like(expected[0], np.nan)
    assert rp.attention(q, k, v, **options, out=out) is out
    assert_same_bits([out], expected[:1])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_signalling_nan_warns_in_no_call(dtype):
    """Neither where a form is new nor where it is known, although NumPy says so when it casts one."""
    q, k = np.ones((4, 5, 16), dtype), np.ones((4, 40, 16), dtype)
    q.view(f"u{q.itemsize}")[:, 2, 1] = 0x7FA1 if q.itemsize == 2 else 0x7FA00001
    for options in ({}, {"offset": "end", "segments": ([0, 5], [0, 40])}):
        for _ in range(4):
            out = rp.attention(q, k, k, **options)
            assert np.isnan(out[:, 2]).all()
            assert np.isfinite(np.delete(out, 2, axis=1)).all()


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_numbers_that_change_in_place_are_followed(name, variant):
    """Those of operands, and of every array of a scheme that lies in the caller's memory."""
    e = testing.example(name, variant=variant, size="tiny")
    mine = {}
    position = remade(e.position, lambda at, x: mine.setdefault(at, x.copy()))
    options = {key: value for key, value in e.kwargs.items() if not isinstance(value, np.ndarray)}
    operands = [x.copy() for x in (e.q, e.k, e.v)]
    other, expected = remade(e.position, lambda _, x: x.copy()), first(e.q, e.k, e.v, position=e.position, **options)
    for change in (None, *mine.values(), *operands):
        if change is not None:
            np.multiply(change, 0.5, out=change)
        met(*operands, position=position, **options)
        assert_same_bits(
            rp.attention(*operands, position=position, **options, return_lse=True),
            first(*operands, position=position, **options, return_lse=True),
        )
        # What was kept for the numbers before is not made of memory that has others now.
        assert_same_bits([rp.attention(e.q, e.k, e.v, position=other, **options)], [expected])


# Schemes whose terms hold numbers of pairs that are made of queries and keys.
SLOW = {"cope", "dape", "path", "selective"}


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_the_quick_way_is_taken(name, variant, runs, known):
    """By later calls, of which the first may have made maps that its scheme holds."""
    e = testing.example(name, variant=variant, size="tiny")
    options = {key: value for key, value in e.kwargs.items() if not isinstance(value, np.ndarray)}
    quick = name not in SLOW and not e.position.turns_values
    for _ in range(3):
        rp.attention(e.q, e.k, e.v, position=e.position, **options)
    runs.clear()
    rp.attention(e.q + 1, e.k, e.v, position=e.position, **options)
    assert len(runs) == quick
    assert any(known.values()) == quick


def test_one_that_holds_the_same_is_the_same(rng, runs):
    """Schemes and options are known by what they are; other numbers of the same bytes are not."""
    q, k, v = rng.standard_normal((3, 2, 8, 8)).astype(np.float32)
    table = rng.standard_normal((32, 2)).astype(np.float32)
    met(q, k, v, position=rp.T5(table), window=(3, None))
    runs.clear()
    rp.attention(q, k, v, position=rp.T5(table.copy()), window=(3, None))
    assert len(runs) == 1
    for position, options in (
        (rp.T5(table + 1), {}),
        (rp.T5(table, max_distance=100), {}),
        (rp.T5(table.view(np.int32).astype(np.float32)), {}),
        ((rp.T5(table),), {}),
        (rp.T5(table), {"causal": True}),
        (rp.T5(table), {"window": (None, 3)}),
        (rp.T5(table), {"scale": 1.0}),
        (rp.T5(table), {"precision": "medium"}),
    ):
        given = {"window": (3, None)} | options
        assert_same_bits(
            [rp.attention(q, k, v, position=position, **given)], [first(q, k, v, position=position, **given)]
        )
    assert len(runs) == 1


# Two values, of those that may be part of a form, of each option; and other options that one of them needs.
PLAIN = {
    "mask": (np.tri(64, dtype=bool), np.tri(64, dtype=bool).T),
    "causal": (False, True),
    "window": (3, (3, None)),
    "scale": (None, 0.3),
    "offset": (None, 1),
    "softcap": (None, 0.5),
    "cap_order": ("scores", "content", {"softcap": 0.5}),
    "precision": ("highest", "medium"),
    "backend": ("numba", "numpy"),
}
# Arrays, objects, and numbers that each call draws.
NEVER_PLAIN = {"key_lengths", "rule", "selected", "query_scale", "segments", "sinks", "dropout", "rng"}


def test_every_option_may_be_part_of_a_form_or_not():
    assert PLAIN.keys() | NEVER_PLAIN == DEFAULTS.keys()
    assert not PLAIN.keys() & NEVER_PLAIN


@pytest.mark.parametrize("name", PLAIN)
def test_calls_that_differ_in_an_option_have_forms_of_their_own(name, rng, known):
    """What was kept for one of its values is never used for the other."""
    # More queries than a call of the decoding kernel has, and as many keys and channels as every matrix unit
    # multiplies: with fewer, all precisions are alike on some.
    q, k, v = rng.standard_normal((3, 2, 64, 64)).astype(np.float32)
    position = rp.T5(rng.standard_normal((32, 2)).astype(np.float32))
    one, other, *more = PLAIN[name]
    rest = {"position": position, **(more[0] if more else {})}
    for before, after in ((one, other), (other, one)):
        known.clear()
        met(q, k, v, **rest, **{name: before})
        found = [rp.attention(q, k, v, **rest, **{name: x}) for x in (before, after)]
        assert_same_bits(found, [first(q, k, v, **rest, **{name: x}) for x in (before, after)])
    # Else nothing was shown.
    same = name == "precision" and target.UNIT == "none"
    assert same or not np.array_equal(*found)


def test_every_byte_of_a_larger_table_counts(rng):
    q, k, v = rng.standard_normal((3, 2, 30, 8)).astype(np.float32)
    table = rng.standard_normal((600, 2)).astype(np.float32)
    for place in np.ndindex(20, 2):
        table[place] += 1
        met(q, k, v, position=rp.T5(table, max_distance=2000))
        expected = first(q, k, v, position=rp.T5(table, max_distance=2000))
        assert_same_bits([rp.attention(q, k, v, position=rp.T5(table, max_distance=2000))], [expected])


def test_a_map_that_may_change_is_no_part_of_a_form():
    for index in (Dense(np.zeros((3, 3), np.int32), 1), Toeplitz(np.zeros(5, np.int32), 1)):
        lookup = index.lookup if isinstance(index, Toeplitz) else index.index
        assert repeated._of(index) is None
        lookup.flags.writeable = False
        assert repeated._of(index) is index
    # The memory of another array, which may be written to.
    seen = np.zeros((4, 3), np.int32)[:3]
    seen.flags.writeable = False
    assert repeated._of(Dense(seen, 1)) is None


def test_a_subclass_may_do_anything(rng, runs):
    class Own(rp.T5):
        factor = 1.0

        def lower(self, q, k, site):
            terms = super().lower(q, k, site)
            terms.tables[0].table = terms.tables[0].table * self.factor
            return terms

    q, k, v = rng.standard_normal((3, 2, 8, 8))
    own = Own(rng.standard_normal((32, 2)))
    met(q, k, v, position=own)
    Own.factor = -1.0
    assert_same_bits([rp.attention(q, k, v, position=own)], [first(q, k, v, position=own)])
    assert not runs


def test_operands_that_are_one_array_may_be_several(rng, runs):
    """Products of queries are not taken for those of keys."""
    q, k, v = rng.standard_normal((3, 2, 9, 8))
    for position in (
        rp.DeBERTa(*rng.standard_normal((2, 2, 16, 8))),
        rp.Shaw(rng.standard_normal((3, 8))),
        rp.Rotary(),
    ):
        met(q, q, q, position=position)
        runs.clear()
        assert_same_bits([rp.attention(q, k, v, position=position)], [first(q, k, v, position=position)])
        assert len(runs) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"scale": True},
        {"window": True},
        {"window": (1, True)},
        {"causal": 1},
        {"causal": 0.0},
        {"offset": 1.0},
        {"offset": True},
        {"softcap": True},
        {"key_lengths": True},
        {"key_lengths": 3.0},
    ],
    ids=str,
)
def test_equal_options_of_other_types_are_refused(options, rng):
    """1, 1.0 and True are equal, and not the same argument."""
    q, k, v = rng.standard_normal((3, 2, 4, 4))
    for equal in (
        *({"scale": x} for x in (1, 1.0)),
        *({"window": x} for x in (1, (1, 1))),
        *({"causal": x} for x in (True, False)),
        {"offset": 1},
        {"softcap": 1.0},
        {"key_lengths": 1},
        {"key_lengths": 3},
    ):
        met(q, k, v, **equal)
    with pytest.raises(rp.RelposError, match=next(iter(options))):
        rp.attention(q, k, v, **options)


def test_what_is_chosen_for_the_process_is_followed(rng, runs):
    q, k, v = rng.standard_normal((3, 2, 40, 8)).astype(np.float32)
    met(q, k, v)
    runs.clear()
    for chosen in (rp.use_backend("numpy"), rp.use_precision("medium"), rp.memory_limit(1 << 30)):
        with chosen:
            assert_same_bits([rp.attention(q, k, v)], [first(q, k, v)])
    with rp.memory_limit(100), pytest.raises(rp.RelposMemoryError):
        rp.attention(q, k, v)
    assert not runs


@pytest.mark.skipif(rp.get_num_threads() < 2, reason="there is one thread at most")
def test_fewer_threads_make_a_plan_anew(rng, runs):
    """Of work that is enough for two; less is done by one, however many there may be."""
    for length, quick in ((40, True), (256, False)):
        q, k, v = rng.standard_normal((3, 8, length, 64)).astype(np.float32)
        met(q, k, v)
        runs.clear()
        with rp.threads(1):
            assert_same_bits([rp.attention(q, k, v)], [first(q, k, v)])
            assert bool(runs) == quick
            met(q, k, v)
            assert runs


@pytest.mark.parametrize("at", range(3))
def test_other_operands_are_other_forms(at, rng, runs):
    """Another layout, dtype or class of any of them, and memory that is not aligned."""
    operands = rng.standard_normal((3, 2, 6, 8)).astype(np.float32)
    met(*operands)
    runs.clear()
    own = operands[at]

    def given(x):
        return (*operands[:at], x, *operands[at + 1 :])

    odd = np.zeros(own.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(own.shape)
    odd[...] = own
    met(*given(odd))
    assert not runs
    wide = np.repeat(own, 2, axis=-1)[..., ::2]
    turned = np.ascontiguousarray(own.swapaxes(0, 1)).swapaxes(0, 1)
    swapped = own.astype(own.dtype.newbyteorder())
    for x in (odd, wide, turned, own[:, ::-1], np.broadcast_to(own[:1], own.shape), own[None], swapped):
        for _ in range(3):
            assert_same_bits([rp.attention(*given(x))], [first(*given(x))])
    for x in (own.astype(np.float64), own.astype(ml_dtypes.bfloat16), own[..., :4, :4], own.tolist(), np.ma.array(own)):
        with pytest.raises(rp.RelposError):
            rp.attention(*given(x))


def test_out_may_overlap_nothing_that_is_read(rng, runs):
    """Neither operands nor a table that lies beside them."""
    room = rng.standard_normal(400)
    q, k, v = (room[n : n + 32].reshape(2, 4, 4) for n in (0, 32, 64))
    position = rp.T5(room[96:160].reshape(32, 2))
    met(q, k, v, position=position)
    runs.clear()
    before = room.copy()
    for start in (0, 31, 33, 95, 97, 159):
        with pytest.raises(rp.RelposValueError, match="out: the array overlaps an input"):
            rp.attention(q, k, v, position=position, out=room[start : start + 32].reshape(2, 4, 4))
    np.testing.assert_array_equal(room, before)
    for out in (np.empty((2, 4, 3)), np.empty((2, 4, 4), np.float32), np.empty((2, 4, 4)).tolist()):
        with pytest.raises(rp.RelposError, match="out: expected"):
            rp.attention(q, k, v, position=position, out=out)
    spread = np.full((2, 4, 8), np.nan)[..., ::2]
    expected = first(q, k, v, position=position)
    assert_same_bits([np.array(rp.attention(q, k, v, position=position, out=spread))], [expected])
    assert len(runs) == 1


def test_what_is_kept_is_bounded(rng, known, monkeypatch):
    """Forms, and bytes: of large tables nothing, and never the operands."""
    import gc
    import weakref

    monkeypatch.setattr(repeated, "MOST", 5)
    kept = []
    for n in range(1, 12):
        q, k, v = (np.array(x) for x in rng.standard_normal((3, 2, n, 4)))
        kept += [weakref.ref(x) for x in (q, k, v)]
        for position in (rp.DeBERTa(rng.standard_normal((2, 8, 4))), rp.T5(np.ones((32, 2)))):
            met(q, k, v, position=position)
        assert len(known) <= 5
    del q, k, v
    gc.collect()
    assert not any(x() is not None for x in kept)
    q, k, v = rng.standard_normal((3, 2, 4, 4))
    large = rp.T5(np.ones((repeated.FORM_BYTES // 16 + 2, 2)), max_distance=1 << 20)
    known.clear()
    met(q, k, v, position=large)
    assert not known
    # A bias of every two tokens, or of every distance, of long sequences.
    monkeypatch.setattr(repeated, "KEPT_BYTES", 1 << 18)
    long = np.ones((1, 600, 4), np.float32)
    met(long, long, long, position=rp.WindowBias(np.ones((59 * 39, 1), np.float32), (30, 20)))
    assert not any(known.values())
    known.clear()
    wide = np.ones((1, 1, repeated.QUERY_BYTES // 4 + 1), np.float32)
    met(wide, wide, wide[..., :1])
    assert not any(known.values())
    k = np.ones((2, 40_000, 2), np.float32)
    met(k[:, :1].copy(), k, k, position=rp.T5(np.ones((32, 2), np.float32)))
    assert list(known.values()) == [None]
    known.clear()
    k = k[:, :9].copy()
    for _ in range(5):  # tables that change from call to call, as in training
        rp.attention(k, k, k, position=rp.T5(rng.standard_normal((1000, 2)), max_distance=1 << 20))
    assert 0 < sum(map(repeated._size, known)) + len(known) <= 5
    monkeypatch.setattr(repeated, "ALL_BYTES", 3000)
    for n in range(4, 12):
        q, k, v = rng.standard_normal((3, 2, n, 4))
        met(q, k, v, position=rp.ALiBi())
        assert 0 < sum(x.nbytes for x in known.values() if x) <= 3000


def test_threads_share_it(rng):
    """While others forget all forms."""
    table = rng.standard_normal((32, 2))
    calls = [tuple(rng.standard_normal((3, 2, n, 8))) for n in range(1, 30)]
    expected = [first(*x, position=rp.T5(table)) for x in calls]

    def many(_):
        for x, wanted in zip(calls * 3, expected * 3, strict=True):
            assert_same_bits([rp.attention(*x, position=rp.T5(table))], [wanted])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(repeated, "MOST", 20)
        list(pool.map(many, range(6)))


@pytest.mark.parametrize("position", [None, rp.ALiBi(), rp.Rotary(16), rp.T5(np.ones((32, 4), np.float32))])
@pytest.mark.parametrize("shape", [(3, 1, 40), (3, 16, 16), (3, 70, 500)])
@pytest.mark.parametrize("options", [{}, {"causal": True, "offset": 0}, {"window": (20, 9), "offset": 3}])
@pytest.mark.parametrize("coded", [False, True])
def test_lengths_of_items_come_with_each_call(position, shape, options, coded, rng, runs):
    """Whatever lengths a form was met with; those that do not fit are refused as in a call that is new."""
    batch, q_len, k_len = shape
    operands = rng.standard_normal((batch, 4, q_len, 16)), *rng.standard_normal((2, batch, 2, k_len, 16))
    operands = [x.astype(np.float32) for x in operands]
    if coded:
        operands[1:] = map(rp.quantize, operands[1:])
    call, all_keys = {"position": position, **options}, np.full(batch, k_len)
    # Without an offset a shorter cache does not say where its queries stand, if that matters.
    unplaced = q_len < k_len and position is not None and "offset" not in options
    for lengths in (all_keys, [k_len if unplaced else 1] * batch, all_keys):
        rp.attention(*operands, key_lengths=lengths, **call)
    runs.clear()
    assert_same_bits(
        rp.attention(*operands, key_lengths=all_keys, return_lse=True, **call),
        first(*operands, key_lengths=all_keys, return_lse=True, **call),
    )
    assert len(runs) == (not unplaced)
    for lengths in (np.array([3, 0, 9]), rng.integers(0, k_len, (batch, 1))[:, 0], [k_len, 2, 1]):
        if unplaced:
            with pytest.raises(rp.RelposValueError, match="do not say where the queries stand"):
                rp.attention(*operands, key_lengths=lengths, **call)
        else:
            expected = first(*operands, key_lengths=lengths, return_lse=True, **call)
            assert_same_bits(rp.attention(*operands, key_lengths=lengths, return_lse=True, **call), expected)
    for wrong in (all_keys + 1, all_keys - 1000, all_keys[:2], all_keys * 0.5, all_keys[:1]):
        with pytest.raises(rp.RelposError, match="key_lengths: "):
            rp.attention(*operands, key_lengths=wrong, **call)


@pytest.mark.parametrize("shape", [(1, 1, 40), (2, 1, 1, 40), (3, 20, 40)])
@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
@pytest.mark.parametrize("q_len", [1, 20])
def test_a_mask_that_changes_in_place_is_followed(shape, dtype, q_len, rng, runs):
    """And the one that was met is not read later, when its memory holds another one."""
    shapes = (2, 3, q_len, 16), (2, 3, 40, 16), (2, 3, 40, 16)
    q, k, v = (rng.standard_normal(own).astype(np.float32) for own in shapes)
    mask = np.maximum(rng.standard_normal((*shape[:-2], min(shape[-2], q_len), 40)), 0).astype(dtype)
    call, own = {"position": rp.ALiBi()}, mask.copy()
    expected = first(q, k, v, mask=own, **call)
    met(q, k, v, mask=mask, **call)
    for _ in range(3):
        mask[...] = mask[..., ::-1].copy()
        met(q, k, v, mask=mask, **call)
        runs.clear()
        assert_same_bits([rp.attention(q, k, v, mask=mask, **call)], [first(q, k, v, mask=mask, **call)])
        assert_same_bits([rp.attention(q, k, v, mask=own, **call)], [expected])
        assert len(runs) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 20])
def test_sinks_come_with_each_call(q_len, dtype, rng, runs):
    """Those of heads, as layers have their own, and those of queries; an output in half precision is rounded once."""
    q, k, v = (rng.standard_normal((2, 3, n, 16)).astype(dtype) for n in (q_len, 40, 40))
    out = np.empty_like(q)
    for shape in ((3,), (2, 1, q_len), (3,)):
        for n in range(4):
            call = {"sinks": rng.standard_normal(shape) * 3, "position": rp.ALiBi()}
            expected = first(q, k, v, return_lse=True, **call)
            runs.clear()
            assert_same_bits(rp.attention(q, k, v, return_lse=True, **call), expected)
            assert rp.attention(q, k, v, out=out, **call) is out
            assert_same_bits([out], expected[:1])
            assert n < 2 or len(runs) == 2
    for wrong in (np.ones(4), np.ones((2, 2, q_len)), np.ones(3, int), [1.0, 2.0, 3.0]):
        with pytest.raises(rp.RelposError, match="sinks: "):
            rp.attention(q, k, v, sinks=wrong, position=rp.ALiBi())
