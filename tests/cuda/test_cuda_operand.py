"""One array on the device: what schemes do with it, how it is converted, and how results are exported."""

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from relpos_np import testing
from relpos_np._calls import lowering
from relpos_np._contract import check
from relpos_np._contract.turned import turn_channels
from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from relpos_np.kernels._cuda.simd import intrinsics
from relpos_np.kernels._cuda.simd.elementwise import elementwise
from tests.cuda.doubles import (
    ATTENTION,
    DTYPES,
    EPS,
    There,
    heads_last,
    holds,
    with_gaps,
)

# In the simulator NumPy warns of the infinities that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_terms_are_those_of_the_host(name, variant, transfers):
    one = testing.example(name, dtype="float32", variant=variant, size="tiny")
    problem, _, _ = check.problem(one.q, one.k, one.v, causal=one.kwargs.get("causal", False))
    schemes = lowering.checked_schemes(one.position, problem)
    expected = lowering.all_terms(lowering.each_lowered(schemes, problem))
    del transfers.up[:]
    operands = [Operand.of(There(x), n) for x, n in ((problem.q, "q"), (problem.k, "k"))]
    found = lowering.all_terms(lowering.each_lowered(schemes, problem, operands))
    stayed = not transfers.down
    pairs = [(found.query, expected.query), (found.key, expected.key)]
    for slot, names in (("queries", ("query", "weights")), ("keys", ("key", "weights")), ("tables", ("table",))):
        a, b = getattr(found, slot), getattr(expected, slot)
        assert len(a) == len(b)
        pairs += [(getattr(x, n), getattr(y, n)) for x, y in zip(a, b, strict=True) for n in names]
    pairs += list(zip(found.biases, expected.biases, strict=True))
    for a, b in pairs:
        if b is None:
            assert a is None
        else:
            # One rounding of a product, or of a sum, may differ.
            largest = np.abs(b[np.isfinite(b)]).max(initial=1)
            np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=4 * EPS["float32"] * largest)
    wraps = name == "transformer_xl" and len(expected.queries) > 1
    copied = {"swin_v2", "cope", "selective", "dape", "path", "pope", "liere"}
    assert stayed == (name not in copied and not wraps and variant != "wenet")
    if stayed:
        assert not holds(transfers.up, one.q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation(layout, dtype, rng):
    x = with_gaps(rng.standard_normal((2, 3, 3, 5, 8)).astype(DTYPES[dtype]))
    real = np.dtype("float64" if dtype == "float64" else "float32")
    for shape in ((1, 5, 4), (3, 5, 3), (1, 1, 5, 4), (2, 1, 1, 5, 1), (2, 3, 3, 5, 2)):
        cos, sin = rng.standard_normal((2, *shape)).astype(real)
        found = Operand.of(There(x), "x").turned(cos, sin, layout)
        expected = turn_channels(x.astype(real), cos, sin, layout)
        np.testing.assert_allclose(found.host(), expected, rtol=0, atol=16 * EPS[real.name])
        rest = x[..., 2 * shape[-1] :].astype(real)
        np.testing.assert_array_equal(found.host()[..., 2 * shape[-1] :], rest)


def test_conversions_round_as_numpy_does(rng):
    bits = rng.integers(0, 1 << 32, 600, dtype=np.uint32)
    # Ties, the largest numbers, infinities and NaN with a payload in the lower half alone.
    special = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000000]
    x = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float64):
        with np.errstate(all="ignore"):
            expected = x.astype(dtype)
            found = Operand.of(There(x), "x").contiguous(dtype)
            back = found.contiguous(np.float32)
        np.testing.assert_array_equal(np.isnan(found.host()), np.isnan(x))
        np.testing.assert_array_equal(found.host()[~np.isnan(x)], expected[~np.isnan(x)])
        np.testing.assert_array_equal(back.host()[~np.isnan(x)], expected[~np.isnan(x)].astype(np.float32))


@pytest.mark.parametrize("shape", [(2, 3, 2, 3, 2, 2), (4,), (), (3, 1, 5)])
def test_elementwise_in_any_number_of_axes(shape, rng):
    x = rng.standard_normal((*shape, 2))[..., 0]
    y = np.broadcast_to(rng.standard_normal(shape[-1:] if len(shape) < 2 else (shape[-2], 1)), shape)
    a, b = (Operand.of(There(n), "x") for n in (x, y))
    for operation, expected in (("add", x + y), ("multiply", x * y), ("copy", x)):
        out = Operand.empty(shape, np.float64)
        elementwise(operation, shape, a._given(), None if operation == "copy" else b._given(), out._given())
        np.testing.assert_array_equal(out.host(), expected)


def test_numpy_computes_with_an_operand(rng, transfers):
    x, y = rng.standard_normal((2, 3, 4)).astype(np.float32)
    a = Operand.of(There(x), "x")
    for found, expected in ((a + y, x + y), (y * a, y * x), (a * 2, x * 2), (np.add(a, a), x + x), (2.0 * a, 2 * x)):
        assert type(found) is Operand
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.host(), expected)
    assert (a * y.astype(np.float64)).dtype == np.float64
    before = x.copy()
    b = a
    b *= np.float32(3)
    np.testing.assert_array_equal(b.host(), before * 3)
    np.testing.assert_array_equal(x, before)
    del transfers.down[:]
    for found, expected in (
        (a - y, x - y),
        (y @ a.swapaxes(0, 1), y @ x.T),
        (a[..., 1:], x[..., 1:]),
        (np.concatenate([a, y]), np.concatenate([x, y])),
        (a.sum(axis=0), x.sum(axis=0)),
        (a.astype(np.float64), x.astype(np.float64)),
        (np.exp(a), np.exp(x)),
    ):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, expected)
    # One copy serves them all, and nothing can be written to it by mistake.
    assert len(transfers.down) == 1
    for one in (a, Operand.of(There(x.astype(np.float16)), "x")):
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(one)[0] = 1
    with pytest.raises(AttributeError, match="'Operand' object has no attribute 'nothing'"):
        a.nothing  # noqa: B018


# Results ---------------------------------------------------------------------------------------------


def code_of(capsule):
    """Element type, bits and name of a capsule of DLPack."""
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    name = name_of(capsule)
    start = address_of(capsule, name) + (32 if name.endswith(b"versioned") else 0) + 20
    return *ctypes.string_at(start, 2), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_exported(dtype, rng):
    x = rng.standard_normal((2, 3, 4)).astype(DTYPES[dtype])
    there = DeviceArray(Operand.of(There(heads_last(x)), "x"), 5)
    assert (there.shape, there.ndim, there.size, there.nbytes, len(there)) == ((2, 3, 4), 3, 24, x.nbytes, 2)
    interface = there.__cuda_array_interface__
    assert interface["stream"] == 5
    assert interface["version"] == 3
    assert interface["typestr"] == np.dtype(DTYPES[dtype]).str
    np.testing.assert_array_equal(Operand.of(There(x, **interface), "x").host(), x)
    np.testing.assert_array_equal(np.asarray(there), x)
    assert np.asarray(there).dtype == x.dtype
    expected = (4, 16) if dtype == "bfloat16" else (2, 8 * x.itemsize)
    assert code_of(there.__dlpack__()) == (*expected, b"dltensor")
    assert code_of(there.__dlpack__(max_version=(1, 0))) == (*expected, b"dltensor_versioned")
    if dtype != "bfloat16":
        view = np.from_dlpack(there)
        np.testing.assert_array_equal(view, x)
        assert np.shares_memory(view, there._operand.flat._ary)


def test_strides_are_never_negative(rng):
    x = rng.standard_normal((3, 1, 4))
    odd = There(x, strides=(32, -8, 8))
    found = Operand.of(odd, "x")
    assert found.strides == (4, 0, 1)
    np.testing.assert_array_equal(found.host(), x)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, heads_last, with_gaps])
def test_ranges_of_axes_are_views(layout, rng):
    x = layout(rng.standard_normal((2, 3, 5, 4)))
    a = Operand.of(There(x), "x")
    every = slice(None)
    for index in (
        (slice(1, 2), ..., slice(2, 4), every), (..., slice(4, 5), every), (every,) * 3 + (slice(1, 3),), (...,),
        (slice(0, 1), ...), (..., slice(3, 3), every), (..., slice(5, 9)), (slice(1, 2), ..., slice(0, 3)),
    ):  # fmt: skip
        found = a.cut(index)
        np.testing.assert_array_equal(found.host(), x[index])
        if found.size:
            assert np.shares_memory(found.flat._ary, a.flat._ary)
    a.cut((..., slice(1, 3), every)).fill(7)
    x[..., 1:3, :] -= 7
    assert (x[..., 1:3, :] == 0).all()
    assert (x[..., 3:, :] != 0).all()


def test_an_operand_keeps_its_owner(rng):
    owner = There(rng.standard_normal((2, 3)))
    alive = weakref.ref(owner)
    operand = Operand.of(owner, "x")
    expected = owner.x.copy()
    del owner
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(operand.host(), expected)
    del operand
    gc.collect()
    assert alive() is None


# What is refused ----------------------------------------------------------------------------------------


def test_what_an_operand_refuses(rng):
    x = rng.standard_normal((2, 3)).astype(np.float32)
    a = Operand.of(There(x), "x")
    assert Operand.of(a, "x") is a
    assert len(a) == 2
    for shape in ((3, 3), (3,)):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) does not broadcast to"):
            a.broadcast_to(shape)
    for shape in ((3,), (2,)):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is not .* with axes of one entry in front"):
            a.reshaped(shape)
    for one in (a, DeviceArray(a, 0)):
        with pytest.raises(ValueError, match="cannot be read on the host without a copy"):
            np.asarray(one, copy=False)
        assert np.asarray(one, np.float64).dtype == np.float64
    assert repr(DeviceArray(a, 0)) == "DeviceArray(shape=(2, 3), dtype=float32)"


def test_numpy_takes_over_what_kernels_cannot_add(rng):
    x = rng.standard_normal((2, 3)).astype(np.float32)
    a = Operand.of(There(x), "x")
    for other in (np.full(3, 1j), np.array([True, False, True]), np.full(3, 2**40)):
        found = a + other
        np.testing.assert_array_equal(np.asarray(found), x + other)
    out = np.empty_like(x)
    assert np.add(a, x, out=out) is out
    np.testing.assert_array_equal(out, x + x)
    with pytest.raises(TypeError):
        a + object()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_is_launched_for_nothing(shape):
    a = Operand.of(There(np.empty(shape, np.float32)), "x")
    assert (a + a).shape == shape
    assert a.host().shape == shape
    heads = Operand.of(There(np.empty((1, *shape), np.float32)), "x")
    turned = heads.turned(np.ones((1, shape[0], 0), np.float32), np.ones((1, shape[0], 0), np.float32), "half")
    assert turned.shape == (1, *shape)


def test_the_simulator_sees_negative_indices():
    """Indices that the device would read without a word."""
    assert intrinsics.u64(3) == 3
    with pytest.raises(IndexError, match="a kernel reads element -1"):
        intrinsics.u64(-1)
    four = intrinsics.neighbours(4)
    assert four(np.arange(8), 4) == (4, 5, 6, 7)
    with pytest.raises(IndexError, match="a kernel reads 4 elements from 2 on"):
        four(np.arange(8), 2)
