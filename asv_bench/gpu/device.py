"""The device, or Numba's simulator in its place: times of calls, arrays, what it is, and what the driver says."""

from __future__ import annotations

import subprocess
import time
from functools import cache

import numpy as np
from benchmarks.shapes import wide

from relpos_np.versions import of_packages

PACKAGES = (
    *("relpos-np", "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm"),
    *("nvidia-nvjitlink", "nvidia-cuda-nvrtc", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "ml_dtypes"),
)
ATTRIBUTES = (
    *("MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE", "CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH"),
    *("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "ECC_ENABLED"),
)
SMI = (
    *("name", "uuid", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.limit", "temperature.gpu", "compute_mode", "mig.mode.current"),
)


def cuda():
    """numba.cuda, or an error in the driver's words."""
    from relpos_np.kernels._cuda.device import module

    return module()


def simulated():
    """Whether this process runs Numba's simulator, whose times mean nothing."""
    from relpos_np.kernels._cuda.device import simulated

    return simulated()


def times_ms(calls):
    """The time of each call in ms, by events on the default stream; by the clock in the simulator."""
    if simulated():
        found = []
        for call in calls:
            started = time.perf_counter()
            call()
            found.append((time.perf_counter() - started) * 1e3)
        return found
    module = cuda()
    events = [(module.event(), module.event()) for _ in calls]
    for (start, end), call in zip(events, calls, strict=True):
        start.record()
        call()
        end.record()
    module.synchronize()
    return [float(start.elapsed_time(end)) for start, end in events]


@cache
def torch_on_device():
    """Torch if it is there and sees the GPU, and why not: in the simulator torch on the host stands in for it."""
    try:
        import torch
    except ImportError as error:
        return None, f"torch cannot be imported: {error}"
    if not simulated() and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU (it was built for CUDA {torch.version.cuda})"
    return torch, ""


def upload(x):
    """An array as callers hold it: a torch tensor, or numba.cuda's array; in the simulator as it is."""
    if simulated():
        return x
    torch, _ = torch_on_device()
    if torch is not None:
        return as_tensor(x)
    if x.dtype.name == "bfloat16":
        raise TypeError("without torch there are no arrays of bfloat16 on the device")
    return cuda().to_device(x)


def as_tensor(x):
    """An array as a tensor on the device; bfloat16, which torch does not take from NumPy, from its bits."""
    torch, _ = torch_on_device()
    x = np.ascontiguousarray(x)
    if x.dtype == np.uint16 or x.dtype.name == "bfloat16":
        found = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(x)
    return found.clone() if simulated() else found.to("cuda")


def download(x):
    """What a call returned as NumPy, half precision widened."""
    if isinstance(x, np.ndarray):
        return wide(x)
    if hasattr(x, "copy_to_host"):
        return wide(x.copy_to_host())
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if x.dtype.itemsize == 2 else x).numpy()
    if hasattr(x, "__cuda_array_interface__"):
        return wide(cuda().as_cuda_array(x).copy_to_host())
    return wide(np.asarray(x))


def working():
    """Whether the context still works: after an illegal access every call fails."""
    try:
        module = cuda()
        module.synchronize()
        x = np.arange(8, dtype=np.float32)
        return bool((module.to_device(x).copy_to_host() == x).all())
    except Exception:  # noqa: BLE001 - whatever it is, the process is to be replaced
        return False


def about():
    """The device, driver and CUDA versions as plain data."""
    if simulated():
        return {"device": {"name": "Numba's simulator"}, "driver": None, "cuda": None}
    from numba.cuda.cudadrv import driver

    module = cuda()
    unit = module.get_current_device()
    name = unit.name.decode() if isinstance(unit.name, bytes) else str(unit.name)
    found = {"name": name, "compute_capability": list(unit.compute_capability)}
    for attribute in ATTRIBUTES:
        try:
            found[attribute.lower()] = int(getattr(unit, attribute))
        except Exception as error:  # noqa: BLE001 - some drivers no longer know some of them
            found[attribute.lower()] = f"{type(error).__name__}: {error}"
    free, total = module.current_context().get_memory_info()
    found |= {"memory_bytes": int(total), "memory_free_bytes": int(free)}
    version = getattr(driver, "get_version", None) or driver.driver.get_version
    return {
        "device": found,
        "driver": {"cuda": ".".join(map(str, version())), "smi": smi()},
        "cuda": ".".join(map(str, module.runtime.get_version())),
    }


def smi():
    """Driver, clocks and limits of every GPU, or why nvidia-smi did not say."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"missing": f"nvidia-smi: {error}"}
    if done.returncode:
        return {"missing": f"nvidia-smi: {(done.stderr or done.stdout).strip()[:300]}"}
    lines = done.stdout.strip().splitlines()
    return {"gpus": [dict(zip(SMI, map(str.strip, line.split(",")), strict=False)) for line in lines]}


def versions():
    """Of the packages that matter; None where one is not installed."""
    import platform

    return {"python": platform.python_version(), "platform": platform.platform()} | of_packages(PACKAGES)
