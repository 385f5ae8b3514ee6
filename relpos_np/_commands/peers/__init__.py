"""Who is compared: every peer's name, the module here that prepares its calls, and what is timed.

`relpos bench` and ``asv_bench/compare.py`` run them, and the benchmarks of asv share their shapes.
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


@dataclass(frozen=True)
class Peer:
    """A line of the tables."""

    module: str
    words: str
    tasks: tuple[str, ...] = ("attention",)

    @property
    def packages(self) -> tuple[str, ...]:
        """What the module imports."""
        return _PACKAGES.get(self.module, ())


_PACKAGES = {
    "ours": ("numba", "llvmlite"),
    "with_torch": ("torch",),
    "with_onnx": ("onnxruntime", "onnx"),
    "with_openvino": ("openvino",),
    "with_jax": ("jax", "jaxlib"),
}
PEERS = {
    OURS: Peer(
        "ours",
        "this library's kernels, tables expanded inside the call, into an array that is kept",
        ("attention", "backward", "rel_shift"),
    ),
    "torch eager": Peer("with_torch", "as models write it, bias gathered inside the call"),
    "torch sdpa": Peer("with_torch", "scaled_dot_product_attention, bias built before the call"),
    "torch sdpa, bias inside": Peer("with_torch", "the same, bias built inside the call"),
    "torch flex": Peer("with_torch", "flex_attention, compiled, scores modified tile by tile"),
    "torch autograd": Peer("with_torch", "bias gathered, math of SDPA, backward", ("backward",)),
    "torch pad and reshape": Peer(
        "with_torch", "as models write it: a copy with a column more, viewed", ("rel_shift",)
    ),
    "onnxruntime": Peer("with_onnx", "Attention operator, bias built before the call"),
    "openvino": Peer(
        "with_openvino", "ScaledDotProductAttention in the operands' precision, bias built before the call"
    ),
    "openvino, own precision": Peer(
        "with_openvino", "the same in the precision that it chooses: bfloat16 where the processor multiplies it"
    ),
    "jax": Peer("with_jax", "jit of products and softmax, bias gathered inside the call"),
    "numpy": Peer("with_numpy", "this library's reference"),
    "numpy view": Peer("with_numpy", "a strided view, copied", ("rel_shift",)),
    "memcpy": Peer("with_numpy", "a copy of as many bytes as the result has, on one thread", ("rel_shift",)),
    "limit": Peer(
        "ours",
        "the 100 % mark: FMA instructions on registers; for one query, reading memory",
        ("attention", "backward"),
    ),
}
