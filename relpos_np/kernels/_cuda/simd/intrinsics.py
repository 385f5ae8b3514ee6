"""What a device can do and Python cannot: casts, bits of numbers, barriers, wide loads; each with its equal in Python.

Kernels take these as constants, so that one source serves the device and the simulator.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.launch.device import inline, simulated

# Where numba-cuda has what it knows of arrays.
_ARRAYS = "numba.cuda.np.arrayobj"

# Names of storage formats: what an array holds, and what its elements are computed in.
FORMATS: dict[str, tuple[Any, Any]] = {
    "float64": (types.float64, np.dtype(np.float64)),
    "float32": (types.float32, np.dtype(np.float32)),
    "float16": (types.float16, np.dtype(np.float16)),
    # Numba has no such array: the upper halves of float32.
    "bfloat16": (types.uint16, np.dtype(np.uint16)),
}


def _checked(x: int) -> int:
    if x < 0:
        raise IndexError(f"a kernel reads element {x}")
    return x


# Indices whose sign Numba need not look at: it takes negative ones to count from the end, which kernels never mean.
u64: Any = _checked if simulated() else types.uint64
# For a part of an index: the whole is a sum of signed integers that the compiler sees not to be negative.
u32: Any = int if simulated() else types.uint32


def _barrier() -> None:
    cuda.syncthreads()


def _barrier_or(x: Any) -> Any:
    return cuda.syncthreads_or(x)


def _simulated_barrier() -> None:
    # The simulator puts `cuda.syncthreads` into the module of the kernel alone, but its threads know it.
    thread: Any = threading.current_thread()
    thread.syncthreads()


def _simulated_barrier_or(x: Any) -> Any:
    thread: Any = threading.current_thread()
    return thread.syncthreads_or(x)


# Wait for all threads of the block; and say whether any of them brings something that is not 0.
wait: Any = _simulated_barrier if simulated() else inline(_barrier)
wait_or: Any = _simulated_barrier_or if simulated() else inline(_barrier_or)


def _widen(x: Any) -> Any:
    """Float32 from its upper half."""
    return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


def _narrow(x: Any) -> Any:
    """The nearest bfloat16, ties to even, as an integer."""
    bits = np.float32(x).view(np.uint32)
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        # NaN stays NaN, also where only its lower half said so.
        return np.uint16((bits >> np.uint32(16)) | np.uint32(64))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@cache
def converters(stored: str) -> tuple[Any, Any]:
    """Functions from a stored element to the number that kernels compute with, and back."""
    if stored == "bfloat16":
        return inline(_widen), inline(_narrow)
    wide = np.float64 if stored == "float64" else np.float32
    return wide, FORMATS[stored][1].type


@cache
def reader(stored: str, real: np.dtype[Any]) -> Any:
    """The function from a stored element to a number in `real`, float32 or float64."""
    widen, cast = converters(stored)[0], real.type

    def read(x: Any) -> Any:
        return cast(widen(x))

    return inline(read)


def _neighbours(size: int) -> Any:
    """Load `size` elements from an index that is a multiple of `size`."""

    def load(x: Any, at: int) -> Any:
        if at % size:
            raise IndexError(f"a kernel reads {size} elements from {at} on")
        return tuple(x[at : at + size])

    return load


def _device_neighbours(size: int) -> Any:
    """The same, as one load of 16 bytes."""
    ir, extending, array = (import_module(name) for name in ("llvmlite.ir", "numba.cuda.extending", _ARRAYS))

    # The names of the arguments are Numba's.
    @extending.intrinsic
    def load(typingctx: Any, x: Any, at: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            start = builder.gep(array.make_array(x)(context, builder, args[0]).data, [args[1]])
            # PTX has loads of 16 bytes as words of 32 or 64 bits.
            bits = max(32, 128 // size)
            words = ir.VectorType(ir.IntType(bits), 128 // bits)
            found = builder.load(builder.bitcast(start, words.as_pointer()))
            found.align = 16
            found = builder.bitcast(found, ir.VectorType(context.get_value_type(x.dtype), size))
            parts = [builder.extract_element(found, ir.IntType(32)(n)) for n in range(size)]
            return context.make_tuple(builder, types.UniTuple(x.dtype, size), parts)

        return types.UniTuple(x.dtype, size)(x, at), codegen

    return load


def neighbours(size: int) -> Any:
    """The function of an array and an index, a multiple of 16 bytes, that loads the elements in the 16 bytes there."""
    return (_neighbours if simulated() else _device_neighbours)(size)


def _raw(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*map(_raw, x))
    return getattr(x, "_item", x)._ary


def _itself(x: Any) -> Any:
    return x


# The elements of an argument, an array or a record of arrays: the simulator's wrappers make each access slow.
elements: Any = _raw if simulated() else inline(_itself)
