"""OpenVINO: its fused attention where the scheme is a bias, plain operators for Shaw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op

from relpos_np._commands.peers import Prepared, UnavailableError, graph
from relpos_np._commands.peers.shapes import Case, bits, narrow, wide
from relpos_np.types import Array

# From ONNX's, by the order of their inputs and attributes.
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": op.add,
    "Attention": op.scaled_dot_product_attention,
    "Gather": lambda table, index: op.gather(table, index, np.int64(0)),
    "MatMul": lambda x, y: op.matmul(x, y, False, False),
    "Mul": op.multiply,
    "Pad": lambda x, pads: op.pad(x, pads[:4], pads[4:], "constant", np.float32(0)),
    "Reshape": lambda x, sizes: op.reshape(x, sizes, False),
    "Slice": lambda x, start, end, axis: op.slice(x, start, end, np.array([1]), axis),
    "Softmax": op.softmax,
    "Transpose": lambda x, axes: op.transpose(x, np.array(axes)),
}


class Graph:
    """A model with inputs in a storage; bfloat16 is fed as its bits in uint16."""

    fused = "ScaledDotProductAttention"

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.inputs: list[Any] = []
        self.feeds: list[Array] = []

    def feed(self, name: str, x: Array) -> Any:
        x = np.ascontiguousarray(bits(narrow(x, self.storage) if x.dtype == np.float32 else x))
        kind = openvino.Type.bf16 if x.dtype == np.uint16 else openvino.Type(x.dtype)
        self.feeds.append(x)
        self.inputs.append(op.parameter(list(x.shape), kind, name=name))
        return self.inputs[-1]

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        return OPERATORS[operator](*inputs, *attributes.values())


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape."""
    storage = case.shape.storage
    chosen_there = name == "openvino, own precision"
    if chosen_there and storage != "float32":
        raise UnavailableError("as asked for: see openvino")
    g = Graph(storage)
    result, note = graph.attention(g, case)
    if chosen_there:
        note += "; its own choice of precision"
    if storage != "float32":
        note += f"; all of it, and the precision asked for, {storage}"
    precision = {"float32": "f32", "bfloat16": "bf16"}[storage]
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Without it bfloat16 is used for float32 too, where the processor has it.
        **({} if chosen_there else {"INFERENCE_PRECISION_HINT": precision}),
        # Without it keys and values of one query may be kept in eight bits.
        "KV_CACHE_PRECISION": precision,
    }
    model = openvino.Model([result], g.inputs, "attention")
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    tensors = [
        openvino.Tensor(x, list(x.shape), node.get_element_type()) for x, node in zip(g.feeds, g.inputs, strict=True)
    ]
    for n, tensor in enumerate(tensors):
        request.set_input_tensor(n, tensor)

    def call() -> Any:
        # Named here because the tensors share the arrays' memory, which must live as long as the call.
        _ = tensors, g.feeds
        request.infer()
        return request.get_output_tensor(0)

    def to_numpy(out: Any) -> Any:
        # Of bfloat16 the array has the bits, under the name of another type of two bytes.
        return wide(np.array(out.data).view(np.uint16)) if storage == "bfloat16" else np.array(out.data)

    return Prepared(call, to_numpy, note)
