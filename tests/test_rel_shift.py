"""rel_shift: every variant against loops and against the published pad-and-reshape trick, on every backend."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relpos_np as rp
from tests import naive

VARIANTS = ("transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni")


def published(x, variant):
    """The trick as papers' code has it: pad a column, reinterpret the shape, drop the first row, cut."""
    *lead, rows, columns = x.shape
    if variant == "wenet":
        return x
    if variant == "xlnet_uni":
        return x.reshape(*lead, columns, rows)[..., 1:, :].reshape(*lead, rows, columns - 1)
    if variant == "xlnet":
        return x.reshape(*lead, columns, rows)[..., 1:, :].reshape(*lead, rows, columns - 1)[..., : columns - rows]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    shifted = padded.reshape(*lead, columns + 1, rows)[..., 1:, :].reshape(*lead, rows, columns)
    return shifted[..., : columns - rows + 1] if variant == "conformer" else shifted


def columns(variant, l_q, l_k):
    return {"conformer": l_q + l_k - 1, "xlnet": l_q + l_k, "xlnet_uni": l_k + 1}.get(variant, l_k)


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    l_q=st.integers(1, 9),
    memory=st.integers(0, 9),
    lead=st.sampled_from([(), (1,), (2, 3)]),
    view=st.sampled_from(["plain", "transposed", "reversed", "stride 0", "read-only"]),
)
def test_every_variant_against_loops_and_the_trick(variant, l_q, memory, lead, view):
    l_k = l_q + memory
    x = np.random.default_rng(l_q * 10 + memory).standard_normal((*lead, l_q, columns(variant, l_q, l_k)))
    if view == "transposed":
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    elif view == "reversed":
        x = x[..., ::-1, ::-1]
    elif view == "stride 0":
        x = np.broadcast_to(x[..., :1], x.shape)
    elif view == "read-only":
        x.flags.writeable = False
    before = x.copy()
    expected = naive.rel_shift(x, variant)
    np.testing.assert_array_equal(published(x, variant), expected)
    for backend in rp.backend.HOST_BACKENDS:
        y = rp.rel_shift(x, variant=variant, backend=backend)
        assert y.shape == (*lead, l_q, l_k)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("variant", ["conformer", "xlnet", "wenet", "xlnet_uni"])
def test_numpy_form_is_a_read_only_view(variant):
    x = np.arange(2.0 * 4 * 9).reshape(2, 4, 9)
    y = rp.rel_shift(x, variant=variant, backend="numpy")
    assert np.shares_memory(x, y)
    assert not y.flags.writeable
    assert x.flags.writeable


DTYPES = ["int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", ">f4", ">i2"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_bit_for_bit(variant, dtype):
    x = np.random.default_rng(3).integers(-90, 90, (2, 17, columns(variant, 17, 24))).astype(dtype)
    if x.dtype.kind in "fc":
        x[0, 3, 5] = np.nan
    expected = rp.rel_shift(x, variant=variant, backend="numpy")
    y = rp.rel_shift(x, variant=variant, backend="numba")
    assert y.dtype == expected.dtype.newbyteorder("=") or y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


def test_longdouble_and_bfloat16(backend):
    x = np.arange(12, dtype=np.longdouble).reshape(3, 4) / 3
    np.testing.assert_array_equal(rp.rel_shift(x, backend=backend), published(x, "transformer_xl"))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rp.rel_shift(x, backend=backend), published(x, "transformer_xl"))


@pytest.mark.parametrize("variant", ["conformer", "transformer_xl"])
def test_large_input_on_several_threads(variant):
    width = 2045 if variant == "conformer" else 1100
    x = np.random.default_rng(0).integers(0, 1 << 30, (8, 1023, width), dtype=np.int32).view(np.float32)
    expected = rp.rel_shift(x, variant=variant, backend="numpy")
    found = rp.rel_shift(x, variant=variant, backend="numba")
    np.testing.assert_array_equal(found.view(np.int32), np.ascontiguousarray(expected).view(np.int32))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.float64])
def test_into_a_given_array(variant, dtype, streamed, backend, monkeypatch):
    """Every byte of it and none beside it, wherever it begins; large ones are written past the caches."""
    if backend == "numba":
        module = importlib.import_module("relpos_np.kernels._numba.forward_pass.shift")
        monkeypatch.setattr(module, "STREAM_BYTES", 0 if streamed else 1 << 60)
    rng = np.random.default_rng(1)
    for l_q, l_k in ((1, 1), (3, 70), (33, 100), (2, 1025)):
        x = rng.integers(-100, 100, (2, l_q, columns(variant, l_q, l_k))).astype(dtype)
        expected = rp.rel_shift(x, variant=variant, backend="numpy")
        for start in (0, 1, 7, 64):
            room = np.full(expected.size + 80, 77, dtype)
            out = room[start : start + expected.size].reshape(expected.shape)
            out[...] = 99
            assert rp.rel_shift(x, variant=variant, backend=backend, out=out) is out
            np.testing.assert_array_equal(out, expected)
            assert (room[:start] == 77).all()
            assert (room[start + expected.size :] == 77).all()
        apart = np.zeros((2, l_q, 2 * expected.shape[-1]), dtype)[..., ::2]
        assert rp.rel_shift(x, variant=variant, backend=backend, out=apart) is apart
        np.testing.assert_array_equal(apart, expected)


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        ("transformer_xl", (4, 3)),
        ("espnet_legacy", (4, 3)),
        ("conformer", (4, 2)),
        ("xlnet", (4, 3)),
        ("xlnet_uni", (4, 4)),
        ("conformer", (5,)),
    ],
)
def test_impossible_shapes_name_variant_and_shape(variant, shape, backend):
    with pytest.raises(rp.RelposValueError, match=rf"^x: .*\({shape[0]},") as caught:
        rp.rel_shift(np.zeros(shape), variant=variant, backend=backend)
    assert len(shape) < 2 or variant in str(caught.value)
