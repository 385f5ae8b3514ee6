"""Whole layers on random weights: no worse than the same layer on NumPy, or within a few roundings."""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np import layers
from relpos_np.testing import tolerance
from relpos_np.testing.compare import ratio
from tests.soaking import calls
from tests.soaking.calls import pick
from tests.soaking.kinds import Report, bits

# Scores of the weights below stay under this: inputs and weights are of the size that makes states about 1.
_SCORES = 16.0


def _weights(rng: np.random.Generator, *shape: int) -> Any:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def _multi_head(rng: np.random.Generator) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    heads, kv_heads, dim = (*pick(rng, ((4, 4), (4, 2), (3, 1))), pick(rng, (4, 8, 20)))
    width, length = int(rng.integers(4, 40)), pick(rng, calls.SHORT)
    position = pick(
        rng,
        (
            None,
            rp.T5(_weights(rng, 32, heads)),
            rp.ALiBi(heads=heads),
            rp.Shaw(_weights(rng, 7, dim), _weights(rng, 9, dim)),
            rp.Rotary(dim),
        ),
    )
    rows = (heads * dim, kv_heads * dim, kv_heads * dim)
    parts = [(_weights(rng, n, width), _weights(rng, n)) for n in rows]
    layer = layers.MultiHeadAttention(*parts, _weights(rng, width, heads * dim), heads=heads, position=position)
    return layer, (2, length, width), {"causal": bool(rng.integers(2))}


def _relative(rng: np.random.Generator) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    heads, dim, length = 3, pick(rng, (4, 8, 20)), pick(rng, calls.SHORT)
    width = heads * dim
    parts = [_weights(rng, width, width) for _ in range(4)]
    variant = pick(rng, ("transformer_xl", "conformer", "xlnet", "espnet_legacy", "wenet"))
    layer = layers.RelativeMultiHeadAttention(
        *parts,
        pos=_weights(rng, width, width),
        content_bias=_weights(rng, heads, dim),
        position_bias=_weights(rng, heads, dim),
        variant=variant,
    )
    return layer, (2, length, width), {}


def _window(rng: np.random.Generator) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    heads, sides, frames = pick(rng, (1, 2, 3)), pick(rng, ((2, 2), (4, 4), (3, 5), (7, 7))), int(rng.integers(1, 4))
    layer = layers.WindowAttention(heads * 8, frames, frames, sides, heads, rng=rng)
    tokens = frames * sides[0] * sides[1]
    return layer, (int(rng.integers(1, 6)), tokens, heads * 8), {"return_attention": False}


def _swin(rng: np.random.Generator) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    side, heads = int(rng.integers(2, 8)), pick(rng, (1, 2, 3))
    moved = pick(rng, (0, side // 2))
    layer = layers.SwinAttention(heads * 8, (side, side), heads, shift_size=(moved, moved), rng=rng)
    return layer, (int(rng.integers(1, 3)), *(int(n) for n in rng.integers(1, 20, 2)), heads * 8), {}


_LAYERS = (_multi_head, _relative, _window, _swin)


def layer(rng: np.random.Generator, report: Report) -> None:
    """One layer in float32 or float64; the same bits again."""
    made, shape, options = pick(rng, _LAYERS)(rng)
    x = rng.standard_normal(shape).astype(pick(rng, (np.float32, np.float64)))
    report.where = f"{made!r}, {x.dtype}: {x.shape}"
    exact = made(x.astype(np.float64), backend="numpy", **options)
    trusted, actual, again = (made(x, backend=name, **options) for name in ("numpy", "numba", "numba"))
    floor = tolerance(x.dtype, logit_bound=_SCORES, depth=shape[-1], magnitude=max(1.0, float(np.abs(exact).max())))
    error = ratio(actual, exact, floor + 4 * ratio(trusted, exact, 1.0))
    report.judge("numba", str(x.dtype), error, "layer")
    report.expect(bits(actual) == bits(again), "the layer gave other bits when called again")
    report.calls += 3
