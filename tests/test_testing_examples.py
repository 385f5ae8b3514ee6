"""The examples of docs/testing.md, run where their framework is installed; the CUDA kernel runs in a simulator."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relpos_np

PAGE = Path(relpos_np.__file__).parent.parent / "docs" / "testing.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="there is no docs/testing.md: not a checkout")


def example(title):
    """The Python below a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return code


def run(code, **environment):
    """What an example does in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=PAGE.parent.parent,
        env={**os.environ, **environment},
    )


def passes(code, **environment):
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]


def fails(code, **environment):
    done = run(code, **environment)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr, done.stderr[-3000:]


def changed(code, old, new):
    """The example with a bug."""
    assert code.count(old) == 1
    return code.replace(old, new)


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parity
def test_torch():
    needs("torch")
    code = example("PyTorch")
    passes(code)
    # Its assertions notice what they are there for.
    fails(changed(code, "- offset", "- offset + 1"))
    fails(changed(code, "bias + mask", "bias"))
    fails(changed(code, "out.backward(grad_out)", "out.backward(grad_out * 1.001)"))
    fails(changed(code, "attn_mask=past, ", "attn_mask=past, scale=0.225, "))


@pytest.mark.parity
def test_jax():
    needs("jax")
    code = example("JAX")
    passes(code, JAX_PLATFORMS="cpu")
    fails(changed(code, "back(out)", "back(out * 1.001)"), JAX_PLATFORMS="cpu")
    fails(changed(code, "len(table) - 1)", "len(table) - 2)"), JAX_PLATFORMS="cpu")


@pytest.mark.simulator
def test_cuda():
    needs("numba")
    code = example("A CUDA kernel")
    passes(code, NUMBA_ENABLE_CUDASIM="1")
    fails(changed(code, "abs(j - i - (k.shape[2] - q.shape[2]))", "abs(j - i)"), NUMBA_ENABLE_CUDASIM="1")
    fails(changed(code, "* kept + weight * v", "+ weight * v"), NUMBA_ENABLE_CUDASIM="1")
