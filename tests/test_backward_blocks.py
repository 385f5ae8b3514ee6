"""Gradients where blocks of queries and of keys begin and end: bands at their edges, and heads that are divided."""

from itertools import product

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba import backjob
from relpos_np.kernels._numba.backjob import BLOCK_QUERIES
from relpos_np.kernels._numba.target import BLOCK_KEYS

Q_LENGTHS = (7, BLOCK_QUERIES + 1, 2 * BLOCK_QUERIES + 1)
K_LENGTHS = (BLOCK_KEYS - 1, BLOCK_KEYS + 1, 2 * BLOCK_KEYS + 1)
# The narrowest bands reach into one more tile with one query and one key.
BANDS = (None, (0, 0), (1, 0), (0, 1), (2, None), (None, 1))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_every_pair_has_its_share(parts, monkeypatch, rng):
    """However many ranges of queries and of keys a head is divided into, and whichever there are more of."""
    monkeypatch.setattr(backjob, "part_count", lambda heads, threads: parts)
    for q_len, k_len, band in product(Q_LENGTHS, K_LENGTHS, BANDS):
        q, k, v, g = (rng.standard_normal((1, n, 3)) for n in (q_len, k_len, k_len, q_len))
        for offset in (0, 1, k_len - q_len):
            call = {"grad_out": g, "window": band, "offset": offset}
            found, expected = (rp.attention_vjp(q, k, v, **call, backend=b) for b in ("numba", "numpy"))
            for name in "qkv":
                # Sums of at most 2 * BLOCK_KEYS products of numbers of about 1.
                a, b = getattr(found, name), getattr(expected, name)
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=f"{name} {q_len} {k_len} {band} {offset}")
