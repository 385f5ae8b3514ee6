"""ONNX Runtime: graphs of the Attention operator where the scheme is a bias, of plain operators for Shaw."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from relpos_np._commands.peers import Prepared, UnavailableError, graph
from relpos_np._commands.peers.shapes import Case, wide


class NoSessionError(UnavailableError):
    """The runtime lacks an operator in a storage, and what it says."""


def _session(model: bytes, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads must not spin through the turns of others.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime has types of its own for an operator it lacks
        raise NoSessionError(f"no session: {str(error)[:200]}") from error


def in_storage(case: Case, storage: str, threads: int) -> Prepared:
    """The call with all numbers in a storage; its result goes into an array that is kept."""
    g = graph.Model(storage)
    result, note = graph.attention(g, case)
    session = _session(g.file(result), threads)
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
    except NoSessionError as refused:
        if case.shape.storage == "float32":
            raise
        try:
            prepared = in_storage(case, "float16", threads)
        except NoSessionError as also:
            raise UnavailableError(f"{case.shape.storage}: {refused}; float16: {also}") from also
        prepared.note += f"; {case.shape.storage} is refused: {refused}"
        return prepared
