"""What comes in and what goes out: no connections, nothing unpickled, pinned actions, releases that can be traced."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import relpos_np as rp
from tests.processes import child

ROOT = Path(rp.__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))

# Python tells an audit hook of every connection, program and unpickled name.
GUARD = """
import sys
seen = []
def watch(event, arguments):
    if event.startswith(("socket.", "urllib.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "pickle.")):
        seen.append(f"{event} {arguments}")
sys.addaudithook(watch)
"""
REPORT = "\nprint(*seen, sep='\\n', end='')\n"
# What needs other packages, a GPU, or is a program.
APART = ("relpos_np.interop.", "relpos_np.kernels._cuda", "relpos_np._commands.peers.with_", "relpos_np.__main__")
IMPORT = f"""
import importlib, pkgutil, relpos_np
for module in pkgutil.walk_packages(relpos_np.__path__, "relpos_np."):
    if not module.name.startswith({APART}):
        importlib.import_module(module.name)
"""
RUN = """
import contextlib, io, numpy as np, relpos_np as rp
from relpos_np.testing import example
for scheme, info in rp.SCHEMES.items():
    if info.kind == "attention":
        for backend in rp.backend.HOST_BACKENDS:
            example(scheme).run(backend)
x = np.ones((2, 300, 8), np.float32)
rp.attention_vjp(x, x, x, grad_out=x)
rp.rel_shift(np.ones((5, 9)), variant="conformer")
from relpos_np._commands.main import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["attend", "--plot", "none"]) == 0
"""


@pytest.mark.parametrize("code", [IMPORT, RUN], ids=["import", "run"])
def test_no_connection_no_program_nothing_unpickled(code):
    status, out, log = child(GUARD + code + REPORT, bare=True)
    assert status == 0, log
    assert out.strip() == "", out


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path):
    used = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\s*-?\s*uses:", line)]
    assert used
    for line in used:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_begin_without_permissions(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")


def test_what_builds_a_release_is_named_by_its_digest():
    text = (GITHUB / "build-requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {entry.partition("==")[0] for entry in entries} >= {"build", "hatchling"}
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+ *", entry), entry


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
@pytest.mark.parametrize(
    ("tag", "heading", "said"),
    [
        ("v1.2.3", "## [1.2.3] - 2026-11-30", ""),
        ("v1.2.4", "## [1.2.3] - 2026-11-30", "the tag must be v1.2.3"),
        ("1.2.3", "## [1.2.3] - 2026-11-30", "the tag must be v1.2.3"),
        ("v1.2.3", "## [Unreleased]", "has no heading"),
        ("v1.2.3", "## [1x2.3] - 2026-11-30", "has no heading"),
    ],
)
def test_a_tag_must_match_the_version_and_the_changelog(tmp_path, tag, heading, said):
    for folder in (".github", "relpos_np"):
        (tmp_path / folder).mkdir()
    shutil.copy(GITHUB / "check-tag", tmp_path / ".github")
    (tmp_path / "relpos_np" / "__init__.py").write_text('__version__ = "1.2.3"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n", encoding="utf-8")
    done = subprocess.run(
        ["bash", tmp_path / ".github" / "check-tag", tag], capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(said)
    assert said in done.stderr


def test_the_citation_names_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [rp.__version__]
