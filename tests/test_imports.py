"""Who imports whom, what importing costs, and what works without the packages that are not there."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import relpos_np

PACKAGE = Path(relpos_np.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# A module may import modules of lower levels only; those of one level know nothing of each other.
# Rooms, from the lowest level to the highest: folders of the package, and the files beside them.
LEVELS = (
    {"errors", "types"},
    {"_runtime"},
    {"_contract"},
    {"_files", "backend", "formulas", "kernels"},
    {"schemes"},
    {"_dense"},
    {"_calls", "complexity", "reference", "terms"},
    {"api", "versions"},
    {"configs", "paged"},
    {""},
    {"distributed", "interop", "layers"},
    {"testing"},
    {"conform", "plot"},
    {"_commands"},
    {"__main__", "pytest_plugin"},
)
# What may be imported late, inside functions: backends find their kernels, versions describe them.
LATE = dict.fromkeys(("api", "_calls", "backend"), ("kernels", "_dense")) | {"versions": ("", "kernels")}
# A layer that is bound to weights reads them as whole modules do, and finds rules of masks by their public names.
LATE["configs"] = ("", "layers")


def dotted(path):
    """A file as a module name without the package's: "schemes.t5", "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path) for path in MODULES}


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path):
    """(module, late) for each import of the package in a file; late ones stand in functions or TYPE_CHECKING."""
    found = set()

    def visit(node, late):
        if isinstance(node, ast.FunctionDef):
            late = True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            late = True
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "relpos_np":
                while rest not in NAMES:  # a name inside a module
                    rest = rest.rpartition(".")[0]
                found.add((rest, late))
        for child in ast.iter_child_nodes(node):
            visit(child, late)

    visit(parsed(path), False)
    return found


def room(name):
    """The folder of the package that a module lies in, or the module itself where it lies beside them."""
    return name.partition(".")[0]


def level(name):
    for n, rooms in enumerate(LEVELS):
        if room(name) in rooms:
            return n
    pytest.fail(f"{name}: a new room needs a level")
    return None


def test_rooms_import_lower_levels_only():
    """A room knows those below it, and those of its level know nothing of each other."""
    for path in MODULES:
        name = dotted(path)
        for other, late in imports(path):
            if room(other) == room(name) or (late and room(other) in LATE.get(room(name), ())):
                continue
            assert level(other) < level(name), f"{name} imports {other}"


def test_house_is_small_and_without_circles(capsys):
    """Rooms and the arrows between them, counted from the imports, and no circle of modules within a room either."""
    arrows, modules = set(), {}
    for path in MODULES:
        name = dotted(path)
        known = {other for other, late in imports(path) if not late} - {name}
        arrows |= {(room(name), room(other)) for other in known} - {(room(name), room(name))}
        # A package that only gathers what its files define is no module of its own.
        modules[name] = known
    tuple(TopologicalSorter(modules).static_order())  # raises CycleError, which names the circle
    rooms = {room(name) for name in NAMES}
    with capsys.disabled():
        print(f" {len(rooms)} rooms, {len(arrows)} arrows", end="")
    assert len(rooms) <= 28


def test_kernels_know_terms_only():
    """No scheme, no check, no api; and the two backends know nothing of each other."""
    known = {f"_contract.{name}" for name in ("problem", "sequences", "terms", "turned", "counted", "cut", "placed")}
    known |= {"errors", "types", "_runtime.threadcount", "_runtime.forks"}
    for path in MODULES:
        name = dotted(path)
        if room(name) == "kernels":
            family = ".".join(name.split(".")[:2])
            for other, _ in imports(path):
                assert other in known or (other.startswith(family) and name != "kernels"), f"{name} imports {other}"


def python(code, *options, **environment):
    """Run code in a new interpreter and return what it printed."""
    import os

    run = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=PACKAGE.parent,
        env=os.environ | environment,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_import_is_light():
    loaded = set(json.loads(python("import sys, json, relpos_np; print(json.dumps(sorted(sys.modules)))")))
    assert not [name for name in loaded if name.startswith("relpos_np.layers")]
    bare = set(json.loads(python("import sys, json, numpy; print(json.dumps(sorted(sys.modules)))")))
    for heavy in ("numba", "llvmlite", "matplotlib", "scipy", "rich", "numpy.typing", "numpy.ma", "typing_extensions"):
        assert heavy not in loaded or heavy in bare, heavy


def test_import_costs_at_most_half_of_numpys(tmp_path, monkeypatch):
    # As an installed package has it: compiled to bytecode, which the first run below writes.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = "from time import thread_time as t; a = t(); import numpy; b = t(); import relpos_np; print(b - a, t() - b)"
    python(code)
    taken = []
    for _ in range(20):  # what others do on the machine adds to both
        taken.append([float(seconds) for seconds in python(code).split()])
        numpy, ours = map(min, zip(*taken, strict=True))
        if ours <= numpy / 2:
            return
    pytest.fail(f"import took {1000 * ours:.0f} ms, numpy's {1000 * numpy:.0f} ms")


def test_every_module_says_what_it_is_for():
    for path in MODULES:
        first = (ast.get_docstring(parsed(path)) or "").splitlines()
        assert first, path
        assert first[0].endswith("."), path
