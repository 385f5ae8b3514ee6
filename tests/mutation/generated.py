"""Mutants that cosmic-ray generates, a sample or all: ``python -m tests.mutation.generated --sample 200 --jobs 2``.

cosmic-ray's configuration lies beside this file, and its session is an ordinary one: it can be interrupted and
continued, and `cr-report` and `cr-html` read it. What it has no notion of is here: which tests are the quick ones for a
file, copies of the tree, and processes that are forked after all third-party packages have been imported.

Left out are mutants of what computes nothing: annotations, messages of errors, `__repr__`, and the samples that a
scheme registers for the tests themselves.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.anchors import ROOT
from tests.mutation.trees import MARKERS, PYTEST, QUIET, copy_tree, likely

CONFIG = Path(__file__).with_name("cosmic-ray.toml")
RECORDED = ROOT / "asv_bench" / "recorded"
# Survivors that were looked at: why they are equivalent, or what catches them since.
JUDGED = RECORDED / "mutation-survivors.toml"
# What tests import and no mutant changes.
_HEAVY = ("hypothesis", "hypothesis.extra.numpy", "mpmath", "numba", "numpy", "pytest", "scipy.special", "ml_dtypes")
# Where each scheme is named by a parameter of the tests.
_BY_SCHEME = ("three_way", "schemes", "gradients", "equivalence", "distributed", "testing_examples")

# Where all schemes' functions and refusals are tested under names that need not be those of the schemes.
_ALL_SCHEMES = ("tests/test_bad_input.py", "tests/test_seed_formulas.py", "tests/faults/test_held.py")
# What schemes have in common: no test is named after it.
_OF_ALL = {"absolute", "base", "registry"}
# How a process ends in which no test could be run; none of pytest's.
NO_TESTS = 99


class Mutant(NamedTuple):
    """One change in a file of the package."""

    job: str
    file: str
    at: str
    line: int
    operator: str
    source: str
    before: str
    after: str


# choosing -------------------------------------------------------------------------------------


def mutant(item: Any, clean: Path) -> Mutant:
    """What an entry of the session stands for, from a copy of the tree: what is edited meanwhile does not matter."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    spec = item.mutations[0]
    file, line = spec.module_path.as_posix(), spec.start_pos[0]
    text = (clean / file).read_text(encoding="utf-8")
    source = mutate_code(text, get_operator(spec.operator_name)(**spec.operator_args), spec.occurrence)
    old, new = text.splitlines(), source.splitlines()
    places = [
        place for place in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if place[0] != "equal"
    ]
    before = " ".join(one.strip() for _, a, b, _, _ in places for one in old[a:b])
    after = " ".join(one.strip() for *_, a, b in places for one in new[a:b])
    module = file.removeprefix("relpos_np/").removesuffix(".py").replace("/", ".")
    at = f"{module}:{function_at(file, line)}".rstrip(":")
    return Mutant(item.job_id, file, at, line, spec.operator_name.removeprefix("core/"), source, before, after)


def computes(file: str, line: int, column: int) -> bool:
    """Whether a place in a file is code that an answer depends on."""
    return not any(first <= (line, column) < last for first, last in _aside(file))


@cache
def _aside(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where signatures, but for their defaults, errors, `__repr__` and what is registered for tests begin and end."""

    def ends(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)

    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            if node.name == "__repr__" or node.name.startswith(("_build", "_words")):
                found.append(ends(node))
                continue
            start = min(ends(one)[0] for one in (node, *node.decorator_list))
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                found.append((start, ends(default)[0]))
                start = ends(default)[1]
            found.append((start, ends(node.body[0])[0]))
        elif isinstance(node, ast.AnnAssign):
            found.append(ends(node.annotation))
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "register"):
            found.append(ends(node))
    return found


@cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{prefix}.{child.name}".lstrip(".")
                found.append((child.lineno, child.end_lineno or 0, inside))
            visit(child, inside)

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def function_at(file: str, line: int) -> str:
    """The dotted name of the innermost function or class around a line."""
    around = [(first, name) for first, last, name in _functions(file) if first <= line <= last]
    return max(around, default=(0, ""))[1]


def open_session(folder: Path) -> Any:
    """A session with all mutants in it; what the configuration leaves out, and what computes nothing, is skipped.

    Mutants are counted in the order of the source: another source, or configuration, has another session.
    """
    from cosmic_ray.commands import init
    from cosmic_ray.config import load_config
    from cosmic_ray.modules import filter_paths, find_modules
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    config = load_config(str(CONFIG))
    paths = sorted(filter_paths(find_modules(map(Path, config["module-path"])), config["excluded-modules"]))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [CONFIG, *paths])).hexdigest()
    folder.mkdir(exist_ok=True)
    database = WorkDB(str(folder / f"{digest[:12]}.sqlite"), WorkDB.Mode.create)
    if not database.num_work_items:
        init(paths, database, config.operators_config)
        left_out = re.compile("|".join(config.sub("filters", "operators-filter")["exclude-operators"]))
        specs = [(item.job_id, item.mutations[0]) for item in database.pending_work_items]
        skipped = [
            job
            for job, spec in specs
            if left_out.match(spec.operator_name) or not computes(spec.module_path.as_posix(), *spec.start_pos)
        ]
        # At once: `cr-filter-operators` does the first half one by one, for minutes.
        database.set_multiple_results(skipped, WorkResult(WorkerOutcome.SKIPPED))
    return database


def place(item: Any) -> tuple[Any, ...]:
    """Where an entry of the session stands among the others: numbers of jobs are drawn at random."""
    spec = item.mutations[0]
    return spec.module_path.as_posix(), spec.start_pos, spec.operator_name, spec.occurrence


# running --------------------------------------------------------------------------------------


def runs(file: str) -> list[list[str]]:
    """Arguments of pytest, run after run: what most likely notices a mutant of this file first."""
    # Faults are slow; the kernels know no schemes, and what `lower` says is seen by the evaluator of terms, and sooner.
    files = [path for path in likely(file) if not path.startswith("tests/faults/")]
    stem = Path(file).stem
    # What few mutants are left to: the same on kernels, bounds on memory, and what results may be written to.
    also = ("tests/test_gradients.py", "tests/faults/test_out.py", "tests/faults/test_held.py")
    last = [*files[:3], *also, "-k", "numba or test_out or test_held"]
    if file.startswith("relpos_np/schemes/") and stem not in _OF_ALL:
        named = [path for path in files if any(word in Path(path).stem for word in _BY_SCHEME)]
        words = f"({stem} or {stem.replace('_', '')})"
        return [
            [*named, *_ALL_SCHEMES, "-k", f"{words} and not numba"],
            [*files[:2], *_ALL_SCHEMES, "-k", f"not {words} and not numba"],
            last,
        ]
    return [[*files[:3], "-k", "not numba"], [*files[3:6], "tests/test_three_way.py", "-k", "not numba"], last]


def start(copy: Path, log: Path, arguments: list[str]) -> int:
    """Run pytest in a process forked from this one, in a copy; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(copy)
        for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        pytest = importlib.import_module("pytest")
        # A plugin that has been imported already is run as it is.
        options = [*PYTEST, "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", f"{MARKERS} and not simulator"]
        status = int(pytest.main([*options, *arguments]))
    except BaseException:  # noqa: BLE001  (this process must not go on as its parent)
        traceback.print_exc()
        status = NO_TESTS
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def judge(mutant: Mutant, clean: Path, copy: Path, limit: float) -> Generator[None, None, str | None]:
    """What notices a mutant: the first test that fails, or how its process ended; waits by yielding."""
    path, log = copy / mutant.file, copy.parent / f"{copy.name}.log"
    path.write_text(mutant.source, encoding="utf-8")
    try:
        for arguments in runs(mutant.file):
            child, deadline = start(copy, log, arguments), time.monotonic() + limit
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return "the tests hang"
                yield
            if failed := failures(log):
                return failed[0]
            code = os.waitstatus_to_exitcode(ended[1])
            if code == NO_TESTS:
                raise RuntimeError(f"the tests did not run\n{log.read_text(encoding='utf-8')}")
            if code not in (0, 5):  # 5: no test has the scheme's name
                return f"the tests end with status {code}"
        return None
    finally:
        shutil.copyfile(clean / mutant.file, path)


def failures(log: Path) -> list[str]:
    """Tests that have failed, as pytest's summary names them."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)


def failing_anyway(clean: Path, tests: Iterable[str]) -> set[str]:
    """Which of these tests fail without any mutant as well, and so notice nothing."""
    names = sorted(name for name in set(tests) if name.startswith("tests/"))
    log = clean.parent / "clean.log"
    if names:
        os.waitpid(start(clean, log, ["--maxfail=0", *names]), 0)
    return set(failures(log)) if names else set()


def judge_all(items: Iterable[Any], clean: Path, jobs: int, limit: float) -> Iterator[tuple[Mutant, str | None, float]]:
    """What notices each mutant, and the seconds that it took; several at once, each in a copy of the clean tree."""
    waiting = iter(items)
    running: dict[Path, tuple[Mutant, Any, float]] = {}
    free = [clean.parent / f"copy{n}" for n in range(jobs)]
    for copy in free:
        shutil.copytree(clean, copy)
    while True:
        while free and (item := next(waiting, None)) is not None:
            one, copy = mutant(item, clean), free.pop()
            running[copy] = one, judge(one, clean, copy, limit), time.monotonic()
        if not running:
            return
        for copy, (one, steps, started) in list(running.items()):
            try:
                next(steps)
            except StopIteration as stop:
                del running[copy]
                free.append(copy)
                yield one, stop.value, time.monotonic() - started
        time.sleep(0.05)


# recording ------------------------------------------------------------------------------------


def judged() -> dict[tuple[str, str, str], str]:
    """Why survivors are equivalent, by place, line before and line after."""
    entries = tomllib.loads(JUDGED.read_text(encoding="utf-8")).get("survivor", [])
    return {(one["at"], one["before"], one["after"]): one["equivalent"] for one in entries if "equivalent" in one}


def report(database: Any, seed: int) -> dict[str, Any]:
    """The record: the score, what survived, and which test files noticed how many."""
    from cosmic_ray.work_item import WorkerOutcome

    ran = {
        job: json.loads(result.output)
        for job, result in database.results
        if result.worker_outcome == WorkerOutcome.NORMAL
    }
    left = len(list(database.pending_work_items))
    known, files, tests, alive = judged(), {}, Counter(), []
    for one in ran.values():
        counts = files.setdefault(one["file"], {"run": 0, "killed": 0})
        counts["run"] += 1
        counts["killed"] += one["by"] is not None
        if one["by"] is not None:
            tests[one["by"].partition("::")[0]] += 1
            continue
        reason = known.get((one["at"], one["before"], one["after"]))
        entry = {name: one[name] for name in ("at", "operator", "before", "after")}
        alive.append(entry | ({"equivalent": reason} if reason else {}))
    equivalent = sum("equivalent" in one for one in alive)
    killed = len(ran) - len(alive)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "tool": f"cosmic-ray {version('cosmic-ray')}",
        "seed": seed,
        "mutants": len(ran) + left,
        "run": len(ran),
        "killed": killed,
        "equivalent": equivalent,
        "score": round(killed / max(len(ran) - equivalent, 1), 4),
        "survived": sorted(alive, key=lambda one: (one["at"], one["before"], one["after"])),
        "by_file": dict(sorted(files.items())),
        "noticed_by": dict(tests.most_common()),
    }


def main() -> int:
    """Run a sample of the mutants, or what is left of it, and record what survives."""
    parser = argparse.ArgumentParser(description="Run tests on mutants that cosmic-ray generates.")
    parser.add_argument("--sample", type=int, help="how many; default all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="only files with this in their names")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after so many")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one run of tests")
    parser.add_argument("--session", type=Path, default=Path(".mutation"), help="folder of cosmic-ray's sessions")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    os.chdir(ROOT)
    os.environ |= QUIET | {"NUMBA_NUM_THREADS": str(max(2, os.cpu_count() or 1))}
    os.environ.setdefault("RELPOS_CACHE_DIR", str(Path(tempfile.gettempdir()) / "relpos-mutation-kernels"))
    database = open_session(args.session)
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    for name in _HEAVY:
        importlib.import_module(name)
    results = dict(database.results)
    skipped = {job for job, result in results.items() if result.worker_outcome == WorkerOutcome.SKIPPED}
    items = sorted((item for item in database.work_items if item.job_id not in skipped), key=place)
    items = [item for item in items if args.only in place(item)[0]]
    random.Random(args.seed).shuffle(items)
    chosen = [item for item in items[: args.sample] if item.job_id not in results]
    in_time = itertools.takewhile(lambda _: time.monotonic() < end, chosen)
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(clean := Path(folder) / "clean")
        for one, by, seconds in judge_all(in_time, clean, args.jobs, args.limit):
            output = {name: getattr(one, name) for name in ("file", "at", "operator", "before", "after")} | {"by": by}
            ended = TestOutcome.KILLED if by else TestOutcome.SURVIVED
            database.set_result(one.job, WorkResult(WorkerOutcome.NORMAL, json.dumps(output), ended))
            words = f"{one.at} line {one.line}: {one.before} -> {one.after}"
            print("noticed " if by else "SURVIVED", words, f"| {by}" if by else "", f"({seconds:.0f} s)", flush=True)
        noticed: dict[str, list[str]] = {}
        for job, result in database.results:
            if result.worker_outcome == WorkerOutcome.NORMAL:
                noticed.setdefault(json.loads(result.output)["by"] or "", []).append(job)
        broken = failing_anyway(clean, noticed)
    for name in sorted(broken):
        print(f"fails without any mutant: {name}; what it noticed does not count")
        database.set_multiple_results(noticed.get(name, []), WorkResult(WorkerOutcome.SKIPPED))
    record = report(database, args.seed)
    database.close()
    print(f"{record['killed']} of {record['run']} noticed, {record['equivalent']} equivalent: {record['score']:.1%}")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if record["run"] == record["killed"] + record["equivalent"] and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
