"""How the two backward kernels work, and the sizes of their blocks.

Both recompute the scores of a tile, the probabilities p and the gradients of the scores, ds = p * (dp - delta). A
block has a tile of queries, or of keys, and goes over all keys, or queries, in order. Every sum belongs to one thread
and is taken in a fixed order, without atomics, so that results do not depend on scheduling. If there are more
channels than the threads of a block can hold, several blocks share them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.forward_pass.attend import width_of
from relpos_np.kernels._cuda.launch.device import simulated
from relpos_np.kernels._cuda.simd.tile import OWN_SIZE, STARTS, Tiling

# Static shared memory that every device has for a block.
SHARED = 48 * 1024


def query_side(dtype: np.dtype[Any], depth: int, crowded: bool = False) -> tuple[Tiling, int]:
    """Sizes of a block that makes gradients of queries, and how many of their channels it makes.

    `crowded` if its threads hold more than scores and gradients: products by position, or the slopes of a cap.
    """
    width = width_of(depth)
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128 if width == 128 or crowded else 64, 32 if dtype.itemsize == 8 else 64), width


def key_side(dtype: np.dtype[Any], depth: int, v_dim: int) -> tuple[Tiling, int]:
    """The same for gradients of keys and values, both of which are in registers at once."""
    width = width_of(max(depth, v_dim))
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128, 32 if dtype.itemsize == 8 else 64), width


def fits(tiling: Tiling, *shapes: tuple[int, ...]) -> None:
    """Check that shared arrays fit."""
    size = sum(math.prod(shape) for shape in shapes) * tiling.dtype.itemsize + 8 * (2 * STARTS + OWN_SIZE)
    assert size <= SHARED, f"a block needs {size} bytes of shared memory"
