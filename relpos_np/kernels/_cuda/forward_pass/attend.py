"""The forward kernel: one block of threads streams over the keys of a block of queries, with an online softmax.

Scores are made in registers, go through shared memory to the thread that looks after a row (its maximum, its sum and
its bins of value terms, always in the order of the keys, so that results do not depend on scheduling), and return
from there as weights. A block makes some of the value channels; if there are more, other blocks make the rest.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.forward_pass.row_sums import write_lse
from relpos_np.kernels._cuda.forward_pass.scores import EXCLUDED, UNCAPPED, complete, stage_strip, survives
from relpos_np.kernels._cuda.launch.device import inline, jit, simulated
from relpos_np.kernels._cuda.launch.records import BINS, BINS_SIZE
from relpos_np.kernels._cuda.simd import tile
from relpos_np.kernels._cuda.simd.intrinsics import converters, elements, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.simd.tile import ALIGNED, OWN_SIZE, STARTS, Tiling

# Value channels that a block makes: the sizes of fragments.
WIDTHS = (32, 64, 128)


def width_of(channels: int, most: int = WIDTHS[-1]) -> int:
    """How many channels one block makes, if there are `channels` in all."""
    return next((width for width in WIDTHS if channels <= width < most), most)


def value_width(dtype: np.dtype[Any], v_dim: int) -> int:
    """How many value channels one block makes; in float64 half as many fit."""
    return width_of(v_dim, WIDTHS[-1] * 4 // dtype.itemsize)


def tiling(dtype: np.dtype[Any], width: int, skewed: bool = False) -> Tiling:
    """Threads and rows of a block: what 48 KB of shared memory and the registers allow."""
    rows = 32 if simulated() or dtype.itemsize == 8 else 64
    return Tiling(dtype, 64 if width <= 64 and not skewed else 128, rows)


def _is_resident(depth: int, skewed: bool) -> bool:
    """Whether queries stay in shared memory: where they fit, and where nothing else needs their room."""
    return depth <= 64 and not skewed


@cache
def _products(tiling: Tiling, of_query: str, of_key: str, depth: int, skewed: bool) -> Any:
    """Fill a fragment with products of queries and keys.

    Keys, and queries that are not resident, have two tiles each: while one is used, the next is being loaded.
    """
    resident, whole_depth = _is_resident(depth, skewed), depth % tile.DEPTH == 0
    # With 64 threads in float64, fragments leave no registers for queries that are being loaded.
    ahead = not resident and (tiling.threads > 64 or tiling.dtype.itemsize < 8)
    stage_query, fetch_query = (tile.stage_turned(tiling, of_query, fetched=fetched) for fetched in (False, True))
    fetch_key, store = tile.stage_turned(tiling, of_key, fetched=True), tile.store_turned(tiling)
    zero, add = tile.clear(tiling.high, tiling.wide, tiling.dtype), tile.outer(tiling, tiling.wide)

    def products(space, q, k, held, q_held, thread):  # type: ignore[no-untyped-def]
        me = thread.me
        zero(space.s)
        side = 0
        fetch_key(held, 0, k, 0, me)
        if ahead:
            fetch_query(q_held, 0, q, 0, me)
        for channel in range(0, depth, tile.DEPTH):
            store(space.right, side, held, me)
            if ahead:
                store(space.left, side, q_held, me)
            elif not resident:
                stage_query(space.left, side, q, channel, me)
            wait()
            if channel + tile.DEPTH < depth:
                fetch_key(held, 0, k, channel + tile.DEPTH, me)
                if ahead:
                    fetch_query(q_held, 0, q, channel + tile.DEPTH, me)
            own = channel if resident else side
            for d in range(0, tile.DEPTH if whole_depth else min(tile.DEPTH, depth - channel), tile.STEPS):
                add(space, own + d, side + d, thread)
            side = tile.DEPTH - side

    return inline(products)


@cache
def _softmax(tiling: Tiling) -> Any:
    """Turn the scores of a row into weights, in the order of the keys; returns the row's new maximum and sum.

    The third number returned is 1 if a key is excluded. `factors` gets what earlier weights must be multiplied by.
    """
    rows, real = tiling.rows, tiling.dtype.type
    zero, one, least, excluded = real(0), real(1), real(-np.inf), real(EXCLUDED)

    def softmax(ps, factors, top, total, tables, call, here, kept, me):  # type: ignore[no-untyped-def]
        careful, highest = 0, top
        for y in range(rows):
            # NaN is no maximum, whatever `max` would make of it.
            if ps[y, me] > highest:  # noqa: PLR1730
                highest = ps[y, me]
        base = highest
        if highest == least:
            base = zero
        factor = one
        if top != least:
            factor = real(math.exp(top - base))
        total *= factor
        for y in range(rows):
            value = ps[y, me]
            if value == least:
                ps[y, me] = excluded
                careful = 1
            else:
                weight = real(math.exp(value - base))
                total += weight
                if call.keep >= 0:
                    weight = weight * kept if survives(tables, call, here, here.first + me, here.key + y) else zero
                ps[y, me] = weight
        factors[me] = factor
        return highest, total, careful

    return inline(softmax)


@cache
def _add_values(tiling: Tiling, of_value: str, width: int) -> Any:
    """Rescale a fragment of results, and add the weighted values of a tile, a few keys at a time."""
    rows, high, run, low, columns = tiling.rows, tiling.high, tiling.run, tiling.low, width // tile.ACROSS
    excluded = tiling.dtype.type(EXCLUDED)
    fetch, store = tile.stage_rows(tiling, of_value, width, fetched=True), tile.store_rows(tiling, width)
    add = tile.accumulate(tiling, columns)

    def add_values(space, factors, v, channel, held, careful, thread):  # type: ignore[no-untyped-def]
        _, right, o, a, _ = space
        me = thread.me
        for r in range(high):
            a[r] = factors[(r // run) * low + thread.down + r % run]
        for r in range(high):
            for c in range(columns):
                o[r, c] *= a[r]
        side = 0
        fetch(held, 0, v, channel, me)
        for y in range(0, min(rows, v.end - v.first), tile.DEPTH):
            store(right, side, held, me)
            wait()
            if v.first + y + tile.DEPTH < v.end and y + tile.DEPTH < rows:
                fetch(held, y + tile.DEPTH, v, channel, me)
            add(space, y, side, careful, excluded, thread)
            side = tile.DEPTH - side
        wait()

    return inline(add_values)


@cache
def add_value_terms(tiling: Tiling, width: int) -> Any:
    """Add to a fragment of results the rows of value terms, each times its bin."""
    high, run, low, columns = tiling.high, tiling.run, tiling.low, tiling.columns(width)
    beside, apart = tiling.beside, tiling.apart
    zero = tiling.dtype.type(0)

    def add(space, bins, bins_at, tables, call, here, channel, thread):  # type: ignore[no-untyped-def]
        _, _, o, a, b = space
        meta = tables.meta
        for n in range(call.n_values):
            at = call.values + n * BINS_SIZE
            start = meta[at + BINS.weights] + here.own[tile.HEAD] * meta[at + BINS.weights_head] + channel
            for row in range(meta[at + BINS.rows]):
                for r in range(high):
                    x = (r // run) * low + thread.down + r % run
                    a[r] = zero
                    if here.first + x < here.last:
                        a[r] = bins[u64(bins_at + x * call.n_bins + meta[at + BINS.bin] + row)]
                for c in range(columns):
                    d = (c // beside) * apart + thread.across + c % beside
                    b[c] = zero
                    if channel + d < call.v_dim:
                        b[c] = tables.data[u64(start + row * call.v_dim + d)]
                for r in range(high):
                    for c in range(columns):
                        o[r, c] += a[r] * b[c]

    return inline(add)


@cache
def write_results(tiling: Tiling, of_out: str, width: int) -> Any:
    """Divide a fragment of results by its rows' totals, and write it from row `row_at` on; rows without keys are 0."""
    high, run, low, columns = tiling.high, tiling.run, tiling.low, tiling.columns(width)
    beside, apart = tiling.beside, tiling.apart
    zero, one = tiling.dtype.type(0), tiling.dtype.type(1)
    _, narrow = converters(of_out)

    def write(out, o, totals, a, row_at, size, channel, v_dim, thread):  # type: ignore[no-untyped-def]
        for r in range(high):
            a[r] = totals[(r // run) * low + thread.down + r % run]
            if a[r] != zero:
                a[r] = one / a[r]
        for r in range(high):
            x = (r // run) * low + thread.down + r % run
            for c in range(columns):
                d = channel + (c // beside) * apart + thread.across + c % beside
                if x < size and d < v_dim:
                    out[u64((row_at + x) * v_dim + d)] = narrow(zero if a[r] == zero else o[r, c] * a[r])

    return inline(write)


@cache
def attend(
    tiling: Tiling, stored: tuple[str, str, str, str], depth: int, width: int, skewed: bool, capped: int = UNCAPPED
) -> Any:
    """The kernel for a tiling, formats of queries, keys, values and results, head size and value channels.

    `skewed` if there are products with a row for each relative position; `capped`: what a cap is for.
    """
    rows, kind, columns = tiling.rows, tiling.kind, width // tile.ACROSS
    of_query, of_key, of_value, of_out = stored
    resident = _is_resident(depth, skewed)
    left_shape = (-(-depth // tile.DEPTH) * tile.DEPTH if resident else 2 * tile.DEPTH, rows + tile.PAD)
    right_shape, p_shape = (2 * tile.DEPTH, max(rows, width) + tile.PAD), (rows, rows + tile.PAD)
    s_shape, o_shape, high = (tiling.high, tiling.wide), (tiling.high, columns), tiling.high
    b_size, strip_size = max(tiling.wide, columns), 2 * rows
    k_size, v_size = tile.held_of(tiling, rows), tile.held_of(tiling, width)
    real = tiling.dtype.type
    zero, one, least = real(0), real(1), real(-np.inf)
    number, stage_query = tile.thread_of(tiling), tile.stage_turned(tiling, of_query)
    products, strip_of = _products(tiling, of_query, of_key, depth, skewed), stage_strip(tiling)
    finish_scores, softmax = complete(tiling, keys_first=True, skewed=skewed, capped=capped), _softmax(tiling)
    slopes_shape = (tiling.high, tiling.wide) if capped else (1, 1)
    weigh, clear_results = (
        tile.add_bins(tiling, by_query=True, skipped=EXCLUDED),
        tile.clear(high, columns, tiling.dtype),
    )
    add_values, add_terms = _add_values(tiling, of_value, width), add_value_terms(tiling, width)
    write_sum = write_lse(tiling.dtype)
    write = write_results(tiling, of_out, width)

    @jit()
    def kernel(operands, tables, results, call, scales):  # type: ignore[no-untyped-def]
        operands, tables, results = elements(operands), elements(tables), elements(results)
        left = cuda.shared.array(left_shape, kind, ALIGNED)
        right = cuda.shared.array(right_shape, kind, ALIGNED)
        # Scores, then weights: [key, row].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        # What rows are multiplied by; in the end their totals.
        factors = cuda.shared.array(rows, kind, ALIGNED)
        starts = cuda.shared.array((STARTS, 2), types.int64)
        own = cuda.shared.array(OWN_SIZE, types.int64)
        s = cuda.local.array(s_shape, kind)
        o = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)
        held = cuda.local.array(k_size, kind)
        q_held = cuda.local.array(k_size, kind)
        v_held = cuda.local.array(v_size, kind)
        slopes = cuda.local.array(slopes_shape, kind)
        room, space = tile.Room(tile.Space(left, right, s, a, b), strip, starts), tile.Space(ps, right, o, a, b)

        thread = number(u32(cuda.threadIdx.x))
        me, n_bins, v_dim = thread.me, call.n_bins, call.v_dim
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

        top, total = least, zero
        clear_results(o)
        mine = me < rows and first + me < call.q_len
        if mine:
            for n in range(n_bins):
                results.work[u64(bins_at + me * n_bins + n)] = zero
        if resident:
            for c in range(0, depth, tile.DEPTH):
                stage_query(left, c, q, c, me)
        while key < stop:
            here = tile.Tile(own, first, last, key, stop)
            if call.strip >= 0:
                strip_of(strip, tables.data, call, here, me)
            products(room.space, q, tile.Rows(operands.k, starts[tile.K], key, stop, depth), held, q_held, thread)
            finish_scores(ps, room, tables, call, here, scales, slopes, thread)
            careful = 0
            if mine:
                top, total, careful = softmax(ps, factors, top, total, tables, call, here, scales.kept, me)
                if n_bins > 0:
                    row_bins = bins_at + me * n_bins
                    if factors[me] != one:
                        for n in range(n_bins):
                            results.work[u64(row_bins + n)] *= factors[me]
                    weigh(ps, results.work, row_bins, tables, call.values, call.n_values, here, one, me)
            elif me < rows:
                factors[me] = one
                for y in range(rows):
                    ps[y, me] = zero
            careful = wait_or(careful)
            v = tile.Rows(operands.v, starts[tile.V], key, stop, v_dim)
            add_values(space, factors, v, channel, v_held, careful, thread)
            key += rows

        if me < rows:
            factors[me] = total
        if mine and part == 0 and call.wants_lse != 0:
            write_sum(results.lse, row_at + me, top, total, call.lse_apart)
        # Also lets every thread see the bins, which are in global memory.
        wait()
        here = tile.Tile(own, first, last, key, stop)
        add_terms(space, results.work, bins_at, tables, call, here, channel, thread)
        write(results.out, o, factors, a, row_at, last - first, channel, v_dim, thread)

    return kernel
