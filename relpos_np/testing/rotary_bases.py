"""A base of rotary frequencies that nobody stated: those of released models, or the number that explains the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from relpos_np.testing.arguments import arguments
from relpos_np.testing.candidates import Candidate

# Defaults of configurations in transformers 5.23, the most frequent first; 40000, 8e6 and 250000 are of checkpoints.
PUBLISHED = (
    *(500_000.0, 1_000_000.0, 20_000.0, 5_000_000.0, 150_000.0, 12_000_000.0, 100.0, 160_000.0, 100_000.0, 25_000.0),
    *(1_000.0, 2_000_000.0, 10_000_000.0, 100_000_000.0, 1_000_000_000.0, 80_000_000.0, 2_560_000.0, 11_158_840.0),
    *(1_200.0, 40_000.0, 250_000.0, 8_000_000.0),
)
# Bases that are looked at first, far enough apart for every call's conventions to be seen from one of them.
LANDMARKS = (100.0, 10_000.0, 1_000_000.0)
_LEAST, _MOST = 2.0, 1e10
_POINTS, _DIGITS = 64, 15
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

Error = Callable[[float], float]


def free(candidate: Candidate, stated: Mapping[str, Any]) -> bool:
    """Whether the candidate has a base that is nobody's but its default."""
    return "base" in candidate.settings and "base" not in stated and candidate.settings.get("frequencies") is None


def with_base(candidate: Candidate, base: float) -> Candidate:
    """The candidate with another base."""
    made = type(candidate.made)(**arguments(candidate.made) | {"base": base})
    return replace(candidate, made=made, settings=candidate.settings | {"base": base})


def lowest(error: Error, longest: int) -> float:
    """The base with the smallest error, as far as an even grid of its logarithm and a bisection find it.

    An angle t base^-x changes by at most t / (e log base) where the logarithm does by 1, so that longer calls need more
    points.
    """
    points = _POINTS * min(6, 1 + longest // 32)
    first, last = math.log(_LEAST), math.log(_MOST)
    step = (last - first) / points
    errors = [error(math.exp(first + n * step)) for n in range(points + 1)]
    at = first + min(range(points + 1), key=errors.__getitem__) * step
    left, right = max(at - step, first), min(at + step, last)
    # The error is that of a distance: straight lines down to the smallest, and no parabola.
    while right - left > 1e-14 * right:
        a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
        if not left < a < b < right:
            break
        if error(math.exp(a)) <= error(math.exp(b)):
            right = b
        else:
            left = a
    return math.exp((left + right) / 2)


def rounder(base: float) -> Iterator[float]:
    """The base with 1 digit, 2 digits and so on, and as it is."""
    for digits in range(1, _DIGITS):
        yield float(f"{base:.{digits - 1}e}")
    yield base


def alike(base: float, fits: Callable[[float], bool]) -> tuple[float, float]:
    """The smallest and the largest base around one that fit too."""

    def edge(sign: int) -> float:
        inside, outside = 0.0, 1e-15
        while outside < 30.0 and fits(base * math.exp(sign * outside)):
            inside, outside = outside, outside * 4
        for _ in range(8):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if fits(base * math.exp(sign * middle)) else (inside, middle)
        return base * math.exp(sign * inside)

    return edge(-1), edge(1)
