"""The backward kernel for the gradients of queries, and for the sums of what terms add to the scores."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.backcall import (
    BATCH,
    HEAD,
    K_AT,
    K_ROW,
    LINE_AT,
    OWN_AT,
    Q_AT,
    Q_ROW,
    STARTS,
    V_AT,
    V_ROW,
    fits,
)
from relpos_np.kernels._cuda.backtile import (
    EXCLUDED,
    clear,
    collect,
    diagonals,
    differentiate,
    gather,
    skew,
    stage_mapped_rows,
    sums,
)
from relpos_np.kernels._cuda.device import jit
from relpos_np.kernels._cuda.intrinsics import count, elements, place
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
    finish,
    outer,
    put,
    stage_mapped,
    stage_rows,
    stage_strip,
    stage_turned,
)


@cache
def query_gradient(tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int, skewed: bool = False) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes.

    `skewed` if there are products that are made tile by tile.
    """
    rows, threads, kind = tiling.rows, tiling.threads, tiling.kind
    of_query, of_key, of_value = stored
    parts, columns, whole_depth = -(-depth // width), width // ACROSS, depth % DEPTH == 0
    left_shape, tile_shape = (DEPTH, rows + PAD), (DEPTH, max(rows, width) + PAD)
    p_shape, strip_size = (rows, rows + PAD), 2 * rows
    skew_shape, skew_size = p_shape if skewed else (1, 1), len(SKEW)
    fits(tiling, left_shape, tile_shape, p_shape, skew_shape, (strip_size,), (rows,))
    s_shape, o_shape = (tiling.high, tiling.wide), (tiling.high, columns)
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    b_size, turns = max(wide, columns), rows * rows // threads
    real = tiling.dtype.type
    zero, least, excluded = real(0), real(-np.inf), real(EXCLUDED)

    stage_query, stage_key = stage_turned(tiling, of_query), stage_turned(tiling, of_key)
    stage_value, stage_grad = stage_turned(tiling, of_value), stage_turned(tiling, tiling.dtype.name)
    key_rows, strip_of = stage_rows(tiling, of_key, width), stage_strip(tiling)
    add_scores, accumulate_scores = outer(tiling, wide), accumulate(tiling, wide)
    accumulate_keys = accumulate(tiling, columns)
    complete, store = finish(tiling, keys_first=True), put(tiling, keys_first=True)
    wipe, lift, turn_to_ds = clear(tiling), gather(tiling, keys_first=True), differentiate(tiling, keys_first=True)
    stage_vectors, stage_positions = stage_turned(tiling, tiling.dtype.name), stage_mapped(tiling)
    vector_rows, position_rows = stage_rows(tiling, tiling.dtype.name, rows), stage_mapped_rows(tiling)
    add_positions, gather_sums = add_skewed(tiling, keys_first=True), collect(tiling)
    by_position, by_row = skew(tiling, rows_first=False), skew(tiling, rows_first=True)
    add_kept = sums(tiling, by_query=True, probabilities=True)
    add_ds, add_diagonals = sums(tiling, by_query=True, probabilities=False), diagonals(tiling)

    @jit()
    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, grad_out, data, index, flags, meta, lse, delta, work, out, call, back, base, scale, keep_scale
    ):
        q, k, v, data, index, flags, meta = (
            elements(q), elements(k), elements(v), elements(data), elements(index), elements(flags), elements(meta)
        )  # fmt: skip
        grad_out, lse, delta, work, out = (
            elements(grad_out), elements(lse), elements(delta), elements(work), elements(out)
        )  # fmt: skip
        left = cuda.shared.array(left_shape, kind, ALIGNED)
        tile = cuda.shared.array(tile_shape, kind, ALIGNED)
        # Scores, then probabilities, then gradients of scores: [key, row].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        # The same by relative position.
        skews = cuda.shared.array(skew_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        deltas = cuda.shared.array(rows, kind, ALIGNED)
        at = cuda.shared.array(STARTS, types.int64)
        s = cuda.local.array(s_shape, kind)
        o = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)

        v_dim, k_len = call.v_dim, call.k_len
        me = count(cuda.threadIdx.x)
        across, down = count((me % ACROSS) * 4), count((me // ACROSS) * run)
        tiles = (call.q_len + rows - 1) // rows
        block = base + cuda.blockIdx.x
        part = block % parts
        # Later queries have more keys under a causal mask: they start first.
        first = (tiles - 1 - (block // parts) % tiles) * rows
        head = (block // (tiles * parts)) % call.heads
        batch = block // (tiles * parts * call.heads)
        own = (block - base) // parts
        strides = call.strides
        line = batch * call.heads + head
        if me == 0:
            at[Q_AT] = meta[meta[strides] + batch] + head * meta[strides + 1]
            at[K_AT] = meta[meta[strides + 3] + batch] + (head // call.k_group) * meta[strides + 4]
            at[V_AT] = meta[meta[strides + 6] + batch] + (head // call.v_group) * meta[strides + 7]
            at[Q_ROW], at[K_ROW], at[V_ROW] = meta[strides + 2], meta[strides + 5], meta[strides + 8]
            at[LINE_AT], at[OWN_AT] = line * call.q_len, line * call.q_len + first
            at[BATCH], at[HEAD] = batch, head
        cuda.syncthreads()

        end = k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + at[BATCH]])
        last = min(first + rows, call.q_len)
        key = max(0, first + call.offset - call.left)
        stop = min(end, last - 1 + call.offset + call.right + 1)

        # Sums of terms are one part's business.
        spans, n_tables = rows + k_len - 1, back.n_table_bins
        if part == 0:
            wipe(work, back.query_bins + at[OWN_AT] * back.n_query_bins, (last - first) * back.n_query_bins, me)
            wipe(work, back.value_bins + at[OWN_AT] * call.n_bins, (last - first) * call.n_bins, me)
            wipe(work, back.table_bins + own * rows * n_tables, rows * n_tables, me)
            if back.diagonals >= 0:
                wipe(work, back.diagonals + own * spans, spans, me)
            if skewed:
                wipe(work, back.skew_rows + own * spans * back.skew_width, spans * back.skew_width, me)
                column = 0
                for n in range(call.n_skews):
                    size = meta[call.skews + n * skew_size + 6]
                    wipe(work, back.skew_vectors + back.lines * column + at[OWN_AT] * size, (last - first) * size, me)
                    column += size
            if back.pairs >= 0:
                wipe(work, back.pairs + at[OWN_AT] * k_len, (last - first) * k_len, me)
        for r in range(high):
            for c in range(columns):
                o[r, c] = zero
        # The row of a tile that a thread meets everywhere in its columns.
        row = me % rows
        mine = me < rows and first + me < last
        row_lse, row_delta = zero, zero
        if first + row < last:
            row_lse, row_delta = lse[place(at[OWN_AT] + row)], delta[place(at[OWN_AT] + row)]
        if me < rows:
            deltas[me] = row_delta
        cuda.syncthreads()

        while key < stop:
            # Scores: products, a few channels at a time.
            for r in range(high):
                for c in range(wide):
                    s[r, c] = zero
            here = Where(at[BATCH], at[HEAD], first, last, key, stop)
            if call.strip >= 0:
                strip_of(strip, data, call, here, me)
            for channel in range(0, depth, DEPTH):
                stage_query(left, 0, q, at[Q_AT], at[Q_ROW], first, last, channel, depth, me)
                stage_key(tile, 0, k, at[K_AT], at[K_ROW], key, stop, channel, depth, me)
                cuda.syncthreads()
                for d in range(0, DEPTH if whole_depth else min(DEPTH, depth - channel), STEPS):
                    add_scores(s, left, d, tile, d, a, b, down, across)
                cuda.syncthreads()
            store(ps, s, scale, strip, call.strip >= 0, down, across)
            cuda.syncthreads()
            if skewed:
                for n in range(call.n_skews):
                    term = call.skews + n * skew_size
                    x_at = meta[term] + meta[meta[term + 1] + at[BATCH]] + at[HEAD] * meta[term + 2]
                    rows_at, channels = meta[term + 4] + at[HEAD] * meta[term + 5], meta[term + 6]
                    for half in range(0, 2 * rows, rows):
                        for r in range(high):
                            for c in range(wide):
                                s[r, c] = zero
                        start = key - first + half - (rows - 1)
                        for channel in range(0, channels, DEPTH):
                            stage_vectors(left, 0, data, x_at, meta[term + 3], first, last, channel, channels, me)
                            stage_positions(
                                tile, data, rows_at, index, meta[term + 7], start, call, channel, channels, me
                            )
                            cuda.syncthreads()
                            for d in range(0, min(DEPTH, channels - channel), STEPS):
                                add_scores(s, left, d, tile, d, a, b, down, across)
                            cuda.syncthreads()
                        add_positions(ps, s, half, down, across)
                cuda.syncthreads()
            i, j = first + call.offset, key
            whole = last - first == rows and key + rows <= stop and call.mask < 0
            whole = whole and j - (i + rows - 1) >= -call.left and j + rows - 1 - i <= call.right
            if call.n_adds > 0 or not whole:
                complete(ps, data, index, flags, meta, call, here, me)
                cuda.syncthreads()

            # Probabilities.
            careful = 0
            for turn in range(turns):
                y = (turn * threads + me) // rows
                value = ps[y, row]
                if value == least:
                    ps[y, row] = excluded
                    careful = 1
                else:
                    weight = real(math.exp(value - row_lse))
                    if call.keep >= 0:
                        where = meta[call.keep] + meta[meta[call.keep + 1] + at[BATCH]] + at[HEAD] * meta[call.keep + 2]
                        where += (first + row) * meta[call.keep + 3] + (key + y) * meta[call.keep + 4]
                        if flags[place(where)] == 0:
                            weight = -weight
                    ps[y, row] = weight
            size = min(rows, stop - key)
            if call.n_values > 0:
                cuda.syncthreads()
                if mine and part == 0:
                    add_kept(
                        ps, work, back.value_bins + (at[OWN_AT] + me) * call.n_bins, index, meta,
                        call.values, call.n_values, at[BATCH], first + me, key, size, keep_scale, me,
                    )  # fmt: skip

            # Gradients of the probabilities: products with the values.
            for r in range(high):
                for c in range(wide):
                    s[r, c] = zero
            for channel in range(0, v_dim, DEPTH):
                stage_grad(left, 0, grad_out, at[LINE_AT] * v_dim, v_dim, first, last, channel, v_dim, me)
                stage_value(tile, 0, v, at[V_AT], at[V_ROW], key, stop, channel, v_dim, me)
                cuda.syncthreads()
                for d in range(0, min(DEPTH, v_dim - channel), STEPS):
                    add_scores(s, left, d, tile, d, a, b, down, across)
                cuda.syncthreads()
            if back.n_lifted > 0:
                lift(s, data, index, meta, back.lifted, back.n_lifted, here, down, across)
            turn_to_ds(ps, s, deltas, keep_scale, down, across)
            careful = cuda.syncthreads_or(careful)

            if part == 0:
                if back.diagonals >= 0:
                    add_diagonals(ps, work, back.diagonals + own * spans + key, spans - key, me)
                if back.pairs >= 0:
                    for turn in range(turns):
                        x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
                        if first + x < last and y < size:
                            work[place(back.pairs + (at[OWN_AT] + x) * k_len + key + y)] = ps[y, x]
                if mine:
                    add_ds(
                        ps, work, back.query_bins + (at[OWN_AT] + me) * back.n_query_bins, index, meta,
                        back.queries, back.n_queries, at[BATCH], first + me, key, size, keep_scale, me,
                    )  # fmt: skip
                    add_ds(
                        ps, work, back.table_bins + (own * rows + me) * n_tables, index, meta,
                        back.tables, back.n_tables, at[BATCH], first + me, key, size, keep_scale, me,
                    )  # fmt: skip

                if skewed:
                    column = 0
                    for n in range(call.n_skews):
                        term = call.skews + n * skew_size
                        x_at = meta[term] + meta[meta[term + 1] + at[BATCH]] + at[HEAD] * meta[term + 2]
                        rows_at, channels = meta[term + 4] + at[HEAD] * meta[term + 5], meta[term + 6]
                        vectors_at = back.skew_vectors + back.lines * column + at[OWN_AT] * channels
                        for half in range(0, 2 * rows, rows):
                            start = key - first + half - (rows - 1)
                            # Gradients of the vectors: products with rows.
                            by_position(skews, ps, half, me)
                            for channel in range(0, channels, rows):
                                for r in range(high):
                                    for c in range(wide):
                                        s[r, c] = zero
                                for m in range(0, rows, DEPTH):
                                    position_rows(
                                        tile,
                                        data,
                                        rows_at,
                                        index,
                                        meta[term + 7],
                                        start + m,
                                        call,
                                        channel,
                                        channels,
                                        me,
                                    )
                                    cuda.syncthreads()
                                    for d in range(0, DEPTH, STEPS):
                                        add_scores(s, skews, m + d, tile, d, a, b, down, across)
                                    cuda.syncthreads()
                                gather_sums(
                                    work, s, vectors_at, channels, last - first, channel, channels, down, across
                                )
                            # Gradients of the rows: products with vectors.
                            by_row(skews, ps, half, me)
                            rows_to = back.skew_rows + (own * spans + key + half) * back.skew_width + column
                            for channel in range(0, channels, rows):
                                for r in range(high):
                                    for c in range(wide):
                                        s[r, c] = zero
                                for x in range(0, rows, DEPTH):
                                    vector_rows(
                                        tile, data, x_at, meta[term + 3], first + x, last, channel, channels, me
                                    )
                                    cuda.syncthreads()
                                    accumulate_scores(s, skews, x, tile, 0, careful, zero, a, b, down, across)
                                    cuda.syncthreads()
                                gather_sums(
                                    work, s, rows_to, back.skew_width, spans - key - half, channel, channels,
                                    down, across,
                                )  # fmt: skip
                        column += channels

            # Gradients of the queries: products with the keys, a few at a time.
            for y in range(0, size, DEPTH):
                if y > 0:
                    cuda.syncthreads()
                key_rows(tile, k, at[K_AT], at[K_ROW], key + y, stop, part * width, depth, me)
                cuda.syncthreads()
                accumulate_keys(o, ps, y, tile, 0, careful, zero, a, b, down, across)
            cuda.syncthreads()
            key += rows

        for r in range(high):
            x = (r // run) * low + down + r % run
            for c in range(columns):
                d = part * width + (c // 4) * 32 + across + c % 4
                if first + x < last and d < depth:
                    out[place((at[OWN_AT] + x) * depth + d)] = o[r, c] * scale
        if part == 0:
            # The block's sums, in the place of its first row's.
            tables_at = back.table_bins + own * rows * n_tables
            n = me
            while n < n_tables:
                total = zero
                for x in range(last - first):
                    total += work[place(tables_at + x * n_tables + n)]
                work[place(tables_at + n)] = total
                n += threads

    return kernel
