r"""Tables of relative positions, resampled for other lengths and windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array

__all__ = ["resize_matrix", "resize_table"]

MODES = ("cubic", "linear", "geometric")
# The cubic kernel's free parameter in PyTorch; Keys proposed -0.5.
_A = -0.75


def resize_matrix(old: int, new: int, mode: str = "cubic") -> Array:
    r"""Weights of each old point in each new one.

    With :math:`x_r = (r + \tfrac12)\, n / m - \tfrac12` the new point r among n old ones, row r holds
    :math:`w(x_r - c)` for points c, those beyond an end being the end itself:

    .. math::

        w(x) = \begin{cases}
        (a + 2)|x|^3 - (a + 3)|x|^2 + 1 & |x| \le 1 \\
        a|x|^3 - 5a|x|^2 + 8a|x| - 4a & 1 < |x| < 2
        \end{cases}, \quad a = -\tfrac34; \qquad w(x) = \max(0, 1 - |x|)

    for "cubic" and "linear". For "geometric" new points lie at the integers from -(m-1)/2 to (m-1)/2, old ones at
    0 and :math:`\pm(1 + \rho + \dots + \rho^{c-1})` for c = 1 ... (n-1)/2, with the ratio :math:`\rho` between 1.01
    and 1.5 for which the outermost ones meet, as nearly as that range allows. Between two old points a new one is
    interpolated linearly, beyond the last it is the last.

    Parameters
    ----------
    old, new : int
        Number of points n before and m after; both odd for "geometric".
    mode : {"cubic", "linear", "geometric"}
        Which rule.

    Returns
    -------
    ndarray of float64, shape (m, n)
        Rows sum to 1. The identity for n = m, except for "geometric".

    References
    ----------
    Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981. The progression is that of BEiT's
    published code.
    """
    if mode == "geometric":
        at, side = _progression(old, new), new // 2
        return np.stack([np.interp(np.arange(-side, side + 1), at, unit) for unit in np.eye(old)], axis=1)
    # In integers, so that the fractions do not lose what the coordinates are large by.
    below, rest = np.divmod((2 * np.arange(new) + 1) * old - new, 2 * new)
    t = rest / (2 * new)
    taps: tuple[tuple[int, Array], ...]
    if mode == "linear":
        taps = ((0, 1 - t), (1, t))
    else:
        far, near = 1 + t, 1 - t
        taps = (
            (-1, ((_A * far - 5 * _A) * far + 8 * _A) * far - 4 * _A),
            (0, ((_A + 2) * t - (_A + 3)) * t * t + 1),
            (1, ((_A + 2) * near - (_A + 3)) * near * near + 1),
            (2, ((_A * (1 + near) - 5 * _A) * (1 + near) + 8 * _A) * (1 + near) - 4 * _A),
        )
    matrix = np.zeros((new, old))
    for step, weight in taps:
        # Rows are distinct, so that each pair is met once per tap.
        matrix[np.arange(new), np.clip(below + step, 0, old - 1)] += weight
    return matrix


def _progression(old: int, new: int) -> Array:
    """Places of the old points, by the published bisection; it ends before the ratio is exact."""
    low, high, ratio = 1.01, 1.5, 1.01
    while high - low > 1e-6:
        ratio = (low + high) / 2
        reach = (1 - ratio ** (old // 2)) / (1 - ratio)
        low, high = (low, ratio) if reach > new // 2 else (ratio, high)
    half = np.cumsum(ratio ** np.arange(old // 2))
    return np.concatenate([-half[::-1], [0.0], half])


@np.errstate(all="ignore")
def resize_table(
    table: Any,
    old_grid: Sequence[int],
    new_grid: Sequence[int],
    *,
    mode: Literal["cubic", "linear", "geometric"] = "cubic",
    extra_rows: int = 0,
) -> Array:
    r"""A table of relative positions for another window.

    The rows of a grid with extents E are an image of :math:`2E_a - 1` points along each axis a, in row-major
    order. It is resampled along one axis after the other with `resize_matrix`, centres of pixels aligned, not
    their corners.

    Parameters
    ----------
    table : ndarray, shape (rows, ...)
        Rows for the differences of coordinates on the old grid, then `extra_rows` others. Further axes are
        those of heads or channels.
    old_grid, new_grid : sequence of int
        Extents E along each axis before and after, such as (7, 7) and (12, 16); one axis for the tables
        of `DecomposedBias`.
    mode : {"cubic", "linear", "geometric"}
        What Swin's loaders do to tables (PyTorch's bicubic), or what BEiT in transformers (bilinear) and SAM
        (linear) do. "geometric" is what BEiT's loader does, and timm's for BEiT, Swin and others: near differences
        keep their places and far ones move outward. It is made for larger new grids. The original has cubic splines
        between these places, timm linear pieces, as here.
    extra_rows : int
        Rows at the end that stay as they are: 3 for `BEiT`.

    Returns
    -------
    ndarray, shape (new rows, ...)
        In the table's dtype (float32 for half precision), computed in float64.

    Raises
    ------
    RelposValueError
        If the number of rows is not that of the old grid, or the grids differ in their number of axes.

    Notes
    -----
    PyTorch's ``interpolate`` with ``align_corners=False`` and no antialiasing gives the same numbers. Loaders
    that guess the old grid from the number of rows take it for a square. A grid that stays as it is keeps its
    table in every mode; where only one axis changes, "geometric" moves numbers along the other too, as in timm.
    """
    x = check.floating("table", table)
    if x.ndim < 1:
        raise RelposValueError(f"table: expected shape (rows, ...), found {x.shape}")
    old, new = ([2 * n - 1 for n in _extents(name, g)] for name, g in (("old_grid", old_grid), ("new_grid", new_grid)))
    if len(old) != len(new):
        raise RelposValueError(f"new_grid: expected {len(old)} axes as in old_grid, found {tuple(new_grid)}")
    mode, extra = check.choice("mode", mode, MODES), check.integer("extra_rows", extra_rows, 0)
    if len(x) != prod(old) + extra:
        raise RelposValueError(
            f"table: grid {tuple(old_grid)} and {extra} extra rows need {prod(old) + extra} rows, found shape {x.shape}"
        )
    if old == new:
        return x.copy()
    image = x[: prod(old)].astype(np.float64).reshape(*old, *x.shape[1:])
    for axis, (n, m) in enumerate(zip(old, new, strict=True)):
        image = np.moveaxis(np.tensordot(resize_matrix(n, m, mode), image, axes=(1, axis)), 0, axis)
    resized = image.reshape(prod(new), *x.shape[1:]).astype(x.dtype)
    return np.concatenate([resized, x[prod(old) :]])


def _extents(name: str, value: Any) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RelposTypeError(f"{name}: expected a tuple of extents such as (7, 7), found {value!r}")
    return [check.integer(name, n, 1) for n in value]
