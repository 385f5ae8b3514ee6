"""Schemes whose terms are tables that index maps look rows up in: both ways from one statement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relpos_np._contract.terms import IndexMap, KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm
from relpos_np.schemes.base import MemoryBound, Scheme, SchemeGradient, Site
from relpos_np.types import Array

_TERMS: dict[str, Callable[[Array, Array, Array, IndexMap], Any]] = {
    "tables": lambda _q, _k, weights, index: TableTerm(weights, index),
    "queries": lambda q, _k, weights, index: QueryTerm(q, weights, index),
    "keys": lambda _q, k, weights, index: KeyTerm(k, weights, index),
    "values": lambda _q, _k, weights, index: ValueTerm(weights, index),
}


@dataclass(frozen=True, eq=False)
class Lookup:
    """A table of a scheme in the axes of a term, and the row of it that each pair has.

    Attributes
    ----------
    name : str
        The attribute of the scheme that it is made of.
    kind : {"tables", "queries", "keys", "values"}
        Which terms it belongs to.
    weights : ndarray, shape (H, rows), or (H or 1, rows, channels)
        Numbers for each head, or vectors.
    index : Toeplitz or Dense, or callable
        The rows, or what makes them where they take memory and only `lower` needs them.
    back : callable
        From the gradient of `weights` to that of the attribute, but for its shape.
    scaled : bool
        Whether the call's scale multiplies what is looked up.
    """

    name: str
    kind: Literal["tables", "queries", "keys", "values"]
    weights: Array
    index: IndexMap | Callable[[], IndexMap]
    back: Callable[[Array], Array] = np.asarray
    scaled: bool = False


class LookupScheme(Scheme):
    """A scheme that looks rows up, and does nothing else."""

    reads_operand_values = False

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        """What is looked up; several of one attribute are its first axis."""
        raise NotImplementedError

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A term for each table."""
        factor = site.dtype.type(site.scale)
        found: dict[str, list[Any]] = {kind: [] for kind in _TERMS}
        ulps = 0.0
        for one in self._lookups(site):
            ulps = max(ulps, float(one.scaled))
            weights = one.weights * factor if one.scaled else one.weights
            index = one.index() if callable(one.index) else one.index
            found[one.kind].append(_TERMS[one.kind](q, k, weights.astype(site.dtype, copy=False), index))
        tables, queries, keys, values = map(tuple, found.values())
        return Terms(tables=tables, queries=queries, keys=keys, values=values, relative_error_ulps=ulps)

    def memory_bound(self, site: Site) -> MemoryBound:
        """As any scheme; a map that only `lower` needs has a row for every pair."""
        bound = super().memory_bound(site)
        return bound.with_maps(site) if [one for one in self._lookups(site) if callable(one.index)] else bound

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """The gradient of each table, and of the queries and keys that met them."""
        factor = site.dtype.type(site.scale)
        terms = {kind: iter(getattr(grad, kind)) for kind in _TERMS}
        found: dict[str, list[Array]] = {}
        for one in self._lookups(site):
            term = next(terms[one.kind])
            weights = term.table if one.kind == "tables" else term.weights
            weights = weights * factor if one.scaled else weights
            found.setdefault(one.name, []).append(one.back(weights))
        arrays = {
            name: (np.stack(x) if len(x) > 1 else x[0]).reshape(getattr(self, name).shape) for name, x in found.items()
        }
        return SchemeGradient(_sum([x.query for x in grad.queries]), _sum([x.key for x in grad.keys]), arrays)


def _sum(parts: Sequence[Array]) -> Array | None:
    return np.asarray(sum(parts[1:], parts[0])) if parts else None


def per_head(table: Array) -> Array:
    """Vectors for each head, or for all of them along an axis of 1."""
    return table if table.ndim == 3 else table[None]
