"""Every benchmark runs once, and the README prints what was recorded."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "asv_bench"
MODULES = ["attention", "rel_shift"]


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def cases():
    sys.path.insert(0, str(BENCH))
    try:
        for name in MODULES:
            module = importlib.import_module(f"benchmarks.{name}")
            for _, cls in inspect.getmembers(module, inspect.isclass):
                if cls.__module__ != module.__name__:
                    continue
                params = getattr(cls, "params", [])
                axes = params if params and isinstance(params[0], list) else [params] if params else []
                for values in itertools.product(*axes):
                    yield pytest.param(cls, values, id="-".join([cls.__name__, *map(str, values)]))
    finally:
        sys.path.remove(str(BENCH))


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "values"), list(cases()))
def test_benchmark_runs(cls, values):
    bench = cls()
    bench.setup(*values)
    ran = 0
    for name, method in inspect.getmembers(bench, inspect.ismethod):
        if name.startswith(("time_", "peakmem_")):
            method(*values)
            ran += 1
        elif name.startswith("track_"):
            figure = method(*values)
            assert figure >= 0, name
            if name == "track_error":
                assert figure < 2e-6
            ran += 1
    assert ran


@pytest.mark.slow
def test_raw_benchmarks_run():
    start = importlib.import_module("benchmarks.start")
    for name, function in inspect.getmembers(start, inspect.isfunction):
        code = function()
        statement, setup = code if isinstance(code, tuple) else (code, "")
        result = subprocess.run(
            [sys.executable, "-c", f"{setup}\n{statement}"], check=False, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{name}: {result.stderr}"


def test_readme_prints_the_recorded_figures():
    measure = importlib.import_module("measure")
    record = json.loads((BENCH / "recorded" / "cpu.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(measure.table(record)) in readme
