"""What the decoding kernel does with a tile of keys, as functions that are inlined."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types

from relpos_np.kernels._cuda.forward_pass.row_sums import write_lse
from relpos_np.kernels._cuda.forward_pass.scores import EXCLUDED, is_ruled_out
from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.launch.records import ADD, ADD_SIZE, PAIRS, VECTORS
from relpos_np.kernels._cuda.simd.intrinsics import converters, neighbours, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.simd.tile import PAD, origin

# Bytes of shared memory that every device has for a block.
MOST_SHARED = 48 << 10
# Threads that share a row's keys when they find its maximum and its sum.
LANES = 8
# Elements of a row of a tile that a thread loads from shared memory at a time.
STEP = 4
# Such elements that a loop takes in a turn.
TURN = 4 * STEP
# Elements that a thread loads before it stores any.
HELD = 32


class Block(NamedTuple):
    """Sizes of a block: its dtype, threads, rows and head size, and the elements of one load of keys or of values."""

    dtype: np.dtype[Any]
    threads: int
    rows: int
    depth: int
    k_word: int
    v_word: int

    @property
    def kind(self) -> Any:
        """Numba's type of the numbers that are computed with."""
        return types.float32 if self.dtype.itemsize == 4 else types.float64

    @property
    def chunk(self) -> int:
        """Channels of keys that are in shared memory at a time."""
        return 16 if self.dtype.itemsize == 8 and self.threads > 64 else 32

    @property
    def few(self) -> int:
        """Values that are in shared memory at a time."""
        return min(self.chunk, self.threads)

    @property
    def wide(self) -> int:
        """The head size, rounded up to whole turns."""
        return -(-self.depth // TURN) * TURN

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements of shared memory: queries, a tile of keys or values, scores, a number for each row and lane."""
        tile = max(self.threads * (self.chunk + PAD), self.few * (self.threads + PAD))
        return self.rows * self.wide, tile, self.rows * (self.threads + PAD), self.rows * LANES

    @property
    def fits(self) -> bool:
        """Whether shared memory is large enough."""
        *most, lanes = self.sizes
        return (sum(most) + 2 * lanes + 2 * self.rows) * self.dtype.itemsize <= MOST_SHARED


class Own(NamedTuple):
    """What a block computes: a batch item, its first head, its rows, and the number of its first query among all."""

    batch: int
    head: int
    rows: int
    line: int


class Vector(NamedTuple):
    """Keys or values of a head: the array, where they begin, and the step to the next."""

    array: Any
    start: int
    step: int


class Space(NamedTuple):
    """The arrays that a block works in; the kernel says what they hold."""

    qs: Any
    tile: Any
    highs: Any
    sums: Any
    bases: Any
    factors: Any
    s: Any
    b: Any
    held: Any


@cache
def _fetch(stored: str, word: int) -> Any:
    """Widen the `word` elements of one load, from index `at` on, into `held` from n on."""
    widen, _ = converters(stored)
    load: Any = neighbours(word) if word > 1 else None

    def one(held, n, x, at):  # type: ignore[no-untyped-def]
        held[n] = widen(x[u64(at)])

    def two(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b = load(x, u64(at))
        held[n], held[n + 1] = widen(a), widen(b)

    def four(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b, c, d = load(x, u64(at))
        held[n], held[n + 1], held[n + 2], held[n + 3] = widen(a), widen(b), widen(c), widen(d)

    def eight(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b, c, d, e, f, g, h = load(x, u64(at))
        held[n], held[n + 1], held[n + 2], held[n + 3] = widen(a), widen(b), widen(c), widen(d)
        held[n + 4], held[n + 5], held[n + 6], held[n + 7] = widen(e), widen(f), widen(g), widen(h)

    return inline({1: one, 2: two, 4: four, 8: eight}[word])


@cache
def _stage(block: Block, stored: str, word: int, rows: int, width: int) -> Any:
    """Fill shared[row, channel] with `rows` vectors of `width` channels, 0 where there are none.

    Neighbouring threads read neighbouring words. A thread issues several loads before it stores any.
    """
    across = width // word
    height, stride = block.threads // across, width + PAD
    turns = rows // height
    loads = min(turns, 8, HELD // word)
    zero, fetch = block.dtype.type(0), _fetch(stored, word)

    def stage(shared, x, at, step, end, channel, depth, held, me):  # type: ignore[no-untyped-def]
        d, row = me % across * word, me // across
        where = at + row * step + channel + d
        there = channel + d < depth
        for _ in range(0, turns, loads):
            for n in range(loads):
                for m in range(word):
                    held[n * word + m] = zero
                if there and row + n * height < end:
                    fetch(held, n * word, x, where + n * height * step)
            for n in range(loads):
                to = u32((row + n * height) * stride + d)
                for m in range(word):
                    shared[to + m] = held[n * word + m]
            where += loads * height * step
            row += loads * height

    return inline(stage)


@cache
def _products(rows: int, stride: int) -> Any:
    """Add to each row's sum its products with `TURN` elements of a shared array, a stride apart."""

    def four(sums, left, i, by_row, right, j, b):  # type: ignore[no-untyped-def]
        for n in range(STEP):
            b[n] = right[j + n * stride]
        for r in range(rows):
            own = u32(i + r * by_row)
            for n in range(STEP):
                sums[r] += left[own + n] * b[n]

    step = inline(four)

    # Loops that the compiler unrolls lose sight of what is aligned.
    def add(sums, left, i, by_row, right, j, b):  # type: ignore[no-untyped-def]
        step(sums, left, i, by_row, right, u32(j), b)
        step(sums, left, i + STEP, by_row, right, u32(j + STEP * stride), b)
        step(sums, left, i + 2 * STEP, by_row, right, u32(j + 2 * STEP * stride), b)
        step(sums, left, i + 3 * STEP, by_row, right, u32(j + 3 * STEP * stride), b)

    return inline(add)


@cache
def _add_terms(block: Block) -> Any:
    """Add to the scores of a thread's key what terms say."""
    real, stride = block.dtype.type, block.threads + PAD
    least = real(-np.inf)

    def cap(scores, own, limit, me):  # type: ignore[no-untyped-def]
        for r in range(own.rows):
            to = u32(r * stride + me)
            # -inf excludes.
            if scores[to] != least:
                scores[to] = real(math.tanh(scores[to] / limit)) * limit

    within = inline(cap)

    def add(scores, tables, call, own, j, limit, me):  # type: ignore[no-untyped-def]
        data, meta, batch = tables.data, tables.meta, own.batch
        inner = -1
        if limit > 0:
            inner = call.n_adds - call.n_outer
            if call.cap_content != 0:
                inner = -1
                within(scores, own, limit, me)
        if call.strip >= 0:
            i, head = 0, own.head
            for r in range(own.rows):
                scores[u32(r * stride + me)] += data[u64(call.strip + head * call.strip_head + j - i)]
                i += 1
                if i == call.q_len:
                    i, head = 0, head + 1
        for n in range(call.n_adds):
            if n == inner:
                within(scores, own, limit, me)
            at = call.adds + n * ADD_SIZE
            start = origin(meta, at, batch, 0) + j * meta[at + ADD.key]
            by_head, by_query, by_row = meta[at + ADD.head], meta[at + ADD.query], meta[at + ADD.row]
            lookup, map_query = meta[at + ADD.map], meta[at + ADD.map_query]
            if lookup >= 0:
                lookup += meta[meta[at + ADD.map_batch] + batch] + j * meta[at + ADD.map_key]
            i, head = 0, own.head
            for r in range(own.rows):
                to = u32(r * stride + me)
                at_pair = start + head * by_head + i * by_query
                if lookup < 0:
                    value = data[u64(at_pair)]
                    # -inf excludes, whatever the score is.
                    if value == least:
                        scores[to] = least
                    else:
                        scores[to] += value
                else:
                    row = tables.maps[u64(lookup + i * map_query)]
                    if row >= 0:
                        scores[to] += data[u64(at_pair + row * by_row)]
                i += 1
                if i == call.q_len:
                    i, head = 0, head + 1
        if inner == call.n_adds:
            within(scores, own, limit, me)

    return inline(add)


@cache
def _exclude(block: Block) -> Any:
    """Make the scores of a thread's key -inf for the rows that may not attend it."""
    least, stride = block.dtype.type(-np.inf), block.threads + PAD

    def exclude(scores, tables, call, own, j, stop, me):  # type: ignore[no-untyped-def]
        meta = tables.meta
        i, head = 0, own.head
        for r in range(own.rows):
            distance = j - (i + call.offset)
            if j >= stop or distance < -call.left or distance > call.right or is_ruled_out(meta, call, own.batch, i, j):
                scores[u32(r * stride + me)] = least
            elif call.mask >= 0:
                at_pair = origin(meta, call.mask, own.batch, head)
                at_pair += i * meta[call.mask + PAIRS.query] + j * meta[call.mask + PAIRS.key]
                if tables.flags[u64(at_pair)] == 0:
                    scores[u32(r * stride + me)] = least
            i += 1
            if i == call.q_len:
                i, head = 0, head + 1

    return inline(exclude)


@cache
def stage_queries(block: Block, of_query: str) -> Any:
    """Fill shared memory with the queries of all rows; 0 beyond the last row and channel, all 0 if not `is_read`."""
    threads, depth, wide, zero = block.threads, block.depth, block.wide, block.dtype.type(0)
    widen, _ = converters(of_query)
    size = block.sizes[0]

    def stage(qs, q, meta, call, own, is_read, me):  # type: ignore[no-untyped-def]
        for n in range(me, size, threads):
            r, d = n // wide, n % wide
            value = zero
            if r < own.rows and d < depth and is_read:
                at = origin(meta, call.query, own.batch, own.head + r // call.q_len)
                value = widen(q[u64(at + r % call.q_len * meta[call.query + VECTORS.row] + d)])
            qs[n] = value

    return inline(stage)


@cache
def make_scores(block: Block, of_key: str) -> Any:
    """Make the scores of all rows with one key per thread, and wait for them."""
    rows, threads, depth, chunk, wide = block.rows, block.threads, block.depth, block.chunk, block.wide
    stride, zero = threads + PAD, block.dtype.type(0)
    stage, products = _stage(block, of_key, block.k_word, threads, chunk), _products(rows, 1)
    add_terms, exclude = _add_terms(block), _exclude(block)

    def scores(ps, space, x, key, stop, tables, call, own, scales, me):  # type: ignore[no-untyped-def]
        s, left = space.s, stop - key
        for r in range(rows):
            s[r] = zero
        for c in range(0, depth, chunk):
            stage(space.tile, x.array, x.start + key * x.step, x.step, left, c, depth, space.held, me)
            wait()
            for d in range(0, min(chunk, wide - c), TURN):
                products(s, space.qs, c + d, wide, space.tile, me * (chunk + PAD) + d, space.b)
            wait()
        for r in range(rows):
            ps[u32(r * stride + me)] = s[r] * scales.scores
        if key + me < stop:
            add_terms(ps, tables, call, own, key + me, scales.cap, me)
        whole = key + threads <= stop and call.mask < 0 and call.ranges < 0 and call.step <= 1
        whole = whole and key - (call.q_len - 1 + call.offset) >= -call.left
        if not (whole and key + threads - 1 - call.offset <= call.right):
            exclude(ps, tables, call, own, key + me, stop, me)
        wait()

    return inline(scores)


@cache
def softmax(block: Block) -> Any:
    """Turn scores into weights: maxima by lane, then by row. Returns a row's maximum, and 1 if a key is excluded."""
    rows, threads, real = block.rows, block.threads, block.dtype.type
    stride, lanes = threads + PAD, block.sizes[-1]
    zero, one, least, excluded = real(0), real(1), real(-np.inf), real(EXCLUDED)

    def softmax(ps, space, top, own_rows, is_key, me):  # type: ignore[no-untyped-def]
        highs, sums, bases, factors = space.highs, space.sums, space.bases, space.factors
        for n in range(me, lanes, threads):
            highest = least
            for y in range(n % LANES, threads, LANES):
                value = ps[u32(n // LANES * stride + y)]
                # NaN is no maximum, whatever `max` would make of it.
                if value > highest:  # noqa: PLR1730
                    highest = value
            highs[n] = highest
        wait()
        if me < rows:
            highest = top
            for n in range(LANES):
                if highs[u32(me * LANES + n)] > highest:  # noqa: PLR1730
                    highest = highs[u32(me * LANES + n)]
            base = highest
            if highest == least:
                base = zero
            factor = one
            if top != least:
                factor = real(math.exp(top - base))
            bases[me], factors[me], top = base, factor, highest
        wait()
        careful = 0
        for r in range(own_rows):
            to = u32(r * stride + me)
            value = ps[to]
            if value != least:
                ps[to] = real(math.exp(value - bases[r]))
            elif is_key:
                ps[to] = excluded
                careful = 1
            else:
                ps[to] = zero
        careful = wait_or(careful)
        for n in range(me, lanes, threads):
            total = sums[n] * factors[n // LANES]
            for y in range(n % LANES, threads, LANES):
                value = ps[u32(n // LANES * stride + y)]
                if value != excluded:
                    total += value
            sums[n] = total
        return top, careful

    return inline(softmax)


@cache
def add_values(block: Block, of_value: str) -> Any:
    """Rescale one channel of all rows' results, and add the weighted values of the keys in a tile."""
    rows, threads, few = block.rows, block.threads, block.few
    stride, excluded = threads + PAD, block.dtype.type(EXCLUDED)
    stage, products = _stage(block, of_value, block.v_word, few, threads), _products(rows, stride)

    def add(o, ps, space, x, key, stop, channel, v_dim, careful, me):  # type: ignore[no-untyped-def]
        tile, b = space.tile, space.b
        for r in range(rows):
            o[r] *= space.factors[r]
        for y in range(0, min(threads, stop - key), few):
            if y > 0:
                wait()
            left = stop - key - y
            stage(tile, x.array, x.start + (key + y) * x.step, x.step, left, channel, v_dim, space.held, me)
            wait()
            # Values beyond the last are 0, and so are their weights.
            if careful != 0:
                for m in range(0, min(few, left), STEP):
                    for n in range(STEP):
                        b[n] = tile[u32((m + n) * stride + me)]
                    for r in range(rows):
                        there = u32(r * stride + y + m)
                        for n in range(STEP):
                            if ps[there + n] != excluded:
                                o[r] += ps[there + n] * b[n]
            else:
                for m in range(0, min(few, left), TURN):
                    products(o, ps, y + m, stride, tile, m * stride + me, b)
        wait()

    return inline(add)


@cache
def finish(block: Block, of_out: str) -> Any:
    """Write the results and log-sum-exps of all rows, or what of them belongs to one of several ranges."""
    rows, real, write_sum = block.rows, block.dtype.type, write_lse(block.dtype)
    zero, one = real(0), real(1)
    _, narrow = converters(of_out)

    def finish(results, o, space, top, ranges, part, call, own, channel, me):  # type: ignore[no-untyped-def]
        work, factors, parts = results.work, space.factors, ranges.parts
        if me < own.rows:
            total = zero
            for n in range(LANES):
                total += space.sums[u32(me * LANES + n)]
            factors[me] = total
            if channel == 0 and parts > 1:
                work[u64((own.line + me) * parts + part)] = top
                work[u64((ranges.queries + own.line + me) * parts + part)] = total
            elif channel == 0 and call.wants_lse != 0:
                write_sum(results.lse, own.line + me, top, total, call.lse_apart)
        wait()
        d = channel + me
        for r in range(rows):
            if r < own.rows and d < call.v_dim:
                total = factors[r]
                if parts > 1:
                    # Without keys there is nothing to merge.
                    if total != zero:
                        at = 2 * ranges.queries * parts + ((own.line + r) * parts + part) * call.v_dim
                        work[u64(at + d)] = o[r]
                elif total == zero:
                    results.out[u64((own.line + r) * call.v_dim + d)] = narrow(zero)
                else:
                    results.out[u64((own.line + r) * call.v_dim + d)] = narrow(o[r] * (one / total))

    return inline(finish)
