"""Draw the pictures of these pages: ``python docs/draw.py [FOLDER]``; Sphinx calls it before it reads them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import relpos_np as rp
from relpos_np import layers, plot, testing
from relpos_np.formulas.buckets import t5_bucket
from relpos_np.plot import diagrams
from relpos_np.plot import gallery as pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
FOLDER = HERE / "_pictures"
HEADS = ("head 0", "head 3", "head 7", "head 11")


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
    "shift_mask": (
        shift_mask,
        "A map after the cyclic shift, and which tokens of its windows may see each other (light).",
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


def draw(name: str) -> Figure:
    """One picture."""
    if name in PICTURES:
        return PICTURES[name][0]()
    return pictures.scheme_picture(name.removeprefix("scheme_"))


def draw_all(folder: Path = FOLDER) -> None:
    """Draw what is not there yet, or is older than the code."""
    folder.mkdir(exist_ok=True)
    package = Path(rp.__file__).parent
    newest = max(path.stat().st_mtime for path in [Path(__file__), *package.rglob("*.py")])
    for name in names():
        path = folder / f"{name}.png"
        if not path.exists() or path.stat().st_mtime < newest:
            plot.save(draw(name), path)


def gallery() -> str:
    """The gallery's Markdown."""
    parts = [f"![{name}](_pictures/{name}.png)\n\n{words}\n" for name, (_, words) in PICTURES.items()]
    parts.append("## Every scheme\n")
    for name, info in rp.SCHEMES.items():
        parts.append(f"### {info.cls.__name__}\n\n[Formula]({info.docs})\n\n![{name}](_pictures/scheme_{name}.png)\n")
    return "\n".join(parts)


if __name__ == "__main__":
    draw_all(*map(Path, sys.argv[1:2]))
