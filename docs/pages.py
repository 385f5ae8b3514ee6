"""Write a page per scheme from its registration; Sphinx calls it before it reads the pages."""

from __future__ import annotations

import contextlib
import inspect
import io
from pathlib import Path

import checkpoints

import relpos_np as rp
from tests import naive

HERE = Path(__file__).parent
FOLDER = HERE / "schemes"
# What every scheme has, and `Scheme` describes.
INHERITED = "change, check, gradient, held, lift, lower, narrow, outputs, scores, transform"

CALL = """\
import relpos_np as rp
from relpos_np import testing

one = testing.example("{name}", size="tiny")
out = rp.attention(one.q, one.k, one.v, position=one.position, **one.kwargs)
print(one.position)
print("options:", ", ".join(one.kwargs) or "none")
print(one.q.shape, one.k.shape, one.v.shape, "->", out.shape)
"""
VARIANTS = """\
for variant in {variants}:
    one = testing.example("{name}", variant=variant, size="tiny", dtype="float64")
    placed = rp.logits(one.q, one.k, position=one.position, **one.kwargs)[0, 0, 5, :6]
    plain = rp.logits(one.q, one.k, **one.kwargs)[0, 0, 5, :6]
    print(f"{{variant:>{width}}}", (placed - plain).round(2))
"""
ENCODING = """\
from relpos_np import testing

one = testing.example("{name}", size="tiny")
print(one.encoding)
print(one.x.shape, "->", one.encoding(one.x).shape)
"""
LAYOUTS = """\
for variant in {variants}:
    one = testing.example("{name}", variant=variant, size="tiny", dtype="float64")
    print(f"{{variant:>{width}}}", one.encoding.encode(2)[1, :8].round(2))
"""


class Blocks:
    """Blocks of Python that run one after the other, and what they print."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {}

    def __call__(self, code: str) -> str:
        """One block as Markdown."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), rp.use_backend("numpy"):
            exec(code, self.names)  # noqa: S102
        return f"```python\n{code}```\n\n```text\n{printed.getvalue()}```\n"


def calls(info: rp.SchemeInfo) -> str:
    """A call on the seeded example, and all variants side by side."""
    absolute, blocks = info.kind == "absolute", Blocks()
    text = f"## A call\n\nOn seeded numbers:\n\n{blocks((ENCODING if absolute else CALL).format(name=info.name))}"
    if len(info.variants) > 1:
        what = (
            "The first channels of position 1"
            if absolute
            else "What positions change in the scores of one query, for the first keys; -inf is a key that they exclude"
        )
        code = (LAYOUTS if absolute else VARIANTS).format(
            name=info.name, variants=str(info.variants).replace("'", '"'), width=max(map(len, info.variants))
        )
        text += f"\n## Variants side by side\n\n{what}. Where two agree here, they differ elsewhere.\n\n{blocks(code)}"
    return text


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


def page(info: rp.SchemeInfo) -> str:
    """Markdown of one page: what it is, a call, its formulas with their source, models, loops, and somebody's notes."""
    lines = [f"# {info.cls.__name__}", "", f"Positions contribute {info.adds} ({info.paper})."]
    if info.models:
        lines += ["", f"Found in {', '.join(info.models)}."]
    lines += ["", f"![{info.name}](../_pictures/scheme_{info.name}.png)", "", calls(info), "## Formula", ""]
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
        cells = (link, info.adds, variants, ", ".join(info.models), info.paper)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)
