"""Tab completion: scripts for bash, zsh and fish, written from what argparse knows of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Words = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Option:
    """An option or a positional argument.

    Attributes
    ----------
    flags : tuple of str
        How it is written; empty for a positional one.
    text : str
        Its help.
    takes : bool
        Whether a value follows.
    words : tuple of str
        The values it can have, if they are few.
    path : bool
        Whether the value is a file or a folder.
    """

    flags: tuple[str, ...]
    text: str
    takes: bool
    words: tuple[str, ...]
    path: bool


Commands = Mapping[str, tuple[str, list[Option]]]


def script(shell: str, parser: argparse.ArgumentParser, words: Words) -> str:
    """The script that makes a shell complete a program's arguments.

    Parameters
    ----------
    shell : {"bash", "zsh", "fish"}
        For which shell.
    parser : ArgumentParser
        One with commands.
    words : mapping of str to sequence of str
        Values of options that argparse does not know, such as ``{"--scheme": [...]}``.

    Returns
    -------
    str
        To be evaluated by the shell.
    """
    return SHELLS[shell](parser.prog, _commands(parser, words))


def _commands(parser: argparse.ArgumentParser, words: Words) -> Commands:
    """Help and options of each command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {
                name: (texts.get(name, ""), [_option(one, words) for one in sub._actions])
                for name, sub in action.choices.items()
            }
    raise AssertionError("the parser has no commands")


def _option(action: argparse.Action, words: Words) -> Option:
    known = next((tuple(words[flag]) for flag in action.option_strings if flag in words), ())
    # argparse reads help as a format.
    text = (action.help or "").replace("%%", "%")
    choices = tuple(str(one) for one in action.choices or ()) or known
    path = action.type is Path or action.metavar == "PNG"
    return Option(tuple(action.option_strings), text, action.nargs != 0, choices, path)


def _bash(prog: str, commands: Commands) -> str:
    values, arguments = [], []
    for name, (_, options) in commands.items():
        flags = " ".join(flag for option in options for flag in option.flags)
        own = [option for option in options if not option.flags]
        positional = [_bash_values(prog, option) for option in own]
        arguments.append(f"{name}:-*) _{prog}_reply -W '{flags}' -- \"$word\" ;;")
        arguments.append(f"{name}:*) {positional[0] if positional else ':'} ;;")
        for option in options:
            if option.takes and option.flags:
                pattern = "|".join(f"{name}:{flag}" for flag in option.flags)
                values.append(f"{pattern}) {_bash_values(prog, option)}; return ;;")
    return f"""\
# Completion of {prog} for bash.
_{prog}_reply() {{
    local line
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen "$@")
}}
_{prog}_files() {{
    compopt -o filenames 2>/dev/null || :
    _{prog}_reply -f -- "$1"
}}
_{prog}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _{prog}_reply -W '{" ".join([*commands, "--help", "--version"])}' -- "$word"
        return
    fi
    case "$command:$before" in
        {_lines(values)}
    esac
    case "$command:$word" in
        {_lines(arguments)}
    esac
}}
complete -F _{prog} {prog}
"""


def _bash_values(prog: str, option: Option) -> str:
    if option.path:
        return f'_{prog}_files "$word"'
    return f"_{prog}_reply -W '{' '.join(option.words)}' -- \"$word\"" if option.words else ":"


def _lines(lines: Sequence[str]) -> str:
    return ("\n" + " " * 8).join(lines)


def _quoted(text: str, special: str = "") -> str:
    """Text in single quotes; zsh also wants a backslash before some signs in it."""
    for sign in special:
        text = text.replace(sign, "\\" + sign)
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh(prog: str, commands: Commands) -> str:
    described = [_quoted(f"{name}:{text}") for name, (text, _) in commands.items()]
    cases = []
    for name, (_, options) in commands.items():
        specifications = [_zsh_option(option, flag) for option in options for flag in option.flags or ("",)]
        cases.append(f"{name}) _arguments {' '.join(specifications)} ;;")
    return f"""\
#compdef {prog}
# Completion of {prog} for zsh.
_{prog}() {{
    local -a listed=({" ".join(described)})
    if ((CURRENT == 2)); then
        _describe command listed
        return
    fi
    local chosen=$words[2]
    shift words
    ((CURRENT--))
    case $chosen in
        {_lines(cases)}
    esac
}}
compdef _{prog} {prog}
"""


def _zsh_option(option: Option, flag: str) -> str:
    action = "_files" if option.path else f"({' '.join(option.words)})" if option.words else ""
    if not flag:
        return _quoted(f"::{option.text.replace(':', ' ')}:{action}")
    text = option.text
    for sign in "[]:":
        text = text.replace(sign, "\\" + sign)
    return _quoted(f"{flag}[{text}]" + (f":value:{action}" if option.takes else ""))


def _fish(prog: str, commands: Commands) -> str:
    lines = [f"# Completion of {prog} for fish.", f"complete -c {prog} -f"]
    for name, (text, options) in commands.items():
        lines.append(f"complete -c {prog} -n __fish_use_subcommand -a {name} -d {_quoted(text)}")
        inside = f"complete -c {prog} -n '__fish_seen_subcommand_from {name}'"
        for option in options:
            parts = [inside]
            parts += [f"-s {flag[1:]}" if flag[1] != "-" else f"-l {flag[2:]}" for flag in option.flags]
            if option.path:
                # -F: files again, which the first line switched off.
                parts.append("-r -F" if option.flags else "-F")
            elif option.takes and option.flags:
                parts.append("-x")
            if option.words:
                parts.append(f"-a '{' '.join(option.words)}'")
            if option.flags:
                parts.append(f"-d {_quoted(option.text)}")
            lines.append(" ".join(parts))
    return "\n".join(lines) + "\n"


SHELLS: Mapping[str, Callable[[str, Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
