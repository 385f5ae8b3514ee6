"""Gradients of what a `Skew` multiplies, vectors and rows by relative position, tile by tile."""

from __future__ import annotations

from functools import cache
from typing import Any

from relpos_np.kernels._cuda.forward_pass.scores import Positions, locate_skew, stage_positions
from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.launch.records import SKEW_SIZE
from relpos_np.kernels._cuda.simd.intrinsics import u32, u64
from relpos_np.kernels._cuda.simd.tile import LINE, NUMBER, TABLE, Space, Tiling, clear, combine, stage_rows


@cache
def _by_position(tiling: Tiling, *, rows_first: bool) -> Any:
    """Fill a tile [position, row], or [row, position], from one [key, row], 0 where there is no key.

    The first of its `rows` relative positions key - row is half - rows + 1.
    """
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    turns = rows * rows // threads

    def fill(shared, ds, half, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            u, w = (turn * threads + me) // rows, (turn * threads + me) % rows
            n, x = (w, u) if rows_first else (u, w)
            y = n + half - rows + 1 + x
            value = zero
            if 0 <= y < rows:
                value = ds[u32(y), x]
            shared[u, w] = value

    return inline(fill)


@cache
def _add_fragment(tiling: Tiling) -> Any:
    """Add a fragment to the channels from `channel` on of the first `end` rows at `at`, which are `step` apart."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low

    def add(work, s, at, step, end, channel, depth, thread):  # type: ignore[no-untyped-def]
        for r in range(high):
            x = (r // run) * low + thread.down + r % run
            for c in range(wide):
                d = channel + (c // 4) * 32 + thread.across + c % 4
                if x < end and d < depth:
                    work[u64(at + x * step + d)] += s[r, c]

    return inline(add)


@cache
def skew_gradients(tiling: Tiling) -> Any:
    """Add what a tile of gradients of scores, [key, row], contributes to the sums in `work` of every `Skew`."""
    rows, real = tiling.rows, tiling.dtype.type
    zero = real(0)
    by_position, by_row = _by_position(tiling, rows_first=False), _by_position(tiling, rows_first=True)
    of_positions = combine(tiling, stage_positions(tiling, turned=False), tiling.wide)
    of_vectors = combine(tiling, stage_rows(tiling, tiling.dtype.name, rows), tiling.wide)
    clear_sums, add = clear(tiling.high, tiling.wide, tiling.dtype), _add_fragment(tiling)

    def gradients(skews, ds, room, work, tables, call, back, here, careful, thread):  # type: ignore[no-untyped-def]
        # Relative positions of a block.
        spans, column = rows + call.k_len - 1, 0
        (_, right, s, a, b), _, starts = room
        space = Space(skews, right, s, a, b)
        for n in range(call.n_skews):
            x = locate_skew(starts, tables, here, call.skews + n * SKEW_SIZE, thread.me)
            vectors_to = back.skew_vectors + back.lines * column + here.own[LINE] * x.depth
            for half in range(0, 2 * rows, rows):
                # Gradients of the vectors: products with rows.
                by_position(skews, ds, half, thread.me)
                first = here.key - here.first + half - (rows - 1)
                positions = Positions(tables, starts[TABLE], first, call, x.depth)
                for channel in range(0, x.depth, rows):
                    clear_sums(s)
                    of_positions(space, positions, rows, channel, 0, zero, thread)
                    add(work, s, vectors_to, x.depth, here.last - here.first, channel, x.depth, thread)
                # Gradients of the rows: products with vectors.
                by_row(skews, ds, half, thread.me)
                past = here.key + half
                rows_to = back.skew_rows + (here.own[NUMBER] * spans + past) * back.skew_width + column
                for channel in range(0, x.depth, rows):
                    clear_sums(s)
                    of_vectors(space, x, rows, channel, careful, zero, thread)
                    add(work, s, rows_to, back.skew_width, spans - past, channel, x.depth, thread)
            column += x.depth

    return inline(gradients)
