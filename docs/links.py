"""Follow every link within the built pages, whoever wrote it: ``python docs/links.py FOLDER``."""

from __future__ import annotations

import html
import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

TARGET = re.compile(r'\b(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\bid="([^"]+)"')


@cache
def anchors(page: Path) -> frozenset[str]:
    """Where links can point to within a page."""
    return frozenset(ANCHOR.findall(page.read_text(encoding="utf-8")))


def broken(folder: Path) -> list[str]:
    """Links to files or places that are not there.

    Parameters
    ----------
    folder : Path
        With the built pages.

    Returns
    -------
    list of str
        Each with its page.

    Raises
    ------
    FileNotFoundError
        If there are no pages.
    """
    pages = sorted(folder.resolve().rglob("*.html"))
    if not pages:
        raise FileNotFoundError(f"no pages in {folder}")
    found = []
    for page in pages:
        for link in TARGET.findall(page.read_text(encoding="utf-8")):
            parts = urlsplit(html.unescape(link))
            if parts.scheme or parts.netloc:
                continue
            file, place = page.parent / unquote(parts.path) if parts.path else page, unquote(parts.fragment)
            if not file.is_file() or (place and file.suffix == ".html" and place not in anchors(file.resolve())):
                found.append(f"{page.relative_to(folder.resolve())}: {link}")
    return found


if __name__ == "__main__":
    lost = broken(Path(sys.argv[1]))
    sys.stdout.writelines(f"{line}\n" for line in lost)
    sys.exit(bool(lost))
