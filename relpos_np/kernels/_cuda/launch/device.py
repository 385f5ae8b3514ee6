"""The one place that knows whether numba.cuda runs on a device, in the simulator or not at all."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from relpos_np.errors import RelposError, RelposImportError, RelposMemoryError
from relpos_np.types import Array

REMEDY = (
    'install the compiler with `pip install "relpos-np[cuda]"` on a machine with an NVIDIA GPU and a driver for '
    "CUDA 13.0 or later, set NUMBA_ENABLE_CUDASIM=1 before Python starts to try it in Numba's slow simulator, or use "
    "backend='numba'"
)
# Options of `cuda.jit` that the simulator does not know.
DEVICE_ONLY = ("forceinline", "launch_bounds", "lineinfo", "max_registers")

# The simulator runs one kernel at a time, and a launch changes a setting of Numba's.
_lock = threading.RLock()
# What gives up memory that calls share.
_shared_memory: list[Callable[[], None]] = []


def on_release(give_up: Callable[[], None]) -> None:
    """Have a function called when memory is to be given back to the driver."""
    _shared_memory.append(give_up)


@cache
def compiler() -> Any:
    """`numba.cuda`, which compiles without a GPU too, or an error that names the remedy."""
    try:
        cuda = importlib.import_module("numba.cuda")
    except ImportError as error:
        raise RelposImportError(f"backend 'cuda' cannot be imported ({error}); {REMEDY}") from error
    if simulated():
        _guard_simulator()
    return cuda


@cache
def module() -> Any:
    """`numba.cuda` where it can run kernels, or an error that names the remedy."""
    cuda = compiler()
    if not cuda.is_available():
        raise RelposImportError(f"backend 'cuda' finds no usable GPU ({_reason(cuda)}); {REMEDY}")
    return cuda


def _guard_simulator() -> None:
    """Make shared arrays of the simulator safe, and let them take an alignment.

    The simulator looks up a shared array and then makes a missing one; in between, a second thread may do the same.
    """
    shared = importlib.import_module("numba.cuda.simulator.kernelapi").FakeCUDAShared
    numpy_support = importlib.import_module("numba.np.numpy_support")
    making = threading.Lock()

    def array(self: Any, shape: Any, kind: Any, alignment: int | None = None) -> Array:  # noqa: ARG001
        # One array for each line of the source, as in the simulator itself.
        caller = sys._getframe(1)
        line = caller.f_code, caller.f_lineno
        with making:
            if line not in self._allocations:
                self._allocations[line] = np.empty(shape, numpy_support.as_dtype(kind))
            found: Array = self._allocations[line]
        return found

    shared.array = array


def _reason(cuda: Any) -> str:
    """The driver's own words, on one line."""
    error = cuda.cuda_error()
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return " ".join(lines).rstrip(".:") or "the compiler library NVVM is missing"


def available() -> bool:
    """Whether kernels can be launched, if only in the simulator."""
    try:
        module()
    except RelposImportError:
        return False
    return True


def simulated() -> bool:
    """Whether kernels run in Numba's simulator: in Python, one interpreter thread per thread."""
    return bool(importlib.import_module("numba").config.ENABLE_CUDASIM)


def jit(**options: Any) -> Callable[[Any], Any]:
    """`cuda.jit`, without the options that the simulator lacks."""
    if simulated():
        options = {name: value for name, value in options.items() if name not in DEVICE_ONLY}
    decorator: Callable[[Any], Any] = compiler().jit(**options)
    return decorator


def inline(function: Any) -> Any:
    """A function that kernels call: itself in the simulator, always inlined on a device."""
    if simulated():
        return function
    return compiler().jit(device=True, forceinline=True)(function)


class _Current(threading.local):
    """The stream of a thread's call: what Numba takes for one, and its address, as DLPack has it."""

    stream: Any = 0
    pointer = 1


_current = _Current()


@contextmanager
def on(pointer: int) -> Iterator[None]:
    """Order launches, copies and new arrays of this thread by a stream, given by its address.

    The address 1 is the legacy default stream, 2 that of the thread, as in DLPack.
    """
    before = _current.stream, _current.pointer
    # The simulator has no streams of others.
    _current.stream = pointer if simulated() else module().external_stream(pointer)
    _current.pointer = pointer
    try:
        yield
    finally:
        _current.stream, _current.pointer = before


def current_stream() -> int:
    """The address of the current stream."""
    return _current.pointer


def follow(later: int, earlier: int) -> None:
    """Let one stream wait for the present work of another, without waiting here."""
    if later == earlier or simulated():
        return
    cuda = module()
    event = cuda.event(timing=False)
    event.record(cuda.external_stream(earlier))
    event.wait(cuda.external_stream(later))


# Errors after which the context is unusable: every later call of the process gets the same one.
LOST = {
    *("ASSERT", "CONTAINED", "CONTEXT_IS_DESTROYED", "ECC_UNCORRECTABLE", "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR"),
    *("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED"),
    *("LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS", "NVLINK_UNCORRECTABLE", "TENSOR_MEMORY_LEAK"),
}


@cache
def _driver_errors() -> tuple[type[Exception], ...]:
    """The errors that carry the driver's codes: Numba's for memory and copies, cuda.core's for launches."""
    found: list[type[Exception]] = [importlib.import_module("numba.cuda.cudadrv.driver").CudaAPIError]
    with suppress(ImportError, AttributeError):
        found.append(importlib.import_module("cuda.core._utils.cuda_utils").CUDAError)
    return tuple(found)


def release() -> None:
    """Give back to the driver memory that calls share, and that of unused arrays that Numba still holds."""
    for give_up in _shared_memory:
        give_up()
    if not simulated():
        module().current_context().deallocations.clear()


@contextmanager
def tidied() -> Iterator[None]:
    """Give back the memory of a call that ran out of it."""
    try:
        yield
    except RelposMemoryError as error:
        # Tracebacks keep the arrays of every function they passed.
        for failure in (error, error.__cause__):
            if failure is not None:
                traceback.clear_frames(failure.__traceback__)
        release()
        raise


def attempt(what: str, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do something on the device; if memory runs out, give back what is unused and try once more.

    `what` is for the error, such as "an array of 64 bytes". `action` is no closure: a traceback would keep what it
    refers to. A RelposMemoryError says that there is no memory, a RelposError what else the driver reports.
    """
    for last in (False, True):
        try:
            return action(*args, **options)
        except _driver_errors() as error:
            words = " ".join(str(error).split())
            code = re.search(r"CUDA_ERROR_(\w+)", words)
            name = code[1] if code else ""
            if name == "OUT_OF_MEMORY" and not last:
                release()
                continue
            if name == "OUT_OF_MEMORY":
                raise RelposMemoryError(f"backend 'cuda': the device has no memory for {what} ({words})") from error
            if name in LOST:
                raise RelposError(
                    f"backend 'cuda': a kernel of this process failed on the device ({words}); its context is lost, "
                    "and only a new process can use the device again"
                ) from error
            raise RelposError(f"backend 'cuda': the driver reports an error for {what} ({words})") from error
    return None


def launch(kernel: Any, blocks: int, threads: int, *args: Any) -> None:
    """Run a kernel on a line of blocks, in the order of the current stream."""
    # numba-cuda has its own configuration.
    config = importlib.import_module("numba" if simulated() else "numba.cuda.dispatcher").config
    with _lock:
        # Numba warns of calls too small to fill the device.
        before, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            attempt(f"a kernel of {blocks} blocks", kernel[blocks, threads, _current.stream], *args)
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


def upload(x: Array) -> Any:
    """A copy of a flat array on the device, of at least one element, since empty arrays have no address."""
    if not x.size:
        return empty(1, x.dtype)
    return attempt(f"a copy of an array of {x.nbytes} bytes", module().to_device, x, stream=_current.stream)


def upload_all(*arrays: Array) -> list[Any]:
    """Copies of several flat arrays on the device, made by one transfer."""
    starts, size = [], 0
    for x in arrays:
        starts.append(size)
        # At least one element each, aligned for every kind of load.
        size += -(-max(x.nbytes, x.itemsize) // 16) * 16
    packed = np.zeros(size, np.uint8)
    for start, x in zip(starts, arrays, strict=True):
        packed[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    flat = upload(packed)
    return [
        flat[start : start + max(x.nbytes, x.itemsize)].view(x.dtype) for start, x in zip(starts, arrays, strict=True)
    ]


def write(x: Any, values: Any, size: int) -> None:
    """Overwrite the first `size` elements of a flat array on the device, from there or from the host."""
    if size:
        what = f"a copy of {size * x.dtype.itemsize} bytes to the device"
        attempt(what, x[:size].copy_to_device, values, stream=_current.stream)


def empty(size: int, dtype: Any) -> Any:
    """An uninitialised flat array on the device."""
    size, dtype = max(size, 1), np.dtype(dtype)
    what = f"an array of {size * dtype.itemsize} bytes"
    return attempt(what, module().device_array, size, dtype, stream=_current.stream)


def download(x: Any, out: Array) -> None:
    """Copy a flat array from the device into a C-contiguous one, and wait for that."""
    attempt(f"a copy of {out.nbytes} bytes to the host", _download, x, out.reshape(-1))


def _download(x: Any, out: Array) -> None:
    stream = _current.stream
    x.copy_to_host(out, stream=stream)
    if stream and not simulated():
        stream.synchronize()
