"""Index maps of distances between given positions, which are made pair by pair only for whoever asks for pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from relpos_np._contract.terms import Dense, Terms, check_rows, of_batch
from relpos_np.errors import RelposIndexError
from relpos_np.types import Array, Int32, Int64

# Distances that are held at once while a map is made, or one query's.
BLOCK = 1 << 16


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Placed(Dense):
    """An index map that depends on the distance of two positions: ``r(i, j) = by_distance[t_j - s_i]``.

    `index`, which has a number for each pair, is made when it is first asked for. The CPU kernels ask for some
    queries' at a time.

    Parameters
    ----------
    by_distance : ndarray of int, shape (n,)
        Row for each distance from 0 to n - 1, or -1; kept as int32.
    rows : int
        Rows of the table that is indexed.
    at_query : ndarray of int64, shape (..., L_q)
        Positions s of the queries, so far back that no distance is less than 0.
    at_key : ndarray of int64, shape (..., L_k)
        Positions t of the keys.
    """

    by_distance: Int32
    at_query: Int64
    at_key: Int64

    def __init__(self, by_distance: Array, rows: int, at_query: Int64, at_key: Int64) -> None:
        # Gaps may be at distances that no pair has: whoever reads them then looks for pairs that are not there.
        own: dict[str, Any] = {"gaps": check_rows(by_distance, rows), "rows": rows}
        own |= {"by_distance": by_distance.astype(np.int32, copy=False), "at_query": at_query, "at_key": at_key}
        if at_query.size and at_key.size:
            low = int((at_key.min(axis=-1) - at_query.max(axis=-1)).min())
            high = int((at_key.max(axis=-1) - at_query.min(axis=-1)).max())
            if low < 0 or high >= len(by_distance):
                most = len(by_distance) - 1
                raise RelposIndexError(f"index map: distances span [{low}, {high}], expected 0 ... {most}")
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Placed(rows={self.rows}, shape={self.shape})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the map, (..., L_q, L_k)."""
        lead = np.broadcast_shapes(self.at_query.shape[:-1], self.at_key.shape[:-1])
        return (*lead, self.at_query.shape[-1], self.at_key.shape[-1])

    @cached_property  # type: ignore[misc]
    def index(self) -> Int32:
        """The row of each pair, (..., L_q, L_k)."""
        return self._made()

    def _cut(self, queries: slice, keys: slice, batch: tuple[slice, ...]) -> Placed:
        """The map of some queries, keys and batch items."""
        at_query, at_key = (
            of_batch(x, 1, batch)[..., some] for x, some in ((self.at_query, queries), (self.at_key, keys))
        )
        return Placed(self.by_distance, self.rows, at_query, at_key)

    def made(self, batch: tuple[int, ...]) -> Dense:
        """The same pair by pair; where batch items differ, for each item of the batch."""
        index = self
        if len(self.shape) > 2:
            at_query, at_key = (np.broadcast_to(x, (*batch, x.shape[-1])) for x in (self.at_query, self.at_key))
            index = Placed(self.by_distance, self.rows, at_query, at_key)
        found: Dense = object.__new__(Dense)
        # Its rows are known to be in the table: looking at each would take a third as long as making them.
        for name, value in {"index": index._made(), "rows": self.rows, "gaps": self.gaps}.items():
            object.__setattr__(found, name, value)
        return found

    def made_bytes(self, batch: tuple[int, ...]) -> int:
        """Of a query of `made`."""
        items = 1 if len(self.shape) == 2 else math.prod(batch)
        return 4 * items * self.shape[-1]

    def distance_bytes(self) -> int:
        """Of the distances that are held at once."""
        return 8 * min(max(BLOCK, self.shape[-1]), math.prod(self.shape))

    def _made(self) -> Int32:
        """The row of each pair, some queries' distances at a time."""
        out = np.empty(self.shape, np.int32)
        if not out.size:
            return out
        *lead, q_len, k_len = self.shape
        at_query, at_key = (np.broadcast_to(x, (*lead, x.shape[-1])) for x in (self.at_query, self.at_key))
        if out.size <= BLOCK:
            return self._looked_up(at_query, at_key, out)
        step = max(BLOCK // k_len, 1)
        for item in np.ndindex(*lead):
            for first in range(0, q_len, step):
                some = slice(first, first + step)
                self._looked_up(at_query[item][some], at_key[item], out[item][some])
        return out

    def _looked_up(self, at_query: Int64, at_key: Int64, out: Int32) -> Int32:
        """Fill `out`. Every distance is known; NumPy would check it again, in a copy of the result."""
        distances = at_key[..., None, :] - at_query[..., :, None]
        return np.take(self.by_distance, distances, out=out, mode="clip")


def placed_maps(terms: Terms) -> tuple[Placed, ...]:
    """Each map of terms that is made when it is asked for, once."""
    every: list[Any] = [*terms.tables, *terms.queries, *terms.keys, *terms.values]
    found = {id(term.index): term.index for term in every}
    return tuple(index for index in found.values() if isinstance(index, Placed))
