"""The backward kernels: one for the gradient of queries and of what terms add, one for those of keys and values.

Both make a tile's scores anew, from them the probabilities p and, with the gradients of the probabilities, those of
the scores, ds = p * (dp - delta). A block looks after a tile of queries, or of keys, and goes over all keys, or
queries, in their order; every sum belongs to one thread and is taken in a fixed order, so that results do not depend
on scheduling. No atomics. If there are more channels than a block's threads can hold, several blocks make some each.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.attend import width_of
from relpos_np.kernels._cuda.backtile import EXCLUDED, clear, diagonals, differentiate, gather, sums
from relpos_np.kernels._cuda.device import jit, simulated
from relpos_np.kernels._cuda.intrinsics import count, elements, place
from relpos_np.kernels._cuda.tile import (
    ACROSS,
    ALIGNED,
    DEPTH,
    PAD,
    STEPS,
    Tiling,
    Where,
    finish,
    outer,
    put,
    stage_rows,
    stage_strip,
    stage_turned,
)

# What threads of a block read from shared memory, since registers are scarce: where queries, keys and values start
# and their steps per row, the first query of the head, and the first query (or key) of the block.
STARTS = 8
Q_AT, K_AT, V_AT, Q_ROW, K_ROW, V_ROW, LINE_AT, OWN_AT = range(STARTS)
# Static shared memory that every device has for a block.
SHARED = 48 * 1024


class Back(NamedTuple):
    """The integers that the backward pass has beside those of the call.

    Sums over the pairs that read a row of a table ("bins"): where their terms are described, as value terms are, how
    many there are, where in `work` the bins start, and how many there are for each query (or key). Starts of -1:
    there is none.
    """

    queries: int
    n_queries: int
    query_bins: int
    n_query_bins: int
    keys: int
    n_keys: int
    key_bins: int
    n_key_bins: int
    # Those of tables on index maps by pair are for some blocks at a time.
    tables: int
    n_tables: int
    table_bins: int
    n_table_bins: int
    value_bins: int
    # What value terms add to the gradients of probabilities, described as summands of the scores are.
    lifted: int
    n_lifted: int
    # Sums over diagonals, for some blocks at a time, and the gradients of the scores themselves.
    diagonals: int
    pairs: int


def query_side(dtype: np.dtype[Any], depth: int) -> tuple[Tiling, int]:
    """Sizes of a block that makes gradients of queries, and how many of their channels it makes."""
    width = width_of(depth)
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128 if width == 128 else 64, 32 if dtype.itemsize == 8 else 64), width


def key_side(dtype: np.dtype[Any], depth: int, v_dim: int) -> tuple[Tiling, int]:
    """The same for the gradients of keys and values, whose fragments are in registers at the same time."""
    width = width_of(max(depth, v_dim))
    if simulated():
        return Tiling(dtype, 32, 32), width
    return Tiling(dtype, 128, 32 if dtype.itemsize == 8 else 64), width


def _fits(tiling: Tiling, *shapes: tuple[int, ...]) -> None:
    """Make sure that shared arrays fit."""
    size = sum(math.prod(shape) for shape in shapes) * tiling.dtype.itemsize + 8 * STARTS
    assert size <= SHARED, f"a block needs {size} bytes of shared memory"


# ---------------------------------------------------------------------------------------------- gradients of queries


@cache
def query_gradient(tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes."""
    rows, threads, kind = tiling.rows, tiling.threads, tiling.kind
    of_query, of_key, of_value = stored
    parts, columns, whole_depth = -(-depth // width), width // ACROSS, depth % DEPTH == 0
    left_shape, tile_shape = (DEPTH, rows + PAD), (DEPTH, max(rows, width) + PAD)
    p_shape, strip_size = (rows, rows + PAD), 2 * rows
    _fits(tiling, left_shape, tile_shape, p_shape, (strip_size,), (rows,))
    s_shape, o_shape = (tiling.high, tiling.wide), (tiling.high, columns)
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    b_size, turns = max(wide, columns), rows * rows // threads
    real = tiling.dtype.type
    zero, least, excluded = real(0), real(-np.inf), real(EXCLUDED)

    stage_query, stage_key = stage_turned(tiling, of_query), stage_turned(tiling, of_key)
    stage_value, stage_grad = stage_turned(tiling, of_value), stage_turned(tiling, tiling.dtype.name)
    key_rows, strip_of = stage_rows(tiling, of_key, width), stage_strip(tiling)
    add_scores, add_keys = outer(tiling, wide), outer(tiling, columns)
    complete, store = finish(tiling, keys_first=True), put(tiling, keys_first=True)
    wipe, lift, turn_to_ds = clear(tiling), gather(tiling, keys_first=True), differentiate(tiling, keys_first=True)
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
        cuda.syncthreads()

        end = k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + batch])
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
            here = Where(batch, head, first, last, key, stop)
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
                        where = meta[call.keep] + meta[meta[call.keep + 1] + batch] + head * meta[call.keep + 2]
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
                        call.values, call.n_values, batch, first + me, key, size, keep_scale, me,
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
                        back.queries, back.n_queries, batch, first + me, key, size, keep_scale, me,
                    )  # fmt: skip
                    add_ds(
                        ps, work, back.table_bins + (own * rows + me) * n_tables, index, meta,
                        back.tables, back.n_tables, batch, first + me, key, size, keep_scale, me,
                    )  # fmt: skip

            # Gradients of the queries: products with the keys, a few at a time.
            for y in range(0, size, DEPTH):
                if y > 0:
                    cuda.syncthreads()
                key_rows(tile, k, at[K_AT], at[K_ROW], key + y, stop, part * width, depth, me)
                cuda.syncthreads()
                if careful != 0:
                    for n in range(DEPTH):
                        for r in range(high):
                            a[r] = ps[count(y + n), (r // run) * low + down + r % run]
                        for c in range(columns):
                            b[c] = tile[n, (c // 4) * 32 + across + c % 4]
                        for r in range(high):
                            # What is excluded may hold NaN.
                            if a[r] != zero:
                                for c in range(columns):
                                    o[r, c] += a[r] * b[c]
                else:
                    for n in range(0, DEPTH, STEPS):
                        add_keys(o, ps, y + n, tile, n, a, b, down, across)
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


# ---------------------------------------------------------------------------------------------- of keys and values


@cache
def key_gradient(tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes.

    Rows of fragments are keys; of scores the columns are queries.
    """
    rows, threads, kind = tiling.rows, tiling.threads, tiling.kind
    of_query, of_key, of_value = stored
    columns, whole_depth = width // ACROSS, depth % DEPTH == 0
    left_shape, tile_shape = (DEPTH, rows + PAD), (DEPTH, max(rows, width) + PAD)
    p_shape, strip_size = (rows, rows + PAD), 2 * rows
    _fits(tiling, left_shape, tile_shape, p_shape, p_shape, (strip_size,), (rows,), (rows,))
    s_shape, o_shape = (tiling.high, tiling.wide), (tiling.high, columns)
    high, wide, run, low = tiling.high, tiling.wide, tiling.run, tiling.low
    b_size, turns = max(wide, columns), rows * rows // threads
    real = tiling.dtype.type
    zero, least, excluded, left_out = real(0), real(-np.inf), real(EXCLUDED), real(-1)

    stage_query, stage_key = stage_turned(tiling, of_query), stage_turned(tiling, of_key)
    stage_value, stage_grad = stage_turned(tiling, of_value), stage_turned(tiling, tiling.dtype.name)
    query_rows, grad_rows = stage_rows(tiling, of_query, width), stage_rows(tiling, tiling.dtype.name, width)
    add_scores, add_rows, strip_of = outer(tiling, wide), outer(tiling, columns), stage_strip(tiling)
    complete, store = finish(tiling, keys_first=False), put(tiling, keys_first=False)
    wipe, lift, turn_to_ds = clear(tiling), gather(tiling, keys_first=False), differentiate(tiling, keys_first=False)
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
        cuda.syncthreads()

        end = k_len
        if call.lengths >= 0:
            end = min(end, meta[call.lengths + batch])
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
            here = Where(batch, head, first, last, key, stop)
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
                        where = meta[call.keep] + meta[meta[call.keep + 1] + batch] + head * meta[call.keep + 2]
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
                    if careful != 0:
                        for n in range(DEPTH):
                            for r in range(high):
                                a[r] = ps[count(y + n), (r // run) * low + down + r % run]
                            for c in range(columns):
                                b[c] = tile[n, (c // 4) * 32 + across + c % 4]
                            for r in range(high):
                                if a[r] != left_out:
                                    for c in range(columns):
                                        dv[r, c] += a[r] * b[c]
                    else:
                        for n in range(0, DEPTH, STEPS):
                            add_rows(dv, ps, y + n, tile, n, a, b, down, across)
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
                    batch, key + me, first, size, keep_scale, me,
                )  # fmt: skip

            # Gradients of the keys: products with the queries.
            if part * width < depth:
                for y in range(0, size, DEPTH):
                    if y > 0:
                        cuda.syncthreads()
                    query_rows(tile, q, at[Q_AT], at[Q_ROW], first + y, last, part * width, depth, me)
                    cuda.syncthreads()
                    if careful != 0:
                        for n in range(DEPTH):
                            for r in range(high):
                                a[r] = ds[count(y + n), (r // run) * low + down + r % run]
                            for c in range(columns):
                                b[c] = tile[n, (c // 4) * 32 + across + c % 4]
                            for r in range(high):
                                # What is excluded may hold NaN.
                                if a[r] != zero:
                                    for c in range(columns):
                                        dk[r, c] += a[r] * b[c]
                    else:
                        for n in range(0, DEPTH, STEPS):
                            add_rows(dk, ds, y + n, tile, n, a, b, down, across)
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
