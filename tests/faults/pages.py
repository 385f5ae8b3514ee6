"""Arrays beside memory that may not be touched: to read or write past their ends is a segmentation fault."""

import ctypes
import mmap

import numpy as np

_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_PROTECT.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# Nothing may be done with the memory.
_NONE = 0
# What is mapped stays so.
_kept = []


def _region(size):
    """Memory of so many bytes, rounded up to pages, between two pages that may not be touched."""
    size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    everything = np.frombuffer(memory, np.uint8)
    _kept.append(everything)
    shut(everything[: mmap.PAGESIZE])
    shut(everything[size + mmap.PAGESIZE :])
    return everything[mmap.PAGESIZE : size + mmap.PAGESIZE]


def shut(pages):
    """Forbid whole pages of memory to be read and written."""
    if _PROTECT(pages.ctypes.data, pages.nbytes, _NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


def hide(x, seen):
    """A copy of x (B, H, L, D) of which only rows first ... last - 1 of each batch item may be touched.

    `seen` (B, L) says which ones; each run of others must fill whole pages.
    """
    memory = _region(x.nbytes)
    out = memory[: x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    for b, row in enumerate(seen):
        at = np.flatnonzero(row)
        first, last = (at[0], at[-1] + 1) if at.size else (len(row), len(row))
        for h in range(x.shape[1]):
            for part in (out[b, h, :first], out[b, h, last:]):
                if part.nbytes:
                    pages = part.reshape(-1).view(np.uint8)
                    assert pages.ctypes.data % mmap.PAGESIZE == pages.nbytes % mmap.PAGESIZE == 0, "whole pages"
                    shut(pages)
    return out
