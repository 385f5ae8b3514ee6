"""From the schemes of a call to its terms, and from gradients of terms back to those of operands and schemes."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem, Site
from relpos_np._contract.terms import Terms
from relpos_np._contract.turned import Turning
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array


def checked_schemes(position: Any, problem: Problem) -> tuple[Scheme, ...]:
    """The schemes of a call, checked against it."""
    if position is None:
        return ()
    schemes = position if isinstance(position, tuple) else (position,)
    for scheme in schemes:
        if not isinstance(scheme, Scheme):
            hint = "; absolute encodings are added to the inputs: x = encoding(x)" if callable(scheme) else ""
            raise RelposTypeError(
                f"position: expected a scheme such as relpos_np.T5, found {type(scheme).__name__}{hint}"
            )
        scheme.check(problem.site)
    if sum(scheme.content for scheme in schemes) > 1:
        raise RelposValueError("position: two of the schemes change the content product and cannot be combined")
    return schemes


def each_lowered(
    schemes: tuple[Scheme, ...], problem: Problem, operands: Any = None, *, turning: bool = False
) -> list[Terms]:
    """Each scheme as terms; `operands` are q and k where they are on a device, `turning` as `lowered` has it."""
    if operands is not None:
        return [scheme.lower(operands[0], operands[1], problem.site) for scheme in schemes]
    return [lowered(scheme, problem, problem.site, turning=turning) for scheme in schemes]


def lowered(scheme: Scheme, problem: Problem, site: Site, *, turning: bool = False) -> Terms:
    """One scheme as terms. What is stored in half precision is converted only if the terms hold it.

    `turning`: operands that turn are left to the kernel.
    """
    if turning and scheme.turns:
        operands: list[Any] = [Turning(problem.stored_q), Turning(problem.stored_k)]
        return scheme.lower(operands[0], operands[1], site)
    if scheme.computes:
        return scheme.lower(problem.q, problem.k, site)
    q, k = problem.stored_q, problem.stored_k
    terms = scheme.lower(q, k, site)
    terms.queries = tuple(replace(t, query=problem.q) if t.query is q else t for t in terms.queries)
    terms.keys = tuple(replace(t, key=problem.k) if t.key is k else t for t in terms.keys)
    return terms


def all_terms(lowered: list[Terms]) -> Terms:
    """Several sets of terms as one."""
    return reduce(add, lowered) if lowered else Terms()


def each_lifted(
    operands: tuple[Any, Any],
    problem: Problem,
    position: Any,
    schemes: tuple[Scheme, ...],
    lowered: list[Terms],
    grads: Terms,
) -> tuple[Array, Array, Any]:
    """Gradients of q, of k and of each scheme's arrays, from those of all terms.

    The last are one dictionary, or a tuple of them if `position`, the argument of the call, is one.
    """
    grad_q: Array | None = None
    grad_k: Array | None = None
    # A scheme that changes the content product returns the gradients of q and k itself.
    if not any(scheme.content for scheme in schemes):
        grad_q, grad_k = grads.query, grads.key
    rest = {slot: iter(getattr(grads, slot)) for slot in ("tables", "queries", "keys", "values", "biases")}
    arrays = []
    for scheme, terms in zip(schemes, lowered, strict=True):
        own = Terms(*((grads.query, grads.key) if scheme.content else (None, None)))
        for slot, left in rest.items():
            setattr(own, slot, tuple(next(left) for _ in getattr(terms, slot)))
        share = scheme.lift(*operands, problem.site, own)
        arrays.append(
            {name: np.asarray(x).astype(getattr(scheme, name).dtype, copy=False) for name, x in share.arrays.items()}
        )
        if share.q is not None:
            grad_q = share.q if grad_q is None else grad_q + share.q
        if share.k is not None:
            grad_k = share.k if grad_k is None else grad_k + share.k
    if grad_q is None:
        grad_q = np.zeros(problem.stored_q.shape, problem.site.dtype)
    if grad_k is None:
        grad_k = np.zeros(problem.stored_k.shape, problem.site.dtype)
    return grad_q, grad_k, tuple(arrays) if isinstance(position, tuple) else arrays[0] if arrays else {}
