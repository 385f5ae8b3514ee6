"""Calls with numbers of every pair that are made for some queries at a time: one call of the kernels for each of these.

The numbers are biases, or index maps of given positions. Nothing of size L_q L_k is held. How many queries a part has
depends neither on the batch and heads nor on the number of keys, so that bits do not either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.counted import CountedBias
from relpos_np._contract.cut import Cut
from relpos_np._contract.placed import Placed, placed_maps
from relpos_np._contract.problem import Part, Problem
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm, with_maps
from relpos_np.kernels._numba.forward_pass.gated_positions import BLOCK_ROWS, Counting
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.plan.fields import readable
from relpos_np.types import Array

# Few enough that for many heads the bias of a part is about as large as their keys, and for maps as many as take little
# longer than all at once.
BIAS_ROWS, MAP_ROWS = 2 * BLOCK_ROWS, 1024

Backward = Callable[..., tuple[Terms, Array]]


def needed(terms: Terms) -> bool:
    """Whether something is made for some queries at a time."""
    return counted(terms) or bool(placed_maps(terms))


def counted(terms: Terms) -> bool:
    """Whether that is a bias."""
    return any(isinstance(bias, CountedBias) for bias in terms.biases)


def whole(problem: Problem, terms: Terms) -> Terms | None:
    """The terms with all that is made for some queries at a time, if that is little and can be made at once."""
    if not needed(terms):
        return terms
    if counted(terms) or number_of_parts(problem, terms) > 1:
        return None
    return _made(problem, terms)


def _made(problem: Problem, terms: Terms) -> Terms:
    """The terms with index maps as the kernels read them."""
    return with_maps(terms, lambda index: index.made(problem.batch) if isinstance(index, Placed) else index)


def number_of_parts(problem: Problem, terms: Terms) -> int:
    """How many calls of the kernels, each with as many queries as the others, or one more."""
    rows = BIAS_ROWS if counted(terms) else problem.site.q_len
    if placed_maps(terms):
        # Each part multiplies keys with tables anew, which is to take little beside its own products.
        tables = 4 * max((term.weights.shape[-2] for term in terms.keys), default=0)
        rows = min(rows, max(MAP_ROWS, tables))
    return -(-problem.site.q_len // rows)


class _Parts:
    """A call part by part."""

    def __init__(self, problem: Problem, terms: Terms) -> None:
        if not readable(problem):
            # Converted once, and not for each part.
            _ = problem.k, problem.v
        self.problem, self.terms, self.whole = problem, terms, Part.of(problem.site)
        self.makers = [Counting(bias) if isinstance(bias, CountedBias) else None for bias in terms.biases]
        self.arrays = tuple(bias for bias in terms.biases if not isinstance(bias, CountedBias))
        self.count = number_of_parts(problem, terms)

    def __iter__(self) -> Iterator[tuple[slice, Problem, Terms]]:
        starts = [n * self.problem.site.q_len // self.count for n in range(self.count + 1)]
        for queries in map(slice, starts, starts[1:]):
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
        terms = _made(self.problem, Cut(self.problem.site, part).terms(replace(self.terms, biases=self.arrays)))
        rest = iter(terms.biases)
        terms.biases = tuple(next(rest) if maker is None else maker.rows(queries) for maker in self.makers)
        return terms


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float) -> None:
    """As `job.attention`."""
    at_once = whole(problem, terms)
    if at_once is not None:
        job.attention(problem, at_once, out, lse, unit)
        return
    for queries, part, own in _Parts(problem, terms):
        target = np.empty(part.out_shape, out.dtype)
        sums = None if lse is None else np.empty(part.out_shape[:-1], lse.dtype)
        job.attention(part, own, target, sums, unit)
        out[..., queries, :] = target
        if lse is not None and sums is not None:
            lse[..., queries] = sums
        # Before another part is made.
        del part, own


def backward(
    problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None, compute: Backward, *, stored: bool
) -> tuple[Terms, Array]:
    """As the backward pass of the backend, which for one part is `compute`."""
    at_once = whole(problem, terms)
    if at_once is not None:
        return compute(problem, at_once, grad_out, grad_lse, stored=stored)
    parts, total = _Parts(problem, terms), _Total()
    for queries, part, own in parts:
        lse_part = None if grad_lse is None else grad_lse[..., queries]
        grads, grad_v = compute(part, own, grad_out[..., queries, :], lse_part, stored=False)
        rest = []
        for maker, ds in zip(parts.makers, grads.biases, strict=True):
            if maker is None:
                rest.append(ds)
            else:
                # Biases of the same shape share one gradient, which `back` overwrites.
                maker.back(queries, ds.copy() if len(grads.biases) > 1 else ds)
        grads.biases = tuple(rest)
        total.add(grads, grad_v, [x.shape[-2] == 1 for x in parts.arrays])
        del part, own, grads, grad_v
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
