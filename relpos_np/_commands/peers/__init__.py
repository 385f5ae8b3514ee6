"""Who is compared: every peer's name, the module that prepares its calls, and what is timed.

`relpos bench` runs them; ``asv_bench/compare.py`` does with tasks and peers of its own beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Others are compared with it.
OURS = "relpos_np"


class UnavailableError(Exception):
    """A peer cannot do a task, and why."""


@dataclass
class Prepared:
    """A call to be timed, how its result becomes NumPy, and what should be known about it."""

    call: Callable[[], Any]
    to_numpy: Callable[[Any], Any] = lambda result: result
    note: str = ""
    # Where seconds are not what matters: operations or bytes of one call.
    amount: float | None = None
    # Whether it computes what was asked.
    answers: bool = True


@dataclass(frozen=True)
class Peer:
    """A line of the tables: the module that prepares its calls, what it does, the packages it needs, and its tasks."""

    module: str
    words: str
    packages: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("attention",)


_TORCH, _OPENVINO = ("torch",), ("openvino", "onnx")
PEERS = {
    OURS: Peer(
        ".ours",
        "this library's kernels, tables expanded inside the call, into an array that is kept",
        ("numba", "llvmlite"),
    ),
    "torch eager": Peer(".with_torch", "as models write it, bias gathered inside the call", _TORCH),
    "torch sdpa": Peer(".with_torch", "scaled_dot_product_attention, bias built before the call", _TORCH),
    "torch sdpa, bias inside": Peer(".with_torch", "the same, bias built inside the call", _TORCH),
    "torch flex": Peer(".with_torch", "flex_attention, compiled, scores modified tile by tile", _TORCH),
    "onnxruntime": Peer(".with_onnx", "Attention operator, bias built before the call", ("onnxruntime", "onnx")),
    "openvino": Peer(
        ".with_openvino",
        "ScaledDotProductAttention in the operands' precision, bias built before the call",
        _OPENVINO,
    ),
    "openvino, own precision": Peer(
        ".with_openvino",
        "the same in the precision that it chooses: bfloat16 where the processor multiplies it",
        _OPENVINO,
    ),
    "jax": Peer(".with_jax", "jit of products and softmax, bias gathered inside the call", ("jax", "jaxlib")),
    "numpy": Peer(".ours", "this library's reference"),
    "limit": Peer(
        ".ours",
        "the 100 % mark: FMA instructions on registers; for one query, reading memory",
        ("numba", "llvmlite"),
    ),
}
