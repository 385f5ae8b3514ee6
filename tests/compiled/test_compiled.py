"""The CUDA forward kernel compiles for a Hopper device: no spills, and shared loads of 16 bytes."""

import numpy as np
import pytest
from numba import types
from offline import arguments, compiled, flat, integers, record, scales

from relpos_np.kernels._cuda import attend as forward
from relpos_np.kernels._cuda.intrinsics import FORMATS
from relpos_np.kernels._cuda.records import Call, Results

# What a block may have without asking the driver for more.
SHARED = 48 * 1024
# Four blocks of 64 threads, or two of 128, share a multiprocessor's 65,536 registers.
REGISTERS = {64: 255, 128: 255}


def vector_loads(code, kind):
    """Shared loads of 16 bytes."""
    return code.count("ld.shared.v4.f32") if kind is types.float32 else code.count("ld.shared.v2.f64")


@pytest.mark.parametrize(
    ("depth", "v_dim", "stored", "skewed"),
    [(size, size, stored, False) for size in (64, 128) for stored in FORMATS]
    + [(size, size, stored, True) for size in (64, 128) for stored in ("float32", "float64")]
    + [(32, 32, "float32", False), (80, 100, "bfloat16", False), (5, 3, "float64", False), (256, 256, "float32", True)],
)
def test_forward(depth, v_dim, stored, skewed):
    dtype = np.dtype(stored if stored == "float64" else "float32")
    width = forward.value_width(dtype, v_dim)
    tiling = forward.tiling(dtype, width, skewed)
    kernel = forward.attend(tiling, (stored,) * 4, depth, width, skewed)
    operand, real = flat(FORMATS[stored][0]), flat(tiling.kind)
    code = compiled(
        kernel,
        *arguments(operand, real),
        *(record(Results, operand, real, real), integers(Call), scales(tiling.kind)),
    )
    assert code.spilled == 0
    assert code.registers <= REGISTERS[tiling.threads]
    assert code.shared <= SHARED
    # Operands of a step of scores and of values: 16 numbers, or 8 and as many channels.
    steps = 4 * (tiling.high + tiling.wide + tiling.high + width // 8) * dtype.itemsize // 16
    assert vector_loads(code, tiling.kind) >= steps
    assert code.count(".local") == 0
