"""Calls with arrays that already are on a device: opened by the CUDA backend, then checked as all others are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_np import backend
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lifted, each_lowered, fit_option
from relpos_np._calls.packed import PackedCall
from relpos_np._contract import check, outputs
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import Options
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms, fit
from relpos_np.errors import RelposTypeError
from relpos_np.formulas import relshift
from relpos_np.types import Array

if TYPE_CHECKING:
    from relpos_np.kernels._cuda.arrays.operand import Operand


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
        from relpos_np.kernels._cuda.arrays.operand import Operand, session

        with session(named) as pointer, np.errstate(all="ignore"):
            return call(kernels, pointer, {name: Operand.of(x, name) for name, x in named.items()}, *arguments)

    return run


# Options that are read on the host, where they decide what is launched.
_READ = ("mask", "key_lengths", "selected", "segments", "offset")
# Numbers per head or per query, of which the rest of a call knows nothing.
_FACTORS = ("sinks", "query_scale")


def _read(options: Options, names: tuple[str, ...] = _READ) -> Any:
    """The options, with those of these names that are on the device copied to the host."""
    given: Any = options
    return {name: fetched(name, x) if name in names else x for name, x in given.items()}


def fetched(name: str, x: Any) -> Any:
    """What an option holds, on the host if it was on the device; of a pair of arrays either may be."""
    from relpos_np.kernels._cuda.arrays.operand import Operand

    if isinstance(x, tuple):
        return tuple(fetched(name, one) for one in x)
    return np.asarray(Operand.of(x, name).host()) if check.on_device(x) else x


def beside(x: Any, y: Array) -> Any:
    """A copy of an array of the host where a result of a call is, in the order of its stream."""
    from relpos_np.kernels._cuda.arrays.operand import Operand
    from relpos_np.kernels._cuda.launch import device

    with device.on(x.stream):
        return _result(Operand.uploaded(y), x.stream)


def _problem(operands: list[Operand], options: Options) -> tuple[Problem, np.dtype[Any], bool]:
    """The checked call; its arrays are stand-ins, and what says which pairs are attended is read on the host."""
    q, k, v = operands
    read: Any = {**_read(options), **dict.fromkeys(_FACTORS)}
    return check.call(q, k, v, read)


def _factors(name: str, x: Any, problem: Problem) -> Operand | None:
    """Numbers per head or query for every query, on the device; of which nothing is stored twice."""
    from relpos_np.kernels._cuda.arrays.operand import Operand

    if x is None:
        return None
    own = Operand.of(x, name) if check.on_device(x) else Operand.uploaded(check.floating(name, x))
    shape = problem.out_shape[:-1]
    (check.per_head if name == "sinks" else check.per_query)(name, own.stand_in(), shape, problem.site.dtype)
    if name == "sinks" and own.ndim == 1:
        own = Operand(own.flat, (*own.shape, 1), (*own.strides, 0), own.dtype)
    return own.broadcast_to(shape)


def _scaled(q: Operand, factors: Operand | None, problem: Problem) -> Operand:
    """Queries times their factors, in the dtype of the computation."""
    from relpos_np.kernels._cuda.backward_pass.sinks import scaled

    return q if factors is None else scaled(q, factors.contiguous(problem.site.dtype))


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
        from relpos_np.kernels._cuda.arrays.operand import Operand

        self.out = out
        if out is None:
            self.operand = Operand.empty(shape, dtype)
        elif not check.on_device(out):
            raise RelposTypeError(f"out: expected a device array like the operands, found {type(out).__name__}")
        else:
            self.operand = Operand.of(out, "out")
            outputs.check(self.operand, shape, dtype, inputs)
        self.filled = self.operand if self.operand.is_contiguous else Operand.empty(shape, dtype)

    def result(self, pointer: int) -> Any:
        """What the caller gets, once kernels in the order of this stream have filled `filled`."""
        if self.filled is not self.operand:
            self.operand.fill_from(self.filled)
        if self.out is None:
            return _result(self.operand, pointer)
        from relpos_np.kernels._cuda.arrays.operand import stream_of
        from relpos_np.kernels._cuda.launch.device import follow

        own = stream_of(self.out)
        if own is not None:
            follow(own, pointer)
        return self.out


def _result(x: Operand, pointer: int) -> Any:
    from relpos_np.kernels._cuda.arrays.result import DeviceArray

    return DeviceArray(x, pointer)


def _there(x: Any) -> Operand:
    """An operand, or what the host has made of one, on the device."""
    from relpos_np.kernels._cuda.arrays.operand import Operand

    return Operand.uploaded(x) if isinstance(x, np.ndarray) else x


def _turned_attention(
    kernels: Any, problem: Problem, terms: Terms, lse: Any, operands: tuple[Any, Any, Any], *, back: bool
) -> Operand:
    """Output of a call whose values turn, before it turns back or after it; fills `lse`."""
    from relpos_np.kernels._cuda.arrays.operand import Operand

    q, k, v = operands
    turn = terms.turn
    assert turn is not None
    out = Operand.empty(problem.out_shape, problem.site.dtype)
    kernels.attention(problem, terms, out, lse, (q, k, _there(turn.of_values(v))))
    return _there(turn.of_output(out)) if back else out


def _fill(kernels: Any, problem: Problem, terms: Terms, out: Operand, lse: Any, operands: tuple[Any, Any, Any]) -> None:
    """Fill `out` and `lse` with attention as it is without sinks."""
    if terms.turn is None:
        kernels.attention(problem, terms, out, lse, operands)
    else:
        out.fill_from(_turned_attention(kernels, problem, terms, lse, operands, back=True))


def _backward(
    kernels: Any, problem: Problem, terms: Terms, grad_out: Any, grad_lse: Any, operands: tuple[Any, Any, Any]
) -> tuple[Terms, Any]:
    """Gradients of terms and of values, from those of attention as it is without sinks."""
    q, k, v = operands
    turn = terms.turn
    if turn is None:
        grads, grad_v = kernels.backward(problem, terms, grad_out, grad_lse, operands)
        return grads, grad_v
    turned = _there(turn.of_values(v))
    grads, grad_v = kernels.backward(problem, terms, _there(turn.to_output(grad_out)), grad_lse, (q, k, turned))
    if turn.trained:
        exact = replace(problem, precision="highest")
        out = _turned_attention(kernels, exact, terms, None, operands, back=False)
        grads.turn = turn.gradient(*map(np.asarray, (v, grad_v, out, grad_out)))
    return grads, turn.to_values(grad_v)


class _There:
    """Arrays on the device, as a packed call needs them; see `packed.Host`."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def checked(self, name: str, x: Any) -> Any:
        from relpos_np.kernels._cuda.arrays.operand import Operand

        return _result(Operand.of(x, name), self.pointer)

    def view(self, x: Any, index: Any) -> Any:
        return _result(self.checked("x", x)._operand.cut(index), self.pointer)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        from relpos_np.kernels._cuda.arrays.operand import Operand

        return _result(Operand.empty(shape, dtype), self.pointer)

    def put(self, x: Any, target: Any, index: Any) -> None:
        target._operand.cut(index).fill_from(x._operand)


def _packed(operands: dict[str, Operand], position: Any, options: Options, pointer: int) -> PackedCall:
    q, k, v = (_result(operands[name], pointer) for name in "qkv")
    return PackedCall(q, k, v, position, _read(options, (*_READ, *_FACTORS)), _There(pointer))


@_on_stream
def attention(
    kernels: Any,
    pointer: int,
    operands: dict[str, Operand],
    position: Any,
    return_lse: bool,
    out: Any,
    options: Any,
    compute: Callable[..., Any] | None,
) -> Any:
    """`relpos_np.attention` of arrays on the device; `compute` is that function itself if the call is several."""
    from relpos_np.kernels._cuda.arrays.operand import Operand
    from relpos_np.kernels._cuda.backward_pass.sinks import sink

    given = list(operands.values())
    if compute is not None:
        call = _packed(operands, position, options, pointer)
        target = _Target(out, call.shape, given[0].dtype, given)
        found = call.attention(compute, return_lse, _result(target.filled, pointer))
        return (target.result(pointer), found[1]) if return_lse else target.result(pointer)
    problem, dtype, flat = _problem(given, options)
    schemes = checked_schemes(position, problem, "cuda")
    sinks, factors = (_factors(name, options[name], problem) for name in _FACTORS)
    q, k, v = _batched(given, problem)
    q = _scaled(q, factors, problem)
    shape = problem.out_shape
    target = _Target(out, shape[1:] if flat else shape, dtype, given)
    lse = Operand.empty(shape[:-1], problem.site.dtype) if return_lse or sinks is not None else None
    terms = all_terms(each_lowered(schemes, problem, (q, k)))
    filled = target.filled.reshaped(shape)
    # Rounded to half precision after the sinks have taken their share.
    plain = filled if sinks is None else Operand.empty(shape, problem.site.dtype)
    _fill(kernels, problem, terms, plain, lse, (q, k, v))
    if sinks is not None and lse is not None:
        sink(plain, lse, sinks, filled)
    result = target.result(pointer)
    if lse is None or not return_lse:
        return result
    return result, _result(lse.reshaped(lse.shape[1:]) if flat else lse, pointer)


@_on_stream
def attention_vjp(
    kernels: Any,
    pointer: int,
    operands: dict[str, Operand],
    position: Any,
    options: Any,
    mask_gradient: bool,
    compute: Callable[..., Any] | None,
) -> AttentionGradient:
    """`relpos_np.attention_vjp` of arrays on the device; `compute` is that function itself if the call is several."""
    from relpos_np.kernels._cuda.arrays.operand import Operand
    from relpos_np.kernels._cuda.backward_pass.sinks import before_sinks, products

    if compute is not None:
        call = _packed(operands, position, options, pointer)
        found = call.attention_vjp(compute, operands["grad_out"], operands.get("grad_lse"), mask_gradient)
        return replace(
            found,
            **{name: beside(found.q, getattr(found, name)) for name in _FACTORS if check.on_device(options[name])},
        )
    given = [operands.pop(name) for name in "qkv"]
    problem, _, flat = _problem(given, options)
    schemes = checked_schemes(position, problem, "cuda", backward=True)
    stand_ins = check.output_gradients(operands, problem, flat)
    sinks, factors = (_factors(name, options[name], problem) for name in _FACTORS)
    grad_out, grad_lse = (
        operands[name].reshaped(shape).contiguous(problem.site.dtype) if name in stand_ins else None
        for name, shape in (("grad_out", problem.out_shape), ("grad_lse", problem.out_shape[:-1]))
    )
    unscaled, k, v = _batched(given, problem)
    q = _scaled(unscaled, factors, problem)
    lowered = each_lowered(schemes, problem, (q, k))
    terms = all_terms(lowered)
    grad_sinks = grad_scale = None
    if sinks is not None and grad_out is not None:
        out, lse = (Operand.empty(x, problem.site.dtype) for x in (problem.out_shape, problem.out_shape[:-1]))
        _fill(kernels, problem, terms, out, lse, (q, k, v))
        grad_out, grad_lse, grad_sinks = before_sinks(out, lse, sinks, grad_out, grad_lse)
    grads, grad_v = _backward(kernels, problem, terms, grad_out, grad_lse, (q, k, v))
    grad_q: Any
    grad_q, grad_k, arrays = each_lifted((q, k), problem, position, schemes, lowered, grads)
    if factors is not None:
        of_scaled = grad_q if isinstance(grad_q, Operand) else Operand.uploaded(np.asarray(grad_q))
        grad_scale, grad_q = products(of_scaled, unscaled), _scaled(of_scaled, factors, problem)

    def fitted(x: Any, operand: Operand) -> Any:
        """A gradient in the shape and dtype of its operand, summed on the host where that was broadcast."""
        if flat:
            x = x.reshaped(x.shape[1:]) if isinstance(x, Operand) else x[0]
        if x.shape != operand.shape:
            x = fit(np.asarray(x), operand.shape)
        if isinstance(x, Operand):
            return _result(x.contiguous(operand.dtype), pointer)
        return _result(Operand.uploaded(np.asarray(x).astype(operand.dtype, copy=False)), pointer)

    def of_option(name: str, x: Operand | None) -> Any:
        """The gradient of an option where that was; summed on the host."""
        own = options[name]
        if x is None:
            return None
        far = check.on_device(own)
        summed = fit_option(np.array(x.host()), Operand.of(own, name) if far else own, per_head=name == "sinks")
        return _result(Operand.uploaded(summed), pointer) if far else summed

    to_q, to_k, to_v = (fitted(x, own) for x, own in zip((grad_q, grad_k, grad_v), given, strict=True))
    more = {"sinks": of_option("sinks", grad_sinks), "query_scale": of_option("query_scale", grad_scale)}
    return AttentionGradient(to_q, to_k, to_v, arrays, **more)


def _uni(x: Operand) -> Operand:
    """What "xlnet_uni" makes of products: all but the first L_q of each matrix, in rows of one less."""
    from relpos_np.kernels._cuda.arrays.operand import Operand

    x = x.contiguous()
    *lead, rows, columns = x.shape
    flat = x.flat[rows:] if x.size else x.flat
    return Operand(flat, (*lead, rows, max(columns - 1, 0)), (*x.strides[:-2], columns - 1, 1), x.dtype, readonly=True)


@_on_stream
def rel_shift(kernels: Any, pointer: int, operands: dict[str, Operand], variant: str, out: Any) -> Any:
    """`relpos_np.rel_shift` of an array on the device."""
    x = operands["x"]
    target = _Target(out, relshift.checked(x, variant), x.dtype, [x])
    if variant in relshift.UNMOVED:
        target.filled.fill_from(x if variant == "wenet" else _uni(x))
    else:
        kernels.rel_shift(x, target.filled, variant)
    return target.result(pointer)
