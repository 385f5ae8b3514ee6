"""Calls with a bias of every pair that is made for some queries at a time: one call of the kernels for each of these.

Nothing of size L_q L_k is held: a part has as many queries as fit into `PART_BYTES`, and at least `LEAST_ROWS`, so that
for many heads the bias of a part is about as large as their keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.counted import CountedBias
from relpos_np._contract.cut import Cut
from relpos_np._contract.problem import Part, Problem
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm
from relpos_np.kernels._numba.forward_pass.gated_positions import BLOCK_ROWS, Counting
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.plan.fields import readable
from relpos_np.types import Array

PART_BYTES = 1 << 26
LEAST_ROWS = 2 * BLOCK_ROWS

Backward = Callable[[Problem, Terms, Array, Array | None], tuple[Terms, Array]]


def needed(terms: Terms) -> bool:
    """Whether a bias is made for some queries at a time."""
    return any(isinstance(bias, CountedBias) for bias in terms.biases)


def part_rows(problem: Problem, terms: Terms, *, backward: bool) -> int:
    """How many queries a part has."""
    return max(LEAST_ROWS, PART_BYTES // max(row_bytes(problem, terms, backward=backward), 1))


def row_bytes(problem: Problem, terms: Terms, *, backward: bool) -> int:
    """Bytes for one query of every head: its biases, on the way back their gradients, and its products with tables."""
    site = problem.site
    counted = [bias for bias in terms.biases if isinstance(bias, CountedBias)]
    # The biases, their sum and that with the mask; gradients, a copy of one, and slopes of gates in float64.
    back = 2 + (len(terms.biases) > 1)
    pairs = (len(counted) + 2) * site.dtype.itemsize + (back * site.dtype.itemsize + 8 if backward else 0)
    positions = sum(8 * int(bias.table.shape[-2]) * (2 if backward else 1) for bias in counted)
    return math.prod(site.batch) * site.heads * (site.k_len * pairs + positions + 32 * site.head_dim)


class _Parts:
    """A call part by part."""

    def __init__(self, problem: Problem, terms: Terms, *, backward: bool) -> None:
        if not readable(problem):
            # Converted once, and not for each part.
            _ = problem.k, problem.v
        self.problem, self.terms, self.whole = problem, terms, Part.of(problem.site)
        self.makers = [Counting(bias) if isinstance(bias, CountedBias) else None for bias in terms.biases]
        self.arrays = tuple(bias for bias in terms.biases if not isinstance(bias, CountedBias))
        self.rows = part_rows(problem, terms, backward=backward)

    def __iter__(self) -> Iterator[tuple[slice, Problem, Terms]]:
        for start in range(0, self.problem.site.q_len, self.rows):
            queries = slice(start, min(start + self.rows, self.problem.site.q_len))
            yield queries, self._problem(queries), self._terms(queries)

    def _problem(self, queries: slice) -> Problem:
        """The call of some queries."""
        problem, site = self.problem, self.problem.site
        own = replace(
            problem,
            stored_q=problem.stored_q[..., queries, :],
            site=replace(site, q_len=queries.stop - queries.start, offset=site.offset + queries.start),
            mask=None if problem.mask is None else problem.mask[..., queries, :],
            keep=None if problem.keep is None else np.ascontiguousarray(problem.keep[..., queries, :]),
            ranges=None if problem.ranges is None else problem.ranges[..., queries, :],
        )
        own._k, own._v = problem._k, problem._v
        return own

    def _terms(self, queries: slice) -> Terms:
        """The terms of some queries."""
        part = replace(self.whole, queries=queries)
        terms = Cut(self.problem.site, part).terms(replace(self.terms, biases=self.arrays))
        rest = iter(terms.biases)
        terms.biases = tuple(next(rest) if maker is None else maker.rows(queries) for maker in self.makers)
        return terms


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float) -> None:
    """As `job.attention`."""
    for queries, part, own in _Parts(problem, terms, backward=False):
        target = np.empty(part.out_shape, out.dtype)
        sums = None if lse is None else np.empty(part.out_shape[:-1], lse.dtype)
        job.attention(part, own, target, sums, unit)
        out[..., queries, :] = target
        if lse is not None and sums is not None:
            lse[..., queries] = sums


def backward(
    problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None, compute: Backward
) -> tuple[Terms, Array]:
    """As the backward pass of the backend, which for one part is `compute`."""
    parts, total = _Parts(problem, terms, backward=True), _Total()
    for queries, part, own in parts:
        lse_part = None if grad_lse is None else grad_lse[..., queries]
        grads, grad_v = compute(part, own, grad_out[..., queries, :], lse_part)
        rest = []
        for maker, ds in zip(parts.makers, grads.biases, strict=True):
            if maker is None:
                rest.append(ds)
            else:
                # Biases of the same shape share one gradient, which `back` overwrites.
                maker.back(queries, ds.copy() if len(grads.biases) > 1 else ds)
        grads.biases = tuple(rest)
        total.add(grads, grad_v, [x.shape[-2] == 1 for x in parts.arrays])
    found, grad_v = total.found(parts.terms, problem.site.dtype)
    others = iter(found.biases)
    found.biases = tuple(next(others) if maker is None else maker.gradient() for maker in parts.makers)
    return found, grad_v


class _Total:
    """Gradients of all parts: side by side what belongs to queries, in sums of float64 what they share."""

    def __init__(self) -> None:
        self.rows: list[list[Array]] = []
        self.sums: list[Array] = []

    def add(self, grads: Terms, grad_v: Array, shared: list[bool]) -> None:
        """Take the gradients of a part; `shared`: biases that all queries have in common."""
        rows = [grads.query, *(t.query for t in grads.queries)]
        sums = [grad_v, grads.key, *(t.table for t in grads.tables), *(t.weights for t in grads.queries)]
        sums += [x for t in grads.keys for x in (t.key, t.weights)] + [t.weights for t in grads.values]
        for bias, common in zip(grads.biases, shared, strict=True):
            (sums if common else rows).append(bias)
        self.shared = shared
        self.rows.append(rows)
        if not self.sums:
            self.sums = [x.astype(np.float64) for x in sums]
        else:
            for total, x in zip(self.sums, sums, strict=True):
                np.add(total, x, out=total)

    def found(self, terms: Terms, dtype: np.dtype[Any]) -> tuple[Terms, Array]:
        """The record of gradients, with the index maps of the call, and that of v."""
        rows = iter(np.concatenate(parts, axis=-2) for parts in zip(*self.rows, strict=True))
        sums = iter(x.astype(dtype, copy=False) for x in self.sums)
        grad_v, found = next(sums), Terms(query=next(rows), key=next(sums))
        found.tables = tuple(TableTerm(next(sums), t.index) for t in terms.tables)
        found.queries = tuple(QueryTerm(next(rows), next(sums), t.index) for t in terms.queries)
        found.keys = tuple(KeyTerm(next(sums), next(sums), t.index) for t in terms.keys)
        found.values = tuple(ValueTerm(next(sums), t.index) for t in terms.values)
        found.biases = tuple(next(sums if common else rows) for common in self.shared)
        return found, grad_v
