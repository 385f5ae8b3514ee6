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
from numba import cuda

from relpos_np.kernels._cuda.device import jit, simulated
from relpos_np.kernels._cuda.intrinsics import converters, count, elements, place
from relpos_np.kernels._cuda.tile import (
    ACROSS,
    ALIGNED,
    DEPTH,
    PAD,
    SKEW,
    STEPS,
    Tiling,
    Where,
    accumulate,
    add_skewed,
    drop_rows,
    drop_turned,
    fetch_rows,
    fetch_turned,
    finish,
    held_of,
    outer,
    put,
    stage_mapped,
    stage_strip,
    stage_turned,
)

# One value term: its weights, its step per head, its first bin, its rows, and its index map.
VALUE = ("data", "head", "bin", "rows", "index", "index_batch", "index_query", "index_key")
# Value channels that a block makes: the sizes of fragments.
WIDTHS = (32, 64, 128)


def width_of(channels: int, most: int = WIDTHS[-1]) -> int:
    """Of so many channels those that a block makes."""
    return next((width for width in WIDTHS if channels <= width < most), most)


def value_width(dtype: np.dtype[Any], v_dim: int) -> int:
    """Value channels that a block makes: of those in float64 half as many fit."""
    return width_of(v_dim, WIDTHS[-1] * 4 // dtype.itemsize)


def tiling(dtype: np.dtype[Any], width: int, skewed: bool = False) -> Tiling:
    """Threads and rows of a block: what 48 KB of shared memory and the registers allow."""
    rows = 32 if simulated() or dtype.itemsize == 8 else 64
    return Tiling(dtype, 64 if width <= 64 and not skewed else 128, rows)


@cache
def attend(tiling: Tiling, stored: tuple[str, str, str, str], depth: int, width: int, skewed: bool) -> Any:
    """The kernel for a tiling, formats of queries, keys, values and results, head size and value channels.

    `skewed` if there are products with a row for each relative position.
    """
    rows, kind = tiling.rows, tiling.kind
    of_query, of_key, of_value, of_out = stored
    _, narrow = converters(of_out)
    # Queries stay in shared memory where they fit, and where nothing else needs their place.
    resident, whole_depth = depth <= 64 and not skewed, depth % DEPTH == 0
    # Else they are fetched ahead, unless the fragments of 64 threads in float64 leave no registers to hold them.
    ahead = not resident and (tiling.threads > 64 or tiling.dtype.itemsize < 8)
    columns = width // ACROSS
    q_shape = (-(-depth // DEPTH) * DEPTH if resident else 2 * DEPTH, rows + PAD)
    tile_shape = (2 * DEPTH, max(rows, width) + PAD)
    p_shape = (rows, rows + PAD)
    s_shape, o_shape = (tiling.high, tiling.wide), (tiling.high, columns)
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    b_size, strip_size = max(wide, columns), 2 * rows
    real = tiling.dtype.type
    zero, one, least, excluded = real(0), real(1), real(-np.inf), real(-1)
    value_size, skew_size = len(VALUE), len(SKEW)

    stage_query, strip_of = stage_turned(tiling, of_query), stage_strip(tiling)
    fetch_query, fetch_key = fetch_turned(tiling, of_query), fetch_turned(tiling, of_key)
    fetch_value, drop_value = fetch_rows(tiling, of_value, width), drop_rows(tiling, width)
    drop_turned_tile = drop_turned(tiling)
    k_size, v_size = held_of(tiling, rows), held_of(tiling, width)
    add_scores, accumulate_values = outer(tiling, wide), accumulate(tiling, columns)
    stage_vectors, stage_positions = stage_turned(tiling, tiling.dtype.name), stage_mapped(tiling)
    add_diagonals = add_skewed(tiling, keys_first=True)
    complete, store = finish(tiling, keys_first=True), put(tiling, keys_first=True)

    @jit()
    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, data, index, flags, meta, out, lse, bins, call, scale, keep_scale
    ):
        q, k, v, data, index, flags, meta = (
            elements(q), elements(k), elements(v), elements(data), elements(index), elements(flags), elements(meta)
        )  # fmt: skip
        out, lse, bins = elements(out), elements(lse), elements(bins)
        qs = cuda.shared.array(q_shape, kind, ALIGNED)
        tile = cuda.shared.array(tile_shape, kind, ALIGNED)
        # Scores, then weights: [key, row].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        factors = cuda.shared.array(rows, kind, ALIGNED)
        s = cuda.local.array(s_shape, kind)
        o = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)
        held = cuda.local.array(k_size, kind)
        q_held = cuda.local.array(k_size, kind)
        v_held = cuda.local.array(v_size, kind)

        n_bins, v_dim = call.n_bins, call.v_dim
        me = count(cuda.threadIdx.x)
        across, down = count((me % ACROSS) * 4), count((me // ACROSS) * run)
        tiles = (call.q_len + rows - 1) // rows
        parts = (v_dim + width - 1) // width
        block = cuda.blockIdx.x
        # Later queries have more keys under a causal mask: they start first.
        first = (tiles - 1 - block % tiles) * rows
        part = (block // tiles) % parts
        head = (block // (tiles * parts)) % call.heads
        batch = block // (tiles * parts * call.heads)
        strides = call.strides
        q_at = meta[meta[strides] + batch] + head * meta[strides + 1]
        k_at = meta[meta[strides + 3] + batch] + (head // call.k_group) * meta[strides + 4]
        v_at = meta[meta[strides + 6] + batch] + (head // call.v_group) * meta[strides + 7]
        q_row, k_row, v_row = meta[strides + 2], meta[strides + 5], meta[strides + 8]
        row_at = (batch * call.heads + head) * call.q_len + first
        # Each part has bins of its own.
        bins_at = (((batch * call.heads + head) * parts + part) * call.q_len + first) * n_bins

        end = call.k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + batch])
        last = min(first + rows, call.q_len)
        key = max(0, first + call.offset - call.left)
        stop = min(end, last - 1 + call.offset + call.right + 1)

        top, total = least, zero
        for r in range(high):
            for c in range(columns):
                o[r, c] = zero
        mine = me < rows and first + me < call.q_len
        if mine:
            for n in range(n_bins):
                bins[place(bins_at + me * n_bins + n)] = zero
        if resident:
            for channel in range(0, depth, DEPTH):
                stage_query(qs, channel, q, q_at, q_row, first, last, channel, depth, me)

        while key < stop:
            # Scores: products, a few channels at a time.
            for r in range(high):
                for c in range(wide):
                    s[r, c] = zero
            here = Where(batch, head, first, last, key, stop)
            if call.strip >= 0:
                strip_of(strip, data, call, here, me)
            # There are two tiles of keys, and of queries: while one is used, the next one is on its way.
            side = 0
            fetch_key(held, k, k_at, k_row, key, stop, 0, depth, me)
            if ahead:
                fetch_query(q_held, q, q_at, q_row, first, last, 0, depth, me)
            for channel in range(0, depth, DEPTH):
                drop_turned_tile(tile, side, held, me)
                if ahead:
                    drop_turned_tile(qs, side, q_held, me)
                elif not resident:
                    stage_query(qs, side, q, q_at, q_row, first, last, channel, depth, me)
                cuda.syncthreads()
                if channel + DEPTH < depth:
                    fetch_key(held, k, k_at, k_row, key, stop, channel + DEPTH, depth, me)
                    if ahead:
                        fetch_query(q_held, q, q_at, q_row, first, last, channel + DEPTH, depth, me)
                for d in range(0, DEPTH if whole_depth else min(DEPTH, depth - channel), STEPS):
                    add_scores(s, qs, (channel if resident else side) + d, tile, side + d, a, b, down, across)
                side = DEPTH - side
            store(ps, s, scale, strip, call.strip >= 0, down, across)
            cuda.syncthreads()
            if skewed:
                for n in range(call.n_skews):
                    at = call.skews + n * skew_size
                    x_at = meta[at] + meta[meta[at + 1] + batch] + head * meta[at + 2]
                    rows_at, size = meta[at + 4] + head * meta[at + 5], meta[at + 6]
                    for half in range(0, 2 * rows, rows):
                        for r in range(high):
                            for c in range(wide):
                                s[r, c] = zero
                        for channel in range(0, size, DEPTH):
                            stage_vectors(qs, 0, data, x_at, meta[at + 3], first, last, channel, size, me)
                            start = key - first + half - (rows - 1)
                            stage_positions(tile, data, rows_at, index, meta[at + 7], start, call, channel, size, me)
                            cuda.syncthreads()
                            for d in range(0, min(DEPTH, size - channel), STEPS):
                                add_scores(s, qs, d, tile, d, a, b, down, across)
                            cuda.syncthreads()
                        add_diagonals(ps, s, half, down, across)
                cuda.syncthreads()
            i, j = first + call.offset, key
            whole = last - first == rows and key + rows <= stop and call.mask < 0
            whole = whole and j - (i + rows - 1) >= -call.left and j + rows - 1 - i <= call.right
            if call.n_adds > 0 or not whole:
                complete(ps, data, index, flags, meta, call, here, me)
                cuda.syncthreads()

            # Online softmax: each row by one thread, in the order of the keys.
            careful = 0
            if mine:
                highest = top
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
                        # Marked, since the value may be one whose product with 0 is not 0.
                        ps[y, me] = excluded
                        careful = 1
                    else:
                        weight = real(math.exp(value - base))
                        total += weight
                        if call.keep >= 0:
                            where = meta[call.keep] + meta[meta[call.keep + 1] + batch] + head * meta[call.keep + 2]
                            where += (first + me) * meta[call.keep + 3] + (key + y) * meta[call.keep + 4]
                            weight = weight * keep_scale if flags[place(where)] != 0 else zero
                        ps[y, me] = weight
                top = highest
                factors[me] = factor
                if n_bins > 0:
                    own = bins_at + me * n_bins
                    if factor != one:
                        for n in range(n_bins):
                            bins[place(own + n)] *= factor
                    for n in range(call.n_values):
                        at = call.values + n * value_size
                        lookup = meta[at + 4] + meta[meta[at + 5] + batch] + (first + me) * meta[at + 6]
                        # Neighbouring keys often share a row: it is written when it ends.
                        row, gathered = -1, zero
                        for y in range(min(rows, stop - key)):
                            weight = ps[y, me]
                            if weight != excluded:
                                here = index[place(lookup + (key + y) * meta[at + 7])]
                                if here != row:
                                    if row >= 0:
                                        bins[place(own + meta[at + 2] + row)] += gathered
                                    row, gathered = here, zero
                                gathered += weight
                        if row >= 0:
                            bins[place(own + meta[at + 2] + row)] += gathered
            elif me < rows:
                factors[me] = one
                for y in range(rows):
                    ps[y, me] = zero
            careful = cuda.syncthreads_or(careful)

            # Output: products of the weights with the values, a few keys at a time.
            for r in range(high):
                a[r] = factors[(r // run) * low + down + r % run]
            for r in range(high):
                for c in range(columns):
                    o[r, c] *= a[r]
            side = 0
            fetch_value(v_held, v, v_at, v_row, key, stop, part * width, v_dim, me)
            for y in range(0, min(rows, stop - key), DEPTH):
                drop_value(tile, side, v_held, me)
                cuda.syncthreads()
                if key + y + DEPTH < stop and y + DEPTH < rows:
                    fetch_value(v_held, v, v_at, v_row, key + y + DEPTH, stop, part * width, v_dim, me)
                accumulate_values(o, ps, y, tile, side, careful, excluded, a, b, down, across)
                side = DEPTH - side
            cuda.syncthreads()
            key += rows

        if me < rows:
            factors[me] = total
        if mine and part == 0 and call.wants_lse != 0:
            if total == zero:
                lse[place(row_at + me)] = least
            else:
                base = top
                if top == least:
                    base = zero
                lse[place(row_at + me)] = base + real(math.log(total))
        # Also lets every thread see the bins, which are in global memory.
        cuda.syncthreads()
        for n in range(call.n_values):
            at = call.values + n * value_size
            start = meta[at] + head * meta[at + 1] + part * width
            for row in range(meta[at + 3]):
                for r in range(high):
                    x = (r // run) * low + down + r % run
                    a[r] = zero
                    if first + x < last:
                        a[r] = bins[place(bins_at + x * n_bins + meta[at + 2] + row)]
                for c in range(columns):
                    d = (c // 4) * 32 + across + c % 4
                    b[c] = zero
                    if part * width + d < v_dim:
                        b[c] = data[place(start + row * v_dim + d)]
                for r in range(high):
                    for c in range(columns):
                        o[r, c] += a[r] * b[c]
        for r in range(high):
            a[r] = factors[(r // run) * low + down + r % run]
            if a[r] != zero:
                a[r] = one / a[r]
        for r in range(high):
            x = (r // run) * low + down + r % run
            for c in range(columns):
                d = part * width + (c // 4) * 32 + across + c % 4
                if first + x < last and d < v_dim:
                    out[place((row_at + x) * v_dim + d)] = narrow(zero if a[r] == zero else o[r, c] * a[r])

    return kernel
