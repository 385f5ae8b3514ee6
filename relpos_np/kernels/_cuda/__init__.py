"""The CUDA backend: kernels in numba.cuda for the same terms, on arrays of the host or of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Never

import numpy as np

from relpos_np.errors import RelposError
from relpos_np.kernels._cuda import device
from relpos_np.problem import Problem
from relpos_np.terms import Terms

__all__ = ["attention", "backward", "rel_shift", "require"]


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
    from relpos_np.kernels._cuda.operand import Operand
    from relpos_np.kernels._cuda.plan import Planner

    site = problem.site
    if operands is None:
        operands = problem.q, problem.stored_k, problem.stored_v
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
    Planner(problem, terms, operands, fused=True).run(out, lse)


@device.tidied()
def rel_shift(x: Any, out: Any, variant: str, *, used: bool = False) -> None:  # noqa: ARG001
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; `used` makes no difference here.

    Both are arrays of NumPy, or both are `Operand`.
    """
    from relpos_np.kernels._cuda import shift

    shift.rel_shift(x, out, variant)


def backward(*_: object) -> Never:
    """Refuse: there are no gradients yet."""
    raise RelposError("backend: 'cuda' has no gradients yet; use backend=\"numba\"")
