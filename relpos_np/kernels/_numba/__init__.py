"""The CPU backend: streaming kernels in Numba on vector instructions, parallel over blocks of queries."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem, name_of
from relpos_np._contract.terms import Terms, nothing
from relpos_np.kernels._numba.backward_pass.kernel import backward as backward_kernel
from relpos_np.kernels._numba.forward_pass.attend import attend
from relpos_np.kernels._numba.forward_pass.decode import MOST_ROWS, decode
from relpos_np.kernels._numba.forward_pass.gated_positions import count, recount
from relpos_np.kernels._numba.forward_pass.product import product
from relpos_np.kernels._numba.forward_pass.shift import rel_shift, shift
from relpos_np.kernels._numba.forward_pass.window import windows
from relpos_np.kernels._numba.forward_pass.work import LOG2
from relpos_np.kernels._numba.launch.cache import cache_folder
from relpos_np.kernels._numba.plan import by_rows, ends, job, sequence_gradients, sequences
from relpos_np.kernels._numba.plan.backward_job import BackwardJob, readable_gradient
from relpos_np.kernels._numba.plan.prepared import prepare
from relpos_np.kernels._numba.plan.sequences import prepare_sequences
from relpos_np.kernels._numba.plan.workspace_bytes import workspace_bytes
from relpos_np.kernels._numba.simd.target import CONVERTS_HALF, TILED, UNIT
from relpos_np.types import Array

__all__ = [
    "attention",
    "backward",
    "cache_folder",
    "prepare",
    "prepare_sequences",
    "rel_shift",
    "warm_up",
    "workspace_bytes",
]

# Dtypes of results.
WRITES = ("float64", "float32", "bfloat16", *(("float16",) if CONVERTS_HALF else ()))

# What is multiplied by a unit that this process does not use.
_ABSENT = {*(("bfloat16",) if UNIT == "none" else ()), *(() if TILED else ("planes",))}
# Every kernel that this processor may run, by what it is for and the dtype, where it has one.
KERNELS = {
    "rel_shift": shift,
    **{f"attention {name}": kernel for name, kernel in attend.items() if name not in _ABSENT},
    **{f"windows {name}": kernel for name, kernel in windows.items() if name not in _ABSENT},
    **{f"products {name}": kernel for name, kernel in product.items()},
    **{f"counted positions {name}": kernel for name, kernel in count.items()},
    **{f"gradients of counted positions {name}": kernel for name, kernel in recount.items()},
    **{f"backward {name}": kernel for name, kernel in backward_kernel.items() if name not in _ABSENT},
    **{f"decoding {name}": kernel for name, kernel in decode.items()},
}


def warm_up() -> Iterator[tuple[str, float]]:
    """Compile every kernel, or load it from the cache; yield its name and the seconds that took."""
    for name, kernel in KERNELS.items():
        started = time.perf_counter()
        _ = kernel.address
        yield name, time.perf_counter() - started


def decodes(dtype: np.dtype[Any], rows: int) -> bool:
    """Whether the kernel for few queries reads keys and values of a dtype as they lie, for so many queries of each."""
    return name_of(dtype) in decode and rows <= MOST_ROWS


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float = LOG2) -> None:
    """Fill `out` and `lse`, both C-contiguous, `out` perhaps in half precision; lse in units of log 2, times `unit`."""
    if not out.size:
        if lse is not None and lse.size:
            _lse_only(problem, terms, lse, unit)
        return
    if not problem.site.k_len:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    if problem.sequences is not None:
        sequences.attention(problem, terms, out, lse, unit)
        return
    run = by_rows.attention if by_rows.needed(terms) else job.attention
    run(problem, terms, out, lse, unit)


def backward(
    problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None, *, stored: bool = False
) -> tuple[Terms, Array]:
    """Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v.

    `stored`: where nothing is to be added to a gradient of q, k or v, it is in the dtype in which that is stored.
    """
    if not (math.prod(problem.out_shape[:-1]) and problem.site.k_len):
        return nothing(terms, problem.q, problem.k, problem.v)
    if by_rows.needed(terms):
        return by_rows.backward(problem, terms, grad_out, grad_lse, _backward, stored=stored)
    return _backward(problem, terms, grad_out, grad_lse, stored=stored)


def _backward(
    problem: Problem,
    terms: Terms,
    grad_out: Array,
    grad_lse: Array | None,
    *,
    stored: bool = False,
    watched: bool = True,
) -> tuple[Terms, Array]:
    """`backward` of a call that has queries and keys, and biases that are arrays."""
    dtype = problem.site.dtype
    # With what their rounding has lost.
    lse = np.zeros((2, *problem.out_shape[:-1]), dtype)
    delta = np.zeros(problem.out_shape[:-1], dtype)
    grad_out = readable_gradient(problem, terms, grad_out)
    attend = job.attention if problem.sequences is None else sequences.attention
    # In units of log 2, as the scores are: changing the unit twice would lose digits of large scores.
    if problem.site.v_dim:
        attend(problem, terms, delta, lse, 1.0, grad_out, watched=watched)
    else:
        _lse_only(problem, terms, lse[0], 1.0)
    if watched and ends.reached(problem, terms):

        def again(part: Problem, own: Terms) -> tuple[Terms, Array]:
            return _backward(part, own, grad_out, grad_lse, stored=stored, watched=False)

        return ends.gradients_again(attend, again, problem, terms)
    if problem.sequences is not None:
        return sequence_gradients.backward(problem, terms, lse, delta, grad_out, grad_lse, stored=stored)
    work = BackwardJob(problem, terms, lse, delta, grad_out, grad_lse, stored=stored)
    work.run()
    return work.gradients()


def _lse_only(problem: Problem, terms: Terms, lse: Array, unit: float) -> None:
    """D_v = 0: there is no output, but the log-sum-exp is still asked for."""
    site = replace(problem.site, v_dim=1)
    v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
    out = np.empty((*lse.shape, 1), site.dtype)
    attention(replace(problem, stored_v=v, site=site), replace(terms, values=()), out, lse, unit)
