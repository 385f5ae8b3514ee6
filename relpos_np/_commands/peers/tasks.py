"""What peers are timed at: a task's inputs, what is right, and what a record says of it.

`relpos bench` has attention alone. Whoever has other tasks adds them to `TASKS`, and their peers to `PEERS`, in a
module that the workers import too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relpos_np._commands.peers.shapes import Case, case
from relpos_np.types import Array


@dataclass(frozen=True)
class Task:
    """What can be asked of peers.

    Attributes
    ----------
    subject : callable
        From the name of a shape to what peers prepare their calls from.
    exact : callable
        From that to answers in float64, by name.
    error : callable
        How far a result is from these: of a subject, the result and the answers.
    about : callable
        From a subject to what is recorded: "shape", and if there are "words", "storage" and "amount", operations or
        bytes of a call.
    """

    subject: Callable[[str], Any]
    exact: Callable[[Any], Mapping[str, Array]]
    error: Callable[[Any, Any, Mapping[str, Array]], float]
    about: Callable[[Any], dict[str, Any]]


def described(subject: Case) -> dict[str, Any]:
    """Scheme and sizes of a case."""
    s = subject.shape
    found = {"words": s.words, "storage": s.storage, "shape": [s.batch, s.heads, s.q_len, s.k_len, s.head_dim]}
    return found if s.shortest is None else found | {"shortest": s.shortest}


def _attention(subject: Case) -> dict[str, Any]:
    # What must be read of memory, not arithmetic, limits a single query.
    read = subject.k.nbytes + subject.v.nbytes
    return described(subject) | {"amount": read if subject.shape.q_len == 1 else subject.operations}


TASKS = {
    "attention": Task(
        case,
        lambda subject: {"out": subject.exact()},
        lambda subject, result, exact: subject.error(result, exact["out"]),
        _attention,
    )
}
