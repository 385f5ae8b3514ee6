"""The command line: run attention on real data or a file, check every backend, describe the installation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import relpos_np as rp
from relpos_np._commands import attend, bench, check, config, conform, identify, info, plot, vectors, warmup
from relpos_np._commands.common import FAILED, INTERRUPTED, UnusableError
from relpos_np._commands.completion import SHELLS, script
from relpos_np._commands.terminal import note
from relpos_np.errors import RelposError

_COMMANDS = {
    "attend": attend,
    "bench": bench,
    "config": config,
    "plot": plot,
    "check": check,
    "identify": identify,
    "conform": conform,
    "vectors": vectors,
    "warmup": warmup,
    "info": info,
}

_JSON: dict[str, Any] = {"action": "store_true", "help": "print one JSON object and nothing else"}

_COMPLETION_HELP = """\
Print a script that makes the shell complete commands, options, their values and files. It is written by shtab, which
pip install "relpos-np[cli]" installs. Load it where the shell starts:
  bash  eval "$(relpos completion bash)" in ~/.bashrc
  zsh   eval "$(relpos completion zsh)" in ~/.zshrc, after compinit
  fish  relpos completion fish | source in ~/.config/fish/config.fish
"""
_COMPLETION_EXAMPLE = """\
examples:
  relpos completion bash > relpos.bash
  relpos completion zsh
  relpos completion fish
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0; 1 for a wrong number; 2 for unusable arguments; 3 if nothing ran."""
    name = "relpos"
    try:
        try:
            args, left = _parser().parse_known_args(argv)
            if left:  # said with the usage of the command, which argparse itself says with that of all
                args.parser.error(f"unrecognized arguments: {' '.join(left)}")
            name = f"relpos {args.command}"
            _check_environment()
            return int(args.run(args))
        finally:
            # Here, where an error can still be reported: the interpreter's own flush comes too late.
            print(end="", flush=True)
    except MemoryError as error:
        message = str(error) or "out of memory"
        note(f"{name}: {_line(message)}; backend numba needs the least, and a part of the queries less than all")
    except RelposError as error:
        note(f"{name}: {_line(error)}")
    except OSError as error:
        note(f"{name}: {error.filename or 'standard output'}: {error.strerror or _line(error)}")
        _drop_output()
    except KeyboardInterrupt:
        note(f"{name}: interrupted")
        return INTERRUPTED
    return FAILED


def _line(message: object) -> str:
    return " ".join(str(message).split())


def _check_environment() -> None:
    """Report a variable that Numba answers with a traceback while it is imported."""
    text = os.environ.get("NUMBA_NUM_THREADS", "")
    if text.lstrip("-").isdecimal() and int(text) < 1:
        raise UnusableError(f"NUMBA_NUM_THREADS: expected a number from 1 on, found {text}")


def _drop_output() -> None:
    """Where stdout cannot be written, let what it still holds go nowhere: the interpreter flushes it once more."""
    try:
        print(end="", flush=True)
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relpos", description=(rp.__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"relpos {rp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.HELP,
            epilog=command.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", **getattr(command, "JSON", _JSON))
        command.arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)

    # Unlike the others: a script has no form in JSON.
    completion = commands.add_parser(
        "completion",
        help="print a script for tab completion in bash, zsh or fish",
        description=_COMPLETION_HELP,
        epilog=_COMPLETION_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS, help="for which shell")
    completion.set_defaults(run=_completion, parser=completion)
    return parser


def _completion(args: argparse.Namespace) -> int:
    print(script(args.shell, _parser()))
    return 0
