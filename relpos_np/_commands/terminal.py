"""What the command line prints: JSON, lines, tables, and on stderr how far a long run is."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")

# Into a file or a log, one line of progress at most so often; nothing about runs that are shorter.
_LOG_SECONDS = 10.0


def print_json(found: Mapping[str, Any]) -> None:
    """One object; JSON has no infinity and no NaN, and null stands for them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    print(json.dumps(plain(dict(found)), indent=2, allow_nan=False))


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Names and values below each other."""
    pairs = list(lines)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name:>{width}}  {value}")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, by rich on a terminal where it is installed."""
    if sys.stdout.isatty():
        with suppress(ImportError):
            from rich.console import Console
            from rich.table import Table

            table = Table()
            for name in head:
                table.add_column(name)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def progress(items: Iterable[_T], label: str, *, quiet: bool = False) -> Iterator[_T]:
    """Pass the items on and show on stderr how many are done, and of how many if that is known; nothing if `quiet`."""
    if quiet:
        yield from items
        return
    live = sys.stderr.isatty()
    if live:
        os.environ["RELPOS_QUIET"] = "1"  # whoever sees a bar need not be told what is compiled
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass  # a line that counts is enough
        else:
            yield from track(items, description=label, console=Console(stderr=True), transient=True)
            return
    total = f" of {len(items)}" if isinstance(items, Sequence) else ""
    n, shown = 0, time.monotonic()
    for item in items:
        if live:
            print(f"\r{label}: {n}{total}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - shown > _LOG_SECONDS:
            note(f"{label}: {n}{total}")
            shown = time.monotonic()
        yield item
        n += 1
    if live:
        print(f"\r{label}: {n}{total}", file=sys.stderr)


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def seconds(value: float) -> str:
    """A duration, given in seconds, with three digits and a unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.2g} µs"
