"""Check and time the CUDA backend on this machine's GPU: ``python asv_bench/gpu/measure.py FOLDER``.

Writes FOLDER/<device>-<date>.json, again after each step, so that a run that is cut off leaves what it had. The exit
status is 0 if every check passed and every row of ours was measured; baselines that are missing are recorded with the
reason and are no failure. In Numba's simulator (NUMBA_ENABLE_CUDASIM=1, with --tiny) it shows that the program works:
the record says so, and no page prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [path for path in (str(HERE.parent), str(ROOT)) if path not in sys.path]

from gpu import checks, page, rows  # noqa: E402

BUDGET = 520.0
# Seconds that a step may take at most; the whole has the budget.
LIMITS = {
    "about": 60.0,
    "tests": 170.0,
    "sanitizer": 120.0,
    "memory": 40.0,
    "repeat": 40.0,
    "ceiling": 40.0,
    "row": 75.0,
}
# The first three at the same time: most of their time is compilation.
TOGETHER = ("tests", "memcheck", "racecheck")
STEPS = (*TOGETHER, "memory", "repeat", "ceilings", "rows")
REPEATED = ("t5-1024", "t5-2048-mma", "t5-1024-gradient", "rel_shift-conformer", "decode-4096-float16", "shaw")


class Worker:
    """The process that uses the device, replaced when it hangs or its context breaks."""

    def __init__(self, tiny, folder):
        self.tiny, self.log = tiny, Path(folder) / "worker.log"
        self.process = None

    def _start(self):
        with self.log.open("a", encoding="utf-8") as log:
            command = [sys.executable, "-m", "gpu.worker", *(["--tiny"] if self.tiny else [])]
            pipe = subprocess.PIPE
            self.process = checks.start(command, {}, stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True).start()

    @staticmethod
    def _read(pipe, lines):
        for line in pipe:
            lines.put(line)
        lines.put("")

    def ask(self, what, limit, **request):
        """One answer; a process that ends or takes too long is a failure, and the next request gets a new one."""
        if limit <= 0:
            return {"status": "failed", "reason": "no time was left", "seconds": 0.0}
        if self.process is None:
            self._start()
        started = time.monotonic()
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": what, **request}) + "\n")
            self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            reason = f"did not end within {limit:.0f} s; its process was ended"
            return {"status": "failed", "reason": reason, "seconds": time.monotonic() - started}
        if not line:
            code = self.process.wait()
            self.close()
            reason = f"its process ended with {code}: {checks.last_lines(self.log, 5)}"
            return {"status": "failed", "reason": reason, "seconds": time.monotonic() - started}
        answer = json.loads(line)
        if answer.pop("broken", False):
            answer["reason"] += " (the context was broken; a new process took over)"
            self.close()
        return answer

    def close(self):
        if self.process is not None:
            checks.end(self.process)
            self.process.stdin.close()
            self.process = None


def commit():
    """The version that is measured: of git, or from the variable RELPOS_COMMIT where there is no repository."""
    found = {}
    for name, command in (("id", ["rev-parse", "HEAD"]), ("changed", ["status", "--porcelain"])):
        try:
            done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return {"id": os.environ.get("RELPOS_COMMIT"), "changed": None, "reason": str(error)[:200]}
        found[name] = done.stdout.strip()
    return {"id": found["id"], "changed": found["changed"].splitlines()}


def free_name(folder, name):
    """A file that does not exist yet."""
    tried = (folder / f"{name}{'' if n == 1 else f'-{n}'}.json" for n in range(1, 1000))
    return next(path for path in tried if not path.exists())


class Record:
    """The file, written whole after each step."""

    def __init__(self, path, head):
        self.path, self.found = path, head | {"complete": False, "failures": []}

    def write(self):
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def add(self, group, name, answer):
        """One result; a failure is also listed and printed."""
        self.found.setdefault(group, {})[name] = answer
        words = answer["status"]
        if words == "failed":
            self.found["failures"].append(f"{group} {name}: {answer['reason']}")
        elif group == "rows":
            words = f"{answer['ms_median']:.4g} ms, error {answer['error']:.1e}"
            for other, one in answer["baselines"].items():
                words += f"; {other} " + (f"{one['ratio']:.2f}×" if "ratio" in one else one["status"])
        reason = f": {answer['reason']}" if "reason" in answer else ""
        print(f"{group} {name}: {words}{reason} [{answer.get('seconds', 0):.1f} s]", flush=True)
        self.write()


def described(row, tiny, answer, kernels, device, simulated):
    """A row's answer with what it is and what it should reach."""
    shape = row.tiny if tiny else row.shape
    goals = []
    for goal in row.goals:
        if goal.device and goal.device not in device:
            continue
        found = answer.get("baselines", {}).get(goal.against, {}).get("ratio") if goal.against else None
        if goal.figure:
            found = answer.get(goal.figure)
        met = None if found is None or simulated else found >= goal.at_least
        goals.append(
            {"words": goal.words, "at_least": goal.at_least, "against": goal.against, "found": found, "met": met}
        )
    head = {"task": row.task, "words": shape.words, "shape": rows.dimensions(shape), "dtype": shape.storage}
    return head | {"kernels": kernels, "simulated": simulated, "goals": goals} | answer


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the record goes")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes and one round: only to see that it works")
    parser.add_argument("--only", default="", help=f"of {','.join(STEPS)}; default all")
    parser.add_argument("--rows", default="", help="names of rows; default all: " + ", ".join(rows.NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.06, help="of a turn of one call in a round")
    parser.add_argument("--jobs", type=int, default=min(8, max(1, (os.cpu_count() or 1) // 2)), help="test processes")
    arguments = parser.parse_args(argv)
    arguments.only = [name for name in arguments.only.split(",") if name] or list(STEPS)
    arguments.rows = [name for name in arguments.rows.split(",") if name] or list(rows.NAMES)
    for name, given, known in (("--only", arguments.only, STEPS), ("--rows", arguments.rows, rows.NAMES)):
        if unknown := [x for x in given if x not in known]:
            parser.error(f"{name}: there is no {unknown[0]!r}; expected some of {', '.join(known)}")
    return parser, arguments


def main(argv=None):
    """All steps; return the exit status."""
    parser, arguments = parse(argv)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), checks.end_all)
    import relpos_np as rp

    if reason := rp.backend.available()[1].get("cuda"):
        print(f"nothing can be measured: {reason}", file=sys.stderr)
        return 2
    from relpos_np.kernels._cuda.device import simulated as in_simulator

    simulated = in_simulator()
    if simulated and arguments.folder.resolve() == HERE.resolve():
        parser.error("folder: pages read this one, and the simulator's times mean nothing")
    if simulated and not arguments.tiny:
        parser.error("--tiny: needed in the simulator, which would take days")
    arguments.folder.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(arguments.tiny, scratch)
        try:
            return measure(arguments, worker, scratch, simulated)
        finally:
            worker.close()


def measure(arguments, worker, scratch, simulated):
    """The steps, each with its share of the time that is left."""
    budget = float(os.environ.get("RELPOS_GPU_SECONDS") or BUDGET)
    most = float(os.environ.get("RELPOS_GPU_STEP_SECONDS") or budget)
    started = time.monotonic()

    def limit(step):
        return min(LIMITS[step], most, budget - (time.monotonic() - started))

    about = worker.ask("about", LIMITS["about"])
    if about["status"] == "failed":
        print(f"the device does not answer: {about['reason']}", file=sys.stderr)
        return 2
    device = about["device"]["name"]
    date = time.strftime("%Y-%m-%d")
    slug = "simulated" if simulated else re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    kernels = page.kernel_hash()
    head = {"format": page.FORMAT, "date": date, "simulated": simulated, "tiny": arguments.tiny}
    keys = ("device", "driver", "cuda", "versions")
    head |= {name: about[name] for name in keys} | {"commit": commit(), "kernels": kernels}
    head |= {"rounds": 1 if arguments.tiny else arguments.rounds, "asked": arguments.only}
    record = Record(free_name(arguments.folder, f"{slug}-{date}"), head)
    if about["arrays"] and not simulated:
        record.found["failures"].append(f"arrays on the device are not taken: {about['arrays']}")
    record.write()
    jobs = 1 if arguments.tiny else arguments.jobs

    def check(step):
        before = time.monotonic()
        try:
            if step == "tests":
                found = checks.tests(limit("tests"), jobs, arguments.tiny, simulated)
            elif step == "memory":
                found = checks.memory(limit("memory"), scratch, simulated)
            else:
                found = checks.sanitize(step, limit("sanitizer"), scratch)
        except Exception as error:  # noqa: BLE001 - the other steps still run
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        return found | {"seconds": time.monotonic() - before}

    together = [step for step in TOGETHER if step in arguments.only]
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        for step, found in zip(together, pool.map(check, together), strict=True):
            record.add("checks", step, found)
    for step in (name for name in STEPS if name in arguments.only and name not in TOGETHER):
        if step == "memory":
            record.add("checks", step, check(step))
        elif step == "repeat":
            for name in REPEATED:
                record.add("repeat", name, worker.ask("repeat", limit("repeat"), name=name))
        elif step == "ceilings":
            for name in ("copy", "fma", "gemm", "launch"):
                record.add("ceilings", name, worker.ask("ceiling", limit("ceiling"), name=name))
        else:
            timing = {"rounds": record.found["rounds"], "seconds": 0.0 if arguments.tiny else arguments.seconds}
            for row in (rows.find(name) for name in arguments.rows):
                answer = worker.ask("row", limit("row"), name=row.name, **timing)
                record.add("rows", row.name, described(row, arguments.tiny, answer, kernels, device, simulated))
    record.found |= {"complete": True, "seconds": time.monotonic() - started}
    if not simulated:
        record.found["driver"]["smi_after"] = worker.ask("clocks", 30.0)
    record.write()
    failures = record.found["failures"]
    print(f"written to {record.path}: {len(failures)} failures, {record.found['seconds']:.0f} s", flush=True)
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
