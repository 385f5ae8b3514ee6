"""What kernels work on: a head of a batch item, tiles of its scores, and the units that these are measured in."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np

from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.records import BATCH_GRAD, BATCH_INNER, BATCH_K, BATCH_MASK, BATCH_Q, BATCH_V
from relpos_np.kernels._numba.simd.rows import at, get, lanes_of, pointer_like
from relpos_np.kernels._numba.simd.target import NARROW, PAIR_STEPS, TARGET

SCORE_ROWS, PANEL_VECTORS, VECTOR_BYTES = TARGET.score_rows, TARGET.score_vectors, TARGET.vector_bytes
MINUS_INFINITY = -math.inf
LOG2 = math.log(2.0)
LOG2E = 1.0 / LOG2
# The least that a mask counts as, in float32 and float64: multiplied by LOG2E it is no infinity, nor with a score.
_LEAST = tuple(-float(np.finfo(name).max) * LOG2 * (1 - 2.0**-10) for name in ("float32", "float64"))
# Scores in units of log 2 up to this have room for whatever is added to them; and where a call learns that it has had
# rows without a weight, or with larger scores.
_END = tuple(float(np.finfo(name).max) / 4 for name in ("float32", "float64"))
NONE, MANY = range(2)


# How an operand is stored: in the dtype of the computation, or in half precision. DELTA: of a result only the product
# of each row with that of its gradient. CODE: in eight bits, which the kernel knows the format of.
OWN, HALF, BRAIN, DELTA, CODE = range(5)

# Tuples of compiled functions: pointers among their fields have no type in Python.
# Numbers of a batch item and of a head, the addresses of the head's operands and of its output's gradient, its bias,
# the offset of its mask, the addresses of what its queries and keys are turned by, and the offset of its bias within a
# cap.
Head = namedtuple("Head", "b h q k v grad bias mask q_turn k_turn inner")  # noqa: PYI024
# Scores of `rows` queries from i0 on and `cols` keys from j0 on, in the workspace's rows from `first` on.
Tile = namedtuple("Tile", "i0 rows j0 cols first")  # noqa: PYI024


@helper
def size_of(like: Any, kind: int) -> int:
    """Bytes of an element of an operand that is stored in one of these ways."""
    if kind == CODE:
        return 1
    return 2 if kind in (HALF, BRAIN) else VECTOR_BYTES // lanes_of(like)


@helper
def least_mask(like: Any) -> float:
    """What numbers of a mask below it are taken for: only its -inf excludes."""
    return _LEAST[0] if size_of(like, OWN) == 4 else _LEAST[1]


@helper
def end_of(like: Any) -> float:
    """Scores below it are far enough from the largest number."""
    return _END[0] if size_of(like, OWN) == 4 else _END[1]


@helper
def head_of(p: Any, batches: Any, base: Any, b: int, h: int) -> Head:
    """A head of a batch item."""
    q = get(batches, BATCH_Q * p.count + b) + h * p.q_head
    k = get(batches, BATCH_K * p.count + b) + h // p.k_group * p.k_head
    v = get(batches, BATCH_V * p.count + b) + h // p.v_group * p.v_head
    grad = get(batches, BATCH_GRAD * p.count + b) + h * p.grad_head
    own = size_of(base, OWN)
    return Head(
        b,
        h,
        p.q + q * size_of(base, p.q_kind),
        p.k + k * size_of(base, p.k_kind),
        p.v + v * size_of(base, p.v_kind),
        p.grad_out + grad * size_of(base, p.grad_kind),
        at(pointer_like(base, p.bias), h * p.bias_head),
        get(batches, BATCH_MASK * p.count + b),
        p.q_turn + (b * p.q_turn_batch + h * p.q_turn_head) * own,
        p.k_turn + (b * p.k_turn_batch + h // p.k_group * p.k_turn_head) * own,
        get(batches, BATCH_INNER * p.count + b) + h * p.inner_head,
    )


@helper
def whole_columns(cols: int, lanes: int) -> int:
    """Columns of scores that are made for so many keys: whole panels, of which the last may be narrower."""
    left = cols % (PANEL_VECTORS * lanes)
    if left == 0:
        return cols
    for vectors in NARROW:
        if left <= vectors * lanes:
            return cols - left + vectors * lanes
    return cols - left + PANEL_VECTORS * lanes


@helper
def pair_steps(depth: int) -> int:
    """Elements of a row of so many channels, each a pair of bfloat16: whole steps of a product."""
    return (depth + 2 * PAIR_STEPS - 1) // (2 * PAIR_STEPS) * PAIR_STEPS


@helper
def round_up(n: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below n."""
    return (n + unit - 1) // unit * unit
