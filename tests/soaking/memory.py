"""Resident memory over time, and whether it drifts."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
from pathlib import Path

_STATM = Path("/proc/self/statm")
# Parts of the samples: what a process fills once and keeps, and what is compared after that.
WARM_UP, LEVEL = 0.25, 0.2
LIMIT_MIB = 8.0
FEWEST = 20


def resident_mib() -> float | None:
    """Memory of the process that is in RAM now; None where the system does not say.

    Python's cycles are collected before. glibc keeps pages of freed blocks, more of them the more threads there were
    and in an order that chance decides, which hides a leak of a few MiB: it is told to give them back.
    """
    if not _STATM.exists():
        return None
    gc.collect()
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
