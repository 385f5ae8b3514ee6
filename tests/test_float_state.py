"""The floating-point state of the caller: kernels have one of their own, and give it back."""

import ctypes
import mmap
import platform

import numpy as np
import pytest

import relpos_np as rp

if platform.machine().lower() not in ("x86_64", "amd64"):
    pytest.skip("the state is set in instructions of x86", allow_module_level=True)

# stmxcsr [rdi]; ret, and ldmxcsr [rdi]; ret
READ, WRITE = bytes.fromhex("0fae1fc3"), bytes.fromhex("0fae17c3")
# Subnormal operands and results as 0; and rounding to 0 as well.
STATES = [0x9FC0, 0x7F80]


@pytest.fixture
def state():
    """Read and write the state of this thread."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(READ.ljust(16, b"\x90") + WRITE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    kind = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint32))
    read, write = kind(start), kind(start + 16)

    def found():
        value = ctypes.c_uint32()
        read(value)
        return value.value

    before = found()
    yield found, lambda value: write(ctypes.c_uint32(value))
    write(ctypes.c_uint32(before))


@pytest.mark.parametrize("value", STATES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 300), (40, 40), (300, 300)])
def test_bits_do_not_depend_on_the_state(q_len, k_len, dtype, value, state, rng):
    """Subnormal values and gradients: with one thread, with two, and of decoding and windows."""
    read, write = state
    q = rng.standard_normal((2, q_len, 16)).astype(dtype)
    k, v = rng.standard_normal((2, 2, k_len, 16)).astype(dtype)
    v *= np.finfo(dtype).smallest_subnormal * 1000

    def results():
        grads = rp.attention_vjp(q, k, v, grad_out=q)
        return [*rp.attention(q, k, v, return_lse=True), grads.q, grads.k, grads.v]

    expected, usual = results(), read() & 0xFFC0
    assert np.any(expected[0])
    write(value)
    found = results()
    after = read() & 0xFFC0
    write(usual)
    assert after == value & 0xFFC0
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
