"""Write the tutorial as notebooks: the same text, code and pictures, from the same pages."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE / "_notebooks"
# Python, and what it prints where a block of text follows.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[([^]]*)\]\([^)]*/([^/)]*)\)")
# To other pages, which a notebook does not have beside it.
LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?:)[^)]*\)")


def text_cell(text: str) -> dict[str, Any]:
    """Text of a page, with its pictures."""
    names = [name for _, name in PICTURE.findall(text)]
    text = PICTURE.sub(r"![\1](attachment:\2)", LINK.sub(r"\1", text)).strip()
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": text}
    if names:
        drawn = {name: base64.b64encode((HERE / "_pictures" / name).read_bytes()).decode() for name in names}
        cell["attachments"] = {name: {"image/png": data} for name, data in drawn.items()}
    return cell


def code_cell(code: str, printed: str) -> dict[str, Any]:
    """A block of Python, and what it prints."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed}] if printed else []
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "source": code.rstrip(), "outputs": outputs}


def notebook(page: str) -> dict[str, Any]:
    """A page as a notebook."""
    parts = BLOCK.split(page)
    cells = [text_cell(parts[0])]
    for code, printed, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        cells.append(code_cell(code, printed or ""))
        if text.strip():
            cells.append(text_cell(text))
    cells = [{"id": f"cell-{n}", **cell} for n, cell in enumerate(cells)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}


def write_all() -> None:
    """Write the notebooks of both languages, and leave those that are up to date as they are."""
    for folder in ("tutorial", "zh"):
        for path in (HERE / folder).glob("[0-9]*.md"):
            text = json.dumps(notebook(path.read_text(encoding="utf-8")), ensure_ascii=False, indent=1) + "\n"
            target = FOLDER / folder / f"{path.stem}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or target.read_text(encoding="utf-8") != text:
                target.write_text(text, encoding="utf-8")
