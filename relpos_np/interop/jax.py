"""Attention on arrays of JAX: its programs call the host, and gradients flow through."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

import relpos_np as rp
from relpos_np._calls.lowering import checked_schemes
from relpos_np._calls.packed import PackedCall, is_packed
from relpos_np._contract import check
from relpos_np._contract.options import ForeignOptions, completed, takes
from relpos_np._runtime import precision
from relpos_np.errors import RelposImportError, RelposTypeError
from relpos_np.interop.bias import with_bias
from relpos_np.interop.scheme import TensorOptions, Trained, as_tuple, gradients, made, tensors
from relpos_np.types import Array, Precision

try:
    import jax
except ImportError as error:
    raise RelposImportError(
        f"relpos_np.interop.jax cannot import JAX ({error}); install it with `pip install jax`"
    ) from error

__all__ = ["Trained", "attention", "trained"]


def trained(scheme: Any, *args: Any, **kwargs: Any) -> Trained:
    """A scheme made of JAX arrays, which receive gradients.

    Parameters
    ----------
    scheme : type
        Class of the scheme, for instance `relpos_np.T5`.
    *args, **kwargs
        Its arguments, with arrays of JAX in place of NumPy's; inside of `jax.grad` and `jax.jit`, those that are
        traced.

    Returns
    -------
    Trained
        For ``position=`` of `attention`.

    Raises
    ------
    RelposTypeError
        If `scheme` is not a class of this library, or an argument is none of its own.
    """
    return Trained.of(scheme, args, kwargs, lambda _, x: isinstance(x, jax.Array))


def _array(name: str, x: Any) -> Any:
    if not isinstance(x, jax.Array | np.ndarray):
        raise RelposTypeError(f"{name}: expected an array of JAX or NumPy, found {type(x).__name__}")
    return x


def _known(name: str, value: Any) -> Any:
    """What must be known while a program is traced, with arrays of NumPy in place of JAX's."""
    if isinstance(value, tuple):
        return tuple(_known(name, x) for x in value)
    if isinstance(value, jax.core.Tracer):
        raise RelposTypeError(
            f"{name}: expected numbers that are known while the program is traced, found a traced array"
        )
    return np.asarray(value) if isinstance(value, jax.Array) else value


# What `jax_default_matmul_precision` allows, in this library's words. "default" is the same to JAX as None, which
# nobody has said, and so it allows nothing; nor do words that are not here.
_SETTINGS: dict[str | None, Precision] = {
    "highest": "highest",
    "float32": "highest",
    "high": "high",
    "tensorfloat32": "high",
    "bfloat16_3x": "high",
    "bfloat16": "medium",
    "fastest": "medium",
    "F64_F64_F64": "highest",
    "F32_F32_F32": "highest",
    "TF32_TF32_F32_X3": "highest",
    "BF16_BF16_F32_X9": "highest",
    "BF16_BF16_F32_X6": "highest",
    "BF16_BF16_F32_X3": "high",
    "TF32_TF32_F32": "high",
    "BF16_BF16_F32": "medium",
    "BF16_BF16_BF16": "medium",
}


def _setting(x: Any) -> Precision | None:
    """What JAX was told about products of this operand: its setting is for float32 alone."""
    return _SETTINGS.get(jax.config.jax_default_matmul_precision) if x.dtype == np.float32 else None


def _stand_in(x: Any) -> Array:
    """An array of the same shape and dtype, for checks while a program is traced."""
    one: Array = np.ones((), x.dtype)
    return np.broadcast_to(one, x.shape)


# Options that are arrays and receive gradients.
_TRAINED = ("query_scale", "sinks")


class _Call:
    """One call without its arrays: after the operands come those of options, which are named, and those of schemes."""

    def __init__(self, positions: tuple[Any, ...], options: dict[str, Any], named: tuple[str, ...]) -> None:
        self.positions, self.options, self.named = positions, options, named

    def arguments(self, arrays: Any) -> dict[str, Any]:
        count = len(self.named)
        named = dict(zip(self.named, arrays[:count], strict=True))
        return {**self.options, **named, "position": made(self.positions, arrays[count:])}

    def results(self, arrays: Any) -> tuple[Any, Any]:
        """Shapes and dtypes of the output and the log-sum-exp, after the checks of a call."""
        q, k, v, *others = (_stand_in(x) for x in arrays)
        options: Any = self.arguments(others)
        position = options.pop("position")
        for name, harmless in (("key_lengths", 0), ("selected", -1)):
            if name in self.named and options[name].dtype.kind in "iu":  # their values are not known yet
                options[name] = np.broadcast_to(np.int64(harmless), options[name].shape)
        if is_packed(options):
            PackedCall(q, k, v, position, options)  # raises what is wrong with how the call is cut
            # What follows asks for shapes, which are the same for any parts.
            options |= {"segments": None, "offset": None}
        problem, dtype, flat = check.problem(q, k, v, **options)
        if options["sinks"] is not None:
            check.per_head("sinks", options["sinks"], problem.out_shape[:-1], problem.site.dtype)
        checked_schemes(position, problem)
        shape = problem.out_shape[1:] if flat else problem.out_shape
        return jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], problem.site.dtype)

    def forward(self, *arrays: Any) -> tuple[Array, Array]:
        """On the host: the output and the log-sum-exp."""
        q, k, v, *others = (np.asarray(x) for x in arrays)
        with precision.held(self.options["precision"]):
            found: tuple[Array, Array] = rp.attention(q, k, v, return_lse=True, **self.arguments(others))
        return found

    def backward(self, grad_out: Any, grad_lse: Any, *arrays: Any) -> tuple[Array, ...]:
        """On the host: gradients of operands, of options that have them, and of the schemes' arrays."""
        q, k, v, *others = (np.asarray(x) for x in arrays)
        options = {"grad_lse": np.asarray(grad_lse), **self.arguments(others)}
        with precision.held(self.options["precision"]):
            found = rp.attention_vjp(q, k, v, grad_out=np.asarray(grad_out), **options)
        options_grads = [getattr(found, name) for name in self.named if name in _TRAINED]
        own = [
            np.zeros_like(x) if g is None else g.astype(x.dtype, copy=False)
            for g, x in zip(gradients(self.positions, found.position), others[len(self.named) :], strict=True)
        ]
        return (found.q, found.k, found.v, *options_grads, *own)


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[False] = ..., **options: Unpack[TensorOptions]) -> Any: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[TensorOptions]
) -> tuple[Any, Any]: ...


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[TensorOptions]
) -> Any | tuple[Any, Any]: ...


@takes(only=ForeignOptions.__annotations__)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    position: Any = None,
    mask: Any = None,
    key_lengths: Any = None,
    selected: Any = None,
    query_scale: Any = None,
    sinks: Any = None,
    segments: Any = None,
    offset: Any = None,
    return_lse: bool = False,
    **options: Unpack[ForeignOptions],
) -> Any:
    """`relpos_np.attention` of JAX arrays, under `jax.jit`, `jax.grad` and `jax.vmap`.

    Parameters
    ----------
    q, k, v : jax.Array
        Shapes and dtypes as in `relpos_np.attention`.
    position : scheme, Trained or tuple of them, optional
        A scheme of this library is fixed; `trained` makes one whose arrays have gradients.
    mask : jax.Array of bool or float, optional
        See `relpos_np.attention`. A float mask receives a gradient.
    key_lengths : int or jax.Array of int, optional
        See `relpos_np.attention`.
    selected : jax.Array of int, optional
        See `relpos_np.attention`.
    query_scale, sinks : jax.Array, optional
        See `relpos_np.attention`. They receive gradients.
    segments, offset, causal, window, rule, scale, softcap, cap_order
        See `relpos_np.attention`; not traced.
    precision : {"highest", "high", "medium"}, optional
        See `relpos_np.set_precision`. Where nothing was chosen there, ``jax_default_matmul_precision`` counts for
        operands of float32: "highest" and "float32" are "highest", "high", "tensorfloat32" and "BF16_BF16_F32_X3" are
        "high", "bfloat16" and "BF16_BF16_F32" are "medium". None and "default", which JAX does not tell apart, say
        nothing.
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        See `relpos_np.set_backend`.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    out : jax.Array, shape (..., H, L_q, D_v)
        In the dtype of q.
    lse : jax.Array, shape (..., H, L_q)
        Only with `return_lse`.

    Raises
    ------
    RelposError
        As `relpos_np.attention`, while the program is traced.

    Notes
    -----
    The call is a `jax.pure_callback`: JAX hands its arrays to the host and takes the results back, with copies if
    they are on a GPU. Under `jax.vmap` calls are made one after the other; leading axes of the operands are faster.
    There is neither dropout nor a second derivative.

    A compiled program keeps the precision that was chosen when it was traced. JAX traces again where its own setting
    has changed, and does not know of `relpos_np.use_precision`.
    """
    given: dict[str, Any] = {**completed(attention, options)}
    given |= {"offset": _known("offset", offset), "segments": _known("segments", segments)}
    positions = as_tuple(position)
    named: dict[str, Any] = {}
    for name, x in (("query_scale", query_scale), ("sinks", sinks), ("selected", selected)):
        if x is not None:
            named[name] = _array(name, x)
    if isinstance(key_lengths, jax.Array):
        named["key_lengths"] = key_lengths
    else:
        given["key_lengths"] = key_lengths
    if mask is not None:
        if _array("mask", mask).dtype == np.bool_:
            named["mask"] = mask
        else:
            positions = with_bias(positions, mask, given)
    arrays = [*map(_array, "qkv", (q, k, v)), *named.values(), *tensors(positions)]
    # Where a program runs, and when, another may be chosen than where it is traced.
    given["precision"] = precision.chosen(given["precision"], _setting(q))
    call = _Call(positions, given, tuple(named))
    has_gradient = [True] * 3 + [name in _TRAINED for name in named] + [True] * len(tensors(positions))
    results = call.results(arrays)

    @jax.custom_vjp
    def run(*arrays: Any) -> Any:
        return jax.pure_callback(call.forward, results, *arrays, vmap_method="sequential")

    def forward(*arrays: Any) -> Any:
        return run(*arrays), arrays

    def backward(arrays: Any, grads: Any) -> tuple[Any, ...]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, own in zip(arrays, has_gradient, strict=True) if own]
        found = iter(jax.pure_callback(call.backward, tuple(shapes), *grads, *arrays, vmap_method="sequential"))
        return tuple(next(found) if own else None for own in has_gradient)

    run.defvjp(forward, backward)
    out, lse = run(*arrays)
    return (out, lse) if return_lse else out
