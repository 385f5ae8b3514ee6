"""One peer in a process of its own, ``python -m relpos_np._commands.peers.worker NAME THREADS [MODULE]``.

One JSON request and one answer a line. A module may add tasks and peers.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from relpos_np._commands.peers import OURS, PEERS, Prepared, UnavailableError
from relpos_np._commands.peers.tasks import TASKS
from relpos_np.versions import blas, of_packages

# No float32 arithmetic is so far off: a peer that is computes something else, or in fewer digits. In bfloat16 a peer
# may round products, biases and their sums: where weights matter these are below 8, in steps of 2^-5, so that three
# roundings change a weight by up to 5 %, in either direction, and a mean of values of about 1 by a part of that; the
# result, below 2, is rounded by up to 2^-8 more. Without its bias or its scale a result is off by 0.8 and more.
WORST = {"float32": 1e-3, "bfloat16": 3e-2}


class Worker:
    """What is prepared, and the time of calls."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.prepared: Prepared | None = None
        self.cpu_at_end = time.process_time()

    def prepare(self, task: str, shape: str, exact: str, seconds: float) -> dict[str, Any]:
        """Have a call ready and check its answer; say why there is none."""
        self.prepared = None
        asked = TASKS[task]
        subject = asked.subject(shape)
        with np.load(exact) as file:
            answers = dict(file)
        try:
            module = importlib.import_module(PEERS[self.name].module, __package__)
            prepared = module.prepare(self.name, task, subject, self.threads, seconds)
            # Those without an answer only say what time the machine needs.
            error = asked.error(subject, prepared.to_numpy(prepared.call()), answers) if prepared.answers else None
        except (UnavailableError, ImportError) as problem:
            return {"unavailable": str(problem).splitlines()[0]}
        except Exception as problem:
            # A peer that fails at one shape must not end a long comparison; a fault of ours must.
            if self.name in (OURS, "limit"):
                raise
            return {"unavailable": f"{type(problem).__name__}: {str(problem)[:200]}".splitlines()[0]}
        worst = WORST[asked.about(subject).get("storage", "float32")]
        if error is not None and not error < worst:
            return {"unavailable": f"its result deviates from float64 by {error:.1e}"}
        self.prepared = prepared
        return {"note": prepared.note, "amount": prepared.amount, "error": error}

    def versions(self) -> Mapping[str, str | None]:
        """Of the interpreter and of the packages that matter."""
        found = {"python": sys.version.split()[0]} | of_packages(("numpy", *PEERS[self.name].packages))
        return found | ({"NumPy's BLAS": blas()} if self.name == "numpy" else {})

    def turn(self, seconds: float, most: int) -> dict[str, Any]:
        """One call untimed, because others have used the caches, then as many as fit, at least one."""
        assert self.prepared is not None
        call = self.prepared.call
        idle = time.process_time() - self.cpu_at_end
        started = time.perf_counter()
        call()
        times = [time.perf_counter() - started] if most == 1 else []
        end = time.perf_counter() + seconds
        while not times or (time.perf_counter() < end and len(times) < most):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        self.cpu_at_end = time.process_time()
        return {"seconds": times, "idle_cpu": idle}


def serve(worker: type[Worker]) -> None:
    """Answer until the pipe is closed. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, threads, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    if hasattr(os, "sched_setaffinity"):
        # Some pools ask how many processors they may use, and nothing else.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    # Ctrl-C goes to whoever asks, who then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = worker(name, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(own, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Worker)
