"""Rows 24 and 25: buffers that begin beside a multiple of their elements' size, and those of the other byte order."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from tests.faults.conftest import BACKENDS
from tests.faults.operands import make

DTYPES = [np.float16, np.float32, np.float64]


def moved(x, by=1):
    """The same numbers, in memory that begins some bytes later."""
    room = np.empty(x.nbytes + by, np.uint8)[by:]
    found = room.view(x.dtype).reshape(x.shape) if x.size else x
    found[...] = x
    assert not found.flags.aligned
    return found


def swapped(x):
    """The same numbers in the other byte order."""
    return x.astype(x.dtype.newbyteorder("S"))


def dtypes(backend):
    """All of them, but one where calls take seconds."""
    return [np.float32] if backend == "cuda" else DTYPES


@pytest.mark.parametrize("change", [moved, swapped])
@pytest.mark.parametrize(("backend", "dtype"), [(b, dtype) for b in BACKENDS for dtype in dtypes(b)])
def test_row_24_25_operands_masks_and_tables(dtype, change, backend, rng):
    """Forward, scores and gradients have the bits they have with ordinary arrays; nothing is written to an input."""
    q, k, v = make(rng, dtype)
    mask, table, grad = (rng.standard_normal(s).astype(dtype) for s in ((5, 6), (32, 2), (2, 2, 5, 3)))
    given = [q, k, v, mask, table, grad]

    def run(q, k, v, mask, table, grad):
        options = {"position": rp.T5(table), "mask": mask, "backend": backend}
        found = rp.attention_vjp(q, k, v, grad_out=grad, **options)
        return [
            *rp.attention(q, k, v, **options, return_lse=True),
            rp.logits(q, k, **options),
            *(found.q, found.k, found.v, found.position["table"]),
        ]

    expected = run(*given)
    odd = [change(x) for x in given]
    copies = [x.copy() for x in odd]
    for a, b in zip(run(*odd), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for x, copy in zip(odd, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_row_24_operands_of_bfloat16(name, backend, rng):
    """More queries than decoding takes: with units for bfloat16, products are made of it wherever an operand lies."""
    operands = make(rng, ml_dtypes.bfloat16, q_len=60, k_len=60, depth=16, v_dim=16)
    given = dict(zip(("q", "k", "v"), operands, strict=True), grad_out=operands[2])

    def run(given):
        operands = given["q"], given["k"], given["v"]
        found = rp.attention_vjp(**given, backend=backend)
        return [*rp.attention(*operands, return_lse=True, backend=backend), found.q, found.k, found.v]

    for a, b in zip(run(given | {name: moved(given[name])}), run(given), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("change", [moved, swapped])
@pytest.mark.parametrize("dtype", [*DTYPES, np.int32, np.complex64])
@pytest.mark.parametrize("variant", ["transformer_xl", "conformer", "xlnet", "wenet"])
def test_row_24_25_rel_shift(variant, dtype, change, backend, rng):
    x = rng.standard_normal((3, 5, 12)).astype(dtype)
    found = rp.rel_shift(change(x), variant=variant, backend=backend)
    np.testing.assert_array_equal(found, rp.rel_shift(x, variant=variant, backend="numpy"))


@pytest.mark.parametrize("change", [moved, swapped])
@pytest.mark.parametrize("dtype", [bool, np.int64, np.int32])
def test_row_24_25_masks_and_lengths(dtype, change, backend, rng):
    q, k, v = make(rng)
    if dtype is bool:
        mask = np.ascontiguousarray(rng.random((5, 6)) < 0.7)
        mask[:, 0] = True
        options = [{"mask": mask}, {"mask": mask[::-1, ::-1]}]
        found, expected = ({"mask": np.asfortranarray(mask)}, options[0])
    else:
        lengths = np.array([3, 6], dtype)
        found, expected = {"key_lengths": change(lengths)}, {"key_lengths": lengths}
    np.testing.assert_array_equal(
        rp.attention(q, k, v, **found, backend=backend), rp.attention(q, k, v, **expected, backend=backend)
    )


@pytest.mark.parametrize("change", [moved, swapped])
def test_row_24_25_encodings(change, rng):
    x = rng.standard_normal((2, 5, 8))
    for encoding in (rp.Sinusoidal(8), rp.LearnedAbsolute(rng.standard_normal((6, 8)))):
        np.testing.assert_array_equal(encoding(change(x)), encoding(x))
    np.testing.assert_array_equal(rp.LearnedAbsolute(change(x[0]))(x), rp.LearnedAbsolute(x[0])(x))


def test_row_25_big_endian(backend, rng):
    q, k, v = make(rng)
    big = [x.astype(">f8") for x in (q, k, v)]
    out = rp.attention(*big, backend=backend)
    np.testing.assert_allclose(out, rp.attention(q, k, v, backend=backend), rtol=0, atol=1e-15)
    mixed = rp.attention(big[0], k, v, mask=np.zeros((5, 6), ">f4"), backend=backend)
    np.testing.assert_allclose(mixed, out, rtol=0, atol=1e-15)
