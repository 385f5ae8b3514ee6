"""The products of the backward pass in pairs of bfloat16, with sums in float32.

Two channels of a query or key are a pair where scores are made, and two neighbouring keys or queries where gradients
are. Probabilities and gradients of scores are rounded for the products that they go into, and for nothing else.
"""

from __future__ import annotations

from typing import Any

from relpos_np.kernels._numba.forward_pass.pack import load_block, load_turned, pack_panels
from relpos_np.kernels._numba.forward_pass.work import OWN, SCORE_ROWS, pair_steps, round_up, size_of
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.half_precision import copy_pairs, halve_row, pair_rows
from relpos_np.kernels._numba.simd.rows import at, fill_row, lanes_of
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, PAIR_ROWS, PAIR_STEPS, SUM_VECTORS
from relpos_np.kernels._numba.simd.tiles import accumulate_pairs, accumulate_transposed_pairs


@helper
def load_unscaled(p: Any, base: Any, w: Any, head: Any, i0: int, rows: int) -> None:
    """Copy a block of queries as `load_queries` does, but for the scale, which bfloat16 would round."""
    queries, width = at(base, w.queries), round_up(p.depth, lanes_of(base))
    own = head.q + i0 * p.q_row * size_of(base, p.q_kind)
    if p.turn:
        turns = head.q_turn + i0 * 2 * p.turn_pairs * size_of(base, OWN)
        load_turned(p, queries, width, own, p.q_kind, p.q_row, turns, rows, p.depth)
    else:
        load_block(queries, width, own, p.q_kind, p.q_row, rows, p.depth)
    fill_row(queries, rows * width, round_up(rows, SCORE_ROWS) * width, 0.0)


@helper
def pair_lines(base: Any, out: int, x: int, width: int, rows: int) -> None:
    """Pairs of the rows that begin at x."""
    pair_rows(at(base, out), width, at(base, x), width, rows, width)


@helper
def clear_steps(base: Any, out: int, width: int, rows: int) -> None:
    """Rows of 0 behind the pairs of so many rows, up to whole steps of a product."""
    made = (rows + 1) // 2
    fill_row(at(base, out), made * width, round_up(made, PAIR_STEPS) * width, 0.0)


@helper
def pair_block(base: Any, by_channel: int, by_row: int, x: int, width: int, rows: int, depth: int) -> None:
    """Pairs of channels of the rows that begin at x, with rows of 0 up to a whole register tile, and pairs of rows."""
    steps, rows_at = pair_steps(depth), at(base, x)
    copy_pairs(at(base, by_channel), steps, rows_at, width, rows, depth)
    fill_row(at(base, by_channel), rows * steps, round_up(rows, PAIR_ROWS) * steps, 0.0)
    pair_lines(base, by_row, x, width, rows)


@helper
def pair_panels(base: Any, panels: int, scratch: int, x: int, width: int, rows: int, depth: int) -> None:
    """Pairs of channels of the keys or values that begin at x, packed into panels."""
    steps = pair_steps(depth)
    copy_pairs(at(base, scratch), steps, at(base, x), width, rows, depth)
    pack_panels(at(base, panels), at(base, scratch), steps, 0, rows, rows, steps)


@helper
def add_pairs_to_keys(base: Any, w: Any, tile: int, lines: int, out: int, width: int, rows: int, cols: int) -> None:
    """Add the transposed tile that begins at `tile` times the paired rows at `lines` to rows of gradients."""
    pairs = at(base, w.tile_lines)
    pair_rows(pairs, BLOCK_KEYS, at(base, tile), BLOCK_KEYS, rows, round_up(cols, lanes_of(base)))
    own, to = at(base, lines), at(base, out)
    accumulate_transposed_pairs(pairs, BLOCK_KEYS, own, width, to, width, cols, width, (rows + 1) // 2)


@helper
def add_pairs_to_queries(base: Any, w: Any, out: Any, width: int, rows: int, cols: int) -> None:
    """Add dS K to dQ; the tile of dS is paired in place."""
    slopes, wide = at(base, w.slopes), round_up(cols, SUM_VECTORS * lanes_of(base))
    for i in range(rows):
        line = at(slopes, i * BLOCK_KEYS)
        fill_row(line, cols, wide, 0.0)
        halve_row(line, wide)
    lines, ones, both = at(base, w.key_lines), at(base, w.ones), (cols + 1) // 2
    accumulate_pairs(slopes, BLOCK_KEYS, lines, width, out, width, ones, rows, width, both)
