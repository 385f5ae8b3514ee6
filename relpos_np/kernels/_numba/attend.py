"""Streaming attention: blocks of queries against blocks of keys, online softmax, no N x N array.

One piece of work is a block of queries of one head. Its working set lives in one workspace per
thread: the scaled queries, one block of keys packed into panels, one of values, a tile of scores
and the output so far. Scores are kept in units of log 2, so that the exponential is 2**x.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray

from relpos_np.kernels._numba.build import Kernel, helper, inlined
from relpos_np.kernels._numba.records import ADD, BATCH_K, BATCH_MASK, BATCH_Q, BATCH_V, CALL, KEY_BEGIN, KEY_END, VALUE
from relpos_np.kernels._numba.rows import (
    add_constant,
    add_mask,
    add_row,
    advance,
    at,
    bytes_,
    copy_block,
    doubles,
    exp2_row,
    fill_row,
    floats,
    get,
    integers,
    lane_max,
    lane_sum,
    longs,
    mask_row,
    max_row,
    opaque,
    pointer_like,
    put,
    scale_row,
    sum_row,
    take,
    transpose_square,
)
from relpos_np.kernels._numba.target import BLOCK_KEYS, ROW_QUANTUM, SUM_VECTORS, TARGET
from relpos_np.kernels._numba.tiles import accumulate, score_panel, score_panel_max

SCORE_ROWS = TARGET.score_rows
# Rows that are exponentiated, then multiplied while the nearer caches hold them. A multiple of every tile's rows.
STRIP = 4 * ROW_QUANTUM
PANEL_VECTORS = TARGET.score_vectors
VECTOR_BYTES = TARGET.vector_bytes
MINUS_INFINITY = -math.inf
LOG2 = math.log(2.0)
LOG2E = 1.0 / LOG2
# Entries of `layout`.
QUERIES, KEYS, SCORES, VALUES, OUT, TOTAL, TOPS, BEST, TOP, FADE, SKEW_Q, SKEW_W, SKEW, BINS = range(14)


@helper
def round_up(n: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below n."""
    return (n + unit - 1) // unit * unit


@helper
def layout(block: int, depth: int, v_width: int, skew_depth: int, bins: int, lanes: int) -> tuple[int, ...]:
    """Where each buffer of a thread's workspace begins, in elements; the last entry is its size.

    The host calls it as plain Python, so it calls no compiled function.
    """
    queries = 0
    keys = queries + (block * depth + 63) // 64 * 64
    scores = keys + BLOCK_KEYS * depth
    values = scores + block * BLOCK_KEYS
    out = values + BLOCK_KEYS * v_width
    total = out + block * v_width
    tops = total + block * lanes
    best = tops + block * lanes
    top = best + block
    fade = top + block
    skew_q = fade + block
    skew_w = skew_q + (block * skew_depth + 63) // 64 * 64
    reach = (block + PANEL_VECTORS * lanes - 1) // (PANEL_VECTORS * lanes) * PANEL_VECTORS * lanes
    skew = skew_w + (reach + BLOCK_KEYS) * skew_depth
    binned = skew + (block * (reach + BLOCK_KEYS) if skew_depth else 0)
    end = binned + (block * bins + 63) // 64 * 64
    return queries, keys, scores, values, out, total, tops, best, top, fade, skew_q, skew_w, skew, binned, end


@helper
def pack_vector(out: Any, width: int, x: Any, row: int, depth: int, lanes: int) -> None:
    """out[c, r] = x[r, c] for as many rows as a vector has lanes."""
    whole = depth // lanes * lanes
    for c in range(0, whole, lanes):
        transpose_square(at(out, c * width), width, at(x, c), row)
    for r in range(lanes):
        for c in range(whole, depth):
            put(out, c * width + r, get(x, r * row + c))


@helper
def pack_panels(
    out: Any, x: Any, row: int, first: int, last: int, limit: int, depth: int, width: int, lanes: int
) -> None:
    """Pack rows first..last of x, transposed, into panels [depth, width]; rows outside [0, limit) become 0."""
    end = min(last, limit)
    for p in range(first, last, width):
        panel = at(out, (p - first) * depth)
        for r0 in range(p, p + width, lanes):
            corner = at(panel, r0 - p)
            if r0 >= 0 and r0 + lanes <= end:
                pack_vector(corner, width, at(x, r0 * row), row, depth, lanes)
            else:
                for c in range(depth):
                    fill_row(corner, c * width, c * width + lanes, 0.0)
                for r in range(max(r0, 0), min(r0 + lanes, end)):
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, r * row + c))


@helper
def pack_indexed(
    out: Any, x: Any, row: int, index: Any, first: int, last: int, limit: int, depth: int, width: int, lanes: int
) -> None:
    """As `pack_panels`, of rows index[first] .. index[last] of x; those of index -1 become 0."""
    for r0 in range(first, last, lanes):
        column = r0 - first
        corner = at(out, column // width * width * depth + column % width)
        step, even = 0, r0 >= 0 and r0 + lanes <= limit
        if even:
            step = get(index, r0 + 1) - get(index, r0)
            even = get(index, r0) >= 0 and get(index, r0 + lanes - 1) >= 0
            for r in range(2, lanes):
                even = even and get(index, r0 + r) - get(index, r0 + r - 1) == step
        if even:
            pack_vector(corner, width, at(x, get(index, r0) * row), step * row, depth, lanes)
        else:
            for c in range(depth):
                fill_row(corner, c * width, c * width + lanes, 0.0)
            for r in range(max(r0, 0), min(r0 + lanes, limit)):
                if get(index, r) >= 0:
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, get(index, r) * row + c))


@helper
def score_plain(a: Any, lda: int, b: Any, depth: int, c: Any, stride: int, rows: int) -> None:
    """`score_panel` as a function, so that its callers share one copy of the code."""
    score_panel(a, lda, b, depth, c, stride, rows)


@helper
def load_rows(out: Any, width: int, x: Any, row: int, rows: int, depth: int, scale: float) -> None:
    """Copy a block of rows, scaled, `width` apart, and as many rows of 0 as complete a register tile of scores."""
    for i in range(rows):
        scale_row(at(out, i * width), at(x, i * row), depth, scale)
        fill_row(out, i * width + depth, (i + 1) * width, 0.0)
    fill_row(out, rows * width, round_up(rows, SCORE_ROWS) * width, 0.0)


@helper
def skew_block(
    p: Any, base: Any, w: Any, q_row: int, weights: Any, i0: int, rows: int, j0: int, cols: int, moved: int, lanes: int
) -> None:
    """Products of the block's queries with one weight row per distance.

    With `reach` the block's queries rounded up to whole panels, column c of the buffer belongs to distance
    j - i = j0 - i0 - (reach - 1) + c, so that row i of the tile reads it from column reach - 1 - i on. A tile
    `moved` keys further keeps what it shares with the one before.
    """
    depth, width = p.skew_depth, PANEL_VECTORS * lanes
    reach = round_up(p.block_queries, width)
    products, packed, stride = at(base, w[SKEW]), at(base, w[SKEW_W]), reach + BLOCK_KEYS
    start = (reach - rows) // width * width
    if moved:
        for i in range(rows):
            line = at(products, i * stride)
            scale_row(line, at(line, moved), reach, 1.0)
        start = reach
    origin = j0 - i0 - (reach - 1)
    # Distances that no query may attend are left out: what stands there is overwritten with -inf.
    stop = min(reach + round_up(cols, width), round_up(max(p.offset + p.right + 1 - origin, 0), width))
    index, limit = integers(p.skew_index), p.q_len + p.k_len - 1
    origin += p.q_len - 1
    pack_indexed(packed, weights, p.skew_row, index, origin + start, origin + stop, limit, depth, width, lanes)
    for c in range(start, stop, width):
        # The first rows come to these columns in the next tile only, unless this is the first.
        low = max(reach - c - width, 0) // SCORE_ROWS * SCORE_ROWS
        panel, out = at(packed, (c - start) * depth), at(products, low * stride + c)
        score_plain(at(base, w[SKEW_Q] + low * q_row), q_row, panel, depth, out, stride, rows - low)


@helper
def add_gathered(s: Any, a: Any, source: Any, t: int, col: int, cols: int) -> None:
    """s[j] += source[j * col + index[t + j]] for every index that is not negative."""
    index = integers(a.index)
    if a.runs and col == 0:
        runs = integers(a.runs)
        j = 0
        while j < cols:
            r = get(index, t + j)
            end = min(get(runs, t + j) - t, cols)
            if r >= 0:
                add_constant(at(s, j), end - j, get(source, r))
            j = end
    else:
        for j in range(cols):
            r = get(index, t + j)
            if r >= 0:
                put(s, j, get(s, j) + get(source, j * col + r))


@helper
def add_binned(s: Any, a: Any, bins: Any, t: int, cols: int) -> None:
    """bins[index[t + j]] += s[j] for every index that is not negative."""
    index = integers(a.index)
    if a.runs:
        runs = integers(a.runs)
        j = 0
        while j < cols:
            r = get(index, t + j)
            end = min(get(runs, t + j) - t, cols)
            if r >= 0:
                put(bins, r, get(bins, r) + sum_row(at(s, j), end - j))
            j = end
    else:
        for j in range(cols):
            r = get(index, t + j)
            if r >= 0:
                put(bins, r, get(bins, r) + get(s, j))


@helper
def open_rows(
    p: Any,
    adds: Any,
    base: Any,
    w: Any,
    bias: Any,
    b: int,
    h: int,
    mask: int,
    i0: int,
    rows: int,
    j0: int,
    cols: int,
    lanes: int,
    first: int,
) -> None:
    """Complete a tile of plain scores: bias, gathered terms, masks, and each row's maximum; `first` is its row."""
    wide = round_up(cols, lanes)
    reach = round_up(p.block_queries, PANEL_VECTORS * lanes)
    for i in range(rows):
        q = i0 + i
        s = at(base, w[SCORES] + (first + i) * BLOCK_KEYS)
        if p.bias_row:
            add_row(s, at(bias, q * p.bias_row + j0), cols, 1.0)
        if p.skew_depth:
            add_row(s, at(base, w[SKEW] + i * (reach + BLOCK_KEYS) + reach - 1 - i), cols, 1.0)
        for n in range(p.add_count):
            a = adds[n]
            source = at(pointer_like(base, a.src), b * a.src_batch + h * a.src_head + q * a.src_row + j0 * a.src_col)
            add_gathered(s, a, source, b * a.index_batch + q * a.index_row + j0, a.src_col, cols)
        if p.soft:
            soft = at(pointer_like(base, p.soft), mask + h * p.mask_head + q * p.mask_row + j0 * p.mask_col)
            if p.mask_col:
                add_mask(s, soft, cols, LOG2E)
            elif get(soft, 0) == MINUS_INFINITY:
                fill_row(s, 0, cols, MINUS_INFINITY)
            else:
                add_constant(s, cols, get(soft, 0) * LOG2E)
        if p.allowed:
            allowed = at(bytes_(p.allowed), mask + h * p.mask_head + q * p.mask_row + j0 * p.mask_col)
            if p.mask_col:
                mask_row(s, allowed, cols, MINUS_INFINITY)
            elif get(allowed, 0) == 0:
                fill_row(s, 0, cols, MINUS_INFINITY)
        # Excluded keys are overwritten, not added to, so that what they hold never matters.
        begin = min(max(q + p.offset - p.left - j0, 0), cols)
        end = max(min(q + p.offset + p.right + 1 - j0, cols), 0)
        fill_row(s, 0, begin, MINUS_INFINITY)
        fill_row(s, end, wide, MINUS_INFINITY)
        max_row(s, wide, at(base, w[TOPS] + (first + i) * lanes))


@helper
def spread_poison(base: Any, w: Any, rows: int, cols: int, v_depth: int, v_width: int) -> None:
    """Move values that are not finite past the product, in which 0 * inf would reach rows that exclude their key."""
    for j in range(cols):
        for c in range(v_depth):
            x = get(base, w[VALUES] + j * v_width + c)
            if not math.isfinite(x):
                put(base, w[VALUES] + j * v_width + c, 0.0)
                for i in range(rows):
                    if get(base, w[SCORES] + i * BLOCK_KEYS + j) != MINUS_INFINITY:
                        at_out = w[OUT] + i * v_width + c
                        put(base, at_out, get(base, at_out) + x)


@helper
def finish_rows(
    p: Any, values: Any, base: Any, w: Any, b: int, h: int, i0: int, rows: int, v_width: int, lanes: int
) -> None:
    """Add the value terms, divide by the sums and write the output and the log-sum-exp."""
    fill_row(base, w[FADE], w[FADE] + round_up(rows, ROW_QUANTUM), 1.0)
    for n in range(p.value_count):
        a = values[n]
        weights = at(pointer_like(base, a.weights), h * a.weights_head)
        binned = at(base, w[BINS] + a.bins)
        accumulate(
            binned, p.bins, weights, v_width, at(base, w[OUT]), v_width, at(base, w[FADE]), rows, v_width, a.rows
        )
    out = at(pointer_like(base, p.out), b * p.out_batch + h * p.out_head)
    for i in range(rows):
        total = lane_sum(at(base, w[TOTAL] + i * lanes))
        empty = total == 0.0
        scale_row(
            at(out, (i0 + i) * p.out_row), at(base, w[OUT] + i * v_width), p.v_depth, 0.0 if empty else 1.0 / total
        )
        if p.lse:
            lse = MINUS_INFINITY if empty else (get(base, w[TOP] + i) + math.log2(total)) * p.lse_unit
            put(pointer_like(base, p.lse), (b * p.heads + h) * p.q_len + i0 + i, lse)


@inlined
def attend_block(p: Any, adds: Any, values: Any, batches: Any, base: Any, t: int, lanes: int) -> None:
    """Attention for one block of queries of one head."""
    block, depth, v_depth = p.block_queries, p.depth, p.v_depth
    b, h, i0 = t // (p.heads * p.blocks), t // p.blocks % p.heads, t % p.blocks * block
    rows = min(block, p.q_len - i0)
    width, v_width = PANEL_VECTORS * lanes, round_up(v_depth, lanes)
    w = layout(block, depth, v_width, p.skew_depth, p.bins, lanes)
    scores, out, fade = at(base, w[SCORES]), at(base, w[OUT]), at(base, w[FADE])
    q = at(pointer_like(base, p.q), get(batches, BATCH_Q * p.count + b) + h * p.q_head + i0 * p.q_row)
    k = at(pointer_like(base, p.k), get(batches, BATCH_K * p.count + b) + h // p.k_group * p.k_head)
    v = at(pointer_like(base, p.v), get(batches, BATCH_V * p.count + b) + h // p.v_group * p.v_head)
    bias = at(pointer_like(base, p.bias), h * p.bias_head)
    weights = at(pointer_like(base, p.skew_w), h * p.skew_head)
    mask = get(batches, BATCH_MASK * p.count + b)
    load_rows(at(base, w[QUERIES]), depth, q, p.q_row, rows, depth, p.scale)
    if p.skew_depth:
        skew_q = at(pointer_like(base, p.skew_q), ((b * p.heads + h) * p.q_len + i0) * p.skew_depth)
        load_rows(at(base, w[SKEW_Q]), p.skew_depth, skew_q, p.skew_depth, rows, p.skew_depth, LOG2E)
    fill_row(base, w[OUT], w[OUT] + round_up(rows, ROW_QUANTUM) * v_width, 0.0)
    fill_row(base, w[TOTAL], w[TOTAL] + rows * lanes, 0.0)
    fill_row(base, w[TOP], w[TOP] + block, MINUS_INFINITY)
    fill_row(base, w[FADE], w[FADE] + block, 1.0)
    fill_row(base, w[BINS], w[BINS] + round_up(rows, ROW_QUANTUM) * p.bins, 0.0)
    # Register tiles of the last product read rows that no query fills: denormal numbers left there would be slow.
    for i in range(rows, round_up(rows, ROW_QUANTUM)):
        fill_row(scores, i * BLOCK_KEYS, i * BLOCK_KEYS + min(BLOCK_KEYS, round_up(p.k_len, lanes)), 0.0)
    plain = p.add_count == 0 and p.soft == 0 and p.allowed == 0 and not (p.skew_depth and p.bias_row)
    # Tiles lie on a grid that begins at the first key that any query may attend, and a tile ends where whole
    # panels end: a row's sums are the same bits whatever other rows share its block.
    origin = max(get(batches, KEY_BEGIN * p.count + b), p.offset - p.left)
    end = min(get(batches, KEY_END * p.count + b), p.q_len + p.offset + p.right)
    panels_end = origin + (end - origin) // width * width
    last = min(end, i0 + rows + p.offset + p.right)
    j0 = origin + max(i0 + p.offset - p.left - origin, 0) // BLOCK_KEYS * BLOCK_KEYS
    moved = 0

    while j0 < last:
        cols = min(BLOCK_KEYS, last - j0)
        if j0 < panels_end and not p.bias_tail:
            cols = min(cols, panels_end - j0)  # leave a ragged end to a small tile of its own
        pack_panels(at(base, w[KEYS]), k, p.k_row, j0, j0 + cols, p.k_len, depth, width, lanes)
        # A tile takes the short way if every query may attend every key and no column is left over.
        open_ = j0 >= i0 + rows - 1 + p.offset - p.left and j0 + cols <= i0 + p.offset + p.right + 1
        whole = cols % width == 0 or (p.bias_tail and j0 % width == 0 and j0 + cols == p.k_len)
        short = plain and open_ and whole
        fill_row(base, w[TOPS], w[TOPS] + round_up(rows, SCORE_ROWS) * lanes, MINUS_INFINITY)
        if p.skew_depth:
            skew_block(p, base, w, p.skew_depth, weights, i0, rows, j0, cols, moved, lanes)
        if short:
            added, added_row = at(bias, i0 * p.bias_row + (j0 if p.bias_row else 0)), p.bias_row
            if p.skew_depth:
                reach = round_up(block, width)
                added, added_row = at(base, w[SKEW] + reach - 1), reach + BLOCK_KEYS - 1
            for c in range(0, cols, width):
                score_panel_max(
                    at(base, w[QUERIES]),
                    depth,
                    at(base, w[KEYS] + c * depth),
                    depth,
                    at(scores, c),
                    BLOCK_KEYS,
                    rows,
                    at(added, c if added_row else 0),
                    added_row,
                    at(base, w[TOPS]),
                )
        else:
            for c in range(0, cols, width):
                # Only rows that may attend one of the panel's keys: what stands in others is overwritten with -inf.
                low = min(max(j0 + c - p.offset - p.right - i0, 0), rows) // SCORE_ROWS * SCORE_ROWS
                high = min(max(j0 + c + width - p.offset + p.left - i0, low), rows)
                lines, tile = at(base, w[QUERIES] + low * depth), at(scores, low * BLOCK_KEYS + c)
                score_plain(lines, depth, at(base, w[KEYS] + c * depth), depth, tile, BLOCK_KEYS, high - low)
            open_rows(p, adds, base, w, bias, b, h, mask, i0, rows, j0, cols, lanes, 0)

        for i in range(rows):
            put(base, w[BEST] + i, lane_max(at(base, w[TOPS] + i * lanes)))
        advance(at(base, w[BEST]), at(base, w[TOP]), fade, round_up(rows, lanes))
        check = copy_block(at(base, w[VALUES]), v_width, at(v, j0 * p.v_row), p.v_row, cols, v_depth)
        poisoned = not short and math.isnan(check)
        if poisoned:
            for i in range(rows):
                if get(fade, i) == 0.0:
                    fill_row(out, i * v_width, (i + 1) * v_width, 0.0)
            spread_poison(base, w, rows, cols, v_depth, v_width)
        for i1 in range(0, rows, STRIP):
            i2 = min(i1 + STRIP, rows)
            # Keys that the last row of the strip may attend: beyond them there is nothing to exponentiate or to add.
            last_seen = max(min(cols, i0 + i2 + p.offset + p.right - j0), 0)
            wide = round_up(last_seen, SUM_VECTORS * lanes)
            for i in range(i1, i2):
                s = at(scores, i * BLOCK_KEYS)
                fill_row(s, round_up(cols, width) if short else last_seen, wide, MINUS_INFINITY)
                exp2_row(s, wide, get(base, w[BEST] + i), at(base, w[TOTAL] + i * lanes), get(fade, i))
                if p.keep:
                    keep = at(bytes_(p.keep), ((b * p.heads + h) * p.q_len + i0 + i) * p.k_len + j0)
                    scale_row(s, s, last_seen, p.keep_scale)
                    mask_row(s, keep, last_seen, 0.0)
                if p.value_count:
                    bins = at(base, w[BINS] + i * p.bins)
                    scale_row(bins, bins, p.bins, get(fade, i))
                    # Up to the row's own last key: sums must not depend on how far the tile reaches.
                    seen = max(min(cols, i0 + i + p.offset + p.right + 1 - j0), 0)
                    for n in range(p.value_count):
                        a = values[n]
                        add_binned(s, a, at(bins, a.bins), b * a.index_batch + (i0 + i) * a.index_row + j0, seen)
                if poisoned and get(fade, i) == 0.0:
                    # Rows that begin here: 0 * fade would turn an infinity among the values into NaN.
                    put(fade, i, 1.0)
            tile, target = at(scores, i1 * BLOCK_KEYS), at(out, i1 * v_width)
            accumulate(
                tile,
                BLOCK_KEYS,
                at(base, w[VALUES]),
                v_width,
                target,
                v_width,
                at(fade, i1),
                i2 - i1,
                v_width,
                last_seen,
            )
        j0, moved = j0 + cols, cols
    finish_rows(p, values, base, w, b, h, i0, rows, v_width, lanes)


@inlined
def attend_all(call: int, base: Any, lanes: int) -> None:
    """Take blocks of queries from the shared counter while there are any."""
    p = carray(opaque(call), 1, CALL)[0]
    adds = carray(opaque(p.adds), p.add_count, ADD)
    values = carray(opaque(p.values), p.value_count, VALUE)
    t = take(call)
    while t < p.stop:
        attend_block(p, adds, values, longs(p.batches), base, t, lanes)
        t = take(call)


def _attend_float32(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_all(call, floats(p.work + get(get(arrays, 0), n) * p.work_stride), VECTOR_BYTES // 4)


def _attend_float64(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, CALL)[0]
    for n in range(get(lengths, 0)):
        attend_all(call, doubles(p.work + get(get(arrays, 0), n) * p.work_stride), VECTOR_BYTES // 8)


attend = {4: Kernel(_attend_float32), 8: Kernel(_attend_float64)}
