"""rel_shift on the device: each row of the result is one run of the input, or two around a zero.

Elements are moved one by one, neighbours by neighbouring threads. Wide words would not help: from row to row the
input advances by one element less than the result, so that both are rarely aligned together. To keep the memory busy,
each thread has several loads under way.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.arrays.operand import Operand, one_step
from relpos_np.kernels._cuda.launch.device import download, empty, jit, launch, simulated, upload
from relpos_np.kernels._cuda.simd.intrinsics import elements, u64
from relpos_np.types import Array

# The most blocks of a grid; with more rows, blocks take several turns.
MOST_BLOCKS = (1 << 31) - 1
# Threads per row where rows are too short for a whole block.
FEW = (8, 32)


def _loads(size: int) -> int:
    """Independent loads of a thread before it stores any, for words of `size` bytes."""
    return 8 if size <= 2 else 4


class Shift(NamedTuple):
    """The integers of one call, in words: rows in all and per matrix, their length, and where they come from.

    Row i of a matrix begins at offset + i * step. After first + i * unit words there is a zero of `unit` words, and
    what follows comes from further on by a gap.
    """

    total: int
    rows: int
    length: int
    by_matrix: int
    offset: int
    step: int
    first: int
    unit: int
    gap: int


@cache
def shift(size: int, threads: int, across: int) -> Any:
    """The kernel for elements made of words of `size` bytes, with `threads` in a block and `across` on a row."""
    kind = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[size]
    loads, height = _loads(size), threads // across

    @jit()
    def kernel(x, out, call):  # type: ignore[no-untyped-def]
        x, out, (total, rows, length, by_matrix, offset, step, first, unit, gap) = elements(x), elements(out), call
        words = cuda.local.array(loads, kind)
        lane = cuda.threadIdx.x % across
        row, hop = cuda.blockIdx.x * height + cuda.threadIdx.x // across, cuda.gridDim.x * height
        while row < total:
            i = row % rows
            start, own = row // rows * by_matrix + offset + i * step, first + i * unit
            base = lane
            while base < length:
                for n in range(loads):
                    at = base + n * across
                    words[n] = 0
                    if at < length and (at < own or at >= own + unit):
                        words[n] = x[u64(start + at + (0 if at < own else gap))]
                for n in range(loads):
                    at = base + n * across
                    if at < length:
                        out[u64(row * length + at)] = words[n]
                base += loads * across
            row += hop

    return kernel


def shift_flat(
    x: Any, out: Any, sizes: tuple[int, int, int, int], steps: tuple[int, int], itemsize: int, variant: str
) -> None:
    """Fill a flat array on the device from another one.

    Parameters
    ----------
    x, out : device arrays
        Flat; of any dtype as large as an element. `out` is filled as (matrices, rows, keys) in C order.
    sizes : tuple of int
        Matrices, their rows and columns in `x`, and keys.
    steps : tuple of int
        From matrix to matrix and from row to row in `x`, in elements. Columns follow one another.
    itemsize : int
        Bytes of an element.
    variant : str
        Of `relpos_np.rel_shift`, one that moves rows.
    """
    matrices, rows, columns, k_len = sizes
    if not matrices * rows * k_len:
        return
    size = next(n for n in (8, 4, 2, 1) if itemsize % n == 0)
    word, unit = np.dtype(f"u{size}"), itemsize // size
    count, length = matrices * rows, k_len * unit
    # Short rows share a block.
    threads = 64 if simulated() else 256
    across = next((n for n in FEW if n * _loads(size) >= length), threads)
    by_matrix, by_row, wide = steps[0] * unit, steps[1] * unit, columns * unit
    offset, first, gap = wide - length, length, 0
    if variant in ("transformer_xl", "espnet_legacy"):
        # The row's own products, a zero, and the start of the next row's.
        offset, first, gap = (rows - 1) * unit, wide - (rows - 1) * unit, by_row - wide - unit
    launch(
        shift(size, threads, across),
        *(min(-(-count * across // threads), MOST_BLOCKS), threads, x.view(word), out.view(word)),
        Shift(count, rows, length, by_matrix, offset, by_row - unit, first, unit, gap),
    )


def rel_shift(x: Array | Operand, out: Array | Operand, variant: str) -> None:
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; any dtype, both on the same side."""
    if not out.size:
        return
    size = next(n for n in (8, 4, 2, 1) if out.itemsize % n == 0)
    word = np.dtype(f"u{size}")
    rows, columns = x.shape[-2:]
    k_len = out.shape[-1]
    sizes = out.size // (rows * k_len), rows, columns, k_len
    if isinstance(x, Operand):
        # One step leads from matrix to matrix, or a copy is made where it does.
        matrices = one_step(x.shape[:-2], x.strides[:-2])
        if matrices is None or (columns > 1 and x.strides[-1] != 1):
            x = x.contiguous()
            matrices = rows * columns
        shift_flat(x.flat, out.flat, sizes, (matrices, x.strides[-2]), out.itemsize, variant)
        return
    source = upload(np.ascontiguousarray(x, out.dtype).reshape(-1).view(word))
    result = empty(out.nbytes // size, word)
    shift_flat(source, result, sizes, (rows * columns, columns), out.itemsize, variant)
    assert isinstance(out, np.ndarray)
    download(result, out.reshape(-1).view(word))
