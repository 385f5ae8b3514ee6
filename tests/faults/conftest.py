"""Fault tests run on every backend of the machine, CUDA's simulator included (NUMBA_ENABLE_CUDASIM=1)."""

import pytest

import relpos_np as rp
from tests.faults.calls import small

BACKENDS = rp.backend.available()[0]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn; `-k cuda` chooses the device's."""
    return request.param


def pytest_itemcollected(item):
    """In CUDA's simulator NumPy warns of the infinities and NaN that faults are made of."""
    if getattr(item, "callspec", None) and item.callspec.params.get("backend") == "cuda":
        item.add_marker(pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by):RuntimeWarning"))


def pytest_collection_modifyitems(config, items):
    """Leave out what `simulate_only` says."""

    def left_out(item):
        given = item.callspec.params if hasattr(item, "callspec") else {}
        few = getattr(getattr(item, "function", None), "simulated_values", {})
        return small(given.get("backend")) and any(given[name] not in values for name, values in few.items())

    gone = [item for item in items if left_out(item)]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]
