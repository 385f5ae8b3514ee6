"""Draw the pictures of these pages: ``python docs/draw.py [FOLDER]``; Sphinx calls it before it reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import relpos_np as rp
from relpos_np import layers, plot, testing
from relpos_np.formulas.buckets import t5_bucket
from relpos_np.plot import diagrams
from relpos_np.plot import gallery as pictures
from relpos_np.plot.layers import layer_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
FOLDER = HERE / "_pictures"
HEADS = ("head 0", "head 3", "head 7", "head 11")
# A token and a layer, and a way from one to another.
Place = tuple[int, int]
Edge = tuple[Place, Place]
# Furo's dark background, and words and lines that can be read on it.
DARK = {
    "figure.facecolor": "#131416",
    "axes.facecolor": "#131416",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#cfd0d0"
    ),
}


def with_and_without() -> Figure:
    """The trained head that looks at the next word."""
    real = testing.real_example()
    length = int(real["mask"][1].sum())
    return plot.attention_with_and_without(
        real["q"][1, :, :length],
        real["k"][1, :, :length],
        position=rp.T5(real["table"], max_distance=128),
        scale=0.125,
        tokens=[str(token) for token in real["tokens"][1, :length]],
        head=3,
        heads=HEADS,
    )


def bias_by_distance() -> Figure:
    """Trained numbers of four heads."""
    return plot.bias_by_distance(
        rp.T5(testing.real_example()["table"], max_distance=128), 161, 161, labels=HEADS
    ).figure


def bias_maps() -> Figure:
    """The same as maps."""
    t5 = rp.T5(testing.real_example()["table"], max_distance=128)
    return plot.bias_maps(plot.position_bias(t5, 32, 32), heads=HEADS)


def sinusoidal() -> Figure:
    """128 positions, 64 channels."""
    return diagrams.encoding_map(rp.Sinusoidal(64), 128)


def rotary() -> Figure:
    """Llama 3.1's rule beside the paper's."""
    rules = {
        "base 10,000": rp.reference.rotary_frequencies(128),
        "base 500,000": rp.reference.rotary_frequencies(128, base=500_000.0),
        "base 500,000, llama3 rule": rp.reference.llama3_frequencies(
            128, factor=8.0, trained_length=8192, base=500_000.0
        ),
    }
    return diagrams.rotary_angles(rules, 256)


def shaw_rows() -> Figure:
    """Five tokens, k = 2."""
    return diagrams.numbered_map(np.clip(np.arange(5) - np.arange(5)[:, None], -2, 2) + 2).figure


def t5_buckets() -> Figure:
    """Sixteen tokens, the default sizes but for fewer buckets."""
    d = np.arange(16) - np.arange(16)[:, None]
    return diagrams.numbered_map(t5_bucket(d, num_buckets=16, max_distance=16)).figure


def window_rows() -> Figure:
    """A window of 4 by 4."""
    grid = [np.arange(4), np.arange(4)]
    return diagrams.numbered_map(rp.reference.window_index(grid, grid, (4, 4))).figure


def shift_mask() -> Figure:
    """A map of 4 by 4 in windows of 2 by 2 after a shift of 1."""
    mask = layers.shift_mask((4, 4), (2, 2), (1, 1), value=None)
    assert mask is not None
    places = layers.cyclic_shift(np.arange(16).reshape(1, 4, 4, 1), (1, 1))[0, ..., 0]
    figure = plot.new_figure(11.5, 3.0)
    left, *others = figure.subplots(1, 5, width_ratios=[1.3, 1, 1, 1, 1])
    diagrams.numbered_map(places, left, title="Tokens after the shift")
    left.set_xlabel("")
    left.set_ylabel("")
    left.set_xticks([])
    left.set_yticks([])
    for edge in (-0.5, 1.5, 3.5):
        left.axhline(edge, color="black", linewidth=2.5, clip_on=False)
        left.axvline(edge, color="black", linewidth=2.5, clip_on=False)
    for n, ax in enumerate(others):
        tokens = layers.window_partition(places[None, ..., None], (2, 2))[n, :, 0]
        ax.imshow(mask[n], cmap="Greys_r", vmin=-0.6, vmax=1)
        ax.set_xticks(range(4), [str(t) for t in tokens])
        ax.set_yticks(range(4), [str(t) for t in tokens])
        ax.set_title(f"Window {n}", fontsize="medium")
        ax.set_xlabel("key token")
        if n == 0:
            ax.set_ylabel("query token")
    return figure


def shortest_path(edges: Collection[Edge], start: Place, goal: Place) -> list[Edge]:
    """Edges from one place to another, as few as there are."""
    reached: dict[Place, list[Edge]] = {start: []}
    while goal not in reached:
        ends = [(b, [*path, (a, b)]) for a, path in reached.items() for c, b in edges if c == a]
        reached = dict(ends) | reached
    return reached[goal]


def layer_graphs(n: int = 5) -> Figure:
    """Convolutions, a recurrent layer and self-attention as graphs, with the path from the first token to the last."""
    tokens, ups = range(n), range(n - 1)
    near: list[Edge] = [((i, y), (j, y + 1)) for y in ups for i in tokens for j in tokens if abs(i - j) <= 1]
    onward: list[Edge] = [((i, 0), (i, 1)) for i in tokens] + [((i, 1), (i + 1, 1)) for i in ups]
    every: list[Edge] = [((i, 0), (j, 1)) for i in tokens for j in tokens]
    figure = plot.new_figure(11.5, 3.4)
    for ax, name, edges in zip(
        figure.subplots(1, 3),
        ("Convolutions of width 3", "Recurrent layer", "Self-attention"),
        (near, onward, every),
        strict=True,
    ):
        top = max(b[1] for _, b in edges)
        path = shortest_path(edges, (0, 0), (n - 1, top))
        for a, b in [*edges, *path]:
            on_path = (a, b) in path
            ax.plot(*zip(a, b, strict=True), color="tab:red" if on_path else "0.6", linewidth=2.5 if on_path else 0.7)
        places = sorted({place for edge in edges for place in edge})
        ax.scatter(*zip(*places, strict=True), color=["tab:blue" if y else "0.5" for _, y in places], s=70, zorder=3)
        ax.set_title(f"{name}: {len(path)} step{'s' * (len(path) > 1)}", fontsize="medium")
        ax.set_xticks(tokens, [str(i) for i in tokens])
        ax.set_xlabel("token")
        ax.set_yticks([])
        ax.set_ylim(-0.4, max(top, 2) + 0.4)
        ax.spines[:].set_visible(False)
    return figure


def counting() -> Figure:
    """Binary digits of 32 numbers, and sines of five frequencies for as many positions."""
    n = np.arange(32)
    waves = rp.reference.sinusoidal(n, 10, base=64.0, layout="concatenated")[:, 5:]
    figure = plot.new_figure(7.5, 4.3)
    for ax, rows, title, label in zip(
        figure.subplots(1, 2),
        (n[:, None] >> np.arange(5) & 1, waves),
        ("Binary digits", "Cosines"),
        ("digit, the last one first", "pair of channels"),
        strict=True,
    ):
        ax.imshow(rows, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        ax.set_title(title, fontsize="medium")
        ax.set_xlabel(label)
        ax.set_ylabel("position")
    return figure


def speed_by_length() -> Figure:
    """What asv_bench/measure.py recorded."""
    recorded = json.loads((HERE.parent / "asv_bench" / "recorded" / "cpu.json").read_text(encoding="utf-8"))
    return diagrams.speed_by_length(recorded["lengths"])


# By file name: how it is drawn, and what the gallery says of it.
PICTURES: Mapping[str, tuple[Callable[[], Figure], str]] = {
    "with_and_without": (
        with_and_without,
        (
            "Attention of one trained head with its positions and without (all-mpnet-base-v2, layer 5). "
            "`plot.attention_with_and_without`"
        ),
    ),
    "layer_graphs": (
        layer_graphs,
        "How many steps lie between the first token and the last: convolutions, a recurrent layer, self-attention.",
    ),
    "counting": (
        counting,
        "Counting in binary, and with waves: the first digit or pair changes fastest. Base 64 in place of 10,000.",
    ),
    "bias_by_distance": (bias_by_distance, "Trained T5 bias of four heads by distance. `plot.bias_by_distance`"),
    "bias_maps": (bias_maps, "The same bias over pairs of queries and keys. `plot.bias_maps`"),
    "sinusoidal": (sinusoidal, "Sinusoidal encoding, and the products of its rows. `diagrams.encoding_map`"),
    "rotary": (
        rotary,
        (
            "Rotary positions: angles of the pairs, and how many positions each takes for one turn under three rules. "
            "`diagrams.rotary_angles`"
        ),
    ),
    "rel_shift": (
        lambda: diagrams.rel_shift_steps(4, 4, "conformer"),
        "rel_shift in both directions. `diagrams.rel_shift_steps`",
    ),
    "rel_shift_transformer_xl": (
        lambda: diagrams.rel_shift_steps(4, 5, "transformer_xl"),
        (
            "Transformer-XL's shift with one position of memory: red entries belong to the next query, and a "
            "causal mask hides them."
        ),
    ),
    "rel_shift_xlnet": (lambda: diagrams.rel_shift_steps(4, 4, "xlnet"), "XLNet's shift: one column more."),
    "shaw_rows": (shaw_rows, "Row of Shaw's table for each pair of five tokens, k = 2. `diagrams.numbered_map`"),
    "t5_buckets": (t5_buckets, "Buckets of T5: sixteen tokens, 16 buckets up to distance 16."),
    "window_rows": (window_rows, "Row of Swin's table for each pair of a window of 4 by 4."),
    "window_differences": (
        lambda: pictures.differences_picture("window", variant="rstt"),
        "Bias of RSTT's windows by (Δframe, Δrow, Δcolumn), random numbers. `diagrams.window_differences`",
    ),
    "shift_mask": (
        shift_mask,
        "A map after the cyclic shift, and which tokens of its windows may see each other (light).",
    ),
    "shifted_windows": (
        lambda: layer_picture("swin_attention"),
        (
            "Where `layers.SwinAttention` looks when all tokens are alike: grey tokens are in another window, and the "
            "mask of the shift makes the dark corners and edges zero. `plot.layers.layer_diagram`"
        ),
    ),
    "speed_by_length": (
        speed_by_length,
        (
            "Time and memory by length, as recorded for [performance](performance.md): time grows with "
            "the square of the length, memory does not. `diagrams.speed_by_length`"
        ),
    ),
}


def names() -> list[str]:
    """All pictures, those of the schemes included.

    Returns
    -------
    list of str
        Without ".png".
    """
    return [*PICTURES, *(f"scheme_{name}" for name in rp.SCHEMES)]


def draw(name: str, *, dark: bool = False) -> Figure:
    """One picture, for pages that are light or dark."""
    from matplotlib import rc_context

    with rc_context(DARK if dark else None):
        figure = PICTURES[name][0]() if name in PICTURES else pictures.scheme_picture(name.removeprefix("scheme_"))
    for ax in figure.axes:
        if ax.images and ax.texts:  # black words in cells of pale colours
            ax.set_facecolor("white")
    return figure


def draw_all(folder: Path = FOLDER) -> None:
    """Draw what is not there yet, or is older than the code."""
    (folder / "dark").mkdir(parents=True, exist_ok=True)
    package = Path(rp.__file__).parent
    newest = max(path.stat().st_mtime for path in [Path(__file__), *package.rglob("*.py")])
    for name in names():
        for dark, path in ((False, folder / f"{name}.png"), (True, folder / "dark" / f"{name}.png")):
            if not path.exists() or path.stat().st_mtime < newest:
                plot.save(draw(name, dark=dark), path)


def gallery() -> str:
    """The gallery's Markdown."""
    parts = [f"![{name}](_pictures/{name}.png)\n\n{words}\n" for name, (_, words) in PICTURES.items()]
    parts.append("## Every scheme\n")
    for name, info in rp.SCHEMES.items():
        parts.append(f"### {info.cls.__name__}\n\n[Formula]({info.docs})\n\n![{name}](_pictures/scheme_{name}.png)\n")
    return "\n".join(parts)


if __name__ == "__main__":
    draw_all(*map(Path, sys.argv[1:2]))
