"""Row 36: arrays whose elements, bytes or pairs are more than 2**31, 2**32 or, on a device, than a grid's y and z.

Large arrays are virtual: pages that nobody touches take no memory, and a kernel is run for its last piece of work,
where the addresses are largest. Expected numbers come from the same call on the few elements that matter.
"""

import struct

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract.terms import Toeplitz
from relpos_np.kernels import _numba
from relpos_np.kernels._numba.launch import launcher as launch
from relpos_np.kernels._numba.launch import records

FAR = 1 << 32
TOLERANCE = {"rtol": 0, "atol": 1e-4}


def sparse(*shape, dtype=np.float32):
    """Zeros, of which only what is written takes memory."""
    try:
        return np.zeros(shape, dtype)
    except MemoryError:  # a system that promises no more than it has
        pytest.skip("no address space for it")


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture
def last_pieces(monkeypatch):
    """Kernels do only the last piece of work of each call."""
    run = launch.run

    def last(kernel, record, threads):
        counter, stop = struct.unpack_from("<qq", record)
        # The kernel for windows counts a run of several blocks as one.
        run_at = records.CALL.fields["run"][1]
        step = struct.unpack_from("<q", record, run_at)[0] if kernel in _numba.windows.values() else 1
        record[:8] = struct.pack("<q", max(-(-stop // step) - 1, counter))
        run(kernel, record, 1)

    monkeypatch.setattr(launch, "run", last)


def test_row_36_records_hold_nothing_of_less_than_64_bits():
    for record in (records.CALL, records.ADD, records.VALUE, records.BACKWARD, records.DECODE, records.SINK,
                   records.PRODUCT, records.COUNT, records.SHIFT):  # fmt: skip
        assert {record[name] for name in record.names} <= {np.dtype("<i8"), np.dtype("<f8")}


@pytest.mark.parametrize("q_len", [2, 20])  # decoding, and the kernel that packs keys
@pytest.mark.parametrize("position", [None, "t5", "shaw"])
def test_row_36_keys_beyond_4_gib(q_len, position):
    """One head whose last keys and values lie more than 2**32 bytes after the first."""
    length, depth = (1 << 20) + 100, 1024
    k, near = sparse(1, length, depth), 40
    assert k.nbytes > FAR
    k[:, -near:] = drawn(1, near, depth)
    q = drawn(1, q_len, depth)
    schemes = {"t5": rp.T5(drawn(32, 1)), "shaw": rp.Shaw(drawn(9, depth)), None: None}
    options = {"position": schemes[position], "window": (5, 0), "return_lse": True}
    found = rp.attention(q, k, k, **options)
    expected = rp.attention(q, k[:, -near:], k[:, -near:], **options, backend="numpy")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)


@pytest.mark.parametrize("q_len", [2, 20])
def test_row_36_batch_items_beyond_4_gib(q_len):
    """The third item begins at 4 GiB; of each only the first keys exist."""
    k = sparse(3, 1, 1 << 19, 1024)
    assert k[2:].ctypes.data - k.ctypes.data == FAR
    k[:, :, :7] = drawn(3, 1, 7, 1024)
    q = drawn(3, 1, q_len, 1024)
    found = rp.attention(q, k, k, key_lengths=7)
    np.testing.assert_allclose(found, rp.attention(q, k[:, :, :7], k[:, :, :7], backend="numpy"), **TOLERANCE)


def test_row_36_strides_beyond_2_31_elements():
    """Heads lie 2**31 elements apart, and batch items of stride 0 make 3 GiB of one row."""
    room = sparse(2 * (1 << 31) + 4096, dtype=np.float16)
    k = np.lib.stride_tricks.as_strided(room, (1, 3, 9, 8), (0, 2 << 30, 16, 2))
    for h in range(3):
        k[0, h] = drawn(9, 8)
    wide = np.broadcast_to(k, (5, 3, 9, 8))
    q = drawn(5, 3, 4, 8).astype(np.float16)
    found = rp.attention(q, wide, wide)
    np.testing.assert_allclose(found, rp.attention(q, wide.copy(), wide.copy(), backend="numpy"), atol=2e-3)


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_row_36_masks_beyond_4_gib(dtype):
    """The mask's last row of the second item; keys are one number, which is 2**30 of them."""
    length = (1 << 30) if dtype is bool else (1 << 28)
    mask = sparse(2, 1, 3, length, dtype=dtype)
    assert mask.nbytes > FAR
    seen = np.array([[[True, False, True, False, True]] * 3] * 2)[:, None]
    mask[..., :5] = seen if dtype is bool else np.where(seen, 0.5, -np.inf)
    k = np.broadcast_to(np.float32(1), (2, 1, length, 1))
    v = sparse(1, 1, length, 1)
    v[..., :5, 0] = np.arange(5)
    options = {"key_lengths": 5, "offset": 5}
    found = rp.attention(k[:, :, :3], k, np.broadcast_to(v, k.shape), mask=mask, **options)
    np.testing.assert_allclose(found, 2.0)


@pytest.mark.parametrize("position", [None, "alibi", "shaw"])
def test_row_36_more_than_2_32_pairs_and_more_queries_than_65535(position):
    """A band of one head: 70,000 queries and keys, more than CUDA's grids have blocks in y and z."""
    length = 70_000
    q, k, v = drawn(3, 1, length, 4)
    schemes = {"alibi": rp.ALiBi(np.ones(1)), "shaw": rp.Shaw(drawn(9, 4), drawn(9, 4)), None: None}
    options = {"position": schemes[position], "window": 3}
    found = rp.attention(q, k, v, **options)
    for part in (slice(0, 50), slice(65_500, 65_600), slice(length - 50, length)):
        near = slice(max(part.start - 3, 0), min(part.stop + 3, length))
        expected = rp.attention(
            q[:, part], k[:, near], v[:, near], **options, offset=part.start - near.start, backend="numpy"
        )
        np.testing.assert_allclose(found[:, part], expected, **TOLERANCE)


def test_row_36_gradients_of_many_queries():
    length = 70_000
    q, k, v, grad = drawn(4, 1, length, 4)
    options = {"position": rp.Shaw(drawn(9, 4), drawn(9, 4)), "window": 3}
    found = rp.attention_vjp(q, k, v, grad_out=grad, **options)
    near, own = slice(65_500 - 6, 65_600 + 6), slice(65_500, 65_600)
    expected = rp.attention_vjp(q[:, near], k[:, near], v[:, near], grad_out=grad[:, near], **options, backend="numpy")
    for name in "qkv":
        inner = getattr(expected, name)[:, 6:-6]
        np.testing.assert_allclose(getattr(found, name)[:, own], inner, rtol=0, atol=1e-3)


@pytest.mark.parametrize("variant", ["conformer", "xlnet", "transformer_xl"])
def test_row_36_shifts_beyond_4_gib(variant, last_pieces):
    """The last row of products that begin 2**32 bytes before it, and of a result as long."""
    rows, k_len = 4100, 1 << 18
    columns = {"conformer": rows + k_len - 1, "xlnet": rows + k_len, "transformer_xl": k_len}[variant]
    x, out = sparse(rows, columns), np.empty((rows, k_len), np.float32)
    assert out[-1:].ctypes.data - out.ctypes.data >= FAR
    # Row L_q - 1 begins at its first column, or for XLNet at its second.
    first = 1 if variant == "xlnet" else 0
    x[-1, first : first + 10] = np.arange(10) + 1
    end = columns if variant == "transformer_xl" else first + k_len
    x[-1, end - 10 : end] = np.arange(10) + 20
    out[-1, -10:] = 7
    rp.rel_shift(x, variant=variant, out=out)
    np.testing.assert_array_equal(out[-1, -10:], x[-1, end - 10 : end])


def test_row_36_results_and_products_beyond_4_gib(last_pieces):
    """The last block of queries of a call whose result, and whose products with a table, are longer than 4 GiB."""
    length, depth, rows = (1 << 20) + 77, 4, 1025
    q = np.broadcast_to(drawn(1, 1, depth), (1, length, depth))
    k, v = drawn(1, length, depth), np.broadcast_to(drawn(1, 1, 1100), (1, length, 1100))
    out = np.empty((1, length, 1100), np.float32)
    assert out.nbytes > FAR
    assert length * rows * 4 > FAR
    table = drawn(rows, depth)
    # Products are made in blocks of 96 queries, and the last block of the result needs no more than the last one's.
    found = rp.attention(q, k, v, position=rp.Shaw(table), window=(8, 0), out=out, return_lse=True)
    near = slice(length - 20, length)
    expected = rp.attention(
        q[:, near], k[:, near], v[:, near], position=rp.Shaw(table), window=(8, 0), backend="numpy", return_lse=True
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[:, -10:], b[:, -10:], **TOLERANCE)


def test_row_36_windows_and_batch_items_beyond_4_gib(last_pieces):
    """The kernel for windows writes into the last of 2**21 results."""
    count = (1 << 21) + 5
    x = drawn(1, 1, 24, 16)
    q = np.broadcast_to(x, (count, 1, 24, 16))
    k = np.broadcast_to(x[:, :, :8], (count, 1, 8, 16))
    v = np.broadcast_to(drawn(1, 1, 8, 32), (count, 1, 8, 32))
    out = np.empty((count, 1, 24, 32), np.float32)
    assert out.nbytes > FAR
    rp.attention(q, k, v, out=out)
    np.testing.assert_allclose(out[-1], rp.attention(q[0], k[0], v[0], backend="numpy"), **TOLERANCE)


def test_row_36_maps_are_checked_for_the_integers_that_kernels_read():
    """Rows are 32-bit integers: a table with more is refused, and not read modulo 2**32."""
    with pytest.raises(rp.RelposIndexError):
        Toeplitz(np.array([0, np.iinfo(np.int32).max], np.int32), np.iinfo(np.int32).max)


# ---------------------------------------------------------------------------------------------- devices


def test_row_36_grids_have_one_axis():
    """2**31 - 1 blocks fit along x, and 65,535 along y and z: no kernel uses these two."""
    import ast
    from pathlib import Path

    for path in sorted((Path(rp.__file__).parent / "kernels" / "_cuda").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("y", "z") and isinstance(node.value, ast.Attribute):
                assert node.value.attr not in ("blockIdx", "gridDim"), path
