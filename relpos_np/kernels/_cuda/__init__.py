"""The CUDA backend: kernels in numba.cuda for the same terms, on arrays of the host or of the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms, ValueTerm, nothing
from relpos_np.kernels._cuda.launch import device

__all__ = ["attention", "backward", "rel_shift", "require"]

# Dtypes of results.
WRITES = ("float64", "float32")


def require() -> None:
    """Raise RelposImportError unless there is a device, or the simulator."""
    device.module()


@device.tidied()
def attention(
    problem: Problem,
    terms: Terms,
    out: Any,
    lse: Any,
    operands: tuple[Any, Any, Any] | None = None,
) -> None:
    """Fill `out` and `lse`, both C-contiguous.

    `operands`, q, k and v, are arrays of NumPy, or `Operand` as are `out` and `lse` then; they may be of half
    precision.
    """
    from relpos_np.kernels._cuda.arrays.operand import Operand
    from relpos_np.kernels._cuda.plan.forward import Forward

    site = problem.site
    if operands is None:
        operands = problem.stored_q, problem.stored_k, problem.stored_v
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
        if isinstance(out, Operand):
            out = Operand.empty((*lse.shape, 1), site.dtype)
        else:
            out = np.empty((*lse.shape, 1), site.dtype)
        operands = *operands[:2], v
    Forward(problem, terms, operands, fused=True, on_matrix_units=True).run(out, lse)


@device.tidied()
def rel_shift(x: Any, out: Any, variant: str, *, used: bool = False) -> None:  # noqa: ARG001
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; `used` makes no difference here.

    Both are arrays of NumPy, or both are `Operand`.
    """
    from relpos_np.kernels._cuda.forward_pass import shift

    shift.rel_shift(x, out, variant)


def backward(
    problem: Problem, terms: Terms, grad_out: Any, grad_lse: Any, operands: tuple[Any, Any, Any] | None = None
) -> tuple[Terms, Any]:
    """Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v.

    `operands` as in `attention`; where they are `Operand`, so are `grad_out`, `grad_lse` and gradients of vectors.
    """
    from relpos_np.kernels._cuda.plan.backward import Backward

    site = problem.site
    if not math.prod((*problem.out_shape[:-1], site.k_len)):
        return nothing(terms, problem.q, problem.k, problem.v)
    if not site.v_dim:
        # D_v = 0: there is no output, but the log-sum-exp may have a gradient.
        values = tuple(ValueTerm(np.zeros_like(value.weights), value.index) for value in terms.values)
        v = np.zeros((*problem.v.shape[:-1], 1), site.dtype)
        empty, problem, terms = (
            np.zeros_like(problem.v),
            replace(problem, stored_v=v, site=replace(site, v_dim=1)),
            replace(terms, values=()),
        )
        operands = None if operands is None else (*operands[:2], v)
        grads, _ = backward(problem, terms, np.zeros(problem.out_shape, site.dtype), grad_lse, operands)
        grads.values = values
        return grads, empty
    if operands is None:
        operands = problem.q, problem.stored_k, problem.stored_v
    call = Backward(problem, terms, operands, grad_out, grad_lse)
    call.launch()
    return call.collect()
