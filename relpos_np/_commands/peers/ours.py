"""relpos_np on its default backend; results go into an array that is kept from call to call.

ONNX Runtime and OpenVINO keep theirs. A result of megabytes in fresh memory costs page faults, which are not the
kernels'.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np._commands.peers import Prepared, UnavailableError
from relpos_np._commands.peers.shapes import as_mapping, lacking, wide


def prepare(name: str, task: str, subject: Any, threads: int, seconds: float) -> Prepared:
    """The call of a task."""
    import numba

    numba.set_num_threads(threads)
    if task == "rel_shift":
        *lead, rows, columns = subject.shape
        kept = np.full((*lead, rows, columns - rows + 1), np.nan, subject.dtype)
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", out=kept))
    if reason := lacking(subject.shape):
        raise UnavailableError(reason)
    if task == "backward":
        return Prepared(subject.attention_vjp, lambda found: {name: wide(x) for name, x in as_mapping(found).items()})
    return Prepared(subject.into_kept)
