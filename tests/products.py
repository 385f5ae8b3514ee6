"""Products of pairs of bfloat16 at awkward sizes: ``python -m tests.products`` prints what this process's unit makes.

One line of JSON: the unit, a digest of all bits, another of those products that vectors make where there are matrix
tiles, and the largest error, in units of what rounding of sums allows.
What a product must not read is NaN, and so is what it has not written.
"""

from __future__ import annotations

import hashlib
import json

import ml_dtypes
import numba
import numpy as np

from relpos_np.kernels._numba.simd.amx import close_tiles, open_tiles
from relpos_np.kernels._numba.simd.rows import floats
from relpos_np.kernels._numba.simd.target import PAIR_ROWS, PAIR_STEPS, TARGET, UNIT
from relpos_np.kernels._numba.simd.tiles import accumulate_pairs, accumulate_transposed_pairs, average_pairs, pair_panel

LANES = TARGET.lanes(4)
ROWS = 96


@numba.njit
def scores(a, lda, b, c, ldc, count, cols, depth):
    """One panel of scores."""
    open_tiles()
    pair_panel(floats(a), lda, floats(b), depth, floats(c), ldc, count, cols, 1.0)
    close_tiles()


@numba.njit
def sums(kind, a, lda, b, ldb, c, ldc, ones, count, width, depth):
    """One of the three products with values or gradients."""
    open_tiles()
    if kind == 0:
        accumulate_pairs(floats(a), lda, floats(b), ldb, floats(c), ldc, floats(ones), count, width, depth)
    elif kind == 1:
        average_pairs(floats(a), lda, floats(b), ldb, floats(c), ldc, floats(ones), count, width, depth)
    else:
        accumulate_transposed_pairs(floats(a), lda, floats(b), ldb, floats(c), ldc, count, width, depth)
    close_tiles()


def operand(rng, rows, steps, axis):
    """Numbers of bfloat16 whose pairs lie along an axis, as float64, and the elements of these pairs."""
    numbers = rng.standard_normal((2 * rows, steps) if axis == 0 else (rows, 2 * steps)).astype(ml_dtypes.bfloat16)
    bits = numbers.view(np.uint16).astype(np.uint32)
    low, high = (bits[0::2], bits[1::2]) if axis == 0 else (bits[:, 0::2], bits[:, 1::2])
    return numbers.astype(float), (low | high << 16).view(np.float32)


def inside(x, rows, columns, value=np.nan):
    """An array in the corner of a larger one, C-contiguous."""
    made = np.full((rows, columns), value, np.float32)
    made[: x.shape[0], : x.shape[1]] = x
    return made


def steps_of(x, axis):
    """Zeros behind the last step of a product, up to whole steps."""
    missing = -x.shape[axis] % PAIR_STEPS
    return np.pad(x, [(0, missing if n == axis else 0) for n in range(2)])


class Record:
    """Digests of results, and the largest of their errors."""

    def __init__(self):
        self.bits, self.on_vectors, self.error = hashlib.sha256(), hashlib.sha256(), 0.0

    def add(self, found, x, y, *, on_vectors=False):
        """A result, and the operands whose product it should be."""
        (self.on_vectors if on_vectors else self.bits).update((found + np.float32(0)).tobytes())  # either zero is one
        allowed = np.abs(x) @ np.abs(y) * x.shape[1] * 2.0**-23
        self.error = max(self.error, np.nan_to_num(np.abs(found - x @ y) / allowed, nan=np.inf).max())


def main():
    """Make every product at every size."""
    rng, record = np.random.default_rng(0), Record()
    ones = np.ones(ROWS, np.float32)
    for depth in (1, 2, 3, 7, 18, 33):
        for count, cols in ((1, 1), (7, LANES + 1), (25, 3 * LANES), (13, TARGET.panel(4))):
            left, a = operand(rng, ROWS, depth, 1)
            right, b = operand(rng, depth, TARGET.panel(4), 0)
            a, b = inside(steps_of(a, 1), ROWS, depth + 17), inside(steps_of(b, 0), depth + 17, TARGET.panel(4))
            a[-(-count // PAIR_ROWS) * PAIR_ROWS :] = np.nan
            c = np.full((ROWS, TARGET.panel(4)), np.nan, np.float32)
            scores(a.ctypes.data, a.shape[1], b.ctypes.data, c.ctypes.data, c.shape[1], count, cols, depth)
            record.add(c[:count, :cols], left[:count], right[:, :cols])
        for vectors in (1, 2, 3, 4, 5):
            width = vectors * LANES
            for kind in range(3):
                right, b = operand(rng, depth, width, 0)
                b = inside(steps_of(b, 0), depth + 17, width + 3)
                left, a = operand(rng, *((depth, ROWS, 0) if kind == 2 else (ROWS, depth, 1)))
                left, a = (left.T, a) if kind == 2 else (left, steps_of(a, 1))
                a = inside(a, depth + 17, ROWS) if kind == 2 else inside(a, ROWS, depth + 17)
                c = np.zeros((ROWS, width + 3), np.float32)
                c[:, width:] = np.nan
                pointers = a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1], c.ctypes.data, c.shape[1]
                sums(kind, *pointers, ones.ctypes.data, 49, width, depth)
                record.add(c[:49, :width], left[:49], right, on_vectors=kind == 2)
    print(json.dumps([UNIT, record.bits.hexdigest(), record.on_vectors.hexdigest(), record.error]))


if __name__ == "__main__":
    main()
