"""Several sequences in the arrays of one call, each attended alone: where each lies, and how long it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np.types import Array, Int64


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Keys and values in pages of `size` keys: those of each item, int64 (items, M), and elements from page to page."""

    table: Int64
    size: int
    k_step: int
    v_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Numbers of every sequence of every batch item, int64 (n,) each, and the pages that they lie in.

    Attributes
    ----------
    item : ndarray
        The batch item, in C order.
    q_start, k_start : ndarray
        Its first row among those of queries, and of keys and values.
    q_len, k_len : ndarray
        Its queries and keys.
    offset : ndarray
        Position of its first query among its keys.
    k_end : ndarray, optional
        How many of its keys exist; by default all.
    pages : Pages, optional
        Where keys and values lie, if not in rows one after the other.
    """

    item: Int64
    q_start: Int64
    k_start: Int64
    q_len: Int64
    k_len: Int64
    offset: Int64
    k_end: Int64 | None = None
    pages: Pages | None = None

    @classmethod
    def of_segments(
        cls, bounds: tuple[Int64, Int64], offset: int | str | None, items: int, k_end: Int64 | None
    ) -> Sequences:
        """Sequences that lie one after the other, the same in each of so many batch items.

        `bounds`: cumulative lengths of queries and of keys. `offset`: a number, or queries are the last of the keys,
        of those that exist if it is "end".
        """
        (q_start, k_start), (q_len, k_len) = [x[:-1] for x in bounds], [x[1:] - x[:-1] for x in bounds]
        if isinstance(offset, int):
            own = np.full_like(k_len, offset)
        else:
            own = (k_len if offset is None or k_end is None else k_end) - q_len
        found = cls(np.zeros(len(own), np.int64), q_start, k_start, q_len, k_len, own, k_end)
        if items == 1:
            return found
        found = found.some(np.tile(np.arange(len(own)), items))
        return replace(found, item=np.repeat(np.arange(items), len(own)))

    @classmethod
    def of_items(cls, offsets: Int64, q_len: int, k_len: int, k_end: Array | None) -> Sequences:
        """One sequence in each batch item; `offsets` are those of all items, and so is `k_end`."""
        count, zeros = offsets.size, np.zeros(offsets.size, np.int64)
        rows, columns = np.full(count, q_len), np.full(count, k_len)
        end = None if k_end is None else k_end.ravel().astype(np.int64)
        return cls(np.arange(count), zeros, zeros, rows, columns, offsets.ravel(), end)

    def __len__(self) -> int:
        return len(self.item)

    def some(self, which: Any) -> Sequences:
        """Some of them, in the order of these indices."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return Sequences(**{name: x[which] if isinstance(x, np.ndarray) else x for name, x in own.items()})

    def reach(self) -> tuple[int, int]:
        """Powers of 2 that the lengths of queries, and of keys, do not pass."""
        q_len, k_len = (1 << (int(x.max()) - 1).bit_length() for x in (self.q_len, self.k_len))
        return q_len, k_len

    def within(self, reach: tuple[int, int]) -> bool:
        """Whether they stand from the first key, less the queries of one, to the last key."""
        (q_len, k_len), stop = reach, self.offset + self.q_len
        return bool(self.offset.min() >= -q_len and stop.max() <= k_len + q_len)

    def covering(self) -> tuple[int, int, int]:
        """Offset and lengths of the shortest call that has every position, and every distance, of these."""
        offset = int(self.offset.min())
        stop = int((self.offset + self.q_len).max())
        return offset, stop - offset, int(self.k_len.max())
