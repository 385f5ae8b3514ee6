"""The NumPy reference, and what memory allows for rel_shift."""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np._commands.peers import Prepared, UnavailableError
from relpos_np._commands.peers.shapes import lacking
from relpos_np.types import Array


def prepare(name: str, task: str, subject: Any, threads: int, seconds: float) -> Prepared:
    """The call of a task."""
    if name == "numpy view":
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", backend="numpy").copy())
    if name == "memcpy":
        heads, rows, columns = subject.shape
        source = np.ones((heads, rows, columns - rows + 1), subject.dtype)
        target = np.zeros_like(source)

        def copy() -> Array:
            np.copyto(target, source)
            return target

        return Prepared(copy, note="one thread")
    if reason := lacking(subject.shape):
        raise UnavailableError(reason)
    return Prepared(lambda: subject.attention(backend="numpy"))
