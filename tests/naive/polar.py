"""Polar positions as loops: sums of cosines, with no vectors made of them."""

import math

import numpy as np

from tests.naive.by_name import Loops, flat, witness
from tests.naive.seeds import floats


def softplus(x):
    """ln(1 + e^x), without overflow."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


@witness("pope")
def pope(q, k, bias, base, frequencies, positions, key_positions, offset, scale, batch):
    """sum_c softplus(q_c) softplus(k_c) cos((s - t) w_c + delta_c), w_c = base^(-c/d) (Gopalakrishnan 2025)."""
    (_, heads, l_q, _), (_, kv_heads, l_k, _) = np.shape(q), np.shape(k)
    if positions is None:
        positions, key_positions = np.arange(offset, offset + l_q), np.arange(l_k)
    elif key_positions is None:
        positions, key_positions = positions[..., offset : offset + l_q], positions
    here, there = (floats(flat(np.asarray(x, np.float64), batch, 1)) for x in (positions, key_positions))
    delta = floats(bias if np.ndim(bias) == 2 else [bias] * heads)
    count = len(delta[0]) if delta else 0
    waves = [base ** (-c / count) for c in range(count)] if frequencies is None else floats(frequencies)
    queries, keys = floats(q), floats(k)

    def logit(b, h, i, j):
        x, y = queries[b][h][i], keys[b][h // (heads // kv_heads)][j]
        distance = there[b][j] - here[b][i]
        total = sum(softplus(x[c]) * softplus(y[c]) * math.cos(distance * waves[c] + delta[h][c]) for c in range(count))
        return scale * (total + sum((x[c] * y[c] for c in range(count, len(x))), 0.0))

    return Loops(product=logit)
