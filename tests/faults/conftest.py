"""Fault tests run on every backend of the machine, CUDA's simulator included (NUMBA_ENABLE_CUDASIM=1)."""

import pytest

import relpos_np as rp

BACKENDS = rp.backend.available()[0]


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend in turn; `-k cuda` chooses the device's."""
    return request.param
