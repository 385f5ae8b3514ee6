"""Arrays of a device in and out of the CUDA backend: results, gradients, layouts, and no copies."""

import numba.cuda
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels import _cuda
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from tests.cuda.doubles import (
    DTYPES,
    EPS,
    Packed,
    There,
    draw,
    expected_of,
    heads_last,
    holds,
    in_a_row,
    same,
    there,
    with_gaps,
)

# In the simulator NumPy warns of the infinities that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.parametrize("layout", [in_a_row, heads_last, with_gaps])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_dtypes_without_a_copy(layout, dtype, rng, transfers):
    q, k, v = (layout(x) for x in draw(rng, dtype))
    position = rp.Shaw(rng.standard_normal((5, 6)))
    found = rp.attention(*there(q, k, v), position=position, causal=True, backend="cuda", return_lse=True)
    assert not any(holds(transfers.up, x) for x in (q, k, v))
    real = np.float64 if dtype == "float64" else np.float32
    assert holds(transfers.up, position.key_table.astype(real) * real(6**-0.5))
    assert not transfers.down
    same(found, expected_of(q, k, v, position=position, causal=True), dtype)


def test_broadcast_axes_and_what_has_no_heads(rng, transfers):
    q, k, v = draw(rng, heads=2, kv_heads=2, batch=(2, 1))
    k, v = np.broadcast_to(k[0, 0], (2, 3, 2, 7, 6)), v[:1]
    found = rp.attention(*there(q, k, v), backend="cuda", return_lse=True)
    same(found, expected_of(q, k, v), "float32")
    q, k, v = q[0, 0, 0], k[0, 0, 1], v[0, 0, 1]
    with rp.use_backend("cuda"):
        found = rp.attention(*there(q, k, v), return_lse=True)
    assert found[0].shape == (5, 3)
    same(found, expected_of(q, k, v), "float32")
    assert not holds(transfers.up, q)


def test_arrays_of_numba_and_of_dlpack_and_results_themselves(rng, transfers):
    q, k, v = draw(rng, v_dim=6)
    q_there, k_there = numba.cuda.to_device(q), Packed(k)
    del transfers.up[:]
    first = rp.attention(q_there, k_there, There(v), backend="cuda", return_lse=True)
    same(first, expected_of(q, k, v), "float32")
    again = rp.attention(first[0], k_there, There(v), backend="cuda", return_lse=True)
    assert not any(holds(transfers.up, x) for x in (q, k, v, first[0]._operand.flat._ary))
    same(again, expected_of(first[0].copy_to_host(), k, v), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_given_array_is_filled_and_returned(dtype, rng, transfers):
    q, k, v = draw(rng, dtype)
    expected, _ = expected_of(q, k, v)
    room = np.full((2, 5, 2, 6), -7, DTYPES[dtype])
    view = np.swapaxes(room[..., ::2], 1, 2)
    for target in (np.full((2, 2, 5, 3), -7, DTYPES[dtype]), view):
        out = There(target)
        assert rp.attention(*there(q, k, v), backend="cuda", out=out) is out
        atol = 200 * EPS["float64" if dtype == "float64" else "float32"]
        np.testing.assert_allclose(target.astype(np.float64), expected, rtol=EPS[dtype], atol=atol)
    assert (room[..., 1::2] == -7).all()
    assert not transfers.down


def test_a_given_array_must_fit(rng):
    q, k, v = draw(rng, v_dim=6, kv_heads=2, k_len=5)
    fixed = np.zeros((2, 2, 5, 6), np.float32)
    fixed.flags.writeable = False
    # Keys, and behind them room that begins in their last ones.
    shared = np.zeros(3 * k.size, np.float32)
    k_there = shared[: k.size].reshape(k.shape)
    k_there[...] = k
    cases = {
        r"out: expected a device array like the operands, found ndarray": np.zeros((2, 2, 5, 6), np.float32),
        r"out: expected shape \(2, 2, 5, 6\), found \(2, 5, 6\)": There(np.zeros((2, 5, 6), np.float32)),
        r"out: expected dtype float32, found float64": There(np.zeros((2, 2, 5, 6))),
        r"out: the array is read-only": There(fixed),
        r"out: elements of the array share memory": There(
            np.lib.stride_tricks.as_strided(np.zeros(20, np.float32), (2, 2, 5, 6), (0, 0, 0, 4))
        ),
        r"out: the array overlaps an input": There(v),
        r"out: the array overlaps an inpu": There(shared[k.size - 1 :][: v.size].reshape(v.shape)),
    }
    for message, out in cases.items():
        with pytest.raises(rp.RelposError, match=message):
            rp.attention(*there(q, k_there, v), backend="cuda", out=out)
    behind = There(shared[k.size :][: v.size].reshape(v.shape))
    assert rp.attention(*there(q, k_there, v), backend="cuda", out=behind) is behind


@pytest.mark.parametrize(("q_len", "k_len", "v_dim"), [(0, 3, 2), (3, 0, 2), (3, 4, 0)])
def test_empty_axes(q_len, k_len, v_dim, rng):
    q, k, v = draw(rng, q_len=q_len, k_len=k_len, v_dim=v_dim)
    same(rp.attention(*there(q, k, v), backend="cuda", return_lse=True), expected_of(q, k, v), "float32")


def test_masks_and_lengths_may_be_there_as_well(rng):
    q, k, v = draw(rng)
    mask, lengths = rng.random((5, 7)) < 0.7, np.array([4, 7])
    found = rp.attention(*there(q, k, v), mask=There(mask), key_lengths=There(lengths), backend="cuda", return_lse=True)
    same(found, expected_of(q, k, v, mask=mask, key_lengths=lengths), "float32")


# Gradients -------------------------------------------------------------------------------------------


def test_gradients_of_outputs_are_checked(monkeypatch, rng):
    monkeypatch.setattr(_cuda, "backward", None)
    q, k, v = draw(rng)
    for grad_out, message in (
        (
            np.zeros((2, 2, 5, 3), np.float32),
            "expected all of them on a CUDA device or none.*grad_out ndarray on the host",
        ),
        (There(np.zeros((2, 2, 5, 4), np.float32)), r"grad_out: expected shape \(2, 2, 5, 3\), found \(2, 2, 5, 4\)"),
        (There(np.zeros((2, 2, 5, 3), np.int32)), "grad_out: expected dtype float16"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            rp.attention_vjp(*there(q, k, v), grad_out=grad_out, backend="cuda")


# rel_shift -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float64", "complex128"])
@pytest.mark.parametrize("variant", ["transformer_xl", "conformer", "wenet", "xlnet_uni"])
def test_rel_shift(variant, dtype, rng, transfers):
    x = (100 * rng.random((2, 3, 7))).astype(DTYPES.get(dtype, dtype))
    expected = rp.rel_shift(x, variant=variant, backend="numpy")
    for source in (x, with_gaps(x)):
        found = rp.rel_shift(There(source), variant=variant, backend="cuda")
        assert type(found) is DeviceArray
        assert not transfers.up
        np.testing.assert_array_equal(found.copy_to_host(), expected)
    target = There(with_gaps(np.zeros_like(expected)))
    assert rp.rel_shift(There(x), variant=variant, backend="cuda", out=target) is target
    np.testing.assert_array_equal(target.x, expected)
    assert found.dtype == x.dtype


def test_rel_shift_refuses_what_it_refuses_on_the_host():
    for x, options, message in (
        (np.zeros((3, 4), bool), {}, "x: expected numbers, found dtype bool"),
        (np.zeros((5, 4)), {}, "x: variant 'transformer_xl' needs at least as many columns"),
        (np.zeros((3, 4)), {"variant": "other"}, "variant: expected one of"),
        (np.zeros((3, 4)), {"out": np.zeros((3, 4))}, "out: expected a device array"),
        (np.zeros((3, 4)), {"backend": "numba"}, "x: expected a NumPy array for backend 'numba'"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            rp.rel_shift(There(x), **({"backend": "cuda"} | options))
