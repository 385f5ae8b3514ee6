"""The CUDA kernels of the backward pass compile for a Hopper device as the forward kernel does."""

import numpy as np
import pytest
from numba import types
from offline import arguments, compiled, flat, integers, record, scales

from relpos_np.kernels._cuda.backward_pass import sums
from relpos_np.kernels._cuda.backward_pass.keys import key_gradient
from relpos_np.kernels._cuda.backward_pass.queries import query_gradient
from relpos_np.kernels._cuda.backward_pass.sizes import key_side, query_side
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, SCORES, UNCAPPED
from relpos_np.kernels._cuda.launch.records import Back, Call, Upstream
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS

# What a block may have without asking the driver for more, and the kilobyte that the assembler counts for the system.
SHARED = 49 * 1024
SIZES = [
    *[(size, size, stored, False) for size in (64, 128) for stored in FORMATS],
    *[(size, size, stored, True) for size in (64, 128) for stored in ("float32", "float64")],
    *[(32, 32, "float32", False), (80, 100, "bfloat16", False), (5, 3, "float64", False)],
    *[(256, 256, "float32", True), (256, 256, "float64", False)],
]
# Of what is capped some sizes: each is a kernel of its own, and half a minute.
CAPPED = [(*size, UNCAPPED) for size in SIZES]
CAPPED += [
    (size, size, stored, skewed, capped)
    for size, stored, skewed in (
        (5, "float64", False), (64, "float32", False), (128, "float16", False), (128, "float64", True),
        (256, "float32", True),
    )
    for capped in (SCORES, CONTENT)
]  # fmt: skip


def check(code, tiling, width, allowed=0):
    """No spills, registers for two blocks, and loads of 16 bytes in a step of the scores' products and of the rows'.

    `allowed`: bytes that may be spilled after all.
    """
    assert code.spilled <= allowed
    assert code.count(".local") == 0
    assert code.registers <= 255
    assert code.shared <= SHARED
    assert code.reads_wide(4 * (tiling.high + tiling.wide + tiling.high + width // 8), tiling.dtype)


@pytest.mark.parametrize(("depth", "v_dim", "stored", "skewed", "capped"), CAPPED)
def test_gradients_of_queries(depth, v_dim, stored, skewed, capped):
    dtype = np.dtype(stored if stored == "float64" else "float32")
    tiling, width = query_side(dtype, depth, skewed or capped != UNCAPPED)
    kernel = query_gradient(tiling, (stored,) * 3, depth, width, skewed, capped)
    operand, real = flat(FORMATS[stored][0]), flat(tiling.kind)
    code = compiled(
        kernel,
        *(*arguments(operand, real), record(Upstream, real, real, real), real, real),
        *(integers(Call), integers(Back), scales(tiling.kind)),
    )
    check(code, tiling, width)


@pytest.mark.parametrize(("depth", "v_dim", "stored", "skewed", "capped"), CAPPED)
def test_gradients_of_keys_and_values(depth, v_dim, stored, skewed, capped):
    dtype = np.dtype(stored if stored == "float64" else "float32")
    tiling, width = key_side(dtype, depth, v_dim)
    kernel = key_gradient(tiling, (stored,) * 3, depth, width, skewed, capped)
    operand, real = flat(FORMATS[stored][0]), flat(tiling.kind)
    code = compiled(
        kernel,
        *(*arguments(operand, real), record(Upstream, real, real, real), real, real, real),
        *(integers(Call), integers(Back), scales(tiling.kind)),
    )
    # Slopes of a cap are a fragment more, beside gradients of keys and of values.
    check(code, tiling, width, 128 if skewed and capped != UNCAPPED else 0)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_sums(name):
    dtype, real, word = np.dtype(name), flat(FORMATS[name][0]), types.int64
    double, private = flat(types.float64), integers(sums.Private)
    for code in (
        compiled(sums.delta_kernel(dtype), real, real, real, real, *[word] * 3),
        compiled(sums.reduce_kernel(), real, double, private, *[word] * 5),
        compiled(sums.seen_kernel(dtype), real, real, real, integers(sums.Seen)),
        compiled(sums.group_kernel(dtype), real, real, *[word] * 3),
    ):
        assert code.spilled == 0
        assert code.registers <= 64
