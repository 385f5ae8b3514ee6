"""What the backward kernel fills, and the gradients of terms that are made of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm, by_row, fit
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.forward_pass.work import LOG2E
from relpos_np.kernels._numba.launch.records import SinkRecord
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.fields import readable
from relpos_np.kernels._numba.plan.gather import map_record, products
from relpos_np.kernels._numba.simd.target import ROW_QUANTUM, TARGET
from relpos_np.types import Array

# Multiplications of a product that OpenBLAS leaves to one thread, with room to spare.
BLAS_ALONE = 1 << 19
# Numbers in a sum on average, and in all sums of a table, that are added one after the other. Of more, what sums lose
# to rounding is kept.
FEW, SKEWED = 64, 1 << 12


def many(count: int, rows: int = 1) -> bool:
    """Whether so many numbers in so many sums are too many for one of them."""
    return count > min(FEW * rows, SKEWED)


class Sums:
    """Arrays for the gradients of operands, and sums for those of terms; `parts` partial sums for each head.

    `group` heads of queries add their gradients of keys and values up. `stored` is that of `backward`.
    """

    def __init__(self, call: Call, parts: int, group: int, *, stored: bool) -> None:
        site, dtype, shape = call.site, call.dtype, call.shape
        problem, terms = call.problem, call.terms
        self.call, self.parts = call, parts
        # Rows of the operands: more than the call has where sequences share them.
        self.q_rows, self.k_rows = problem.stored_q.shape[-2], problem.stored_k.shape[-2]
        self.tasks = call.count * site.heads * parts
        depth, skew = call.fields["depth"], call.fields["skew_depth"]
        self.span = site.q_len + site.k_len - 1
        # What schemes and other heads add to is rounded by whoever has the sum.
        alone = stored and not (terms.queries or terms.keys)
        if terms.query is not None:
            alone = alone and isinstance(terms.query, Turned) and not terms.query.trained
        self.dq = self._of(problem.stored_q, self.q_rows, depth, stored=alone)
        self.dk = self._of(problem.stored_k, self.k_rows, depth, group, stored=alone)
        self.dv = self._of(problem.stored_v, self.k_rows, site.v_dim, group, stored=stored)
        self.diag = self.dense = self.skew_dq = self.skew_dw = self.diag_low = self.skew_dw_low = np.empty(0, dtype)
        each = min(site.q_len, site.k_len)
        if [term for term in call.terms.tables if isinstance(term.index, Toeplitz)]:
            self.diag = np.zeros((self.tasks, self.span), dtype)
            self.diag_low = np.zeros(self.diag.shape if many(each) else 0, dtype)
        if call.terms.biases:
            self.dense = np.zeros(shape(site.q_len, site.k_len), dtype)
        if skew:
            lanes = TARGET.lanes(dtype.itemsize)
            self.skew_dq = np.zeros(shape(self.q_rows, skew), dtype)
            # Whole register tiles are written.
            self.skew_dw = np.zeros((self.tasks, self.span + ROW_QUANTUM, -(-skew // lanes) * lanes), dtype)
            self.skew_dw_low = np.zeros(self.skew_dw.shape if each > SKEWED else 0, dtype)
        # Of gathered terms, by term.
        self.gathered: dict[Any, Array] = {}
        self.low: list[tuple[Array, Array]] = [(self.diag, self.diag_low), (self.skew_dw, self.skew_dw_low)]
        # Rows of the tables that sinks are for.
        self.sink_rows: list[int] = []
        self.sinks = self._sinks()

    def _of(self, x: Array, length: int, width: int, group: int = 1, *, stored: bool) -> Array:
        """For the gradient of an operand, in its own dtype if nothing is left to sum."""
        shape = (*self.call.site.batch, self.call.site.heads // group, length, width)
        repeated = any(size > 1 and step == 0 for size, step in zip(x.shape, x.strides, strict=True))
        kept = stored and group == 1 and x.shape == shape and not repeated and readable(self.call.problem)
        return np.zeros(shape, x.dtype if kept else self.call.dtype)

    def _sinks(self) -> list[SinkRecord]:
        """Allocate sums for the gathered terms, and say where they are."""
        site, terms, out = self.call.site, self.call.terms, []

        def sink(term: Any, count: int, shape: tuple[int, ...], **fields: int) -> None:
            sums = self.gathered[term] = np.zeros(shape, self.call.dtype)
            index = map_record(self.call, term.index, runs=not fields.get("dst_col"))
            low = np.zeros(shape if index.runs or many(count, term.index.rows) else 0, self.call.dtype)
            self.low.append((sums, low))
            self.sink_rows.append(term.index.rows)
            kept = self.call.keep(low) if low.size else 0
            out.append(SinkRecord(index, dst=self.call.keep(sums), low=kept, **fields))

        for table in terms.tables:
            if isinstance(table.index, Dense):
                sink(table, site.q_len * site.k_len, (self.tasks, table.index.rows), dst_task=table.index.rows)
        for key in terms.keys:
            rows, head = key.index.rows, self.k_rows * key.index.rows
            shape = self.call.shape(self.k_rows, rows)
            sink(key, site.q_len, shape, dst_batch=site.heads * head, dst_head=head, dst_col=rows, of_keys=1)
        per_query: list[QueryTerm | ValueTerm] = [t for t in terms.queries if t not in self.call.skewed]
        for term in (*per_query, *terms.values):
            rows, head, of_p = term.index.rows, self.q_rows * term.index.rows, isinstance(term, ValueTerm)
            shape, item = self.call.shape(self.q_rows, rows), site.heads * head
            sink(term, site.k_len, shape, dst_batch=item, dst_head=head, dst_row=rows, of_probabilities=of_p)
        return out

    def _by_head(self, partial: Array) -> Array:
        """Add up the tasks of each head (tasks, ...) over batch items and parts, in float64: (H, ...)."""
        split = partial.reshape(self.call.count, self.call.site.heads, self.parts, *partial.shape[1:])
        total: Array = split.sum(axis=(0, 2), dtype=np.float64)
        return total

    def _by_distance(self, name: str) -> Array:
        """Sums of one kind, for every head and distance."""
        return self._by_head(getattr(self, name))

    def gradients(self, grad_out: Array) -> tuple[Terms, Array]:
        """Gradients of the terms and of v, from that of the output."""
        problem, terms = self.call.problem, self.call.terms
        for sums, low in self.low:
            if low.size:
                np.add(sums, low, out=sums)
        # The kernel has run: nothing that it has read is needed any more.
        self.diag_low = self.skew_dw_low = np.empty(0, self.call.dtype)
        self.low.clear()
        self.call.kept.clear()
        grads = Terms(
            query=fit(self.dq, (problem.stored_q if terms.query is None else terms.query).shape),
            key=_shared(self.dk, (problem.stored_k if terms.key is None else terms.key).shape),
            tables=tuple(map(self._table, terms.tables)),
            queries=self._queries(),
            keys=tuple(map(self._key, terms.keys)),
            values=tuple(ValueTerm(self._weights(t, grad_out), t.index) for t in terms.values),
            biases=tuple(fit(self.dense, bias.shape) for bias in terms.biases),
        )
        return grads, _shared(self.dv, problem.stored_v.shape)

    def _table(self, term: TableTerm) -> TableTerm:
        if isinstance(term.index, Toeplitz):
            rows = by_row(self._by_distance("diag")[..., None], term.index)[..., 0]
        else:
            rows = self._by_head(self.gathered[term])
        return TableTerm(fit(rows, term.table.shape).astype(self.call.dtype), term.index)

    def _queries(self) -> tuple[QueryTerm, ...]:
        """Gradients of the query terms; those that are multiplied tile by tile lie side by side."""
        out, first = [], 0
        for term in self.call.terms.queries:
            if term in self.call.skewed:
                assert isinstance(term.index, Toeplitz)
                columns = slice(first, first + term.query.shape[-1])
                first = columns.stop
                # The queries of these products are in units of log 2.
                by_distance = self._by_distance("skew_dw")[:, : self.span, columns] / LOG2E
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
        # What has no share in the sums may hold anything. In C order, since a BLAS adds by strides.
        read = sums.any(axis=-1, keepdims=True)
        seen = np.zeros(np.broadcast_shapes(read.shape, x.shape), self.call.dtype)
        np.copyto(seen, x, where=read)
        # In products so small that no BLAS takes threads for them: those would go on spinning while ours work.
        length, rows, width = seen.shape[-2], sums.shape[-1], seen.shape[-1]
        step = max(BLAS_ALONE // (rows * width), 64)
        total = np.zeros((*sums.shape[:-2], rows, width))
        for start in range(0, length, step):
            part = np.s_[..., start : start + step, :]
            total += np.swapaxes(sums[part], -1, -2) @ seen[part]
        added: Array = total.sum(axis=tuple(range(total.ndim - 3)))
        return fit(added, term.weights.shape).astype(self.call.dtype)


def _shared(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum gradients over the heads that share keys, one after the other as the kernel does, and over batch items."""
    group = x.shape[-3] // max(shape[-3], 1)
    if group > 1:
        split = x.reshape(*x.shape[:-3], shape[-3], group, *x.shape[-2:])
        x = split[..., 0, :, :].copy()
        for n in range(1, group):
            x += split[..., n, :, :]
    return fit(x, shape)
