"""The CUDA kernels' products of matrices against np.einsum in float64."""

import numpy as np
import pytest

from relpos_np.kernels._cuda.forward_pass import product
from relpos_np.kernels._cuda.launch.device import upload

FILLER = 7.0


def place(shape, order, gap=0):
    """Steps of each axis of an array whose axes lie in memory in an order, the last one fastest, and its size."""
    steps, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps[axis] = step
        step *= shape[axis] + gap
    return tuple(steps), step


def spread(x, steps, size):
    """A flat array with the elements of x at their places from 3 on, and NaN everywhere else."""
    flat = np.full(size + 3, np.nan, x.dtype)
    np.lib.stride_tricks.as_strided(flat[3:], x.shape, [n * x.itemsize for n in steps])[...] = x
    return flat


def run(a, b, orders=((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3)), gap=0, group=1, stored=None, widened=None):
    """Multiply, and compare with float64; what lies between the elements stays as it was."""
    (batch, heads, outer, inner, columns), rows = b.shape, a.shape[3]
    (a_steps, a_size), (b_steps, b_size) = place(a.shape, orders[0], gap), place(b.shape, orders[1], gap)
    c_steps, c_size = place((batch, heads, rows, columns), orders[2], gap)
    flats = [spread(a, a_steps, a_size), spread(b, b_steps, b_size)]
    flats = [np.nan_to_num(x, nan=99) if x.dtype.kind == "u" else x for x in flats]
    result = np.full(c_size + 3, FILLER, b.dtype)
    place_of_c = upload(result)
    product.gemm(
        *(upload(flats[0]), 3, a_steps, upload(flats[1]), 3, b_steps, place_of_c, 3, c_steps),
        *((batch, heads, rows, columns, outer, inner),),
        a_group=group,
        stored=stored,
    )
    result = place_of_c.copy_to_host()
    found = np.lib.stride_tricks.as_strided(
        result[3:], (batch, heads, rows, columns), [n * result.itemsize for n in c_steps]
    )
    wide = np.repeat((a if widened is None else widened).astype(np.float64), group, axis=1)
    expected = np.einsum("bhomk,bhokn->bhmn", wide, b.astype(np.float64))
    eps = np.finfo(b.dtype).eps
    bound = np.einsum("bhomk,bhokn->bhmn", abs(wide), abs(b.astype(np.float64)))
    assert (abs(found - expected) <= (outer * inner + 1) * eps * bound).all()
    kept = result.copy()
    np.lib.stride_tricks.as_strided(kept[3:], found.shape, [n * kept.itemsize for n in c_steps])[...] = FILLER
    assert (kept == FILLER).all()
    return found.copy()


def matrices(rng, batch, heads, rows, columns, outer, inner, dtype, group=1):
    a = rng.standard_normal((batch, heads // group, outer, rows, inner)).astype(dtype)
    return a, rng.standard_normal((batch, heads, outer, inner, columns)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1, 1), (1, 2, 7, 33, 1, 7), (2, 1, 65, 7, 1, 33), (1, 1, 33, 65, 2, 17), (2, 2, 1, 1, 3, 5)]
)
def test_ragged_sizes(sizes, dtype, rng):
    run(*matrices(rng, *sizes, dtype))


@pytest.mark.parametrize(
    "orders",
    [((0, 1, 2, 4, 3), (0, 1, 2, 4, 3), (1, 0, 3, 2)), ((3, 0, 1, 4, 2), (4, 2, 0, 1, 3), (2, 0, 1, 3))],
    ids=["turned", "mixed"],
)
def test_any_steps(orders, rng):
    run(*matrices(rng, 2, 2, 9, 6, 2, 18, "float32"), orders, gap=1)


def test_heads_that_share(rng):
    run(*matrices(rng, 2, 6, 5, 3, 1, 4, "float64", group=3), group=3)


@pytest.mark.parametrize("sizes", [(2, 3, 5, 4, 1, 6), (3, 2, 1, 4, 1, 6)], ids=str)
def test_steps_of_zero_and_joined_axes(sizes, rng):
    """One table for all heads and batch items: they become rows."""
    batch, heads, rows, columns, *_ = sizes
    a, b = matrices(rng, *sizes, "float64")
    a_steps, _ = place(a.shape, (0, 1, 2, 3, 4))
    c_shape = batch, heads, rows, columns
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)):
        c_steps, size = place(c_shape, order)
        c = upload(np.full(size, np.nan))
        product.gemm(
            *(upload(a.ravel()), 0, a_steps, upload(b[0, 0].ravel()), 0, (0, 0, 0, columns, 1), c, 0, c_steps, sizes)
        )
        found = np.lib.stride_tricks.as_strided(c.copy_to_host(), c_shape, [8 * n for n in c_steps])
        np.testing.assert_allclose(found, np.einsum("bhomk,kn->bhmn", a, b[0, 0, 0]), rtol=0, atol=1e-14)


def test_folding_joins_what_it_can():
    sizes = {"batch": 3, "heads": 4, "rows": 5, "columns": 6, "outer": 1, "inner": 7}
    whole = product.Product(**dict.fromkeys(product.Product._fields, 0) | sizes)._replace(
        a_batch=140, a_head=35, a_row=7, a_inner=1, a_group=1, c_batch=120, c_head=30, c_row=6, c_column=1
    )
    found = product.fold(whole)
    assert (found.batch, found.heads, found.rows, found.a_row, found.c_row) == (1, 1, 60, 7, 6)
    # A table per head, or vectors that heads share: as it was.
    assert product.fold(whole._replace(b_head=42)) == whole._replace(b_head=42)
    assert product.fold(whole._replace(a_group=2)).rows == 5
    assert product.fold(whole._replace(b_batch=42)).rows == 20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(1, 2, 5, 3, 2, 41), (2, 1, 3, 34, 4, 16)], ids=str)
def test_split_sums(sizes, dtype, rng, monkeypatch):
    """Sums in parts, which lie in an array of their own: the same numbers each time."""
    monkeypatch.setattr(product, "LEAST", 2)
    made = []
    empty = product.empty
    monkeypatch.setattr(product, "empty", lambda *args: made.append(args[0]) or empty(*args))
    a, b = matrices(rng, *sizes, dtype)
    first = run(a, b, ((0, 1, 2, 4, 3), (0, 1, 2, 3, 4), (1, 0, 3, 2)), gap=1)
    second = run(a, b, ((0, 1, 2, 3, 4), (0, 1, 2, 4, 3), (0, 1, 2, 3)))
    parts = sizes[4] * -(-sizes[5] // product.DEPTH) // 2
    assert parts > 1
    assert made == [parts * first.size] * 2
    np.testing.assert_array_equal(first, second)
    # An item of the batch does not depend on the others.
    np.testing.assert_array_equal(run(a[:1], b[:1]), first[:1])


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_precision_that_is_stored(stored, rng):
    a, b = matrices(rng, 1, 2, 5, 4, 1, 19, "float32")
    if stored == "float16":
        run(a.astype(np.float16), b, stored=stored)
    else:
        bits = (a.view(np.uint32) >> 16).astype(np.uint16)
        widened = (bits.astype(np.uint32) << 16).view(np.float32)
        steps, _ = place(a.shape, (0, 1, 2, 3, 4))
        c = upload(np.full(2 * 5 * 4, np.nan, np.float32))
        b_steps, _ = place(b.shape, (0, 1, 2, 3, 4))
        product.gemm(
            *(upload(bits.ravel()), 0, steps, upload(b.ravel()), 0, b_steps, c, 0, (40, 20, 4, 1), (1, 2, 5, 4, 1, 19)),
            stored=stored,
        )
        expected = np.einsum("bhomk,bhokn->bhmn", widened.astype(np.float64), b)
        np.testing.assert_allclose(c.copy_to_host().reshape(expected.shape), expected, rtol=0, atol=1e-5)


def test_a_sum_of_nothing_is_zero(rng):
    assert not run(*matrices(rng, 1, 1, 2, 3, 1, 0, "float32")).any()
