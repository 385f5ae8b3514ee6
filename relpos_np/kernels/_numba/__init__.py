"""The CPU backend: streaming kernels in Numba on vector instructions, parallel over blocks of queries."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np.kernels._numba.attend import attend
from relpos_np.kernels._numba.launch import available_threads, run
from relpos_np.kernels._numba.plan import make_plan
from relpos_np.kernels._numba.shift import rel_shift
from relpos_np.problem import Problem
from relpos_np.terms import Terms
from relpos_np.types import Array

__all__ = ["attention", "rel_shift"]

# Work below this many operations is done by the calling thread alone: waking others costs more.
SERIAL_FLOPS = 1e7
# Operations of one thread between two looks at signals: about a tenth of a second.
CALL_FLOPS = 1e10
# A workspace of up to this many bytes is kept for the thread's next call.
KEEP_BYTES = 64 * 1024 * 1024

_local = threading.local()


def _workspace(size: int) -> tuple[Any, int]:
    """At least `size` bytes, and the address of the first cache line in them."""
    kept, address, room = getattr(_local, "workspace", (None, 0, -1))
    if room < size:
        kept = np.empty(size + 64, np.uint8)
        address = kept.ctypes.data + -kept.ctypes.data % 64
        if size <= KEEP_BYTES:
            _local.workspace = kept, address, size
    return kept, address


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None) -> None:
    """Fill `out` and `lse`, both C-contiguous and of the problem's dtype."""
    if not out.size:
        if lse is not None and lse.size:
            _lse_only(problem, terms, lse)
        return
    if not problem.site.k_len:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    threads = available_threads()
    plan = make_plan(problem, terms, out, lse, threads)
    if plan.flops_per_block * plan.blocks < SERIAL_FLOPS:
        threads = 1
    threads = min(threads, plan.blocks)
    stride = -(-plan.workspace * problem.site.dtype.itemsize // 64) * 64
    memory, address = _workspace(threads * stride)
    plan.kept.append(memory)
    fields = plan.fields
    fields["work"], fields["work_stride"] = address, stride
    kernel = attend[problem.site.dtype.itemsize]
    chunk = max(4 * threads, int(threads * CALL_FLOPS / plan.flops_per_block))
    for start in range(0, plan.blocks, chunk):
        fields["counter"], fields["stop"] = start, min(start + chunk, plan.blocks)
        run(kernel, plan.pack(), threads)


def _lse_only(problem: Problem, terms: Terms, lse: Array) -> None:
    """D_v = 0: there is no output, but the log-sum-exp is still asked for."""
    site = replace(problem.site, v_dim=1)
    v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
    attention(replace(problem, v=v, site=site), replace(terms, values=()), np.empty((*lse.shape, 1), site.dtype), lse)
