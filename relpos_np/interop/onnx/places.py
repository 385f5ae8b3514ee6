"""Where queries and keys stand, as nodes: lengths and an offset that the model has, or that its inputs have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from relpos_np.interop.onnx.graph import Graph


@dataclass(eq=False)
class Places:
    """Nodes that all parts of a call share, each added when it is first asked for.

    Attributes
    ----------
    graph : Graph
        Where they are added.
    batch, q_len, k_len : int or str
        Batch items and lengths, or their names.
    offset : int or None
        Position of the first query among the keys; None: the queries stand at the end.
    heads : int
        Heads H of queries.
    lowered : tuple of int
        L_q, L_k and offset of the call for which schemes were lowered. For lengths without a number these are the
        longest ones, and 0.
    by_item : bool
        Whether the position of the first query is an input "offset", with a number for each batch item.
    """

    graph: Graph
    batch: int | str
    q_len: int | str
    k_len: int | str
    offset: int | None
    heads: int
    lowered: tuple[int, int, int] = (0, 0, 0)
    by_item: bool = False

    @property
    def symbolic(self) -> bool:
        """Whether a length is that of the inputs, or the offset is one of them."""
        return self.by_item or isinstance(self.q_len, str) or isinstance(self.k_len, str)

    def _size(self, x: str, axis: int, n: int | str) -> str:
        """A size, as a list of one."""
        if isinstance(n, int):
            return self.graph.integers(n)
        return self.graph.add("Shape", x, name="size", start=axis, end=axis + 1)

    @cached_property
    def items(self) -> str:
        """B, as a list of one."""
        return self._size("q", 0, self.batch)

    @cached_property
    def q_count(self) -> str:
        """L_q, as a list of one."""
        return self._size("q", 2, self.q_len)

    @cached_property
    def k_count(self) -> str:
        """L_k, as a list of one."""
        return self._size("k", 2, self.k_len)

    def _range(self, count: str) -> str:
        scalar = self.graph.add("Squeeze", count, self.graph.integers(0))
        zero, one = (self.graph.constant(np.int64(n), "number") for n in (0, 1))
        return self.graph.add("Range", zero, scalar, one)

    @cached_property
    def first(self) -> str:
        """Position of the first query among the keys, as a list of one, or (B, 1) by item."""
        if self.by_item:
            given = self.graph.input("offset", np.int64, (self.batch,))
            return self.graph.add("Unsqueeze", given, self.graph.integers(1), name="first_positions")
        if self.offset is not None:
            return self.graph.integers(self.offset)
        if isinstance(self.q_len, int) and isinstance(self.k_len, int):
            return self.graph.integers(self.k_len - self.q_len)
        return self.graph.add("Sub", self.k_count, self.q_count, name="offset")

    @cached_property
    def of_queries(self) -> str:
        """Position of each query, (L_q) or (B, L_q)."""
        return self.graph.add("Add", self._range(self.q_count), self.first, name="query_positions")

    @cached_property
    def of_keys(self) -> str:
        """Position of each key, (L_k)."""
        return self._range(self.k_count)

    @cached_property
    def distance(self) -> str:
        """Relative position d = j - (i + offset) of each pair, (L_q, L_k) or (B, 1, L_q, L_k)."""
        axes = (1, 3) if self.by_item else (1,)
        column = self.graph.add("Unsqueeze", self.of_queries, self.graph.integers(*axes))
        return self.graph.add("Sub", self.of_keys, column, name="relative_positions")

    @cached_property
    def pairs(self) -> str:
        """Shape of the scores: B, H, L_q, L_k."""
        sizes = self.items, self.graph.integers(self.heads), self.q_count, self.k_count
        return self.graph.add("Concat", *sizes, name="pairs", axis=0)

    def within(self, index: str, count: int) -> str:
        """Indices as they are, but for negative ones, which ONNX would count from the end: these become an error.

        Parameters
        ----------
        index : str
            Integers.
        count : int
            How many rows there are.

        Returns
        -------
        str
            The indices.
        """
        if not self.symbolic:
            return index
        graph = self.graph
        below = graph.add("Less", index, graph.constant(np.int64(0), "number"))
        return graph.add("Where", below, graph.constant(np.int64(count), "number"), index)

    @cached_property
    def lookup(self) -> str:
        """For each pair, its place in the lookup of a `Toeplitz` map of the call that was lowered: as `distance`."""
        q_len, k_len, offset = self.lowered
        shift = self.graph.constant(np.int64(q_len - 1 + offset), "number")
        return self.within(self.graph.add("Add", self.distance, shift), q_len + k_len - 1)
