"""What runs before and after the backward kernels: a number per query, and totals of what blocks have summed."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.launch.device import jit, simulated
from relpos_np.kernels._cuda.simd.intrinsics import u64

# Threads of a block; a grid that is too small for all elements goes over them in several turns.
THREADS = 64


def blocks_for(size: int) -> int:
    """Blocks for a kernel with a thread per element, or that takes several turns."""
    return min(-(-size // THREADS), 8 if simulated() else 1 << 16)


@cache
def delta_kernel(dtype: np.dtype[Any]) -> Any:
    """The kernel for delta = dO . O - dlse, one number per query. One thread per query."""
    zero = dtype.type(0)

    @jit()
    def kernel(grad_out, out, grad_lse, delta, size, v_dim, given):  # type: ignore[no-untyped-def]
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < size:
            total = zero
            for d in range(v_dim):
                total += grad_out[u64(n * v_dim + d)] * out[u64(n * v_dim + d)]
            if given != 0:
                total -= grad_lse[u64(n)]
            delta[u64(n)] = total
            n += cuda.gridDim.x * THREADS

    return kernel


class Private(NamedTuple):
    """Sums that every block has of its own, `size` numbers each, a `step` apart from `start` on.

    For column n of the result, the block of the queries from `first` on adds its number n + slope * first + shift,
    if it has one.
    """

    start: int
    step: int
    size: int
    columns: int
    slope: int
    shift: int


@cache
def reduce_kernel() -> Any:
    """The kernel that adds sums of the blocks from `begin` to before `end` to totals (heads, columns) in float64."""
    zero = np.float64(0)

    @jit()
    def kernel(work, totals, private, begin, end, heads, tiles, rows):  # type: ignore[no-untyped-def]
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < heads * private.columns:
            head, column = n // private.columns, n % private.columns
            total = totals[u64(n)]
            if begin == 0:
                total = zero
            # In the order of the blocks' numbers (batch item, head, tile), however many one launch has.
            line = begin // (heads * tiles) * heads + head
            while line * tiles < end:
                for tile in range(tiles):
                    block = line * tiles + tile
                    at = column + private.slope * (tiles - 1 - tile) * rows + private.shift
                    if begin <= block < end and 0 <= at < private.size:
                        total += work[u64(private.start + (block - begin) * private.step + at)]
                line += heads
            totals[u64(n)] = total
            n += cuda.gridDim.x * THREADS

    return kernel


class Seen(NamedTuple):
    """The integers of `seen_kernel`: where the sums of a vector begin, the step to the next, how many, and sizes."""

    at: int
    step: int
    rows: int
    size: int
    heads: int
    group: int
    length: int
    depth: int


@cache
def seen_kernel(dtype: np.dtype[Any]) -> Any:
    """The kernel that copies vectors with a share in sums, and sets others to 0, since they may hold anything.

    Vectors are (batch, heads / group, length, depth), copies (batch, heads, length, depth).
    """
    zero = dtype.type(0)

    @jit()
    def kernel(x, work, out, call):  # type: ignore[no-untyped-def]
        at, step, rows, size, heads, group, length, depth = call
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < size:
            row, found = 0, 0
            while row < rows and found == 0:
                if work[u64(at + n * step + row)] != zero:
                    found = 1
                row += 1
            line = n // length
            own = line // heads * (heads // group) + line % heads // group
            for d in range(depth):
                value = zero
                if found != 0:
                    value = x[u64((own * length + n % length) * depth + d)]
                out[u64(n * depth + d)] = value
            n += cuda.gridDim.x * THREADS

    return kernel


@cache
def group_kernel(dtype: np.dtype[Any]) -> Any:
    """The kernel that adds up the arrays, of `step` elements, of each group of heads, in their order."""
    zero = dtype.type(0)

    @jit()
    def kernel(x, out, size, step, group):  # type: ignore[no-untyped-def]
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < size:
            at = n // step * group * step + n % step
            total = zero
            for head in range(group):
                total += x[u64(at + head * step)]
            out[u64(n)] = total
            n += cuda.gridDim.x * THREADS

    return kernel
