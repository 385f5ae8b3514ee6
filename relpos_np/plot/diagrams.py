"""Diagrams that explain one formula: rows of a table, encodings, angles, rel_shift, and speed by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np.api import rel_shift
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.plot.bias import heat_map, new_figure, span
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.transformer_xl import row_distances
from relpos_np.schemes.window import WindowBias
from relpos_np.types import Array, Shift

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "encoding_map",
    "numbered_map",
    "rel_shift_steps",
    "rotary_angles",
    "speed_by_length",
    "window_differences",
]


def numbered_map(
    rows: Array, ax: Axes | None = None, *, title: str | None = None, labels: Sequence[str] | None = None
) -> Axes:
    """Draw which row of a table each pair takes, with the numbers in the cells.

    Parameters
    ----------
    rows : ndarray of int, shape (L_q, L_k)
        Rows of a table, or other small whole numbers; negative ones, which mean "none", stay blank.
    ax : matplotlib.axes.Axes, optional
        Where to draw; default a new figure.
    title : str, optional
        Above the map.
    labels : sequence of str, optional
        Names of queries and keys, where they are the same; default their numbers.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn; its figure is ``ax.figure``.

    Raises
    ------
    RelposValueError
        If there are not two axes, or not one label for each query and key.
    RelposImportError
        If matplotlib is not installed.
    """
    if np.ndim(rows) != 2 or np.asarray(rows).dtype.kind not in "iu":
        raise RelposValueError(f"rows: expected integers (L_q, L_k), found {np.shape(rows)}")
    q_len, k_len = rows.shape
    if labels is not None and not len(labels) == q_len == k_len:
        raise RelposValueError(f"labels: {len(labels)} do not fit the map of shape {rows.shape}")
    if ax is None:
        ax = new_figure(0.9 + 0.42 * k_len, 0.9 + 0.42 * q_len).add_subplot()
    ax.imshow(np.where(rows < 0, np.nan, rows), cmap="viridis", alpha=0.75, interpolation="nearest")
    for (i, j), row in np.ndenumerate(rows):
        ax.text(j, i, str(row) if row >= 0 else "", ha="center", va="center", fontsize=8, color="black")
    ax.set_xticks(range(k_len), labels)
    ax.set_yticks(range(q_len), labels)
    ax.set(xlabel="key j", ylabel="query i")
    if title is not None:
        ax.set_title(title, fontsize="medium")
    return ax


def window_differences(scheme: WindowBias, head: int = 0, *, title: str | None = None) -> Figure:
    r"""Draw the bias of a window by (Δframe, Δrow, Δcolumn), the query's coordinates less the key's.

    Parameters
    ----------
    scheme : WindowBias
        Of one, two or three axes. Entry :math:`T[r, h]` of its table stands where the differences are that row r is
        for; entries that no pair of this window takes stay blank.
    head : int
        Which h.
    title : str, optional
        Above everything.

    Returns
    -------
    matplotlib.figure.Figure
        A map for each Δframe that a pair has, with Δrow down and Δcolumn across; one map where there are no frames.

    Raises
    ------
    RelposTypeError
        If `scheme` is no `WindowBias`.
    RelposValueError
        If it has more than three axes, or no such head.
    RelposImportError
        If matplotlib is not installed.

    References
    ----------
    Liu et al., "Swin Transformer", ICCV 2021; Liu et al., "Video Swin Transformer", CVPR 2022; Geng et al., "RSTT",
    CVPR 2022.
    """
    if not isinstance(scheme, WindowBias):
        raise RelposTypeError(f"scheme: expected a WindowBias, found {type(scheme).__name__}")
    if len(scheme.grid) > 3:
        raise RelposValueError(f"scheme: expected one to three axes, found {len(scheme.grid)}")
    heads = scheme.table.shape[1]
    if not 0 <= head < heads:
        raise RelposValueError(f"head: expected 0 ... {heads - 1}, found {head}")
    coords = scheme.key_coords or (None,) * len(scheme.grid)
    taken = []
    for n, m, given, extent in zip(scheme.grid, scheme.key_grid, coords, scheme.extent, strict=True):
        there = np.zeros(2 * extent - 1, bool)
        there[np.subtract.outer(np.arange(n), np.arange(m) if given is None else given) + extent - 1] = True
        taken.append(there)
    table = scheme.table[:, head].reshape([len(there) for there in taken])
    values: Array = np.full(table.shape, np.nan)
    values[np.ix_(*taken)] = table[np.ix_(*taken)]
    frames, rows, columns = (1,) * (3 - values.ndim) + values.shape
    values = values.reshape(frames, rows, columns)
    shown = np.flatnonzero(~np.isnan(values).all(axis=(1, 2)))
    across = min(len(shown), 7)
    down = -(-len(shown) // across)
    figure = new_figure(max(4.2, 1.6 + 1.9 * across), 1.3 + 1.7 * down + 0.6 * (across == 1), title)
    axes = figure.subplots(down, across, squeeze=False)

    # Differences from -(n - 1) to n - 1, beside the maps of the first column and below those of the last row.
    def signed(difference: int) -> str:
        return f"{difference:+d}" if difference else "0"

    limits, reach = span(values), (frames // 2, rows // 2, columns // 2)
    for n, frame in enumerate(shown):
        ax = axes[n // across, n % across]
        named = f"Δframe {signed(frame - reach[0])}" if scheme.extent[0] > 1 and len(scheme.grid) == 3 else None
        last = n == len(shown) - 1
        heat_map(values[frame], ax, title=named, limits=limits, colorbar=last, unit="bias (nats)")
        ax.set(aspect="equal", facecolor="0.8")
        for set_ticks, far in ((ax.set_xticks, reach[2]), (ax.set_yticks, reach[1])):
            places = sorted({0, far, 2 * far})
            set_ticks(places, [signed(place - far) for place in places])
        ax.set_xlabel("Δcolumn" if n + across >= len(shown) else "")
        ax.set_ylabel("Δrow" if n % across == 0 and len(scheme.grid) > 1 else "")
    for ax in axes.ravel()[len(shown) :]:
        ax.set_visible(False)
    return figure


def encoding_map(encoding: AbsoluteEncoding, length: int, *, title: str | None = None) -> Figure:
    """Draw an absolute encoding: its rows, and the products of every two of them.

    Parameters
    ----------
    encoding : Sinusoidal or LearnedAbsolute
        What is added to the inputs.
    length : int
        Positions 0 ... length - 1 are drawn.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `save`.

    Raises
    ------
    RelposError
        If the encoding has no such positions.
    RelposImportError
        If matplotlib is not installed.
    """
    pe = np.asarray(encoding.encode(length), dtype=np.float64)
    figure = new_figure(10.5, 4.3, title)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    heat_map(pe, left, title="Encoding", unit="added to the input")
    left.set(xlabel="channel", ylabel="position")
    heat_map(pe @ pe.T, right, title="Product of the encodings of two positions", unit="PE(s) · PE(t)")
    right.set(xlabel="position t", ylabel="position s")
    return figure


def rotary_angles(rules: Mapping[str, Array], length: int, *, title: str | None = None) -> Figure:
    """Draw how far the pairs of channels of rotary positions turn, for one or several rules of frequencies.

    Parameters
    ----------
    rules : mapping of str to ndarray, shape (P,)
        Angle per step of position for each pair, such as from `relpos_np.reference.rotary_frequencies`, by the name
        of the rule. The first one is drawn over the positions, all of them are compared.
    length : int
        Positions 0 ... length - 1 are drawn.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `save`.

    Raises
    ------
    RelposValueError
        If there is no rule, or frequencies have more than one axis.
    RelposImportError
        If matplotlib is not installed.
    """
    if not rules or any(np.ndim(omega) != 1 for omega in rules.values()):
        raise RelposValueError("rules: expected at least one array of frequencies of shape (P,)")
    figure = new_figure(10.5, 4.3, title)
    left, right = figure.subplots(1, 2)
    name, first = next(iter(rules.items()))
    cosines = np.cos(np.arange(length)[:, None] * first)
    heat_map(cosines, left, title=f"Cosine of the angle: {name}", unit="cos", limits=(-1, 1))
    left.set(xlabel="pair of channels", ylabel="position")
    for style, (label, omega) in enumerate(rules.items()):
        # Earlier lines are wider, so that they are still seen where later ones run along them.
        right.plot(2 * np.pi / np.asarray(omega), label=label, linewidth=1.4 + 1.8 * (len(rules) - 1 - style))
    right.set(yscale="log", xlabel="pair of channels", ylabel="positions for one whole turn")
    right.axhline(length, color="0.6", linewidth=0.8, linestyle="--")
    right.text(0, length, f" {length} positions", va="bottom", fontsize="small", color="0.4")
    right.set_title("Wavelengths", fontsize="medium")
    right.legend(frameon=False, fontsize="small")
    return figure


def rel_shift_steps(q_len: int, k_len: int, variant: Shift = "conformer", *, title: str | None = None) -> Figure:
    """Draw the products of queries and distances before `relpos_np.rel_shift`, and what stands where after it.

    Cells are coloured by distance. Before the shift, those that it drops are pale. After it, those that do not
    belong to their query or not to their distance are white with red words; the zero is one that the shift makes up.

    Parameters
    ----------
    q_len, k_len : int
        Number of queries and of keys; small ones can be read.
    variant : {"conformer", "xlnet", "transformer_xl", "espnet_legacy", "wenet"}
        See `relpos_np.rel_shift`.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `save`.

    Raises
    ------
    RelposValueError
        If the variant has no such lengths.
    RelposImportError
        If matplotlib is not installed.
    """
    distances = row_distances(q_len, k_len, variant)
    columns = len(distances)
    # The number of an element, from 1 on, says where the shift took it from; 0 is made up.
    source = rel_shift(np.arange(1, q_len * columns + 1).reshape(q_len, columns), variant=variant, backend="numpy")
    i, column = np.divmod(source - 1, columns)
    here, there = np.arange(q_len)[:, None], np.arange(k_len)
    right = (source > 0) & (i == here) & (distances[column] == here + (k_len - q_len) - there)
    kept = np.isin(np.arange(1, q_len * columns + 1).reshape(q_len, columns), source)

    figure = new_figure(1.5 + 0.62 * (columns + k_len), 1.2 + 0.55 * q_len, title)
    before, after = figure.subplots(1, 2, width_ratios=[columns, k_len])
    span = float(np.abs(distances).max(initial=1))
    style: dict[str, Any] = {"cmap": "coolwarm", "vmin": -1.3 * span, "vmax": 1.3 * span, "interpolation": "nearest"}
    number = [str(d).replace("-", "−") for d in distances]
    before.imshow(np.broadcast_to(distances, kept.shape), alpha=np.where(kept, 0.85, 0.15), **style)
    after.imshow(np.where(right, distances[column], np.nan), **style, alpha=0.85)
    for n in range(q_len):
        for m in range(columns):
            before.text(
                m, n, f"$q_{n}R_{{{number[m]}}}$", ha="center", va="center", color="black" if kept[n, m] else "0.6"
            )
        for m in range(k_len):
            word = f"$q_{i[n, m]}R_{{{number[column[n, m]]}}}$" if source[n, m] else "0"
            after.text(m, n, word, ha="center", va="center", color="black" if right[n, m] else "tab:red")
    for ax, name, label, ticks in (
        (before, "Products", "position of the key" if variant == "wenet" else "distance i + M − j", number),
        (after, f"After rel_shift, {variant!r}", "key j", [str(m) for m in range(k_len)]),
    ):
        ax.set_title(name, fontsize="medium")
        ax.set_xticks(range(len(ticks)), ticks)
        ax.set(xlabel=label, ylabel="query i", yticks=range(q_len))
    return figure


def speed_by_length(lengths: Mapping[str, Mapping[str, float]], *, title: str | None = None) -> Figure:
    """Draw time and memory of a call against the length, as `asv_bench/measure.py` records them.

    Parameters
    ----------
    lengths : mapping of str to mapping
        By length: "best_ms" and "extra_memory_mib", the entry "lengths" of ``asv_bench/recorded/cpu.json``.
    title : str, optional
        Above the picture.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `save`.

    Raises
    ------
    RelposValueError
        If there are no two lengths.
    RelposImportError
        If matplotlib is not installed.
    """
    n = np.array(sorted(int(length) for length in lengths), dtype=np.float64)
    if len(n) < 2:
        raise RelposValueError(f"lengths: expected at least two, found {len(n)}")
    figure = new_figure(9.5, 3.9, title)
    for ax, key, label, growth, rule in zip(
        figure.subplots(1, 2),
        ("best_ms", "extra_memory_mib"),
        ("time of a call (ms)", "memory beside inputs and outputs (MiB)"),
        (n**2, n**2 * 4 / 2**20),
        ("∝ length²", "one L × L array of float32"),
        strict=True,
    ):
        found = np.array([lengths[str(int(length))][key] for length in n])
        guide = growth * (found[-1] / growth[-1] if key == "best_ms" else 1.0)
        ax.plot(n, guide, color="0.6", linestyle="--", linewidth=1, label=rule)
        ax.plot(n, found, marker="o", label="measured")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xlabel="length L", ylabel=label)
        ax.set_xticks(n, [f"{int(length):,}" for length in n], fontsize="small")
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize="small")
    return figure
