"""From a problem and its terms to a few flat arrays on the device, and the launches that use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.attend import ADD, PAIRS, THREADS, VALUE, attend, block_rows
from relpos_np.kernels._cuda.device import download, empty, launch, upload
from relpos_np.kernels._cuda.operand import Operand
from relpos_np.kernels._cuda.product import multiply
from relpos_np.problem import Problem
from relpos_np.terms import IndexMap, Terms, Toeplitz
from relpos_np.types import Array, Int64


class Pool:
    """Arrays of one dtype, one after the other in a flat one."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.parts, self.size = np.dtype(dtype), list[Array](), 0

    def add(self, x: Array) -> int:
        """Append an array; return where it starts."""
        start = self.size
        self.parts.append(np.ascontiguousarray(x, self.dtype).reshape(-1))
        self.size += x.size
        return start

    def joined(self) -> Array:
        """All of them."""
        return np.concatenate(self.parts) if self.parts else np.zeros(0, self.dtype)


def compact(x: Array, axes: int) -> tuple[Array, list[int]]:
    """Without the repetitions of a broadcast array of so many axes: contiguous, and its steps, 0 where it repeats."""
    x = x[(None,) * (axes - x.ndim)]
    x = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)]
    x = np.ascontiguousarray(x)
    return x, [0 if n == 1 else step // x.itemsize for n, step in zip(x.shape, x.strides, strict=True)]


class Planner:
    """Builds one call."""

    def __init__(self, problem: Problem, terms: Terms, operands: tuple[Any, Any, Any]) -> None:
        self.operands = operands
        self.problem, self.terms, self.site = problem, terms, problem.site
        self.count = math.prod(problem.batch)
        self.data, self.index, self.flags = (Pool(dtype) for dtype in (self.site.dtype, np.int32, np.uint8))
        self.meta = Pool(np.int64)
        self.products: list[tuple[Any, ...]] = []
        self.product_size = 0
        # One table of starts serves all that do not differ between batch items.
        self.same = self.meta.add(np.zeros(self.count, np.int64))

    def _batches(self, steps: Sequence[int]) -> int:
        """Where in `meta` the start for each batch item is, from the steps of the batch axes."""
        if not any(steps):
            return self.same
        starts: Int64 = np.zeros((), np.int64)
        for n, step in zip(self.problem.batch, steps, strict=True):
            starts = starts[..., None] + np.arange(n, dtype=np.int64) * step
        return self.meta.add(starts)

    def _operand(self, x: Array | Operand) -> tuple[Any, tuple[int, int, int]]:
        """Queries, keys or values on the device, and their starts per batch item and steps per head and row."""
        if isinstance(x, Operand):
            if x.dtype != self.site.dtype or (x.shape[-1] > 1 and x.strides[-1] != 1):
                x = x.contiguous(self.site.dtype)
            steps = [0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True)]
            steps = [0] * (len(self.problem.batch) + 3 - x.ndim) + steps
            return x.flat, (self._batches(steps[:-3]), *steps[-3:-1])  # type: ignore[return-value]
        # The last axis keeps all its numbers: the kernel steps through it by one.
        flat, steps = compact(x, len(self.problem.batch) + 3)
        if flat.shape[-1] != x.shape[-1]:
            flat, steps = compact(np.ascontiguousarray(x), len(self.problem.batch) + 3)
        return upload(flat.reshape(-1)), (self._batches(steps[:-3]), *steps[-3:-1])  # type: ignore[return-value]

    def _map(self, index: IndexMap) -> tuple[int, ...]:
        """Start, table of starts per batch item, and steps per query and key of an index map."""
        if isinstance(index, Toeplitz):
            return self.index.add(index.lookup) + self.site.q_len - 1, self.same, -1, 1
        flat, steps = compact(index.index, len(self.problem.batch) + 2)
        return self.index.add(flat), self._batches(steps[:-2]), *steps[-2:]

    def _pairs(self, x: Array, pool: Pool) -> tuple[int, ...]:
        """Start, table of starts per batch item, and steps per head, query and key of a number per pair."""
        flat, steps = compact(x, len(self.problem.batch) + 3)
        return pool.add(flat), self._batches(steps[:-3]), *steps[-3:]

    def _product(self, x: Array | Operand, weights: Array) -> tuple[int, tuple[int, int, int]]:
        """Have vectors (..., heads, L, E) multiplied with rows; start, steps per batch item and head, and rows."""
        heads, (length, depth), rows = self.site.heads, x.shape[-2:], weights.shape[-2]
        sizes = self.count, heads, length, rows, depth
        shape = (*self.problem.batch, *x.shape[-3:])
        if isinstance(x, Operand):
            wide: Any = x.broadcast_to(shape).contiguous(self.site.dtype)
        else:
            wide = np.broadcast_to(x, shape)
        start = self.product_size
        self.products.append(
            (wide, np.swapaxes(weights, -1, -2), start, sizes, heads // x.shape[-3], weights.shape[0] == 1)
        )
        self.product_size += math.prod(sizes[:-1])
        return start, (heads * length * rows, length * rows, rows)

    def _each(self, step: int) -> int:
        """Starts per batch item for something that lies there item by item."""
        return self.meta.add(np.arange(self.count, dtype=np.int64) * step)

    def adds(self) -> tuple[int, int]:
        """Every summand of the scores: where its description is, and how many there are."""
        found: list[tuple[int, ...]] = []
        mapped: list[tuple[int, ...]] = []
        for table in self.terms.tables:
            head = table.table.shape[1] if table.table.shape[0] > 1 else 0
            found.append((self.data.add(table.table), self.same, head, 0, 0, 1, *self._map(table.index)))
        for query in self.terms.queries:
            start, (item, head, row) = self._product(query.query, query.weights)
            mapped.append((start, self._each(item), head, row, 0, 1, *self._map(query.index)))
        for key in self.terms.keys:
            start, (item, head, row) = self._product(key.key, key.weights)
            mapped.append((start, self._each(item), head, 0, row, 1, *self._map(key.index)))
        # Last, since their -inf is final.
        mask = self.problem.mask
        for pairs in (*self.terms.biases, *(() if mask is None or mask.dtype == np.bool_ else (mask,))):
            start, *steps = self._pairs(pairs, self.data)
            found.append((start, *steps, 0, -1, self.same, 0, 0))
        return self._listed(found, len(ADD), mapped)

    def _listed(self, found: list[tuple[int, ...]], width: int, mapped: Sequence[Any] = ()) -> tuple[int, int]:
        """Write descriptions to `meta`; products lie behind all other data, which is complete by now."""
        rows = [*((start + self.data.size, *rest) for start, *rest in mapped), *found]
        return self.meta.add(np.array(rows, np.int64).reshape(len(rows), width)), len(rows)

    def values(self) -> tuple[int, int, int]:
        """Every value term: where its description is, how many there are, and the bins that a query needs."""
        found: list[tuple[int, ...]] = []
        bins = 0
        for term in self.terms.values:
            heads, rows, width = term.weights.shape
            head = rows * width if heads > 1 else 0
            found.append((self.data.add(term.weights), head, bins, rows, *self._map(term.index)))
            bins += rows
        return *self._listed(found, len(VALUE)), bins

    def _flags(self, x: Array | None) -> int:
        """Where the description of a byte per pair is; -1: there is none."""
        if x is None or x.dtype != np.bool_:
            return -1
        return self.meta.add(np.array(self._pairs(x, self.flags), np.int64).reshape(len(PAIRS)))

    def run(self, out: Array | Operand, lse: Array | Operand | None) -> None:
        """Copy what is on the host to the device, launch, and copy back what belongs on the host."""
        problem, terms, site = self.problem, self.terms, self.site
        query = self.operands[0] if terms.query is None else terms.query
        key = self.operands[1] if terms.key is None else terms.key
        value = self.operands[2]
        operands, strides = zip(*(self._operand(x) for x in (query, key, value)), strict=True)
        placed = self.meta.add(np.array(strides, np.int64))
        lengths = -1
        if problem.key_lengths is not None:
            lengths = self.meta.add(np.broadcast_to(problem.key_lengths, problem.batch).astype(np.int64))
        values = self.values()
        adds = self.adds()
        mask, keep = self._flags(problem.mask), self._flags(problem.keep)

        data = empty(self.data.size + self.product_size, site.dtype)
        if self.data.size:
            data[: self.data.size].copy_to_device(self.data.joined())
        for x, weights, start, *rest in self.products:
            vectors, rows = (
                part.flat if isinstance(part, Operand) else upload(np.ascontiguousarray(part).reshape(-1))
                for part in (x, weights)
            )
            multiply(vectors, rows, data, self.data.size + start, *rest)

        queries = self.count * site.heads * site.q_len
        result, sums, bins = (
            x.flat if isinstance(x, Operand) and x.dtype == site.dtype else empty(n, site.dtype)
            for n, x in ((out.size, out), (queries, lse), (queries * values[-1], None))
        )
        careful = isinstance(value, Operand) or not np.isfinite(problem.v).all()
        blocks = self.count * site.heads * -(-site.q_len // block_rows(site.dtype))
        real = site.dtype.type
        launch(
            attend(site.dtype, query.shape[-1], site.v_dim, bool(careful)),
            *(blocks, THREADS, *operands, data, upload(self.index.joined()), upload(self.flags.joined())),
            *(upload(self.meta.joined()), result, sums, bins, site.heads, site.q_len, site.k_len),
            *(site.heads // key.shape[-3], site.heads // value.shape[-3], site.offset, problem.left),
            *(problem.right, real(site.scale), real(problem.keep_scale), placed, lengths, *adds, *values, mask, keep),
            int(lse is not None),
        )
        for found, target in ((result, out), (sums, lse)):
            if isinstance(target, Operand):
                if target.flat is not found:
                    target.fill_from(Operand(found, target.shape, target.strides, site.dtype))
            elif target is not None:
                download(found, target)
