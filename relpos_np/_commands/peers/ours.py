"""relpos_np on its default backend, and the 100 % mark.

Results go into an array that is kept from call to call, as those of ONNX Runtime and OpenVINO do. A result of megabytes
in fresh memory costs page faults, which are not the kernels'.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np._commands.peers import Prepared, UnavailableError, ceiling
from relpos_np._commands.peers.shapes import as_mapping, lacking, wide


def prepare(name: str, task: str, subject: Any, threads: int, seconds: float) -> Prepared:
    """The call of a task, or the limit for about as long."""
    import numba

    numba.set_num_threads(threads)
    if name == "limit":
        return _limit(subject, threads, seconds)
    if task == "rel_shift":
        *lead, rows, columns = subject.shape
        kept = np.full((*lead, rows, columns - rows + 1), np.nan, subject.dtype)
        return Prepared(lambda: rp.rel_shift(subject, variant="conformer", out=kept))
    if reason := lacking(subject.shape):
        raise UnavailableError(reason)
    if task == "backward":
        return Prepared(subject.attention_vjp, lambda found: {name: wide(x) for name, x in as_mapping(found).items()})
    return Prepared(subject.into_kept)


def _limit(subject: Any, threads: int, seconds: float) -> Prepared:
    """FMA instructions on registers, in operations; for a single query reading keys and values once, in bytes."""
    if subject.shape.q_len == 1:
        whole = ceiling.to_read((subject.k, subject.v))
        return Prepared(lambda: ceiling.read_seconds(whole, threads), amount=float(whole.nbytes), note="bytes")
    turns = ceiling.turns_for(seconds, threads)
    amount = ceiling.rate(turns, threads, 1.0)
    return Prepared(lambda: ceiling.fma_seconds(turns, threads), amount=amount, note="operations")
