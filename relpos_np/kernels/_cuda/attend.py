"""The forward kernel: one block of threads streams over the keys of a block of queries, with an online softmax.

A block has 8 x 8 threads, of which each holds a fragment of the scores and of the output in registers. Rows and
columns of a fragment come in runs of four, so that they are loaded together. The thread with number r looks after row
r: its maximum, its sum and its bins of value terms, always in the order of the keys, so that results do not depend on
scheduling. Everything is written out in one function because device functions are very slow in the simulator.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.device import jit, simulated

THREADS = 64
# Channels of queries and keys, and of values, that are in shared memory at a time.
DEPTH, WIDTH = 16, 32

# One summand of the scores: where its numbers are (a start, the table of starts per batch item, and steps per head,
# query, key and row), and where its index map is (the same; a start of -1: there is none).
ADD = ("data", "data_batch", "head", "query", "key", "row", "index", "index_batch", "index_query", "index_key")
# One value term: its weights, its first bin, its rows, and its index map.
VALUE = ("data", "head", "bin", "rows", "index", "index_batch", "index_query", "index_key")
# Something with a byte per pair: the bool mask, the survivors of dropout.
PAIRS = ("start", "batch", "head", "query", "key")


def block_rows(dtype: np.dtype[Any]) -> int:
    """Queries, and keys, of a tile: what 48 KB of shared memory and the registers allow."""
    return 32 if simulated() or dtype.itemsize == 8 else 64


@cache
def attend(dtype: np.dtype[Any], depth: int, v_dim: int, careful: bool) -> Any:
    """The kernel for one element type, head size and value size; `careful` if a value may not be finite."""
    rows = block_rows(dtype)
    kind = types.float32 if dtype.itemsize == 4 else types.float64
    frag = rows // 8
    chunks = -(-v_dim // WIDTH)
    held = 4 * chunks
    # Padded against bank conflicts; the fragments' loads of four numbers stay aligned.
    q_tile, v_tile, p_tile = (DEPTH, rows + 4), (rows, WIDTH), (rows, rows + 1)
    s_frag, o_frag = (frag, frag), (frag, held)
    real = dtype.type
    zero, one, least, excluded = real(0), real(1), real(-np.inf), real(-1)
    tile_size, v_size, pairs = DEPTH * rows, rows * WIDTH, rows * rows
    add_size, value_size = len(ADD), len(VALUE)

    @jit(max_registers=255)
    def kernel(  # type: ignore[no-untyped-def]
        q, k, v, data, index, flags, meta, out, lse, bins,
        heads, q_len, k_len, k_group, v_group, offset, left, right, scale, keep_scale,
        strides, lengths, adds, n_adds, values, n_values, n_bins, mask, keep, want_lse,
    ):  # fmt: skip
        qs = cuda.shared.array(q_tile, kind)
        ks = cuda.shared.array(q_tile, kind)
        vs = cuda.shared.array(v_tile, kind)
        ps = cuda.shared.array(p_tile, kind)
        factors = cuda.shared.array(rows, kind)
        s = cuda.local.array(s_frag, kind)
        o = cuda.local.array(o_frag, kind)
        a = cuda.local.array(frag, kind)
        b = cuda.local.array(frag, kind)

        me = cuda.threadIdx.x
        across, down = (me % 8) * 4, (me // 8) * 4
        tiles = (q_len + rows - 1) // rows
        block = cuda.blockIdx.x
        # Later queries have more keys under a causal mask: they start first.
        first = (tiles - 1 - block % tiles) * rows
        head = (block // tiles) % heads
        batch = block // (tiles * heads)
        # Starts per batch item, then steps per head and row, of queries, keys and values.
        q_at = meta[meta[strides] + batch] + head * meta[strides + 1]
        k_at = meta[meta[strides + 3] + batch] + (head // k_group) * meta[strides + 4]
        v_at = meta[meta[strides + 6] + batch] + (head // v_group) * meta[strides + 7]
        q_row, k_row, v_row = meta[strides + 2], meta[strides + 5], meta[strides + 8]
        out_at = ((batch * heads + head) * q_len + first) * v_dim
        row_at = (batch * heads + head) * q_len + first

        end = k_len
        if lengths >= 0:
            end = min(end, meta[lengths + batch])
        last = min(first + rows, q_len)
        key = max(0, first + offset - left)
        stop = min(end, last - 1 + offset + right + 1)

        top, total = least, zero
        for r in range(frag):
            for c in range(held):
                o[r, c] = zero
        mine = me < rows and first + me < q_len
        if mine:
            for r in range(n_bins):
                bins[(row_at + me) * n_bins + r] = zero

        while key < stop:
            # Scores: products, a few channels at a time.
            for r in range(frag):
                for c in range(frag):
                    s[r, c] = zero
            for channel in range(0, depth, DEPTH):
                if channel > 0:
                    cuda.syncthreads()
                for n in range(me, tile_size, THREADS):
                    d, x = channel + n % DEPTH, n // DEPTH
                    value = zero
                    if d < depth and first + x < q_len:
                        value = q[q_at + (first + x) * q_row + d]
                    qs[n % DEPTH, x] = value
                    value = zero
                    if d < depth and key + x < stop:
                        value = k[k_at + (key + x) * k_row + d]
                    ks[n % DEPTH, x] = value
                cuda.syncthreads()
                for d in range(min(DEPTH, depth - channel)):
                    for r in range(frag):
                        a[r] = qs[d, (r // 4) * 32 + down + r % 4]
                        b[r] = ks[d, (r // 4) * 32 + across + r % 4]
                    for r in range(frag):
                        for c in range(frag):
                            s[r, c] += a[r] * b[c]
            for r in range(frag):
                for c in range(frag):
                    ps[(r // 4) * 32 + down + r % 4, (c // 4) * 32 + across + c % 4] = s[r, c] * scale
            cuda.syncthreads()

            # What positions and float masks add, by neighbouring threads to neighbouring keys. Nothing is read that
            # belongs to no pair of the tile.
            for n in range(n_adds):
                at = adds + n * add_size
                start = meta[at] + meta[meta[at + 1] + batch] + head * meta[at + 2]
                by_query, by_key, by_row, lookup = meta[at + 3], meta[at + 4], meta[at + 5], meta[at + 6]
                map_query, map_key = meta[at + 8], meta[at + 9]
                if lookup >= 0:
                    lookup += meta[meta[at + 7] + batch]
                for pair in range(me, pairs, THREADS):
                    x, y = pair // rows, pair % rows
                    i, j = first + x, key + y
                    if i < last and j < stop:
                        place = start + i * by_query + j * by_key
                        if lookup < 0:
                            value = data[place]
                            # -inf excludes, whatever the score is.
                            if value == least:
                                ps[x, y] = least
                            else:
                                ps[x, y] += value
                        else:
                            row = index[lookup + i * map_query + j * map_key]
                            if row >= 0:
                                ps[x, y] += data[place + row * by_row]

            # What is excluded is selected away: it may hold NaN.
            for pair in range(me, pairs, THREADS):
                x, y = pair // rows, pair % rows
                i, j = first + x, key + y
                distance = j - (i + offset)
                if i >= last or j >= stop or distance < -left or distance > right:
                    ps[x, y] = least
                elif mask >= 0:
                    place = meta[mask] + meta[meta[mask + 1] + batch] + head * meta[mask + 2]
                    if flags[place + i * meta[mask + 3] + j * meta[mask + 4]] == 0:
                        ps[x, y] = least
            cuda.syncthreads()

            # Online softmax: each row by one thread, in the order of the keys.
            if mine:
                i = first + me
                count = min(rows, stop - key)
                highest = top
                for y in range(count):
                    # NaN is no maximum, whatever `max` would make of it.
                    if ps[me, y] > highest:  # noqa: PLR1730
                        highest = ps[me, y]
                base = highest
                if highest == least:
                    base = zero
                factor = one
                if top != least:
                    factor = real(math.exp(top - base))
                total *= factor
                for y in range(count):
                    value = ps[me, y]
                    if value == least:
                        # Marked where a product with 0 would not be 0.
                        ps[me, y] = excluded if careful else zero
                    else:
                        weight = real(math.exp(value - base))
                        total += weight
                        if keep >= 0:
                            place = meta[keep] + meta[meta[keep + 1] + batch] + head * meta[keep + 2]
                            if flags[place + i * meta[keep + 3] + (key + y) * meta[keep + 4]] == 0:
                                weight = zero
                            else:
                                weight *= keep_scale
                        ps[me, y] = weight
                top = highest
                factors[me] = factor
                if n_bins > 0:
                    own = (row_at + me) * n_bins
                    if factor != one:
                        for r in range(n_bins):
                            bins[own + r] *= factor
                    for n in range(n_values):
                        at = values + n * value_size
                        lookup = meta[at + 4] + meta[meta[at + 5] + batch] + i * meta[at + 6]
                        for y in range(count):
                            weight = ps[me, y]
                            if weight != excluded:
                                row = index[lookup + (key + y) * meta[at + 7]]
                                if row >= 0:
                                    bins[own + meta[at + 2] + row] += weight
            elif me < rows:
                factors[me] = one
                for y in range(rows):
                    ps[me, y] = excluded if careful else zero
            cuda.syncthreads()

            # Output: products of the weights with the values, a few channels at a time.
            for r in range(frag):
                a[r] = factors[(r // 4) * 32 + down + r % 4]
            for r in range(frag):
                for c in range(held):
                    o[r, c] *= a[r]
            for chunk in range(chunks):
                if chunk > 0:
                    cuda.syncthreads()
                for n in range(me, v_size, THREADS):
                    y, d = n // WIDTH, n % WIDTH
                    value = zero
                    if chunk * WIDTH + d < v_dim and key + y < stop:
                        value = v[v_at + (key + y) * v_row + chunk * WIDTH + d]
                    vs[y, d] = value
                cuda.syncthreads()
                for y in range(min(rows, stop - key)):
                    for c in range(4):
                        b[c] = vs[y, across + c]
                    for r in range(frag):
                        weight = ps[(r // 4) * 32 + down + r % 4, y]
                        if careful:
                            if weight != excluded:
                                for c in range(4):
                                    o[r, chunk * 4 + c] += weight * b[c]
                        else:
                            for c in range(4):
                                o[r, chunk * 4 + c] += weight * b[c]
            cuda.syncthreads()
            key += rows

        if me < rows:
            factors[me] = total
        if mine and want_lse != 0:
            if total == zero:
                lse[row_at + me] = least
            else:
                base = top
                if top == least:
                    base = zero
                lse[row_at + me] = base + real(math.log(total))
        # Also lets every thread see the bins, which are in global memory.
        cuda.syncthreads()
        for r in range(frag):
            a[r] = factors[(r // 4) * 32 + down + r % 4]
        # Apart from the bins: fragments stay in registers only where loops over them are short enough to be unrolled.
        for r in range(frag):
            x = (r // 4) * 32 + down + r % 4
            for c in range(held):
                d = (c // 4) * WIDTH + across + c % 4
                if first + x < q_len and d < v_dim:
                    out[out_at + x * v_dim + d] = zero if a[r] == zero else o[r, c] / a[r]
        if n_bins > 0:
            cuda.syncthreads()
            for n in range(me, (last - first) * v_dim, THREADS):
                x, d = n // v_dim, n % v_dim
                value = zero
                for term in range(n_values):
                    at = values + term * value_size
                    own = (row_at + x) * n_bins + meta[at + 2]
                    start = meta[at] + head * meta[at + 1] + d
                    for row in range(meta[at + 3]):
                        value += bins[own + row] * data[start + row * v_dim]
                if factors[x] != zero:
                    out[out_at + n] += value / factors[x]

    return kernel
