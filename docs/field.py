"""Write board.md and ledger.md from what was recorded of other packages: ``python docs/field.py``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE.parent / "asv_bench" / "recorded"
# What a cell of the board shows, and what that means.
VERDICTS: Mapping[str, tuple[str, str]] = {
    "right": ("✓", "all cases of the family are right"),
    "partly": ("(✓)", "the cases that it takes are right, and it takes no others"),
    "convention": ("≠", "it differs by a convention that others share"),
    "wrong": ("✗", "at least one case is wrong"),
    "not run": ("", "it has no argument for what the family needs, or refuses it"),
}
KINDS: Mapping[str, str] = {
    "error": "Against a paper, documentation, or the package's own code elsewhere",
    "rounding": "Rounded where the result is exact",
    "convention": "Conventions, of which both are used",
    "claim": "Said to be wrong, and equal",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def recorded(name: str) -> Any:
    """A file of asv_bench/recorded."""
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def board() -> str:
    """All of board.md."""
    found = recorded("board")
    rows = found["rows"]
    return f"""\
<!-- Written by docs/field.py; change that, and run it. -->
# The conformance board

What [`relpos conform`](test-your-kernel.md) finds of the attention of other packages, recorded on {found["date"]}.
Each is called as its users call it, through an adaptor that holds no formula (`tests/parity/adaptors.py`).

A column is a [family](test-your-kernel.md#families) of cases. "Right" means as near to float64 as a straightforward
implementation in that dtype may be.

{_legend()}

Whether a ✗ is a fault depends on what the package promises; the [ledger](ledger.md) says which are.
[Bad input and faults](faults.md) lists this library's conventions: the last query attends all keys, a query without
keys gets 0, excluded keys are not read.

{_verdicts(rows)}
## What is different

{"".join(_differences(rows))}
`python -m tests.parity.board` records it anew in the environment for
[parity](developing.md#parity-with-other-packages). A package is added as a function of a few lines and a row of
`ADAPTORS`.
"""


def _legend() -> str:
    """What the signs of the table mean."""
    return "\n".join(f"- {sign or 'nothing'}: {words}." for sign, words in VERDICTS.values()) + "\n"


def _verdicts(rows: list[dict[str, Any]]) -> str:
    """A table in HTML, whose cells have the colours of their verdicts; subjects with most that is wrong come first."""
    families = list(dict.fromkeys(name for row in rows for name in row["families"]))
    lines = ["<div class='table-wrapper'><table class='board'><thead><tr><th>package</th>"]
    lines += [f"<th><span>{name.replace('_', ' ')}</span></th>" for name in families]
    lines.append("</tr></thead><tbody>")
    for row in sorted(rows, key=lambda row: -sum(one["verdict"] == "wrong" for one in row["families"].values())):
        scheme = row["scheme"] + (f" ({row['variant']})" if row["variant"] else "")
        what = f"{row['package']} {row['what']}<br><small>{row['version']}, {scheme}, {row['dtype']}</small>"
        lines.append(f"<tr><th>{what}</th>")
        for name in families:
            verdict = row["families"].get(name, {"verdict": "not run"})["verdict"]
            sign, words = VERDICTS[verdict]
            lines.append(f"<td class='{verdict.replace(' ', '-')}' title='{name}: {words}'>{sign}</td>")
        lines.append("</tr>")
    return "\n".join([*lines, "</tbody></table></div>\n"])


def _differences(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Per cause: the families that show it, by package, and the smallest case."""
    causes: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        who = f"{row['package']}, {row['what']}"
        for name, one in row["families"].items():
            if one["verdict"] in ("wrong", "convention"):
                words = one.get("cause") or one.get("words") or "no known mistake gives these numbers"
                causes.setdefault(words, {}).setdefault(who, []).append((name, one.get("smallest", "")))
    for words, where in causes.items():
        yield f"- {words[:1].upper()}{words[1:]}\n"
        for who, cases in where.items():
            names = ", ".join(dict.fromkeys(name.replace("_", " ") for name, _ in cases))
            yield f"  - {who}: {names}; the smallest case is `{cases[0][1]}`\n"


def ledger() -> str:
    """All of ledger.md."""
    found = recorded("ledger")
    parts = []
    for kind, title in KINDS.items():
        entries = {name: one for name, one in found["entries"].items() if one["kind"] == kind}
        if entries:
            parts.append(f"## {title}\n")
            parts += [_entry(name, one) for name, one in entries.items()]
    return f"""\
<!-- Written by docs/field.py; change that, and run it. -->
# A ledger of differences in the field

What packages compute otherwise than a paper, or than others do, each as its smallest case, recorded on
{found["date"]}. A test (`tests/parity/test_ledger.py`) asks the installed version whether it still does, and fails when
it does not, so that the entry can be closed.

{chr(10).join(parts)}
`python -m tests.parity.ledger` records it anew. An entry is a function of `tests/parity/ledger.py`.
"""


def _entry(name: str, one: Mapping[str, Any]) -> str:
    """A section."""
    text = f"{textwrap.fill(one['case'], 120)}\n\n{textwrap.fill(one['why'], 120)}"
    answers = table(
        ["here", f"{one['package']} {one['version']}"], [[f"`{_shown(one['ours'])}`", f"`{_shown(one['theirs'])}`"]]
    )
    link = f"\nMore: <{one['link']}>\n" if one["link"] else ""
    return f"### {one['package']}: {name.replace('_', ' ')}\n\n{text}\n\n{answers}{link}"


def _shown(answer: Any) -> str:
    return ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def pages() -> dict[str, str]:
    """Both pages, by file."""
    return {"board.md": board(), "ledger.md": ledger()}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
