"""Calls with arrays that already are on the device: the public functions' other half, checked by the same checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np import backend
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered, lifted
from relpos_np._contract import check
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import fit
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas import relshift

if TYPE_CHECKING:
    from relpos_np.kernels._cuda.operand import Operand


def _kernels(first: tuple[str, Any], chosen: str | None) -> Any:
    """The CUDA backend, which alone reads arrays of a device, and only where there is one."""
    name = backend.current(chosen)
    if name != "cuda":
        raise RelposTypeError(
            f"{first[0]}: expected a NumPy array for backend {name!r}, found {type(first[1]).__name__} on a CUDA "
            'device; use backend="cuda", or copy it to the host'
        )
    return backend.kernels("cuda")


def _host_copies(options: dict[str, Any]) -> dict[str, Any]:
    """Masks and lengths are read on the host."""
    from relpos_np.kernels._cuda.operand import Operand

    return {
        name: np.asarray(Operand.of(x, name).host()) if name in ("mask", "key_lengths") and check.on_device(x) else x
        for name, x in options.items()
    }


def _problem(operands: dict[str, Operand], options: dict[str, Any]) -> tuple[Problem, np.dtype[Any], bool]:
    """The checked call, with arrays that stand in for those of the device."""
    kinds = {x.dtype for x in operands.values()}
    if len(kinds) > 1:
        check.one_dtype({name: x.dtype for name, x in operands.items()})
    found, _, flat = check.problem(*(x.stand_in() for x in operands.values()), **_host_copies(options))
    return found, kinds.pop(), flat


def _spread(operands: dict[str, Operand], problem: Problem) -> tuple[Operand, Operand, Operand]:
    """Operands with the batch axes of the call, as those of a checked call are."""
    q, k, v = (
        (x.reshaped((1, *x.shape)) if x.ndim == 2 else x).broadcast_to(stand_in.shape)
        for x, stand_in in zip(operands.values(), (problem.q, problem.stored_k, problem.stored_v), strict=True)
    )
    return q, k, v


def _output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: list[Operand]) -> Operand:
    """Check `out=`, with the words of `check.output`."""
    from relpos_np.kernels._cuda.operand import Operand

    if not check.on_device(out):
        raise RelposTypeError(f"out: expected a device array like the operands, found {type(out).__name__}")
    found = Operand.of(out, "out")
    if found.shape != shape:
        raise RelposValueError(f"out: expected shape {shape}, found {found.shape}")
    if found.dtype != dtype:
        raise RelposTypeError(f"out: expected dtype {dtype}, found {found.dtype}")
    if found.readonly:
        raise RelposValueError("out: the array is read-only")
    if found.repeats:
        raise RelposValueError("out: elements of the array share memory")
    if any(found.overlaps(x) for x in inputs):
        raise RelposValueError("out: the array overlaps an input")
    return found


def _handed_back(out: Any, pointer: int) -> Any:
    """The caller's own array, whose stream waits for that of the call."""
    from relpos_np.kernels._cuda.device import follow
    from relpos_np.kernels._cuda.operand import stream_of

    own = stream_of(out)
    if own is not None:
        follow(own, pointer)
    return out


def attention(
    named: dict[str, Any], position: Any, chosen: str | None, return_lse: bool, out: Any, options: dict[str, Any]
) -> Any:
    """`relpos_np.attention` of arrays on the device; `options` are those of `check.problem`."""
    kernels = _kernels(next(iter(named.items())), chosen)
    check.one_side(named)
    from relpos_np.kernels._cuda.operand import session

    # What it holds is given back after an error for memory, if it is a function of its own.
    with session(named) as pointer, np.errstate(all="ignore"):
        return _attention(kernels, pointer, named, position, return_lse, out, options)


def _attention(
    kernels: Any,
    pointer: int,
    named: dict[str, Any],
    position: Any,
    return_lse: bool,
    out: Any,
    options: dict[str, Any],
) -> Any:
    """Check, lower, run, in the order of the stream with this address."""
    from relpos_np.kernels._cuda.operand import Operand

    operands = {name: Operand.of(x, name) for name, x in named.items()}
    problem, dtype, flat = _problem(operands, options)
    schemes = checked_schemes(position, problem)
    q, k, v = _spread(operands, problem)
    shape = problem.out_shape
    if out is None:
        target = Operand.empty(shape, dtype)
    else:
        target = _output(out, shape[1:] if flat else shape, dtype, list(operands.values())).reshaped(shape)
    lse = Operand.empty(shape[:-1], problem.site.dtype) if return_lse else None
    terms = all_terms(each_lowered(schemes, problem, (q, k)))
    # Kernels write whole arrays in C order.
    straight = target if target.is_contiguous else Operand.empty(shape, dtype)
    kernels.attention(problem, terms, straight, lse, (q, k, v))
    if straight is not target:
        target.fill_from(straight)
    result = _handed_back(out, pointer) if out is not None else _result(target, flat, pointer)
    return (result, _result(lse, flat, pointer)) if lse is not None else result


def _result(x: Operand, flat: bool, pointer: int) -> Any:
    """What the caller gets, without the axis of heads if the operands had none."""
    from relpos_np.kernels._cuda.result import DeviceArray

    return DeviceArray(x.reshaped(x.shape[1:]) if flat else x, pointer)


def attention_vjp(
    named: dict[str, Any],
    grad_out: Any,
    grad_lse: Any,
    position: Any,
    chosen: str | None,
    options: dict[str, Any],
) -> AttentionGradient:
    """`relpos_np.attention_vjp` of arrays on the device."""
    kernels = _kernels(next(iter(named.items())), chosen)
    gradients = {"grad_out": grad_out} | ({} if grad_lse is None else {"grad_lse": grad_lse})
    check.one_side(named | gradients)
    from relpos_np.kernels._cuda.operand import session

    with session(named) as pointer, np.errstate(all="ignore"):
        return _attention_vjp(kernels, pointer, named, gradients, position, options)


def _attention_vjp(
    kernels: Any,
    pointer: int,
    named: dict[str, Any],
    gradients: dict[str, Any],
    position: Any,
    options: dict[str, Any],
) -> AttentionGradient:
    """Check, lower, run, and pass the gradients of the terms on."""
    from relpos_np.kernels._cuda.operand import Operand

    operands = {name: Operand.of(x, name) for name, x in named.items()}
    problem, _, flat = _problem(operands, options)
    schemes = checked_schemes(position, problem)
    given = []
    for name, x in gradients.items():
        shape = problem.out_shape if name == "grad_out" else problem.out_shape[:-1]
        found = Operand.of(x, name)
        check.like(name, found.stand_in(), shape[1:] if flat else shape, problem.site.dtype)
        given.append(found.reshaped(shape).contiguous(problem.site.dtype))
    q, k, v = _spread(operands, problem)
    lowered = each_lowered(schemes, problem, (q, k))
    own_grad_lse = given[1] if len(given) > 1 else None
    grads, grad_v = kernels.backward(problem, all_terms(lowered), given[0], own_grad_lse, (q, k, v))
    grad_q, grad_k, arrays = lifted((q, k), problem, schemes, lowered, grads)
    found_q, found_k, found_v = (
        _result(_fitted(x, operand, flat), False, pointer)
        for x, operand in zip((grad_q, grad_k, grad_v), operands.values(), strict=True)
    )
    by_scheme = arrays if isinstance(position, tuple) else arrays[0] if arrays else {}
    return AttentionGradient(found_q, found_k, found_v, by_scheme)


def _fitted(x: Any, operand: Operand, flat: bool) -> Operand:
    """A gradient in the shape and dtype of its operand, summed on the host where that was broadcast."""
    from relpos_np.kernels._cuda.operand import Operand

    if flat:
        x = x.reshaped(x.shape[1:]) if isinstance(x, Operand) else x[0]
    if x.shape != operand.shape:
        x = fit(np.asarray(x), operand.shape)
    if not isinstance(x, Operand):
        return Operand.uploaded(np.asarray(x).astype(operand.dtype, copy=False))
    return x.contiguous(operand.dtype)


def rel_shift(x: Any, variant: str, chosen: str | None, out: Any) -> Any:
    """`relpos_np.rel_shift` of an array on the device."""
    kernels = _kernels(("x", x), chosen)
    from relpos_np.kernels._cuda.operand import session

    with session({"x": x}) as pointer:
        return _rel_shift(kernels, pointer, x, variant, out)


def _rel_shift(kernels: Any, pointer: int, x: Any, variant: str, out: Any) -> Any:
    """Check and run."""
    from relpos_np.kernels._cuda.operand import Operand

    operand = Operand.of(x, "x")
    if operand.dtype.kind not in "fiuc" and operand.dtype.name != "bfloat16":
        raise RelposTypeError(f"x: expected numbers, found dtype {operand.dtype}")
    variant = check.choice("variant", variant, relshift.VARIANTS)
    shape = (*operand.shape[:-1], relshift.shifted_length(operand.shape, variant))
    target = Operand.empty(shape, operand.dtype) if out is None else _output(out, shape, operand.dtype, [operand])
    straight = target if target.is_contiguous else Operand.empty(shape, operand.dtype)
    if variant == "wenet":
        straight.fill_from(operand)
    else:
        kernels.rel_shift(operand, straight, variant)
    if straight is not target:
        target.fill_from(straight)
    return _result(target, False, pointer) if out is None else _handed_back(out, pointer)
