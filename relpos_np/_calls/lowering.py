"""From the schemes of a call to its terms, and from gradients of terms back to those of operands and schemes."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add, attrgetter
from typing import Any

import numpy as np

from relpos_np._calls import validate_terms
from relpos_np._contract import check
from relpos_np._contract.problem import Problem, Site
from relpos_np._contract.terms import Terms, fit
from relpos_np._contract.turned import Turned, TurnedBack
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array


def schemes_of(position: Any) -> tuple[Scheme, ...]:
    """The schemes of a call, none, one or several."""
    schemes = position if isinstance(position, tuple) else () if position is None else (position,)
    for scheme in schemes:
        if not isinstance(scheme, Scheme):
            hint = "; absolute encodings are added to the inputs: x = encoding(x)" if callable(scheme) else ""
            raise RelposTypeError(
                f"position: expected a scheme such as relpos_np.T5, found {type(scheme).__name__}{hint}"
            )
    return schemes


def checked_schemes(
    position: Any, problem: Problem, backend: str | None = None, *, backward: bool = False
) -> tuple[Scheme, ...]:
    """The schemes of a call, checked against it, and against what is to evaluate them."""
    schemes = schemes_of(position)
    if schemes and problem.unplaced:
        check.refuse_unplaced(problem)
    for scheme in schemes:
        scheme.check(problem.site)
        if problem.cap_content and scheme.content and type(scheme).transform is Scheme.transform:
            raise RelposValueError(
                f'cap_order: "content" caps the products q . k alone, and with {scheme!r} there are none without '
                'positions; expected "scores"'
            )
    if sum(scheme.content for scheme in schemes) > 1:
        raise RelposValueError("position: two of the schemes change the content product and cannot be combined")
    if not problem.site.scores_only:
        _check_turns(schemes)
    validate_terms.able(schemes, problem.site, backend, backward)
    return schemes


def _check_turns(schemes: tuple[Scheme, ...]) -> None:
    """Refuse schemes of which one turns the values and the output of another."""
    turning = [scheme for scheme in schemes if scheme.turns_values]
    if len(turning) > 1:
        raise RelposValueError("position: two of the schemes turn values and cannot be combined")
    for scheme in schemes if turning else ():
        if scheme is not turning[0] and type(scheme).outputs is not Scheme.outputs:
            raise RelposValueError(
                f"position: {turning[0]!r} turns the output, to which {type(scheme).__name__} may add vectors: they "
                "cannot be combined"
            )


def each_lowered(
    schemes: tuple[Scheme, ...],
    problem: Problem,
    operands: Any = None,
    *,
    by_kernels: bool = False,
) -> list[Terms]:
    """Each scheme as terms; `operands` are q and k where they are on a device, the rest is as `lowered` has it."""
    if operands is not None:
        return [
            validate_terms.checked(scheme, scheme.lower(operands[0], operands[1], problem.site), problem.site)
            for scheme in schemes
        ]
    return [lowered(scheme, problem, problem.site, by_kernels=by_kernels) for scheme in schemes]


def lowered(scheme: Scheme, problem: Problem, site: Site, *, by_kernels: bool = False) -> Terms:
    """One scheme as terms. What is stored in half precision is converted only if the terms hold it.

    `by_kernels`: the CPU kernels are left to turn operands, and to make biases of every pair, where they can.
    """
    if by_kernels and scheme.by_rows:
        return scheme.lower_by_rows(problem.q, problem.k, site)
    if by_kernels and scheme.rotates_operands:
        return scheme.lower_rotated(problem.stored_q, problem.stored_k, site)
    if scheme.reads_operand_values:
        return validate_terms.checked(scheme, scheme.lower(problem.q, problem.k, site), site)
    q, k = problem.stored_q, problem.stored_k
    terms = scheme.lower(q, k, site)
    if isinstance(terms, Terms):
        terms.queries = tuple(replace(t, query=problem.q) if t.query is q else t for t in terms.queries)
        terms.keys = tuple(replace(t, key=problem.k) if t.key is k else t for t in terms.keys)
    return validate_terms.checked(scheme, terms, site)


def has_reusable_terms(scheme: Scheme) -> bool:
    """Whether calls of one form can share the terms of a scheme, but for vectors that it makes anew in each."""
    return not scheme.reads_operand_values or scheme.rotates_operands or scheme.makes_vectors


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
        of_operands: list[Any] = [grads.query, grads.key] if scheme.content else [None, None]
        if isinstance(terms.query, Turned):
            of_operands = [TurnedBack(x) for x in of_operands]
        own = Terms(*of_operands)
        own.turn = None if terms.turn is None else grads.turn
        for slot, left in rest.items():
            setattr(own, slot, tuple(next(left) for _ in getattr(terms, slot)))
        share = scheme.lift(*operands, problem.site, own)
        share = validate_terms.checked_lift(scheme, share, tuple(x.shape for x in operands))
        own_arrays = {
            name: np.asarray(x).astype(attrgetter(name)(scheme).dtype, copy=False) for name, x in share.arrays.items()
        }
        arrays.append(own_arrays)
        if share.q is not None:
            grad_q = share.q if grad_q is None else grad_q + share.q
        if share.k is not None:
            grad_k = share.k if grad_k is None else grad_k + share.k
    if grad_q is None:
        grad_q = np.zeros(problem.stored_q.shape, problem.site.dtype)
    if grad_k is None:
        grad_k = np.zeros(problem.stored_k.shape, problem.site.dtype)
    return grad_q, grad_k, tuple(arrays) if isinstance(position, tuple) else arrays[0] if arrays else {}


def fit_option(x: Array, given: Any, *, per_head: bool) -> Array:
    """The gradient of an option with a number per query or per head, in its shape and dtype."""
    shape = (*given.shape, 1) if per_head and given.ndim == 1 else given.shape
    return fit(x, shape).reshape(given.shape).astype(given.dtype, copy=False)
