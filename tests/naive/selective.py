"""Selective attention as loops, written from the paper; see `tests.naive.seeds` for conventions."""

from functools import cache

from tests.naive.by_name import flat, witness
from tests.naive.seeds import dot, floats


@witness("selective")
def selective(q, k, head, variant, past, last, offset, scale, batch):
    """Minus the sum over i' < i of max(scale q_i' . k_j, 0) of one head (Leviathan 2025, section 3).

    Nobody votes on his own key, on a key that he does not see, and on the first one. x_transformers: the first one is
    that of the first query, and memory before it is spared too.
    """
    group = q.shape[1] // k.shape[1]
    queries, keys = floats(q), floats(k)
    before = None if past is None else floats(flat(past, batch, 1))

    def spared(i, j):
        own = i + offset
        if j == own or (last is not None and j > own + last):
            return True
        return j == 0 if variant == "paper" else j <= offset

    @cache
    def against(b, i, j):
        total = 0.0 if before is None else before[b][j]
        for earlier in range(i):
            if not spared(earlier, j):
                total += max(0.0, scale * dot(queries[b][head][earlier], keys[b][head // group][j]))
        return total

    return lambda b, h, i, j: -against(b, i, j)
