"""What the parity tests share: comparisons with tolerances derived from machine epsilon, and what was called."""

import importlib.util
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._runtime import precision
from tests.every import remade

HERE = Path(__file__).parent
# What says where a token is stays as precise as it is given: it is no trained array.
PLACES = ("frequencies", "positions", "key_positions", "boxes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Everything in this folder compares with other packages; the sweep of all model types has a mark of its own."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.parity)


def largest_score(q, k, scale, scores):
    """How large the terms of a score get before they cancel: rounding is relative to them, not to the score."""
    group = q.shape[-3] // k.shape[-3]
    products = np.abs(q) @ np.swapaxes(np.abs(np.repeat(k, group, axis=-3)), -1, -2)
    finite = np.abs(scores[np.isfinite(scores)])
    return scale * products.max(initial=0.0) + finite.max(initial=0.0)


def cast(position, dtype):
    """A scheme, or several, with trained arrays of a dtype."""
    if position is None:
        return None
    if isinstance(position, tuple):
        return tuple(cast(one, dtype) for one in position)
    return remade(position, lambda name, x: x if name.rpartition(".")[2] in PLACES else x.astype(dtype))


@pytest.fixture(params=["numpy", "numba"])
def agrees(request):
    """``agrees(expected, q, k, v, position=..., **options)``: assert that the peer's float64 answer is ours too.

    ``position`` is a scheme in float64; its tables are made as precise as q, k and v.
    Backend "numpy" runs in float64 and must be within 1e-12; backend "numba" runs in float32, and must be within
    8 eps (1 + largest score) max|v|: one eps for each rounded input, a few for the sums.
    """
    backend = request.param
    if backend == "numba":
        pytest.importorskip("numba")
    dtype = {"numpy": np.float64, "numba": np.float32}[backend]

    def compare(expected, q, k, v, *, position=None, mask=None, scale=None, largest_value=0.0, **options):
        expected, q, k, v = (np.asarray(array, dtype=np.float64) for array in (expected, q, k, v))
        assert np.isfinite(expected).all()
        if mask is not None and mask.dtype != bool:
            mask = mask.astype(dtype)
        inputs = [array.astype(dtype) for array in (q, k, v)]
        scheme = cast(position, dtype)
        got = rp.attention(*inputs, position=scheme, mask=mask, scale=scale, backend=backend, **options)
        assert got.dtype == dtype
        assert got.shape == expected.shape
        tolerance = 1e-12
        if dtype == np.float32:
            true_scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
            scores = rp.logits(q, k, position=position, scale=scale, offset=options.get("offset"), backend="numpy")
            size = np.abs(v).max() + largest_value
            tolerance = 8 * np.finfo(dtype).eps * (1 + largest_score(q, k, true_scale, scores)) * size
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)

    compare.backend = backend
    return compare


@dataclass
class Call:
    """One call of this library's attention, or of its gradients."""

    function: str
    operands: tuple
    options: dict
    precision: str | None
    thread: str


@pytest.fixture
def calls(monkeypatch):
    """Calls of `rp.attention` and `rp.attention_vjp`, in their order; nobody has chosen a precision before."""
    monkeypatch.delenv("RELPOS_PRECISION", raising=False)
    seen = []

    def recorded(name):
        function = getattr(rp, name)

        def record(*operands, **options):
            chosen = precision.chosen(options.get("precision"))
            seen.append(Call(name, operands, options, chosen, threading.current_thread().name))
            return function(*operands, **options)

        monkeypatch.setattr(rp, name, record)

    recorded("attention")
    recorded("attention_vjp")
    return seen


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


@pytest.fixture
def with_gradients(few_threads_and_fixed_seed):
    """PyTorch's autograd records."""
    import torch

    with torch.enable_grad():
        yield
