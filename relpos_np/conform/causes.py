"""Why answers are wrong: the suspect that gives them, leaves right answers right, and what the wrong cases share.

A suspect that differs from the truth is compared with a few wrong answers of a family, the smallest first. Where it
gives these but would also change answers that are right, the mistake is made under a condition, and the cause says
which one tells wrong cases from right ones: a length from which on, a pair of options, a number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np.conform.bench import STATE, Answer
from relpos_np.conform.report import Family
from relpos_np.conform.suspects import Suspect
from relpos_np.conform.yardstick import distance
from relpos_np.testing.example import Example
from relpos_np.types import Array

# How much nearer to a suspect's output than to the truth an answer is, for the suspect to be the cause.
_NEARER = 0.02
# Cosine of the errors with those of a suspect that rounds.
_ALIKE = 0.7
# Answers of a family that are compared, and of all.
_FEW, _ALL = 4, 24
# Scores beyond which an answer is compared only where there is no smaller one.
_LARGE = 1 << 18


class _Known:
    """Outputs of suspects, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Array | None] = {}

    def output(self, suspect: Suspect, one: Example) -> Array | None:
        key = id(suspect), id(one)
        if key not in self._made:
            self._made[key] = suspect.output(one)
        return self._made[key]

    def gives(self, suspect: Suspect, one: Answer) -> bool | None:
        """Whether a suspect explains a wrong answer; None where it does not change the output."""
        out, expected, allowed = one.returned["out"], one.expected["out"], one.allowed["out"]
        off = distance(out, expected)
        if off <= allowed:
            return None  # only gradients or the log-sum-exp are wrong
        other = self.output(suspect, one.example)
        if other is None or other.shape != out.shape:
            return False
        if suspect.rough:
            apart, meant = out - expected, other - expected
            size = float(np.sqrt((apart**2).sum() * (meant**2).sum()))
            return bool((apart * meant).sum() > _ALIKE * size)
        near = distance(out, other)
        return distance(other, expected) > allowed and near <= max(2 * allowed, _NEARER * off if off < np.inf else 0.0) and near <= off / 2

    def spares(self, suspect: Suspect, one: Answer) -> bool:
        """Whether a suspect leaves an answer right that is."""
        other = self.output(suspect, one.example)
        if suspect.rough or other is None:
            return True
        return distance(other, one.expected["out"]) <= 2 * one.allowed["out"]


def explained(families: list[Family], answers: list[Answer], suspects: list[Suspect]) -> list[Family]:
    """The families with the first suspect that gives all their wrong answers, if there is one."""
    known = _Known()
    wrong = _smallest([one for one in answers if one.wrong], _ALL)
    right = _smallest([one for one in answers if not one.wrong and one.example.k.shape[2] > 1], _ALL)
    matching = {id(s): sum(bool(known.gives(s, one)) for one in wrong) for s in suspects} if wrong else {}
    return [replace(one, cause=_cause(one, answers, suspects, known, matching, right)) for one in families]


def _cause(
    family: Family,
    answers: list[Answer],
    suspects: list[Suspect],
    known: _Known,
    matching: dict[int, int],
    right: list[Answer],
) -> str:
    """Why a family is wrong, or nothing."""
    for one in family.findings:
        if one.verdict == "wrong" and (one.reason == STATE or one.reason.startswith("writes into")):
            return one.reason
    mine = [one for one in answers if one.family == family.name]
    wrong = [one for one in mine if one.wrong]
    if not wrong:
        return ""
    few = _smallest(wrong, _FEW)
    found: list[tuple[bool, int, str]] = []
    for suspect in suspects:
        given = [known.gives(suspect, one) for one in few]
        if not any(given) or any(one is False for one in given):
            continue
        own = [one for one in mine if not one.wrong]
        changed = [one for one in (*_smallest(own, _FEW), *right) if not known.spares(suspect, one)]
        when = _condition([one for one in answers if one.wrong], changed) if changed else ""
        if when is not None:
            found.append((not changed, matching.get(id(suspect), 0), suspect.cause + when))
    if not found:
        return _seen(wrong)
    best = max((clean, count) for clean, count, _ in found)
    return next(words for clean, count, words in found if (clean, count) == best)


def _smallest(answers: list[Answer], count: int) -> list[Answer]:
    """The smallest of some answers, and of large ones as few as can be."""

    def size(one: Answer) -> int:
        return one.example.q.size * one.example.k.shape[2]

    found = sorted(answers, key=size)[:count]
    return [one for n, one in enumerate(found) if not n or size(one) <= _LARGE * 64]


# ---------------------------------------------------------------------------------------------- conditions


def _facts(one: Example) -> dict[str, Any]:
    """What may decide whether a mistake is made."""
    (batch, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = one.q.shape, one.v.shape
    names = {name for name, value in one.kwargs.items() if value is not None and value is not False}
    if heads != kv_heads:
        names |= {"grouped heads"}
    return {"L_k": k_len, "L_q": q_len, "head_dim": dim, "D_v": v_dim, "H": heads, "batch": batch, "names": names}


def _conditions(wrong: list[dict[str, Any]]) -> Iterator[tuple[str, Callable[[dict[str, Any]], bool]]]:
    """Conditions that all wrong cases fulfil, those with fewer words first."""
    common = set.intersection(*(one["names"] for one in wrong))
    for name in sorted(common):
        yield f" with {name}", lambda x, name=name: name in x["names"]
    for name in ("L_k", "L_q", "head_dim", "D_v", "H", "batch"):
        least, most = min(one[name] for one in wrong), max(one[name] for one in wrong)
        yield f" from {name} = {least} on", lambda x, name=name, least=least: x[name] >= least
        yield f" up to {name} = {most}", lambda x, name=name, most=most: x[name] <= most
        for tile in (2, 8, 16, 32, 64, 128):
            if all(one[name] % tile for one in wrong):
                yield f" where {tile} does not divide {name}", lambda x, name=name, tile=tile: x[name] % tile != 0
    relations = (("less than", lambda x: x["L_q"] < x["L_k"]), ("equal to", lambda x: x["L_q"] == x["L_k"]))
    for words, holds in relations:
        if all(map(holds, wrong)):
            yield f" where L_q is {words} L_k", holds
    for name in sorted(common):
        for other in sorted(common - {name}):
            if name < other:
                yield f" with {name} and {other} together", lambda x, both={name, other}: both <= x["names"]
    absent = {"causal", "mask", "key_lengths", "window"} - set().union(*(one["names"] for one in wrong))
    for name in sorted(absent):
        yield f" without {name}", lambda x, name=name: name not in x["names"]


def _condition(wrong: list[Answer], right: list[Answer]) -> str | None:
    """What tells cases that are wrong from those that are right though the mistake would change them, or None."""
    bad, good = [_facts(one.example) for one in wrong], [_facts(one.example) for one in right]
    return next((f", only{words}" for words, holds in _conditions(bad) if not any(map(holds, good))), None)


def _seen(wrong: list[Answer]) -> str:
    """What a kind of case alone shows, where no suspect gives the numbers."""
    one, out, expected = wrong[0].example, wrong[0].returned["out"], wrong[0].expected["out"]
    empty = ~np.isfinite(wrong[0].expected["lse"])
    if one.family == "large_scores" and not np.isfinite(out).all():
        return "the exponential overflows: the largest score is not subtracted first"
    if one.family == "nan_excluded" and np.isnan(out).any():
        return "values of excluded keys are multiplied by 0, and 0 times NaN is NaN"
    if empty.any() and out.shape == expected.shape:
        if np.isnan(out[empty]).any() and not np.isnan(out[~empty]).any():
            return "divides by a sum of 0 for queries that may attend no key"
        rest = distance(out[~empty], expected[~empty])
        if np.isfinite(out[empty]).all() and rest <= wrong[0].allowed["out"]:
            return "gives queries that may attend no key an average of values: a large negative number stands for -inf"
    return ""
