"""Tab completion: scripts that shtab writes from what argparse knows of the commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from relpos_np._commands.names import attention_schemes
from relpos_np._commands.plot import SHIFT
from relpos_np.errors import RelposImportError
from relpos_np.schemes.registry import SCHEMES

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """A script for the shell to evaluate, so that it completes a program's arguments; needs shtab.

    The parser is changed: nobody may parse with it afterwards.
    """
    try:
        import shtab
    except ImportError as error:
        raise RelposImportError('tab completion needs the package shtab: pip install "relpos-np[cli]"') from error
    _describe(parser, shtab.FILE)
    return str(shtab.complete(parser, shell=shell))


def _describe(parser: argparse.ArgumentParser, file: object) -> None:
    """Add what argparse does not know: which values are files, and the names of schemes."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                # Without it shtab takes the line that sums the command up.
                command.description = None
                _describe(command, file)
        elif action.type is Path or action.metavar in {"FILE", "FUNCTION", "PNG"}:
            action.complete = file  # type: ignore[attr-defined]
        elif "--scheme" in action.option_strings:
            action.choices = attention_schemes()
        elif action.metavar == "SCHEME":
            action.choices = (*SCHEMES, SHIFT)
