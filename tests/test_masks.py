"""Masks, faults and memory: what must happen on input that others answer with NaN, garbage or a crash."""

import warnings

import numpy as np
import pytest

import relpos_np as rp
from tests import naive

NAN, INF = np.nan, np.inf
DTYPES = [np.float32, np.float64]


def make(rng, dtype=np.float64, *, q_len=5, k_len=6, heads=2, batch=(2,), depth=4, v_dim=3):
    shapes = ((q_len, depth), (k_len, depth), (k_len, v_dim))
    return [rng.standard_normal((*batch, heads, *shape)).astype(dtype) for shape in shapes]


def schemes(rng, dtype, length, heads, depth, v_dim):
    """One scheme of each kind of term."""

    def table(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "none": None,
        "shaw": rp.Shaw(table(9, depth), table(9, v_dim)),
        "t5": rp.T5(table(32, heads)),
        "window": rp.WindowBias(table(2 * length - 1, heads), (length,)),
        "conformer": rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(2 * length - 1, heads, depth), variant="conformer"
        ),
        "wenet": rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(length, heads, depth), variant="wenet"
        ),
    }


@pytest.mark.parametrize("lengths", [[[1], [5]], [[2, 0, 6]], [[1, 2, 3], [4, 5, 6]], [3], [6, 0, 2], 4])
def test_key_lengths_broadcast_to_the_batch_axes(lengths, backend, rng):
    q, k, v = make(rng, batch=(2, 3))
    out = rp.attention(q, k, v, key_lengths=lengths, backend=backend)
    full = np.broadcast_to(lengths, (2, 3))
    for b in np.ndindex(2, 3):
        expected = rp.attention(q[b], k[b][:, : full[b]], v[b][:, : full[b]], backend="terms")
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=1e-14)


def out_problems(q):
    base = np.full((2, 2, 5, 3), 7.0)
    read_only = base.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only, ValueError
    yield "wrong shape", np.full((2, 2, 5, 4), 7.0), ValueError
    yield "wrong rank", base[0], ValueError
    yield "wrong dtype", base.astype(np.float32), TypeError
    yield "stride 0", np.lib.stride_tricks.as_strided(base, base.shape, (0, *base.strides[1:])), ValueError
    yield "list", base.tolist(), TypeError
    yield "masked", np.ma.masked_array(base), TypeError


@pytest.mark.parametrize("n", range(7))
def test_row_23_out_that_cannot_be_used(n, backend, rng):
    q, k, v = make(rng)
    _, out, kind = list(out_problems(q))[n]
    with pytest.raises(kind, match=r"^out: ") as caught:
        rp.attention(q, k, v, out=out, backend=backend)
    assert isinstance(caught.value, rp.RelposError)
    assert (np.asarray(out) == 7).all()


@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
def test_row_23_out_that_overlaps_an_input(which, backend, rng):
    memory = rng.standard_normal(4 * 64)
    arrays = {name: rng.standard_normal((2, 4, 4)) for name in "qkv"} | {"mask": rng.standard_normal((2, 4, 4))}
    arrays[which] = memory[:32].reshape(2, 4, 4)
    copy = memory.copy()
    for start in (0, 16):
        with pytest.raises(rp.RelposValueError, match=r"^out: .*overlap"):
            rp.attention(
                *(arrays[x] for x in "qkv"),
                mask=arrays["mask"],
                out=memory[start : start + 32].reshape(2, 4, 4),
                backend=backend,
            )
    np.testing.assert_array_equal(memory, copy)


def test_row_23_out_that_overlaps_a_table(backend, rng):
    """A table is an input as well: its memory may not be written while it is read."""
    q, k, v = (x.astype(np.float64) for x in make(rng, heads=4, batch=(), q_len=8, k_len=8, v_dim=4))
    memory = rng.standard_normal((32, 4))
    expected = rp.attention(q, k, v, position=rp.T5(memory.copy()), backend=backend)
    try:
        out = rp.attention(q, k, v, position=rp.T5(memory), out=memory.reshape(4, 8, 4), backend=backend)
    except rp.RelposValueError:
        return
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other", "reversed", "big-endian", "misaligned"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_row_23_out_of_any_layout_is_filled_and_returned(dtype, layout, backend, rng):
    q, k, v = make(rng, dtype)
    expected = rp.attention(q, k, v, backend=backend)
    shape = expected.shape
    out = {
        "contiguous": np.empty(shape, dtype),
        "transposed": np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2),
        "every other": np.empty((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
        "reversed": np.empty(shape, dtype)[..., ::-1, :],
        "big-endian": np.empty(shape, np.dtype(dtype).newbyteorder(">")),
        "misaligned": np.empty(expected.nbytes + 1, np.uint8)[1:].view(dtype).reshape(shape),
    }[layout]
    out[...] = NAN
    if layout == "big-endian":
        try:
            result = rp.attention(q, k, v, backend=backend, out=out)
        except rp.RelposTypeError:
            return
    else:
        result, lse = rp.attention(q, k, v, backend=backend, out=out, return_lse=True)
        assert lse.shape == shape[:-1]
    assert result is out
    np.testing.assert_array_equal(out, expected)


def test_row_25_big_endian(backend, rng):
    q, k, v = make(rng)
    big = [x.astype(">f8") for x in (q, k, v)]
    out = rp.attention(*big, backend=backend)
    np.testing.assert_allclose(out, rp.attention(q, k, v, backend=backend), rtol=0, atol=1e-15)
    mixed = rp.attention(big[0], k, v, mask=np.zeros((5, 6), ">f4"), backend=backend)
    np.testing.assert_allclose(mixed, out, rtol=0, atol=1e-15)


def test_row_26_float16_tables_and_masks(backend, rng):
    q, k, v = make(rng, np.float16)
    table = rng.standard_normal((32, 2)).astype(np.float16)
    mask = rng.standard_normal((5, 6)).astype(np.float16)
    out = rp.attention(q, k, v, position=rp.T5(table), mask=mask, backend=backend)
    wide = rp.attention(
        *(x.astype(np.float32) for x in (q, k, v)),
        position=rp.T5(table.astype(np.float32)),
        mask=mask.astype(np.float32),
        backend=backend,
    )
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, wide.astype(np.float16))


def test_row_31_other_subclasses_are_read_as_arrays(backend, rng):
    class Tagged(np.ndarray):
        pass

    q, k, v = make(rng)
    out = rp.attention(q.view(Tagged), k.view(Tagged), v.view(Tagged), backend=backend)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, rp.attention(q, k, v, backend=backend))


def test_row_32_a_float_mask_of_ones_and_zeros_is_added(backend, rng):
    q, k, v = make(rng)
    ones = (rng.random((5, 6)) < 0.5).astype(np.float64)
    expected, _ = naive.attention(q, k, v, allowed=naive.allowed(5, 6, mask=ones))
    np.testing.assert_allclose(rp.attention(q, k, v, mask=ones, backend=backend), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "shaw", "t5", "window", "conformer", "wenet"])
def test_row_46_strict_floating_point_changes_nothing(name, dtype, backend, rng):
    """np.seterr(all="raise") and warnings as errors on legal input: same bits, no exception."""
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    q *= 30  # probabilities underflow
    position = schemes(rng, dtype, 70, 2, 4, 3)[name]
    options = {"causal": True, "mask": np.where(rng.random((70, 70)) < 0.3, dtype(-INF), dtype(1))}
    with np.errstate(all="ignore"):
        expected = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
        rp.logits(q, k, position=position, **options, backend=backend)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
