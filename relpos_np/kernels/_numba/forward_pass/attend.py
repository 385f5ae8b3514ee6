"""Streaming attention: blocks of queries against blocks of keys, online softmax, no N x N array.

One piece of work is a block of queries of one head. Its working set lies in one workspace per thread: the scaled
queries, one block of keys packed into panels, one of values, a tile of scores and the output so far. Scores are in
units of log 2, so that the exponential is 2**x.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from numba import carray

from relpos_np.kernels._numba.forward_pass.pack import (
    load_queries,
    load_rows,
    load_values,
    pack_keys,
    store_delta,
    store_row,
)
from relpos_np.kernels._numba.forward_pass.pages import from_pages
from relpos_np.kernels._numba.forward_pass.planes import (
    SHARE_ROWS,
    add_planes,
    plane_layout,
    score_planes,
    split_queries,
    split_values,
)
from relpos_np.kernels._numba.forward_pass.scores import (
    complete_scores,
    in_band,
    map_index,
    range_of,
    score_pairs,
    score_plain,
    skew_block,
)
from relpos_np.kernels._numba.forward_pass.work import (
    DELTA,
    LOG2E,
    MANY,
    MINUS_INFINITY,
    NONE,
    PANEL_VECTORS,
    SCORE_ROWS,
    Tile,
    end_of,
    head_of,
    pair_steps,
    round_up,
    size_of,
    whole_columns,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import ADD, CALL, KEY_BEGIN, KEY_END, VALUE
from relpos_np.kernels._numba.simd.amx import close_tiles, open_tiles
from relpos_np.kernels._numba.simd.half_precision import as_integers, halve_row
from relpos_np.kernels._numba.simd.rows import (
    add_row,
    advance,
    at,
    bytes_,
    doubles,
    exp2_row,
    fill_row,
    floats,
    get,
    integers,
    lane_max,
    lane_sum,
    lanes_of,
    longs,
    mask_row,
    opaque,
    pointer_like,
    put,
    scale_row,
    sum_row,
    take,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, PAIR_ROWS, ROW_QUANTUM, SUM_VECTORS
from relpos_np.kernels._numba.simd.tiles import accumulate, accumulate_pairs, pair_panel_max, score_panel_max

# Rows that are exponentiated, then multiplied while the nearer caches hold them. A multiple of every tile's rows.
STRIP = 4 * ROW_QUANTUM
# Keys whose tiles are summed before their sum is added to that of earlier keys: rounding then grows with the square
# root of the tiles of a group and of the number of groups, and not of all tiles.
GROUP_KEYS = 32 * BLOCK_KEYS


# Where each buffer of a thread's workspace begins, in elements, and its size. By row: `total` and `tops` are sums and
# maxima per lane, `best` is what a tile subtracts, `top` the maximum so far and `fade` the factor on earlier sums.
# `scratch` holds a vector's worth of queries or keys while they are converted or turned. What is summed, `out`, `total`
# and `bins`, is there again for earlier groups of keys, with the factor `far_fade` on them. `lost` is what bins lose to
# rounding.
Layout = namedtuple(  # noqa: PYI024
    "Layout",
    "queries keys scratch scores values far_out far_total far_bins far_fade out total tops best top fade "
    "skew_q skew_w skew bins lost caps end",
)


@helper
def layout(block: int, depth: int, v_width: int, skew_depth: int, bins: int, lanes: int) -> Layout:
    """The workspace for `block` queries. The host calls it as plain Python, so it calls no compiled function."""
    keys = (block * depth + 63) // 64 * 64
    scratch = keys + BLOCK_KEYS * depth
    scores = scratch + (2 * lanes * depth + 63) // 64 * 64
    values = scores + block * BLOCK_KEYS
    far_out = values + BLOCK_KEYS * v_width
    far_total = far_out + block * v_width
    far_bins = far_total + block * lanes
    far_fade = far_bins + (block * bins + 63) // 64 * 64
    out = far_fade + (block + 63) // 64 * 64
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
    lost = binned + (block * bins + 63) // 64 * 64
    end = lost + (block * bins + 63) // 64 * 64
    return Layout(
        0, keys, scratch, scores, values, far_out, far_total, far_bins, far_fade, out, total, tops, best, top, fade,
        skew_q, skew_w, skew, binned, lost, 0, end,
    )  # fmt: skip


@helper
def add_number(sums: Any, lost: Any, n: int, x: Any) -> None:
    """sums[n] += x + lost[n]; what that loses to rounding is put into lost[n], and 0 where it is no number."""
    old, new = get(sums, n), x + get(lost, n)
    total = old + new
    part = total - old
    rest = (old - (total - part)) + (new - part)
    put(sums, n, total)
    put(lost, n, 0.0 if math.isnan(rest) else rest)


@helper
def add_binned(s: Any, a: Any, bins: Any, lost: Any, t: int, cols: int) -> None:
    """bins[map[t + j]] += s[j] for every entry of the map that is not negative."""
    index = integers(a.map)
    if a.runs:
        runs = integers(a.runs)
        j = 0
        while j < cols:
            r = get(index, t + j)
            end = min(get(runs, t + j) - t, cols)
            if r >= 0:
                # Most runs are of one element: rows of keys that are near.
                add_number(bins, lost, r, get(s, j) if end == j + 1 else sum_row(at(s, j), end - j))
            j = end
    else:
        for j in range(cols):
            r = get(index, t + j)
            if r >= 0:
                add_number(bins, lost, r, get(s, j))


@helper
def bypass_values(base: Any, w: Any, rows: int, cols: int, v_depth: int, v_width: int) -> None:
    """Add values that are not finite to the output of the rows that attend them, and put 0 in their place.

    In the product that follows, 0 * inf would make NaN of rows that exclude the key.
    """
    for j in range(cols):
        for c in range(v_depth):
            x = get(base, w.values + j * v_width + c)
            if not math.isfinite(x):
                put(base, w.values + j * v_width + c, 0.0)
                for i in range(rows):
                    if get(base, w.scores + i * BLOCK_KEYS + j) != MINUS_INFINITY:
                        at_out = w.out + i * v_width + c
                        put(base, at_out, get(base, at_out) + x)


@helper
def bypass_pairs(base: Any, w: Any, rows: int, cols: int, v_depth: int, v_width: int) -> None:
    """As `bypass_values`, of values that are paired."""
    bits = as_integers(at(base, w.values))
    for j in range(cols):
        shift = j % 2 * 16
        for c in range(v_depth):
            pair = get(bits, j // 2 * v_width + c)
            own = pair >> shift & 0xFFFF
            if own & 0x7F80 == 0x7F80:
                put(bits, j // 2 * v_width + c, pair & (0xFFFF0000 >> shift))
                x = math.nan if own & 0x7F else MINUS_INFINITY if own & 0x8000 else math.inf
                for i in range(rows):
                    if get(base, w.scores + i * BLOCK_KEYS + j) != MINUS_INFINITY:
                        at_out = w.out + i * v_width + c
                        put(base, at_out, get(base, at_out) + x)


@helper
def write_lse(p: Any, like: Any, row: int, top: float, total: float) -> None:
    """Write the log-sum-exp of a row, if it is asked for, from its maximum and its sum, and what kind of row it is."""
    if p.ends and not (math.fabs(top) < end_of(like) and total < math.inf):
        put(longs(p.ends), NONE if total == 0.0 else MANY, 1)
    if p.lse:
        own, more = pointer_like(like, p.lse), 0.0 if total == 0.0 else math.log2(total)
        put(own, row, MINUS_INFINITY if total == 0.0 else (top + more) * p.lse_unit)
        if p.lse_low:
            # The unit is 1 then. Exact, whichever of the two is larger.
            kept = get(own, row) - top
            lost = (top - (get(own, row) - kept)) + (more - kept)
            put(own, row + p.lse_low, lost if math.isfinite(lost) else 0.0)


@helper
def begin_rows(p: Any, base: Any, w: Any, head: Any, i0: int, rows: int, pairs: Any) -> None:
    """Load a block's queries and clear its sums."""
    v_width, padded = round_up(p.v_depth, lanes_of(base)), round_up(rows, ROW_QUANTUM)
    load_queries(p, at(base, w.queries), at(base, w.scratch), p.steps, head, i0, rows, pairs)
    if p.skew_depth:
        skew_q = at(pointer_like(base, p.skew_q), ((head.b * p.heads + head.h) * p.q_rows + i0) * p.skew_depth)
        load_rows(at(base, w.skew_q), p.skew_depth, skew_q, p.skew_depth, rows, p.skew_depth, LOG2E)
    fill_row(base, w.out, w.out + padded * v_width, 0.0)
    fill_row(base, w.total, w.total + rows * lanes_of(base), 0.0)
    fill_row(base, w.top, w.top + p.block_queries, MINUS_INFINITY)
    fill_row(base, w.fade, w.fade + p.block_queries, 1.0)
    fill_row(base, w.bins, w.bins + padded * p.bins, 0.0)
    fill_row(base, w.lost, w.lost + rows * p.bins, 0.0)
    # Register tiles of the last product read rows that no query fills: denormal numbers left there would be slow.
    for i in range(rows, padded):
        filled = min(BLOCK_KEYS, round_up(p.k_len, lanes_of(base)))
        fill_row(at(base, w.scores), i * BLOCK_KEYS, i * BLOCK_KEYS + filled, 0.0)


@helper
def begin_far(base: Any, w: Any, rows: int, v_width: int, bins: int) -> None:
    """Clear the sums of earlier groups of keys."""
    fill_row(base, w.far_out, w.far_out + rows * v_width, 0.0)
    fill_row(base, w.far_total, w.far_total + rows * lanes_of(base), 0.0)
    fill_row(base, w.far_bins, w.far_bins + rows * bins, 0.0)
    fill_row(base, w.far_fade, w.far_fade + rows, 1.0)


@helper
def move_sums(base: Any, at_sums: int, at_far: int, width: int, fade: float) -> None:
    """Add a row of sums to that of earlier groups of keys, and begin it again."""
    sums, far = at(base, at_sums), at(base, at_far)
    scale_row(far, far, width, fade)
    add_row(far, sums, width, 1.0)
    fill_row(sums, 0, width, 0.0)


@helper
def end_group(base: Any, w: Any, rows: int, v_width: int, bins: int) -> None:
    """Add the sums of a group of keys to those of earlier ones."""
    lanes = lanes_of(base)
    for i in range(rows):
        fade = get(base, w.far_fade + i)
        move_sums(base, w.out + i * v_width, w.far_out + i * v_width, v_width, fade)
        move_sums(base, w.total + i * lanes, w.far_total + i * lanes, lanes, fade)
        add_row(at(base, w.bins + i * bins), at(base, w.lost + i * bins), bins, 1.0)
        fill_row(base, w.lost + i * bins, w.lost + (i + 1) * bins, 0.0)
        move_sums(base, w.bins + i * bins, w.far_bins + i * bins, bins, fade)
        put(base, w.far_fade + i, 1.0)


@helper
def add_far(base: Any, w: Any, rows: int, v_width: int, bins: int) -> None:
    """Add the sums of earlier groups of keys to those of the last one."""
    lanes = lanes_of(base)
    for i in range(rows):
        fade = get(base, w.far_fade + i)
        add_row(at(base, w.out + i * v_width), at(base, w.far_out + i * v_width), v_width, fade)
        add_row(at(base, w.total + i * lanes), at(base, w.far_total + i * lanes), lanes, fade)
        add_row(at(base, w.bins + i * bins), at(base, w.far_bins + i * bins), bins, fade)


@helper
def score_tile(
    p: Any, adds: Any, base: Any, w: Any, x: Any, head: Any, tile: Any, moved: int, odd: float, pairs: Any, split: Any
) -> bool:
    """Scores of a tile and their maxima by row; whether bias and maxima were done within the product."""
    depth, lanes = p.steps, lanes_of(base)
    width, queries, scores, tops = PANEL_VECTORS * lanes, at(base, w.queries), at(base, w.scores), at(base, w.tops)
    i0, rows, j0, cols, _ = tile
    unit = PAIR_ROWS if pairs is not None or split is not None else SCORE_ROWS
    pack_keys(p, at(base, w.keys), at(base, w.scratch), head, j0, cols, pairs)
    # That needs all keys open to all queries, no column left over, and one bias at most.
    plain = p.add_count == 0 and p.soft == 0 and p.allowed == 0 and p.cap == 0.0
    plain = plain and not (p.skew_depth and p.bias_row)
    whole = whole_columns(cols, lanes) == cols or (p.bias_tail and j0 % width == 0 and j0 + cols == p.k_len)
    fused = split is None and plain and in_band(p, head.b, tile) and whole
    fill_row(tops, 0, round_up(rows, unit) * lanes, MINUS_INFINITY)
    if p.skew_depth:
        skew_block(p, base, w, p.skew_depth, head, tile, moved)
    if fused:
        added, added_row = at(head.bias, i0 * p.bias_row + (j0 if p.bias_row else 0)), p.bias_row
        if p.skew_depth:
            reach = round_up(p.block_queries, width)
            added, added_row = at(base, w.skew + reach - 1), reach + BLOCK_KEYS - 1
        for c in range(0, cols, width):
            panel, bias = at(base, w.keys + c * depth), at(added, c if added_row else 0)
            out, n = at(scores, c), min(width, cols - c)
            if pairs is not None:
                pair_panel_max(queries, depth, panel, depth, out, BLOCK_KEYS, rows, n, bias, added_row, tops, p.scale)
            else:
                score_panel_max(queries, depth, panel, depth, out, BLOCK_KEYS, rows, n, bias, added_row, tops)
    else:
        for c in range(0, cols, width):
            # Only rows that may attend one of the panel's keys: what stands in others is overwritten with -inf.
            low = min(max(j0 + c - p.offset - p.right - i0, 0), rows) // unit * unit
            high = min(max(j0 + c + width - p.offset + p.left - i0, low), rows)
            lines, out, panel = at(queries, low * depth), at(scores, low * BLOCK_KEYS + c), at(base, w.keys + c * depth)
            if split is not None:
                score_planes(p, base, w, x, low, high, c, min(width, cols - c), odd)
            elif pairs is not None:
                score_pairs(lines, depth, panel, depth, out, BLOCK_KEYS, high - low, min(width, cols - c), p.scale)
            else:
                score_plain(lines, depth, panel, depth, out, BLOCK_KEYS, high - low, min(width, cols - c))
        complete_scores(p, adds, base, w, head, tile)
    return fused


@helper
def weigh_row(p: Any, values: Any, base: Any, w: Any, head: Any, tile: Any, i: int, last_seen: int) -> None:
    """What becomes of a row's probabilities before they meet the values: dropout, and sums for the value terms."""
    q, s = tile.i0 + i, at(base, w.scores + i * BLOCK_KEYS)
    if p.keep:
        keep = at(bytes_(p.keep), ((head.b * p.heads + head.h) * p.q_rows + q) * p.k_rows + tile.j0)
        scale_row(s, s, last_seen, p.keep_scale)
        mask_row(s, keep, last_seen, 0.0)
    if p.value_count:
        bins, lost, fade = at(base, w.bins + i * p.bins), at(base, w.lost + i * p.bins), get(base, w.fade + i)
        if fade != 1.0:
            scale_row(bins, bins, p.bins, fade)
            scale_row(lost, lost, p.bins, fade)
        # Up to the row's own last key: sums must not depend on how far the tile reaches.
        seen = max(min(tile.cols, q + p.offset + p.right + 1 - tile.j0), 0)
        for n in range(p.value_count):
            a = values[n]
            add_binned(s, a, at(bins, a.bins), at(lost, a.bins), map_index(a, head.b, q, tile.j0), seen)


@helper
def add_tile(
    p: Any, values: Any, base: Any, w: Any, x: Any, head: Any, tile: Any, fused: bool, far: bool, pairs: Any,
    split: Any,
) -> None:  # fmt: skip
    """Turn a tile's scores into probabilities, fade earlier sums, and add the tile's."""
    rows, cols, lanes, fade = tile.rows, tile.cols, lanes_of(base), at(base, w.fade)
    v_width = round_up(p.v_depth, lanes)
    for i in range(rows):
        put(base, w.best + i, lane_max(at(base, w.tops + i * lanes)))
    advance(at(base, w.best), at(base, w.top), fade, round_up(rows, lanes))
    if far:
        for i in range(rows):
            put(base, w.far_fade + i, get(base, w.far_fade + i) * get(fade, i))
    own = head.v + tile.j0 * p.v_row * size_of(base, p.v_kind)
    check = load_values(at(base, w.values), v_width, own, p.v_kind, p.v_row, cols, p.v_depth, pairs)
    bypassed = not fused and math.isnan(check)
    if bypassed:
        for i in range(rows):
            if get(fade, i) == 0.0:
                fill_row(base, w.out + i * v_width, w.out + (i + 1) * v_width, 0.0)
        if pairs is not None:
            bypass_pairs(base, w, rows, cols, p.v_depth, v_width)
        else:
            bypass_values(base, w, rows, cols, p.v_depth, v_width)
    apart, strip = False, STRIP
    if split is not None:
        apart, strip = split_values(p, base, w, x, cols, v_width), SHARE_ROWS
    for i1 in range(0, rows, strip):
        i2 = min(i1 + strip, rows)
        # Keys that the last row of the strip may attend: beyond them there is nothing to exponentiate or to add.
        last_seen = max(min(cols, tile.i0 + i2 + p.offset + p.right - tile.j0), 0)
        wide = round_up(last_seen, SUM_VECTORS * lanes)
        for i in range(i1, i2):
            s = at(base, w.scores + i * BLOCK_KEYS)
            fill_row(s, whole_columns(cols, lanes) if fused else last_seen, wide, MINUS_INFINITY)
            exp2_row(s, wide, get(base, w.best + i), at(base, w.total + i * lanes), get(fade, i))
            weigh_row(p, values, base, w, head, tile, i, last_seen)
            if pairs is not None:
                halve_row(s, wide)
            if bypassed and get(fade, i) == 0.0:
                # Rows that begin here: 0 * fade would turn an infinity among the values into NaN.
                put(fade, i, 1.0)
        s, v, out = at(base, w.scores + i1 * BLOCK_KEYS), at(base, w.values), at(base, w.out + i1 * v_width)
        count, below = i2 - i1, at(fade, i1)
        if split is not None:
            add_planes(p, base, w, x, i1, count, last_seen, wide, apart)
        elif pairs is not None:
            both = (last_seen + 1) // 2
            accumulate_pairs(s, BLOCK_KEYS, v, v_width, out, v_width, below, count, v_width, both)
        else:
            accumulate(s, BLOCK_KEYS, v, v_width, out, v_width, below, count, v_width, last_seen)


@helper
def finish_rows(p: Any, values: Any, base: Any, w: Any, head: Any, i0: int, rows: int) -> None:
    """Add the value terms, divide by the sums and write the output and the log-sum-exp."""
    lanes, b, h = lanes_of(base), head.b, head.h
    v_width, fade, sums = round_up(p.v_depth, lanes), at(base, w.fade), at(base, w.out)
    fill_row(fade, 0, round_up(rows, ROW_QUANTUM), 1.0)
    add_row(at(base, w.bins), at(base, w.lost), rows * p.bins, 1.0)
    for n in range(p.value_count):
        a = values[n]
        weights, binned = at(pointer_like(base, a.weights), h * a.weights_head), at(base, w.bins + a.bins)
        accumulate(binned, p.bins, weights, v_width, sums, v_width, fade, rows, v_width, a.rows)
    out, size = b * p.out_batch + h * p.out_head, size_of(base, p.out_kind)
    for i in range(rows):
        total = lane_sum(at(base, w.total + i * lanes))
        factor = 0.0 if total == 0.0 else 1.0 / total
        line, own = at(sums, i * v_width), p.out + (out + (i0 + i) * p.out_row) * size
        if p.out_kind == DELTA:
            scale_row(line, line, p.v_depth, factor)
            store_delta(p, line, own, head, i0 + i)
        else:
            store_row(line, own, p.out_kind, p.v_depth, factor)
        write_lse(p, base, (b * p.heads + h) * p.q_rows + i0 + i, get(base, w.top + i), total)


@helper
def attend_block(p: Any, adds: Any, values: Any, batches: Any, base: Any, t: int, pairs: Any, split: Any) -> None:
    """Attention for one block of queries of one head."""
    block, lanes, b, i0 = p.block_queries, lanes_of(base), t // (p.heads * p.blocks), t % p.blocks * p.block_queries
    rows, width = min(block, p.q_len - i0), PANEL_VECTORS * lanes
    w = layout(block, p.steps, round_up(p.v_depth, lanes), p.skew_depth, p.bins, lanes)
    head = head_of(p, batches, base, b, t // p.blocks % p.heads)
    begin_rows(p, base, w, head, i0, rows, pairs)
    x = plane_layout(w.end, block, pair_steps(p.depth), round_up(p.v_depth, lanes), p.planes, lanes)
    odd = 0.0
    if split is not None:
        odd = split_queries(p, base, w, x, rows)
    # Tiles lie on a grid that begins at the first key that any query may attend, and a tile ends where whole
    # panels end: a row's sums are the same bits whatever other rows share its block.
    origin = max(get(batches, KEY_BEGIN * p.count + b), p.offset - p.left)
    end = min(get(batches, KEY_END * p.count + b), p.q_len + p.offset + p.right)
    panels_end = origin + (end - origin) // width * width
    first, last = i0 + p.offset - p.left, min(end, i0 + rows + p.offset + p.right)
    if p.ranges:
        begin, stop = range_of(p, b, i0, rows)
        first, last = max(first, begin), min(last, stop)
    j0 = origin + max(first - origin, 0) // BLOCK_KEYS * BLOCK_KEYS
    # Groups lie on the same grid.
    moved, v_width, far = 0, round_up(p.v_depth, lanes), (last - 1 - origin) // GROUP_KEYS > (j0 - origin) // GROUP_KEYS
    if far:
        begin_far(base, w, rows, v_width, p.bins)
    while j0 < last:
        cols = min(BLOCK_KEYS, last - j0)
        if j0 < panels_end and not p.bias_tail:
            cols = min(cols, panels_end - j0)  # leave a ragged end to a small tile of its own
        tile = Tile(i0, rows, j0, cols, 0)
        here = from_pages(p, at(base, x.end), head, j0, cols) if p.pages else head
        fused = score_tile(p, adds, base, w, x, here, tile, moved, odd, pairs, split)
        add_tile(p, values, base, w, x, here, tile, fused, far, pairs, split)
        j0, moved = j0 + cols, cols
        if far and (j0 - origin) % GROUP_KEYS == 0:
            end_group(base, w, rows, v_width, p.bins)
    if far:
        add_far(base, w, rows, v_width, p.bins)
    finish_rows(p, values, base, w, head, i0, rows)


def _attending(*, pairs: int | None = None, split: int | None = None) -> Any:
    """The kernel's body, which takes blocks of queries from the shared counter while there are any.

    Constants that are compiled in, 1 or None: products are of `pairs` of bfloat16, or of operands `split` into planes.
    Numba leaves out what stands behind `is not None` for None, so that each kernel has the code of its products alone.
    """

    @helper
    def attend_all(call: int, base: Any) -> None:
        p = carray(opaque(call), 1, CALL)[0]
        adds = carray(opaque(p.adds), p.add_count, ADD)
        values = carray(opaque(p.values), p.value_count, VALUE)
        if pairs is not None or split is not None:
            open_tiles()
        t = take(call)
        while t < p.stop:
            attend_block(p, adds, values, longs(p.batches), base, t, pairs, split)
            t = take(call)
        if pairs is not None or split is not None:
            close_tiles()

    return attend_all


# By what is multiplied: products of pairs of bfloat16, and of planes of float32, are summed in float32.
attend = entry_points(
    __name__,
    "attend",
    CALL,
    {
        "float32": (floats, _attending()),
        "float64": (doubles, _attending()),
        "bfloat16": (floats, _attending(pairs=1)),
        "planes": (floats, _attending(split=1)),
    },
)
