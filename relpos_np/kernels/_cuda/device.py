"""The one place that knows whether numba.cuda runs on a device, in the simulator or not at all."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from relpos_np.errors import RelposImportError
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
    """Let the simulator's threads share arrays safely, and with the arguments that a device takes.

    The simulator looks up a shared array and makes a missing one in two steps, between which a second thread would
    make an array of its own; and it knows nothing of alignment.
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


def launch(kernel: Any, blocks: int, threads: int, *args: Any) -> None:
    """Run a kernel on a line of blocks."""
    # numba-cuda has a configuration of its own, apart from Numba's.
    config = importlib.import_module("numba" if simulated() else "numba.cuda.dispatcher").config
    with _lock:
        # A call may be small; Numba would warn that it does not fill the device.
        before, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
        try:
            kernel[blocks, threads](*args)
        finally:
            config.CUDA_LOW_OCCUPANCY_WARNINGS = before


def upload(x: Array) -> Any:
    """A copy of a flat array on the device; one element at least, since empty arrays have no address there."""
    return module().to_device(x) if x.size else empty(1, x.dtype)


def empty(size: int, dtype: Any) -> Any:
    """A flat array on the device, with anything in it."""
    return module().device_array(max(size, 1), dtype)


def download(x: Any, out: Array) -> None:
    """Copy a flat array from the device into a C-contiguous one."""
    x.copy_to_host(out.reshape(-1))
