"""Neighbourhoods and image buckets: NeighborhoodBias (nat, dinat) and IRPE."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.test_schemes import close
from tests.test_schemes_windows import LIMITS, added, irpe, neighborhood, operands

METHODS = ("product", "euclidean", "quantization", "cross")

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


def test_neighborhood_axis_by_hand():
    near, step = rp.reference.neighborhood_axis(5, 3)
    np.testing.assert_array_equal(np.argmax(near, axis=1), [0, 0, 1, 2, 2])
    np.testing.assert_array_equal(near.sum(axis=1), 3)
    np.testing.assert_array_equal(step[0], [0, 1, 2, 3, 4])
    near, step = rp.reference.neighborhood_axis(7, 3, 2)
    np.testing.assert_array_equal([np.flatnonzero(row) for row in near][:5], [[0, 2, 4], [1, 3, 5]] * 2 + [[2, 4, 6]])
    np.testing.assert_array_equal(step[4, [2, 4, 6]], [-1, 0, 1])


def test_neighborhood_of_everything_is_a_window(backend, rng):
    """A kernel as long as its axis leaves nobody out; Swin counts in the other direction."""
    q, k, v = operands(rng, 15)
    scheme = neighborhood(rng, (3, 5), (3, 5))
    window = rp.WindowBias(scheme.table.reshape(2, -1)[:, ::-1].T.copy(), (3, 5))
    close(
        rp.attention(q, k, v, position=scheme, backend=backend), rp.attention(q, k, v, position=window, backend=backend)
    )


def test_dilation_is_attention_within_every_other_token(backend, rng):
    q, k, v = operands(rng, 23)
    dinat, nat = neighborhood(rng, (23,), (3,), 3), None
    out = rp.attention(q, k, v, position=dinat, backend=backend)
    for first in range(3):
        part = [x[..., first::3, :] for x in (q, k, v)]
        nat = rp.NeighborhoodBias(dinat.table.copy(), (part[0].shape[-2],), 3)
        close(out[..., first::3, :], rp.attention(*part, position=nat, backend=backend))


def test_neighborhood_and_masks(backend, rng):
    """A mask excludes further keys, possibly all of a query's; NaN in a key or a value reaches neighbours only."""
    q, k, v = operands(rng, 12)
    scheme = neighborhood(rng, (3, 4), (3, 3))
    bias = added(scheme, 12)
    mask = rng.random((12, 12)) < 0.4
    mask[5] = False
    out, lse = rp.attention(q, k, v, position=scheme, mask=mask, backend=backend, return_lse=True)
    expected = rp.attention(q, k, v, mask=np.where(mask, bias, -np.inf), backend=backend, return_lse=True)
    close(out, expected[0])
    np.testing.assert_allclose(lse, expected[1], atol=1e-13)
    assert (lse[..., 5] == -np.inf).all()
    for x in (k, v):
        kept = x[..., 0, :].copy()
        x[..., 0, :] = np.nan
        out = rp.attention(q, k, v, position=scheme, backend=backend)
        np.testing.assert_array_equal(np.isnan(out).all(axis=(0, 1, 3)), np.isfinite(bias[0, :, 0]))
        np.testing.assert_array_equal(np.isnan(out).any(axis=(0, 1, 3)), np.isfinite(bias[0, :, 0]))
        x[..., 0, :] = kept


@pytest.mark.parametrize("backend", ["numpy", "terms"])
def test_neighborhood_gradients_end_at_the_border(backend, rng):
    """Only the two queries beside the last of a line read its key and value."""
    q, k, v = operands(rng, 9)
    scheme = neighborhood(rng, (9,), (3,))
    grad_out = np.zeros((2, 2, 9, 3))
    grad_out[..., 0, :] = 1
    grads = rp.attention_vjp(q, k, v, grad_out=grad_out, position=scheme, backend=backend)
    assert all(np.isfinite(x).all() for x in (grads.q, grads.k, grads.v, grads.position["table"]))
    for x in (grads.k, grads.v):
        assert x[..., :3, :].all()
        assert not x[..., 3:, :].any()
    # The first query's differences are 0, 1 and 2.
    np.testing.assert_array_equal(grads.position["table"] != 0, [[False, False, True, True, True]] * 2)


def test_neighborhood_refuses(rng):
    for call, words in (
        (lambda: rp.NeighborhoodBias(None, (4, 5), 2), "kernel: expected odd"),
        (lambda: rp.NeighborhoodBias(None, (4, 5), 5), "kernel: 5 times the dilation 1 exceeds"),
        (lambda: rp.NeighborhoodBias(None, (9, 9), 3, (1, 4)), "kernel: 3 times the dilation 4 exceeds"),
        (lambda: rp.NeighborhoodBias(None, (4, 5), (3, 3, 3)), "kernel: expected 2 integers"),
        (lambda: rp.NeighborhoodBias(None, (4, 5), 3, 0), "dilation: .*0"),
        (lambda: rp.NeighborhoodBias(None, 5, 3), "grid: "),
        (lambda: rp.NeighborhoodBias(None, (3, 3, 3, 3), 3), "grid: "),
        (lambda: rp.NeighborhoodBias(np.ones((2, 5, 7)), (4, 5), 3), r"table: .*\(heads, 5, 5\)"),
        (lambda: rp.NeighborhoodBias(np.ones((2, 25)), (4, 5), 3), "table: "),
    ):
        with pytest.raises(rp.RelposError, match=words):
            call()


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


def test_irpe_with_exact_offsets_is_a_window(backend, rng):
    """Up to alpha every difference has its own bucket; query less key, as in Swin."""
    q, k, v = operands(rng, 16)
    table = rng.standard_normal((49, 2))
    scheme = rp.IRPE((4, 4), table.T.copy(), mode="bias", alpha=3.0, beta=3.0, gamma=9.0)
    close(
        rp.attention(q, k, v, position=scheme, backend=backend),
        rp.attention(q, k, v, position=rp.WindowBias(table, (4, 4)), backend=backend),
    )


def test_irpe_cross_is_a_product_of_sums(backend, rng):
    q, k, v = operands(rng, 13)
    cross = irpe(rng, (3, 4), method="cross", class_tokens=1)
    tables = {}
    for name in ("key_table", "query_table", "value_table"):
        down, right = getattr(cross, name)
        sums = (down[:, :7, None] + right[:, None, :7]).reshape(len(down), 49, -1)
        tables[name] = np.concatenate([sums, (down + right)[:, 7:]], axis=1)
    product = rp.IRPE((3, 4), **tables, class_tokens=1, **LIMITS)
    close(*(rp.attention(q, k, v, position=x, backend=backend) for x in (cross, product)))


def test_irpe_refuses(rng):
    good = irpe(rng, (3, 4))
    key, value = good.key_table, good.value_table
    q = np.zeros((2, 12, 5))
    for call, words in (
        (lambda: rp.IRPE((3, 4)), "at least one"),
        (lambda: rp.IRPE((3, 4), key, beta=4.0), "key_table: expected .*81 buckets"),
        (lambda: rp.IRPE((3, 4), key, class_tokens=1, **LIMITS), "key_table: expected .*50 buckets"),
        (lambda: rp.IRPE((3, 4), key[0], **LIMITS), "key_table: expected shape"),
        (lambda: rp.IRPE((3, 4), key[None], method="cross", **LIMITS), "key_table: expected .*7 buckets"),
        (lambda: rp.IRPE((3, 4), key[None, :, :7], method="cross", **LIMITS), r"key_table: expected \(2, heads"),
        (lambda: rp.IRPE((3, 4), value_table=value[..., 0], mode="bias", **LIMITS), "value_table: values have no bias"),
        (lambda: rp.IRPE((3, 4), key, alpha=2.0, beta=1.5, gamma=9.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, alpha=0.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, alpha=1.0, beta=2.0, gamma=1.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, alpha=0.1, beta=0.5, gamma=2.0), "alpha, beta, gamma: "),
        (lambda: rp.IRPE((3, 4), key, gamma=np.inf), "gamma: "),
        (lambda: rp.IRPE((3, 4), key, method="quant"), "method: .*'quant'"),
        (lambda: rp.IRPE((3, 4), key, mode="ctx"), "mode: .*'ctx'"),
        (lambda: rp.IRPE((3, 4), key, class_tokens=-1), "class_tokens: "),
        (lambda: rp.IRPE(12, key), "grid: "),
        (lambda: rp.attention(q[..., :4], q[..., :4], q, position=good), "key_table: .*vectors of 5"),
        (lambda: rp.attention(q, q, q, position=good), "value_table: .*vectors of 3"),
        (lambda: rp.attention(*operands(rng, 12, heads=3, kv_heads=3), position=good), "query_table: .*2 heads"),
    ):
        with pytest.raises(rp.RelposError, match=words):
            call()
    assert rp.logits(q, q, position=good).shape == (2, 12, 12)
