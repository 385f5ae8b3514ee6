r"""The record to which every scheme is lowered, and the only thing kernels know of positions.

.. math::

    s_{ij} = \sigma\, q_i \cdot k_j + \sum_t T_t[r_t(i,j)] + \sum_t q^{(t)}_i \cdot W_t[r_t(i,j)]
             + \sum_t k^{(t)}_j \cdot W_t[r_t(i,j)] + \sum_t B^{(t)}_{ij}

    o_i = \sum_j p_{ij} v_j + \sum_t \sum_j p_{ij} W_t[r_t(i,j)]

An index map r gives a row of a table for each pair of query i and key j, or -1: no contribution.
B is for what no table can say, because every pair has a number of its own; it costs memory of L_q L_k.
Only the content product is scaled here; a scheme whose formula scales more does so in its `lower`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relpos_np.errors import RelposIndexError, RelposValueError
from relpos_np.types import Array, Int32


@dataclass(frozen=True, eq=False)
class Toeplitz:
    """An index map that depends on j - i alone: ``r(i, j) = lookup[j - i + L_q - 1]``.

    Parameters
    ----------
    lookup : ndarray of int32, shape (L_q + L_k - 1,)
        Row for each difference from -(L_q - 1) to L_k - 1, or -1.
    rows : int
        Rows of the table that is indexed.
    """

    lookup: Int32
    rows: int
    gaps: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", _check_range(self.lookup, self.rows))

    def dense(self, q_len: int, k_len: int) -> Int32:
        """The map as an array (L_q, L_k)."""
        index: Int32 = self.lookup[np.arange(k_len) - np.arange(q_len)[:, None] + q_len - 1]
        return index


@dataclass(frozen=True, eq=False)
class Dense:
    """An index map given pair by pair, for grids and windows or, with leading axes, per batch item.

    Parameters
    ----------
    index : ndarray of int32, shape (..., L_q, L_k)
        Row for each pair, or -1.
    rows : int
        Rows of the table that is indexed.
    """

    index: Int32
    rows: int
    gaps: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", _check_range(self.index, self.rows))

    def dense(self, q_len: int, k_len: int) -> Int32:
        """The map as an array (..., L_q, L_k)."""
        if self.index.shape[-2:] != (q_len, k_len):
            raise RelposValueError(f"index map: shape {self.index.shape} does not end in {(q_len, k_len)}")
        return self.index


IndexMap = Toeplitz | Dense


def _check_range(index: Int32, rows: int) -> bool:
    """Refuse indices outside [-1, rows); return whether there is a -1."""
    if index.size == 0:
        return False
    low, high = int(index.min()), int(index.max())
    if low < -1 or high >= rows:
        raise RelposIndexError(f"index map: entries span [{low}, {high}], the table has rows 0 ... {rows - 1}")
    return low < 0


@dataclass(slots=True, eq=False)
class TableTerm:
    """A scalar per head and row added to the scores: `table` (H or 1, rows)."""

    table: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class QueryTerm:
    """A product of a query-side vector (..., H, L_q, E) with a row of `weights` (H or 1, rows, E)."""

    query: Array
    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class KeyTerm:
    """A product of a key-side vector (..., H_kv, L_k, E) with a row of `weights` (H or 1, rows, E)."""

    key: Array
    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class ValueTerm:
    """A row of `weights` (H or 1, rows, D_v) added to each value."""

    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class Terms:
    """Everything that positions contribute to one call.

    `query` and `key`, where given, replace q and k in the content product; they may be longer than
    head_dim, as long as they agree, or still be to be turned (`turned.py`). Each of `biases` is broadcast to
    (..., H, L_q, L_k).
    """

    query: Any = None
    key: Any = None
    tables: tuple[TableTerm, ...] = ()
    queries: tuple[QueryTerm, ...] = ()
    keys: tuple[KeyTerm, ...] = ()
    values: tuple[ValueTerm, ...] = ()
    biases: tuple[Array, ...] = ()

    def __add__(self, other: Terms) -> Terms:
        """Both sets of terms; at most one may replace the content operands."""
        if (self.query is not None or self.key is not None) and (other.query is not None or other.key is not None):
            raise RelposValueError("position: two of the schemes change the content product and cannot be combined")
        return Terms(
            self.query if other.query is None else other.query,
            self.key if other.key is None else other.key,
            self.tables + other.tables,
            self.queries + other.queries,
            self.keys + other.keys,
            self.values + other.values,
            self.biases + other.biases,
        )


def of_batch(x: Array, inner: int, batch: tuple[slice, ...]) -> Array:
    """Some batch items of an array whose axes before the last `inner` ones broadcast to those of the batch."""
    lead = x.ndim - inner
    at = (slice(None) if n == 1 else s for n, s in zip(x.shape[:lead], batch[len(batch) - lead :], strict=True))
    return x[tuple(at)]


def cut_map(
    index: IndexMap, q_len: int, queries: slice, keys: slice, batch: tuple[slice, ...] = ()
) -> Toeplitz | Dense:
    """The map of some of q_len queries, some keys and some batch items."""
    if isinstance(index, Dense):
        return Dense(np.ascontiguousarray(of_batch(index.index, 2, batch)[..., queries, keys]), index.rows)
    count = queries.stop - queries.start + keys.stop - keys.start - 1
    first = keys.start - queries.stop + q_len
    return Toeplitz(index.lookup[first : first + max(count, 0)], index.rows)


def fit(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which its operand was broadcast, and over the heads that share one."""
    if x.ndim > len(shape):
        x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    for axis, size in enumerate(shape):
        if x.shape[axis] != size:
            # Consecutive heads share one; of an operand with a single entry, all do.
            x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]).sum(axis=axis + 1)
    return x


def by_row(sums: Array, index: Toeplitz) -> Array:
    """Sum what belongs to each relative position (..., L_q + L_k - 1, E) over those of a row: (..., rows, E)."""
    out = np.zeros((*sums.shape[:-2], index.rows, sums.shape[-1]), sums.dtype)
    given = index.lookup >= 0
    if np.bincount(index.lookup[given]).max(initial=0) <= 1:
        out[..., index.lookup[given], :] = sums[..., given, :]
        return out
    order = np.argsort(index.lookup, kind="stable")
    rows = index.lookup[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-2))
    totals = np.add.reduceat(sums[..., order, :], starts, axis=-2)
    # A position without a row has index -1.
    there = rows[starts] >= 0
    out[..., rows[starts[there]], :] = totals[..., there, :]
    return out


def nothing(terms: Terms, q: Array, k: Array, v: Array) -> tuple[Terms, Array]:
    """Gradients of a call without queries or without keys."""
    grads = Terms(
        query=np.zeros_like(q if terms.query is None else terms.query),
        key=np.zeros_like(k if terms.key is None else terms.key),
        tables=tuple(TableTerm(np.zeros_like(t.table), t.index) for t in terms.tables),
        queries=tuple(QueryTerm(np.zeros_like(t.query), np.zeros_like(t.weights), t.index) for t in terms.queries),
        keys=tuple(KeyTerm(np.zeros_like(t.key), np.zeros_like(t.weights), t.index) for t in terms.keys),
        values=tuple(ValueTerm(np.zeros_like(t.weights), t.index) for t in terms.values),
        biases=tuple(np.zeros_like(bias) for bias in terms.biases),
    )
    return grads, np.zeros_like(v)
