"""The CUDA backend's tests: they run where there is a GPU, and in Numba's simulator (NUMBA_ENABLE_CUDASIM=1)."""

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import relpos_np as rp

# tests/test_cuda.py runs them in the simulator, which must be chosen before Numba is imported.
collect_ignore_glob = [] if "cuda" in rp.backend.available()[0] else ["test_*.py"]
# Tensors of torch are never in the simulator's memory.
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" or importlib.util.find_spec("torch") is None:
    collect_ignore_glob.append("test_cuda_torch.py")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """New arrays on the device hold NaN, so that a number that is never written is seen."""
    # Whoever allocates must have been imported by now.
    from relpos_np.kernels._cuda.forward_pass import shift  # noqa: F401
    from relpos_np.kernels._cuda.launch import device
    from relpos_np.kernels._cuda.plan import backward, forward  # noqa: F401
    from relpos_np.kernels._cuda.simd import elementwise, rotate  # noqa: F401

    empty = device.empty

    def poisoned(size, dtype):
        x = empty(size, dtype)
        bits = np.full(x.size * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        x.copy_to_device(bits.view(dtype))
        return x

    for name, user in list(sys.modules.items()):
        if name.startswith("relpos_np.kernels._cuda.") and getattr(user, "empty", None) is empty:
            monkeypatch.setattr(user, "empty", poisoned)


@pytest.fixture
def transfers(monkeypatch):
    """What is copied to the device, and what back; in the simulator."""
    from relpos_np.kernels._cuda.launch import shared_copies

    fake = importlib.import_module("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray
    cuda = importlib.import_module("numba.cuda")
    # What earlier tests sent is not sent again.
    shared_copies.forget()
    up, down = [], []
    to_device, copy_to_device, copy_to_host = cuda.to_device, fake.copy_to_device, fake.copy_to_host

    def recorded_up(x, *rest, **options):
        up.append(np.array(x))
        return to_device(x, *rest, **options)

    def recorded_copy(self, x, *rest, **options):
        # From the device to the device; and poison.
        if not isinstance(x, fake) and not (np.asarray(x).view(np.uint8) == 0xFF).all():
            up.append(np.array(x))
        return copy_to_device(self, x, *rest, **options)

    def recorded_down(self, *rest, **options):
        down.append(self.shape)
        return copy_to_host(self, *rest, **options)

    monkeypatch.setattr(cuda, "to_device", recorded_up)
    monkeypatch.setattr(fake, "copy_to_device", recorded_copy)
    monkeypatch.setattr(fake, "copy_to_host", recorded_down)
    return SimpleNamespace(up=up, down=down)
