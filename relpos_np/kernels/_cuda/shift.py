"""rel_shift on the device: each row of the result is one run of the input, or two around a zero.

Elements are moved one by one, neighbours by neighbouring threads. From one row to the next the input moves by one
element less than the result does, so that of 16 / size rows only one could be copied in words of 16 bytes; the
others would need words that are put together from two. What fills the memory's pipeline instead is several loads of
each thread on the way at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.device import download, empty, jit, launch, simulated, upload
from relpos_np.kernels._cuda.intrinsics import elements, place
from relpos_np.types import Array

# As many blocks as a grid may have; they go on with further rows.
MOST_BLOCKS = (1 << 31) - 1
# Threads that are scheduled together, and read lines of memory together.
TOGETHER = 32


def _loads(size: int) -> int:
    """Independent loads of a thread before it stores any, for words of `size` bytes."""
    return 8 if size <= 2 else 4


@cache
def shift(size: int) -> Any:
    """The kernel for elements made of words of `size` bytes; all lengths and steps are in words but `columns`."""
    kind = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[size]
    loads = _loads(size)

    @jit()
    def kernel(  # type: ignore[no-untyped-def]
        x, out, count, rows, columns, length, by_matrix, by_row, unit, wrapped, across, height
    ):
        x, out = elements(x), elements(out)
        words = cuda.local.array(loads, kind)
        lane = cuda.threadIdx.x % across
        row, hop = cuda.blockIdx.x * height + cuda.threadIdx.x // across, cuda.gridDim.x * height
        matrix, i = row // rows, row % rows
        next_matrix, next_i = hop // rows, hop % rows
        while row < count:
            # The row's own run of the input, how long it is, and how far behind its end the second one begins.
            start = matrix * by_matrix + i * by_row
            own, gap = length, 0
            if wrapped:
                own = (columns - rows + 1 + i) * unit
                start += (rows - 1 - i) * unit
                gap = by_row - (columns + 1) * unit
            else:
                start += (columns - i) * unit - length
            base = lane
            while base < length:
                for n in range(loads):
                    at = base + n * across
                    words[n] = 0
                    if at < own:
                        words[n] = x[place(start + at)]
                    elif own + unit <= at < length:
                        words[n] = x[place(start + at + gap)]
                for n in range(loads):
                    at = base + n * across
                    if at < length:
                        out[place(row * length + at)] = words[n]
                base += loads * across
            row += hop
            matrix += next_matrix
            i += next_i
            if i >= rows:
                matrix, i = matrix + 1, i - rows

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
    across = 1 << (-(-length // _loads(size)) - 1).bit_length()
    across = min(max(across, min(TOGETHER, 1 << (length - 1).bit_length())), threads)
    height = threads // across
    launch(
        shift(size),
        *(min(-(-count // height), MOST_BLOCKS), threads, x.view(word), out.view(word), count, rows, columns, length),
        *(steps[0] * unit, steps[1] * unit, unit, variant in ("transformer_xl", "espnet_legacy"), across, height),
    )


def rel_shift(x: Array, out: Array, variant: str) -> None:
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; any dtype."""
    if not out.size:
        return
    x = np.ascontiguousarray(x, out.dtype)
    size = next(n for n in (8, 4, 2, 1) if out.itemsize % n == 0)
    word = np.dtype(f"u{size}")
    rows, columns = x.shape[-2:]
    k_len = out.shape[-1]
    result = empty(out.nbytes // size, word)
    sizes = out.size // (rows * k_len), rows, columns, k_len
    source = upload(x.reshape(-1).view(word))
    shift_flat(source, result, sizes, (rows * columns, columns), out.itemsize, variant)
    download(result, out.reshape(-1).view(word))
