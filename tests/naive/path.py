"""PaTH as loops, written from the paper; see `tests.naive.seeds` for conventions."""

from functools import cache

import numpy as np

from tests.naive.by_name import flat, witness
from tests.naive.seeds import dot, floats


@witness("path")
def path(q, k, w, beta, offset, scale, batch):
    """scale q_i^T (I - beta w w^T)_{i+M} ... (I - beta w w^T)_{j+1} k_j, less scale q_i . k_j (Yang 2025, eq. 1).

    The factors act on the key one after the other, the one after it first.
    """
    group, shared = q.shape[1] // k.shape[1], q.shape[1] // np.shape(w)[-3]
    queries, keys = floats(q), floats(k)
    directions, strengths = floats(flat(w, batch, 3)), floats(flat(beta, batch, 2))

    @cache
    def moved(b, h, j, last):
        """The key of a head of queries behind the factors up to the last one."""
        if last <= j:
            return keys[b][h // group][j]
        x, axis = moved(b, h, j, last - 1), directions[b][h // shared][last]
        along = strengths[b][h // shared][last] * dot(axis, x)
        return [a - along * c for a, c in zip(x, axis, strict=True)]

    def logit(b, h, i, j):
        for last in range(j, i + offset + 1):  # so that nothing recurs deeply
            moved(b, h, j, last)
        x = moved(b, h, j, i + offset)
        return scale * (dot(queries[b][h][i], x) - dot(queries[b][h][i], keys[b][h // group][j]))

    return logit
