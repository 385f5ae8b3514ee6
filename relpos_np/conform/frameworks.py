"""Arrays of NumPy, PyTorch, JAX and ONNX Runtime: how operands get there and results come back."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.conform.formats import DTYPES, Format
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.types import Array

FRAMEWORKS = ("numpy", "torch", "jax", "onnx")


def imported(name: str, package: str) -> Any:
    """A module of a framework; a RelposImportError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RelposImportError(
            f"framework: {name} cannot be imported ({error}); install it with `pip install {package}`"
        ) from error


class Framework:
    """NumPy itself, and what the others share."""

    name = "numpy"
    differentiates = False
    module: Any = np

    @property
    def version(self) -> str:
        """Of the framework, or of the runtime."""
        return str(self.module.__version__)

    def array(self, x: Array, stored: Format) -> Any:
        """An array of float64 in the format; integers and bools as they are."""
        return x.astype(stored.dtype) if x.dtype.kind == "f" else x

    def back(self, name: str, x: Any) -> tuple[Array, str]:
        """What was returned, in float64, and the dtype that it had: an array of NumPy or of anything with DLPack."""
        if not isinstance(x, np.ndarray | np.generic):
            if not hasattr(x, "__dlpack__"):
                raise RelposTypeError(f"{name}: expected an array, found {type(x).__name__}")
            x = np.from_dlpack(x)
        return self._known(name, np.asarray(x).astype(np.float64), str(x.dtype))

    @staticmethod
    def _known(name: str, x: Array, dtype: str) -> tuple[Array, str]:
        if dtype not in DTYPES:
            raise RelposTypeError(f"{name}: expected one of {', '.join(DTYPES)}; found {dtype}")
        return x, dtype

    def pulled(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        grad_out: Any,
    ) -> tuple[Any, list[Any]]:
        """The output of a function of arrays, and its vector-Jacobian product with each."""
        raise NotImplementedError


class _Torch(Framework):
    """PyTorch."""

    name = "torch"
    differentiates = True

    def __init__(self, device: str | None) -> None:
        self.module = self.torch = imported("torch", "torch")
        self.device = device or "cpu"

    def array(self, x: Array, stored: Format) -> Any:
        """See `Framework.array`; rounding twice is rounding once, because the numbers are there already."""
        tensor = self.torch.from_numpy(np.array(x))
        if x.dtype.kind == "f":
            tensor = tensor.to(getattr(self.torch, stored.name))
        return tensor.to(self.device)

    def back(self, name: str, x: Any) -> tuple[Array, str]:
        """See `Framework.back`."""
        if not isinstance(x, self.torch.Tensor):
            return super().back(name, x)
        found = x.detach().to("cpu").to(self.torch.float64, copy=True).numpy()
        return self._known(name, found, str(x.dtype).removeprefix("torch."))

    def pulled(self, function: Callable[..., Any], arrays: Sequence[Any], grad_out: Any) -> tuple[Any, list[Any]]:
        """See `Framework.pulled`."""
        with self.torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in arrays]
            out = function(*leaves)
            found = self.torch.autograd.grad(out, leaves, grad_out.to(out.dtype), allow_unused=True)
        return out, [self.torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


class _JAX(Framework):
    """JAX, with float64 where it is asked for."""

    name = "jax"
    differentiates = True

    def __init__(self) -> None:
        self.module = self.jax = imported("jax", "jax")

    def array(self, x: Array, stored: Format) -> Any:
        """See `Framework.array`."""
        if stored.name == "float64" and not self.jax.config.jax_enable_x64:
            raise RelposValueError("dtype: JAX has float64 only with JAX_ENABLE_X64=1, found it not set")
        return self.jax.numpy.asarray(super().array(x, stored))

    def back(self, name: str, x: Any) -> tuple[Array, str]:
        """See `Framework.back`."""
        return super().back(name, np.asarray(x) if isinstance(x, self.jax.Array) else x)

    def pulled(self, function: Callable[..., Any], arrays: Sequence[Any], grad_out: Any) -> tuple[Any, list[Any]]:
        """See `Framework.pulled`."""
        out, pull = self.jax.vjp(function, *arrays)
        return out, list(pull(grad_out.astype(out.dtype)))


class _ONNX(Framework):
    """ONNX Runtime, which runs a file: its inputs are the arguments."""

    name = "onnx"

    def __init__(self) -> None:
        self.module = imported("onnxruntime", "onnxruntime")

    def array(self, x: Array, stored: Format) -> Any:
        """See `Framework.array`."""
        if stored.name not in ("float16", "float32", "float64"):
            raise RelposValueError(
                f"dtype: ONNX Runtime gets arrays of NumPy: expected float16, float32 or float64; found {stored.name}"
            )
        return super().array(x, stored)


def opened(path: str) -> Callable[..., Any]:
    """The model of a file as a function, whose parameters have the names of its inputs."""
    runtime = imported("onnxruntime", "onnxruntime")
    try:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RelposValueError(f"callable: ONNX Runtime cannot open {path}: {error}") from error
    inputs = [one.name for one in session.get_inputs()]
    if inputs[:3] != ["q", "k", "v"]:
        raise RelposValueError(f"callable: expected a model whose first inputs are q, k and v, found {inputs}")

    def run(*operands: Any, **options: Any) -> Any:
        given: Mapping[str, Any] = dict(zip(inputs, operands, strict=False)) | options
        return session.run(None, given)[0]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    run.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in inputs])  # type: ignore[attr-defined]
    return run


def framework_of(name: str | None, function: Callable[..., Any], device: str | None) -> Framework:
    """The framework of a name, or else the one that the function's file has imported; NumPy if there is none."""
    if name is None:
        used = getattr(inspect.unwrap(function), "__globals__", {}).values()
        modules = {getattr(x, "__name__", "").partition(".")[0] for x in used if inspect.ismodule(x)}
        name = next((one for one in ("torch", "jax") if one in modules), "numpy")
    check.choice("framework", name, FRAMEWORKS)
    if device is not None and name != "torch":
        raise RelposValueError(f"device: goes with framework torch; found {name}")
    if name == "torch":
        return _Torch(device)
    return {"numpy": Framework, "jax": _JAX, "onnx": _ONNX}[name]()


def loaded(where: str, framework: str | None) -> Callable[..., Any]:
    """What ``package.module:name`` names, or the model in a file that ends in .onnx."""
    if framework == "onnx" or where.endswith(".onnx"):
        return opened(where)
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise RelposValueError(f"callable: expected package.module:name, found {where!r}")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise RelposImportError(f"callable: cannot import {module}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise RelposValueError(f"callable: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise RelposTypeError(f"callable: expected a function, found {where} of type {type(found).__name__}")
    return found  # type: ignore[no-any-return]
