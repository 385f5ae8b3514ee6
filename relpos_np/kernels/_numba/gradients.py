"""What the backward kernel fills, and the gradients of terms that are made of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm, by_row, fit
from relpos_np.kernels._numba.call import Call
from relpos_np.kernels._numba.gather import map_record, products
from relpos_np.kernels._numba.pieces import LOG2E
from relpos_np.kernels._numba.records import SinkRecord
from relpos_np.kernels._numba.skew import is_skewed
from relpos_np.kernels._numba.target import ROW_QUANTUM, TARGET
from relpos_np.types import Array

# Multiplications of a product that OpenBLAS leaves to one thread, with room to spare.
BLAS_ALONE = 1 << 19


class Sums:
    """Arrays for the gradients of operands, and sums for those of terms; `parts` partial sums for each head."""

    def __init__(self, call: Call, parts: int) -> None:
        site, dtype, shape = call.site, call.dtype, call.shape
        self.call, self.parts = call, parts
        self.tasks = call.count * site.heads * parts
        depth, skew = call.fields["depth"], call.fields["skew_depth"]
        self.span = site.q_len + site.k_len - 1
        self.dq = np.zeros(shape(site.q_len, depth), dtype)
        self.dk = np.zeros(shape(site.k_len, depth), dtype)
        self.dv = np.zeros(shape(site.k_len, site.v_dim), dtype)
        self.diag = self.dense = self.skew_dq = self.skew_dw = np.empty(0, dtype)
        if any(isinstance(term.index, Toeplitz) for term in call.terms.tables):
            self.diag = np.zeros((self.tasks, self.span), dtype)
        if call.terms.biases:
            self.dense = np.zeros(shape(site.q_len, site.k_len), dtype)
        if skew:
            lanes = TARGET.lanes(dtype.itemsize)
            self.skew_dq = np.zeros(shape(site.q_len, skew), dtype)
            # Whole register tiles are written.
            self.skew_dw = np.zeros((self.tasks, self.span + ROW_QUANTUM, -(-skew // lanes) * lanes), dtype)
        # Of gathered terms, by term.
        self.gathered: dict[Any, Array] = {}
        self.sinks = self._sinks()

    def _sinks(self) -> list[SinkRecord]:
        """Allocate sums for the gathered terms, and say where they are."""
        site, terms, out = self.call.site, self.call.terms, []

        def sink(term: Any, shape: tuple[int, ...], **fields: int) -> None:
            sums = self.gathered[term] = np.zeros(shape, self.call.dtype)
            index = map_record(self.call, term.index, runs=not fields.get("dst_col"))
            out.append(SinkRecord(index, dst=self.call.keep(sums), **fields))

        for table in terms.tables:
            if isinstance(table.index, Dense):
                sink(table, (self.tasks, table.index.rows), dst_task=table.index.rows)
        for key in terms.keys:
            rows, head = key.index.rows, site.k_len * key.index.rows
            shape = self.call.shape(site.k_len, rows)
            sink(key, shape, dst_batch=site.heads * head, dst_head=head, dst_col=rows, of_keys=1)
        per_query: list[QueryTerm | ValueTerm] = [t for t in terms.queries if not is_skewed(t)]
        for term in (*per_query, *terms.values):
            rows, head, of_p = term.index.rows, site.q_len * term.index.rows, isinstance(term, ValueTerm)
            shape, item = self.call.shape(site.q_len, rows), site.heads * head
            sink(term, shape, dst_batch=item, dst_head=head, dst_row=rows, of_probabilities=of_p)
        return out

    def _by_head(self, partial: Array) -> Array:
        """Add up the tasks of each head (tasks, ...) over batch items and parts, in float64: (H, ...)."""
        split = partial.reshape(self.call.count, self.call.site.heads, self.parts, *partial.shape[1:])
        total: Array = split.sum(axis=(0, 2), dtype=np.float64)
        return total

    def gradients(self, grad_out: Array) -> tuple[Terms, Array]:
        """Gradients of the terms and of v, from that of the output."""
        problem, terms = self.call.problem, self.call.terms
        grads = Terms(
            query=fit(self.dq, (problem.q if terms.query is None else terms.query).shape),
            key=fit(self.dk, (problem.k if terms.key is None else terms.key).shape),
            tables=tuple(map(self._table, terms.tables)),
            queries=self._queries(),
            keys=tuple(map(self._key, terms.keys)),
            values=tuple(ValueTerm(self._weights(t, grad_out), t.index) for t in terms.values),
            biases=tuple(fit(self.dense, bias.shape) for bias in terms.biases),
        )
        return grads, fit(self.dv, problem.v.shape)

    def _table(self, term: TableTerm) -> TableTerm:
        if isinstance(term.index, Toeplitz):
            rows = by_row(self._by_head(self.diag)[..., None], term.index)[..., 0]
        else:
            rows = self._by_head(self.gathered[term])
        return TableTerm(fit(rows, term.table.shape).astype(self.call.dtype), term.index)

    def _queries(self) -> tuple[QueryTerm, ...]:
        """Gradients of the query terms; those that are multiplied tile by tile lie side by side."""
        out, first = [], 0
        for term in self.call.terms.queries:
            if is_skewed(term):
                assert isinstance(term.index, Toeplitz)
                columns = slice(first, first + term.query.shape[-1])
                first = columns.stop
                # The queries of these products are in units of log 2.
                by_distance = self._by_head(self.skew_dw)[:, : self.span, columns] / LOG2E
                weights = fit(by_row(by_distance, term.index), term.weights.shape).astype(self.call.dtype)
                gradient = self.skew_dq[..., columns]
            else:
                gradient, weights = self._vectors(term), self._weights(term, term.query)
            out.append(QueryTerm(fit(gradient, term.query.shape), weights, term.index))
        return tuple(out)

    def _key(self, term: KeyTerm) -> KeyTerm:
        group = self.call.site.heads // term.key.shape[-3]
        repeated = term.key if group == 1 else np.repeat(term.key, group, axis=-3)
        return KeyTerm(fit(self._vectors(term), term.key.shape), self._weights(term, repeated), term.index)

    def _vectors(self, term: QueryTerm | KeyTerm) -> Array:
        """Gradient of a gathered term's vectors."""
        return products(self.call, self.gathered[term], np.swapaxes(term.weights, -1, -2), 1.0)

    def _weights(self, term: QueryTerm | KeyTerm | ValueTerm, x: Array) -> Array:
        """Gradient of a gathered term's weights: its sums (..., H, L, R) times x (..., H, L, E), added in float64."""
        sums = self.gathered[term]
        # What has no share in the sums may hold anything.
        seen = np.where(sums.any(axis=-1, keepdims=True), x, self.call.dtype.type(0))
        # In products so small that no BLAS takes threads for them: those would go on spinning while ours work.
        length, rows, width = seen.shape[-2], sums.shape[-1], seen.shape[-1]
        step = max(BLAS_ALONE // (rows * width), 64)
        total = np.zeros((*sums.shape[:-2], rows, width))
        for start in range(0, length, step):
            part = np.s_[..., start : start + step, :]
            total += np.swapaxes(sums[part], -1, -2) @ seen[part]
        added: Array = total.sum(axis=tuple(range(total.ndim - 3)))
        return fit(added, term.weights.shape).astype(self.call.dtype)
