"""Rotations by exponentials of matrices, as a series in loops."""

from functools import cache

import numpy as np

from tests.naive.by_name import Loops, flat, witness
from tests.naive.seeds import dot, floats


def product(a, b):
    """Rows times columns."""
    columns = list(zip(*b, strict=True))
    return [[dot(row, column) for column in columns] for row in a]


def exponential(x):
    """(sum_n (x / 2^s)^n / n!)^(2^s)."""
    size, halvings = range(len(x)), 0
    largest = max(sum(abs(entry) for entry in row) for row in x)
    while largest > 0.5:
        largest, halvings = largest / 2, halvings + 1
    small = [[entry / 2**halvings for entry in row] for row in x]
    total = [[float(i == j) for j in size] for i in size]
    term = total
    for n in range(1, 20):
        term = [[entry / n for entry in row] for row in product(term, small)]
        total = [[total[i][j] + term[i][j] for j in size] for i in size]
    for _ in range(halvings):
        total = product(total, total)
    return total


@witness("liere")
def liere(q, k, generators, positions, key_positions, offset, batch):
    """exp(sum_a x_a G_a) times each block of channels, G_a = U_a - U_a^T (Ostmeier 2025, section 3)."""
    (_, _, l_q, _), (_, kv_heads, l_k, _) = np.shape(q), np.shape(k)
    form = np.ndim(generators)
    if positions is None:
        positions, key_positions = np.arange(offset, offset + l_q), np.arange(l_k)
    elif key_positions is None:
        positions, key_positions = positions[..., offset : offset + l_q], positions
    if form == 3:
        generators, positions, key_positions = generators[None], positions[..., None, :], key_positions[..., None, :]
    given = floats(generators)
    blocks, size = np.shape(generators)[-3], np.shape(generators)[-1]

    def entry(matrix, s, t):
        return matrix[s][t] if s < t else -matrix[t][s] if t < s else 0.0

    @cache
    def rotation(x, h, n):
        """Of block n at coordinates x, for a key head or all."""
        sets = [one[n] if h is None else one[h][n] for one in given]
        rows = range(size)
        return exponential(
            [[sum(c * entry(g, s, t) for c, g in zip(x, sets, strict=True)) for t in rows] for s in rows]
        )

    def each(x, places):
        places = floats(flat(np.asarray(places, np.float64), batch, 2))
        out = np.array(x, np.float64)
        for b, h, p in np.ndindex(np.shape(x)[:3]):
            of = h // (np.shape(x)[1] // kv_heads) if form == 5 else None
            at = tuple(axis[p] for axis in places[b])
            row = floats(out[b, h, p])
            for n in range(0, blocks * size, size):
                out[b, h, p, n : n + size] = [dot(r, row[n : n + size]) for r in rotation(at, of, n // size)]
        return out

    return Loops(q=each(q, positions), k=each(k, key_positions))
