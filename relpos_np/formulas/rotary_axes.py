r"""Rotary positions with several coordinates: frequencies per axis, and the coordinates of grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.types import Array


def axis_frequencies(frequencies: Any, axes: Any, count: int | None = None) -> Array:
    r"""Frequencies for positions with several coordinates, of which each pair follows one.

    .. math::

        \Omega_{a,p} = \begin{cases} \omega_p & a = a(p) \\ 0 & \text{else} \end{cases}, \qquad
        \text{so that the angle of pair } p \text{ is } \sum_a t_a\, \Omega_{a,p} = t_{a(p)}\, \omega_p

    Parameters
    ----------
    frequencies : ndarray, shape (P,)
        Angle :math:`\omega_p` per step.
    axes : ndarray of int, shape (P,)
        Axis a(p) that each pair follows, from 0, such as from `section_axes`.
    count : int, optional
        Number of axes A; default one more than the largest in `axes`.

    Returns
    -------
    ndarray of float64, shape (A, P)
        For `Rotary`'s ``frequencies``.

    Raises
    ------
    RelposValueError
        If the shapes differ, or an axis does not exist.

    References
    ----------
    Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution", 2024.
    """
    omega = check.table("frequencies", frequencies, "pairs").astype(np.float64)
    axes = check.array("axes", axes)
    if axes.dtype.kind not in "iu" or axes.shape != omega.shape:
        raise RelposValueError(
            f"axes: expected integers of shape {omega.shape}, found {axes.dtype} of shape {axes.shape}"
        )
    count = int(axes.max()) + 1 if count is None else check.integer("count", count, 1)
    if axes.min() < 0 or axes.max() >= count:
        raise RelposValueError(f"axes: expected 0 ... {count - 1}, found {axes.min()} ... {axes.max()}")
    return np.where(np.arange(count)[:, None] == axes, omega, 0.0)


def section_axes(
    sections: Sequence[int], *, order: Literal["chunks", "cyclic", "time_last"] = "chunks", pairs: int | None = None
) -> Array:
    r"""Axes of the pairs in models with multimodal positions (time, height, width).

    Parameters
    ----------
    sections : sequence of int
        How many pairs follow each axis (`mrope_section`).
    order : {"chunks", "cyclic", "time_last"}
        - "chunks": the first ``sections[0]`` pairs follow axis 0, the next ``sections[1]`` axis 1 ... (Qwen2-VL).
        - "cyclic": axes 0, 1, 2, 0, 1, 2 ... until the pairs of an axis other than 0 are used up, whose places then
          fall to axis 0 (Qwen3-VL, `mrope_interleaved`). Pairs that would lie beyond the last are left out, and axis
          0 has what remains, whatever its section: (3, 5, 5) has 5, 4 and 4 pairs.
        - "time_last": axes 1, 2, 1, 2 ... in turn, and then, on the slowest pairs, axis 0 (VideoRoPE, ERNIE 4.5-VL).
          ERNIE's configurations list their sections in this order, too: height, width and time.
    pairs : int, optional
        Number of pairs P, where it is not the sum of the sections ("cyclic" only, as in timm).

    Returns
    -------
    ndarray of int64, shape (P,)
        The axis of each pair, for `axis_frequencies`.

    Raises
    ------
    RelposValueError
        If a section is negative, all are 0, there is no such order, or P is not the sum and the order not "cyclic".

    References
    ----------
    Wang et al., "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution", 2024; "cyclic"
    is the published code of Qwen3-VL, 2025; Wei et al., "VideoRoPE: What Makes for Good Video Rotary Position
    Embedding?", ICML 2025, for "time_last".
    """
    check.choice("order", order, ("chunks", "cyclic", "time_last"))
    counts = [check.integer("sections", n, 0) for n in sections]
    if not sum(counts):
        raise RelposValueError(f"sections: expected at least one pair, found {tuple(counts)}")
    pairs = sum(counts) if pairs is None else check.integer("pairs", pairs, 1)
    if order != "cyclic" and pairs != sum(counts):
        raise RelposValueError(f"pairs: expected {sum(counts)}, the sum of sections {tuple(counts)}, found {pairs}")
    if order == "chunks":
        return np.repeat(np.arange(len(counts)), counts)
    if order == "time_last":
        others = np.arange(sum(counts[1:])) % max(len(counts) - 1, 1) + 1
        return np.concatenate([others, np.zeros(counts[0], np.int64)])
    axes = np.zeros(pairs, np.int64)
    for axis, count in enumerate(counts[1:], 1):
        places = axis + len(counts) * np.arange(count)
        axes[places[places < pairs]] = axis
    return axes


def axial_frequencies(
    dim: int | Sequence[int],
    axes: int | None = None,
    *,
    base: float = 10000.0,
    spread: Literal["same", "alternate"] = "same",
) -> Array:
    r"""Frequencies of images and videos: a share of the pairs for each axis of a grid, one after the other.

    With m = d / 2A pairs per axis, or its own number for each, pair r of axis a, as p = a m + r, has

    .. math::

        \Omega_{a,p} = \begin{cases} \mathrm{base}^{-r/m} & \text{same} \\
        \mathrm{base}^{-(A r + a)/(A m)} & \text{alternate} \end{cases}, \qquad
        \Omega_{b,p} = 0 \quad (b \ne a)

    Parameters
    ----------
    dim : int or sequence of int
        Number of rotated channels d, a multiple of 2A; or the channels 2m of each axis, such as (44, 42, 42) for Wan's
        time, height and width, (16, 24, 24) for CogVideoX's and (16, 56, 56) for HunyuanVideo's.
    axes : int, optional
        Number of axes A; 2 by default, or as many as `dim` lists. Positions are rows of coordinates in this order, such
        as from `grid_positions`.
    base : float
        Ratio between the longest and the shortest wavelength, nearly.
    spread : {"same", "alternate"}
        - "same": every axis has the frequencies of d / A channels (EVA-02, the image encoder of Qwen2-VL, and
          with ``base=100`` and a factor of :math:`2\pi` DINOv3).
        - "alternate": the frequencies of d channels are dealt out in turn (Pixtral).

    Returns
    -------
    ndarray of float64, shape (A, d / 2)
        For `Rotary`'s ``frequencies``.

    Raises
    ------
    RelposValueError
        If `dim` is not a positive multiple of 2A, or lists odd numbers, other than A of them, or different ones with
        "alternate"; if `axes` is below 1, `base` is not positive, or there is no such spread.

    References
    ----------
    Heo et al., "Rotary Position Embedding for Vision Transformer", ECCV 2024; Fang et al., "EVA-02: A
    Visual Representation for Neon Genesis", 2023.
    """
    check.choice("spread", spread, ("same", "alternate"))
    sizes = _shares(dim, axes)
    if spread == "same":
        omega = np.concatenate([rotary_frequencies(size, base=base) for size in sizes])
    else:
        if len(set(sizes)) > 1:
            raise RelposValueError(f"dim: spread 'alternate' needs axes of one size, found {sizes}")
        omega = rotary_frequencies(sum(sizes), base=base).reshape(-1, len(sizes)).T.reshape(-1)
    return axis_frequencies(omega, np.repeat(np.arange(len(sizes)), [size // 2 for size in sizes]), len(sizes))


def _shares(dim: Any, axes: Any) -> list[int]:
    """Channels of each axis."""
    if isinstance(dim, Sequence):
        sizes = [check.integer("dim", size, 2) for size in dim]
        if not sizes or any(size % 2 for size in sizes):
            raise RelposValueError(f"dim: expected even numbers of channels, found {tuple(dim)}")
        if axes not in (None, len(sizes)):
            raise RelposValueError(f"axes: expected {len(sizes)} for channels {tuple(dim)}, found {axes}")
        return sizes
    axes = 2 if axes is None else check.integer("axes", axes, 1)
    if check.integer("dim", dim, 2) % (2 * axes):
        raise RelposValueError(f"dim: expected a multiple of {2 * axes} for {axes} axes, found {dim}")
    return [dim // axes] * axes


def pixel_frequencies(pairs: int, *, resolution: float = 224.0, spacing: Literal["linear", "log"] = "linear") -> Array:
    r"""Frequencies for coordinates from -1 to 1, of P pairs.

    .. math::

        \omega_p = \pi \left(1 + \frac{p}{P - 1} \left(\frac{r}{2} - 1\right)\right)
        \quad \text{(linear)}, \qquad
        \omega_p = \pi \left(\frac{r}{2}\right)^{p / (P - 1)} \quad \text{(log)}

    Parameters
    ----------
    pairs : int
        Number of pairs P.
    resolution : float
        The number r: the fastest pair turns half a circle per step of 2 / r.
    spacing : {"linear", "log"}
        How the frequencies lie between the ends.

    Returns
    -------
    ndarray of float64, shape (P,)
        Angle per unit of position.

    Raises
    ------
    RelposValueError
        If `pairs` is below 1, `resolution` is not positive, or there is no such spacing.

    References
    ----------
    Jaegle et al., "Perceiver: General Perception with Iterative Attention", ICML 2021, for features that are
    sines and cosines; as rotary frequencies in timm's ``in_pixels`` mode, 2022.
    """
    check.choice("spacing", spacing, ("linear", "log"))
    top = check.positive("resolution", resolution) / 2
    step = np.linspace(0.0, 1.0, check.integer("pairs", pairs, 1))
    frequencies: Array = np.pi * (1.0 + step * (top - 1.0) if spacing == "linear" else top**step)
    return frequencies


def grid_positions(
    grid: Sequence[int],
    *,
    coordinates: Literal["index", "centered", "ends"] = "index",
    reference: Sequence[int] | None = None,
) -> Array:
    r"""Coordinates of the cells of a grid, the last axis running fastest.

    Parameters
    ----------
    grid : sequence of int
        Number of cells along each axis, such as (height, width).
    coordinates : {"index", "centered", "ends"}
        For cell i of n: "index" is i; "centered" is :math:`2 (i + \tfrac{1}{2}) / n - 1`, the centre of a cell if the
        grid spans -1 ... 1 (DINOv3); "ends" is :math:`2 i / (n - 1) - 1` (-1 if n = 1), with cells at both ends
        (timm's "pixel").
    reference : sequence of int, optional
        A grid seen in training, onto which this one is scaled: coordinates are multiplied by its size over n (EVA-02).

    Returns
    -------
    ndarray of float64, shape (A, cells)
        One row per axis, for `Rotary`'s ``positions``. A token that stands nowhere (class token, registers) is not
        turned if its coordinates are 0: ``np.pad(positions, [(0, 0), (1, 0)])``.

    Raises
    ------
    RelposValueError
        If a size is below 1, `reference` has other axes, or there are no such coordinates.

    References
    ----------
    Fang et al., "EVA-02: A Visual Representation for Neon Genesis", 2023; Siméoni et al., "DINOv3", 2025.
    """
    check.choice("coordinates", coordinates, ("index", "centered", "ends"))
    sizes = [check.integer("grid", n, 1) for n in grid]
    if not sizes:
        raise RelposValueError("grid: expected at least one axis")
    targets = sizes if reference is None else [check.integer("reference", n, 1) for n in reference]
    if len(targets) != len(sizes):
        raise RelposValueError(f"reference: expected {len(sizes)} sizes like the grid, found {len(targets)}")
    rows = []
    for size, target in zip(sizes, targets, strict=True):
        if coordinates == "index":
            row = np.arange(size, dtype=np.float64)
        elif coordinates == "centered":
            row = (2.0 * np.arange(size) + 1.0) / size - 1.0
        else:
            row = np.linspace(-1.0, 1.0, size)
        rows.append(row if target == size else row / size * target)
    return np.stack([axis.reshape(-1) for axis in np.meshgrid(*rows, indexing="ij")])
