"""Attention as a graph, for runtimes that take one, in the operators of ONNX.

``g.feed(name, array)`` makes an input, and ``g.node(operator, *inputs, ...)`` a node of inputs, nodes and constants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._commands.peers import UnavailableError, arrays
from relpos_np._commands.peers.shapes import Case


def attention(g: Any, case: Case) -> tuple[Any, str]:
    """The result of a case as a node, and what should be known about it."""
    s = case.shape
    if s.storage != "float32" and s.kind in ("transformer_xl", "shaw"):
        raise UnavailableError("only written in float32")
    q, k, v = (g.feed(letter, getattr(case, letter)) for letter in "qkv")
    if s.kind == "shaw":
        return _shaw(g, case, q, k, v), "MatMul and Softmax, vectors gathered inside the call"
    if s.kind == "transformer_xl":
        query = g.node("Add", q, g.feed("content_bias", case.arrays["content_bias"][:, None]))
        note = f"{g.fused}, its mask built by pad and reshape inside the call"
        return g.node("Attention", query, k, v, _shifted(g, case, q)), note
    if s.kind == "plain":
        return g.node("Attention", q, k, v), g.fused
    bias, hidden = arrays.bias(case)[None], arrays.padding(case)
    mask = g.feed("mask", bias if hidden is None else bias + hidden)
    return g.node("Attention", q, k, v, mask), f"{g.fused}, bias built before the call"


def _scaled(g: Any, case: Case, x: Any) -> Any:
    return g.node("Mul", x, np.float32(1 / math.sqrt(case.shape.head_dim)))


def _shifted(g: Any, case: Case, q: Any) -> Any:
    """Transformer-XL's mask: scaled products with the rows of distances, shifted, and -inf for later keys."""
    s = case.shape
    query = g.node("Add", q, g.feed("position_bias", case.arrays["position_bias"][:, None]))
    products = g.node("MatMul", query, g.feed("rows", case.arrays["rows"].transpose(1, 2, 0)))
    padded = g.node("Pad", products, np.array([0, 0, 0, 1, 0, 0, 0, 0]))
    turned = g.node("Reshape", padded, np.array([s.batch, s.heads, s.k_len + 1, s.q_len]))
    cut = g.node("Slice", turned, np.array([1]), np.array([s.k_len + 1]), np.array([2]))
    position = g.node("Reshape", cut, np.array([s.batch, s.heads, s.q_len, s.k_len]))
    return g.node("Add", _scaled(g, case, position), g.feed("hidden", arrays.minus_infinity(case)))


def _shaw(g: Any, case: Case, q: Any, k: Any, v: Any) -> Any:
    """Shaw's attention, with one product per query: (L_q, B H, D) by (L_q, D, L_k)."""
    s = case.shape
    index = g.feed("index", arrays.per_pair(case))
    on_keys, on_values = (
        g.node("Gather", g.feed(name, case.arrays[name]), index) for name in ("key_table", "value_table")
    )

    def by_query(x: Any, width: int, vectors: Any) -> Any:
        flat = g.node("Reshape", x, np.array([-1, s.q_len, width]))
        products = g.node("MatMul", g.node("Transpose", flat, perm=[1, 0, 2]), vectors)
        sizes = np.array([s.batch, s.heads, s.q_len, -1])
        return g.node("Reshape", g.node("Transpose", products, perm=[1, 0, 2]), sizes)

    position = by_query(q, s.head_dim, g.node("Transpose", on_keys, perm=[0, 2, 1]))
    content = g.node("MatMul", q, g.node("Transpose", k, perm=[0, 1, 3, 2]))
    p = g.node("Softmax", _scaled(g, case, g.node("Add", content, position)), axis=-1)
    return g.node("Add", g.node("MatMul", p, v), by_query(p, s.k_len, on_values))
