"""ONNX Runtime: graphs of the Attention operator where the scheme is a bias, of plain operators for Shaw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime

from relpos_np._commands.peers import Prepared, UnavailableError, arrays
from relpos_np._commands.peers.shapes import Case, narrow, wide


class Graph:
    """Inputs with their values, constants and nodes, put together as they are named.

    Without a `storage` inputs have the arrays' dtypes; with one of half precision they are its bits in uint16.
    """

    def __init__(self, storage: Any = None) -> None:
        from onnx import TensorProto, helper

        self.helper = helper
        self.half = {"bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}.get(storage)
        self.nodes: list[Any] = []
        self.feeds: dict[str, Any] = {}
        self.constants: list[Any] = []

    def feed(self, name: Any, x: Any) -> Any:
        self.feeds[name] = np.ascontiguousarray(x)
        return name

    def constant(self, name: Any, x: Any) -> Any:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(x), name))
        return name

    def add(self, operator: Any, *inputs: str, **attributes: Any) -> Any:
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def session(self, result: Any, threads: Any) -> Any:
        h = self.helper
        inputs = [
            h.make_tensor_value_info(name, self.half or h.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in self.feeds.items()
        ]
        outputs = [h.make_tensor_value_info(result, self.half or 1, [None] * 4)]
        graph = h.make_graph(self.nodes, "attention", inputs, outputs, self.constants)
        # Opset 23 has the operator, and IR 10 belongs to it; later runtimes read both.
        model = h.make_model(graph, opset_imports=[h.make_opsetid("", 23)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads must not spin through the turns of others.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime has types of its own for an operator it lacks
            raise UnavailableError(f"no session: {str(error)[:200]}") from error


def in_half(case: Case, storage: str, threads: int) -> Prepared:
    """The operator on a case in half precision."""
    g = Graph(storage)
    named = {letter: wide(getattr(case, letter)) for letter in "qkv"}
    if case.shape.kind != "plain":
        named["mask"] = arrays.bias(case)[None]
    result = g.add("Attention", *(g.feed(name, narrow(x, storage).view(np.uint16)) for name, x in named.items()))
    session = g.session(result, threads)
    # Arrays of bfloat16 can only be bound: `run` knows no NumPy type for them.
    out = np.zeros(case.q.shape, np.uint16)
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    values = {name: value(x, g.half) for name, x in (g.feeds | {result: out}).items()}
    binding = session.io_binding()
    for name in g.feeds:
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output(result, values[result])

    def call() -> Any:
        session.run_with_iobinding(binding)
        # They share the arrays' memory, which must live as long as the call.
        return values

    def to_numpy(_: Any) -> Any:
        return wide(out if storage == "bfloat16" else out.view(np.float16))

    bias = "" if case.shape.kind == "plain" else ", bias too, built before the call"
    return Prepared(call, to_numpy, f"Attention operator (opset 23) in {storage}{bias}")


def in_some_half(case: Case, threads: int) -> Prepared:
    """In the case's storage, or in float16 where the runtime has the operator in no other half precision."""
    try:
        return in_half(case, case.shape.storage, threads)
    except UnavailableError as refused:
        try:
            prepared = in_half(case, "float16", threads)
        except UnavailableError as also:
            raise UnavailableError(f"{case.shape.storage}: {refused}; float16: {also}") from also
        prepared.note += f"; {case.shape.storage} is refused: {refused}"
        return prepared


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape."""
    try:
        g = Graph()
    except ImportError as error:
        raise UnavailableError("needs onnx to write the graph") from error
    if case.shape.storage != "float32":
        if case.shape.kind in ("transformer_xl", "shaw"):
            raise UnavailableError("only written in float32")
        return in_some_half(case, threads)
    s, scale = case.shape, 1 / math.sqrt(case.shape.head_dim)
    q, k, v = (g.feed(letter, getattr(case, letter)) for letter in "qkv")
    note = "Attention operator (opset 23), bias built before the call"
    if s.kind == "transformer_xl":
        note = "Attention operator (opset 23), its mask built by pad and reshape inside the call"
        u, bias, rows = (
            g.feed(name, x)
            for name, x in (
                ("u", case.arrays["content_bias"][:, None]),
                ("bias", case.arrays["position_bias"][:, None]),
                ("rows", case.arrays["rows"].transpose(1, 2, 0)),
            )
        )
        products = g.add("MatMul", g.add("Add", q, bias), rows)
        padded = g.add("Pad", products, g.constant("pads", np.array([0, 0, 0, 1, 0, 0, 0, 0])))
        heads = (s.batch, s.heads)
        turned = g.add("Reshape", padded, g.constant("turned", np.array([*heads, s.k_len + 1, s.q_len])))
        ends = (g.constant(n, np.array([x])) for n, x in (("one", 1), ("end", s.k_len + 1), ("axis", 2)))
        cut = g.add("Slice", turned, *ends)
        position = g.add("Reshape", cut, g.constant("back", np.array([*heads, s.q_len, s.k_len])))
        scaled = g.add("Mul", position, g.constant("scale", np.float32(scale)))
        mask = g.add("Add", scaled, g.feed("hidden", arrays.minus_infinity(case)))
        result = g.add("Attention", g.add("Add", q, u), k, v, mask)
    elif s.kind == "shaw":
        note = "MatMul and Softmax, vectors gathered inside the call"
        index = g.feed("index", arrays.shaw_rows(case))
        on_keys, on_values = (
            g.add("Gather", g.feed(name, case.arrays[name]), index) for name in ("key_table", "value_table")
        )
        # One product per query: (L_q, B H, D) by (L_q, D, L_k)
        flat = g.add("Reshape", q, g.constant("flat", np.array([-1, s.q_len, s.head_dim])))
        by_query = g.add("Transpose", flat, perm=[1, 0, 2])
        position = g.add("MatMul", by_query, g.add("Transpose", on_keys, perm=[0, 2, 1]))
        sizes = g.constant("sizes", np.array([s.batch, s.heads, s.q_len, -1]))
        position = g.add("Reshape", g.add("Transpose", position, perm=[1, 0, 2]), sizes)
        content = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.add("Mul", g.add("Add", content, position), g.constant("scale", np.float32(scale)))
        p = g.add("Softmax", scores, axis=-1)
        flat = g.add("Reshape", p, g.constant("flat_p", np.array([-1, s.q_len, s.k_len])))
        added = g.add("MatMul", g.add("Transpose", flat, perm=[1, 0, 2]), on_values)
        added = g.add("Reshape", g.add("Transpose", added, perm=[1, 0, 2]), sizes)
        result = g.add("Add", g.add("MatMul", p, v), added)
    elif s.kind == "plain":
        note = "Attention operator (opset 23)"
        result = g.add("Attention", q, k, v)
    else:
        result = g.add("Attention", q, k, v, g.feed("mask", arrays.bias(case)[None]))
    session = g.session(result, threads)
    return Prepared(lambda: session.run(None, g.feeds)[0], note=note)
