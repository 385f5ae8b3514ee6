"""Where the backward pass adds up what its tiles give: gradients of terms, and of operands over groups of tiles."""

from __future__ import annotations

import math
from typing import Any

from relpos_np.kernels._numba.forward_pass.attend import add_binned, add_number
from relpos_np.kernels._numba.forward_pass.scores import map_index
from relpos_np.kernels._numba.forward_pass.work import round_up
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.rows import (
    add_row,
    add_sum,
    at,
    copy_block,
    fill_row,
    get,
    integers,
    lanes_of,
    pointer_like,
    put,
    scale_row,
    sum_row,
)
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM
from relpos_np.kernels._numba.simd.tiles import accumulate, accumulate_transposed


@helper
def add_product(a: Any, lda: int, b: Any, c: Any, ones: Any, count: int, width: int, depth: int) -> None:
    """`accumulate` as a function, so that its callers share one copy of the code; rows of b and c are adjacent."""
    accumulate(a, lda, b, width, c, width, ones, count, width, depth)


@helper
def add_transposed(a: Any, lda: int, b: Any, c: Any, count: int, width: int, depth: int) -> None:
    """`accumulate_transposed` as a function, likewise."""
    accumulate_transposed(a, lda, b, width, c, width, count, width, depth)


@helper
def bypass_rows(a: Any, along: int, across: int, rows: Any, width: int, count: int, out: Any, others: int) -> None:
    """Add products with what is not finite in rows[count, width] to out, where a[...] is not 0; put 0 in its place.

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
def add_sunk(x: Any, a: Any, target: Any, low: Any, t: int, cols: int) -> None:
    """target[j * dst_col + map[t + j]] += x[j] for every entry of the map that is not negative."""
    if a.dst_col == 0 and a.low:
        add_binned(x, a, target, low, t, cols)
        return
    index = integers(a.map)
    for j in range(cols):
        r = get(index, t + j)
        if r >= 0 and a.low:
            add_number(target, low, j * a.dst_col + r, get(x, j))
        elif r >= 0:
            put(target, j * a.dst_col + r, get(target, j * a.dst_col + r) + get(x, j))


@helper
def collect(p: Any, e: Any, sinks: Any, base: Any, w: Any, head: Any, tile: Any, task: Any) -> None:
    """Add a tile to those gradients of terms that the task owns, or has a partial sum of."""
    b, h, j0, cols = head.b, head.h, tile.j0, tile.cols
    for i in range(tile.rows):
        q = tile.i0 + i
        ds = at(base, w.slopes + i * BLOCK_KEYS)
        if task.side != 1:
            if e.diag:
                origin = task.number * e.diag_task + j0 - q + p.q_len - 1
                diag = at(pointer_like(base, e.diag), origin)
                if e.diag_low:
                    add_sum(diag, at(pointer_like(base, e.diag_low), origin), ds, cols)
                else:
                    add_row(diag, ds, cols, 1.0)
            if e.dense:
                dense = at(pointer_like(base, e.dense), ((b * p.heads + h) * p.q_len + q) * p.k_len + j0)
                scale_row(dense, ds, cols, 1.0)
        for n in range(e.sink_count):
            a = sinks[n]
            if task.side in (2, a.of_keys):
                origin = task.number * a.dst_task + b * a.dst_batch + h * a.dst_head + q * a.dst_row + j0 * a.dst_col
                x = at(base, w.scores + i * BLOCK_KEYS) if a.of_probabilities else ds
                target, low = at(pointer_like(base, a.dst), origin), at(pointer_like(base, a.low), origin)
                add_sunk(x, a, target, low, map_index(a, b, q, j0), cols)


@helper
def collect_skewed(p: Any, e: Any, base: Any, w: Any, head: Any, tile: Any, task: Any) -> None:
    """Gradients of the term with one row of weights per distance, from a tile of ds, each row shifted by its query."""
    block, depth, s_width = p.block_queries, p.skew_depth, round_up(p.skew_depth, lanes_of(base))
    i0, rows, j0, cols, _ = tile
    # Columns beyond the tile's distances stay 0, because a product of whole register tiles reads some of them.
    shifted = block + BLOCK_KEYS + ROW_QUANTUM
    buffer = at(base, w.moved)
    fill_row(buffer, 0, rows * shifted, 0.0)
    for i in range(rows):
        scale_row(at(buffer, i * shifted + block - 1 - i), at(base, w.slopes + i * BLOCK_KEYS), cols, 1.0)
    origin = j0 - i0 - (block - 1) + p.q_len - 1
    low, high = max(origin, 0), min(origin + block + cols, p.q_len + p.k_len - 1)
    count = high - low
    lines, index = at(base, w.skew_rows), integers(p.skew_index)
    weights = at(pointer_like(base, p.skew_w), head.h * p.skew_head)
    for r in range(count):
        row = get(index, low + r)
        if row < 0:
            fill_row(lines, r * s_width, (r + 1) * s_width, 0.0)
        else:
            copy_block(at(lines, r * s_width), s_width, at(weights, row * p.skew_row), depth, 1, depth)
    products, own = at(buffer, low - origin), at(base, w.skew_dq + (i0 - task.first) * s_width)
    add_product(products, shifted, lines, own, at(base, w.ones), rows, s_width, count)
    first = task.number * e.skew_dw_task + low * s_width
    target, queries = at(pointer_like(base, e.skew_dw), first), at(base, w.skew_q)
    to = at(base, w.skew_tile) if e.skew_dw_low else target
    if e.skew_dw_low:
        fill_row(to, 0, round_up(count, ROW_QUANTUM) * s_width, 0.0)
    if not math.isfinite(sum_row(queries, rows * s_width)):
        bypass_rows(products, 1, shifted, queries, s_width, rows, to, count)
    add_transposed(products, shifted, queries, to, count, s_width, rows)
    if e.skew_dw_low:
        add_sum(target, at(pointer_like(base, e.skew_dw_low), first), to, count * s_width)


@helper
def end_group(base: Any, w: Any, size: int, v_size: int) -> None:
    """Add the gradients of a block of keys and values to those of earlier groups of queries."""
    add_sum(at(base, w.far_dk), at(base, w.low_dk), at(base, w.dk), size)
    add_sum(at(base, w.far_dv), at(base, w.low_dv), at(base, w.dv), v_size)
    fill_row(base, w.dk, w.dk + size, 0.0)
    fill_row(base, w.dv, w.dv + v_size, 0.0)


@helper
def add_far(base: Any, w: Any, size: int, v_size: int) -> None:
    """Add the gradients of earlier groups of queries to those of the last one, and begin with them again."""
    for own, far, low, n in (w.dk, w.far_dk, w.low_dk, size), (w.dv, w.far_dv, w.low_dv, v_size):
        add_row(at(base, own), at(base, low), n, 1.0)
        add_row(at(base, own), at(base, far), n, 1.0)
        fill_row(base, far, far + n, 0.0)
        fill_row(base, low, low + n, 0.0)


@helper
def end_key_group(base: Any, w: Any, size: int, s_size: int) -> None:
    """Add the gradients of queries to those of earlier groups of keys."""
    for own, far, low, n in (w.dq, w.far_dq, w.low_dq, size), (w.skew_dq, w.far_skew_dq, w.low_skew_dq, s_size):
        add_sum(at(base, far), at(base, low), at(base, own), n)
        fill_row(base, own, own + n, 0.0)


@helper
def add_key_groups(base: Any, w: Any, size: int, s_size: int) -> None:
    """Add the gradients of earlier groups of keys to those of the last one."""
    for own, far, low, n in (w.dq, w.far_dq, w.low_dq, size), (w.skew_dq, w.far_skew_dq, w.low_skew_dq, s_size):
        add_row(at(base, own), at(base, low), n, 1.0)
        add_row(at(base, own), at(base, far), n, 1.0)
