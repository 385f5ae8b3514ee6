"""What backward kernels do with a tile of scores beyond `tile` and `scores`, as functions that are inlined.

A tile of probabilities holds p where a pair survives dropout, -p where it does not, and `EXCLUDED`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from relpos_np.kernels._cuda.forward_pass.scores import EXCLUDED, complete, stage_strip
from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.launch.records import ADD, ADD_SIZE
from relpos_np.kernels._cuda.simd.intrinsics import u64
from relpos_np.kernels._cuda.simd.tile import ACROSS, BATCH, DEPTH, HEAD, Tiling, multiply, origin, stage_turned


@cache
def make_scores(
    tiling: Tiling, formats: tuple[str, str], depth: int, *, keys_first: bool, skewed: bool, capped: int
) -> Any:
    """Fill shared memory with the scores of a tile, and wait for them. x: the rows of fragments, y: the columns."""
    left, right = (stage_turned(tiling, stored) for stored in formats)
    products, strip_of = multiply(tiling, left, right, depth % DEPTH == 0), stage_strip(tiling)
    finish = complete(tiling, keys_first=keys_first, skewed=skewed, capped=capped)

    def make(scores, room, x, y, tables, call, here, scales, slopes, thread):  # type: ignore[no-untyped-def]
        if call.strip >= 0:
            strip_of(room.strip, tables.data, call, here, thread.me)
        products(room.space, x, y, thread)
        finish(scores, room, tables, call, here, scales, slopes, thread)

    return inline(make)


@cache
def make_ds(tiling: Tiling, formats: tuple[str, str], *, keys_first: bool) -> Any:
    """Replace shared probabilities by gradients of the scores. x, y: the output's gradient and values, or reverse."""
    left, right = (stage_turned(tiling, stored) for stored in formats)
    products = multiply(tiling, left, right, False)
    gather, turn = add_gathered(tiling, keys_first=keys_first), differentiate(tiling, keys_first=keys_first)

    def make(ps, deltas, space, x, y, tables, back, here, kept, thread):  # type: ignore[no-untyped-def]
        products(space, x, y, thread)
        if back.n_gathered > 0:
            gather(space.s, tables, back, here, thread)
        turn(ps, space.s, deltas, kept, thread)

    return inline(make)


@cache
def add_gathered(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add to a fragment what value terms say of its pairs: products with the rows that index maps give."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low

    def add(s, tables, back, here, thread):  # type: ignore[no-untyped-def]
        meta, down, across = tables.meta, thread.down, thread.across
        for n in range(back.n_gathered):
            at = back.gathered + n * ADD_SIZE
            start = origin(meta, at, here.own[BATCH], here.own[HEAD])
            by_query, by_row = meta[at + ADD.query], meta[at + ADD.row]
            lookup = meta[at + ADD.map] + meta[meta[at + ADD.map_batch] + here.own[BATCH]]
            map_query, map_key = meta[at + ADD.map_query], meta[at + ADD.map_key]
            for c in range(wide):
                for r in range(high):
                    x, y = (r // run) * low + down + r % run, (c // 4) * 32 + across + c % 4
                    i, j = (here.first + x, here.key + y) if keys_first else (here.first + y, here.key + x)
                    if i < here.last and j < here.stop:
                        row = tables.maps[u64(lookup + i * map_query + j * map_key)]
                        if row >= 0:
                            s[r, c] += tables.data[u64(start + i * by_query + row * by_row)]

    return inline(add)


@cache
def differentiate(tiling: Tiling, *, keys_first: bool) -> Any:
    """Replace a tile's probabilities by the gradients of its scores; a fragment holds those of the probabilities."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    zero, excluded = tiling.dtype.type(0), EXCLUDED

    def differentiate(shared, s, deltas, kept, thread):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x, y = (r // run) * low + thread.down + r % run, (c // 4) * 32 + thread.across + c % 4
                delta = deltas[x if keys_first else y]
                p = shared[y, x]
                ds = zero
                if p != excluded:
                    ds = p * delta if p < zero else p * (s[r, c] * kept - delta)
                shared[y, x] = ds

    return inline(differentiate)


@cache
def wipe(tiling: Tiling) -> Any:
    """Have all threads write zeros."""
    threads, zero = tiling.threads, tiling.dtype.type(0)

    def wipe(work, at, size, me):  # type: ignore[no-untyped-def]
        n = me
        while n < size:
            work[u64(at + n)] = zero
            n += threads

    return inline(wipe)


@cache
def write(tiling: Tiling, width: int) -> Any:
    """Write a fragment of `width` channels to rows from `line` on, times a factor."""
    high, run, low, columns = tiling.high, tiling.run, tiling.low, width // ACROSS

    def write(out, s, line, size, channel, depth, factor, thread):  # type: ignore[no-untyped-def]
        for r in range(high):
            x = (r // run) * low + thread.down + r % run
            for c in range(columns):
                d = channel + (c // 4) * 32 + thread.across + c % 4
                if x < size and d < depth:
                    out[u64((line + x) * depth + d)] = s[r, c] * factor

    return inline(write)


@cache
def add_diagonals(tiling: Tiling) -> Any:
    """Add each diagonal of a tile [key, row] to sums by relative position, from key - row = 1 - rows on."""
    rows, zero = tiling.rows, tiling.dtype.type(0)

    def add(shared, work, at, size, me):  # type: ignore[no-untyped-def]
        if me < rows:
            # Two diagonals that have together one key for each row. Threads begin at different rows, and so at
            # different banks of the memory.
            lower, upper = zero, zero
            for n in range(rows):
                x = (n + me) % rows
                y = x + me + 1
                if y < rows:
                    upper += shared[y, x]
                else:
                    lower += shared[y - rows, x]
            if me < size:
                work[u64(at + me)] += lower
            if me + rows < size:
                work[u64(at + me + rows)] += upper

    return inline(add)
