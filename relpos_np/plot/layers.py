"""What whole layers do with positions: where their attention goes when all tokens are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.layers import MultiHeadAttention, RelativeMultiHeadAttention, SwinAttention
from relpos_np.layers.swin import cyclic_shift, window_partition
from relpos_np.plot.bias import heat_map, new_figure
from relpos_np.plot.diagrams import numbered_map
from relpos_np.schemes.t5 import T5
from relpos_np.types import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_of_alike_tokens", "layer_diagram", "layer_picture"]

Layer = MultiHeadAttention | RelativeMultiHeadAttention | SwinAttention


def attention_of_alike_tokens(layer: Layer, size: Sequence[int]) -> Array:
    r"""The probabilities of a layer for an input whose tokens are all the same.

    Contents then say the same of every token, so that what differs from :math:`1 / N` comes from positions.

    Parameters
    ----------
    layer : MultiHeadAttention, RelativeMultiHeadAttention or SwinAttention
        Its inputs are ones.
    size : sequence of int
        (L,) tokens, or (height, width) of a map that `SwinAttention` needs not pad.

    Returns
    -------
    ndarray of float64, shape (H, N, N)
        From each of the N tokens to each, both in the order of the input; a map is counted row by row. NaN where two
        tokens of a map are never in one window.

    Raises
    ------
    RelposTypeError
        If it is another layer.
    RelposValueError
        If `size` has not its number of axes, or the map would be padded.
    """
    if not isinstance(layer, (MultiHeadAttention, RelativeMultiHeadAttention, SwinAttention)):
        raise RelposTypeError(
            "layer: expected a MultiHeadAttention, RelativeMultiHeadAttention or SwinAttention, found "
            f"{type(layer).__name__}"
        )
    axes = 2 if isinstance(layer, SwinAttention) else 1
    if np.ndim(size) != 1 or len(size) != axes:
        raise RelposValueError(f"size: expected {axes} length{'s' * (axes > 1)}, found {size!r}")
    grid = tuple(check.integer("size", length, 1) for length in size)
    if not isinstance(layer, SwinAttention):
        _, found = layer(np.ones((1, *grid, layer.query.inputs)), backend="numpy", return_probabilities=True)
        whole: Array = found[0]
        return whole
    window, shift, padded = layer.plan(grid)
    if padded != grid:
        raise RelposValueError(f"size: expected a multiple of the window {window}, found {grid}")
    _, found = layer(np.ones((1, *grid, layer.attention.dim)), backend="numpy", return_attention=True)
    tokens = window_partition(cyclic_shift(np.arange(np.prod(grid)).reshape(1, *grid, 1), shift), window)[..., 0]
    heads = np.arange(layer.attention.num_heads)[:, None, None]
    whole = np.full((len(heads), tokens.size, tokens.size), np.nan)
    for inside, at in zip(found, tokens, strict=True):
        whole[heads, at[:, None], at] = inside
    return whole


def layer_diagram(layer: Layer, size: Sequence[int], head: int = 0, *, title: str | None = None) -> Figure:
    """Draw where a layer's attention goes when all tokens are alike.

    Parameters
    ----------
    layer, size
        See `attention_of_alike_tokens`.
    head : int
        Which head.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        Of a sequence: all pairs, and the query in the middle. Of a map: in which window each token is, with a border
        around each, and where three tokens look, which are framed: grey is what is in another window, and zero within
        a window is what the mask of the shift keeps apart.

    Raises
    ------
    RelposTypeError
        If the layer is none of these.
    RelposValueError
        If there is no such head, or the size does not fit.
    RelposImportError
        If matplotlib is not installed.
    """
    shares = attention_of_alike_tokens(layer, size)
    if not 0 <= head < len(shares):
        raise RelposValueError(f"head: expected 0 ... {len(shares) - 1}, found {head}")
    if isinstance(layer, SwinAttention):
        return _map(layer, (int(size[0]), int(size[1])), shares[head], title)
    return _sequence(shares[head], title)


def _sequence(shares: Array, title: str | None) -> Figure:
    """All pairs, and the query in the middle beside what it would be without positions."""
    figure = new_figure(9.5, 3.9, title)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    heat_map(shares, left, title="All tokens alike", limits=(0, float(shares.max())), unit="probability")
    left.set_aspect("equal")
    middle = len(shares) // 2
    right.axhline(1 / len(shares), color="0.6", linewidth=1, linestyle="--", label="without positions")
    right.axvline(middle, color="0.75", linewidth=0.8, zorder=0)
    right.plot(shares[middle], drawstyle="steps-mid", label="with positions")
    right.set_title(f"Query {middle}", fontsize="medium")
    right.set(xlabel="key j", ylabel="probability", ylim=(0, None))
    right.locator_params(axis="x", integer=True)
    right.legend(frameon=False, fontsize="small")
    return figure


def _map(layer: SwinAttention, grid: tuple[int, int], shares: Array, title: str | None) -> Figure:
    """In which window each token is, and where a corner, an edge and the middle look."""
    window, shift, _ = layer.plan(grid)
    counts = [g // w for g, w in zip(grid, window, strict=True)]
    row, column = ((np.arange(g) - s) % g // w for g, s, w in zip(grid, shift, window, strict=True))
    height, width = grid
    figure = new_figure(12.0, 0.9 + 2.6 * min(height / width, 2.0), title)
    axes = figure.subplots(1, 4)
    numbered_map(row[:, None] * counts[1] + column, axes[0], title="Window of each token")
    limits = (0.0, float(np.nanmax(shares)))
    for n, (y, x) in enumerate(((0, 0), (0, width // 2), (height // 2, width // 2)), 1):
        last, named = n == 3, f"From token ({y}, {x})"
        seen = shares[y * width + x].reshape(grid)
        heat_map(seen, axes[n], title=named, limits=limits, colorbar=last, unit="probability")
        axes[n].set_facecolor("0.8")
        frame = {"marker": "s", "markerfacecolor": "none", "markeredgecolor": "tab:red", "markeredgewidth": 2}
        axes[n].plot([x], [y], markersize=9, linestyle="none", **frame)
    for n, ax in enumerate(axes):
        for axis, line in enumerate((ax.axhline, ax.axvline)):
            for place in range(shift[axis], grid[axis] + 1, window[axis]):
                line(place - 0.5, color="black" if n == 0 else "white", linewidth=1.5)
        ax.set(aspect="equal", xlabel="column", ylabel="row" if n == 0 else "")
    return figure


def _multi_head(rng: np.random.Generator) -> tuple[Layer, tuple[int, ...]]:
    weights = rng.standard_normal((4, 32, 32)) / np.sqrt(32)
    return MultiHeadAttention(*weights, heads=4, position=T5(rng.standard_normal((32, 4)))), (48,)


def _relative(rng: np.random.Generator) -> tuple[Layer, tuple[int, ...]]:
    weights = rng.standard_normal((5, 32, 32)) / np.sqrt(32)
    content, position = rng.standard_normal((2, 4, 8))
    biases = {"content_bias": content, "position_bias": position}
    return RelativeMultiHeadAttention(*weights[:4], pos=weights[4], variant="conformer", **biases), (48,)


def _swin(rng: np.random.Generator) -> tuple[Layer, tuple[int, ...]]:
    weights = {
        "q.weight": rng.standard_normal((32, 32)),
        "kv.weight": rng.standard_normal((64, 32)),
        "proj.weight": np.eye(32),
        "proj.bias": np.zeros(32),
        "relative_position_bias_table": rng.standard_normal((49, 4)),
    }
    return SwinAttention(32, (4, 4), 4, shift_size=(2, 2), qkv_bias=False, weights=weights, dtype=np.float64), (8, 8)


# By the name in a command: a seeded layer, and the size of an input.
LAYERS: Mapping[str, Callable[[np.random.Generator], tuple[Layer, tuple[int, ...]]]] = {
    "multi_head_attention": _multi_head,
    "relative_multi_head_attention": _relative,
    "swin_attention": _swin,
}


def layer_picture(name: str, *, seed: int = 0) -> Figure:
    """Draw a layer of `relpos_np.layers` with random weights, as `layer_diagram` does.

    Parameters
    ----------
    name : {"multi_head_attention", "relative_multi_head_attention", "swin_attention"}
        The first with the positions of `relpos_np.T5`, the second those of Conformers, the third with shifted windows.
    seed : int
        Of the weights.

    Returns
    -------
    matplotlib.figure.Figure
        Of head 0.

    Raises
    ------
    RelposValueError
        If there is no such layer.
    RelposImportError
        If matplotlib is not installed.
    """
    check.choice("name", name, tuple(LAYERS))
    layer, size = LAYERS[name](np.random.default_rng(seed))
    title = type(layer).__name__
    if isinstance(layer, SwinAttention):
        title += f", window {layer.window_size}, shift {layer.shift_size}"
    return layer_diagram(layer, size, title=f"{title}: head 0")
