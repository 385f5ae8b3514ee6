"""The CUDA forward kernel compiles for a Hopper device: no spills, and shared loads of 16 bytes."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import types
from numba.cuda import dispatcher
from offline import arguments, compiled, flat, integers, record, scales

from relpos_np.kernels._cuda.forward_pass import attend as forward
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, SCORES, UNCAPPED
from relpos_np.kernels._cuda.launch.records import Call, Results
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS

# What a block may have without asking the driver for more.
SHARED = 48 * 1024
# Four blocks of 64 threads, or two of 128, share a multiprocessor's 65,536 registers.
REGISTERS = {64: 255, 128: 255}


SIZES = [(size, size, stored, False) for size in (64, 128) for stored in FORMATS]
SIZES += [(size, size, stored, True) for size in (64, 128) for stored in ("float32", "float64")]
SIZES += [(32, 32, "float32", False), (80, 100, "bfloat16", False), (5, 3, "float64", False)]
SIZES += [(256, 256, "float32", True)]
# Of what is capped one size of each format, and the largest: each is a kernel of its own.
OFTEN = [*SIZES[len(FORMATS) : 2 * len(FORMATS)], (128, 128, "float64", True), SIZES[-1]]


@pytest.mark.parametrize(
    ("depth", "v_dim", "stored", "skewed", "capped"),
    [*((*size, UNCAPPED) for size in SIZES), *((*size, capped) for size in OFTEN for capped in (SCORES, CONTENT))],
)
def test_forward(depth, v_dim, stored, skewed, capped):
    dtype = np.dtype(stored if stored == "float64" else "float32")
    width = forward.value_width(dtype, v_dim)
    tiling = forward.tiling(dtype, width, skewed)
    kernel = forward.attend(tiling, (stored,) * 4, depth, width, skewed, capped)
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
    assert code.reads_wide(4 * (tiling.high + tiling.wide + tiling.high + width // 8), dtype)
    assert code.count(".local") == 0


def test_records_of_arrays_are_passed_as_kernels_read_them():
    """What Numba passes for records of arrays and numbers has as many words as the kernel has parameters."""
    tiling = forward.tiling(np.dtype(np.float32), 32)
    kernel = forward.attend(tiling, ("float32",) * 4, 32, 32, False)
    real = flat(types.float32)
    kinds = *arguments(real, real), record(Results, real, real, real), integers(Call), scales(types.float32)
    code = compiled(kernel, *kinds)
    place = SimpleNamespace(strides_in_bytes=(4,), is_contiguous_c=True, is_contiguous_f=True)
    array = SimpleNamespace(size=1, dtype=np.dtype(np.float32), ptr=0, shape=(1,), _layout=place)
    array.to_device = lambda *_: array

    def values(kind):
        if isinstance(kind, types.BaseTuple):
            return tuple(map(values, kind))
        return array if isinstance(kind, types.Array) else 1

    passed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "wrap_arg", lambda x: x)
        launcher = object.__new__(dispatcher._Kernel)
        launcher.extensions = []
        for kind in kinds:
            launcher._prepare_args(kind, values(kind), 0, [], passed)
    header = code.ptx[code.ptx.index(".visible .entry") :]
    assert len(passed) == header[: header.index(")")].count(".param")
