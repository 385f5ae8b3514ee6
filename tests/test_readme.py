"""What the README prints must run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"  # also where the package is installed elsewhere
pytestmark = [
    pytest.mark.readme,
    pytest.mark.skipif(not README.is_file(), reason="there is no README.md: not a checkout"),
]


def blocks(language):
    """Fenced blocks of a language."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands():
    """Lines of shell blocks, without prompts and comments."""
    lines = "".join(blocks("bash|sh|shell|console")).splitlines()
    return [line.removeprefix("$ ").strip() for line in lines if line.strip(" $") and not line.startswith("#")]


def test_python_blocks_run_in_order():
    """One script, so that a block may use what an earlier one made, with warnings as errors."""
    code = "\n".join(blocks("python"))
    assert code, "the README shows no Python"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_two_commands_are_promised():
    """From a fresh clone: one line that installs and attends, one that runs the tests."""
    first, second = commands()
    parts = [part.split() for part in first.split("&&")]
    assert parts[0][1:] == ["-m", "venv", ".venv"]
    assert parts[1][:2] == [".venv/bin/pip", "install"]
    assert "-e" in parts[1]
    assert parts[2] == [".venv/bin/relpos", "attend"]
    assert second == ".venv/bin/pytest"


def test_code_blocks_say_their_language():
    """A block without one would be neither run nor checked."""
    fences = re.findall(r"^```(.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[1::2]) == {""}
    assert set(fences[0::2]) <= {"sh", "python", "text", "bibtex"}
