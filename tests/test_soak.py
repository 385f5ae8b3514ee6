"""The soak itself: some of every kind of case pass, and it notices wrong answers, lost bits and leaks."""

import json
import mmap
import os
import signal
import time
from collections import Counter

import numpy as np
import pytest

import relpos_np as rp
from tests import soak
from tests.every import ABSOLUTE, ATTENTION
from tests.soaking import kinds, memory, modules, surroundings
from tests.soaking.kinds import Report


def first_of(kind, seed=0):
    """The number of the first case of a kind."""
    return next(n for n in range(1000) if soak.draw(seed, n)[0] is kind)


@pytest.mark.parametrize("kind", [kind for _, kind in soak.KINDS], ids=lambda kind: kind.__name__)
def test_a_case_of_every_kind_is_right(kind):
    name, report = soak.run(0, first_of(kind))
    assert name == kind.__name__
    assert report.where
    assert not report.problems
    assert report.calls > 0


def test_cases_are_the_same_again():
    for number in range(6):
        a, b = (soak.run(3, number)[1] for _ in range(2))
        assert (a.where, a.calls) == (b.where, b.calls)
    assert soak.draw(3, 1)[2].random() != soak.draw(4, 1)[2].random()


def test_one_case_is_repeated_and_described(capsys):
    number = first_of(kinds.forward)
    assert soak.main(["--case", str(number)]) == 0
    out = capsys.readouterr().out
    assert f"case {number} of seed 0: forward" in out
    assert "times the tolerance" in out


def test_every_scheme_and_edge_is_drawn():
    """Calls that are drawn, but not run."""
    assert {name for name, _ in ATTENTION + ABSOLUTE} == set(rp.SCHEMES)
    seen = Counter()
    for number in range(150):
        rng = np.random.default_rng([9, number])
        one = kinds.calls.changed(rng, kinds.calls.plain_example(rng, [("t5", None), ("shaw", None)]))
        seen[one.edge] += 1
        seen[str(one.q.dtype)] += 1
    edges = {"own", "mask", "lengths", "causal", "window", "offset", "scale", "excluded", "empty"}
    assert not (edges | {"float16", "bfloat16", "float32", "float64"}) - set(seen)


def test_a_short_run_makes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "_CROWDS", (2,))
    out = tmp_path / "record.json"
    code = soak.main(["--minutes", "0.02", "--seed", "5", "--out", str(out)])
    record = json.loads(out.read_text())
    assert code == (0 if record["ok"] else 1)
    assert record["mismatches"] == 0
    assert record["cases"]["all"] > 0
    assert {"seed", "seconds", "calls", "processor", "versions", "resident_memory"} <= set(record)
    assert "cases" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- it can fail


def wrong(monkeypatch, change):
    """Replace rp.attention by one whose results are changed, on compiled kernels only."""
    right = rp.attention

    def attention(*operands, backend=None, **options):
        found = right(*operands, backend=backend, **options)
        return change(found) if backend == "numba" else found

    monkeypatch.setattr(rp, "attention", attention)


def on_numba(monkeypatch, kind, count=12):
    """Problems that cases of a kind on the kernels report."""
    monkeypatch.setattr(kinds, "BACKENDS", ("numba",))
    monkeypatch.setattr(surroundings, "BACKENDS", ("numba",))
    numbers = [n for n in range(1600) if soak.draw(0, n)[0] is kind][:count]
    return [problem for n in numbers for problem in soak.run(0, n)[1].problems]


def test_a_wrong_kernel_is_reported(monkeypatch):
    def off(found):
        out = found[0] if isinstance(found, tuple) else found
        out[...] = out * out.dtype.type(1.01)
        return found

    wrong(monkeypatch, off)
    assert any("times the tolerance" in problem for problem in on_numba(monkeypatch, kinds.forward))


def test_bits_that_change_are_reported(monkeypatch):
    calls = iter(range(10**6))

    def flicker(found):
        out = found[0] if isinstance(found, tuple) else found
        out[...] = np.nextafter(out, out.dtype.type(next(calls) % 2)) if out.dtype.itemsize > 2 else out
        return found

    wrong(monkeypatch, flicker)
    assert any("other bits" in problem for problem in on_numba(monkeypatch, kinds.forward))


def test_an_accepted_mistake_is_reported(monkeypatch):
    monkeypatch.setattr(kinds, "BAD", {"nothing": (lambda: None,)})
    assert any("accepted" in problem for problem in on_numba(monkeypatch, kinds.refused))


def test_a_swallowed_interrupt_is_reported(monkeypatch):
    right = rp.attention

    def attention(*operands, **options):
        try:
            return right(*operands, **options)
        except KeyboardInterrupt:
            return right(*operands, **options)

    monkeypatch.setattr(rp, "attention", attention)
    assert any("swallowed" in problem for problem in on_numba(monkeypatch, kinds.interrupted))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_with_other_bits_is_reported(monkeypatch):
    parent, right = os.getpid(), rp.attention

    def attention(*operands, **options):
        found = right(*operands, **options)
        if os.getpid() != parent:
            found[1][...] += 1
        return found

    monkeypatch.setattr(rp, "attention", attention)
    assert any("the child's status was 3, not 0" in problem for problem in on_numba(monkeypatch, surroundings.forked))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_hangs_is_reported(monkeypatch):
    monkeypatch.setattr(surroundings, "_child", lambda *_: time.sleep(100))
    monkeypatch.setattr(surroundings, "_HANGS_SECONDS", 0.1)
    monkeypatch.setattr(surroundings, "_FATES", ("ends",))
    found = on_numba(monkeypatch, surroundings.forked, 1)
    assert found == ["the child's status was None, not 0"]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to threads")
def test_bits_that_change_under_signals_are_reported(monkeypatch):
    surroundings.listen()
    right = rp.attention

    def attention(*operands, **options):
        out, lse = right(*operands, **options)
        return out, lse + surroundings.received()

    monkeypatch.setattr(rp, "attention", attention)
    assert any("other bits under signals" in problem for problem in on_numba(monkeypatch, surroundings.signalled))


def test_a_reader_that_trips_over_a_file_is_reported(monkeypatch):
    def careless(path):
        raise KeyError(path.name)

    for name in surroundings.READERS:
        monkeypatch.setitem(surroundings.READERS, name, careless)
    assert any("KeyError" in problem for problem in on_numba(monkeypatch, surroundings.hostile, 3))


@pytest.mark.parametrize("name", surroundings.READERS)
def test_every_reader_reads_some_files_and_refuses_others(name, tmp_path):
    """That none were read would mean that little of a reader ran."""
    seen = Counter()
    path = tmp_path / f"file.{name}"
    for number in range(60):
        path.write_bytes(surroundings.tampered(np.random.default_rng(number), name))
        try:
            with np.errstate(all="ignore"):
                surroundings.READERS[name](path)
        except rp.RelposError:
            seen["refused"] += 1
        else:
            seen["read"] += 1
    assert seen["read"] > 2
    assert seen["refused"] > 10


def test_mismatches_and_drift_decide_the_exit_code(monkeypatch, tmp_path):
    def lost(rng, report):
        report.where = "nowhere"
        report.judge("numba", "float32", 2.0)

    monkeypatch.setattr(soak, "KINDS", ((1, lost),))
    monkeypatch.setattr(soak, "_SHARES", [1])
    out = tmp_path / "record.json"
    assert soak.main(["--minutes", "0.02", "--out", str(out)]) == 1
    record = json.loads(out.read_text())
    assert record["mismatches"] == record["cases"]["lost"] > 0
    assert record["problems"][0]["where"] == "nowhere"
    assert record["error_in_units_of_the_tolerance"]["numba"]["float32"]["error"] == 2.0
    found = soak.Soak(0)
    found.samples = [200.0 + 0.5 * n for n in range(100)]
    assert not found.ok
    found.samples = [200.0] * 100
    assert found.ok


# ---------------------------------------------------------------------------------------------- memory


def noise(count, spread, seed=0):
    return np.random.default_rng(seed).uniform(0, spread, count)


@pytest.mark.parametrize(
    ("what", "series", "leaks"),
    [
        ("level", 200 + noise(200, 4.0), False),
        ("a warm-up", np.concatenate([np.linspace(100, 300, 50), 300 + noise(150, 4.0)]), False),
        ("single large arrays", 200 + 300 * (noise(200, 1.0) > 0.9), False),
        ("a level that falls", np.linspace(300, 250, 200), False),
        ("a leak of 12 MiB", 200 + np.linspace(0, 16, 200) + noise(200, 1.0), True),
        ("a leak of steps", 200 + 4.0 * (np.arange(200) // 30) + noise(200, 1.0), True),
        ("a leak behind large arrays", 200 + np.linspace(0, 20, 200) + 300 * (noise(200, 1.0) > 0.9), True),
    ],
)
def test_drift_of_series(what, series, leaks):
    assert (memory.drift_mib(list(series)) > memory.LIMIT_MIB) == leaks, what


def test_too_few_samples_say_nothing():
    assert memory.drift_mib([200.0] * (memory.FEWEST - 1)) is None
    assert memory.drift_mib([200.0] * memory.FEWEST) == 0.0


@pytest.mark.skipif(memory.resident_mib() is None, reason="the system does not say")
def test_a_leak_is_seen_and_freed_memory_is_not():
    """1 MiB per sample, written to, so that it is resident; mapped anew, where NumPy's may be what others freed."""
    kept = []

    def series(keep):
        found = []
        for _ in range(30):
            block = mmap.mmap(-1, 1 << 20)
            block.write(bytes(1 << 20))
            if keep:
                kept.append(block)
            del block
            found.append(memory.resident_mib())
        return memory.drift_mib(found)

    assert series(keep=False) < 2.0
    assert series(keep=True) > memory.LIMIT_MIB


def test_a_leak_in_the_library_is_seen(monkeypatch):
    """A cache without bound, as a server with ever new shapes would fill it."""
    kept, right = [], rp.attention

    def attention(*operands, **options):
        kept.append(np.ones(1 << 17))
        return right(*operands, **options)

    if memory.resident_mib() is None:
        pytest.skip("the system does not say")
    monkeypatch.setattr(rp, "attention", attention)
    monkeypatch.setattr(soak, "_ROUND", 1)
    monkeypatch.setattr(soak, "_CROWDS", (1, 2))
    monkeypatch.setattr(soak, "KINDS", ((1, kinds.refused),))
    monkeypatch.setattr(soak, "_SHARES", [1])
    found = soak.Soak(0)
    for _ in range(24):
        found.round(lambda: False)
        found.sample(0.0)
    assert found.drift > memory.LIMIT_MIB
    assert not found.ok


def test_layers_are_judged():
    report = Report()
    for n in range(8):
        modules.layer(np.random.default_rng(n), report)
    assert not report.problems
    assert max(error for _, _, error in report.errors) > 0
