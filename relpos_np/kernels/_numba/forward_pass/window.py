"""Attention over few keys, as windows have them: one tile holds a row's scores, so that nothing is summed online.

Queries are read and results written where they lie: the last register tile of a block begins early enough to end
with the block. Otherwise the work is divided and the workspace laid out as in `attend.py`.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray

from relpos_np.kernels._numba.forward_pass.attend import bypass_pairs, bypass_values, layout, write_lse
from relpos_np.kernels._numba.forward_pass.pack import (
    load_block,
    load_pairs,
    load_values,
    pack_keys,
    store_delta,
    store_row,
    turn_queries,
)
from relpos_np.kernels._numba.forward_pass.work import (
    DELTA,
    LOG2E,
    MINUS_INFINITY,
    OWN,
    PANEL_VECTORS,
    head_of,
    least_mask,
    round_up,
    size_of,
    whole_columns,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import CALL
from relpos_np.kernels._numba.simd.amx import close_tiles, open_tiles
from relpos_np.kernels._numba.simd.half_precision import halve_row
from relpos_np.kernels._numba.simd.rows import (
    add_mask,
    add_row,
    at,
    bytes_,
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
    scale_row,
    take,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, SUM_VECTORS, TARGET
from relpos_np.kernels._numba.simd.tiles import average, average_pairs, pair_panel_inside, score_panel_inside

VECTOR_BYTES = TARGET.vector_bytes


@helper
def own_head(p: Any, batches: Any, base: Any, t: int) -> Any:
    """The head of a piece of work."""
    return head_of(p, batches, base, t // (p.heads * p.blocks), t // p.blocks % p.heads)


@helper
def cut_bias(out: Any, bias: Any, rows: int, seen: int, width: int) -> None:
    """Copy a panel of a bias that depends on the distance alone, and put -inf behind the last key."""
    for i in range(rows):
        own = at(out, i * width)
        scale_row(own, at(bias, -i), seen, 1.0)
        fill_row(own, seen, width, MINUS_INFINITY)


@helper
def score_rows(p: Any, base: Any, w: Any, head: Any, i0: int, rows: int, pairs: Any) -> None:
    """Scores of a block, with bias, and the maxima of its rows."""
    cols, depth, lanes = p.k_len, p.steps, lanes_of(base)
    bias, tops = at(head.bias, i0 * p.bias_row), at(base, w.tops)
    own = head.q + i0 * p.q_row * size_of(base, p.q_kind)
    q, q_row = pointer_like(base, own), p.q_row
    if pairs is not None or p.turn or p.q_kind != OWN:
        q, q_row = at(base, w.queries), depth
        if p.turn:
            turn_queries(p, q, at(base, w.scratch), depth, head, i0, rows, pairs)
        elif pairs is not None:
            load_pairs(q, depth, own, p.q_kind, p.q_row, rows, p.depth)
        else:
            load_block(q, depth, own, p.q_kind, p.q_row, rows, p.depth)
    pack_keys(p, at(base, w.keys), at(base, w.scratch), head, 0, cols, pairs)
    fill_row(tops, 0, rows * lanes, MINUS_INFINITY)
    width = PANEL_VECTORS * lanes
    for c in range(0, cols, width):
        panel, out, added, row = at(base, w.keys + c * depth), at(base, w.scores + c), at(bias, c), p.bias_row
        seen = min(width, cols - c)
        if row < 0 and seen < width:
            added, row = at(base, w.lost), width
            cut_bias(added, at(bias, c), rows, seen, width)
        if pairs is not None:
            pair_panel_inside(q, q_row, panel, depth, out, BLOCK_KEYS, rows, seen, added, row, tops, p.scale)
        else:
            score_panel_inside(q, q_row, panel, depth, out, BLOCK_KEYS, rows, seen, added, row, tops, p.scale)


@helper
def mask_rows(p: Any, base: Any, w: Any, mask: int, rows: int, wide: int) -> None:
    """Apply the mask of every pair to the block's scores and find the rows' maxima again."""
    lanes = lanes_of(base)
    for i in range(rows):
        s, tops = at(base, w.scores + i * BLOCK_KEYS), at(base, w.tops + i * lanes)
        if p.soft:
            add_mask(s, at(pointer_like(base, p.soft), mask + i * p.mask_row), p.k_len, least_mask(base), LOG2E)
        else:
            mask_row(s, at(bytes_(p.allowed), mask + i * p.mask_row), p.k_len, MINUS_INFINITY)
        # Behind the last key stands NaN where the query holds what is not finite.
        fill_row(s, p.k_len, wide, MINUS_INFINITY)
        fill_row(tops, 0, lanes, MINUS_INFINITY)
        max_row(s, wide, tops)


@helper
def fetch_line(address: int, size: int) -> None:
    """Ask for the bytes at an address."""
    for n in range(0, size, VECTOR_BYTES):
        prefetch(address + n)


@helper
def fetch_row(p: Any, like: Any, head: Any, i0: int, i: int) -> None:
    """Ask for row i of the operands of a block that begins with query i0."""
    fetch_line(head.q + (i0 + i) * p.q_row * size_of(like, p.q_kind), p.depth * size_of(like, p.q_kind))
    if i < p.k_len:
        fetch_line(head.k + i * p.k_row * size_of(like, p.k_kind), p.depth * size_of(like, p.k_kind))
        fetch_line(head.v + i * p.v_row * size_of(like, p.v_kind), p.v_depth * size_of(like, p.v_kind))


@helper
def attend_window(p: Any, batches: Any, base: Any, t: int, following: int, pairs: Any) -> None:
    """Attention for one block of queries of one head, while the operands of the `following` one are fetched."""
    block, cols, v_depth, lanes = p.block_queries, p.k_len, p.v_depth, lanes_of(base)
    head, i0 = own_head(p, batches, base, t), t % p.blocks * block
    rows = min(block, p.q_len - i0)
    wide = round_up(cols, (SUM_VECTORS if pairs is not None else 1) * lanes)
    w = layout(block, p.steps, v_depth, 0, p.bins, lanes)
    scores, share, top = at(base, w.scores), at(base, w.fade), at(base, w.top)
    score_rows(p, base, w, head, i0, rows, pairs)
    fill_row(base, w.total, w.total + rows * lanes, 0.0)
    v, v_row, bypassed, masked = pointer_like(base, head.v), p.v_row, False, p.soft != 0 or p.allowed != 0
    if masked:
        mask_rows(p, base, w, head.mask + head.h * p.mask_head + i0 * p.mask_row, rows, round_up(cols, lanes))
    if masked or pairs is not None or p.v_kind != OWN:
        copied = at(base, w.values)
        check = load_values(copied, v_depth, head.v, p.v_kind, p.v_row, cols, v_depth, pairs)
        bypassed = masked and math.isnan(check)
        if bypassed:
            fill_row(base, w.out, w.out + rows * v_depth, 0.0)
            if pairs is not None:
                bypass_pairs(base, w, rows, cols, v_depth, v_depth)
            else:
                bypass_values(base, w, rows, cols, v_depth, v_depth)
        if bypassed or pairs is not None or p.v_kind != OWN:
            v, v_row = copied, v_depth
    # One pass after the other, so that the rows of each overlap: a row's own chain is long.
    for i in range(rows):
        best = lane_max(at(base, w.tops + i * lanes))
        put(top, i, best)
        put(share, i, 0.0 if best == MINUS_INFINITY else best)
    next_head, next_i0 = own_head(p, batches, base, following), following % p.blocks * block
    for i in range(rows):
        # Exponentials leave the ports idle that load.
        fetch_row(p, base, next_head, next_i0, i)
        s = at(scores, i * BLOCK_KEYS)
        fill_row(s, whole_columns(cols, lanes), wide, MINUS_INFINITY)
        exp2_row(s, wide, get(share, i), at(base, w.total + i * lanes), 0.0)
        if pairs is not None:
            halve_row(s, wide)
    for i in range(rows):
        total = lane_sum(at(base, w.total + i * lanes))
        put(share, i, 0.0 if total == 0.0 else 1.0 / total)
        write_lse(p, base, (head.b * p.heads + head.h) * p.q_rows + i0 + i, get(top, i), total)
    size = size_of(base, p.out_kind)
    own = p.out + (head.b * p.out_batch + head.h * p.out_head + i0 * p.out_row) * size
    out, out_row = pointer_like(base, own), p.out_row
    if p.out_kind != OWN:
        out, out_row = at(base, w.bins), v_depth
    if pairs is not None:
        average_pairs(scores, BLOCK_KEYS, v, v_row, out, out_row, share, rows, v_depth, (cols + 1) // 2)
    else:
        average(scores, BLOCK_KEYS, v, v_row, out, out_row, share, rows, v_depth, cols)
    if bypassed:
        for i in range(rows):
            add_row(at(out, i * out_row), at(base, w.out + i * v_depth), v_depth, 1.0)
    if p.out_kind == DELTA:
        for i in range(rows):
            store_delta(p, at(out, i * v_depth), own + i * p.out_row * size, head, i0 + i)
    elif p.out_kind != OWN:
        for i in range(rows):
            store_row(at(out, i * v_depth), own + i * p.out_row * size, p.out_kind, v_depth, 1.0)


def _attending(*, pairs: int | None = None) -> Any:
    """The kernel's body, which takes runs of blocks from the shared counter while there are any."""

    @helper
    def attend_windows(call: int, base: Any) -> None:
        p = carray(opaque(call), 1, CALL)[0]
        if pairs is not None:
            open_tiles()
        start = take(call) * p.run
        while start < p.stop:
            stop = min(start + p.run, p.stop)
            for t in range(start, stop):
                attend_window(p, longs(p.batches), base, t, min(t + 1, stop - 1), pairs)
            start = take(call) * p.run
        if pairs is not None:
            close_tiles()

    return attend_windows


# By what is multiplied, as in `attend.py`.
windows = entry_points(
    __name__,
    "windows",
    CALL,
    {
        "float32": (floats, _attending()),
        "float64": (doubles, _attending()),
        "bfloat16": (floats, _attending(pairs=1)),
    },
)
