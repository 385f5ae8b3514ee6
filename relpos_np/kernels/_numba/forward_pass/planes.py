"""Attention in float32 on matrix tiles, which multiply bfloat16: each number as two or three planes.

See `simd/bfloat16_planes.py`.

Operands are loaded, turned and packed as for products of float32, and then split. Of the products of planes those are
made that count, and summed from the smallest on: with two planes three, so that a product is off by 3 * 2^-16 of its
size at most, and with three planes six, so that it is off by 2^-23, about the rounding of a float32.

Planes do not stand for every float32. Scores of a query or key with NaN, infinity or a number from FAR on are made of
float32 instead, and so is the share of a value with one that is beyond FAR or NEAR. That is decided for each query and
each key alone: what others hold, or keys that are excluded, changes no bit.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from relpos_np.kernels._numba.forward_pass.scores import score_plain
from relpos_np.kernels._numba.forward_pass.work import PANEL_VECTORS, SCORE_ROWS, pair_steps, round_up, whole_columns
from relpos_np.kernels._numba.launch.build import helper
from relpos_np.kernels._numba.simd.bfloat16_planes import NEAR, odd_columns, odd_rows, split_pairs, split_rows
from relpos_np.kernels._numba.simd.rows import at, fill_row, get, lanes_of, put, scale_row
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, PAIR_ROWS, PAIR_STEPS, ROW_QUANTUM
from relpos_np.kernels._numba.simd.tiles import accumulate, accumulate_planes, plane_panel

# Rows whose probabilities are split, then multiplied while the nearer caches hold them.
SHARE_ROWS = ROW_QUANTUM

# Where the planes of each operand begin, in elements: those of a block of queries, of a block of keys in panels, of
# values, and of the probabilities of SHARE_ROWS rows. How many numbers of each query and key are odd; values that are,
# with 0 for all others; and a tile of scores.
Planes = namedtuple("Planes", "queries keys values shares odd_queries odd_keys odd_values side end")  # noqa: PYI024


@helper
def plane_layout(start: int, block: int, steps: int, v_width: int, planes: int, lanes: int) -> Planes:
    """The part of a workspace behind `start`; none of it without planes. The host calls it as plain Python."""
    if planes == 0:
        return Planes(start, start, start, start, start, start, start, start, start)
    keys = start + planes * block * steps
    values = keys + planes * BLOCK_KEYS * steps
    shares = values + planes * (BLOCK_KEYS // 2) * v_width
    odd_queries = shares + planes * SHARE_ROWS * (BLOCK_KEYS // 2)
    odd_keys = odd_queries + block
    odd_values = odd_keys + BLOCK_KEYS
    side = odd_values + BLOCK_KEYS * v_width
    end = side + SCORE_ROWS * PANEL_VECTORS * lanes
    return Planes(start, keys, values, shares, odd_queries, odd_keys, odd_values, side, end)


@helper
def split_queries(p: Any, base: Any, w: Any, x: Any, rows: int) -> float:
    """Split a block of queries, with rows of 0 up to a whole tile; return how many of their numbers are odd."""
    steps, lines = pair_steps(p.depth), at(base, w.queries)
    plane = p.block_queries * steps
    split_rows(at(base, x.queries), plane, steps, lines, p.depth, rows, p.depth, 2 * steps, p.planes)
    for n in range(p.planes):
        fill_row(at(base, x.queries + n * plane), rows * steps, round_up(rows, PAIR_ROWS) * steps, 0.0)
    found: float = odd_rows(at(base, x.odd_queries), lines, p.depth, rows, p.depth, 0.0)
    return found


@helper
def clear_pairs(base: Any, out: int, plane: int, width: int, rows: int, planes: int) -> None:
    """Rows of 0 behind the pairs of so many rows, up to whole steps of a product, in every plane."""
    made = (rows + 1) // 2
    for n in range(planes):
        fill_row(at(base, out + n * plane), made * width, round_up(made, PAIR_STEPS) * width, 0.0)


@helper
def score_planes(p: Any, base: Any, w: Any, x: Any, low: int, high: int, c: int, cols: int, odd: float) -> None:
    """Scores of the rows low ... high - 1 and the panel that begins at column c; of the queries so many are odd."""
    lanes, depth, steps = lanes_of(base), p.depth, pair_steps(p.depth)
    width, plane, apart = PANEL_VECTORS * lanes, BLOCK_KEYS * steps, p.block_queries * steps
    panel, own, made = at(base, w.keys + c * depth), x.keys + c * steps, whole_columns(cols, lanes)
    split_pairs(at(base, own), plane, width, panel, width, depth, made, p.planes)
    clear_pairs(base, own, plane, width, depth, p.planes)
    left, out = at(base, x.queries + low * steps), at(base, w.scores + low * BLOCK_KEYS + c)
    plane_panel(left, steps, apart, at(base, own), plane, steps, out, BLOCK_KEYS, high - low, cols, p.planes)
    if odd + odd_columns(at(base, x.odd_keys + c), panel, width, depth, made) > 0.0:
        mend_scores(p, base, w, x, low, high, c, cols)


@helper
def mend_scores(p: Any, base: Any, w: Any, x: Any, low: int, high: int, c: int, cols: int) -> None:
    """Products of float32 in place of those that an odd query or key has a share in."""
    width = PANEL_VECTORS * lanes_of(base)
    panel, side = at(base, w.keys + c * p.depth), at(base, x.side)
    for i in range(low, high, SCORE_ROWS):
        rows = min(SCORE_ROWS, high - i)
        score_plain(at(base, w.queries + i * p.depth), p.depth, panel, p.depth, side, width, rows, cols)
        for r in range(rows):
            whole = get(base, x.odd_queries + i + r) > 0.0
            for j in range(cols):
                if whole or get(base, x.odd_keys + c + j) > 0.0:
                    put(base, w.scores + (i + r) * BLOCK_KEYS + c + j, get(side, r * width + j))


@helper
def split_values(p: Any, base: Any, w: Any, x: Any, cols: int, v_width: int) -> bool:
    """Split a block of values, but for those of odd keys, which are set apart; whether there are any."""
    lines, plane = at(base, w.values), BLOCK_KEYS // 2 * v_width
    apart: bool = odd_rows(at(base, x.odd_keys), lines, v_width, cols, p.v_depth, NEAR) > 0.0
    if apart:
        for j in range(cols):
            line, odd = at(lines, j * v_width), at(base, x.odd_values + j * v_width)
            if get(base, x.odd_keys + j) > 0.0:
                scale_row(odd, line, v_width, 1.0)
                fill_row(line, 0, v_width, 0.0)
            else:
                fill_row(odd, 0, v_width, 0.0)
    split_pairs(at(base, x.values), plane, v_width, lines, v_width, cols, v_width, p.planes)
    clear_pairs(base, x.values, plane, v_width, cols, p.planes)
    return apart


@helper
def add_planes(p: Any, base: Any, w: Any, x: Any, i1: int, count: int, seen: int, wide: int, apart: bool) -> None:
    """Fade the sums of `count` rows from i1 on; add their probabilities times the values of the first `seen` keys."""
    lanes, half = lanes_of(base), BLOCK_KEYS // 2
    v_width, plane = round_up(p.v_depth, lanes), SHARE_ROWS * half
    s, shares, out = at(base, w.scores + i1 * BLOCK_KEYS), at(base, x.shares), at(base, w.out + i1 * v_width)
    fade = at(base, w.fade + i1)
    split_rows(shares, plane, half, s, BLOCK_KEYS, count, wide, wide, p.planes)
    for n in range(p.planes):
        fill_row(at(shares, n * plane), count * half, round_up(count, PAIR_ROWS) * half, 0.0)
    values, both = at(base, x.values), (seen + 1) // 2
    accumulate_planes(
        shares, half, values, v_width, out, v_width, fade, count, v_width, both, p.planes, plane, half * v_width
    )
    if apart:
        fill_row(fade, 0, count, 1.0)
        accumulate(s, BLOCK_KEYS, at(base, x.odd_values), v_width, out, v_width, fade, count, v_width, seen)
