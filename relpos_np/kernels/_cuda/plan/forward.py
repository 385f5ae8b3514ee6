"""A call of attention: from a problem and its terms to flat arrays on the device, and the launches that use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import IndexMap, QueryTerm, TableTerm, Terms, Toeplitz
from relpos_np.kernels._cuda.arrays.operand import Operand, contiguous_strides, one_step
from relpos_np.kernels._cuda.forward_pass import decode, matrix, unit
from relpos_np.kernels._cuda.forward_pass.attend import attend, tiling, value_width
from relpos_np.kernels._cuda.forward_pass.product import gemm
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, SCORES, UNCAPPED
from relpos_np.kernels._cuda.launch.device import download, empty, launch, upload, write
from relpos_np.kernels._cuda.launch.records import (
    Add,
    Bins,
    Call,
    Operands,
    Pairs,
    Results,
    Scales,
    Skew,
    Tables,
    Vectors,
)
from relpos_np.kernels._cuda.launch.shared_copies import LARGEST, kept
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS
from relpos_np.kernels._cuda.simd.planes import Block, tiling_for
from relpos_np.types import Array, Int64


class Pool:
    """Arrays of one dtype that become one flat array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.parts, self.size = np.dtype(dtype), list[Array](), 0

    def add(self, x: Array) -> int:
        """Append an array; return where it starts."""
        start = self.size
        self.parts.append(np.ascontiguousarray(x, self.dtype).reshape(-1))
        self.size += x.size
        return start

    def record(self, *fields: int) -> int:
        """Append a record; return where it starts."""
        return self.add(np.array(fields, self.dtype))

    def joined(self) -> Array:
        """All of them, one after the other."""
        return np.concatenate(self.parts) if self.parts else np.zeros(0, self.dtype)


def compact(x: Array, axes: int) -> tuple[Array, list[int]]:
    """A broadcast array with `axes` axes, stored once: contiguous, and its steps, 0 along axes that repeat."""
    x = x[(None,) * (axes - x.ndim)]
    x = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.strides)]
    x = np.ascontiguousarray(x)
    return x, [0 if n == 1 else step // x.itemsize for n, step in zip(x.shape, x.strides, strict=True)]


def values_along(term: TableTerm) -> Array:
    """The values of a table by relative position: (H or 1, L_q + L_k - 1)."""
    assert isinstance(term.index, Toeplitz)
    lookup = term.index.lookup
    picked: Array = term.table[:, np.maximum(lookup, 0)]
    return np.where(lookup < 0, term.table.dtype.type(0), picked) if term.index.gaps else picked


def strides_of_keys(step: int, offset: int, q_len: int, k_len: int) -> tuple[int, int]:
    """The `step` and `phase` of a `Call` whose attended keys are at distances that are multiples of a step.

    Both are below 3 (L_q + L_k), however large the step and the offset are: kernels divide 32 bits.
    """
    span, attended = q_len + k_len, offset % step
    if step > span:
        # At most one difference j - i is attended: this one, or one that no pair has.
        attended -= 0 if attended < k_len else step
        step, attended = span, max(attended, -q_len)
    return step, -attended + step * -(-(attended + q_len) // step)


# Toeplitz maps with more rows than this have their products made tile by tile: a tile has this many positions.
FEW_ROWS = 128


class Forward:
    """One call of attention; `fused` if the kernel makes products with a row for each relative position itself.

    `on_matrix_units` if its products may be made there, where the environment says so.
    """

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        operands: tuple[Any, Any, Any],
        *,
        fused: bool = False,
        on_matrix_units: bool = False,
    ) -> None:
        self.problem, self.terms, self.site = problem, terms, problem.site
        # For few queries all products are made ahead.
        self.fused = fused and problem.site.q_len > decode.MOST_ROWS
        self.on_matrix_units = on_matrix_units
        self.count = math.prod(problem.batch)
        self.data, self.index, self.flags = (Pool(dtype) for dtype in (self.site.dtype, np.int32, np.uint8))
        self.meta = Pool(np.int64)
        self.products: list[tuple[Any, ...]] = []
        self.product_size = 0
        # The table of starts for everything that batch items share.
        self.same = self.meta.add(np.zeros(self.count, np.int64))
        self.copies: list[tuple[Operand, int]] = []
        query, key, value = operands
        self.query = query if terms.query is None else terms.query
        self.key = key if terms.key is None else terms.key
        found = [self._operand(x) for x in (self.query, self.key, value)]
        self.operands = Operands(*(flat for flat, _, _ in found))
        self.strides = [Vectors(0, *steps) for _, steps, _ in found]
        self.formats = found[0][2], found[1][2], found[2][2]

    def _batches(self, steps: Sequence[int]) -> int:
        """Where in `meta` the starts of the batch items are, from the steps of the batch axes."""
        if not any(steps):
            return self.same
        starts: Int64 = np.zeros((), np.int64)
        for n, step in zip(self.problem.batch, steps, strict=True):
            starts = starts[..., None] + np.arange(n, dtype=np.int64) * step
        return self.meta.add(starts)

    def _vectors(self, x: Array) -> tuple[Array, tuple[int, int, int]]:
        """Vectors (..., heads, length, channels), stored once, and their steps per batch item, head and row."""
        flat, steps = compact(x, len(self.problem.batch) + 3)
        # Kernels step through the last axis by one, so that it may not repeat.
        if flat.shape[-1] != x.shape[-1]:
            flat, steps = compact(np.ascontiguousarray(x), len(self.problem.batch) + 3)
        return flat.reshape(-1), self._steps(flat.shape, steps)

    def _operand(self, x: Array | Operand) -> tuple[Any, tuple[int, int, int], str]:
        """Queries, keys or values on the device, their steps, and their format."""
        if isinstance(x, Operand):
            if x.shape[-1] > 1 and x.strides[-1] != 1:
                x = x.contiguous()
            return x.flat, self._steps(x.shape, x.strides), x.dtype.name
        flat, steps = self._vectors(x)
        stored: Array = flat.view(FORMATS[x.dtype.name][1])
        return upload(stored), steps, x.dtype.name

    def _steps(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
        """The table of starts per batch item, and steps per head and row."""
        steps = [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]
        steps = [0] * (len(self.problem.batch) + 3 - len(steps)) + steps
        return self._batches(steps[:-3]), steps[-3], steps[-2]

    def _strip(self) -> tuple[int, int]:
        """All tables on Toeplitz maps, summed by relative position: where distance 0 is, and the step per head."""
        found = [term for term in self.terms.tables if isinstance(term.index, Toeplitz)]
        if not found:
            return -1, 0
        total = reduce(np.add, (values_along(term) for term in found))
        return self.data.add(total) + self.site.q_len - 1, total.shape[1] if total.shape[0] > 1 else 0

    def _map(self, index: IndexMap) -> tuple[int, int, int, int]:
        """An index map: its start, the table of starts per batch item, and steps per query and key."""
        if isinstance(index, Toeplitz):
            return self.index.add(index.lookup) + self.site.q_len - 1, self.same, -1, 1
        flat, steps = compact(index.index, len(self.problem.batch) + 2)
        return self.index.add(flat), self._batches(steps[:-2]), steps[-2], steps[-1]

    def _pairs(self, x: Array, pool: Pool) -> Pairs:
        """Put a number per pair into a pool."""
        flat, steps = compact(x, len(self.problem.batch) + 3)
        return Pairs(pool.add(flat), self._batches(steps[:-3]), *steps[-3:])

    def _product(self, x: Array | Operand, weights: Array) -> Vectors:
        """Have vectors (..., heads, L, E) multiplied by rows; returns where the products will be."""
        heads, (length, depth), rows = self.site.heads, x.shape[-2:], weights.shape[-2]
        sizes = self.count, heads, length, rows, 1, depth
        start = self.product_size
        self.products.append((*self._stepped(x), weights, start, sizes, heads // x.shape[-3]))
        self.product_size += math.prod(sizes[:4])
        each = self.meta.add(np.arange(self.count, dtype=np.int64) * (heads * length * rows))
        return Vectors(start, each, length * rows, rows)

    def _stepped(self, x: Array | Operand) -> tuple[Any, tuple[int, ...], str]:
        """Vectors on the device, their steps per batch item, head, (nothing), vector and channel, and their format."""
        lead = len(self.problem.batch)
        if isinstance(x, Operand):
            strides = x.broadcast_to((*self.problem.batch, *x.shape[-3:])).strides
            batch = one_step(self.problem.batch, strides[:lead])
            if batch is None:
                x = x.broadcast_to((*self.problem.batch, *x.shape[-3:])).contiguous()
                strides = x.strides
                batch = math.prod(x.shape[-3:])
            return x.flat, (batch, strides[-3], 0, *strides[-2:]), x.dtype.name
        flat, steps = compact(x, lead + 3)
        step = one_step(self.problem.batch, steps[:lead])
        if step is None:
            wide = np.broadcast_to(x, (*self.problem.batch, *x.shape[-3:]))
            flat, steps = compact(np.ascontiguousarray(wide), lead + 3)
            step = math.prod(x.shape[-3:])
        return upload(flat.reshape(-1)), (step, steps[-3], 0, *steps[-2:]), x.dtype.name

    def _is_fused(self, term: QueryTerm) -> bool:
        """Whether the kernel makes a term's products."""
        return self.fused and isinstance(term.index, Toeplitz) and term.index.rows > FEW_ROWS

    def skews(self) -> tuple[int, int]:
        """Write a record of every product that the kernel makes; returns where they begin and how many there are."""
        found, copied = list[Skew](), list[Skew]()
        for term in self.terms.queries:
            if not self._is_fused(term):
                continue
            assert isinstance(term.index, Toeplitz)
            heads, rows, depth = term.weights.shape
            head = rows * depth if heads > 1 else 0
            tail = (self.data.add(term.weights), head, depth, self.index.add(term.index.lookup) + self.site.q_len - 1)
            query: Any = term.query
            if isinstance(query, Operand):
                copied.append(Skew(*self._copied(query), *tail))
            else:
                flat, steps = self._vectors(query)
                found.append(Skew(self.data.add(flat), *steps, *tail))
        return self._listed(found, copied)

    def _copied(self, x: Operand) -> tuple[int, int, int, int]:
        """Have vectors copied behind all other data; returns where they will be."""
        start = self.product_size
        self.copies.append((x, start))
        self.product_size += x.size
        return start, *self._steps(x.shape, contiguous_strides(x.shape))

    def adds(self) -> tuple[int, int]:
        """Write a record of every summand of the scores; returns where they begin and how many there are."""
        found, mapped = list[Add](), list[Add]()
        for table in self.terms.tables:
            if isinstance(table.index, Toeplitz):
                continue
            head = table.table.shape[1] if table.table.shape[0] > 1 else 0
            found.append(Add(self.data.add(table.table), self.same, head, 0, 0, 1, *self._map(table.index)))
        for query in self.terms.queries:
            if self._is_fused(query):
                continue
            start, batch, head, row = self._product(query.query, query.weights)
            mapped.append(Add(start, batch, head, row, 0, 1, *self._map(query.index)))
        for key in self.terms.keys:
            start, batch, head, row = self._product(key.key, key.weights)
            mapped.append(Add(start, batch, head, 0, row, 1, *self._map(key.index)))
        # Last, since their -inf is final.
        mask = self.problem.mask
        for pairs in (*self.terms.biases, *(() if mask is None or mask.dtype == np.bool_ else (mask,))):
            found.append(Add(*self._pairs(pairs, self.data), 0, -1, self.same, 0, 0))
        return self._listed(found, mapped)

    def _listed(self, found: Sequence[Any], mapped: Sequence[Any] = ()) -> tuple[int, int]:
        """Write records to `meta`. Those `mapped` lie behind all other data, which is complete by now."""
        records = [*(record._replace(start=record.start + self.data.size) for record in mapped), *found]
        return self.meta.record(*(field for record in records for field in record)), len(records)

    def multiplied(self) -> Any:
        """All data on the device where kernels write to it: tables, copies of vectors, products."""
        data = empty(self.data.size + self.product_size, self.site.dtype)
        numbers = self.data.joined()
        # What is small is on the device already if calls repeat.
        write(data, kept(numbers)[0] if 0 < numbers.nbytes <= LARGEST else numbers, numbers.size)
        for operand, start in self.copies:
            copy = data[self.data.size + start : self.data.size + start + operand.size]
            Operand(copy, operand.shape, contiguous_strides(operand.shape), self.site.dtype).fill_from(operand)
        for x, steps, name, weights, start, sizes, group in self.products:
            _, heads, length, rows, _, depth = sizes
            (table,) = kept(np.ascontiguousarray(weights).reshape(-1))
            by_table = 0, rows * depth if weights.shape[0] > 1 else 0, 0, 1, depth
            by_result = heads * length * rows, length * rows, rows, 1
            at = self.data.size + start
            gemm(x, 0, steps, table, 0, by_table, data, at, by_result, sizes, a_group=group, stored=name)
        return data

    def values(self) -> tuple[int, int, int]:
        """Write a record of every value term; returns where they begin, how many there are, and the bins of a query."""
        found, bins = list[Bins](), 0
        for term in self.terms.values:
            heads, rows, width = term.weights.shape
            head = rows * width if heads > 1 else 0
            found.append(Bins(self.data.add(term.weights), head, bins, rows, *self._map(term.index)))
            bins += rows
        return *self._listed(found), bins

    def _flags(self, x: Array | None) -> int:
        """Where the record of a byte per pair is, or -1."""
        if x is None or x.dtype != np.bool_:
            return -1
        return self.meta.record(*self._pairs(x, self.flags))

    def _ranges(self) -> tuple[int, int]:
        """Where the range of keys of the first query is that a rule leaves, or -1, and the step per batch item."""
        ranges = self.problem.ranges
        if ranges is None:
            return -1, 0
        flat, steps = compact(ranges, len(self.problem.batch) + 2)
        if any(steps[:-2]):
            flat = np.ascontiguousarray(ranges)
        return self.meta.add(flat.astype(np.int64)), 2 * self.site.q_len if any(steps[:-2]) else 0

    @property
    def capped(self) -> int:
        """Which kernels: without a cap, with one for all scores, or for products alone."""
        return (CONTENT if self.problem.cap_content else SCORES) if self.problem.softcap else UNCAPPED

    def call(self) -> Call:
        """The integers of the call. Fills the pools."""
        problem, site = self.problem, self.site
        lengths = -1
        if problem.key_lengths is not None:
            lengths = self.meta.add(np.broadcast_to(problem.key_lengths, problem.batch).astype(np.int64))
        strip, strip_head = self._strip()
        ranges, ranges_batch = self._ranges()
        step, phase = strides_of_keys(problem.step, site.offset, site.q_len, site.k_len)
        values, n_values, n_bins = self.values()
        skews, n_skews = self.skews()
        adds, n_adds = self.adds()
        query, key, value = (self.meta.record(*vectors) for vectors in self.strides)
        return Call(
            heads=site.heads,
            q_len=site.q_len,
            k_len=site.k_len,
            k_group=site.heads // self.key.shape[-3],
            v_group=site.heads // site.kv_heads,
            offset=site.offset,
            left=problem.left,
            right=problem.right,
            query=query,
            key=key,
            value=value,
            lengths=lengths,
            strip=strip,
            strip_head=strip_head,
            skews=skews,
            n_skews=n_skews,
            adds=adds,
            n_adds=n_adds,
            n_outer=int(problem.mask is not None and problem.mask.dtype != np.bool_),
            cap_content=int(problem.cap_content),
            ranges=ranges,
            ranges_batch=ranges_batch,
            step=step,
            phase=phase,
            mask=self._flags(problem.mask),
            keep=self._flags(problem.keep),
            values=values,
            n_values=n_values,
            n_bins=n_bins,
            v_dim=site.v_dim,
            wants_lse=0,
            lse_apart=0,
        )

    def start(self, out: Any = None, lse: Any = None, *, wants_lse: bool, apart: bool = False) -> tuple[Any, Any]:
        """Copy to the device what is not there, and launch; returns outputs and log-sum-exps there, flat.

        They are written into `out` and `lse` where these are `Operand`. `apart`: see `Call.lse_apart`.
        """
        site, call = self.site, self.call()
        integers = [pool.joined() for pool in (self.index, self.flags, self.meta)]
        if self.product_size:
            self.tables = Tables(self.multiplied(), *kept(*integers))
        else:
            self.tables = Tables(*kept(self.data.joined(), *integers))
        queries = self.count * site.heads * site.q_len
        result = out.flat if isinstance(out, Operand) else empty(queries * site.v_dim, site.dtype)
        # Not written to, but it must have an address.
        (nothing,) = kept(np.zeros(1, site.dtype))
        size = 2 * queries if apart else queries
        sums = lse.flat if isinstance(lse, Operand) else empty(size, site.dtype) if wants_lse else nothing
        formats = (*self.formats, out.dtype.name if isinstance(out, Operand) else site.dtype.name)
        call = call._replace(wants_lse=int(wants_lse), lse_apart=queries if apart else 0)
        real = site.dtype.type
        self.scales = Scales(real(site.scale), real(self.problem.keep_scale), real(self.problem.softcap))
        depth = self.query.shape[-1]
        small = decode.block_for(call, depth, site.dtype)
        steps = [np.append(integers[-1][x.batch : x.batch + self.count], (x.head, x.row)) for x in self.strides]
        if small is not None:
            given = self.operands, self.tables, (result, sums), call, formats, steps[1:], queries, self.scales
            decode.run(small, *given)
            return result, sums
        skewed = call.n_skews > 0
        multiplied = unit.multiplied(self.problem, self.terms, self.formats) if self.on_matrix_units else None
        if multiplied is None:
            width = value_width(site.dtype, site.v_dim)
            sizes = tiling(site.dtype, width, skewed)
            kernel = attend(sizes, formats, depth, width, skewed, self.capped)
        else:
            width = unit.value_width(site.v_dim)
            lengths = depth, depth, site.v_dim
            sources = map(unit.source, self.operands, self.formats, lengths, steps)
            crowded = skewed or self.capped != UNCAPPED
            sizes = tiling_for(width, multiplied.planes, crowded=crowded)
            kernel = matrix.attend(Block(sizes, *multiplied, depth, width, skewed, *sources), formats[-1], self.capped)
        parts = -(-site.v_dim // width)
        bins = queries * parts * call.n_bins
        results = Results(result, sums, empty(bins, site.dtype) if bins else nothing)
        launch(
            *(kernel, self.count * site.heads * parts * -(-site.q_len // sizes.rows), sizes.threads),
            *(self.operands, self.tables, results, call, self.scales),
        )
        return result, sums

    def run(self, out: Array | Operand, lse: Array | Operand | None) -> None:
        """Fill arrays of the host or of the device."""
        found = self.start(out, lse, wants_lse=lse is not None)
        for x, target in zip(found, (out, lse), strict=True):
            if isinstance(target, np.ndarray):
                download(x, target)
