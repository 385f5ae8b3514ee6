"""What all tests share: hypothesis profiles, a kernel cache of their own, and the backends."""

import gc
import os
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import relpos_np as rp

# Examples are arrays made from a drawn seed: generating one is slow at times, and a first call compiles.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=30, **_COMMON)
settings.register_profile("ci", max_examples=60, derandomize=True, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))

# Two threads exist even on a machine with one processor, so that parallel paths always run.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, os.cpu_count() or 1)))


def pytest_collection_finish():
    """What there is by now is not looked through for cycles again and again: it is there to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """A cold kernel cache for the session, inherited by child processes, unless one is named from outside."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("RELPOS_CACHE_DIR"):
            patch.setenv("RELPOS_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(autouse=True)
def no_choice_left_over(monkeypatch):
    """Every test starts without a chosen backend, and with all threads."""
    monkeypatch.delenv("RELPOS_BACKEND", raising=False)
    rp.set_backend(None)
    yield
    rp.set_backend(None)
    numba = sys.modules.get("numba")
    if numba is not None:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.fixture(params=rp.backend.HOST_BACKENDS)
def backend(request):
    """Each backend in turn."""
    return request.param


@pytest.fixture
def rng():
    """The same numbers in every test."""
    return np.random.default_rng(20261121)
