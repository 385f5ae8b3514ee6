"""Products of vectors with the rows of a table, for maps that pick few rows or different ones for each pair.

A BLAS could do it, but its threads go on spinning after the call and slow down the kernel that follows.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numba import carray

from relpos_np._contract.problem import name_of
from relpos_np.kernels._numba.forward_pass.pack import load_rows, pack_panels
from relpos_np.kernels._numba.forward_pass.scores import score_plain
from relpos_np.kernels._numba.forward_pass.work import PANEL_VECTORS
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets, rowwise, strides
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.launcher import SERIAL_FLOPS, call_flops, run_pieces
from relpos_np.kernels._numba.launch.records import PRODUCT
from relpos_np.kernels._numba.simd.rows import (
    at,
    doubles,
    floats,
    get,
    lanes_of,
    longs,
    opaque,
    pointer_like,
    scale_row,
    take,
)
from relpos_np.kernels._numba.simd.target import ROW_QUANTUM, TARGET
from relpos_np.types import Array

# Vectors of one piece of work.
BLOCK_ROWS = 4 * ROW_QUANTUM


@helper
def product_layout(depth: int, width: int) -> tuple[int, ...]:
    """Where a thread's vectors, its packed table rows and its tile begin, in elements, and the end."""
    packed = BLOCK_ROWS * depth
    tile = packed + width * depth
    return 0, packed, tile, tile + BLOCK_ROWS * width


@helper
def multiply_block(m: Any, batches: Any, base: Any, t: int) -> None:
    """Multiply a block of vectors of one head with all rows of the table."""
    b, h, i0 = t // (m.heads * m.blocks), t // m.blocks % m.heads, t % m.blocks * BLOCK_ROWS
    rows, width = min(BLOCK_ROWS, m.length - i0), PANEL_VECTORS * lanes_of(base)
    _, packed_at, tile_at, _ = product_layout(m.depth, width)
    x = at(pointer_like(base, m.x), get(batches, b) + h // m.x_group * m.x_head + i0 * m.x_row)
    table = at(pointer_like(base, m.table), h * m.table_head)
    out = at(pointer_like(base, m.out), ((b * m.heads + h) * m.length + i0) * m.rows)
    packed, tile = at(base, packed_at), at(base, tile_at)
    load_rows(base, m.depth, x, m.x_row, rows, m.depth, m.scale)
    for r0 in range(0, m.rows, width):
        pack_panels(packed, table, m.table_row, r0, min(r0 + width, m.rows), m.rows, m.depth)
        score_plain(base, m.depth, packed, m.depth, tile, width, rows, min(width, m.rows - r0))
        for i in range(rows):
            scale_row(at(out, i * m.rows + r0), at(tile, i * width), min(width, m.rows - r0), 1.0)


@helper
def multiply_all(call: int, base: Any) -> None:
    """Take blocks from the shared counter while there are any."""
    m = carray(opaque(call), 1, PRODUCT)[0]
    t = take(call)
    while t < m.stop:
        multiply_block(m, longs(m.batches), base, t)
        t = take(call)


product = entry_points(
    __name__, "product", PRODUCT, {"float32": (floats, multiply_all), "float64": (doubles, multiply_all)}
)

_EMPTY = dict.fromkeys(PRODUCT.names or (), 0)
_PACK = struct.Struct(f"<{len(_EMPTY) - 1}qd").pack


def multiply(x: Array, weights: Array, scale: float, heads: int, threads: int) -> Array:
    """Products of x (..., H or H_kv, L, E) with the rows of weights (H or 1, R, E), scaled: (..., H, L, R)."""
    batch, (length, depth), rows = x.shape[:-3], x.shape[-2:], weights.shape[-2]
    out = np.empty((*batch, heads, length, rows), x.dtype)
    if not out.size:
        return out
    x, weights = rowwise(x), rowwise(weights)
    f: dict[str, Any] = _EMPTY.copy()
    count = math.prod(batch)
    batches = batch_offsets(x, len(batch))
    f["x_head"], f["x_row"], _ = strides(x)[-3:]
    f["table_head"], f["table_row"], _ = strides(weights)
    if weights.shape[0] == 1:
        f["table_head"] = 0
    f["x"], f["table"], f["out"], f["batches"] = (address_of(a) for a in (x, weights, out, batches))
    f["heads"], f["x_group"], f["length"], f["depth"], f["rows"] = heads, heads // x.shape[-3], length, depth, rows
    f["blocks"], f["scale"] = -(-length // BLOCK_ROWS), scale
    pieces = count * heads * f["blocks"]
    lanes = TARGET.lanes(x.itemsize)
    room = product_layout.py_func(depth, PANEL_VECTORS * lanes)[-1] * x.itemsize
    flops = 2.0 * out.size * depth
    threads = 1 if flops < SERIAL_FLOPS else min(threads, pieces)
    # A small product waits for the memory that it fills: 512 operations per number at least. A deep one reads its table
    # again for each block, at half the speed of attention.
    chunk = int(threads * call_flops(x.itemsize) * pieces / max(2.0 * flops, 512.0 * out.size, 1.0))
    record = bytearray(_PACK(*f.values()))
    run_pieces(product[name_of(x.dtype)], record, pieces, chunk, threads, workspace=room, size=flops / SERIAL_FLOPS)
    return out
