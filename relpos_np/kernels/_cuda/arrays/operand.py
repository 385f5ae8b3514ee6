"""Arrays that are on the device already: recognising them, reading them without a copy, computing with them."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.kernels._cuda.launch import device
from relpos_np.kernels._cuda.launch.shared_copies import kept
from relpos_np.kernels._cuda.simd.elementwise import elementwise, is_brain
from relpos_np.kernels._cuda.simd.rotate import rotate
from relpos_np.types import Array

LEGACY_STREAM = 1


def stream_of(x: Any) -> int | None:
    """The address of the stream that an array names, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return int(torch.cuda.current_stream(x.device).cuda_stream) or LEGACY_STREAM
    try:
        named = x.__cuda_array_interface__.get("stream")
    except Exception:  # noqa: BLE001  (some libraries raise errors of their own for dtypes that the interface lacks)
        return None
    return None if named is None else int(named) or LEGACY_STREAM


def common_stream(arrays: list[Any]) -> int:
    """The stream of a call: the first that an array names, else the legacy default stream."""
    return next((stream for stream in map(stream_of, arrays) if stream is not None), LEGACY_STREAM)


@contextmanager
def session(named: dict[str, Any]) -> Iterator[int]:
    """Run everything inside in the order of the stream of these arguments."""
    pointer = common_stream(list(named.values()))
    with device.on(pointer), device.tidied():
        yield pointer


def _bfloat16(name: str) -> np.dtype[Any]:
    """NumPy's dtype for bfloat16, which is in a package of its own."""
    try:
        dtype: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise RelposImportError(
            f"{name}: bfloat16 needs the package ml_dtypes; install it with `pip install ml_dtypes`"
        ) from error
    return dtype


class _Described:
    """The host's memory behind an array of the simulator."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        described = owner.__cuda_array_interface__
        self.__array_interface__ = {
            key: described[key] for key in ("shape", "typestr", "data", "strides", "version") if key in described
        }


def _memory(flat: Any) -> int:
    """The address of a flat array, on the device or in the simulator."""
    if device.simulated():
        return int(flat.ctypes.data)
    return int(flat.__cuda_array_interface__["data"][0])


def _simulated_view(x: Any) -> Array:
    """The host's array behind an array of the simulator, without a copy."""
    if getattr(x, "__cuda_ndarray__", False) is True:
        return np.asarray(x._ary)
    if not hasattr(x, "__cuda_array_interface__"):
        return np.from_dlpack(x)
    return np.asarray(_Described(x))


def _check_device(x: Any, name: str, found: int | None) -> None:
    """Refuse an array on another device than the current one."""
    here = 0 if device.simulated() else int(device.module().get_current_device().id)
    if found is None and hasattr(x, "__dlpack_device__") and getattr(x, "__cuda_ndarray__", False) is not True:
        kind, found = x.__dlpack_device__()
        if int(kind) == 13:  # managed memory belongs to all of them
            return
    if found is not None and int(found) != here:
        raise RelposValueError(
            f"{name}: wrong device: the array is on CUDA device {int(found)}, and the current one is {here}; "
            f"choose it with numba.cuda.select_device({int(found)})"
        )


def _flat_of_device(x: Any, name: str) -> tuple[Any, tuple[int, ...], tuple[int, ...], np.dtype[Any], bool]:
    """The memory of a device array, without a copy and in the order of the current stream."""
    try:
        memory_view = importlib.import_module("cuda.core.utils").StridedMemoryView
    except ImportError as error:
        raise RelposImportError(
            f"{name}: device arrays need the package cuda-core ({error}); install it with "
            '`pip install "relpos-np[cuda]"`'
        ) from error
    cuda = device.module()
    # Looking up addresses needs Numba's context.
    cuda.current_context()
    _check_device(x, name, None)
    # No need to wait for the stream that already orders the array.
    pointer = -1 if stream_of(x) == device.current_stream() else device.current_stream()
    # Torch may leave conjugation and negation to readers.
    if any(getattr(x, question, bool)() for question in ("is_conj", "is_neg")):
        raise RelposTypeError(f"{name}: the memory of the {type(x).__name__} holds other numbers; resolve or clone it")
    try:
        view = memory_view.from_any_interface(x, stream_ptr=pointer)
    except (BufferError, RuntimeError, TypeError) as error:
        # For instance a sparse tensor of torch.
        raise RelposTypeError(f"{name}: {type(x).__name__} cannot be read ({' '.join(str(error).split())})") from error
    _check_device(x, name, int(view.device_id))
    shape = tuple(int(n) for n in view.shape)
    try:
        dtype = np.dtype(view.dtype)
    except (NotImplementedError, TypeError) as error:
        if "bfloat16" not in str(getattr(x, "dtype", "bfloat16")):
            raise RelposTypeError(f"{name}: dtype {x.dtype} cannot be read ({error})") from error
        dtype = _bfloat16(name)
    strides = view.strides
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    strides = tuple(int(step) for step in strides)
    if dtype.kind == "V" and dtype.itemsize == 2 and not is_brain(dtype):
        dtype = _bfloat16(name)
    _check_layout(name, shape, strides, dtype, int(view.ptr))
    span = _span(shape, strides)
    word = np.dtype(np.uint16) if is_brain(dtype) else dtype
    if not span:
        return device.empty(1, word), shape, strides, dtype, bool(view.readonly)
    described = {
        "shape": (span,),
        "typestr": word.str,
        "data": (int(view.ptr), bool(view.readonly)),
        "strides": None,
        "stream": None,
        "version": 3,
    }
    # The view keeps the array, or what it exported, alive.
    flat = cuda.from_cuda_array_interface(described, owner=(view, x), sync=False)
    return flat, shape, strides, dtype, bool(view.readonly)


def _flat_of_host(x: Any, name: str) -> tuple[Any, tuple[int, ...], tuple[int, ...], np.dtype[Any], bool]:
    """The same in the simulator, whose device is the host's memory."""
    _check_device(x, name, None)
    array = _simulated_view(x)
    dtype = array.dtype
    if dtype.kind == "V" and dtype.itemsize == 2 and not is_brain(dtype):
        dtype = _bfloat16(name)
    strides = tuple(step // dtype.itemsize if step % dtype.itemsize == 0 else -1 for step in array.strides)
    _check_layout(name, array.shape, strides, dtype, array.ctypes.data)
    word = np.dtype(np.uint16) if is_brain(dtype) else dtype
    span = _span(array.shape, strides)
    if not span:
        return device.empty(1, word), array.shape, strides, dtype, not array.flags.writeable
    readonly = not array.flags.writeable
    flat = as_strided(array.view(word) if word != dtype else array, (span,), (word.itemsize,), writeable=not readonly)
    fake = importlib.import_module("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray
    return fake(flat), array.shape, strides, dtype, readonly


def _check_layout(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], address: int
) -> None:
    """Refuse layouts and dtypes that kernels cannot read."""
    if not dtype.isnative:
        raise RelposTypeError(f"{name}: expected the byte order of this machine, found dtype {dtype.str}")
    if any(step < 0 and n > 1 for n, step in zip(shape, strides, strict=True)):
        raise RelposValueError(
            f"{name}: expected strides that are multiples of an element and not negative, found {strides} for shape "
            f"{shape}; make a contiguous copy"
        )
    if 0 not in shape and address % dtype.itemsize:
        raise RelposValueError(f"{name}: the address of the array is no multiple of {dtype.itemsize} bytes")


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of memory from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if n > 1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Steps of an array in C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def one_step(shape: Sequence[int], steps: Sequence[int]) -> int | None:
    """The step of several axes taken as one, or None if there is none."""
    axes = [(n, step) for n, step in zip(shape, steps, strict=True) if n > 1]
    if any(step != n * after for (_, step), (n, after) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 0


class Operand(NDArrayOperatorsMixin):
    """An array on the device, to a scheme's `lower` like one of NumPy.

    Sums and products with others and `turned` stay on the device. Everything else that NumPy does with an array
    is done with a copy on the host, in which half precision is widened to float32.

    Parameters
    ----------
    flat : device array of one axis
        The memory from the first to the last element; bfloat16 as uint16, which Numba knows.
    shape, strides : tuple of int
        As in NumPy, but strides in elements. They are never negative.
    dtype : dtype
        NumPy's; bfloat16 is that of ml_dtypes.
    readonly : bool
        Whether it may only be read.

    Attributes
    ----------
    flat, shape, strides, dtype, readonly
        As given.
    """

    # NumPy's arrays leave operators to this class.
    __array_priority__ = 1000.0

    def __init__(
        self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, *, readonly: bool = False
    ) -> None:
        self.flat, self.shape, self.strides = flat, tuple(shape), tuple(strides)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.readonly = readonly
        self._copy: Array | None = None

    @classmethod
    def of(cls, x: Any, name: str) -> Operand:
        """An array of a device without a copy, in the order of the current stream; the operand keeps x alive.

        x has `__dlpack__` or `__cuda_array_interface__`, and errors call it `name`. A RelposTypeError says that it
        cannot be read, or has a dtype or a byte order that kernels do not read; a RelposValueError that it is on
        another device, or has negative strides; a RelposImportError that a package is missing for its dtype.
        """
        if isinstance(x, Operand):
            return x
        own = getattr(x, "_operand", None)
        if isinstance(own, Operand):
            device.follow(device.current_stream(), x.stream)
            return own
        flat, shape, strides, dtype, readonly = (_flat_of_host if device.simulated() else _flat_of_device)(x, name)
        # An axis of one entry may come with any stride.
        strides = tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))
        return cls(flat, shape, strides, dtype, readonly=readonly)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> Operand:
        """A new one in C order, with anything in it."""
        dtype = np.dtype(dtype)
        flat = device.empty(math.prod(shape), np.uint16 if is_brain(dtype) else dtype)
        return cls(flat, shape, contiguous_strides(shape), dtype)

    @classmethod
    def uploaded(cls, x: Array) -> Operand:
        """A copy of an array of the host."""
        flat = np.ascontiguousarray(x).reshape(-1)
        flat = device.upload(flat.view(np.uint16) if is_brain(x.dtype) else flat)
        return cls(flat, x.shape, contiguous_strides(x.shape), x.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def real(self) -> np.dtype[Any]:
        """The dtype that kernels compute in: float64 or float32."""
        return np.dtype(np.float64 if self.dtype.name == "float64" else np.float32)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is in C order, without gaps."""
        steps = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return not self.size or all(n == 1 or step == wanted for n, step, wanted in steps)

    @property
    def repeats(self) -> bool:
        """Whether elements share memory, or may."""
        reach = 0
        for step, n in sorted((step, n) for n, step in zip(self.shape, self.strides, strict=True) if n > 1):
            if step <= reach:
                return bool(self.size)
            reach += (n - 1) * step
        return False

    def overlaps(self, other: Operand) -> bool:
        """Whether the stretches of memory of both overlap."""
        a, b = _memory(self.flat), _memory(other.flat)
        a_bytes, b_bytes = (_span(x.shape, x.strides) * x.itemsize for x in (self, other))
        return a < b + b_bytes and b < a + a_bytes

    def stand_in(self) -> Array:
        """An array on the host with the same shape that stores one element, for checks; half precision as float32."""
        dtype = self.dtype if self.dtype.name not in ("float16", "bfloat16") else np.dtype(np.float32)
        return np.broadcast_to(np.zeros((), dtype), self.shape)

    # on the device ---------------------------------------------------------------------------------

    def _given(self, shape: tuple[int, ...] | None = None) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
        """The arguments of a kernel for the operand, broadcast to a shape."""
        return self.flat, self.strides if shape is None else self.broadcast_to(shape).strides, self.dtype

    def broadcast_to(self, shape: tuple[int, ...]) -> Operand:
        """The same memory in a larger shape."""
        if shape == self.shape:
            return self
        lead = len(shape) - self.ndim
        if lead < 0 or any(n not in (1, wanted) for n, wanted in zip(self.shape, shape[lead:], strict=True)):
            raise ValueError(f"shape {self.shape} does not broadcast to {shape}")
        kept = (0 if n == 1 else step for n, step in zip(self.shape, self.strides, strict=True))
        return Operand(self.flat, shape, (*[0] * lead, *kept), self.dtype, readonly=True)

    def reshaped(self, shape: tuple[int, ...]) -> Operand:
        """The same memory with axes of one entry added or left out in front."""
        lead = len(shape) - self.ndim
        if lead < 0 and (self.shape[-lead:] != shape or math.prod(self.shape[:-lead]) != 1):
            raise ValueError(f"shape {self.shape} is not {shape} with axes of one entry in front")
        strides = (*[0] * lead, *self.strides) if lead >= 0 else self.strides[-lead:]
        return Operand(self.flat, shape, strides, self.dtype, readonly=self.readonly)

    def cut(self, index: tuple[Any, ...]) -> Operand:
        """The same memory in ranges of its axes; an ellipsis stands for axes as they are."""
        at = index.index(...) if ... in index else len(index)
        index = (*index[:at], *[slice(None)] * (self.ndim - len(index) + (at < len(index))), *index[at + 1 :])
        ranges = [one.indices(n)[:2] for one, n in zip(index, self.shape, strict=True)]
        shape = tuple(max(stop - begin, 0) for begin, stop in ranges)
        start = sum(begin * step for (begin, _), step in zip(ranges, self.strides, strict=True))
        flat = self.flat[start:] if start and math.prod(shape) else self.flat
        return Operand(flat, shape, self.strides, self.dtype, readonly=self.readonly)

    def contiguous(self, dtype: Any = None) -> Operand:
        """In C order and in a dtype, by default its own; itself if it already is."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if dtype == self.dtype and self.is_contiguous:
            return self
        out = Operand.empty(self.shape, dtype)
        out.fill_from(self)
        return out

    def fill_from(self, x: Operand) -> None:
        """Overwrite with another one, which is broadcast and converted."""
        elementwise("copy", self.shape, x._given(self.shape), None, self._given())

    def fill(self, value: float) -> None:
        """Overwrite with one number."""
        self.fill_from(Operand.uploaded(np.full((), value, self.real)))

    def turned(self, cos: Array, sin: Array, layout: str) -> Operand:
        """Pairs of channels times complex numbers, which are (..., heads or 1, L, pairs) on the host.

        Parameters
        ----------
        cos, sin : ndarray
            Real and imaginary part. Their axes but the last broadcast to those of the operand.
        layout : {"half", "interleaved"}
            Whether a pair are channels p and p + pairs, or 2 p and 2 p + 1; later channels stay as they are.

        Returns
        -------
        Operand
            In float64 for float64, else in float32.
        """
        out = Operand.empty(self.shape, self.real)
        if not self.size:
            return out
        # What repeats is copied once.
        core = tuple(slice(0, 1) if step == 0 else slice(None) for step in cos.strides[:-1])
        cos, sin = (np.ascontiguousarray(table[core], self.real) for table in (cos, sin))
        wide = np.broadcast_to(cos, (*self.shape[:-1], cos.shape[-1])).strides
        steps = tuple(step // cos.itemsize for step in wide)
        starts = np.zeros((1, 2), np.int64)
        for n, own, turn in zip(self.shape[:-3], self.strides[:-3], steps[:-3], strict=True):
            starts = (starts[:, None] + np.arange(n)[:, None] * np.array([own, turn])).reshape(-1, 2)
        flat_cos, flat_sin, flat_starts = kept(cos, sin, starts)
        rotate(self._given(), self.shape, (flat_cos, flat_sin, steps), cos.shape[-1], flat_starts, out.flat, layout)
        return out

    def _combined(self, operation: str, other: Any) -> Operand | None:
        """Sum or product with another array or number, on the device; None if it must be done on the host."""
        if isinstance(other, Operand):
            second = other
            dtype = np.result_type(self.real, other.real)
        elif isinstance(other, int | float) and not isinstance(other, bool | np.generic):
            dtype = self.real
            second = Operand.uploaded(np.asarray(other, dtype))
        elif isinstance(other, np.ndarray | np.generic):
            dtype = np.result_type(self.real, other.dtype)
            if other.dtype.kind not in "fiu" or dtype.name not in ("float32", "float64"):
                return None
            second = Operand.uploaded(np.asarray(other).astype(dtype, copy=False))
        else:
            return None
        shape = np.broadcast_shapes(self.shape, second.shape)
        out = Operand.empty(shape, dtype)
        elementwise(operation, shape, self._given(shape), second._given(shape), out._given())
        return out

    # as NumPy sees it --------------------------------------------------------------------------------

    def host(self) -> Array:
        """A copy on the host, in its own dtype."""
        # What repeats is copied once.
        core = tuple(1 if step == 0 else n for n, step in zip(self.shape, self.strides, strict=True))
        once = Operand(self.flat, core, self.strides, self.dtype).contiguous()
        out = np.empty(core, self.dtype)
        if out.size:
            words = out.view(np.uint16) if is_brain(self.dtype) else out
            device.download(once.flat[: out.size], words)
        return np.broadcast_to(out, self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """A read-only copy on the host, made once, with half precision widened."""
        if copy is False:
            raise ValueError("an array on the device cannot be read on the host without a copy")
        if self._copy is None:
            found = self.host()
            self._copy = found.astype(self.real) if self.dtype.name in ("float16", "bfloat16") else found.view()
            self._copy.flags.writeable = False
        if dtype is not None and np.dtype(dtype) != self._copy.dtype:
            return self._copy.astype(dtype)
        return self._copy.copy() if copy else self._copy

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Sums and products on the device, everything else on the host."""
        out = options.pop("out", (None,))
        if method == "__call__" and ufunc in (np.add, np.multiply) and not options and len(inputs) == 2:
            first, second = inputs if isinstance(inputs[0], Operand) else inputs[::-1]
            # `x *= y` binds x to something new: the caller's array is never written to.
            if out[0] is None or isinstance(out[0], Operand):
                found = first._combined(ufunc.__name__, second)
                if found is not None:
                    return found
        inputs = tuple(np.asarray(x) if isinstance(x, Operand) else x for x in inputs)
        if not all(x is None or isinstance(x, Operand) for x in out):
            options["out"] = out
        return getattr(ufunc, method)(*inputs, **options)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """In another dtype; on the device where `copy` is False."""
        if not copy and np.dtype(dtype).kind == "f":
            return self if np.dtype(dtype) == self.dtype else self.contiguous(dtype)
        return np.asarray(self).astype(dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __getattr__(self, name: str) -> Any:
        # Everything else that arrays of NumPy have comes from a copy on the host.
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(np.asarray(self), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Operand(shape={self.shape}, strides={self.strides}, dtype={self.dtype})"
