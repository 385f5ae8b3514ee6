"""What terms add to the scores and to the output, as nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Dense, IndexMap, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm
from relpos_np.interop.onnx.operand import Traced, UntracedError
from relpos_np.interop.onnx.places import Places
from relpos_np.types import Array


def _padded(x: Array, index: IndexMap, axis: int) -> Array:
    """A table with one more row of zeros, for pairs that have no row."""
    if not index.gaps:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, 1)
    return np.pad(x, widths)


class Added:
    """Sums of what the terms of a call add.

    Parameters
    ----------
    places : Places
        The graph, and where queries and keys stand.
    problem : Problem
        The call that was lowered.
    """

    def __init__(self, places: Places, problem: Problem) -> None:
        self.places, self.graph, self.site = places, places.graph, problem.site

    def rows(self, index: IndexMap) -> str:
        """The row of each pair, that after the last one for none: (L_q, L_k), or (B, 1, L_q, L_k) where items differ.

        Parameters
        ----------
        index : Toeplitz or Dense
            The map.

        Returns
        -------
        str
            Name of the integers.
        """
        graph = self.graph
        given = index.lookup if isinstance(index, Toeplitz) else index.index
        if self._by_item(index) and isinstance(index, Dense):
            given = given[:, None]
        stored = graph.constant(np.where(given < 0, index.rows, given).astype(np.int64), "rows")
        if isinstance(index, Toeplitz):
            return graph.add("Gather", stored, self.places.lookup, name="row", axis=0)
        if self.places.symbolic:
            raise UntracedError("a map pair by pair, where lengths are not fixed")
        return stored

    def _by_item(self, index: IndexMap) -> bool:
        """Whether batch items have rows of their own."""
        return index.index.ndim > 2 if isinstance(index, Dense) else self.places.by_item

    def _for_all_heads(self, index: IndexMap, *, turned: bool = False) -> str:
        """Rows as GatherElements asks for them: (B, H, L_q, L_k), or (B, H, L_k, L_q)."""
        graph = self.graph
        wide = graph.add("Expand", self.rows(index), self.places.pairs)
        return graph.transposed(wide, 0, 1, 3, 2) if turned else wide

    def table(self, term: TableTerm) -> str:
        """Scalars that are looked up.

        Parameters
        ----------
        term : TableTerm
            The term.

        Returns
        -------
        str
            Of shape (1 or B, H or 1, L_q, L_k).
        """
        graph = self.graph
        table = graph.constant(_padded(term.table, term.index, 1), "table")
        found = graph.add("Gather", table, self.rows(term.index), name="bias", axis=1)
        if self._by_item(term.index):
            # (H or 1, B, 1, L_q, L_k)
            return graph.transposed(graph.add("Squeeze", found, graph.integers(2)), 1, 0, 2, 3)
        return graph.add("Unsqueeze", found, graph.integers(0))

    def _picked(self, x: str, weights: Array, index: IndexMap, *, turned: bool) -> str:
        """Products of vectors (B, H, L, E) with rows, that of each pair."""
        graph = self.graph
        padded = np.ascontiguousarray(np.swapaxes(_padded(weights, index, 1), 1, 2))
        products = graph.add("MatMul", x, graph.constant(padded[None], "weights"), name="products")
        if padded.shape[2] == 1:
            return products
        return graph.add("GatherElements", products, self._for_all_heads(index, turned=turned), name="picked", axis=3)

    def query(self, term: QueryTerm) -> str:
        """Products with queries.

        Parameters
        ----------
        term : QueryTerm
            The term.

        Returns
        -------
        str
            Of shape (B, H, L_q, L_k), or 1 in place of L_k.
        """
        return self._picked(self._vectors(term.query, "queries"), term.weights, term.index, turned=False)

    def key(self, term: KeyTerm) -> str:
        """Products with keys.

        Parameters
        ----------
        term : KeyTerm
            The term.

        Returns
        -------
        str
            Of shape (B, H, L_q, L_k), or 1 in place of L_q.
        """
        graph, site = self.graph, self.site
        x = graph.repeated(self._vectors(term.key, "keys"), site.heads // site.kv_heads, site.heads)
        return graph.transposed(self._picked(x, term.weights, term.index, turned=True), 0, 1, 3, 2)

    def _vectors(self, x: Any, name: str) -> str:
        """Vectors with the axes (B, H, L, E), of which B may be 1."""
        if not isinstance(x, Traced):
            x = x.reshape((1,) * (4 - x.ndim) + x.shape)
            lead = (*self.site.batch, self.site.heads) if name == "queries" else (*self.site.batch, self.site.kv_heads)
            x = np.ascontiguousarray(np.broadcast_to(x, (*lead, *x.shape[2:])))
            if self.places.symbolic and x.shape[-2] > 1:
                raise UntracedError("a vector of its own for each of so many positions, where lengths are not fixed")
            stored = self.graph.constant(x, name)
            if isinstance(self.places.batch, int):
                return stored
            shape = self.graph.add("Concat", self.places.items, self.graph.integers(1, 1, 1), axis=0)
            return self.graph.add("Expand", stored, shape)
        return x.name

    def value(self, term: ValueTerm, probabilities: str) -> str:
        """Vectors added to values: probabilities summed by row, times the rows.

        Parameters
        ----------
        term : ValueTerm
            The term.
        probabilities : str
            Of shape (B, H, L_q, L_k).

        Returns
        -------
        str
            Of shape (B, H, L_q, D_v).
        """
        graph = self.graph
        weights = _padded(term.weights, term.index, 1)
        ends = graph.add("Slice", self.places.pairs, *map(graph.integers, (0, 3)))
        shape = graph.add("Concat", ends, graph.integers(weights.shape[1]), axis=0)
        zeros = graph.add("Expand", graph.constant(np.zeros((), self.site.dtype), "zero"), shape)
        rows = self._for_all_heads(term.index)
        sums = graph.add("ScatterElements", zeros, rows, probabilities, name="sums_by_row", axis=3, reduction="add")
        return graph.add("MatMul", sums, graph.constant(weights[None], "value_rows"))

    def to_scores(self, terms: Terms) -> tuple[list[str], list[Array]]:
        """Everything that is added to the scores.

        Parameters
        ----------
        terms : Terms
            Of the call.

        Returns
        -------
        tuple of list
            Names of what is added, each broadcast to (B, H, L_q, L_k), and arrays of the pairs that are not excluded.
        """
        found = [self.table(term) for term in terms.tables]
        found += [self.query(term) for term in terms.queries]
        found += [self.key(term) for term in terms.keys]
        open_pairs = []
        biases: tuple[Any, ...] = terms.biases
        for bias in biases:
            if isinstance(bias, Traced):
                found.append(bias.name)
                continue
            if self.places.symbolic:
                raise UntracedError("a number for each pair, where lengths are not fixed")
            shut = np.isneginf(bias)
            if shut.any():
                open_pairs.append(~shut)
            finite = np.where(shut, bias.dtype.type(0), bias)
            if finite.any():
                found.append(self.graph.constant(finite, "bias"))
        return found, open_pairs
