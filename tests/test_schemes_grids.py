"""Neighbourhoods and image buckets: NeighborhoodBias (nat, dinat) and IRPE."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.compare import assert_refused, close
from tests.test_schemes_windows import added, operands

METHODS = ("product", "euclidean", "quantization", "cross")
# Lower than published, so that small grids have offsets beyond them.
LIMITS = {"alpha": 1.5, "beta": 3.0, "gamma": 6.0}


def neighborhood(rng, grid, kernel=(1, 1), dilation=1, heads=2):
    return rp.NeighborhoodBias(rng.standard_normal((heads, *(2 * k - 1 for k in kernel))), grid, kernel, dilation)


# ---------------------------------------------------------------------------------------------- neighbourhoods


@pytest.mark.parametrize(
    ("grid", "kernel", "dilation"),
    [
        ((1,), (1,), (1,)),
        ((65,), (7,), (1,)),
        ((65,), (7,), (9,)),
        ((7, 9), (3, 5), (1, 1)),
        ((7, 9), (3, 1), (2, 4)),
        ((8, 8), (3, 3), (2, 2)),
        ((3, 4, 5), (3, 1, 5), (1, 3, 1)),
    ],
)
def test_neighborhood_against_loops(grid, kernel, dilation, rng):
    length = int(np.prod(grid))
    q, k, v = operands(rng, length)
    for scheme in (neighborhood(rng, grid, kernel, dilation), rp.NeighborhoodBias(None, grid, kernel, dilation)):
        logit = naive.neighborhood(scheme.table, grid, kernel, dilation)
        expected = naive.attention(q, k, v, logit=logit)
        for backend in rp.backend.HOST_BACKENDS:
            for x, y in zip(
                rp.attention(q, k, v, position=scheme, backend=backend, return_lse=True), expected, strict=True
            ):
                close(x, y, 1e-12)
        bias = rp.reference.neighborhood_bias(scheme.table, grid, kernel, dilation)
        assert (np.isfinite(bias).sum(axis=-1) == np.prod(kernel)).all()
        close(np.broadcast_to(bias, (2, length, length)), added(scheme, length, backend="terms"))


def test_neighborhood_refuses(rng):
    assert_refused(
        (lambda: rp.NeighborhoodBias(None, (4, 5), 2), "kernel: expected odd"),
        (lambda: rp.NeighborhoodBias(None, (4, 5), 5), "kernel: 5 times the dilation 1 exceeds"),
        (lambda: rp.NeighborhoodBias(None, (9, 9), 3, (1, 4)), "kernel: 3 times the dilation 4 exceeds"),
        (lambda: rp.NeighborhoodBias(None, (4, 5), 3, 0), "dilation: .*0"),
        (lambda: rp.NeighborhoodBias(None, 5, 3), "grid: "),
        (lambda: rp.NeighborhoodBias(None, (3, 3, 3, 3), 3), "grid: "),
    )


# ---------------------------------------------------------------------------------------------- iRPE


def test_piecewise_index_by_hand():
    """The published limits of "product", and limits whose logarithms are halves: they go to even numbers."""
    g = rp.reference.piecewise_index
    np.testing.assert_array_equal(g(np.arange(-6, 7)), [-3, -3, -3, -2, -2, -1, 0, 1, 2, 2, 3, 3, 3])
    assert g(np.array(10**6)) == 3
    halves = g(np.array([1, 2, 4, 8, 16, 32, 64, 128]), alpha=1.0, beta=4.0, gamma=64.0)
    np.testing.assert_array_equal(halves, [1, 2, 2, 2, 3, 4, 4, 4])


@pytest.mark.parametrize("limits", [(1.9, 3.8, 15.2), (20.0, 40.0, 160.0), (33.0, 66.0, 264.0), (1.0, 4.0, 64.0)])
def test_piecewise_index_against_loops(limits):
    options = dict(zip(("alpha", "beta", "gamma"), limits, strict=True))
    x = np.arange(-700, 701)
    found = rp.reference.piecewise_index(x, **options)
    if limits[0] != 1.0:  # where the loops' own logarithms are halves but for rounding
        np.testing.assert_array_equal(found, [naive.irpe_piecewise(n, *limits) for n in x.tolist()])
    np.testing.assert_array_equal(found, -found[::-1])
    assert (np.diff(found) >= 0).all()
    assert found.max() == int(limits[1])
    for method in METHODS:
        formula = rp.reference.irpe_buckets((1, 300), method=method, **options)
        rows = int(formula.max()) + 1
        side = 2 * int(limits[1]) + 1
        buckets = side**2 if method == "product" else side
        assert rows <= buckets
        table = np.arange(float(buckets))[None]
        scheme = rp.IRPE(
            (1, 300),
            np.stack([table, 0 * table]) if method == "cross" else table,
            mode="bias",
            method=method,
            **options,
        )
        np.testing.assert_array_equal(added(scheme, 300, 1, "terms")[0], formula[0])


def test_irpe_refuses(rng):
    key, query, value = (rng.standard_normal((n, 49, size)) for n, size in ((1, 5), (2, 5), (1, 3)))
    good = rp.IRPE((3, 4), key, query, value, **LIMITS)
    q = np.zeros((2, 12, 5))
    assert_refused(
        (lambda: rp.IRPE((3, 4)), "at least one"),
        (lambda: rp.IRPE((3, 4), key, beta=4.0), "key_table: expected .*81 buckets"),
        (lambda: rp.IRPE((3, 4), key, class_tokens=1, **LIMITS), "key_table: expected .*50 buckets"),
        (lambda: rp.IRPE((3, 4), key[None], method="cross", **LIMITS), "key_table: expected .*7 buckets"),
        (lambda: rp.IRPE((3, 4), key[None, :, :7], method="cross", **LIMITS), r"key_table: expected \(2, heads"),
        (lambda: rp.IRPE((3, 4), value_table=value[..., 0], mode="bias", **LIMITS), "value_table: values have no bias"),
        (lambda: rp.IRPE((3, 4), key, alpha=2.0, beta=1.5, gamma=9.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, alpha=1.0, beta=2.0, gamma=1.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, alpha=0.1, beta=0.5, gamma=2.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE(12, key), "grid: "),
    )
    assert rp.logits(q, q, position=good).shape == (2, 12, 12)
