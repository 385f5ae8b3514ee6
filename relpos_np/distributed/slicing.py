"""The terms of a part of a call: those of the call, or of little more than the part, cut to the part."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import lowering, validate_terms
from relpos_np._calls.lowering import all_terms
from relpos_np._contract import check
from relpos_np._contract.cut import Cut
from relpos_np._contract.problem import Part, Problem, Site
from relpos_np._contract.terms import Terms
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

Narrowed = tuple[tuple[Scheme, Site, Part], ...]


def _stand_ins(site: Site) -> tuple[Array, Array]:
    """Queries and keys of the whole call without the memory, which nothing computes with: NaN everywhere."""
    nan = np.full((), np.nan, site.dtype)
    q = np.broadcast_to(nan, (*site.batch, site.heads, site.q_len, site.head_dim))
    return q, np.broadcast_to(nan, (*site.batch, site.kv_heads, site.k_len, site.head_dim))


def lowered(narrowed: tuple[Scheme, Site, Part], problem: Problem) -> Terms:
    """The terms of one scheme, as its `narrow` prepared it, for the part whose operands `problem` holds."""
    scheme, site, part = narrowed
    if part == Part.of(site):
        return lowering.lowered(scheme, problem, site)
    if scheme.reads_operand_values:
        raise RelposValueError(
            f"position: {scheme!r} cannot be computed for a part of a call, since it computes with queries or keys "
            "and does not say how it is narrowed"
        )
    q, k = _stand_ins(site)
    cut = Cut(site, part, ((q, lambda: problem.q), (k, lambda: problem.k)))
    return cut.terms(validate_terms.checked(scheme, scheme.lower(q, k, site), site))


def compute(name: str, problem: Problem, narrowed: Narrowed) -> tuple[Array, Array]:
    """Output and log-sum-exp of a part whose schemes are narrowed."""
    with np.errstate(all="ignore"):
        terms = all_terms([lowered(one, problem) for one in narrowed])
        out, lse = _backend.evaluate(name, problem, terms, None, True, problem.site.dtype)
    assert lse is not None
    return out, lse


def evaluating(name: str | None) -> str:
    """A backend that evaluates terms."""
    chosen = _backend.current(name)
    if chosen == "numpy":
        raise RelposValueError(
            f"backend: parts of a call are computed from terms; expected 'terms', 'numba' or 'cuda', found {chosen!r}"
        )
    return chosen


def refuse_end(offset: Any) -> None:
    """Refuse the word for the last of the keys that exist, of which a part knows nothing."""
    if check.at_end(offset):
        raise RelposTypeError('offset: expected the position of the first query of the whole call, found "end"')


def lengths_here(lengths: Array, keys: slice) -> Array:
    """How many of these keys exist, from how many exist in all."""
    return np.asarray(np.clip(lengths - keys.start, 0, keys.stop - keys.start))
