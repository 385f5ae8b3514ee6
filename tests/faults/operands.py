"""Operands of tests that need no more than some."""

import numpy as np


def make(rng, dtype=np.float64, *, q_len=5, k_len=6, heads=2, batch=(2,), depth=4, v_dim=3):
    """Queries, keys and values."""
    shapes = ((q_len, depth), (k_len, depth), (k_len, v_dim))
    return [rng.standard_normal((*batch, heads, *shape)).astype(dtype) for shape in shapes]
