"""What the command line tells its users: examples that run, completion, progress, and remedies in messages."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import completion, promises, terminal
from relpos_np._commands import main as cli
from relpos_np.testing import records, sweep

COMMANDS = cli._parser()._subparsers._group_actions[0].choices


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


@pytest.fixture
def brief(monkeypatch):
    """Sweeps, vectors and kernels cut short: two schemes, no compiler where none is needed."""
    every = sweep.examples
    schemes = {name: rp.SCHEMES[name] for name in ("t5", "sinusoidal")}
    monkeypatch.setattr(sweep, "SCHEMES", schemes)
    monkeypatch.setattr(records, "SCHEMES", schemes)
    monkeypatch.setattr(records, "divergences", lambda seed: iter(()))
    monkeypatch.setattr(
        sweep, "examples", lambda *args, **kwargs: (one for one in every(*args, **kwargs) if one.edge == "own")
    )
    monkeypatch.setattr(rp.backend, "available", lambda: (("numpy", "terms"), {"numba": "left out"}))
    monkeypatch.setattr(promises, "MEASURES", (("one", "a promise", 1.0, "s", lambda: (0.5, "here")),))


def examples(text):
    """Lines below "examples:", with continued ones joined."""
    below = text.partition("examples:\n")[2].replace("\\\n", "")
    return [line.strip() for line in below.splitlines() if line.strip()]


def test_every_command_has_examples_and_says_what_it_is_for():
    for name, parser in COMMANDS.items():
        assert [line for line in examples(parser.epilog) if f"relpos {name}" in line], name
        assert len(parser.description) > 60
        for action in parser._actions:
            assert action.help, f"relpos {name} {action.dest}"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_run(name, brief, monkeypatch, capsys, tmp_path):
    if name == "warmup":
        kernels = pytest.importorskip("relpos_np.kernels._numba")
        monkeypatch.setattr(kernels, "warm_up", lambda: iter([("one", 0.1)]))
    if name == "attend" and not rp.backend.kernels("numba"):
        pytest.skip("no numba")
    for line in examples(COMMANDS[name].epilog):
        command, _, target = line.partition(" > ")
        words = shlex.split(command)
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True, timeout=60)
            continue
        with pytest.MonkeyPatch.context() as patch:
            while "=" in words[0]:
                patch.setenv(*words.pop(0).split("=", 1))
            assert words[0] == "relpos"
            capsys.readouterr()
            assert cli.main(words[1:]) == 0, line
        out = capsys.readouterr().out
        assert out
        if "--json" in words:
            json.loads(out)
        if target:
            assert re.fullmatch(r"[\w.]+", target)
    if name == "attend":
        assert np.load("out.npz")["out"].shape == (1, 4, 100, 64)


# --------------------------------------------------------------------------------- completion


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """``complete("relpos", "at")``: what bash offers for the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    script = tmp_path_factory.mktemp("completion") / "relpos.bash"
    script.write_text(completion.script("bash", cli._parser(), {"--scheme": cli.attention_schemes()}))

    def call(*words):
        # Looked up as a press of TAB does: by what `complete` holds for the program.
        code = (
            'set -eu; source "$1"; shift; registered=$(complete -p relpos); set -- "$@"\n'
            '[[ $registered == *"-F "* ]]; function=${registered##*-F }; function=${function%% *}\n'
            'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); "$function" relpos "${@: -1}" "${@: -2:1}"\n'
            '((${#COMPREPLY[@]})) && printf "%s\\n" "${COMPREPLY[@]}" || true'
        )
        done = subprocess.run(
            [bash, "--norc", "-c", code, "bash", str(script), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()

    return call


def test_bash_completes_commands_and_options(complete):
    assert complete("relpos", "") == [*COMMANDS, "--help", "--version"]
    assert complete("relpos", "ch") == ["check"]
    for name, parser in COMMANDS.items():
        flags = [flag for action in parser._actions for flag in action.option_strings]
        assert complete("relpos", name, "-") == flags
    assert complete("relpos", "attend", "--th") == ["--threads"]


def test_bash_completes_values(complete):
    assert complete("relpos", "attend", "--scheme", "") == cli.attention_schemes()
    assert complete("relpos", "attend", "--scheme", "t") == ["t5", "transformer_xl", "tisa"]
    assert complete("relpos", "attend", "--backend", "n") == ["numpy", "numba"]
    assert complete("relpos", "completion", "z") == ["zsh"]
    assert complete("relpos", "check", "--seed", "") == []
    assert complete("relpos", "check", "") == []
    assert complete("relpos", "fly", "") == []


def test_bash_completes_files(complete, tmp_path):
    for name in ("in.npz", "in two words.npz", "other.txt"):
        (tmp_path / name).touch()
    (tmp_path / "indeed").mkdir()
    assert set(complete("relpos", "attend", "in")) == {"in.npz", "in two words.npz", "indeed"}
    assert complete("relpos", "attend", "--out", "oth") == ["other.txt"]
    assert complete("relpos", "vectors", "--check", "indeed") == ["indeed"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_can_be_read_by_their_shell(shell):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    text = completion.script(shell, cli._parser(), {})
    done = subprocess.run([program, "-n"], input=text, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_option_with_quotes_closed(shell):
    parser = argparse.ArgumentParser(prog="tool")
    sub = parser.add_subparsers().add_parser("run", help="what isn't [much]: a run")
    sub.add_argument("--depth", choices=["1", "2"], help="it's 100%% [sure]: yes")
    sub.add_argument("--quick", action="store_true", help="hurry")
    text = completion.script(shell, parser, {})
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list(lexer)  # raises where a quote is open
    assert any("1 2" in word for word in words)
    assert any("100% " in word for word in words)
    assert any("quick" in word for word in words)


def test_completion_command(capsys):
    for shell in completion.SHELLS:
        assert cli.main(["completion", shell]) == 0
        out = capsys.readouterr().out
        assert "transformer_xl" in out
        assert all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])


# --------------------------------------------------------------------------------- progress


def test_json_shows_no_progress(brief, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for words in (["check"], ["vectors", "golden"], ["vectors", "--check", "golden"], ["attend", "--plot", "none"]):
        assert cli.main([*words, "--json"]) == 0
        printed = capsys.readouterr()
        json.loads(printed.out)
        assert printed.err == ""


def test_progress_into_a_log_is_rare_lines(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    for _ in terminal.progress(range(9), "counting"):
        now[0] += 3
    assert capsys.readouterr().err == "counting: 4 of 9\ncounting: 8 of 9\n"
    assert list(terminal.progress(range(9), "counting")) == list(range(9))
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------- remedies


@pytest.mark.parametrize(
    ("remedy", "words"),
    [
        ("relpos attend --help", ["attend", "missing.npz"]),
        ("numpy.savez", ["attend", "single.npy"]),
        ("relpos attend FILE --scheme", ["attend", "--scheme", "t5"]),
        ("--backend numba", ["attend", "--backend", "numpy", "--threads", "1"]),
        ("--out", ["attend", "good.npz", "--out", "no/such/folder.npz", "--backend", "numpy"]),
        ("add an array `scheme`, or --scheme", ["attend", "unnamed.npz"]),
        ("expected one of plain, shaw, t5", ["attend", "good.npz", "--scheme", "t6"]),
        ("position.table", ["attend", "good.npz", "--scheme", "t5"]),
    ],
)
def test_messages_name_the_remedy(remedy, words, capsys):
    q = np.ones((1, 1, 3, 2))
    np.savez("good.npz", q=q, k=q, v=q)
    np.savez("unnamed.npz", q=q, k=q, v=q, **{"position.table": np.ones((32, 1))})
    np.save("single.npy", q)
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert remedy in printed.err
    assert printed.err.count("\n") == 1


def test_too_little_memory_has_a_remedy(monkeypatch, capsys):
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(rp, "attention", exhausted)
    assert cli.main(["attend", "--backend", "numpy", "--plot", "none"]) == 2
    assert "out of memory; backend numba needs the least" in capsys.readouterr().err
