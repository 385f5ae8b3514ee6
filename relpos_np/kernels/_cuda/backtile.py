"""What backward kernels do with a tile of scores beside what `tile` says, as functions that are inlined.

A tile of probabilities holds p where a pair survives dropout, -p where it does not, and `EXCLUDED`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from relpos_np.kernels._cuda.attend import VALUE
from relpos_np.kernels._cuda.device import inline
from relpos_np.kernels._cuda.intrinsics import count, place
from relpos_np.kernels._cuda.tile import ADD_SIZE, DEPTH, Tiling

# No probability, of either sign.
EXCLUDED = -2
VALUE_SIZE = len(VALUE)


@cache
def clear(tiling: Tiling) -> Any:
    """Have all threads write zeros."""
    threads, zero = tiling.threads, tiling.dtype.type(0)

    def clear(work, at, size, me):  # type: ignore[no-untyped-def]
        n = me
        while n < size:
            work[place(at + n)] = zero
            n += threads

    return inline(clear)


@cache
def gather(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add to a fragment what value terms say of its pairs: products with the rows that index maps give."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low

    def gather(s, data, index, meta, terms, n_terms, where, down, across):  # type: ignore[no-untyped-def]
        batch, head, first, last, key, stop = where
        for n in range(n_terms):
            at = terms + n * ADD_SIZE
            start = meta[at] + meta[meta[at + 1] + batch] + head * meta[at + 2]
            by_query, by_row = meta[at + 3], meta[at + 5]
            lookup = meta[at + 6] + meta[meta[at + 7] + batch]
            map_query, map_key = meta[at + 8], meta[at + 9]
            for c in range(wide):
                for r in range(high):
                    x, y = (r // run) * low + down + r % run, (c // 4) * 32 + across + c % 4
                    i, j = (first + x, key + y) if keys_first else (first + y, key + x)
                    if i < last and j < stop:
                        row = index[place(lookup + i * map_query + j * map_key)]
                        if row >= 0:
                            s[r, c] += data[place(start + i * by_query + row * by_row)]

    return inline(gather)


@cache
def differentiate(tiling: Tiling, *, keys_first: bool) -> Any:
    """Replace a tile's probabilities by the gradients of its scores; a fragment holds those of the probabilities."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    zero, excluded = tiling.dtype.type(0), EXCLUDED

    def differentiate(shared, s, deltas, keep_scale, down, across):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x, y = (r // run) * low + down + r % run, (c // 4) * 32 + across + c % 4
                delta = deltas[x if keys_first else y]
                p = shared[y, x]
                ds = zero
                if p != excluded:
                    ds = p * delta if p < zero else p * (s[r, c] * keep_scale - delta)
                shared[y, x] = ds

    return inline(differentiate)


@cache
def sums(tiling: Tiling, *, by_query: bool, probabilities: bool) -> Any:
    """Have a thread add one column of a tile to its bins: that of a query (or key), keys (or queries) in their order.

    Of probabilities those that survive dropout are added, times a factor; else the tile holds gradients of scores.
    """
    zero, factor = tiling.dtype.type(0), probabilities
    skipped = tiling.dtype.type(EXCLUDED if probabilities else 0)

    def add(  # type: ignore[no-untyped-def]
        shared, work, own, index, meta, terms, n_terms, batch, mine, other, size, keep_scale, me
    ):
        for n in range(n_terms):
            at = terms + n * VALUE_SIZE
            map_query, map_key = meta[at + 6], meta[at + 7]
            lookup = meta[at + 4] + meta[meta[at + 5] + batch]
            if by_query:
                lookup += mine * map_query + other * map_key
            else:
                lookup += mine * map_key + other * map_query
            to = own + meta[at + 2]
            # Neighbours often share a row: it is written when it ends.
            row, held = -1, zero
            for y in range(size):
                value = shared[y, me]
                if value != skipped:
                    here = index[place(lookup + y * (map_key if by_query else map_query))]
                    if here != row:
                        if row >= 0:
                            work[place(to + row)] += held
                        row, held = here, zero
                    if factor:
                        value = zero if value < zero else value * keep_scale
                    held += value
            if row >= 0:
                work[place(to + row)] += held

    return inline(add)


@cache
def diagonals(tiling: Tiling) -> Any:
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
                work[place(at + me)] += lower
            if me + rows < size:
                work[place(at + me + rows)] += upper

    return inline(add)


@cache
def skew(tiling: Tiling, *, rows_first: bool) -> Any:
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
                value = ds[count(y), x]
            shared[u, w] = value

    return inline(fill)


@cache
def stage_mapped_rows(tiling: Tiling) -> Any:
    """Fill shared[n, channel] with the table rows of `DEPTH` relative positions from `start` on, 0 for none."""
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    across = min(rows, threads)
    height = threads // across
    turns = DEPTH // height

    def stage(shared, weights, at, index, lookup, start, call, channel, depth, me):  # type: ignore[no-untyped-def]
        d, n = me % across, me // across
        for turn in range(turns):
            step = start + n + turn * height
            value = zero
            if channel + d < depth and -call.q_len < step < call.k_len:
                row = index[place(lookup + step)]
                if row >= 0:
                    value = weights[place(at + row * depth + channel + d)]
            shared[n + turn * height, d] = value

    return inline(stage)


@cache
def collect(tiling: Tiling) -> Any:
    """Add a fragment to numbers in rows of `step`, of which there are `end` and in each `depth` from `channel` on."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low

    def add(work, s, at, step, end, channel, depth, down, across):  # type: ignore[no-untyped-def]
        for r in range(high):
            x = (r // run) * low + down + r % run
            for c in range(wide):
                d = channel + (c // 4) * 32 + across + c % 4
                if x < end and d < depth:
                    work[place(at + x * step + d)] += s[r, c]

    return inline(add)
