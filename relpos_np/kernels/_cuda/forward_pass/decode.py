"""Few queries for many keys: blocks attend ranges of the keys, and a second kernel merges what they found.

A block takes all queries that share a key head, as rows, and one range of keys, as many at a time as it has threads.
A thread makes the scores of one key, and one channel of the results. Every key is read once. The ranges depend on
the number of keys alone, so that results depend neither on the device nor on the size of the batch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.forward_pass.decode_tile import (
    HELD,
    STEP,
    Block,
    Own,
    Space,
    Vector,
    add_values,
    finish,
    make_scores,
    softmax,
    stage_queries,
)
from relpos_np.kernels._cuda.forward_pass.row_sums import write_lse
from relpos_np.kernels._cuda.launch.device import empty, jit, launch, simulated
from relpos_np.kernels._cuda.launch.records import VECTORS, Call, Operands, Results, Scales, Tables
from relpos_np.kernels._cuda.launch.shared_copies import kept
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS, converters, elements, u32, u64, wait
from relpos_np.kernels._cuda.simd.tile import ALIGNED, keys_of, origin, share
from relpos_np.types import Array

# Rows beyond this many are worth the general kernel.
MOST_ROWS = 16
# Keys of a range, and the largest number of ranges.
RANGE = 256
MOST_RANGES = 128


class Ranges(NamedTuple):
    """How many ranges of keys there are, and how many queries of all heads and batch items."""

    parts: int
    queries: int


@cache
def decode(block: Block, stored: tuple[str, ...]) -> Any:
    """The kernel for sizes of a block and formats of queries, keys, values and results."""
    threads, rows, kind = block.threads, block.rows, block.kind
    of_query, of_key, of_value, of_out = stored
    q_size, tile_size, p_size, lanes = block.sizes
    zero, least = block.dtype.type(0), block.dtype.type(-np.inf)
    fetch_queries, scores, weights = stage_queries(block, of_query), make_scores(block, of_key), softmax(block)
    values, write = add_values(block, of_value), finish(block, of_out)

    @jit()
    def kernel(operands, tables, results, call, ranges, scales):  # type: ignore[no-untyped-def]
        operands, tables, results = elements(operands), elements(tables), elements(results)
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
        space = Space(qs, tile, highs, sums, bases, factors, s, b, held)

        me, v_dim, group, meta = u32(cuda.threadIdx.x), call.v_dim, call.k_group, tables.meta
        parts, slices = ranges.parts, (v_dim + threads - 1) // threads
        part, n, key_head, batch = share(cuda.blockIdx.x, parts, slices, call.heads // group)
        channel, head = n * threads, key_head * group
        own = Own(batch, head, group * call.q_len, (batch * call.heads + head) * call.q_len)
        k = Vector(operands.k, origin(meta, call.key, batch, key_head), meta[call.key + VECTORS.row])
        v = Vector(operands.v, origin(meta, call.value, batch, key_head), meta[call.value + VECTORS.row])
        key, end = keys_of(call, meta, batch, 0, call.q_len)
        step = ((end - key + parts - 1) // parts + threads - 1) // threads * threads
        key += part * step
        stop = min(end, key + step)

        top = least
        for r in range(rows):
            o[r] = zero
        for n in range(me, lanes, threads):
            sums[n] = zero
        fetch_queries(qs, operands.q, meta, call, own, key < stop, me)
        wait()
        while key < stop:
            scores(ps, space, k, key, stop, tables, call, own, scales, me)
            top, careful = weights(ps, space, top, own.rows, key + me < stop, me)
            values(o, ps, space, v, key, stop, channel, v_dim, careful, me)
            key += threads
        write(results, o, space, top, ranges, part, call, own, channel, me)

    return kernel


@cache
def merge(dtype: np.dtype[Any], stored: str, threads: int) -> Any:
    """The kernel that merges the ranges of each query, in their order: one channel per thread."""
    _, narrow = converters(stored)
    real, write_sum = dtype.type, write_lse(dtype)
    zero, one, least = real(0), real(1), real(-np.inf)

    @jit()
    def kernel(work, out, lse, queries, parts, v_dim, wants_lse, apart):  # type: ignore[no-untyped-def]
        work, out, lse = elements(work), elements(out), elements(lse)
        slices = (v_dim + threads - 1) // threads
        row, d = cuda.blockIdx.x // slices, cuda.blockIdx.x % slices * threads + cuda.threadIdx.x
        best = least
        for part in range(parts):
            top = work[u64(row * parts + part)]
            # NaN is no maximum, whatever `max` would make of it.
            if top > best:  # noqa: PLR1730
                best = top
        base = best
        if best == least:
            base = zero
        total, o = zero, zero
        for part in range(parts):
            at = row * parts + part
            own = work[u64(queries * parts + at)]
            if own != zero:
                share = real(math.exp(work[u64(at)] - base))
                total += own * share
                if d < v_dim:
                    o += work[u64(2 * queries * parts + at * v_dim + d)] * share
        if d < v_dim:
            out[u64(row * v_dim + d)] = narrow(zero if total == zero else o * (one / total))
        if d == 0 and wants_lse != 0:
            write_sum(lse, row, base, total, apart)

    return kernel


def ranges(k_len: int) -> int:
    """Number of ranges for `k_len` keys."""
    return min(-(-k_len // RANGE), MOST_RANGES)


def word_of(x: Any, stored: str, depth: int, steps: Array) -> int:
    """Elements of a load of 16 bytes, or 1 where some vector does not begin at a multiple of 16 bytes."""
    word = 16 // FORMATS[stored][1].itemsize
    # Allocations begin at multiples of 256 bytes, but an array of the caller may be a part of one.
    start = 0 if simulated() else int(x.__cuda_array_interface__["data"][0])
    return 1 if start % 16 or depth % word or (steps % word).any() else word


def block_for(call: Call, depth: int, dtype: np.dtype[Any]) -> Block | None:
    """The block for a call with few queries per key head; None: only the general kernel can do the call."""
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
    operands: Operands,
    tables: Tables,
    results: tuple[Any, Any],
    call: Call,
    formats: tuple[str, ...],
    steps: list[Array],
    queries: int,
    scales: Scales,
) -> None:
    """Attend ranges of keys, and merge them if there are several.

    Parameters
    ----------
    block : Block
        Its sizes, without those of loads.
    operands, tables : Operands, Tables
        As for the general kernel.
    results : tuple of device array
        Outputs and log-sum-exps.
    call : Call
        The integers of the call.
    formats : tuple of str
        Of queries, keys, values and outputs.
    steps : list of ndarray
        Starts per batch item and steps per head and row, of keys and of values.
    queries : int
        Of all heads and batch items.
    scales : Scales
        Of the products of queries and keys, and a cap.
    """
    dtype, threads = block.dtype, block.threads
    k_word, v_word = (
        word_of(x, stored, size, own)
        for x, stored, size, own in zip(operands[1:], formats[1:3], (block.depth, call.v_dim), steps, strict=True)
    )
    parts, slices = ranges(call.k_len), -(-call.v_dim // threads)
    out, lse = results
    # Of one range nothing is kept for a merger; what is not written to must have an address.
    work = empty(queries * parts * (2 + call.v_dim), dtype) if parts > 1 else kept(np.zeros(1, dtype))[0]
    block = block._replace(k_word=k_word, v_word=v_word)
    blocks = queries // (call.k_group * call.q_len) * slices * parts
    given = operands, tables, Results(out, lse, work), call, Ranges(parts, queries), scales
    launch(decode(block, formats), blocks, threads, *given)
    if parts > 1:
        sizes = queries, parts, call.v_dim, call.wants_lse, call.lse_apart
        launch(merge(dtype, formats[-1], threads), queries * slices, threads, work, out, lse, *sizes)
