"""What measures GPUs, in Numba's simulator: every row of its record, failures that it must notice, its page."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import relpos_np as rp

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "asv_bench"
SCRIPT = BENCH / "gpu.py"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def run(folder, *options, simulator=True, **more):
    """The script's exit status, what it printed, and its record if there is one."""
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": str(int(simulator))} | more
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
def test_every_row_is_there_and_right(tmp_path):
    gpu = importlib.import_module("gpu")
    status, printed, record = run(tmp_path, "--tiny", "--rounds", "1")
    assert status == 0, printed
    check(record, gpu.NAMES)


CHOICE = ["t5-2048-gradient", "t5-2048-float16", "conformer", "decode-16384"]


def test_a_choice_of_rows_and_their_page(tmp_path):
    status, printed, record = run(tmp_path, "--tiny", "--rounds", "2", "--rows", ",".join(CHOICE))
    assert status == 0, printed
    check(record, CHOICE)
    assert [line.split(":")[0] for line in printed.splitlines() if line.split(":")[0] in CHOICE] == CHOICE
    record["rows"]["conformer"]["calls"]["torch"] = {"status": "missing", "reason": "no compiler"}
    (tmp_path / "gpu.json").write_text(json.dumps(record), encoding="utf-8")
    report = importlib.import_module("report")
    page = report.sections(tmp_path)["figures_gpu"]
    assert page.startswith("Numba's simulator, ")
    for name in CHOICE:
        found = record["rows"][name]
        ours = found["calls"]["relpos_np"]
        times = " | ".join([name, report.sizes(found["shape"]), found["storage"], "relpos_np", ""])
        assert f"| {times}{report.brief(ours['median_ms'])} ({report.brief(ours['best_ms'])}) |" in page
    assert f"{record['rows']['conformer']['calls']['copy']['times_ours']:.2f}× |" in page
    assert "- conformer, torch: missing, `no compiler`" in page


def test_the_recorded_figures_are_of_a_device():
    """A record of the simulator or of small shapes is none for the page."""
    path = BENCH / "recorded" / "gpu.json"
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert not record["simulated"]
        assert not record["tiny"]


PLANTED = """
import os
if os.environ.get("RELPOS_TEST_PLANT"):
    from relpos_np.kernels._cuda.forward_pass import shift
    whole = shift.rel_shift

    def spoiled(x, out, *rest, **more):
        if os.environ["RELPOS_TEST_PLANT"] == "fails":
            raise RuntimeError("an illegal\\naccess")
        found = whole(x, out, *rest, **more)
        out[..., -1] += 1
        return found

    shift.rel_shift = spoiled
"""


@pytest.mark.parametrize(
    ("plant", "verdict", "words"),
    [("wrong", "wrong", "deviates from float64 by"), ("fails", "failed", "RuntimeError: an illegal access")],
)
def test_a_call_that_is_wrong_is_not_timed_and_the_next_row_is(plant, verdict, words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PLANTED, encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    options = ["--tiny", "--rounds", "1", "--rows", "conformer,decode-16384"]
    status, printed, record = run(tmp_path, *options, PYTHONPATH=paths, RELPOS_TEST_PLANT=plant)
    assert status == 1
    assert record["complete"]
    calls = record["rows"]["conformer"]["calls"]
    assert calls["relpos_np"]["status"] == verdict
    assert words in calls["relpos_np"]["reason"]
    assert words in printed
    assert "median_ms" not in calls["relpos_np"]
    # Others are timed, with nothing to be compared with.
    assert calls["copy"]["median_ms"] > 0
    assert "times_ours" not in calls["copy"]
    assert record["rows"]["decode-16384"]["calls"]["relpos_np"]["median_ms"] > 0


def test_without_rounds_results_are_only_checked(tmp_path):
    status, printed, record = run(tmp_path, "--tiny", "--rounds", "0", "--rows", "conformer")
    assert status == 0, printed
    assert record["rows"]["conformer"]["calls"]["relpos_np"] == {"status": "right", "error": 0.0, "allowed": 0.0}


def test_without_a_gpu_the_script_ends_in_the_drivers_words(tmp_path):
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")
    status, printed, record = run(tmp_path, simulator=False)
    assert (status, record) == (2, None)
    reason = rp.backend.available()[1]["cuda"]
    assert f"nothing can be measured: {reason}" in printed


def test_what_cannot_be_measured_is_refused(tmp_path):
    for options, words in (
        (["--tiny", "--rows", "magic"], "--rows: there is no row 'magic'"),
        ([], "--tiny is needed in the simulator"),
    ):
        status, printed, record = run(tmp_path, *options)
        assert (status, record) == (2, None)
        assert words in printed


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
@pytest.mark.skipif(os.name == "nt", reason="the script is for bash")
def test_all_of_it_ends_where_a_test_fails():
    """Without a GPU, that is: nothing is timed where the tests did not pass."""
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")
    script = ROOT / "tests" / "gpu" / "run_all.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([script, "--tiny"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "finds no usable GPU" in done.stdout
    assert "nothing can be measured" not in done.stderr


def test_programs_import_without_numba_and_torch():
    code = "import sys; sys.modules['numba'] = sys.modules['torch'] = None; import benchmarks.cuda, gpu"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# asv's benchmarks of a GPU


@pytest.mark.parametrize(("cls", "value"), [("Attention", "A"), ("Backward", "A"), ("RelShift", "conformer")])
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


# What only a device shows


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


@pytest.fixture
def on_device(monkeypatch):
    """The script, as if it ran on a device of so much cache, and what its events note."""
    gpu, events = importlib.import_module("gpu"), Events()
    events.get_current_device = lambda: SimpleNamespace(L2_CACHE_SIZE=50 << 20)
    monkeypatch.setattr(gpu, "cuda", lambda: events)
    monkeypatch.setattr(gpu, "simulated", lambda: False)
    return gpu, events.said


def test_times_are_those_between_events(on_device):
    gpu, said = on_device
    assert gpu.times_ms([lambda n=n: said.append(n) for n in (1, 2, 3)]) == [1.0, 2.0, 3.0]
    assert said == ["record", 1, "record", "record", 2, "record", "record", 3, "record", "synchronize"]


def test_sets_of_operands_do_not_fit_the_cache(on_device):
    gpu, _ = on_device
    for amount in (4 << 20, 40 << 20, 400 << 20):
        count = gpu.sets_for(amount)
        assert count >= 2
        # When a set's turn comes again, others of twice the cache's size have passed.
        assert (count - 1) * amount >= 2 * 50 << 20
    assert gpu.sets_for(1) == 48


def test_calls_alternate_and_the_first_of_a_turn_is_not_counted(on_device):
    gpu, said = on_device
    calls = {"a": lambda: said.append(10), "b": lambda: said.append(20)}
    times = gpu.alternate(calls, rounds=3, seconds=0.02)
    # So many calls of each fill a turn: 2 of 10 ms, 1 of 20 ms.
    assert times == {"a": [[10.0, 10.0]] * 3, "b": [[20.0]] * 3}
    turns = [n for n in said if isinstance(n, int)][4:]
    assert turns == [10, 10, 10, 20, 20, 20, 20, 10, 10, 10, 10, 10, 10, 20, 20]


def test_results_of_any_library_come_to_the_host():
    gpu = importlib.import_module("gpu")
    bits = np.array([0x3F80, 0x4000], np.uint16)
    numba_like = SimpleNamespace(copy_to_host=lambda: bits)
    assert gpu.download(numba_like).tolist() == [1.0, 2.0]
    assert gpu.download(bits).tolist() == [1.0, 2.0]
    half = SimpleNamespace(copy_to_host=lambda: np.array([0.5], np.float16))
    assert gpu.download(half).dtype == "float32"
