"""The backward kernel for the gradients of queries, and for the sums of what terms add to the scores."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.backward_pass.sizes import fits
from relpos_np.kernels._cuda.backward_pass.skew import skew_gradients
from relpos_np.kernels._cuda.backward_pass.tile import add_diagonals, make_ds, make_scores, wipe, write
from relpos_np.kernels._cuda.forward_pass.scores import CONTENT, EXCLUDED, SCORES, UNCAPPED, steepen, survives
from relpos_np.kernels._cuda.launch.device import inline, jit
from relpos_np.kernels._cuda.launch.records import SKEW, SKEW_SIZE
from relpos_np.kernels._cuda.simd import tile
from relpos_np.kernels._cuda.simd.intrinsics import elements, u32, u64, wait, wait_or
from relpos_np.kernels._cuda.simd.tile import ALIGNED, OWN_SIZE, STARTS, Tiling


@cache
def _wipe_sums(tiling: Tiling, skewed: bool) -> Any:
    """Set a block's sums of terms to 0."""
    rows, wipe_all = tiling.rows, wipe(tiling)

    def wipe_sums(work, tables, call, back, own, size, me):  # type: ignore[no-untyped-def]
        spans, line, number = rows + call.k_len - 1, own[tile.LINE], own[tile.NUMBER]
        wipe_all(work, back.query_bins + line * back.n_query_bins, size * back.n_query_bins, me)
        wipe_all(work, back.value_bins + line * call.n_bins, size * call.n_bins, me)
        wipe_all(work, back.table_bins + number * rows * back.n_table_bins, rows * back.n_table_bins, me)
        if back.diagonals >= 0:
            wipe_all(work, back.diagonals + number * spans, spans, me)
        if skewed:
            wipe_all(work, back.skew_rows + number * spans * back.skew_width, spans * back.skew_width, me)
            column = 0
            for n in range(call.n_skews):
                depth = tables.meta[call.skews + n * SKEW_SIZE + SKEW.depth]
                wipe_all(work, back.skew_vectors + back.lines * column + line * depth, size * depth, me)
                column += depth
        if back.pairs >= 0:
            wipe_all(work, back.pairs + line * call.k_len, size * call.k_len, me)

    return inline(wipe_sums)


@cache
def _probabilities(tiling: Tiling) -> Any:
    """Turn scores into probabilities; returns 1 if any of the thread's pairs is excluded."""
    rows, threads, real = tiling.rows, tiling.threads, tiling.dtype.type
    turns, least, excluded = rows * rows // threads, real(-np.inf), real(EXCLUDED)

    def probabilities(ps, base, more, tables, call, here, me):  # type: ignore[no-untyped-def]
        careful, row = 0, me % rows
        for turn in range(turns):
            y = (turn * threads + me) // rows
            value = ps[y, row]
            if value == least:
                ps[y, row] = excluded
                careful = 1
            else:
                weight = real(math.exp((value - base) - more))
                if call.keep >= 0 and not survives(tables, call, here, here.first + row, here.key + y):
                    weight = -weight
                ps[y, row] = weight
        return careful

    return inline(probabilities)


@cache
def _add_to_sums(tiling: Tiling) -> Any:
    """Add a tile of gradients of scores to the sums of all terms but those of a `Skew`."""
    rows, threads = tiling.rows, tiling.threads
    turns, diagonals = rows * rows // threads, add_diagonals(tiling)
    bins = tile.add_bins(tiling, by_query=True, skipped=0)

    def add(ds, work, tables, call, back, here, me):  # type: ignore[no-untyped-def]
        line, number = here.own[tile.LINE], here.own[tile.NUMBER]
        if back.diagonals >= 0:
            spans = rows + call.k_len - 1
            diagonals(ds, work, back.diagonals + number * spans + here.key, spans - here.key, me)
        if back.pairs >= 0:
            for turn in range(turns):
                x, y = (turn * threads + me) // rows, (turn * threads + me) % rows
                if here.first + x < here.last and here.key + y < here.stop:
                    work[u64(back.pairs + (line + x) * call.k_len + here.key + y)] = ds[y, x]
        if me < rows and here.first + me < here.last:
            queries = back.query_bins + (line + me) * back.n_query_bins
            bins(ds, work, queries, tables, back.queries, back.n_queries, here, 1, me)
            in_tables = back.table_bins + (number * rows + me) * back.n_table_bins
            bins(ds, work, in_tables, tables, back.tables, back.n_tables, here, 1, me)

    return inline(add)


@cache
def _join_tables(tiling: Tiling) -> Any:
    """Add up the bins of tables over a block's rows; the total replaces the first row's."""
    threads, zero = tiling.threads, tiling.dtype.type(0)

    def join(work, at, bins, size, me):  # type: ignore[no-untyped-def]
        n = me
        while n < bins:
            total = zero
            for x in range(size):
                total += work[u64(at + x * bins + n)]
            work[u64(at + n)] = total
            n += threads

    return inline(join)


@cache
def query_gradient(
    tiling: Tiling, stored: tuple[str, str, str], depth: int, width: int, skewed: bool = False, capped: int = UNCAPPED
) -> Any:
    """The kernel for a tiling, formats of queries, keys and values, head size, and channels that a block makes.

    `skewed` if there are products that are made tile by tile; `capped`: what a cap is for.
    """
    rows, kind, parts, columns = tiling.rows, tiling.kind, -(-depth // width), width // tile.ACROSS
    of_query, of_key, of_value = stored
    left_shape, right_shape = (tile.DEPTH, rows + tile.PAD), (tile.DEPTH, max(rows, width) + tile.PAD)
    p_shape, strip_size = (rows, rows + tile.PAD), 2 * rows
    skew_shape = p_shape if skewed else (1, 1)
    fits(tiling, left_shape, right_shape, p_shape, skew_shape, (strip_size,), (rows,))
    s_shape, o_shape, high = (tiling.high, tiling.wide), (tiling.high, columns), tiling.high
    b_size, zero = max(tiling.wide, columns), tiling.dtype.type(0)
    number, clear_gradients = tile.thread_of(tiling), tile.clear(high, columns, tiling.dtype)
    wipe_sums, probabilities, add_to_sums = _wipe_sums(tiling, skewed), _probabilities(tiling), _add_to_sums(tiling)
    scores = make_scores(tiling, (of_query, of_key), depth, keys_first=True, skewed=skewed, capped=capped)
    steep, all_capped, content_capped = steepen(tiling), capped == SCORES, capped == CONTENT
    slopes_shape = (tiling.high, tiling.wide) if capped else (1, 1)
    turn_to_ds = make_ds(tiling, (tiling.dtype.name, of_value), keys_first=True)
    weigh = tile.add_bins(tiling, by_query=True, skipped=EXCLUDED, survivors=True)
    add_keys = tile.combine(tiling, tile.stage_rows(tiling, of_key, width), columns)
    add_skewed, write_gradients, join_tables = skew_gradients(tiling), write(tiling, width), _join_tables(tiling)

    @jit()
    def kernel(operands, tables, upstream, work, out, call, back, scales):  # type: ignore[no-untyped-def]
        operands, tables, upstream = elements(operands), elements(tables), elements(upstream)
        work, out = elements(work), elements(out)
        left = cuda.shared.array(left_shape, kind, ALIGNED)
        right = cuda.shared.array(right_shape, kind, ALIGNED)
        # Scores, then probabilities, then gradients of scores: [key, row].
        ps = cuda.shared.array(p_shape, kind, ALIGNED)
        # The same by relative position.
        skews = cuda.shared.array(skew_shape, kind, ALIGNED)
        strip = cuda.shared.array(strip_size, kind)
        deltas = cuda.shared.array(rows, kind, ALIGNED)
        starts = cuda.shared.array((STARTS, 2), types.int64)
        own = cuda.shared.array(OWN_SIZE, types.int64)
        s = cuda.local.array(s_shape, kind)
        o = cuda.local.array(o_shape, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(b_size, kind)
        slopes = cuda.local.array(slopes_shape, kind)
        space, room = tile.Space(ps, right, o, a, b), tile.Room(tile.Space(left, right, s, a, b), strip, starts)

        thread = number(u32(cuda.threadIdx.x))
        me, v_dim = thread.me, call.v_dim
        tiles = (call.q_len + rows - 1) // rows
        part, n, head, batch = tile.share(back.base + cuda.blockIdx.x, parts, tiles, call.heads)
        # Later queries have more keys under a causal mask: they start first.
        first = (tiles - 1 - n) * rows
        line = (batch * call.heads + head) * call.q_len + first
        tile.locate(starts, own, tables.meta, call, batch, head, line, cuda.blockIdx.x // parts, me)
        last = min(first + rows, call.q_len)
        key, stop = tile.keys_of(call, tables.meta, batch, first, last)

        # Sums of terms are one part's business.
        if part == 0:
            wipe_sums(work, tables, call, back, own, last - first, me)
        clear_gradients(o)
        # The one row of a tile that the thread turns into probabilities.
        row, base, more, row_delta = me % rows, zero, zero, zero
        if first + row < last:
            base, more = upstream.lse[u64(line + row)], upstream.lse[u64(line + row + back.lines)]
            row_delta = upstream.delta[u64(line + row)]
        if me < rows:
            deltas[me] = row_delta
        wait()

        while key < stop:
            here = tile.Tile(own, first, last, key, stop)
            q = tile.Rows(operands.q, starts[tile.Q], first, last, depth)
            k = tile.Rows(operands.k, starts[tile.K], key, stop, depth)
            scores(ps, room, q, k, tables, call, here, scales, slopes, thread)
            careful = probabilities(ps, base, more, tables, call, here, me)
            if call.n_values > 0:
                wait()
                if part == 0 and me < rows and first + me < last:
                    bins = back.value_bins + (own[tile.LINE] + me) * call.n_bins
                    weigh(ps, work, bins, tables, call.values, call.n_values, here, scales.kept, me)
            grad = tile.Rows(upstream.grad_out, starts[tile.GRAD], first, last, v_dim)
            v = tile.Rows(operands.v, starts[tile.V], key, stop, v_dim)
            turn_to_ds(ps, deltas, room.space, grad, v, tables, back, here, scales.kept, thread)
            if all_capped:
                steep(ps, slopes, thread)
            careful = wait_or(careful)
            if part == 0:
                add_to_sums(ps, work, tables, call, back, here, me)
                if skewed:
                    add_skewed(skews, ps, room, work, tables, call, back, here, careful, thread)
            if content_capped:
                wait()
                steep(ps, slopes, thread)
                wait()
            add_keys(space, k, min(rows, stop - key), part * width, careful, zero, thread)
            key += rows

        write_gradients(out, o, own[tile.LINE], last - first, part * width, depth, scales.scores, thread)
        if part == 0:
            bins = back.n_table_bins
            join_tables(work, back.table_bins + own[tile.NUMBER] * rows * bins, bins, last - first, me)

    return kernel
