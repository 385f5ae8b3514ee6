"""Plant bugs one at a time in a copy of the package and see the suite fail: ``python -m tests.mutation.planted``.

Exit code 1 if a bug survives; ``--out`` writes what caught each, and the next run starts with that test.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from tests.mutation.anchors import ROOT, Bug, file_of, planted
from tests.mutation.beyond import BEYOND
from tests.mutation.bugs import BUGS
from tests.mutation.trees import copy_tree, failure, likely

RECORD = ROOT / "asv_bench" / "recorded" / "planted.json"
ALL = [*BUGS, *BEYOND]


def recorded() -> dict[str, str]:
    """Which test caught each bug, where there is a record and the test is still there."""
    caught = json.loads(RECORD.read_text(encoding="utf-8"))["caught_by"] if RECORD.exists() else {}
    return {name: by for name, by in caught.items() if by and (ROOT / by.partition("::")[0]).is_file()}


def sample(bugs: Sequence[Bug], count: int, seed: int) -> list[Bug]:
    """Some bugs, the same ones for a seed."""
    return random.Random(seed).sample(bugs, min(count, len(bugs)))


def caught(bug: Bug, clean: Path, kernels: Path, quick: bool = False) -> str | None:
    """What notices the bug; `quick` runs the test that did so when it was recorded, and the likeliest files."""
    by = recorded()
    with tempfile.TemporaryDirectory(dir=clean.parent) as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(clean, copy)
        (copy / file_of(bug)).write_text(planted(bug, clean), encoding="utf-8")
        runs = [[by[bug.name]]] if bug.name in by else []
        files = likely(file_of(bug), _of_file(file_of(bug), by))
        if bug in BEYOND and "/_cuda/" not in file_of(bug):
            # Sizes past those of examples are drawn there.
            files.sort(key=lambda path: path != "tests/test_three_way.py")
        runs += [files[:1], files[1:4]] if quick else [files[:1], files[1:4], files[4:]]
        return next((found for tests in runs if tests and (found := failure(copy, kernels, tests))), None)


def _of_file(file: str, by: Mapping[str, str]) -> list[str]:
    """Test files that caught bugs in a file."""
    own = [by[bug.name] for bug in ALL if file_of(bug) == file and bug.name in by]
    return list(dict.fromkeys(name.partition("::")[0] for name in own))


def run(bugs: Iterable[Bug], jobs: int, quick: bool = False) -> tuple[dict[str, str | None], str | None]:
    """Plant bugs.

    Parameters
    ----------
    bugs : iterable of Bug
        What to plant.
    jobs : int
        How many at once.
    quick : bool
        Run only the test that caught a bug when it was recorded, and the likeliest files.

    Returns
    -------
    found : dict
        What caught each bug.
    broken : str or None
        A test that caught one but fails without any bug as well.
    """
    bugs = list(bugs)
    with tempfile.TemporaryDirectory() as folder:
        # Kernels that a bug does not change are compiled once, or never where a cache is named.
        clean, kernels = Path(folder) / "clean", Path(os.environ.get("RELPOS_CACHE_DIR") or f"{folder}/kernels")
        copy_tree(clean)

        def plant(bug: Bug) -> str | None:
            started = time.perf_counter()
            by = caught(bug, clean, kernels, quick)
            took = time.perf_counter() - started
            print(f"caught    {bug.name}: {by}" if by else f"SURVIVED  {bug.name}", f"({took:.0f} s)", flush=True)
            return by

        with ThreadPoolExecutor(jobs) as pool:
            found = {bug.name: by for bug, by in zip(bugs, pool.map(plant, bugs), strict=True)}
        # A test that fails anyway notices nothing.
        noticed = {by for by in found.values() if by and by.startswith("tests/")}
        simulated = {name for name in noticed if name.startswith("tests/cuda/")}
        runs = [sorted(names) for names in (noticed - simulated, simulated) if names]
        return found, next((failed for names in runs if (failed := failure(clean, kernels, names))), None)


def main() -> int:
    """Plant the bugs named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Plant bugs one at a time, and see the suite catch each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of bugs; default all")
    parser.add_argument("--group", choices=["bugs", "beyond"], help="only these; beyond: sizes past those of examples")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--new", action="store_true", help="only what the record lacks, which is kept in what is written"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    chosen = {None: ALL, "bugs": BUGS, "beyond": BEYOND}[args.group]
    if unknown := set(args.names) - {bug.name for bug in chosen}:
        parser.error(f"no such bugs: {sorted(unknown)}")
    chosen = [bug for bug in chosen if not args.names or bug.name in args.names]
    if args.new:
        chosen = [bug for bug in chosen if bug.name not in recorded()]
    if args.sample:
        chosen = sample(chosen, args.sample, args.seed)
    found, broken = run(chosen, args.jobs)
    alive = [name for name, by in found.items() if not by]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} planted bugs caught")
    if broken:
        print(f"but without any bug there is a failure as well: {broken}")
    if args.out:
        date = datetime.now(UTC).date().isoformat()
        if args.new:
            both = recorded() | found
            found = {bug.name: both[bug.name] for bug in ALL if bug.name in both}
        beyond = [bug.name for bug in BEYOND if bug.name in found]
        record = {"date": date, "bugs": len(found), "beyond_examples": len(beyond), "survived": alive}
        record |= {"fails_anyway": broken, "caught_by": found}
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if alive or broken else 0


if __name__ == "__main__":
    sys.exit(main())
