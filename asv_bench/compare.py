"""Compare with other libraries: ``python asv_bench/compare.py --backward --rel-shift --out FILE``.

Each peer runs in a process of its own, all with the same number of threads. Peers take turns: in a turn one call is not
timed, because others have used the caches meanwhile, and then as many are timed as fit. Medians and minima are
over all timed calls; a ratio is the median over rounds of the ratio within a round. Before anything is timed, every
peer's result is compared with float64. A peer that is not installed is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
# The library beside this file is compared, installed or not; the peers' processes get the same paths.
PATHS = [str(HERE), str(HERE.parent)]
sys.path[:0] = [path for path in PATHS if path not in sys.path]

from benchmarks.rel_shift import SHIFTED  # noqa: E402
from benchmarks.shapes import SHAPES, SMALL, case  # noqa: E402
from peers import PEERS  # noqa: E402
from report import OURS, peers  # noqa: E402

# Between turns: threads that wait for work by spinning must have gone to sleep.
PAUSE = 0.03


class Process:
    """One peer's process."""

    def __init__(self, name, python, threads):
        count = str(threads)
        pinned = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "NPROC"), count
        )
        paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.name = name
        self.process = subprocess.Popen(
            [python, "-m", "peers.worker", name, count],
            env=os.environ | pinned | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what, **request):
        """One request, one answer; an answer that never comes is an error."""
        try:
            self.process.stdin.write(json.dumps({"do": what, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with code {self.process.wait()} during {what!r}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def prepare(processes, task, shape, folder):
    """Have all peers ready a case, ours before the limit, which is to take as long; return their answers."""
    exact = None
    if task != "rel_shift":
        exact = str(Path(folder) / f"{task}-{shape}.npz")
        subject = case(shape)
        answers = subject.exact_gradients() if task == "backward" else {"out": subject.exact()}
        np.savez(exact, **answers)
    ready, seconds = {}, 0.01
    for name, process in processes.items():
        if task not in PEERS[name].tasks:
            continue
        ready[name] = process.ask("prepare", task=task, shape=shape, exact=exact, seconds=seconds)
        if name == OURS and "unavailable" not in ready[name]:
            seconds = min(process.ask("turn", seconds=0.05, most=20)["seconds"])
        time.sleep(PAUSE)
    return ready


def alternate(processes, names, rounds, seconds):
    """Every peer's times, a list for each round, and the most processor time one used while it was not its turn."""
    times = {name: [] for name in names}
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


def figures(times, ours, limit, operations):
    """Of one peer: medians, minima, ratios within rounds."""
    flat = [t for turn in times for t in turn]
    found = {"median_ms": statistics.median(flat) * 1e3, "best_ms": min(flat) * 1e3, "calls": len(flat)}
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


def compare(processes, task, shape, rounds, seconds, folder):
    """One task at one shape."""
    ready = prepare(processes, task, shape, folder)
    record = {"peers": {}}
    operations = None
    if task == "rel_shift":
        record["shape"] = list(SHIFTED)
    else:
        subject = case(shape)
        s = subject.shape
        record |= {"words": s.words, "storage": s.storage, "shape": [s.batch, s.heads, s.q_len, s.k_len, s.head_dim]}
        operations = subject.operations if task == "attention" else subject.backward_operations
        if task == "attention" and s.q_len == 1:
            # What must be read of memory, not arithmetic, limits a single query.
            operations = subject.k.nbytes + subject.v.nbytes
        record["amount"] = operations
    names = [name for name, answer in ready.items() if "unavailable" not in answer]
    times, idle = alternate(processes, names, rounds, seconds)
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


def interpreter(name, given):
    """The interpreter of a peer: of the longest given name that it begins with."""
    fitting = [n for n in given if name == n or name.startswith(f"{n} ")]
    return given[max(fitting, key=len)] if fitting else sys.executable


def run(arguments, given):
    """All comparisons that are asked for."""
    from relpos_np.versions import processor

    wanted = [name for name in PEERS if not arguments.peers or name in {*arguments.peers.split(","), OURS, "limit"}]
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "load_before": list(os.getloadavg()),
    }
    processes = {}
    try:
        # Ours first: the limit is run for as long.
        for name in sorted(wanted, key=lambda name: name != OURS):
            processes[name] = Process(name, interpreter(name, given), arguments.threads)
        record["versions"] = {name: process.ask("versions") for name, process in processes.items()}
        record["words"] = {name: PEERS[name].words for name in processes}
        record["compiler"] = bool(shutil.which("g++") or shutil.which("clang++"))
        letters = [letter for letter in arguments.shapes.split(",") if letter]
        jobs = {"attention": letters}
        if arguments.backward:
            jobs["backward"] = [n for n in letters if n.upper() in ("A", "B")]
        if arguments.rel_shift:
            jobs["rel_shift"] = ["conformer"]
        with tempfile.TemporaryDirectory() as folder:
            for task, shapes in jobs.items():
                record[task] = {}
                for shape in shapes:
                    record[task][shape] = compare(processes, task, shape, arguments.rounds, arguments.seconds, folder)
                    print("\n".join(peers({task: {shape: record[task][shape]}})), flush=True)
    finally:
        for process in processes.values():
            process.close()
    record["load_after"] = list(os.getloadavg())
    return record


def main(argv=None):
    """Compare, print, record."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join([*SHAPES, *SMALL])}")
    parser.add_argument("--peers", default="", help="default all of: " + ", ".join(PEERS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one turn")
    parser.add_argument("--threads", type=int, default=allowed)
    parser.add_argument("--backward", action="store_true", help="also gradients, at A and B")
    parser.add_argument("--rel-shift", action="store_true", help="also rel_shift alone")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter of the peers whose name begins so, such as torch=venv/bin/python; may be repeated",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    given = dict(one.split("=", 1) for one in arguments.python)
    for letter in filter(None, arguments.shapes.split(",")):
        if letter not in SHAPES | SMALL:
            parser.error(f"--shapes: there is no shape {letter!r}")
    for name in filter(None, arguments.peers.split(",")):
        if name not in PEERS:
            parser.error(f"--peers: there is no peer {name!r}")
    record = run(arguments, given)
    text = json.dumps(record, indent=1) + "\n"
    if arguments.out:
        arguments.out.parent.mkdir(exist_ok=True, parents=True)
        arguments.out.write_text(text, encoding="utf-8")
        print(f"written to {arguments.out}")
    return record


if __name__ == "__main__":
    main()
