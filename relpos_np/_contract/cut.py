"""The terms of a part of a call, cut from those of all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import Part, Site
from relpos_np._contract.terms import (
    KeyTerm,
    QueryTerm,
    TableTerm,
    Terms,
    ValueTerm,
    ValueTurn,
    cut_map,
    of_batch,
    with_maps,
)
from relpos_np._contract.turned import Turned
from relpos_np.types import Array


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
class Cut:
    """Cuts a record of terms to a part of the call `site`.

    `given`: arrays that stand in for operands, each with what makes the part of that operand.
    """

    site: Site
    part: Part
    given: tuple[tuple[Array, Callable[[], Array]], ...] = ()

    def operand(self, x: Any, heads: slice, rows: slice) -> Any:
        """A vector per query or key: an operand itself, or what the scheme holds."""
        for stand_in, own in self.given:
            if x is stand_in:
                return own()
        if isinstance(x, Turned):
            own_parts = {name: self.operand(getattr(x, name), heads, rows) for name in ("x", "cos", "sin")}
            return replace(x, **own_parts)
        return self.batch_items(_along(_along(x, -2, rows), -3, heads), 3)

    def of_key(self, x: Any) -> Any:
        """A vector per key, of the heads of keys, or of those of queries where a scheme makes them for each."""
        own = x.shape[-3] == self.site.heads
        return self.operand(x, self.part.heads if own else self.part.kv_heads, self.part.keys)

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
        of_query = (heads, part.queries)
        terms = with_maps(terms, lambda index: cut_map(index, *at))
        queries = [(self.operand(t.query, *of_query), t) for t in terms.queries]
        keys = [(self.of_key(t.key), t) for t in terms.keys]
        return Terms(
            query=None if terms.query is None else self.operand(terms.query, *of_query),
            key=None if terms.key is None else self.of_key(terms.key),
            tables=tuple(TableTerm(_of_heads(t.table, heads), t.index) for t in terms.tables),
            queries=tuple(QueryTerm(x, _of_heads(t.weights, heads), t.index) for x, t in queries),
            keys=tuple(KeyTerm(x, _of_heads(t.weights, heads), t.index) for x, t in keys),
            values=tuple(ValueTerm(_of_heads(t.weights, heads), t.index) for t in terms.values),
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
