"""Bars of what `asv_bench/compare.py` and `asv_bench/interop.py` recorded: ``python docs/charts.py`` draws README's.

HTML for the site, where bars fit any width and both colours of a page; SVG for README, where neither is possible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE / "readme"
RECORDED = HERE.parent / "asv_bench" / "recorded"
OURS = "relpos_np"
# Who is compared, as users know them. The tables below the bars have the rest, and say how each was called.
PEERS = {
    OURS: OURS,
    "torch eager": "PyTorch, as models write it",
    "torch sdpa, bias inside": "PyTorch SDPA",
    "torch sdpa": "PyTorch SDPA, bias ready",
    "torch flex": "PyTorch flex_attention",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "jax": "JAX, jit",
}
# README has room for four: long, windows, tables on keys and values, and short, where others are faster.
FEW = "BDGL"
COLOURS = {
    "light": {"words": "#1f2328", "faint": "#59636e", "ours": "#1a7f37", "other": "#8c959f"},
    "dark": {"words": "#e6edf3", "faint": "#9198a1", "ours": "#3fb950", "other": "#6e7681"},
}
# In pixels: what a bar takes, the column of names, that of bars, that of figures.
LINE, NAMES, BARS, FIGURES = 18, 176, 118, 112


@dataclass(frozen=True)
class Panel:
    """What one call takes in each package."""

    title: str
    sizes: str
    milliseconds: Mapping[str, float]
    times_ours: Mapping[str, float]  # taken in turns, and so steadier than the quotient of two medians

    def figure(self, name: str) -> str:
        """Time, and how often it holds ours."""
        taken, ratio = self.milliseconds[name], self.times_ours[name]
        text = f"{taken:,.{int(taken < 100)}f} ms" if taken >= 1 else f"{1000 * taken:.0f} µs"
        return text if name == OURS else f"{text}, {ratio:.{0 if ratio >= 10 else 1 if ratio >= 1.05 else 2}f}×"

    def share(self, name: str) -> float:
        """Length of a bar, of the longest."""
        return self.times_ours[name] / max(self.times_ours.values())


def sizes(one: Mapping[str, Any]) -> str:
    """A recorded shape in words."""
    batch, heads, queries, keys, _ = one["shape"]
    length = (
        f"{queries:,} tokens" if queries == keys else f"{queries:,} quer{'y' if queries == 1 else 'ies'}, {keys:,} keys"
    )
    if "shortest" in one:
        length = f"{one['shortest']:,} to {length}"
    return f"{batch:,} × {heads} heads, {length}" if batch > 1 else f"{heads} heads, {length}"


def compared(record: Mapping[str, Any], letters: Iterable[str], peers: Iterable[str] = tuple(PEERS)) -> list[Panel]:
    """Panels of compare.json; who cannot compute a shape is not in it."""
    found = []
    for letter in letters:
        one = record["attention"][letter]
        names = {name: PEERS[name] for name in peers if "median_ms" in one["peers"].get(name, {})}
        if one["words"].startswith("no positions"):  # no bias to build: one call of SDPA, not two
            names.pop("torch sdpa, bias inside", None)
            names["torch sdpa"] = PEERS["torch sdpa, bias inside"]
        title = one["words"].removesuffix(", in bfloat16")
        figures = [{words: one["peers"][n][key] for n, words in names.items()} for key in ("median_ms", "times_ours")]
        found.append(Panel(title[0].upper() + title[1:], sizes(one), *figures))
    return found


def of_storage(record: Mapping[str, Any], storage: str, *, ragged: bool = False) -> list[Panel]:
    """All panels of compare.json whose operands are stored so, of one length or `ragged`."""
    shapes = record["attention"].items()
    return compared(record, [n for n, one in shapes if one["storage"] == storage and ("shortest" in one) == ragged])


def whole_models(record: Mapping[str, Any]) -> list[Panel]:
    """Panels of interop.json."""
    words = {"transformers": "transformers, SDPA", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    panels = []
    for work, dtypes in record["works"].items():
        for dtype, found in dtypes.items():
            figures = (found["median_ms"], found["times_ours"])
            panels.append(Panel(work, dtype, *({words.get(way, way): x for way, x in one.items()} for one in figures)))
    return panels


def table(panel: Panel) -> str:
    """One panel in HTML."""
    rows = "".join(
        f'<tr{" class=ours" * (name == OURS)}><th scope="row">{escape(name)}</th>'
        f'<td><span style="width:{100 * panel.share(name):.1f}%"></span></td><td>{panel.figure(name)}</td></tr>'
        for name in panel.times_ours
    )
    return f"<table><caption>{escape(panel.title)} <small>{escape(panel.sizes)}</small></caption>{rows}</table>"


def html(panels: Iterable[Panel]) -> str:
    """Panels beside each other, as many as the page has room for."""
    return f'<div class="bars">{"".join(map(table, panels))}</div>'


def slower(panels: Iterable[Panel], where: str) -> list[str]:
    """Where somebody takes less than 1.1 times our time, in words."""
    lines = []
    for panel in panels:
        close = {name: ratio for name, ratio in panel.times_ours.items() if name != OURS and ratio < 1.1}
        if close:
            said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in close.items())
            lines.append(f"| {panel.title} | {panel.sizes} | {where} | {said} |")
    return lines


def drawn(panel: Panel, colour: Mapping[str, str], left: int, top: int) -> Iterator[str]:
    """One panel in SVG, from its upper left corner."""

    def text(x: float, y: int, words: str, more: str) -> str:
        return f'<text x="{left + x:g}" y="{top + y}" {more}>{words}</text>'

    sizes = f'<tspan fill="{colour["faint"]}" font-weight="400">  {escape(panel.sizes)}</tspan>'
    yield text(4, 14, escape(panel.title) + sizes, f'fill="{colour["words"]}" font-weight="600"')
    for line, name in enumerate(panel.times_ours):
        y, bar = LINE * (line + 1) + 4, round(max(1.0, BARS * panel.share(name)), 1)
        fill, weight = ("ours", ' font-weight="600"') if name == OURS else ("other", "")
        yield text(NAMES - 6, y + 13, escape(name), f'text-anchor="end" fill="{colour["words"]}"{weight}')
        box = f'x="{left + NAMES}" y="{top + y + 3}" width="{bar:g}" height="{LINE - 5}"'
        yield f'<rect {box} fill="{colour[fill]}"/>'
        yield text(NAMES + bar + 5, y + 13, panel.figure(name), f'fill="{colour["faint"]}"{weight}')


def svg(panels: list[Panel], shade: str, columns: int) -> str:
    """Panels as a picture for a page that takes only pictures."""
    width = NAMES + BARS + FIGURES
    parts, down = [], 0
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        parts += [line for n, panel in enumerate(row) for line in drawn(panel, COLOURS[shade], n * width, down)]
        down += LINE * (max(len(panel.times_ours) for panel in row) + 2)
    across = width * columns
    size = f'width="{across}" height="{down}" viewBox="0 0 {across} {down}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """README's pictures, by the file of each."""
    panels = compared(recorded("compare.json"), FEW, [name for name in PEERS if name != "torch sdpa, bias inside"])
    return {
        FOLDER / f"speed-{shade}{'' if columns == 2 else '-narrow'}.svg": svg(panels, shade, columns)
        for shade in COLOURS
        for columns in (2, 1)
    }


def recorded(name: str) -> dict[str, Any]:
    """What a program measured."""
    found: dict[str, Any] = json.loads((RECORDED / name).read_text(encoding="utf-8"))
    return found


def sections() -> dict[str, str]:
    """The pages' parts, by the name under which a page includes them."""
    parts: dict[str, str] = {"bars_few": html(compared(recorded("compare.json"), FEW))}
    lines = ["| call | sizes | where | times our time |", "| --- | --- | --- | --- |"]
    for suffix, name in (("", "compare.json"), ("_amx", "compare-amx.json"), ("_fma", "compare-fma.json")):
        record = recorded(name)
        for storage in ("float32", "bfloat16"):
            panels, ragged = of_storage(record, storage), of_storage(record, storage, ragged=True)
            parts[f"bars_{storage}{suffix}"], parts[f"bars_{storage}_ragged{suffix}"] = html(panels), html(ragged)
            where = f"{storage}, {record['processor']}{', with tiles' * (suffix == '_amx')}"
            lines += slower([*panels, *ragged], where)
    models = whole_models(recorded("interop.json"))
    lines += slower(models, recorded("interop.json")["processor"])
    return parts | {"bars_models": html(models), "not_faster": "\n".join(lines)}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
