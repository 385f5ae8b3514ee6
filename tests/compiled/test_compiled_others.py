"""The other CUDA kernels compile for a Hopper device: products, decoding, shifts, what is done elementwise."""

import re

import ml_dtypes
import numpy as np
import pytest
from numba import types
from offline import arguments, compiled, flat, integers, record, scales

from relpos_np.kernels._cuda.backward_pass import sinks
from relpos_np.kernels._cuda.forward_pass import attend, decode, product, shift
from relpos_np.kernels._cuda.launch.records import Call, Results
from relpos_np.kernels._cuda.simd import elementwise, rotate
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS

SHARED = 48 * 1024


def array(dtype):
    """Numba's type of what an array of a dtype is on the device."""
    return flat(FORMATS[np.dtype(dtype).name][0])


@pytest.mark.parametrize("stored", FORMATS)
def test_products(stored):
    tiling = attend.tiling(np.dtype("float64" if stored == "float64" else "float32"), 64)
    real = flat(tiling.kind)
    code = compiled(product.product(tiling, stored), flat(FORMATS[stored][0]), real, real, integers(product.Product))
    assert code.spilled == 0
    assert code.count(".local") == 0
    assert code.shared <= SHARED
    assert code.reads_wide(64 if tiling.dtype == np.float32 else 32, tiling.dtype)
    code = compiled(product.joined(tiling.dtype), real, real, types.int64, integers(product.Product))
    assert code.spilled == 0


@pytest.mark.parametrize(
    ("stored", "threads", "rows", "depth"),
    [
        ("float32", 128, 1, 128), ("float32", 128, 16, 128), ("float32", 64, 8, 64), ("float16", 128, 8, 128),
        ("bfloat16", 128, 16, 128), ("bfloat16", 64, 4, 64), ("float64", 128, 1, 128), ("float64", 64, 16, 64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wide", [True, False])
def test_decoding(stored, threads, rows, depth, wide):
    dtype = np.dtype("float64" if stored == "float64" else "float32")
    word = 16 // FORMATS[stored][1].itemsize if wide else 1
    block = decode.Block(dtype, threads, rows, depth, word, word)
    assert block.fits
    operand, real = flat(FORMATS[stored][0]), flat(block.kind)
    code = compiled(
        decode.decode(block, (stored,) * 4),
        *(*arguments(operand, real), record(Results, operand, real, real), integers(Call)),
        *(integers(decode.Ranges), scales(block.kind)),
    )
    assert code.spilled == 0
    assert code.count(".local") == 0
    assert code.registers <= 255
    assert code.shared <= SHARED
    # Keys and values.
    loads = len(re.findall(r"ld\.global[.a-z]*\.v[248]\.", code.ptx))
    assert (loads >= 2) == wide


@pytest.mark.parametrize("stored", FORMATS)
def test_merging(stored):
    dtype = np.dtype("float64" if stored == "float64" else "float32")
    code = compiled(
        decode.merge(dtype, stored, 128), array(dtype), flat(FORMATS[stored][0]), array(dtype), *[types.int64] * 5
    )
    assert code.spilled == 0
    assert code.registers <= 64


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_sinks(name):
    dtype, real, word = np.dtype(name), array(name), types.int64
    pair, triple = types.UniTuple(real, 2), types.UniTuple(real, 3)
    for code in (
        compiled(sinks.sink_kernel(dtype), real, real, real, word),
        compiled(sinks.before_kernel(dtype), pair, real, pair, triple, *[word] * 3),
    ):
        assert code.spilled == 0
        assert code.registers <= 64
        # Exponentials of float32 are not made in float64.
        assert (".f64" in code.ptx) == (name == "float64")


@pytest.mark.parametrize("across", [1, 8, 256])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rel_shift(size, across):
    word = flat({1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[size])
    code = compiled(shift.shift(size, 256, across), word, word, integers(shift.Shift))
    assert code.spilled == 0
    assert code.registers <= 64


BRAIN = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("operation", "x", "y", "out", "real"),
    [
        ("copy", BRAIN, BRAIN, "float32", "float32"), ("copy", "float32", "float32", BRAIN, "float32"),
        ("copy", "float32", "float32", "float16", "float32"), ("copy", BRAIN, BRAIN, "float64", "float64"),
        ("add", BRAIN, "float32", "float32", "float32"), ("multiply", "float16", "float32", "float32", "float32"),
        ("add", "float64", "float64", "float64", "float64"), ("copy", "float32", "float32", "float32", None),
    ],
)  # fmt: skip
def test_elementwise(operation, x, y, out, real):
    dtypes = [np.dtype(dtype) for dtype in (x, y, out)]
    kernel = elementwise._elementwise(operation, *dtypes, None if real is None else np.dtype(real))
    code = compiled(kernel, *map(array, dtypes), types.int64, *[types.UniTuple(types.int64, 4)] * 4)
    assert code.spilled == 0
    assert code.registers <= 64
    # Half precision goes through float32 alone.
    assert (".f64" in code.ptx) == (real == "float64")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("dtype", ["float16", BRAIN, "float32", "float64"])
def test_rotation(dtype, half):
    dtype = np.dtype(dtype)
    real = np.dtype("float64" if dtype.name == "float64" else "float32")
    code = compiled(
        rotate._rotate(dtype, real, half), array(dtype), *[array(real)] * 3, flat(types.int64), integers(rotate.Turn)
    )
    assert code.spilled == 0
    assert code.registers <= 64
