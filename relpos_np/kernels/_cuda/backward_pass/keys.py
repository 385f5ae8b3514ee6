"""The backward kernel for the gradients of keys and values."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.backward_pass.sizes import fits
from relpos_np.kernels._cuda.backward_pass.tile import make_ds, make_scores, wipe, write
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, EXCLUDED, SCORES, UNCAPPED, steepen, survives
from relpos_np.kernels._cuda.launch.device import inline, jit
from relpos_np.kernels._cuda.simd import tile
from relpos_np.kernels._cuda.simd.intrinsics import elements, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.simd.tile import ALIGNED, OWN_SIZE, STARTS, Tiling

# Marks an excluded pair where probabilities after dropout stand, which are at least 0.
LEFT_OUT = -1


@cache
def _fetch_queries(tiling: Tiling) -> Any:
    """Fill shared memory with the log-sum-exps, in two parts, and deltas of a tile's queries, from number `line` on."""
    rows, zero = tiling.rows, tiling.dtype.type(0)

    def fetch(lses, deltas, upstream, line, apart, size, me):  # type: ignore[no-untyped-def]
        if me < rows:
            base, more, row_delta = zero, zero, zero
            if me < size:
                base, more = upstream.lse[u64(line + me)], upstream.lse[u64(line + me + apart)]
                row_delta = upstream.delta[u64(line + me)]
            lses[me], lses[rows + me] = base, more
            deltas[me] = row_delta

    return inline(fetch)


@cache
def _probabilities(tiling: Tiling) -> Any:
    """Turn scores into probabilities, before dropout and after; returns 1 if any of the thread's pairs is excluded."""
    rows, threads, real = tiling.rows, tiling.threads, tiling.dtype.type
    turns, zero, least = rows * rows // threads, real(0), real(-np.inf)
    excluded, left_out = real(EXCLUDED), real(LEFT_OUT)

    def probabilities(ps, ds, lses, tables, call, here, kept, me):  # type: ignore[no-untyped-def]
        careful, column = 0, me % rows
        for turn in range(turns):
            x = (turn * threads + me) // rows
            value = ps[x, column]
            if value == least:
                ds[x, column] = excluded
                ps[x, column] = left_out
                careful = 1
            else:
                weight = real(math.exp((value - lses[x]) - lses[rows + x]))
                after = weight
                if call.keep >= 0:
                    after = weight * kept
                    if not survives(tables, call, here, here.first + x, here.key + column):
                        weight, after = -weight, zero
                ds[x, column] = weight
                ps[x, column] = after
        return careful

    return inline(probabilities)


@cache
def key_gradient(
    tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int, skewed: bool = False, capped: int = UNCAPPED
) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes.

    `skewed` if there are products that are made tile by tile; `capped`: what a cap is for. Rows of fragments are keys;
    of scores the columns are queries.
    """
    rows, kind, columns = tiling.rows, tiling.kind, width // tile.ACROSS
    of_query, of_key, of_value = stored
    left_shape, right_shape = (tile.DEPTH, rows + tile.PAD), (tile.DEPTH, max(rows, width) + tile.PAD)
    p_shape, strip_size, both = (rows, rows + tile.PAD), 2 * rows, 2 * rows
    fits(tiling, left_shape, right_shape, p_shape, p_shape, (strip_size,), (both,), (rows,))
    s_shape, o_shape, high = (tiling.high, tiling.wide), (tiling.high, columns), tiling.high
    b_size, real = max(tiling.wide, columns), tiling.dtype.type
    zero, one, left_out = real(0), real(1), real(LEFT_OUT)
    number, clear_gradients = tile.thread_of(tiling), tile.clear(high, columns, tiling.dtype)
    wipe_all, fetch_queries, probabilities = wipe(tiling), _fetch_queries(tiling), _probabilities(tiling)
    scores = make_scores(tiling, (of_key, of_query), depth, keys_first=False, skewed=skewed, capped=capped)
    steep, all_capped, content_capped = steepen(tiling), capped == SCORES, capped == CONTENT
    slopes_shape = (tiling.high, tiling.wide) if capped else (1, 1)
    turn_to_ds = make_ds(tiling, (of_value, tiling.dtype.name), keys_first=False)
    add_bins_of_keys = tile.add_bins(tiling, by_query=False, skipped=0)
    add_gradients = tile.combine(tiling, tile.stage_rows(tiling, tiling.dtype.name, width), columns)
    add_queries = tile.combine(tiling, tile.stage_rows(tiling, of_query, width), columns)
    write_gradients = write(tiling, width)

    @jit()
    def kernel(operands, tables, upstream, work, out_k, out_v, call, back, scales):  # type: ignore[no-untyped-def]
        operands, tables, upstream = elements(operands), elements(tables), elements(upstream)
        work, out_k, out_v = elements(work), elements(out_k), elements(out_v)
        left = cuda.shared.array(left_shape, kind, ALIGNED)
        right = cuda.shared.array(right_shape, kind, ALIGNED)
        # Scores, then probabilities after dropout: [query, key].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        # Probabilities, then gradients of scores.
        ds = cuda.shared.array(p_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        lses = cuda.shared.array(both, kind, ALIGNED)
        deltas = cuda.shared.array(rows, kind, ALIGNED)
        starts = cuda.shared.array((STARTS, 2), types.int64)
        own = cuda.shared.array(OWN_SIZE, types.int64)
        s = cuda.local.array(s_shape, kind)
        dk = cuda.local.array(o_shape, kind)
        dv = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)
        slopes = cuda.local.array(slopes_shape, kind)
        room = tile.Room(tile.Space(left, right, s, a, b), strip, starts)

        thread = number(u32(cuda.threadIdx.x))
        me, v_dim, q_len, k_len = thread.me, call.v_dim, call.q_len, call.k_len
        tiles, parts = (k_len + rows - 1) // rows, (max(depth, v_dim) + width - 1) // width
        # Earlier keys have more queries under a causal mask: they start first.
        part, n, head, batch = tile.share(cuda.blockIdx.x, parts, tiles, call.heads)
        key, channel = n * rows, part * width
        line = (batch * call.heads + head) * k_len + key
        stop = min(key + rows, tile.key_end(call, tables.meta, batch))
        first = max(0, key - call.offset - call.right)
        final = min(q_len, stop - 1 - call.offset + call.left + 1)
        if stop <= key:
            final = 0
        if me == 0:
            own[tile.FINAL] = final
        tile.locate(starts, own, tables.meta, call, batch, head, line, 0, me)
        if channel == 0:
            wipe_all(work, back.key_bins + line * back.n_key_bins, min(rows, k_len - key) * back.n_key_bins, me)
        clear_gradients(dk)
        clear_gradients(dv)

        while first < own[tile.FINAL]:
            last = min(first + rows, own[tile.FINAL])
            here = tile.Tile(own, first, last, key, stop)
            first_line = (own[tile.BATCH] * call.heads + own[tile.HEAD]) * q_len + first
            fetch_queries(lses, deltas, upstream, first_line, back.lines, last - first, me)
            q = tile.Rows(operands.q, starts[tile.Q], first, last, depth)
            k = tile.Rows(operands.k, starts[tile.K], key, stop, depth)
            scores(ps, room, k, q, tables, call, here, scales, slopes, thread)
            careful = wait_or(probabilities(ps, ds, lses, tables, call, here, scales.kept, me))
            grad = tile.Rows(upstream.grad_out, starts[tile.GRAD], first, last, v_dim)
            if channel < v_dim:
                add_gradients(tile.Space(ps, right, dv, a, b), grad, last - first, channel, careful, left_out, thread)
            v = tile.Rows(operands.v, starts[tile.V], key, stop, v_dim)
            turn_to_ds(ds, deltas, room.space, v, grad, tables, back, here, scales.kept, thread)
            if all_capped:
                steep(ds, slopes, thread)
            wait()
            if channel == 0 and me < rows and key + me < stop:
                bins = back.key_bins + (own[tile.LINE] + me) * back.n_key_bins
                add_bins_of_keys(ds, work, bins, tables, back.keys, back.n_keys, here, 1, me)
            if content_capped:
                wait()
                steep(ds, slopes, thread)
                wait()
            if channel < depth:
                add_queries(tile.Space(ds, right, dk, a, b), q, last - first, channel, careful, zero, thread)
            first += rows

        size = min(rows, k_len - key)
        write_gradients(out_k, dk, own[tile.LINE], size, channel, depth, scales.scores, thread)
        write_gradients(out_v, dv, own[tile.LINE], size, channel, v_dim, one, thread)

    return kernel
