"""Rounds in which peers take turns, each in a process of its own.

In a turn one call is not timed, because others have used the caches meanwhile, and then as many are timed as fit.
Medians and minima are over all timed calls; a ratio is the median over rounds of the ratio within a round. Before
anything is timed, every peer's result is compared with float64.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

import relpos_np
from relpos_np._commands.peers import OURS, PEERS
from relpos_np._commands.peers.tasks import TASKS
from relpos_np.versions import processor, settings

# Between turns: threads that wait for work by spinning must have gone to sleep.
PAUSE = 0.03

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC")


class Process:
    """One peer's process."""

    def __init__(
        self,
        name: str,
        python: str,
        threads: int,
        modules: Sequence[str] = (),
        *,
        program: Sequence[str] = ("-m", "relpos_np._commands.peers.worker"),
    ) -> None:
        # The library that runs here is compared, installed or not.
        paths = [str(Path(relpos_np.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        pinned = dict.fromkeys(_COUNTS, str(threads)) | {"PYTHONPATH": os.pathsep.join(paths)}
        self.name = name
        # -P: a file in the folder of the call is nobody's module.
        self.process = subprocess.Popen(
            [python, "-P", *program, name, str(threads), *modules],
            env=os.environ | pinned,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, **request: Any) -> Any:
        """One request, one answer; an answer that never comes is an error."""
        sent, answers = self.process.stdin, self.process.stdout
        assert sent is not None
        assert answers is not None
        try:
            sent.write(json.dumps({"do": what, **request}) + "\n")
            sent.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildProcessError(f"{self.name}: its process ended with code {self.process.wait()} during {what!r}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, in the middle of a call too; it has nothing to lose."""
        self.process.kill()
        # What was not taken from the pipe cannot be written any more when it is closed.
        with suppress(BrokenPipeError), self.process:
            pass
        self.process.wait()


def prepare(processes: Mapping[str, Process], task: str, shape: str, folder: str) -> dict[str, Any]:
    """Have all peers ready a case, ours before the limit, which is to take as long; return their answers."""
    exact = str(Path(folder) / f"{task}-{shape}.npz")
    np.savez(exact, **TASKS[task].exact(TASKS[task].subject(shape)))  # type: ignore[arg-type]
    ready, seconds = {}, 0.01
    for name, process in processes.items():
        if task not in PEERS[name].tasks:
            continue
        ready[name] = process.ask("prepare", task=task, shape=shape, exact=exact, seconds=seconds)
        if name == OURS and "unavailable" not in ready[name]:
            seconds = min(process.ask("turn", seconds=0.05, most=20)["seconds"])
        time.sleep(PAUSE)
    return ready


def alternate(
    processes: Mapping[str, Process], names: Sequence[str], rounds: int, seconds: float
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Every peer's times, a list for each round, and the most processor time one used while it was not its turn."""
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    idle = dict.fromkeys(names, 0.0)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            past = times[name]
            # Calls of seconds need no second one to fill the caches.
            slow = past and min(map(min, past)) > 1
            answer = processes[name].ask("turn", seconds=seconds, most=1 if slow else 50)
            past.append(answer["seconds"])
            if turn:
                idle[name] = max(idle[name], answer["idle_cpu"])
            time.sleep(PAUSE)
    return times, idle


def figures(
    times: Sequence[Sequence[float]],
    ours: Sequence[Sequence[float]] | None,
    limit: Sequence[float] | None,
    operations: float | None,
) -> dict[str, Any]:
    """Of one peer: medians, minima, ratios within rounds."""
    flat = [t for turn in times for t in turn]
    found: dict[str, Any] = {
        "median_ms": statistics.median(flat) * 1e3,
        "best_ms": min(flat) * 1e3,
        "calls": len(flat),
    }
    medians = [statistics.median(turn) for turn in times]
    if ours is not None:
        found["times_ours"] = statistics.median(
            theirs / statistics.median(own) for theirs, own in zip(medians, ours, strict=True)
        )
    if operations:
        found["speed"] = operations / statistics.median(flat)
        if limit:
            speeds = [operations / t for t in medians]
            found["fraction_of_limit"] = statistics.median(s / x for s, x in zip(speeds, limit, strict=True))
            found["fraction_of_limit_best"] = operations / min(flat) / max(limit)
    return found


def compare(
    processes: Mapping[str, Process], task: str, shape: str, rounds: int, seconds: float, folder: str
) -> dict[str, Any]:
    """One task at one shape."""
    ready = prepare(processes, task, shape, folder)
    record = {"peers": {}, **TASKS[task].about(TASKS[task].subject(shape))}
    operations = record.get("amount")
    names = [name for name, answer in ready.items() if "unavailable" not in answer]
    times, idle = alternate(processes, names, rounds, seconds) if names else ({}, {})
    limit = None
    if "limit" in times:
        amount = ready["limit"]["amount"]
        limit = [amount / statistics.median(turn) for turn in times["limit"]]
        flat = [t for turn in times.pop("limit") for t in turn]
        record["limit"] = {
            "of": ready["limit"]["note"],
            "median": amount / statistics.median(flat),
            "best": amount / min(flat),
        }
    for name, answer in ready.items():
        if name == "limit":
            continue
        if name in times:
            found = figures(times[name], times.get(OURS), limit, operations)
            found |= {"error": answer["error"], "note": answer["note"], "idle_cpu_s": idle[name]}
            record["peers"][name] = found
        else:
            record["peers"][name] = answer
    return record


def load() -> list[float] | None:
    """Programs that want to run, on average over 1, 5 and 15 minutes; None where the system does not say."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else None


def run(
    names: Sequence[str],
    jobs: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    seconds: float,
    threads: int,
    interpreter: Callable[[str], str] | None = None,
    modules: Sequence[str] = (),
    done: Callable[[str, str, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Compare these peers in the shapes of each task, and call `done` after each; return the record of all.

    `interpreter` says for a peer's name which Python runs it, by default this one. `modules` add tasks and peers.
    """
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": threads,
        "environment": settings(),
        "rounds": rounds,
        "load_before": load(),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = {}
        for name in sorted(names, key=lambda name: name != OURS):  # ours first: the limit is run for as long
            process = Process(name, interpreter(name) if interpreter else sys.executable, threads, modules)
            processes[name] = stack.enter_context(closing(process))
        record["versions"] = {name: process.ask("versions") for name, process in processes.items()}
        record["words"] = {name: PEERS[name].words for name in processes}
        for task, shapes in jobs.items():
            record[task] = {}
            for shape in shapes:
                record[task][shape] = compare(processes, task, shape, rounds, seconds, folder)
                if done:
                    done(task, shape, record[task][shape])
    record["load_after"] = load()
    return record
