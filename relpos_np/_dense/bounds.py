r"""Proved bounds of the rounding errors of an output that is there already, whatever computed it.

The call is evaluated once more with unit roundoff u (float64 for results of float32 and half precision, `longdouble`
for float64), and each step says how far it may be from the exact value. Let :math:`s_{ij}` and
:math:`w_{ij} = e^{s_{ij} - m_i}`, with any number :math:`m_i`, be what this computes, :math:`s^*_{ij}`,
:math:`w^*_{ij}` and :math:`o^*_i` what is exact, :math:`o_i` the output in question, and
:math:`\gamma_n = n u / (1 - n u)`.

1. *Scores.* A sum of n products in any order, with or without FMA, is within :math:`\gamma_n \sum |a| |b|` of its
   value (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1). An addition whose result is s is
   within u \|s\| of it, and the cap :math:`c \tanh(s / c)` has a slope of at most 1. With numbers of terms that have
   been rounded themselves, see `Terms.relative_error_ulps`, the sum of all these errors is :math:`d_{ij}`:
   :math:`|s^*_{ij} - s_{ij}| \le d_{ij}`.
2. *Weights.* As the exponential is convex, and computed within 4 u of its value,
   :math:`|w^*_{ij} - w_{ij}| \le \rho_{ij} = e^{s_{ij} - m_i + d_{ij}} (1 - e^{-d_{ij}}) + 4 u w_{ij}`.
3. *Output.* As :math:`\sum_j w^*_{ij} (v_j - o^*_i) = 0`,

   .. math::

       |o^*_i - o_i| = \frac{\bigl| \sum_j w^*_{ij} (v_j - o_i) \bigr|}{\sum_j w^*_{ij}}
       \le \frac{\bigl| \sum_j w_{ij} v_j - o_i \sum_j w_{ij} \bigr| + \sum_j \rho_{ij} (|v_j| + |o_i|)}
       {\sum_j (w_{ij} - \rho_{ij})} .

   Both sums of weights are made in chunks of c keys, which a tree adds up: for their roundings
   :math:`\gamma_{c + \log_2 (L_k / c)} w_{ij}` is added to :math:`\rho_{ij}`. And :math:`o^*_i` is a mean of values:
   :math:`\max_j |v_j| + |o_i|` is a bound, too.
4. *Log-sum-exp.* With :math:`S = \sum_j w_{ij}` and :math:`\rho = \sum_j \rho_{ij}` the exact one is within
   :math:`\rho / (S - \rho)` of :math:`m_i + \ln S`.

Rows that schemes add to values, and values that turn, are linear in the weights: step 3 holds for their sums. A sink is
one more weight, whose value is 0. What is computed of errors is itself rounded: each sum of them is enlarged by a
factor of :math:`1 + 2^{-20}`, which covers :math:`2^{32}` roundings, and by what may underflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem, Site
from relpos_np._contract.terms import IndexMap, Terms, Toeplitz, cut_map
from relpos_np.types import Array

# Units of roundoff within which exponentials and logarithms, and hyperbolic tangents, of NumPy are trusted to be right.
FUNCTION, TANGENT = 4, 8
# Keys whose products are summed in any order, before the sums of chunks are added as a tree.
CHUNK = 32
# Pairs of query and key that are looked at together.
PAIRS = 1 << 16
# On sums that are errors: they have roundings of their own.
UP = 1 + 2.0**-20
LESS = 1 - 2.0**-40
# Below the smallest normal number of float64 a result may be 0, or have any error of its size.
TINY = 2.0**-1021


def widest(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In what a result of this dtype, float32 or float64, is bounded."""
    if dtype == np.float32:
        return np.dtype(np.float64)
    # Pairs of float64 prove nothing; and a processor may be told, or emulated, to round as float64 does.
    about = np.finfo(np.longdouble)
    wider = about.nmant in (63, 112) and np.longdouble(1) + about.eps != 1
    return np.dtype(np.longdouble if wider else np.float64)


@dataclass(slots=True, eq=False)
class _Line:
    """One head of one batch item. Numbers in its terms have at most `made` roundings of `gap` each."""

    problem: Problem
    terms: Terms
    b: tuple[int, ...]
    h: int
    wide: np.dtype[Any]
    gap: float
    made: float

    def of(self, x: Any, inner: int = 2) -> Array:
        """What of an array with the axes (..., H or H_kv or 1) and `inner` more belongs to this head."""
        *lead, heads = x.shape[: x.ndim - inner]
        found: Array = self.of_item(x, lead)[self.h // (self.problem.site.heads // heads)]
        return found

    def of_item(self, x: Array, lead: Sequence[int]) -> Array:
        """What of an array whose first axes broadcast to those of the batch belongs to this item."""
        own = self.b[len(self.b) - len(lead) :]
        found: Array = x[tuple(0 if size == 1 else i for size, i in zip(lead, own, strict=True))]
        return found

    def rows_of(self, index: IndexMap, low: int, high: int) -> Array:
        """Row of a table for each query from `low` on and each key, or -1: (high - low, L_k)."""
        site = self.problem.site
        if isinstance(index, Toeplitz):
            found: Array = index.lookup[np.arange(site.k_len) - np.arange(low, high)[:, None] + site.q_len - 1]
            return found
        item = tuple(slice(i, i + 1) for i in self.b)
        found = cut_map(index, site.q_len, slice(low, high), slice(0, site.k_len), item).dense(high - low, site.k_len)
        return found.reshape(high - low, site.k_len)

    def product(self, a: Array, b: Array, made: bool) -> tuple[Array, Array]:
        """A B^T and what it may be off, also since vectors that were `made` are: a (n, E), b (m, E)."""
        found = np.matmul(a.astype(self.wide), b.astype(self.wide).T)
        depth, (a, b) = a.shape[-1], (_size(a), _size(b))
        error = _gamma(depth, self.gap) * UP * np.matmul(a, b.T) + 2 * depth * TINY
        return found, error + self.moved(a, b) if made else error

    def moved(self, a: Array, b: Array) -> Array:
        """How far roundings of what a scheme made move products: of sizes a (n, E) and b (m, E)."""
        norms = [UP * np.sqrt(np.square(x).sum(axis=-1)) for x in (a, b)]
        most: Array = 2 * UP * self.made * self.gap * norms[0][:, None] * norms[1]
        return most


def _gamma(n: float, gap: float) -> float:
    return n * gap / (1 - n * gap)


def _size(x: Array) -> Array:
    """Absolute values in float64, not smaller than they are."""
    found: Array = np.abs(x).astype(np.float64) * UP
    return found


def _sum_by_chunks(w: Array, v: Array) -> Array:
    """W V for w (n, L) and v (L, D): products of chunks of keys, and a tree of sums."""
    n, keys = w.shape
    chunks = max(-(-keys // CHUNK), 1)
    whole = keys // CHUNK * CHUNK
    parts = np.zeros((chunks, n, v.shape[1]), w.dtype)
    if whole:
        count = whole // CHUNK
        left = np.moveaxis(w[:, :whole].reshape(n, count, CHUNK), 1, 0)
        np.matmul(left, v[:whole].reshape(count, CHUNK, v.shape[1]), out=parts[:count])
    if keys > whole:
        parts[-1] = w[:, whole:] @ v[whole:]
    while len(parts) > 1:
        half = len(parts) // 2
        rest = parts[2 * half :]
        parts = np.concatenate([parts[:half] + parts[half : 2 * half], rest])
    found: Array = parts[0]
    return found


def _capped(s: Array, d: Array, c: float, gap: float) -> tuple[Array, Array]:
    t = np.tanh(s / s.dtype.type(c)) * s.dtype.type(c)
    # A quotient, whose error the tangent does not enlarge, the tangent, and a product.
    return t, d + (TANGENT + 3) * gap * _size(t) + 4 * c * TINY


def _scores(line: _Line, low: int, high: int, k: Array) -> tuple[Array, Array, Array]:
    """Scores of some queries, their errors, and which keys are excluded, whose score is -inf and has no error."""
    problem, terms, gap, wide = line.problem, line.terms, line.gap, line.wide
    scale = problem.site.scale
    q = line.of(problem.q if terms.query is None else terms.query)[low:high]
    s, d = line.product(q, k, made=terms.query is not None)
    s = s * wide.type(scale)
    d = abs(scale) * UP * d + gap * _size(s) + TINY
    if problem.cap_content:
        s, d = _capped(s, d, problem.softcap, gap)

    def add(s: Array, d: Array, x: Array, error: Array | float = 0.0) -> tuple[Array, Array]:
        s = s + x
        return s, d + error + gap * _size(s)

    shut = _excluded(line, low, high)
    for table in terms.tables:
        rows = line.rows_of(table.index, low, high)
        own = np.where(rows >= 0, line.of(table.table, inner=1)[np.maximum(rows, 0)], 0.0)
        shut = shut | (own == -np.inf)
        s, d = add(s, d, own, line.made * gap * _size(own))
    for term in terms.queries:
        rows = line.rows_of(term.index, low, high)
        found = line.product(line.of(term.query)[low:high], line.of(term.weights), made=True)
        x, error = (np.where(rows >= 0, np.take_along_axis(y, np.maximum(rows, 0), -1), 0.0) for y in found)
        s, d = add(s, d, x, error)
    for key_term in terms.keys:
        rows, key, weights = line.rows_of(key_term.index, low, high), key_term.key, line.of(key_term.weights)
        own = line.of(key)
        x, error = np.zeros(s.shape, wide), np.zeros(s.shape)
        for i, row in enumerate(rows):
            picked = np.where(row[:, None] >= 0, weights[np.maximum(row, 0)], 0.0)
            x[i] = (own.astype(wide) * picked).sum(axis=-1)
            sizes, depth = (_size(own), _size(picked)), own.shape[-1]
            # As in a product, but each key has a row of its own.
            norms = UP * np.sqrt(np.square(sizes[0]).sum(axis=-1) * np.square(sizes[1]).sum(axis=-1))
            error[i] = _gamma(depth, gap) * UP * (sizes[0] * sizes[1]).sum(axis=-1) + 2 * depth * TINY
            error[i] += 2 * UP * line.made * gap * norms
        s, d = add(s, d, x, error)
    for bias in terms.biases:
        own = line.of(bias if bias.ndim > 2 else bias[None])
        own = np.broadcast_to(own[low:high] if own.shape[0] > 1 else own, s.shape)
        shut = shut | (own == -np.inf)
        s, d = add(s, d, own, line.made * gap * _size(own))
    if problem.softcap and not problem.cap_content:
        s, d = _capped(s, d, problem.softcap, gap)
    if problem.mask is not None and problem.mask.dtype != np.bool_:
        own = line.of(problem.mask)[low:high]
        shut = shut | (own == -np.inf)
        s, d = add(s, d, own)
    return np.where(shut, wide.type(-np.inf), s), np.where(shut, 0.0, d), shut


def _excluded(line: _Line, low: int, high: int) -> Array:
    """Which keys some queries may not attend, but for float masks and biases: (high - low, L_k)."""
    problem, site = line.problem, line.problem.site
    i, j = np.arange(low, high)[:, None] + site.offset, np.arange(site.k_len)
    out = np.zeros((high - low, site.k_len), np.bool_)
    if problem.left != UNBOUNDED or problem.right != UNBOUNDED:
        out |= (j < i - problem.left) | (j > i + problem.right)
    if problem.step > 1:
        out |= (i - j) % problem.step != 0
    if problem.ranges is not None:
        own = line.of(problem.ranges[..., None, :, :])[low:high]
        out |= (j < own[:, :1]) | (j >= own[:, 1:])
    if problem.key_lengths is not None:
        out |= j >= problem.key_lengths[line.b]
    if problem.mask is not None and problem.mask.dtype == np.bool_:
        out |= ~line.of(problem.mask)[low:high]
    return out


def _bounds(
    line: _Line, out: Array, lse: Array | None, sinks: Array | None
) -> Iterator[tuple[slice, Array, Array | None]]:
    """Bounds for one head, some queries at a time; `out` (L_q, D_v), `lse` and `sinks` (L_q,)."""
    problem, terms, gap, wide = line.problem, line.terms, line.gap, line.wide
    site = problem.site
    k = line.of(problem.k if terms.key is None else terms.key)
    v, turn = line.of(problem.v).astype(wide), terms.turn
    if turn is not None:
        to_keys, to_queries = ((line.of(real), line.of(imaginary)) for real, imaginary in (turn.key, turn.query))
        turn = replace(turn, key=to_keys, query=to_keys)
    finite = np.isfinite(v if turn is None else turn.of_values(v))
    holes = None if finite.all() else (~finite).astype(np.float64)
    v = np.where(finite, v, 0)
    size, extra = _size(v), 0
    if turn is not None:
        # Each turned number is the sum of two products.
        v, size, extra = turn.of_values(v), _turned_size(turn, size), 4
    # Sums of weights are those of one more channel, and a sink is a key without a value.
    zero = 0 if sinks is None else 1
    v = np.pad(np.concatenate([v, np.ones((site.k_len, 1), wide)], axis=1), ((0, zero), (0, 0)))
    v[site.k_len :, -1] = 1
    size = np.pad(size, ((0, zero), (0, 0)))
    length = site.k_len + zero
    # Roundings in a sum by chunks, and one for its product with the output.
    depth = _gamma(min(length, CHUNK) + math.ceil(math.log2(max(length / CHUNK, 1))) + 2 + extra, gap)
    most = size.max(axis=0, initial=0.0)
    block = max(PAIRS // max(length, 1), 1)
    for low in range(0, site.q_len, block):
        high = min(low + block, site.q_len)
        o = out[low:high].astype(wide)
        s, d, shut = _scores(line, low, high, k)
        keyless = shut.all(axis=-1, keepdims=True)
        reached = None if holes is None else (~shut).astype(np.float64) @ holes > 0
        if sinks is not None:
            own = sinks[low:high, None].astype(wide)
            s, shut = np.concatenate([s, own], axis=1), np.concatenate([shut, own == -np.inf], axis=1)
            d = np.pad(d, ((0, 0), (0, 1)))
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        x = np.where(shut, s, s - np.where(m == -np.inf, 0, m))
        d = np.where(shut, 0.0, d + gap * _size(x))
        w = np.exp(x)
        # Nearer to 0 than it is, which covers what rounding does to it.
        near = (x * wide.type(LESS)).astype(np.float64)
        rho = UP * (np.exp(near + d) * -np.expm1(-d))
        rho = np.where(shut, 0.0, rho + (FUNCTION * gap + depth) * _size(w) + TINY)
        sums = _sum_by_chunks(w, v)
        total, sums = sums[:, -1:], sums[:, :-1]
        error, loose = rho @ size, most
        for term in terms.values:
            rows, weights = line.rows_of(term.index, low, high), line.of(term.weights)
            loose = loose + (1 + line.made * gap) * _size(weights).max(axis=0, initial=0.0)
            for i, row in enumerate(rows):
                picked = np.where(row[:, None] >= 0, weights[np.maximum(row, 0)], 0.0)
                sums[i] += _sum_by_chunks(w[i : i + 1, : site.k_len], picked.astype(wide))[0]
                heavy = rho[i, : site.k_len] + line.made * gap * _size(w[i, : site.k_len])
                error[i] += heavy @ _size(picked) + gap * _size(sums[i])
        if turn is not None:
            turn = replace(turn, query=(to_queries[0][low:high], to_queries[1][low:high]))
            error = _turned_size(turn, error + 4 * gap * _size(sums))
            loose = _turned_size(turn, np.broadcast_to(loose, o.shape))
            sums = turn.of_output(sums)
        off = rho.sum(axis=-1, keepdims=True) * UP
        rest = sums - o * total
        top = _size(rest) * (1 + gap) + UP * (error + _size(o) * (off + 2 * gap * _size(total)))
        least = (total * wide.type(LESS)).astype(np.float64) - off
        bound = np.where(least > 0, UP * (top + (length + 8) * TINY) / least, np.inf)
        bound = np.fmin(bound, UP * (loose + _size(o)))
        if reached is not None:
            bound = np.where(reached, np.inf, bound)
        undefined = ~np.isfinite(m) | np.isnan(s).any(axis=-1, keepdims=True)
        bound = np.where(keyless, _size(o), np.where(undefined, np.inf, bound))
        bound = np.where(np.isfinite(o), bound, np.inf)
        found = None
        if lse is not None:
            found = _of_lse(lse[low:high].astype(wide), m[:, 0], total[:, 0], off[:, 0], least[:, 0], gap)
        yield slice(low, high), bound, found


def _turned_size(turn: Any, x: Array) -> Array:
    """Sums of absolute values, of which channels of what has turned consist."""
    sizes = turn.sizes()
    found: Array = UP * np.maximum(sizes.of_output(x), sizes.to_output(x))
    return found


def _of_lse(lse: Array, m: Array, total: Array, off: Array, least: Array, gap: float) -> Array:
    log = np.log(total)
    exact = m + log
    apart = _size(lse - exact) + gap * (FUNCTION * _size(log) + _size(exact))
    found = UP * (apart + off / least) + TINY
    found = np.where((least > 0) & np.isfinite(lse) & np.isfinite(found), found, np.inf)
    return np.where((m == -np.inf) & (lse == -np.inf), 0.0, found)


def bounds(
    problem: Problem, terms: Terms, made: float, out: Array, lse: Array | None, sinks: Array | None
) -> tuple[Array, Array | None]:
    """How far an output (*batch, H, L_q, D_v) and a log-sum-exp (*batch, H, L_q) are from the exact ones, at most.

    The problem and its terms are those of the call in wide arithmetic. `made` is how many roundings numbers in the
    terms may have, relative to themselves or to the norm of their vector. Bounds are float64.
    """
    site, wide = problem.site, problem.site.dtype
    bound = np.zeros(problem.out_shape)
    of_lse = None if lse is None else np.zeros(problem.out_shape[:-1])
    gap = float(np.finfo(wide).eps) / 2
    with np.errstate(all="ignore"):
        for *b, h in np.ndindex(*problem.batch, site.heads):
            line = _Line(problem, terms, tuple(b), h, wide, gap, made)
            at = (*b, h)
            own = out[at], None if lse is None else lse[at], None if sinks is None else sinks[at]
            for rows, found, found_lse in _bounds(line, *own):
                bound[(*at, rows)] = found
                if of_lse is not None and found_lse is not None:
                    of_lse[(*at, rows)] = found_lse
    return bound, of_lse


def workspace_bytes(site: Site) -> int:
    """Bytes that `bounds` holds beside wide operands and terms, which it is given."""
    lines = math.prod(site.batch) * site.heads
    # Of whole rows, with a sink.
    pairs = min(max(PAIRS, site.k_len + 1), site.q_len * (site.k_len + 1))
    wide = site.head_dim * 4 + site.v_dim
    return lines * site.q_len * (site.v_dim + 1) * 8 + pairs * (200 + site.v_dim) + 80 * site.k_len * (wide + 4)
