"""An exception raised at a chosen line of the library: a Ctrl-C or a failed allocation half way, again and again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import relpos_np as rp

_PACKAGE = str(Path(rp.__file__).parent)


class Lines:
    """Counts the lines that the library's Python code runs in this thread, and may raise at one of them."""

    def __init__(self, at: int = 0, error: type[BaseException] | None = None) -> None:
        self.at, self.error, self.seen = at, error, 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if event == "call":
            return self._trace if frame.f_code.co_filename.startswith(_PACKAGE) else None
        if event == "line":
            self.seen += 1
            if self.seen == self.at and self.error is not None:
                raise self.error("planted")
        return self._trace

    def run(self, call: Callable[[], Any]) -> Any:
        """The call's result, or what is raised in it."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)
