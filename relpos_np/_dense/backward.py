r"""The reference's backward pass: from scores and terms to the gradients of every array in the terms.

With p the probabilities, P the same after dropout at a rate ρ, g the gradient of the output and l that of the
log-sum-exp,

.. math::

    \mathrm{d}P_{ij} = g_i \cdot \Big(v_j + \sum_t W_t[r_t(i,j)]\Big), \qquad
    \mathrm{d}p_{ij} = \frac{\mathrm{keep}_{ij}}{1 - \rho}\, \mathrm{d}P_{ij}, \qquad
    \mathrm{d}s_{ij} = p_{ij} \Big(\mathrm{d}p_{ij} - \sum_l p_{il}\, \mathrm{d}p_{il} + l_i\Big),

and whatever the scores depend on collects ds over the pairs that read it. Where the scores are a function of others,
ds is multiplied by its derivative. Nothing that is excluded is multiplied.
"""

from __future__ import annotations

import math

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import IndexMap, KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm, fit
from relpos_np._dense.slopes import Slopes
from relpos_np.formulas.softmax import repeat_heads, softmax, weighted_sum
from relpos_np.formulas.sums import product, total
from relpos_np.types import Array


class _Map:
    """An index map as dense rows, with what the sums over its rows need."""

    def __init__(self, index: IndexMap, problem: Problem) -> None:
        rows = index.dense(problem.site.q_len, problem.site.k_len)
        # A map per batch item is the same for all heads.
        self.rows: Array = rows if rows.ndim == 2 else np.expand_dims(rows, -3)
        self.count = index.rows

    def pick(self, products: Array) -> Array:
        """Entry r(i, j) of each query's products (..., L_q, R), 0 where there is none: (..., L_q, L_k)."""
        if not self.count:
            return np.zeros((*products.shape[:-1], self.rows.shape[-1]), products.dtype)
        shape = (*products.shape[:-1], self.rows.shape[-1])
        rows = np.broadcast_to(self.rows, shape)
        return np.where(rows < 0, 0, np.take_along_axis(products, np.maximum(rows, 0), axis=-1))

    def sums(self, x: Array, axis: int = -1) -> Array:
        """Sum x (..., L_q, L_k) over the keys of each row, (..., L_q, R), or over queries: (..., L_k, R)."""
        x, rows = np.broadcast_arrays(x, self.rows)
        if axis == -2:
            x, rows = np.swapaxes(x, -1, -2), np.swapaxes(rows, -1, -2)
        lines, columns = math.prod(x.shape[:-1]), x.shape[-1]
        # What belongs to no row is collected in a last one and left out.
        at = np.where(rows < 0, self.count, rows).reshape(lines, columns)
        at = at + np.arange(lines)[:, None] * (self.count + 1)
        sums = np.bincount(at.ravel(), x.ravel(), lines * (self.count + 1))
        return sums.reshape(*x.shape[:-1], self.count + 1)[..., :-1].astype(x.dtype)


def _table(term: TableTerm, ds: Array, problem: Problem) -> TableTerm:
    sums = _Map(term.index, problem).sums(ds)
    return TableTerm(fit(total(sums, axis=-2), term.table.shape), term.index)


def _seen(sums: Array, x: Array) -> Array:
    """Rows that have a share in the sums; others are 0, because they may hold anything."""
    return np.where(sums.any(axis=-1, keepdims=True), x, x.dtype.type(0))


def _query(term: QueryTerm, ds: Array, problem: Problem) -> QueryTerm:
    sums = _Map(term.index, problem).sums(ds)
    weights = product(np.swapaxes(sums, -1, -2), _seen(sums, term.query))
    query = np.einsum("...ir,...rc->...ic", sums, term.weights)
    return QueryTerm(fit(query, term.query.shape), fit(weights, term.weights.shape), term.index)


def _key(term: KeyTerm, ds: Array, problem: Problem) -> KeyTerm:
    sums = _Map(term.index, problem).sums(ds, axis=-2)
    weights = product(np.swapaxes(sums, -1, -2), _seen(sums, repeat_heads(term.key, problem.site.heads)))
    key = np.einsum("...jr,...rc->...jc", sums, term.weights)
    return KeyTerm(fit(key, term.key.shape), fit(weights, term.weights.shape), term.index)


def backward(
    problem: Problem,
    terms: Terms,
    s: Array,
    grad_out: Array,
    grad_lse: Array | None,
    slopes: Slopes | None = None,
) -> tuple[Terms, Array]:
    """Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v.

    s are the scores (*batch, H, L_q, L_k), with -inf where a key is excluded; `slopes` the derivatives of what they
    were changed by.
    """
    site = problem.site
    zero = site.dtype.type(0)
    query = problem.q if terms.query is None else terms.query
    key = repeat_heads(problem.k if terms.key is None else terms.key, site.heads)
    turn, to_result = terms.turn, grad_out
    if turn is not None:
        grad_out = turn.to_output(grad_out)
    v = repeat_heads(problem.v if turn is None else turn.of_values(problem.v), site.heads)
    read = s != -np.inf
    # An excluded key has no share of a row whose sum is not a number, either.
    p = np.where(read, softmax(s)[0], zero)
    kept = p if problem.keep is None else p * (problem.keep * site.dtype.type(problem.keep_scale))
    with np.errstate(all="ignore"):
        dp = np.einsum("...id,...jd->...ij", grad_out, v)
        values = []
        for term in terms.values:
            index = _Map(term.index, problem)
            dp = dp + index.pick(np.einsum("...id,...rd->...ir", grad_out, term.weights))
            sums = index.sums(kept)
            weights = product(np.swapaxes(sums, -1, -2), _seen(sums, grad_out))
            values.append(ValueTerm(fit(weights, term.weights.shape), term.index))
        dp = np.where(read, dp, zero)
        if problem.keep is not None:
            dp = dp * (problem.keep * site.dtype.type(problem.keep_scale))
        ds = dp - total(p * dp)[..., None]
        if grad_lse is not None:
            ds = ds + grad_lse[..., None]
        ds = np.where(read, p * ds, zero)
        inner = ds
        if slopes is not None:
            for slope in slopes.scores:
                ds = np.where(ds == 0, zero, ds * slope)
            inner = ds if slopes.content is None else np.where(ds == 0, zero, ds * slopes.content)
        scaled, across = inner * site.dtype.type(site.scale), np.swapaxes(read, -1, -2)
        dv = weighted_sum(np.swapaxes(kept, -1, -2), np.broadcast_to(grad_out, problem.out_shape), across)
        dk = weighted_sum(
            np.swapaxes(scaled, -1, -2), np.broadcast_to(query, (*ds.shape[:-1], query.shape[-1])), across
        )
        grads = Terms(
            query=fit(weighted_sum(scaled, key, read), query.shape),
            key=fit(dk, (problem.k if terms.key is None else terms.key).shape),
            tables=tuple(_table(term, ds, problem) for term in terms.tables),
            queries=tuple(_query(term, ds, problem) for term in terms.queries),
            keys=tuple(_key(term, ds, problem) for term in terms.keys),
            values=tuple(values),
            biases=tuple(fit(ds, bias.shape) for bias in terms.biases),
        )
        dv = fit(dv, problem.v.shape)
        if turn is not None:
            if turn.trained:
                grads.turn = turn.gradient(problem.v, dv, weighted_sum(kept, v, read), to_result)
            dv = turn.to_values(dv)
    return grads, dv
