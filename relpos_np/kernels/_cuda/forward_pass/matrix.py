"""The forward kernel on matrix units (tensor cores): the same online softmax as `attend.py`, in registers.

Products of queries and keys, and of weights and values, are made by `mma.sync`. A thread has, of each row that it
shares with three others, a quarter of the scores; maxima and sums are exchanged among the four. Where a term or a mask
needs a tile's scores in shared memory, they make a way through it. Weights never do, as they already are where the
second product reads them, unless value terms collect them.

One shared tile holds in turn keys, scores, and values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.forward_pass.attend import add_value_terms, write_results
from relpos_np.kernels._cuda.forward_pass.row_sums import write_lse
from relpos_np.kernels._cuda.forward_pass.scores import (
    EXCLUDED,
    SCORES,
    UNCAPPED,
    finish,
    is_whole,
    put,
    scale,
    stage_strip,
    survives,
)
from relpos_np.kernels._cuda.launch.device import inline, jit
from relpos_np.kernels._cuda.simd import planes as staged
from relpos_np.kernels._cuda.simd import tile
from relpos_np.kernels._cuda.simd.intrinsics import converters, elements, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.simd.planes import Block
from relpos_np.kernels._cuda.simd.tile import ALIGNED, OWN_SIZE, STARTS
from relpos_np.kernels._cuda.simd.warp import COLUMNS, STEPS, bits, high, low, packed, product, repeated, swap


class Lane(NamedTuple):
    """Where the fragments of a thread are: the first row, and among its warp's eight groups of four."""

    down: int
    group: int
    own: int


class Fragments(NamedTuple):
    """Shared words of queries, the shared tile, sums of both products, and the words of a step."""

    left: Any
    ps: Any
    s: Any
    o: Any
    a: Any
    b: Any


@cache
def _multiply(block: Block, results: bool) -> Any:
    """Add to columns 8 n, ..., 8 n + 7 the products of the words of a step, planes that add least first."""
    multiply, tall, planes = product(block.half), block.tiling.high // 2, block.planes

    def add(n, x):  # type: ignore[no-untyped-def]
        to, a, b = x.o if results else x.s, x.a, x.b
        for m in range(tall):
            for total in range(planes - 1, -1, -1):
                for i in range(total + 1):
                    c0, c1, c2, c3 = multiply(
                        (to[2 * m, 2 * n], to[2 * m, 2 * n + 1], to[2 * m + 1, 2 * n], to[2 * m + 1, 2 * n + 1]),
                        (a[m, i, 0], a[m, i, 1], a[m, i, 2], a[m, i, 3]),
                        (b[total - i, 0], b[total - i, 1]),
                    )
                    to[2 * m, 2 * n], to[2 * m, 2 * n + 1] = c0, c1
                    to[2 * m + 1, 2 * n], to[2 * m + 1, 2 * n + 1] = c2, c3

    return inline(add)


@cache
def _scores(block: Block) -> Any:
    """Add to a fragment of scores the products of the channels that are in shared memory."""
    tall, planes, apart, add = block.tiling.high // 2, block.planes, block.channels // 2, _multiply(block, False)

    def column(n, given):  # type: ignore[no-untyped-def]
        x, first, lane = given
        key = u32(COLUMNS * n + lane.group)
        for p in range(planes):
            for e in range(2):
                x.b[p, e] = bits(x.ps[key, u32(p * apart + first + lane.own + 4 * e)])
        add(n, x)

    columns = repeated(inline(column), block.tiling.rows // COLUMNS)

    def scores(x, first, lane):  # type: ignore[no-untyped-def]
        for at in range(0, apart, STEPS // 2):
            for m in range(tall):
                for p in range(planes):
                    for e in range(2):
                        for h in range(2):
                            row, word = lane.down + 16 * m + 8 * h, first + p * apart + at + lane.own + 4 * e
                            x.a[m, p, 2 * e + h] = x.left[u32(row), u32(word)]
            columns(0, (x, at, lane))

    return inline(scores)


@cache
def _dot(block: Block, of_query: str, of_key: str) -> Any:
    """A product of a query and a key in float32, for what planes do not stand for."""
    (widen_query, _), (widen_key, _) = converters(of_query), converters(of_key)
    depth, plain = block.depth, np.float32(0)

    def dot(q, row, k, key):  # type: ignore[no-untyped-def]
        total = plain
        at_q, at_k = q.start[0] + (q.first + row) * q.start[1], k.start[0] + (k.first + key) * k.start[1]
        if q.first + row < q.end and k.first + key < k.end:
            for d in range(depth):
                total += widen_query(q.array[u64(at_q + d)]) * widen_key(k.array[u64(at_k + d)])
        return total

    return inline(dot)


@cache
def _softmax(block: Block) -> Any:
    """Turn a fragment of scores into weights; `top`, `total` and `factors` are those of the thread's rows.

    The weight of an excluded pair is -0, so that it can be told from one that is too small.
    """
    high_, wide, beside, apart = block.tiling.high, block.tiling.wide, block.tiling.beside, block.tiling.apart
    zero, one, least, excluded = np.float32(0), np.float32(1), np.float32(-np.inf), np.float32(-0.0)

    def weigh(n, given):  # type: ignore[no-untyped-def]
        s, sums, base, r = given
        # Without a branch for each pair.
        weight = np.float32(math.exp(s[r, n] - base))
        if s[r, n] == least:
            weight = excluded
        sums[r] += weight
        s[r, n] = weight

    def drop(n, given):  # type: ignore[no-untyped-def]
        s, r, tables, call, here, kept, thread = given
        if s[r, n] != zero or math.copysign(one, s[r, n]) > zero:
            i, j = here.first + 8 * r + thread.down, here.key + (n // beside) * apart + thread.across + n % beside
            s[r, n] = s[r, n] * kept if survives(tables, call, here, i, j) else zero

    drop_all = repeated(inline(drop), wide)
    weigh_all = repeated(inline(weigh), wide)

    def row(r, given):  # type: ignore[no-untyped-def]
        s, top, total, factors, sums, tables, call, here, kept, thread = given
        highest = top[r]
        for c in range(wide):
            # NaN is no maximum, whatever `max` would make of it.
            if s[r, c] > highest:  # noqa: PLR1730
                highest = s[r, c]
        for other in (1, 2):
            found = swap(highest, other)
            if found > highest:  # noqa: PLR1730
                highest = found
        base = highest
        if highest == least:
            base = zero
        factor = one
        if top[r] != least:
            factor = np.float32(math.exp(top[r] - base))
        sums[r] = zero
        weigh_all(0, (s, sums, base, r))
        if call.keep >= 0:
            drop_all(0, (s, r, tables, call, here, kept, thread))
        own = sums[r]
        own += swap(own, 1)
        own += swap(own, 2)
        total[r] = total[r] * factor + own
        top[r], factors[r] = highest, factor

    return repeated(inline(row), high_)


@cache
def _add_values(block: Block) -> Any:
    """Add the weighted values of `Block.keys` keys from key `n * STEPS` of a tile on."""
    tall, planes, rows, turns = block.tiling.high // 2, block.planes, block.tiling.rows, block.turns
    pack, add, more = packed(block.half), _multiply(block, True), planes > 1
    apart, steps = block.keys // 2 * block.turns, block.keys // STEPS

    def column(n, given):  # type: ignore[no-untyped-def]
        x, first, lane = given
        for p in range(planes):
            for e in range(2):
                row = p * apart + (first + lane.own + 4 * e) * turns + COLUMNS * n // rows
                x.b[p, e] = bits(x.ps[u32(row), u32(COLUMNS * n % rows + lane.group)])
        add(n, x)

    columns = repeated(inline(column), block.width // COLUMNS)

    def step(n, given):  # type: ignore[no-untyped-def]
        x, lane = given
        s, a = x.s, x.a
        for m in range(tall):
            for e in range(2):
                for h in range(2):
                    first, second = s[2 * m + h, 4 * n + 2 * e], s[2 * m + h, 4 * n + 2 * e + 1]
                    for p in range(planes):
                        word = pack(first, second)
                        a[m, p, 2 * e + h] = word
                        if more:
                            first, second = first - low(word), second - high(word)
        columns(0, (x, n % steps * (STEPS // 2), lane))

    return repeated(inline(step), steps)


@cache
def _add_far(block: Block) -> Any:
    """Add the shares of values that are not finite or too large, which were left out; weights are shared."""
    rows, high_, beside, apart = block.tiling.rows, block.tiling.high, block.tiling.beside, block.tiling.apart
    far = np.float32(np.inf) if block.is_raw(block.value) else staged.FAR_VALUES
    zero, one = np.float32(0), np.float32(1)
    widen, _ = converters(block.value.stored)

    def column(c, given):  # type: ignore[no-untyped-def]
        o, ps, v, channel, y, thread = given
        d = channel + (c // beside) * apart + thread.across + c % beside
        if d < v.depth:
            value = widen(v.array[u64(v.start[0] + (v.first + y) * v.start[1] + d)])
            if not abs(value) < far:
                for r in range(high_):
                    weight = ps[y, 8 * r + thread.down]
                    if weight != zero or math.copysign(one, weight) > zero:
                        o[r, c] += weight * value

    columns = repeated(inline(column), block.tiling.columns(block.width))

    def add(o, ps, v, channel, thread):  # type: ignore[no-untyped-def]
        for y in range(min(rows, v.end - v.first)):
            columns(0, (o, ps, v, channel, y, thread))

    return inline(add)


@cache
def attend(block: Block, of_out: str, capped: int = UNCAPPED) -> Any:
    """The kernel for sizes and formats of a block, the format of results, and what a cap is for."""
    tiling, depth, width, skewed = block.tiling, block.depth, block.width, block.skewed
    rows, real, plain, keys = tiling.rows, types.float32, block.planes == 1, block.keys
    columns, channels, chunks, resident = tiling.columns(width), block.channels, block.chunks, block.resident
    wide, beside, apart = tiling.wide, tiling.beside, tiling.apart
    zero, one, least = np.float32(0), np.float32(1), np.float32(-np.inf)
    left_shape, ps_shape = (rows, block.left_words), (rows, rows + tile.PAD)
    s_shape, o_shape, high_ = (tiling.high, tiling.wide), (tiling.high, columns), tiling.high
    a_shape, b_shape = (tiling.high // 2, block.planes, 4), (block.planes, 2)
    skew_shape = (tile.DEPTH, rows + tile.PAD) if skewed else (1, 1)
    row_size = max(tiling.high, tiling.wide if skewed else 1)
    column_size, slopes_shape = max(tiling.wide if skewed else 1, columns), s_shape if capped else (1, 1)
    odd_size, strip_size = 1 if plain else rows, 2 * rows
    step, held_size = channels * block.planes // 2, staged.HELD
    number, clear_scores = tile.thread_of(tiling), tile.clear(tiling.high, tiling.wide, tiling.dtype)
    clear_results = tile.clear(tiling.high, columns, tiling.dtype)
    fetch_query, fetch_key = (staged.fetch_rows(block, source) for source in (block.query, block.key))
    store_query = staged.store_rows(block, block.query, as_words=True)
    store_key = staged.store_rows(block, block.key, as_words=False)
    fetch_value, store_value = (make(block, block.value) for make in (staged.fetch_values, staged.store_values))
    scores, softmax, add_values, add_far = _scores(block), _softmax(block), _add_values(block), _add_far(block)
    dot, strip_of, whole, share = (
        _dot(block, block.query.stored, block.key.stored),
        stage_strip(tiling),
        is_whole(tiling),
        put(tiling),
    )
    scaled = scale(tiling, keys_first=True, capped=capped)
    finished = finish(tiling, keys_first=True, skewed=skewed, capped=capped)
    weigh = tile.add_bins(tiling, by_query=True, skipped=EXCLUDED)
    add_terms, write = add_value_terms(tiling, width), write_results(tiling, of_out, width)
    write_sum = write_lse(tiling.dtype)
    always_shared = skewed or capped == SCORES

    def mend(c, given):  # type: ignore[no-untyped-def]
        s, odd_rows, odd_keys, q, k, thread = given
        key = (c // beside) * apart + thread.across + c % beside
        for r in range(high_):
            row = 8 * r + thread.down
            if odd_rows[row] != 0 or odd_keys[key] != 0:
                s[r, c] = dot(q, row, k, key)

    mend_scores = repeated(inline(mend), tiling.wide)

    def values_of(n, given):  # type: ignore[no-untyped-def]
        fragments, held, odd, v, channel, lane, me = given
        skip = n * keys
        if v.first + skip < v.end:
            fetch_value(held, v, skip, channel, me)
            wait()
            odd[0] |= wait_or(store_value(fragments.ps, held, me))
            add_values(skip // STEPS, (fragments, lane))

    all_values = repeated(inline(values_of), rows // keys)

    @jit()
    def kernel(operands, tables, results, call, scales):  # type: ignore[no-untyped-def]
        operands, tables, results = elements(operands), elements(tables), elements(results)
        left = cuda.shared.array(left_shape, types.uint32, ALIGNED)
        # Keys, then scores, [key, row], then values.
        ps = cuda.shared.array(ps_shape, real, ALIGNED)
        strip = cuda.shared.array(strip_size, real)
        # What rows are multiplied by; in the end their totals.
        shared_factors = cuda.shared.array(rows, real, ALIGNED)
        odd_rows = cuda.shared.array(odd_size, types.int32)
        odd_keys = cuda.shared.array(odd_size, types.int32)
        skew_left = cuda.shared.array(skew_shape, real, ALIGNED)
        skew_right = cuda.shared.array(skew_shape, real, ALIGNED)
        starts = cuda.shared.array((STARTS, 2), types.int64)
        own = cuda.shared.array(OWN_SIZE, types.int64)
        s = cuda.local.array(s_shape, real)
        o = cuda.local.array(o_shape, real)
        a = cuda.local.array(a_shape, types.uint32)
        b = cuda.local.array(b_shape, types.uint32)
        row_held = cuda.local.array(row_size, real)
        column_held = cuda.local.array(column_size, real)
        held = cuda.local.array(held_size, real)
        q_held = cuda.local.array(held_size, real)
        slopes = cuda.local.array(slopes_shape, real)
        top = cuda.local.array(high_, real)
        total = cuda.local.array(high_, real)
        factors = cuda.local.array(high_, real)
        sums = cuda.local.array(high_, real)
        odd = cuda.local.array(1, types.int32)
        x = Fragments(left, ps, s, o, a, b)
        room = tile.Room(tile.Space(skew_left, skew_right, s, row_held, column_held), strip, starts)

        thread = number(u32(cuda.threadIdx.x))
        me, n_bins, v_dim = thread.me, call.n_bins, call.v_dim
        lane = Lane(thread.down, u32(me % 32 // 4), u32(me % 4))
        tiles, parts = (call.q_len + rows - 1) // rows, (v_dim + width - 1) // width
        part, n, head, batch = tile.share(cuda.blockIdx.x, parts, tiles, call.heads)
        # Later queries have more keys under a causal mask: they start first.
        first = (tiles - 1 - n) * rows
        line = batch * call.heads + head
        # Each part has bins of its own.
        row_at, bins_at = line * call.q_len + first, ((line * parts + part) * call.q_len + first) * n_bins
        tile.locate(starts, own, tables.meta, call, batch, head, row_at, 0, me)
        last, channel = min(first + rows, call.q_len), part * width
        key, stop = tile.keys_of(call, tables.meta, batch, first, last)
        q = tile.Rows(operands.q, starts[tile.Q], first, last, depth)

        clear_results(o)
        for r in range(high_):
            top[r], total[r] = least, zero
        mine = me < rows and first + me < call.q_len
        if mine:
            for n in range(n_bins):
                results.work[u64(bins_at + me * n_bins + n)] = zero
        if not plain and me < rows:
            odd_rows[me] = 0
        wait()
        if resident:
            for chunk in range(chunks):
                fetch_query(q_held, q, chunk * channels, me)
                store_query(left, chunk * step, q_held, odd_rows, me)
        while key < stop:
            here = tile.Tile(own, first, last, key, stop)
            k = tile.Rows(operands.k, starts[tile.K], key, stop, depth)
            clear_scores(s)
            for chunk in range(chunks):
                fetch_key(held, k, chunk * channels, me)
                if not resident:
                    fetch_query(q_held, q, chunk * channels, me)
                # Until nobody reads what the tile held.
                wait()
                if chunk == 0:
                    if call.strip >= 0:
                        strip_of(strip, tables.data, call, here, me)
                    if not plain:
                        if me < rows:
                            odd_keys[me] = 0
                        wait()
                store_key(ps, 0, held, odd_keys, me)
                if not resident:
                    store_query(left, 0, q_held, odd_rows, me)
                wait()
                scores(x, chunk * step if resident else 0, lane)
            if not plain:
                found = 0
                if me < rows and (odd_rows[me] != 0 or odd_keys[me] != 0):
                    found = 1
                if wait_or(found) != 0:
                    mend_scores(0, (s, odd_rows, odd_keys, q, k, thread))
            scaled(s, scales, strip, call.strip >= 0, slopes, thread)
            if always_shared or call.n_adds > 0 or not whole(call, here):
                # Until nobody reads keys.
                wait()
                finished(ps, room, tables, call, here, scales, slopes, thread)
                for r in range(high_):
                    for c in range(wide):
                        s[r, c] = ps[(c // beside) * apart + thread.across + c % beside, 8 * r + thread.down]
            softmax(0, (s, top, total, factors, sums, tables, call, here, scales.kept, thread))
            for r in range(high_):
                for c in range(columns):
                    o[r, c] *= factors[r]
            if n_bins > 0:
                wait()
                share(ps, s, thread)
                if lane.own == 0:
                    for r in range(high_):
                        shared_factors[8 * r + thread.down] = factors[r]
                wait()
                if mine:
                    row_bins = bins_at + me * n_bins
                    for n in range(n_bins):
                        results.work[u64(row_bins + n)] *= shared_factors[me]
                    weigh(ps, results.work, row_bins, tables, call.values, call.n_values, here, one, me)
            v = tile.Rows(operands.v, starts[tile.V], key, stop, v_dim)
            odd[0] = 0
            all_values(0, (x, held, odd, v, channel, lane, me))
            if odd[0] != 0:
                wait()
                share(ps, s, thread)
                wait()
                add_far(o, ps, v, channel, thread)
            key += rows

        wait()
        if lane.own == 0:
            for r in range(high_):
                row = 8 * r + thread.down
                shared_factors[row] = total[r]
                if first + row < last and part == 0 and call.wants_lse != 0:
                    write_sum(results.lse, row_at + row, top[r], total[r], call.lse_apart)
        # Also lets every thread see the bins, which are in global memory.
        wait()
        here = tile.Tile(own, first, last, key, stop)
        space = tile.Space(skew_left, skew_right, o, row_held, column_held)
        add_terms(space, results.work, bins_at, tables, call, here, channel, thread)
        write(results.out, o, shared_factors, row_held, row_at, last - first, channel, v_dim, thread)

    return kernel
