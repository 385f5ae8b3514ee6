"""Rotary positions on the device: pairs of channels times complex numbers, in one pass."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.launch.device import jit, launch, simulated
from relpos_np.kernels._cuda.simd.intrinsics import reader

THREADS = 64


class Turn(NamedTuple):
    """The integers of one call: sizes, and steps of the operand and of the angles."""

    rows: int
    heads: int
    length: int
    pairs: int
    depth: int
    by_head: int
    by_row: int
    by_channel: int
    turn_head: int
    turn_row: int


@cache
def _rotate(dtype: np.dtype[Any], real: np.dtype[Any], half: bool) -> Any:
    """The kernel for a dtype and a layout of pairs; neighbouring threads have neighbouring pairs."""
    read = reader(dtype.name, real)

    @jit()
    def kernel(x, cos, sin, out, starts, call):  # type: ignore[no-untyped-def]
        pairs, by_channel = call.pairs, call.by_channel
        # First the pairs of a row, then the channels that do not turn.
        width = call.depth - pairs
        count = call.rows * width
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < count:
            row, p = n // width, n % width
            i, line = row % call.length, row // call.length
            head, batch = line % call.heads, line // call.heads
            at = starts[2 * batch] + head * call.by_head + i * call.by_row
            own = row * call.depth
            if p < pairs:
                turn = starts[2 * batch + 1] + head * call.turn_head + i * call.turn_row + p
                first, second = 2 * p, 2 * p + 1
                if half:
                    first, second = p, p + pairs
                a, b = read(x[at + first * by_channel]), read(x[at + second * by_channel])
                c, s = cos[turn], sin[turn]
                out[own + first] = a * c - b * s
                out[own + second] = b * c + a * s
            else:
                out[own + p + pairs] = read(x[at + (p + pairs) * by_channel])
            n += cuda.gridDim.x * THREADS

    return kernel


def rotate(
    x: tuple[Any, tuple[int, ...], np.dtype[Any]],
    shape: tuple[int, ...],
    turns: tuple[Any, Any, tuple[int, ...]],
    pairs: int,
    starts: Any,
    out: Any,
    layout: str,
) -> None:
    """Fill `out`, contiguous, with x (..., H, L, D) turned.

    Parameters
    ----------
    x : tuple
        A flat array on the device, its steps along the axes in elements and its dtype.
    shape : tuple of int
        That of x.
    turns : tuple
        Cosines and sines, flat on the device, and their steps along the axes of x; the last one is 1.
    pairs : int
        Pairs that turn.
    starts : device array of int64
        For each batch item where x starts and where the cosines do.
    out : device array
        Flat, in the dtype of the computation.
    layout : {"half", "interleaved"}
        Which channels are a pair.
    """
    heads, length, depth = shape[-3:]
    rows = math.prod(shape[:-1])
    count = rows * (depth - pairs)
    if not count:
        return
    cos, sin, steps = turns
    flat, strides, dtype = x
    launch(
        _rotate(dtype, np.dtype(out.dtype), layout == "half"),
        *(min(-(-count // THREADS), 4 if simulated() else 1 << 16), THREADS),
        *(flat, cos, sin, out, starts, Turn(rows, heads, length, pairs, depth, *strides[-3:], *steps[-3:-1])),
    )
