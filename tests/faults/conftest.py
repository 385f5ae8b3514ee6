"""Fault tests run on every backend of the machine, CUDA's simulator included (NUMBA_ENABLE_CUDASIM=1)."""

import sys

import pytest

import relpos_np as rp
from tests.faults.calls import SIMULATED

BACKENDS = rp.backend.available()[0]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn; `-k cuda` chooses the device's."""
    return request.param


def pytest_itemcollected(item):
    """In CUDA's simulator NumPy warns of the infinities and NaN that faults are made of."""
    if getattr(item, "callspec", None) and item.callspec.params.get("backend") == "cuda":
        item.add_marker(pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by):RuntimeWarning"))


@pytest.fixture(scope="session", autouse=True)
def quick_switches():
    """The simulator's threads wait for each other all the time: let Python switch between them sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4 if SIMULATED else before)
    yield
    sys.setswitchinterval(before)
