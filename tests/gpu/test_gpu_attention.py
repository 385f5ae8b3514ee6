"""Sizes that no tile divides and sizes that fill a GPU, runs that must repeat, and arrays of CuPy.

Tensors of torch and arrays of Numba: tests/cuda/test_cuda_torch.py and test_cuda_resident.py.
"""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing import tolerance

# Other libraries warn of this and that when they find a GPU.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def operands(rng, q_len, k_len, dim, *, heads=2, batch=2, dtype="float32"):
    """Queries, keys and values."""
    shapes = [(batch, heads, n, dim) for n in (q_len, k_len, k_len)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def schemes(rng, heads, dim, k_len, dtype="float32"):
    """One of each kind that takes a way of its own through the kernels."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "none": {},
        "T5": {"position": rp.T5(normal(32, heads))},
        "T5, causal": {"position": rp.T5(normal(32, heads), bidirectional=False), "causal": True},
        "Shaw": {"position": rp.Shaw(normal(17, dim), normal(17, dim))},
        "Transformer-XL": {
            "position": rp.TransformerXL(normal(heads, dim), normal(heads, dim), normal(k_len, heads, dim)),
            "causal": True,
        },
        "window": {"window": (100, 3)},
    }


KINDS = ("none", "T5", "T5, causal", "Shaw", "Transformer-XL", "window")


def wide(value):
    """A scheme or an array in float64."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    arrays = {name: x for name, x in vars(value).items() if isinstance(x, np.ndarray)}
    found = object.__new__(type(value))
    vars(found).update(vars(value) | {name: x.astype(np.float64) for name, x in arrays.items() if x.dtype.kind == "f"})
    return found


def allowed(v, dim, lse):
    """What rounding explains: scores lie below the largest log-sum-exp, and seldom far below 0 where they count."""
    return float(
        tolerance(v.dtype, logit_bound=max(12.0, float(np.abs(lse).max())), depth=dim, magnitude=np.abs(v).max())
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ((1023, 1024, 64), (9, 10, 4)),
        ((1024, 1024, 128), (8, 8, 8)),
        ((65, 1023, 64), (3, 35, 4)),
        ((1, 1025, 80), (1, 33, 5)),
    ],
    ids=str,
)
def test_sizes(kind, sizes, small, simulated, rng):
    """As right as rounding allows, and the same bits on every run."""
    q_len, k_len, dim = small if simulated else sizes
    q, k, v = operands(rng, q_len, k_len, dim)
    options = schemes(rng, 2, dim, k_len)[kind]
    out, lse = rp.attention(q, k, v, backend="cuda", return_lse=True, **options)
    exact = {name: wide(x) if name == "position" else x for name, x in options.items()}
    wanted, wanted_lse = rp.attention(*map(wide, (q, k, v)), backend="numpy", return_lse=True, **exact)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=allowed(v, dim, wanted_lse))
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=float(tolerance("float32", logit_bound=15.0, depth=dim)))
    for _ in range(1 if simulated else 4):
        again = rp.attention(q, k, v, backend="cuda", **options)
        np.testing.assert_array_equal(again.view(np.uint32), out.view(np.uint32))


@pytest.mark.parametrize("dim", [1, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_head_dims(dim, dtype, simulated, rng):
    if simulated and dim > 40:
        pytest.skip("slow in the simulator")
    q_len, k_len, heads = (5, 9, 1) if simulated else (127, 129, 4)
    q, k, v = operands(rng, q_len, k_len, dim, heads=heads, batch=1, dtype=dtype)
    out = rp.attention(q, k, v, backend="cuda")
    wanted, lse = rp.attention(*map(wide, (q, k, v)), backend="numpy", return_lse=True)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=allowed(v, dim, lse))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_matrix_units(kind, dtype, dim, simulated, rng, monkeypatch):
    """As right as without them, but for weights of float16; and twice the same bits."""
    if simulated and (dim > 64 or dtype == "float32"):
        pytest.skip("slow in the simulator")
    q_len, k_len, dim = (17, 20, 8) if simulated else (1023, 1025, dim)
    q, k, v = operands(rng, q_len, k_len, dim, dtype=dtype)
    options = schemes(rng, 2, dim, k_len)[kind]
    monkeypatch.setenv("RELPOS_CUDA_UNIT", "mma")
    first, second = (rp.attention(q, k, v, backend="cuda", **options) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))
    monkeypatch.setenv("RELPOS_CUDA_UNIT", "fma")
    other = rp.attention(q, k, v, backend="cuda", **options)
    exact = {name: wide(x) if name == "position" else x for name, x in options.items()}
    wanted, lse = rp.attention(*map(wide, (q, k, v)), backend="numpy", return_lse=True, **exact)
    bound = allowed(v, dim, lse) + (np.abs(v.astype(np.float64)).max() * 2.0**-11 if dtype == "float16" else 0)
    np.testing.assert_allclose(first, wanted, rtol=0, atol=bound)
    np.testing.assert_allclose(first.astype(np.float64), other, rtol=0, atol=2 * bound)


def gradients(*args, **options):
    """Gradients by name."""
    found = rp.attention_vjp(*args, backend="cuda", **options)
    return {"q": found.q, "k": found.k, "v": found.v} | (found.position or {})


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, simulated, rng):
    q_len, k_len, dim = (9, 10, 4) if simulated else (513, 640, 64)
    q, k, v = operands(rng, q_len, k_len, dim)
    grad = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype("float32")
    options = schemes(rng, 2, dim, k_len)[kind]
    first, second = (gradients(q, k, v, grad_out=grad, **options) for _ in range(2))
    exact = {name: wide(x) if name == "position" else x for name, x in options.items()}
    wanted = rp.attention_vjp(*map(wide, (q, k, v)), grad_out=wide(grad), backend="numpy", **exact)
    wanted = {"q": wanted.q, "k": wanted.k, "v": wanted.v} | (wanted.position or {})
    assert first.keys() == wanted.keys()
    # Scores are computed twice, and sums are as long as the sequence.
    error = 2 * float(tolerance("float32", logit_bound=12.0, depth=k_len))
    for name, x in first.items():
        np.testing.assert_array_equal(x.view(np.uint32), second[name].view(np.uint32), err_msg=name)
        np.testing.assert_allclose(x, wanted[name], rtol=0, atol=error * np.abs(wanted[name]).max(), err_msg=name)


@pytest.mark.parametrize("variant", ["conformer", "transformer_xl", "xlnet"])
def test_rel_shift_of_many_rows(variant, simulated, rng):
    rows, k_len = (5, 7) if simulated else (1023, 1025)
    columns = {"conformer": rows + k_len - 1, "xlnet": rows + k_len}.get(variant, k_len)
    x = rng.standard_normal((3, rows, columns)).astype("float32")
    found = rp.rel_shift(x, variant=variant, backend="cuda")
    np.testing.assert_array_equal(found, rp.rel_shift(x, variant=variant, backend="numpy"))


def test_cupy_arrays(simulated, rng):
    if simulated:
        pytest.skip("the simulator has no arrays on a device")
    cupy = pytest.importorskip("cupy")
    arrays = operands(rng, 200, 300, 64)
    found = rp.attention(*map(cupy.asarray, arrays), backend="cuda")
    assert not isinstance(found, np.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(found)), rp.attention(*arrays, backend="cuda"))
