"""Positions that are given, for schemes of distances."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract.placed import BLOCK, Placed
from relpos_np._contract.terms import cut_map
from relpos_np._dense import bounds
from tests.compare import assert_memory_below

BACKENDS = rp.backend.HOST_BACKENDS


def schemes(rng, heads=4):
    return {
        "alibi": rp.ALiBi(),
        "t5": rp.T5(rng.standard_normal((32, heads))),
        "shaw": rp.Shaw(rng.standard_normal((9, 64)), rng.standard_normal((9, 64)), outside="zero"),
        "deberta": rp.DeBERTa(*rng.standard_normal((2, heads, 32, 64)), max_position=64),
        "tisa": rp.TISA(*rng.standard_normal((3, 5, heads))),
        "sandwich": rp.Sandwich(16),
        "kerple": rp.KERPLE(*np.abs(rng.standard_normal((2, heads)))),
    }


@pytest.mark.parametrize("name", schemes(np.random.default_rng(0)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_of_tokens_is_each_of_its_paths(name, backend, rng):
    """Two continuations of one prefix in one call, against a call for each."""
    scheme = schemes(rng)[name]
    q, k, v = rng.standard_normal((3, 4, 70, 64))
    shared, first, second = np.arange(50), np.arange(50, 58), np.arange(58, 70)
    depth = np.concatenate([shared, 50 + np.arange(8), 50 + np.arange(12)])
    mask = np.tri(70, dtype=bool)
    mask[58:, 50:58] = False
    found = rp.attention(q, k, v, position=rp.AtPositions(scheme, depth), mask=mask, backend=backend)
    for branch in (first, second):
        path = np.concatenate([shared, branch])
        alone = rp.attention(*(x[:, path] for x in (q, k, v)), position=scheme, causal=True, backend=backend)
        np.testing.assert_allclose(found[:, path], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", schemes(np.random.default_rng(0)))
def test_gaps_in_a_cache(name, rng):
    """Keys that were evicted: the others keep their distances."""
    scheme = schemes(rng)[name]
    q, k, v = (rng.standard_normal((2, 4, n, 64)) for n in (3, 300, 300))
    kept = np.sort(rng.permutation(297)[:40])
    kept = np.concatenate([kept, [297, 298, 299]])
    mask = np.zeros((3, 300), bool)
    mask[:, kept] = True
    whole = rp.attention(q, k, v, position=scheme, mask=mask, backend="numpy")
    own = rp.AtPositions(scheme, np.arange(297, 300), kept)
    for backend in BACKENDS:
        found = rp.attention(q, k[:, :, kept], v[:, :, kept], position=own, backend=backend)
        np.testing.assert_allclose(found, whole, rtol=1e-11, atol=1e-11)


def test_counted_positions_are_an_offset(rng):
    """With its bits, and without an index map of all pairs."""
    q, k, v = rng.standard_normal((3, 2, 4, 30, 64)).astype(np.float32)
    scheme = schemes(rng)["t5"]
    there = np.stack([np.arange(100, 130)] * 2)
    found = rp.attention(q, k, v, position=rp.AtPositions(scheme, there + 7, there))
    assert np.array_equal(found, rp.attention(q, k, v, position=scheme, offset=7))
    site = rp.terms.Site(4, 4, 4096, 4096, 64, 64, 0, 0, 1.0, np.dtype(np.float32), False, (2,))
    (term,) = rp.AtPositions(scheme, np.arange(4096)).lower(q, k, site).tables
    assert isinstance(term.index, rp.terms.Toeplitz)


def test_items_of_their_own(rng):
    """Left padding: real tokens count from 0 in each item."""
    q, k, v = rng.standard_normal((3, 3, 4, 20, 64))
    scheme, padding = schemes(rng)["shaw"], np.array([0, 5, 19])
    positions = np.maximum(np.arange(20) - padding[:, None], 0)
    mask = (np.arange(20) >= padding[:, None])[:, None, None]
    found = rp.attention(q, k, v, position=rp.AtPositions(scheme, positions), mask=mask, causal=True)
    for b, n in enumerate(padding):
        alone = rp.attention(*(x[b, :, n:] for x in (q, k, v)), position=scheme, causal=True)
        np.testing.assert_allclose(found[b, :, n:], alone, rtol=1e-11, atol=1e-11)


def test_gradients_reach_the_scheme(rng):
    q, k, v, g = rng.standard_normal((4, 4, 12, 64))
    scheme, order = schemes(rng)["t5"], rng.permutation(12)
    grads = rp.attention_vjp(q, k, v, grad_out=g, position=rp.AtPositions(scheme, order))
    back = np.argsort(order)
    counted = rp.attention_vjp(q[:, back], k[:, back], v[:, back], grad_out=g[:, back], position=scheme)
    np.testing.assert_allclose(grads.position["scheme.table"], counted.position["table"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(grads.q[:, back], counted.q, rtol=1e-10, atol=1e-12)


@pytest.fixture
def by_rows(monkeypatch):
    """Calls in four parts."""
    module = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    monkeypatch.setattr(module, "number_of_parts", lambda *_, **__: 4)
    return module


def scattered(rng, *shape):
    """Positions in any order, some of them twice and some far."""
    near = rng.integers(-30, 30, shape)
    near[..., ::7] *= 9
    return near


OPTIONS = {
    "keys alone": {},
    "causal": {"causal": True},
    "softcap and a window": {"softcap": 3.0, "window": (50, 20)},
    "offset": {"offset": 5, "causal": True},
    "lengths": {"key_lengths": np.array([90, 40]), "offset": 19},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", schemes(np.random.default_rng(0)))
@pytest.mark.usefixtures("by_rows")
def test_some_queries_at_a_time(name, own, options, rng):
    """The CPU kernels, in four parts, against the formula: outputs and all gradients, with grouped heads."""
    q_len, k_len = 71, 90
    q, g = rng.standard_normal((2, 2, 4, q_len, 64))
    k, v = rng.standard_normal((2, 2, 2, k_len, 64))
    sums = rng.standard_normal((2, 4, q_len))
    mask = np.where(rng.random((q_len, k_len)) < 0.8, rng.standard_normal((q_len, k_len)), -np.inf)
    places = scattered(rng, *([2] if own else []), k_len)
    given = (places,) if OPTIONS[options] else (places[..., :q_len] - 3, places)
    position = rp.AtPositions(schemes(rng)[name], *given)
    call = {"position": position, "mask": mask, **OPTIONS[options]}

    def found(backend):
        out, lse = rp.attention(q, k, v, **call, return_lse=True, backend=backend)
        grads = rp.attention_vjp(q, k, v, **call, grad_out=g, grad_lse=sums, backend=backend)
        return [out, lse, grads.q, grads.k, grads.v, *grads.position.values()]

    for one, wanted in zip(found("numba"), found("numpy"), strict=True):
        assert one.shape == wanted.shape
        assert one.dtype == wanted.dtype
        np.testing.assert_allclose(one, wanted, rtol=1e-10, atol=1e-10)


# Roundings to half precision, of results and of what a matrix unit multiplies.
UNITS = {"float64": 1e-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", ["cope", "rotary", "xpos"])
@pytest.mark.usefixtures("by_rows")
def test_parts_beside_other_schemes(name, dtype, rng):
    """A bias that is made for some queries at a time as well, vectors that turn, and operands of half precision."""
    q, k, v, g = rng.standard_normal((4, 2, 4, 70, 32)).astype(getattr(ml_dtypes, dtype, dtype))
    own = np.float64 if dtype == "float64" else np.float32
    tables = rng.standard_normal((2, 9, 32)).astype(own)
    others = {"cope": rp.CoPE(tables[0]), "rotary": rp.Rotary(32), "xpos": rp.XPos(32)}
    position = rp.AtPositions(rp.Shaw(*tables), scattered(rng, 2, 70)), others[name]

    def found(backend):
        call = {"position": position, "causal": True, "backend": backend}
        grads = rp.attention_vjp(q, k, v, grad_out=g, **call)
        return [rp.attention(q, k, v, **call), grads.q, grads.k, grads.v, *grads.position[0].values()]

    for one, wanted in zip(found("numba"), found("numpy"), strict=True):
        assert one.dtype == wanted.dtype
        exact = wanted.astype(np.float64)
        np.testing.assert_allclose(one.astype(np.float64), exact, rtol=0, atol=8 * UNITS[dtype] * np.abs(exact).max())


@pytest.mark.parametrize("name", ["t5", "deberta"])
def test_items_and_heads_have_the_bits_that_they_have_alone(name, rng, monkeypatch):
    """In parts, as in one: neither the batch nor heads decide how many there are."""
    by_rows = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    monkeypatch.setattr(by_rows, "MAP_ROWS", 40)
    of_heads = {
        "t5": (rng.standard_normal((1, 6, 32)), lambda x: rp.T5(x[0].T)),
        "deberta": (rng.standard_normal((2, 6, 32, 64)), lambda x: rp.DeBERTa(*x, max_position=64)),
    }
    tables, scheme = of_heads[name]
    places = scattered(rng, 3, 150)
    q, g = rng.standard_normal((2, 3, 6, 150, 64)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, 2, 150, 64)).astype(np.float32)

    def found(items, heads, keys, position):
        call = {"position": position, "causal": True, "backend": "numba"}
        operands = q[items, heads], k[items, keys], v[items, keys]
        grads = rp.attention_vjp(*operands, grad_out=g[items, heads], **call)
        return rp.attention(*operands, **call), grads.q, grads.k, grads.v

    every = slice(None)
    whole = found(every, every, every, rp.AtPositions(scheme(tables), places))
    alone = found(slice(1, 2), every, every, rp.AtPositions(scheme(tables), places[1:2]))
    for one, own in zip(whole, alone, strict=True):
        assert np.array_equal(one[1:2], own)
    alone = found(every, slice(3, 6), slice(1, 2), rp.AtPositions(scheme(tables[:, 3:]), places))
    for one, own, heads in zip(whole, alone, (slice(3, 6), slice(3, 6), slice(1, 2), slice(1, 2)), strict=True):
        assert np.array_equal(one[:, heads], own)


@pytest.mark.parametrize("count", [1, 4])
def test_no_call_of_the_cpu_asks_for_all_pairs(count, rng, monkeypatch):
    """Not even to find out whether it may take its memory, or how far off it may be; prepared calls neither."""
    by_rows = pytest.importorskip("relpos_np.kernels._numba.plan.by_rows")
    monkeypatch.setattr(by_rows, "number_of_parts", lambda *_, **__: count)
    q, k, v, g = rng.standard_normal((4, 2, 4, 70, 64))
    position = rp.AtPositions(schemes(rng)["shaw"], scattered(rng, 70))
    wanted = rp.attention(q, k, v, position=position, backend="numpy")

    def of_some(index):
        assert index.shape != (70, 70), "all pairs"
        return index._made()

    monkeypatch.setattr(bounds, "PAIRS", 1000)
    monkeypatch.setattr(Placed, "index", property(of_some))
    call = {"position": position, "backend": "numba"}
    with rp.memory_limit(1 << 40):
        found = [rp.attention(q, k, v, **call), rp.attention(q, k, v, **call, return_bound=True)[0]]
        rp.attention_vjp(q, k, v, grad_out=g, **call)
    prepared = rp.prepare(q, k, v, **call)
    found += [prepared(q, k, v), prepared(q, k, v), *(rp.attention(q, k, v, **call) for _ in range(3))]
    for one in found:
        np.testing.assert_allclose(one, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["t5", "shaw", "deberta"])
def test_a_long_call_holds_no_number_per_pair_on_the_cpu(name, rng):
    """Forward and back in a tenth of what the smallest map of all pairs takes."""
    pytest.importorskip("relpos_np.kernels._numba")
    n = 16_384
    tables = {
        "t5": lambda: rp.T5(rng.standard_normal((32, 1))),
        "shaw": lambda: rp.Shaw(*rng.standard_normal((2, 9, 8))),
        "deberta": lambda: rp.DeBERTa(*rng.standard_normal((2, 1, 16, 8)), max_position=64),
    }
    q, k, v, g = rng.standard_normal((4, 1, n, 8)).astype(np.float32)
    position = rp.AtPositions(tables[name](), np.cumsum(rng.integers(1, 3, n)))
    call = {"position": position, "window": (64, 0), "backend": "numba"}
    most = 4 * n * n // 10
    for run in (lambda: rp.attention(q, k, v, **call), lambda: rp.attention_vjp(q, k, v, grad_out=g, **call)):
        assert_memory_below(run, most)


def test_maps_of_given_positions(rng):
    """Made, cut and checked, against each pair's own distance; larger than what is looked up at once."""
    lookup = rng.integers(-1, 5, 60).astype(np.int32)
    at_query, at_key = rng.integers(-9, 0, (2, 1, 300)), rng.integers(0, 51, (3, 401))
    assert BLOCK < 300 * 401
    index = Placed(lookup, 5, at_query, at_key)
    assert index.shape == (2, 3, 300, 401)
    wanted = lookup[at_key[..., None, :] - at_query[..., :, None]]
    assert np.array_equal(index.index, wanted)
    assert np.array_equal(index.dense(300, 401), wanted)
    assert np.array_equal(index.made((2, 3)).index, wanted)
    assert np.array_equal(Placed(lookup, 5, at_query, at_key[0]).made((2, 3)).index[:, 2], wanted[:, 0])
    some = slice(1, 2), slice(0, 3), slice(7, 250), slice(3, 390)
    part = cut_map(index, 300, *some[2:], some[:2])
    assert isinstance(part, Placed)
    assert np.array_equal(part.index, wanted[some])
    for first, last in ((1, 60), (0, 60)):
        with pytest.raises(rp.RelposError, match=r"distances span"):
            Placed(lookup, 5, np.array([first]), np.array([0, last]))
    with pytest.raises(rp.RelposError, match=r"entries span \[-1, 4\]"):
        Placed(lookup, 4, at_query, at_key)


def test_terms_that_share_a_map_still_do(rng):
    """So that each part of a call makes it once."""
    q, k, _ = rng.standard_normal((3, 4, 20, 64))
    site = rp.terms.Site(4, 4, 20, 20, 64, 64, 0, 0, 1.0, q.dtype, False, ())
    shaw = schemes(rng)["shaw"]
    plain, placed = shaw.lower(q, k, site), rp.AtPositions(shaw, scattered(rng, 20)).lower(q, k, site)
    assert plain.queries[0].index is plain.values[0].index
    assert placed.queries[0].index is placed.values[0].index


REFUSED = {
    "a scheme that turns": (lambda: rp.AtPositions(rp.Rotary(64), np.arange(8)), "goes by distances alone"),
    "a bias by key": (lambda: rp.AtPositions(rp.ALiBi(form="key"), np.arange(8)), "goes by distances alone"),
    "far apart": (lambda: rp.AtPositions(rp.ALiBi(), np.arange(8) * (1 << 28)), "more than 16777216"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, rng):
    make, words = REFUSED[name]
    q, k, v = rng.standard_normal((3, 2, 4, 8, 64))
    with pytest.raises(rp.RelposError, match=words):
        rp.attention(q, k, v, position=make())
