"""Why answers are wrong: the suspect that gives them, leaves right answers right, and what the wrong cases share.

A suspect that differs from the truth is compared with a few wrong answers of a family, the smallest first. Where it
gives these but would also change answers that are right, the mistake is made under a condition, and the cause says
which one tells wrong cases from right ones: a length from which on, a pair of options, a number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relpos_np.conform.altered import remade
from relpos_np.conform.bench import SHARED, STATE, Bench
from relpos_np.conform.conditions import by_sizes, condition, runs_where
from relpos_np.conform.customs import BORDERS
from relpos_np.conform.outputs import by_output, far_off, fitted_scale
from relpos_np.conform.report import Family
from relpos_np.conform.suspects import Suspect
from relpos_np.conform.yardstick import Answer, distance
from relpos_np.errors import RelposError
from relpos_np.testing.arguments import arguments
from relpos_np.testing.compare import largest
from relpos_np.testing.example import Example
from relpos_np.types import Array

# How much nearer to a suspect's output than to the truth an answer is, for the suspect to be the cause.
_NEARER, _NEARER_IN_HALF = 0.02, 0.15
# And how far off it may be, in units of what is allowed: a mistake that makes scores large makes roundings larger.
_ROUNDINGS = 256.0
# From this on a format is half precision, in which a mistake that makes scores large makes errors of its own.
_HALF = 1e-4
# How like the errors of a suspect that rounds they are at least.
_ALIKE = 0.7
# Answers of a family that are compared.
_FEW = 4
# Scores beyond which an answer is compared only where there is no smaller one.
_LARGE = 1 << 18
# An error of this part of the largest output is no rounding, in any arithmetic, but of sums over many keys.
_ROUNDING = 0.25

# The smallest case that fails as a family does, with its answer; None where there is none that is smaller.
Shrunk = Callable[[Family], Answer | None]


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
        of_sums = min(self.eps * one.example.k.shape[2], 1.0)
        if suspect.rough and off > max(_ROUNDING, of_sums) * largest(expected):
            return False
        other = self.output(suspect, one.example)
        if other is None or other.shape != out.shape:
            return False
        if suspect.like is not None:
            return suspect.like(out - expected, other - expected) > _ALIKE
        nearer = min(_NEARER * off, _ROUNDINGS * allowed) if self.eps < _HALF else _NEARER_IN_HALF * off
        near = max(2 * allowed, nearer if off < np.inf else 0.0)
        finite = np.isfinite(out) & np.isfinite(other)
        if not np.array_equal(finite, np.isfinite(out)):
            return False
        # Of a query without keys it may be NaN, whatever hid these, and where -inf of a mask or NaN behind one has met
        # numbers: what is finite tells mistakes apart.
        seen = other.any(axis=-1) & expected.any(axis=-1)
        mask = one.example.kwargs.get("mask")
        met = one.family == "nan_excluded" or (mask is not None and mask.dtype.kind == "f")
        if not met and (np.isnan(out).any(axis=-1) & seen).any():
            return False
        out, other, expected = (np.where(finite, x, 0.0) for x in (out, other, expected))
        off = distance(out, expected)
        if off <= allowed:
            return None if distance(other, expected) <= 2 * allowed else False
        return distance(other, expected) > allowed and distance(out, other) <= min(near, off / 2)

    def likeness(self, suspect: Suspect, wrong: list[Answer]) -> float:
        """How like the errors those of a suspect that rounds are; 1 for one that gives the numbers."""
        if suspect.like is None:
            return 1.0
        pairs = [(one, self.output(suspect, one.example)) for one in wrong]
        found = [
            suspect.like(one.returned["out"] - one.expected["out"], x - one.expected["out"])
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


def explained(families: list[Family], bench: Bench, suspects: list[Suspect], shrunk: Shrunk) -> list[Family]:
    """The families with the first suspect that gives all their wrong answers, if there is one.

    A suspect is tried on the smallest failure of a family, which `shrunk` makes, and those that are left on larger
    ones. What explains a family is tried first on the next.
    """
    failed = {one.name for one in families if one.verdict == "wrong"}
    search = _Search(bench, suspects, shrunk)

    def cause(one: Family) -> str:
        if one.verdict == "convention":
            return next(each.reason for each in one.findings if each.verdict == "convention")
        return _observed(one, failed, bench) or (search.cause(one) if one.verdict == "wrong" else "")

    return [replace(one, cause=cause(one)) for one in families]


class _Search:
    """Why one family after the other is wrong."""

    def __init__(self, bench: Bench, suspects: list[Suspect], shrunk: Shrunk) -> None:
        self.bench, self.answers, self.suspects, self.shrunk = bench, bench.answers, suspects, shrunk
        self.known = _Known(bench.answers, bench.stored.eps)
        self.found: list[Suspect] = []
        # What is wrong without options is wrong with them, so that another mistake cannot be the only one.
        self.ordinary = [one for one in self.known.wrong if one.family == "self"]
        self.smallest: Answer | None = None
        self.all_wrong = [one.example for one in bench.answers if one.wrong]

    def cause(self, family: Family) -> str:
        """Why it is wrong, or nothing."""
        wrong = _smallest([one for one in self.answers if one.wrong and one.family == family.name], _FEW)
        if not wrong:
            return ""
        if self._stale(wrong):
            return STATE
        for suspect in self.found:
            when = self._when(suspect, family, wrong)
            if when is not None:
                return suspect.cause + when
        first = self.shrunk(family) or wrong[0]
        if family.name == "self":
            self.smallest = first
        left = [one for one in self.suspects if not self._refuted(one, first)]
        told = [(one, when) for one in left if (when := self._when(one, family, wrong)) is not None]
        if not told:
            fitted = None if self.ordinary and family.name != "self" else fitted_scale(first, wrong)
            told = [] if fitted is None else [(Suspect(*fitted), "")]
        if not told:
            return self.bench.unsteady(first) or by_output(wrong, self.known.wrong) or self._only()
        suspect, when = told[0] if len(told) == 1 else max(told, key=lambda one: self._rank(one[0], one[1], wrong))
        if not suspect.rough:
            self.found.append(suspect)
        return suspect.cause + when

    def _only(self) -> str:
        """Of a mistake that nobody knows the sizes with which it is made, in all families."""
        if not all(map(far_off, self.known.wrong)):
            return ""
        when = by_sizes(self.all_wrong, [one.example for one in self.answers if not one.wrong])
        return f"no known mistake gives these numbers{when}" if when else ""

    def _stale(self, wrong: list[Answer]) -> bool:
        """Whether each of some answers has the scheme's arrays of the first call of the same lengths and heads."""
        return all(self._of_first_call(one) for one in wrong)

    def _of_first_call(self, one: Answer) -> bool:
        if one.example.position is None:
            return False
        shape, now = _lengths_and_heads(one.example), _arrays_of(one.example)
        alike = (other.example for other in self.answers if _lengths_and_heads(other.example) == shape)
        before = next((_arrays_of(x) for x in alike if _shapes(_arrays_of(x)) == _shapes(now)), now)
        if all(np.array_equal(x, now[name]) for name, x in before.items()):
            return False
        try:
            out = remade(one.example, **before)
        except RelposError:
            return False
        return distance(one.returned["out"], out) <= 2 * one.allowed["out"]

    def _refuted(self, suspect: Suspect, first: Answer) -> bool:
        """Whether the smallest failure of a family, or of ordinary cases, shows that it is something else."""
        if suspect.rough:
            return False
        if self.smallest is not None and self.known.contradicts(suspect, self.smallest):
            return True
        return self.known.output(suspect, first.example) is not None and self.known.gives(suspect, first) is False

    def _when(self, suspect: Suspect, family: Family, wrong: list[Answer]) -> str | None:
        """When a suspect is what is wrong, in words; None where it is not."""
        known = self.known
        if not known.explains(suspect, wrong) or any(known.contradicts(suspect, one) for one in self.ordinary):
            return None
        if any(not known.gives(suspect, one) for one in self._plainer(wrong[0])):
            return None
        own = [one for one in self.answers if not one.wrong and one.family == family.name]
        return condition(self.all_wrong, [x.example for x in (*own, *known.right) if not known.spares(suspect, x)])

    def _plainer(self, answer: Answer) -> list[Answer]:
        """Wrong answers of cases with fewer options and no more keys: these have another mistake, or the same one."""
        return [one for one in self.known.wrong if not one.rough and _is_plainer(one.example, answer.example)]

    def _rank(self, suspect: Suspect, when: str, wrong: list[Answer]) -> tuple[int, bool, float]:
        return self.known.count(suspect), not when, self.known.likeness(suspect, wrong)


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
    when, said = runs_where(ran, bench.crashes, crashed)
    if when:
        return f"crashes{when}: if it takes no other, raise NotImplementedError or say {said}"
    when = condition(bench.crashes, ran) or condition(crashed, ran) or ""
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
    known = (STATE, SHARED, BORDERS.words, "writes into") if family.name != "ragged" else ""
    told = next((one.reason for one in found if one.reason.startswith(known)), "")
    if told or family.name != "calls" or not found or "self" in failed:
        return told
    views = [one for one in found if one.edge.startswith(("transposed", "strided"))]
    if len(views) == len(found):
        return "ignores strides: reads a view as if it were a whole array"
    return "leaves parts of the array to write into as they are" if not views else ""


def _is_plainer(one: Example, other: Example) -> bool:
    """Whether a case has fewer options, no more keys, and as many queries for its keys."""
    (q_len, k_len), (more_q, more_k) = ((x.q.shape[2], x.k.shape[2]) for x in (one, other))
    alike = (q_len < k_len, q_len > k_len) == (more_q < more_k, more_q > more_k)
    return alike and k_len <= more_k and one.needs < other.needs


def _lengths_and_heads(one: Example) -> tuple[int, int, int]:
    return one.q.shape[1], one.q.shape[2], one.k.shape[2]


def _arrays_of(one: Example) -> dict[str, Array]:
    """Those of the scheme."""
    given = {} if one.position is None else arguments(one.position)
    return {name: x for name, x in given.items() if isinstance(x, np.ndarray)}


def _shapes(arrays: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in arrays.items()}


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
