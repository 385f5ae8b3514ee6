"""Attention over few keys, as windows have them: one tile holds a row's scores, so that nothing is summed online.

Queries are read and results written where they lie: the last register tile of a block begins early enough to end
with the block. Beside that, the work is divided and the workspace laid out as in `attend.py`.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray

from relpos_np.kernels._numba.attend import (
    FADE,
    KEYS,
    LOG2E,
    MINUS_INFINITY,
    OUT,
    SCORES,
    TOP,
    TOPS,
    TOTAL,
    VALUES,
    VECTOR_BYTES,
    layout,
    pack_panels,
    round_up,
    spread_poison,
)
from relpos_np.kernels._numba.build import Kernel, helper, inlined
from relpos_np.kernels._numba.records import BATCH_K, BATCH_MASK, BATCH_Q, BATCH_V, CALL
from relpos_np.kernels._numba.rows import (
    add_mask,
    add_row,
    at,
    bytes_,
    copy_block,
    doubles,
    exp2_row,
    fill_row,
    floats,
    get,
    lane_max,
    lane_sum,
    longs,
    mask_row,
    max_row,
    opaque,
    pointer_like,
    prefetch,
    put,
    take,
)
from relpos_np.kernels._numba.target import BLOCK_KEYS, SUM_VECTORS, TARGET
from relpos_np.kernels._numba.tiles import average, score_panel_inside

PANEL_VECTORS = TARGET.score_vectors


@helper
def mask_rows(p: Any, base: Any, w: Any, mask: int, rows: int, wide: int, lanes: int) -> None:
    """Apply the mask of every pair to the block's scores and find the rows' maxima again."""
    for i in range(rows):
        s, tops = at(base, w[SCORES] + i * BLOCK_KEYS), at(base, w[TOPS] + i * lanes)
        if p.soft:
            add_mask(s, at(pointer_like(base, p.soft), mask + i * p.mask_row), p.k_len, LOG2E)
        else:
            mask_row(s, at(bytes_(p.allowed), mask + i * p.mask_row), p.k_len, MINUS_INFINITY)
        fill_row(tops, 0, lanes, MINUS_INFINITY)
        max_row(s, wide, tops)


@helper
def place(p: Any, batches: Any, base: Any, t: int) -> tuple[Any, ...]:
    """Batch item, head and first query of a piece of work, and where its queries, keys and values begin."""
    b, h, i0 = t // (p.heads * p.blocks), t // p.blocks % p.heads, t % p.blocks * p.block_queries
    q = at(pointer_like(base, p.q), get(batches, BATCH_Q * p.count + b) + h * p.q_head + i0 * p.q_row)
    k = at(pointer_like(base, p.k), get(batches, BATCH_K * p.count + b) + h // p.k_group * p.k_head)
    v = at(pointer_like(base, p.v), get(batches, BATCH_V * p.count + b) + h // p.v_group * p.v_head)
    return b, h, i0, q, k, v


@helper
def attend_window(p: Any, batches: Any, base: Any, t: int, following: int, lanes: int) -> None:
    """Attention for one block of queries of one head, while the operands of the `following` one are fetched."""
    block, depth, cols, v_depth = p.block_queries, p.depth, p.k_len, p.v_depth
    b, h, i0, q, k, v = place(p, batches, base, t)
    rows = min(block, p.q_len - i0)
    width = PANEL_VECTORS * lanes
    padded, wide = round_up(cols, width), round_up(cols, SUM_VECTORS * lanes)
    w = layout(block, depth, v_depth, 0, 0, lanes)
    scores, share = at(base, w[SCORES]), at(base, w[FADE])
    tops, top = at(base, w[TOPS]), at(base, w[TOP])
    v_row = p.v_row
    out = at(pointer_like(base, p.out), b * p.out_batch + h * p.out_head + i0 * p.out_row)
    bias = at(pointer_like(base, p.bias), h * p.bias_head + i0 * p.bias_row)
    pack_panels(at(base, w[KEYS]), k, p.k_row, 0, cols, cols, depth, width, lanes)
    fill_row(tops, 0, rows * lanes, MINUS_INFINITY)
    fill_row(base, w[TOTAL], w[TOTAL] + rows * lanes, 0.0)
    for c in range(0, cols, width):
        score_panel_inside(
            q,
            p.q_row,
            at(base, w[KEYS] + c * depth),
            depth,
            at(scores, c),
            BLOCK_KEYS,
            rows,
            at(bias, c),
            p.bias_row,
            tops,
            p.scale,
        )
    poisoned = False
    if p.soft or p.allowed:
        mask = get(batches, BATCH_MASK * p.count + b) + h * p.mask_head + i0 * p.mask_row
        mask_rows(p, base, w, mask, rows, min(padded, wide), lanes)
        poisoned = math.isnan(copy_block(at(base, w[VALUES]), v_depth, v, v_row, cols, v_depth))
        if poisoned:
            fill_row(base, w[OUT], w[OUT] + rows * v_depth, 0.0)
            spread_poison(base, w, rows, cols, v_depth, v_depth)
            v, v_row = at(base, w[VALUES]), v_depth
    # One pass after the other, so that the rows of each overlap: a row's own chain is long.
    for i in range(rows):
        best = lane_max(at(tops, i * lanes))
        put(top, i, best)
        put(share, i, 0.0 if best == MINUS_INFINITY else best)
    _, _, _, next_q, next_k, next_v = place(p, batches, base, following)
    for i in range(rows):
        # Exponentials leave the ports idle that load.
        for c in range(0, depth, lanes):
            prefetch(next_q, i * p.q_row + c)
        if i < cols:
            for c in range(0, depth, lanes):
                prefetch(next_k, i * p.k_row + c)
            for c in range(0, v_depth, lanes):
                prefetch(next_v, i * p.v_row + c)
        s = at(scores, i * BLOCK_KEYS)
        fill_row(s, padded, wide, MINUS_INFINITY)
        exp2_row(s, wide, get(share, i), at(base, w[TOTAL] + i * lanes), 0.0)
    for i in range(rows):
        whole = lane_sum(at(base, w[TOTAL] + i * lanes))
        put(share, i, 0.0 if whole == 0.0 else 1.0 / whole)
        if p.lse:
            lse = MINUS_INFINITY if whole == 0.0 else (get(top, i) + math.log2(whole)) * p.lse_unit
            put(pointer_like(base, p.lse), (b * p.heads + h) * p.q_len + i0 + i, lse)
    average(scores, BLOCK_KEYS, v, v_row, out, p.out_row, share, rows, v_depth, cols)
    if poisoned:
        for i in range(rows):
            add_row(at(out, i * p.out_row), at(base, w[OUT] + i * v_depth), v_depth, 1.0)


@inlined
def attend_windows(call: int, base: Any, lanes: int) -> None:
    """Take runs of blocks from the shared counter while there are any."""
    p = carray(opaque(call), 1, CALL)[0]
    start = take(call) * p.run
    while start < p.stop:
        stop = min(start + p.run, p.stop)
        for t in range(start, stop):
            attend_window(p, longs(p.batches), base, t, min(t + 1, stop - 1), lanes)
        start = take(call) * p.run


def _windows_float32(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_windows(call, floats(p.work + get(get(arrays, 0), n) * p.work_stride), VECTOR_BYTES // 4)


def _windows_float64(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_windows(call, doubles(p.work + get(get(arrays, 0), n) * p.work_stride), VECTOR_BYTES // 8)


windows = {4: Kernel(_windows_float32), 8: Kernel(_windows_float64)}
