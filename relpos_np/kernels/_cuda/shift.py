"""rel_shift on the device: each row of the result is one run of the input, or two around a zero."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.device import download, empty, jit, launch, upload
from relpos_np.kernels._cuda.operand import Operand
from relpos_np.types import Array

THREADS = 64
# Independent loads of a thread before it stores any.
LOADS = 4


@cache
def _shift(size: int) -> Any:
    """The kernel for elements made of words of `size` bytes."""
    kind = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[size]

    @jit()
    def kernel(x, out, rows, columns, k_len, unit, wrapped):  # type: ignore[no-untyped-def]
        words = cuda.local.array(LOADS, kind)
        row = cuda.blockIdx.x
        i = row % rows
        count = k_len * unit
        # The first word of the row's own run, and how many there are.
        start = (row * columns + columns - k_len - i) * unit
        own = count
        if wrapped:
            start = (row * columns + rows - 1 - i) * unit
            own = (columns - rows + 1 + i) * unit
        base = cuda.threadIdx.x
        while base < count:
            for n in range(LOADS):
                at = base + n * THREADS
                words[n] = 0
                if at < own:
                    words[n] = x[start + at]
                elif own + unit <= at < count:
                    # Behind the zero: the start of the next row.
                    words[n] = x[(row + 1) * columns * unit + at - own - unit]
            for n in range(LOADS):
                at = base + n * THREADS
                if at < count:
                    out[row * count + at] = words[n]
            base += LOADS * THREADS

    return kernel


def rel_shift(x: Array | Operand, out: Array | Operand, variant: str) -> None:
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; any dtype, both on the same side."""
    if not out.size:
        return
    size = next(n for n in (8, 4, 2, 1) if out.itemsize % n == 0)
    word = np.dtype(f"u{size}")
    if isinstance(out, Operand):
        source, result = x.contiguous().flat.view(word), out.flat.view(word)  # type: ignore[union-attr]
    else:
        source = upload(np.ascontiguousarray(x, out.dtype).reshape(-1).view(word))
        result = empty(out.nbytes // size, word)
    rows, columns = x.shape[-2:]
    k_len = out.shape[-1]
    launch(
        _shift(size),
        *(out.size // k_len, THREADS, source, result),
        *(rows, columns, k_len, out.itemsize // size, variant in ("transformer_xl", "espnet_legacy")),
    )
    if not isinstance(out, Operand):
        download(result, out.reshape(-1).view(word))
