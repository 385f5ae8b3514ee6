"""Kernels for a level of instructions: what one machine compiled, another of that level loads."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from relpos_np.kernels._numba.simd import target
from relpos_np.kernels._numba.simd.level import LEVELS

# A processor of another model, one that lacks an instruction, and a shift by kernel and formula.
MACHINE = """
import logging, sys
import llvmlite.binding as llvm
llvm.get_host_cpu_name = lambda: sys.argv[1]
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import numpy as np
import relpos_np as rp
x = np.random.default_rng(0).standard_normal((2, 9, 17)).astype(np.float32)
found, expected = (rp.rel_shift(x, variant="conformer", backend=name) for name in ("numba", "numpy"))
print("equal", np.array_equal(found, expected))
"""
OLD = {"avx2": True, "f16c": True}
pytestmark = pytest.mark.slow
LEVEL = pytest.mark.skipif(target.TARGET not in (target.AVX2, target.AVX512), reason="levels are those of x86-64")


def run(folder, model, level, code=MACHINE):
    environment = {**os.environ, "RELPOS_CACHE_DIR": str(folder), "RELPOS_CPU_LEVEL": level}
    done = subprocess.run(
        [sys.executable, "-c", code, model], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout, done.stderr


@LEVEL
@pytest.mark.parametrize(("level", "compilations"), [("x86-64-v3", 1), ("", 2)])
def test_a_level_is_compiled_once_for_all_models(tmp_path, level, compilations):
    printed = "".join(run(tmp_path, model, level)[0] for model in ("haswell", "znver3"))
    assert printed.count("equal True") == 2, printed
    assert printed.count("compiling") == compilations, printed


@LEVEL
def test_what_a_level_lacks_is_not_used(tmp_path):
    code = "from relpos_np.kernels._numba.simd import target; print(target.TARGET.name, target.UNIT)"
    assert run(tmp_path, "", "x86-64-v3", code)[0].split() == ["avx2", "none"]


@pytest.mark.parametrize(
    ("level", "code", "words"),
    [
        ("x86-64-v9", MACHINE, f"RELPOS_CPU_LEVEL: expected one of {', '.join(LEVELS)}, found 'x86-64-v9'"),
        (
            "x86-64-v3",
            "import llvmlite.binding as llvm\nllvm.get_host_cpu_features = lambda: {'avx2': True, 'f16c': True}\n"
            + MACHINE,
            "RELPOS_CPU_LEVEL: x86-64-v3 needs fma; this processor has none",
        ),
        pytest.param(
            "x86-64-v3",
            "import numba\nnumba.njit(lambda x: x)(1)\n" + MACHINE,
            "RELPOS_CPU_LEVEL: Numba has compiled for another processor in this process before",
            marks=LEVEL,
        ),
    ],
    ids=["unknown", "lacking", "late"],
)
def test_a_level_that_cannot_be_is_an_error(tmp_path, level, code, words):
    assert words in run(tmp_path, "haswell", level, code)[1]
