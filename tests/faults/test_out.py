"""Row 23: where results may be written, and that nothing is written before an error."""

import itertools

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract.options import DEFAULTS
from tests.faults.operands import make


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


# One of every argument that may be an array, for two items of two heads with 8 queries and keys of 4 channels; and
# the options that are none, or make a copy of what they are given.
ARRAYS = {
    **{name: np.ones((2, 2, 8, 4)) for name in "qkv"},
    "position": np.zeros((32, 2)),
    "mask": np.zeros((8, 8)),
    "key_lengths": np.array([8, 5]),
    "selected": np.zeros((2, 8, 2), np.int64),
    "segments": np.array([0, 3, 8]),
    "offset": np.array([0, 1]),
    "sinks": np.zeros(2),
    "query_scale": np.ones(8),
}
NO_ARRAYS = {"causal", "window", "rule", "scale", "softcap", "cap_order", "dropout", "rng", "precision", "backend"}


def test_row_23_every_option_is_known_here():
    """An option that is new is either among those that `out` may overlap, or is said to be none."""
    assert set(DEFAULTS) | {"q", "k", "v", "position"} == set(ARRAYS) | NO_ARRAYS


# A call, and two that are made of several; and what neither of these can be given.
SEVERAL = {"one": {}, "segments": {"segments": [0, 3, 8]}, "items": {"offset": [0, 1]}}
REFUSED = {("segments", "key_lengths"), ("segments", "selected"), ("segments", "offset"), ("items", "segments")}


@pytest.mark.parametrize(("name", "calls"), [x for x in itertools.product(ARRAYS, SEVERAL) if x[::-1] not in REFUSED])
def test_row_23_out_that_overlaps_any_argument(name, calls, backend):
    """Also of a call that is several, where a later one would read what an earlier one has written."""
    beside = SEVERAL[calls]
    memory = np.zeros(512)
    own = memory.view(ARRAYS[name].dtype)[: ARRAYS[name].size].reshape(ARRAYS[name].shape)
    own[...] = ARRAYS[name]
    given = {x: ARRAYS[x] for x in "qkv"} | beside | {name: rp.T5(own) if name == "position" else own}
    copy, out = memory.copy(), memory[:128].reshape(2, 2, 8, 4)
    rp.attention(**given, backend=backend)
    with pytest.raises(rp.RelposValueError, match=r"^out: the array overlaps an input"):
        rp.attention(**given, out=out, backend=backend)
    np.testing.assert_array_equal(memory, copy)


def test_row_23_out_whose_elements_share_memory(backend, rng):
    """Also where rows only reach into one another; those of a part of an array, in any order, do not."""
    q, k, v = (x.astype(np.float64) for x in make(rng, heads=4, batch=(), q_len=8, k_len=8, v_dim=4))
    memory = np.full(4 * 8 * 4, 7.0)
    for strides in ((256, 24, 8), (128, 32, 8), (8, 8, 8), (0, 32, 8), (256, -24, 8)):
        out = np.lib.stride_tricks.as_strided(memory[32:], (4, 8, 4), strides) if strides[0] < 256 else None
        if out is None:
            out = np.lib.stride_tricks.as_strided(np.full(512, 7.0)[200:], (4, 8, 4), strides)
        with pytest.raises(rp.RelposValueError, match=r"^out: elements of the array share memory"):
            rp.attention(q, k, v, out=out, backend=backend)
    assert (memory == 7).all()
    out = np.empty((8, 4, 9, 6))[:, ::-1, 1:, 1:5][3:7].transpose(1, 0, 2, 3)[2]
    np.testing.assert_array_equal(
        rp.attention(q, k, v, out=out, backend=backend), rp.attention(q, k, v, backend=backend)
    )


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
    out[...] = np.nan
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


SHIFT_OUTS = {
    "wrong shape": (lambda: np.full((3, 5, 8), 7.0), ValueError),
    "wrong dtype": (lambda: np.full((3, 5, 7), 7.0, np.float32), TypeError),
    "stride 0": (lambda: np.lib.stride_tricks.as_strided(np.full((5, 7), 7.0), (3, 5, 7), (0, 56, 8)), ValueError),
    "list": (lambda: [7.0], TypeError),
    "masked": (lambda: np.ma.masked_array(np.full((3, 5, 7), 7.0)), TypeError),
}


@pytest.mark.parametrize("name", SHIFT_OUTS)
@pytest.mark.parametrize("variant", ["transformer_xl", "wenet"])
def test_row_23_out_of_rel_shift_that_cannot_be_used(name, variant, backend, rng):
    make_out, kind = SHIFT_OUTS[name]
    out = make_out()
    with pytest.raises(kind, match=r"^out: ") as caught:
        rp.rel_shift(rng.standard_normal((3, 5, 7)), variant=variant, out=out, backend=backend)
    assert isinstance(caught.value, rp.RelposError)
    assert (np.asarray(out) == 7).all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other"])
@pytest.mark.parametrize("variant", ["transformer_xl", "conformer", "xlnet", "wenet"])
def test_row_23_out_of_rel_shift_is_filled_and_returned(variant, layout, backend, rng):
    x = rng.standard_normal((3, 5, 12))
    expected = rp.rel_shift(x, variant=variant, backend="numpy")
    shape = expected.shape
    out = {
        "contiguous": np.empty(shape),
        "transposed": np.empty(shape[::-1]).T,
        "every other": np.empty((*shape[:-1], 2 * shape[-1]))[..., ::2],
    }[layout]
    assert rp.rel_shift(x, variant=variant, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(rp.RelposValueError, match=r"^out: .*overlap"):
        rp.rel_shift(x, variant=variant, out=x.reshape(-1)[: out.size].reshape(shape), backend=backend)
