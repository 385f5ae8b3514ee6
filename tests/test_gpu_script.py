"""What measures GPUs, in Numba's simulator: every row of its record, failures that it must notice, its page."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "asv_bench"
SCRIPT = BENCH / "gpu.py"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def run(folder, *options):
    """The script's exit status, what it printed, and its record if there is one."""
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    out = Path(folder) / "record.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--seconds", "0.001", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return done.returncode, done.stdout + done.stderr, record


def check(record, names):
    """Every number of some rows is there, and right: rel_shift moves numbers and makes no error at all."""
    gpu = importlib.import_module("gpu")
    assert record["complete"]
    assert record["simulated"] is record["tiny"] is True
    assert record["device"]["name"] == "Numba's simulator"
    assert record["versions"]["numpy"] == np.__version__
    assert record["commit"]
    assert list(record["rows"]) == list(names)
    for row in (row for row in gpu.ROWS if row.name in names):
        found = record["rows"][row.name]
        shape = gpu.tiny(row).shape
        assert found["storage"] == shape.storage
        assert set(found["shape"]) <= set(vars(shape).values())
        assert found["sets"] >= 2
        assert list(found["calls"]) == [gpu.OURS, *row.calls]
        for name, one in found["calls"].items():
            if one["status"] == "missing":
                assert name.startswith("torch"), name
                assert one["reason"]
                continue
            assert one["status"] == "right", (row.name, name, one)
            if name != gpu.COPY:
                assert 0 <= one["error"] <= one["allowed"] < (2e-3 if shape.storage == "float32" else 5e-2)
                assert (one["allowed"] == 0) == row.shifts
            if name in (gpu.OURS, gpu.MATRIX):
                assert one["allowed"] < (1e-4 if shape.storage == "float32" else 5e-2)
            assert 0 < one["best_ms"] <= one["median_ms"]
            assert one["gbs"] > 0
            assert one["times_ours"] > 0
            assert ("tflops" in one) == (not row.shifts)
        assert found["calls"][gpu.OURS]["times_ours"] == 1


@pytest.mark.simulator
def test_every_row_is_there_and_right_and_on_the_page(tmp_path):
    gpu, report = importlib.import_module("gpu"), importlib.import_module("report")
    status, printed, record = run(tmp_path, "--tiny", "--rounds", "1")
    assert status == 0, printed
    check(record, gpu.NAMES)
    assert [line.split(":")[0] for line in printed.splitlines() if line.split(":")[0] in gpu.NAMES] == [*gpu.NAMES]
    record["rows"]["conformer"]["calls"]["torch"] = {"status": "missing", "reason": "no compiler"}
    (tmp_path / "gpu.json").write_text(json.dumps(record), encoding="utf-8")
    page = report.sections(tmp_path)["figures_gpu"]
    assert page.startswith("Numba's simulator, ")
    for name, found in record["rows"].items():
        ours = found["calls"]["relpos_np"]
        times = " | ".join([name, report.sizes(found["shape"]), found["storage"], "relpos_np", ""])
        assert f"| {times}{report.brief(ours['median_ms'])} ({report.brief(ours['best_ms'])}) |" in page
    assert f"{record['rows']['conformer']['calls']['copy']['times_ours']:.2f}× |" in page
    assert "- conformer, torch: missing, `no compiler`" in page
