"""Several sequences in the arrays of one call, each attended alone: where each lies, and how long it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from relpos_np.types import Array, Int64


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Keys and values in pages of `size` keys: those of each item, int64 (items, M), and elements from page to page."""

    table: Int64
    size: int
    k_step: int
    v_step: int


# The numbers of a sequence, as `Sequences` has them, in the order of its `numbers`.
NUMBERS = ("item", "q_start", "k_start", "q_len", "k_len", "offset", "k_end")


class Sequences:
    """Several numbers of every sequence of every batch item, int64 (n,) each, and the pages that they lie in.

    Attributes
    ----------
    numbers : ndarray
        All of the following, (7, n).
    item : ndarray
        The batch item, in C order.
    q_start, k_start : ndarray
        Its first row among those of queries, and of keys and values.
    q_len, k_len : ndarray
        Its queries and keys.
    offset : ndarray
        Position of its first query among its keys.
    k_end : ndarray
        How many of its keys exist.
    has_ends : bool
        Whether some may not.
    pages : Pages, optional
        Where keys and values lie, if not in rows one after the other.
    """

    item: Int64
    q_start: Int64
    k_start: Int64
    q_len: Int64
    k_len: Int64
    offset: Int64
    k_end: Int64

    def __init__(self, numbers: Int64, *, has_ends: bool = False, pages: Pages | None = None) -> None:
        self.numbers, self.has_ends, self.pages = numbers, has_ends, pages
        self.item, self.q_start, self.k_start, self.q_len, self.k_len, self.offset, self.k_end = numbers

    @classmethod
    def of_segments(
        cls, bounds: tuple[Int64, Int64], offset: int | str | None, items: int, k_end: Int64 | None
    ) -> Sequences:
        """Sequences that lie one after the other, the same in each of so many batch items.

        `bounds`: cumulative lengths of queries and of keys. `offset`: a number, or queries are the last of the keys,
        of those that exist if it is "end".
        """
        queries, keys = bounds
        numbers = np.empty((len(NUMBERS), items, len(queries) - 1), np.int64)
        numbers[0] = np.arange(items)[:, None]
        numbers[1], numbers[2] = queries[:-1], keys[:-1]
        numbers[3] = queries[1:] - queries[:-1]
        numbers[4] = numbers[6] = keys[1:] - keys[:-1]
        if k_end is not None:
            numbers[6] = k_end
        numbers[5] = offset if isinstance(offset, int) else numbers[4 if offset is None else 6] - numbers[3]
        return cls(numbers.reshape(len(NUMBERS), -1), has_ends=k_end is not None)

    @classmethod
    def of_items(
        cls, offsets: Int64, q_len: int, k_len: int | Int64, k_end: Array | None, pages: Pages | None = None
    ) -> Sequences:
        """One sequence in each batch item; `offsets` and `k_end` are those of all items, and `k_len` may be."""
        numbers = np.empty((len(NUMBERS), offsets.size), np.int64)
        numbers[0], numbers[1:3], numbers[3], numbers[4] = np.arange(offsets.size), 0, q_len, k_len
        numbers[5], numbers[6] = offsets.ravel(), k_len if k_end is None else k_end.ravel()
        return cls(numbers, has_ends=k_end is not None, pages=pages)

    def __len__(self) -> int:
        return len(self.item)

    def some(self, which: Any) -> Sequences:
        """Some of them, in the order of these indices."""
        return Sequences(self.numbers[:, which], has_ends=self.has_ends, pages=self.pages)

    def reach(self) -> tuple[int, int]:
        """Powers of 2 that the lengths of queries, and of keys, do not pass."""
        q_len, k_len = (1 << (int(x) - 1).bit_length() for x in self.numbers[3:5].max(axis=1))
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


def in_rows(pages: Array, items: int, k_len: int) -> Array:
    """Keys in pages (pages, H_kv, P, D) as (items, H_kv, k_len, D) with the strides of a page throughout.

    It stands for keys that are one after the other, and only a kernel that goes from page to page may read it.
    """
    # As bytes: NumPy knows no float8 by what it is called.
    plain, shape = pages.view(f"V{pages.itemsize}"), (items, pages.shape[1], k_len, pages.shape[3])
    return as_strided(plain, shape, (0, *pages.strides[1:]), writeable=False).view(pages.dtype)
