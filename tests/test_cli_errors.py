"""What the command line says when its output or its environment is unusable: one line and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relpos_np._commands.common import FAILED


@pytest.fixture
def complains():
    """``complains("line", word, ...)``: the command ends with exit code 2 and says this line on stderr, and no more."""

    def call(line, *words, stdout=subprocess.PIPE, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "relpos_np", *words],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
            # Buffered, as most users have it: what is printed then fails at the end.
            env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,
        )
        assert done.stderr == f"{line}\n"
        assert done.returncode == FAILED
        assert not done.stdout

    return call


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    ("words", "unbuffered"), [(("info",), ""), (("info", "--json"), "1"), (("config", "--types"), "")], ids=str
)
def test_output_on_a_full_disk(complains, words, unbuffered):
    with Path("/dev/full").open("wb") as full:
        line = f"relpos {words[0]}: standard output: No space left on device"
        complains(line, *words, stdout=full, PYTHONUNBUFFERED=unbuffered)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_help_on_a_full_disk(complains):
    with Path("/dev/full").open("wb") as full:
        complains("relpos: standard output: No space left on device", "--help", stdout=full)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise")
def test_output_that_nobody_reads(complains):
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "wb") as pipe:
        complains("relpos info: standard output: Broken pipe", "info", stdout=pipe)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["0", "-2"])
def test_a_number_of_threads_that_numba_does_not_take(complains, count):
    line = f"relpos attend: NUMBA_NUM_THREADS: expected a number from 1 on, found {count}"
    complains(line, "attend", NUMBA_NUM_THREADS=count)


@pytest.mark.slow
def test_a_folder_that_does_not_exist(complains, tmp_path):
    """Reported by the system, and by no check of ours."""
    report = str(tmp_path / "no" / "found.xml")
    words = ("conform", "relpos_np:attention", "--scheme", "plain", "--families", "self", "--junit", report)
    complains(f"relpos conform: {report}: No such file or directory", *words)
