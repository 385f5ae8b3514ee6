"""Products of vectors with the rows of a table, which the forward kernel then gathers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.device import jit, launch, simulated

THREADS = 64


@cache
def _product(dtype: np.dtype[Any]) -> Any:
    """The kernel for one element type: threads next to each other have the same vector and neighbouring rows."""
    zero = dtype.type(0)

    @jit()
    def kernel(x, weights, out, start, count, heads, length, rows, depth, group, weights_head):  # type: ignore[no-untyped-def]
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < count:
            row = n % rows
            vector = n // rows
            head = vector // length
            batch = head // heads
            own = head % heads
            x_at = ((batch * (heads // group) + own // group) * length + vector % length) * depth
            w_at = own * weights_head + row
            total = zero
            for d in range(depth):
                total += x[x_at + d] * weights[w_at + d * rows]
            out[start + n] = total
            n += cuda.gridDim.x * THREADS

    return kernel


def multiply(
    x: Any, weights: Any, out: Any, start: int, sizes: tuple[int, int, int, int, int], group: int, shared: bool
) -> None:
    """Products from `start` in `out`, as (batch, heads, length, rows).

    Parameters
    ----------
    x, weights, out : device arrays
        Vectors (batch, heads / group, length, depth); a table (heads or 1, depth, rows), transposed; where to write.
    start : int
        The first element that is written.
    sizes : tuple of int
        Batch items, heads, length, rows and depth.
    group : int
        Heads that share a vector.
    shared : bool
        Whether all heads share one table.
    """
    batch, heads, length, rows, depth = sizes
    count = batch * heads * length * rows
    if not count:
        return
    blocks = min(-(-count // THREADS), 8 if simulated() else 1 << 16)
    step = 0 if shared else rows * depth
    launch(
        _product(np.dtype(out.dtype)),
        *(blocks, THREADS, x, weights, out, start, count, heads, length, rows, depth, group, step),
    )
