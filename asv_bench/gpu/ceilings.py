"""What the device can do at most, measured in the same run: copies, FMA, a float32 matrix product, a launch."""

from __future__ import annotations

import statistics
import time

import numpy as np

from . import device
from .with_torch import copy, full_precision

NAMES = ("copy", "fma", "gemm", "launch")


def summary(times):
    """Median and minimum."""
    return {"ms_median": statistics.median(times), "ms_min": min(times), "calls": len(times)}


def timed(call, count):
    """The same of so many calls, after a first one."""
    call()
    return summary(device.times_ms([call] * count))


def bandwidth(copy_once, moved, tiny):
    """What a copy takes, and the bytes that it reads and writes per second."""
    found = timed(copy_once, 2 if tiny else 20)
    return found | {"bytes": moved, "gbs": moved / found["ms_median"] / 1e6, "gbs_best": moved / found["ms_min"] / 1e6}


def copies(tiny):
    """Bytes that are read and written per second when one array is copied to another."""
    size = 1 << 10 if tiny else 1 << 28
    moved = 2 * 4 * size
    found = {"numba.cuda, device to device": bandwidth(copy((size,), 2)[0], moved, tiny)}
    torch, reason = device.torch_on_device()
    if torch is None:
        return found | {"torch, copy_": {"status": "missing", "reason": reason}}
    given = device.as_tensor(np.ones(size, np.float32))
    taken = torch.empty_like(given)
    return found | {"torch, copy_": bandwidth(lambda: taken.copy_(given), moved, tiny)}


def fma(tiny):
    """Float32 operations per second of FMA instructions on registers."""
    from . import loops

    threads = 32 if tiny else 256
    blocks = 1 if tiny else 8 * device.cuda().get_current_device().MULTIPROCESSOR_COUNT
    turns = 1 if tiny else 4096
    out = device.cuda().device_array(blocks * threads, np.float32)
    arguments = out, turns, np.float32(0.9999), np.float32(0.125)

    def call():
        loops.multiply_add[blocks, threads](*arguments)

    found = timed(call, 1 if tiny else 20)
    if not np.isfinite(out.copy_to_host()).all():
        raise RuntimeError("the loop's numbers are not finite")
    work = 2 * loops.CHAINS * loops.STEPS * turns * blocks * threads
    found |= {"operations": work, "tflops": work / found["ms_median"] / 1e9}
    return {"numba.cuda, FMA on registers": found | {"tflops_best": work / found["ms_min"] / 1e9}}


def gemm(tiny):
    """A square product in float32, by torch or else by cupy; with torch also in TF32, on tensor cores."""
    size = 8 if tiny else 8192
    found = {}
    torch, reason = device.torch_on_device()
    if torch is not None:
        full_precision()
        x = device.as_tensor(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32))
        found["torch.matmul, float32"] = _product(lambda: x @ x, size, tiny)
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            found["torch.matmul, TF32"] = _product(lambda: x @ x, size, tiny)
        finally:
            full_precision()
        return found
    try:
        import cupy
    except ImportError as error:
        return {"float32 product": {"status": "missing", "reason": f"{reason}; cupy cannot be imported: {error}"}}
    x = cupy.asarray(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32))
    return {"cupy.matmul, float32": _product(lambda: x @ x, size, tiny)}


def _product(call, size, tiny):
    found = timed(call, 2 if tiny else 8)
    work = 2 * size**3
    return found | {"operations": work, "tflops": work / found["ms_median"] / 1e9}


def launch(tiny):
    """Microseconds of the host per launch through numba.cuda, with one array and with ten."""
    from . import loops

    arrays = [device.cuda().device_array(1, np.float32) for _ in range(10)]
    count = 2 if tiny else 2000
    found = {}
    for name, kernel, given in (
        ("numba.cuda, one array", loops.nothing, arrays[:1]),
        ("numba.cuda, ten arrays", loops.nothing_of_ten, arrays),
    ):
        configured = kernel[1, 32]
        configured(*given)
        device.cuda().synchronize()
        started = time.perf_counter()
        for _ in range(count):
            configured(*given)
        host = time.perf_counter() - started
        device.cuda().synchronize()
        found[name] = {"us_host": host / count * 1e6, "us_done": (time.perf_counter() - started) / count * 1e6}
    return found


def measure(name, tiny):
    """One of NAMES."""
    return {"copy": copies, "fma": fma, "gemm": gemm, "launch": launch}[name](tiny)
