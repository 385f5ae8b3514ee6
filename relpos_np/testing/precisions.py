"""How far an answer is from the one that is looked for, what precision explains that, and why two are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np.testing.candidates import Candidate
from relpos_np.testing.compare import EPS, largest, tolerance
from relpos_np.testing.conventions import Options
from relpos_np.testing.identification import Match
from relpos_np.testing.operands import Operands, computed
from relpos_np.types import Array

# What a framework writes for a score that is excluded, if not -inf.
_EXCLUDED = -1e4
_REASONS = 40


@dataclass(eq=False)
class Fit:
    """A candidate with a convention, and how far from the answer it is."""

    candidate: Candidate
    how: Options
    at: Operands
    error: float
    relative: float
    answer: Array
    rung: int = 99


def _part(at: Operands, x: Array, axes: int) -> Array:
    """The part of an answer with so many axes from the heads on that is computed."""
    batch, rows = at.cut
    return x[(*batch, slice(None), rows)] if axes > 1 else x[batch]


def distance(at: Operands, answer: Array, lse: Array | None) -> tuple[float, float]:
    """The largest difference, and the root mean square relative to that of what is to be explained."""
    if at.scores is not None:
        wanted = _part(at, at.scores, 3)
        shut = ~(wanted > _EXCLUDED)
        if (np.isneginf(answer) != shut).any():
            return np.inf, np.inf
        return relative_to(answer, np.where(shut, -np.inf, wanted))
    assert at.out is not None
    error, relative = relative_to(answer, _part(at, at.out, 3))
    if at.lse is not None and lse is not None:
        more, other = relative_to(lse, _part(at, at.lse, 2), 1.0)
        error, relative = max(error, more), max(relative, other)
    return error, relative


def relative_to(found: Array, wanted: Array, least: float = 0.0) -> tuple[float, float]:
    """Of finite elements; what is infinite must be so in both."""
    there = np.isfinite(wanted)
    if (np.isinf(wanted) & (found != wanted)).any() or not there.any():
        return np.inf, np.inf
    difference = np.abs(found[there] - wanted[there])
    size = float(np.sqrt(np.mean(wanted[there] ** 2))) + least
    return float(difference.max()), float(np.sqrt(np.mean(difference**2))) / (size or 1.0)


# Precisions in which an answer can have been computed, the finest first.
RUNGS = ("float64", "float32", "float16", "bfloat16", "float16 inside", "bfloat16 inside")
# With scores and probabilities rounded to half precision too, errors may be so large in units of the answer.
_INSIDE = 2.0**-5


def rung_of(stored: np.dtype[Any], fit: Fit, sinks: Array | None) -> int:
    """The finest precision whose rounding explains the difference."""
    at = fit.at
    s, _ = computed(at, fit.candidate.made, fit.how, sinks, scores=True)
    bound = 2 * float(np.abs(s[s > _EXCLUDED]).max(initial=0.0))
    size = 1.0
    if at.v is not None:
        size = max(largest(fit.answer), largest(at.v))
    magnitude = 1 + bound if at.out is None else size if at.lse is None else max(size, 1.0)

    def allowed(label: str) -> float:
        name, _, inside = label.partition(" ")
        if inside:
            return EPS[name] * (1 + bound) * magnitude if fit.relative <= _INSIDE else 0.0
        return float(tolerance(name, logit_bound=bound, depth=at.q.shape[-1], magnitude=magnitude))

    return finest(stored, at.wanted, fit.error, allowed)


def finest(stored: np.dtype[Any], wanted: Array, error: float, allowed: Callable[[str], float]) -> int:
    """The finest precision that allows an error, and that an answer of this dtype can have."""
    for n, label in enumerate(RUNGS):
        name = label.partition(" ")[0]
        coarser = stored.name not in EPS or EPS[name] >= EPS[stored.name]
        if coarser and (EPS[name] <= EPS["float32"] or _stored_in(wanted, name)) and error <= allowed(label):
            return n
    return len(RUNGS)


def _stored_in(x: Array, name: str) -> bool:
    """Whether numbers have no more digits than a format of half precision keeps."""
    digits = {"float16": 11, "bfloat16": 8}[name]
    fraction, _ = np.frexp(x[np.isfinite(x)])
    scaled = np.ldexp(fraction, digits)
    return bool((scaled == np.round(scaled)).all())


def grouped(best: list[Fit]) -> list[list[Fit]]:
    """Fits of one scheme and variant whose answers are the same numbers, together."""

    def key(fit: Fit) -> tuple[Any, ...]:
        return fit.candidate.scheme, fit.candidate.variant, fit.candidate.arrays, fit.at.layout

    groups: list[list[Fit]] = []
    for fit in best:
        own = (group for group in groups if key(group[0]) == key(fit) and same(group[0].answer, fit.answer))
        group = next(own, None)
        if group is None:
            groups.append([fit])
        else:
            group.append(fit)
    return groups


def same(a: Array, b: Array) -> bool:
    """Whether numbers differ by rounding of float64 at most."""
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=1e-11, atol=1e-12, equal_nan=True))


def match(group: list[Fit], why: str) -> Match:
    """What is told of fits that are the same numbers."""
    fit = group[0]
    at, own = fit.at, fit.candidate
    call = fit.how.shown(*at.lengths)
    shown = own.settings | call
    others_of: dict[str, list[Any]] = {}
    for one in group[1:]:
        others = one.candidate.settings | one.how.shown(*at.lengths)
        for name in [*shown, *(others.keys() - shown.keys())]:
            other, known = others.get(name), others_of.get(name, [])
            if not name.endswith("_is") and other not in known and (name not in shown or other != shown[name]):
                others_of[name] = [*known, other]
    told = own.settings, own.arrays, call, at.layout, others_of
    return Match(own.scheme, own.variant, *told, fit.error, fit.relative, why)


def why(first: Fit, other: Fit, rank: int) -> str:
    """Why a fit cannot be told apart from the first, from the scores of both."""
    if rank > _REASONS:
        return "not looked into"
    if not same(first.answer, other.answer):
        gap = float(np.nanmax(np.abs(first.answer - other.answer)))
        return f"the answers differ by {gap:.1e}, less than the rounding that is seen"
    if first.at.out is None:
        return "the scores are the same numbers for these operands"
    a, b = (computed(fit.at, fit.candidate.made, fit.how, None, scores=True)[0] for fit in (first, other))
    if (np.isneginf(a) != np.isneginf(b)).any():
        return "other keys are excluded, and they have no weight here"
    if same(a, b):
        return "the scores are the same numbers for these operands"
    open_ = np.isfinite(a)
    gaps = np.where(open_, np.where(open_, a, 0) - np.where(open_, b, 0), np.nan)
    with np.errstate(all="ignore"):
        spread = np.nanmax(gaps, axis=-1) - np.nanmin(gaps, axis=-1)
    if np.nanmax(spread) <= 1e-10 * max(1.0, float(np.nanmax(np.abs(gaps)))):
        return "scores differ by one number per query, which the softmax takes out; lse or scores would tell"
    return "scores differ, and the outputs are the same numbers for these operands"
