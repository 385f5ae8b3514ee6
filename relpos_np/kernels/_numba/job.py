"""A call of attention as work for a kernel: which kernel, its record, how many pieces on how many threads.

Nearly all of it depends on sizes alone, and is kept: of small calls planning would be most of the time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Dense, Terms
from relpos_np.kernels._numba.attend import attend
from relpos_np.kernels._numba.build import Kernel
from relpos_np.kernels._numba.decode import MOST_ROWS, decode, decode_layout
from relpos_np.kernels._numba.launch import SERIAL_FLOPS, available_threads, call_flops
from relpos_np.kernels._numba.plan import Planner, is_skewed, is_windowed
from relpos_np.kernels._numba.target import BLOCK_KEYS, TARGET
from relpos_np.kernels._numba.window import windows
from relpos_np.types import Array

# When decoding memory is waited for: fewer operations of one thread between two looks at signals (`CALL_FLOPS`).
CALL_DECODE_SHARE = 1 / 32
# When decoding, keys are divided into ranges of at least so many blocks, and into so many ranges at most.
PART_BLOCKS, MOST_PARTS = 8, 64
# Below this a single thread decodes: memory is what it waits for, so that it takes longer per operation.
SERIAL_DECODE_FLOPS = 1e6
# Runs of windows per thread, of one call of the kernel.
RUNS = 16
# Jobs that are kept, and batch items of those: larger calls take longer than their planning.
MOST_JOBS, MOST_ITEMS = 256, 64


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What calls of the same sizes have in common.

    `workspace` bytes for each of `threads` threads. A call of the kernel does about `chunk` of the `pieces`; the
    record counts in units of `unit` pieces. `parts`: ranges of keys of each piece that is decoded; 0 for the
    other kernels. `narrow` and `windowed` are the planner's, and so is `batches`, a table that the record names.
    """

    kernel: Kernel
    fields: dict[str, Any]
    batches: Array
    pieces: int
    chunk: int
    threads: int
    workspace: int
    unit: int = 1
    parts: int = 0
    narrow: bool = False
    windowed: bool = False


_known: dict[Hashable, Job] = {}


def prepare(problem: Problem, terms: Terms, out: Array, lse: Array | None) -> tuple[Job, Planner]:
    """The work of a call, and its record with the arrays that it names."""
    threads = available_threads()
    key = _sizes(problem, terms, lse is None, threads)
    job = None if key is None else _known.get(key)
    if job is not None:
        planner = Planner(problem, terms, out, lse, threads, narrow=job.narrow, windowed=job.windowed)
        planner.repeat(job.fields, job.batches)
        return job, planner
    if _is_decoding(problem, terms):
        job, planner = _decoding(problem, terms, out, lse, threads)
    else:
        job, planner = _streaming(problem, terms, out, lse, threads)
    # What is gathered in the kernel has records of its own.
    if key is not None and not planner.fields["add_count"] and planner.count <= MOST_ITEMS:
        if len(_known) >= MOST_JOBS:
            _known.clear()
        _known[key] = job
    return job, planner


def _sizes(problem: Problem, terms: Terms, no_lse: bool, threads: int) -> Hashable | None:
    """All that a job depends on; None if it depends on what arrays hold, beside tables."""
    if terms.queries or terms.keys or terms.values or terms.biases:
        return None
    if problem.mask is not None or problem.key_lengths is not None or problem.keep is not None:
        return None
    site = problem.site
    q = problem.q if terms.query is None else terms.query
    k, v = problem.stored_k if terms.key is None else terms.key, problem.stored_v
    maps = tuple([t.index.index.ndim if isinstance(t.index, Dense) else 0 for t in terms.tables])
    # The axes of strides are those of shapes; the lengths of v's are among the others.
    return (
        *(site.batch, site.heads, site.kv_heads, site.q_len, site.k_len, site.v_dim, site.offset, site.scale),
        *(problem.left, problem.right, site.dtype.char, no_lse, threads, maps),
        *(q.shape, q.strides, k.shape, k.strides, k.dtype.char, v.strides, v.dtype.char),
    )


def _streaming(problem: Problem, terms: Terms, out: Array, lse: Array | None, threads: int) -> tuple[Job, Planner]:
    """Blocks of queries, each over all of its keys; for few keys in runs, of which each is fetched during the last."""
    windowed, item = is_windowed(problem, terms), problem.site.dtype.itemsize
    planner = Planner(problem, terms, out, lse, threads, windowed=windowed)
    planner.build()
    pieces, flops = planner.blocks, planner.flops_per_block
    threads = 1 if flops * pieces < SERIAL_FLOPS else min(threads, pieces)
    kernel, unit, chunk = attend[item], 1, int(threads * call_flops(item) / flops)
    if windowed:
        most = max(int(call_flops(item) / (RUNS * flops)), 1)
        kernel, unit = windows[item], min(-(-pieces // (RUNS * threads)), most)
        planner.fields["run"], chunk = unit, RUNS * threads * unit
    room = planner.workspace * item
    fields = planner.fields.copy()
    return Job(kernel, fields, planner.batches, pieces, chunk, threads, room, unit, windowed=windowed), planner


def _is_decoding(problem: Problem, terms: Terms) -> bool:
    """Whether there are so few queries for each key that packing the keys would not pay."""
    site = problem.site
    heads = site.kv_heads if terms.key is None else terms.key.shape[-3]
    if heads != site.kv_heads or site.heads // heads * site.q_len > MOST_ROWS:
        return False
    return not (terms.values or problem.keep is not None or any(is_skewed(term) for term in terms.queries))


def _decoding(problem: Problem, terms: Terms, out: Array, lse: Array | None, threads: int) -> tuple[Job, Planner]:
    """Heads of keys, each in several ranges of keys if there are too few heads for the threads."""
    site, dtype = problem.site, problem.site.dtype
    kernel, narrow = decode["float32" if dtype.itemsize == 4 else "float64"], False
    stored = problem.stored_k.dtype
    # Terms that were made of the keys hold them in the dtype of the computation.
    if stored is not dtype and stored == problem.stored_v.dtype != dtype and terms.key is None:
        narrow = stored.name in decode
        kernel = decode.get(stored.name, kernel)
    planner = Planner(problem, terms, out, lse, threads, narrow=narrow)
    planner.build()
    f = planner.fields
    count = f["count"] * site.heads
    # The number of parts decides about rounding: it depends on the keys alone, not on threads or the batch.
    parts = min(max(-(-site.k_len // BLOCK_KEYS) // PART_BLOCKS, 1), MOST_PARTS)
    pieces = count // f["k_group"] * parts
    flops = 2.0 * count * site.q_len * site.k_len * (f["depth"] + site.v_dim)
    threads = 1 if flops < SERIAL_DECODE_FLOPS else min(threads, pieces)
    chunk = int(threads * CALL_DECODE_SHARE * call_flops(dtype.itemsize) * pieces / flops)
    room = decode_layout.py_func(f["depth"], site.v_dim, TARGET.lanes(dtype.itemsize))[-1] * dtype.itemsize
    return Job(kernel, f.copy(), planner.batches, pieces, chunk, threads, room, parts=parts, narrow=narrow), planner
