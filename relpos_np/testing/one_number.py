"""One number that nobody stated: that of released models, or the one that explains the answer.

The scale of a call, and of positions a rotary base, the share of the channels that turns, a factor on positions or on
what they add, and every real number that a scheme has at its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.schemes.alibi import ALiBi, alibi_slopes
from relpos_np.schemes.rotary import Rotary
from relpos_np.testing.arguments import arguments, parameters
from relpos_np.testing.candidates import Candidate
from relpos_np.testing.conventions import Options

# Defaults of configurations in transformers 5.23, the most frequent first; 40000, 8e6 and 250000 are of checkpoints.
PUBLISHED = (
    *(500_000.0, 1_000_000.0, 20_000.0, 5_000_000.0, 150_000.0, 12_000_000.0, 100.0, 160_000.0, 100_000.0, 25_000.0),
    *(1_000.0, 2_000_000.0, 10_000_000.0, 100_000_000.0, 1_000_000_000.0, 80_000_000.0, 2_560_000.0, 11_158_840.0),
    *(1_200.0, 40_000.0, 250_000.0, 8_000_000.0),
)
_POINTS, _DIGITS = 64, 15
# Of WavLM, T5 and others, and powers of two.
DISTANCES = (800.0, 128.0, 20.0, 80.0, 32.0, 64.0, 256.0, 512.0)
# Steps of a search after which an error that is no smaller, and larger than that of half precision, shows no number.
_STEPS, _NO_ROUNDING = 12, 2.0**-6
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

Error = Callable[[float], float]


# From a candidate and a value of a number to arguments of its scheme, and to what is told of them.
_Given = Callable[[Candidate, float], tuple[dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True)
class Unknown:
    """A number of a scheme that `given` puts into it, or of a call: its scale.

    It is looked for between `first` and `last`, where `landmarks` are far enough apart for every call's conventions to
    be seen from one of them; `values` are tried before, or alone where there are no landmarks. The usual scales have
    been tried by then.
    """

    name: str
    given: _Given | None
    values: tuple[float, ...] = ()
    landmarks: tuple[float, ...] = ()
    first: float = 0.0
    last: float = 0.0

    def applied(self, candidate: Candidate, how: Options, value: float) -> tuple[Candidate, Options]:
        """A candidate with options that have some value of it."""
        if self.given is None:
            return candidate, replace(how, scale=value)
        given, shown = self.given(candidate, value)
        made = type(candidate.made)(**(arguments(candidate.made) | given))
        return replace(candidate, made=made, settings=candidate.settings | shown), how


SCALE = Unknown("scale", None, first=1e-3, last=30.0)


def unknowns(candidate: Candidate, stated: Mapping[str, Any], dim: int, heads: int) -> Iterator[Unknown]:
    """Numbers of a candidate that are nobody's but their default."""
    free = candidate.settings.keys() - stated.keys()
    # A share of the channels is a number of its own, and an example's is nobody's.
    partial = candidate.settings.get("dim") not in (None, dim) or "channels" in candidate.settings
    if isinstance(candidate.made, Rotary) and partial and not {"dim", "channels"} & stated.keys():
        return
    if "base" in free and getattr(candidate.made, "frequencies", None) is None:
        yield Unknown("base", _setting("base"), PUBLISHED, (100.0, 10_000.0, 1_000_000.0), 2.0, 1e10)
    if isinstance(candidate.made, Rotary) and candidate.made.frequencies is None:
        if not {"dim", "channels"} & stated.keys():
            shares = tuple(float(n) for n in range(dim // 2 * 2 - 2, 0, -2))
            yield Unknown("dim", _share(dim, last=False), shares)
            if type(candidate.made) is Rotary:
                yield Unknown("dim of the last channels", _share(dim, last=True), shares)
        if type(candidate.made) is Rotary:
            yield Unknown("factor", _slower(dim), (2.0, 4.0, 8.0), (1.0, 4.0, 32.0), 1 / 64, 1024.0)
    elif candidate.arrays or isinstance(candidate.made, ALiBi):
        yield Unknown("factor", _louder(heads), (), (0.2, 1.0, 5.0), 1 / 64, 64.0)
        if isinstance(candidate.made, ALiBi) and candidate.made.slopes is None and "bias_max" not in stated:
            yield Unknown("bias_max", _setting("bias_max"), (16.0, 4.0, 32.0))
            if heads & (heads - 1):
                yield Unknown("slopes", _geometric(heads), (8.0,))
    if "max_distance" in free:
        yield Unknown("max_distance", _setting("max_distance", int), DISTANCES)
    cls: type = type(candidate.made)
    for name in sorted(free & parameters(cls).keys() - {"base"}):
        default = parameters(cls)[name].default
        if isinstance(default, float) and default > 0 and candidate.settings[name] == default:
            marks = tuple(default * x for x in (0.25, 1.0, 4.0))
            yield Unknown(name, _setting(name), (), marks, default / 64, default * 64)


def _setting(name: str, kind: type[int | float] = float) -> _Given:
    return lambda _, value: ({name: kind(value)}, {name: kind(value)})


def _share(dim: int, *, last: bool) -> _Given:
    """So many of the channels, the first or the last ones."""

    def given(_: Candidate, count: float) -> tuple[dict[str, Any], dict[str, Any]]:
        if last:
            channels = {"channels": (dim - int(count), dim)}
            return channels | {"dim": None}, channels
        return {"dim": int(count)}, {"dim": int(count)}

    return given


def _slower(dim: int) -> _Given:
    """Positions that are divided by a factor."""

    def given(candidate: Candidate, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
        frequencies = rotary_frequencies(candidate.made.dim or dim // 2 * 2, base=candidate.made.base) / factor
        return {"frequencies": frequencies, "base": 10000.0, "dim": None}, {"factor": factor}

    return given


def _louder(heads: int) -> _Given:
    """What positions add, times a factor."""

    def given(candidate: Candidate, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {n: x * factor for n, x in arguments(candidate.made).items() if _is_floats(x)}
        if not own and isinstance(candidate.made, ALiBi):
            own = {"slopes": alibi_slopes(heads) * factor, "heads": None, "bias_max": None}
        return own, {"factor": factor}

    return given


def _geometric(heads: int) -> _Given:
    """Slopes 2^(-n h / H), where published ones are those of powers of 2 of heads."""

    def given(_: Candidate, n: float) -> tuple[dict[str, Any], dict[str, Any]]:
        slopes = 2.0 ** (-n * np.arange(1, heads + 1) / heads)
        return {"slopes": slopes, "heads": None, "bias_max": None}, {"slopes": f"2^(-{n:g} h / H)"}

    return given


def _is_floats(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def lowest(unknown: Unknown, error: Error, longest: int) -> float:
    """The number with the smallest error, as far as an even grid of its logarithm and a bisection find it.

    An angle t base^-x changes by at most t / (e log base) where the logarithm does by 1, so that longer calls need more
    points.
    """
    points = _POINTS * min(6, 1 + longest // 32)
    first, last = math.log(unknown.first), math.log(unknown.last)
    step = (last - first) / points
    errors = [error(math.exp(first + n * step)) for n in range(points + 1)]
    at = first + min(range(points + 1), key=errors.__getitem__) * step
    left, right = max(at - step, first), min(at + step, last)
    # The error is that of a distance: straight lines down to the smallest, and no parabola.
    a, b = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
    at_a, at_b = error(math.exp(a)), error(math.exp(b))
    for n in count():
        if right - left <= 1e-14 * max(abs(left), abs(right)) or not left < a < b < right:
            break
        # It would have become much smaller, were it that of the number.
        if n == _STEPS and min(at_a, at_b) > max(min(errors) / 5, _NO_ROUNDING):
            break
        if at_a <= at_b:
            right, b, at_b = b, a, at_a
            a = right - _GOLDEN * (right - left)
            at_a = error(math.exp(a))
        else:
            left, a, at_a = a, b, at_b
            b = left + _GOLDEN * (right - left)
            at_b = error(math.exp(b))
    return math.exp((left + right) / 2)


def rounder(unknown: Unknown, number: float, sizes: tuple[int, int, int]) -> Iterator[float]:
    """What may have been meant: a scale of known form, the number with 1 digit, 2 digits and so on, and as it is."""
    if unknown.name == "scale":
        yield from known_scales(*sizes)
    for digits in range(1, _DIGITS):
        yield float(f"{number:.{digits - 1}e}")
    yield number


def known_scales(dim: int, heads: int, v_dim: int) -> dict[float, str]:
    """Scales that are in use, in words."""
    return {
        (2.0 * dim) ** -0.5: "1/sqrt(2 D)",
        (3.0 * dim) ** -0.5: "1/sqrt(3 D)",
        (heads * dim) ** -0.5: "1/sqrt(H D)",
        1.0 / dim: "1/D",
        dim**-0.25: "D^(-1/4)",
        v_dim**-0.5: "1/sqrt(D_v)",
        float(2 ** np.ceil(np.log2(dim))) ** -0.5: "1/sqrt of D filled up to a power of 2",
    }


def alike(number: float, fits: Callable[[float], bool]) -> tuple[float, float]:
    """The smallest and the largest number around one that fit too."""

    def edge(sign: int) -> float:
        inside, outside = 0.0, 1e-15
        while outside < 30.0 and fits(number * math.exp(sign * outside)):
            inside, outside = outside, outside * 4
        for _ in range(8):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if fits(number * math.exp(sign * middle)) else (inside, middle)
        return number * math.exp(sign * inside)

    return edge(-1), edge(1)
