"""The CPU backend: streaming kernels in Numba on vector instructions, parallel over blocks of queries."""

from __future__ import annotations

import os
import threading
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from relpos_np.kernels._numba import attend as kernels
from relpos_np.kernels._numba import shift
from relpos_np.kernels._numba.jit import announce
from relpos_np.kernels._numba.plan import make_plan
from relpos_np.problem import Problem
from relpos_np.terms import Terms

__all__ = ["attention", "rel_shift"]

Array = NDArray[Any]

# Work below this many operations is done by the calling thread alone: waking others costs more.
SERIAL_FLOPS = 2e6
# Operations between two looks at signals, about a tenth of a second of one thread.
CALL_FLOPS = 1e10

_local = threading.local()
_lock = threading.Lock()
_home = os.getpid()


def _workspace(threads: int, size: int, dtype: np.dtype[Any]) -> Array:
    """One row per thread, kept between calls of the same Python thread, each beginning on a cache line."""
    line = 64 // dtype.itemsize
    size = -(-size // line) * line
    kept = getattr(_local, "workspace", None)
    if kept is None or kept.nbytes < threads * size * dtype.itemsize + 64:
        kept = np.empty(threads * size * dtype.itemsize + 64, np.uint8)
        _local.workspace = kept
    start = -kept.__array_interface__["data"][0] % 64
    flat = kept[start : start + threads * size * dtype.itemsize].view(dtype)
    return flat.reshape(threads, size)


def available_threads() -> int:
    """Threads a call may use: 1 in a forked child, where the parent's thread pool does not exist."""
    return int(numba.get_num_threads()) if os.getpid() == _home else 1


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None) -> None:
    """Fill `out` and `lse`, both C-contiguous and of the problem's dtype."""
    if not out.size:
        if lse is not None and lse.size:
            _lse_only(problem, terms, lse)
        return
    threads = available_threads()
    plan = make_plan(problem, terms, out, lse, threads)
    if plan.blocks == 1 or plan.flops_per_block * plan.blocks < SERIAL_FLOPS:
        threads = 1
    threads = min(threads, plan.blocks)
    work = _workspace(threads, plan.workspace, problem.site.dtype)
    counter = np.zeros(1, np.int64)
    chunk = max(4 * threads, int(threads * CALL_FLOPS / plan.flops_per_block))
    for start in range(0, plan.blocks, chunk):
        counter[0] = start
        stop = min(start + chunk, plan.blocks)
        records = plan.plan, plan.adds, plan.values, plan.batches
        if threads == 1:
            announce(kernels.attend, (*records, work[0], counter, stop))
        else:
            _guarded(kernels.attend_parallel, (*records, work, counter, stop))


def rel_shift(x: Array, out: Array, variant: str) -> None:
    """Fill `out` with the shifted rows of x."""
    shift.rel_shift(x, out, variant, available_threads(), _guarded)


def _guarded(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Run a parallel kernel; Numba's own pool aborts the process if two Python threads enter it at once."""
    if _layer_is_safe():
        announce(kernel, arguments)
    else:
        with _lock:
            announce(kernel, arguments)


def _layer_is_safe() -> bool:
    try:
        return bool(numba.threading_layer() != "workqueue")
    except ValueError:  # no layer has been started yet
        return False


def _lse_only(problem: Problem, terms: Terms, lse: Array) -> None:
    """D_v = 0: there is no output, but the log-sum-exp is still asked for."""
    from dataclasses import replace

    site = replace(problem.site, v_dim=1)
    v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
    attention(replace(problem, v=v, site=site), replace(terms, values=()), np.empty((*lse.shape, 1), site.dtype), lse)
