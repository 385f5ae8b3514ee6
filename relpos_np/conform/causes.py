"""Why answers are wrong: the suspect that gives them, leaves right answers right, and what the wrong cases share.

A suspect that differs from the truth is compared with a few wrong answers of a family, the smallest first. Where it
gives these but would also change answers that are right, the mistake is made under a condition, and the cause says
which one tells wrong cases from right ones: a length from which on, a pair of options, a number of heads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relpos_np.conform.bench import STATE, Bench
from relpos_np.conform.conditions import condition, runs_where
from relpos_np.conform.customs import BORDERS
from relpos_np.conform.outputs import by_output
from relpos_np.conform.report import Family
from relpos_np.conform.suspects import Suspect
from relpos_np.conform.yardstick import Answer, distance
from relpos_np.testing.example import Example
from relpos_np.types import Array

# How much nearer to a suspect's output than to the truth an answer is, for the suspect to be the cause.
_NEARER, _NEARER_IN_HALF = 0.02, 0.15
# From this on a format is half precision, in which a mistake that makes scores large makes errors of its own.
_HALF = 1e-4
# Cosine of the errors with those of a suspect that rounds.
_ALIKE = 0.7
# Answers of a family that are compared.
_FEW = 4
# Scores beyond which an answer is compared only where there is no smaller one.
_LARGE = 1 << 18


class _Known:
    """Outputs of suspects, each made once."""

    def __init__(self, answers: list[Answer], eps: float) -> None:
        self.eps = eps
        self._made: dict[tuple[int, int], Array | None] = {}
        self._counts: dict[int, int] = {}
        wrong = [one for one in answers if one.wrong]
        self.wrong = _of_each(wrong)
        right = [one for one in answers if not one.wrong and one.example.k.shape[2] > 1]
        self.right = _of_each(right)

    def output(self, suspect: Suspect, one: Example) -> Array | None:
        """What the suspect leads to, or None."""
        key = id(suspect), id(one)
        if key not in self._made:
            self._made[key] = suspect.output(one)
        return self._made[key]

    def gives(self, suspect: Suspect, one: Answer) -> bool | None:
        """Whether a suspect explains a wrong answer; None where the output is right."""
        out, expected, allowed = one.returned["out"], one.expected["out"], one.allowed["out"]
        off = distance(out, expected)
        if off <= allowed and not (one.rough and suspect.rough):
            return None if not one.rough else False  # only gradients or the log-sum-exp are wrong
        other = self.output(suspect, one.example)
        if other is None or other.shape != out.shape:
            return False
        if suspect.rough:
            return _alike(out - expected, other - expected) > _ALIKE
        nearer = _NEARER if self.eps < _HALF else _NEARER_IN_HALF
        near = max(2 * allowed, nearer * off if off < np.inf else 0.0)
        finite = np.isfinite(out) & np.isfinite(other)
        if not np.array_equal(finite, np.isfinite(out)):
            return False
        # Where it is NaN many mistakes have met: what is finite tells them apart.
        out, other, expected = (np.where(finite, x, 0.0) for x in (out, other, expected))
        off = distance(out, expected)
        if off <= allowed:
            return None if distance(other, expected) <= 2 * allowed else False
        return distance(other, expected) > allowed and distance(out, other) <= min(near, off / 2)

    def likeness(self, suspect: Suspect, wrong: list[Answer]) -> float:
        """How like the errors those of a suspect that rounds are: the cosine; 1 for one that gives the numbers."""
        if not suspect.rough:
            return 1.0
        pairs = [(one, self.output(suspect, one.example)) for one in wrong]
        found = [
            _alike(one.returned["out"] - one.expected["out"], x - one.expected["out"])
            for one, x in pairs
            if x is not None
        ]
        return float(np.mean(found))

    def contradicts(self, suspect: Suspect, one: Answer) -> bool:
        """Whether a suspect leads to a mistake in a wrong answer, and not to this one."""
        if suspect.rough or self.gives(suspect, one) is not False:
            return False
        return not self.spares(suspect, one)

    def explains(self, suspect: Suspect, wrong: list[Answer]) -> bool:
        """Whether a suspect gives all of some wrong answers whose output is wrong, and at least one."""
        some = False
        for one in wrong:
            found = self.gives(suspect, one)
            if found is False:
                return False
            some |= bool(found)
        return some

    def count(self, suspect: Suspect) -> int:
        """How many wrong answers of all families a suspect gives."""
        if id(suspect) not in self._counts:
            self._counts[id(suspect)] = sum(bool(self.gives(suspect, one)) for one in self.wrong)
        return self._counts[id(suspect)]

    def spares(self, suspect: Suspect, one: Answer) -> bool:
        """Whether a suspect leaves an answer right that is."""
        other = self.output(suspect, one.example)
        if suspect.rough or other is None:
            return True
        return distance(other, one.expected["out"]) <= 2 * one.allowed["out"]


def _alike(apart: Array, meant: Array) -> float:
    """The cosine of two errors."""
    size = float(np.sqrt((apart**2).sum() * (meant**2).sum()))
    return float((apart * meant).sum()) / size if size else 0.0


def explained(families: list[Family], bench: Bench, suspects: list[Suspect]) -> list[Family]:
    """The families with the first suspect that gives all their wrong answers, if there is one."""
    answers = bench.answers
    known = _Known(answers, bench.stored.eps)
    failed = {one.name for one in families if one.verdict == "wrong"}

    def cause(one: Family) -> str:
        if one.verdict == "convention":
            return next(each.reason for each in one.findings if each.verdict == "convention")
        return _observed(one, failed, bench) or _cause(one, answers, suspects, known)

    return [replace(one, cause=cause(one)) for one in families]


# By what a condition names: how to say what an implementation takes.
_HINTS = {
    "head_dim": "--head-dim",
    "L_q": "--lengths",
    "L_k": "--lengths",
    "H": "--heads",
    "batch": "--batch",
    "grouped heads": "--except grouped_heads",
    "several shared key heads": "--except grouped_heads",
    "D_v": "--except value_dim",
}


def _crash(family: str, bench: Bench) -> str:
    """When it crashes, and what to do if it is not meant to take such calls."""
    ran, crashed = [one.example for one in bench.answers], [one for one in bench.crashes if one.family == family]
    if not crashed:
        return ""  # refused, where it was asked for
    when = runs_where(ran) or condition(bench.crashes, ran) or condition(crashed, ran) or ""
    hints = [flag for name, flag in _HINTS.items() if f" {name} " in f"{when} "]
    if " with " in when and not hints:
        hints = [f"--except {when.rpartition(' with ')[2].partition(' ')[0]}"]
    said = ", ".join(dict.fromkeys(hints))
    return f"crashes{when}" + (f": if it takes no other, raise NotImplementedError or say {said}" if said else "")


def _observed(family: Family, failed: set[str], bench: Bench) -> str:
    """A cause that needs no suspect, because how a case was called says it."""
    found = [one for one in family.findings if one.verdict == "wrong"]
    if found and not any(one.errors for one in found):
        return _crash(family.name, bench)
    found = [one for one in found if one.errors]
    told = next(
        (one.reason for one in found if one.reason.startswith((STATE, BORDERS.words, "writes into", "ignores "))), ""
    )
    if told or family.name != "calls" or not found or "self" in failed:
        return told
    views = [one for one in found if one.edge.startswith(("transposed", "strided"))]
    if len(views) == len(found):
        return "ignores strides: reads a view as if it were a whole array"
    return "leaves parts of the array to write into as they are" if not views else ""


def _cause(family: Family, answers: list[Answer], suspects: list[Suspect], known: _Known) -> str:
    """Why a family is wrong, or nothing."""
    wrong = _smallest([one for one in answers if one.wrong and one.family == family.name], _FEW)
    if not wrong:
        return ""
    own = [one for one in answers if not one.wrong and one.family == family.name]
    # What is wrong without options is wrong with them, so that another mistake cannot be the only one.
    ordinary = [one for one in known.wrong if one.family == "self"]
    all_wrong = [one.example for one in answers if one.wrong]
    found: list[tuple[tuple[int, bool, float], str]] = []
    for suspect in suspects:
        if not known.explains(suspect, wrong) or any(known.contradicts(suspect, one) for one in ordinary):
            continue
        changed = [one.example for one in (*own, *known.right) if not known.spares(suspect, one)]
        when = condition(all_wrong, changed)
        if when is not None:
            rank = (known.count(suspect), not changed, known.likeness(suspect, wrong))
            found.append((rank, suspect.cause + when))
    if found:
        return max(found, key=lambda one: one[0])[1]
    return by_output(wrong, known.wrong)


def _of_each(answers: list[Answer]) -> list[Answer]:
    """The smallest of each family."""
    families = dict.fromkeys(one.family for one in answers)
    return [one for name in families for one in _smallest([x for x in answers if x.family == name], _FEW)]


def _smallest(answers: list[Answer], count: int) -> list[Answer]:
    """The smallest of some answers, and of large ones as few as can be."""

    def size(one: Answer) -> int:
        return int(one.example.q.size * one.example.k.shape[2])

    found = sorted(answers, key=size)[:count]
    return [one for n, one in enumerate(found) if not n or size(one) <= _LARGE * 64]
