"""Who is compared: every peer's name, the module that prepares its calls, and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    packages: tuple[str, ...] = ()


PEERS = {
    "relpos_np": Peer(
        "peers.ours",
        "this library's kernels, tables expanded inside the call, into an array that is kept",
        ("attention", "backward", "rel_shift"),
        ("numba", "llvmlite"),
    ),
    "torch eager": Peer("peers.with_torch", "as models write it, bias gathered inside the call", packages=("torch",)),
    "torch sdpa": Peer(
        "peers.with_torch", "scaled_dot_product_attention, bias built before the call", packages=("torch",)
    ),
    "torch sdpa, bias inside": Peer("peers.with_torch", "the same, bias built inside the call", packages=("torch",)),
    "torch flex": Peer(
        "peers.with_torch", "flex_attention, compiled, scores modified tile by tile", packages=("torch",)
    ),
    "torch autograd": Peer(
        "peers.with_torch", "bias gathered, math of SDPA, backward", ("backward",), packages=("torch",)
    ),
    "torch pad and reshape": Peer(
        "peers.with_torch", "as models write it: a copy with a column more, viewed", ("rel_shift",), packages=("torch",)
    ),
    "onnxruntime": Peer(
        "peers.with_onnx", "Attention operator, bias built before the call", packages=("onnxruntime", "onnx")
    ),
    "openvino": Peer(
        "peers.with_openvino",
        "ScaledDotProductAttention in the operands' precision, bias built before the call",
        packages=("openvino",),
    ),
    "openvino, own precision": Peer(
        "peers.with_openvino",
        "the same in the precision that it chooses: bfloat16 where the processor multiplies it",
        packages=("openvino",),
    ),
    "jax": Peer(
        "peers.with_jax", "jit of products and softmax, bias gathered inside the call", packages=("jax", "jaxlib")
    ),
    "numpy": Peer("peers.with_numpy", "this library's reference"),
    "numpy view": Peer("peers.with_numpy", "a strided view, copied", ("rel_shift",)),
    "memcpy": Peer("peers.with_numpy", "a copy of as many bytes as the result has, on one thread", ("rel_shift",)),
    "limit": Peer(
        "peers.limits",
        "the 100 % mark: FMA instructions on registers; for one query, reading memory",
        ("attention", "backward"),
    ),
}
