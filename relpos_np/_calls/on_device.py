"""Calls with arrays that already are on a device: opened by the CUDA backend, then checked as all others are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np import backend
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lifted, each_lowered
from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import Options
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import fit
from relpos_np.errors import RelposTypeError
from relpos_np.formulas import relshift
from relpos_np.types import Array

if TYPE_CHECKING:
    from relpos_np.kernels._cuda.operand import Operand


def _on_stream(call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a call in the order of the stream that its arrays name, if the chosen backend reads arrays of a device.

    `call` is a function of its own so that what it holds is free again after an error for memory.
    """

    @wraps(call)
    def run(named: dict[str, Any], chosen: str | None, *arguments: Any) -> Any:
        name = backend.current(chosen)
        if name != "cuda":
            first, x = next(iter(named.items()))
            raise RelposTypeError(
                f"{first}: expected a NumPy array for backend {name!r}, found {type(x).__name__} on a CUDA "
                'device; use backend="cuda", or copy it to the host'
            )
        kernels = backend.kernels("cuda")
        check.one_side(named)
        from relpos_np.kernels._cuda.operand import Operand, session

        with session(named) as pointer, np.errstate(all="ignore"):
            return call(kernels, pointer, {name: Operand.of(x, name) for name, x in named.items()}, *arguments)

    return run


def _problem(operands: list[Operand], options: Options) -> tuple[Problem, np.dtype[Any], bool]:
    """The checked call; its arrays are stand-ins, and masks and lengths are read on the host."""
    read: Any = {
        name: _downloaded(name, x) if name in ("mask", "key_lengths") and check.on_device(x) else x
        for name, x in options.items()
    }
    q, k, v = operands
    return check.call(q, k, v, read)


def _downloaded(name: str, x: Any) -> Array:
    from relpos_np.kernels._cuda.operand import Operand

    return np.asarray(Operand.of(x, name).host())


def _batched(operands: list[Operand], problem: Problem) -> tuple[Operand, Operand, Operand]:
    """Operands with the batch axes of the call, as those of a checked call are."""
    q, k, v = (
        (x.reshaped((1, *x.shape)) if x.ndim == 2 else x).broadcast_to(stand_in.shape)
        for x, stand_in in zip(operands, (problem.stored_q, problem.stored_k, problem.stored_v), strict=True)
    )
    return q, k, v


class _Target:
    """Where a result goes: a new array or the caller's own, which kernels fill if it is in C order."""

    def __init__(self, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: list[Operand]) -> None:
        from relpos_np.kernels._cuda.operand import Operand

        self.out = out
        if out is None:
            self.operand = Operand.empty(shape, dtype)
        elif not check.on_device(out):
            raise RelposTypeError(f"out: expected a device array like the operands, found {type(out).__name__}")
        else:
            self.operand = Operand.of(out, "out")
            check.output(self.operand, shape, dtype, inputs)
        self.filled = self.operand if self.operand.is_contiguous else Operand.empty(shape, dtype)

    def result(self, pointer: int) -> Any:
        """What the caller gets, once kernels in the order of this stream have filled `filled`."""
        if self.filled is not self.operand:
            self.operand.fill_from(self.filled)
        if self.out is None:
            return _result(self.operand, pointer)
        from relpos_np.kernels._cuda.device import follow
        from relpos_np.kernels._cuda.operand import stream_of

        own = stream_of(self.out)
        if own is not None:
            follow(own, pointer)
        return self.out


def _result(x: Operand, pointer: int) -> Any:
    from relpos_np.kernels._cuda.result import DeviceArray

    return DeviceArray(x, pointer)


@_on_stream
def attention(
    kernels: Any,
    pointer: int,
    operands: dict[str, Operand],
    position: Any,
    return_lse: bool,
    out: Any,
    options: Options,
) -> Any:
    """`relpos_np.attention` of arrays on the device."""
    from relpos_np.kernels._cuda.operand import Operand

    given = list(operands.values())
    problem, dtype, flat = _problem(given, options)
    schemes = checked_schemes(position, problem)
    q, k, v = _batched(given, problem)
    shape = problem.out_shape
    target = _Target(out, shape[1:] if flat else shape, dtype, given)
    lse = Operand.empty(shape[:-1], problem.site.dtype) if return_lse else None
    terms = all_terms(each_lowered(schemes, problem, (q, k)))
    kernels.attention(problem, terms, target.filled.reshaped(shape), lse, (q, k, v))
    result = target.result(pointer)
    return result if lse is None else (result, _result(lse.reshaped(lse.shape[1:]) if flat else lse, pointer))


@_on_stream
def attention_vjp(
    kernels: Any, pointer: int, operands: dict[str, Operand], position: Any, options: Options
) -> AttentionGradient:
    """`relpos_np.attention_vjp` of arrays on the device."""
    from relpos_np.kernels._cuda.operand import Operand

    given = [operands.pop(name) for name in "qkv"]
    problem, _, flat = _problem(given, options)
    schemes = checked_schemes(position, problem)
    stand_ins = check.output_gradients(operands, problem, flat)
    grad_out, grad_lse = (
        operands[name].reshaped(shape).contiguous(problem.site.dtype) if name in stand_ins else None
        for name, shape in (("grad_out", problem.out_shape), ("grad_lse", problem.out_shape[:-1]))
    )
    q, k, v = _batched(given, problem)
    lowered = each_lowered(schemes, problem, (q, k))
    grads, grad_v = kernels.backward(problem, all_terms(lowered), grad_out, grad_lse, (q, k, v))
    grad_q, grad_k, arrays = each_lifted((q, k), problem, position, schemes, lowered, grads)

    def fitted(x: Any, operand: Operand) -> Any:
        """A gradient in the shape and dtype of its operand, summed on the host where that was broadcast."""
        if flat:
            x = x.reshaped(x.shape[1:]) if isinstance(x, Operand) else x[0]
        if x.shape != operand.shape:
            x = fit(np.asarray(x), operand.shape)
        if isinstance(x, Operand):
            return _result(x.contiguous(operand.dtype), pointer)
        return _result(Operand.uploaded(np.asarray(x).astype(operand.dtype, copy=False)), pointer)

    return AttentionGradient(fitted(grad_q, given[0]), fitted(grad_k, given[1]), fitted(grad_v, given[2]), arrays)


@_on_stream
def rel_shift(kernels: Any, pointer: int, operands: dict[str, Operand], variant: str, out: Any) -> Any:
    """`relpos_np.rel_shift` of an array on the device."""
    x = operands["x"]
    target = _Target(out, relshift.checked(x, variant), x.dtype, [x])
    if variant == "wenet":
        target.filled.fill_from(x)
    else:
        kernels.rel_shift(x, target.filled, variant)
    return target.result(pointer)
