"""The kernels' machine code for a Hopper device, run by an interpreter, computes what the reference does."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "asv_bench"))

from benchmarks.shapes import SMALL, make
from gpu import predict, sass

pytestmark = pytest.mark.skipif(
    sass.nvdisasm() is None and os.environ.get("RELPOS_COMPILED") != "required",
    reason=f"nvdisasm is not installed: {sass.REMEDY}",
)


@pytest.fixture(scope="module")
def runner():
    return predict.Runner()


# A weight is a sum of 16 products, a result of as many as there are keys: below 2^-24 * (16 + 112) times numbers of
# order 4, and half precision is rounded once more.
@pytest.mark.parametrize("name", ["a", "d", "e", "f", "g", "h", "i", "ab"])
def test_results(runner, name):
    _, error = runner.checked(make(SMALL[name]), "attention")
    assert error < (2**-6 if name.endswith("b") else 2**-15)


@pytest.mark.parametrize("name", ["a", "d", "g"])
def test_gradients(runner, name):
    _, error = runner.checked(make(SMALL[name]), "backward")
    assert error < 2**-15


@pytest.mark.parametrize("name", ["a", "ab"])
def test_matrix_units(runner, name, monkeypatch):
    """Three planes of float32, and bfloat16 as it is stored, whose weights are rounded to it as well."""
    monkeypatch.setenv("RELPOS_CUDA_UNIT", "mma")
    _, error = runner.checked(make(SMALL[name]), "attention")
    assert error < (2**-6 if name.endswith("b") else 2**-15)
    assert any(one.base == "HMMA" for _, program in runner.programs.values() for one in program.instructions)
