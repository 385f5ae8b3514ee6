"""Pictures of what positions contribute to attention; matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np.api import logits
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import softmax
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = [
    "attention_weights",
    "attention_with_and_without",
    "bias_by_distance",
    "bias_maps",
    "heat_map",
    "new_figure",
    "position_bias",
    "save",
    "span",
]


def new_figure(width: float, height: float, title: str | None = None) -> Figure:
    """A figure of its own, outside pyplot's list of open ones, that draws without a display.

    Parameters
    ----------
    width, height : float
        In inches.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        Without axes.

    Raises
    ------
    RelposImportError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RelposImportError(
            f'pictures need matplotlib ({error}); install it with `pip install "relpos-np[plot]"`'
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title is not None:
        figure.suptitle(title)
    return figure


def span(values: Array) -> tuple[float, float]:
    """Values at the ends of the colours: from 0 to the furthest, or as far to both sides.

    Parameters
    ----------
    values : ndarray
        What is drawn; values that are not finite do not count.

    Returns
    -------
    tuple of float
        The least and the largest.
    """
    finite = values[np.isfinite(values)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    if low < 0 < high:
        return -max(-low, high), max(-low, high)
    return (low, high) if low < high else (-1.0, 1.0)


def _draw(ax: Axes, matrix: Array, limits: tuple[float, float], **options: Any) -> AxesImage:
    """Draw one value per query and key, with white in the middle of the colours where values have both signs."""
    low, high = limits
    ax.set(xlabel="key j", ylabel="query i")
    shown = np.where(np.isfinite(matrix), matrix, np.nan)
    return ax.imshow(shown, cmap="RdBu_r" if low < 0 < high else "viridis", vmin=low, vmax=high, **options)


def position_bias(scheme: Scheme, q_len: int, k_len: int) -> Array:
    r"""What a scheme adds to the scores whatever the queries and keys hold.

    It is what is left of the scores for :math:`q = k = 0`.

    Parameters
    ----------
    scheme : T5, WindowBias or TransformerXL
        A scheme with a bias of its own.
    q_len, k_len : int
        Number of queries L_q and of keys L_k.

    Returns
    -------
    ndarray, shape (H, L_q, L_k)
        The bias of every pair.

    Raises
    ------
    RelposTypeError
        If all that the scheme adds depends on the queries, as in `relpos_np.Shaw`.
    """
    table, u = getattr(scheme, "table", None), getattr(scheme, "content_bias", None)
    if table is not None:
        heads, dim = table.shape[1], 1
    elif u is not None:
        heads, dim = u.shape
    else:
        raise RelposTypeError(f"scheme: {scheme!r} has no bias of its own; what it adds depends on the queries")
    zeros = np.zeros((heads, max(q_len, k_len), dim))
    return logits(zeros[:, :q_len], zeros[:, :k_len], position=scheme, backend="numpy")


def bias_by_distance(
    scheme: Scheme, q_len: int, k_len: int, ax: Axes | None = None, *, labels: Sequence[str] | None = None
) -> Axes:
    """Draw a scheme's bias against relative position, one line per head.

    Parameters
    ----------
    scheme : scheme
        One whose bias depends on nothing but the relative position, such as `relpos_np.T5`.
    q_len, k_len : int
        Number of queries and keys: relative positions run from -(k_len - 1) to q_len - 1.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default a new figure.
    labels : sequence of str, optional
        Names of the heads; default "head 0", "head 1" ...

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn; its figure is ``ax.figure``.

    Raises
    ------
    RelposValueError
        If the bias differs between pairs at the same relative position.
    RelposTypeError
        If the scheme has no bias of its own.
    RelposImportError
        If matplotlib is not installed.
    """
    bias = position_bias(scheme, q_len, k_len)
    # Queries are the last positions: first key against the queries from the last, then all keys against the first.
    line = np.concatenate([bias[:, :0:-1, 0], bias[:, 0, :]], axis=-1)
    d = np.arange(1 - k_len, q_len)
    i, j = np.indices(bias.shape[-2:])
    if not np.allclose(bias, line[:, j - i + q_len - 1], rtol=1e-9, atol=1e-12):
        raise RelposValueError(f"scheme: the bias of {scheme!r} depends on more than the relative position")
    if ax is None:
        ax = new_figure(7, 4).add_subplot()
    names = labels if labels is not None else [f"head {h}" for h in range(len(line))]
    if len(names) != len(line):
        raise RelposValueError(f"labels: expected {len(line)}, one per head; found {len(names)}")
    ax.axhline(0, color="0.75", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.75", linewidth=0.8, zorder=0)
    for values, name in zip(line, names, strict=True):
        ax.step(d, values, where="mid", linewidth=1.3, label=name)
    # Near positions matter most and have most rows: linear up to 4 tokens, logarithmic beyond.
    ax.set_xscale("symlog", linthresh=4, linscale=1.5, base=2)
    ticks = [t for t in (-512, -128, -32, -8, -2, 0, 2, 8, 32, 128, 512) if d[0] <= t <= d[-1]]
    ax.set_xticks(ticks, [str(t).replace("-", "−") for t in ticks])
    ax.minorticks_off()
    ax.set(
        xlim=(d[0], d[-1]), xlabel="relative position of the key, j − i (tokens)", ylabel="added to the score (nats)"
    )
    ax.legend(frameon=False, fontsize="small", ncols=1 + (len(line) - 1) // 8)
    return ax


def heat_map(
    matrix: Array,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    unit: str = "probability",
    limits: tuple[float, float] | None = None,
    colorbar: bool = True,
) -> Axes:
    """Draw one value per query (down) and key (across).

    Parameters
    ----------
    matrix : ndarray, shape (L_q, L_k)
        Probabilities, scores or a bias; values that are not finite stay blank.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default a new figure.
    title : str, optional
        Above the map.
    labels : sequence of str, optional
        The tokens, where queries and keys are the same; default their numbers.
    unit : str
        Beside the colour bar.
    limits : tuple of float, optional
        Values at the ends of the colours; default 0 or the least value, and the largest. A bias of
        both signs is centred.
    colorbar : bool
        Whether to draw the colour bar.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn; its figure is ``ax.figure``.

    Raises
    ------
    RelposValueError
        If the matrix does not have two axes, or not one label for each of both.
    RelposImportError
        If matplotlib is not installed.
    """
    if np.ndim(matrix) != 2:
        raise RelposValueError(f"matrix: expected shape (L_q, L_k), found {np.shape(matrix)}")
    if labels is not None and {len(labels)} != set(matrix.shape):
        raise RelposValueError(f"labels: {len(labels)} do not fit the matrix of shape {matrix.shape}")
    if ax is None:
        ax = new_figure(5.5, 4.8).add_subplot()
    if limits is None:
        limits = span(matrix)
    ax.locator_params(axis="x", integer=True)
    image = _draw(ax, matrix, limits, aspect="auto")
    if labels is not None:
        # Dollar signs would start a formula.
        names = [label.replace("$", r"\$") for label in labels]
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=6.5)
        ax.set_yticks(range(len(names)), names, fontsize=6.5)
        ax.tick_params(length=2, pad=2)
        ax.set_aspect("equal")
    if title is not None:
        ax.set_title(title, fontsize="medium")
    if colorbar:
        ax.figure.colorbar(image, ax=ax, label=unit, fraction=0.046, pad=0.03)
    return ax


def bias_maps(
    bias: Array,
    *,
    heads: Sequence[str] | None = None,
    title: str | None = None,
    unit: str = "added to the score (nats)",
) -> Figure:
    """Draw a bias over all pairs, one map per head, in the same colours.

    Parameters
    ----------
    bias : ndarray, shape (H, L_q, L_k)
        As from `position_bias`.
    heads : sequence of str, optional
        Names of the heads; default "head 0", "head 1" ...
    title : str, optional
        Above the picture.
    unit : str
        Beside the colour bar.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `save`.

    Raises
    ------
    RelposValueError
        If the bias does not have three axes, or not one name for each head.
    RelposImportError
        If matplotlib is not installed.
    """
    if np.ndim(bias) != 3 or not len(bias):
        raise RelposValueError(f"bias: expected shape (H, L_q, L_k), found {np.shape(bias)}")
    names = heads if heads is not None else [f"head {h}" for h in range(len(bias))]
    if len(names) != len(bias):
        raise RelposValueError(f"heads: expected {len(bias)} names, found {len(names)}")
    limits = span(bias)
    across = min(len(bias), 4)
    down = -(-len(bias) // across)
    figure = new_figure(0.8 + 3.1 * across, 0.4 + 3.0 * down, title)
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for n, ax in enumerate(axes.flat):
        if n >= len(bias):
            ax.set_axis_off()
            continue
        image = _draw(ax, bias[n], limits, interpolation="nearest")
        ax.set_title(names[n], fontsize="medium")
        ax.label_outer()
    figure.colorbar(image, ax=axes, label=unit, fraction=0.03, pad=0.02)
    return figure


def attention_weights(q: Array, k: Array, **options: Any) -> Array:
    """Probabilities p of attention as a dense array, to look at.

    Parameters
    ----------
    q, k : ndarray, shapes (..., H, L_q, D) and (..., H_kv, L_k, D)
        Queries and keys.
    **options
        ``position``, ``mask`` and others of `relpos_np.logits`.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        Rows sum to 1, or are 0 for a query without keys.
    """
    return softmax(logits(q, k, backend="numpy", **options))[0]


def attention_with_and_without(
    q: Array,
    k: Array,
    *,
    position: Scheme,
    scale: float | None = None,
    mask: Array | None = None,
    tokens: Sequence[str] | None = None,
    head: int = 0,
    heads: Sequence[str] | None = None,
    reach: int = 160,
    title: str | None = None,
) -> Figure:
    """Draw a learned bias against distance, and one head's attention with it and without it.

    Parameters
    ----------
    q, k : ndarray, shape (H, L, D)
        Queries and keys of one text.
    position : scheme
        See `bias_by_distance`.
    scale, mask
        See `relpos_np.attention`.
    tokens : sequence of str, optional
        The L word pieces.
    head : int
        Whose attention is drawn.
    heads : sequence of str, optional
        Names of the heads.
    reach : int
        Relative positions up to this are drawn.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with ``figure.savefig(path)``.

    Raises
    ------
    RelposError
        As `bias_by_distance`, `heat_map` and `relpos_np.attention`.
    """
    figure = new_figure(11.5, 4.1, title)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.25, 1, 1], gridspec_kw={"wspace": 0.05})
    names = heads if heads is not None else [f"head {h}" for h in range(q.shape[-3])]
    bias_by_distance(position, reach + 1, reach + 1, left, labels=names)
    left.set_title("Learned bias by distance", fontsize="medium")
    options: dict[str, Any] = {"scale": scale, "mask": mask}
    plain = attention_weights(q, k, **options)[head]
    placed = attention_weights(q, k, position=position, **options)[head]
    limits = 0.0, float(max(plain.max(), placed.max()))
    where = names[head]
    heat_map(
        plain, middle, title=f"Attention of {where} without positions", labels=tokens, limits=limits, colorbar=False
    )
    heat_map(placed, right, title=f"Attention of {where} with positions", labels=tokens, limits=limits)
    return figure


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a figure as the format that the path's ending names.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to write.
    path : str or path
        Where to.

    Raises
    ------
    RelposValueError
        If matplotlib knows no such format, or the file cannot be written.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RelposValueError(f"the picture cannot be written to {path}: {error}") from error
