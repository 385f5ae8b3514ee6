"""The share of the cases that `pytest` alone runs: what it leaves out, and what it never does."""

import os
import subprocess
import sys

from tests.processes import ROOT

MADE = """
import pytest

@pytest.mark.parametrize("backend", ["numpy", "terms"])
@pytest.mark.parametrize("name", ["t5", "shaw", "rotary, chosen", "another"])
@pytest.mark.parametrize("n", range(20))
def test_of_names(name, backend, n): pass

@pytest.mark.parametrize("a", range(10))
@pytest.mark.parametrize("b", range(8))
def test_of_two_lists(a, b): pass

@pytest.mark.parametrize("bad", range(40))
def test_of_one_list(bad): pass
"""


def cases(folder, *arguments, seed="1"):
    """The cases of the file that are run, in a project that has nothing but these and our `conftest.py`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), "-c", str(folder / "pytest.toml"), *arguments]
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=os.environ | {"RELPOS_SEED": seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_a_share_is_drawn_unless_a_file_is_named(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "made" / "test_made.py").write_text(MADE)
    (tmp_path / "pytest.toml").write_text('[pytest]\ntestpaths = ["made"]\naddopts = ["-m", "not slow"]\n')
    few, other = cases(tmp_path), cases(tmp_path, seed="2")
    assert few != other
    assert len(cases(tmp_path, "made")) == 160 + 80 + 40
    for found in (few, other):
        assert sum(case.startswith("test_of_two_lists") for case in found) == 5
        assert sum(case.startswith("test_of_one_list") for case in found) == 40
        of_names = [case for case in found if case.startswith("test_of_names")]
        assert 10 <= len(of_names) <= 15
        assert all(any(name in case for case in of_names) for name in ("t5", "shaw", "rotary", "numpy", "terms"))
