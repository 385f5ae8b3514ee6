"""What wrong outputs show by themselves, where no known mistake gives them: a scale that fits, where they are wrong."""

from __future__ import annotations

import numpy as np

from relpos_np.conform.altered import out_of, scale_of
from relpos_np.conform.bench import Answer
from relpos_np.conform.yardstick import distance
from relpos_np.errors import RelposError
from relpos_np.types import Array

# Of a search for one number: times the meant one, in steps, and how often the best interval is divided.
_FACTORS = np.geomspace(1 / 32, 32, 41)
_DIVISIONS = 40
_AXES = ("batch item", "head", "query", "channel")


def by_output(wrong: list[Answer], others: set[str]) -> str:
    """A cause for wrong answers of one family, of which the smallest is first; `others` are wrong, too."""
    if all(distance(one.returned["out"], one.expected["out"]) <= one.allowed["out"] for one in wrong):
        return _of_lse(wrong)
    return _special(wrong, others) or _fitted(wrong) or _region(wrong)


def _of_lse(wrong: list[Answer]) -> str:
    """Outputs are right, and log-sum-exps are not."""
    for words, change in _LSE:
        found = [one for one in wrong if "lse" in one.returned]
        if found and all(
            distance(change(one.returned["lse"]), one.expected["lse"]) <= 4 * one.allowed["lse"] for one in found
        ):
            return words
    return ""


_LSE = (
    ("log-sum-exp in powers of 2 in place of e", lambda x: x * np.log(2)),
    ("log-sum-exp with the other sign", lambda x: -x),
    ("sum of exponentials in place of its logarithm", np.log),
)


def _special(wrong: list[Answer], others: set[str]) -> str:
    """What a kind of case alone shows, if ordinary cases with the same options are right."""
    one = wrong[0]
    out, expected = one.returned["out"], one.expected["out"]
    empty = ~np.isfinite(one.expected["lse"])
    if one.family == "large_scores" and "self" not in others and not np.isfinite(out).all():
        return "the exponential overflows: the largest score is not subtracted first"
    if "masks" in others:
        return ""
    if one.family == "nan_excluded" and np.isnan(out).any():
        return "values of excluded keys are multiplied by 0, and 0 times NaN is NaN"
    if one.family == "excluded_rows" and empty.any() and out.shape == expected.shape:
        if np.isnan(out[empty]).any():
            return "divides by a sum of 0 for queries that may attend no key"
        if np.isfinite(out[empty]).all() and distance(out[~empty], expected[~empty]) < np.inf:
            return "gives queries that may attend no key an average of values: a large negative number stands for -inf"
    return ""


def _fitted(wrong: list[Answer]) -> str:
    """A constant scale that gives all answers, if there is one."""
    first = wrong[0]

    def off(one: Answer, scale: float) -> float:
        try:
            return distance(out_of(one.example, scale=scale), one.returned["out"])
        except RelposError:
            return np.inf

    if not np.isfinite(first.returned["out"]).all():
        return ""
    tried = scale_of(first.example) * _FACTORS
    errors = [off(first, float(scale)) for scale in tried]
    best = int(np.argmin(errors))
    low, high = (float(tried[min(max(best + n, 0), len(tried) - 1)]) for n in (-1, 1))
    for _ in range(_DIVISIONS):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if off(first, a) < off(first, b) else (a, high)
    scale = (low + high) / 2
    if all(off(one, scale) <= 4 * one.allowed["out"] for one in wrong):
        return f"the scale is {scale:.4g} where {scale_of(first.example):.4g} is meant"
    return ""


def _region(wrong: list[Answer]) -> str:
    """Where alone outputs are wrong, if that is the same in all cases: heads, items, queries or channels."""
    for axis, word in enumerate(_AXES):
        firsts, ends, zero = set(), set(), True
        for one in wrong:
            out, expected = one.returned["out"], one.expected["out"]
            if out.shape != expected.shape:
                return ""
            with np.errstate(invalid="ignore"):
                bad = ~(np.abs(out - expected) <= one.allowed["out"])
            along = bad.any(axis=tuple(n for n in range(4) if n != axis))
            if along.all() or not along.any():
                break
            at = np.flatnonzero(along)
            zero &= bool((np.take(out, at, axis) == 0).all())
            firsts.add(int(at[0]))
            ends.add(_shape_of(along))
        else:
            what = "the output is 0" if zero else "the output is wrong"
            if ends == {"last"}:
                return f"{what} for the last {word} alone"
            if ends == {"first"}:
                return f"{what} for the first {word} alone"
            if len(firsts) == 1 and ends <= {"rest", "last"}:
                return f"{what} from {word} {firsts.pop()} on alone, counted from 0"
    return ""


def _shape_of(along: Array) -> str:
    """Which entries of an axis are wrong."""
    at = np.flatnonzero(along)
    if len(at) == 1 and at[0] == len(along) - 1:
        return "last"
    if len(at) == 1 and at[0] == 0:
        return "first"
    return "rest" if at[-1] == len(along) - 1 and len(at) == at[-1] - at[0] + 1 else "some"
