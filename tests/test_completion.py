"""Tab completion: what real shells make of the keys that a user presses."""

import os
import shutil
import subprocess
import sys
import time

import pytest

import relpos_np as rp
from relpos_np._commands import completion
from relpos_np._commands import main as cli

if sys.platform == "win32":
    pytest.skip("needs terminals", allow_module_level=True)
import pty

COMMANDS = cli._parser()._subparsers._group_actions[0].choices
TAB = "\t"
# How each shell starts without anybody's settings and loads the script, and how it defines what it runs as `relpos`: a
# function that writes down its arguments, one a line, with a line of dashes below.
START = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        'eval "$(cat "$SCRIPT")"',
        """relpos() { printf '%s\\n' "$@" ---- >> "$FOUND"; }""",
    ),
    "zsh": (
        ["-f", "-i"],
        'autoload -Uz compinit; compinit -D -u; eval "$(cat "$SCRIPT")"',
        """relpos() { printf '%s\\n' "$@" ---- >> "$FOUND" }""",
    ),
    "fish": (
        ["--no-config", "-i"],
        'cat "$SCRIPT" | source',
        """function relpos; printf '%s\\n' $argv ---- >> "$FOUND"; end""",
    ),
}
# Turns into a program whose terminal is the one that it reads: shells need that for job control.
ATTACHED = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture(scope="module", params=START)
def shell(request, tmp_path_factory):
    """``shell(["relpos at<TAB>"])``: the arguments that `relpos` gets for each line typed into an interactive shell."""
    program = shutil.which(request.param)
    if program is None:
        # bash belongs to every machine that runs these tests, and CI installs the others.
        required = request.param == "bash" or os.environ.get("RELPOS_SHELLS") == "required"
        (pytest.fail if required else pytest.skip)(f"no {request.param}")
    folder = tmp_path_factory.mktemp(request.param)
    script, found, files = folder / "script", folder / "found", folder / "files"
    script.write_text(completion.script(request.param, cli._parser()))
    files.mkdir()
    for name in ("in.npz", "other.txt", "two words.npz"):
        (files / name).touch()
    (files / "folder").mkdir()
    options, load, define = START[request.param]
    environment = {"SCRIPT": script, "FOUND": found, "HOME": folder, "TERM": "dumb", "PATH": os.environ["PATH"]}

    def typed(lines):
        found.write_text("")
        terminal, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", ATTACHED, program, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=files,
            env={name: str(value) for name, value in environment.items()},
            start_new_session=True,
        ) as process:
            os.close(theirs)
            os.set_blocking(terminal, False)
            shown = ""

            def send(line, answers):
                nonlocal shown
                os.write(terminal, (line + "\r").encode())
                until = time.monotonic() + 60
                while found.read_text().count("----\n") < answers:
                    # What nobody reads would fill the terminal and stop the shell.
                    try:
                        shown += os.read(terminal, 1 << 16).decode(errors="replace")
                    except BlockingIOError:
                        time.sleep(0.01)
                    assert time.monotonic() < until, f"{line!r}: no answer\n{shown[-2000:]}"

            try:
                send(f"{load}; {define}; relpos ready", 1)
                for answers, line in enumerate(lines, 2):
                    send(line, answers)
            finally:
                process.kill()
                os.close(terminal)
        return [one.splitlines() for one in found.read_text().split("----\n")[1:-1]]

    return typed


def shortest(word, words, least=1):
    """The shortest beginning, of at least so many letters, that no other word has."""
    return next(word[:n] for n in range(least, len(word) + 1) if sum(w.startswith(word[:n]) for w in words) == 1)


def test_commands_options_and_their_values(shell):
    wanted = {}
    for name, parser in COMMANDS.items():
        wanted[shortest(name, COMMANDS)] = [name]
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        # Two hyphens alone end the options.
        wanted |= {f"{name} {shortest(flag, flags, 3)}": [name, flag] for flag in flags}
    for words, values in (
        ("attend --scheme", [name for name, info in rp.SCHEMES.items() if info.kind == "attention"]),
        ("attend --backend", rp.backend.BACKENDS),
        ("plot", (*rp.SCHEMES, "rel_shift")),
        ("completion", completion.SHELLS),
    ):
        wanted |= {f"{words} {shortest(value, values)}": [*words.split(), value] for value in values}
    found = shell([f"relpos {typed}{TAB}" for typed in wanted])
    assert dict(zip(wanted, found, strict=True)) == wanted


def test_files(shell):
    wanted = {
        "attend in": ["attend", "in.npz"],
        "attend tw": ["attend", "two words.npz"],
        "attend --out oth": ["attend", "--out", "other.txt"],
        "attend in.npz --plot oth": ["attend", "in.npz", "--plot", "other.txt"],
        "plot t5 --out oth": ["plot", "t5", "--out", "other.txt"],
        "vectors --check fol": ["vectors", "--check", "folder"],
        # A number and a second argument are no files.
        "check --seed in": ["check", "--seed", "in"],
        "check in": ["check", "in"],
    }
    found = shell([f"relpos {typed}{TAB}" for typed in wanted])
    # Some shells leave the stroke behind a folder, some take it off again.
    assert {key: [word.rstrip("/") for word in words] for key, words in zip(wanted, found, strict=True)} == wanted


def test_other_shells_are_refused():
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])


def test_what_to_install_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert 'pip install "relpos-np[cli]"' in printed.err
