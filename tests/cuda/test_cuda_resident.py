"""Arrays that stay on the device, with Numba's own: the same on a GPU as in the simulator."""

import numba.cuda
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from relpos_np.kernels._cuda.launch import device

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@pytest.fixture
def stream():
    """A stream of our own, by its address; the simulator has none."""
    if device.simulated():
        yield 1
        return
    own = numba.cuda.stream()
    yield int(own)
    own.synchronize()


def sent(x, stream):
    """A copy on the device: one of Numba's arrays, or ours for bfloat16, which Numba lacks."""
    with device.on(stream):
        found = Operand.uploaded(x)
        if x.dtype.name == "bfloat16":
            return DeviceArray(found, stream)
        flat = found.flat.reshape(x.shape)
        return flat if device.simulated() else flat.bind(numba.cuda.external_stream(stream))


def draw(rng, dtype, q_len=5, k_len=9):
    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    shapes = ((1, 2, q_len, 8), (1, 1, k_len, 8), (1, 1, k_len, 8))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def position_of(name, rng):
    return {
        "none": lambda: None,
        "table": lambda: rp.T5(rng.standard_normal((32, 2))),
        "key table": lambda: rp.Shaw(rng.standard_normal((7, 8))),
        "turned": lambda: rp.Rotary(4, layout="interleaved"),
        "added to": lambda: rp.TransformerXL(*rng.standard_normal((2, 2, 8)), rng.standard_normal((9, 2, 8))),
    }[name]()


def test_strict_floating_point(rng, stream):
    """Exponentials that become 0 while the scheme is lowered, of operands that never were on the host."""
    operands = draw(rng, "float32")
    narrow = rp.TISA(*(np.full((5, 2), x, np.float32) for x in (1.0, 40.0, 3.0)))
    expected = rp.attention(*operands, position=narrow, offset=40, backend="cuda")
    with np.errstate(all="raise"):
        found = rp.attention(*(sent(x, stream) for x in operands), position=narrow, offset=40, backend="cuda")
        gradient = rp.attention_vjp(
            *(sent(x, stream) for x in operands),
            grad_out=sent(expected, stream),
            position=narrow,
            offset=40,
            backend="cuda",
        )
    np.testing.assert_array_equal(found.copy_to_host(), expected)
    assert all(np.isfinite(x).all() for x in gradient.position.values())


@pytest.mark.parametrize("name", ["none", "table", "key table", "turned", "added to"])
@pytest.mark.parametrize("dtype", EPS)
def test_attention(dtype, name, rng, stream):
    operands = draw(rng, dtype)
    options = {"position": position_of(name, rng), "causal": True}
    expected = rp.attention(*(x.astype(np.float64) for x in operands), backend="numpy", return_lse=True, **options)
    room = sent(np.zeros_like(operands[0]), stream)
    out, lse = rp.attention(*(sent(x, stream) for x in operands), backend="cuda", return_lse=True, out=room, **options)
    assert out is room
    assert lse.stream == stream
    # Scores below 20; results of half precision are rounded once.
    atol = 400 * EPS["float64" if dtype == "float64" else "float32"]
    np.testing.assert_allclose(out.copy_to_host().astype(np.float64), expected[0], rtol=EPS[dtype], atol=atol)
    np.testing.assert_allclose(lse.copy_to_host(), expected[1], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
def test_rel_shift(dtype, rng, stream):
    x = (100 * rng.random((2, 5, 9))).astype(dtype)
    for variant in ("transformer_xl", "conformer", "xlnet"):
        found = rp.rel_shift(sent(x, stream), variant=variant, backend="cuda")
        expected = rp.rel_shift(x, variant=variant, backend="numpy")
        np.testing.assert_array_equal(found.copy_to_host(), expected)
        # A result is taken again, and so is what it exports.
        again = rp.rel_shift(found, variant="wenet", backend="cuda")
        np.testing.assert_array_equal(again.copy_to_host(), expected)
    if dtype != "complex128":
        view = numba.cuda.as_cuda_array(found) if not device.simulated() else found
        np.testing.assert_array_equal(view.copy_to_host(), expected)
