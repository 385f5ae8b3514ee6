"""Write a page per scheme from its registration; Sphinx calls it before it reads the pages."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import checkpoints
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import relpos_np as rp
from relpos_np import testing
from relpos_np.types import Array
from tests import naive

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
FOLDER = HERE / "schemes"
# What every scheme has, and `Scheme` describes.
INHERITED = "change, check, gradient, held, lift, lower, narrow, outputs, scores, transform"

# How the last section of a docstring begins.
EXAMPLES = "\nExamples\n--------\n"
# Cases in which variants may differ: the last are those at the borders of buckets.
SOURCES = (
    'testing.example("{name}", variant=variant, size="tiny", dtype="float64")',
    'testing.example("{name}", variant=variant, size="small", dtype="float64")',
    'next(testing.cases("{name}", variant=variant, families="borders", dtype="float64"))',
)
# So many numbers make a row.
SHOWN = 6
SCORES = """\
import relpos_np as rp
from relpos_np import testing

for variant in {variants}:
    one = {call}
    placed = rp.logits(one.q, one.k, position=one.position, **one.kwargs)[0, 0, {row}, {first}:{stop}]
    plain = rp.logits(one.q, one.k, scale=one.kwargs.get("scale"))[0, 0, {row}, {first}:{stop}]
    print(f"{{variant:>{width}}}", (placed - plain).round(2))
"""
LAYOUTS = """\
from relpos_np import testing

for variant in {variants}:
    one = testing.example("{name}", variant=variant, size="tiny", dtype="float64")
    print(f"{{variant:>{width}}}", one.encoding.encode(2)[1, :8].round(2))
"""


def printed(code: str) -> str:
    """A block of Python as Markdown, and what it prints."""
    words = io.StringIO()
    with contextlib.redirect_stdout(words), rp.use_backend("numpy"):
        exec(code, {})  # noqa: S102
    return f"```python\n{code}```\n\n```text\n{words.getvalue()}```\n"


def placed(one: testing.Example) -> Array:
    """What positions and masks change in the scores of the first head."""
    with np.errstate(invalid="ignore"):
        with_positions = rp.logits(one.q, one.k, position=one.position, backend="numpy", **one.kwargs)
        return (with_positions - rp.logits(one.q, one.k, scale=one.kwargs.get("scale"), backend="numpy"))[0, 0]


def call(info: rp.SchemeInfo) -> str:
    """The example of the class, which its description then leaves out."""
    example = (inspect.getdoc(info.cls) or "").partition(EXAMPLES)[2].strip()
    return f"## A call\n\n```pycon\n{example}\n```\n" if example else ""


def without_example(_app: object, _what: str, _name: str, thing: object, _options: object, lines: list[str]) -> None:
    """Cut a scheme's docstring where its example begins."""
    if thing in [info.cls for info in rp.SCHEMES.values()] and "Examples" in lines:
        del lines[lines.index("Examples") :]


def place(rows: Sequence[Array]) -> tuple[int, int] | None:
    """A query, and a key from which on variants show other numbers, all of them if they can: they differ most there."""
    sizes = np.min([x.shape for x in rows], axis=0)
    if sizes[1] < SHOWN:
        return None
    shown = np.stack([x[: sizes[0], : sizes[1]] for x in rows]).round(2)
    windows = sliding_window_view(shown, SHOWN, axis=-1)
    with np.errstate(invalid="ignore"):
        pairs = [np.nan_to_num(abs(x - y), posinf=1.0).max(-1) for x, y in itertools.combinations(windows, 2)]
    least = np.min(pairs, axis=0)
    if not least.any():
        least = np.sum(pairs, axis=0)
    row, first = np.unravel_index(least.argmax(), least.shape)
    return (int(row), int(first)) if least.max() else None


def variants(info: rp.SchemeInfo) -> str:
    """All variants side by side, where they differ."""
    names = info.variants
    if len(names) < 2:
        return ""
    about = {"name": info.name, "variants": str(names).replace("'", '"'), "width": max(map(len, names))}
    if info.kind == "absolute":
        what, code = "The first channels of position 1", LAYOUTS.format(**about)
    else:
        what = "What positions change in the scores of one query, for some keys; -inf is a key that is not attended"
        for source in SOURCES:
            call = source.format(name=info.name)
            ones = [eval(call, {"testing": testing, "variant": name}) for name in names]
            where = place([placed(one) for one in ones])
            if where:
                break
        else:
            return ""
        code = SCORES.format(**about, call=call, row=where[0], first=where[1], stop=where[1] + SHOWN)
    return f"## Variants side by side\n\n{what}.\n\n{printed(code)}"


def models(info: rp.SchemeInfo) -> str:
    """The calls for published models."""
    rows = [row for rows in checkpoints.TABLES.values() for row in rows if row.scheme == info.name]
    if not rows:
        return ""
    lines = ["## Models", "", "[What the letters stand for](../checkpoints.md).", ""]
    lines += ["| model | call | options |", "| --- | --- | --- |"]
    for row in rows:
        cells = [row.models, f"`{row.call}`", f"`{row.options}`" if row.options else ""]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def loops(info: rp.SchemeInfo) -> str:
    """What the tests compare the formula with."""
    witness = naive.by_name.LOOPS[info.name]
    home = Path(inspect.getsourcefile(witness) or "").name
    lines = [
        "## The loops of its tests",
        "",
        f"From `tests/naive/{home}`: written from the paper, and importing nothing from the package. Functions of",
        "(b, h, i, j) are for one batch item, head, query and key.",
        "",
        "```{raw} html",
        "<details><summary>Show</summary>",
        "```",
        "",
        f"```python\n{inspect.getsource(witness)}```",
        "",
        "```{raw} html",
        "</details>",
        "```",
        "",
    ]
    return "\n".join(lines)


def paper(info: rp.SchemeInfo) -> str:
    """Where the scheme comes from, linked."""
    return f"[{info.paper}](https://doi.org/{info.doi})" if info.doi else info.paper


def page(info: rp.SchemeInfo) -> str:
    """Markdown of one page: what it is, a call, its formulas with their source, models, loops, and somebody's notes."""
    lines = [f"# {info.cls.__name__}", "", f"Positions contribute {info.adds} ({paper(info)})."]
    if info.models:
        lines += ["", f"Found in {', '.join(info.models)}."]
    lines += [
        "",
        f"![{info.name}](../_pictures/scheme_{info.name}.png)",
        "",
        call(info),
        variants(info),
        "## Formula",
        "",
    ]
    lines += ["```{eval-rst}", f".. autoclass:: relpos_np.{info.cls.__name__}", "   :members:"]
    lines += [f"   :exclude-members: {INHERITED}", ""]
    home = info.cls.__module__
    lines += [line for name in info.formulas for line in (f".. autofunction:: {home}.{name}", "")]
    lines += ["```", "", models(info), loops(info)]
    if (HERE / "notes" / f"{info.name}.md").is_file():
        lines += [f"```{{include}} ../notes/{info.name}.md", "```", ""]
    return "\n".join(lines)


def write_all() -> None:
    """Write the pages of all schemes, and leave those that are up to date as they are."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {FOLDER / f"{info.name}.md": page(info) for info in rp.SCHEMES.values()}
    for path in FOLDER.glob("*.md"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def rounded() -> str:
    """The schemes whose bounds of rounding errors are those of their formulas."""
    known = [info.cls for info in rp.SCHEMES.values() if getattr(info.cls, "roundings", None) is not None]
    return ", ".join(f"`{cls.__name__}`" for cls in known)


def table() -> str:
    """The register as a table in Markdown."""
    head = ("scheme", "what positions contribute", "variants", "found in", "paper")
    rows = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for info in rp.SCHEMES.values():
        variants = "; ".join(part for part in (", ".join(info.variants), info.options) if part)
        link = f"[{info.cls.__name__}]({info.docs})"
        cells = (link, info.adds, variants, ", ".join(info.models), paper(info))
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def setup(app: Sphinx) -> dict[str, bool]:
    """Before numpydoc reads the docstrings."""
    app.connect("autodoc-process-docstring", without_example, priority=1)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
