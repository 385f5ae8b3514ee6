"""`return_bound`: a call once more in wide arithmetic, for bounds of the errors of its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered
from relpos_np._contract import check
from relpos_np._contract.options import Options
from relpos_np._contract.problem import Problem
from relpos_np._dense import bounds
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.registry import is_registered
from relpos_np.types import Array


def refuse(asked: Any, q: Any, given: Options) -> None:
    """Raise for what has no bounds, and if what was asked is neither yes nor no."""
    if not check.flag("return_bound", asked):
        return
    if type(q) is not np.ndarray and check.on_device(q):
        raise RelposTypeError("return_bound: bounds are made on the host; expected q, k and v as NumPy arrays")
    if check.rate("dropout", given["dropout"]):
        raise RelposValueError("return_bound: probabilities that are dropped have no bounds; expected no dropout")


class Bounded:
    """What a call is in wide arithmetic, checked and lowered before its results are there."""

    def __init__(self, operands: tuple[Array, Array, Array], position: Any, given: Options, dtype: Any) -> None:
        q, k, v = (x.astype(np.float64, copy=False) for x in operands)
        problem, _, self.flat = check.call(q, k, v, given)
        schemes = checked_schemes(position, problem, "terms")
        self.problem = _widened(problem, q, given["query_scale"], bounds.widest(dtype))
        # Schemes that others wrote know no dtype beyond float64.
        seen = self.problem if all(is_registered(type(scheme)) for scheme in schemes) else problem
        self.terms = all_terms(each_lowered(schemes, seen))
        units = np.finfo(seen.site.dtype).eps / np.finfo(self.problem.site.dtype).eps
        self.made = float(units) * (self.terms.relative_error_ulps or 0.0)
        if self.terms.changes:
            raise RelposValueError(
                "return_bound: a function that changes scores may lose any number of digits; expected schemes that "
                f"add to them, found {position!r}"
            )
        self.sinks = None
        if given["sinks"] is not None:
            self.sinks = check.per_head("sinks", given["sinks"], problem.out_shape[:-1], problem.site.dtype)

    def of(self, out: Array, lse: Array | None) -> tuple[Array, ...]:
        """Bounds of an output and, unless it is None, of a log-sum-exp."""
        if self.flat:
            out, lse = out[None], None if lse is None else lse[None]
        found, of_lse = bounds.bounds(self.problem, self.terms, self.made, out, lse, self.sinks)
        both = (found,) if of_lse is None else (found, of_lse)
        return tuple(x[0] for x in both) if self.flat else both


def _widened(problem: Problem, q: Array, query_scale: Any, wide: np.dtype[Any]) -> Problem:
    """The call with operands in wide arithmetic, in which its queries are scaled, too."""
    stored = problem.stored_q
    if query_scale is not None:
        q = np.broadcast_to(q, stored.shape).astype(wide)
        stored = q * check.per_query("query_scale", query_scale, stored.shape[:-1], wide)[..., None]
    q, k, v = (x.astype(wide, copy=False) for x in (stored, problem.stored_k, problem.stored_v))
    return replace(problem, stored_q=q, stored_k=k, stored_v=v, site=replace(problem.site, dtype=wide))
