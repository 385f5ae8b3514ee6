"""Cosines and sines of products of positions and frequencies, to the last digit however large the product is."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np

from relpos_np.types import Array

# Enough for a number of float64 and the rounding error of it.
_DIGITS = 40
# 2^27 + 1: the product with it tells the upper half of a float64's digits from the lower.
_SPLITTER = 134217729.0


@lru_cache(maxsize=64)
def geometric_frequencies(base: float, count: int) -> tuple[Array, Array]:
    r"""Frequencies base^(-c / count) in float64, and what rounding took off each.

    A frequency that is off by half a unit in its last place makes an angle at position 50 off by 50 times as much.

    Parameters
    ----------
    base : float
        A positive number.
    count : int
        How many frequencies.

    Returns
    -------
    rounded, rest : ndarray of float64, shape (count,)
        Their sum is exact to 30 digits. Read-only, since calls share them.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        exact = [Decimal(base) ** (Decimal(-c) / Decimal(count)) for c in range(count)]
        rounded = [float(x) for x in exact]
        rest = [float(x - Decimal(y)) for x, y in zip(exact, rounded, strict=True)]
    found = np.array(rounded, np.float64), np.array(rest, np.float64)
    for x in found:
        x.flags.writeable = False
    return found


def _halves(x: Array) -> tuple[Array, Array]:
    upper = x * _SPLITTER
    upper = upper - (upper - x)
    return upper, x - upper


@np.errstate(all="ignore")
def product_rest(x: Array, y: Array, product: Array) -> Array:
    """What rounding took off products of float64 numbers, exactly; 0 where that cannot be said.

    Parameters
    ----------
    x, y, product : ndarray of float64
        Factors, and ``x * y``.

    Returns
    -------
    ndarray of float64
        As large as the product.

    References
    ----------
    Dekker, "A floating-point technique for extending the available precision", 1971, :doi:`10.1007/BF01397083`.
    """
    (x_upper, x_lower), (y_upper, y_lower) = _halves(x), _halves(y)
    rest = x_upper * y_upper - product
    rest += x_upper * y_lower
    rest += x_lower * y_upper
    rest += x_lower * y_lower
    return np.where(np.isfinite(rest), rest, 0.0)


@np.errstate(all="ignore")
def cos_sin(positions: Array, frequencies: tuple[Array, Array], shift: Array) -> tuple[Array, Array]:
    r"""Cosines and sines of :math:`t\,\omega - \delta`.

    Parameters
    ----------
    positions : ndarray of float64
        Positions t.
    frequencies : tuple of two ndarray of float64
        Frequencies :math:`\omega`, as numbers and what to add to them.
    shift : ndarray of float64
        Angles :math:`\delta`. All arrays broadcast.

    Returns
    -------
    cos, sin : ndarray of float64
        Off by about a unit in the last place of 1, where the product alone would be off by half of one of the angle.
    """
    omega, rest = frequencies
    turned = positions * omega
    lost = product_rest(positions, omega, turned)
    lost += positions * rest
    angle = turned - shift
    # What the difference lost: Knuth's sum of two numbers.
    back = angle - turned
    lost = lost + ((turned - (angle - back)) - (shift + back))
    lost = np.where(np.isfinite(lost), lost, 0.0)
    cos, sin = np.cos(angle), np.sin(angle)
    cos_lost, sin_lost = np.cos(lost), np.sin(lost)
    return cos * cos_lost - sin * sin_lost, sin * cos_lost + cos * sin_lost
