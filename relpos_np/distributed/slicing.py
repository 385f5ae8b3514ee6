"""The terms of a part of a call: those of the call, or of little more than the part, cut to the part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import lowering, stated
from relpos_np._calls.lowering import all_terms
from relpos_np._contract.problem import Part, Problem, Site
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm, ValueTurn, cut_map, of_batch
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

Narrowed = tuple[tuple[Scheme, Site, Part], ...]


def _of_heads(x: Array, heads: slice) -> Array:
    """The part of a table that belongs to some heads; a table of one head serves all of them."""
    return x if len(x) == 1 else x[heads]


def _along(x: Array, axis: int, some: slice) -> Array:
    """Some entries along an axis, which may be missing or have one entry for all."""
    if x.ndim < -axis or x.shape[axis] == 1:
        return x
    index: tuple[Any, ...] = (..., some, *(slice(None),) * (-axis - 1))
    return np.asarray(x[index])


@dataclass(slots=True)
class _Cut:
    """Cuts a record of terms, and puts the operands of `problem` where it finds their stand-ins `q` and `k`."""

    site: Site
    part: Part
    q: Array
    k: Array
    problem: Problem

    def operand(self, x: Array, heads: slice, rows: slice) -> Array:
        """A vector per query or key: an operand itself, or what the scheme holds."""
        if x is self.q:
            return self.problem.q
        if x is self.k:
            return self.problem.k
        return self.batch_items(_along(_along(x, -2, rows), -3, heads), 3)

    def batch_items(self, x: Array, inner: int) -> Array:
        """What is held per batch item."""
        return of_batch(x, inner, self.part.batch) if x.ndim > inner else x

    def bias(self, x: Array) -> Array:
        """Numbers of pairs, (..., H, L_q, L_k)."""
        x = _along(_along(_along(x, -1, self.part.keys), -2, self.part.queries), -3, self.part.heads)
        return self.batch_items(x, 3)

    def terms(self, terms: Terms) -> Terms:
        """The record of the part."""
        part, heads = self.part, self.part.heads
        at = (self.site.q_len, part.queries, part.keys, part.batch)
        of_query, of_key = (heads, part.queries), (part.kv_heads, part.keys)
        tables, values = terms.tables, terms.values
        queries = [(self.operand(t.query, *of_query), t.weights, t.index) for t in terms.queries]
        keys = [(self.operand(t.key, *of_key), t.weights, t.index) for t in terms.keys]
        return Terms(
            tables=tuple(TableTerm(_of_heads(t.table, heads), cut_map(t.index, *at)) for t in tables),
            queries=tuple(QueryTerm(x, _of_heads(w, heads), cut_map(index, *at)) for x, w, index in queries),
            keys=tuple(KeyTerm(x, _of_heads(w, heads), cut_map(index, *at)) for x, w, index in keys),
            values=tuple(ValueTerm(_of_heads(t.weights, heads), cut_map(t.index, *at)) for t in values),
            biases=tuple(self.bias(x) for x in terms.biases),
            turn=None if terms.turn is None else self.turn(terms.turn),
        )

    def turn(self, turn: ValueTurn) -> ValueTurn:
        """The factors of the part's values and of its output."""
        part = self.part

        def cut(factors: tuple[Array, Array], heads: slice, rows: slice) -> tuple[Array, Array]:
            real, imaginary = (self.batch_items(_along(x[..., rows, :], -3, heads), 3) for x in factors)
            return real, imaginary

        key, query = cut(turn.key, part.kv_heads, part.keys), cut(turn.query, part.heads, part.queries)
        return replace(turn, key=key, query=query)


def _stand_ins(site: Site) -> tuple[Array, Array]:
    """Queries and keys of the whole call without the memory, which nothing computes with: NaN everywhere."""
    nan = np.full((), np.nan, site.dtype)
    q = np.broadcast_to(nan, (*site.batch, site.heads, site.q_len, site.head_dim))
    return q, np.broadcast_to(nan, (*site.batch, site.kv_heads, site.k_len, site.head_dim))


def lowered(narrowed: tuple[Scheme, Site, Part], problem: Problem) -> Terms:
    """The terms of one scheme, as its `narrow` prepared it, for the part whose operands `problem` holds."""
    scheme, site, part = narrowed
    if part == Part.of(site):
        return lowering.lowered(scheme, problem, site)
    if scheme.computes:
        raise RelposValueError(
            f"position: {scheme!r} cannot be computed for a part of a call, since it computes with queries or keys "
            "and does not say how it is narrowed"
        )
    q, k = _stand_ins(site)
    return _Cut(site, part, q, k, problem).terms(stated.checked(scheme, scheme.lower(q, k, site), site))


def compute(name: str, problem: Problem, narrowed: Narrowed) -> tuple[Array, Array]:
    """Output and log-sum-exp of a part whose schemes are narrowed."""
    with np.errstate(all="ignore"):
        terms = all_terms([lowered(one, problem) for one in narrowed])
        out, lse = _backend.evaluate(name, problem, terms, None, True, problem.site.dtype)
    assert lse is not None
    return out, lse


def evaluating(name: str | None) -> str:
    """A backend that evaluates terms."""
    chosen = _backend.current(name)
    if chosen == "numpy":
        raise RelposValueError(
            f"backend: parts of a call are computed from terms; expected 'terms', 'numba' or 'cuda', found {chosen!r}"
        )
    return chosen


def lengths_here(lengths: Array, keys: slice) -> Array:
    """How many of these keys exist, from how many exist in all."""
    return np.asarray(np.clip(lengths - keys.start, 0, keys.stop - keys.start))
