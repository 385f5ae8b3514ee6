"""OpenVINO: its fused attention where the scheme is a bias, plain operators for Shaw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op

from relpos_np._commands.peers import Prepared, UnavailableError, arrays
from relpos_np._commands.peers.shapes import Case, narrow, wide


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call of a shape."""
    s, scale = case.shape, np.float32(1 / math.sqrt(case.shape.head_dim))
    feeds, kinds = {}, {}

    def feed(name: Any, x: Any) -> Any:
        x = np.ascontiguousarray(narrow(x, s.storage) if x.dtype == np.float32 else x)
        # OpenVINO takes bfloat16 as the bits.
        half = x.dtype == np.uint16 or x.dtype.name == "bfloat16"
        feeds[name] = x.view(np.uint16) if half else x
        kinds[name] = openvino.Type.bf16 if half else openvino.Type(x.dtype)
        return op.parameter(list(x.shape), kinds[name], name=name)

    q, k, v = (feed(letter, getattr(case, letter)) for letter in "qkv")
    inputs = [q, k, v]
    note = "ScaledDotProductAttention, bias built before the call"
    if s.kind == "transformer_xl":
        note = "ScaledDotProductAttention, its mask built by pad and reshape inside the call"
        u = feed("u", case.arrays["content_bias"][:, None])
        bias = feed("bias", case.arrays["position_bias"][:, None])
        rows = feed("rows", case.arrays["rows"].transpose(1, 2, 0))
        hidden = feed("hidden", arrays.minus_infinity(case))
        inputs += [u, bias, rows, hidden]
        products = op.matmul(op.add(q, bias), rows, False, False)
        padded = op.pad(products, np.array([0, 0, 0, 1]), np.array([0, 0, 0, 0]), "constant", np.float32(0))
        turned = op.reshape(padded, np.array([s.batch, s.heads, s.k_len + 1, s.q_len]), False)
        cut = op.slice(turned, np.array([1]), np.array([s.k_len + 1]), np.array([1]), np.array([2]))
        position = op.reshape(cut, np.array([s.batch, s.heads, s.q_len, s.k_len]), False)
        mask = op.add(op.multiply(position, scale), hidden)
        result = op.scaled_dot_product_attention(op.add(q, u), k, v, mask)
    elif s.kind == "shaw":
        note = "MatMul and Softmax, vectors gathered inside the call"
        index = feed("index", arrays.shaw_rows(case))
        tables = [feed(name, case.arrays[name]) for name in ("key_table", "value_table")]
        inputs += [index, *tables]
        on_keys, on_values = (op.gather(table, index, np.int64(0)) for table in tables)
        turn, sizes = np.array([1, 0, 2]), np.array([s.batch, s.heads, s.q_len, -1])
        by_query = op.transpose(op.reshape(q, np.array([-1, s.q_len, s.head_dim]), False), turn)
        position = op.matmul(by_query, on_keys, False, True)
        position = op.reshape(op.transpose(position, turn), sizes, False)
        scores = op.multiply(op.add(op.matmul(q, k, False, True), position), scale)
        p = op.softmax(scores, -1)
        by_query = op.transpose(op.reshape(p, np.array([-1, s.q_len, s.k_len]), False), turn)
        added = op.transpose(op.matmul(by_query, on_values, False, False), turn)
        result = op.add(op.matmul(p, v, False, False), op.reshape(added, sizes, False))
    else:
        masks = [] if s.kind == "plain" else [feed("mask", arrays.bias(case)[None])]
        inputs += masks
        result = op.scaled_dot_product_attention(q, k, v, *masks)
    precision = {"float32": "f32", "bfloat16": "bf16"}[s.storage]
    if name == "openvino, own precision":
        if s.storage != "float32":
            raise UnavailableError("as asked for: see openvino")
        note += "; its own choice of precision"
    if s.storage != "float32":
        note += f"; all of it, and the precision asked for, {s.storage}"
    model = openvino.Model([result], inputs, "attention")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Without it bfloat16 is used for float32 too, where the processor has it.
        **({} if name == "openvino, own precision" else {"INFERENCE_PRECISION_HINT": precision}),
        # Without it keys and values of one query may be kept in eight bits.
        "KV_CACHE_PRECISION": precision,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    tensors = [openvino.Tensor(x, list(x.shape), kinds[name]) for name, x in feeds.items()]
    for n, tensor in enumerate(tensors):
        request.set_input_tensor(n, tensor)

    def call() -> Any:
        # Named here because the tensors share the arrays' memory, which must live as long as the call.
        _ = tensors, feeds
        request.infer()
        return request.get_output_tensor(0)

    def to_numpy(out: Any) -> Any:
        # Of bfloat16 the array has the bits, under the name of another type of two bytes.
        return wide(np.array(out.data).view(np.uint16)) if s.storage == "bfloat16" else np.array(out.data)

    return Prepared(call, to_numpy, note)
