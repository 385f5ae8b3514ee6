"""Terms evaluated densely: the specification that the other kernels are read against.

Written apart from the reference formulas and sharing nothing with them.
"""

from __future__ import annotations

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import IndexMap, Terms
from relpos_np._dense.slopes import Slopes
from relpos_np.types import Array


def _rows(index: IndexMap, problem: Problem) -> tuple[Array, Array]:
    """Rows with -1 replaced by 0, and where a row exists; (..., 1, L_q, L_k) for a map per batch item."""
    dense = index.dense(problem.site.q_len, problem.site.k_len)
    if dense.ndim > 2:
        dense = np.expand_dims(dense, -3)
    return np.maximum(dense, 0), dense >= 0


def _pick(table: Array, rows: Array) -> Array:
    """``table[..., r]`` along the last axis for every pair: table (..., A, R), rows (..., L_q, L_k)."""
    return np.take_along_axis(table, np.broadcast_to(rows, (*table.shape[:-2], *rows.shape[-2:])), axis=-1)


def _heads(x: Array, heads: int) -> Array:
    groups = heads // x.shape[-3] if x.shape[-3] else 1
    return x[..., np.arange(heads) // groups, :, :]


def _before_masks(problem: Problem, terms: Terms, slopes: Slopes) -> Array:
    site = problem.site
    query = problem.q if terms.query is None else terms.query
    key = _heads(problem.k if terms.key is None else terms.key, site.heads)
    zero, cap = site.dtype.type(0), site.dtype.type(problem.softcap)
    s = np.einsum("...ic,...jc->...ij", query, key) * site.dtype.type(site.scale)
    if problem.cap_content:
        bent = np.tanh(s / cap)
        s, slopes.content = cap * bent, 1 - bent**2
    for table in terms.tables:
        rows, there = _rows(table.index, problem)
        values = table.table[:, rows] if rows.ndim == 2 else np.moveaxis(table.table[:, rows], 0, -4)[..., 0, :, :]
        s = s + np.where(there, values, zero)
    for term in terms.queries:
        rows, there = _rows(term.index, problem)
        products = np.einsum("...ic,...rc->...ir", term.query, term.weights)
        s = s + np.where(there, _pick(products, rows), zero)
    for key_term in terms.keys:
        rows, there = _rows(key_term.index, problem)
        products = np.einsum("...jc,...rc->...jr", _heads(key_term.key, site.heads), key_term.weights)
        picked = np.swapaxes(_pick(products, np.swapaxes(rows, -1, -2)), -1, -2)
        s = s + np.where(there, picked, zero)
    for bias in terms.biases:
        s = np.where(np.isneginf(bias), bias, s + bias)
    hidden = []
    for change in terms.changes:
        if change.slope is not None:
            slopes.scores.append(change.slope(s))
        s = change.apply(s)
        hidden.append(np.isneginf(s))
    if problem.softcap and not problem.cap_content:
        bent = np.tanh(s / cap)
        slopes.scores.append(1 - bent**2)
        s = cap * bent
    for bias in terms.biases:
        s = np.where(np.isneginf(bias), bias, s)
    for pairs in hidden:
        s = np.where(pairs, site.dtype.type(-np.inf), s)
    return np.asarray(s)


def scores(problem: Problem, terms: Terms, slopes: Slopes | None = None) -> Array:
    """Scores of every pair, -inf where excluded: (*batch, H, L_q, L_k); derivatives of changes go to `slopes`."""
    site = problem.site
    with np.errstate(all="ignore"):
        s = _before_masks(problem, terms, Slopes() if slopes is None else slopes)
    i, j = np.arange(site.q_len)[:, None] + site.offset, np.arange(site.k_len)
    out = (j < i - problem.left) | (j > i + problem.right) | ((i - j) % problem.step != 0)
    if problem.ranges is not None:
        own = problem.ranges[..., None, :, :]
        out = out | (j < own[..., :1]) | (j >= own[..., 1:])
    if problem.key_lengths is not None:
        out = out | (j >= problem.key_lengths[..., None, None, None])
    if problem.mask is not None:
        if problem.mask.dtype == np.bool_:
            out = out | ~problem.mask
        else:
            out = out | (problem.mask == -np.inf)
            with np.errstate(all="ignore"):
                s = s + problem.mask
    return np.asarray(np.where(out, site.dtype.type(-np.inf), s))


def _summed(p: Array, x: Array) -> Array:
    """Sums of p (..., L_q, L_k) times x (..., L_k, D): some queries at a time, so that little is held besides."""
    out = np.empty((*p.shape[:-1], x.shape[-1]), x.dtype)
    rows = max(1, (p.shape[-2] << 16) // max(out.size, 1))
    for i in range(0, p.shape[-2], rows):
        out[..., i : i + rows, :] = _added(p[..., i : i + rows, :], x)
    return out


def _added(p: Array, x: Array) -> Array:
    """The same of some queries: a few keys at a time, and what each addition of them loses.

    So errors do not grow with the number of keys.
    """
    out = np.zeros((), x.dtype)
    lost = np.zeros((), x.dtype)
    for j in range(0, max(p.shape[-1], 1), 8):
        more = np.einsum("...ij,...jd->...id", p[..., j : j + 8], x[..., j : j + 8, :])
        both = out + more
        lost = lost + np.where(np.abs(out) < np.abs(more), (more - both) + out, (out - both) + more)
        out = both
    return np.asarray(out + np.where(np.isfinite(lost), lost, 0))


def _bins(p: Array, rows: Array, there: Array, count: int) -> Array:
    """Sums of p (..., L_q, L_k) over the keys of each row: (..., L_q, count), in halves down to a block of keys."""
    keys = p.shape[-1]
    if keys <= max(128, count // 64):
        bins = np.zeros((*p.shape[:-1], count), p.dtype)
        rows, there = np.broadcast_to(rows, p.shape), np.broadcast_to(there, p.shape)
        first = np.arange(0, bins.size, count).reshape(*p.shape[:-1], 1) if bins.size else rows
        np.add.at(bins.reshape(-1), (first + rows)[there], p[there])
        return bins
    halves = [(..., slice(keys // 2)), (..., slice(keys // 2, None))]
    first, second = (_bins(p[own], rows[own], there[own], count) for own in halves)
    return np.asarray(first + second)


def attention(problem: Problem, terms: Terms) -> tuple[Array, Array]:
    """Output (*batch, H, L_q, D_v) and log-sum-exp (*batch, H, L_q)."""
    site = problem.site
    s = scores(problem, terms)
    with np.errstate(all="ignore"):
        top = np.max(s, axis=-1, initial=-np.inf, keepdims=True)
        top = np.where(np.isneginf(top), site.dtype.type(0), top)
        weight = np.exp(s - top)
        total = _summed(weight, np.ones((site.k_len, 1), site.dtype))[..., 0]
        lse = np.log(total) + top[..., 0]
        p = weight / np.where(total == 0, site.dtype.type(1), total)[..., None]
        if problem.keep is not None:
            p = p * (problem.keep * site.dtype.type(problem.keep_scale))
        v = _heads(problem.v if terms.turn is None else terms.turn.of_values(problem.v), site.heads)
        finite = np.isfinite(v)
        clean = v if finite.all() else np.where(finite, v, site.dtype.type(0))
        out = _summed(p, clean)
        # An excluded key's value is never multiplied.
        for key in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))):
            seen = ~np.isneginf(s[..., key])[..., None] & ~finite[..., key, None, :]
            out = out + np.where(seen, p[..., key, None] * v[..., key, None, :], site.dtype.type(0))
        for term in terms.values:
            rows, there = _rows(term.index, problem)
            bins = _bins(p, rows, there, term.weights.shape[-2])
            out = out + np.einsum("...ir,...rd->...id", bins, term.weights)
        if terms.turn is not None:
            out = terms.turn.of_output(out)
    return out, lse
