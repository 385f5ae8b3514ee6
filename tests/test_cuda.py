"""The CUDA backend without a GPU: its tests in Numba's simulator, and what is said where there is neither."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp

HERE = Path(__file__).parent


# Processes that share all tests: the simulator keeps one processor busy.
SHARDS = 2
# What every run of the tests includes, some seconds; the marker `simulator` stands for all of it.
QUICK = (
    "test_interpreter_of_the_instruction or (test_what_is_multiplied and None and not float32) or "
    "(test_masks and bool and not 35) or (test_rel_shift and float32) or test_gradients_of_empty_axes or "
    "((test_every_scheme or test_gradients_of_every_scheme) and None and t5) or "
    "(test_outputs and float16 and sinks and heads)"
)


def simulate(folder, *options, shards=SHARDS):
    """Run tests in processes of their own: Numba chooses between simulator and device when it is imported."""
    pytest.importorskip("numba")
    command = [sys.executable, "-m", "pytest", str(HERE / folder), "-q", "-p", "no:cacheprovider", "-p", "tests.shard"]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen(
            [*command, *options],
            cwd=HERE.parent,
            env=environment | {"RELPOS_GPU_SHARD": f"{part}/{shards}"},
            **pipes,
        )
        for part in range(shards)
    ]
    try:
        said = [process.communicate(timeout=1200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, words in zip(processes, said, strict=True):
        assert process.returncode == 0, words[-7000:]
        assert " passed" in words
        assert " skipped" not in words


def test_a_choice_of_tests_in_the_simulator():
    simulate("cuda", "-k", QUICK, shards=1)


@pytest.mark.simulator
def test_in_the_simulator():
    simulate("cuda", "--durations=5")


@pytest.mark.simulator
def test_faults_in_the_simulator():
    """Every row's tests on the device's backend."""
    simulate("faults", "-k", "cuda", "--durations=5")


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
    ids=["attention", "attention_vjp", "rel_shift"],
)
def test_row_45_without_a_gpu_the_error_names_the_remedy(call, rng):
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
