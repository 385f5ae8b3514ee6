"""Attention on tensors of PyTorch: read without a copy, with gradients for autograd."""

from __future__ import annotations

import sys
from typing import Any, Literal, Unpack, overload

import numpy as np

import relpos_np as rp
from relpos_np._contract.options import ForeignOptions, completed, takes
from relpos_np._runtime import precision
from relpos_np.errors import RelposImportError, RelposTypeError
from relpos_np.interop.bias import with_bias
from relpos_np.interop.scheme import TensorOptions, Trained, as_tuple, gradients, made, tensors
from relpos_np.types import Array, Precision

try:
    import torch
except ImportError as error:
    raise RelposImportError(
        f"relpos_np.interop.torch cannot import PyTorch ({error}); install it with `pip install torch`"
    ) from error

__all__ = ["Trained", "attention", "trained"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What `torch.backends` calls products of float32.
_FLOAT32_PRODUCTS: dict[str, Precision] = {"ieee": "highest", "tf32": "high", "bf16": "medium"}


def outside_graphs(function: Any) -> Any:
    """A function that `torch.compile` leaves alone: it breaks the graph there, and with ``fullgraph=True`` says why."""
    try:
        return torch.compiler.disable(function, reason="relpos_np computes attention in kernels of its own")
    except TypeError:  # PyTorch 2.6 knows no reasons
        return torch.compiler.disable(function)


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise RelposImportError(
            "bfloat16 tensors need the package ml_dtypes; install it with `pip install ml_dtypes`"
        ) from error
    return ml_dtypes.bfloat16


def _checked(name: str, x: Any) -> Any:
    """A dense tensor on the host or on a CUDA device."""
    if not isinstance(x, torch.Tensor):
        raise RelposTypeError(f"{name}: expected a torch.Tensor, found {type(x).__name__}")
    if x.device.type not in ("cpu", "cuda"):
        raise RelposTypeError(f"{name}: expected a tensor on 'cpu' or 'cuda', found one on {str(x.device)!r}")
    if x.layout is not torch.strided:
        raise RelposTypeError(f"{name}: expected a dense tensor, found layout {x.layout}; use to_dense()")
    return x


def _operand(name: str, x: Any) -> Any:
    """A checked tensor of a dtype that attention reads."""
    if _checked(name, x).dtype not in _DTYPES:
        raise RelposTypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, found {x.dtype}")
    return x


def _autocast(x: Any) -> Any:
    """An operand as `torch.autocast` hands it to PyTorch's own attention."""
    return x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _setting(x: Any) -> Precision | None:
    """What PyTorch was told about products of this operand: it has settings for float32 alone."""
    if x.dtype is not torch.float32:
        return None
    try:
        found: Precision | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        # Settings of `torch.backends` that differ have no common name.
        own = torch.backends.mkldnn if x.device.type == "cpu" else torch.backends.cuda
        found = _FLOAT32_PRODUCTS.get(own.matmul.fp32_precision)
    return found


def _refuse_transformed(named: list[tuple[str, Any]]) -> None:
    """Refuse tensors whose numbers a tracer or a transformation would take for constants, or that have none."""
    # What is not loaded is not running.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if torch.jit.is_tracing():
        raise RelposTypeError("q: torch.jit.trace would record this call's result as a constant")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        raise RelposTypeError("q: torch.fx and torch.export would record this call's result as a constant")
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    for name, x in named:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise RelposTypeError(
                f"{name}: expected a plain tensor, found one inside of torch.func (vmap, grad, jvp, ...); leading "
                "axes are a batch already, and gradients come from backward()"
            )
        if fakes is not None and isinstance(x, fakes.FakeTensor):
            raise RelposTypeError(f"{name}: expected a tensor with numbers, found a FakeTensor, as of torch.export")
        if forward_mode and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise RelposTypeError(f"{name}: expected a plain tensor, found a dual one; there is no forward mode here")


def _array(x: Any) -> Array:
    """A tensor as an array: its own memory on the host, a copy of what is on a device."""
    x = x.detach().resolve_neg()
    if x.device.type != "cpu":
        x = x.cpu()
    if x.dtype is torch.bfloat16:
        half: Array = x.view(torch.int16).numpy().view(_bfloat16())
        return half
    own: Array = x.numpy()
    return own


def _read(name: str, value: Any) -> Any:
    """What an option holds, with arrays in place of tensors."""
    if isinstance(value, tuple):
        return tuple(_read(name, x) for x in value)
    return _array(_checked(name, value)) if isinstance(value, torch.Tensor) else value


def _tensor(x: Any) -> Any:
    """An array, or what the CUDA backend returns, as a tensor with the same memory."""
    if not isinstance(x, np.ndarray):
        return torch.from_dlpack(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def trained(scheme: Any, *args: Any, **kwargs: Any) -> Trained:
    """A scheme made of tensors, which receive gradients.

    Parameters
    ----------
    scheme : type
        Class of the scheme, for instance `relpos_np.T5`.
    *args, **kwargs
        Its arguments, with tensors in place of arrays. They are read in each call of `attention`, so that one
        object serves a whole training.

    Returns
    -------
    Trained
        For ``position=`` of `attention`.

    Raises
    ------
    RelposTypeError
        If `scheme` is not a class of this library, or an argument is none of its own.
    """
    return Trained.of(scheme, args, kwargs, lambda name, x: isinstance(x, torch.Tensor) and _operand(name, x) is x)


class _Call:
    """One call without its tensors: what autograd keeps beside them for the backward pass.

    After the operands come tensors of options, those that are `named`, and then tensors of schemes.
    """

    def __init__(
        self, positions: tuple[Any, ...], named: tuple[str, ...], options: dict[str, Any], seed: int | None
    ) -> None:
        self.positions, self.named, self.options, self.seed = positions, named, options, seed

    def arguments(self, tensors: tuple[Any, ...]) -> dict[str, Any]:
        """Arguments of the library's own functions, with schemes made of the tensors as they are now."""
        arrays = [_array(x) for x in tensors]
        count = len(self.named)
        own = dict(zip(self.named, arrays[:count], strict=True))
        rng = None if self.seed is None else np.random.default_rng(self.seed)
        return {**self.options, **own, "position": made(self.positions, arrays[count:]), "rng": rng}

    def forward(self, q: Any, k: Any, v: Any, *tensors: Any) -> tuple[Any, Any]:
        """The output and the log-sum-exp."""
        read = _array if q.device.type == "cpu" else torch.Tensor.detach
        out, lse = rp.attention(read(q), read(k), read(v), return_lse=True, **self.arguments(tensors))
        return _tensor(out), _tensor(lse)

    def output(self, q: Any, k: Any, v: Any, *tensors: Any) -> Any:
        """The output alone."""
        read = _array if q.device.type == "cpu" else torch.Tensor.detach
        return _tensor(rp.attention(read(q), read(k), read(v), **self.arguments(tensors)))

    def backward(self, saved: tuple[Any, ...], grad_out: Any, grad_lse: Any) -> list[Any]:
        """Gradients of q, k, v, of options and of each scheme's tensors."""
        q, k, v, *tensors = saved
        read = _array if q.device.type == "cpu" else torch.Tensor.detach
        # Where and when this runs another precision may be chosen, or one where none was.
        with precision.held(self.options["precision"]):
            given = self.arguments(tuple(tensors))
            sums = None if grad_lse is None else read(grad_lse)
            found = rp.attention_vjp(read(q), read(k), read(v), grad_out=read(grad_out), grad_lse=sums, **given)
        own = [getattr(found, name) for name in self.named]
        grads = [found.q, found.k, found.v, *own, *gradients(self.positions, found.position)]
        return [None if g is None else _tensor(g).to(x) for g, x in zip(grads, saved, strict=True)]


class _Attention(torch.autograd.Function):
    """The call as a node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> tuple[Any, Any]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return call.forward(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * (1 + len(saved))
        if grad_out is None:
            q, v = saved[0], saved[2]
            grad_out = q.new_zeros((*grad_lse.shape, v.shape[-1]))
        return (None, *ctx.call.backward(saved, grad_out, grad_lse))


class _Options(TensorOptions, total=False):
    """What a call takes."""

    dropout: float
    generator: Any


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[False] = ..., **options: Unpack[_Options]) -> Any: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[_Options]) -> tuple[Any, Any]: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[_Options]) -> Any | tuple[Any, Any]: ...


@outside_graphs
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
    dropout: float = 0.0,
    generator: Any = None,
    return_lse: bool = False,
    **options: Unpack[ForeignOptions],
) -> Any:
    """`relpos_np.attention` of tensors, as an operation that autograd differentiates.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Shapes and dtypes as in `relpos_np.attention`; all on the host, or all on one CUDA device.
    position : scheme, Trained or tuple of them, optional
        A scheme of this library is fixed; `trained` makes one whose arrays are tensors with gradients.
    mask : torch.Tensor of bool or float, optional
        See `relpos_np.attention`. A float mask that requires a gradient receives one.
    key_lengths : int or torch.Tensor of int, optional
        See `relpos_np.attention`.
    selected : torch.Tensor of int, optional
        See `relpos_np.attention`.
    query_scale, sinks : torch.Tensor, optional
        See `relpos_np.attention`. They receive gradients.
    segments : torch.Tensor of int, or a pair of them, optional
        See `relpos_np.attention`.
    offset : int or torch.Tensor of int, optional
        See `relpos_np.attention`.
    dropout : float
        Rate at which probabilities are dropped.
    generator : torch.Generator, optional
        Source of the dropout mask's seed; default that of PyTorch, so that `torch.manual_seed` repeats it.
    causal, window, rule, scale, softcap, cap_order
        See `relpos_np.attention`.
    precision : {"highest", "high", "medium"}, optional
        See `relpos_np.set_precision`. Where nothing was chosen there, ``torch.get_float32_matmul_precision()`` counts
        for operands of float32; where ``torch.backends.*.matmul.fp32_precision`` has replaced it, what that says of
        the operands' device: "ieee" is "highest", "tf32" is "high", "bf16" is "medium".
    backend : {"numpy", "terms", "numba", "cuda"}, optional
        Default "cuda" for tensors on a device, else as `relpos_np.set_backend` says.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    out : torch.Tensor, shape (..., H, L_q, D_v)
        In the dtype of q; inside of `torch.autocast`, in the dtype that it casts to.
    lse : torch.Tensor, shape (..., H, L_q)
        Only with `return_lse`.

    Raises
    ------
    RelposError
        As `relpos_np.attention`; also for tensors on other devices, or sparse ones.

    Notes
    -----
    Inside of `torch.autocast` for the operands' device q, k and v are cast to its dtype, as PyTorch's own attention
    casts them: unless they are of float64, and with gradients in the dtype that was given. Masks and all else stay as
    they are. The backward pass has the precision of the call, wherever and whenever it runs.

    Tensors on the host are read where they lie, and results are not copied either; only a result in the wrong order
    of memory, tensors with a lazy negation and half precision that a kernel does not read are converted. The
    backward pass computes probabilities again, tile by tile. There are no second derivatives and no `torch.func`.
    """
    given: dict[str, Any] = {**completed(attention, options)}
    positions = as_tuple(position)
    trained_options = {name: x for name, x in (("query_scale", query_scale), ("sinks", sinks)) if x is not None}
    fixed = {"key_lengths": key_lengths, "selected": selected, "offset": offset, "segments": segments}
    parts = [(name, x) for name, value in fixed.items() for x in (value if isinstance(value, tuple) else (value,))]
    operands = {"q": q, "k": k, "v": v}
    named = [*operands.items(), ("mask", mask), *trained_options.items(), *parts]
    named += [("position", x) for x in tensors(positions)]
    _refuse_transformed([(name, x) for name, x in named if isinstance(x, torch.Tensor)])
    for name, x in (operands | trained_options).items():
        _operand(name, x)
    for name, x in operands.items():
        if x.device != q.device:
            raise RelposTypeError(f"{name}: expected a tensor on {str(q.device)!r} like q, found one on {x.device}")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = map(_autocast, (q, k, v))
    given["precision"] = precision.chosen(given["precision"], _setting(q))
    if q.device.type == "cuda":
        given["backend"] = given["backend"] or "cuda"
    given |= {name: _read(name, x) for name, x in fixed.items()}
    grad = torch.is_grad_enabled()
    if mask is not None:
        if _checked("mask", mask).requires_grad and grad:
            positions = with_bias(positions, mask, given)
        else:
            given["mask"] = _array(mask)
    seed = None
    if dropout:
        given["dropout"] = dropout
        seed = int(torch.randint(2**62, (), generator=generator))
    call = _Call(positions, tuple(trained_options), given, seed)
    inputs = (q, k, v, *trained_options.values(), *tensors(positions))
    if grad and any(x.requires_grad for x in inputs):
        out, lse = _Attention.apply(call, *inputs)
        return (out, lse) if return_lse else out
    return call.forward(*inputs) if return_lse else call.output(*inputs)
