"""What kernels do with a tile of queries and keys, as functions that are inlined.

A block's threads stand in a grid, eight of them across. Each holds a fragment of the tile's scores, or of a result,
in registers. Columns of a fragment come in runs of four that are loaded together, rows in runs of four or fewer:

    row r of the fragment of thread (down, across) is row (r // run) * low + run * down + r % run,
    column c is column (c // 4) * 32 + 4 * across + c % 4.

Fragments of products on matrix units (`Tiling.matrix`) are as the PTX ISA has them: a warp has 16 or 32 whole rows, and
each of its threads two neighbours of every eight columns, in every eighth row.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.launch.records import BINS, BINS_SIZE, VECTORS
from relpos_np.kernels._cuda.simd.intrinsics import converters, u32, u64, wait

# Channels of operands, or rows of values, that are in shared memory at a time.
DEPTH = 16
# How many of those a loop handles per turn.
STEPS = 4
# Padding of a row of a shared tile, against bank conflicts; loads of 16 bytes stay aligned.
PAD = 4
ALIGNED = 16
# Threads of a block across the columns of a tile.
ACROSS = 8
# Registers are scarce, so a block keeps in shared memory: for each operand where it begins and its step per row, for
# the current `Skew` the same of its vectors, and where its rows begin and where its index map has distance 0;
STARTS = 6
Q, K, V, GRAD, SKEWED, TABLE = range(STARTS)
# its batch item, its head, the number of its first query (or key) among all, its own among the launch's blocks, and
# where the queries of a block of keys end.
OWN_SIZE = 5
BATCH, HEAD, LINE, NUMBER, FINAL = range(OWN_SIZE)


class Tiling(NamedTuple):
    """Sizes of a block: threads, rows (and keys) of a tile of scores, and the shape of a thread's fragment of it."""

    dtype: np.dtype[Any]
    threads: int
    rows: int
    matrix: bool = False

    @property
    def kind(self) -> Any:
        """Numba's type of the numbers that kernels compute with."""
        return types.float32 if self.dtype.itemsize == 4 else types.float64

    @property
    def high(self) -> int:
        """Rows of a fragment."""
        return self.rows * self.across // self.threads

    @property
    def wide(self) -> int:
        """Columns of a fragment of scores."""
        return self.columns(self.rows)

    @property
    def run(self) -> int:
        """Rows of a fragment that follow each other."""
        return 1 if self.matrix else min(self.high, 4)

    @property
    def low(self) -> int:
        """Rows of a tile between one run of a fragment and the next."""
        return 8 if self.matrix else self.run * self.threads // ACROSS

    @property
    def across(self) -> int:
        """Threads that share the rows of a fragment."""
        return 4 if self.matrix else ACROSS

    @property
    def beside(self) -> int:
        """Columns of a fragment that follow each other."""
        return 2 if self.matrix else 4

    @property
    def apart(self) -> int:
        """Columns of a tile between one run of columns and the next."""
        return self.beside * self.across

    def columns(self, width: int) -> int:
        """Columns of a fragment of a result with `width` of them."""
        return width // self.across


class Thread(NamedTuple):
    """A thread's number, and where its fragments begin: the first row and the first column."""

    me: int
    down: int
    across: int


class Tile(NamedTuple):
    """Queries first, ..., last - 1 and keys key, ..., stop - 1; `own` names the block's batch item and head."""

    own: Any
    first: int
    last: int
    key: int
    stop: int


class Rows(NamedTuple):
    """Vectors first, ..., end - 1 of a head; `start`: where vector 0 begins in the array, and the step to the next."""

    array: Any
    start: Any
    first: int
    end: int
    depth: int


class Space(NamedTuple):
    """Two shared tiles of operands, a fragment of sums of their products, and registers for the operands of a step."""

    left: Any
    right: Any
    s: Any
    a: Any
    b: Any


class Room(NamedTuple):
    """A space for products, the shared strip of biases, and the starts that `locate` fills."""

    space: Any
    strip: Any
    starts: Any


@cache
def thread_of(tiling: Tiling) -> Any:
    """Where in the grid the thread of a number stands."""
    run = tiling.run

    def thread(me):  # type: ignore[no-untyped-def]
        return Thread(me, u32((me // ACROSS) * run), u32((me % ACROSS) * 4))

    warps, rows = tiling.threads // 32, tiling.rows

    def of_warp(me):  # type: ignore[no-untyped-def]
        return Thread(me, u32(me // 32 * (rows // warps) + me % 32 // 4), u32(me % 4 * 2))

    return inline(of_warp if tiling.matrix else thread)


def _share(block, parts, tiles, heads):  # type: ignore[no-untyped-def]
    part, tile, line = block % parts, block // parts % tiles, block // (parts * tiles)
    return part, tile, line % heads, line // heads


# Which part of the channels, tile, head and batch item belong to a block.
share = inline(_share)


def _origin(meta, at, batch, head):  # type: ignore[no-untyped-def]
    return meta[at + VECTORS.start] + meta[meta[at + VECTORS.batch] + batch] + head * meta[at + VECTORS.head]


# Where the numbers of a batch item and head begin, for `Vectors` and all records that begin with the same fields.
origin = inline(_origin)


def _locate(starts, own, meta, call, batch, head, line, number, me):  # type: ignore[no-untyped-def]
    if me == 0:
        starts[Q, 0], starts[Q, 1] = origin(meta, call.query, batch, head), meta[call.query + VECTORS.row]
        starts[K, 0], starts[K, 1] = origin(meta, call.key, batch, head // call.k_group), meta[call.key + VECTORS.row]
        starts[V, 0] = origin(meta, call.value, batch, head // call.v_group)
        starts[V, 1] = meta[call.value + VECTORS.row]
        starts[GRAD, 0], starts[GRAD, 1] = (batch * call.heads + head) * call.q_len * call.v_dim, call.v_dim
        own[BATCH], own[HEAD], own[LINE], own[NUMBER] = batch, head, line, number
    wait()


# Fill `starts` and `own`, and wait for them.
locate = inline(_locate)


def _key_end(call, meta, batch):  # type: ignore[no-untyped-def]
    end = call.k_len
    if call.lengths >= 0:
        end = min(end, meta[call.lengths + batch])
    return end


# How many keys a batch item has.
key_end = inline(_key_end)


def _keys_of(call, meta, batch, first, last):  # type: ignore[no-untyped-def]
    key = max(0, first + call.offset - call.left)
    return key, min(key_end(call, meta, batch), last - 1 + call.offset + call.right + 1)


# The keys of queries first, ..., last - 1: the first in their band, and the end of the band or of the batch item.
keys_of = inline(_keys_of)


def held_of(tiling: Tiling, width: int) -> int:
    """Numbers per thread of a tile of `DEPTH` by `width`."""
    return DEPTH * width // tiling.threads


@cache
def stage_turned(tiling: Tiling, stored: str, *, fetched: bool = False) -> Any:
    """Fill to[base + channel, row] with `DEPTH` channels of a tile's rows, 0 where there are none.

    `fetched`: load them into registers, for `store_turned`, so that they arrive while something else is computed.
    """
    zero, height, turns = tiling.dtype.type(0), tiling.threads // DEPTH, held_of(tiling, tiling.rows)
    widen, _ = converters(stored)

    def stage(to, base, x, channel, me):  # type: ignore[no-untyped-def]
        d, n, step = me % DEPTH, me // DEPTH, x.start[1]
        where = x.start[0] + (x.first + n) * step + channel + d
        there = channel + d < x.depth
        for turn in range(turns):
            value = zero
            if there and x.first + n + turn * height < x.end:
                value = widen(x.array[u64(where)])
            if fetched:
                to[turn] = value
            else:
                to[base + d, n + turn * height] = value
            where += height * step

    return inline(stage)


@cache
def store_turned(tiling: Tiling) -> Any:
    """Write what was fetched to shared[base + channel, row]."""
    height, turns = tiling.threads // DEPTH, held_of(tiling, tiling.rows)

    def store(shared, base, held, me):  # type: ignore[no-untyped-def]
        d, row = me % DEPTH, me // DEPTH
        for turn in range(turns):
            shared[u32(base + d), row + turn * height] = held[turn]

    return inline(store)


def _parts(tiling: Tiling, width: int) -> tuple[int, int, int, int]:
    """How threads share `DEPTH` rows of `width` channels: threads across, rows and parts of a row, turns."""
    across = min(width, tiling.threads)
    return across, tiling.threads // across, width // across, held_of(tiling, width)


@cache
def stage_rows(tiling: Tiling, stored: str, width: int, *, fetched: bool = False) -> Any:
    """Fill to[row, channel] with `DEPTH` rows, after the first `skip` of a tile, 0 where there are none.

    `fetched`: load them into registers, for `store_rows`.
    """
    zero, (across, height, parts, turns) = tiling.dtype.type(0), _parts(tiling, width)
    widen, _ = converters(stored)

    def stage(to, skip, x, channel, me):  # type: ignore[no-untyped-def]
        d, n, step = me % across, me // across, x.start[1]
        row = x.first + skip + n
        where = x.start[0] + row * step + channel + d
        for turn in range(turns):
            # Part of a row, or whole rows.
            more, further = turn % parts * across, turn // parts * height
            value = zero
            if channel + d + more < x.depth and row + further < x.end:
                value = widen(x.array[u64(where + more + further * step)])
            if fetched:
                to[turn] = value
            else:
                to[n + further, d + more] = value

    return inline(stage)


@cache
def store_rows(tiling: Tiling, width: int) -> Any:
    """Write what was fetched to shared[base + row, channel]."""
    across, height, parts, turns = _parts(tiling, width)

    def store(shared, base, held, me):  # type: ignore[no-untyped-def]
        d, row = me % across, me // across
        for turn in range(turns):
            shared[u32(base + row + turn // parts * height), d + turn % parts * across] = held[turn]

    return inline(store)


@cache
def clear(high: int, wide: int, dtype: np.dtype[Any]) -> Any:
    """Set a fragment to 0."""
    zero = dtype.type(0)

    def clear(s):  # type: ignore[no-untyped-def]
        for r in range(high):
            for c in range(wide):
                s[r, c] = zero

    return inline(clear)


@cache
def outer(tiling: Tiling, columns: int) -> Any:
    """Add to a fragment the outer products of `STEPS` rows of the left tile, from i on, and the right, from j on."""
    high, run, low, beside, apart = tiling.high, tiling.run, tiling.low, tiling.beside, tiling.apart

    def one(space, i, j, thread):  # type: ignore[no-untyped-def]
        left, right, s, a, b = space
        for r in range(high):
            a[r] = left[i, (r // run) * low + thread.down + r % run]
        for c in range(columns):
            b[c] = right[j, (c // beside) * apart + thread.across + c % beside]
        for r in range(high):
            for c in range(columns):
                s[r, c] += a[r] * b[c]

    step = inline(one)

    # The compiler unrolls no loop of this size by itself.
    def add(space, i, j, thread):  # type: ignore[no-untyped-def]
        step(space, u32(i), u32(j), thread)
        step(space, u32(i + 1), u32(j + 1), thread)
        step(space, u32(i + 2), u32(j + 2), thread)
        step(space, u32(i + 3), u32(j + 3), thread)

    return inline(add)


@cache
def accumulate(tiling: Tiling, columns: int) -> Any:
    """The same for `DEPTH` rows.

    If `careful`, numbers of the left tile that equal `skipped` are left out: what they stand for may be NaN.
    """
    high, run, low = tiling.high, tiling.run, tiling.low
    add = outer(tiling, columns)

    def accumulate(space, i, j, careful, skipped, thread):  # type: ignore[no-untyped-def]
        left, right, s, a, b = space
        if careful != 0:
            for n in range(DEPTH):
                for r in range(high):
                    a[r] = left[u32(i + n), (r // run) * low + thread.down + r % run]
                for c in range(columns):
                    b[c] = right[u32(j + n), (c // 4) * 32 + thread.across + c % 4]
                for r in range(high):
                    if a[r] != skipped:
                        for c in range(columns):
                            s[r, c] += a[r] * b[c]
        else:
            for n in range(0, DEPTH, STEPS):
                add(space, i + n, j + n, thread)

    return inline(accumulate)


@cache
def multiply(tiling: Tiling, stage_left: Any, stage_right: Any, whole: bool) -> Any:
    """Fill a fragment with the products of the vectors x and y, staged `DEPTH` channels at a time.

    `whole`: the number of channels is a multiple of `DEPTH`.
    """
    zero, add = clear(tiling.high, tiling.wide, tiling.dtype), outer(tiling, tiling.wide)

    def multiply(space, x, y, thread):  # type: ignore[no-untyped-def]
        zero(space.s)
        for channel in range(0, x.depth, DEPTH):
            stage_left(space.left, 0, x, channel, thread.me)
            stage_right(space.right, 0, y, channel, thread.me)
            wait()
            for d in range(0, DEPTH if whole else min(DEPTH, x.depth - channel), STEPS):
                add(space, d, d, thread)
            wait()

    return inline(multiply)


@cache
def combine(tiling: Tiling, stage: Any, columns: int) -> Any:
    """Add to a fragment `size` rows of x, staged `DEPTH` at a time, times the weights in the rows of the left tile."""
    add = accumulate(tiling, columns)

    def combine(space, x, size, channel, careful, skipped, thread):  # type: ignore[no-untyped-def]
        for n in range(0, size, DEPTH):
            stage(space.right, n, x, channel, thread.me)
            wait()
            add(space, n, 0, careful, skipped, thread)
            wait()

    return inline(combine)


@cache
def add_bins(tiling: Tiling, *, by_query: bool, skipped: float, survivors: bool = False) -> Any:
    """Have a thread add one column of a tile, a query's or a key's, to the bins of its terms, in order.

    Numbers that equal `skipped` are left out. `survivors`: add only those above 0, times `kept`.
    """
    rows, zero, skip = tiling.rows, tiling.dtype.type(0), tiling.dtype.type(skipped)

    def add(shared, work, own, tables, terms, n_terms, here, kept, me):  # type: ignore[no-untyped-def]
        meta, maps = tables.meta, tables.maps
        for n in range(n_terms):
            at = terms + n * BINS_SIZE
            lookup = meta[at + BINS.map] + meta[meta[at + BINS.map_batch] + here.own[BATCH]]
            lookup += here.first * meta[at + BINS.map_query] + here.key * meta[at + BINS.map_key]
            if by_query:
                size, step, aside = here.stop - here.key, meta[at + BINS.map_key], meta[at + BINS.map_query]
            else:
                size, step, aside = here.last - here.first, meta[at + BINS.map_query], meta[at + BINS.map_key]
            lookup += me * aside
            to = own + meta[at + BINS.bin]
            # Neighbours often share a row: its sum is written when it ends.
            row, held = -1, zero
            for y in range(min(rows, size)):
                value = shared[y, me]
                if value != skip:
                    found = maps[u64(lookup + y * step)]
                    if found != row:
                        if row >= 0:
                            work[u64(to + row)] += held
                        row, held = found, zero
                    if survivors:
                        value = zero if value < zero else value * kept
                    held += value
            if row >= 0:
                work[u64(to + row)] += held

    return inline(add)
