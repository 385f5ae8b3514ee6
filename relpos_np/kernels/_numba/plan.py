"""From a problem and its terms to the records that the kernel reads, with every buffer it may touch."""

from __future__ import annotations

import math
import struct
from functools import cache, reduce
from typing import Any

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem
from relpos_np._contract.terms import Dense, IndexMap, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz
from relpos_np.kernels._numba.arrays import address_of, aligned, batch_offsets, rowwise, strides
from relpos_np.kernels._numba.attend import layout
from relpos_np.kernels._numba.launch import call_flops
from relpos_np.kernels._numba.product import multiply
from relpos_np.kernels._numba.records import ADD, BATCH_MASK, CALL, KEY_BEGIN, KEY_END, VALUE
from relpos_np.kernels._numba.target import BLOCK_KEYS, ROW_QUANTUM, TARGET, block_queries
from relpos_np.types import Array

LOG2E = 1.0 / math.log(2.0)
# A dense bias up to this many bytes is gathered once per call and then read like any other.
GATHER_BYTES = 16 * 1024 * 1024
# A band of fewer keys is narrow.
NARROW = 8 * BLOCK_KEYS
# A query term whose map has at least this share of distinct runs is multiplied tile by tile.
SKEW_SHARE = 0.25


# A call's record is packed from a dict in the order of its fields: much cheaper than assigning them one by one.
_EMPTY = dict.fromkeys(CALL.names or (), 0)
PACK_CALL = struct.Struct("<" + "".join("d" if CALL[name].kind == "f" else "q" for name in _EMPTY)).pack


@cache
def _no_bias(dtype: np.dtype[Any], k_len: int) -> tuple[int, Array]:
    """A row of zeros for so many keys, -inf up to the end of the last panel, and its address."""
    panel = TARGET.panel(dtype.itemsize)
    row = np.zeros(-(-k_len // panel) * panel, dtype)
    row[k_len:] = -np.inf
    return address_of(row), row


def _runs(lookup: Array, q_len: int) -> Array:
    """For each entry where its run of equal entries ends, counted like the entries from j - i = 0."""
    n = len(lookup)
    ends = np.flatnonzero(np.append(lookup[1:] != lookup[:-1], True)) + 1
    return (np.repeat(ends, np.diff(ends, prepend=0)) - (q_len - 1)).astype(np.int32) if n else lookup


def is_counting(lookup: Array) -> bool:
    """Whether a map is 0, 1, 2 ..., so that nothing has to be looked up."""
    return bool(len(lookup)) and lookup[0] == 0 and bool((lookup[1:] - lookup[:-1] == 1).all())


def is_skewed(term: QueryTerm) -> bool:
    """Whether a query term is multiplied tile by tile: most distances have a row of their own."""
    if not isinstance(term.index, Toeplitz):
        return False
    lookup = term.index.lookup
    changes = int(np.count_nonzero(lookup[1:] != lookup[:-1])) + 1
    return changes > SKEW_SHARE * len(lookup)


def is_windowed(problem: Problem, terms: Terms) -> bool:
    """Whether the kernel for windows does it: few keys, all of them for every query, and at most one fused bias."""
    site, mask = problem.site, problem.mask
    lanes, panel = TARGET.lanes(site.dtype.itemsize), TARGET.panel(site.dtype.itemsize)
    if site.k_len > BLOCK_KEYS or site.q_len < TARGET.accumulators or site.v_dim % lanes:
        return False
    if terms.queries or terms.keys or terms.values or terms.biases or problem.keep is not None:
        return False
    # The last query must reach the first key, and the first query the last key.
    first, last = site.q_len - 1 + site.offset, site.k_len - 1 - site.offset
    if problem.key_lengths is not None or first > problem.left or last > problem.right:
        return False
    # A mask of keys alone becomes a range of keys. The shape decides, never the strides: layouts change no bits.
    if mask is not None and 1 in mask.shape[-2:]:
        return False
    # One bias serves all batch items: maps that differ between them are gathered, which its kernel does not do.
    if any(isinstance(term.index, Dense) and term.index.index.ndim > 2 for term in terms.tables):
        return False
    # The end of the last panel is cut off by the bias, which therefore has a row per query or is the same for all.
    grids = all(isinstance(term.index, Dense) for term in terms.tables)
    gathered = site.heads * site.q_len * site.k_len * site.dtype.itemsize
    return (grids or site.k_len % panel == 0) and gathered <= GATHER_BYTES // 2


class Planner:
    """Builds the record of one call; `out` and `lse` are C-contiguous.

    `narrow`: keys and values are read as they are stored. `windowed`: `is_windowed` holds, and its kernel will run.
    """

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        out: Array,
        lse: Array | None,
        threads: int,
        *,
        narrow: bool = False,
        windowed: bool = False,
    ) -> None:
        self.problem, self.site, self.terms = problem, problem.site, terms
        self.count = math.prod(problem.batch)
        self.dtype = problem.site.dtype
        self.kept: list[Array] = []
        self.fields: dict[str, Any] = _EMPTY.copy()
        # What the kernel's record has behind that of a call.
        self.tail = b""
        self.threads = threads
        self.out, self.lse, self.narrow, self.windowed = out, lse, narrow, windowed

    def _keep(self, x: Array) -> int:
        """Keep an array alive and return its address."""
        self.kept.append(x)
        return address_of(x)

    def _wide(self) -> tuple[Array, Array]:
        """Keys and values in the dtype of the computation."""
        return self.problem.k if self.terms.key is None else self.terms.key, self.problem.v

    def _stored(self) -> tuple[Array, Array]:
        """Keys and values as they are stored, in half precision."""
        return self.problem.stored_k, self.problem.stored_v

    def pack(self) -> bytearray:
        """The record's bytes."""
        return bytearray(PACK_CALL(*self.fields.values()) + self.tail)

    def repeat(self, fields: dict[str, Any], batches: Array) -> None:
        """Fill every record as `build` has done for the same sizes, where only addresses and fused biases differ."""
        self.fields, self.batches = fields.copy(), batches
        self.kept.append(batches)
        self._operands()
        if self.terms.tables:
            self._bias()

    def _operands(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values as they are read; with the results, their addresses."""
        f, query = self.fields, self.problem.q if self.terms.query is None else self.terms.query
        key, value = (self._stored if self.narrow else self._wide)()
        q, k, v = rowwise(query), rowwise(key), rowwise(value)
        f["q"], f["k"], f["v"], f["out"] = self._keep(q), self._keep(k), self._keep(v), self._keep(self.out)
        if self.lse is not None:
            f["lse"] = self._keep(self.lse)
        return q, k, v

    def build(self) -> None:
        """Fill every record."""
        site, terms, f = self.site, self.terms, self.fields
        self.batches = batches = np.zeros((6, self.count), np.int64)
        axes = len(self.problem.batch)
        query, key, value = self._operands()
        for row, (name, x) in enumerate((("q", query), ("k", key), ("v", value))):
            f[name + "_head"], f[name + "_row"] = x.strides[-3] // x.itemsize, x.strides[-2] // x.itemsize
            if self.count > 1:
                batches[row] = batch_offsets(x, axes, self.count)
        f["out_batch"] = site.heads * site.q_len * site.v_dim
        f["out_head"], f["out_row"] = site.q_len * site.v_dim, site.v_dim
        f["heads"], f["v_group"] = site.heads, site.heads // max(site.kv_heads, 1)
        f["k_group"] = site.heads // max(key.shape[-3], 1)
        f["q_len"], f["k_len"], f["depth"], f["v_depth"] = site.q_len, site.k_len, query.shape[-1], site.v_dim
        f["offset"], f["left"], f["right"] = site.offset, self.problem.left, self.problem.right
        f["scale"] = site.scale * LOG2E
        self._masks(batches)
        adds = self._bias()
        if terms.queries:
            adds += self._queries()
        adds += [self._key(term) for term in terms.keys]
        values = self._values() if terms.values else []
        lanes = TARGET.lanes(self.dtype.itemsize)
        width = -(-site.v_dim // lanes) * lanes
        heads = self.count * site.heads
        narrow = bool(f["skew_depth"]) or self.windowed or f["left"] + f["right"] < NARROW
        block = block_queries(
            site.q_len, query.shape[-1], width, self.dtype.itemsize, heads, self.threads, narrow=narrow
        )
        skew, bins = f["skew_depth"], f["bins"]
        # Besides products: what is gathered and what is collected.
        per_pair = 2.0 * (query.shape[-1] + width + 2 * skew + 8 * len(adds) + 8 * len(values))
        reach = min(site.k_len, self.problem.left + self.problem.right + block)
        # A block is not interrupted: with very many keys it has fewer queries.
        most = int(2 * call_flops(self.dtype.itemsize) / (per_pair * max(reach, 1)))
        block = min(block, max(most // ROW_QUANTUM, 2) * ROW_QUANTUM)
        blocks = -(-site.q_len // block)
        # The kernel for windows writes whole tiles in place: it needs blocks of about the same length.
        f["block_queries"], f["blocks"] = -(-site.q_len // blocks) if self.windowed else block, blocks
        f["batches"], f["count"] = self._keep(batches), self.count
        f["add_count"], f["value_count"] = len(adds), len(values)
        if adds:
            f["adds"] = self._keep(np.array(adds, ADD))
        if values:
            f["values"] = self._keep(np.array(values, VALUE))
        if self.problem.keep is not None:
            f["keep"] = self._keep(self.problem.keep)
            f["keep_scale"] = self.problem.keep_scale
        span = min(site.k_len, self.problem.left + self.problem.right + block)
        self.blocks = self.count * site.heads * f["blocks"]
        self.workspace = layout.py_func(block, query.shape[-1], width, skew, bins, lanes)[-1]
        self.flops_per_block = per_pair * block * span

    # masks -----------------------------------------------------------------------------------

    def _masks(self, batches: Array) -> None:
        """Turn key lengths and masks of keys alone into ranges; hand other masks on."""
        problem, site, f = self.problem, self.site, self.fields
        batches[KEY_END] = site.k_len
        if problem.key_lengths is not None:
            batches[KEY_END] = problem.key_lengths.ravel()
        mask = self._biased(problem.mask)
        if mask is None or not mask.size:
            return
        if mask.dtype == np.bool_ and problem.mask_of_keys and not self.windowed:
            keys = mask[..., 0, 0, :].reshape(self.count, site.k_len)
            seen = keys.any(axis=1)
            begin = np.where(seen, keys.argmax(axis=1), site.k_len)
            end = np.where(seen, site.k_len - keys[:, ::-1].argmax(axis=1), 0)
            batches[KEY_BEGIN] = begin
            batches[KEY_END] = np.minimum(batches[KEY_END], end)
            if (keys.sum(axis=1) == np.maximum(end - begin, 0)).all():
                return
        adjacent = {mask.itemsize} if self.windowed else {0, mask.itemsize}
        if mask.shape[-1] > 1 and mask.strides[-1] not in adjacent:
            mask = np.ascontiguousarray(mask)
        address = self._keep(mask)
        f["allowed" if mask.dtype == np.bool_ else "soft"] = address
        f["mask_head"], f["mask_row"], f["mask_col"] = strides(mask)[-3:]
        if mask.shape[-1] == 1:
            f["mask_col"] = 1
        batches[BATCH_MASK] = batch_offsets(mask, len(problem.batch), self.count)

    def _biased(self, mask: Array | None) -> Array | None:
        """A bias of every pair is read like a float mask, and together with one."""
        if not self.terms.biases:
            return mask
        total: Array = reduce(np.add, self.terms.biases)
        if mask is not None:
            if mask.dtype == np.bool_:
                total = np.where(mask, total, self.dtype.type(-np.inf))
            else:
                total = np.where(mask == -np.inf, mask, total + mask)
        return np.broadcast_to(total, self._full(self.site.q_len, self.site.k_len))

    # additive terms ----------------------------------------------------------------------------

    def _bias(self) -> list[Any]:
        """Sum the table terms into one fused bias where they fit, and gather the others in the kernel."""
        site, f = self.site, self.fields
        panel = TARGET.panel(self.dtype.itemsize)
        if not self.terms.tables:
            # Every row of every tile reads the same zeros; for windows they also cut off the end of the last panel.
            f["bias"] = _no_bias(self.dtype, site.k_len if self.windowed else panel)[0]
            return []
        toeplitz: list[TableTerm] = []
        grids: list[TableTerm] = []
        others: list[TableTerm] = []
        for term in self.terms.tables:
            kind = toeplitz if isinstance(term.index, Toeplitz) else grids if term.index.index.ndim == 2 else others
            kind.append(term)
        width = -(-site.k_len // panel) * panel
        height = -(-site.q_len // ROW_QUANTUM) * ROW_QUANTUM
        if grids and site.heads * height * width * self.dtype.itemsize <= GATHER_BYTES:
            # Padding columns are -inf, so that a ragged last panel needs no mask of its own.
            bias = aligned((site.heads, height, width), self.dtype, -math.inf)
            bias[:, site.q_len :] = 0
            inner = bias[:, : site.q_len, : site.k_len]
            inner[...] = self._picked(grids[0])
            for term in grids[1:]:
                inner += self._picked(term)
            for term in toeplitz:
                lookup = term.index.dense(site.q_len, site.k_len)
                inner += self._picked(TableTerm(term.table, Dense(lookup, term.index.rows)))
            f["bias"] = self._keep(bias)
            f["bias_head"], f["bias_row"], f["bias_tail"] = height * width, width, 1
            grids = []
        elif toeplitz:
            span = site.q_len + site.k_len - 1
            # Padded query rows and a ragged last panel read beyond the ends.
            buffer = np.zeros((site.heads, ROW_QUANTUM + span + panel), self.dtype)
            inner = buffer[:, ROW_QUANTUM : ROW_QUANTUM + span]
            self._along(toeplitz[0], inner)
            for term in toeplitz[1:]:
                also = np.empty_like(inner)
                self._along(term, also)
                inner += also
            f["bias"] = self._keep(buffer) + (ROW_QUANTUM + site.q_len - 1) * buffer.itemsize
            f["bias_head"], f["bias_row"] = buffer.shape[1], -1
        else:
            f["bias"] = _no_bias(self.dtype, panel)[0]
        return [self._table(term) for term in grids + others]

    def _picked(self, term: TableTerm) -> Array:
        """A table's value for every pair of a dense map, in units of log 2: (H or 1, L_q, L_k)."""
        assert isinstance(term.index, Dense)
        picked: Array = (term.table * self.dtype.type(LOG2E))[:, term.index.index]
        return np.where(term.index.index < 0, self.dtype.type(0), picked) if term.index.gaps else picked

    def _along(self, term: TableTerm, out: Array) -> None:
        """Fill out (H, L_q + L_k - 1) with a table's value for every relative position, in units of log 2."""
        assert isinstance(term.index, Toeplitz)
        lookup, scale = term.index.lookup, self.dtype.type(LOG2E)
        if len(lookup) == term.index.rows and is_counting(lookup):
            np.multiply(term.table, scale, out=out)
            return
        out[...] = (term.table * scale).take(lookup, axis=1, mode="wrap" if term.index.gaps else "raise")
        if term.index.gaps:
            out[:, lookup < 0] = 0

    def _table(self, term: TableTerm) -> tuple[int, ...]:
        """A table that the kernel gathers from."""
        table = np.ascontiguousarray(term.table * self.dtype.type(LOG2E))
        head = table.shape[1] if table.shape[0] > 1 else 0
        return (self._keep(table), 0, head, 0, 0, *self._index(term.index, runs=False))

    def _index(self, index: IndexMap, *, runs: bool) -> tuple[int, int, int, int]:
        """Address and strides of a map: batch stride, row stride and the ends of its runs."""
        if isinstance(index, Toeplitz):
            origin = max(self.site.q_len - 1, 0) * 4
            ends = self._keep(_runs(index.lookup, self.site.q_len)) + origin if runs else 0
            return self._keep(index.lookup) + origin, 0, -1, ends
        dense = np.ascontiguousarray(index.index)
        per_batch = 0
        if dense.ndim > 2:
            shape = (*self.problem.batch, self.site.q_len, self.site.k_len)
            dense = np.ascontiguousarray(np.broadcast_to(dense, shape))
            per_batch = self.site.q_len * self.site.k_len
        return self._keep(dense), per_batch, self.site.k_len, 0

    def _queries(self) -> list[Any]:
        """Multiply maps with many rows tile by tile; others once, to be gathered."""
        skewed: list[QueryTerm] = []
        adds: list[Any] = []
        for term in self.terms.queries:
            if is_skewed(term):
                skewed.append(term)
                continue
            products = self._products(term.query, term.weights, LOG2E)
            rows = products.shape[-1]
            head = self.site.q_len * rows
            address = self._keep(products)
            adds.append((address, self.site.heads * head, head, rows, 0, *self._index(term.index, runs=True)))
        if skewed:
            self._skew(skewed)
        return adds

    def _products(self, x: Array, weights: Array, scale: float) -> Array:
        """Products of vectors (..., H or H_kv, L, E) with rows of weights, scaled: (*batch, H, L, rows)."""
        wide = np.broadcast_to(x, (*self.problem.batch, *x.shape[-3:]))
        return multiply(wide, weights, scale, self.site.heads, self.threads)

    def _full(self, length: int, width: int) -> tuple[int, ...]:
        return (*self.problem.batch, self.site.heads, length, width)

    def _skew(self, terms: list[QueryTerm]) -> None:
        """One row of weights per relative position; several terms share one product."""
        f, site = self.fields, self.site
        span = site.q_len + site.k_len - 1
        if len(terms) == 1:
            query, weight = terms[0].query, terms[0].weights
            assert isinstance(terms[0].index, Toeplitz)
            lookup = terms[0].index.lookup
        else:
            query, weight = self._side_by_side(terms)
            lookup = np.arange(span, dtype=np.int32)
        query = np.ascontiguousarray(np.broadcast_to(query, self._full(site.q_len, query.shape[-1])))
        weight = rowwise(weight)
        f["skew_q"], f["skew_w"], f["skew_depth"] = self._keep(query), self._keep(weight), weight.shape[-1]
        f["skew_index"] = self._keep(np.ascontiguousarray(lookup))
        head, f["skew_row"], _ = strides(weight)
        f["skew_head"] = head if weight.shape[0] > 1 else 0

    def _side_by_side(self, terms: list[QueryTerm]) -> tuple[Array, Array]:
        """Several terms as one: queries and weights one after the other, the weights with a row per distance."""
        queries, weights = [], []
        heads = max(term.weights.shape[0] for term in terms)
        for term in terms:
            assert isinstance(term.index, Toeplitz)
            rows = term.weights[:, term.index.lookup]
            if term.index.gaps:
                rows[:, term.index.lookup < 0] = 0
            weights.append(np.broadcast_to(rows, (heads, *rows.shape[1:])))
            queries.append(np.broadcast_to(term.query, self._full(self.site.q_len, term.query.shape[-1])))
        return np.concatenate(queries, axis=-1), np.concatenate(weights, axis=-1)

    def _value_products(self, grad_out: Array) -> list[Any]:
        """Products of the output's gradient with the rows of value tables, to be gathered."""
        adds = []
        for term in self.terms.values:
            products = self._products(grad_out, term.weights, 1.0)
            rows = products.shape[-1]
            head = self.site.q_len * rows
            address = self._keep(products)
            adds.append((address, self.site.heads * head, head, rows, 0, *self._index(term.index, runs=True)))
        return adds

    def _key(self, term: KeyTerm) -> tuple[int, ...]:
        """Products of keys with every row, to be gathered."""
        heads = self.site.heads
        products = self._products(term.key, term.weights, LOG2E)
        rows = products.shape[-1]
        head = self.site.k_len * rows
        return (self._keep(products), heads * head, head, 0, rows, *self._index(term.index, runs=False))

    def _values(self) -> list[Any]:
        """Weights padded to whole vectors, and a place among the bins for each term."""
        lanes = TARGET.lanes(self.dtype.itemsize)
        width = -(-self.site.v_dim // lanes) * lanes
        out, bins = [], 0
        for term in self.terms.values:
            heads, rows, depth = term.weights.shape
            weights = aligned((heads, rows, width), self.dtype, 0.0)
            weights[..., :depth] = term.weights
            head = rows * width if heads > 1 else 0
            out.append((self._keep(weights), head, rows, bins, *self._index(term.index, runs=True)))
            bins += rows
        self.fields["bins"] = bins
        return out


assert UNBOUNDED < 1 << 62  # positions are added to it in int64
