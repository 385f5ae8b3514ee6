"""The backward kernel for the gradients of keys and values."""

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
    differentiate,
    gather,
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
def key_gradient(tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int, skewed: bool = False) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes.

    `skewed` if there are products that are made tile by tile. Rows of fragments are keys; of scores the
    columns are queries.
    """
    rows, threads, kind = tiling.rows, tiling.threads, tiling.kind
    of_query, of_key, of_value = stored
    columns, whole_depth = width // ACROSS, depth % DEPTH == 0
    left_shape, tile_shape = (DEPTH, rows + PAD), (DEPTH, max(rows, width) + PAD)
    p_shape, strip_size = (rows, rows + PAD), 2 * rows
    fits(tiling, left_shape, tile_shape, p_shape, p_shape, (strip_size,), (rows,), (rows,))
    s_shape, o_shape = (tiling.high, tiling.wide), (tiling.high, columns)
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    b_size, turns = max(wide, columns), rows * rows // threads
    real = tiling.dtype.type
    zero, least, excluded, left_out = real(0), real(-np.inf), real(EXCLUDED), real(-1)

    stage_query, stage_key = stage_turned(tiling, of_query), stage_turned(tiling, of_key)
    stage_value, stage_grad = stage_turned(tiling, of_value), stage_turned(tiling, tiling.dtype.name)
    query_rows, grad_rows = stage_rows(tiling, of_query, width), stage_rows(tiling, tiling.dtype.name, width)
    add_scores, accumulate_rows, strip_of = outer(tiling, wide), accumulate(tiling, columns), stage_strip(tiling)
    complete, store = finish(tiling, keys_first=False), put(tiling, keys_first=False)
    wipe, lift, turn_to_ds = clear(tiling), gather(tiling, keys_first=False), differentiate(tiling, keys_first=False)
    stage_vectors, stage_positions = stage_turned(tiling, tiling.dtype.name), stage_mapped(tiling)
    add_positions, skew_size = add_skewed(tiling, keys_first=False), len(SKEW)
    add_ds = sums(tiling, by_query=False, probabilities=False)

    @jit()
    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, grad_out, data, index, flags, meta, lse, delta, work, out_k, out_v, call, back, scale, keep_scale
    ):
        q, k, v, data, index, flags, meta = (
            elements(q), elements(k), elements(v), elements(data), elements(index), elements(flags), elements(meta)
        )  # fmt: skip
        grad_out, lse, delta, work, out_k, out_v = (
            elements(grad_out), elements(lse), elements(delta), elements(work), elements(out_k), elements(out_v)
        )  # fmt: skip
        left = cuda.shared.array(left_shape, kind, ALIGNED)
        tile = cuda.shared.array(tile_shape, kind, ALIGNED)
        # Scores, then probabilities after dropout: [query, key].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        # Probabilities, then gradients of scores.
        ds = cuda.shared.array(p_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        sums_of = cuda.shared.array(rows, kind, ALIGNED)
        deltas = cuda.shared.array(rows, kind, ALIGNED)
        at = cuda.shared.array(STARTS, types.int64)
        s = cuda.local.array(s_shape, kind)
        dk = cuda.local.array(o_shape, kind)
        dv = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)

        v_dim, q_len, k_len = call.v_dim, call.q_len, call.k_len
        me = count(cuda.threadIdx.x)
        across, down = count((me % ACROSS) * 4), count((me // ACROSS) * run)
        tiles = (k_len + rows - 1) // rows
        parts = (max(depth, v_dim) + width - 1) // width
        block = cuda.blockIdx.x
        part = block % parts
        # Earlier keys have more queries under a causal mask: they start first.
        key = (block // parts) % tiles * rows
        head = (block // (tiles * parts)) % call.heads
        batch = block // (tiles * parts * call.heads)
        strides = call.strides
        line = batch * call.heads + head
        if me == 0:
            at[Q_AT] = meta[meta[strides] + batch] + head * meta[strides + 1]
            at[K_AT] = meta[meta[strides + 3] + batch] + (head // call.k_group) * meta[strides + 4]
            at[V_AT] = meta[meta[strides + 6] + batch] + (head // call.v_group) * meta[strides + 7]
            at[Q_ROW], at[K_ROW], at[V_ROW] = meta[strides + 2], meta[strides + 5], meta[strides + 8]
            at[LINE_AT], at[OWN_AT] = line * q_len, line * k_len + key
            at[BATCH], at[HEAD] = batch, head
        cuda.syncthreads()

        end = k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + at[BATCH]])
        past = min(key + rows, k_len)
        stop = min(past, end)
        first = max(0, key - call.offset - call.right)
        final = min(q_len, stop - 1 - call.offset + call.left + 1)
        if stop <= key:
            final = 0

        if part == 0:
            wipe(work, back.key_bins + at[OWN_AT] * back.n_key_bins, (past - key) * back.n_key_bins, me)
        for r in range(high):
            for c in range(columns):
                dk[r, c] = zero
                dv[r, c] = zero
        column = me % rows

        while first < final:
            last = min(first + rows, final)
            size = last - first
            for r in range(high):
                for c in range(wide):
                    s[r, c] = zero
            here = Where(at[BATCH], at[HEAD], first, last, key, stop)
            if call.strip >= 0:
                strip_of(strip, data, call, here, me)
            if me < rows:
                row_lse, row_delta = zero, zero
                if first + me < last:
                    row_lse, row_delta = lse[place(at[LINE_AT] + first + me)], delta[place(at[LINE_AT] + first + me)]
                sums_of[me] = row_lse
                deltas[me] = row_delta
            for channel in range(0, depth, DEPTH):
                stage_key(left, 0, k, at[K_AT], at[K_ROW], key, stop, channel, depth, me)
                stage_query(tile, 0, q, at[Q_AT], at[Q_ROW], first, last, channel, depth, me)
                cuda.syncthreads()
                for d in range(0, DEPTH if whole_depth else min(DEPTH, depth - channel), STEPS):
                    add_scores(s, left, d, tile, d, a, b, down, across)
                cuda.syncthreads()
            store(ps, s, scale, strip, call.strip >= 0, down, across)
            cuda.syncthreads()
            if skewed:
                for n in range(call.n_skews):
                    term = call.skews + n * skew_size
                    for half in range(0, 2 * rows, rows):
                        for r in range(high):
                            for c in range(wide):
                                s[r, c] = zero
                        for channel in range(0, meta[term + 6], DEPTH):
                            channels = meta[term + 6]
                            x_at = meta[term] + meta[meta[term + 1] + at[BATCH]] + at[HEAD] * meta[term + 2]
                            stage_vectors(left, 0, data, x_at, meta[term + 3], first, last, channel, channels, me)
                            rows_at, start = meta[term + 4] + at[HEAD] * meta[term + 5], key - first + half - (rows - 1)
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
            whole = size == rows and key + rows <= stop and call.mask < 0
            whole = whole and j - (i + rows - 1) >= -call.left and j + rows - 1 - i <= call.right
            if call.n_adds > 0 or not whole:
                complete(ps, data, index, flags, meta, call, here, me)
                cuda.syncthreads()

            # Probabilities, before and after dropout.
            careful = 0
            for turn in range(turns):
                x = (turn * threads + me) // rows
                value = ps[x, column]
                if value == least:
                    ds[x, column] = excluded
                    ps[x, column] = left_out
                    careful = 1
                else:
                    weight = real(math.exp(value - sums_of[x]))
                    kept = weight
                    if call.keep >= 0:
                        where = meta[call.keep] + meta[meta[call.keep + 1] + at[BATCH]] + at[HEAD] * meta[call.keep + 2]
                        where += (first + x) * meta[call.keep + 3] + (key + column) * meta[call.keep + 4]
                        kept = weight * keep_scale
                        if flags[place(where)] == 0:
                            weight, kept = -weight, zero
                    ds[x, column] = weight
                    ps[x, column] = kept
            careful = cuda.syncthreads_or(careful)

            # Gradients of the values: products of probabilities with those of the output, a few queries at a time.
            if part * width < v_dim:
                for y in range(0, size, DEPTH):
                    if y > 0:
                        cuda.syncthreads()
                    grad_rows(tile, grad_out, at[LINE_AT] * v_dim, v_dim, first + y, last, part * width, v_dim, me)
                    cuda.syncthreads()
                    accumulate_rows(dv, ps, y, tile, 0, careful, left_out, a, b, down, across)
                cuda.syncthreads()

            # Gradients of the probabilities, and from them those of the scores.
            for r in range(high):
                for c in range(wide):
                    s[r, c] = zero
            for channel in range(0, v_dim, DEPTH):
                stage_value(left, 0, v, at[V_AT], at[V_ROW], key, stop, channel, v_dim, me)
                stage_grad(tile, 0, grad_out, at[LINE_AT] * v_dim, v_dim, first, last, channel, v_dim, me)
                cuda.syncthreads()
                for d in range(0, min(DEPTH, v_dim - channel), STEPS):
                    add_scores(s, left, d, tile, d, a, b, down, across)
                cuda.syncthreads()
            if back.n_lifted > 0:
                lift(s, data, index, meta, back.lifted, back.n_lifted, here, down, across)
            turn_to_ds(ds, s, deltas, keep_scale, down, across)
            cuda.syncthreads()
            if part == 0 and me < rows and key + me < stop:
                add_ds(
                    ds, work, back.key_bins + (at[OWN_AT] + me) * back.n_key_bins, index, meta, back.keys, back.n_keys,
                    at[BATCH], key + me, first, size, keep_scale, me,
                )  # fmt: skip

            # Gradients of the keys: products with the queries.
            if part * width < depth:
                for y in range(0, size, DEPTH):
                    if y > 0:
                        cuda.syncthreads()
                    query_rows(tile, q, at[Q_AT], at[Q_ROW], first + y, last, part * width, depth, me)
                    cuda.syncthreads()
                    accumulate_rows(dk, ds, y, tile, 0, careful, zero, a, b, down, across)
            cuda.syncthreads()
            first += rows

        for r in range(high):
            x = (r // run) * low + down + r % run
            for c in range(columns):
                d = part * width + (c // 4) * 32 + across + c % 4
                if key + x < past:
                    if d < depth:
                        out_k[place((at[OWN_AT] + x) * depth + d)] = dk[r, c] * scale
                    if d < v_dim:
                        out_v[place((at[OWN_AT] + x) * v_dim + d)] = dv[r, c]

    return kernel
