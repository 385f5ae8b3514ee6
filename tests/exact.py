"""A call's terms evaluated with 40 digits, by Python's decimal numbers: what bounds of errors are compared with."""

import math
from decimal import Decimal, localcontext

import numpy as np

DIGITS = 40


def decimal(x):
    """A number as the decimal that it is; one of more than 53 bits is two."""
    head = float(x)
    return Decimal(head) + Decimal(float(x - head)) if math.isfinite(head) else Decimal(head)


decimals = np.frompyfunc(decimal, 1, 1)


def own(x, item, head, heads, inner=2):
    """What belongs to one head of one batch item of an array (..., H or fewer, *inner), any leading axis of 1."""
    x = np.asarray(x)
    x = x.reshape((1,) * (len(item) + 1 + inner - x.ndim) + x.shape)
    x = x[tuple(0 if n == 1 else i for n, i in zip(x.shape, item, strict=False))]
    return x[head * len(x) // heads]


def rows(index, item, i, j, q_len):
    """The row of a table for query i and key j."""
    if hasattr(index, "lookup"):
        return index.lookup[j - i + q_len - 1]
    lead = index.index.shape[:-2]
    at = [0 if n == 1 else b for n, b in zip(lead, item[len(item) - len(lead) :], strict=True)]
    return index.index[(*at, i, j)]


def tanh(x):
    """(e^2x - 1) / (e^2x + 1)."""
    if abs(x) > 60:
        return Decimal(1 if x > 0 else -1)
    with localcontext() as more:
        more.prec = DIGITS + 40
        e = (2 * x).exp()
        return (e - 1) / (e + 1)


def turned(x, factors, turn, *, back):
    """Pairs of channels times complex numbers, or their conjugates: x (L, D) and factors two of (L, P)."""
    cos, sin = (decimals(y) for y in factors)
    out, pairs = x.copy(), cos.shape[-1]
    per = pairs // turn.blocks
    for p in range(pairs):
        block, n = divmod(p, per)
        start = turn.first + 2 * per * block
        a, b = (start + n, start + n + per) if turn.layout == "half" else (start + 2 * n, start + 2 * n + 1)
        c, s = cos[:, p], -sin[:, p] if back else sin[:, p]
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return out


def excluded(problem, item, head, i):
    """Which keys query i may not attend."""
    site, shut = problem.site, []
    place = i + site.offset
    for j in range(site.k_len):
        out = not place - problem.left <= j <= place + problem.right or (place - j) % problem.step
        if problem.ranges is not None:
            first, stop = problem.ranges[item][i]
            out = out or not first <= j < stop
        if problem.key_lengths is not None:
            out = out or j >= problem.key_lengths[item]
        if problem.mask is not None:
            mask = problem.mask[(*item, head, i, j)]
            out = out or (not mask if problem.mask.dtype == np.bool_ else mask == -np.inf)
        shut.append(bool(out))
    return shut


def head_of_call(problem, terms, item, head, sinks):
    """Output (L_q, D_v) and log-sum-exp (L_q,) of one head, as decimals; what is not finite has weight 0."""
    site = problem.site

    def of(x, inner=2):
        return own(x, item, head, site.heads, inner)

    query, key = (decimals(of(x if y is None else y)) for x, y in ((problem.q, terms.query), (problem.k, terms.key)))
    s = query @ key.T * Decimal(site.scale)
    cap = Decimal(problem.softcap) if problem.softcap else None
    if problem.cap_content:
        s = np.frompyfunc(lambda x: cap * tanh(x / cap), 1, 1)(s)
    lines = [(decimals(of(t.table, 1))[:, None], t, "table") for t in terms.tables]
    lines += [(decimals(of(t.weights)), t, "query") for t in terms.queries]
    lines += [(decimals(of(t.weights)), t, "key") for t in terms.keys]
    for table, term, kind in lines:
        side = {"query": lambda t=term: decimals(of(t.query)), "key": lambda t=term: decimals(of(t.key))}
        vectors = side[kind]() if kind in side else None
        for i, j in np.ndindex(s.shape):
            r = rows(term.index, item, i, j, site.q_len)
            if r >= 0:
                s[i, j] += table[r, 0] if vectors is None else vectors[i if kind == "query" else j] @ table[r]
    shut = np.array([excluded(problem, item, head, i) for i in range(site.q_len)], bool).reshape(s.shape)
    for bias in terms.biases:
        added = np.broadcast_to(of(bias), s.shape)
        shut = shut | np.isneginf(added)
        s = s + decimals(np.where(np.isneginf(added), 0, added))
    if cap is not None and not problem.cap_content:
        s = np.frompyfunc(lambda x: cap * tanh(x / cap), 1, 1)(s)
    if problem.mask is not None and problem.mask.dtype != np.bool_:
        added = of(problem.mask)
        s = s + decimals(np.where(np.isneginf(added), 0, added))
    v = of(problem.v)
    v = decimals(np.where(np.isfinite(v), v, 0))
    turn = terms.turn
    if turn is not None:
        v = turned(v, [of(x) for x in turn.key], turn, back=False)
    out = np.full((site.q_len, v.shape[1]), Decimal(0), object)
    lse = np.full(site.q_len, Decimal("-inf"), object)
    for i in range(site.q_len):
        open_ = [j for j in range(site.k_len) if not shut[i, j]]
        sink = None if sinks is None or np.isneginf(sinks[i]) else decimal(sinks[i])
        scores = [s[i, j] for j in open_] + ([] if sink is None else [sink])
        if not scores:
            continue
        top = max(scores)
        weights = [(x - top).exp() for x in scores]
        total = sum(weights)
        lse[i] = top + total.ln()
        for j, w in zip(open_, weights, strict=False):
            value = v[j]
            for term in terms.values:
                r = rows(term.index, item, i, j, site.q_len)
                if r >= 0:
                    value = value + decimals(of(term.weights)[r])
            out[i] = out[i] + w / total * value
    return (out if turn is None else turned(out, [of(x) for x in turn.query], turn, back=True)), lse


def attention(problem, terms, sinks=None):
    """Output (*batch, H, L_q, D_v) and log-sum-exp (*batch, H, L_q) of a call in float64, as decimals."""
    site = problem.site
    out, lse = np.empty(problem.out_shape, object), np.empty(problem.out_shape[:-1], object)
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = DIGITS, -(10**9), 10**9
        for *item, head in np.ndindex(*problem.batch, site.heads):
            at = (*item, head)
            found = head_of_call(problem, terms, tuple(item), head, None if sinks is None else sinks[at])
            out[at], lse[at] = found
    return out, lse
