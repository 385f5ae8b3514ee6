"""Hours of everything: ``python tests/soak.py --minutes N [--seed S] [--out record.json]``.

Random calls of every scheme and variant, of gradients and shifts, in every dtype and memory layout, with masks, faults,
interrupts and failed allocations, from several threads at once whose number changes, against the float64 reference;
amid them forks, whose children are interrupted or killed. Exit code 1 if one answer is
wrong, or memory drifts by more than 8 MiB.

Case N of seed S is the same whenever and wherever it runs: ``--seed S --case N`` repeats one, alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numba
import numpy as np
import threadpoolctl

import relpos_np as rp
from relpos_np.versions import collect_versions
from tests.soaking import kinds, memory, surroundings
from tests.soaking.kinds import Kind, Report

# Each kind and its share. Gradients take several times as long as the rest.
KINDS: tuple[tuple[int, Kind], ...] = (
    (50, kinds.forward),
    (14, kinds.gradient),
    (8, kinds.shift),
    (7, kinds.interrupted),
    (4, kinds.packed),
    (5, surroundings.forked),
)
_SHARES = list(itertools.accumulate(share for share, _ in KINDS))
# Threads of Python that work at once, a number for each round; cases per round and thread.
_CROWDS = (1, 2, 3, 8)
_ROUND = 6
# A round that takes so long hangs.
_HANGS_SECONDS = 900
# What goes wrong is described, but not a thousand times.
_MOST_PROBLEMS = 50


def draw(seed: int, number: int) -> tuple[Kind, int, np.random.Generator]:
    """The kind of a case, how many threads its kernels may use, and the source of all else in it."""
    rng = np.random.default_rng([seed, number])
    at = int(rng.integers(_SHARES[-1]))
    kind = next(kind for last, (_, kind) in zip(_SHARES, KINDS, strict=True) if at < last)
    return kind, int(rng.integers(1, numba.config.NUMBA_NUM_THREADS + 1)), rng


def run(seed: int, number: int) -> tuple[str, Report]:
    """Run one case."""
    kind, threads, rng = draw(seed, number)
    report, before = Report(), surroundings.shared()
    try:
        with rp.threads(threads, blas=False), np.errstate(all="raise", under="ignore"):
            kind(rng, report)
    except Exception:  # noqa: BLE001  (whatever it is, it should not have happened)
        report.problems.append(traceback.format_exc(limit=-4).strip())
    report.expect(surroundings.shared() == before, "the process is not as it was")
    return kind.__name__, report


@dataclass
class Soak:
    """What was found so far."""

    seed: int
    cases: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    worst: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    problems: list[dict[str, Any]] = field(default_factory=list)
    mismatches: int = 0
    rounds: int = 0
    crowds: Counter[int] = field(default_factory=Counter)
    samples: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def add(self, number: int, kind: str, report: Report) -> None:
        """Count a case."""
        with self._lock:
            self.cases[kind] += 1
            self.calls += report.calls
            for backend, dtype, error in report.errors:
                if error > self.worst.get((backend, dtype), (-1.0, 0))[0]:
                    self.worst[backend, dtype] = error, number
            if report.problems:
                self.mismatches += 1
                found = {"case": number, "kind": kind, "where": report.where, "problems": report.problems}
                if len(self.problems) < _MOST_PROBLEMS:
                    self.problems.append(found)
                note(f"MISMATCH in case {number} of seed {self.seed}: {kind}, {report.where}")
                for problem in report.problems:
                    note(f"    {problem}")

    def _work(self, stop: Callable[[], bool]) -> None:
        for _ in range(_ROUND):
            if stop():
                return
            number = next(self._numbers)
            self.add(number, *run(self.seed, number))

    def round(self, stop: Callable[[], bool]) -> None:
        """Some threads run some cases each; then memory is measured, when none of them is left."""
        count = _CROWDS[int(np.random.default_rng([self.seed, self.rounds, 0]).integers(len(_CROWDS)))]
        workers = [threading.Thread(target=self._work, args=(stop,)) for _ in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.rounds += 1
        self.crowds[count] += 1

    def sample(self, started: float) -> None:
        """Measure memory."""
        resident = memory.resident_mib()
        if resident is not None:
            self.samples.append(resident)
            self.times.append(time.monotonic() - started)

    def during(self, seconds: float) -> None:
        """Run for some time, and say once in a while how it goes."""
        started = time.monotonic()
        said = started
        # What there is by now, most of it Numba's, is not looked through again for every sample.
        frozen = gc.get_freeze_count()
        gc.freeze()
        while time.monotonic() < started + seconds:
            faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True, file=sys.__stderr__)
            self.round(lambda: time.monotonic() >= started + seconds)
            self.sample(started)
            if time.monotonic() > said + 20:
                said = time.monotonic()
                size = f"{self.samples[-1]:.0f} MiB" if self.samples else "memory unknown"
                note(f"{said - started:5.0f} s: {self.cases.total()} cases, {self.mismatches} wrong, {size}")
        if not frozen:
            gc.unfreeze()
        faulthandler.cancel_dump_traceback_later()

    @property
    def drift(self) -> float | None:
        """What memory drifted by."""
        return memory.drift_mib(self.samples)

    @property
    def ok(self) -> bool:
        """Whether all answers were right, and memory stayed."""
        return not self.mismatches and (self.drift is None or self.drift <= memory.LIMIT_MIB)

    def record(self, seconds: float) -> dict[str, Any]:
        """What is worth keeping."""
        errors: dict[str, dict[str, Any]] = defaultdict(dict)
        for (backend, dtype), (error, number) in sorted(self.worst.items()):
            errors[backend][dtype] = {"error": round(error, 4), "case": number}
        resident: dict[str, Any] = {"samples": len(self.samples), "limit_mib": memory.LIMIT_MIB, "drift_mib": None}
        if self.drift is not None:
            early, late = memory.levels(self.samples)
            resident |= {"drift_mib": round(self.drift, 2), "early_mib": round(early, 1), "late_mib": round(late, 1)}
            # A curve of some thirty points says more than two levels.
            step = -(-len(self.samples) // 32)
            curve = zip(self.times[::step], self.samples[::step], strict=True)
            resident["curve"] = [[round(at), round(size, 1)] for at, size in curve]
        versions = collect_versions()
        kept = ("relpos_np", "python", "numpy", "blas", "numba", "llvmlite", "scipy")
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "ok": self.ok,
            "seed": self.seed,
            "seconds": round(seconds),
            "cases": dict(sorted(self.cases.items())) | {"all": self.cases.total()},
            "calls": self.calls,
            "mismatches": self.mismatches,
            "problems": self.problems,
            "error_in_units_of_the_tolerance": errors,
            "resident_memory": resident,
            "python_threads_by_rounds": {str(count): times for count, times in sorted(self.crowds.items())},
            "kernel_threads": numba.config.NUMBA_NUM_THREADS,
            "processor": versions["processor"],
            "processors": versions["processors"],
            "kernels": {name: versions["kernels"][name] for name in ("vectors", "threading_layer")},
            "versions": {name: versions[name] for name in kept}
            | {name: metadata.version(name) for name in ("ml_dtypes",)},
        }


def note(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)


def one_case(seed: int, number: int) -> int:
    """Repeat one case, and say what it was."""
    kind, report = run(seed, number)
    print(f"case {number} of seed {seed}: {kind}, {draw(seed, number)[1]} threads: {report.where}")
    for backend, dtype, error in report.errors:
        print(f"    {backend}, {dtype}: {error:.3g} times the tolerance")
    for problem in report.problems:
        print(f"    WRONG: {problem}")
    return 1 if report.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run for some minutes, or one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long; default 3")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers; default 0")
    parser.add_argument("--case", type=int, metavar="N", help="repeat case N of the seed, alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the record; default stdout")
    args = parser.parse_args(argv)
    if args.case is not None:
        return one_case(args.seed, args.case)
    memory.keep_little()
    started = time.monotonic()
    for _ in rp.backend.kernels("numba").warm_up():
        pass
    note(f"kernels are ready after {time.monotonic() - started:.0f} s")
    soak = Soak(args.seed)
    started = time.monotonic()
    # A fork while OpenBLAS 0.3.31 multiplies on several threads stops them and the child for ever, as NumPy alone
    # shows; tests/faults/test_processes.py says what is promised.
    with threadpoolctl.threadpool_limits(1, "blas"):
        soak.during(60 * args.minutes)
    record = soak.record(time.monotonic() - started)
    text = json.dumps(record, indent=1) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    drift = "unknown" if soak.drift is None else f"{soak.drift:.1f} MiB"
    note(f"{soak.cases.total()} cases, {soak.calls} calls: {soak.mismatches} wrong; memory drifted by {drift}")
    return 0 if soak.ok else 1


if __name__ == "__main__":
    sys.exit(main())
