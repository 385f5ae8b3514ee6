"""Benchmarks notice errors, peers are compared as they should be, and the pages print what was recorded."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import peers
from relpos_np._commands.peers import ours
from relpos_np._commands.peers.tasks import TASKS
from relpos_np._commands.peers.worker import Worker

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "asv_bench"
MODULES = ["attention", "options", "rel_shift", "scaling", "small", "steady"]


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def of_rounding(case):
    """How far rounding to half precision may take a result from the truth: nothing in float32."""
    shapes = importlib.import_module("benchmarks.shapes")
    storage = case.shape.storage
    return 0.0 if storage == "float32" else shapes.ROUNDING[storage] * np.abs(case.exact()).max()


def test_importing_benchmarks_leaves_numba_alone():
    # asv forks every benchmark from a process that has imported them, and a forked child may not use
    # threads that its parent started: the kernels would run another way than users see.
    modules = ", ".join(f"benchmarks.{name}" for name in ("accuracy", *MODULES))
    code = f"import sys, {modules}; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("letter", [*"adefgh", "hb"])
def test_checks_of_cases_notice_errors(letter):
    shapes = importlib.import_module("benchmarks.shapes")
    subject = shapes.case(letter)
    out = subject.attention(backend="numpy")
    rounding = of_rounding(subject)
    assert subject.error(out) < 4e-6 + rounding
    out[-1, -1, -1, -1] += 1e-3 + 4 * rounding
    assert subject.error(out) > 9e-4 + 2 * rounding
    if letter in ("h", "hb"):
        return
    gradients = shapes.as_mapping(subject.attention_vjp(backend="numpy"))
    assert subject.gradient_error(gradients) < 4e-6
    for name in gradients:
        wrong = {n: x.copy() for n, x in gradients.items()}
        wrong[name][..., -1] *= 1.01
        assert subject.gradient_error(wrong) > 1e-5, name


@pytest.mark.slow
def test_compare_runs_peers_in_turn(tmp_path, capsys):
    compare = importlib.import_module("compare")
    out = tmp_path / "compare.json"
    options = {"shapes": "a,f,hb", "peers": "numpy,jax", "rounds": 2, "seconds": 0.01, "threads": 1}
    arguments = [f"--{name}={value}" for name, value in options.items()] + ["--backward"]
    compare.main([*arguments, "--python", f"jax={sys.executable}", "--out", str(out)])
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["threads"] == 1
    assert record["versions"]["relpos_np"]["numpy"] == np.__version__
    shapes = importlib.import_module("benchmarks.shapes")
    for letter in ("a", "f", "hb"):
        subject = shapes.case(letter)
        worst = 4e-6 + of_rounding(subject)
        assert record["attention"][letter]["storage"] == subject.shape.storage
        found = record["attention"][letter]["peers"]
        for name in ("relpos_np", "numpy"):
            assert found[name]["error"] < worst
            assert 0 < found[name]["best_ms"] <= found[name]["median_ms"]
        assert found["relpos_np"]["times_ours"] == 1
        assert found["relpos_np"]["fraction_of_limit"] > 0
        # JAX rounds the weights too.
        assert "unavailable" in found["jax"] or found["jax"]["error"] < (worst if worst < 1e-5 else 3 * worst)
    # Keys and values of four heads, 96 keys and 16 numbers, two bytes each
    assert record["attention"]["hb"]["amount"] == 2 * 4 * 96 * 16 * 2
    assert list(record["backward"]) == ["a"]
    assert record["backward"]["a"]["peers"]["relpos_np"]["error"] < 4e-6
    page = importlib.import_module("report").sections(tmp_path)["figures_peers"]
    assert f"{record['attention']['a']['peers']['numpy']['median_ms']:.3g}" in page
    assert "relpos_np, of the limit" in page
    assert page.count("Largest errors against float64") == 3  # in float32, in bfloat16, and of gradients
    assert f"in bfloat16: relpos_np {record['attention']['hb']['peers']['relpos_np']['error']:.1e}" in page
    assert "Forward" in capsys.readouterr().out


def test_peers_that_compute_something_else_are_not_timed(monkeypatch, tmp_path):
    worker = Worker("numpy", 1)
    exact = {letter: str(tmp_path / f"{letter}.npz") for letter in ("a", "hb")}
    for letter, path in exact.items():
        np.savez(path, out=TASKS["attention"].subject(letter).exact())
    assert worker.prepare("attention", "a", exact["a"], 0.01)["error"] < 4e-6
    assert worker.prepare("attention", "hb", exact["hb"], 0.01)["error"] < 4e-3
    wrong = {"a": lambda case: case.v, "hb": lambda case: rp.attention(case.q, case.k, case.v)}
    for letter, other in wrong.items():
        monkeypatch.setattr(
            ours,
            "prepare",
            lambda name, task, case, threads, seconds, other=other: peers.Prepared(lambda: other(case)),
        )
        found = worker.prepare("attention", letter, exact[letter], 0.01)
        assert found["unavailable"].startswith("its result deviates")
        assert worker.prepared is None

    def fails(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(ours, "prepare", fails)
    assert worker.prepare("attention", "a", exact["a"], 0.01) == {"unavailable": "MemoryError: no room"}


def test_compare_refuses_unknown_names(capsys):
    compare = importlib.import_module("compare")
    for wrong in (["--shapes", "Z"], ["--peers", "abacus"]):
        with pytest.raises(SystemExit):
            compare.main(wrong)
        assert f"there is no {wrong[0][2:-1]} {wrong[1]!r}" in capsys.readouterr().err


def test_documentation_prints_the_recorded_figures(tmp_path):
    report = importlib.import_module("report")
    record = json.loads((BENCH / "recorded" / "cpu.json").read_text(encoding="utf-8"))
    found = report.sections()
    for name, figures in record["shapes"].items():
        words = figures["words"].removesuffix(", in bfloat16")
        times = f"{figures['median_ms']:.3g} ({figures['best_ms']:.3g})"
        assert f"| {name}: {words}, length {figures['shape'][2]:,} | {times} |" in found["figures_kernels"]
    assert all(f"| {name} |" in found["figures_shapes"] for name in [*"ABCDEFGH", "Hb"])
    assert "H is bound by memory" in found["figures_kernels"]
    half = record["shapes"].get("Hb", record["shapes"]["H"]) | {"fraction_of_read_median": 0.421}
    with_half = report.kernels(record | {"shapes": record["shapes"] | {"Hb": half}})
    assert any(line.startswith("Hb is bound by memory") and "42%" in line for line in with_half)
    assert f"or {record['first_call_cold_s']:.1f} s if the kernel must be compiled" in found["figures_small"]
    nothing = report.sections(tmp_path)
    assert all("Nothing is recorded" in nothing[name] for name in found if name != "figures_shapes")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("**/*.md")]
    assert all("{{ " + name + " }}" in "".join(pages) for name in found)


# --------------------------------------------------------------------------------- accuracy, and asv's own record


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scheme", ["plain", "rotary"])
def test_accuracy_is_tracked(scheme, dtype, unmet, monkeypatch):
    accuracy = importlib.import_module("benchmarks.accuracy").Accuracy
    assert [set(axis) for axis in accuracy.params] == [set(rp.SCHEMES), {"float16", "float32", "float64"}]
    bench = accuracy()
    bench.setup(scheme, dtype)
    assert {case.dtype for case in bench.cases} == {dtype}
    assert {case.example.variant for case in bench.cases} == set(rp.SCHEMES[scheme].variants or (None,))
    assert 0 < bench.track_error(scheme, dtype) <= 1
    # A backend that is wrong shows.
    right = rp.backend.evaluate
    monkeypatch.setattr(
        rp.backend, "evaluate", lambda *args: tuple(None if x is None else x * x.dtype.type(1.1) for x in right(*args))
    )
    assert bench.track_error(scheme, dtype) > 1


@pytest.mark.parametrize("path", sorted((BENCH / "recorded").rglob("*.json")), ids=lambda path: f"{path.parts[-2:]}")
def test_nothing_recorded_is_a_path(path):
    assert not re.search(r'"/\w', path.read_text(encoding="utf-8"))


def test_versions_are_recorded_without_paths(monkeypatch):
    monkeypatch.setenv("RELPOS_ELSEWHERE", "/nowhere")
    assert not re.search(r'"/\w', json.dumps(importlib.import_module("measure").versions_without_paths()))


@pytest.mark.simulator
@pytest.mark.parametrize("core", ["neoverse-v1", "neoverse-v2", "apple-m1"])
def test_inner_loops_for_arm(core):
    """Four steps of 24 products, or two of 24 of matrices where that is the unit, in a loop that does little else."""
    arm = importlib.import_module("arm")
    found = arm.compiled(core)
    kinds = ("scores", "values")
    assert found.keys() == {f"{x}, {y}" for x in kinds for y in ("float32", "bfloat16, BFDOT", "bfloat16, BFMMLA")}
    for name, block in found.items():
        word, count = {"BFDOT": ("bfdot", 96), "BFMMLA": ("bfmmla", 48)}.get(name.split()[-1], ("fmla", 96))
        assert block.count(f"\t{word}\t") == count, name
        assert block.count("\n") < (230 if count == 96 else 150), name
