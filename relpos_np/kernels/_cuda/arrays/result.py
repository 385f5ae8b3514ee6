"""Results on the device, in forms that other libraries read without a copy."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.arrays.operand import Operand, _memory
from relpos_np.kernels._cuda.launch import device
from relpos_np.kernels._cuda.simd.elementwise import is_brain
from relpos_np.types import Array

# Offsets of the element type's code in DLPack's two records of a tensor, and the code of bfloat16.
_CODE_AT = {b"dltensor": 20, b"dltensor_versioned": 52}
_BFLOAT = 4


def _as_bfloat16(capsule: Any) -> Any:
    """The same capsule of DLPack, with 16-bit elements called bfloat16: neither NumPy nor cuda.core exports those."""
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    name = name_of(capsule)
    ctypes.c_uint8.from_address(address_of(capsule, name) + _CODE_AT[name]).value = _BFLOAT
    return capsule


class DeviceArray:
    """An array on the device, which `attention`, `attention_vjp` and `rel_shift` return where they were given such.

    torch.from_dlpack, cupy.from_dlpack, jax.dlpack.from_dlpack, and everything that reads the CUDA array interface
    take it without a copy, and so does this library.

    Attributes
    ----------
    shape : tuple of int
        Sizes of its axes.
    dtype : dtype
        NumPy's; bfloat16 is that of ml_dtypes.
    strides : tuple of int
        Bytes from one entry of each axis to the next.
    stream : int
        Address of the CUDA stream whose work fills the array; 1 is the legacy default stream.
    """

    def __init__(self, operand: Operand, stream: int) -> None:
        self._operand, self.stream = operand, stream
        self.shape, self.dtype = operand.shape, operand.dtype
        self.strides = tuple(step * operand.itemsize for step in operand.strides)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._operand.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._operand.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._operand.nbytes

    def copy_to_host(self) -> Array:
        """A copy on the host, once the stream's work is done.

        Returns
        -------
        ndarray
            In the array's shape and dtype.
        """
        with device.on(self.stream):
            return np.array(self._operand.host())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array on the device cannot be read on the host without a copy")
        found = self.copy_to_host()
        return found if dtype is None else found.astype(dtype, copy=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; bfloat16, for which it has no name, as elements "<V2" of two bytes."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (_memory(self._operand.flat) if self.size else 0, self._operand.readonly),
            "strides": None if self._operand.is_contiguous else self.strides,
            "stream": self.stream,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number for CUDA, and which device; in the simulator that of the host."""
        return (1, 0) if device.simulated() else (2, int(device.module().get_current_device().id))

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of DLPack; the consumer's stream waits for the array's."""
        operand = self._operand
        word = np.dtype(np.uint16) if is_brain(self.dtype) else self.dtype
        if device.simulated():
            flat = np.asarray(operand.flat._ary)[: operand.size]
            view = np.lib.stride_tricks.as_strided(flat, self.shape, self.strides)
            capsule = view.__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)
        else:
            if stream != -1:
                device.follow(stream or 1, self.stream)
            core = importlib.import_module("cuda.core")
            buffer = core.Buffer.from_handle(_memory(operand.flat), self.nbytes, owner=operand.flat)
            memory_view = importlib.import_module("cuda.core.utils").StridedMemoryView
            view = memory_view.from_buffer(
                buffer, shape=self.shape, strides=operand.strides, dtype=word, is_readonly=operand.readonly
            )
            capsule = view.__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)
        return _as_bfloat16(capsule) if is_brain(self.dtype) else capsule

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"
