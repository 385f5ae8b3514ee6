"""OpenVINO: its fused attention where the scheme is a bias, plain operators for Shaw, read from a model of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino

from relpos_np._commands.peers import Prepared, UnavailableError, graph
from relpos_np._commands.peers.shapes import Case, wide


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape."""
    storage = case.shape.storage
    chosen_there = name == "openvino, own precision"
    if chosen_there and storage != "float32":
        raise UnavailableError("as asked for: see openvino")
    g = graph.Model(storage)
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
    core = openvino.Core()
    model = core.read_model(g.file(result))
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    for node in model.inputs:
        x, _ = g.feeds[node.any_name]
        request.set_tensor(node.any_name, openvino.Tensor(x, list(x.shape), node.get_element_type()))

    def call() -> Any:
        # Named here because the tensors share the arrays' memory, which must live as long as the call.
        _ = g.feeds
        request.infer()
        return request.get_output_tensor(0)

    def to_numpy(out: Any) -> Any:
        # Of bfloat16 the array has the bits, under the name of another type of two bytes.
        return wide(np.array(out.data).view(np.uint16)) if storage == "bfloat16" else np.array(out.data)

    return Prepared(call, to_numpy, note)
