"""Few queries for many keys: ranges of keys are attended apart and then merged, and each is read once.

A block looks after all queries that share a key head, as rows, and after a range of keys, of which it takes as many
at a time as it has threads. A thread has one key for the scores, and one channel of the values for the results.
What it cannot have in registers is in shared memory. Ranges depend on the keys alone: results depend neither on the
device nor on how many batch items there are.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.device import empty, inline, jit, launch, simulated
from relpos_np.kernels._cuda.intrinsics import FORMATS, converters, elements, neighbours, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.records import ADD, ADD_SIZE, PAIRS, VECTORS, Call, Operands, Tables
from relpos_np.kernels._cuda.tile import ALIGNED, PAD, key_end, origin, share
from relpos_np.types import Array

# Rows beyond this many are worth the general kernel.
MOST_ROWS = 16
# Bytes of shared memory that every device has for a block.
MOST_SHARED = 48 << 10
# Keys of a range, and how many ranges there are at most.
RANGE = 256
MOST_RANGES = 128
# Threads that share a row's keys when its maximum and its sum are sought.
LANES = 8
# Elements of a row of a tile that a thread loads from shared memory at a time.
STEP = 4
# Such elements that a loop takes in a turn.
TURN = 4 * STEP
# Elements that a thread loads before it stores any.
HELD = 32
# No weight: an excluded key's, which is marked since its value may be one whose product with 0 is not 0.
EXCLUDED = -1


class Block(NamedTuple):
    """Sizes of a block: its dtype, threads, rows and head size, and how many elements a load of keys or values has."""

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
        """The head size, filled up."""
        return -(-self.depth // TURN) * TURN

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Elements of shared memory for queries, a tile of keys or values, scores, and what rows share among lanes."""
        tile = max(self.threads * (self.chunk + PAD), self.few * (self.threads + PAD))
        return self.rows * self.wide, tile, self.rows * (self.threads + PAD), self.rows * LANES

    @property
    def fits(self) -> bool:
        """Whether shared memory is large enough."""
        *most, lanes = self.sizes
        return (sum(most) + 2 * lanes + 2 * self.rows) * self.dtype.itemsize <= MOST_SHARED


class Results(NamedTuple):
    """What the kernel writes: outputs, log-sum-exps, and what is to be merged if there are several ranges."""

    out: Any
    lse: Any
    work: Any


class Ranges(NamedTuple):
    """How many ranges of keys there are, and how many queries of all heads and batch items."""

    parts: int
    queries: int


class Own(NamedTuple):
    """What a block looks after: a batch item, its first head, rows, and the number of its first query of all."""

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
    """What a block works in: see the kernel."""

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
    """Put as many elements as one load has, from a place on, into an array from n on."""
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
    """Fill shared[row, channel] with so many rows and channels of vectors, 0 where there are none.

    Neighbouring threads have neighbouring words. A thread's loads are independent of each other.
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
    least, stride = block.dtype.type(-np.inf), block.threads + PAD

    def add(scores, tables, call, own, j, me):  # type: ignore[no-untyped-def]
        data, meta, batch = tables.data, tables.meta, own.batch
        if call.strip >= 0:
            i, head = 0, own.head
            for r in range(own.rows):
                scores[u32(r * stride + me)] += data[u64(call.strip + head * call.strip_head + j - i)]
                i += 1
                if i == call.q_len:
                    i, head = 0, head + 1
        for n in range(call.n_adds):
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
            if j >= stop or distance < -call.left or distance > call.right:
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
def _stage_queries(block: Block, of_query: str) -> Any:
    """Fill shared memory with the queries of all rows, 0 beyond the last row and channel, or all if nothing is read."""
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
def _make_scores(block: Block, of_key: str) -> Any:
    """Make the scores of all rows with one key per thread, and wait for them."""
    rows, threads, depth, chunk, wide = block.rows, block.threads, block.depth, block.chunk, block.wide
    stride, zero = threads + PAD, block.dtype.type(0)
    stage, products = _stage(block, of_key, block.k_word, threads, chunk), _products(rows, 1)
    add_terms, exclude = _add_terms(block), _exclude(block)

    def scores(ps, space, x, key, stop, tables, call, own, scale, me):  # type: ignore[no-untyped-def]
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
            ps[u32(r * stride + me)] = s[r] * scale
        if key + me < stop:
            add_terms(ps, tables, call, own, key + me, me)
        whole = key + threads <= stop and call.mask < 0
        whole = whole and key - (call.q_len - 1 + call.offset) >= -call.left
        if not (whole and key + threads - 1 - call.offset <= call.right):
            exclude(ps, tables, call, own, key + me, stop, me)
        wait()

    return inline(scores)


@cache
def _softmax(block: Block) -> Any:
    """Make weights of scores: maxima by lanes, then by rows. Each row's new maximum, and 1 if a key is excluded."""
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
def _add_values(block: Block, of_value: str) -> Any:
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
def _finish(block: Block, of_out: str) -> Any:
    """Write the results and log-sum-exps of all rows, or what of them belongs to one of several ranges."""
    rows, real = block.rows, block.dtype.type
    zero, one, least = real(0), real(1), real(-np.inf)
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
                if total == zero:
                    results.lse[u64(own.line + me)] = least
                else:
                    base = top
                    if top == least:
                        base = zero
                    results.lse[u64(own.line + me)] = base + real(math.log(total))
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


@cache
def decode(block: Block, stored: tuple[str, ...]) -> Any:
    """The kernel for sizes of a block and formats of queries, keys, values and results."""
    threads, rows, kind = block.threads, block.rows, block.kind
    of_query, of_key, of_value, of_out = stored
    q_size, tile_size, p_size, lanes = block.sizes
    zero, least = block.dtype.type(0), block.dtype.type(-np.inf)
    stage_queries, make_scores, softmax = _stage_queries(block, of_query), _make_scores(block, of_key), _softmax(block)
    add_values, finish = _add_values(block, of_value), _finish(block, of_out)

    @jit()
    def kernel(operands, tables, results, call, ranges, scale):  # type: ignore[no-untyped-def]
        operands, tables, results = elements(operands), elements(tables), elements(results)
        qs = cuda.shared.array(q_size, kind, ALIGNED)
        tile = cuda.shared.array(tile_size, kind, ALIGNED)
        # Scores, then weights: [row, key].
        ps = cuda.shared.array(p_size, kind, ALIGNED)
        # Of each row and each of its lanes, the maximum of a tile, and the sum.
        highs = cuda.shared.array(lanes, kind)
        sums = cuda.shared.array(lanes, kind)
        bases = cuda.shared.array(rows, kind)
        factors = cuda.shared.array(rows, kind)
        s = cuda.local.array(rows, kind)
        o = cuda.local.array(rows, kind)
        b = cuda.local.array(STEP, kind)
        held = cuda.local.array(HELD, kind)
        space = Space(qs, tile, highs, sums, bases, factors, s, b, held)

        me, v_dim, group, meta = u32(cuda.threadIdx.x), call.v_dim, call.k_group, tables.meta
        parts, slices = ranges.parts, (v_dim + threads - 1) // threads
        part, n, key_head, batch = share(cuda.blockIdx.x, parts, slices, call.heads // group)
        channel, head = n * threads, key_head * group
        own = Own(batch, head, group * call.q_len, (batch * call.heads + head) * call.q_len)
        k = Vector(operands.k, origin(meta, call.key, batch, key_head), meta[call.key + VECTORS.row])
        v = Vector(operands.v, origin(meta, call.value, batch, key_head), meta[call.value + VECTORS.row])
        key = max(0, call.offset - call.left)
        end = min(key_end(call, meta, batch), call.q_len - 1 + call.offset + call.right + 1)
        step = ((end - key + parts - 1) // parts + threads - 1) // threads * threads
        key += part * step
        stop = min(end, key + step)

        top = least
        for r in range(rows):
            o[r] = zero
        for n in range(me, lanes, threads):
            sums[n] = zero
        stage_queries(qs, operands.q, meta, call, own, key < stop, me)
        wait()
        while key < stop:
            make_scores(ps, space, k, key, stop, tables, call, own, scale, me)
            top, careful = softmax(ps, space, top, own.rows, key + me < stop, me)
            add_values(o, ps, space, v, key, stop, channel, v_dim, careful, me)
            key += threads
        finish(results, o, space, top, ranges, part, call, own, channel, me)

    return kernel


@cache
def merge(dtype: np.dtype[Any], stored: str, threads: int) -> Any:
    """The kernel that merges the ranges of each query, the first one first: a thread has one channel."""
    _, narrow = converters(stored)
    real = dtype.type
    zero, one, least = real(0), real(1), real(-np.inf)

    @jit()
    def kernel(work, out, lse, queries, parts, v_dim, wants_lse):  # type: ignore[no-untyped-def]
        work, out, lse = elements(work), elements(out), elements(lse)
        slices = (v_dim + threads - 1) // threads
        row, d = cuda.blockIdx.x // slices, cuda.blockIdx.x % slices * threads + cuda.threadIdx.x
        best = least
        for part in range(parts):
            top = work[u64(row * parts + part)]
            # NaN is no maximum, whatever `max` would make of it.
            if top > best:  # noqa: PLR1730
                best = top
        base = best
        if best == least:
            base = zero
        total, o = zero, zero
        for part in range(parts):
            at = row * parts + part
            own = work[u64(queries * parts + at)]
            if own != zero:
                share = real(math.exp(work[u64(at)] - base))
                total += own * share
                if d < v_dim:
                    o += work[u64(2 * queries * parts + at * v_dim + d)] * share
        if d < v_dim:
            out[u64(row * v_dim + d)] = narrow(zero if total == zero else o * (one / total))
        if d == 0 and wants_lse != 0:
            lse[u64(row)] = least if total == zero else base + real(math.log(total))

    return kernel


def ranges(k_len: int) -> int:
    """How many ranges so many keys are attended in."""
    return min(-(-k_len // RANGE), MOST_RANGES)


def _word(x: Any, stored: str, depth: int, steps: Array) -> int:
    """Elements of a load of 16 bytes, or 1 where vectors do not all begin at such a multiple."""
    word = 16 // FORMATS[stored][1].itemsize
    # What was allocated begins at a multiple of 256, but other arrays may be a part of something.
    start = 0 if simulated() else int(x.__cuda_array_interface__["data"][0])
    return 1 if start % 16 or depth % word or (steps % word).any() else word


def block_for(call: Call, depth: int, dtype: np.dtype[Any]) -> Block | None:
    """A block, if there are so few queries for each key, and nothing that only the general kernel knows."""
    rows = call.k_group * call.q_len
    if call.n_values or call.n_skews or call.keep >= 0 or call.k_group != call.v_group or rows > MOST_ROWS:
        return None
    rows = 1 << (rows - 1).bit_length()
    for threads in (32,) if simulated() else (128, 64) if call.v_dim > 64 else (64,):
        block = Block(dtype, threads, rows, depth, 1, 1)
        if block.fits:
            return block
    return None


def run(
    block: Block,
    operands: Operands,
    tables: Tables,
    results: tuple[Any, Any],
    call: Call,
    formats: tuple[str, ...],
    steps: list[Array],
    queries: int,
    scale: Any,
) -> None:
    """Attend ranges of keys, and merge them if there are several.

    Parameters
    ----------
    block : Block
        Its sizes, without those of loads.
    operands, tables : Operands, Tables
        As for the general kernel.
    results : tuple of device array
        Outputs and log-sum-exps.
    call : Call
        The integers of the call.
    formats : tuple of str
        Of queries, keys, values and outputs.
    steps : list of ndarray
        Starts per batch item and steps per head and row, of keys and of values.
    queries : int
        Of all heads and batch items.
    scale : float32 or float64
        Of the products of queries and keys.
    """
    dtype, threads = block.dtype, block.threads
    k_word, v_word = (
        _word(x, stored, size, own)
        for x, stored, size, own in zip(operands[1:], formats[1:3], (block.depth, call.v_dim), steps, strict=True)
    )
    parts, slices = ranges(call.k_len), -(-call.v_dim // threads)
    out, lse = results
    work = empty(queries * parts * (2 + call.v_dim) if parts > 1 else 1, dtype)
    block = block._replace(k_word=k_word, v_word=v_word)
    blocks = queries // (call.k_group * call.q_len) * slices * parts
    given = operands, tables, Results(out, lse, work), call, Ranges(parts, queries), scale
    launch(decode(block, formats), blocks, threads, *given)
    if parts > 1:
        sizes = queries, parts, call.v_dim, call.wants_lse
        launch(merge(dtype, formats[-1], threads), queries * slices, threads, work, out, lse, *sizes)
