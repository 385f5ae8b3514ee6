"""The scores of a tile, from the products of queries and keys: what terms add, and what is excluded.

Shared scores are [key, row] where `keys_first`, the columns of fragments being keys, else [row, key].
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.launch.records import ADD, ADD_SIZE, PAIRS, SKEW, SKEW_SIZE
from relpos_np.kernels._cuda.simd.intrinsics import u32, u64, wait
from relpos_np.kernels._cuda.simd.tile import (
    BATCH,
    DEPTH,
    HEAD,
    SKEWED,
    TABLE,
    Rows,
    Tiling,
    multiply,
    origin,
    stage_turned,
)


class Positions(NamedTuple):
    """Rows of a table, from relative position `first` on; `start`: where the rows begin and the map has distance 0."""

    tables: Any
    start: Any
    first: int
    call: Any
    depth: int


# What a kernel's scores are capped for: nothing, all that is added to products, or products alone.
UNCAPPED, SCORES, CONTENT = range(3)
# Marks the weight of an excluded pair, whose value may be NaN: a weight of 0 would not leave it out. No probability is
# -2, of either sign: dropout makes negative what does not survive.
EXCLUDED = -2


@cache
def stage_strip(tiling: Tiling) -> Any:
    """Fill a shared strip with the bias of a tile's 2 * rows - 1 relative positions, from key - row = 1 - rows on."""
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    turns = -(-2 * rows // threads)

    def stage(strip, data, call, here, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            m = turn * threads + me
            if m < 2 * rows:
                step = here.key - here.first + m - (rows - 1)
                value = zero
                if -call.q_len < step < call.k_len:
                    value = data[u64(call.strip + here.own[HEAD] * call.strip_head + step)]
                strip[m] = value

    return inline(stage)


@cache
def stage_positions(tiling: Tiling, *, turned: bool) -> Any:
    """Fill shared[position, channel] with the rows of `DEPTH` positions, after the first `skip`, 0 for none.

    `turned`: fill shared[channel, position] with `DEPTH` channels of as many positions as a tile has rows.
    """
    rows, threads, zero = tiling.rows, tiling.threads, tiling.dtype.type(0)
    across = DEPTH if turned else min(rows, threads)
    height = threads // across
    turns = (rows if turned else DEPTH) // height

    def stage(shared, skip, x, channel, me):  # type: ignore[no-untyped-def]
        d, n = me % across, me // across
        for turn in range(turns):
            step = x.first + skip + n + turn * height
            value = zero
            if channel + d < x.depth and -x.call.q_len < step < x.call.k_len:
                row = x.tables.maps[u64(x.start[1] + step)]
                if row >= 0:
                    value = x.tables.data[u64(x.start[0] + row * x.depth + channel + d)]
            if turned:
                shared[d, n + turn * height] = value
            else:
                shared[n + turn * height, d] = value

    return inline(stage)


def _locate_skew(starts, tables, here, at, me):  # type: ignore[no-untyped-def]
    meta = tables.meta
    if me == 0:
        starts[SKEWED, 0], starts[SKEWED, 1] = origin(meta, at, here.own[BATCH], here.own[HEAD]), meta[at + SKEW.row]
        starts[TABLE, 0] = meta[at + SKEW.weights] + here.own[HEAD] * meta[at + SKEW.weights_head]
        starts[TABLE, 1] = meta[at + SKEW.map]
    wait()
    return Rows(tables.data, starts[SKEWED], here.first, here.last, meta[at + SKEW.depth])


# Put into shared memory where the vectors and rows of a `Skew` begin; returns the vectors.
locate_skew = inline(_locate_skew)


@cache
def add_skews(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add to shared scores the products with a row for each relative position, half of a tile's positions at a time."""
    high, wide, run, low, rows = tiling.high, tiling.wide, tiling.run, tiling.low, tiling.rows
    beside, apart = tiling.beside, tiling.apart
    of_vectors = stage_turned(tiling, tiling.dtype.name)
    products = multiply(tiling, of_vectors, stage_positions(tiling, turned=True), False)

    def add(scores, room, tables, call, here, thread):  # type: ignore[no-untyped-def]
        space, _, starts = room
        for n in range(call.n_skews):
            x = locate_skew(starts, tables, here, call.skews + n * SKEW_SIZE, thread.me)
            for half in range(0, 2 * rows, rows):
                first = here.key - here.first + half - (rows - 1)
                products(space, x, Positions(tables, starts[TABLE], first, call, x.depth), thread)
                for c in range(wide):
                    for r in range(high):
                        i = (r // run) * low + thread.down + r % run
                        # The fragment's first column is that of the position half - rows + 1.
                        j = (c // beside) * apart + thread.across + c % beside + half - rows + 1 + i
                        if 0 <= j < rows:
                            u, w = (u32(j), i) if keys_first else (i, u32(j))
                            scores[u, w] += space.s[r, c]
        wait()

    return inline(add)


@cache
def scale(tiling: Tiling, *, keys_first: bool, capped: int) -> Any:
    """Multiply a fragment of products by a factor and add the strip.

    Where it is `capped` as content, it is so before the strip is added, and `slopes` gets the derivatives.
    """
    high, wide, run, low, rows = tiling.high, tiling.wide, tiling.run, tiling.low, tiling.rows
    beside, apart = tiling.beside, tiling.apart
    real, plain = tiling.dtype.type, capped != CONTENT

    def scale(s, scales, strip, biased, slopes, thread):  # type: ignore[no-untyped-def]
        down, across, factor = thread.down, thread.across, scales.scores
        if not plain:
            for c in range(wide):
                for r in range(high):
                    t = real(math.tanh(s[r, c] * factor / scales.cap))
                    slopes[r, c] = real(1) - t * t
                    s[r, c] = t * scales.cap
            factor = real(1)
        if biased:
            for c in range(wide):
                for r in range(high):
                    x, y = (r // run) * low + down + r % run, (c // beside) * apart + across + c % beside
                    s[r, c] = s[r, c] * factor + strip[(y - x if keys_first else x - y) + rows - 1]
        elif plain:
            for c in range(wide):
                for r in range(high):
                    s[r, c] *= factor

    return inline(scale)


@cache
def put(tiling: Tiling) -> Any:
    """Write a fragment of a tile to shared memory, its columns as rows there."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    beside, apart = tiling.beside, tiling.apart

    def put(shared, s, thread):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x, y = (r // run) * low + thread.down + r % run, (c // beside) * apart + thread.across + c % beside
                shared[y, x] = s[r, c]

    return inline(put)


@cache
def cap_scores(tiling: Tiling) -> Any:
    """Cap shared scores, each at the place where its thread's fragment was; `slopes` gets the derivatives."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    beside, apart = tiling.beside, tiling.apart
    real = tiling.dtype.type
    least = real(-np.inf)

    def cap(shared, scales, slopes, thread):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x, y = (r // run) * low + thread.down + r % run, (c // beside) * apart + thread.across + c % beside
                value = shared[y, x]
                t = real(math.tanh(value / scales.cap))
                slopes[r, c] = real(1) - t * t
                # -inf excludes.
                if value != least:
                    shared[y, x] = t * scales.cap

    return inline(cap)


@cache
def steepen(tiling: Tiling) -> Any:
    """Turn shared gradients of capped scores into those of what was capped; what is 0 stays 0."""
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    zero = tiling.dtype.type(0)

    def steepen(shared, slopes, thread):  # type: ignore[no-untyped-def]
        for c in range(wide):
            for r in range(high):
                x, y = (r // run) * low + thread.down + r % run, (c // 4) * 32 + thread.across + c % 4
                if shared[y, x] != zero:
                    shared[y, x] *= slopes[r, c]

    return inline(steepen)


@cache
def add_terms(tiling: Tiling, *, keys_first: bool) -> Any:
    """Add to shared scores what is given per pair, or by an index map: the summands from `begin` to `end`.

    Neighbouring threads have neighbouring keys. Only pairs of the tile are read.
    """
    rows, threads = tiling.rows, tiling.threads
    least, turns = tiling.dtype.type(-np.inf), rows * rows // threads

    def add(scores, tables, call, here, begin, end, me):  # type: ignore[no-untyped-def]
        meta = tables.meta
        for n in range(begin, end):
            at = call.adds + n * ADD_SIZE
            start = origin(meta, at, here.own[BATCH], here.own[HEAD])
            by_query, by_key, by_row = meta[at + ADD.query], meta[at + ADD.key], meta[at + ADD.row]
            lookup, map_query, map_key = meta[at + ADD.map], meta[at + ADD.map_query], meta[at + ADD.map_key]
            if lookup >= 0:
                lookup += meta[meta[at + ADD.map_batch] + here.own[BATCH]]
            for turn in range(turns):
                x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
                i, j = here.first + x, here.key + y
                u, w = (y, x) if keys_first else (x, y)
                if i < here.last and j < here.stop:
                    at_pair = start + i * by_query + j * by_key
                    if lookup < 0:
                        value = tables.data[u64(at_pair)]
                        # -inf excludes, whatever the score is.
                        if value == least:
                            scores[u, w] = least
                        else:
                            scores[u, w] += value
                    else:
                        row = tables.maps[u64(lookup + i * map_query + j * map_key)]
                        if row >= 0:
                            scores[u, w] += tables.data[u64(at_pair + row * by_row)]

    return inline(add)


def _is_ruled_out(meta, call, batch, i, j):  # type: ignore[no-untyped-def]
    out = False
    if call.ranges >= 0:
        at = call.ranges + batch * call.ranges_batch + 2 * i
        out = j < meta[u64(at)] or j >= meta[u64(at + 1)]
    # In 32 bits: a remainder of 64 takes so many registers that others are spilled.
    if call.step > 1 and u32(j - i + call.phase) % u32(call.step) != u32(0):
        out = True
    return out


# Whether a rule excludes a pair.
is_ruled_out = inline(_is_ruled_out)


@cache
def exclude(tiling: Tiling, *, keys_first: bool) -> Any:
    """Set the shared scores of excluded pairs to -inf, whatever they are: excluded vectors may hold NaN."""
    rows, threads = tiling.rows, tiling.threads
    least, turns = tiling.dtype.type(-np.inf), rows * rows // threads

    def exclude(scores, tables, call, here, me):  # type: ignore[no-untyped-def]
        meta = tables.meta
        for turn in range(turns):
            x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
            i, j = here.first + x, here.key + y
            u, w = (y, x) if keys_first else (x, y)
            distance = j - (i + call.offset)
            out = i >= here.last or j >= here.stop or distance < -call.left or distance > call.right
            if out or is_ruled_out(meta, call, here.own[BATCH], i, j):
                scores[u, w] = least
            elif call.mask >= 0:
                at_pair = origin(meta, call.mask, here.own[BATCH], here.own[HEAD])
                at_pair += i * meta[call.mask + PAIRS.query] + j * meta[call.mask + PAIRS.key]
                if tables.flags[u64(at_pair)] == 0:
                    scores[u, w] = least

    return inline(exclude)


@cache
def is_whole(tiling: Tiling) -> Any:
    """Whether no pair of a tile is excluded, as far as sizes, the band, lengths and rules say."""
    rows = tiling.rows

    def whole(call, here):  # type: ignore[no-untyped-def]
        i, j = here.first + call.offset, here.key
        whole = here.last - here.first == rows and j + rows <= here.stop and call.mask < 0
        whole = whole and j - (i + rows - 1) >= -call.left and j + rows - 1 - i <= call.right
        return whole and call.ranges < 0 and call.step <= 1

    return inline(whole)


@cache
def finish(tiling: Tiling, *, keys_first: bool, skewed: bool, capped: int) -> Any:
    """Turn a fragment of products, scaled, into complete scores in shared memory, and wait for them."""
    all_capped, cap, whole = capped == SCORES, cap_scores(tiling), is_whole(tiling)
    share_products, skews = put(tiling), add_skews(tiling, keys_first=keys_first)
    terms, leave_out = add_terms(tiling, keys_first=keys_first), exclude(tiling, keys_first=keys_first)

    def finish(scores, room, tables, call, here, scales, slopes, thread):  # type: ignore[no-untyped-def]
        share_products(scores, room.space.s, thread)
        wait()
        if skewed:
            skews(scores, room, tables, call, here, thread)
        first = 0
        if all_capped:
            first = call.n_adds - call.n_outer
            terms(scores, tables, call, here, 0, first, thread.me)
            wait()
            cap(scores, scales, slopes, thread)
            wait()
        if call.n_adds > first or not whole(call, here):
            terms(scores, tables, call, here, first, call.n_adds, thread.me)
            leave_out(scores, tables, call, here, thread.me)
            wait()

    return inline(finish)


@cache
def complete(tiling: Tiling, *, keys_first: bool, skewed: bool, capped: int) -> Any:
    """Turn a fragment of products into complete scores in shared memory, and wait for them."""
    scaled = scale(tiling, keys_first=keys_first, capped=capped)
    finished = finish(tiling, keys_first=keys_first, skewed=skewed, capped=capped)

    def complete(scores, room, tables, call, here, scales, slopes, thread):  # type: ignore[no-untyped-def]
        scaled(room.space.s, scales, room.strip, call.strip >= 0, slopes, thread)
        finished(scores, room, tables, call, here, scales, slopes, thread)

    return inline(complete)


def _survives(tables, call, here, i, j):  # type: ignore[no-untyped-def]
    at = origin(tables.meta, call.keep, here.own[BATCH], here.own[HEAD])
    at += i * tables.meta[call.keep + PAIRS.query] + j * tables.meta[call.keep + PAIRS.key]
    return tables.flags[u64(at)] != 0


# Whether dropout keeps a pair.
survives = inline(_survives)
