r"""The record to which every scheme is lowered, and the only thing kernels know of positions.

.. math::

    s_{ij} = \sigma\, q_i \cdot k_j + \sum_t T_t[r_t(i,j)] + \sum_t q^{(t)}_i \cdot W_t[r_t(i,j)]
             + \sum_t k^{(t)}_j \cdot W_t[r_t(i,j)] + \sum_t B^{(t)}_{ij}

    o_i = \sum_j p_{ij} v_j + \sum_t \sum_j p_{ij} W_t[r_t(i,j)]

An index map r gives a row of a table for each pair of query i and key j, or -1: no contribution.
B is for what no table can say, because every pair has a number of its own; it costs memory of L_q L_k. Values may turn
before they are summed, and the output back after it: see `ValueTurn`.
Only the content product is scaled here; a scheme whose formula scales more does so in its `lower`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relpos_np._contract.counted import CountedBias
from relpos_np._contract.turned import Turned, paired_channels, turn_channels
from relpos_np.errors import RelposIndexError, RelposTypeError, RelposValueError
from relpos_np.types import Array, Int32


@dataclass(frozen=True, eq=False)
class Toeplitz:
    """An index map that depends on j - i alone: ``r(i, j) = lookup[j - i + L_q - 1]``.

    Parameters
    ----------
    lookup : ndarray of int, shape (L_q + L_k - 1,)
        Row for each difference from -(L_q - 1) to L_k - 1, or -1; kept as int32.
    rows : int
        Rows of the table that is indexed.
    """

    lookup: Int32
    rows: int
    gaps: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", check_rows(self.lookup, self.rows))
        object.__setattr__(self, "lookup", self.lookup.astype(np.int32, copy=False))

    def dense(self, q_len: int, k_len: int) -> Int32:
        """The map, pair by pair.

        Parameters
        ----------
        q_len, k_len : int
            Queries and keys of the call.

        Returns
        -------
        ndarray of int32, shape (L_q, L_k)
            Row of each pair, or -1.
        """
        index: Int32 = self.lookup[np.arange(k_len) - np.arange(q_len)[:, None] + q_len - 1]
        return index


@dataclass(frozen=True, eq=False)
class Dense:
    """An index map given pair by pair, for grids and windows or, with leading axes, per batch item.

    Parameters
    ----------
    index : ndarray of int, shape (..., L_q, L_k)
        Row for each pair, or -1; kept as int32.
    rows : int
        Rows of the table that is indexed.
    """

    index: Int32
    rows: int
    gaps: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gaps", check_rows(self.index, self.rows))
        object.__setattr__(self, "index", self.index.astype(np.int32, copy=False))

    def dense(self, q_len: int, k_len: int) -> Int32:
        """The map, pair by pair.

        Parameters
        ----------
        q_len, k_len : int
            Queries and keys of the call.

        Returns
        -------
        ndarray of int32, shape (..., L_q, L_k)
            Row of each pair, or -1.
        """
        if self.shape[-2:] != (q_len, k_len):
            raise RelposValueError(f"index map: shape {self.shape} does not end in {(q_len, k_len)}")
        return self.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the map, (..., L_q, L_k)."""
        found: tuple[int, ...] = self.index.shape
        return found

    def _cut(self, queries: slice, keys: slice, batch: tuple[slice, ...]) -> Dense:
        """The map of some queries, keys and batch items."""
        return Dense(np.ascontiguousarray(of_batch(self.index, 2, batch)[..., queries, keys]), self.rows)


IndexMap = Toeplitz | Dense


def check_rows(index: Any, rows: int) -> bool:
    """Refuse what is no index, and indices outside [-1, rows); return whether there is a -1."""
    if not isinstance(index, np.ndarray) or index.dtype.kind not in "iu":
        found = f"dtype {index.dtype}" if isinstance(index, np.ndarray) else type(index).__name__
        raise RelposTypeError(f"index map: expected an array of integers, found {found}")
    if index.size == 0:
        return False
    low, high = int(index.min()), int(index.max())
    if low < -1 or high >= rows:
        raise RelposIndexError(f"index map: entries span [{low}, {high}], the table has rows 0 ... {rows - 1}")
    return low < 0


@dataclass(slots=True, eq=False)
class TableTerm:
    """A scalar per head and row, added to the scores.

    Attributes
    ----------
    table : ndarray, shape (H or 1, rows)
        The scalars.
    index : Toeplitz or Dense
        Which row.
    """

    table: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class QueryTerm:
    """A product of a query-side vector with a row, added to the scores; the call's scale does not apply.

    Attributes
    ----------
    query : ndarray, shape (..., H, L_q, E)
        A vector per query, such as q itself.
    weights : ndarray, shape (H or 1, rows, E)
        The rows.
    index : Toeplitz or Dense
        Which row.
    """

    query: Array
    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class KeyTerm:
    """A product of a key-side vector with a row, added to the scores; the call's scale does not apply.

    Attributes
    ----------
    key : ndarray, shape (..., H_kv, L_k, E)
        A vector per key, such as k itself.
    weights : ndarray, shape (H or 1, rows, E)
        The rows.
    index : Toeplitz or Dense
        Which row.
    """

    key: Array
    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class ValueTerm:
    """A row added to each value.

    Attributes
    ----------
    weights : ndarray, shape (H or 1, rows, D_v)
        The rows.
    index : Toeplitz or Dense
        Which row.
    """

    weights: Array
    index: IndexMap


@dataclass(slots=True, eq=False)
class Change:
    """A change of all scores, which only an evaluation that holds them can make.

    Attributes
    ----------
    apply : callable
        Returns the scores (..., H, L_q, L_k) that it gets, before any mask, changed.
    slope : callable, optional
        From the same scores the derivative of each changed one by its own.
    """

    apply: Callable[[Array], Array]
    slope: Callable[[Array], Array] | None = None


@dataclass(slots=True, eq=False)
class ValueTurn:
    r"""Values whose pairs of channels turn before they are summed, and the output that turns back.

    With complex numbers :math:`\kappa_{j,p}` of keys and :math:`\chi_{i,p}` of queries, and the two channels of pair p
    as one complex number,

    .. math::

        o_{i,p} = \bar\chi_{i,p} \sum_j p_{ij}\, \kappa_{j,p}\, v_{j,p} .

    Attributes
    ----------
    key : tuple of two ndarray, shapes (..., H_kv or 1, L_k, P)
        Real and imaginary parts of the numbers of keys.
    query : tuple of two ndarray, shapes (..., H or 1, L_q, P)
        Those of the numbers of queries.
    layout : {"half", "interleaved"}
        Whether a pair are channels p and p + P, or 2p and 2p + 1.
    first : int
        The first channel that turns.
    blocks : int
        Number of equal parts of the 2P channels that turn, each laid out on its own.
    trained : bool
        Whether `Scheme.lift` wants the gradients of these numbers, which need the output once more.
    """

    key: tuple[Array, Array]
    query: tuple[Array, Array]
    layout: str = "half"
    first: int = 0
    blocks: int = 1
    trained: bool = False

    def of_values(self, v: Any) -> Any:
        """Turn values.

        Parameters
        ----------
        v : ndarray, shape (..., H_kv, L_k, D_v)
            Values; those that are on a device stay there.

        Returns
        -------
        ndarray
            In their shape.
        """
        return self._turned(v, self.key)

    def of_output(self, out: Any) -> Any:
        """Turn an output back.

        Parameters
        ----------
        out : ndarray, shape (..., H, L_q, D_v)
            Sums of turned values.

        Returns
        -------
        ndarray
            In its shape.
        """
        return self._turned(out, self.query, back=True)

    def to_values(self, grad: Any) -> Any:
        """From the gradient of turned values to that of values.

        Parameters
        ----------
        grad : ndarray, shape (..., H_kv, L_k, D_v)
            Gradient of what `of_values` returns.

        Returns
        -------
        ndarray
            In its shape.
        """
        return self._turned(grad, self.key, back=True)

    def to_output(self, grad: Any) -> Any:
        """From the gradient of an output to that of what turned back to it.

        Parameters
        ----------
        grad : ndarray, shape (..., H, L_q, D_v)
            Gradient of what `of_output` returns.

        Returns
        -------
        ndarray
            In its shape.
        """
        return self._turned(grad, self.query)

    def sizes(self) -> ValueTurn:
        """The same with factors without signs.

        Of vectors without signs, the larger of a turn and its way back is the sum that a channel of what has turned
        consists of, without the signs of its parts.

        Returns
        -------
        ValueTurn
            For `relpos_np.testing`, which tolerates errors relative to these.
        """
        key, query = ((np.abs(real), np.abs(imaginary)) for real, imaginary in (self.key, self.query))
        return replace(self, key=key, query=query)

    def _turned(self, x: Any, factors: tuple[Array, Array], *, back: bool = False) -> Any:
        cos, sin = factors
        return turn_channels(x, cos, -sin if back else sin, self.layout, self.first, self.blocks)

    def gradient(self, v: Array, grad_v: Array, out: Array, grad_out: Array) -> ValueTurn:
        """Gradients of the factors.

        Parameters
        ----------
        v, grad_v : ndarray, shape (..., H_kv, L_k, D_v)
            Values, and the gradient of turned ones.
        out, grad_out : ndarray, shape (..., H, L_q, D_v)
            The output before it turned back, and the gradient of what has.

        Returns
        -------
        ValueTurn
            With gradients in place of factors, in float64.
        """
        at = paired_channels(self.key[0].shape[-1], self.layout, self.first, self.blocks)
        real, imaginary = _by_factor(v, grad_v, at)
        key = fit(real, self.key[0].shape), fit(imaginary, self.key[1].shape)
        # The output turns back: its factors are conjugates.
        real, imaginary = _by_factor(out, grad_out, at)
        query = fit(real, self.query[0].shape), fit(-imaginary, self.query[1].shape)
        return replace(self, key=key, query=query)


def _by_factor(x: Array, grad: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
    """Gradients of the real and imaginary parts of what multiplies pairs of x, from those of the products."""
    (a, b), (to_a, to_b) = ([y[..., channel].astype(np.float64) for channel in at] for y in (x, grad))

    def product(g: Array, y: Array) -> Array:
        return np.where(g == 0, 0.0, g * y)  # an excluded key may hold anything

    return product(to_a, a) + product(to_b, b), product(to_b, a) - product(to_a, b)


@dataclass(slots=True, eq=False)
class Terms:
    """Everything that positions contribute to one call; two records can be added.

    Attributes
    ----------
    query, key : ndarray, shapes (..., H, L_q, E) and (..., H_kv, L_k, E), optional
        Replace q and k in the content product; E may be more than head_dim. They may still be to be turned.
    tables : tuple of TableTerm
        Scalars that are looked up.
    queries : tuple of QueryTerm
        Products with queries.
    keys : tuple of KeyTerm
        Products with keys.
    values : tuple of ValueTerm
        Vectors added to values.
    biases : tuple of ndarray
        Numbers of pairs, with all axes of (..., H, L_q, L_k), any of which may have length 1. In calls of the CPU
        kernels some may be made for some queries at a time instead, from a record of what they are made of.
    changes : tuple of Change
        Made of the sum of everything else, one after the other; kernels refuse them.
    turn : ValueTurn, optional
        Of values, and back of the output, with what `values` adds to it.
    relative_error_ulps : float, optional
        For ``return_bound``: how many units of roundoff of the call's dtype a number in the terms may be off, relative
        to itself, or to the norm of the vector it belongs to; 0 for numbers that are handed on. None, if more is
        computed than that, or not in this dtype: bounds then hold for the terms as they are.
    """

    query: Any = None
    key: Any = None
    tables: tuple[TableTerm, ...] = ()
    queries: tuple[QueryTerm, ...] = ()
    keys: tuple[KeyTerm, ...] = ()
    values: tuple[ValueTerm, ...] = ()
    biases: tuple[Any, ...] = ()
    changes: tuple[Change, ...] = ()
    turn: ValueTurn | None = None
    relative_error_ulps: float | None = None

    def vectors(self) -> tuple[Any, ...]:
        """What may be made of the numbers in queries and keys, as `Scheme.vectors` has it.

        Returns
        -------
        tuple of ndarray
            `query` and `key`, where they are not None, then the `query` of each query term and the `key` of each key
            term.
        """
        own = [x for x in (self.query, self.key) if x is not None]
        return (*own, *[term.query for term in self.queries], *[term.key for term in self.keys])

    def __add__(self, other: Terms) -> Terms:
        """Both sets of terms; at most one may replace the content operands, and one turn values."""
        if (self.query is not None or self.key is not None) and (other.query is not None or other.key is not None):
            raise RelposValueError("position: two of the schemes change the content product and cannot be combined")
        if self.turn is not None and other.turn is not None:
            raise RelposValueError("position: two of the schemes turn values and cannot be combined")
        return Terms(
            self.query if other.query is None else other.query,
            self.key if other.key is None else other.key,
            self.tables + other.tables,
            self.queries + other.queries,
            self.keys + other.keys,
            self.values + other.values,
            self.biases + other.biases,
            self.changes + other.changes,
            self.turn if other.turn is None else other.turn,
            max((ulps for ulps in (self.relative_error_ulps, other.relative_error_ulps) if ulps), default=None),
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
        return index._cut(queries, keys, batch)
    count = queries.stop - queries.start + keys.stop - keys.start - 1
    first = keys.start - queries.stop + q_len
    return Toeplitz(index.lookup[first : first + max(count, 0)], index.rows)


def with_maps(terms: Terms, change: Callable[[IndexMap], IndexMap]) -> Terms:
    """The terms with other index maps; those that share one still do."""
    made: dict[int, IndexMap] = {}

    def changed(some: tuple[Any, ...]) -> tuple[Any, ...]:
        for term in some:
            if id(term.index) not in made:
                made[id(term.index)] = change(term.index)
        return tuple(replace(term, index=made[id(term.index)]) for term in some)

    kinds = (terms.tables, terms.queries, terms.keys, terms.values)
    tables, queries, keys, values = map(changed, kinds)
    return replace(terms, tables=tables, queries=queries, keys=keys, values=values)


def fit(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which its operand was broadcast, and over the heads that share one.

    In float64 at least: NumPy adds along leading axes one after the other, where float32 would lose bits.
    """
    own, wide = x.dtype, np.result_type(x.dtype, np.float64)
    if x.ndim > len(shape):
        x = x.sum(axis=tuple(range(x.ndim - len(shape))), dtype=wide)
    for axis, size in enumerate(shape):
        if x.shape[axis] != size:
            # Consecutive heads share one; of an operand with a single entry, all do.
            split = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
            x = split.sum(axis=axis + 1, dtype=wide)
    return x.astype(own, copy=False)


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
        query=_zeros(q if terms.query is None else terms.query),
        key=_zeros(k if terms.key is None else terms.key),
        tables=tuple(TableTerm(np.zeros_like(t.table), t.index) for t in terms.tables),
        queries=tuple(QueryTerm(np.zeros_like(t.query), np.zeros_like(t.weights), t.index) for t in terms.queries),
        keys=tuple(KeyTerm(np.zeros_like(t.key), np.zeros_like(t.weights), t.index) for t in terms.keys),
        values=tuple(ValueTerm(np.zeros_like(t.weights), t.index) for t in terms.values),
        biases=tuple(bias.zeros() if isinstance(bias, CountedBias) else np.zeros_like(bias) for bias in terms.biases),
    )
    return grads, np.zeros_like(v)


def _zeros(x: Any) -> Array:
    return np.zeros(x.shape, x.cos.dtype) if isinstance(x, Turned) else np.zeros_like(x)
