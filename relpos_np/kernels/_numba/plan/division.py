"""How a call's work is divided: blocks of queries, or ranges of keys, among threads and calls of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np.kernels._numba.forward_pass.attend import layout
from relpos_np.kernels._numba.forward_pass.decode import decode_layout
from relpos_np.kernels._numba.forward_pass.planes import plane_layout
from relpos_np.kernels._numba.forward_pass.work import BRAIN, CODE, HALF, pair_steps
from relpos_np.kernels._numba.launch.launcher import SERIAL_FLOPS, call_flops
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM, TARGET, block_queries

# A band of fewer keys is narrow.
NARROW = 8 * BLOCK_KEYS
# Decoding waits for memory: this share of a thread's operations between two looks at signals (`CALL_FLOPS`).
CALL_DECODE_SHARE = 1 / 32
# When decoding, keys are divided into ranges of at least so many blocks, and into so many ranges at most.
PART_BLOCKS, MOST_PARTS = 8, 64
# Bytes of a page of memory, as most systems have it; and pieces of decoding that are left for a thread at least.
MEMORY_PAGE, PIECES_OF_THREAD = 4096, 2
# Below this a single thread decodes: it waits for memory, so that it takes longer per operation.
SERIAL_DECODE_FLOPS = 1e6
# Runs of windows per thread, of one call of the kernel.
RUNS = 16


@dataclass(frozen=True, slots=True)
class Division:
    """How many pieces of work, for how many threads.

    `workspace` bytes for each of `threads` threads. A call of the kernel does about `chunk` of the `pieces`; the
    record counts in units of `unit` pieces. `parts`: ranges of keys of each head that is decoded, 0 otherwise; a piece
    is of `together` key heads.
    `size`: all work, in units of that from which on there are threads.
    """

    pieces: int
    chunk: int
    threads: int
    workspace: int
    size: float
    unit: int = 1
    parts: int = 0
    together: int = 1


def into_blocks(call: Call, *, windowed: bool) -> Division:
    """Blocks of queries, each over all of its keys; windows in runs, in which the next is always being fetched."""
    site, f, item = call.site, call.fields, call.dtype.itemsize
    heads = call.count * site.heads
    block = block_of(call, site.q_len, site.k_len, heads, windowed=windowed)
    blocks = -(-site.q_len // block)
    # The kernel for windows writes whole tiles in place: it needs blocks of about the same length.
    f["block_queries"], f["blocks"] = -(-site.q_len // blocks) if windowed else block, blocks
    workspace = block_workspace(call, block)
    pieces, flops = heads * blocks, pair_flops(call) * block * min(site.k_len, f["left"] + f["right"] + block)
    size = flops * pieces / SERIAL_FLOPS
    threads = 1 if size < 1.0 else min(call.threads, pieces)
    if not windowed:
        return Division(pieces, int(threads * call_flops(item) / flops), threads, workspace, size)
    unit = f["run"] = min(-(-pieces // (RUNS * threads)), max(int(call_flops(item) / (RUNS * flops)), 1))
    return Division(pieces, RUNS * threads * unit, threads, workspace, size, unit)


def pair_flops(call: Call) -> float:
    """Operations for each pair of query and key: of products, and of what is gathered and collected."""
    f, lanes = call.fields, TARGET.lanes(call.dtype.itemsize)
    width = -(-call.site.v_dim // lanes) * lanes
    flops: float = 2.0 * (f["depth"] + width + 2 * f["skew_depth"] + 8 * f["add_count"] + 8 * f["value_count"])
    return flops


def block_of(call: Call, q_len: int, k_len: int, heads: int, *, windowed: bool) -> int:
    """Queries of a block, of so many heads with so many queries and keys each."""
    f, item = call.fields, call.dtype.itemsize
    lanes, band = TARGET.lanes(item), f["left"] + f["right"]
    width, narrow = -(-call.site.v_dim // lanes) * lanes, bool(f["skew_depth"]) or windowed or band < NARROW
    block: int = block_queries(q_len, f["depth"], width, item, heads, call.threads, narrow=narrow)
    # A block is not interrupted: with very many keys it has fewer queries.
    most = int(2 * call_flops(item) / (pair_flops(call) * max(min(k_len, band + block), 1)))
    return min(block, max(most // ROW_QUANTUM, 2) * ROW_QUANTUM)


def block_workspace(call: Call, block: int) -> int:
    """Bytes of a thread's workspace for blocks of so many queries."""
    f, item = call.fields, call.dtype.itemsize
    lanes, depth = TARGET.lanes(item), f["depth"]
    width = -(-call.site.v_dim // lanes) * lanes
    end = layout.py_func(block, f["steps"], width, f["skew_depth"], f["bins"], lanes).end
    numbers: int = plane_layout.py_func(end, block, pair_steps.py_func(depth), width, f["planes"], lanes).end
    # A block of keys and values that is copied out of pages.
    copied = BLOCK_KEYS * (depth + call.site.v_dim) if call.problem.is_paged else 0
    return (numbers + copied) * item


def key_parts(k_len: Any) -> Any:
    """Ranges of so many keys, or of each of several numbers of keys, that are decoded apart.

    It decides about rounding: it depends on the keys alone, not on threads or the batch.
    """
    return np.maximum(np.minimum((k_len + (BLOCK_KEYS - 1)) // (BLOCK_KEYS * PART_BLOCKS), MOST_PARTS), 1)


def heads_together(beside: int, pieces: int, threads: int) -> int:
    """How many key heads a piece of work has, of so many pieces of one head each, to leave enough for all threads.

    `beside`: how many are best read together.
    """
    return max(min(beside, pieces // (PIECES_OF_THREAD * threads)), 1)


def heads_beside(head: int, row: int, heads: int) -> int:
    """How many key heads are best read together, with so many bytes from head to head, and from row to row.

    Heads whose rows lie side by side within a page of memory, while the rows of a head do not: to read those of one
    head alone would address each page of memory once for each head.
    """
    return min(max(MEMORY_PAGE // head, 1), heads) if 0 < head < row else 1


def decode_workspace(depth: int, v_depth: int, turn: int, item: int, together: int) -> int:
    """Bytes of a thread's workspace in decoding so many key heads at a time."""
    numbers: int = decode_layout.py_func(depth, v_depth, turn, TARGET.lanes(item), together - 1).end
    return numbers * item


def into_parts(call: Call) -> Division:
    """Heads of keys, each in several ranges of keys if there are many keys."""
    site, f, item = call.site, call.fields, call.dtype.itemsize
    heads, parts = call.count * site.heads, int(key_parts(site.k_len))
    kv_heads = site.heads // f["k_group"]
    size = {CODE: 1, HALF: 2, BRAIN: 2}.get(f["k_kind"], item)
    beside = heads_beside(f["k_head"] * size, f["k_row"] * size, kv_heads)
    together = heads_together(beside, call.count * kv_heads * parts, call.threads)
    pieces = call.count * -(-kv_heads // together) * parts
    flops = 2.0 * heads * site.q_len * site.k_len * (f["depth"] + site.v_dim)
    size = flops / SERIAL_DECODE_FLOPS
    threads = 1 if size < 1.0 else min(call.threads, pieces)
    chunk = int(threads * CALL_DECODE_SHARE * call_flops(item) * pieces / flops)
    workspace = decode_workspace(f["depth"], site.v_dim, f["turn"], item, together)
    return Division(pieces, chunk, threads, workspace, size, parts=parts, together=together)
