"""Calls of the CUDA backend where there is no GPU: their launches go to a function of ours, with NumPy's arrays."""

from __future__ import annotations

import re
import struct
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

CAPABILITY = (9, 0)


class Launch(NamedTuple):
    """A kernel, blocks, threads of a block, and arguments, arrays being NumPy's."""

    kernel: Any
    blocks: int
    threads: int
    arguments: tuple


class Code(NamedTuple):
    """A kernel's machine code and what the assembler says of a thread and a block."""

    cubin: bytes
    registers: int
    shared: int


class _Array(np.ndarray):
    """Memory of the device that is not there."""

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.ctypes.data, False)}

    def copy_to_device(self, x, stream=0):
        self[...] = x

    def copy_to_host(self, out, stream=0):
        out[...] = self


def _on_device(x, stream=0):
    return np.array(x).view(_Array)


def _empty(size, dtype, stream=0):
    return np.zeros(size, dtype).view(_Array)


@contextmanager
def launching(launch):
    """Within this, `launch` gets every kernel, its blocks, threads and arguments, and nothing needs a device."""
    from relpos_np.kernels._cuda import device

    context = SimpleNamespace(device=SimpleNamespace(id=0))
    capable = SimpleNamespace(compute_capability=CAPABILITY)
    fake = SimpleNamespace(
        to_device=_on_device,
        device_array=_empty,
        current_context=lambda: context,
        get_current_device=lambda: capable,
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(device, "module", lambda: fake))
        for name, module in list(sys.modules.items()):
            if name.startswith("relpos_np.kernels._cuda.") and hasattr(module, "launch"):
                stack.enter_context(patch.object(module, "launch", launch))
        yield


def _load():
    """Import every module that launches, so that `launching` finds it."""
    from relpos_np.kernels._cuda import backplan, decode, elementwise, plan, product, rotate, shift, sinks  # noqa: F401


_load()


def _plain(x):
    """An argument with arrays as NumPy has them."""
    if isinstance(x, tuple):
        parts = map(_plain, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x.view(np.ndarray) if isinstance(x, np.ndarray) else x


def _kind(x):
    """Numba's type of an argument."""
    from numba import types
    from numba.np.numpy_support import from_dtype

    if isinstance(x, tuple):
        found = [_kind(part) for part in x]
        if not hasattr(x, "_fields"):
            return types.Tuple(found)
        same = len(set(found)) == 1
        return types.NamedUniTuple(found[0], len(found), type(x)) if same else types.NamedTuple(found, type(x))
    if isinstance(x, np.ndarray):
        return types.Array(from_dtype(x.dtype), 1, "C")
    return from_dtype(x.dtype) if isinstance(x, np.generic) else types.int64


def kinds(launch):
    """Numba's types of a launch's arguments."""
    return tuple(_kind(_plain(x)) for x in launch.arguments)


def compiled(launch):
    """The machine code of a launch's kernel for an H100."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba import cuda, types
    from numba.cuda import dispatcher

    with patch.object(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=CAPABILITY)):
        text, _ = cuda.compile(
            *(launch.kernel.py_func, types.void(*kinds(launch))),
            device=False,
            abi="numba",
            cc=CAPABILITY,
            output="ptx",
        )
    ptx = text if isinstance(text, str) else text.decode()
    options = LinkerOptions(arch="sm_{}{}".format(*CAPABILITY), verbose=True, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    cubin = linker.link("cubin").code
    said = linker.get_info_log() + linker.get_error_log()
    registers, shared = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes smem", said)
    return Code(bytes(cubin), int(registers[1]), int(shared[1]) if shared else 0)


def parameters(arguments, memory):
    """The bytes that a launch passes, as Numba lays arguments out; arrays get addresses in `memory`."""
    packed, known = bytearray(), {}

    def number(letter, value):
        size = struct.calcsize(letter)
        packed.extend(bytes(-len(packed) % size))
        packed.extend(struct.pack("<" + letter, value))

    def put(x):
        if isinstance(x, tuple):
            for part in x:
                put(part)
        elif isinstance(x, np.ndarray):
            key = x.__array_interface__["data"][0], x.nbytes
            if key not in known:
                known[key] = memory.add(x)
            for value in (0, 0, x.size, x.itemsize, known[key], x.size, x.itemsize):
                number("q", value)
        elif isinstance(x, np.float32 | np.float64):
            number("f" if x.itemsize == 4 else "d", float(x))
        else:
            number("q", int(x))

    for argument in map(_plain, arguments):
        put(argument)
    return bytes(packed)
