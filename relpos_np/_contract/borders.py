"""Borders of logarithmic buckets, exactly, in time that follows the borders that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal, localcontext
from itertools import count

# Distances have up to 19 digits; a border nearer to an integer than this is compared with it in integers.
_DIGITS, _NEAR = 60, Decimal("1e-30")


def borders(first: int, last: int, steps: int, *, up: bool) -> Iterator[int]:
    r"""Where :math:`x_m = a (b / a)^{m / w}` lies for m = 1, 2, ..., the number below or, if `up`, above.

    Parameters
    ----------
    first, last : int
        a and b, 0 < a < b.
    steps : int
        w.
    up : bool
        The smallest integer that is not below, not the largest that is not above.

    Yields
    ------
    int
        One border after the other, without end. Of each x 60 digits are computed; where these do not tell on which
        side of an integer n it lies, :math:`n^w` is compared with :math:`b^m a^{w-m}`.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        start = Decimal(first).ln()
        whole = Decimal(last).ln() - start
    for m in count(1):
        with localcontext() as context:
            context.prec = _DIGITS
            x = (start + whole * m / steps).exp()
            below, nearest = int(x), int(x.to_integral_value())
            sure = abs(x - nearest) > _NEAR * x
        if sure:
            yield below + up
            continue
        # The last factor stands on the other side where its exponent would be negative.
        border, power = last**m * first ** max(steps - m, 0), nearest**steps * first ** max(m - steps, 0)
        yield nearest + (up and power < border) - (not up and power > border)
