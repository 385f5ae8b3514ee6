"""The CUDA backend without a GPU: its tests in Numba's simulator, and what is said where there is neither."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp

HERE = Path(__file__).parent


def test_in_the_simulator():
    """In a process of its own: Numba chooses between simulator and device when it is imported."""
    pytest.importorskip("numba")
    command = [sys.executable, "-m", "pytest", str(HERE / "cuda"), "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@pytest.fixture
def no_device():
    if "cuda" in rp.backend.available()[0]:
        pytest.skip("here is a GPU, or the simulator")


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    "call",
    [
        rp.attention,
        lambda q, k, v, backend: rp.attention_vjp(q, k, v, grad_out=v, backend=backend),
        lambda q, k, v, backend: rp.rel_shift(q, backend=backend),
    ],
)
def test_without_a_gpu_the_error_names_the_remedy(call, rng):
    q, k, v = rng.standard_normal((3, 2, 4, 4))
    with pytest.raises(rp.RelposImportError) as caught:
        call(q, k, v, backend="cuda")
    for words in ('pip install "relpos-np[cuda]"', "CUDA 13.0", "NUMBA_ENABLE_CUDASIM=1", "backend='numba'"):
        assert words in str(caught.value)
    assert rp.backend.available()[1]["cuda"] == str(caught.value)
    # The choice itself is valid, and nothing else is run in its stead.
    with rp.use_backend("cuda"), pytest.raises(rp.RelposImportError):
        call(q, k, v, backend=None)
    assert np.isfinite(rp.logits(q, k, backend="cuda")).all()
