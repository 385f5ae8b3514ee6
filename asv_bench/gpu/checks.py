"""Checks that are programs of their own: the GPU's tests, and compute-sanitizer on small shapes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Later, when no other process needs the memory that it takes.
ALONE = ROOT / "tests" / "gpu" / "test_gpu_memory.py"
# Of the simulator, where all tests take minutes: enough to see that they are found and run.
TINY = "rel_shift and uint8 or empty_axes or many_rows"


def environment(**more):
    """The environment of a child: this library and these programs first, and Numba's cache of PTX untouched."""
    paths = [str(ROOT), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


# Processes of ours that have not been waited for: each leads a group, which a signal to this one does not reach.
RUNNING = set()


def start(command, more, **pipes):
    """A child in a group of its own."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(**more), start_new_session=True, **pipes)
    RUNNING.add(process)
    return process


def end(process):
    """End a process and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    RUNNING.discard(process)


def end_all(number, _):
    """What a signal to this process does: nothing is left on the device."""
    for process in list(RUNNING):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    # Threads may be waiting, and the record is whole after each step.
    os._exit(128 + number)


def run(command, limit, log, **more):
    """Run to its end or its limit in seconds; return the exit status, or None if it took too long."""
    with Path(log).open("w", encoding="utf-8") as file:
        process = start(command, more, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout=max(limit, 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def last_lines(log, count=15):
    """The end of what a program printed."""
    return "\n".join(Path(log).read_text(encoding="utf-8", errors="replace").splitlines()[-count:])[-2000:]


def counts(report):
    """Numbers of a JUnit file, what failed, and why some were skipped."""
    found = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skips": []}
    for case in ET.parse(report).iter("testcase"):
        bad = next((x for x in case if x.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        name = f"{case.get('classname')}::{case.get('name')}"
        if bad is not None:
            found["failed"] += 1
            found["failures"].append(f"{name}: {' '.join((bad.get('message') or '').split())[:300]}")
        elif skipped is not None:
            found["skipped"] += 1
            found["skips"].append(f"{name}: {skipped.get('message')}"[:300])
        else:
            found["passed"] += 1
    return found


def pytest_command(paths, report, extra):
    plugin = ["-p", "gpu.shard", "-p", "no:cacheprovider", "--no-showlocals"]
    return [sys.executable, "-m", "pytest", *map(str, paths), "-q", *plugin, f"--junitxml={report}", *extra]


def tests(limit, jobs, tiny, simulated):
    """The simulator's tests and the GPU's own, on the device, in several processes."""
    started = time.monotonic()
    paths = [ROOT / "tests" / "cuda", ROOT / "tests" / "gpu"]
    extra = ["-k", TINY] if tiny else []
    more = {} if simulated else {"RELPOS_GPU": "required"}
    total = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skips": []}
    reasons = []
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        for part in range(jobs):
            report, log = Path(folder) / f"{part}.xml", Path(folder) / f"{part}.log"
            command = pytest_command(paths, report, [f"--ignore={ALONE}", *extra])
            file = log.open("w", encoding="utf-8")
            shard = more | {"RELPOS_GPU_SHARD": f"{part}/{jobs}"}
            process = start(command, shard, stdout=file, stderr=subprocess.STDOUT)
            parts.append((process, report, log, file))
        ended = []
        try:
            for process, report, log, file in parts:
                try:
                    status = process.wait(timeout=max(0.1, limit - (time.monotonic() - started)))
                except subprocess.TimeoutExpired:
                    status = None
                end(process)
                file.close()
                ended.append((status, report, log))
        finally:
            for process, *_ in parts[len(ended) :]:
                end(process)
        for status, report, log in ended:
            found = counts(report) if report.exists() else None
            for name, value in (found or {}).items():
                total[name] += value
            # 5: nothing was selected, as in a part without tests.
            if status is None:
                reasons.append(f"did not end in time: {last_lines(log, 3)}")
            elif status not in (0, 1, 5) or found is None:
                reasons.append(f"pytest ended with {status}: {last_lines(log)}")
    if total["failed"]:
        reasons.append(f"{total['failed']} tests failed")
    if not total["passed"]:
        reasons.append("no test ran")
    return total | verdict(reasons)


def memory(limit, folder, simulated):
    """What happens on a device that is full: in a process that is alone there."""
    report, log = Path(folder) / "memory.xml", Path(folder) / "memory.log"
    more = {} if simulated else {"RELPOS_GPU": "required"}
    status = run(pytest_command([ALONE], report, []), limit, log, **more)
    if status is None:
        return {"status": "failed", "reason": f"did not end within {limit:.0f} s: {last_lines(log, 3)}"}
    found = counts(report) if report.exists() else {"passed": 0, "failures": [], "skips": []}
    if found["skips"]:
        return {"status": "missing", "reason": found["skips"][0]}
    if status or not found["passed"]:
        return {"status": "failed", "reason": "; ".join(found["failures"]) or last_lines(log)}
    return {"status": "passed", "passed": found["passed"]}


def verdict(reasons):
    """The status of a step."""
    return {"status": "failed", "reason": "; ".join(reasons)} if reasons else {"status": "passed"}


def sanitizer():
    """compute-sanitizer from the path, from CUDA's usual folder or from NVIDIA's wheels; or None."""
    if found := shutil.which("compute-sanitizer"):
        return found
    usual = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        usual += sorted(Path(folder).glob("**/bin/compute-sanitizer"))
    return next((str(path) for path in usual if os.access(path, os.X_OK)), None)


def sanitize(tool, limit, folder):
    """One tool of compute-sanitizer over every kind of kernel."""
    program = sanitizer()
    if program is None:
        return {"status": "missing", "reason": "compute-sanitizer is neither on the path nor beside CUDA"}
    log = Path(folder) / f"{tool}.log"
    command = [program, "--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    status = run([*command, sys.executable, "-m", "gpu.small"], limit, log)
    said = last_lines(log)
    if status is None:
        return {"status": "failed", "reason": f"did not end within {limit:.0f} s: {said}"}
    if status:
        return {"status": "failed", "reason": f"ended with {status}: {said}"}
    return {
        "status": "passed",
        "summary": next((x for x in reversed(said.splitlines()) if "SUMMARY" in x), said[-200:]),
    }
