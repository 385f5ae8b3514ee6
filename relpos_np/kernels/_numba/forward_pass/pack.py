"""Copies of operands in a thread's workspace, in the order in which the register tiles read them."""

from __future__ import annotations

from typing import Any

from relpos_np.kernels._numba.forward_pass.work import (
    BRAIN,
    HALF,
    OWN,
    PANEL_VECTORS,
    SCORE_ROWS,
    round_up,
    size_of,
    whole_columns,
)
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.half_precision import copy_pairs, narrow_row, pair_rows
from relpos_np.kernels._numba.simd.rotation import turn_rows
from relpos_np.kernels._numba.simd.rows import (
    at,
    brains,
    copy_block,
    dots_of_one,
    fill_row,
    get,
    halves,
    lanes_of,
    pointer_like,
    put,
    scale_row,
    transpose_square,
)
from relpos_np.kernels._numba.simd.target import CONVERTS_HALF, PAIR_ROWS, PAIR_STEPS


def by_storage(function: Any) -> Any:
    """An intrinsic `function(x, width, rows, ...)` as a function of the rows' address and of how they are stored."""

    @helper
    def dispatched(x: Any, width: int, rows: int, kind: int, *rest: Any) -> Any:
        if kind == BRAIN:
            return function(x, width, brains(rows), *rest)
        if CONVERTS_HALF and kind == HALF:
            return function(x, width, halves(rows), *rest)
        return function(x, width, pointer_like(x, rows), *rest)

    return dispatched


load_block, load_pairs, load_pairs_of_rows = by_storage(copy_block), by_storage(copy_pairs), by_storage(pair_rows)
turn_stored, dots_stored = by_storage(turn_rows), by_storage(dots_of_one)


@helper
def load_values(out: Any, width: int, x: int, kind: int, row: int, rows: int, depth: int, pairs: Any) -> Any:
    """Copy a block of values, or their pairs; return NaN if an element is not finite."""
    if pairs is None:
        return load_block(out, width, x, kind, row, rows, depth)
    made = (rows + 1) // 2
    fill_row(out, made * width, round_up(made, PAIR_STEPS) * width, 0.0)
    return load_pairs_of_rows(out, width, x, kind, row, rows, depth)


@helper
def load_turned(p: Any, out: Any, width: int, x: int, kind: int, row: int, turns: int, rows: int, depth: int) -> None:
    """Copy the rows at an address, however they are stored, while their pairs of channels turn."""
    by, pairs, first, blocks, way = pointer_like(out, turns), p.turn_pairs, p.turn_first, p.turn_blocks, p.turn - 1
    turn_stored(out, width, x, kind, row, by, rows, depth, pairs, first, blocks, way, 1.0)


@helper
def turn_back(p: Any, x: Any, width: int, turns: int) -> None:
    """Turn a row of gradients back, in its place."""
    by, pairs, first, blocks = pointer_like(x, turns), p.turn_pairs, p.turn_first, p.turn_blocks
    turn_rows(x, width, x, width, by, 1, p.depth, pairs, first, blocks, p.turn - 1, -1.0)


@helper
def turn_queries(p: Any, out: Any, scratch: Any, width: int, head: Any, i0: int, rows: int, pairs: Any) -> None:
    """Copy a block of queries, or their pairs, while their channels turn."""
    size, turn = p.q_row * size_of(out, p.q_kind), 2 * p.turn_pairs * size_of(out, OWN)
    x, turns = head.q + i0 * size, head.q_turn + i0 * turn
    if pairs is not None:
        lanes = lanes_of(out)
        for r in range(0, rows, lanes):
            n, by = min(lanes, rows - r), turns + r * turn
            load_turned(p, scratch, p.depth, x + r * size, p.q_kind, p.q_row, by, n, p.depth)
            copy_pairs(at(out, r * width), width, scratch, p.depth, n, p.depth)
    else:
        load_turned(p, out, width, x, p.q_kind, p.q_row, turns, rows, p.depth)


@helper
def load_queries(p: Any, out: Any, scratch: Any, width: int, head: Any, i0: int, rows: int, pairs: Any) -> None:
    """Copy a block of queries, scaled unless they are pairs, with rows of 0 up to a whole register tile of scores."""
    x = head.q + i0 * p.q_row * size_of(out, p.q_kind)
    if p.turn:
        turn_queries(p, out, scratch, width, head, i0, rows, pairs)
        if pairs is not None:
            fill_row(out, rows * width, round_up(rows, PAIR_ROWS) * width, 0.0)
        else:
            load_rows(out, width, out, width, rows, p.depth, p.scale)
    elif pairs is not None:
        load_pairs(out, width, x, p.q_kind, p.q_row, rows, p.depth)
        fill_row(out, rows * width, round_up(rows, PAIR_ROWS) * width, 0.0)
    elif p.q_kind == OWN:
        load_rows(out, width, pointer_like(out, x), p.q_row, rows, p.depth, p.scale)
    else:
        load_block(out, width, x, p.q_kind, p.q_row, rows, p.depth)
        load_rows(out, width, out, width, rows, p.depth, p.scale)


@helper
def store_row(x: Any, out: int, kind: int, n: int, factor: float) -> None:
    """Write a row, times a factor, to an address, in the way that is stored there."""
    if kind == BRAIN:
        narrow_row(brains(out), x, n, factor)
    elif CONVERTS_HALF and kind == HALF:
        narrow_row(halves(out), x, n, factor)
    else:
        scale_row(pointer_like(x, out), x, n, factor)


@helper
def store_operand(p: Any, x: Any, width: int, turns: int, out: int, kind: int, factor: float) -> None:
    """Write a row of the gradient of queries or keys, times a factor, to an address; turned back if they turn."""
    if p.turn:
        scale_row(x, x, p.depth, factor)
        turn_back(p, x, width, turns)
        store_row(x, out, kind, p.depth, 1.0)
    else:
        store_row(x, out, kind, p.depth, factor)


@helper
def store_delta(p: Any, x: Any, own: int, head: Any, i: int) -> None:
    """Write to an address the product of a row of the result with that of its gradient, for query i."""
    out, grad, depth = pointer_like(x, own), head.grad + i * p.grad_row * size_of(x, p.grad_kind), p.v_depth
    dots_stored(x, depth, grad, p.grad_kind, depth, 0, 1, depth, out, 1)


@helper
def load_rows(out: Any, width: int, x: Any, row: int, rows: int, depth: int, scale: float) -> None:
    """Copy a block of rows, scaled and padded to `width`; add rows of 0 up to a whole register tile of scores."""
    for i in range(rows):
        scale_row(at(out, i * width), at(x, i * row), depth, scale)
        fill_row(out, i * width + depth, (i + 1) * width, 0.0)
    fill_row(out, rows * width, round_up(rows, SCORE_ROWS) * width, 0.0)


@helper
def pack_vector(out: Any, width: int, x: Any, row: int, depth: int) -> None:
    """out[c, r] = x[r, c] for as many rows as a vector has lanes."""
    lanes = lanes_of(out)
    whole = depth // lanes * lanes
    for c in range(0, whole, lanes):
        transpose_square(at(out, c * width), width, at(x, c), row)
    for r in range(lanes):
        for c in range(whole, depth):
            put(out, c * width + r, get(x, r * row + c))


@helper
def pack_panels(out: Any, x: Any, row: int, first: int, last: int, limit: int, depth: int) -> None:
    """Pack rows first..last of x, transposed, into panels [depth, width]; rows outside [0, limit) become 0."""
    lanes = lanes_of(out)
    width, end = PANEL_VECTORS * lanes, min(last, limit)
    for p in range(first, last, width):
        panel = at(out, (p - first) * depth)
        for r0 in range(p, p + whole_columns(min(last - p, width), lanes), lanes):
            corner = at(panel, r0 - p)
            if r0 >= 0 and r0 + lanes <= end:
                pack_vector(corner, width, at(x, r0 * row), row, depth)
            else:
                for c in range(depth):
                    fill_row(corner, c * width, c * width + lanes, 0.0)
                for r in range(max(r0, 0), min(r0 + lanes, end)):
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, r * row + c))


@helper
def pack_keys(p: Any, out: Any, scratch: Any, head: Any, j0: int, cols: int, pairs: Any) -> None:
    """Pack `cols` keys of a head from j0 on into panels [steps, width], padded with 0."""
    x, turn = head.k, 2 * p.turn_pairs * size_of(out, OWN)
    if p.k_kind == OWN and pairs is None and not p.turn:
        own = pointer_like(out, x + j0 * p.k_row * size_of(out, OWN))
        pack_panels(out, own, p.k_row, 0, cols, p.k_len - j0, p.depth)
        return
    lanes, steps = lanes_of(out), p.steps
    width, size = PANEL_VECTORS * lanes, p.k_row * size_of(out, p.k_kind)
    for c in range(0, whole_columns(cols, lanes), lanes):
        rows = min(max(cols - c, 0), lanes)
        j = j0 + min(c, cols - 1)
        own = x + j * size
        if p.turn:
            # Two elements for each of a pair: what is then made of it stays behind what is still to be read.
            wide = 2 * steps if pairs is not None else steps
            load_turned(p, scratch, wide, own, p.k_kind, p.k_row, head.k_turn + j * turn, rows, p.depth)
            if pairs is not None:
                copy_pairs(scratch, steps, scratch, wide, rows, p.depth)
        elif pairs is not None:
            load_pairs(scratch, steps, own, p.k_kind, p.k_row, rows, p.depth)
        else:
            load_block(scratch, steps, own, p.k_kind, p.k_row, rows, p.depth)
        fill_row(scratch, rows * steps, lanes * steps, 0.0)
        pack_vector(at(out, c // width * width * steps + c % width), width, scratch, steps, steps)


@helper
def pack_indexed(out: Any, x: Any, row: int, index: Any, first: int, last: int, limit: int, depth: int) -> None:
    """As `pack_panels`, of rows index[first] .. index[last] of x; those of index -1 become 0."""
    lanes = lanes_of(out)
    width = PANEL_VECTORS * lanes
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
            pack_vector(corner, width, at(x, get(index, r0) * row), step * row, depth)
        else:
            for c in range(depth):
                fill_row(corner, c * width, c * width + lanes, 0.0)
            for r in range(max(r0, 0), min(r0 + lanes, limit)):
                if get(index, r) >= 0:
                    for c in range(depth):
                        put(corner, c * width + r - r0, get(x, get(index, r) * row + c))
