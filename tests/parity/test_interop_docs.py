"""The examples of docs/interop.md and docs/transformers.md run as they stand."""

import contextlib
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DOCS = Path(__file__).parent.parent.parent / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("interop.md", "transformers.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
PACKAGES = ("transformers", "torch", "jax")


def package(code):
    """The package that a block is about."""
    return next(name for name in PACKAGES if f"relpos_np.interop.{name}" in code)


def test_each_package_has_an_example():
    assert {package(code) for code in BLOCKS} == set(PACKAGES)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"{n} {package(code)}" for n, code in enumerate(BLOCKS)])
def test_example_runs(code):
    if importlib.util.find_spec(package(code)) is None:
        pytest.skip(f"{package(code)} is not installed")
    with contextlib.ExitStack() as stack:
        if "torch" in code:
            stack.enter_context(importlib.import_module("torch").enable_grad())
        exec(compile(code, package(code), "exec"), {})  # noqa: S102
