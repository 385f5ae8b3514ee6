"""What other packages' arrays need without those packages: a bias of every pair, and threads that are shared."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.interop.bias import DenseBias


@pytest.mark.parametrize("shape", [(5, 7), (4, 1, 7), (2, 4, 5, 7), (2, 1, 1, 7), (1,)])
@pytest.mark.parametrize("backend", ["numpy", "terms", "numba"])
def test_a_dense_bias_is_a_mask_with_a_gradient(shape, backend):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 5, 8))
    k, v = rng.standard_normal((2, 2, 2, 7, 8))
    bias = rng.standard_normal(shape)
    if bias.size > 1:
        bias[..., 2] = -np.inf
    out = rp.attention(q, k, v, position=DenseBias(bias), backend=backend)
    np.testing.assert_allclose(out, rp.attention(q, k, v, mask=bias, backend="numpy"), rtol=0, atol=1e-13)
    grad = rng.standard_normal(out.shape)
    found = rp.attention_vjp(q, k, v, grad_out=grad, position=DenseBias(bias), backend=backend).position["bias"]
    assert found.shape == shape
    # Along one direction by central differences.
    way, step = np.where(np.isfinite(bias), rng.standard_normal(shape), 0), 1e-5
    ends = [rp.attention(q, k, v, mask=np.where(way, bias + s * way, bias), backend="numpy") for s in (step, -step)]
    expected = ((ends[0] - ends[1]) * grad).sum() / (2 * step)
    np.testing.assert_allclose((found * way).sum(), expected, rtol=1e-7, atol=1e-9)


def test_a_dense_bias_that_does_not_fit_is_refused():
    q = np.zeros((2, 4, 5, 8))
    for shape in [(3, 5, 5), (6, 5), (1, 2, 4, 5, 5)]:
        with pytest.raises(rp.RelposValueError, match=r"mask: shape .* does not broadcast"):
            rp.attention(q, q, q, position=DenseBias(np.zeros(shape)))


@pytest.fixture
def other_pool(monkeypatch):
    """Kernels on the threads of the GNU OpenMP library of this process, entered as PyTorch's is."""
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    from relpos_np.kernels._numba.launch.openmp import Pool

    maps = Path("/proc/self/maps")
    launch._pool()
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line} if maps.exists() else ()
    if not paths:
        pytest.skip("there is no GNU OpenMP library in this process")
    pool = Pool(min(paths))
    calls = []

    def run(*arguments):
        calls.append(arguments[-1])
        Pool.run(pool, *arguments)

    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(launch, "_shared", lambda: pool)
    return calls


def test_kernels_on_another_pool_give_the_same_bits(monkeypatch, other_pool):
    launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 300, 32)).astype(np.float32)
    table = rng.standard_normal((32, 4)).astype(np.float32)
    found = rp.attention(q, k, v, position=rp.T5(table))
    grads = rp.attention_vjp(q, k, v, position=rp.T5(table), grad_out=q)
    if launch.available_threads() > 1:
        assert other_pool
        assert max(other_pool) > 1
    monkeypatch.setattr(launch, "_shared", lambda: None)
    assert np.array_equal(found, rp.attention(q, k, v, position=rp.T5(table)))
    again = rp.attention_vjp(q, k, v, position=rp.T5(table), grad_out=q)
    assert np.array_equal(grads.position["table"], again.position["table"])
    assert np.array_equal(grads.k, again.k)
    testing.assert_matches(found, rp.attention(*(x.astype(float) for x in (q, k, v)), position=rp.T5(table)))


def test_numba_s_own_threads_are_used_without_torch():
    code = (
        "import sys; import numpy as np, relpos_np as rp\n"
        "from relpos_np.kernels._numba.launch import launcher as launch\n"
        "x = np.zeros((1, 2, 64, 8), np.float32); rp.attention(x, x, x)\n"
        "assert 'torch' not in sys.modules and launch._shared() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
