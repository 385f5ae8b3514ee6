"""What all tests share: hypothesis profiles, a kernel cache of their own, and the backends."""

import gc
import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import relpos_np as rp
from tests import fibers

# Examples are arrays made from a drawn seed: generating one is slow at times, and a first call compiles.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=10, **_COMMON)
# The same draws each time: a change fails for what it changes. Whoever runs the tests elsewhere draws new ones.
settings.register_profile("ci", max_examples=10, derandomize=True, print_blob=True, **_COMMON)
# Planted bugs are looked for with more draws, the same each time; the night draws as many anew.
settings.register_profile("planted", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("night", max_examples=30, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))

# Tests of a run that needs all kernels.
MANY_TESTS = 5000
WORKERS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}

fibers.install()
# Two threads exist even on a machine with one processor, so that parallel paths always run.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, os.cpu_count() or 1)))


def pytest_xdist_auto_num_workers(config):
    """Several processes for the whole suite; one for chosen files, and where tests fill the machine themselves."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if not whole or not ("not stress" in config.option.markexpr or config.option.markexpr == "simulator"):
        return 0
    # Inherited. Threads that wait must not take the processors of other workers, and memory that is freed and asked for
    # again 10,000 times should not be cleared by the system each time.
    for name, value in WORKERS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Tests start a hundred processes, each of which would compile the package's sources again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return min(os.cpu_count() or 1, 4)


def pytest_collection_finish():
    """What there is by now is not looked through for cycles again and again: it is there to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory, request):
    """A kernel cache for tests alone, unless one is named from outside.

    It is kept with what pytest keeps: kernels are known by their source, so that only what has changed is compiled.
    `pytest --cache-clear` begins anew.
    """
    worker = getattr(request.config, "workerinput", None)
    kept = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("kernels") if kept is None else kept.mkdir("kernels")
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("RELPOS_CACHE_DIR"):
            folder.chmod(0o700)  # or what is in it would not be trusted
            patch.setenv("RELPOS_CACHE_DIR", str(folder))
        if worker and len(request.session.items) > MANY_TESTS and request.config.option.markexpr != "simulator":
            share = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
            # On a stack of its own: as deep as this one is, CPython maps and unmaps memory for many a call.
            thread = threading.Thread(target=_compile_share, args=share)
            thread.start()
            thread.join()
        yield


def _compile_share(worker, workers):
    """Compile the kernels of some dtypes, which have functions in common: otherwise each worker compiles nearly all."""
    kernels = rp.backend.kernels("numba").KERNELS
    dtypes = sorted({name.split()[-1] for name in kernels})[worker::workers]
    # Backwards: few tests need half precision.
    for dtype in reversed(dtypes):
        for name, kernel in kernels.items():
            if name.split()[-1] == dtype:
                _ = kernel.address


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
