"""Vectors per relative position or label as loops, written from the papers; see `tests.naive.seeds` for conventions."""

import math
from fractions import Fraction
from functools import cache
from itertools import accumulate

import numpy as np

from tests.naive.by_name import flat, witness
from tests.naive.seeds import dot, floats


def _heads_of(k, q):
    """Which key head a query head reads."""
    return np.shape(q)[1] // np.shape(k)[1]


# ---------------------------------------------------------------------------------------------- DeBERTa


def deberta_bucket(distance, span, max_position=None):
    """The distance, or beyond s//2 a logarithmic bucket rounded up, at most s, with the sign (He 2021, code of v2).

    ceil(ln(n/mid) / ln((P-1)/mid) (mid-1)) <= m says (n/mid)^(mid-1) <= ((P-1)/mid)^m, which fractions decide.
    """
    if max_position is None:
        return distance
    middle, n = span // 2, abs(distance)
    if n <= middle:
        return distance
    power = Fraction(n, middle) ** (middle - 1)
    m = 1
    while middle + m < span and Fraction(max_position - 1, middle) ** m < power:
        m += 1
    return (middle + m) * (1 if distance > 0 else -1)


_deberta_bucket = cache(deberta_bucket)


@witness("deberta")
def deberta(
    q, k, pos_key=None, pos_query=None, *, max_position=None, clamped=False, p2c="code", offset=None, scale=None
):
    """scale (q_i . Kr[delta(i,j)] + k_j . Qr[delta(i,j)]), delta = clip(i+M-j, -s, s-1) + s (He 2021, eq. 3 and 4).

    p2c="paper": k_j . Qr[delta(j,i)]. clamped: i+M-j within +-(P-1) before anything else (Microsoft's newest code).
    """
    (_, _, l_q, dim), l_k = np.shape(q), np.shape(k)[2]
    group = _heads_of(k, q)
    offset = l_k - l_q if offset is None else offset
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    q, k = floats(q), floats(k)
    keys, queries = (None if table is None else floats(table) for table in (pos_key, pos_query))

    def row(table, distance):
        span = len(table) // 2
        if clamped:
            distance = max(min(distance, max_position - 1), 1 - max_position)
        return table[min(max(_deberta_bucket(distance, span, max_position) + span, 0), 2 * span - 1)]

    def logit(b, h, i, j):
        distance = i + offset - j
        total = 0.0
        if keys is not None:
            total += dot(q[b][h][i], row(keys[h], distance))
        if queries is not None:
            total += dot(k[b][h // group][j], row(queries[h], distance if p2c == "code" else -distance))
        return scale * total

    return logit


# ---------------------------------------------------------------------------------------------- labels of a graph


def graph_labels(q, labels, table=None, key_table=None, value_table=None, *, scale=None):
    """(logit, value): scale q_i . wK[r] + T[r, h] and wV[r] for the label r of i and j; nothing for r = -1.

    Vectors per label: Shaw 2018, section 3.1; a bias per label: Ying 2021, eq. 6. labels (L_q, L_k), or with a batch.
    """
    scale = 1.0 / math.sqrt(np.shape(q)[3]) if scale is None else float(scale)
    queries, labels = floats(q), np.asarray(labels)
    biases, key_rows, value_rows = (None if x is None else floats(x) for x in (table, key_table, value_table))

    def label(b, i, j):
        return int(labels[i, j] if labels.ndim == 2 else labels[min(b, len(labels) - 1), i, j])

    def vector(rows, h, r):
        return (rows[h] if isinstance(rows[0][0], list) else rows)[r]

    def logit(b, h, i, j):
        r = label(b, i, j)
        if r < 0:
            return 0.0
        total = 0.0 if biases is None else biases[r][h]
        return total if key_rows is None else total + scale * dot(queries[b][h][i], vector(key_rows, h, r))

    def value(b, h, i, j):
        r = label(b, i, j)
        found = vector(value_rows, h, max(r, 0))
        return [0.0] * len(found) if r < 0 else found

    return logit, None if value_rows is None else value


@witness("graph")
def graph(q, labels, table, key_table, value_table, scale, batch):
    """`graph_labels` of every batch item (Shaw 2018; Ying 2021)."""
    return graph_labels(q, flat(labels, batch, 2), table, key_table, value_table, scale=scale)


def graphormer(distances, table, virtual):
    """Dense bias (H, N+1, N+1): T[phi(i,j), h], and t_h with the virtual node, which is first (Ying 2021, 3.1.2)."""
    rows, t, phi = floats(table), floats(virtual), np.asarray(distances).tolist()
    n = len(phi)
    out = np.empty((len(t), n + 1, n + 1))
    for h in range(len(t)):
        for i in range(n + 1):
            for j in range(n + 1):
                out[h, i, j] = t[h] if i == 0 or j == 0 else rows[phi[i - 1][j - 1]][h]
    return out


# ---------------------------------------------------------------------------------------------- CoPE


@witness("cope")
def cope_of(q, k, table, variant, gate_key, counted, last, offset, scale, batch):
    """`cope` of every batch item (Golovneva 2024)."""
    gate_key, counted = (None if x is None else flat(x, batch, 3) for x in (gate_key, counted))
    options = {"last": last, "offset": offset, "scale": scale}
    return cope(q, k, table, variant=variant, gate_key=gate_key, counted=counted, **options)


def cope(q, k, table, *, variant="paper", gate_key=None, counted=None, last=None, offset=None, scale=None):
    """z_i[p] with p_ij the sum of sigmoid(scale q_i . k_t) from t = j to the last key (Golovneva 2024, eq. 3 to 8).

    last: largest t - (i + M) that is counted, 0 in causal attention, None for all keys. variant="ram": scale z_i[p].
    """
    (_, _, l_q, dim), l_k = np.shape(q), np.shape(k)[2]
    group = _heads_of(k, q)
    offset = l_k - l_q if offset is None else offset
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    queries, keys, rows = floats(q), floats(k if gate_key is None else gate_key), floats(table)
    per_head = isinstance(rows[0][0], list)

    full = (np.shape(q)[0], np.shape(q)[1], l_q, l_k)
    counted = None if counted is None else np.broadcast_to(counted, full).tolist()

    def gate(b, h, i, t):
        if last is not None and t - (i + offset) > last:
            return 0.0
        if counted is not None and not counted[b][h][i][t]:
            return 0.0
        return 1.0 / (1.0 + math.exp(-scale * dot(queries[b][h][i], keys[b][h // group][t])))

    @cache
    def counts(b, h, i):
        gates = [gate(b, h, i, t) for t in range(l_k)]
        return list(accumulate(reversed(gates)))[::-1]

    def logit(b, h, i, j):
        own = rows[h] if per_head else rows
        p = min(counts(b, h, i)[j], float(len(own) - 1))
        below, above = math.floor(p), math.ceil(p)
        z = [dot(queries[b][h][i], own[at]) for at in (below, above)]
        return (z[1] * (p - below) + z[0] * (1.0 - (p - below))) * (1.0 if variant == "paper" else scale)

    return logit
