"""The CPU backend: streaming kernels in Numba on vector instructions, parallel over blocks of queries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from relpos_np.kernels._numba.arrays import aligned
from relpos_np.kernels._numba.attend import LOG2, attend
from relpos_np.kernels._numba.backplan import BackPlanner
from relpos_np.kernels._numba.backward import backward as backward_kernel
from relpos_np.kernels._numba.build import Kernel
from relpos_np.kernels._numba.cache import cache_folder
from relpos_np.kernels._numba.decode import MOST_ROWS, PACK_DECODE, decode, decode_layout, merge
from relpos_np.kernels._numba.footprint import held
from relpos_np.kernels._numba.launch import SERIAL_FLOPS, available_threads, call_flops, lend, run, run_pieces
from relpos_np.kernels._numba.plan import Planner, is_skewed, is_windowed
from relpos_np.kernels._numba.product import product
from relpos_np.kernels._numba.shift import rel_shift, shift
from relpos_np.kernels._numba.target import BLOCK_KEYS, TARGET
from relpos_np.kernels._numba.window import windows
from relpos_np.problem import Problem
from relpos_np.terms import Terms, nothing
from relpos_np.types import Array

__all__ = ["attention", "backward", "cache_folder", "held", "rel_shift", "warm_up"]

# When decoding memory is waited for: fewer operations of one thread between two looks at signals (`CALL_FLOPS`).
CALL_DECODE_SHARE = 1 / 32
# When decoding, keys are divided into ranges of at least so many blocks, and into so many ranges at most.
PART_BLOCKS, MOST_PARTS = 8, 64
# Below this a single thread decodes: memory is what it waits for, so that it takes longer per operation.
SERIAL_DECODE_FLOPS = 1e6
# Runs of windows per thread, of one call of the kernel.
RUNS = 16

# Every kernel by what it is for and the dtype, where it has one.
KERNELS = {
    "rel_shift": shift,
    **{f"attention float{8 * size}": kernel for size, kernel in attend.items()},
    **{f"windows float{8 * size}": kernel for size, kernel in windows.items()},
    **{f"products float{8 * size}": kernel for size, kernel in product.items()},
    **{f"backward float{8 * size}": kernel for size, kernel in backward_kernel.items()},
    **{f"decoding {name}": kernel for name, kernel in decode.items()},
}


def warm_up() -> Iterator[tuple[str, float]]:
    """Compile every kernel, or load it from the cache; yield its name and the seconds that took."""
    for name, kernel in KERNELS.items():
        started = time.perf_counter()
        _ = kernel.address
        yield name, time.perf_counter() - started


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float = LOG2) -> None:
    """Fill `out` and `lse`, both C-contiguous and of the problem's dtype; lse in units of log 2, times `unit`."""
    if not out.size:
        if lse is not None and lse.size:
            _lse_only(problem, terms, lse, unit)
        return
    if not problem.site.k_len:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    threads = available_threads()
    if _is_decoding(problem, terms):
        _decode(problem, terms, out, lse, threads, unit)
        return
    if is_windowed(problem, terms):
        _windows(problem, terms, out, lse, threads, unit)
        return
    plan = Planner(problem, terms, out, lse, threads).build()
    if plan.flops_per_block * plan.blocks < SERIAL_FLOPS:
        threads = 1
    threads = min(threads, plan.blocks)
    fields = plan.fields
    fields["lse_unit"] = unit
    plan.kept.append(lend(fields, plan.workspace * problem.site.dtype.itemsize, threads))
    kernel = attend[problem.site.dtype.itemsize]
    chunk = int(threads * call_flops(problem.site.dtype.itemsize) / plan.flops_per_block)
    run_pieces(kernel, fields, plan.pack, plan.blocks, chunk, threads)


def _is_decoding(problem: Problem, terms: Terms) -> bool:
    """Whether there are so few queries for each key that packing the keys would not pay."""
    site = problem.site
    heads = site.kv_heads if terms.key is None else terms.key.shape[-3]
    if heads != site.kv_heads or site.heads // heads * site.q_len > MOST_ROWS:
        return False
    return not (terms.values or problem.keep is not None or any(is_skewed(term) for term in terms.queries))


def _windows(problem: Problem, terms: Terms, out: Array, lse: Array | None, threads: int, unit: float) -> None:
    """Run the kernel for few keys, on runs of its pieces, of which each is fetched during the one before."""
    plan = Planner(problem, terms, out, lse, threads, windowed=True).build()
    if plan.flops_per_block * plan.blocks < SERIAL_FLOPS:
        threads = 1
    threads = min(threads, plan.blocks)
    fields = plan.fields
    fields["lse_unit"] = unit
    plan.kept.append(lend(fields, plan.workspace * problem.site.dtype.itemsize, threads))
    most = max(int(call_flops(problem.site.dtype.itemsize) / (RUNS * plan.flops_per_block)), 1)
    length = fields["run"] = min(-(-plan.blocks // (RUNS * threads)), most)
    step = RUNS * threads * length
    for start in range(0, plan.blocks, step):
        fields["counter"], fields["stop"] = start // length, min(start + step, plan.blocks)
        run(windows[problem.site.dtype.itemsize], plan.pack(), threads)


def _decode(problem: Problem, terms: Terms, out: Array, lse: Array | None, threads: int, unit: float) -> None:
    """Run the kernel for few queries, on several ranges of keys if there are too few heads for the threads."""
    site, dtype = problem.site, problem.site.dtype
    kernel, narrow = decode["float32" if dtype.itemsize == 4 else "float64"], False
    stored = problem.stored_k.dtype
    # Terms that were made of the keys hold them in the dtype of the computation.
    if stored is not dtype and stored == problem.stored_v.dtype != dtype and terms.key is None:
        narrow = stored.name in decode
        kernel = decode.get(stored.name, kernel)
    plan = Planner(problem, terms, out, lse, threads, narrow=narrow).build()
    f = plan.fields
    f["lse_unit"] = unit
    count = f["count"] * site.heads
    # The number of parts decides about rounding: it depends on the keys alone, not on threads or the batch.
    parts = min(max(-(-site.k_len // BLOCK_KEYS) // PART_BLOCKS, 1), MOST_PARTS)
    pieces = count // f["k_group"] * parts
    flops = 2.0 * count * site.q_len * site.k_len * (f["depth"] + site.v_dim)
    threads = 1 if flops < SERIAL_DECODE_FLOPS else min(threads, pieces)
    lanes = TARGET.lanes(dtype.itemsize)
    size = decode_layout.py_func(f["depth"], site.v_dim, lanes)[-1]
    plan.kept.append(lend(f, size * dtype.itemsize, threads))
    partial = np.empty((count * site.q_len, parts, 2 + site.v_dim), dtype) if parts > 1 else None
    tail = PACK_DECODE(parts, 0 if partial is None else partial.ctypes.data)
    chunk = int(threads * CALL_DECODE_SHARE * call_flops(dtype.itemsize) * pieces / flops)
    run_pieces(kernel, f, lambda: plan.pack() + tail, pieces, chunk, threads)
    if partial is not None:
        merge(partial, out, lse, unit)


def backward(problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None) -> tuple[Terms, Array]:
    """Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v."""
    dtype = problem.site.dtype
    out, lse = np.empty(problem.out_shape, dtype), np.empty(problem.out_shape[:-1], dtype)
    if not (lse.size and problem.site.k_len):
        return nothing(terms, problem.q, problem.k, problem.v)
    # In units of log 2, as the scores are: changing the unit twice would lose digits of large scores.
    attention(problem, terms, out, lse, 1.0)
    threads = available_threads()
    planner = BackPlanner(problem, terms, out, lse, grad_out, grad_lse, threads)
    pieces, workspace = planner.plan()
    threads = min(threads, pieces)
    record = planner.fields
    kernel, site = backward_kernel[dtype.itemsize], problem.site
    pairs = lse.size * site.k_len
    flops = 2.0 * pairs * (3 * record["depth"] + 2 * site.v_dim + 3 * record["skew_depth"])
    if flops < SERIAL_FLOPS:
        threads = 1
    most = call_flops(dtype.itemsize)
    if flops <= most * pieces:
        planner.kept.append(lend(record, workspace * dtype.itemsize, threads))
        run_pieces(kernel, record, planner.pack, pieces, int(threads * most * pieces / flops), threads)
    else:
        _long_pieces(planner, kernel, pieces, workspace, flops / most, threads)
    return planner.collect()


def _long_pieces(planner: BackPlanner, kernel: Kernel, pieces: int, workspace: int, calls: float, threads: int) -> None:
    """Cut pieces of work that take long by their keys; what they have summed waits between calls, one place a piece."""
    record, extra, itemsize = planner.fields, planner.extra, planner.dtype.itemsize
    # Pieces of one head take as long as one another; its ranges do not, so that several per thread are under way.
    chunk = min(threads if planner.parts == 1 else 4 * threads, pieces)
    stride = -(-workspace * itemsize // 64) * 64
    # A place of their own: whoever calls from a signal's handler in between would use the thread's.
    places = aligned((chunk * stride // itemsize,), planner.dtype, None)
    record["work"], record["work_stride"] = places.ctypes.data, stride
    cuts = -(-int(calls * chunk) // (pieces * threads))
    extra["cuts"] = max(2, min(cuts, -(-planner.site.k_len // BLOCK_KEYS)))
    for start in range(0, pieces, chunk):
        extra["origin"] = start
        for cut in range(extra["cuts"]):
            extra["cut"] = cut
            record["counter"], record["stop"] = start, min(start + chunk, pieces)
            run(kernel, planner.pack(), threads)


def _lse_only(problem: Problem, terms: Terms, lse: Array, unit: float) -> None:
    """D_v = 0: there is no output, but the log-sum-exp is still asked for."""
    site = replace(problem.site, v_dim=1)
    v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
    out = np.empty((*lse.shape, 1), site.dtype)
    attention(replace(problem, stored_v=v, site=site), replace(terms, values=()), out, lse, unit)
