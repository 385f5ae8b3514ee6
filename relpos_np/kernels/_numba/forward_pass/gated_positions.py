"""Positions that gates count, for some queries and all keys: the bias, and the way back.

A block of queries meets panels of keys from its last key on backwards, and carries the sums of its gates from panel to
panel. Where all of them have reached the last position, nothing changes any more and earlier keys need no gates. All is
computed in float64: a position is a sum of many gates, and a steep table makes much of its error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numba import carray

from relpos_np._contract.counted import CountedBias
from relpos_np._contract.problem import converted
from relpos_np._contract.terms import fit
from relpos_np.kernels._numba.forward_pass.pack import load_rows, pack_panels
from relpos_np.kernels._numba.forward_pass.product import multiply
from relpos_np.kernels._numba.forward_pass.scores import score_plain
from relpos_np.kernels._numba.forward_pass.work import LOG2E, PANEL_VECTORS, round_up
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets, rowwise, strides
from relpos_np.kernels._numba.launch.build import Kernel, helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import COUNT
from relpos_np.kernels._numba.simd.rows import (
    at,
    bytes_,
    doubles,
    exp2_row,
    fill_row,
    floats,
    get,
    lanes_of,
    longs,
    opaque,
    pointer_like,
    put,
    sum_row,
    take,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM, SUM_VECTORS, TARGET, require_multiple
from relpos_np.types import Array

# Queries of one piece of work. A call holds a bias for two of them at least: on matrix tiles too, it must not grow.
BLOCK_ROWS = 96
require_multiple("BLOCK_ROWS", BLOCK_ROWS, ROW_QUANTUM, "rows that blocks are padded to")
# Operations that a gate, its position and its slope take beside its product.
GATE_FLOPS = 200


@helper
def count_layout(depth: int, lanes: int) -> tuple[int, ...]:
    """Where a thread's queries, packed keys, tile, its exponentials, their sums, and positions begin; and the end."""
    width = PANEL_VECTORS * lanes
    packed = BLOCK_ROWS * depth
    tile = packed + width * depth
    powers = tile + BLOCK_ROWS * width
    total = powers + (BLOCK_ROWS * width + SUM_VECTORS * lanes - 1) // (SUM_VECTORS * lanes) * SUM_VECTORS * lanes
    reached = total + lanes
    return 0, packed, tile, powers, total, reached, reached + BLOCK_ROWS


@helper
def gate_tile(m: Any, base: Any, keys: Any, counted: int, i0: int, rows: int, c0: int, c1: int) -> None:
    """Gates of a block of queries and keys c0..c1 in the tile: 0 where a key does not count."""
    lanes = lanes_of(base)
    width = PANEL_VECTORS * lanes
    _, packed_at, tile_at, powers_at, total_at, _, _ = count_layout(m.depth, lanes)
    packed, tile, powers, total = at(base, packed_at), at(base, tile_at), at(base, powers_at), at(base, total_at)
    pack_panels(packed, keys, m.k_row, c0, c1, c1, m.depth)
    score_plain(base, m.depth, packed, m.depth, tile, width, rows, c1 - c0)
    wide = round_up(rows * width, SUM_VECTORS * lanes)
    fill_row(powers, 0, wide, 0.0)
    for i in range(rows):
        for c in range(i * width, i * width + c1 - c0):
            put(powers, c, -abs(get(tile, c)))
    # Of no use here, but it must not hold anything.
    fill_row(total, 0, lanes, 0.0)
    exp2_row(powers, wide, 0.0, total, 0.0)
    for i in range(rows):
        for c in range(c1 - c0):
            x, small = get(tile, i * width + c), get(powers, i * width + c)
            gate = (1.0 if x >= 0.0 else small) / (1.0 + small)
            put(tile, i * width + c, gate if c0 + c < m.last + i0 + i and x == x else 0.0)  # noqa: PLR0124
        if m.counted:
            own = counted + (i0 + i) * m.counted_row + c0 * m.counted_col
            for c in range(c1 - c0):
                if get(bytes_(m.counted), own + c * m.counted_col) == 0:
                    put(tile, i * width + c, 0.0)


@helper
def all_reached(reached: Any, rows: int, most: float) -> bool:
    """Whether every query of the block has counted to the last position."""
    least = most
    for i in range(rows):
        least = min(least, get(reached, i))
    return least >= most


@helper
def sum_far(x: Any, start: int, stop: int) -> float:
    """The sum of x[start:stop] in float64, of sums of few elements in the type of x."""
    total = 0.0
    for c in range(start, stop, BLOCK_KEYS):
        total += sum_row(at(x, c), min(BLOCK_KEYS, stop - c))
    return total


@helper
def count_block(m: Any, base: Any, stored: Any, t: int) -> None:
    """The bias of a block of queries of one head, to which pointers are of the type of `stored`."""
    b, h, i0 = t // (m.heads * m.blocks), t // m.blocks % m.heads, t % m.blocks * BLOCK_ROWS
    rows, lanes, line = min(BLOCK_ROWS, m.q_len - i0), lanes_of(base), (b * m.heads + h) * m.q_len + i0
    width, most = PANEL_VECTORS * lanes, m.positions - 1
    _, _, tile_at, _, _, reached_at, _ = count_layout(m.depth, lanes)
    tile, reached = at(base, tile_at), at(base, reached_at)
    whole, own = at(doubles(m.whole), line * m.positions), at(pointer_like(stored, m.out), line * m.k_len)
    keys = at(doubles(m.k), get(longs(m.batches), b) + h // m.k_group * m.k_head)
    counted = get(longs(m.batches), m.count + b) + h * m.counted_head
    load_rows(base, m.depth, at(doubles(m.q), line * m.depth), m.depth, rows, m.depth, m.scale * LOG2E)
    fill_row(reached, 0, rows, 0.0)
    stop = max(min(m.last + i0 + rows - 1, m.k_len), 0)
    for i in range(rows):
        fill_row(at(own, i * m.k_len), stop, m.k_len, get(whole, i * m.positions) * m.factor)
    c1 = stop
    while c1 > 0 and not all_reached(reached, rows, float(most)):
        c0 = max(c1 - width, 0)
        gate_tile(m, base, keys, counted, i0, rows, c0, c1)
        for i in range(rows):
            line_of, steps, total = at(own, i * m.k_len), at(whole, i * m.positions), get(reached, i)
            for c in range(c1 - 1, c0 - 1, -1):
                total += get(tile, i * width + c - c0)
                position = min(total, float(most))
                row = int(position)
                low = get(steps, row)
                put(line_of, c, (low + (position - row) * (get(steps, min(row + 1, most)) - low)) * m.factor)
            put(reached, i, total)
        c1 = c0
    for i in range(rows):
        fill_row(at(own, i * m.k_len), 0, c1, get(whole, i * m.positions + most) * m.factor)


@helper
def slope_block(m: Any, base: Any, stored: Any, t: int) -> None:
    """From gradients of a block's bias to those of products with whole positions and of products in gates.

    The former are added to, the latter written; gradients, to which pointers are of the type of `stored`, are
    overwritten with other numbers.
    """
    b, h, i0 = t // (m.heads * m.blocks), t // m.blocks % m.heads, t % m.blocks * BLOCK_ROWS
    rows, lanes, line = min(BLOCK_ROWS, m.q_len - i0), lanes_of(base), (b * m.heads + h) * m.q_len + i0
    width, most = PANEL_VECTORS * lanes, m.positions - 1
    _, _, tile_at, _, _, reached_at, _ = count_layout(m.depth, lanes)
    tile, reached = at(base, tile_at), at(base, reached_at)
    whole, to_whole = at(doubles(m.whole), line * m.positions), at(doubles(m.to_whole), line * m.positions)
    own, slopes = at(pointer_like(stored, m.ds), line * m.k_len), at(doubles(m.slopes), line * m.k_len)
    keys = at(doubles(m.k), get(longs(m.batches), b) + h // m.k_group * m.k_head)
    counted = get(longs(m.batches), m.count + b) + h * m.counted_head
    load_rows(base, m.depth, at(doubles(m.q), line * m.depth), m.depth, rows, m.depth, m.scale * LOG2E)
    fill_row(reached, 0, rows, 0.0)
    stop = max(min(m.last + i0 + rows - 1, m.k_len), 0)
    for i in range(rows):
        later = sum_far(at(own, i * m.k_len), stop, m.k_len) * m.factor
        put(to_whole, i * m.positions, get(to_whole, i * m.positions) + later)
        fill_row(at(slopes, i * m.k_len), stop, m.k_len, 0.0)
    c1 = stop
    while c1 > 0 and not all_reached(reached, rows, float(most)):
        c0 = max(c1 - width, 0)
        gate_tile(m, base, keys, counted, i0, rows, c0, c1)
        for i in range(rows):
            line_of, gates = at(own, i * m.k_len), at(slopes, i * m.k_len)
            steps, to_steps, total = at(whole, i * m.positions), at(to_whole, i * m.positions), get(reached, i)
            for c in range(c1 - 1, c0 - 1, -1):
                total += get(tile, i * width + c - c0)
                position = min(total, float(most))
                row = int(position)
                above, part, grad = min(row + 1, most), position - row, get(line_of, c) * m.factor
                put(to_steps, row, get(to_steps, row) + grad * (1.0 - part))
                put(to_steps, above, get(to_steps, above) + grad * part)
                put(gates, c, get(tile, i * width + c - c0))
                # What the position's rise changes, which its gate and those of all later keys share.
                put(line_of, c, grad * (get(steps, above) - get(steps, row)))
            put(reached, i, total)
        c1 = c0
    put(longs(m.starts), t, c1)
    for i in range(rows):
        line_of, gates, end = at(own, i * m.k_len), at(slopes, i * m.k_len), i * m.positions + most
        put(to_whole, end, get(to_whole, end) + sum_far(line_of, 0, c1) * m.factor)
        fill_row(gates, 0, c1, 0.0)
        total = 0.0
        for c in range(c1, stop):
            total += get(line_of, c)
            gate = get(gates, c)
            put(gates, c, total * gate * (1.0 - gate) * m.scale)


def _by_pieces(block: Any, stored: Any) -> Any:
    """The body of a kernel which does blocks of queries from the shared counter while there are any.

    `stored`: the type of pointer to biases or their gradients; all else is float64.
    """

    @helper
    def every_block(call: int, base: Any) -> None:
        m = carray(opaque(call), 1, COUNT)[0]
        t = take(call)
        while t < m.stop:
            block(m, base, stored(m.work), t)
            t = take(call)

    return every_block


_STORED = {"float32": floats, "float64": doubles}
count = entry_points(
    __name__, "count", COUNT, {name: (doubles, _by_pieces(count_block, x)) for name, x in _STORED.items()}
)
recount = entry_points(
    __name__, "recount", COUNT, {name: (doubles, _by_pieces(slope_block, x)) for name, x in _STORED.items()}
)

_EMPTY = dict.fromkeys(COUNT.names or (), 0)
_PACK = struct.Struct("<" + "".join("d" if COUNT[name].kind == "f" else "q" for name in _EMPTY)).pack


class Counting:
    """The bias of some queries, (..., H, L_q, L_k), and its way back; operands in float64 are made once for a call."""

    def __init__(self, bias: CountedBias) -> None:
        self.bias = bias
        self.key = rowwise(converted(bias.key, np.dtype(np.float64)))
        self.table = bias.table.astype(np.float64, copy=False)
        self.to_key: Array | None = None
        self.to_table = np.zeros(self.table.shape)
        self.to_query: list[Array] = []

    def rows(self, queries: slice) -> Array:
        """The bias of some queries."""
        part = _Part(self, queries)
        out = np.empty(part.bias.shape, part.bias.dtype)
        if out.size:
            part.run(count[out.dtype.name], out=out)
        return out

    def back(self, queries: slice, ds: Array) -> None:
        """Take the gradient of the bias of some queries, C-contiguous and overwritten; ranges come in order."""
        part = _Part(self, queries, clean=True)
        query, whole = part.query, part.whole
        slopes, to_whole = np.empty(ds.shape), np.zeros(whole.shape)
        starts = np.zeros(part.pieces, np.int64)
        part.run(recount[ds.dtype.name], ds=ds, slopes=slopes, to_whole=to_whole, starts=starts)
        to_query = to_whole @ self.table
        shared = np.swapaxes(to_whole, -1, -2) @ query
        self.to_table += fit(shared, self.table.shape)
        if self.to_key is None:
            self.to_key = np.zeros(part.key.shape)
        # Keys before the first that moves a position have no part.
        first = int(starts.min(initial=ds.shape[-1]))
        for b in np.ndindex(ds.shape[:-3]):
            for h, heads in _groups(ds.shape[-3], self.key.shape[-3]):
                moved = slopes[b][heads, :, first:]
                key = part.key[b][h, first:]
                to_query[b][heads] += moved @ np.where(np.isfinite(key), key, 0.0)
                pairs = moved.shape[0] * moved.shape[1], moved.shape[2]
                self.to_key[b][h, first:] += moved.reshape(pairs).T @ query[b][heads].reshape(pairs[0], -1)
        self.to_query.append(to_query)

    def gradient(self) -> CountedBias:
        """The record with gradients of its operands, in the dtype of the bias."""
        own, dtype = self.bias, self.bias.dtype
        to_key = np.zeros(own.key.shape) if self.to_key is None else fit(self.to_key, own.key.shape)
        to_query = np.concatenate(self.to_query, axis=-2) if self.to_query else np.zeros(own.query.shape)
        query, key, table = (x.astype(dtype) for x in (to_query, to_key, self.to_table))
        return replace(own, query=query, key=key, table=table)


def _groups(heads: int, kv_heads: int) -> Iterator[tuple[int, slice]]:
    """Each head of keys, and the heads of queries that share it."""
    group = heads // kv_heads
    return ((h, slice(h * group, (h + 1) * group)) for h in range(kv_heads))


class _Part:
    """The work for some queries."""

    def __init__(self, counting: Counting, queries: slice, *, clean: bool = False) -> None:
        self.bias = bias = counting.bias.of_queries(queries)
        self.query = np.ascontiguousarray(bias.query, np.float64)
        if clean:
            # Queries without keys may hold anything; those with some have gradients that say so.
            self.query = np.where(np.isfinite(self.query), self.query, 0.0)
        heads, self.threads = self.query.shape[-3], launcher.available_threads()
        self.whole = multiply(self.query, counting.table, 1.0, heads, self.threads)
        lead = self.query.shape[:-3]
        self.key = np.broadcast_to(counting.key, (*lead, *counting.key.shape[-3:]))
        self.items = math.prod(lead)
        self.blocks = -(-self.query.shape[-2] // BLOCK_ROWS)
        self.pieces = self.items * heads * self.blocks
        # What records name.
        self.kept: list[Array] = []

    def run(self, kernel: Kernel, **arrays: Array) -> None:
        """Run a kernel, whose record names these arrays as well."""
        f: dict[str, Any] = _EMPTY.copy()
        bias, lead = self.bias, len(self.query.shape) - 3
        batches = np.zeros((2, self.items), np.int64)
        batches[0] = batch_offsets(self.key, lead)
        if bias.counted is not None:
            counted = np.broadcast_to(bias.counted, bias.shape)
            f["counted"], batches[1] = address_of(counted), batch_offsets(counted, lead)
            self.kept.append(counted)
            f["counted_head"], f["counted_row"], f["counted_col"] = strides(counted)[-3:]
        named = {"q": self.query, "k": self.key, "whole": self.whole, "batches": batches, **arrays}
        f |= {name: address_of(x) for name, x in named.items()}
        self.kept += named.values()
        f["k_head"], f["k_row"], _ = strides(self.key)[-3:]
        f["heads"], f["q_len"], f["depth"] = self.query.shape[-3:]
        f["k_len"], f["positions"], f["count"] = self.key.shape[-2], self.whole.shape[-1], self.items
        f["k_group"], f["blocks"] = f["heads"] // self.key.shape[-3], self.blocks
        # Of the first key that query 0 does not count; far more than there are is as good as all.
        f["last"] = min(bias.last, f["k_len"]) + 1
        f["scale"], f["factor"] = bias.scale, bias.factor
        size = count_layout.py_func(f["depth"], TARGET.lanes(8))[-1] * 8
        piece = BLOCK_ROWS * f["k_len"] * (2.0 * f["depth"] + GATE_FLOPS)
        threads = 1 if piece * self.pieces < launcher.SERIAL_FLOPS else min(self.threads, self.pieces)
        chunk = int(threads * launcher.call_flops(8) / piece)
        record = bytearray(_PACK(*f.values()))
        launcher.run_pieces(kernel, record, self.pieces, chunk, threads, workspace=size)
