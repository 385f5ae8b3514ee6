"""What kernels do with a tile of queries and keys, as functions that are inlined.

A block's threads stand in a grid, eight of them across. Each holds a fragment of the tile's scores, or of a result,
in registers. Columns of a fragment come in runs of four that are loaded together, rows in runs of four or fewer:

    row r of the fragment of thread (down, across) is row (r // run) * low + run * down + r % run,
    column c is column (c // 4) * 32 + 4 * across + c % 4.

Functions take the thread's number `me`, and `down` and `across` times the lengths of runs. Waiting for other threads is
the kernels' own business.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from relpos_np.kernels._cuda.device import inline
from relpos_np.kernels._cuda.intrinsics import converters, count, place

# Channels of operands, or rows of values, that are in shared memory at a time.
DEPTH = 16
# How many of those a loop takes in a turn.
STEPS = 4
# What is added to a row of a shared tile against bank conflicts; fragments' loads of 16 bytes stay aligned.
PAD = 4
ALIGNED = 16
# Threads of a block across the columns of a tile.
ACROSS = 8

# One summand of the scores: where its numbers are (a start, the table of starts per batch item, and steps per head,
# query, key and row), and where its index map is (the same; a start of -1: there is none).
ADD = ("data", "data_batch", "head", "query", "key", "row", "index", "index_batch", "index_query", "index_key")
# A product of query vectors with a row for each relative position, made tile by tile: the vectors (a start, the table
# of starts per batch item, and steps per head and query), the rows (a start and a step per head), their length, and
# where the index map has the row of distance 0.
SKEW = ("query", "query_batch", "head", "row", "weights", "weights_head", "depth", "index")
# Something with a byte per pair: the bool mask, the survivors of dropout.
PAIRS = ("start", "batch", "head", "query", "key")
ADD_SIZE = len(ADD)


class Call(NamedTuple):
    """The integers of one call. Starts are places in `meta` or `data`, and -1 where there is nothing."""

    heads: int
    q_len: int
    k_len: int
    k_group: int
    v_group: int
    offset: int
    left: int
    right: int
    # Starts per batch item and steps per head and row of queries, keys and values.
    strides: int
    lengths: int
    # A bias per relative position: its start for distance 0, and its step per head.
    strip: int
    strip_head: int
    skews: int
    n_skews: int
    adds: int
    n_adds: int
    mask: int
    keep: int
    # Value terms, all their rows, and value channels.
    values: int
    n_values: int
    n_bins: int
    v_dim: int
    wants_lse: int


class Where(NamedTuple):
    """Which tile: queries from first to before last, keys from key to before stop."""

    batch: int
    head: int
    first: int
    last: int
    key: int
    stop: int


class Tiling(NamedTuple):
    """Sizes of a block: threads, rows (and keys) of a tile of scores, and the shape of a thread's fragment of it."""

    dtype: np.dtype[Any]
    threads: int
    rows: int

    @property
    def kind(self) -> Any:
        """Numba's type of the numbers that are computed with."""
        return types.float32 if self.dtype.itemsize == 4 else types.float64

    @property
    def high(self) -> int:
        """Rows of a fragment."""
        return self.rows * ACROSS // self.threads

    @property
    def wide(self) -> int:
        """Columns of a fragment of scores."""
        return self.rows // ACROSS

    @property
    def run(self) -> int:
        """Rows of a fragment that follow each other."""
        return min(self.high, 4)

    @property
    def low(self) -> int:
        """Rows of a tile between one run of a fragment and the next."""
        return self.run * self.threads // ACROSS


@cache
def stage_turned(tiling: Tiling, stored: str) -> Any:
    """Fill shared[base + channel, row] with `DEPTH` channels of a tile's rows, 0 where there are none."""
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    height = threads // DEPTH
    turns = rows // height
    widen, _ = converters(stored)

    def stage(shared, base, x, at, step, first, end, channel, depth, me):  # type: ignore[no-untyped-def]
        d, row = me % DEPTH, me // DEPTH
        where = at + (first + row) * step + channel + d
        there = channel + d < depth
        for turn in range(turns):
            value = zero
            if there and first + row + turn * height < end:
                value = widen(x[place(where)])
            shared[base + d, row + turn * height] = value
            where += height * step

    return inline(stage)


def held_of(tiling: Tiling, width: int) -> int:
    """Numbers that a thread fetches of a tile of `DEPTH` by so many."""
    return DEPTH * width // tiling.threads


@cache
def fetch_turned(tiling: Tiling, stored: str) -> Any:
    """Load into registers what `stage_turned` writes, so that it arrives while something else is computed."""
    threads, zero = tiling.threads, tiling.dtype.type(0)
    height, turns = threads // DEPTH, held_of(tiling, tiling.rows)
    widen, _ = converters(stored)

    def fetch(held, x, at, step, first, end, channel, depth, me):  # type: ignore[no-untyped-def]
        d, row = me % DEPTH, me // DEPTH
        where = at + (first + row) * step + channel + d
        there = channel + d < depth
        for turn in range(turns):
            held[turn] = zero
            if there and first + row + turn * height < end:
                held[turn] = widen(x[place(where)])
            where += height * step

    return inline(fetch)


@cache
def drop_turned(tiling: Tiling) -> Any:
    """Write what was fetched to shared[base + channel, row]."""
    height, turns = tiling.threads // DEPTH, held_of(tiling, tiling.rows)

    def drop(shared, base, held, me):  # type: ignore[no-untyped-def]
        d, row = me % DEPTH, me // DEPTH
        for turn in range(turns):
            shared[count(base + d), row + turn * height] = held[turn]

    return inline(drop)


@cache
def fetch_rows(tiling: Tiling, stored: str, width: int) -> Any:
    """Load into registers what `stage_rows` writes."""
    threads, zero = tiling.threads, tiling.dtype.type(0)
    across = min(width, threads)
    height, parts, turns = threads // across, width // across, held_of(tiling, width)
    widen, _ = converters(stored)

    def fetch(held, x, at, step, first, end, channel, depth, me):  # type: ignore[no-untyped-def]
        d, row = me % across, me // across
        where = at + (first + row) * step + channel + d
        for turn in range(turns):
            # Part of a row, or whole rows.
            more, skip = turn % parts * across, turn // parts * height
            held[turn] = zero
            if channel + d + more < depth and first + row + skip < end:
                held[turn] = widen(x[place(where + more + skip * step)])

    return inline(fetch)


@cache
def drop_rows(tiling: Tiling, width: int) -> Any:
    """Write what was fetched to shared[base + row, channel]."""
    across = min(width, tiling.threads)
    height, parts, turns = tiling.threads // across, width // across, held_of(tiling, width)

    def drop(shared, base, held, me):  # type: ignore[no-untyped-def]
        d, row = me % across, me // across
        for turn in range(turns):
            shared[count(base + row + turn // parts * height), d + turn % parts * across] = held[turn]

    return inline(drop)


@cache
def stage_rows(tiling: Tiling, stored: str, width: int) -> Any:
    """Fill shared[row, channel] from `DEPTH` rows of vectors, 0 where there are none."""
    threads, zero = tiling.threads, tiling.dtype.type(0)
    across = min(width, threads)
    height, parts = threads // across, width // across
    turns = DEPTH * parts // height
    widen, _ = converters(stored)

    def stage(shared, x, at, step, first, end, channel, depth, me):  # type: ignore[no-untyped-def]
        d, row = me % across, me // across
        where = at + (first + row) * step + channel + d
        for turn in range(turns):
            # Part of a row, or whole rows.
            more, skip = turn % parts * across, turn // parts * height
            value = zero
            if channel + d + more < depth and first + row + skip < end:
                value = widen(x[place(where + more + skip * step)])
            shared[row + skip, d + more] = value

    return inline(stage)


@cache
def outer(tiling: Tiling, columns: int) -> Any:
    """Add to a fragment the outer products of `STEPS` rows of one shared tile, from i on, and of another, from j on."""
    high, run, low = tiling.high, tiling.run, tiling.low

    def one(total, left, i, right, j, a, b, down, across):  # type: ignore[no-untyped-def]
        for r in range(high):
            a[r] = left[i, (r // run) * low + down + r % run]
        for c in range(columns):
            b[c] = right[j, (c // 4) * 32 + across + c % 4]
        for r in range(high):
            for c in range(columns):
                total[r, c] += a[r] * b[c]

    step = inline(one)

    # The compiler unrolls no loop of this size by itself.
    def add(total, left, i, right, j, a, b, down, across):  # type: ignore[no-untyped-def]
        step(total, left, count(i), right, count(j), a, b, down, across)
        step(total, left, count(i + 1), right, count(j + 1), a, b, down, across)
        step(total, left, count(i + 2), right, count(j + 2), a, b, down, across)
        step(total, left, count(i + 3), right, count(j + 3), a, b, down, across)

    return inline(add)


@cache
def accumulate(tiling: Tiling, columns: int) -> Any:
    """Add to a fragment the outer products of `DEPTH` rows of two shared tiles.

    If it must be careful, nothing is multiplied with the factor `skipped`: what is excluded may hold NaN.
    """
    high, run, low = tiling.high, tiling.run, tiling.low
    add = outer(tiling, columns)

    def accumulate(total, left, i, right, j, careful, skipped, a, b, down, across):  # type: ignore[no-untyped-def]
        if careful != 0:
            for n in range(DEPTH):
                for r in range(high):
                    a[r] = left[count(i + n), (r // run) * low + down + r % run]
                for c in range(columns):
                    b[c] = right[count(j + n), (c // 4) * 32 + across + c % 4]
                for r in range(high):
                    if a[r] != skipped:
                        for c in range(columns):
                            total[r, c] += a[r] * b[c]
        else:
            for n in range(0, DEPTH, STEPS):
                add(total, left, i + n, right, j + n, a, b, down, across)

    return inline(accumulate)


@cache
def finish(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add to shared scores what terms say, and give those that are excluded -inf: [key, row] or [row, key].

    Neighbouring threads have neighbouring keys. Nothing is read that belongs to no pair of the tile, and what is
    excluded is selected away: it may hold NaN.
    """
    rows, threads = tiling.rows, tiling.threads
    least, turns = tiling.dtype.type(-np.inf), rows * rows // threads

    def finish(scores, data, index, flags, meta, call, where, me):  # type: ignore[no-untyped-def]
        batch, head, first, last, key, stop = where
        for n in range(call.n_adds):
            at = call.adds + n * ADD_SIZE
            start = meta[at] + meta[meta[at + 1] + batch] + head * meta[at + 2]
            by_query, by_key, by_row, lookup = meta[at + 3], meta[at + 4], meta[at + 5], meta[at + 6]
            map_query, map_key = meta[at + 8], meta[at + 9]
            if lookup >= 0:
                lookup += meta[meta[at + 7] + batch]
            for turn in range(turns):
                x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
                i, j = first + x, key + y
                u, w = (y, x) if keys_first else (x, y)
                if i < last and j < stop:
                    at_pair = start + i * by_query + j * by_key
                    if lookup < 0:
                        value = data[place(at_pair)]
                        # -inf excludes, whatever the score is.
                        if value == least:
                            scores[u, w] = least
                        else:
                            scores[u, w] += value
                    else:
                        row = index[place(lookup + i * map_query + j * map_key)]
                        if row >= 0:
                            scores[u, w] += data[place(at_pair + row * by_row)]
        for turn in range(turns):
            x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
            i, j = first + x, key + y
            u, w = (y, x) if keys_first else (x, y)
            distance = j - (i + call.offset)
            if i >= last or j >= stop or distance < -call.left or distance > call.right:
                scores[u, w] = least
            elif call.mask >= 0:
                at_pair = meta[call.mask] + meta[meta[call.mask + 1] + batch] + head * meta[call.mask + 2]
                if flags[place(at_pair + i * meta[call.mask + 3] + j * meta[call.mask + 4])] == 0:
                    scores[u, w] = least

    return inline(finish)


@cache
def stage_strip(tiling: Tiling) -> Any:
    """Fill a shared strip with the bias of a tile's 2 * rows - 1 relative positions, from key - row = 1 - rows on."""
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    turns = -(-2 * rows // threads)

    def stage(strip, data, call, where, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            m = turn * threads + me
            if m < 2 * rows:
                step = where.key - where.first + m - (rows - 1)
                value = zero
                if -call.q_len < step < call.k_len:
                    value = data[place(call.strip + where.head * call.strip_head + step)]
                strip[m] = value

    return inline(stage)


@cache
def stage_mapped(tiling: Tiling) -> Any:
    """Fill shared[channel, n] with the table rows of relative positions from `start` on: 0 where there is none."""
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    height = threads // DEPTH
    turns = rows // height

    def stage(shared, weights, at, index, lookup, start, call, channel, depth, me):  # type: ignore[no-untyped-def]
        d, n = me % DEPTH, me // DEPTH
        for turn in range(turns):
            step = start + n + turn * height
            value = zero
            if channel + d < depth and -call.q_len < step < call.k_len:
                row = index[place(lookup + step)]
                if row >= 0:
                    value = weights[place(at + row * depth + channel + d)]
            shared[d, n + turn * height] = value

    return inline(stage)


@cache
def add_skewed(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add products with relative positions to shared scores, [key, row] or [row, key].

    The first column of the fragment is that of the position half - rows + 1.
    """
    high, wide, run, low, rows = tiling.high, tiling.wide, tiling.run, tiling.low, tiling.rows

    def add(scores, s, half, down, across):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x = (r // run) * low + down + r % run
                y = (c // 4) * 32 + across + c % 4 + half - rows + 1 + x
                if 0 <= y < rows:
                    u, w = (count(y), x) if keys_first else (x, count(y))
                    scores[u, w] += s[r, c]

    return inline(add)


@cache
def put(tiling: Tiling, *, keys_first: bool) -> Any:
    """Write a fragment of a tile to shared memory, its columns as rows there, times a factor and plus the strip.

    keys_first: the fragment's columns are keys, else they are queries.
    """
    high, wide, run, low, rows = tiling.high, tiling.wide, tiling.run, tiling.low, tiling.rows

    def put(shared, s, factor, strip, biased, down, across):  # type: ignore[no-untyped-def]
        if biased:
            for c in range(wide):
                for r in range(high):
                    x, y = (r // run) * low + down + r % run, (c // 4) * 32 + across + c % 4
                    s[r, c] = s[r, c] * factor + strip[(y - x if keys_first else x - y) + rows - 1]
        else:
            for c in range(wide):
                for r in range(high):
                    s[r, c] *= factor
        for c in range(wide):
            for r in range(high):
                shared[(c // 4) * 32 + across + c % 4, (r // run) * low + down + r % run] = s[r, c]

    return inline(put)
