"""One picture per scheme of the register: what positions do to the scores of a seeded example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np._contract import check
from relpos_np.api import logits
from relpos_np.errors import RelposValueError
from relpos_np.plot.bias import heat_map, new_figure, span
from relpos_np.plot.diagrams import encoding_map, numbered_map, window_differences
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.window import WindowBias
from relpos_np.testing.example import Example, example
from relpos_np.types import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["differences_picture", "position_effect", "rows_picture", "scheme_picture"]


def position_effect(one: Example) -> Array:
    r"""What positions change in the scores, where the content is the same everywhere.

    All queries of a head are its first one, and all keys its first key, so that
    :math:`s_{ij} - \sigma\, q \cdot k` depends on i and j through their positions alone.

    Parameters
    ----------
    one : Example
        Of a scheme that is passed to `relpos_np.attention`.

    Returns
    -------
    ndarray, shape (H, L_q, L_k)
        Of the first batch item, in float64; NaN where the example excludes a key.
    """
    q, k = (np.repeat(x.astype(np.float64)[:, :, :1], x.shape[-2], axis=-2) for x in (one.q, one.k))
    placed = logits(q, k, position=one.position, backend="numpy", **_options(one))[0]
    plain = logits(q, k, backend="numpy", **_options(one))[0]
    seen = np.isfinite(plain) & np.isfinite(placed)
    effect: Array = np.subtract(placed, plain, where=seen, out=np.full(placed.shape, np.nan))
    return effect


def _options(one: Example) -> dict[str, Any]:
    """Those of its call that scores have."""
    return {name: x for name, x in one.kwargs.items() if name not in ("dropout", "rng")}


def _titled(one: Example) -> str:
    name = SCHEMES[one.name].cls.__name__
    return f"{name}, {one.variant}" if one.variant else name


def _by_distance(effect: Array, k_len: int, offset: int) -> tuple[Array, Array] | None:
    """Relative positions and, per head, the one value at each; None where one position has several."""
    heads, q_len, _ = effect.shape
    d = np.arange(k_len) - (np.arange(q_len)[:, None] + offset)
    distances = np.arange(d.min(), d.max() + 1)
    line = np.full((heads, len(distances)), np.nan)
    for n, distance in enumerate(distances):
        values = effect[:, d == distance]
        seen = ~np.isnan(values).all(axis=0)
        if not seen.any():
            continue
        low, high = np.nanmin(values[:, seen], axis=-1), np.nanmax(values[:, seen], axis=-1)
        if (high - low).max() > 1e-6 * max(float(np.nanmax(np.abs(effect))), 1e-3):
            return None
        line[:, n] = low
    return distances, line


def scheme_picture(name: str, *, variant: str | None = None, seed: int = 0) -> Figure:
    """Draw what a scheme contributes, for the numbers of its seeded example.

    Schemes of attention: the map of `position_effect` of two heads, grey for excluded keys, and beside it the same by
    relative position, or for the query in the middle, where it depends on more than that. Absolute encodings: the
    encoding and the products of its rows. Trained tables are random numbers here, so that the picture shows which
    pairs share one, not what models learn.

    Parameters
    ----------
    name : str
        Key in `relpos_np.SCHEMES`.
    variant : str, optional
        One of the scheme's variants; default the first.
    seed : int
        Of the numbers.

    Returns
    -------
    matplotlib.figure.Figure
        To be saved with `relpos_np.plot.save`.

    Raises
    ------
    RelposValueError
        If there is no such scheme or variant.
    RelposImportError
        If matplotlib is not installed.
    """
    one = example(name, dtype="float64", seed=seed, variant=variant)
    title = _titled(one)
    if one.x is not None:
        encoding = one.encoding
        assert isinstance(encoding, AbsoluteEncoding)
        return encoding_map(encoding, one.x.shape[-2], title=title)
    effect = position_effect(one)
    heads, q_len, k_len = effect.shape
    offset = one.kwargs.get("offset")
    found = _by_distance(effect, k_len, k_len - q_len if offset is None else int(offset))
    shown = min(heads, 2)
    figure = new_figure(3.0 * shown + 4.6, 3.1, title)
    figure.set_layout_engine("constrained", wspace=0.04)
    *maps, right = figure.subplots(1, shown + 1, width_ratios=[1.0] * shown + [1.3])
    limits = span(effect[:shown])
    for h, ax in enumerate(maps):
        last, unit = h == shown - 1, "change of the score (nats)"
        heat_map(effect[h], ax, title=f"head {h}", limits=limits, colorbar=last, unit=unit)
        ax.set(aspect="equal", facecolor="0.8")
    right.axhline(0, color="0.75", linewidth=0.8, zorder=0)
    if found is not None:
        right.axvline(0, color="0.75", linewidth=0.8, zorder=0)
        label, named = "relative position of the key, j − i − M", "By relative position"
    else:
        found = np.arange(k_len), effect[:, q_len // 2]
        label, named = "key j", f"Query {q_len // 2}: not by relative position alone"
    right.set_xlabel(label)
    right.set_title(named, fontsize="medium")
    for h, values in enumerate(found[1][:shown]):
        right.plot(found[0], values, drawstyle="steps-mid", linewidth=1.3, label=f"head {h}")
    if shown > 1:
        right.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    right.locator_params(axis="x", integer=True)
    return figure


def differences_picture(name: str, *, variant: str | None = None, seed: int = 0) -> Figure:
    """Draw the bias of a scheme's windows by the differences of coordinates.

    Parameters
    ----------
    name, variant, seed
        See `scheme_picture`.

    Returns
    -------
    matplotlib.figure.Figure
        Of `relpos_np.plot.diagrams.window_differences`, of head 0.

    Raises
    ------
    RelposValueError
        If there is no such scheme or variant, or if its bias is none of `WindowBias`.
    RelposImportError
        If matplotlib is not installed.
    """
    one = example(name, dtype="float64", seed=seed, variant=variant)
    if not isinstance(one.position, WindowBias):
        raise RelposValueError(f"{name}: has no table by differences of coordinates, only window has one")
    return window_differences(one.position, title=f"{_titled(one)}: head 0")


def rows_picture(name: str, *, variant: str | None = None, seed: int = 0) -> Figure:
    """Draw which row of its table a scheme takes for each pair of a few tokens.

    Parameters
    ----------
    name, variant, seed
        See `scheme_picture`.

    Returns
    -------
    matplotlib.figure.Figure
        A map of `relpos_np.plot.diagrams.numbered_map` for each of the scheme's index maps.

    Raises
    ------
    RelposValueError
        If there is no such scheme or variant, or if it takes no rows of a table.
    RelposImportError
        If matplotlib is not installed.
    """
    one = example(name, dtype="float64", seed=seed, variant=variant, size="tiny")
    maps = _index_maps(one)
    if not maps:
        raise RelposValueError(f"{name}: takes no rows of a table; relpos plot {name} draws what it adds")
    q_len, k_len = next(iter(maps.values())).shape
    figure = new_figure((0.9 + 0.42 * k_len) * len(maps), 1.5 + 0.42 * q_len, f"{_titled(one)}: row of the table")
    axes = np.atleast_1d(figure.subplots(1, len(maps)))
    for (words, rows), ax in zip(maps.items(), axes, strict=True):
        numbered_map(rows, ax, title=words)
    return figure


def _index_maps(one: Example) -> dict[str, Array]:
    """The maps of all terms of an example, of the first batch item, by what their rows meet; equal ones once."""
    if one.position is None:
        return {}
    problem, _, _ = check.problem(one.q, one.k, one.v, **_options(one))
    terms = one.position.lower(problem.q, problem.k, problem.site)
    parts: dict[str, Any] = {
        "to scores": terms.tables,
        "to queries": terms.queries,
        "to keys": terms.keys,
        "to values": terms.values,
    }
    words: dict[bytes, list[str]] = {}
    maps: dict[bytes, Array] = {}
    for what, group in parts.items():
        for term in group:
            rows = term.index.dense(problem.site.q_len, problem.site.k_len)
            rows = rows.reshape(-1, *rows.shape[-2:])[0]
            maps.setdefault(rows.tobytes(), rows)
            words.setdefault(rows.tobytes(), []).append(what)
    return {f"{n}: {', '.join(dict.fromkeys(words[key]))}": rows for n, (key, rows) in enumerate(maps.items(), 1)}
