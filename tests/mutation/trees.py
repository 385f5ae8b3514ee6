"""Copies of the working tree, tests run in them, and which test files most likely notice a change in a file."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.mutation.anchors import ROOT

# What says nothing of numbers, or measures times: no bug is looked for there.
_SILENT = (
    "asv cli_help completeness completion docs gpu_script imports interop mutation pictures plot project promises "
    "readme soak supply_chain"
)
# One thread for products of matrices, because the operands are small, and the same drawn examples each time.
QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "ci"}
PYTEST = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
MARKERS = "not slow and not stress and not models and not mutation and not parity and not sweep"


def copy_tree(to: Path) -> None:
    """Copy what git tracks and what it does not ignore: what is edited afterwards does not matter."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in set(names.split("\0")) - {""}:
        if (source := ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)


def failure(copy: Path, kernels: Path, tests: Iterable[str], limit: float = 900) -> str | None:
    """The first of these tests that fails in a copy, or how the run ended; None if all pass."""
    tests = list(tests)
    environment = os.environ | QUIET | {"RELPOS_CACHE_DIR": str(kernels), "PYTHONPATH": str(copy)}
    markers = MARKERS
    if tests[0].startswith("tests/cuda/"):
        environment["NUMBA_ENABLE_CUDASIM"] = "1"
    else:
        markers += " and not simulator"
    command = [sys.executable, "-m", "pytest", *PYTEST, "-m", markers, *tests]
    try:
        result = subprocess.run(
            command, cwd=copy, env=environment, check=False, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "the tests hang"
    if result.returncode < 0:
        return f"the tests end with signal {-result.returncode}"
    for line in result.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].split(" - ")[0]
    if result.returncode in (0, 5):  # 5: every test is left out by its markers
        return None
    if "while loading conftest" in result.stderr:
        return "the package cannot be imported"
    if "not found:" in result.stderr:  # a test that was recorded and is no longer there
        return None
    sys.exit(f"the tests did not run\n{result.stdout}{result.stderr}")


def likely(file: str, known: Sequence[str] = ()) -> list[str]:
    """Test files for a file of the package, the likeliest first: the `known` ones, then those that name it most."""
    words = _names(file)
    weight = {path: sum(words.get(word, 0) * n for word, n in counts.items()) for path, counts in _words().items()}
    stem = Path(file).stem.strip("_")
    for path in weight:
        weight[path] += 50 * (stem in Path(path).stem)
    folder = file.split("/")[-2]
    own = [path for path in weight if ("/cuda/" in path) == (folder == "_cuda")]
    # What every scheme goes through notices a wrong one within seconds.
    first = "tests/test_three_way.py" if folder in {"schemes", "formulas", "_contract", "_dense"} else ""
    own.sort(key=lambda path: (path != first, path not in known, -weight[path]))
    return own


@cache
def _words() -> dict[str, dict[str, int]]:
    """How often each test file says each word."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        if path.stem.removeprefix("test_") in _SILENT.split() or name.split("/")[1] in {
            "compiled",
            "gpu",
            "models",
            "parity",
        }:
            continue
        counts: dict[str, int] = {}
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8")):
            counts[word] = counts.get(word, 0) + 1
        found[name] = counts
    return found


def _names(file: str) -> dict[str, int]:
    """What a file of the package is known by, with weights: its module, its classes and functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {Path(file).stem: 2, file.split("/")[-2].strip("_"): 1}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = 3
    return names
