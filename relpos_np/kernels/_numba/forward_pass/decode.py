"""Few queries and many keys: keys and values are read once, as they lie, for all queries that share them.

Keys and values may be of half precision, or codes of eight bits with scales; arithmetic is then in float32. One piece
of work is a range of keys of one key head, with the rows of every query head of its group. Many keys are attended in
several ranges and merged. Where the rows of a token lie side by side, as in pages, a piece has several key heads:
memory is read in the order of its addresses, some keys of all these heads before the next keys.

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
from relpos_np.kernels._numba.forward_pass.pages import copy_scales, place_of, place_rows, run_from
from relpos_np.kernels._numba.forward_pass.scores import complete_scores, in_band
from relpos_np.kernels._numba.forward_pass.work import (
    MINUS_INFINITY,
    OWN,
    VECTOR_BYTES,
    Head,
    Tile,
    head_of,
    round_up,
    size_of,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import ADD, CALL, DECODE, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.simd.rotation import turn_rows
from relpos_np.kernels._numba.simd.rows import (
    add_row,
    address_of,
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
from relpos_np.kernels._numba.simd.vectors import CODE_UNITS
from relpos_np.types import Array

PACK_DECODE = struct.Struct(f"<{len(DECODE.names or ())}q").pack
CALL_BYTES = CALL.itemsize
# Rows beyond this many are worth packing the keys for.
MOST_ROWS = 8
# Of several heads whose rows lie side by side, so many keys are read of each in turn. All rows are asked for as many
# rows early: while the heads have their turns, the next rows of all of them arrive.
AHEAD = CHUNK = 32
# Tables of where rows begin have those of a block, and of the rows after it that are asked for early.
PLACES = BLOCK_KEYS + AHEAD
assert BLOCK_KEYS % CHUNK == 0, "the last keys of a block would ask for rows that no table has"

# The scales of a head's keys and of its values, and whether each has one of its own, or channels have them. `unit`:
# what those in pages are multiplied by.
Scales = namedtuple("Scales", "k k_row v v_row unit")  # noqa: PYI024


@helper
def decode_layout(depth: int, v_depth: int, turning: int, lanes: int, n: int) -> Layout:
    """A thread's workspace for the key head n of a piece, up to its end; buffers that are not needed are empty.

    Copies of keys and of values are shared by all key heads; all else is there for each. `scratch`: sums of a block's
    values. `turning`: not 0 if keys turn as they are read.
    """
    width = (v_depth + lanes - 1) // lanes * lanes
    keys = 4 * PLACES * 8 // (VECTOR_BYTES // lanes)
    values = keys + (BLOCK_KEYS * depth if turning else 0)
    queries, own = values + BLOCK_KEYS * width, (MOST_ROWS * depth + 63) // 64 * 64
    # Vectors of rows: the rows are rounded up to a vector.
    queries += n * (own + MOST_ROWS * (BLOCK_KEYS + 2 * width + 2 * lanes) + 3 * 64)
    scores = queries + own
    out = scores + MOST_ROWS * BLOCK_KEYS
    scratch = out + MOST_ROWS * width
    total = scratch + MOST_ROWS * width
    tops = total + MOST_ROWS * lanes
    best = tops + MOST_ROWS * lanes
    top = best + 64
    fade = top + 64
    return Layout(
        queries,
        keys,
        scratch,
        scores,
        values,
        0,
        0,
        0,
        0,
        out,
        total,
        tops,
        best,
        top,
        fade,
        0,
        0,
        0,
        0,
        0,
        0,
        fade + 64,
    )


@helper
def places(base: Any, n: int) -> Any:
    """Where rows begin: of keys (0) and values (1), and of those that were copied (2); scales that were (3)."""
    return at(longs(address_of(base)), n * PLACES)


@helper
def place_tile(p: Any, base: Any, head: Any, tile: Any) -> None:
    """Write where the keys and the values of a block begin, and behind either what is read next.

    After keys these are the values of the block, and after values the keys of the next one; where the heads of keys and
    values are not equally far apart, those of another head.
    """
    j0, cols, left = tile.j0, tile.cols, PLACES - tile.cols
    apart = (head.v - head.k) // size_of(base, p.k_kind)
    place_rows(p, places(base, 0), j0, cols, p.k_row, p.k_page, 0)
    place_rows(p, at(places(base, 0), cols), j0, left, p.v_row, p.v_page, apart)
    place_rows(p, places(base, 1), j0, cols, p.v_row, p.v_page, 0)
    place_rows(p, at(places(base, 1), cols), j0 + cols, left, p.k_row, p.k_page, -apart)


@helper
def places_of_copies(base: Any, width: int) -> Any:
    """Those of rows that were copied to the workspace, so many elements apart."""
    table = places(base, 2)
    for r in range(BLOCK_KEYS):
        put(table, r, r * width)
    return table


@helper
def score_rows(base: Any, w: Any, keys: Any, table: Any, early: Any, first: int, cols: int, p: Any) -> None:
    """Plain products of every query with some keys, whose scores begin in a column."""
    rows = p.k_group * p.q_len
    for r in range(rows):
        q, s = at(base, w.queries + r * p.depth), at(base, w.scores + r * BLOCK_KEYS + first)
        if r >= rows // 4 * 4:
            dots_of_one(q, p.depth, keys, table, early, cols, p.depth, s, BLOCK_KEYS)
        elif r % 4 == 0:
            dots_of_four(q, p.depth, keys, table, early, cols, p.depth, s, BLOCK_KEYS)


@helper
def mix_rows(base: Any, w: Any, values: Any, table: Any, early: Any, first: int, cols: int, p: Any) -> None:
    """Add values, weighted by probabilities from a column on, to the sums of a block."""
    rows, width = p.k_group * p.q_len, round_up(p.v_depth, lanes_of(base))
    for r in range(rows):
        s, sums = at(base, w.scores + r * BLOCK_KEYS + first), at(base, w.scratch + r * width)
        if r >= rows // 4 * 4:
            mixes_of_one(s, BLOCK_KEYS, values, table, early, cols, p.v_depth, sums, width)
        elif r % 4 == 0:
            mixes_of_four(s, BLOCK_KEYS, values, table, early, cols, p.v_depth, sums, width)


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
def turn_keys(p: Any, base: Any, stored: Any, w: Any, head: Any, j0: int, cols: int, scales: Any) -> None:
    """Copy keys, which may lie in several pages, while their pairs of channels turn."""
    first = 0
    while first < cols:
        j = j0 + first
        run = run_from(p, j, cols - first)
        own = head.k + place_of(p, j, p.k_row, p.k_page) * size_of(base, p.k_kind)
        keys, turns = at(base, w.keys + first * p.depth), head.k_turn + j * 2 * p.turn_pairs * size_of(base, OWN)
        if scales is None:
            load_turned(p, keys, p.depth, own, p.k_kind, p.k_row, turns, run, p.depth)
        else:
            turn_codes(p, keys, pointer_like(stored, own), turns, run, scales)
        first += run


@helper
def copy_values(p: Any, base: Any, values: Any, w: Any, tile: Any, scales: Any) -> Any:
    """Copy the values of a block; return NaN if an element is not finite."""
    width, table, finite = round_up(p.v_depth, lanes_of(base)), places(base, 1), 0.0
    for r in range(tile.cols):
        row = at(base, w.values + r * width)
        finite += copy_block(row, width, at(values, get(table, r)), p.v_row, 1, p.v_depth)
        if scales is not None and scales.v_row:
            scale_row(row, row, p.v_depth, get(scales.v, tile.j0 + r))
    if scales is not None and scales.v_row:
        finite = copy_block(at(base, w.values), width, at(base, w.values), width, tile.cols, p.v_depth)
    return finite


@helper
def scales_of_tile(p: Any, e: Any, base: Any, scales: Any, tile: Any) -> Any:
    """The scales of a block of keys as if all of a head lay one after the other, whether they do or lie in pages."""
    if scales is None:
        return None
    k, v, room = scales.k, scales.v, floats(address_of(places(base, 3)))
    if p.pages and scales.k_row:
        copy_scales(p, room, k, e.k_scale_page_row, e.k_scale_page, tile, scales.unit)
        k = at(room, -tile.j0)
    if p.pages and scales.v_row:
        room = at(room, BLOCK_KEYS)
        copy_scales(p, room, v, e.v_scale_page_row, e.v_scale_page, tile, scales.unit)
        v = at(room, -tile.j0)
    return Scales(k, scales.k_row, v, scales.v_row, scales.unit)


@helper
def weigh_tile(p: Any, adds: Any, base: Any, stored: Any, w: Any, head: Any, tile: Any, scales: Any) -> None:
    """Make probabilities of the products of a group's rows, of which `head` is the first head, with a block of keys.

    Values are then still to be added to the sums of the block; where a row may not attend a key, they have been.
    """
    cols, v_depth, lanes = tile.cols, p.v_depth, lanes_of(base)
    rows, width, wide = p.k_group * p.q_len, round_up(v_depth, lanes), round_up(cols, SUM_VECTORS * lanes)
    out, fade = at(base, w.out), at(base, w.fade)
    if scales is not None and scales.k_row:
        for r in range(rows):
            multiply_row(at(base, w.scores + r * BLOCK_KEYS), at(scales.k, tile.j0), cols)
    fill_row(base, w.tops, w.tops + rows * lanes, MINUS_INFINITY)
    for g in range(p.k_group):
        bias, inner = at(head.bias, g * p.bias_head), head.inner + g * p.inner_head
        one = Head(head.b, head.h + g, head.q, head.k, head.v, head.grad, bias, head.mask, 0, 0, inner)
        complete_scores(p, adds, base, w, one, Tile(0, p.q_len, tile.j0, cols, g * p.q_len))
    for i in range(rows):
        put(base, w.best + i, lane_max(at(base, w.tops + i * lanes)))
    advance(at(base, w.best), at(base, w.top), fade, round_up(rows, lanes))
    fill_row(base, w.scratch, w.scratch + rows * width, 0.0)
    in_place, bypassed = reads_values_in_place(p, head.b, tile), False
    if not in_place:
        bypassed = math.isnan(copy_values(p, base, pointer_like(stored, head.v), w, tile, scales))
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
    if not in_place:
        table = places_of_copies(base, width)
        mix_rows(base, w, at(base, w.values), table, table, 0, cols, p)
    elif scales is not None and scales.v_row:
        for i in range(rows):
            multiply_row(at(base, w.scores + i * BLOCK_KEYS), at(scales.v, tile.j0), cols)


@helper
def reads_values_in_place(p: Any, b: int, tile: Any) -> bool:
    """Whether values are read where they lie: where every row may attend every key of a block."""
    found: bool = p.soft == 0 and p.allowed == 0 and p.inner == 0 and in_band(p, b, tile)
    return found


@helper
def decode_tile(
    p: Any, adds: Any, batches: Any, base: Any, stored: Any, scales: Any, e: Any, heads: tuple[int, int, int], tile: Any
) -> None:
    """Attend one block of keys with the rows of every query head of some key heads, of which each has its turn.

    `stored`: any pointer of the type that keys and values have. `heads`: the batch item, the first, and where
    they end.
    """
    b, begin, end = heads
    lanes, count, kv_heads = lanes_of(base), end - begin, p.heads // p.k_group
    rows, width = p.k_group * p.q_len, round_up(p.v_depth, lanes)
    place_tile(p, base, head_of(p, batches, base, b, begin * p.k_group), tile)
    chunk, copies = BLOCK_KEYS if count == 1 else CHUNK, places(base, 2)
    if p.turn:
        copies = places_of_copies(base, p.depth)
    for first in range(0, tile.cols, chunk):
        cols, table = min(chunk, tile.cols - first), at(places(base, 0), first)
        for n in range(count):
            head = head_of(p, batches, base, b, (begin + n) * p.k_group)
            w = decode_layout(p.depth, p.v_depth, p.turn, lanes, n)
            if p.turn:
                turn_keys(p, base, stored, w, head, tile.j0 + first, cols, scales(e, b * kv_heads + begin + n))
                score_rows(base, w, at(base, w.keys), copies, copies, first, cols, p)
            else:
                score_rows(base, w, pointer_like(stored, head.k), table, at(table, AHEAD), first, cols, p)
    for n in range(count):
        head = head_of(p, batches, base, b, (begin + n) * p.k_group)
        w, own = decode_layout(p.depth, p.v_depth, p.turn, lanes, n), scales(e, b * kv_heads + begin + n)
        own = scales_of_tile(p, e, base, own, tile)
        weigh_tile(p, adds, base, stored, w, head, tile, own)
    if reads_values_in_place(p, b, tile):
        for first in range(0, tile.cols, chunk):
            cols, table = min(chunk, tile.cols - first), at(places(base, 1), first)
            for n in range(count):
                values = pointer_like(stored, head_of(p, batches, base, b, (begin + n) * p.k_group).v)
                w = decode_layout(p.depth, p.v_depth, p.turn, lanes, n)
                mix_rows(base, w, values, table, at(table, AHEAD), first, cols, p)
    for n in range(count):
        w = decode_layout(p.depth, p.v_depth, p.turn, lanes, n)
        for i in range(rows):
            sums, out = at(base, w.scratch + i * width), at(base, w.out + i * width)
            add_row(sums, out, width, get(base, w.fade + i))
            scale_row(out, sums, width, 1.0)


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
def load_queries(p: Any, base: Any, w: Any, head: Any, scales: Any) -> None:
    """Load the rows of a group, and forget the keys of the head before."""
    group, q_len, lanes = p.k_group, p.q_len, lanes_of(base)
    rows = group * q_len
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


@helper
def decode_part(p: Any, e: Any, adds: Any, batches: Any, base: Any, stored: Any, scales: Any, t: int) -> None:
    """Attend one range of keys of one key head, or of several."""
    kv_heads, lanes, q_len = p.heads // p.k_group, lanes_of(base), p.q_len
    pieces = (kv_heads + e.together - 1) // e.together * e.parts
    b, part, first_head = t // pieces, t % e.parts, t % pieces // e.parts * e.together
    stop_head = min(first_head + e.together, kv_heads)
    for h in range(first_head, stop_head):
        w = decode_layout(p.depth, p.v_depth, p.turn, lanes, h - first_head)
        load_queries(p, base, w, head_of(p, batches, base, b, h * p.k_group), scales(e, b * kv_heads + h))
    begin = max(get(batches, KEY_BEGIN * p.count + b), p.offset - p.left)
    end = min(get(batches, KEY_END * p.count + b), q_len + p.offset + p.right)
    step = round_up((end - begin + e.parts - 1) // e.parts, BLOCK_KEYS)
    first = begin + part * step
    for j0 in range(first, min(first + step, end), BLOCK_KEYS):
        tile = Tile(0, q_len, j0, min(BLOCK_KEYS, end - j0), 0)
        decode_tile(p, adds, batches, base, stored, scales, e, (b, first_head, stop_head), tile)
    for h in range(first_head, stop_head):
        w = decode_layout(p.depth, p.v_depth, p.turn, lanes, h - first_head)
        head = head_of(p, batches, base, b, h * p.k_group)
        write_rows(p, e, base, w, head, part, scales(e, b * kv_heads + h))


@helper
def no_scales(e: Any, line: int) -> None:
    """Of keys and values that are numbers."""
    return


def _scales(name: str) -> Any:
    """Those of codes of this dtype."""
    unit = CODE_UNITS.get(name, 1.0)

    @helper
    def scales_of(e: Any, line: int) -> Scales:
        k, v = at(floats(e.k_scale), line * e.k_scale_head), at(floats(e.v_scale), line * e.v_scale_head)
        return Scales(k, e.k_scale_row, v, e.v_scale_row, unit)

    return scales_of


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
            decode_part(p, e, adds, longs(p.batches), base, stored(p.k), scales, t)
            t = take(call)

    return decode_all


# By the dtype in which keys and values are stored.
_BODIES = {
    "float32": (floats, _decoding(floats)),
    "float64": (doubles, _decoding(doubles)),
    "bfloat16": (floats, _decoding(brains)),
    "int8": (floats, _decoding(int8s, _scales("int8"))),
}
if CONVERTS_HALF:
    _BODIES["float16"] = floats, _decoding(halves)
    # Both are widened as float16.
    _BODIES |= {
        name: (floats, _decoding(kind, _scales(name)))
        for name, kind in (("float8_e4m3fn", e4m3s), ("float8_e5m2", e5m2s))
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
