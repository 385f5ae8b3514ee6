"""The backward pass: arrays on the device, launches, and gradients of terms from the sums that kernels leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import IndexMap, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm, by_row, fit
from relpos_np.kernels._cuda.arrays.operand import Operand, contiguous_strides
from relpos_np.kernels._cuda.backward_pass.keys import key_gradient
from relpos_np.kernels._cuda.backward_pass.queries import query_gradient
from relpos_np.kernels._cuda.backward_pass.sizes import key_side, query_side
from relpos_np.kernels._cuda.backward_pass.sums import (
    THREADS,
    Private,
    Seen,
    blocks_for,
    delta_kernel,
    group_kernel,
    reduce_kernel,
    seen_kernel,
)
from relpos_np.kernels._cuda.forward_pass.product import gemm
from relpos_np.kernels._cuda.forward_pass.scores import UNCAPPED
from relpos_np.kernels._cuda.launch.device import download, empty, launch, upload
from relpos_np.kernels._cuda.launch.records import Add, Back, Bins, Call, Upstream
from relpos_np.kernels._cuda.launch.shared_copies import kept
from relpos_np.kernels._cuda.plan.forward import Forward
from relpos_np.types import Array

# Most bytes of sums that the blocks of one launch have of their own; further blocks wait for the next launch.
PRIVATE_BYTES = 256 << 20


class Backward(Forward):
    """One backward pass."""

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        operands: tuple[Any, Any, Any],
        grad_out: Array | Operand,
        grad_lse: Array | Operand | None,
    ) -> None:
        super().__init__(problem, terms, operands, fused=True)
        # Gradients of vectors stay on the device if the vectors are there.
        self.far = isinstance(operands[0], Operand)
        self.dtype = self.site.dtype
        self.lines = self.count * self.site.heads
        self.grad_out, self.grad_lse = grad_out, grad_lse
        self.depth = self.query.shape[-1]
        self.maps: dict[int, tuple[int, int, int, int]] = {}
        self.skewed = [query for query in terms.queries if self._is_fused(query)]
        self.crowded = bool(self.skewed) or self.capped != UNCAPPED

    def _map(self, index: IndexMap) -> tuple[int, int, int, int]:
        # Terms of the forward and of the backward pass share maps.
        if id(index) not in self.maps:
            self.maps[id(index)] = super()._map(index)
        return self.maps[id(index)]

    def _bins(self, terms: Sequence[Any]) -> tuple[int, int, int]:
        """Write a record of every term whose rows have sums; returns where they begin, their number, and all rows."""
        found, bins = list[Bins](), 0
        for term in terms:
            found.append(Bins(0, 0, bins, term.index.rows, *self._map(term.index)))
            bins += term.index.rows
        return *self._listed(found), bins

    def call(self) -> Call:
        """The integers of the forward pass. Makes those of the backward pass too."""
        call = super().call()
        site, terms, heads = self.site, self.terms, self.site.heads
        gathered = list[Add]()
        for value in terms.values:
            start, batch, head, row = self._product(self.grad_out, value.weights)
            gathered.append(Add(start, batch, head, row, 0, 1, *self._map(value.index)))
        tiling, _ = query_side(self.dtype, self.depth, self.crowded)
        dense = [term for term in terms.tables if not isinstance(term.index, Toeplitz)]
        along = len(dense) < len(terms.tables)
        mapped = [query for query in terms.queries if not self._is_fused(query)]
        queries, keys, tables = (self._bins(found) for found in (mapped, terms.keys, dense))
        gathers, n_gathered = self._listed([], gathered)
        spans = tiling.rows + site.k_len - 1
        self.skew_width = sum(query.query.shape[-1] for query in self.skewed)
        self.private = spans * (along + self.skew_width) + tiling.rows * tables[2]
        # Blocks of one launch, if they have sums of their own.
        self.tiles = self.lines * -(-site.q_len // tiling.rows)
        self.chunk = min(self.tiles, max(1, PRIVATE_BYTES // (max(self.private, 1) * self.dtype.itemsize)))
        sizes = {
            "query_bins": self.lines * site.q_len * queries[2],
            "key_bins": self.lines * site.k_len * keys[2],
            "table_bins": self.chunk * tiling.rows * tables[2],
            "value_bins": self.lines * site.q_len * call.n_bins,
            "diagonals": self.chunk * spans * along,
            "skew_vectors": self.lines * site.q_len * self.skew_width,
            "skew_rows": self.chunk * spans * self.skew_width,
            "pairs": self.lines * site.q_len * site.k_len if terms.biases else 0,
        }
        starts, self.work_size = {}, 0
        for name, size in sizes.items():
            starts[name] = self.work_size if size else -1
            self.work_size += size
        self.spans, self.heads = spans, heads
        self.back = Back(
            **starts,
            **dict(zip(("queries", "n_queries", "n_query_bins"), queries, strict=True)),
            **dict(zip(("keys", "n_keys", "n_key_bins"), keys, strict=True)),
            **dict(zip(("tables", "n_tables", "n_table_bins"), tables, strict=True)),
            gathered=gathers,
            n_gathered=n_gathered,
            skew_width=self.skew_width,
            lines=self.lines * site.q_len,
            base=0,
        )
        self.record = call
        return call

    def launch(self) -> None:
        """Run the kernels of both passes; everything stays on the device."""
        site, dtype, lines = self.site, self.dtype, self.lines
        out, lse = self.start(wants_lse=True, apart=True)
        back, queries = self.back, lines * site.q_len
        self.upstream = self._whole(self.grad_out, self.problem.out_shape)
        delta, self.work = empty(queries, dtype), empty(self.work_size, dtype)
        given = self.grad_lse is not None
        grad_lse = delta
        if self.grad_lse is not None:
            grad_lse = self._whole(self.grad_lse, self.problem.out_shape[:-1])
        launch(
            *(delta_kernel(dtype), blocks_for(queries), THREADS, self.upstream, out, grad_lse, delta),
            *(queries, site.v_dim, int(given)),
        )
        shared = self.operands, self.tables, Upstream(self.upstream, lse, delta), self.work
        self.dq, self.dk, self.dv = (
            empty(lines * size, dtype)
            for size in (site.q_len * self.depth, site.k_len * self.depth, site.k_len * site.v_dim)
        )
        stored, skewed = self.formats, bool(self.skewed)
        tiling, width = query_side(dtype, self.depth, self.crowded)
        parts = -(-self.depth // width)
        kernel = query_gradient(tiling, stored, self.depth, width, skewed, self.capped)
        per_head = -(-site.q_len // tiling.rows)
        columns = site.q_len + site.k_len - 1
        self.of_diagonals = empty(site.heads * columns, np.dtype(np.float64))
        self.of_tables = empty(site.heads * back.n_table_bins, np.dtype(np.float64))
        diagonals = Private(back.diagonals, self.spans, self.spans, columns, 1, tiling.rows - site.q_len)
        rows = back.n_table_bins
        of_tables = Private(back.table_bins, tiling.rows * rows, rows, rows, 0, 0)
        wide = self.skew_width
        self.of_skews = empty(site.heads * columns * wide, np.dtype(np.float64))
        skews = Private(
            back.skew_rows,
            self.spans * wide,
            self.spans * wide,
            columns * wide,
            wide,
            wide * (tiling.rows - site.q_len),
        )
        chunk = self.chunk if self.private else self.tiles
        for begin in range(0, self.tiles, chunk):
            end = min(begin + chunk, self.tiles)
            launch(
                *(kernel, (end - begin) * parts, tiling.threads),
                *(*shared, self.dq, self.record, back._replace(base=begin * parts), self.scales),
            )
            for private, totals in (
                (diagonals, self.of_diagonals),
                (of_tables, self.of_tables),
                (skews, self.of_skews),
            ):
                if private.start >= 0:
                    launch(
                        *(reduce_kernel(), blocks_for(site.heads * private.columns), THREADS, self.work, totals),
                        *(private, begin, end, site.heads, per_head, tiling.rows),
                    )

        tiling, width = key_side(dtype, self.depth, site.v_dim)
        parts = -(-max(self.depth, site.v_dim) // width)
        launch(
            key_gradient(tiling, stored, self.depth, width, skewed, self.capped),
            *(lines * parts * -(-site.k_len // tiling.rows), tiling.threads),
            *(*shared, self.dk, self.dv, self.record, back, self.scales),
        )

    # from sums to gradients ------------------------------------------------------------------------

    def _fetch(self, x: Any, *shape: int) -> Array:
        """Copy an array of the device to the host, in a shape."""
        out = np.empty(shape, x.dtype)
        if out.size:
            download(x, out)
        return out

    def _whole(self, x: Array | Operand, shape: tuple[int, ...]) -> Any:
        """An array on the device in full, flat and in the dtype of the computation."""
        if isinstance(x, Operand):
            return x.broadcast_to(shape).contiguous(self.dtype).flat
        return upload(np.ascontiguousarray(np.broadcast_to(x, shape), self.dtype).reshape(-1))

    def _by_vector(self, x: Any, *shape: int) -> Array:
        """Copy to the host numbers per batch item, head and query or key."""
        return self._fetch(x, *self.problem.batch, self.site.heads, *shape)

    def _fitted(self, x: Any, length: int, depth: int, wanted: tuple[int, ...]) -> Any:
        """Gradients per head, added up to the shape of the array whose gradient they are."""
        heads = self.site.heads
        if not self.far:
            return fit(self._by_vector(x, length, depth), wanted)
        shared = wanted[-3]
        if shared != heads:
            size, step = self.count * shared * length * depth, length * depth
            total = empty(size, self.dtype)
            launch(group_kernel(self.dtype), blocks_for(size), THREADS, x, total, size, step, heads // shared)
            x = total
        shape = (*self.problem.batch, shared, length, depth)
        return Operand(x, shape, contiguous_strides(shape), self.dtype)

    def _on_device(self, x: Array | Operand) -> tuple[Any, int]:
        """Vectors (..., heads, length, channels) in full, flat, and how many heads share one."""
        return self._whole(x, (*self.problem.batch, *x.shape[-3:])), self.site.heads // x.shape[-3]

    def _of_vectors(self, bins: int, step: int, length: int, weights: Array, wanted: tuple[int, ...]) -> Any:
        """Gradient of the vectors that rows were multiplied by: sums times rows."""
        heads, (rows, depth) = self.site.heads, weights.shape[-2:]
        out = empty(self.lines * length * depth, self.dtype)
        (table,) = kept(np.ascontiguousarray(weights).reshape(-1))
        by_sums = heads * length * step, length * step, 0, step, 1
        by_table = 0, rows * depth if weights.shape[0] > 1 else 0, 0, depth, 1
        by_out = heads * length * depth, length * depth, depth, 1
        sizes = self.count, heads, length, depth, 1, rows
        gemm(self.work, bins, by_sums, table, 0, by_table, out, 0, by_out, sizes)
        return self._fitted(out, length, depth, wanted)

    def _of_rows(self, bins: int, step: int, length: int, x: tuple[Any, int], weights: Array) -> Array:
        """Gradient of the rows: sums times vectors, over all batch items."""
        heads, (rows, depth) = self.site.heads, weights.shape[-2:]
        vectors, group = x
        seen = empty(self.lines * length * depth, self.dtype)
        out = empty(heads * rows * depth, self.dtype)
        if seen.size and rows:
            launch(
                *(seen_kernel(self.dtype), blocks_for(self.lines * length), THREADS, vectors, self.work, seen),
                Seen(bins, step, rows, self.lines * length, heads, group, length, depth),
            )
        by_sums = 0, length * step, heads * length * step, 1, step
        by_vector = 0, length * depth, heads * length * depth, depth, 1
        sizes = 1, heads, rows, depth, self.count, length
        gemm(self.work, bins, by_sums, seen, 0, by_vector, out, 0, (0, rows * depth, depth, 1), sizes)
        return fit(self._fetch(out, heads, rows, depth), weights.shape)

    def collect(self) -> tuple[Terms, Any]:
        """Gradients of the terms and of v: tables on the host, vectors where they came from."""
        site, back, terms, dtype = self.site, self.back, self.terms, self.dtype
        tables, queries, keys, values = [], [], [], []
        along = self._fetch(self.of_diagonals, site.heads, site.q_len + site.k_len - 1) if back.diagonals >= 0 else None
        by_pair, at = self._fetch(self.of_tables, site.heads, back.n_table_bins), 0
        for table in terms.tables:
            if isinstance(table.index, Toeplitz):
                assert along is not None
                sums = by_row(along[..., None], table.index)[..., 0]
            else:
                sums = by_pair[:, at : at + table.index.rows]
                at += table.index.rows
            tables.append(TableTerm(fit(sums, table.table.shape).astype(dtype), table.index))
        at, channel = back.query_bins, 0
        columns = site.q_len + site.k_len - 1
        positions = self._fetch(self.of_skews, site.heads, columns, back.skew_width)
        for query in terms.queries:
            if self._is_fused(query):
                size, start = query.query.shape[-1], back.skew_vectors + back.lines * channel
                vectors = self.work[start : start + back.lines * size]
                assert isinstance(query.index, Toeplitz)
                sums = by_row(positions[..., channel : channel + size], query.index)
                weights = fit(sums, query.weights.shape).astype(dtype)
                gradient = self._fitted(vectors, site.q_len, size, query.query.shape)
                queries.append(QueryTerm(gradient, weights, query.index))
                channel += size
                continue
            of = at, back.n_query_bins, site.q_len
            gradient = self._of_vectors(*of, query.weights, query.query.shape)
            weights = self._of_rows(*of, self._on_device(query.query), query.weights)
            queries.append(QueryTerm(gradient, weights, query.index))
            at += query.index.rows
        at = back.key_bins
        for key in terms.keys:
            of = at, back.n_key_bins, site.k_len
            gradient = self._of_vectors(*of, key.weights, key.key.shape)
            weights = self._of_rows(*of, self._on_device(key.key), key.weights)
            keys.append(KeyTerm(gradient, weights, key.index))
            at += key.index.rows
        at = back.value_bins
        for value in terms.values:
            weights = self._of_rows(at, self.record.n_bins, site.q_len, (self.upstream, 1), value.weights)
            values.append(ValueTerm(weights, value.index))
            at += value.index.rows
        biases: tuple[Array, ...] = ()
        if terms.biases:
            size = self.lines * site.q_len * site.k_len
            ds = self._by_vector(self.work[back.pairs : back.pairs + size], site.q_len, site.k_len)
            biases = tuple(fit(ds, bias.shape) for bias in terms.biases)
        grads = Terms(
            query=self._fitted(self.dq, site.q_len, self.depth, self.query.shape),
            key=self._fitted(self.dk, site.k_len, self.depth, self.key.shape),
            tables=tuple(tables),
            queries=tuple(queries),
            keys=tuple(keys),
            values=tuple(values),
            biases=biases,
        )
        return grads, self._fitted(self.dv, site.k_len, site.v_dim, self.problem.stored_v.shape)
