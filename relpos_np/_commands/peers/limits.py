"""The 100 % mark: FMA instructions on registers for about as long as our call, or reading keys and values once."""

from __future__ import annotations

from typing import Any

from relpos_np._commands.peers import Prepared, ceiling


def prepare(name: str, task: str, subject: Any, threads: int, seconds: float) -> Prepared:
    """A loop whose amount is in operations, or in bytes for a single query."""
    import numba

    numba.set_num_threads(threads)
    if subject.shape.q_len == 1:
        whole = ceiling.to_read((subject.k, subject.v))
        return Prepared(lambda: ceiling.read_seconds(whole, threads), amount=float(whole.nbytes), note="bytes")
    turns = ceiling.turns_for(seconds, threads)
    amount = ceiling.rate(turns, threads, 1.0)
    return Prepared(lambda: ceiling.fma_seconds(turns, threads), amount=amount, note="operations")
