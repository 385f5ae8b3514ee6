"""rel_shift as a parallel copy: each row of the result is read from one or two runs of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from relpos_np.kernels._numba.jit import announce, helper, kernel

Array = NDArray[Any]

# Results below this many bytes are copied by the calling thread alone.
SERIAL_BYTES = 1 << 18


@helper
def shift_row(x: Any, out: Any, row: int, rows: int, columns: int, k_len: int, wrapped: bool) -> None:
    """Write row `row` (over all matrices) of the result."""
    i = row % rows
    source, target = x[row], out[row]
    if not wrapped:
        start = columns - k_len - i
        for j in range(k_len):
            target[j] = source[start + j]
        return
    # Transformer-XL: the row's own products, a zero, and the start of the next row's.
    own = columns - rows + 1 + i
    for j in range(own):
        target[j] = source[rows - 1 - i + j]
    if own < columns:
        target[own] = 0
        following = x[row + 1]
        for j in range(own + 1, columns):
            target[j] = following[j - own - 1]


@kernel()
def shift_serial(x: Any, out: Any, rows: int, wrapped: bool) -> None:
    """All rows on the calling thread."""
    for row in range(out.shape[0]):
        shift_row(x, out, row, rows, x.shape[1], out.shape[1], wrapped)


@kernel(parallel=True)
def shift_parallel(x: Any, out: Any, rows: int, wrapped: bool) -> None:
    """All rows on all threads."""
    for row in numba.prange(out.shape[0]):
        shift_row(x, out, np.int64(row), rows, x.shape[1], out.shape[1], wrapped)


def rel_shift(x: Array, out: Array, variant: str, threads: int, guarded: Callable[[Any, tuple[Any, ...]], None]) -> None:
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows.

    Elements are moved as integers of their size, so that any dtype shares these kernels; `guarded` runs a parallel one.
    """
    rows, columns = x.shape[-2:]
    if not out.size:
        return
    flat = np.ascontiguousarray(x, out.dtype).reshape(-1, columns)
    target = out.reshape(-1, out.shape[-1])
    if out.itemsize <= 8:
        bits = np.dtype(f"u{out.itemsize}")
        flat, target = flat.view(bits), target.view(bits)
    arguments = flat, target, rows, variant in ("transformer_xl", "espnet_legacy")
    if threads == 1 or out.nbytes < SERIAL_BYTES:
        announce(shift_serial, arguments)
    else:
        guarded(shift_parallel, arguments)
