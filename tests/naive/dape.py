"""A bias that adapts to the text, as loops, written from the paper; see `tests.naive.seeds` for conventions."""

import math

from tests.naive.by_name import of, witness
from tests.naive.seeds import dot, floats


@witness("dape")
def dape(q, k, bias, w1, b1, w2, b2, slope, heads, l_q, l_k, offset, scale, batch):
    """b + W2 leaky(W1 [s; b] + b1) + b2 of the vectors of all heads (Zheng 2024, eq. 4)."""
    known = {"alibi": "ALiBi", "kerple": "KERPLE", "fire": "FIRE", "t5": "T5"}
    (name,) = [name for name, kind in known.items() if type(bias).__name__ == kind]
    given = {key: x for key, x in vars(bias).items() if key[0] != "_"}
    call = {"q": q, "k": k, "l_q": l_q, "l_k": l_k, "heads": heads, "offset": offset, "scale": scale, "batch": batch}
    added = of(name, given, **call).logit
    group = heads // k.shape[1]
    queries, keys = floats(q), floats(k)
    first, second, inner, outer = floats(w1), floats(w2), floats(b1), floats(b2)

    def logit(b, h, i, j):
        pair = [scale * dot(queries[b][g][i], keys[b][g // group][j]) for g in range(heads)]
        pair += [added(b, g, i, j) for g in range(heads)]
        hidden = [math.fsum([dot(row, pair), shift]) for row, shift in zip(first, inner, strict=True)]
        active = [x if x > 0 else slope * x for x in hidden]
        return dot(second[h], active) + outer[h] + pair[heads + h]

    return logit
