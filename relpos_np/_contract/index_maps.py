"""Index maps in exact integer arithmetic: which table row belongs to a query and a key.

Relative position d = j - (i + offset): negative for keys in the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, takewhile
from math import inf, prod

import numpy as np

from relpos_np._contract.borders import borders
from relpos_np._contract.terms import Dense, Toeplitz
from relpos_np.types import Int64


def relative_positions(q_len: int, k_len: int, offset: int) -> Int64:
    """Relative positions in the order of a Toeplitz lookup: shape (L_q + L_k - 1,)."""
    return np.arange(1 - q_len, k_len, dtype=np.int64) - offset if q_len and k_len else np.empty(0, np.int64)


def _toeplitz(lookup: Int64, rows: int) -> Toeplitz:
    table = lookup.astype(np.int32)
    table.flags.writeable = False
    return Toeplitz(table, rows)


@lru_cache(maxsize=64)
def clip_map(q_len: int, k_len: int, offset: int, k: int, outside: str, right: int | None = None) -> Toeplitz:
    """Shaw's map: d + k within [-k, right], by default [-k, k]; beyond, the outermost row ("clip") or none ("zero")."""
    d = relative_positions(q_len, k_len, offset)
    right = k if right is None else right
    inside = np.clip(d, -k, right) + k
    return _toeplitz(inside if outside == "clip" else np.where((d >= -k) & (d <= right), inside, -1), k + right + 1)


@lru_cache(maxsize=64)
def reached_rows(q_len: int, k_len: int, offset: int, k: int, outside: str, right: int) -> tuple[slice, Toeplitz]:
    """Which rows of a table some pair of `clip_map` has, one at least, and the map into these."""
    index = clip_map(q_len, k_len, offset, k, outside, right)
    rows = index.lookup[index.lookup >= 0]
    first, last = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    return slice(first, last + 1), _toeplitz(np.maximum(index.lookup - first, -1), last + 1 - first)


@lru_cache(maxsize=64)
def difference_map(q_len: int, k_len: int) -> Toeplitz:
    """A row of its own for each relative position, in the order of `relative_positions`."""
    rows = q_len + k_len - 1 if q_len and k_len else 0
    return _toeplitz(np.arange(rows), rows)


@lru_cache(maxsize=64)
def distance_map(q_len: int, k_len: int, offset: int, first: int, rows: int, furthest: int) -> Toeplitz:
    """Row ``first + d`` for d <= furthest, where it exists: rows that are stored by descending distance i - j."""
    d = relative_positions(q_len, k_len, offset)
    row = d + first
    return _toeplitz(np.where((d <= furthest) & (row >= 0) & (row < rows), row, -1), rows)


@lru_cache(maxsize=64)
def wrapped_map(q_len: int, k_len: int, offset: int, rows: int, first: int = 2) -> Toeplitz:
    """Row ``d - first`` for d >= first: where Transformer-XL's shift runs on into the next query's products."""
    row = relative_positions(q_len, k_len, offset) - first
    return _toeplitz(np.where((row >= 0) & (row < rows), row, -1), rows)


@lru_cache(maxsize=256)
def t5_thresholds(num_buckets: int, max_distance: int, furthest: float = inf) -> Int64:
    """Smallest distance of each bucket from 1 on, for one direction of `num_buckets` buckets, up to the furthest.

    With E = num_buckets // 2 and B = num_buckets - E, bucket E + m starts at the smallest n with
    ln(n/E) / ln(max_distance/E) * B >= m, that is n >= E (max_distance/E)**(m/B).
    """
    exact = num_buckets // 2
    wide = num_buckets - exact
    further = islice(borders(exact, max_distance, wide, up=True), wide - 1)
    return np.asarray([*range(1, exact + 1), *takewhile(lambda n: n <= furthest, further)], dtype=np.int64)


def t5_float32_buckets(distance: Int64, num_buckets: int, max_distance: int, rounding: str = "float32") -> Int64:
    """Buckets of distances >= 0 in one direction, in the arithmetic of published code."""
    exact = num_buckets // 2
    # A distance of 0 lies in the exact half; 1 stands in for it so that no log of 0 is taken.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    kind: type[np.float32 | np.float64] = np.float32
    if rounding == "flaxformer":
        ratio, kind = ratio + np.finfo(np.float32).eps, np.float64
    scaled = np.log(ratio).astype(kind) / kind(np.log(max_distance / exact)) * kind(num_buckets - exact)
    large = np.minimum(exact + np.maximum(scaled, 0).astype(np.int64), num_buckets - 1)
    return np.where(distance < exact, distance, large)


@lru_cache(maxsize=64)
def t5_map(
    q_len: int, k_len: int, offset: int, num_buckets: int, max_distance: int, bidirectional: bool, rounding: str
) -> Toeplitz:
    """T5's buckets of d, either direction its own half or the past only."""
    d = relative_positions(q_len, k_len, offset)
    side = num_buckets // 2 if bidirectional else num_buckets
    distance = np.abs(d) if bidirectional else np.maximum(-d, 0)
    if rounding != "exact":
        bucket = t5_float32_buckets(distance, side, max_distance, rounding)
    else:
        starts = t5_thresholds(side, max_distance, _furthest(distance))
        bucket = np.searchsorted(starts, distance, side="right")
    return _toeplitz(bucket + (side * (d > 0) if bidirectional else 0), num_buckets)


def grid_map(query: Sequence[Int64], key: Sequence[Int64], extent: Sequence[int]) -> Dense:
    """Map of a window: tokens on the grid product of `query` coordinates against that of `key` coordinates.

    Row: sum over axes of (coordinate_q - coordinate_k + extent - 1) * stride, axes in row-major order
    with sizes 2 * extent - 1. Coordinates must differ by less than the extent, which callers check.
    """
    q_len, k_len = prod(len(c) for c in query), prod(len(c) for c in key)
    total = np.zeros((1, 1), dtype=np.int64)
    for q, k, size in zip(query, key, extent, strict=True):
        axis = q[:, None] - k[None, :] + (size - 1)
        # Each axis refines the grid: (Q, K) becomes (Q, q, K, k) and is flattened again.
        total = (total * (2 * size - 1))[:, None, :, None] + axis[None, :, None, :]
        total = total.reshape(total.shape[0] * total.shape[1], -1)
    index = np.ascontiguousarray(total.reshape(q_len, k_len), dtype=np.int32)
    index.flags.writeable = False
    return Dense(index, prod(2 * size - 1 for size in extent))


def bucket_rows(d: Int64, num_buckets: int, max_distance: int, rounding: str) -> Dense:
    """T5's buckets in both directions of relative positions given pair by pair: (..., L_q, L_k)."""
    # Twice the largest distance is in the last bucket however the border is rounded, and so is all beyond.
    last = 2 * max_distance
    near = 2 * last < d.size
    at = np.arange(-last, last + 1) if near else d
    distance, side = np.abs(at), num_buckets // 2
    if rounding == "float32":
        row = t5_float32_buckets(distance, side, max_distance)
    else:
        starts = t5_thresholds(side, max_distance, _furthest(distance))
        row = np.searchsorted(starts, distance, side="right")
    index = (row + side * (at > 0)).astype(np.int32)
    if near:
        index = index[np.clip(d, -last, last) + last]
    index = np.ascontiguousarray(index)
    index.flags.writeable = False
    return Dense(index, num_buckets)


@lru_cache(maxsize=256)
def deberta_thresholds(span: int, max_position: int, furthest: float = inf) -> Int64:
    """Largest distance of each logarithmic bucket of DeBERTa v2, but for the last, beyond the middle M = span // 2.

    Bucket M + m ends at the largest n with ln(n/M) / ln((max_position-1)/M) * (M-1) <= m. Those from the furthest
    distance on are left out.
    """
    middle = span // 2
    ends = islice(borders(middle, max_position - 1, middle - 1, up=False), span - middle - 1)
    return np.asarray([*takewhile(lambda n: n < furthest, ends)], dtype=np.int64)


def _furthest(distance: Int64) -> int:
    """The largest distance, or up to twice as much: so that a call of one more token asks for the same borders."""
    return max(1 << int(distance.max(initial=0)).bit_length(), 1024)


@lru_cache(maxsize=64)
def deberta_map(
    q_len: int, k_len: int, offset: int, span: int, max_position: int | None, clamped: bool, from_query: bool
) -> Toeplitz:
    """DeBERTa's rows: bucket of -d (from the query), or of d, plus span, within 2 span rows."""
    delta = relative_positions(q_len, k_len, offset)
    delta = -delta if from_query else delta
    if max_position is not None:
        if clamped:
            delta = np.clip(delta, 1 - max_position, max_position - 1)
        middle, n = span // 2, np.abs(delta)
        ends = deberta_thresholds(span, max_position, _furthest(n))
        far = middle + 1 + np.searchsorted(ends, n, side="left")
        delta = np.where(n <= middle, delta, np.sign(delta) * far)
    return _toeplitz(np.clip(delta, -span, span - 1) + span, 2 * span)
