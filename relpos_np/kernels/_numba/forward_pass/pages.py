"""Keys and values in pages: where each of them lies, and a block of them copied out of their pages."""

from __future__ import annotations

from typing import Any

from relpos_np.kernels._numba.forward_pass.work import Head, size_of
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.rows import address_of, copy_bytes, get, longs, put
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS


@helper
def run_from(p: Any, j: int, cols: int) -> int:
    """How many of so many keys from j on lie one after the other."""
    return cols if p.pages == 0 else min(cols, p.page_keys - j % p.page_keys)


@helper
def place_of(p: Any, j: int, row: int, page: int) -> int:
    """Where the row of key j begins, in elements from the first of its head."""
    if p.pages == 0:
        return j * row
    found: int = get(longs(p.pages), j // p.page_keys) * page + j % p.page_keys * row
    return found


@helper
def place_rows(p: Any, table: Any, j0: int, count: int, row: int, page: int, start: int) -> None:
    """Write where the rows of so many keys from j0 on begin, with that of key 0 at `start`; none is behind the last."""
    first = 0
    while first < count and j0 + first < p.k_len:
        run, own = run_from(p, j0 + first, min(count, p.k_len - j0) - first), place_of(p, j0 + first, row, page) + start
        for r in range(run):
            put(table, first + r, own + r * row)
        first += run
    for r in range(first, count):
        put(table, r, get(table, first - 1))


@helper
def copy_rows(p: Any, out: int, x: int, size: int, row: int, page: int, j0: int, cols: int, depth: int) -> None:
    """Copy the rows of some keys, of elements of `size` bytes, to an address, one behind the other."""
    first = 0
    while first < cols:
        run = run_from(p, j0 + first, cols - first)
        own = x + place_of(p, j0 + first, row, page) * size
        for r in range(first, first + run):
            copy_bytes(out + r * depth * size, own, depth * size)
            own += row * size
        first += run


@helper
def copy_scales(p: Any, out: Any, x: Any, row: int, page: int, tile: Any, unit: float) -> None:
    """Copy the scales of a block of keys from their pages, times a unit."""
    first = 0
    while first < tile.cols:
        run = run_from(p, tile.j0 + first, tile.cols - first)
        own = place_of(p, tile.j0 + first, row, page)
        for r in range(run):
            put(out, first + r, get(x, own + r * row) * unit)
        first += run


@helper
def from_pages(p: Any, room: Any, head: Any, j0: int, cols: int) -> Head:
    """A head whose keys and values from j0 on have been copied to a workspace, with rows that have no gaps."""
    k_size, v_size, room_at = size_of(room, p.k_kind), size_of(room, p.v_kind), address_of(room)
    values = room_at + BLOCK_KEYS * p.depth * k_size
    copy_rows(p, room_at, head.k, k_size, p.k_page_row, p.k_page, j0, cols, p.depth)
    copy_rows(p, values, head.v, v_size, p.v_page_row, p.v_page, j0, cols, p.v_depth)
    # Where key 0 would be.
    k, v = room_at - j0 * p.depth * k_size, values - j0 * p.v_depth * v_size
    return Head(
        head.b, head.h, head.q, k, v, head.grad, head.bias, head.mask, head.q_turn, head.k_turn, head.inner
    )  # fmt: skip
