"""Query terms with a row of weights for most distances: the kernel multiplies them tile by tile and shifts the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relpos_np._contract.terms import QueryTerm, Toeplitz
from relpos_np.kernels._numba.arrays import broadcast, rowwise, strides
from relpos_np.kernels._numba.call import Call
from relpos_np.types import Array

# A query term whose map has at least this share of distinct runs is multiplied tile by tile.
SKEW_SHARE = 0.25


def is_skewed(term: QueryTerm) -> bool:
    """Whether a query term is multiplied tile by tile: most distances have a row of their own."""
    if not isinstance(term.index, Toeplitz):
        return False
    lookup = term.index.lookup
    changes = int(np.count_nonzero(lookup[1:] != lookup[:-1])) + 1
    return changes > SKEW_SHARE * len(lookup)


def add_skewed(call: Call, terms: Sequence[QueryTerm]) -> None:
    """Set the fields of query terms that are multiplied tile by tile; several share one product."""
    f, site = call.fields, call.site
    if len(terms) == 1:
        query, weight = terms[0].query, terms[0].weights
        assert isinstance(terms[0].index, Toeplitz)
        lookup = terms[0].index.lookup
    else:
        query, weight = _side_by_side(call, terms)
        lookup = np.arange(site.q_len + site.k_len - 1, dtype=np.int32)
    query = np.ascontiguousarray(broadcast(query, call.shape(site.q_len, query.shape[-1])))
    weight = rowwise(weight)
    f["skew_q"], f["skew_w"], f["skew_depth"] = call.keep(query), call.keep(weight), weight.shape[-1]
    f["skew_index"] = call.keep(np.ascontiguousarray(lookup))
    head, f["skew_row"], _ = strides(weight)
    f["skew_head"] = head if weight.shape[0] > 1 else 0


def _side_by_side(call: Call, terms: Sequence[QueryTerm]) -> tuple[Array, Array]:
    """Several terms as one: queries and weights one after the other, the weights with a row per distance."""
    queries, weights = [], []
    heads = max(term.weights.shape[0] for term in terms)
    for term in terms:
        assert isinstance(term.index, Toeplitz)
        rows = term.weights[:, term.index.lookup]
        if term.index.gaps:
            rows[:, term.index.lookup < 0] = 0
        weights.append(broadcast(rows, (heads, *rows.shape[1:])))
        queries.append(broadcast(term.query, call.shape(call.site.q_len, term.query.shape[-1])))
    return np.concatenate(queries, axis=-1), np.concatenate(weights, axis=-1)
