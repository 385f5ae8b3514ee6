"""Forgetting attention as loops, written from the papers; see `tests.naive.seeds` for conventions."""

import math

from tests.naive.by_name import flat, witness
from tests.naive.seeds import floats


def _log_gate(g, variant):
    """ln sigmoid(g) (Lin 2025, section 3), -softplus(g) (Veisi 2025), or g itself."""
    return {"fox": lambda: math.log(1 / (1 + math.exp(-g))), "cable": lambda: -math.log(1 + math.exp(g))}.get(
        variant, lambda: g
    )()


@witness("fox")
def fox(gates, variant, offset, batch):
    """The sum of ln f_l over j < l <= i + M, or minus that over i + M < l <= j (Lin 2025, eq. 5)."""
    logs = [[[_log_gate(g, variant) for g in head] for head in item] for item in floats(flat(gates, batch, 2))]

    def logit(b, h, i, j):
        here = i + offset
        between = math.fsum(logs[b][h][min(here, j) + 1 : max(here, j) + 1])
        return between if j <= here else -between

    return logit
