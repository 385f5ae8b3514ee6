"""Query terms with a row of weights for most distances: the kernel multiplies them tile by tile and shifts the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relpos_np._contract.terms import QueryTerm, Toeplitz
from relpos_np.kernels._numba.launch.arrays import broadcast, rowwise, strides
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.types import Array


def add_skewed(call: Call, terms: Sequence[QueryTerm]) -> None:
    """Set the fields of query terms that are multiplied tile by tile; several share one product."""
    f, site = call.fields, call.site
    if len(terms) == 1:
        assert isinstance(terms[0].index, Toeplitz)
        weight, lookup = terms[0].weights, terms[0].index.lookup
    else:
        weight, lookup = _side_by_side(terms), np.arange(site.q_len + site.k_len - 1, dtype=np.int32)
    query, weight = (
        skewed_queries([term.query for term in terms], call.shape(terms[0].query.shape[-2], 0)),
        rowwise(weight),
    )
    f["skew_q"], f["skew_w"], f["skew_depth"] = call.keep(query), call.keep(weight), weight.shape[-1]
    f["skew_index"] = call.keep(np.ascontiguousarray(lookup))
    head, f["skew_row"], _ = strides(weight)
    f["skew_head"] = head if weight.shape[0] > 1 else 0


def skewed_queries(queries: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Queries of several terms, side by side, as the kernel reads them; `shape` is theirs but for the last axis."""
    all_heads = [broadcast(x, (*shape[:-1], x.shape[-1])) for x in queries]
    return np.ascontiguousarray(all_heads[0] if len(all_heads) == 1 else np.concatenate(all_heads, axis=-1))


def _side_by_side(terms: Sequence[QueryTerm]) -> Array:
    """Weights of several terms, one after the other, with a row per distance."""
    weights = []
    heads = max(term.weights.shape[0] for term in terms)
    for term in terms:
        assert isinstance(term.index, Toeplitz)
        rows = term.weights[:, term.index.lookup]
        if term.index.gaps:
            rows[:, term.index.lookup < 0] = 0
        weights.append(broadcast(rows, (heads, *rows.shape[1:])))
    return np.concatenate(weights, axis=-1)
