"""The GPU's script in Numba's simulator: every row and field of its record, failures that it must notice, its page."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import relpos_np as rp

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "gpu" / "run_all.sh"
BENCH = ROOT / "asv_bench"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the script is for bash")


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def run(folder, *options, simulator=True, **more):
    """The script's exit status, what it printed, and its record if there is one."""
    pytest.importorskip("numba")
    environment = os.environ | {"PYTHON": sys.executable, "NUMBA_ENABLE_CUDASIM": str(int(simulator))} | more
    done = subprocess.run(
        [str(SCRIPT), str(folder), *options], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = list(Path(folder).glob("*.json")) if Path(folder).exists() else []
    assert len(found) < 2
    assert not list(Path(folder).glob("*.partial"))
    record = json.loads(found[0].read_text(encoding="utf-8")) if found else None
    return done.returncode, done.stdout + done.stderr, record


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of everything, tiny."""
    folder = tmp_path_factory.mktemp("gpu")
    # compute-sanitizer would find nothing to look at in the simulator.
    return run(folder, "--tiny", PATH=os.pathsep.join(["/usr/bin", "/bin"]))


@pytest.mark.simulator
def test_every_row_is_there_and_right(whole):
    _, printed, record = whole
    rows = importlib.import_module("gpu.rows")
    page = importlib.import_module("gpu.page")
    assert record["complete"], printed
    assert record["simulated"] is record["tiny"] is True
    assert record["device"]["name"] == "Numba's simulator"
    assert record["versions"]["numpy"]
    assert {"id", "changed"} <= record["commit"].keys()
    assert record["kernels"] == page.kernel_hash()
    assert list(record["rows"]) == list(rows.NAMES)
    for row in rows.ROWS:
        found = record["rows"][row.name]
        assert found["simulated"] is True
        assert (found["task"], found["dtype"]) == (row.task, row.tiny.storage)
        assert found["shape"] == rows.dimensions(row.tiny)
        assert found["kernels"] == record["kernels"]
        assert [goal["met"] for goal in found["goals"]] == [None] * len(found["goals"])
        assert found["status"] == "passed", found
        # Every number is there, and right: rel_shift moves them and makes no error at all.
        assert 0 <= found["error"] <= found["tolerance"] < (1e-4 if row.tiny.storage == "float32" else 5e-2)
        assert (found["tolerance"] == 0) == (row.task == "rel_shift")
        assert 0 < found["ms_min"] <= found["ms_median"]
        assert found["gbs"] > 0
        assert (found["tflops"] is None) == (row.task == "rel_shift")
        assert found["sets"] >= 2
        assert found["operands"] == "NumPy arrays"
        assert list(found["baselines"]) == list(row.baselines)
        for name, one in found["baselines"].items():
            if one["status"] == "measured":
                assert one["ratio"] > 0
                assert one["ms_min"] <= one["ms_median"]
                assert name == "copy" or one["error"] < 3e-2
            else:
                assert one["reason"], name
    shift = record["rows"]["rel_shift-conformer"]["baselines"]["copy"]
    assert shift["status"] == "measured"


@pytest.mark.simulator
def test_checks_and_limits_are_recorded(whole):
    status, printed, record = whole
    checks = record["checks"]
    assert checks["tests"]["status"] == "passed", checks["tests"]
    assert checks["tests"]["passed"] > 10
    assert not checks["tests"]["failed"]
    for tool in ("memcheck", "racecheck"):
        assert checks[tool]["status"] == "missing"
        assert "compute-sanitizer" in checks[tool]["reason"]
    assert checks["memory"]["status"] == "missing"
    assert "the simulator has no memory that could run out" in checks["memory"]["reason"]
    assert len(record["repeat"]) >= 5
    assert {one["status"] for one in record["repeat"].values()} == {"passed"}
    limits = record["ceilings"]
    assert limits["copy"]["numba.cuda, device to device"]["gbs"] > 0
    assert limits["fma"]["numba.cuda, FMA on registers"]["tflops"] > 0
    assert limits["launch"]["numba.cuda, ten arrays"]["us_host"] > 0
    assert set(limits) == {"copy", "fma", "gemm", "launch"}
    assert not record["failures"], printed
    assert status == 0


PLANTED = """
import os
if os.environ.get("RELPOS_TEST_PLANT"):
    from relpos_np.kernels._cuda import shift
    whole = shift.rel_shift

    def wrong(x, out, *rest, **more):
        found = whole(x, out, *rest, **more)
        if os.environ["RELPOS_TEST_PLANT"] == "hang":
            import time
            with open(os.environ["RELPOS_TEST_PIDS"], "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        if os.environ["RELPOS_TEST_PLANT"] == "end":
            os._exit(7)
        out[..., -1] += 1
        return found

    shift.rel_shift = wrong
"""
TOOL = """#!/bin/sh
case "$2" in
memcheck) echo "========= Invalid __global__ read of size 4 bytes"; echo "========= ERROR SUMMARY: 1 error"; exit 99 ;;
*) exec sleep 600 ;;
esac
"""


@pytest.fixture
def planted(tmp_path):
    """A folder that spoils what imports it, and one with a compute-sanitizer that finds an error or never ends."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(PLANTED, encoding="utf-8")
    tool = tmp_path / "tools" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL, encoding="utf-8")
    tool.chmod(0o755)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "python"), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(tool.parent), os.environ.get("PATH", os.defpath)]),
        "RELPOS_TEST_PIDS": str(tmp_path / "pids"),
    }


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("plant", "words"),
    [("wrong", "deviates from float64"), ("hang", "did not end within"), ("end", "its process ended with 7")],
)
def test_a_row_that_fails_is_recorded_and_the_next_one_runs(plant, words, planted, tmp_path):
    options = ["--tiny", "--only", "rows", "--rows", "rel_shift-conformer,t5-1024"]
    more = planted | {"RELPOS_TEST_PLANT": plant, "RELPOS_GPU_STEP_SECONDS": "8"}
    status, printed, record = run(tmp_path / "out", *options, **more)
    assert status == 1
    assert record["complete"]
    assert record["rows"]["rel_shift-conformer"]["status"] == "failed"
    assert words in record["rows"]["rel_shift-conformer"]["reason"]
    assert [f.split(":")[0] for f in record["failures"]] == ["rows rel_shift-conformer"]
    assert "FAILED rows rel_shift-conformer" in printed
    assert record["rows"]["t5-1024"]["status"] == "passed"


def gone(process):
    """Whether a process ends within seconds; one that nobody has waited for is a zombie."""
    for _ in range(100):
        try:
            if "\nState:\tZ" in Path(f"/proc/{process}/status").read_text(encoding="utf-8"):
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.simulator
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_signal_leaves_nothing_on_the_device(planted, tmp_path):
    more = planted | {"RELPOS_TEST_PLANT": "hang", "PYTHON": sys.executable, "NUMBA_ENABLE_CUDASIM": "1"}
    options = ["--tiny", "--only", "rows", "--rows", "t5-1024,rel_shift-conformer"]
    command = [str(SCRIPT), str(tmp_path / "out"), *options]
    with subprocess.Popen(command, env=os.environ | more, stdout=subprocess.PIPE, text=True) as process:
        written = tmp_path / "pids"
        for _ in range(600):
            if written.exists() and written.read_text(encoding="utf-8").endswith("\n"):
                break
            time.sleep(0.1)
        worker = int(written.read_text(encoding="utf-8"))
        assert not Path(f"/proc/{worker}/status").read_text(encoding="utf-8").count("\nState:\tZ")
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert gone(worker)
    (found,) = (tmp_path / "out").glob("*.json")
    record = json.loads(found.read_text(encoding="utf-8"))
    assert not record["complete"]
    assert record["rows"]["t5-1024"]["status"] == "passed"


@pytest.mark.simulator
def test_errors_that_the_sanitizer_finds_fail_the_run(planted, tmp_path):
    options = ["--tiny", "--only", "memcheck,racecheck"]
    status, _, record = run(tmp_path / "out", *options, RELPOS_GPU_STEP_SECONDS="3", **planted)
    assert status == 1
    assert "ended with 99" in record["checks"]["memcheck"]["reason"]
    assert "Invalid __global__ read" in record["checks"]["memcheck"]["reason"]
    assert "did not end within 3 s" in record["checks"]["racecheck"]["reason"]
    assert len(record["failures"]) == 2


@pytest.mark.simulator
def test_tests_that_fail_or_take_too_long_fail_the_run(planted, tmp_path):
    more = planted | {"RELPOS_TEST_PLANT": "wrong"}
    status, _, record = run(tmp_path / "out", "--tiny", "--only", "tests", **more)
    assert status == 1
    assert any("test_rel_shift" in name for name in record["checks"]["tests"]["failures"])
    status, _, record = run(tmp_path / "late", "--tiny", "--only", "tests", RELPOS_GPU_STEP_SECONDS="0.2")
    assert status == 1
    assert "did not end in time" in record["checks"]["tests"]["reason"]


@pytest.mark.simulator
def test_without_a_gpu_the_script_fails_in_the_drivers_words(tmp_path):
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")
    status, printed, record = run(tmp_path / "out", simulator=False)
    assert status == 2
    assert record is None
    reason = rp.backend.available()[1]["cuda"]
    assert f"nothing can be measured: {reason}" in printed


@pytest.mark.simulator
def test_a_required_gpu_turns_skips_into_failures():
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "many_rows or memory"]
    command.append(str(ROOT / "tests" / "gpu"))
    outcomes = []
    for value in ("", "required"):
        environment = os.environ | {"RELPOS_GPU": value}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        outcomes.append(done.returncode)
        assert "finds no usable GPU" in done.stdout
    assert outcomes == [0, 1]


@pytest.mark.simulator
def test_the_simulator_may_not_write_where_pages_read(tmp_path):
    before = sorted((BENCH / "gpu").glob("*.json"))
    environment = os.environ | {"PYTHON": sys.executable, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [str(SCRIPT), str(BENCH / "gpu"), "--tiny", "--only", "ceilings"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pages read this one" in done.stderr
    assert sorted((BENCH / "gpu").glob("*.json")) == before
    status, printed, record = run(tmp_path / "out")
    assert (status, record) == (2, None)
    assert "--tiny: needed in the simulator" in printed


def test_unknown_names_are_refused(tmp_path):
    for wrong in (["--only", "magic"], ["--rows", "magic"]):
        status, printed, record = run(tmp_path / "out", "--tiny", *wrong)
        assert (status, record) == (2, None)
        assert f"{wrong[0]}: there is no 'magic'" in printed


# The page

ROW = {
    "task": "attention",
    "words": "T5 bias",
    "shape": [4, 16, 2048, 2048, 64],
    "dtype": "float32",
    "status": "passed",
    "simulated": False,
    "operands": "torch tensors",
    "error": 3e-7,
    "ms_median": 2.5,
    "ms_min": 2.25,
    "tflops": 27.5,
    "gbs": 107.4,
}


def synthetic(name, current, **more):
    """A record as a GPU would leave it, of one row in full and one that failed."""
    measured = {"status": "measured", "flags": {}, "note": "", "error": 2e-7, "ms_median": 3.0, "ms_min": 2.9}
    baselines = {"torch sdpa": measured | {"ratio": 1.2}, "torch flex": {"status": "missing", "reason": "no compiler"}}
    goals = [{"words": "as fast", "at_least": 1.0, "against": "torch sdpa", "found": 1.2, "met": True}]
    goals.append({"words": "fast", "at_least": 30.0, "against": "", "found": 27.5, "met": False})
    shift = ROW | {
        "task": "rel_shift",
        "status": "failed",
        "reason": "a ` | <bar>\n{{ x }}",
        "kernels": current,
        "goals": [],
    }
    return {
        "format": 1,
        "date": "2026-01-02",
        "simulated": False,
        "tiny": False,
        "complete": True,
        "device": {"name": name},
        "driver": {"cuda": "13.0", "smi": {"gpus": [{"driver_version": "580.1"}]}},
        "cuda": "13.0",
        "versions": {"numba-cuda": "0.30.4", "torch": None},
        "commit": {"id": "f" * 40},
        "kernels": current,
        "checks": {
            "tests": {"status": "passed", "passed": 90, "failed": 0, "skipped": 1},
            "memcheck": {"status": "missing", "reason": "not there"},
        },
        "repeat": {"t5-1024": {"status": "passed"}, "shaw": {"status": "failed", "reason": "differ"}},
        "ceilings": {"copy": {"status": "passed", "numba.cuda": {"gbs": 2950.0}, "seconds": 1.0}},
        "rows": {
            "t5-2048": ROW | {"kernels": current, "baselines": baselines, "goals": goals},
            "rel_shift-conformer": shift,
        },
        "failures": [],
    } | more


def put(folder, name, record):
    (folder / name).write_text(json.dumps(record), encoding="utf-8")


def test_page_of_two_devices_fresh_and_stale(tmp_path):
    page = importlib.import_module("gpu.page")
    put(tmp_path, "nvidia-h100-2026-01-02.json", synthetic("NVIDIA H100", page.kernel_hash()))
    put(tmp_path, "nvidia-h200-2026-01-02.json", synthetic("NVIDIA H200", "0123456789abcdef"))
    first, second = page.figures(tmp_path).split("### NVIDIA H200")
    assert first.startswith("### NVIDIA H100")
    for part in (first, second):
        # One table per task and device: nothing of the other one is in it.
        assert part.count("| median ms (best) |") == 2
        assert "4 × 16 × 2048 × 2048 × 64 | float32 | 2.5 (2.25) | 27.5 | 107 | 3.0e-07" in part
        assert "torch sdpa 1.20× (3 ms); torch flex missing" in part
        assert "≥ 1× torch sdpa: reached; ≥ 30 TFLOP/s: not reached" in part
        assert "is missing: `no compiler`" in part
        assert "failed: `a ' | <bar> (( x ))`" in part
        assert "tests: passed, 90 passed, 0 failed, 1 skipped" in part
        assert "bit by bit: not shaw" in part
        assert "2950 GB/s" in part
        assert "numba-cuda 0.30.4" in part
        assert "torch None" not in part
    assert "stale" not in first
    assert "| t5-2048 (stale) |" in second
    assert "changed to what they are now" in second
    assert "H200" not in first
    assert "H100" not in second


def test_page_shows_the_latest_record_of_a_device(tmp_path):
    page = importlib.import_module("gpu.page")
    for name, date, median in (
        ("gpu-2026-01-02", "2026-01-02", 5.5),
        ("gpu-2026-01-03", "2026-01-03", 6.5),
        ("gpu-2026-01-03-2", "2026-01-03", 7.5),
    ):
        record = synthetic("GPU", page.kernel_hash(), date=date)
        record["rows"]["t5-2048"]["ms_median"] = median
        put(tmp_path, f"{name}.json", record)
    found = page.figures(tmp_path)
    assert found.count("### ") == 1
    assert "7.5 (2.25)" in found
    assert "5.5" not in found


def test_page_without_records_says_so(tmp_path):
    page = importlib.import_module("gpu.page")
    for name in ("simulated", "tiny"):
        put(tmp_path, f"{name}.json", synthetic("GPU", page.kernel_hash(), **{name: True}))
    found = page.figures(tmp_path)
    assert "No figure measured on a GPU exists yet" in found
    assert "run_all.sh" in found
    assert "2.5" not in found
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a record of format 1"):
        page.figures(tmp_path)


def test_kernel_hash_changes_with_any_source(tmp_path):
    page = importlib.import_module("gpu.page")
    (tmp_path / "a.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("", encoding="utf-8")
    first = page.kernel_hash(tmp_path)
    assert page.kernel_hash(tmp_path) == first
    (tmp_path / "b.py").write_text("y = 1\n", encoding="utf-8")
    assert page.kernel_hash(tmp_path) != first


def test_records_in_the_repository_are_of_devices():
    page = importlib.import_module("gpu.page")
    for path in (BENCH / "gpu").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert not record["simulated"]
        assert not record["tiny"]
    text = (ROOT / "docs" / "backends" / "cuda.md").read_text(encoding="utf-8")
    assert all("{{ " + name + " }}" in text for name in page.sections())


def test_goals_of_the_rows():
    rows = importlib.import_module("gpu.rows")
    for row in rows.ROWS:
        for goal in row.goals:
            assert bool(goal.against) != bool(goal.figure)
            assert not goal.against or goal.against in row.baselines
        assert set(row.baselines) <= rows.WORDS.keys()
    assert {g.at_least for r in rows.ROWS if r.task == "attention" for g in r.goals} == {1.0, 1.2, 3.0, 30.0, 150.0}
    assert {g.at_least for r in rows.ROWS if r.task == "backward" for g in r.goals} == {3.0}
    assert {g.at_least for r in rows.ROWS if r.task == "rel_shift" for g in r.goals} == {0.85}


def test_programs_import_without_numba_and_torch():
    code = (
        "import sys\n"
        "sys.modules['numba'] = sys.modules['torch'] = None\n"
        "import benchmarks.cuda\n"
        "from gpu import checks, device, measure, ours, page, rows, shard, with_torch, ceilings, worker, small\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def asv_cases():
    return [("Attention", "A"), ("Backward", "A"), ("RelShift", "conformer")]


@pytest.mark.parametrize(("cls", "value"), asv_cases())
def test_asv_skips_without_a_gpu(cls, value):
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")
    module = importlib.import_module("benchmarks.cuda")
    with pytest.raises(NotImplementedError, match="finds no usable GPU"):
        getattr(module, cls)().setup(value)


SMALL_ASV = """
import numpy as np
import benchmarks.cuda as b
try:
    b.Attention().setup("A")
except NotImplementedError as error:
    print(error)
b.needs_gpu = lambda: None
b.OnDevice.place = lambda self, *arrays: (setattr(self, "cuda", __import__("numba").cuda), list(arrays))[1]
from benchmarks.shapes import small
b.case = small
one = b.Attention()
one.setup("A")
assert one.case.error(one.time_attention("A")) < 1e-5
b.products = lambda variant: np.ones((1, 4, 7), np.float32)
two = b.RelShift()
two.setup("conformer")
assert two.time_rel_shift("conformer").shape == (1, 4, 4)
__import__("numba.cuda.simulator.api").cuda.simulator.api.Event.elapsed_time = lambda start, end: 2.0
assert np.isclose(two.track_gb_per_s("conformer"), 2 * 4 * 4 * 4 / 2 / 1e6)
"""


@pytest.mark.simulator
def test_asv_class_in_the_simulator():
    """With NumPy arrays in place of the device's, which the simulator does not have."""
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SMALL_ASV], cwd=BENCH, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the simulator's times mean nothing" in done.stdout


class Events:
    """What numba.cuda offers for timing, on a device whose n-th call takes n ms."""

    def __init__(self):
        self.said = []

    def event(self):
        return Event(self.said)

    def synchronize(self):
        self.said.append("synchronize")


class Event:
    def __init__(self, said):
        self.said, self.at = said, None

    def record(self):
        self.at = sum(n for n in self.said if isinstance(n, int))
        self.said.append("record")

    def elapsed_time(self, end):
        assert self.said[-1] == "synchronize"
        return end.at - self.at


def test_times_are_those_between_events(monkeypatch):
    device = importlib.import_module("gpu.device")
    stub = Events()
    monkeypatch.setattr(device, "cuda", lambda: stub)
    monkeypatch.setattr(device, "simulated", lambda: False)
    calls = [lambda n=n: stub.said.append(n) for n in (1, 2, 3)]
    assert device.times_ms(calls) == [1.0, 2.0, 3.0]
    assert stub.said == ["record", 1, "record", "record", 2, "record", "record", 3, "record", "synchronize"]


def test_sets_of_operands_do_not_fit_the_cache(monkeypatch):
    device, ours = importlib.import_module("gpu.device"), importlib.import_module("gpu.ours")
    stub = SimpleNamespace(get_current_device=lambda: SimpleNamespace(L2_CACHE_SIZE=50 << 20))
    monkeypatch.setattr(device, "cuda", lambda: stub)
    monkeypatch.setattr(device, "simulated", lambda: False)
    for amount in (4 << 20, 40 << 20, 400 << 20):
        count = ours.sets_for(amount)
        assert count >= 2
        # When a set's turn comes again, others of twice the cache's size have passed.
        assert (count - 1) * amount >= 2 * 50 << 20
    assert ours.sets_for(1) == 48


def test_arrays_that_a_device_would_refuse_are_a_failure(monkeypatch):
    device, ours = importlib.import_module("gpu.device"), importlib.import_module("gpu.ours")
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(device, "upload", lambda x: x)
    for answer, words in ((lambda *a, **k: a[0], "a NumPy array"), (lambda *a, **k: 1 / 0, "ZeroDivisionError")):
        monkeypatch.setattr(rp, "attention", answer)
        ours.refusal.cache_clear()
        assert words in ours.refusal()
        x = ours.np.ones(3)
        assert ours.operands(x) == ([x], "NumPy arrays, copied to the device and back")
    monkeypatch.setattr(rp, "attention", lambda *a, **k: object())
    ours.refusal.cache_clear()
    assert ours.refusal() == ""
    monkeypatch.setattr(device, "torch_on_device", lambda: (None, "not there"))
    assert ours.operands(x)[1] == "numba.cuda arrays"
    ours.refusal.cache_clear()


def test_results_of_any_library_come_to_the_host():
    device = importlib.import_module("gpu.device")
    bits = device.np.array([0x3F80, 0x4000], device.np.uint16)
    numba_like = SimpleNamespace(copy_to_host=lambda: bits)
    assert device.download(numba_like).tolist() == [1.0, 2.0]
    assert device.download(bits).tolist() == [1.0, 2.0]
    half = SimpleNamespace(copy_to_host=lambda: device.np.array([0.5], device.np.float16))
    assert device.download(half).dtype == "float32"
