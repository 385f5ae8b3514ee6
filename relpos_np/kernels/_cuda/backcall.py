"""The sizes of the backward kernels' blocks, and how these kernels go about it.

Both make a tile's scores anew, from them the probabilities p and, with the gradients of the probabilities, those of
the scores, ds = p * (dp - delta). A block looks after a tile of queries, or of keys, and goes over all keys, or
queries, in their order; every sum belongs to one thread and is taken in a fixed order, so that results do not depend
on scheduling. No atomics. If there are more channels than a block's threads can hold, several blocks make some each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.attend import width_of
from relpos_np.kernels._cuda.device import simulated
from relpos_np.kernels._cuda.tile import OWN_SIZE, STARTS, Tiling

# Static shared memory that every device has for a block.
SHARED = 48 * 1024


def query_side(dtype: np.dtype[Any], depth: int, skewed: bool = False) -> tuple[Tiling, int]:
    """Sizes of a block that makes gradients of queries, and how many of their channels it makes."""
    width = width_of(depth)
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128 if width == 128 or skewed else 64, 32 if dtype.itemsize == 8 else 64), width


def key_side(dtype: np.dtype[Any], depth: int, v_dim: int) -> tuple[Tiling, int]:
    """The same for the gradients of keys and values, whose fragments are in registers at the same time."""
    width = width_of(max(depth, v_dim))
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128, 32 if dtype.itemsize == 8 else 64), width


def fits(tiling: Tiling, *shapes: tuple[int, ...]) -> None:
    """Make sure that shared arrays fit."""
    size = sum(math.prod(shape) for shape in shapes) * tiling.dtype.itemsize + 8 * (2 * STARTS + OWN_SIZE)
    assert size <= SHARED, f"a block needs {size} bytes of shared memory"
