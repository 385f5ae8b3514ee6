"""The host's side of the backward pass: its record, the arrays it fills, and gradients of terms made from them."""

from __future__ import annotations

import struct

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import (
    Dense,
    IndexMap,
    KeyTerm,
    QueryTerm,
    TableTerm,
    Terms,
    Toeplitz,
    ValueTerm,
    by_row,
    fit,
)
from relpos_np.kernels._numba.backward import back_layout
from relpos_np.kernels._numba.plan import LOG2E, PACK_CALL, Planner, is_skewed
from relpos_np.kernels._numba.records import ADD, BACKWARD, SINK
from relpos_np.kernels._numba.target import BLOCK_KEYS, ROW_QUANTUM, TARGET
from relpos_np.types import Array

# Queries of one tile: two tiles of scores, their operands and their gradients together fill the cache.
BLOCK_QUERIES = 96
# Multiplications of a product that OpenBLAS leaves to one thread, with room to spare.
BLAS_ALONE = 1 << 19
# Pieces of work per thread where one per head would leave threads without any.
PIECES = 4

_EMPTY = dict.fromkeys(BACKWARD.names or (), 0)
_PACK = struct.Struct(f"<{len(_EMPTY)}q").pack


def part_count(heads: int, threads: int) -> int:
    """Ranges of queries, and of keys, that each head is divided into; 1 if there are heads enough for all threads."""
    return 1 if heads >= 2 * threads else -(-PIECES * threads // heads)


class BackPlanner(Planner):
    """Builds the record of one backward pass and turns what the kernel filled into gradients of terms."""

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        out: Array,
        lse: Array,
        grad_out: Array,
        grad_lse: Array | None,
        threads: int,
    ) -> None:
        super().__init__(problem, terms, out, lse, threads)
        site, shape = self.site, problem.out_shape
        self.grad_out = np.ascontiguousarray(np.broadcast_to(grad_out, shape))
        delta = np.einsum("...d,...d->...", self.grad_out, out)
        self.delta = np.ascontiguousarray(delta if grad_lse is None else delta - grad_lse)
        depth = (problem.q if terms.query is None else terms.query).shape[-1]
        self.dq = np.zeros((*shape[:-1], depth), self.dtype)
        self.dk = np.zeros((*shape[:-2], site.k_len, depth), self.dtype)
        self.dv = np.zeros((*shape[:-2], site.k_len, site.v_dim), self.dtype)
        self.sums: list[Array] = []

    def plan(self) -> tuple[int, int]:
        """The number of pieces of work and the size of a thread's workspace in elements."""
        site = self.site
        self.build()
        f = self.fields
        e = self.extra = _EMPTY.copy()
        heads = self.count * site.heads
        block = min(BLOCK_QUERIES, -(-site.q_len // ROW_QUANTUM) * ROW_QUANTUM)
        parts = part_count(heads, self.threads)
        query_step = -(-site.q_len // (parts * block)) * block
        key_step = -(-site.k_len // (parts * BLOCK_KEYS)) * BLOCK_KEYS
        parts = max(-(-site.q_len // query_step), -(-site.k_len // key_step)) if parts > 1 else 1
        tasks = heads * parts
        f["block_queries"], f["blocks"] = block, 1
        e["parts"], e["query_step"], e["key_step"] = parts, query_step, key_step
        for name in ("grad_out", "delta", "dq", "dk", "dv"):
            e[name] = self._keep(getattr(self, name))
        span = site.q_len + site.k_len - 1
        if any(isinstance(term.index, Toeplitz) for term in self.terms.tables):
            self.diag = np.zeros((tasks, span), self.dtype)
            e["diag"], e["diag_task"] = self._keep(self.diag), span
        if self.terms.biases:
            self.dense = np.zeros((*self.problem.batch, site.heads, site.q_len, site.k_len), self.dtype)
            e["dense"] = self._keep(self.dense)
        lanes = TARGET.lanes(self.dtype.itemsize)
        depth, skew = f["depth"], f["skew_depth"]
        q_width, v_width, s_width = (-(-n // lanes) * lanes for n in (depth, site.v_dim, skew))
        if skew:
            self.skew_dq = np.zeros((*self.problem.batch, site.heads, site.q_len, skew), self.dtype)
            # Whole register tiles are written.
            self.skew_dw = np.zeros((tasks, span + ROW_QUANTUM, s_width), self.dtype)
            e["skew_dq"], e["skew_dw"] = self._keep(self.skew_dq), self._keep(self.skew_dw)
            e["skew_dw_task"] = (span + ROW_QUANTUM) * s_width
        sinks = self._sinks(tasks)
        lifted = self._value_products(self.grad_out)
        e["sink_count"], e["lifted_count"], e["cuts"] = len(sinks), len(lifted), 1
        if sinks:
            e["sinks"] = self._keep(np.array(sinks, SINK))
        if lifted:
            e["lifted"] = self._keep(np.array(lifted, ADD))
        self.parts = parts
        size = back_layout.py_func(
            block, query_step if parts > 1 else site.q_len, depth, site.v_dim, q_width, v_width, skew, s_width, lanes
        )[-1]
        return tasks * (2 if parts > 1 else 1), size

    def pack(self) -> bytearray:
        """The record's bytes."""
        return bytearray(PACK_CALL(*self.fields.values()) + _PACK(*self.extra.values()))

    def _sink(self, index: IndexMap, shape: tuple[int, ...], strides: tuple[int, ...], *flags: int) -> tuple[int, ...]:
        """Allocate sums for a term; `strides` are those of task, batch item, head, query and key."""
        sums = np.zeros(shape, self.dtype)
        self.sums.append(sums)
        return (*self._index(index, runs=strides[-1] == 0), self._keep(sums), *strides, *flags)

    def _sinks(self, tasks: int) -> list[tuple[int, ...]]:
        site, heads, out = self.site, self.site.heads, []
        for table in self.terms.tables:
            if isinstance(table.index, Dense):
                rows = table.index.rows
                out.append(self._sink(table.index, (tasks, rows), (rows, 0, 0, 0, 0), 0, 0))
        out += [self._per_query(query.index, 0) for query in self.terms.queries if not is_skewed(query)]
        for key in self.terms.keys:
            rows = key.index.rows
            shape = (*self.problem.batch, heads, site.k_len, rows)
            head = site.k_len * rows
            out.append(self._sink(key.index, shape, (0, heads * head, head, 0, rows), 1, 0))
        out += [self._per_query(value.index, 1) for value in self.terms.values]
        return out

    def _per_query(self, index: IndexMap, of_probabilities: int) -> tuple[int, ...]:
        heads, rows = self.site.heads, index.rows
        head = self.site.q_len * rows
        shape = self._full(self.site.q_len, rows)
        return self._sink(index, shape, (0, heads * head, head, rows, 0), 0, of_probabilities)

    # from sums to gradients ------------------------------------------------------------------------

    def _by_head(self, partial: Array) -> Array:
        """Add up the tasks of each head (tasks, ...) over batch items and parts, in float64: (H, ...)."""
        split = partial.reshape(self.count, self.site.heads, self.parts, *partial.shape[1:])
        total: Array = split.sum(axis=(0, 2), dtype=np.float64)
        return total

    def collect(self) -> tuple[Terms, Array]:
        """Gradients of the terms and of v from what the kernel has filled."""
        sums, skew_at = iter(self.sums), 0
        tables, queries, keys, values = [], [], [], []
        for table in self.terms.tables:
            if isinstance(table.index, Toeplitz):
                sums_by_row = by_row(self._by_head(self.diag)[..., None], table.index)[..., 0]
            else:
                sums_by_row = self._by_head(next(sums))
            tables.append(TableTerm(fit(sums_by_row, table.table.shape).astype(self.dtype), table.index))
        for query in self.terms.queries:
            if is_skewed(query):
                depth = query.query.shape[-1]
                columns = slice(skew_at, skew_at + depth)
                skew_at += depth
                assert isinstance(query.index, Toeplitz)
                span = self.site.q_len + self.site.k_len - 1
                # The queries of these products are in units of log 2.
                weights = by_row(self._by_head(self.skew_dw)[:, :span, columns] / LOG2E, query.index)
                gradient = self.skew_dq[..., columns]
            else:
                rows = next(sums)
                gradient = self._products(rows, np.swapaxes(query.weights, -1, -2), 1.0)
                weights = self._by_rows(rows, query.query)
            weights = fit(weights, query.weights.shape).astype(self.dtype)
            queries.append(QueryTerm(fit(gradient, query.query.shape), weights, query.index))
        for key in self.terms.keys:
            rows = next(sums)
            group = self.site.heads // key.key.shape[-3]
            spread = key.key if group == 1 else np.repeat(key.key, group, axis=-3)
            weights = self._by_rows(rows, spread)
            weights = fit(weights, key.weights.shape).astype(self.dtype)
            gradient = self._products(rows, np.swapaxes(key.weights, -1, -2), 1.0)
            keys.append(KeyTerm(fit(gradient, key.key.shape), weights, key.index))
        for value in self.terms.values:
            weights = self._by_rows(next(sums), self.grad_out)
            values.append(ValueTerm(fit(weights, value.weights.shape).astype(self.dtype), value.index))
        grads = Terms(
            query=fit(self.dq, (self.problem.q if self.terms.query is None else self.terms.query).shape),
            key=fit(self.dk, (self.problem.k if self.terms.key is None else self.terms.key).shape),
            tables=tuple(tables),
            queries=tuple(queries),
            keys=tuple(keys),
            values=tuple(values),
            biases=tuple(fit(self.dense, bias.shape) for bias in self.terms.biases),
        )
        return grads, fit(self.dv, self.problem.v.shape)

    def _by_rows(self, sums: Array, x: Array) -> Array:
        """Products of sums (..., H, L, R) with x (..., H, L, E), over batch items in float64: (H, R, E)."""
        # What has no share in the sums may hold anything.
        seen = np.where(sums.any(axis=-1, keepdims=True), x, self.dtype.type(0))
        # Piece by piece, so small that no BLAS takes threads for it: they would go on spinning beside our own.
        length, rows, width = seen.shape[-2], sums.shape[-1], seen.shape[-1]
        step = max(BLAS_ALONE // (rows * width), 64)
        total = np.zeros((*sums.shape[:-2], rows, width))
        for start in range(0, length, step):
            part = np.s_[..., start : start + step, :]
            total += np.swapaxes(sums[part], -1, -2) @ seen[part]
        added: Array = total.sum(axis=tuple(range(total.ndim - 3)))
        return added
