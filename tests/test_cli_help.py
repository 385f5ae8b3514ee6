"""What the command line tells its users: examples that run, progress, and remedies in messages."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import bench, promises, terminal
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
    monkeypatch.setattr(bench, "_SHAPES", ("a", "h"))
    monkeypatch.setattr(promises, "MEASURES", (("one", "a promise", 1.0, "s", lambda: (0.5, "here")),))


# What the examples of `relpos conform` test.
STRANGER = """
import relpos_np as rp

def t5(q, k, v, table):
    return rp.attention(q, k, v, position=rp.T5(table), backend="numpy")

def alibi(q, k, v, slopes, causal=False):
    return rp.attention(q, k, v, position=rp.ALiBi(slopes), causal=causal, backend="numpy")

def unscaled(q, k, v):
    return rp.attention(q, k, v, scale=1.0, backend="numpy")

def flash(q, k, v, causal=False):
    if q.shape[-1] != 64 or q.shape[-2] % 64 or k.shape[-2] % 64:
        raise RuntimeError("illegal memory access")
    return rp.attention(q, k, v, causal=causal, backend="numpy")
"""


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


# Those of which one example or another takes seconds.
LONG = ("attend", "bench", "conform", "identify", "plot")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in COMMANDS])
def test_examples_of_the_help_run(name, brief, monkeypatch, capsys, tmp_path):
    if name == "warmup":
        kernels = pytest.importorskip("relpos_np.kernels._numba")
        monkeypatch.setattr(kernels, "warm_up", lambda: iter([("one", 0.1)]))
    if name == "config":
        for folder in (tmp_path, tmp_path / "base", tmp_path / "finetuned"):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text('{"model_type": "t5", "rope_scaling": null}', encoding="utf-8")
    if name == "conform":
        (tmp_path / "mypackage").mkdir()
        (tmp_path / "mypackage" / "attention.py").write_text(STRANGER, encoding="utf-8")
        monkeypatch.setitem(sys.modules, "mypackage", None)  # to be as it was afterwards
        del sys.modules["mypackage"]
    if name == "attend" and not rp.backend.kernels("numba"):
        pytest.skip("no numba")
    for line in examples(COMMANDS[name].epilog):
        if "--format onnx" in line and importlib.util.find_spec("onnx") is None:
            continue  # where it is installed, tests/parity/test_onnx_cases.py runs it
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
        if words[-1] == "--json":
            json.loads(out)
        if target:
            assert re.fullmatch(r"[\w.]+", target)
    if name == "attend":
        assert np.load("out.npz")["out"].shape == (1, 4, 100, 64)


# --------------------------------------------------------------------------------- progress


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


def test_too_little_memory_has_a_remedy(monkeypatch, capsys):
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(rp, "attention", exhausted)
    assert cli.main(["attend", "--backend", "numpy", "--plot", "none"]) == 2
    assert "out of memory; backend numba needs the least" in capsys.readouterr().err
