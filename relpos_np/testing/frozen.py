"""Numbers that are the same on every machine, under every version of NumPy: drawn from raw bits, rounded to a few."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np.errors import RelposError
from relpos_np.types import Array

# How near to the border between two roundings an answer may lie, in units of the last bit: more than float64 errs. No
# answer of v1 is so far from a border, but for 4e-7, that rounding errors could decide whether this is too near.
_NEAR = 3.4e-6
# Above 1 by less than a tolerance changes, and by more than float64 errs.
_SLACK = 1e-9


class Numbers:
    """Draws like those of a NumPy generator, made of the raw stream of PCG64, which never changes."""

    def __init__(self, seed: Any) -> None:
        self._bits = np.random.PCG64(seed)

    def _words(self, shape: Any) -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return np.asarray(self._bits.random_raw(int(np.prod(shape)))).astype(np.uint64).reshape(shape)

    def standard_normal(self, shape: Any) -> Array:
        """Sums of four numbers of 14 bits: multiples of 2^-13 between -4 and 4, with a deviation near 1."""
        raw = self._words(shape)
        parts = ((raw >> np.uint64(14 * n)) & np.uint64(0x3FFF) for n in range(4))
        return np.asarray(sum(part.astype(np.int64) for part in parts) - 2 * 0x3FFF) / 2.0**13

    def random(self, shape: Any) -> Array:
        """Multiples of 2^-53 between 0 and 1."""
        return np.asarray((self._words(shape) >> np.uint64(11)) * 2.0**-53)


def coarse(x: Array, bits: int) -> Array:
    """The nearest numbers whose mantissa has so many bits after the first."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1))


class UndecidedError(RelposError):
    """Rounding errors decide what an answer is rounded to."""


def nearest(x: Array, unit: Any) -> Array:
    """The nearest multiples of a unit, of which 0 has no sign; infinities stay."""
    return np.asarray(np.where(np.isfinite(x), np.rint(np.where(np.isfinite(x), x, 0.0) / unit) * unit, x)) + 0.0


def answer(x: Array, unit: float) -> Array:
    """The same, of numbers none of which lies between two: an UndecidedError says that one does."""
    units = x[np.isfinite(x)] / unit
    if units.size and np.abs(np.abs(units - np.floor(units)) - 0.5).min() < _NEAR:
        raise UndecidedError("an answer lies between two roundings")
    return nearest(x, unit)


def last_bit(x: Any, bits: int, least: float) -> Array:
    """2^-bits of the powers of 2 that are no less than some numbers, which count as `least` at least: 0 has errors."""
    return np.asarray(2.0 ** (np.ceil(np.log2(np.maximum(x, least)) - _SLACK) - bits))


def upper(x: float) -> float:
    """A number of 5 bits that is hardly less."""
    mantissa, exponent = np.frexp(x)
    return float(np.ldexp(np.ceil(mantissa * 32 - _SLACK) / 32, exponent))
