"""What kernels work on: a head of a batch item, tiles of its scores, and the units that these are measured in."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from relpos_np.kernels._numba.build import helper
from relpos_np.kernels._numba.records import BATCH_K, BATCH_MASK, BATCH_Q, BATCH_V
from relpos_np.kernels._numba.rows import at, get, pointer_like
from relpos_np.kernels._numba.target import TARGET

SCORE_ROWS, PANEL_VECTORS = TARGET.score_rows, TARGET.score_vectors
MINUS_INFINITY = -math.inf
LOG2 = math.log(2.0)
LOG2E = 1.0 / LOG2


# Tuples of compiled functions: pointers among their fields have no type in Python.
# Numbers of a batch item and of a head, where the head's operands begin, and the offset of the item's mask.
Head = namedtuple("Head", "b h q k v bias mask")  # noqa: PYI024
# Scores of `rows` queries from i0 on and `cols` keys from j0 on, in the workspace's rows from `first` on.
Tile = namedtuple("Tile", "i0 rows j0 cols first")  # noqa: PYI024


@helper
def head_of(p: Any, batches: Any, base: Any, keys: Any, values: Any, b: int, h: int) -> Head:
    """A head of a batch item; `keys` and `values` may be of another type than `base`."""
    return Head(
        b,
        h,
        at(pointer_like(base, p.q), get(batches, BATCH_Q * p.count + b) + h * p.q_head),
        at(keys, get(batches, BATCH_K * p.count + b) + h // p.k_group * p.k_head),
        at(values, get(batches, BATCH_V * p.count + b) + h // p.v_group * p.v_head),
        at(pointer_like(base, p.bias), h * p.bias_head),
        get(batches, BATCH_MASK * p.count + b),
    )


@helper
def round_up(n: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below n."""
    return (n + unit - 1) // unit * unit
