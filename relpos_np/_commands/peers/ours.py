"""relpos_np on its default backend, its reference on NumPy, and the 100 % mark.

Results go into an array that is kept from call to call, as those of ONNX Runtime and OpenVINO do. A result of megabytes
in fresh memory costs page faults, which are not the kernels'.
"""

from __future__ import annotations

from functools import partial

from relpos_np._commands.peers import Prepared, UnavailableError, ceiling
from relpos_np._commands.peers.shapes import Case, lacking


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a task, or the limit for about as long."""
    if name != "numpy":
        import numba

        numba.set_num_threads(threads)
    if name == "limit":
        return _limit(case, threads, seconds)
    if reason := lacking(case.shape):
        raise UnavailableError(reason)
    return Prepared(partial(case.attention, backend="numpy") if name == "numpy" else case.into_kept)


def _limit(case: Case, threads: int, seconds: float) -> Prepared:
    """FMA instructions on registers, in operations; for a single query reading keys and values once, in bytes."""
    if case.shape.q_len == 1:
        whole = ceiling.to_read((case.k, case.v))
        amount = float(whole.nbytes)
        return Prepared(lambda: ceiling.read_seconds(whole, threads), answers=False, amount=amount, note="bytes")
    turns = ceiling.turns_for(seconds, threads)
    amount = ceiling.rate(turns, threads, 1.0)
    return Prepared(lambda: ceiling.fma_seconds(turns, threads), answers=False, amount=amount, note="operations")
