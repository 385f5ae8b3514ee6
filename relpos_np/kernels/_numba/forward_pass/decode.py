"""Few queries and many keys: keys and values are read once, as they lie, for all queries that share them.

Keys and values may be of half precision, or codes of eight bits with scales; arithmetic is then in float32. One piece
of work is a range of keys of one key head, with the rows of every query head of its group. Many keys are attended in
several ranges and merged.

A scale of a channel is multiplied with queries, and with sums of values; one of a key with its scores, and with its
probabilities.
"""

from __future__ import annotations

import math
import struct
from collections import namedtuple
from typing import Any

import numpy as np
from numba import carray

from relpos_np.kernels._numba.forward_pass.attend import Layout, bypass_values, write_lse
from relpos_np.kernels._numba.forward_pass.pack import load_block, load_turned, store_row
from relpos_np.kernels._numba.forward_pass.pages import place_of, run_from
from relpos_np.kernels._numba.forward_pass.scores import complete_scores, in_band
from relpos_np.kernels._numba.forward_pass.work import MINUS_INFINITY, OWN, Head, Tile, head_of, round_up, size_of
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import ADD, CALL, DECODE, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.simd.rotation import turn_rows
from relpos_np.kernels._numba.simd.rows import (
    ROWS_AHEAD,
    advance,
    at,
    brains,
    copy_block,
    dots_of_four,
    dots_of_one,
    doubles,
    e4m3s,
    e5m2s,
    exp2_row,
    fill_row,
    floats,
    get,
    halves,
    int8s,
    lane_max,
    lane_sum,
    lanes_of,
    longs,
    mixes_of_four,
    mixes_of_one,
    multiply_row,
    opaque,
    pointer_like,
    put,
    scale_row,
    take,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, CONVERTS_HALF, SUM_VECTORS
from relpos_np.types import Array

PACK_DECODE = struct.Struct(f"<{len(DECODE.names or ())}q").pack
CALL_BYTES = CALL.itemsize
# Rows beyond this many are worth packing the keys for.
MOST_ROWS = 8

# The scales of a head's keys and of its values, and whether each has one of its own, or channels have them.
Scales = namedtuple("Scales", "k k_row v v_row")  # noqa: PYI024


@helper
def decode_layout(depth: int, v_depth: int, turning: int, lanes: int) -> Layout:
    """A thread's workspace; buffers that are not needed are empty. `turning`: not 0 if keys turn as they are read."""
    width = (v_depth + lanes - 1) // lanes * lanes
    keys = (MOST_ROWS * depth + 63) // 64 * 64
    scores = keys + (BLOCK_KEYS * depth if turning else 0)
    values = scores + MOST_ROWS * BLOCK_KEYS
    out = values + BLOCK_KEYS * width
    total = out + MOST_ROWS * width
    tops = total + MOST_ROWS * lanes
    # Vectors of rows: the rows are rounded up to a vector.
    best = tops + MOST_ROWS * lanes
    top = best + 64
    fade = top + 64
    return Layout(
        0, keys, 0, scores, values, 0, 0, 0, 0, out, total, tops, best, top, fade, 0, 0, 0, 0, 0, 0, fade + 64
    )


@helper
def ahead_of(p: Any, j: int, run: int, row: int, page: int) -> int:
    """Elements from a row to the one that is asked for early: of small pages that in the next page."""
    if p.pages == 0 or p.page_keys > 4 * ROWS_AHEAD:
        return row * ROWS_AHEAD
    return place_of(p, j + run, row, page) - place_of(p, j, row, page) if j + run < p.k_len else 0


@helper
def score_rows(
    base: Any, w: Any, keys: Any, row: int, ahead: int, first: int, cols: int, depth: int, rows: int
) -> None:
    """Plain products of every query with some keys, whose scores begin in a column."""
    for r in range(rows):
        q, s = at(base, w.queries + r * depth), at(base, w.scores + r * BLOCK_KEYS + first)
        if r >= rows // 4 * 4:
            dots_of_one(q, depth, keys, row, ahead, cols, depth, s, BLOCK_KEYS)
        elif r % 4 == 0:
            dots_of_four(q, depth, keys, row, ahead, cols, depth, s, BLOCK_KEYS)


@helper
def mix_rows(
    base: Any, w: Any, values: Any, row: int, ahead: int, first: int, cols: int, depth: int, rows: int
) -> None:
    """Add values, weighted by probabilities from a column on, to every row of the output."""
    width = round_up(depth, lanes_of(base))
    for r in range(rows):
        s, out, fade = at(base, w.scores + r * BLOCK_KEYS + first), at(base, w.out + r * width), at(base, w.fade + r)
        if r >= rows // 4 * 4:
            mixes_of_one(s, BLOCK_KEYS, values, row, ahead, cols, depth, out, width, fade)
        elif r % 4 == 0:
            mixes_of_four(s, BLOCK_KEYS, values, row, ahead, cols, depth, out, width, fade)


@helper
def turn_codes(p: Any, out: Any, codes: Any, turns: int, rows: int, scales: Any) -> None:
    """Make numbers of keys that are codes, while their pairs of channels turn."""
    by, pairs, first, blocks, way = pointer_like(out, turns), p.turn_pairs, p.turn_first, p.turn_blocks, p.turn - 1
    if scales.k_row:
        turn_rows(out, p.depth, codes, p.k_row, by, rows, p.depth, pairs, first, blocks, way, 1.0)
    else:
        copy_block(out, p.depth, codes, p.k_row, rows, p.depth)
        for r in range(rows):
            multiply_row(at(out, r * p.depth), scales.k, p.depth)
        turn_rows(out, p.depth, out, p.depth, by, rows, p.depth, pairs, first, blocks, way, 1.0)


@helper
def score_tile(p: Any, base: Any, stored: Any, w: Any, head: Any, tile: Any, scales: Any) -> None:
    """Plain products of every row with every key of a block, which may lie in several pages."""
    rows, first = p.k_group * p.q_len, 0
    while first < tile.cols:
        j = tile.j0 + first
        run, place = run_from(p, j, tile.cols - first), place_of(p, j, p.k_row, p.k_page)
        if p.turn:
            keys, own = at(base, w.keys + first * p.depth), head.k + place * size_of(base, p.k_kind)
            turns = head.k_turn + j * 2 * p.turn_pairs * size_of(base, OWN)
            if scales is None:
                load_turned(p, keys, p.depth, own, p.k_kind, p.k_row, turns, run, p.depth)
            else:
                turn_codes(p, keys, pointer_like(stored, own), turns, run, scales)
        else:
            keys, ahead = at(pointer_like(stored, head.k), place), ahead_of(p, j, run, p.k_row, p.k_page)
            score_rows(base, w, keys, p.k_row, ahead, first, run, p.depth, rows)
        first += run
    if p.turn:
        score_rows(base, w, at(base, w.keys), p.depth, 0, 0, tile.cols, p.depth, rows)
    if scales is not None and scales.k_row:
        for r in range(rows):
            multiply_row(at(base, w.scores + r * BLOCK_KEYS), at(scales.k, tile.j0), tile.cols)


@helper
def copy_values(p: Any, base: Any, values: Any, w: Any, tile: Any, scales: Any) -> Any:
    """Copy the values of a block; return NaN if an element is not finite."""
    width, first, finite = round_up(p.v_depth, lanes_of(base)), 0, 0.0
    while first < tile.cols:
        j = tile.j0 + first
        run, place = run_from(p, j, tile.cols - first), place_of(p, j, p.v_row, p.v_page)
        finite += copy_block(at(base, w.values + first * width), width, at(values, place), p.v_row, run, p.v_depth)
        first += run
    if scales is not None and scales.v_row:
        for r in range(tile.cols):
            row = at(base, w.values + r * width)
            scale_row(row, row, p.v_depth, get(scales.v, tile.j0 + r))
        finite = copy_block(at(base, w.values), width, at(base, w.values), width, tile.cols, p.v_depth)
    return finite


@helper
def mix_tile(p: Any, base: Any, values: Any, w: Any, tile: Any) -> None:
    """Add the values of a block, which are read where they lie."""
    rows, first = p.k_group * p.q_len, 0
    while first < tile.cols:
        j = tile.j0 + first
        run, place = run_from(p, j, tile.cols - first), place_of(p, j, p.v_row, p.v_page)
        ahead = ahead_of(p, j, run, p.v_row, p.v_page)
        mix_rows(base, w, at(values, place), p.v_row, ahead, first, run, p.v_depth, rows)
        # What was there before has faded.
        fill_row(base, w.fade, w.fade + rows, 1.0)
        first += run


@helper
def decode_tile(p: Any, adds: Any, base: Any, stored: Any, w: Any, head: Any, tile: Any, scales: Any) -> None:
    """Attend one block of keys with the rows of every query head of a group, of which `head` is the first.

    `stored`: any pointer of the type that keys and values have.
    """
    cols, v_depth, lanes = tile.cols, p.v_depth, lanes_of(base)
    rows, width, wide = p.k_group * p.q_len, round_up(v_depth, lanes), round_up(cols, SUM_VECTORS * lanes)
    out, fade, values = at(base, w.out), at(base, w.fade), pointer_like(stored, head.v)
    score_tile(p, base, stored, w, head, tile, scales)
    fill_row(base, w.tops, w.tops + rows * lanes, MINUS_INFINITY)
    for g in range(p.k_group):
        one = Head(
            head.b,
            head.h + g,
            head.q,
            head.k,
            head.v,
            head.grad,
            at(head.bias, g * p.bias_head),
            head.mask,
            0,
            0,
            head.inner + g * p.inner_head,
        )
        complete_scores(p, adds, base, w, one, Tile(0, p.q_len, tile.j0, cols, g * p.q_len))
    for i in range(rows):
        put(base, w.best + i, lane_max(at(base, w.tops + i * lanes)))
    advance(at(base, w.best), at(base, w.top), fade, round_up(rows, lanes))
    # Where every row may attend every key, values are read where they lie.
    in_place = p.soft == 0 and p.allowed == 0 and p.inner == 0 and in_band(p, head.b, tile)
    bypassed = False
    if not in_place:
        bypassed = math.isnan(copy_values(p, base, values, w, tile, scales))
        if bypassed:
            for i in range(rows):
                if get(fade, i) == 0.0:
                    fill_row(out, i * width, (i + 1) * width, 0.0)
            bypass_values(base, w, rows, cols, v_depth, width)
    for i in range(rows):
        s = at(base, w.scores + i * BLOCK_KEYS)
        fill_row(s, cols, wide, MINUS_INFINITY)
        exp2_row(s, wide, get(base, w.best + i), at(base, w.total + i * lanes), get(fade, i))
    if bypassed:
        # Rows that begin here: 0 * fade would turn an infinity among the values into NaN.
        for i in range(rows):
            if get(fade, i) == 0.0:
                put(fade, i, 1.0)
    if in_place:
        if scales is not None and scales.v_row:
            for i in range(rows):
                multiply_row(at(base, w.scores + i * BLOCK_KEYS), at(scales.v, tile.j0), cols)
        mix_tile(p, base, values, w, tile)
    else:
        mix_rows(base, w, at(base, w.values), width, 0, 0, cols, v_depth, rows)


@helper
def write_rows(p: Any, e: Any, base: Any, w: Any, head: Any, part: int, scales: Any) -> None:
    """Write the output and the log-sum-exp of a group's rows, or what a part of the keys leaves to be merged."""
    v_depth, lanes = p.v_depth, lanes_of(base)
    width = round_up(v_depth, lanes)
    for i in range(p.k_group * p.q_len):
        row = (head.b * p.heads + head.h + i // p.q_len) * p.q_rows + i % p.q_len
        top, total, sums = get(base, w.top + i), lane_sum(at(base, w.total + i * lanes)), at(base, w.out + i * width)
        if scales is not None and not scales.v_row:
            multiply_row(sums, scales.v, v_depth)
        if e.parts > 1:
            own = (head.b * p.heads + head.h) * p.q_len + i
            partial = at(pointer_like(base, e.partial), (own * e.parts + part) * (v_depth + 2))
            put(partial, 0, top)
            put(partial, 1, total)
            scale_row(at(partial, 2), sums, v_depth, 1.0)
        else:
            factor = 0.0 if total == 0.0 else 1.0 / total
            store_row(sums, p.out + row * v_depth * size_of(base, p.out_kind), p.out_kind, v_depth, factor)
            write_lse(p, base, row, top, total)


@helper
def decode_part(p: Any, e: Any, adds: Any, batches: Any, base: Any, stored: Any, scales: Any, t: int) -> None:
    """Attend one range of keys of one key head; `scales`: those of the head, or None."""
    group, q_len, lanes = p.k_group, p.q_len, lanes_of(base)
    kv_heads, rows = p.heads // group, group * q_len
    b, h, part = t // (kv_heads * e.parts), t // e.parts % kv_heads * group, t % e.parts
    w, head = decode_layout(p.depth, p.v_depth, p.turn, lanes), head_of(p, batches, base, b, h)
    for g in range(group):
        rows_at, own = at(base, w.queries + g * q_len * p.depth), head.q + g * p.q_head * size_of(base, p.q_kind)
        if p.turn:
            turns = head.q_turn + g * p.q_turn_head * size_of(base, OWN)
            load_turned(p, rows_at, p.depth, own, p.q_kind, p.q_row, turns, q_len, p.depth)
        else:
            load_block(rows_at, p.depth, own, p.q_kind, p.q_row, q_len, p.depth)
        scale_row(rows_at, rows_at, q_len * p.depth, p.scale)
    if scales is not None and not (scales.k_row or p.turn):
        for r in range(rows):
            multiply_row(at(base, w.queries + r * p.depth), scales.k, p.depth)
    fill_row(base, w.out, w.out + rows * round_up(p.v_depth, lanes), 0.0)
    fill_row(base, w.total, w.total + rows * lanes, 0.0)
    fill_row(base, w.best, w.best + 64, MINUS_INFINITY)
    fill_row(base, w.top, w.top + 64, MINUS_INFINITY)
    begin = max(get(batches, KEY_BEGIN * p.count + b), p.offset - p.left)
    end = min(get(batches, KEY_END * p.count + b), q_len + p.offset + p.right)
    step = round_up((end - begin + e.parts - 1) // e.parts, BLOCK_KEYS)
    first = begin + part * step
    for j0 in range(first, min(first + step, end), BLOCK_KEYS):
        decode_tile(p, adds, base, stored, w, head, Tile(0, q_len, j0, min(BLOCK_KEYS, end - j0), 0), scales)
    write_rows(p, e, base, w, head, part, scales)


@helper
def no_scales(e: Any, t: int) -> None:
    """Of keys and values that are numbers."""
    return


@helper
def scales_of(e: Any, t: int) -> Scales:
    """Of the key head that a piece of work belongs to."""
    line = t // e.parts
    k, v = at(floats(e.k_scale), line * e.k_scale_head), at(floats(e.v_scale), line * e.v_scale_head)
    return Scales(k, e.k_scale_row, v, e.v_scale_row)


def _decoding(stored: Any, scales: Any = no_scales) -> Any:
    """The kernel's body, which takes pieces of work from the shared counter while there are any.

    `stored`: the type of pointer to keys and values, by which loads that widen them are compiled in. `scales`: those of
    codes.
    """

    @helper
    def decode_all(call: int, base: Any) -> None:
        p = carray(opaque(call), 1, CALL)[0]
        e = carray(opaque(call + CALL_BYTES), 1, DECODE)[0]
        adds = carray(opaque(p.adds), p.add_count, ADD)
        t = take(call)
        while t < p.stop:
            decode_part(p, e, adds, longs(p.batches), base, stored(p.k), scales(e, t), t)
            t = take(call)

    return decode_all


# By the dtype in which keys and values are stored.
_BODIES = {
    "float32": (floats, _decoding(floats)),
    "float64": (doubles, _decoding(doubles)),
    "bfloat16": (floats, _decoding(brains)),
    "int8": (floats, _decoding(int8s, scales_of)),
}
if CONVERTS_HALF:
    _BODIES["float16"] = floats, _decoding(halves)
    # Both are widened as float16.
    _BODIES |= {
        name: (floats, _decoding(kind, scales_of)) for name, kind in (("float8_e4m3fn", e4m3s), ("float8_e5m2", e5m2s))
    }
decode = entry_points(__name__, "decode", CALL, _BODIES)


def merge(partial: Array, out: Array, lse: Array | None, unit: float) -> None:
    """Combine parts (rows, parts, 2 + D_v): maximum in units of log 2, sum, weighted sum of values."""
    top, total, sums = partial[..., 0], partial[..., 1], partial[..., 2:]
    # A part without keys has sums of 0; what is not finite elsewhere stays.
    with np.errstate(all="ignore"):
        best = top.max(axis=1, keepdims=True)
        share = np.exp2(top - np.where(best == -np.inf, 0, best))
        whole = (total * share).sum(axis=1)
        mixed = np.matmul(share[:, None], sums)[:, 0] / np.where(whole == 0, 1, whole)[:, None]
        out.reshape(mixed.shape)[...] = mixed
        if lse is not None:
            lse.reshape(whole.shape)[...] = (best[:, 0] + np.log2(whole)) * unit
