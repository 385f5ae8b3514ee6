"""The CUDA backend: kernels in numba.cuda for the same terms, on arrays that are copied to the device and back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from relpos_np.gradient import nothing
from relpos_np.kernels._cuda import device
from relpos_np.problem import Problem
from relpos_np.terms import Terms, ValueTerm
from relpos_np.types import Array

__all__ = ["attention", "backward", "rel_shift", "require"]


def require() -> None:
    """Raise RelposImportError unless there is a device, or the simulator."""
    device.module()


def attention(problem: Problem, terms: Terms, out: Array, lse: Array | None) -> None:
    """Fill `out` and `lse`, both C-contiguous and of the problem's dtype."""
    from relpos_np.kernels._cuda.plan import Planner

    site = problem.site
    if not out.size and (lse is None or not lse.size):
        return
    if not site.k_len:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    if not out.size and lse is not None:
        # D_v = 0: there is no output, but the log-sum-exp is still asked for.
        site = replace(site, v_dim=1)
        v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
        problem, terms = replace(problem, stored_v=v, site=site), replace(terms, values=())
        out = np.empty((*lse.shape, 1), site.dtype)
    Planner(problem, terms, fused=True).run(out, lse)


def rel_shift(x: Array, out: Array, variant: str, *, used: bool = False) -> None:  # noqa: ARG001
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; `used` makes no difference here."""
    from relpos_np.kernels._cuda import shift

    shift.rel_shift(x, out, variant)


def backward(problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None) -> tuple[Terms, Array]:
    """Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v."""
    from relpos_np.kernels._cuda.backplan import BackPlanner

    site = problem.site
    if not math.prod((*problem.out_shape[:-1], site.k_len)):
        return nothing(problem, terms)
    if not site.v_dim:
        # D_v = 0: there is no output, but the log-sum-exp may have a gradient.
        values = tuple(ValueTerm(np.zeros_like(value.weights), value.index) for value in terms.values)
        v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
        empty, problem, terms = (
            np.zeros_like(problem.v),
            replace(problem, stored_v=v, site=replace(site, v_dim=1)),
            replace(terms, values=()),
        )
        grads, _ = backward(problem, terms, np.zeros(problem.out_shape, site.dtype), grad_lse)
        grads.values = values
        return grads, empty
    planner = BackPlanner(problem, terms, grad_out, grad_lse)
    planner.launch()
    return planner.collect()
