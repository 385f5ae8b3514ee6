"""Memory for large results, used again: writing to new memory costs a page fault every few kilobytes.

What a result lies in is kept when the last array that shares it is gone, and lent to the next result of that size.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from contextlib import suppress

import numpy as np

from relpos_np.errors import RelposValueError
from relpos_np.types import Array

VARIABLE = "RELPOS_RESULT_POOL"
# Bytes that are kept at most, unless the variable says otherwise.
LIMIT = 256 << 20
# Smaller results are left to the allocator, which keeps memory of such sizes itself.
LEAST = 1 << 20
# From here on NumPy asks for large pages.
_LARGE = 1 << 22

# By size. Each step is one of the interpreter's own, which no other thread and no finalizer interrupts: no lock is held
# that a finalizer might wait for.
_free: dict[int, deque[mmap.mmap]] = {}
_chosen: int | None = None


def limit() -> int:
    """Bytes that are kept at most; the variable is read once."""
    global _chosen
    if _chosen is None:
        text = os.environ.get(VARIABLE, "").strip()
        if text and not (text.isascii() and text.isdigit()):
            raise RelposValueError(f"{VARIABLE}: expected bytes as an integer, 0 for none, found {text!r}")
        _chosen = int(text) if text else LIMIT
    return _chosen


def clear() -> None:
    """Give back what is kept."""
    _free.clear()


class _Lent(np.ndarray):
    """Holds the memory of a result: views of any class hold this array, because it is one of another class."""

    memory: mmap.mmap

    def __del__(self) -> None:
        memory = getattr(self, "memory", None)
        if memory is not None and deque is not None:  # at the end of the process modules are emptied
            _keep(memory)


def _keep(memory: mmap.mmap) -> None:
    """Keep memory, in place of that of other sizes if need be."""
    size, most = len(memory), limit()
    own = _free.setdefault(size, deque())
    others = [(other, kept) for other, kept in list(_free.items()) if other != size]
    room = most - size - size * len(own) - sum(other * len(kept) for other, kept in others)
    for other, kept in others:
        while room < 0 and kept:
            try:
                kept.popleft()
            except IndexError:  # another thread has taken it
                break
            room += other
    if room >= 0:
        own.append(memory)


def _new(size: int) -> mmap.mmap:
    # Private: a forked child must not write into its parent's results.
    memory = (
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if os.name == "posix" else mmap.mmap(-1, size)
    )
    if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> tuple[Array, bool]:
    """As `np.empty`, and whether the memory has been written to before."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype), False
    # At most an eighth more: few sizes, so that results of about the same length share memory.
    step = 1 << max(size.bit_length() - 4, 0)
    rounded = -(-size // step) * step
    if rounded > limit():
        return np.empty(shape, dtype), False
    used = True
    try:
        memory = _free[rounded].pop()
    except (KeyError, IndexError):
        used = False
        try:
            memory = _new(rounded)
        except OSError:  # the error is NumPy's
            return np.empty(shape, dtype), False
    lent = _Lent(size, np.uint8, memory)
    lent.memory = memory
    return lent.view(dtype, np.ndarray).reshape(shape), used
