"""What the parity tests share: one comparison per backend, with tolerances derived from machine epsilon."""

import importlib.util

import numpy as np
import pytest

import relpos_np as rp


def largest_score(q, k, scale, scores):
    """How large the terms of a score get before they cancel: rounding is relative to them, not to the score."""
    group = q.shape[-3] // k.shape[-3]
    products = np.abs(q) @ np.swapaxes(np.abs(np.repeat(k, group, axis=-3)), -1, -2)
    finite = np.abs(scores[np.isfinite(scores)])
    return scale * products.max(initial=0.0) + finite.max(initial=0.0)


@pytest.fixture(params=["numpy", "numba"])
def agrees(request):
    """``agrees(expected, q, k, v, position=..., **options)``: assert that the peer's float64 answer is ours too.

    ``position`` is a function of the dtype that builds the scheme, so that its tables are as precise as q, k and v.
    Backend "numpy" runs in float64 and must be within 1e-12; backend "numba" runs in float32, and must be within
    8 eps (1 + largest score) max|v|: one eps for each rounded input, a few for the sums.
    """
    backend = request.param
    if backend == "numba":
        pytest.importorskip("numba")
    dtype = {"numpy": np.float64, "numba": np.float32}[backend]

    def compare(expected, q, k, v, *, position=None, mask=None, scale=None, largest_value=0.0, **options):
        expected = np.asarray(expected, dtype=np.float64)
        assert np.isfinite(expected).all()
        if mask is not None and mask.dtype != bool:
            mask = mask.astype(dtype)
        inputs = [np.asarray(array, dtype=dtype) for array in (q, k, v)]
        scheme = None if position is None else position(dtype)
        got = rp.attention(*inputs, position=scheme, mask=mask, scale=scale, backend=backend, **options)
        assert got.dtype == dtype
        assert got.shape == expected.shape
        tolerance = 1e-12
        if dtype == np.float32:
            true_scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
            scheme = None if position is None else position(np.float64)
            scores = rp.logits(q, k, position=scheme, scale=scale, offset=options.get("offset"), backend="numpy")
            size = np.abs(v).max() + largest_value
            tolerance = 8 * np.finfo(dtype).eps * (1 + largest_score(q, k, true_scale, scores)) * size
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)

    compare.backend = backend
    compare.dtype = dtype
    return compare


@pytest.fixture
def rng():
    """The same numbers in every test."""
    return np.random.default_rng(20260117)


@pytest.fixture(autouse=True)
def few_threads_and_fixed_seed():
    """PyTorch on one thread (the arrays are tiny), its random weights repeatable, no gradients."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20260117)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
