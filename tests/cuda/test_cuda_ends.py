"""Masks, tables and products up to the ends of the dtype: CUDA kernels compute in units of the scores."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.forward_pass import decode, unit
from tests.test_ends import agree, masked

# In the simulator NumPy warns where a score minus the largest overflows; its exponential is 0.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

DTYPES = [np.float32, np.float64]
SIZES = [(1, 40), (7, 9), (33, 35)]


@pytest.fixture(params=["", "mma"])
def units(request, monkeypatch):
    """With and without matrix units, which few queries do not use."""
    if request.param:
        monkeypatch.setenv(unit.VARIABLE, request.param)
        monkeypatch.setattr(decode, "MOST_ROWS", 0)
    return request.param


def both(q, k, v, **call):
    """Outputs and log-sum-exps of the kernels and of the formulas."""
    return [rp.attention(q, k, v, **call, return_lse=True, backend=name) for name in ("cuda", "numpy")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
def test_masks(dtype, q_len, k_len, units, rng):
    q, grad = rng.standard_normal((2, 2, q_len, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, k_len, 8)).astype(dtype)
    call = {"mask": masked(rng, dtype, q_len, k_len), "position": rp.ALiBi()}
    agree(*both(q, k, v, **call), dtype)
    if not units:
        grads = [rp.attention_vjp(q, k, v, grad_out=grad, **call, backend=name) for name in ("cuda", "numpy")]
        agree([grads[0].q, grads[0].k, grads[0].v], [grads[1].q, grads[1].k, grads[1].v], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_and_products(dtype, units, rng):
    """Products and sums of powers of two are exact in whatever order: scores of 0.84 of the largest number."""
    most = np.finfo(dtype).max
    q, k, v = rng.standard_normal((3, 2, 33, 8)).astype(dtype)
    agree(
        *both(q, k, v, position=rp.T5(rng.choice(np.array([-most, -0.8 * most, -0.75 * most], dtype), (32, 2)))), dtype
    )
    large = dtype(2.0) ** (np.finfo(dtype).maxexp // 2)
    for scale in (1.0, -1.0):
        agree(*both(np.full_like(q, large / 16), np.full_like(k, 1.6875 * large), v, scale=scale), dtype)
