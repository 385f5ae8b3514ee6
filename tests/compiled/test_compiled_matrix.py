"""The forward kernel on matrix units compiles for a Hopper device: no spills, and the instructions that it is for."""

import pytest
from numba import types
from offline import arguments, compiled, flat, integers, record, scales

from relpos_np.kernels._cuda.forward_pass import matrix, unit
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, SCORES, UNCAPPED
from relpos_np.kernels._cuda.launch.records import Call, Results
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS
from relpos_np.kernels._cuda.simd.planes import Block, Source, tiling_for

SHARED = 48 * 1024


@pytest.mark.parametrize(
    ("size", "stored", "planes", "skewed", "capped", "wide"),
    [
        (64, "bfloat16", 1, False, UNCAPPED, True),
        (128, "float16", 1, False, UNCAPPED, True),
        (64, "float32", 3, False, UNCAPPED, True),
        (40, "bfloat16", 1, True, SCORES, False),
        (128, "float32", 2, False, CONTENT, True),
    ],
)
def test_forward(size, stored, planes, skewed, capped, wide):
    width = unit.value_width(size)
    sizes = tiling_for(width, planes, crowded=skewed or capped != UNCAPPED)
    source = Source(stored, wide)
    half = stored if planes == 1 else "bfloat16"
    block = Block(sizes, half, planes, size, width, skewed, source, source, source)
    operand, real = flat(FORMATS[stored][0]), flat(types.float32)
    code = compiled(
        matrix.attend(block, stored, capped),
        *arguments(operand, real),
        *(record(Results, operand, real, real), integers(Call), scales(types.float32)),
    )
    assert code.spilled == 0
    assert code.registers <= 255
    assert code.shared <= SHARED
    assert code.count(".local") == 0
    # Fragments are in registers, so that every product of a tile but for the loop over channels stands in the text.
    pairs, tall = planes * (planes + 1) // 2, sizes.high // 2
    steps = sizes.rows // 8 + sizes.rows // 16 * (width // 8)
    assert code.ptx.count("mma.sync.aligned.m16n8k16.row.col.f32") == steps * pairs * tall
    if wide and planes == 1:
        assert code.count("ld.global.v4.u32") + code.count("ld.global.v4.b32") > 0
