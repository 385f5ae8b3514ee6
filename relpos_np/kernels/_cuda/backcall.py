"""What both backward kernels need to know of a call, the sizes of their blocks, and what these share.

Both make a tile's scores anew, from them the probabilities p and, with the gradients of the probabilities, those of
the scores, ds = p * (dp - delta). A block looks after a tile of queries, or of keys, and goes over all keys, or
queries, in their order; every sum belongs to one thread and is taken in a fixed order, so that results do not depend
on scheduling. No atomics. If there are more channels than a block's threads can hold, several blocks make some each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from relpos_np.kernels._cuda.attend import width_of
from relpos_np.kernels._cuda.device import simulated
from relpos_np.kernels._cuda.tile import Tiling

# What threads of a block read from shared memory, since registers are scarce: where queries, keys and values start
# and their steps per row, the first query of the head, the first query (or key) of the block, batch item and head.
STARTS = 10
Q_AT, K_AT, V_AT, Q_ROW, K_ROW, V_ROW, LINE_AT, OWN_AT, BATCH, HEAD = range(STARTS)
# Static shared memory that every device has for a block.
SHARED = 48 * 1024


class Back(NamedTuple):
    """The integers that the backward pass has beside those of the call.

    Sums over the pairs that read a row of a table ("bins"): where their terms are described, as value terms are, how
    many there are, where in `work` the bins start, and how many there are for each query (or key). Starts of -1:
    there is none.
    """

    queries: int
    n_queries: int
    query_bins: int
    n_query_bins: int
    keys: int
    n_keys: int
    key_bins: int
    n_key_bins: int
    # Those of tables on index maps by pair are for some blocks at a time.
    tables: int
    n_tables: int
    table_bins: int
    n_table_bins: int
    value_bins: int
    # What value terms add to the gradients of probabilities, described as summands of the scores are.
    lifted: int
    n_lifted: int
    # Sums over diagonals, for some blocks at a time, and the gradients of the scores themselves.
    diagonals: int
    pairs: int
    # Of products that are made tile by tile, the gradients of their vectors, for one term after the other, and those
    # of their rows by relative position, for some blocks at a time; all channels of these terms, and all queries.
    skew_vectors: int
    skew_rows: int
    skew_width: int
    lines: int


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
    size = sum(math.prod(shape) for shape in shapes) * tiling.dtype.itemsize + 8 * STARTS
    assert size <= SHARED, f"a block needs {size} bytes of shared memory"
