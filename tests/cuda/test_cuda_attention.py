"""The CUDA forward kernel against the formulas and against the dense evaluator of terms."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np._contract import check
from relpos_np._contract.terms import QueryTerm, Terms, Toeplitz
from relpos_np._dense import from_terms
from relpos_np.kernels import _cuda
from relpos_np.kernels._cuda.forward_pass import decode
from relpos_np.kernels._cuda.plan import forward
from relpos_np.kernels._cuda.simd.tile import Tiling
from tests.cuda.terms import every_kind, in_float64
from tests.every import ATTENTION

# In the simulator NumPy warns of the infinities and NaN that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float32", "float64")}


@pytest.fixture(autouse=True)
def _general(monkeypatch):
    """Few queries have a kernel of their own, with tests of its own."""
    monkeypatch.setattr(decode, "MOST_ROWS", 0)


def operands(rng, heads=2, kv_heads=1, q_len=7, k_len=9, dim=5, v_dim=3, batch=()):
    """Queries, keys and values."""
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    return [rng.standard_normal((*batch, *shape)) for shape in shapes]


def both(q, k, v, **options):
    """Answers of the kernel and of the formulas; both must be of the same kind everywhere."""
    found, expected = (rp.attention(q, k, v, backend=b, return_lse=True, **options) for b in ("cuda", "numpy"))
    # Scores below 10, sums of at most 65 products of standard normal numbers.
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=200 * EPS[q.dtype.name])
    return found


@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    # Each variant, and each scheme once more in the other precision: the simulator takes a second for one.
    [(n, v, "float64") for n, v in ATTENTION] + [(n, None, "float32") for n in dict(ATTENTION)],
)
def test_every_scheme(name, variant, dtype):
    one = testing.example(name, dtype=dtype, variant=variant, size="tiny")
    out, lse = one.run("cuda")
    assert out.dtype == lse.dtype == dtype
    assert one.error(out, lse) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["distances", "pairs", "per batch item"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "k_len", "dim", "v_dim"),
    [
        ((), 1, 1, 1, 1, 1, 1),
        ((), 1, 1, 3, 5, 65, 130),
        ((2,), 2, 1, 7, 33, 17, 33),
        ((1, 2), 2, 2, 33, 7, 3, 5),
        ((2,), 1, 1, 1, 65, 8, 4),
    ],
)
def test_terms_of_every_kind(batch, heads, kv_heads, q_len, k_len, dim, v_dim, kind, dtype):
    rng = np.random.default_rng(q_len + k_len)
    (q, k, v), terms, _ = every_kind(rng, batch, heads, kv_heads, q_len, k_len, (dim, v_dim), kind, dtype)
    problem, _, _ = check.problem(q, k, v, causal=False, offset=2)
    out, lse = (np.full(shape, np.nan, dtype) for shape in (problem.out_shape, problem.out_shape[:-1]))
    _cuda.attention(problem, terms, out, lse)
    wide, _, _ = check.problem(*(x.astype(np.float64) for x in (q, k, v)), causal=False, offset=2)
    expected, expected_lse = from_terms.attention(wide, in_float64(terms))
    # A score is a sum of fewer than 40 products and reaches 20; outputs are means of numbers below 8.
    np.testing.assert_allclose(out, expected, rtol=0, atol=8 * 40 * EPS[dtype])
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=8 * 40 * EPS[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("q_len", "k_len", "depth"), [(1, 1, 1), (7, 33, 17), (33, 7, 3), (34, 35, 16)])
def test_products_with_relative_positions_made_by_the_kernel(q_len, k_len, depth, dtype, monkeypatch):
    """The same answer, bit for bit or nearly, whether the kernel makes the products or reads them."""
    monkeypatch.setattr(forward, "FEW_ROWS", 0)
    rng = np.random.default_rng(depth)
    q, k, v = (x.astype(dtype) for x in operands(rng, 2, 1, q_len, k_len, 5, 3, (2,)))
    problem, _, _ = check.problem(q, k, v, causal=False, offset=1)

    def term(heads, rows, size):
        lookup = rng.integers(-1, rows, q_len + k_len - 1, dtype=np.int32)
        query = rng.standard_normal((2, 2, q_len, size)).astype(dtype)
        return QueryTerm(query, rng.standard_normal((heads, rows, size)).astype(dtype), Toeplitz(lookup, rows))

    terms = Terms(queries=(term(2, q_len + k_len, depth), term(1, 3, 2)))
    answers = []
    for fused in (True, False):
        out, lse = (np.full(shape, np.nan, dtype) for shape in (problem.out_shape, problem.out_shape[:-1]))
        planner = forward.Forward(problem, terms, (problem.q, problem.k, problem.v), fused=fused)
        assert planner.call().n_skews == (2 if fused else 0)
        forward.Forward(problem, terms, (problem.q, problem.k, problem.v), fused=fused).run(out, lse)
        answers.append((out, lse))
    # Scores are sums of at most 24 products and reach 20; outputs are means of numbers below 4.
    for found, expected in zip(*answers, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=8 * 24 * EPS[dtype])


@pytest.mark.parametrize("variant", rp.SCHEMES["transformer_xl"].variants)
def test_transformer_xl_in_the_kernel(variant, monkeypatch):
    monkeypatch.setattr(forward, "FEW_ROWS", 0)
    one = testing.example("transformer_xl", dtype="float64", variant=variant, size="tiny")
    assert one.error(*one.run("cuda")) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_of_the_device(dtype, rng, monkeypatch):
    """Elsewhere in the simulator tiles are smaller than the device's."""
    monkeypatch.setattr(forward, "tiling", lambda dtype, *_: Tiling(dtype, 64 if dtype.itemsize == 4 else 128, 64))
    monkeypatch.setattr(forward, "FEW_ROWS", 0)
    q, k, v = (x.astype(dtype) for x in operands(rng, 1, 1, 65, 70, 17, 33))
    rows = rng.standard_normal((134, 1, 17)).astype(dtype)
    position = (rp.ALiBi(np.array([0.1])), rp.Shaw(rows[:, 0][:9], np.zeros((9, 33), dtype), outside="zero"))
    both(q, k, v, position=position, causal=True)
    q, k, v = q[..., :3, :], k[..., :3, :], v[..., :3, :]
    both(q, k, v)


OPTIONS = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "causal window, shifted": {"causal": True, "window": 4, "offset": 5},
    "beyond the keys": {"window": (2, 0), "offset": 40},
    "before the keys": {"causal": True, "offset": -4},
    "scale": {"scale": 0.1},
    "lengths": {"key_lengths": np.array([0, 20])},
}


@pytest.mark.parametrize("lengths", [(7, 33), (33, 33), (40, 7)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bands_and_lengths(options, lengths, rng):
    q_len, k_len = lengths
    if "key_lengths" in options:
        options = {"key_lengths": np.minimum(options["key_lengths"], k_len), "offset": k_len - q_len}
    found = both(*operands(rng, 2, 1, q_len, k_len, batch=(2,)), position=rp.ALiBi(np.array([0.5, 0.1])), **options)
    for out, lse in zip(found[0].reshape(-1, 3), found[1].reshape(-1), strict=True):
        # A query without keys has exactly 0.
        assert np.isfinite(lse) or not out.any()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 2, 7, 35), (7, 35), (2, 1, 1, 35), (2, 7, 1)], ids=str)
def test_masks(shape, kind, rng):
    there = rng.random(shape) < 0.6
    there[..., :2, :] &= shape[-2] == 1
    mask = there if kind == "bool" else np.where(there, rng.standard_normal(shape), -np.inf)
    q, k, v = operands(rng, 2, 1, 7, 35, batch=(2,))
    _, lse = both(q, k, v, mask=mask)
    assert np.isneginf(lse).any() == (shape[-2] != 1)
    both(q, k, v, mask=np.broadcast_to(mask, (2, 2, 7, 35)), causal=True)


@pytest.mark.parametrize("variant", ["clip", "zero"])
def test_dropout_drops_what_the_reference_drops(variant, rng):
    position = rp.Shaw(*rng.standard_normal((2, 7, 5)), outside=variant)
    found = [
        rp.attention(*operands(np.random.default_rng(1), v_dim=5), position=position, backend=b, **options)
        for b in ("cuda", "numpy")
        for options in [{"dropout": 0.4, "rng": np.random.default_rng(2)}]
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=200 * EPS["float64"])


def test_large_scores_and_late_maxima(rng):
    """The maximum grows from one tile of keys to the next: sums, outputs and bins are scaled."""
    q, k, v = operands(rng, 1, 1, 3, 70, v_dim=5)
    k *= np.linspace(0, 100, 70)[:, None]
    found, expected = (
        rp.attention(q, k, v, position=rp.Shaw(*np.full((2, 9, 5), 0.3)), backend=b, return_lse=True)
        for b in ("cuda", "numpy")
    )
    assert np.abs(expected[1]).max() > 50
    # Scores reach some hundreds, and so do their rounding errors in units of eps.
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=5000 * EPS["float64"])
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=5000 * EPS["float64"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_and_a_given_array(dtype, rng):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (x.astype(dtype) for x in operands(rng))
    out = np.full((2, 7, 3), np.nan, dtype)
    assert rp.attention(q, k, v, backend="cuda", out=out) is out
    expected = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="numpy")
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=40 * EPS["float32"] + 4 * eps)
    strided = np.full((2, 7, 6), np.nan, dtype)[..., ::2]
    rp.attention(q, k, v, backend="cuda", out=strided)
    np.testing.assert_array_equal(strided, out)


def test_broadcast_operands(rng):
    q, k, v = operands(rng, 2, 2, batch=(2, 3))
    both(q, k[:, :1], v[0])
    both(np.broadcast_to(q[0, 0, 0, 0], (2, 7, 5)), np.broadcast_to(k[0, 0, 0, 0, 0], (2, 9, 5)), v[0, 0])
