"""The terms of a part of a call: those of the call, or of little more than the part, cut to the part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relpos_np.errors import RelposValueError
from relpos_np.problem import Part, Problem, Site
from relpos_np.schemes.base import Scheme
from relpos_np.terms import KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm, of_batch
from relpos_np.types import Array


def _of_heads(x: Array, heads: slice) -> Array:
    """A table of all heads, or of one for all of them."""
    return x if len(x) == 1 else x[heads]


def _along(x: Array, axis: int, some: slice) -> Array:
    """Some entries along an axis that may be missing, or 1 for all."""
    if x.ndim < -axis or x.shape[axis] == 1:
        return x
    return x[(..., some, *(slice(None),) * (-axis - 1))]


@dataclass(slots=True)
class _Cut:
    """Cuts a record of terms; `q` and `k` stand in for operands, and those of `problem` take their places."""

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
        return of_batch(x, inner, self.part.batch) if x.ndim > inner else x

    def terms(self, terms: Terms) -> Terms:
        part, q_len = self.part, self.site.q_len
        at = (q_len, part.queries, part.keys, part.batch)
        return Terms(
            tables=tuple(TableTerm(_of_heads(t.table, part.heads), t.index.cut(*at)) for t in terms.tables),
            queries=tuple(
                QueryTerm(
                    self.operand(t.query, part.heads, part.queries), _of_heads(t.weights, part.heads), t.index.cut(*at)
                )
                for t in terms.queries
            ),
            keys=tuple(
                KeyTerm(
                    self.operand(t.key, part.kv_heads, part.keys), _of_heads(t.weights, part.heads), t.index.cut(*at)
                )
                for t in terms.keys
            ),
            values=tuple(ValueTerm(_of_heads(t.weights, part.heads), t.index.cut(*at)) for t in terms.values),
            biases=tuple(
                self.batch_items(_along(_along(_along(x, -1, part.keys), -2, part.queries), -3, part.heads), 3)
                for x in terms.biases
            ),
        )


def _own(terms: Terms, q: Array, k: Array) -> list[Array]:
    """What a scheme made for queries, keys and pairs."""
    made = [t.query for t in terms.queries] + [t.key for t in terms.keys] + list(terms.biases)
    return [x for x in made if x is not q and x is not k]


def _stand_ins(site: Site, number: float) -> tuple[Array, Array]:
    """Queries and keys of the whole call without the memory: one number seen at every place."""
    lengths = ((site.heads, site.q_len), (site.kv_heads, site.k_len))
    x = np.full((), number, site.dtype)
    q, k = (np.broadcast_to(x, (*site.batch, *shape, site.head_dim)) for shape in lengths)
    return q, k


def lowered(narrowed: tuple[Scheme, Site, Part], problem: Problem) -> Terms:
    """The terms of one scheme, as its `narrow` prepared it, for the part whose operands `problem` holds."""
    scheme, site, part = narrowed
    if part == Part.of(site):
        return scheme.lower(problem.q, problem.k if scheme.reads_keys else problem.stored_k, site)
    # A scheme that computes with queries or keys is noticed by what cannot be computed with.
    q, k = _stand_ins(site, np.nan)
    terms = scheme.lower(q, k, site)
    depends = scheme.content or terms.query is not None or terms.key is not None
    if not depends and any(np.isnan(x).any() for x in _own(terms, q, k)):
        zeros = _stand_ins(site, 0.0)
        depends = not any(np.isnan(x).any() for x in _own(scheme.lower(*zeros, site), *zeros))
    if depends:
        raise RelposValueError(
            f"position: {scheme!r} cannot be computed for a part of a call, since it computes with queries or keys "
            "and does not say how it is narrowed"
        )
    return _Cut(site, part, q, k, problem).terms(terms)
