"""The NumPy reference."""

from __future__ import annotations

from relpos_np._commands.peers import Prepared, UnavailableError
from relpos_np._commands.peers.shapes import Case, lacking


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a task."""
    if reason := lacking(case.shape):
        raise UnavailableError(reason)
    return Prepared(lambda: case.attention(backend="numpy"))
