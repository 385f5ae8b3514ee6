"""This library's NumPy reference, and what memory allows for rel_shift."""

from __future__ import annotations

import numpy as np
from benchmarks.shapes import lacking

import relpos_np as rp
from peers import Prepared, UnavailableError


def prepare(name, task, subject, threads, seconds):
    """The call of a task."""
    if name == "numpy view":
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", backend="numpy").copy())
    if name == "memcpy":
        heads, rows, columns = subject.shape
        source = np.ones((heads, rows, columns - rows + 1), subject.dtype)
        target = np.zeros_like(source)

        def copy():
            np.copyto(target, source)
            return target

        return Prepared(copy, note="one thread")
    if reason := lacking(subject.shape):
        raise UnavailableError(reason)
    return Prepared(lambda: subject.attention(backend="numpy"))
