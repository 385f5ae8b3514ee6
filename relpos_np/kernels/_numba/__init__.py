"""The CPU backend: streaming kernels in Numba on vector instructions, parallel over blocks of queries."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms, nothing
from relpos_np.kernels._numba.arrays import address_of, aligned
from relpos_np.kernels._numba.attend import LOG2, attend
from relpos_np.kernels._numba.backplan import BackPlanner
from relpos_np.kernels._numba.backward import backward as backward_kernel
from relpos_np.kernels._numba.build import Kernel
from relpos_np.kernels._numba.cache import cache_folder
from relpos_np.kernels._numba.decode import PACK_DECODE, decode, merge
from relpos_np.kernels._numba.footprint import held
from relpos_np.kernels._numba.job import prepare
from relpos_np.kernels._numba.launch import SERIAL_FLOPS, available_threads, call_flops, lend, run, run_pieces
from relpos_np.kernels._numba.product import product
from relpos_np.kernels._numba.shift import rel_shift, shift
from relpos_np.kernels._numba.target import BLOCK_KEYS
from relpos_np.kernels._numba.window import windows
from relpos_np.types import Array

__all__ = ["attention", "backward", "cache_folder", "held", "rel_shift", "warm_up"]

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
    job, planner = prepare(problem, terms, out, lse)
    fields, partial = planner.fields, None
    fields["lse_unit"] = unit
    planner.kept.append(lend(fields, job.workspace, job.threads))
    if job.parts:
        if job.parts > 1:
            partial = np.empty((math.prod(out.shape[:-1]), job.parts, 2 + problem.site.v_dim), out.dtype)
        planner.tail = PACK_DECODE(job.parts, 0 if partial is None else address_of(partial))
    run_pieces(job.kernel, fields, planner.pack, job.pieces, job.chunk, job.threads, job.unit)
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
    record["work"], record["work_stride"] = address_of(places), stride
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
