"""Relative logits as loops, from the description of the published model; see `tests.naive.seeds` for conventions."""

from tests.naive.by_name import flat, witness
from tests.naive.seeds import floats


@witness("inkling")
def inkling(relative_states, proj, offset, batch):
    """b = sum_c r_hi[c] P[c][n] for 0 <= n < E, n = i + M - j, and 0 beyond (Thinking Machines 2026)."""
    states, profiles = floats(flat(relative_states, batch, 3)), floats(proj)

    def logit(b, h, i, j):
        distance = i + offset - j
        if not 0 <= distance < len(profiles[0]):
            return 0.0
        return sum(x * profile[distance] for x, profile in zip(states[b][h][i], profiles, strict=True))

    return logit
