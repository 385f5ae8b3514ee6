"""Arithmetic that is coarser than the operands: products of fewer bits, probabilities in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from relpos_np.conform.altered import Answer, out_of, plain_outputs, scale_of, scores_of, values_of
from relpos_np.conform.formats import Format
from relpos_np.testing.example import Example
from relpos_np.types import Array

# Bits of a mantissa, the first one not stored.
_COARSE = (("TF32", 10), ("bfloat16", 7), ("float16", 10))


def of_roundings(kept: Format) -> Iterator[tuple[str, Answer]]:
    """Those that are coarser than a format."""
    for name, bits in _COARSE:
        if 2.0**-bits > kept.eps and name != "float16":
            yield f"makes products of q and k in {name}", partial(_products, bits)
            yield f"makes products of q, k and v in {name}", partial(_all_products, bits)
        if 2.0**-bits > kept.eps and name != "TF32":
            yield f"rounds probabilities to {name}", partial(_weights, bits, True)
            yield f"rounds exponentials to {name}", partial(_weights, bits, False)


def coarse(x: Array, bits: int) -> Array:
    """The nearest numbers with so many bits."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1))


def _products(bits: int, one: Example) -> Array:
    return out_of(one, q=coarse(one.q, bits), k=coarse(one.k, bits), scale=scale_of(one))


def _all_products(bits: int, one: Example) -> Array | None:
    if not plain_outputs(one):
        return None
    return out_of(one, q=coarse(one.q, bits), k=coarse(one.k, bits), v=coarse(one.v, bits), scale=scale_of(one))


def _weights(bits: int, normalised: bool, one: Example) -> Array | None:
    if not plain_outputs(one) or one.kwargs.get("sinks") is not None:
        return None
    s = scores_of(one)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0.0))
    total = p.sum(axis=-1, keepdims=True)
    total = np.where(total > 0, total, 1.0)
    v = values_of(one)
    return np.asarray(coarse(p / total, bits) @ v if normalised else coarse(p, bits) @ v / total)
