r"""Buckets of distances, as a formula: what T5's relatives share.

`relpos_np._contract.index_maps` decides the same in another way.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.types import Array, Int64

Rounding: TypeAlias = Literal["exact", "float32"]
ROUNDING = get_args(Rounding)
T5Rounding: TypeAlias = Literal["exact", "float32", "flaxformer"]
T5_ROUNDING = get_args(T5Rounding)


def t5_bucket(
    relative_position: Int64,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    rounding: T5Rounding = "exact",
) -> Int64:
    r"""Bucket of each relative position d = j - i.

    With B buckets per direction (half of `num_buckets` if bidirectional), E = B // 2 of them exact,
    n the distance and D the largest distance that is told apart,

    .. math::

        b(n) = \begin{cases} n & n < E \\
        \min\left(B - 1,\; E + \left\lfloor \frac{\ln (n/E)}{\ln (D/E)} (B - E) \right\rfloor\right) & n \ge E
        \end{cases}

    Bidirectional: n = \|d\|, and positions after the query (d > 0) use the second half of the table.
    Otherwise n = max(-d, 0): all later positions share bucket 0.

    Parameters
    ----------
    relative_position : ndarray of int
        Positions of keys less positions of queries, any shape.
    num_buckets : int
        Rows of the table.
    max_distance : int
        Distances from here on share the last bucket.
    bidirectional : bool
        Encoder (True) or decoder self-attention (False).
    rounding : {"exact", "float32", "flaxformer"}
        "exact" decides the floor in integers. "float32" repeats the steps of published code: a
        float32 logarithm, divided by the rounded constant. The two can differ where (n/E)**(B-E) is close to a power
        of D/E (not for 32 buckets and distance 128). At such a border the last bit of a logarithm decides, which
        NumPy, PyTorch and each processor's library compute for themselves: with PyTorch a few in a million distances
        may still differ. Code that multiplies by a reciprocal rounds differently again.
        "flaxformer" has the float32 logarithm of n/E + eps with the eps of float32, and goes on in float64, as its
        authors' code does under NumPy 2 (under NumPy 1 it stayed in float32).

    Returns
    -------
    ndarray of int64
        Buckets in 0 ... num_buckets - 1.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", JMLR 2020.
    """
    d = check.integers("relative_position", relative_position).astype(np.int64)
    buckets = num_buckets // 2 if bidirectional else num_buckets
    exact = buckets // 2
    if exact < 1:
        raise RelposValueError(f"num_buckets: {num_buckets} leaves no distance a bucket of its own")
    _exceeds("max_distance", max_distance, exact)
    distance = np.abs(d) if bidirectional else np.maximum(-d, 0)
    far = np.clip(distance, exact, max_distance)
    wide = buckets - exact
    if rounding == "flaxformer":
        ratio = far.astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
        steps = (np.log(ratio).astype(np.float64) / math.log(max_distance / exact) * wide).astype(np.int64)
    elif rounding == "float32":
        ratio = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
        steps = (ratio * np.float32(wide)).astype(np.int64)
    else:
        steps = _steps(far, wide, exact, max_distance)
    bucket = np.where(distance < exact, distance, np.minimum(buckets - 1, exact + steps))
    return bucket + np.where(d > 0, buckets, 0) if bidirectional else bucket


def _steps(far: Int64, wide: int, exact: int, max_distance: int) -> Int64:
    """The floor of the formula: the largest m with D^m E^(B-E-m) <= n^(B-E)."""
    x = wide * np.log1p((far - exact) / exact) / math.log(max_distance / exact)
    steps = np.array(np.round(x), np.int64)
    # Float64 is sure of the floor but for an x beside an integer.
    sure = np.abs(x - steps) > 1e-9 * (1 + x)
    for n in np.unique(far[~sure]):
        m = int(steps[far == n][0])
        if max_distance**m * exact ** (wide - m) > int(n) ** wide:
            steps[far == n] -= 1
    return np.where(sure, np.floor(x).astype(np.int64), steps)


def _exceeds(name: str, max_distance: int, exact: int) -> None:
    if max_distance <= exact:
        raise RelposValueError(f"{name}: {max_distance} must exceed the {exact} distances with a bucket of their own")


def bucket_table(
    name: str, value: Any, max_distance: int, distance_name: str = "max_distance", *, bidirectional: bool = True
) -> Array:
    """A checked, read-only table of buckets; distances from `max_distance` on share the last bucket.

    Half of the buckets are for positions after the query if `bidirectional`. Errors call the arguments `name` and
    `distance_name`; one is raised if it is no table of floats, or if number and distance leave no valid border.
    """
    table = check.table(name, value, "num_buckets heads")
    if bidirectional and (len(table) % 2 or len(table) < 4):
        raise RelposValueError(f"{name}: expected an even number of buckets from 4 on, found shape {table.shape}")
    if len(table) < 2:
        raise RelposValueError(f"{name}: expected at least 2 buckets, found shape {table.shape}")
    exact = len(table) // (4 if bidirectional else 2)
    _exceeds(distance_name, max_distance, exact)
    return table
