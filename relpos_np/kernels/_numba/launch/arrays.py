"""How arrays lie in memory, for the records of kernels."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from relpos_np.types import Array

_pointer = ctypes.c_void_p.from_address
# Where NumPy's C interface has an array's data: behind what every object begins with.
_DATA = object.__basicsize__


def address_of(x: Array) -> int:
    """Address of the first element; `x.ctypes.data` says the same in eight times the time."""
    return _pointer(id(x) + _DATA).value or 0


def strides(x: Array) -> list[int]:
    """Strides in elements."""
    return [s // x.itemsize for s in x.strides]


def rowwise(x: Array) -> Array:
    """The array itself if the elements of a row are adjacent, else a copy."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """The array itself if it has the shape, else what `np.broadcast_to` makes of it in 3 µs."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


def batch_offsets(x: Array, batch_axes: int) -> Array:
    """Element offset of every batch item, in C order."""
    if batch_axes == 1:
        return np.arange(x.shape[0], dtype=np.int64) * (x.strides[0] // x.itemsize)
    total = np.zeros(1, np.int64)
    for size, stride in zip(x.shape[:batch_axes], strides(x)[:batch_axes], strict=True):
        if size != 1:
            total = (total[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return total


def batch_step(x: Array, batch_axes: int) -> int | None:
    """Bytes from each batch item to the next, in C order; None if they are not the same throughout."""
    step, count = 0, 1
    for size, stride in zip(x.shape[batch_axes - 1 :: -1], x.strides[batch_axes - 1 :: -1], strict=True):
        if size == 1:
            continue
        if count == 1:
            step = stride
        elif stride != step * count:
            return None
        count *= size
    return step


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], fill: float | None) -> Array:
    """A C-contiguous array that begins on a cache line, so that vector loads do not straddle two."""
    size = math.prod(shape)
    raw = np.empty(size + 64 // dtype.itemsize, dtype)
    start = (-address_of(raw) % 64) // dtype.itemsize
    x = raw[start : start + size].reshape(shape)
    if fill is not None:
        x.fill(fill)
    return x
