"""Positions on image grids: SwinV2, BEiT, DecomposedBias, and the resizing of tables."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive
from tests.compare import assert_refused, close


def operands(rng, q_len, k_len=None, *, heads=2, kv_heads=1, dim=5, v_dim=3):
    k_len = q_len if k_len is None else k_len
    shapes = (heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim)
    return tuple(rng.standard_normal((2, *shape)) for shape in shapes)


def network(rng, heads=2, hidden=4):
    """W1, b1, W2 and logit_scale; one scale lies above its limit."""
    scale = np.linspace(0.3, 5.0, heads)
    return rng.standard_normal((hidden, 2)), rng.standard_normal(hidden), rng.standard_normal((heads, hidden)), scale


def swin_v2(rng, window, **options):
    return rp.SwinV2(*network(rng), window, **options)


def added(scheme, length, heads=2, backend="numpy"):
    """What a scheme adds where the products are 0."""
    zeros = np.zeros((heads, length, 1))
    return rp.logits(zeros, zeros, position=scheme, backend=backend)


# ---------------------------------------------------------------------------------------------- Swin V2


def test_swin_v2_of_vectors_without_length(backend, rng):
    """The smallest length keeps 0 where it is, and single precision from underflow."""
    q, k, v = (x.astype(np.float32) for x in operands(rng, 6))
    scheme = swin_v2(rng, (2, 3))
    q[..., 0, :], k[..., 1, :], q[..., 2, :] = 0, 1e-20, 1e-20
    s = rp.logits(q, k, position=scheme, backend="numpy" if backend == "numba" else backend)
    close(s[..., 0, :] - added(scheme, 6)[:, 0], np.zeros_like(s[..., 0, :]), 1e-5)
    assert np.isfinite(rp.attention(q, k, v, position=scheme, backend=backend)).all()
    q[..., 3, :] = 1e25
    assert np.isfinite(rp.attention(q, k, v, position=scheme, backend=backend)).all()


def test_swin_v2_gradient_of_the_scale_ends_at_its_limit(rng):
    q, k, v = operands(rng, 6)
    w1, b1, w2, _ = network(rng)
    scheme = rp.SwinV2(w1, b1, w2, np.array([4.0, 4.7]), (2, 3))
    grads = rp.attention_vjp(q, k, v, grad_out=rp.attention(q, k, v, position=scheme), position=scheme).position
    assert grads["logit_scale"][0] != 0 == grads["logit_scale"][1]


# ---------------------------------------------------------------------------------------------- BEiT and resizing


@pytest.mark.parametrize("mode", ["cubic", "linear", "geometric"])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(("old", "new"), [((3, 3), (5, 5)), ((4, 2), (3, 7)), ((1, 3), (2, 1)), ((5, 1), (4, 4))])
def test_resized_tables_against_loops(old, new, extra, mode, rng):
    table = rng.standard_normal(((2 * old[0] - 1) * (2 * old[1] - 1) + extra, 3))
    found = rp.reference.resize_table(table, old, new, mode=mode, extra_rows=extra)
    close(found, naive.resize_table(table, old, new, mode=mode, extra_rows=extra))
    if extra:
        np.testing.assert_array_equal(found[-extra:], table[-extra:])


def test_resizing_refuses():
    table = np.ones((9, 2))
    assert_refused(
        (lambda: rp.reference.resize_table(table, (2, 2), (3,)), "new_grid: expected 2 axes"),
        (lambda: rp.reference.resize_table(table, (3, 2), (3, 3)), "table: .*need 15 rows"),
        (lambda: rp.reference.resize_table(table, (2, 2), (3, 3), extra_rows=3), "table: .*need 12 rows"),
        (lambda: rp.reference.resize_table(table, (2, 2), (3, 3), mode="bicubic"), "mode: .*'bicubic'"),
        (lambda: rp.reference.resize_table(table, 2, (3, 3)), "old_grid: "),
        (lambda: rp.reference.resize_table(table, (2, 2), (3, 0)), "new_grid: .*0"),
    )


# ---------------------------------------------------------------------------------------------- SAM and MViTv2


def test_rows_of_an_axis():
    rows = rp.reference.axis_rows
    np.testing.assert_array_equal(rows(3, 3), [[2, 1, 0], [3, 2, 1], [4, 3, 2]])
    np.testing.assert_array_equal(rows(4, 2), [[2, 0], [3, 1], [4, 2], [5, 3]])
    np.testing.assert_array_equal(rows(2, 4), [[3, 2, 1, 0], [5, 4, 3, 2]])
    for q, k in [(q, k) for q in range(1, 20) for k in range(1, 20)]:
        exact, rounded = rows(q, k), rows(q, k, rounding="float32")
        assert exact.shape == (q, k)
        assert 0 <= exact.min() <= exact.max() <= 2 * max(q, k) - 2
        expected = [[naive.decomposed_row(i, j, q, k) for j in range(k)] for i in range(q)]
        np.testing.assert_array_equal(exact, expected)
        # Rounding never adds, and never takes more than one.
        assert set((exact - rounded).ravel()) <= ({0} if max(q, k) % min(q, k) == 0 else {-1, 0, 1})


@pytest.mark.parametrize("sizes", [(8, 6), (6, 8)])
def test_decomposed_rounding(sizes, backend, rng):
    """Published arithmetic differs from fractions for 8 queries and 6 keys; numbers that do not divide each other."""
    q, k, v = operands(rng, *sizes)
    exact, rounded = (
        rp.DecomposedBias(np.arange(75.0).reshape(15, 5), np.ones((1, 5)), (sizes[0], 1), (sizes[1], 1), rounding=r)
        for r in ("exact", "float32")
    )
    different = rp.reference.axis_rows(*sizes) != rp.reference.axis_rows(*sizes, rounding="float32")
    assert different.sum() == (8 if sizes == (8, 6) else 0)
    s = [rp.logits(q, k, position=x, backend="terms") for x in (exact, rounded)]
    np.testing.assert_array_equal((np.abs(s[0] - s[1]) > 1e-9).any(axis=(0, 1)), different)
    for scheme in (exact, rounded):
        close(*(rp.attention(q, k, v, position=scheme, backend=b) for b in ("numpy", backend)), 1e-12)
