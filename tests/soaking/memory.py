"""Resident memory over time, and whether it drifts."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from pathlib import Path

from relpos_np._runtime import results

_STATM = Path("/proc/self/statm")
# Parts of the samples: what a process fills once and keeps, and what is compared after that.
WARM_UP, LEVEL = 0.25, 0.2
LIMIT_MIB = 8.0
FEWEST = 20


# Of mallopt in <malloc.h>.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


def keep_little() -> None:
    """Make resident memory say what is in use: to be called before there are threads.

    glibc gives threads arenas of their own, of which it returns neither the end nor what lies between blocks in use:
    with eight threads hundreds of MiB that nobody holds, more of them for hours, so that a leak would not be seen. One
    arena, and arrays of more than 256 KiB outside of it, leave nothing like that behind.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if _STATM.exists() else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 18)


def resident_mib() -> float | None:
    """Memory of the process that is in RAM now; None where the system does not say.

    Python's cycles are collected before, and what malloc and the pool of results hold free is given back as far as it
    can be.
    """
    if not _STATM.exists():
        return None
    gc.collect()
    results.clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def levels(samples: list[float]) -> tuple[float, float]:
    """The level early and late: medians of the first and the last fifth of what follows the warm-up.

    Medians, because single samples may hold a large array or lack a page that will be needed again. Of a leak at a
    constant rate the difference is four fifths of what leaked after the warm-up.
    """
    settled = samples[int(WARM_UP * len(samples)) :]
    part = max(int(LEVEL * len(settled)), 1)
    return statistics.median(settled[:part]), statistics.median(settled[-part:])


def drift_mib(samples: list[float]) -> float | None:
    """The late level less the early one; None if there are too few samples to tell."""
    if len(samples) < FEWEST:
        return None
    early, late = levels(samples)
    return late - early
