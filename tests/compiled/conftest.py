"""CUDA kernels compiled without a GPU: these tests run where the extra `cuda` is installed and are left out elsewhere.

RELPOS_COMPILED=required makes it an error that it is not installed. Numba's simulator must be off.
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest

_MISSING = [name for name in ("numba_cuda", "nvidia") if importlib.util.find_spec(name) is None]
if _MISSING and os.environ.get("RELPOS_COMPILED") == "required":
    raise pytest.UsageError(
        f"nothing can be compiled for CUDA: {', '.join(_MISSING)} missing; install the extra `cuda`"
    )
collect_ignore_glob = ["test_*.py"] if _MISSING else []


@pytest.fixture(scope="session", autouse=True)
def no_device():
    """Compile as for a device that is not there: numba.cuda asks only for its compute capability."""
    from numba.cuda import dispatcher

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
        yield
