"""Positions that come from the text: Inkling's relative logits, forget gates; what long texts cost, what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import assert_refused


def test_inkling_of_a_query_that_is_nan_reaches_no_other(backend, rng):
    q, k, v = rng.standard_normal((3, 1, 2, 9, 4))
    states, proj = rng.standard_normal((2, 9, 3)), rng.standard_normal((3, 4))
    clean = rp.attention(q, k, v, position=rp.Inkling(states, proj), causal=True, backend=backend)
    states[:, 4] = np.nan
    found = rp.attention(q, k, v, position=rp.Inkling(states, proj), causal=True, backend=backend)
    others = np.arange(9) != 4
    np.testing.assert_allclose(found[:, :, others], clean[:, :, others], rtol=0, atol=1e-12)
    assert np.isnan(found[:, :, 4]).all()


def test_fox_refuses():
    gates, q = np.ones((2, 5)), np.ones((1, 2, 5, 3))
    assert_refused(
        (lambda: rp.FoX(np.array([[0.0, -np.inf]]), variant="log"), "gates: expected finite numbers, found -inf"),
        (lambda: rp.attention(q, q, q, position=rp.FoX(np.ones((3, 2, 5)))), "batch axes"),
        (lambda: rp.attention(q, q, q, position=rp.FoX(gates), offset=1), r"offset: queries stand at 1 \.\.\. 5"),
        (lambda: rp.attention(q, q, q, position=rp.FoX(gates), offset=-1), r"offset: queries stand at -1 \.\.\. 3"),
    )
    assert repr(rp.FoX(gates)) == "FoX(gates=(2, 5))"


def test_fox_loses_no_digits_in_a_long_text(rng):
    """The last queries of 100,000 keys in float32, whose sums alone would be off by thousands of roundings."""
    length, queries = 100_000, 8
    q, k, v = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (queries, length, length))
    gates = rng.standard_normal((2, length)).astype(np.float32)
    wide = [x.astype(np.float64) for x in (q, k, v, gates)]
    options = {"causal": True, "return_lse": True}
    expected = rp.attention(*wide[:3], position=rp.FoX(wide[3]), backend="numpy", **options)
    found = rp.attention(q, k, v, position=rp.FoX(gates), backend="numba", **options)
    sums = np.cumsum(rp.reference.forget_gates(gates).astype(np.float32), axis=-1)
    lost = rp.attention(q, k, v, mask=sums[:, -queries:, None] - sums[:, None], backend="numba", **options)
    for x, y, z in zip(found, expected, lost, strict=True):
        assert np.abs(x - y).max() < 2e-6
        assert np.abs(z - y).max() > 1e-3


def test_fox_takes_no_memory_of_pairs(rng):
    """Nor do its gradients."""
    n = 4096
    q, k, v = rng.standard_normal((3, 1, n, 4)).astype(np.float32)
    with rp.memory_limit(n * n):
        scheme = rp.FoX(rng.standard_normal((1, n)).astype(np.float32))
        out = rp.attention(q, k, v, position=scheme, causal=True, backend="numba")
        rp.attention_vjp(q, k, v, position=scheme, causal=True, grad_out=out, backend="numba")


def test_dape_gives_an_item_the_bits_that_it_has_alone(rng):
    """However many items divide the work into blocks of queries."""
    q, k, v, grad = rng.standard_normal((4, 3, 2, 21, 8))
    scheme = rp.DAPE(rp.ALiBi(heads=2), *(rng.standard_normal(shape) for shape in ((4, 4), 4, (2, 4), 2)))
    options = {"position": scheme, "causal": True, "backend": "numba"}
    out = rp.attention(q, k, v, **options)
    found = rp.attention_vjp(q, k, v, grad_out=grad, **options)
    alone = rp.attention_vjp(q[1], k[1], v[1], grad_out=grad[1], **options)
    np.testing.assert_array_equal(rp.attention(q[1], k[1], v[1], **options), out[1])
    for name in "qkv":
        np.testing.assert_array_equal(getattr(alone, name), getattr(found, name)[1], err_msg=name)


# ---------------------------------------------------------------------------------------------- selective attention


@pytest.mark.parametrize("variant", ["paper", "x_transformers"])
def test_selective_decodes_with_the_sums_of_votes(variant, backend, rng):
    """Queries in pieces, with what was said before, are all queries at once."""
    q, k, v = (rng.standard_normal((2, n, 9, 5)) for n in (4, 2, 2))
    whole = rp.attention(q, k, v, position=rp.Selective(2, variant="paper"), causal=True, backend=backend)
    past = np.zeros((2, 9))
    for first, last in ((0, 4), (4, 5), (5, 9)):
        if variant == "x_transformers" and first:
            break  # keys of memory are spared there, whatever was said
        new, seen = slice(first, last), slice(last)
        step = rp.Selective(2, variant=variant, past=past[:, seen])
        options = {"causal": True, "backend": backend}
        out = rp.attention(q[:, :, new], k[:, :, seen], v[:, :, seen], position=step, **options)
        np.testing.assert_allclose(out, whole[:, :, new], rtol=0, atol=1e-12)
        scores = rp.logits(q[:, :, new], k[:, :, seen], causal=True)[:, 2]
        past[:, seen] += rp.reference.selective_votes(scores, offset=first, variant=variant).sum(axis=-2)
    assert past.max() > 0.5
