"""Few queries and many keys: keys and values are read once, as they lie, for all queries that share them.

Keys and values may be of half precision; arithmetic is then in float32. One piece of work is a range of
keys of one key head, with the rows of every query head of its group. Ranges of long keys are attended
apart, and merged by their maxima and sums.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numba import carray

from relpos_np.kernels._numba.attend import (
    BEST,
    FADE,
    MINUS_INFINITY,
    OUT,
    QUERIES,
    SCORES,
    TOP,
    TOPS,
    TOTAL,
    VALUES,
    VECTOR_BYTES,
    open_rows,
    round_up,
    spread_poison,
)
from relpos_np.kernels._numba.build import Kernel, helper, inlined
from relpos_np.kernels._numba.records import (
    ADD,
    BATCH_K,
    BATCH_MASK,
    BATCH_Q,
    BATCH_V,
    CALL,
    DECODE,
    KEY_BEGIN,
    KEY_END,
)
from relpos_np.kernels._numba.rows import (
    advance,
    at,
    brains,
    copy_block,
    dots_of_four,
    dots_of_one,
    doubles,
    exp2_row,
    fill_row,
    floats,
    get,
    halves,
    lane_max,
    lane_sum,
    longs,
    mixes_of_four,
    mixes_of_one,
    opaque,
    pointer_like,
    put,
    scale_row,
    take,
)
from relpos_np.kernels._numba.target import BLOCK_KEYS, SUM_VECTORS, host_features
from relpos_np.types import Array

CALL_BYTES = CALL.itemsize
PACK_DECODE = struct.Struct(f"<{len(DECODE.names or ())}q").pack
# Rows beyond this many are worth packing the keys for.
MOST_ROWS = 8


@helper
def decode_layout(depth: int, v_depth: int, lanes: int) -> tuple[int, ...]:
    """Where each buffer of a thread begins, in the order of `layout`; the last entry is the size."""
    width = (v_depth + lanes - 1) // lanes * lanes
    scores = (MOST_ROWS * depth + 63) // 64 * 64
    values = scores + MOST_ROWS * BLOCK_KEYS
    out = values + BLOCK_KEYS * width
    total = out + MOST_ROWS * width
    tops = total + MOST_ROWS * lanes
    # Vectors of rows: the rows are rounded up to a vector.
    best = tops + MOST_ROWS * lanes
    top = best + 64
    fade = top + 64
    end = fade + 64
    return 0, 0, scores, values, out, total, tops, best, top, fade, 0, 0, 0, 0, end


@helper
def mix_rows(s: Any, x: Any, row: int, cols: int, depth: int, out: Any, width: int, fade: Any, rows: int) -> None:
    """Add values, weighted by probabilities, to every row of the output."""
    fours = rows // 4 * 4
    for r in range(0, fours, 4):
        mixes_of_four(at(s, r * BLOCK_KEYS), BLOCK_KEYS, x, row, cols, depth, at(out, r * width), width, at(fade, r))
    for r in range(fours, rows):
        mixes_of_one(at(s, r * BLOCK_KEYS), BLOCK_KEYS, x, row, cols, depth, at(out, r * width), width, at(fade, r))


@helper
def decode_tile(
    p: Any, adds: Any, base: Any, w: Any, k: Any, v: Any, bias: Any, b: int, h: int, mask: int,
    rows: int, j0: int, cols: int, lanes: int,
) -> None:  # fmt: skip
    """Attend one block of keys with all rows."""
    depth, v_depth = p.depth, p.v_depth
    width, wide = round_up(v_depth, lanes), round_up(cols, SUM_VECTORS * lanes)
    scores, out, fade = at(base, w[SCORES]), at(base, w[OUT]), at(base, w[FADE])
    queries, keys = at(base, w[QUERIES]), at(k, j0 * p.k_row)
    fours = rows // 4 * 4
    for r in range(0, fours, 4):
        dots_of_four(at(queries, r * depth), depth, keys, p.k_row, cols, depth, at(scores, r * BLOCK_KEYS), BLOCK_KEYS)
    for r in range(fours, rows):
        dots_of_one(at(queries, r * depth), depth, keys, p.k_row, cols, depth, at(scores, r * BLOCK_KEYS), BLOCK_KEYS)
    fill_row(base, w[TOPS], w[TOPS] + rows * lanes, MINUS_INFINITY)
    for g in range(p.k_group):
        own = at(bias, g * p.bias_head)
        open_rows(p, adds, base, w, own, b, h + g, mask, 0, p.q_len, j0, cols, lanes, g * p.q_len)
    for i in range(rows):
        put(base, w[BEST] + i, lane_max(at(base, w[TOPS] + i * lanes)))
    advance(at(base, w[BEST]), at(base, w[TOP]), fade, round_up(rows, lanes))
    # Where every row may attend every key, values are read where they lie.
    plain = p.soft == 0 and p.allowed == 0
    open_ = j0 >= p.q_len - 1 + p.offset - p.left and j0 + cols <= p.offset + p.right + 1
    held = at(v, j0 * p.v_row)
    poisoned = False
    if not (plain and open_):
        poisoned = math.isnan(copy_block(at(base, w[VALUES]), width, held, p.v_row, cols, v_depth))
        if poisoned:
            for i in range(rows):
                if get(fade, i) == 0.0:
                    fill_row(out, i * width, (i + 1) * width, 0.0)
            spread_poison(base, w, rows, cols, v_depth, width)
    for i in range(rows):
        s = at(scores, i * BLOCK_KEYS)
        fill_row(s, cols, wide, MINUS_INFINITY)
        exp2_row(s, wide, get(base, w[BEST] + i), at(base, w[TOTAL] + i * lanes), get(fade, i))
    if poisoned:
        # Rows that begin here: 0 * fade would turn an infinity among the values into NaN.
        for i in range(rows):
            if get(fade, i) == 0.0:
                put(fade, i, 1.0)
    if plain and open_:
        mix_rows(scores, held, p.v_row, cols, v_depth, out, width, fade, rows)
    else:
        mix_rows(scores, at(base, w[VALUES]), width, cols, v_depth, out, width, fade, rows)


@inlined
def decode_part(p: Any, e: Any, adds: Any, batches: Any, base: Any, ks: Any, vs: Any, t: int, lanes: int) -> None:
    """Attend one range of keys of one key head."""
    depth, v_depth, group, q_len = p.depth, p.v_depth, p.k_group, p.q_len
    kv_heads = p.heads // group
    b, h, part = t // (kv_heads * e.parts), t // e.parts % kv_heads * group, t % e.parts
    rows, width = group * q_len, round_up(v_depth, lanes)
    w = decode_layout(depth, v_depth, lanes)
    q = at(pointer_like(base, p.q), get(batches, BATCH_Q * p.count + b) + h * p.q_head)
    k = at(ks, get(batches, BATCH_K * p.count + b) + h // group * p.k_head)
    v = at(vs, get(batches, BATCH_V * p.count + b) + h // group * p.v_head)
    bias = at(pointer_like(base, p.bias), h * p.bias_head)
    mask = get(batches, BATCH_MASK * p.count + b)
    for g in range(group):
        for i in range(q_len):
            row = at(base, w[QUERIES] + (g * q_len + i) * depth)
            scale_row(row, at(q, g * p.q_head + i * p.q_row), depth, p.scale)
    fill_row(base, w[OUT], w[OUT] + rows * width, 0.0)
    fill_row(base, w[TOTAL], w[TOTAL] + rows * lanes, 0.0)
    fill_row(base, w[BEST], w[BEST] + 64, MINUS_INFINITY)
    fill_row(base, w[TOP], w[TOP] + 64, MINUS_INFINITY)
    begin = max(get(batches, KEY_BEGIN * p.count + b), p.offset - p.left)
    end = min(get(batches, KEY_END * p.count + b), q_len + p.offset + p.right)
    step = round_up((end - begin + e.parts - 1) // e.parts, BLOCK_KEYS)
    first = begin + part * step
    for j0 in range(first, min(first + step, end), BLOCK_KEYS):
        decode_tile(p, adds, base, w, k, v, bias, b, h, mask, rows, j0, min(BLOCK_KEYS, end - j0), lanes)
    for i in range(rows):
        row = (b * p.heads + h) * q_len + i
        total, out = lane_sum(at(base, w[TOTAL] + i * lanes)), at(base, w[OUT] + i * width)
        if e.parts > 1:
            place = at(pointer_like(base, e.partial), (row * e.parts + part) * (v_depth + 2))
            put(place, 0, get(base, w[TOP] + i))
            put(place, 1, total)
            scale_row(at(place, 2), out, v_depth, 1.0)
        else:
            empty = total == 0.0
            scale_row(at(pointer_like(base, p.out), row * v_depth), out, v_depth, 0.0 if empty else 1.0 / total)
            if p.lse:
                lse = MINUS_INFINITY if empty else (get(base, w[TOP] + i) + math.log2(total)) * p.lse_unit
                put(pointer_like(base, p.lse), row, lse)


@inlined
def decode_all(call: int, base: Any, ks: Any, vs: Any, lanes: int) -> None:
    """Take pieces of work from the shared counter while there are any."""
    p = carray(opaque(call), 1, CALL)[0]
    e = carray(opaque(call + CALL_BYTES), 1, DECODE)[0]
    adds = carray(opaque(p.adds), p.add_count, ADD)
    t = take(call)
    while t < p.stop:
        decode_part(p, e, adds, longs(p.batches), base, ks, vs, t, lanes)
        t = take(call)


def _decode_float32(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        base = floats(p.work + get(get(arrays, 0), n) * p.work_stride)
        decode_all(call, base, floats(p.k), floats(p.v), VECTOR_BYTES // 4)


def _decode_float64(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        base = doubles(p.work + get(get(arrays, 0), n) * p.work_stride)
        decode_all(call, base, doubles(p.k), doubles(p.v), VECTOR_BYTES // 8)


def _decode_float16(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        base = floats(p.work + get(get(arrays, 0), n) * p.work_stride)
        decode_all(call, base, halves(p.k), halves(p.v), VECTOR_BYTES // 4)


def _decode_bfloat16(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        base = floats(p.work + get(get(arrays, 0), n) * p.work_stride)
        decode_all(call, base, brains(p.k), brains(p.v), VECTOR_BYTES // 4)


# By the dtype in which keys and values are stored.
decode = {
    "float32": Kernel(_decode_float32),
    "float64": Kernel(_decode_float64),
    "bfloat16": Kernel(_decode_bfloat16),
}
if host_features().get("f16c"):
    # Without the instruction each element would be a call into a library that need not be there.
    decode["float16"] = Kernel(_decode_float16)


def merge(partial: Array, out: Array, lse: Array | None, unit: float) -> None:
    """Combine parts (rows, parts, 2 + D_v): maximum in units of log 2, sum, weighted sum of values."""
    top, total, sums = partial[..., 0], partial[..., 1], partial[..., 2:]
    best = top.max(axis=1, keepdims=True)
    share = np.exp2(top - np.where(best == -np.inf, 0, best))
    whole = (total * share).sum(axis=1)
    # A part without keys has sums of 0; what is not finite elsewhere stays.
    mixed = np.matmul(share[:, None], sums)[:, 0] / np.where(whole == 0, 1, whole)[:, None]
    out.reshape(mixed.shape)[...] = mixed
    if lse is not None:
        lse.reshape(whole.shape)[...] = (best[:, 0] + np.log2(whole)) * unit
