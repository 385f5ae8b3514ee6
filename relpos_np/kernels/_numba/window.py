"""Attention over few keys, as windows have them: one tile holds a row's scores, so that nothing is summed online.

Queries are read and results written where they lie: the last register tile of a block begins early enough to end
with the block. Otherwise the work is divided and the workspace laid out as in `attend.py`.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray

from relpos_np.kernels._numba.attend import bypass_values, layout, write_lse
from relpos_np.kernels._numba.build import Kernel, helper, inlined
from relpos_np.kernels._numba.pack import pack_panels
from relpos_np.kernels._numba.pieces import LOG2E, MINUS_INFINITY, PANEL_VECTORS, head_of, round_up
from relpos_np.kernels._numba.records import CALL
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
    lanes_of,
    longs,
    mask_row,
    max_row,
    opaque,
    pointer_like,
    prefetch,
    put,
    take,
)
from relpos_np.kernels._numba.target import BLOCK_KEYS, SUM_VECTORS
from relpos_np.kernels._numba.tiles import average, score_panel_inside


@helper
def own_head(p: Any, batches: Any, base: Any, t: int) -> Any:
    """The head of a piece of work."""
    keys, values = pointer_like(base, p.k), pointer_like(base, p.v)
    return head_of(p, batches, base, keys, values, t // (p.heads * p.blocks), t // p.blocks % p.heads)


@inlined
def score_rows(p: Any, base: Any, w: Any, head: Any, i0: int, rows: int) -> None:
    """Scores of a block, with bias, and the maxima of its rows."""
    cols, depth, lanes = p.k_len, p.depth, lanes_of(base)
    q, bias, tops = at(head.q, i0 * p.q_row), at(head.bias, i0 * p.bias_row), at(base, w.tops)
    pack_panels(at(base, w.keys), head.k, p.k_row, 0, cols, cols, depth)
    fill_row(tops, 0, rows * lanes, MINUS_INFINITY)
    for c in range(0, cols, PANEL_VECTORS * lanes):
        panel, out, row = at(base, w.keys + c * depth), at(base, w.scores + c), p.bias_row
        score_panel_inside(q, p.q_row, panel, depth, out, BLOCK_KEYS, rows, at(bias, c), row, tops, p.scale)


@helper
def mask_rows(p: Any, base: Any, w: Any, mask: int, rows: int, wide: int) -> None:
    """Apply the mask of every pair to the block's scores and find the rows' maxima again."""
    lanes = lanes_of(base)
    for i in range(rows):
        s, tops = at(base, w.scores + i * BLOCK_KEYS), at(base, w.tops + i * lanes)
        if p.soft:
            add_mask(s, at(pointer_like(base, p.soft), mask + i * p.mask_row), p.k_len, LOG2E)
        else:
            mask_row(s, at(bytes_(p.allowed), mask + i * p.mask_row), p.k_len, MINUS_INFINITY)
        fill_row(tops, 0, lanes, MINUS_INFINITY)
        max_row(s, wide, tops)


@inlined
def fetch_row(p: Any, head: Any, i0: int, i: int, lanes: int) -> None:
    """Ask for row i of the operands of a block that begins with query i0."""
    for c in range(0, p.depth, lanes):
        prefetch(head.q, (i0 + i) * p.q_row + c)
    if i < p.k_len:
        for c in range(0, p.depth, lanes):
            prefetch(head.k, i * p.k_row + c)
        for c in range(0, p.v_depth, lanes):
            prefetch(head.v, i * p.v_row + c)


@helper
def attend_window(p: Any, batches: Any, base: Any, t: int, following: int) -> None:
    """Attention for one block of queries of one head, while the operands of the `following` one are fetched."""
    block, cols, v_depth, lanes = p.block_queries, p.k_len, p.v_depth, lanes_of(base)
    head, i0 = own_head(p, batches, base, t), t % p.blocks * block
    rows = min(block, p.q_len - i0)
    padded, wide = round_up(cols, PANEL_VECTORS * lanes), round_up(cols, SUM_VECTORS * lanes)
    w = layout(block, p.depth, v_depth, 0, 0, lanes)
    scores, share, top = at(base, w.scores), at(base, w.fade), at(base, w.top)
    score_rows(p, base, w, head, i0, rows)
    fill_row(base, w.total, w.total + rows * lanes, 0.0)
    v, v_row, bypassed = head.v, p.v_row, False
    if p.soft or p.allowed:
        mask_rows(p, base, w, head.mask + head.h * p.mask_head + i0 * p.mask_row, rows, min(padded, wide))
        bypassed = math.isnan(copy_block(at(base, w.values), v_depth, v, v_row, cols, v_depth))
        if bypassed:
            fill_row(base, w.out, w.out + rows * v_depth, 0.0)
            bypass_values(base, w, rows, cols, v_depth, v_depth)
            v, v_row = at(base, w.values), v_depth
    # One pass after the other, so that the rows of each overlap: a row's own chain is long.
    for i in range(rows):
        best = lane_max(at(base, w.tops + i * lanes))
        put(top, i, best)
        put(share, i, 0.0 if best == MINUS_INFINITY else best)
    next_head, next_i0 = own_head(p, batches, base, following), following % p.blocks * block
    for i in range(rows):
        # Exponentials leave the ports idle that load.
        fetch_row(p, next_head, next_i0, i, lanes)
        s = at(scores, i * BLOCK_KEYS)
        fill_row(s, padded, wide, MINUS_INFINITY)
        exp2_row(s, wide, get(share, i), at(base, w.total + i * lanes), 0.0)
    for i in range(rows):
        total = lane_sum(at(base, w.total + i * lanes))
        put(share, i, 0.0 if total == 0.0 else 1.0 / total)
        write_lse(p, base, (head.b * p.heads + head.h) * p.q_len + i0 + i, get(top, i), total)
    out = at(pointer_like(base, p.out), head.b * p.out_batch + head.h * p.out_head + i0 * p.out_row)
    average(scores, BLOCK_KEYS, v, v_row, out, p.out_row, share, rows, v_depth, cols)
    if bypassed:
        for i in range(rows):
            add_row(at(out, i * p.out_row), at(base, w.out + i * v_depth), v_depth, 1.0)


@inlined
def attend_windows(call: int, base: Any) -> None:
    """Take runs of blocks from the shared counter while there are any."""
    p = carray(opaque(call), 1, CALL)[0]
    start = take(call) * p.run
    while start < p.stop:
        stop = min(start + p.run, p.stop)
        for t in range(start, stop):
            attend_window(p, longs(p.batches), base, t, min(t + 1, stop - 1))
        start = take(call) * p.run


def _windows_float32(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_windows(call, floats(p.work + get(get(arrays, 0), n) * p.work_stride))


def _windows_float64(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_windows(call, doubles(p.work + get(get(arrays, 0), n) * p.work_stride))


windows = {4: Kernel(_windows_float32), 8: Kernel(_windows_float64)}
