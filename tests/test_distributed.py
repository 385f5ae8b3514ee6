"""Attention in parts is attention: `partial`, `merge`, and Dask arrays, for every scheme that can be divided."""

import importlib.util
import itertools
import queue
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._contract.terms import KeyTerm, Terms, Toeplitz
from relpos_np.distributed import attention, merge, partial, plan
from relpos_np.schemes.base import Scheme
from relpos_np.testing import example
from tests import compare
from tests.compare import assert_same
from tests.every import ATTENTION, divisible
from tests.strategies import cases

# Without a causal mask these need all queries.
WHOLE_QUERIES = {("transformer_xl", "espnet_legacy")}
DIVISIBLE = [pair for pair in ATTENTION if divisible(*pair)]


def cuts(length, *places):
    """Ranges between places, those beyond the length left out."""
    edges = sorted({0, length, *(p for p in places if p < length)})
    return list(itertools.pairwise(edges))


def in_parts(e, queries, backend):
    """Output and log-sum-exp of an example from parts along every axis."""
    (items, heads, q_len, _), (_, kv_heads, k_len, v_dim) = e.q.shape, e.v.shape
    group, options = heads // kv_heads, dict(e.kwargs)
    mask, lengths = options.pop("mask", None), options.pop("key_lengths", None)
    out, lse = np.full((items, heads, q_len, v_dim), np.nan), np.full((items, heads, q_len), np.nan)
    for b, h, (q0, q1) in itertools.product(range(items), range(kv_heads), queries):
        hs, qs = slice(h * group, (h + 1) * group), slice(q0, q1)
        parts = []
        for k0, k1 in cuts(k_len, 5, 6):
            if mask is not None:
                options["mask"] = np.broadcast_to(mask, (items, heads, q_len, k_len))[b : b + 1, hs, qs, k0:k1]
            if lengths is not None:
                options["key_lengths"] = np.broadcast_to(lengths, items)[b : b + 1]
            places = {"batch": ((b, items),), "heads": (hs.start, heads), "queries": (q0, q_len), "keys": (k0, k_len)}
            k, v = (x[b : b + 1, h : h + 1, k0:k1] for x in (e.k, e.v))
            parts.append(
                partial(e.q[b : b + 1, hs, qs], k, v, position=e.position, backend=backend, **places, **options)
            )
        out[b : b + 1, hs, qs], lse[b : b + 1, hs, qs] = merge(*parts)
    return out, lse


@pytest.mark.parametrize("backend", ["terms", "numba"])
@pytest.mark.parametrize(("name", "variant"), DIVISIBLE)
def test_parts_of_every_scheme_make_the_whole(name, variant, backend):
    e = example(name, dtype="float64", variant=variant, size="tiny")
    q_len = e.q.shape[-2]
    queries = [(0, q_len)] if (name, variant) in WHOLE_QUERIES else cuts(q_len, 4)
    out, lse = in_parts(e, queries, backend)
    np.testing.assert_allclose(out, e.expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, e.expected_lse, rtol=1e-12, atol=1e-12)


def placed(kind, draw):
    """Schemes that hold something for each token, for each batch item apart: 2 items, 4 heads, 2 key heads, 9 of 12."""
    places, grid = np.cumsum(np.abs(draw(2, 12)), axis=-1), np.abs(draw(2, 3, 12))
    boxes = np.sort((100 * np.abs(draw(2, 12, 2, 2))).astype(int), axis=-2).reshape(2, 12, 4)
    table = draw(32, 4)
    network = draw(5), draw(5), draw(4, 5), draw(4)
    schemes = {
        "positions": lambda: rp.Rotary(positions=places),
        "positions of keys": lambda: rp.Rotary(positions=places[:1, :9], key_positions=places[1]),
        "frequencies of heads": lambda: rp.Rotary(frequencies=np.abs(draw(1, 2, 3)), positions=places[:, None, :]),
        "coordinates": lambda: rp.Rotary(frequencies=np.abs(draw(3, 3)), positions=grid),
        "xpos": lambda: rp.XPos(positions=places),
        "boxes": lambda: rp.LayoutBias(table, table, table, boxes),
        "boxes in another order": lambda: rp.LayoutBias(table, table, table, boxes, positions=np.arange(12)[::-1] * 3),
        "boxes alone": lambda: rp.LayoutBias(None, table, table, boxes),
        "labels": lambda: rp.GraphLabels(np.abs(10 * draw(2, 9, 12)).astype(int) % 5 - 1, draw(5, 4)),
        "gates": lambda: rp.WavLM(table, draw(2, 4, 9)),
        "beyond the threshold": lambda: rp.FIRE(*network, c=1.0, threshold=4.0),
        "below the threshold": lambda: rp.FIRE(*network, c=1.0, threshold=40.0),
        "key gates of heads": lambda: rp.FoX(-np.abs(draw(2, 4, 12))),
        "several": lambda: (rp.Rotary(positions=places), rp.ALiBi(form="key"), rp.Shaw(value_table=draw(5, 6))),
    }
    return schemes[kind] if kind else list(schemes)


@pytest.mark.parametrize("kind", placed(None, lambda *shape: np.ones(shape)))
def test_parts_of_what_is_held_per_token_and_item_make_the_whole(kind, rng):
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 9, 6), (2, 2, 12, 6), (2, 2, 12, 6)))
    position = placed(kind, lambda *shape: rng.standard_normal(shape))()
    for causal in (False, True):
        e = SimpleNamespace(q=q, k=k, v=v, position=position, kwargs={"causal": causal})
        expected = rp.attention(q, k, v, position=position, causal=causal, backend="numpy", return_lse=True)
        for found, wanted in zip(in_parts(e, cuts(9, 4), "terms"), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "variant"), [pair for pair in ATTENTION if pair not in DIVISIBLE])
def test_a_scheme_says_that_it_cannot_be_divided(name, variant):
    e = example(name, variant=variant, size="tiny")
    with pytest.raises(rp.RelposError, match=rf"{type(e.position).__name__}.*cannot be computed for a part"):
        partial(e.q, e.k[..., :4, :], e.v[..., :4, :], keys=(0, 17), position=e.position, **e.kwargs)


def test_a_shift_that_wraps_around_needs_the_next_query():
    e = example("transformer_xl", variant="espnet_legacy", size="tiny")
    with pytest.raises(rp.RelposError, match=r"TransformerXL.*next query"):
        in_parts(e, cuts(e.q.shape[-2], 4), "terms")


class Secretive(Scheme):
    """Adds a number made of the keys, and does not say how it is narrowed."""

    def lower(self, q, k, site):
        return Terms(biases=(k.sum(axis=-1)[..., None, :],))


class Private(Secretive):
    content = True

    def lower(self, q, k, site):
        return Terms(query=q + 1)


class PerHead(Scheme):
    """A number per key and head of queries, where terms have one per head of keys."""

    reads_operand_values = False

    def __init__(self, numbers):
        self.numbers = numbers

    def lower(self, q, k, site):
        everywhere = Toeplitz(np.zeros(site.q_len + site.k_len - 1, int), 1)
        return Terms(keys=(KeyTerm(self.numbers[..., None], np.ones((1, 1, 1)), everywhere),))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_terms_have_heads_of_keys(kv_heads, rng):
    """In a part as in the whole call; heads of queries are told apart by weights."""
    q, (k, v), numbers = rng.standard_normal((4, 5, 3)), rng.standard_normal((2, kv_heads, 6, 3)), rng.random((4, 6))
    group, parts = 4 // kv_heads, []
    for h in range(kv_heads):
        own, rows = slice(h * group, (h + 1) * group), slice(h, h + 1)
        place = {"heads": (h * group, 4), "position": PerHead(numbers), "backend": "terms"}
        pieces = [((k[rows, a:b], v[rows, a:b]), {"keys": (a, 6), **place}) for a, b in ((0, 2), (2, 6))]
        if kv_heads < 4:
            for operands, call in pieces:
                with pytest.raises(rp.RelposValueError, match=rf"key of a term: expected shape \({kv_heads}, 6, 1\)"):
                    partial(q[own], *operands, **call)
            continue
        parts.append(merge(*(partial(q[own], *operands, **call) for operands, call in pieces))[0])
    if parts:
        expected = rp.attention(q, k, v, position=PerHead(numbers), backend="terms")
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", [Secretive(), Private()])
def test_a_scheme_that_computes_with_keys_is_never_divided_silently(scheme, rng):
    q, k, v = rng.standard_normal((3, 1, 4, 3))
    with pytest.raises(rp.RelposError, match="does not say how it is narrowed"):
        partial(q, k[:, :2], v[:, :2], keys=(0, 4), position=scheme)
    # The whole of a call is no part.
    np.testing.assert_allclose(partial(q, k, v, position=scheme)[0], rp.attention(q, k, v, position=scheme))


def test_nan_in_what_a_scheme_holds_is_not_taken_for_that(rng):
    q, k, v = rng.standard_normal((3, 1, 6, 4))
    gate = np.ones((1, 6))
    gate[0, 1] = np.nan
    wavlm = rp.WavLM(rng.standard_normal((8, 1)), gate, max_distance=20)
    fire = rp.FIRE(*(np.full(s, np.nan) for s in [(3,), (3,), (1, 3), (1,)]), c=1.0, threshold=1.0)
    for scheme in (wavlm, fire):
        out, _ = partial(q[:, :3], k[:, :2], v[:, :2], queries=(0, 6), keys=(0, 6), position=scheme, backend="terms")
        assert np.isnan(out[:, 1]).all()


DIVISIBLE_CASES = cases(small=True, shaped=False).filter(
    lambda case: all((p.name, p.variant) in DIVISIBLE for p in case.positions)
)


@given(DIVISIBLE_CASES, st.data())
def test_parts_of_any_call_make_the_whole(case, data):
    q, k, v = case.operands(np.float64)
    options = case.options(np.float64)
    expected = rp.attention(q, k, v, **options, backend="numpy", return_lse=True)
    mask = options.pop("mask", None)
    if mask is not None:
        mask = np.broadcast_to(mask, (*case.batch, case.heads, case.q_len, case.k_len))
    edges = sorted({0, case.k_len, *data.draw(st.lists(st.integers(0, case.k_len), max_size=3))})
    backend = data.draw(st.sampled_from(["terms", "numba"]))
    parts = []
    for k0, k1 in itertools.pairwise(edges):
        some = None if mask is None else mask[..., k0:k1]
        keys = k[..., k0:k1, :], v[..., k0:k1, :]
        parts.append(partial(q, *keys, keys=(k0, case.k_len), mask=some, backend=backend, **options))
    assert_same(merge(*parts), expected, case)


def pairs(seed, count):
    """Results of parts; some rows have no keys."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        out, lse = rng.standard_normal((2, 5, 3)), 20 * rng.standard_normal((2, 5))
        gone = rng.random((2, 5)) < 0.3
        found.append((np.where(gone[..., None], 0.0, out), np.where(gone, -np.inf, lse)))
    return found


def assert_equal(a, b, tolerance=1e-13):
    for x, y in zip(a, b, strict=True):
        compare.close(x, y, tolerance, rtol=tolerance)


@given(st.integers(0, 9999))
def test_merge_is_associative_and_commutative(seed):
    a, b, c = pairs(seed, 3)
    together = merge(a, b, c)
    for other in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, a, b), merge(merge(c, b), a)):
        assert_equal(together, other)


@given(st.integers(0, 9999))
def test_a_part_without_keys_changes_not_a_bit(seed):
    (a,) = pairs(seed, 1)
    nothing = np.full_like(a[0], np.nan), np.full_like(a[1], -np.inf)
    for merged in (merge(a), merge(a, nothing), merge(nothing, a), merge(nothing, a, nothing)):
        np.testing.assert_array_equal(merged[0], a[0])
        np.testing.assert_array_equal(merged[1], a[1])


@given(st.integers(2, 200), st.integers(0, 999))
def test_merge_of_any_number_of_parts(count, seed):
    """One value per part, whose score is its log-sum-exp."""
    scores, values = np.random.default_rng(seed).standard_normal((2, count, 3))
    out, lse = merge(*zip(values[..., None], scores, strict=True))
    weights = np.exp(scores)
    np.testing.assert_allclose(out[:, 0], (weights * values).sum(axis=0) / weights.sum(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=0)), rtol=1e-12, atol=1e-12)


def test_merge_of_nothing_but_rows_without_keys():
    out, lse = merge(*[(np.zeros((4, 2)), np.full(4, -np.inf))] * 3)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "at least one pair"),
        (([1, 2, 3],), "number 0"),
        (((np.zeros((4, 2)), np.zeros(3)),), "do not belong together"),
        (((np.zeros((4, 2)), np.zeros(4)), (np.zeros((5, 2)), np.zeros(5))), "has shape"),
        (((np.zeros((4, 2)), np.zeros(4)), (np.zeros((4, 2), "f4"), np.zeros(4, "f4"))), "throughout"),
    ],
)
def test_merge_refuses_what_does_not_fit(parts, words):
    with pytest.raises(rp.RelposError, match=words):
        merge(*parts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keys": (3, 6)}, "keys: 4 from 3 on are not among 6"),
        ({"queries": (-1, 6)}, "queries: expected at least 0"),
        ({"keys": 4}, "first, how many"),
        ({"heads": (1, 4)}, "heads: 2 read one key head each"),
        ({"batch": ((0, 2),)}, r"batch: expected \(first, in all\) or None for each axis"),
        ({"keys": (0, 6), "key_lengths": 7}, "key_lengths: expected 0 ... L_k = 6"),
        ({"backend": "numpy"}, "backend: parts of a call"),
    ],
)
def test_partial_refuses_what_is_no_part(options, words, rng):
    q, k, v = rng.standard_normal((2, 3, 4)), *rng.standard_normal((2, 1, 4, 4))
    with pytest.raises(rp.RelposError, match=words):
        partial(q, k, v, **options)


def test_half_precision_is_merged_in_float32(rng):
    q, k, v = rng.standard_normal((3, 2, 8, 4)).astype(np.float16)
    parts = [partial(q, k[:, n : n + 4], v[:, n : n + 4], keys=(n, 8)) for n in (0, 4)]
    assert {x.dtype for part in parts for x in part} == {np.dtype(np.float32)}
    expected = rp.attention(*(x.astype(np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(merge(*parts)[0], expected, atol=1e-6)


# ---------------------------------------------------------------------------------------------- Dask


@pytest.fixture(scope="module")
def da():
    return pytest.importorskip("dask.array")


def over_dask(da, e, *, queries=4, **options):
    """An example in blocks along every axis, by the threaded scheduler."""
    group = e.q.shape[1] // e.k.shape[1]
    q = da.from_array(e.q, chunks=(1, group, queries, 5))
    k, v = (da.from_array(x, chunks=(2, -1, 6, 7)) for x in (e.k, e.v))
    kwargs = dict(e.kwargs)
    if "mask" in kwargs:
        kwargs["mask"] = da.from_array(kwargs["mask"], chunks=3)
    lazy = attention(q, k, v, position=e.position, return_lse=True, min_operations=0, **kwargs, **options)
    return tuple(x.compute(scheduler="threads", num_workers=2) for x in lazy)


@pytest.mark.parametrize(("name", "variant"), DIVISIBLE)
def test_dask_gives_what_one_process_gives(name, variant, da):
    e = example(name, dtype="float64", variant=variant, size="tiny")
    queries = -1 if (name, variant) in WHOLE_QUERIES else 4
    out, lse = over_dask(da, e, queries=queries, split_every=2)
    expected = e.run("numba")
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12, atol=1e-12)


@given(DIVISIBLE_CASES, st.integers(1, 5), st.integers(1, 5), st.integers(2, 4), st.sampled_from([0, 200, 5000, 1e9]))
def test_dask_takes_any_call(case, query_chunk, key_chunk, split_every, least):
    da = pytest.importorskip("dask.array")
    q, k, v = case.operands(np.float64)
    options = case.options(np.float64)
    if any(p.name == "transformer_xl" for p in case.positions):
        query_chunk = -1
    expected = rp.attention(q, k, v, **options, backend="numpy", return_lse=True)
    blocks = [
        da.from_array(x, chunks=(*("auto",) * (x.ndim - 2), chunk, -1))
        for x, chunk in ((q, query_chunk), (k, key_chunk), (v, key_chunk))
    ]
    division = {"split_every": split_every, "min_operations": least}
    lazy = attention(*blocks, **options, backend="terms", return_lse=True, **division)
    assert_same(tuple(x.compute(scheduler="sync") for x in lazy), expected, case)


@pytest.mark.parametrize("least", [0, 1e9])
def test_dask_keeps_dtype_shape_and_chunks(least, da, rng):
    q, k, v = (da.from_array(x, chunks=(1, 3, 4)) for x in rng.standard_normal((3, 2, 7, 4)).astype(np.float16))
    out, lse = attention(q, k, v, causal=True, return_lse=True, min_operations=least)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    assert out.chunks == q.chunks
    assert lse.chunks == q.chunks[:2]
    flat = attention(q[0], k[0], v[0], causal=True, min_operations=least)
    np.testing.assert_array_equal(flat.compute(scheduler="sync"), out[0].compute(scheduler="sync"))


def test_dask_computes_no_block_beyond_the_band(da, rng):
    q, k, v = (da.from_array(x, chunks=(1, 4, 4)) for x in rng.standard_normal((3, 1, 32, 4)))

    def blocks(**options):
        graph = attention(q, k, v, backend="terms", min_operations=0, **options).__dask_graph__()
        return sum(str(key).startswith("attention-part") for key in graph)

    assert blocks() == 64
    assert blocks(causal=True) == 36
    assert blocks(window=4) == 8 + 7 + 7
    assert blocks(key_lengths=9) == 8 * 3


def test_dask_computes_a_block_of_which_one_key_is_seen(da, rng):
    """The farthest key of a window of 1 is the last of the block before."""
    operands = rng.standard_normal((3, 1, 8, 4))
    q, k, v = (da.from_array(x, chunks=(1, 4, 4)) for x in operands)
    for window in ((1, 0), (0, 1), (4, 0), (0, 4)):
        found = attention(q, k, v, window=window, min_operations=0).compute(scheduler="sync")
        np.testing.assert_allclose(found, rp.attention(*operands, window=window), rtol=1e-12, atol=1e-12)


def test_dask_computes_a_block_that_one_of_its_items_reaches(da, rng):
    operands, lengths = rng.standard_normal((3, 2, 1, 8, 4)), np.array([3, 8])
    q, k, v = (da.from_array(x, chunks=(2, 1, 4, 4)) for x in operands)
    found = attention(q, k, v, key_lengths=lengths, min_operations=0).compute(scheduler="sync")
    np.testing.assert_allclose(found, rp.attention(*operands, key_lengths=lengths), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("query_chunk", "key_chunk", "blocks"),
    # Of 16 heads and vectors of 64 channels, 2^20 pairs are 2^32 operations.
    [(256, 256, (2, 1)), (64, 1024, (2, 1)), (1024, 16, (1, 2)), (1, 64, (2, 1)), (512, 512, (2, 1))],
)
def test_small_chunks_are_merged(query_chunk, key_chunk, blocks, da):
    """Those of keys first, then those of queries, up to the operations that were asked for, and no further."""
    q, k = (da.zeros((16, 1024, 64), np.float32, chunks=(16, chunk, 64)) for chunk in (query_chunk, key_chunk))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", da.PerformanceWarning)
        found = attention(q, k, k, min_operations=2e9)
    parts = [key.split("-")[-2:] for key in found.__dask_graph__() if str(key).startswith("attention-part")]
    assert tuple(1 + max(int(own[n]) for own in parts) for n in (0, 1)) == blocks
    assert found.chunks == q.chunks


def test_chunks_that_take_longer_than_the_call_are_said(da):
    q = da.zeros((1, 128, 8), chunks=(1, 1, 8))
    with pytest.warns(da.PerformanceWarning, match=r"384 chunks.*rechunk"):
        attention(q, q, q)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": np.zeros((1, 4, 4))}, "expected a Dask array, found ndarray"),
        ({"split_every": 1}, "split_every: expected at least 2"),
        ({"min_operations": -1.0}, "min_operations"),
        ({"backend": "numpy"}, "backend: parts of a call"),
        ({"mask": np.zeros((4, 5), bool)}, "mask: shape"),
        ({"position": rp.T5(np.zeros((8, 3)))}, "the call has 1"),
        ({"causal": 1}, "causal"),
    ],
)
def test_dask_refuses_bad_calls_before_they_are_computed(change, words, da):
    call = dict.fromkeys("qkv", da.zeros((1, 4, 4), chunks=2)) | change
    with pytest.raises(rp.RelposError, match=words):
        attention(**call)


def test_dask_refuses_mixtures_of_dtypes(da):
    x = da.zeros((1, 4, 4), chunks=2)
    with pytest.raises(rp.RelposTypeError, match="float32"):
        attention(x, x, x.astype(np.float32))


def test_dask_refuses_chunks_of_unknown_size(da):
    x = da.zeros((1, 4, 4), chunks=2)
    unknown = x[:, da.from_array(np.array([True, True, False, True]), chunks=2)]
    with pytest.raises(rp.RelposError, match="unknown size"):
        attention(x, unknown, unknown)


def test_same_chunks_same_bits(da, rng):
    q, k, v = (da.from_array(x, chunks=(1, 5, 4)) for x in rng.standard_normal((3, 2, 16, 4)).astype(np.float32))
    lazy = attention(q, k, v, min_operations=0)
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), lazy.compute(scheduler="threads", num_workers=4))


def test_tasks_follow_what_was_chosen_where_they_were_made(da, rng, monkeypatch):
    q, k, v = (da.from_array(x, chunks=(1, 20, 8)) for x in rng.standard_normal((3, 2, 40, 8)).astype(np.float32))
    seen, call = [], check.call

    def record(*arguments):
        found = call(*arguments)
        seen.append(found[0].precision)
        return found

    monkeypatch.setattr(check, "call", record)
    with rp.use_precision("medium"):
        own, asked = (attention(q, k, v, min_operations=0, **given) for given in ({}, {"precision": "high"}))
    for lazy, expected in ((own, "medium"), (asked, "high")):
        seen.clear()
        lazy.compute(scheduler="threads", num_workers=2)
        assert len(seen) == 8
        assert set(seen) == {expected}


# ---------------------------------------------------------------------------------------------- MPI and plans


class FakeComm:
    """What the MPI example uses of a communicator, between threads of one process."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self._boxes = rank, size, boxes

    def send(self, pair, dest):
        self._boxes[self.rank, dest].put(pair)

    def recv(self, source):
        return self._boxes[source, self.rank].get(timeout=30)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_the_mpi_example_gives_what_one_process_gives(size, rng):
    path = Path(__file__).parent.parent / "docs" / "examples" / "mpi_attention.py"
    spec = importlib.util.spec_from_file_location("mpi_attention", path)
    mpi_attention = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mpi_attention)
    q, k, v = rng.standard_normal((3, 2, 21, 4))
    options = {"position": rp.Shaw(rng.standard_normal((5, 4))), "causal": True, "backend": "terms"}
    boxes = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}

    def rank(n):
        mine = mpi_attention.own_range(21, n, size)
        comm = FakeComm(n, size, boxes)
        return mpi_attention.attention(comm, q, k[:, mine], v[:, mine], 21, **options)

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(rank, range(size))
    assert others == [None] * (size - 1)
    expected = rp.attention(q, k, v, return_lse=True, **options)
    for x, y in zip(first, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-13)


SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 50, "k_len": 70, "head_dim": 8, "v_dim": 6}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("query_chunk", "key_chunk"), [(7, 9), (50, 4), (100, 100), (1, 70)])
def test_a_plan_counts_the_tasks_that_dask_gets(query_chunk, key_chunk, causal, da):
    chunks = {"q": (1, 2, query_chunk, 8), "k": (1, 1, key_chunk, 8), "v": (1, 1, key_chunk, 6)}
    shapes = {"q": (2, 4, 50, 8), "k": (2, 2, 70, 8), "v": (2, 2, 70, 6)}
    operands = {name: da.zeros(shape, chunks=chunks[name]) for name, shape in shapes.items()}
    graph = attention(**operands, causal=causal, split_every=3, min_operations=0, backend="terms").__dask_graph__()
    names = [(key if isinstance(key, str) else key[0]).split("-")[:2] for key in graph]
    planned = plan(
        workers=3, **SIZES, query_chunk=query_chunk, key_chunk=key_chunk, causal=causal, split_every=3, itemsize=8
    )
    assert planned.blocks == names.count(["attention", "part"])
    assert planned.merges == names.count(["attention", "merge"])
    assert planned.tasks == planned.blocks + planned.merges + names.count(["attention", "out"])


def test_a_plan_adds_up():
    one = plan(workers=1, **SIZES, query_chunk=10, key_chunk=10, operations=1e6, bandwidth=1e6, task_seconds=1e-9)
    assert one.moved_bytes == 0
    assert one.transfer_seconds == 0
    # 4 copies of 5 x 7 blocks, with 2 query heads each, 8 + 6 products.
    assert one.blocks == 140
    np.testing.assert_allclose(one.compute_seconds, 140 * 2 * 2 * 10 * 10 * 14 / 1e6)
    assert one.depth == 1
    # q, k and v, output and log-sum-exp.
    assert one.task_bytes == 4 * (2 * 10 * 8 + 10 * 14 + 2 * 10 * 7)
    ten = plan(workers=10, **SIZES, query_chunk=10, key_chunk=10, operations=1e6, bandwidth=1e6, task_seconds=1e-9)
    np.testing.assert_allclose(ten.compute_seconds, one.compute_seconds / 10)
    assert ten.moved_bytes == 140 * 4 * (min(160, 140) + 140) * 9 // 10
    slow = plan(workers=10, **SIZES, query_chunk=10, key_chunk=10, task_seconds=1.0)
    assert slow.seconds >= slow.scheduler_seconds == 140 + 20 + 20


@pytest.mark.parametrize(
    ("change", "words"),
    [({"workers": 0}, "workers"), ({"kv_heads": 3}, "kv_heads: 3 do not divide"), ({"bandwidth": 0.0}, "bandwidth")],
)
def test_a_plan_refuses_nonsense(change, words):
    with pytest.raises(rp.RelposError, match=words):
        plan(**({"workers": 1, "query_chunk": 4, "key_chunk": 4} | SIZES | change))


def test_dask_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.array", None)
    with pytest.raises(rp.RelposImportError, match=r"relpos-np\[dask\]"):
        attention(None, None, None)
