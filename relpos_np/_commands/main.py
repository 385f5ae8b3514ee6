"""The command line: run attention on real data or a file, check every backend, describe the installation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import relpos_np as rp
from relpos_np._commands import attend, bench, check, config, conform, identify, info, plot, vectors, warmup
from relpos_np._commands.common import FAILED
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
    args, left = _parser().parse_known_args(argv)
    if left:  # said with the usage of the command, which argparse itself says with that of all
        args.parser.error(f"unrecognized arguments: {' '.join(left)}")
    try:
        return int(args.run(args))
    except (RelposError, MemoryError) as error:
        message = " ".join(str(error).split()) or "out of memory"
        if isinstance(error, MemoryError):
            message += "; backend numba needs the least, and a part of the queries less than all"
        note(f"relpos {args.command}: {message}")
        return FAILED
    except KeyboardInterrupt:
        note(f"relpos {args.command}: interrupted")
        return 130


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
        help="tab completion for bash, zsh or fish",
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
