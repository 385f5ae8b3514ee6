"""Copies of operands in a thread's workspace, in the order in which the register tiles read them."""

from __future__ import annotations

from typing import Any

from relpos_np.kernels._numba.build import helper
from relpos_np.kernels._numba.pieces import PANEL_VECTORS, SCORE_ROWS, round_up
from relpos_np.kernels._numba.rows import at, fill_row, get, lanes_of, put, scale_row, transpose_square


@helper
def load_rows(out: Any, width: int, x: Any, row: int, rows: int, depth: int, scale: float) -> None:
    """Copy a block of rows, scaled and padded to `width`; add rows of 0 up to a whole register tile of scores."""
    for i in range(rows):
        scale_row(at(out, i * width), at(x, i * row), depth, scale)
        fill_row(out, i * width + depth, (i + 1) * width, 0.0)
    fill_row(out, rows * width, round_up(rows, SCORE_ROWS) * width, 0.0)


@helper
def pack_vector(out: Any, width: int, x: Any, row: int, depth: int) -> None:
    """out[c, r] = x[r, c] for as many rows as a vector has lanes."""
    lanes = lanes_of(out)
    whole = depth // lanes * lanes
    for c in range(0, whole, lanes):
        transpose_square(at(out, c * width), width, at(x, c), row)
    for r in range(lanes):
        for c in range(whole, depth):
            put(out, c * width + r, get(x, r * row + c))


@helper
def pack_panels(out: Any, x: Any, row: int, first: int, last: int, limit: int, depth: int) -> None:
    """Pack rows first..last of x, transposed, into panels [depth, width]; rows outside [0, limit) become 0."""
    lanes = lanes_of(out)
    width, end = PANEL_VECTORS * lanes, min(last, limit)
    for p in range(first, last, width):
        panel = at(out, (p - first) * depth)
        for r0 in range(p, p + width, lanes):
            corner = at(panel, r0 - p)
            if r0 >= 0 and r0 + lanes <= end:
                pack_vector(corner, width, at(x, r0 * row), row, depth)
            else:
                for c in range(depth):
                    fill_row(corner, c * width, c * width + lanes, 0.0)
                for r in range(max(r0, 0), min(r0 + lanes, end)):
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, r * row + c))


@helper
def pack_indexed(out: Any, x: Any, row: int, index: Any, first: int, last: int, limit: int, depth: int) -> None:
    """As `pack_panels`, of rows index[first] .. index[last] of x; those of index -1 become 0."""
    lanes = lanes_of(out)
    width = PANEL_VECTORS * lanes
    for r0 in range(first, last, lanes):
        column = r0 - first
        corner = at(out, column // width * width * depth + column % width)
        step, even = 0, r0 >= 0 and r0 + lanes <= limit
        if even:
            step = get(index, r0 + 1) - get(index, r0)
            even = get(index, r0) >= 0 and get(index, r0 + lanes - 1) >= 0
            for r in range(2, lanes):
                even = even and get(index, r0 + r) - get(index, r0 + r - 1) == step
        if even:
            pack_vector(corner, width, at(x, get(index, r0) * row), step * row, depth)
        else:
            for c in range(depth):
                fill_row(corner, c * width, c * width + lanes, 0.0)
            for r in range(max(r0, 0), min(r0 + lanes, limit)):
                if get(index, r) >= 0:
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, get(index, r) * row + c))
