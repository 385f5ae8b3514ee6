"""Positions that are given, for schemes of distances."""

import numpy as np
import pytest

import relpos_np as rp

BACKENDS = rp.backend.HOST_BACKENDS


def schemes(rng, heads=4):
    return {
        "alibi": rp.ALiBi(),
        "t5": rp.T5(rng.standard_normal((32, heads))),
        "shaw": rp.Shaw(rng.standard_normal((9, 64)), rng.standard_normal((9, 64)), outside="zero"),
        "deberta": rp.DeBERTa(*rng.standard_normal((2, heads, 32, 64)), max_position=64),
        "tisa": rp.TISA(*rng.standard_normal((3, 5, heads))),
        "sandwich": rp.Sandwich(16),
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
