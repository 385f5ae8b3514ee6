"""The backward pass of attention: tiles of probabilities computed again from lse, nothing of size N x N.

One piece of work is a range of queries or of keys of one head, or the whole head. For every tile of
queries and keys in it the scores are recomputed as in the forward pass, and with P the
probabilities and g the gradient of the output

    dS = P (g V^T - delta),  dQ += dS K,  dK += dS^T Q,  dV += P^T g,

while tables collect dS along diagonals or by index. What a task does not own goes to a partial sum of
its own, added up later in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray

from relpos_np.kernels._numba.attend import (
    KEYS,
    LOG2,
    LOG2E,
    PANEL_VECTORS,
    QUERIES,
    SCORES,
    SKEW_Q,
    TOPS,
    VECTOR_BYTES,
    add_binned,
    add_gathered,
    load_rows,
    open_rows,
    pack_panels,
    round_up,
    score_plain,
    skew_block,
)
from relpos_np.kernels._numba.build import Kernel, helper, inlined
from relpos_np.kernels._numba.records import (
    ADD,
    BACKWARD,
    BATCH_K,
    BATCH_MASK,
    BATCH_Q,
    BATCH_V,
    CALL,
    KEY_BEGIN,
    KEY_END,
    SINK,
)
from relpos_np.kernels._numba.rows import (
    add_row,
    at,
    bytes_,
    copy_block,
    doubles,
    fill_row,
    floats,
    get,
    integers,
    longs,
    mask_row,
    opaque,
    pointer_like,
    put,
    scale_row,
    soften_row,
    sum_row,
    take,
)
from relpos_np.kernels._numba.target import BLOCK_KEYS, ROW_QUANTUM
from relpos_np.kernels._numba.tiles import accumulate, accumulate_transposed, score_panel_max

CALL_BYTES = CALL.itemsize
# Entries of `back_layout` beyond those of `layout`.
(
    GRADS, SLOPES, KEY_ROWS, VALUE_PANELS, DK, DV, DQ, ONES, SKEW_ROWS_W, SKEW_DQ, APART,
) = range(14, 25)  # fmt: skip


@helper
def back_layout(
    block: int, span: int, depth: int, v_depth: int, q_width: int, v_width: int, skew: int, s_width: int, lanes: int
) -> tuple[int, ...]:
    """Where each buffer of a thread begins, in elements; the first entries are those of `layout`; last the size.

    `span` is the number of queries of one piece of work. Plain Python can call it too.
    """
    reach = (block + PANEL_VECTORS * lanes - 1) // (PANEL_VECTORS * lanes) * PANEL_VECTORS * lanes
    shifted = reach + BLOCK_KEYS
    queries = 0
    keys = queries + block * q_width
    scores = keys + BLOCK_KEYS * depth
    tops = scores + block * BLOCK_KEYS
    skew_q = tops + block * lanes
    skew_w = skew_q + block * s_width
    skewed = skew_w + shifted * skew
    grads = skewed + (block * shifted if skew else 0)
    slopes = grads + block * v_width
    key_rows = slopes + block * BLOCK_KEYS
    value_panels = key_rows + BLOCK_KEYS * q_width
    dk = value_panels + BLOCK_KEYS * v_depth
    dv = dk + BLOCK_KEYS * q_width
    dq = dv + BLOCK_KEYS * v_width
    ones = dq + (span + ROW_QUANTUM) * q_width
    skew_rows_w = ones + block
    skew_dq = skew_rows_w + shifted * s_width
    apart = skew_dq + (span + ROW_QUANTUM) * s_width
    end = apart + (block * (shifted + ROW_QUANTUM) if skew else 0)
    return (
        queries, keys, scores, 0, 0, 0, tops, 0, 0, 0, skew_q, skew_w, skewed, 0,
        grads, slopes, key_rows, value_panels, dk, dv, dq, ones, skew_rows_w, skew_dq, apart, end,
    )  # fmt: skip


@helper
def add_product(
    a: Any, lda: int, b: Any, ldb: int, c: Any, ldc: int, ones: Any, count: int, width: int, depth: int
) -> None:
    """`accumulate` as a function, so that its callers share one copy of the code."""
    accumulate(a, lda, b, ldb, c, ldc, ones, count, width, depth)


@helper
def add_transposed(a: Any, lda: int, b: Any, ldb: int, c: Any, ldc: int, count: int, width: int, depth: int) -> None:
    """`accumulate_transposed` as a function."""
    accumulate_transposed(a, lda, b, ldb, c, ldc, count, width, depth)


@helper
def tame(a: Any, along: int, across: int, rows: Any, width: int, count: int, out: Any, others: int) -> None:
    """Take what is not finite out of rows[count, width], and add its products where a[...] is not 0 to out.

    Element (i, j) of the tile lies at a[i * along + j * across]; i counts rows of out, j those that are cleaned.
    """
    for j in range(count):
        for c in range(width):
            x = get(rows, j * width + c)
            if not math.isfinite(x):
                put(rows, j * width + c, 0.0)
                for i in range(others):
                    weight = get(a, i * along + j * across)
                    if weight != 0.0:
                        put(out, i * width + c, get(out, i * width + c) + weight * x)


@helper
def add_sunk(x: Any, a: Any, target: Any, t: int, cols: int) -> None:
    """target[j * dst_col + index[t + j]] += x[j] for every index that is not negative."""
    if a.dst_col == 0:
        add_binned(x, a, target, t, cols)
        return
    index = integers(a.index)
    for j in range(cols):
        r = get(index, t + j)
        if r >= 0:
            put(target, j * a.dst_col + r, get(target, j * a.dst_col + r) + get(x, j))


@helper
def collect(
    p: Any,
    e: Any,
    sinks: Any,
    base: Any,
    w: Any,
    task: int,
    b: int,
    h: int,
    i0: int,
    rows: int,
    j0: int,
    cols: int,
    side: int,
) -> None:
    """Add a tile to the terms' gradients: side 0 what queries or the task own, 1 what keys own, 2 both."""
    for i in range(rows):
        q = i0 + i
        ds = at(base, w[SLOPES] + i * BLOCK_KEYS)
        if side != 1:
            if e.diag:
                diag = at(pointer_like(base, e.diag), task * e.diag_task + j0 - q + p.q_len - 1)
                add_row(diag, ds, cols, 1.0)
            if e.dense:
                dense = at(pointer_like(base, e.dense), ((b * p.heads + h) * p.q_len + q) * p.k_len + j0)
                scale_row(dense, ds, cols, 1.0)
        for n in range(e.sink_count):
            a = sinks[n]
            if side in (2, a.of_keys):
                target = at(
                    pointer_like(base, a.dst),
                    task * a.dst_task + b * a.dst_batch + h * a.dst_head + q * a.dst_row + j0 * a.dst_col,
                )
                x = at(base, w[SCORES] + i * BLOCK_KEYS) if a.of_probabilities else ds
                add_sunk(x, a, target, b * a.index_batch + q * a.index_row + j0, cols)


@helper
def collect_skewed(
    p: Any,
    e: Any,
    base: Any,
    w: Any,
    weights: Any,
    task: int,
    i0: int,
    rows: int,
    j0: int,
    cols: int,
    first: int,
    s_width: int,
) -> None:
    """Gradients of the term with one row of weights per distance, from a tile of ds whose rows are moved apart."""
    block, depth = p.block_queries, p.skew_depth
    # Columns beyond the tile's distances stay 0, because a product of whole register tiles reads some of them.
    shifted = block + BLOCK_KEYS + ROW_QUANTUM
    buffer = at(base, w[APART])
    fill_row(buffer, 0, rows * shifted, 0.0)
    for i in range(rows):
        scale_row(at(buffer, i * shifted + block - 1 - i), at(base, w[SLOPES] + i * BLOCK_KEYS), cols, 1.0)
    origin = j0 - i0 - (block - 1) + p.q_len - 1
    low, high = max(origin, 0), min(origin + block + cols, p.q_len + p.k_len - 1)
    count = high - low
    lines = at(base, w[SKEW_ROWS_W])
    index = integers(p.skew_index)
    for r in range(count):
        row = get(index, low + r)
        if row < 0:
            fill_row(lines, r * s_width, (r + 1) * s_width, 0.0)
        else:
            copy_block(at(lines, r * s_width), s_width, at(weights, row * p.skew_row), depth, 1, depth)
    products = at(buffer, low - origin)
    add_product(
        products,
        shifted,
        lines,
        s_width,
        at(base, w[SKEW_DQ] + (i0 - first) * s_width),
        s_width,
        at(base, w[ONES]),
        rows,
        s_width,
        count,
    )
    target = at(pointer_like(base, e.skew_dw), task * e.skew_dw_task + low * s_width)
    add_transposed(products, shifted, at(base, w[SKEW_Q]), s_width, target, s_width, count, s_width, rows)


@helper
def slope_tile(
    p: Any, e: Any, adds: Any, lifted: Any, base: Any, w: Any, weights: Any, bias: Any, b: int, h: int, mask: int,
    i0: int, rows: int, j0: int, cols: int, lanes: int,
) -> None:  # fmt: skip
    """Probabilities and gradients of the scores of one tile; the packed operands are in place."""
    depth, width = p.depth, PANEL_VECTORS * lanes
    q_width, v_width = round_up(depth, lanes), round_up(p.v_depth, lanes)
    scores, slopes = at(base, w[SCORES]), at(base, w[SLOPES])
    wide = round_up(cols, lanes)
    plain = p.add_count == 0 and p.soft == 0 and p.allowed == 0 and p.skew_depth == 0
    open_ = j0 >= i0 + rows - 1 + p.offset - p.left and j0 + cols <= i0 + p.offset + p.right + 1
    if plain and open_ and cols % width == 0:
        for c in range(0, cols, width):
            corner = at(bias, i0 * p.bias_row + (j0 + c if p.bias_row else 0))
            panel = at(base, w[KEYS] + c * depth)
            score_panel_max(
                at(base, w[QUERIES]), q_width, panel, depth, at(scores, c), BLOCK_KEYS, rows, corner, p.bias_row,
                at(base, w[TOPS]),
            )  # fmt: skip
    else:
        for c in range(0, cols, width):
            panel = at(base, w[KEYS] + c * depth)
            score_plain(at(base, w[QUERIES]), q_width, panel, depth, at(scores, c), BLOCK_KEYS, rows)
        if p.skew_depth:
            skew_block(p, base, w, round_up(p.skew_depth, lanes), weights, i0, rows, j0, cols, 0, lanes)
        open_rows(p, adds, base, w, bias, b, h, mask, i0, rows, j0, cols, lanes, 0)
    for c in range(0, cols, width):
        panel = at(base, w[VALUE_PANELS] + c * p.v_depth)
        score_plain(at(base, w[GRADS]), v_width, panel, p.v_depth, at(slopes, c), BLOCK_KEYS, rows)
    for i in range(rows):
        q = i0 + i
        s, dp = at(scores, i * BLOCK_KEYS), at(slopes, i * BLOCK_KEYS)
        for n in range(e.lifted_count):
            a = lifted[n]
            source = at(pointer_like(base, a.src), b * a.src_batch + h * a.src_head + q * a.src_row + j0 * a.src_col)
            add_gathered(dp, a, source, b * a.index_batch + q * a.index_row + j0, a.src_col, cols)
        keep = at(bytes_(p.keep), ((b * p.heads + h) * p.q_len + q) * p.k_len + j0) if p.keep else bytes_(p.keep)
        if p.keep:
            scale_row(dp, dp, cols, p.keep_scale)
            mask_row(dp, keep, cols, 0.0)
        row = (b * p.heads + h) * p.q_len + q
        soften_row(s, dp, wide, get(pointer_like(base, p.lse), row), get(pointer_like(base, e.delta), row))
        if p.keep:
            scale_row(s, s, cols, p.keep_scale)
            mask_row(s, keep, cols, 0.0)


@inlined
def backward_task(
    p: Any, e: Any, adds: Any, lifted: Any, sinks: Any, batches: Any, base: Any, t: int, lanes: int
) -> None:
    """All tiles of one piece of work."""
    block, depth, v_depth = p.block_queries, p.depth, p.v_depth
    tasks = p.count * p.heads * e.parts
    # With several parts the first half of the tasks own keys and the second half own queries.
    side = 2 if e.parts == 1 else 1 if t < tasks else 0
    task = t % tasks
    b, h, part = task // (p.heads * e.parts), task // e.parts % p.heads, task % e.parts
    first = part * e.query_step if side == 0 else 0
    stop = min(first + e.query_step, p.q_len) if side == 0 else p.q_len
    key_first = part * e.key_step if side == 1 else 0
    key_stop = min(key_first + e.key_step, p.k_len) if side == 1 else p.k_len
    width = PANEL_VECTORS * lanes
    q_width, v_width, s_width = round_up(depth, lanes), round_up(v_depth, lanes), round_up(p.skew_depth, lanes)
    span = e.query_step if e.parts > 1 else p.q_len
    w = back_layout(block, span, depth, v_depth, q_width, v_width, p.skew_depth, s_width, lanes)
    q = at(pointer_like(base, p.q), get(batches, BATCH_Q * p.count + b) + h * p.q_head)
    k = at(pointer_like(base, p.k), get(batches, BATCH_K * p.count + b) + h // p.k_group * p.k_head)
    v = at(pointer_like(base, p.v), get(batches, BATCH_V * p.count + b) + h // p.v_group * p.v_head)
    head = b * p.heads + h
    g = at(pointer_like(base, e.grad_out), head * p.q_len * v_depth)
    bias = at(pointer_like(base, p.bias), h * p.bias_head)
    weights = at(pointer_like(base, p.skew_w), h * p.skew_head)
    skew_q = at(pointer_like(base, p.skew_q), head * p.q_len * p.skew_depth)
    mask = get(batches, BATCH_MASK * p.count + b)
    scores, slopes = at(base, w[SCORES]), at(base, w[SLOPES])
    fill_row(base, w[ONES], w[ONES] + block, 1.0)
    if side != 1 and e.cut == 0:
        fill_row(base, w[DQ], w[DQ] + (stop - first) * q_width, 0.0)
        fill_row(base, w[SKEW_DQ], w[SKEW_DQ] + (stop - first) * s_width, 0.0)
    begin, end = get(batches, KEY_BEGIN * p.count + b), get(batches, KEY_END * p.count + b)
    # Neither below the first key that the range's first query sees nor above the last one's.
    begin = max(begin, key_first, first + p.offset - p.left)
    end = min(end, key_stop, stop - 1 + p.offset + p.right + 1)
    tiles = max(end - begin + BLOCK_KEYS - 1, 0) // BLOCK_KEYS
    end = min(end, begin + tiles * (e.cut + 1) // e.cuts * BLOCK_KEYS)
    begin += tiles * e.cut // e.cuts * BLOCK_KEYS
    for j0 in range(begin, end, BLOCK_KEYS):
        cols = min(BLOCK_KEYS, end - j0)
        pack_panels(at(base, w[KEYS]), k, p.k_row, j0, j0 + cols, p.k_len, depth, width, lanes)
        pack_panels(at(base, w[VALUE_PANELS]), v, p.v_row, j0, j0 + cols, p.k_len, v_depth, width, lanes)
        soiled = math.isnan(copy_block(at(base, w[KEY_ROWS]), q_width, at(k, j0 * p.k_row), p.k_row, cols, depth))
        fill_row(base, w[DK], w[DK] + BLOCK_KEYS * q_width, 0.0)
        fill_row(base, w[DV], w[DV] + BLOCK_KEYS * v_width, 0.0)
        for i0 in range(first, stop, block):
            rows = min(block, stop - i0)
            for i in range(rows, round_up(rows, ROW_QUANTUM)):
                fill_row(slopes, i * BLOCK_KEYS, (i + 1) * BLOCK_KEYS, 0.0)
            if j0 + cols <= i0 + p.offset - p.left or j0 > i0 + rows - 1 + p.offset + p.right:
                continue
            load_rows(at(base, w[QUERIES]), q_width, at(q, i0 * p.q_row), p.q_row, rows, depth, p.scale)
            load_rows(at(base, w[GRADS]), v_width, at(g, i0 * v_depth), v_depth, rows, v_depth, 1.0)
            if p.skew_depth:
                own = at(skew_q, i0 * p.skew_depth)
                load_rows(at(base, w[SKEW_Q]), s_width, own, p.skew_depth, rows, p.skew_depth, LOG2E)
            slope_tile(p, e, adds, lifted, base, w, weights, bias, b, h, mask, i0, rows, j0, cols, lanes)
            if side != 0:
                lines = at(base, w[QUERIES])
                if not math.isfinite(sum_row(lines, rows * q_width)):
                    tame(slopes, 1, BLOCK_KEYS, lines, q_width, rows, at(base, w[DK]), cols)
                add_transposed(slopes, BLOCK_KEYS, lines, q_width, at(base, w[DK]), q_width, cols, q_width, rows)
                lines = at(base, w[GRADS])
                if not math.isfinite(sum_row(lines, rows * v_width)):
                    tame(scores, 1, BLOCK_KEYS, lines, v_width, rows, at(base, w[DV]), cols)
                add_transposed(scores, BLOCK_KEYS, lines, v_width, at(base, w[DV]), v_width, cols, v_width, rows)
            if side != 1:
                lines = at(base, w[KEY_ROWS])
                own = at(base, w[DQ] + (i0 - first) * q_width)
                if soiled:
                    # Copied again, because `tame` has emptied rows that these queries may read.
                    copy_block(lines, q_width, at(k, j0 * p.k_row), p.k_row, cols, depth)
                    tame(slopes, BLOCK_KEYS, 1, lines, q_width, cols, own, rows)
                add_product(slopes, BLOCK_KEYS, lines, q_width, own, q_width, at(base, w[ONES]), rows, q_width, cols)
            collect(p, e, sinks, base, w, task, b, h, i0, rows, j0, cols, side)
            if p.skew_depth and side != 1:
                collect_skewed(p, e, base, w, weights, task, i0, rows, j0, cols, first, s_width)
        if side != 0:
            for j in range(cols):
                row = head * p.k_len + j0 + j
                # The queries of the products hold the scale, in units of log 2.
                scale_row(at(pointer_like(base, e.dk), row * depth), at(base, w[DK] + j * q_width), depth, LOG2)
                scale_row(at(pointer_like(base, e.dv), row * v_depth), at(base, w[DV] + j * v_width), v_depth, 1.0)
    if side != 1 and e.cut == e.cuts - 1:
        for i in range(first, stop):
            row, own = head * p.q_len + i, at(base, w[DQ] + (i - first) * q_width)
            scale_row(at(pointer_like(base, e.dq), row * depth), own, depth, p.scale * LOG2)
            if p.skew_depth:
                own = at(base, w[SKEW_DQ] + (i - first) * s_width)
                scale_row(at(pointer_like(base, e.skew_dq), row * p.skew_depth), own, p.skew_depth, 1.0)


@inlined
def backward_all(call: int, work: Any, thread: int, lanes: int) -> None:
    """Take pieces of work from the shared counter while there are any."""
    p = carray(opaque(call), 1, CALL)[0]
    e = carray(opaque(call + CALL_BYTES), 1, BACKWARD)[0]
    adds = carray(opaque(p.adds), p.add_count, ADD)
    lifted = carray(opaque(e.lifted), e.lifted_count, ADD)
    sinks = carray(opaque(e.sinks), e.sink_count, SINK)
    t = take(call)
    while t < p.stop:
        place = thread if e.cuts == 1 else t - e.origin
        base = at(work, place * (p.work_stride * lanes // VECTOR_BYTES))
        backward_task(p, e, adds, lifted, sinks, longs(p.batches), base, t, lanes)
        t = take(call)


def _backward_float32(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        backward_all(call, floats(p.work), get(get(arrays, 0), n), VECTOR_BYTES // 4)


def _backward_float64(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        backward_all(call, doubles(p.work), get(get(arrays, 0), n), VECTOR_BYTES // 8)


backward = {4: Kernel(_backward_float32), 8: Kernel(_backward_float64)}
