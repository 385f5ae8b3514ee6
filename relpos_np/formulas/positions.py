r"""Positions that are not counted: drawn at random, or laid out for a video between texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.rotary_axes import grid_positions
from relpos_np.types import Array, Int64


def randomized_positions(length: int, longest: int, *, rng: Any, batch: Sequence[int] = ()) -> Int64:
    r"""Positions drawn without replacement and sorted, with which training on short texts prepares for long ones.

    .. math::

        t_1 < t_2 < \dots < t_L, \qquad
        \{t_i\} \text{ uniform among the subsets of } \{0 \dots N - 1\} \text{ of size } L

    Parameters
    ----------
    length : int
        Number of positions L.
    longest : int
        Number N of positions to draw from, beyond the longest text that is to be read; at least L.
    rng : numpy.random.Generator
        Source of random numbers.
    batch : sequence of int
        Sizes of batch axes, with positions drawn for each item. The published code draws once for all.

    Returns
    -------
    ndarray of int64, shape (\*batch, L)
        For the ``positions`` of `Rotary` and of sinusoids, and as indices of a table of absolute positions.

    Raises
    ------
    RelposValueError
        If L or N is below 1, or N is below L.
    RelposTypeError
        If `rng` is no generator.

    References
    ----------
    Ruoss et al., "Randomized Positional Encodings Boost Length Generalization of Transformers", ACL 2023.
    """
    length, longest = check.integer("length", length, 1), check.integer("longest", longest, 1)
    if longest < length:
        raise RelposValueError(f"longest: expected at least length {length}, found {longest}")
    if not isinstance(rng, np.random.Generator):
        raise RelposTypeError(f"rng: expected a numpy.random.Generator, found {type(rng).__name__}")
    sizes = [check.integer("batch", n, 0) for n in batch]
    found = np.empty((*sizes, length), np.int64)
    for item in np.ndindex(*sizes):
        found[item] = np.sort(rng.choice(longest, length, replace=False, shuffle=False))
    return found


def diagonal_positions(grid: Sequence[int], *, start: float = 0.0, spacing: float = 1.0) -> Array:
    r"""Coordinates of a video between texts, whose frames lie along the texts' diagonal.

    .. math::

        t' = s + \delta\, t, \qquad h' = t' + h - \lfloor (H - 1) / 2 \rfloor, \qquad
        w' = t' + w - \lfloor (W - 1) / 2 \rfloor

    A token of text has its position three times.

    Parameters
    ----------
    grid : sequence of int
        Numbers of frames, rows and columns (T, H, W).
    start : float
        Position s of the first frame: that of the last token of the text before, plus 1.
    spacing : float
        Positions from frame to frame, :math:`\delta`.

    Returns
    -------
    ndarray of float64, shape (3, T H W)
        Time, height and width, for `Rotary`'s ``positions`` with three axes, such as `section_axes` in the order
        "time_last".

    Raises
    ------
    RelposValueError
        If there are not three sizes, one is below 1, or a number is not finite.

    References
    ----------
    Wei et al., "VideoRoPE: What Makes for Good Video Rotary Position Embedding?", ICML 2025; the middles are
    those of the published code.
    """
    time, *space = cells = grid_positions(grid)
    if len(cells) != 3:
        raise RelposValueError(f"grid: expected (frames, rows, columns), found {tuple(grid)}")
    time = check.real("start", start) + check.real("spacing", spacing) * time
    middles = [(size - 1) // 2 for size in tuple(grid)[1:]]
    return np.stack([time, *(time + axis - middle for axis, middle in zip(space, middles, strict=True))])
