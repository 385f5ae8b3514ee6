"""Tests that a GPU runs with sizes that the simulator could not bear; the simulator runs them small.

RELPOS_GPU=required turns "there is no GPU" from a skip into a failure.
"""

import os

import pytest

import relpos_np as rp


@pytest.fixture(scope="session")
def simulated():
    """Whether this is Numba's simulator."""
    from relpos_np.kernels._cuda.launch.device import simulated

    return simulated()


@pytest.fixture(autouse=True)
def gpu():
    """Skip, or fail, in the driver's own words where there is no GPU."""
    required = os.environ.get("RELPOS_GPU") == "required"
    if reason := rp.backend.available()[1].get("cuda"):
        (pytest.fail if required else pytest.skip)(reason)
    from relpos_np.kernels._cuda.launch.device import simulated

    if required and simulated():
        pytest.fail("RELPOS_GPU=required, and this is the simulator")
