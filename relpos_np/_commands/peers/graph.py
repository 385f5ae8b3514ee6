"""Attention as a model of ONNX, in the operators of opset 23, for runtimes that read one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._commands.peers import UnavailableError
from relpos_np._commands.peers.shapes import Case, bits, narrow, wide
from relpos_np.interop.onnx.graph import Graph
from relpos_np.interop.onnx.package import package
from relpos_np.types import Array


class Model(Graph):
    """A model whose numbers are all of one storage; half precision is fed as its bits in uint16.

    ``g.feed(name, array)`` makes an input, and ``g.node(operator, *inputs, ...)`` a node of inputs, nodes and
    constants.
    """

    def __init__(self, storage: str) -> None:
        super().__init__()
        types = package().TensorProto
        self.storage = storage
        self.kind = {"bfloat16": types.BFLOAT16, "float16": types.FLOAT16}.get(storage, types.FLOAT)
        self.feeds: dict[str, tuple[Array, int]] = {}

    def feed(self, name: str, x: Array) -> str:
        if x.dtype.kind != "i":
            x, kind = bits(narrow(wide(x), self.storage)), self.kind
        else:
            kind = package().helper.np_dtype_to_tensor_dtype(x.dtype)
        self.feeds[name] = np.ascontiguousarray(x), kind
        return name

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        return self.add(operator, *(x if isinstance(x, str) else self.constant(x) for x in inputs), **attributes)

    def file(self, result: str) -> bytes:
        """The file of a model with this node as its output."""
        h = package().helper
        inputs = [h.make_tensor_value_info(name, kind, x.shape) for name, (x, kind) in self.feeds.items()]
        outputs = [h.make_tensor_value_info(result, self.kind, [None] * 4)]
        graph = h.make_graph(self.nodes, "attention", inputs, outputs, self.initializers)
        # Opset 23 has the operator, and IR 10 belongs to it; later runtimes read both.
        model = h.make_model(graph, opset_imports=[h.make_opsetid("", 23)], ir_version=10)
        return bytes(model.SerializeToString())


def attention(g: Model, case: Case) -> tuple[str, str]:
    """The result of a case as a node, and what should be known about it."""
    s = case.shape
    if s.storage != "float32" and s.kind in ("transformer_xl", "shaw"):
        raise UnavailableError("only written in float32")
    q, k, v = (g.feed(letter, getattr(case, letter)) for letter in "qkv")
    if s.kind == "shaw":
        return _shaw(g, case, q, k, v), "MatMul and Softmax, vectors gathered inside the call"
    if s.kind == "transformer_xl":
        query = g.node("Add", q, g.feed("content_bias", case.arrays["content_bias"][:, None]))
        note = "Attention operator, its mask built by pad and reshape inside the call"
        return g.node("Attention", query, k, v, _shifted(g, case, q)), note
    if s.kind == "plain":
        return g.node("Attention", q, k, v), "Attention operator"
    bias, hidden = case.bias[None], case.padding
    mask = g.feed("mask", bias if hidden is None else bias + hidden)
    return g.node("Attention", q, k, v, mask), "Attention operator, bias built before the call"


def _scaled(g: Model, case: Case, x: str) -> str:
    return g.node("Mul", x, np.float32(1 / math.sqrt(case.shape.head_dim)))


def _shifted(g: Model, case: Case, q: str) -> str:
    """Transformer-XL's mask: scaled products with the rows of distances, shifted, and -inf for later keys."""
    s = case.shape
    query = g.node("Add", q, g.feed("position_bias", case.arrays["position_bias"][:, None]))
    products = g.node("MatMul", query, g.feed("rows", case.arrays["rows"].transpose(1, 2, 0)))
    padded = g.node("Pad", products, np.array([0, 0, 0, 1, 0, 0, 0, 0]))
    turned = g.node("Reshape", padded, np.array([s.batch, s.heads, s.k_len + 1, s.q_len]))
    cut = g.node("Slice", turned, np.array([1]), np.array([s.k_len + 1]), np.array([2]))
    position = g.node("Reshape", cut, np.array([s.batch, s.heads, s.q_len, s.k_len]))
    hidden = np.where(case.apart > 0, np.float32(-np.inf), np.float32(0))
    return g.node("Add", _scaled(g, case, position), g.feed("hidden", hidden))


def _shaw(g: Model, case: Case, q: str, k: str, v: str) -> str:
    """Shaw's attention, with one product per query: (L_q, B H, D) by (L_q, D, L_k)."""
    s = case.shape
    index = g.feed("index", case.per_pair)
    on_keys, on_values = (
        g.node("Gather", g.feed(name, case.arrays[name]), index) for name in ("key_table", "value_table")
    )

    def by_query(x: str, width: int, vectors: str) -> str:
        flat = g.node("Reshape", x, np.array([-1, s.q_len, width]))
        products = g.node("MatMul", g.node("Transpose", flat, perm=[1, 0, 2]), vectors)
        sizes = np.array([s.batch, s.heads, s.q_len, -1])
        return g.node("Reshape", g.node("Transpose", products, perm=[1, 0, 2]), sizes)

    position = by_query(q, s.head_dim, g.node("Transpose", on_keys, perm=[0, 2, 1]))
    content = g.node("MatMul", q, g.node("Transpose", k, perm=[0, 1, 3, 2]))
    p = g.node("Softmax", _scaled(g, case, g.node("Add", content, position)), axis=-1)
    return g.node("Add", g.node("MatMul", p, v), by_query(p, s.k_len, on_values))
