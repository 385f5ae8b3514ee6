"""The shapes that every figure refers to, with seeded inputs."""

from __future__ import annotations

import numpy as np

import relpos_np as rp

# name: (batch, heads, length, head_dim), float32, with a T5 bias of 32 buckets
SHAPES = {"A": (1, 8, 512, 64), "B": (1, 8, 2048, 64), "C": (1, 2, 8192, 64)}


def inputs(name):
    """Queries, keys, values and the scheme of a shape."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPES[name], dtype=np.float32) for _ in range(3))
    return q, k, v, rp.T5(rng.standard_normal((32, SHAPES[name][1]), dtype=np.float32))


def operations(name):
    """Floating-point operations of the two matrix products."""
    # Imported late: commits without it still run the benchmarks that need no count.
    from relpos_np.complexity import attention_operations

    batch, heads, length, head_dim = SHAPES[name]
    return attention_operations(batch, heads, length, length, head_dim, head_dim)


def row_error(name, result, rows=64):
    """Largest error of some rows against float64 arithmetic."""
    q, k, v, scheme = inputs(name)
    chosen = np.random.default_rng(1).choice(q.shape[2], rows, replace=False)
    worst = 0.0
    for i in chosen:
        one = [x.astype(np.float64) for x in (q[:, :, i : i + 1], k, v)]
        exact = rp.attention(*one, position=scheme, offset=int(i), backend="numpy")
        worst = max(worst, float(np.abs(result[:, :, i : i + 1] - exact).max()))
    return worst
