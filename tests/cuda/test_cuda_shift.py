"""The CUDA kernel for rel_shift on arrays of the device, with gaps between rows and with few blocks."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.forward_pass import shift
from relpos_np.kernels._cuda.launch.device import upload


@pytest.mark.parametrize("blocks", [2, 1 << 31], ids=["few blocks", "as many as it takes"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "complex128"])
@pytest.mark.parametrize("variant", ["transformer_xl", "conformer", "xlnet"])
def test_rows_with_gaps(variant, dtype, blocks, monkeypatch, rng):
    monkeypatch.setattr(shift, "MOST_BLOCKS", blocks)
    for matrices, rows, k_len in ((3, 5, 7), (2, 7, 33), (5, 1, 1), (2, 2, 300)):
        columns = k_len + {"transformer_xl": 0, "conformer": rows - 1, "xlnet": rows}[variant]
        by_row = columns + 2
        by_matrix = rows * by_row + 3
        x = (100 * rng.random(matrices * by_matrix)).astype(dtype)
        item = x.itemsize
        rows_of_x = np.lib.stride_tricks.as_strided(
            x, (matrices, rows, columns), (by_matrix * item, by_row * item, item)
        )
        out = upload(np.full(matrices * rows * k_len, 99, dtype))
        shift.shift_flat(upload(x), out, (matrices, rows, columns, k_len), (by_matrix, by_row), item, variant)
        expected = rp.rel_shift(rows_of_x, variant=variant, backend="numpy")
        np.testing.assert_array_equal(out.copy_to_host().reshape(expected.shape), expected)


def test_a_matrix_that_repeats(rng):
    x = rng.random((4, 6))
    out = upload(np.full(3 * 24, np.nan))
    shift.shift_flat(upload(x.ravel()), out, (3, 4, 6, 6), (0, 6), 8, "transformer_xl")
    expected = rp.rel_shift(x, backend="numpy")
    np.testing.assert_array_equal(out.copy_to_host().reshape(3, 4, 6), np.broadcast_to(expected, (3, 4, 6)))
