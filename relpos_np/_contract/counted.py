"""A bias of every pair that no backend need hold: positions that gates count, and what the queries say to each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np.types import Array


@dataclass(slots=True, eq=False)
class CountedBias:
    r"""A bias made of queries, keys and a table, in float64 and some queries at a time.

    .. math::

        g_{ij} = \operatorname{sigmoid}(\sigma\, q_i \cdot k_j), \qquad
        p_{ij} = \min\Big(\sum_{t=j}^{i+\text{last}} g_{it},\; n - 1\Big), \qquad b_{ij} = f\, q_i \cdot e[p_{ij}]

    with :math:`e[p]` on the straight line between the rows of two whole positions. A key whose product with the query
    is NaN is not counted. Of gradients, the record has those of `query`, `key` and `table`.

    Attributes
    ----------
    query : ndarray, shape (..., H, L_q, D)
        Queries.
    key : ndarray, shape (..., H_kv, L_k, D)
        What gates compare them with.
    table : ndarray, shape (1 or H, n, D)
        Vectors e of whole positions.
    scale : float
        The factor :math:`\sigma` of products in gates.
    factor : float
        The factor f of products with the table.
    last : int
        Query i counts keys up to i + last.
    counted : ndarray of bool, broadcast to (..., H, L_q, L_k), or None
        Keys that may be counted.
    dtype : dtype
        Of the bias.
    """

    query: Array
    key: Array
    table: Array
    scale: float
    factor: float
    last: int
    counted: Array | None
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the bias, (..., H, L_q, L_k)."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def of_queries(self, queries: slice) -> CountedBias:
        """The bias of some queries."""
        counted = self.counted
        if counted is not None and counted.ndim > 1 and counted.shape[-2] > 1:
            counted = counted[..., queries, :]
        query, last = self.query[..., queries, :], self.last + queries.start
        return replace(self, query=query, counted=counted, last=last)

    def zeros(self) -> CountedBias:
        """Gradients of 0."""
        query, key, table = (np.zeros(x.shape, self.dtype) for x in (self.query, self.key, self.table))
        return replace(self, query=query, key=key, table=table)
