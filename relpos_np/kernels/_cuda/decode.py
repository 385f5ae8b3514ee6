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
from relpos_np.kernels._cuda.intrinsics import FORMATS, converters, count, elements, neighbours, place
from relpos_np.kernels._cuda.tile import ADD_SIZE, ALIGNED, PAD, Call
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


@cache
def _fetch(stored: str, word: int) -> Any:
    """Put as many elements as one load has, from a place on, into an array from n on."""
    widen, _ = converters(stored)
    load: Any = neighbours(word) if word > 1 else None

    def one(held, n, x, at):  # type: ignore[no-untyped-def]
        held[n] = widen(x[place(at)])

    def two(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b = load(x, place(at))
        held[n], held[n + 1] = widen(a), widen(b)

    def four(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b, c, d = load(x, place(at))
        held[n], held[n + 1], held[n + 2], held[n + 3] = widen(a), widen(b), widen(c), widen(d)

    def eight(held, n, x, at):  # type: ignore[no-untyped-def]
        a, b, c, d, e, f, g, h = load(x, place(at))
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
                to = count((row + n * height) * stride + d)
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
            own = count(i + r * by_row)
            for n in range(STEP):
                sums[r] += left[own + n] * b[n]

    step = inline(four)

    # Loops that the compiler unrolls lose sight of what is aligned.
    def add(sums, left, i, by_row, right, j, b):  # type: ignore[no-untyped-def]
        step(sums, left, i, by_row, right, count(j), b)
        step(sums, left, i + STEP, by_row, right, count(j + STEP * stride), b)
        step(sums, left, i + 2 * STEP, by_row, right, count(j + 2 * STEP * stride), b)
        step(sums, left, i + 3 * STEP, by_row, right, count(j + 3 * STEP * stride), b)

    return inline(add)


@cache
def _complete(block: Block) -> Any:
    """Add to the scores of a thread's key what terms say, and give those that are excluded -inf."""
    least, stride = block.dtype.type(-np.inf), block.threads + PAD

    def complete(scores, data, index, flags, meta, call, batch, first, rows, j, stop, whole, me):  # type: ignore[no-untyped-def]
        if call.strip >= 0 and j < stop:
            i, head = 0, first
            for r in range(rows):
                scores[count(r * stride + me)] += data[place(call.strip + head * call.strip_head + j - i)]
                i += 1
                if i == call.q_len:
                    i, head = 0, head + 1
        for n in range(call.n_adds):
            at = call.adds + n * ADD_SIZE
            start = meta[at] + meta[meta[at + 1] + batch] + j * meta[at + 4]
            by_head, by_query, by_row, lookup, map_query = (
                meta[at + 2], meta[at + 3], meta[at + 5], meta[at + 6], meta[at + 8]
            )  # fmt: skip
            if lookup >= 0:
                lookup += meta[meta[at + 7] + batch] + j * meta[at + 9]
            if j < stop:
                i, head = 0, first
                for r in range(rows):
                    own = count(r * stride + me)
                    at_pair = start + head * by_head + i * by_query
                    if lookup < 0:
                        value = data[place(at_pair)]
                        # -inf excludes, whatever the score is.
                        if value == least:
                            scores[own] = least
                        else:
                            scores[own] += value
                    else:
                        row = index[place(lookup + i * map_query)]
                        if row >= 0:
                            scores[own] += data[place(at_pair + row * by_row)]
                    i += 1
                    if i == call.q_len:
                        i, head = 0, head + 1
        if not whole:
            i, head = 0, first
            for r in range(rows):
                distance = j - (i + call.offset)
                if j >= stop or distance < -call.left or distance > call.right:
                    scores[count(r * stride + me)] = least
                elif call.mask >= 0:
                    at_pair = meta[call.mask] + meta[meta[call.mask + 1] + batch] + head * meta[call.mask + 2]
                    if flags[place(at_pair + i * meta[call.mask + 3] + j * meta[call.mask + 4])] == 0:
                        scores[count(r * stride + me)] = least
                i += 1
                if i == call.q_len:
                    i, head = 0, head + 1

    return inline(complete)


@cache
def decode(block: Block, stored: tuple[str, ...]) -> Any:
    """The kernel for sizes of a block and formats of queries, keys, values and results."""
    threads, rows, depth, kind = block.threads, block.rows, block.depth, block.kind
    chunk, few, wide = block.chunk, block.few, block.wide
    of_query, of_key, of_value, of_out = stored
    widen, _ = converters(of_query)
    _, narrow = converters(of_out)
    k_stride, v_stride, p_stride = chunk + PAD, threads + PAD, threads + PAD
    q_size, tile_size, p_size, lanes = block.sizes
    real = block.dtype.type
    zero, one, least, excluded = real(0), real(1), real(-np.inf), real(-1)
    stage_key = _stage(block, of_key, block.k_word, threads, chunk)
    stage_value = _stage(block, of_value, block.v_word, few, threads)
    complete = _complete(block)
    add_products, add_values = _products(rows, 1), _products(rows, v_stride)

    @jit()
    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, data, index, flags, meta, out, lse, work, call, queries, parts, scale
    ):
        q, k, v, data, index, flags, meta = (
            elements(q), elements(k), elements(v), elements(data), elements(index), elements(flags), elements(meta)
        )  # fmt: skip
        out, lse, work = elements(out), elements(lse), elements(work)
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

        me, v_dim, group = count(cuda.threadIdx.x), call.v_dim, call.k_group
        slices, key_heads, own_rows = (v_dim + threads - 1) // threads, call.heads // group, group * call.q_len
        left = cuda.blockIdx.x
        part, left = left % parts, left // parts
        channel, left = left % slices * threads, left // slices
        key_head, batch = left % key_heads, left // key_heads
        head, strides = key_head * group, call.strides
        k_at = meta[meta[strides + 3] + batch] + key_head * meta[strides + 4]
        v_at = meta[meta[strides + 6] + batch] + key_head * meta[strides + 7]
        k_row, v_row = meta[strides + 5], meta[strides + 8]
        row_at = (batch * call.heads + head) * call.q_len

        end = call.k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + batch])
        key = max(0, call.offset - call.left)
        end = min(end, call.q_len - 1 + call.offset + call.right + 1)
        step = ((end - key + parts - 1) // parts + threads - 1) // threads * threads
        key += part * step
        stop = min(end, key + step)

        top = least
        for r in range(rows):
            o[r] = zero
        for n in range(me, lanes, threads):
            sums[n] = zero
        for n in range(me, q_size, threads):
            r, d = n // wide, n % wide
            value = zero
            if r < own_rows and d < depth and key < stop:
                at = meta[meta[strides] + batch] + (head + r // call.q_len) * meta[strides + 1]
                value = widen(q[place(at + r % call.q_len * meta[strides + 2] + d)])
            qs[n] = value
        cuda.syncthreads()

        while key < stop:
            # Scores of one key.
            for r in range(rows):
                s[r] = zero
            for c in range(0, depth, chunk):
                stage_key(tile, k, k_at + key * k_row, k_row, stop - key, c, depth, held, me)
                cuda.syncthreads()
                for d in range(0, min(chunk, wide - c), TURN):
                    add_products(s, qs, c + d, wide, tile, me * k_stride + d, b)
                cuda.syncthreads()
            for r in range(rows):
                ps[count(r * p_stride + me)] = s[r] * scale
            whole = key + threads <= stop and call.mask < 0
            whole = whole and key - (call.q_len - 1 + call.offset) >= -call.left
            whole = whole and key + threads - 1 - call.offset <= call.right
            j = key + me
            complete(ps, data, index, flags, meta, call, batch, head, own_rows, j, stop, whole, me)
            cuda.syncthreads()

            # Online softmax: maxima by lanes, then by rows.
            for n in range(me, lanes, threads):
                highest = least
                for y in range(n % LANES, threads, LANES):
                    value = ps[count(n // LANES * p_stride + y)]
                    # NaN is no maximum, whatever `max` would make of it.
                    if value > highest:  # noqa: PLR1730
                        highest = value
                highs[n] = highest
            cuda.syncthreads()
            if me < rows:
                highest = top
                for n in range(LANES):
                    if highs[count(me * LANES + n)] > highest:  # noqa: PLR1730
                        highest = highs[count(me * LANES + n)]
                base = highest
                if highest == least:
                    base = zero
                factor = one
                if top != least:
                    factor = real(math.exp(top - base))
                bases[me], factors[me], top = base, factor, highest
            cuda.syncthreads()
            careful = 0
            for r in range(own_rows):
                own = count(r * p_stride + me)
                value = ps[own]
                if value != least:
                    ps[own] = real(math.exp(value - bases[r]))
                elif j < stop:
                    # Marked, since the value may be one whose product with 0 is not 0.
                    ps[own] = excluded
                    careful = 1
                else:
                    ps[own] = zero
            careful = cuda.syncthreads_or(careful)
            for n in range(me, lanes, threads):
                total = sums[n] * factors[n // LANES]
                for y in range(n % LANES, threads, LANES):
                    value = ps[count(n // LANES * p_stride + y)]
                    if value != excluded:
                        total += value
                sums[n] = total

            # Results of one channel.
            for r in range(rows):
                o[r] *= factors[r]
            for y in range(0, min(threads, stop - key), few):
                if y > 0:
                    cuda.syncthreads()
                stage_value(tile, v, v_at + (key + y) * v_row, v_row, stop - key - y, channel, v_dim, held, me)
                cuda.syncthreads()
                # Values beyond the last are 0, and so are their weights.
                if careful != 0:
                    for m in range(0, min(few, stop - key - y), STEP):
                        for n in range(STEP):
                            b[n] = tile[count((m + n) * v_stride + me)]
                        for r in range(rows):
                            there = count(r * p_stride + y + m)
                            for n in range(STEP):
                                if ps[there + n] != excluded:
                                    o[r] += ps[there + n] * b[n]
                else:
                    for m in range(0, min(few, stop - key - y), TURN):
                        add_values(o, ps, y + m, p_stride, tile, m * v_stride + me, b)
            cuda.syncthreads()
            key += threads

        # The sum of each row, and what has become of it.
        if me < own_rows:
            total = zero
            for n in range(LANES):
                total += sums[count(me * LANES + n)]
            factors[me] = total
            if channel == 0 and parts > 1:
                work[place((row_at + me) * parts + part)] = top
                work[place((queries + row_at + me) * parts + part)] = total
            elif channel == 0 and call.wants_lse != 0:
                if total == zero:
                    lse[place(row_at + me)] = least
                else:
                    base = top
                    if top == least:
                        base = zero
                    lse[place(row_at + me)] = base + real(math.log(total))
        cuda.syncthreads()
        d = channel + me
        for r in range(rows):
            if r < own_rows and d < v_dim:
                total = factors[r]
                if parts > 1:
                    # Without keys there is nothing to merge.
                    if total != zero:
                        at = 2 * queries * parts + ((row_at + r) * parts + part) * v_dim
                        work[place(at + d)] = o[r]
                elif total == zero:
                    out[place((row_at + r) * v_dim + d)] = narrow(zero)
                else:
                    out[place((row_at + r) * v_dim + d)] = narrow(o[r] * (one / total))

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
            top = work[place(row * parts + part)]
            # NaN is no maximum, whatever `max` would make of it.
            if top > best:  # noqa: PLR1730
                best = top
        base = best
        if best == least:
            base = zero
        total, o = zero, zero
        for part in range(parts):
            at = row * parts + part
            own = work[place(queries * parts + at)]
            if own != zero:
                share = real(math.exp(work[place(at)] - base))
                total += own * share
                if d < v_dim:
                    o += work[place(2 * queries * parts + at * v_dim + d)] * share
        if d < v_dim:
            out[place(row * v_dim + d)] = narrow(zero if total == zero else o * (one / total))
        if d == 0 and wants_lse != 0:
            lse[place(row)] = least if total == zero else base + real(math.log(total))

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
    arrays: list[Any],
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
    arrays : list of device arrays
        Queries, keys, values, numbers of terms, index maps, flags, integers, outputs and log-sum-exps, as for the
        general kernel.
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
        for x, stored, size, own in zip(arrays[1:3], formats[1:3], (block.depth, call.v_dim), steps, strict=True)
    )
    parts, slices = ranges(call.k_len), -(-call.v_dim // threads)
    *_, out, lse = arrays
    work = empty(queries * parts * (2 + call.v_dim) if parts > 1 else 1, dtype)
    block = block._replace(k_word=k_word, v_word=v_word)
    blocks = queries // (call.k_group * call.q_len) * slices * parts
    launch(decode(block, formats), blocks, threads, *arrays, work, call, queries, parts, scale)
    if parts > 1:
        sizes = queries, parts, call.v_dim, call.wants_lse
        launch(merge(dtype, formats[-1], threads), queries * slices, threads, work, out, lse, *sizes)
