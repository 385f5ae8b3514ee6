"""The backward pass of attention: tiles of probabilities computed again from lse, nothing of size N x N.

One piece of work is a range of queries or of keys of one head, or the whole head. Each of its tiles is scored again as
in the forward pass, and with P the probabilities and g the gradient of the output

    dS = P (g V^T - delta),  dQ += dS K,  dK += dS^T Q,  dV += P^T g,

while tables collect dS along diagonals or by index. For gradients that several tasks contribute to, each task has a
partial sum; they are added up later in a fixed order.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from numba import carray

from relpos_np.kernels._numba.backward_pass.pairs import (
    add_pairs_to_keys,
    add_pairs_to_queries,
    clear_steps,
    load_unscaled,
    pair_block,
    pair_lines,
    pair_panels,
)
from relpos_np.kernels._numba.backward_pass.sums import (
    add_far,
    add_key_groups,
    add_product,
    add_transposed,
    bypass_rows,
    collect,
    collect_skewed,
    end_group,
    end_key_group,
)
from relpos_np.kernels._numba.forward_pass.pack import (
    load_block,
    load_queries,
    load_rows,
    load_turned,
    pack_panels,
    store_operand,
    store_row,
    turn_back,
)
from relpos_np.kernels._numba.forward_pass.scores import (
    add_all_gathered,
    complete_scores,
    in_band,
    range_of,
    score_pairs,
    score_plain,
    skew_block,
)
from relpos_np.kernels._numba.forward_pass.work import (
    LOG2,
    LOG2E,
    OWN,
    PANEL_VECTORS,
    SCORE_ROWS,
    Tile,
    head_of,
    pair_steps,
    round_up,
    size_of,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.launch.entries import entry_points
from relpos_np.kernels._numba.launch.records import ADD, BACKWARD, CALL, KEY_BEGIN, KEY_END, SINK
from relpos_np.kernels._numba.simd.amx import close_tiles, open_tiles
from relpos_np.kernels._numba.simd.rows import (
    add_row,
    at,
    bytes_,
    doubles,
    fill_row,
    floats,
    get,
    lanes_of,
    longs,
    mask_row,
    multiply_row,
    opaque,
    pointer_like,
    scale_row,
    soften_row,
    sum_row,
    take,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM
from relpos_np.kernels._numba.simd.tiles import pair_panel_max, score_panel_max

CALL_BYTES = CALL.itemsize
# Blocks of queries whose gradients of a block of keys are summed before they are added to those of earlier queries, as
# groups of keys are in `forward_pass/attend.py`.
GROUP_BLOCKS = 32
# Keys whose shares in the gradients of queries are, likewise: as many numbers of one sign.
GROUP_KEYS = 16 * BLOCK_KEYS


# As `Layout`. `grads` and `slopes` are gradients of the output and of the scores; `skew_rows` the weights of distances,
# row by row, `moved` the slopes, each row shifted by its query, `skew_tile` a tile's product of both, for long sums;
# `caps` the derivatives of capped scores. `far_...`: from earlier groups of queries or of keys, `low_...`: what these
# sums lose to rounding. Where pairs are multiplied (`pairs.py`), `..._pairs` are pairs of channels and `..._lines`
# pairs of rows, and the panels of `keys` and `value_panels` are made by way of `spare`.
BackLayout = namedtuple(  # noqa: PYI024
    "BackLayout",
    "queries keys scores tops skew_q skew_w skew grads slopes key_rows value_panels dk dv far_dk far_dv low_dk low_dv "
    "dq skew_dq far_dq far_skew_dq low_dq low_skew_dq ones skew_rows skew_tile moved caps query_pairs grad_pairs spare "
    "key_lines query_lines grad_lines tile_lines end",
)
# A head of a piece of work: its number among the partial sums, its queries and its keys. `side`: 0 if the piece owns
# the queries, 1 if it owns the keys, 2 if both. `before`: heads that share the keys and have added their gradients.
Task = namedtuple("Task", "number side b h first stop key_first key_stop before")  # noqa: PYI024


@helper
def back_layout(
    block: int,
    span: int,
    q_len: int,
    k_len: int,
    depth: int,
    v_depth: int,
    skew: int,
    capped: int,
    lanes: int,
    steps: int,
    v_steps: int,
) -> BackLayout:
    """The workspace for blocks of `block` queries, of `span` queries in all. The host calls it as plain Python.

    `capped`: 1 if derivatives of a cap are kept, else 0. `steps`, `v_steps`: pairs of channels, 0 unless they are
    multiplied.
    """
    reach = (block + PANEL_VECTORS * lanes - 1) // (PANEL_VECTORS * lanes) * PANEL_VECTORS * lanes
    q_width, v_width = (depth + lanes - 1) // lanes * lanes, (v_depth + lanes - 1) // lanes * lanes
    s_width, shifted = (skew + lanes - 1) // lanes * lanes, reach + BLOCK_KEYS
    keys = block * q_width
    scores = keys + BLOCK_KEYS * max(depth, steps)
    tops = scores + block * BLOCK_KEYS
    skew_q = tops + block * lanes
    skew_w = skew_q + block * s_width
    skewed = skew_w + shifted * skew
    grads = skewed + (block * shifted if skew else 0)
    slopes = grads + block * v_width
    key_rows = slopes + block * BLOCK_KEYS
    value_panels = key_rows + BLOCK_KEYS * q_width
    dk = value_panels + BLOCK_KEYS * max(v_depth, v_steps)
    dv = dk + BLOCK_KEYS * q_width
    far_dk = dv + BLOCK_KEYS * v_width
    far = 1 if q_len > GROUP_BLOCKS * block else 0
    far_dv = far_dk + far * BLOCK_KEYS * q_width
    low_dk = far_dv + far * BLOCK_KEYS * v_width
    low_dv = low_dk + far * BLOCK_KEYS * q_width
    dq = low_dv + far * BLOCK_KEYS * v_width
    rows, far = span + ROW_QUANTUM, 1 if k_len > GROUP_KEYS else 0
    skew_dq = dq + rows * q_width
    far_dq = skew_dq + rows * s_width
    far_skew_dq = far_dq + far * rows * q_width
    low_dq = far_skew_dq + far * rows * s_width
    low_skew_dq = low_dq + far * rows * q_width
    ones = low_skew_dq + far * rows * s_width
    skew_rows = ones + block
    skew_tile = skew_rows + shifted * s_width
    moved = skew_tile + (shifted + ROW_QUANTUM) * s_width
    caps = moved + (block * (shifted + ROW_QUANTUM) if skew else 0)
    query_pairs = caps + capped * block * BLOCK_KEYS
    grad_pairs = query_pairs + block * steps
    spare = grad_pairs + block * v_steps
    key_lines = spare + BLOCK_KEYS * max(steps, v_steps)
    paired = 1 if steps else 0
    query_lines = key_lines + paired * BLOCK_KEYS // 2 * q_width
    grad_lines = query_lines + paired * block // 2 * q_width
    tile_lines = grad_lines + paired * block // 2 * v_width
    end = tile_lines + paired * block // 2 * BLOCK_KEYS
    return BackLayout(
        0, keys, scores, tops, skew_q, skew_w, skewed, grads, slopes, key_rows, value_panels,
        dk, dv, far_dk, far_dv, low_dk, low_dv, dq, skew_dq, far_dq, far_skew_dq, low_dq, low_skew_dq, ones, skew_rows,
        skew_tile, moved, caps, query_pairs, grad_pairs, spare, key_lines, query_lines, grad_lines, tile_lines, end,
    )  # fmt: skip


@helper
def side_of(p: Any, e: Any, t: int) -> int:
    """What a piece of work owns: with several parts, first come those that own keys and then those that own queries."""
    return 2 if e.parts == 1 else 1 if t < p.count * (p.heads // e.group) * e.parts else 0


@helper
def task_of(p: Any, e: Any, t: int, side: int, before: int) -> Task:
    """A head of a piece of work by its number."""
    of_keys = p.count * (p.heads // e.group) * e.parts
    whole, part = t // e.parts * e.group + before, t % e.parts
    if side == 0:
        whole, part = (t - of_keys) // e.parts, (t - of_keys) % e.parts
    first = part * e.query_step if side == 0 else 0
    stop = min(first + e.query_step, p.q_len) if side == 0 else p.q_len
    key_first = part * e.key_step if side == 1 else 0
    key_stop = min(key_first + e.key_step, p.k_len) if side == 1 else p.k_len
    b, h = whole // p.heads, whole % p.heads
    return Task(whole * e.parts + part, side, b, h, first, stop, key_first, key_stop, before)


@helper
def score_again(p: Any, adds: Any, base: Any, w: Any, head: Any, tile: Any, pairs: Any) -> None:
    """Scores of a tile as in the forward pass."""
    i0, rows, j0, cols, _ = tile
    depth, lanes, queries, scores = p.depth, lanes_of(base), at(base, w.queries), at(base, w.scores)
    width, q_width, steps = PANEL_VECTORS * lanes, round_up(depth, lanes), pair_steps(depth)
    plain = p.add_count == 0 and p.soft == 0 and p.allowed == 0 and p.skew_depth == 0 and p.cap == 0.0
    if plain and in_band(p, head.b, tile) and cols % width == 0:
        for c in range(0, cols, width):
            bias, row = at(head.bias, i0 * p.bias_row + (j0 + c if p.bias_row else 0)), p.bias_row
            panel, s, tops = (
                at(base, w.keys + c * (steps if pairs is not None else depth)),
                at(scores, c),
                at(base, w.tops),
            )
            if pairs is not None:
                q = at(base, w.query_pairs)
                pair_panel_max(q, steps, panel, steps, s, BLOCK_KEYS, rows, width, bias, row, tops, p.scale)
            else:
                score_panel_max(queries, q_width, panel, depth, s, BLOCK_KEYS, rows, width, bias, row, tops)
    else:
        for c in range(0, cols, width):
            panel, s, seen = (
                at(base, w.keys + c * (steps if pairs is not None else depth)),
                at(scores, c),
                min(width, cols - c),
            )
            if pairs is not None:
                score_pairs(at(base, w.query_pairs), steps, panel, steps, s, BLOCK_KEYS, rows, seen, p.scale)
            else:
                score_plain(queries, q_width, panel, depth, s, BLOCK_KEYS, rows, seen)
        if p.skew_depth:
            skew_block(p, base, w, round_up(p.skew_depth, lanes), head, tile, 0)
        complete_scores(p, adds, base, w, head, tile)


@helper
def go_below_cap(base: Any, w: Any, tile: Any) -> None:
    """Turn gradients of capped scores into those of what was capped."""
    for i in range(tile.rows):
        multiply_row(at(base, w.slopes + i * BLOCK_KEYS), at(base, w.caps + i * BLOCK_KEYS), tile.cols)


@helper
def slope_tile(p: Any, e: Any, adds: Any, dp_adds: Any, base: Any, w: Any, head: Any, tile: Any, pairs: Any) -> None:
    """Probabilities and gradients of the scores of one tile; the packed operands are in place."""
    score_again(p, adds, base, w, head, tile, pairs)
    lanes, cols = lanes_of(base), tile.cols
    v_width, steps, width = round_up(p.v_depth, lanes), pair_steps(p.v_depth), PANEL_VECTORS * lanes
    for c in range(0, cols, width):
        panel, out = at(base, w.value_panels + c * (steps if pairs is not None else p.v_depth)), at(base, w.slopes + c)
        seen = min(width, cols - c)
        if pairs is not None:
            score_pairs(at(base, w.grad_pairs), steps, panel, steps, out, BLOCK_KEYS, tile.rows, seen, 1.0)
        else:
            score_plain(at(base, w.grads), v_width, panel, p.v_depth, out, BLOCK_KEYS, tile.rows, seen)
    soften_tile(p, e, dp_adds, base, w, head, tile)


@helper
def soften_tile(p: Any, e: Any, dp_adds: Any, base: Any, w: Any, head: Any, tile: Any) -> None:
    """From scores and products of the output's gradient with values to probabilities and gradients of scores."""
    cols = tile.cols
    wide = round_up(cols, lanes_of(base))
    for i in range(tile.rows):
        q = tile.i0 + i
        row = (head.b * p.heads + head.h) * p.q_rows + q
        s, dp = at(base, w.scores + i * BLOCK_KEYS), at(base, w.slopes + i * BLOCK_KEYS)
        add_all_gathered(dp_adds, e.dp_add_count, dp, head, q, tile)
        keep = at(bytes_(p.keep), row * p.k_rows + tile.j0) if p.keep else bytes_(p.keep)
        if p.keep:
            scale_row(dp, dp, cols, p.keep_scale)
            mask_row(dp, keep, cols, 0.0)
        lse = at(pointer_like(base, p.lse), row)
        soften_row(s, dp, wide, get(lse, 0), get(lse, p.lse_low), get(pointer_like(base, e.delta), row))
        if p.keep:
            scale_row(s, s, cols, p.keep_scale)
            mask_row(s, keep, cols, 0.0)
    if p.cap_slopes and p.cap_content == 0:
        go_below_cap(base, w, tile)


@helper
def load_key_rows(p: Any, base: Any, w: Any, head: Any, j0: int, cols: int) -> bool:
    """Copy a block of keys, turned if they turn; whether one of them may not be finite."""
    out, width = at(base, w.key_rows), round_up(p.depth, lanes_of(base))
    own = head.k + j0 * p.k_row * size_of(base, p.k_kind)
    if p.turn:
        turns = head.k_turn + j0 * 2 * p.turn_pairs * size_of(base, OWN)
        load_turned(p, out, width, own, p.k_kind, p.k_row, turns, cols, p.depth)
        return not math.isfinite(sum_row(out, cols * width))
    return math.isnan(load_block(out, width, own, p.k_kind, p.k_row, cols, p.depth))


@helper
def load_keys(p: Any, base: Any, w: Any, head: Any, j0: int, cols: int, pairs: Any) -> bool:
    """Pack a block of keys and values and clear their gradients; whether a key is not finite."""
    lanes = lanes_of(base)
    q_width, v_width = round_up(p.depth, lanes), round_up(p.v_depth, lanes)
    key_rows, value_rows = at(base, w.key_rows), at(base, w.dv)
    bypassed: bool = load_key_rows(p, base, w, head, j0, cols)
    own = head.v + j0 * p.v_row * size_of(base, p.v_kind)
    load_block(value_rows, v_width, own, p.v_kind, p.v_row, cols, p.v_depth)
    if pairs is not None:
        pair_panels(base, w.keys, w.spare, w.key_rows, q_width, cols, p.depth)
        pair_panels(base, w.value_panels, w.spare, w.dv, v_width, cols, p.v_depth)
        clear_steps(base, w.key_lines, q_width, cols)
        pair_lines(base, w.key_lines, w.key_rows, q_width, cols)
    else:
        pack_panels(at(base, w.keys), key_rows, q_width, 0, cols, cols, p.depth)
        pack_panels(at(base, w.value_panels), value_rows, v_width, 0, cols, cols, p.v_depth)
    fill_row(base, w.dk, w.dk + BLOCK_KEYS * q_width, 0.0)
    fill_row(base, w.dv, w.dv + BLOCK_KEYS * v_width, 0.0)
    return bypassed


@helper
def begin_rows(p: Any, base: Any, w: Any, head: Any, i0: int, rows: int, pairs: Any) -> None:
    """Copy a block of queries and of the output's gradient."""
    lanes, row = lanes_of(base), (head.b * p.heads + head.h) * p.q_rows + i0
    v_width, s_width, padded = round_up(p.v_depth, lanes), round_up(p.skew_depth, lanes), round_up(rows, SCORE_ROWS)
    q_width, queries, own = (
        round_up(p.depth, lanes),
        at(base, w.queries),
        head.grad + i0 * p.grad_row * size_of(base, p.grad_kind),
    )
    if pairs is not None:
        load_unscaled(p, base, w, head, i0, rows)
    else:
        load_queries(p, queries, queries, q_width, head, i0, rows, None)
    load_block(at(base, w.grads), v_width, own, p.grad_kind, p.grad_row, rows, p.v_depth)
    fill_row(at(base, w.grads), rows * v_width, padded * v_width, 0.0)
    if pairs is not None:
        pair_block(base, w.query_pairs, w.query_lines, w.queries, q_width, rows, p.depth)
        pair_block(base, w.grad_pairs, w.grad_lines, w.grads, v_width, rows, p.v_depth)
    if p.skew_depth:
        skew_q = at(pointer_like(base, p.skew_q), row * p.skew_depth)
        load_rows(at(base, w.skew_q), s_width, skew_q, p.skew_depth, rows, p.skew_depth, LOG2E)


@helper
def add_to_keys(p: Any, base: Any, w: Any, rows: int, cols: int, pairs: Any) -> None:
    """Add dS^T Q to dK, and P^T g to dV."""
    q_width, v_width = round_up(p.depth, lanes_of(base)), round_up(p.v_depth, lanes_of(base))
    slopes, queries, dk = at(base, w.slopes), at(base, w.queries), at(base, w.dk)
    scores, grads, dv = at(base, w.scores), at(base, w.grads), at(base, w.dv)
    if not math.isfinite(sum_row(queries, rows * q_width)):
        bypass_rows(slopes, 1, BLOCK_KEYS, queries, q_width, rows, dk, cols)
        if pairs is not None:
            pair_lines(base, w.query_lines, w.queries, q_width, rows)
    if not math.isfinite(sum_row(grads, rows * v_width)):
        bypass_rows(scores, 1, BLOCK_KEYS, grads, v_width, rows, dv, cols)
        if pairs is not None:
            pair_lines(base, w.grad_lines, w.grads, v_width, rows)
    if pairs is not None:
        add_pairs_to_keys(base, w, w.slopes, w.query_lines, w.dk, q_width, rows, cols)
        add_pairs_to_keys(base, w, w.scores, w.grad_lines, w.dv, v_width, rows, cols)
    else:
        add_transposed(slopes, BLOCK_KEYS, queries, dk, cols, q_width, rows)
        add_transposed(scores, BLOCK_KEYS, grads, dv, cols, v_width, rows)


@helper
def add_to_queries(p: Any, base: Any, w: Any, head: Any, tile: Any, first: int, bypassed: bool, pairs: Any) -> None:
    """Add dS K to dQ, for a task whose first query is `first`; `bypassed` if a key is not finite."""
    q_width, slopes, keys = round_up(p.depth, lanes_of(base)), at(base, w.slopes), at(base, w.key_rows)
    own = at(base, w.dq + (tile.i0 - first) * q_width)
    if bypassed:
        # Copied again, because `bypass_rows` has emptied rows that these queries may read.
        load_key_rows(p, base, w, head, tile.j0, tile.cols)
        bypass_rows(slopes, BLOCK_KEYS, 1, keys, q_width, tile.cols, own, tile.rows)
        if pairs is not None:
            pair_lines(base, w.key_lines, w.key_rows, q_width, tile.cols)
    if pairs is not None:
        add_pairs_to_queries(base, w, own, q_width, tile.rows, tile.cols)
    else:
        add_product(slopes, BLOCK_KEYS, keys, own, at(base, w.ones), tile.rows, q_width, tile.cols)


@helper
def write_keys(p: Any, e: Any, base: Any, w: Any, head: Any, j0: int, cols: int, before: int, pairs: Any) -> None:
    """Write the gradients of a block of keys and values, or add them to those of the heads before."""
    q_width, v_width = round_up(p.depth, lanes_of(base)), round_up(p.v_depth, lanes_of(base))
    for j in range(cols):
        row = (head.b * p.heads + head.h) // e.group * p.k_rows + j0 + j
        # The queries of the products hold the scale, in units of log 2, unless they were paired.
        of_key = e.dk + row * p.depth * size_of(base, e.dk_kind)
        of_value = e.dv + row * p.v_depth * size_of(base, e.dv_kind)
        turns = head.k_turn + (j0 + j) * 2 * p.turn_pairs * size_of(base, OWN)
        factor = p.scale * LOG2 if pairs is not None else LOG2
        dk, dv = at(base, w.dk + j * q_width), at(base, w.dv + j * v_width)
        if before:
            # Rounded as if it were stored, so that whoever adds stored gradients gets the same bits.
            scale_row(dk, dk, p.depth, factor)
            if p.turn:
                turn_back(p, dk, q_width, turns)
            add_row(pointer_like(base, of_key), dk, p.depth, 1.0)
            add_row(pointer_like(base, of_value), dv, p.v_depth, 1.0)
        else:
            store_operand(p, dk, q_width, turns, of_key, e.dk_kind, factor)
            store_row(dv, of_value, e.dv_kind, p.v_depth, 1.0)


@helper
def write_queries(p: Any, e: Any, base: Any, w: Any, head: Any, task: Any) -> None:
    """Write the gradients of a task's queries."""
    q_width, s_width = round_up(p.depth, lanes_of(base)), round_up(p.skew_depth, lanes_of(base))
    for i in range(task.first, task.stop):
        row, own = (task.b * p.heads + task.h) * p.q_rows + i, at(base, w.dq + (i - task.first) * q_width)
        turns, of_query = head.q_turn + i * 2 * p.turn_pairs * size_of(base, OWN), row * p.depth
        of_query = e.dq + of_query * size_of(base, e.dq_kind)
        store_operand(p, own, q_width, turns, of_query, e.dq_kind, p.scale * LOG2)
        if p.skew_depth:
            own = at(base, w.skew_dq + (i - task.first) * s_width)
            scale_row(at(pointer_like(base, e.skew_dq), row * p.skew_depth), own, p.skew_depth, 1.0)


@helper
def backward_head(
    p: Any, e: Any, adds: Any, dp_adds: Any, sinks: Any, batches: Any, base: Any, task: Any, pairs: Any
) -> None:
    """All tiles of one head of a piece of work."""
    block, lanes = p.block_queries, lanes_of(base)
    first, stop, side = task.first, task.stop, task.side
    steps, v_steps = (pair_steps(p.depth), pair_steps(p.v_depth)) if pairs is not None else (0, 0)
    span = e.query_step if e.parts > 1 else p.q_len
    w = back_layout(
        block, span, p.q_len, p.k_len, p.depth, p.v_depth, p.skew_depth, p.cap_slopes, lanes, steps, v_steps
    )
    head = head_of(p, batches, base, task.b, task.h)
    fill_row(base, w.ones, w.ones + block, 1.0)
    own, skew = (stop - first) * round_up(p.depth, lanes), (stop - first) * round_up(p.skew_depth, lanes)
    # Groups of keys begin at multiples of their length, whatever the tiles, so that a query has the same bits in any.
    far_keys = side != 1 and p.k_len > GROUP_KEYS
    if side != 1 and e.cut == 0:
        fill_row(base, w.dq, w.dq + own, 0.0)
        fill_row(base, w.skew_dq, w.skew_dq + skew, 0.0)
        if far_keys:
            fill_row(base, w.far_dq, w.far_dq + own, 0.0)
            fill_row(base, w.far_skew_dq, w.far_skew_dq + skew, 0.0)
            fill_row(base, w.low_dq, w.low_dq + own, 0.0)
            fill_row(base, w.low_skew_dq, w.low_skew_dq + skew, 0.0)
    size, v_size = BLOCK_KEYS * round_up(p.depth, lanes), BLOCK_KEYS * round_up(p.v_depth, lanes)
    far = side != 0 and stop - first > GROUP_BLOCKS * block
    if far:
        fill_row(base, w.far_dk, w.far_dk + size, 0.0)
        fill_row(base, w.far_dv, w.far_dv + v_size, 0.0)
        fill_row(base, w.low_dk, w.low_dk + size, 0.0)
        fill_row(base, w.low_dv, w.low_dv + v_size, 0.0)
    # Neither below the first key that the range's first query sees nor above the last one's. A range of queries begins
    # on the grid of tiles that all queries have, so that their gradients have the same bits however they are divided.
    origin = max(get(batches, KEY_BEGIN * p.count + task.b), task.key_first, p.offset - p.left)
    begin = max(origin, first + p.offset - p.left)
    if side == 0:
        if far_keys:
            origin = max(origin, begin // GROUP_KEYS * GROUP_KEYS)
        begin = origin + (begin - origin) // BLOCK_KEYS * BLOCK_KEYS
    end = min(get(batches, KEY_END * p.count + task.b), task.key_stop, stop - 1 + p.offset + p.right + 1)
    tiles = max(end - begin + BLOCK_KEYS - 1, 0) // BLOCK_KEYS
    end = min(end, begin + tiles * (e.cut + 1) // e.cuts * BLOCK_KEYS)
    begin += tiles * e.cut // e.cuts * BLOCK_KEYS
    j0 = begin
    while j0 < end:
        cols = min(BLOCK_KEYS, end - j0)
        if far_keys:
            cols = min(cols, GROUP_KEYS - j0 % GROUP_KEYS)
            if j0 % GROUP_KEYS == 0:
                end_key_group(base, w, own, skew)
        bypassed = load_keys(p, base, w, head, j0, cols, pairs)
        for i0 in range(first, stop, block):
            rows = min(block, stop - i0)
            for i in range(rows, round_up(rows, ROW_QUANTUM)):
                fill_row(at(base, w.slopes), i * BLOCK_KEYS, (i + 1) * BLOCK_KEYS, 0.0)
            if j0 + cols <= i0 + p.offset - p.left or j0 > i0 + rows - 1 + p.offset + p.right:
                continue
            if p.ranges:
                low, high = range_of(p, task.b, i0, rows)
                if j0 + cols <= low or j0 >= high:
                    continue
            tile = Tile(i0, rows, j0, cols, 0)
            begin_rows(p, base, w, head, i0, rows, pairs)
            slope_tile(p, e, adds, dp_adds, base, w, head, tile, pairs)
            collect(p, e, sinks, base, w, head, tile, task)
            if p.skew_depth and side != 1:
                collect_skewed(p, e, base, w, head, tile, task)
            if p.cap_slopes and p.cap_content:
                go_below_cap(base, w, tile)
            if side != 0:
                if far and (i0 - first) % (GROUP_BLOCKS * block) == 0:
                    end_group(base, w, size, v_size)
                add_to_keys(p, base, w, rows, cols, pairs)
            if side != 1:
                add_to_queries(p, base, w, head, tile, first, bypassed, pairs)
        if far:
            add_far(base, w, size, v_size)
        if side != 0:
            write_keys(p, e, base, w, head, j0, cols, task.before, pairs)
        j0 += cols
    if side != 1 and e.cut == e.cuts - 1:
        if far_keys:
            add_key_groups(base, w, own, skew)
        write_queries(p, e, base, w, head, task)


def _going_back(*, pairs: int | None = None) -> Any:
    """The kernel's body, which takes pieces of work from the shared counter while there are any."""

    @helper
    def backward_all(call: int, base: Any) -> None:
        p = carray(opaque(call), 1, CALL)[0]
        e = carray(opaque(call + CALL_BYTES), 1, BACKWARD)[0]
        adds = carray(opaque(p.adds), p.add_count, ADD)
        dp_adds = carray(opaque(e.dp_adds), e.dp_add_count, ADD)
        sinks = carray(opaque(e.sinks), e.sink_count, SINK)
        if pairs is not None:
            open_tiles()
        t = take(call)
        while t < p.stop:
            # A piece that is cut has a workspace of its own, whichever thread does it.
            own = base if e.cuts == 1 else pointer_like(base, p.work + (t - e.origin) * p.work_stride)
            side = side_of(p, e, t)
            for before in range(e.first_head, min(e.stop_head, e.group if side else 1)):
                task = task_of(p, e, t, side, before)
                backward_head(p, e, adds, dp_adds, sinks, longs(p.batches), own, task, pairs)
            t = take(call)
        if pairs is not None:
            close_tiles()

    return backward_all


# By what is multiplied, as in `forward_pass/attend.py`.
backward = entry_points(
    __name__,
    "backward",
    CALL,
    {
        "float32": (floats, _going_back()),
        "float64": (doubles, _going_back()),
        "bfloat16": (floats, _going_back(pairs=1)),
    },
)
