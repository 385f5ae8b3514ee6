"""What the device can and Python cannot say: casts, bits of numbers, stored elements; each with its equal in Python.

Kernels take these as constants, so that one source serves the device and the simulator.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numba import types

from relpos_np.kernels._cuda.device import inline, simulated

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


def _place(x: int) -> int:
    if x < 0:
        raise IndexError(f"a kernel reads element {x}")
    return x


# An index that Numba need not look at for a sign: negative ones, which count from the end, are never meant.
place: Any = _place if simulated() else types.uint64
# The same for what is part of a sum: with this type the sum is of signed integers that are seen not to be negative.
count: Any = int if simulated() else types.uint32


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
    """From a stored element to the number that is computed with, and back."""
    if stored == "bfloat16":
        return inline(_widen), inline(_narrow)
    wide = np.float64 if stored == "float64" else np.float32
    return wide, FORMATS[stored][1].type


@cache
def reader(stored: str, real: np.dtype[Any]) -> Any:
    """From a stored element to a number of another dtype, float32 or float64."""
    widen, cast = converters(stored)[0], real.type

    def read(x: Any) -> Any:
        return cast(widen(x))

    return inline(read)


def _neighbours(size: int) -> Any:
    """Several elements from a place on that is a multiple of so many."""

    def load(x: Any, at: int) -> Any:
        if at % size:
            raise IndexError(f"a kernel reads {size} elements from {at} on")
        return tuple(x[at : at + size])

    return load


def _device_neighbours(size: int) -> Any:
    """The same as one load of 16 bytes."""
    ir, extending, array = (import_module(name) for name in ("llvmlite.ir", "numba.cuda.extending", _ARRAYS))

    # Numba's own names for what it passes.
    @extending.intrinsic
    def load(typingctx: Any, x: Any, at: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            start = builder.gep(array.make_array(x)(context, builder, args[0]).data, [args[1]])
            # Words of 32 or 64 bits, which such loads have in the device's language.
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
    """A function of an array and a place, a multiple of 16 bytes, that gives the elements in the 16 bytes there."""
    return (_neighbours if simulated() else _device_neighbours)(size)


def _raw(x: Any) -> Any:
    return x._item._ary


def _itself(x: Any) -> Any:
    return x


# An argument's elements: the simulator's wrapper makes each access slow.
elements: Any = _raw if simulated() else inline(_itself)
