"""Plant bugs one at a time in a copy of the package and see the tests fail: ``python -m tests.mutation.planted``.

The bugs stand in the tables ``*.toml`` beside this file. ``line`` is a line of ``file`` as it is, or several that
follow each other, where one alone is not unique; ``bug`` is what takes its place, and indentation does not matter.
``tests`` are the test files that catch it. ``needs`` is a key of `NEEDS`.

The record says which test caught each bug, and that test is run first. Exit code 1 if a bug is alive or does not apply.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
TABLES = Path(__file__).parent
RECORD = ROOT / "asv_bench" / "recorded" / "planted.json"

# One thread for products of matrices, because the operands are small, and the same drawn examples each time.
QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "planted"}
QUIET |= {"NUMBA_NUM_THREADS": str(max(2, os.cpu_count() or 1))}
# Plugins that were imported before are not rewritten.
PYTEST = ("-q", "-x", "-n", "0", "--no-header", "--tb=no", "-p", "no:cacheprovider")
PYTEST += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
# Tests run in processes that are forked from one that has imported what takes long.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["numpy", "numba", "ml_dtypes", "scipy.special", "mpmath", "hypothesis.extra.numpy", "pytest"]
)
# Markers of tests that are left out.
LEFT_OUT = ("slow", "stress", "models", "mutation", "parity", "sweep", "simulator")
# Exit codes of pytest.
PASSED, USAGE_ERROR, NO_TESTS = 0, 4, 5


class Bug(NamedTuple):
    """A row of a table."""

    name: str
    file: str
    line: str
    bug: str
    tests: Sequence[str]
    needs: str = ""


class Need(NamedTuple):
    """What tests need: variables, a marker of `LEFT_OUT` that is not left out, and a package."""

    environment: Mapping[str, str] = {}
    marker: str = ""
    package: str = ""


NEEDS = {
    "": Need(),
    "simulator": Need({"NUMBA_ENABLE_CUDASIM": "1"}, marker="simulator"),
    "torch": Need(marker="parity", package="torch"),
    "gguf": Need(package="gguf"),
}


class Outcome(NamedTuple):
    """What became of a planted bug: `by` is the test that failed, or how the tests ended, or None if none failed.

    It is `broken` if that test fails without the bug as well: a test that fails anyway notices nothing.
    """

    bug: Bug
    by: str | None
    seconds: float
    ended: bool = True
    broken: bool = False

    def __str__(self) -> str:
        """A line of the report."""
        state = "BROKEN" if self.broken else "caught" if self.by else "ALIVE" if self.ended else "NO END"
        return f"{state:8}{self.bug.name}{f': {self.by}' if self.by else ''} ({self.seconds:.1f} s)"


class DoesNotApplyError(Exception):
    """The line of a bug is gone, or stands there more than once."""


def bugs() -> list[Bug]:
    """All bugs of all tables."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(TABLES.glob("*.toml"))]
    return [Bug(**row) for table in tables for row in table["bug"]]


def with_bug(bug: Bug, root: Path = ROOT) -> str:
    """The source of a bug's file with the bug in it.

    Raises
    ------
    DoesNotApplyError
        If the line does not stand in the file exactly once.
    """
    path = root / bug.file
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    places = _places(lines, bug.line)
    if len(places) != 1:
        raise DoesNotApplyError(
            f"{bug.name!r}: the line stands {len(places)} times, not once, in {bug.file}; {_elsewhere(bug, root)}"
        )
    place = slice(places[0], places[0] + len(bug.line.splitlines()))
    indentation = min(len(line) - len(line.lstrip()) for line in lines[place] if line)
    lines[place] = textwrap.indent(bug.bug, " " * indentation).splitlines()
    return "\n".join(lines) + "\n"


def _places(lines: Sequence[str], wanted: str) -> list[int]:
    """Where lines follow each other, whatever their indentation."""
    stripped, sought = [line.strip() for line in lines], [line.strip() for line in wanted.splitlines()]
    return [n for n in range(len(lines)) if stripped[n : n + len(sought)] == sought]


def _elsewhere(bug: Bug, root: Path) -> str:
    """Which other files hold the line: code moves more often than it goes."""
    paths = sorted((root / "relpos_np").rglob("*.py"))
    found = [path for path in paths if _places(path.read_text(encoding="utf-8").splitlines(), bug.line)]
    names = ", ".join(path.relative_to(root).as_posix() for path in found)
    return f"it stands in {names}" if names else "it stands nowhere"


def can_run(bug: Bug) -> bool:
    """Whether what its tests need is installed."""
    package = NEEDS[bug.needs].package
    return not package or importlib.util.find_spec(package) is not None


def copy_tree(to: Path) -> None:
    """Copy what git tracks and what it does not ignore: what is edited afterwards does not matter."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in set(names.split("\0")) - {""}:
        if (source := ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)


def failure(copy: Path, kernels: Path, tests: Iterable[str], needs: str = "", limit: float = 600) -> str | None:
    """The first of these tests that fails in a copy, or how the run ended; None if all pass.

    Parameters
    ----------
    copy : Path
        A copy of the tree.
    kernels : Path
        The folder of compiled kernels.
    tests : iterable of str
        Arguments of pytest.
    needs : str
        A key of `NEEDS`.
    limit : float
        Seconds after which the run is ended.

    Raises
    ------
    TimeoutError
        If it takes longer.
    """
    # Before the first process is started, which the others are forked from.
    os.environ.update(QUIET)
    log = copy.parent / f"{copy.name}.log"
    process = _PROCESSES.Process(target=_pytest, args=(copy, kernels, [*tests], NEEDS[needs], log))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        # With the processes that the tests have started.
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        raise TimeoutError(f"no end after {limit:.0f} s")
    out = log.read_text(encoding="utf-8", errors="replace")
    if process.exitcode < 0:
        return f"the tests end with signal {-process.exitcode}"
    if failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out, re.MULTILINE):
        return failed[1]
    if "while loading conftest" in out:
        return "the package cannot be imported"
    if process.exitcode in (PASSED, NO_TESTS):
        return None
    # A test that was recorded and is no longer there.
    if process.exitcode == USAGE_ERROR and "not found:" in out:
        return None
    raise RuntimeError(f"the tests did not run\n{out}")


def _pytest(copy: Path, kernels: Path, tests: Sequence[str], need: Need, log: Path) -> None:
    """Run tests in a copy: the work of a forked process."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    # Nothing of the tree that this process comes from.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "relpos_np")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ.update({**need.environment, "RELPOS_CACHE_DIR": str(kernels), "PYTHONPATH": str(copy)})
    numba, pytest = importlib.import_module("numba"), importlib.import_module("pytest")
    numba.core.config.reload_config()
    markers = " and ".join(f"not {marker}" for marker in LEFT_OUT if marker != need.marker)
    sys.exit(int(pytest.main([*PYTEST, "-m", markers, *tests])))


def read_record() -> dict[str, Any]:
    """What caught each bug when it was last run."""
    empty = {"survived": [], "caught_by": {}, "seconds": {}}
    return empty | (json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {})


def plant(bug: Bug, copy: Path, kernels: Path, known: str | None, limit: float) -> Outcome:
    """Run the test that is known to catch a bug, or else its test files, in a copy that has the bug meanwhile."""
    started = time.perf_counter()
    path = copy / bug.file
    source = path.read_text(encoding="utf-8")
    runs = [bug.tests]
    if known and (copy / known.partition("::")[0]).is_file():
        runs.insert(0, [known])
    by, ended, broken = None, True, False
    path.write_text(with_bug(bug, copy), encoding="utf-8")
    try:
        for tests in runs:
            by = by or failure(copy, kernels, tests, bug.needs, limit)
        path.write_text(source, encoding="utf-8")
        broken = "::" in (by or "") and failure(copy, kernels, [by or ""], bug.needs, limit) is not None
    except TimeoutError:
        ended = False
    finally:
        path.write_text(source, encoding="utf-8")
    return Outcome(bug, by, time.perf_counter() - started, ended, broken)


def plant_all(chosen: Sequence[Bug], jobs: int, limit: float = 600, record: bool = False) -> list[Outcome]:
    """Plant bugs.

    Parameters
    ----------
    chosen : sequence of Bug
        What to plant.
    jobs : int
        How many at once.
    limit : float
        Seconds for a run of tests.
    record : bool
        Write each outcome to the record as it comes.

    Returns
    -------
    list of Outcome
        One for each bug.
    """
    known = read_record()["caught_by"]
    copies: SimpleQueue[Path] = SimpleQueue()
    writing = threading.Lock()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        # Kernels that a bug does not change are compiled once, or never where a cache is named.
        kernels = Path(os.environ.get("RELPOS_CACHE_DIR") or folder / "kernels")
        for n in range(jobs):
            copy_tree(folder / f"copy{n}")
            copies.put(folder / f"copy{n}")

        def one(bug: Bug) -> Outcome:
            copy = copies.get()
            try:
                found = plant(bug, copy, kernels, known.get(bug.name), limit)
            finally:
                copies.put(copy)
            print(found, flush=True)
            if record and found.ended and not found.broken:
                with writing:
                    write_record(found)
            return found

        return list(pool.map(one, chosen))


def write_record(found: Outcome) -> None:
    """Add an outcome to the record; bugs that are in no table any more leave it."""
    record = read_record()
    caught, seconds, alive = record["caught_by"], record["seconds"], set(record["survived"])
    name = found.bug.name
    alive.discard(name)
    caught.pop(name, None)
    seconds[name] = round(found.seconds, 1)
    if found.by:
        caught[name] = found.by
    else:
        alive.add(name)
    names = [bug.name for bug in bugs() if bug.name in caught or bug.name in alive]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "bugs": len(names),
        "survived": [name for name in names if name in alive],
        "caught_by": {name: caught[name] for name in names if name in caught},
        "seconds": {name: seconds[name] for name in names if name in seconds},
    }
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _processor() -> str:
    """The name of the processor."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return f"{found[1] if found else platform.processor()}, {os.cpu_count()} threads"


def draw(chosen: Sequence[Bug], count: int, seed: int | None = None) -> list[Bug]:
    """Some bugs; prints the seed, which is RELPOS_SEED or a fresh one where none is given."""
    if seed is None:
        seed = int(os.environ.get("RELPOS_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"bugs drawn with seed {seed}", flush=True)
    return random.Random(seed).sample(chosen, min(count, len(chosen)))


def touched(chosen: Iterable[Bug], base: str) -> list[Bug]:
    """Bugs in files that differ from a git revision."""
    listed = ["git", "diff", "--name-only", base, "--"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [bug for bug in chosen if bug.file in names]


def main() -> int:
    """Plant the bugs named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Plant bugs one at a time, and see the tests catch each.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names or files of bugs; default all")
    parser.add_argument("--touched", metavar="BASE", help="only in files that differ from this git revision")
    parser.add_argument("--new", action="store_true", help="only what the record does not hold as caught")
    parser.add_argument("--draw", type=int, metavar="N", help="only N of them, drawn at random")
    parser.add_argument("--seed", type=int, help="of the draw; default RELPOS_SEED or a fresh one")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run of tests")
    parser.add_argument("--record", action="store_true", help="write what caught them to the record")
    args = parser.parse_args()
    chosen = bugs()
    if args.words:
        chosen = [bug for bug in chosen if any(word in bug.name or word in bug.file for word in args.words)]
    if args.touched:
        chosen = touched(chosen, args.touched)
    if args.new:
        chosen = [bug for bug in chosen if bug.name not in read_record()["caught_by"]]
    for bug in chosen:
        if not can_run(bug):
            print(f"NOT RUN {bug.name}: needs {bug.needs}")
    chosen = [bug for bug in chosen if can_run(bug)]
    if args.draw is not None:
        chosen = draw(chosen, args.draw, args.seed)
    lost = []
    for bug in chosen:
        try:
            with_bug(bug)
        except DoesNotApplyError as error:
            print("DOES NOT APPLY", error)
            lost.append(bug)
    outcomes = plant_all([bug for bug in chosen if bug not in lost], args.jobs, args.limit, args.record)
    caught = [found for found in outcomes if found.by and not found.broken]
    print(f"{len(caught)} of {len(outcomes)} planted bugs caught; {len(lost)} more do not apply")
    return 1 if len(caught) < len(outcomes) or lost else 0


if __name__ == "__main__":
    sys.exit(main())
