"""Write a page per scheme from its registration; Sphinx calls it before it reads the pages."""

from __future__ import annotations

from pathlib import Path

import relpos_np as rp

HERE = Path(__file__).parent
FOLDER = HERE / "schemes"
# What every scheme has, and `Scheme` describes.
INHERITED = "check, gradient, held, lift, lower, narrow, outputs, scores, transform"


def page(info: rp.SchemeInfo) -> str:
    """Markdown of one page: the class, the formulas of its file, and notes where somebody wrote some."""
    lines = [f"# {info.cls.__name__}", "", f"Positions contribute {info.adds}."]
    if info.models:
        lines += ["", f"Found in {', '.join(info.models)}."]
    lines += ["", f"![{info.name}](../_pictures/scheme_{info.name}.png)", ""]
    lines += ["```{eval-rst}", f".. autoclass:: relpos_np.{info.cls.__name__}", "   :members:"]
    lines += [f"   :exclude-members: {INHERITED}", ""]
    home = info.cls.__module__
    lines += [line for name in info.formulas for line in (f".. autofunction:: {home}.{name}", "")]
    lines += ["```", ""]
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


def table() -> str:
    """The register as a table in Markdown."""
    rows = ["| scheme | paper | variants | found in |", "| --- | --- | --- | --- |"]
    for info in rp.SCHEMES.values():
        cells = (f"[{info.name}]({info.docs})", info.paper, ", ".join(info.variants), ", ".join(info.models))
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)
