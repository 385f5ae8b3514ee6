"""ONNX Runtime: graphs of the Attention operator where the scheme is a bias, of plain operators for Shaw."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from relpos_np._commands.peers import Prepared, UnavailableError, graph
from relpos_np._commands.peers.shapes import Case, bits, narrow, wide
from relpos_np.types import Array


class NoSessionError(UnavailableError):
    """The runtime lacks an operator in a storage, and what it says."""


class Graph:
    """A model whose numbers are all of one storage; half precision is fed as its bits in uint16."""

    fused = "Attention operator (opset 23)"

    def __init__(self, storage: str) -> None:
        from onnx import TensorProto, helper

        self.helper, self.storage = helper, storage
        self.kind = {"bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}.get(storage, TensorProto.FLOAT)
        self.nodes: list[Any] = []
        self.feeds: dict[str, tuple[Array, int]] = {}
        self.constants: list[Any] = []

    def feed(self, name: str, x: Array) -> str:
        if x.dtype.kind != "i":
            x, kind = bits(narrow(wide(x), self.storage)), self.kind
        else:
            kind = self.helper.np_dtype_to_tensor_dtype(x.dtype)
        self.feeds[name] = np.ascontiguousarray(x), kind
        return name

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        from onnx import numpy_helper

        name = f"{operator}_{len(self.nodes)}"
        for n, x in enumerate(inputs):
            if not isinstance(x, str):
                self.constants.append(numpy_helper.from_array(np.asarray(x), f"{name}_{n}"))
        names = [x if isinstance(x, str) else f"{name}_{n}" for n, x in enumerate(inputs)]
        self.nodes.append(self.helper.make_node(operator, names, [name], **attributes))
        return name

    def session(self, result: str, threads: int) -> Any:
        h = self.helper
        inputs = [h.make_tensor_value_info(name, kind, x.shape) for name, (x, kind) in self.feeds.items()]
        outputs = [h.make_tensor_value_info(result, self.kind, [None] * 4)]
        model = h.make_graph(self.nodes, "attention", inputs, outputs, self.constants)
        # Opset 23 has the operator, and IR 10 belongs to it; later runtimes read both.
        model = h.make_model(model, opset_imports=[h.make_opsetid("", 23)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads must not spin through the turns of others.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime has types of its own for an operator it lacks
            raise NoSessionError(f"no session: {str(error)[:200]}") from error


def in_storage(case: Case, storage: str, threads: int) -> Prepared:
    """The call with all numbers in a storage; its result goes into an array that is kept."""
    g = Graph(storage)
    result, note = graph.attention(g, case)
    session = g.session(result, threads)
    # Arrays of bfloat16 can only be bound: `run` knows no NumPy type for them.
    out = np.zeros(case.q.shape, np.float32 if storage == "float32" else np.uint16)
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    values = {name: value(x, kind) for name, (x, kind) in (g.feeds | {result: (out, g.kind)}).items()}
    binding = session.io_binding()
    for name in g.feeds:
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output(result, values[result])

    def call() -> Any:
        session.run_with_iobinding(binding)
        # They share the arrays' memory, which must live as long as the call.
        return values, g.feeds

    def to_numpy(_: Any) -> Any:
        return wide(out.view(np.float16) if storage == "float16" else out)

    return Prepared(call, to_numpy, note if storage == "float32" else f"{note}; all of it in {storage}")


def prepare(name: str, task: str, case: Case, threads: int, seconds: float) -> Prepared:
    """The call in the case's storage, or in float16 where the runtime has the operator in no other half precision."""
    try:
        return in_storage(case, case.shape.storage, threads)
    except ImportError as error:
        raise UnavailableError("needs onnx to write the graph") from error
    except NoSessionError as refused:
        if case.shape.storage == "float32":
            raise
        try:
            prepared = in_storage(case, "float16", threads)
        except NoSessionError as also:
            raise UnavailableError(f"{case.shape.storage}: {refused}; float16: {also}") from also
        prepared.note += f"; {case.shape.storage} is refused: {refused}"
        return prepared
