"""The CUDA backend's tests: they run where there is a GPU, and in Numba's simulator (NUMBA_ENABLE_CUDASIM=1)."""

import sys

import numpy as np
import pytest

import relpos_np as rp

# tests/test_cuda.py runs them in the simulator, which must be chosen before Numba is imported.
collect_ignore_glob = [] if "cuda" in rp.backend.available()[0] else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def quick_switches():
    """The simulator's threads wait for each other all the time: let Python switch between them sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """New arrays on the device hold NaN, so that a number that is never written is seen."""
    from relpos_np.kernels._cuda import decode, plan, product, shift
    from relpos_np.kernels._cuda.device import empty

    def poisoned(size, dtype):
        x = empty(size, dtype)
        bits = np.full(x.size * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        x.copy_to_device(bits.view(dtype))
        return x

    for user in (decode, plan, product, shift):
        monkeypatch.setattr(user, "empty", poisoned)
