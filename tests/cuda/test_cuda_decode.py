"""The CUDA kernel for few queries: against the formulas, and against the general kernel in the same calls."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._dense import from_terms
from relpos_np.kernels import _cuda
from relpos_np.kernels._cuda.forward_pass import decode
from relpos_np.kernels._cuda.launch.device import upload
from tests.cuda.terms import every_kind, in_float64

# In the simulator NumPy warns of the infinities and NaN that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

EPS = {dtype: float(np.finfo(dtype).eps) for dtype in ("float32", "float64")}
# (batch, heads, key heads, queries, keys, head size, value channels)
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 4, 2, 1, 33, 8, 4),
    (1, 2, 1, 7, 65, 5, 33),
    (1, 1, 1, 2, 65, 40, 8),
    (2, 2, 2, 4, 7, 3, 2),
]


@pytest.fixture
def blocks(monkeypatch):
    """The blocks that the kernel is run with; ranges are short, so that 65 keys have several."""
    found = []
    run = decode.run
    monkeypatch.setattr(decode, "run", lambda block, *args: (found.append(block), run(block, *args)))
    monkeypatch.setattr(decode, "RANGE", 32)
    return found


@pytest.fixture
def generally(monkeypatch):
    """Call something with the general kernel."""

    def call(function, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(decode, "MOST_ROWS", 0)
            return function(*args, **options)

    return call


def operands(rng, batch=1, heads=2, kv_heads=1, q_len=1, k_len=65, dim=4, v_dim=3):
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    return [rng.standard_normal((batch, *shape)) for shape in shapes]


def options(rng, shape):
    """One set of arguments for each way of excluding keys, and for each kind of term."""
    b, h, _, l_q, l_k, d, _ = shape
    return {
        "plain": {},
        "causal": {"causal": True, "offset": l_k - l_q},
        "window": {"window": (20, 3), "offset": l_k // 2},
        "window of whole tiles": {"window": (40, None), "offset": l_k - l_q},
        "beyond the keys": {"window": (2, 0), "offset": l_k + 5},
        "lengths": {"key_lengths": np.arange(b) * l_k // 2},
        "bool mask": {"mask": rng.random((b, 1, l_q, l_k)) < 0.5, "scale": 0.3},
        "bool mask of each head": {"mask": rng.random((h, l_q, l_k)) < 0.5},
        "padding": {"mask": np.arange(l_k) >= l_k // 3, "causal": True, "offset": 3},
        "float mask": {"mask": np.where(rng.random((h, 1, l_k)) < 0.8, rng.standard_normal((h, 1, l_k)), -np.inf)},
        "row mask": {"mask": rng.random((l_q, 1)) < 0.5},
        "dilated": {"rule": rp.Dilated(3)},
        "chunks": {"rule": rp.Chunked(11, left=1), "offset": l_k // 2},
        "prefixes": {"rule": rp.Prefix(np.arange(b) * l_k // 2), "offset": l_k // 3},
        "cap": {"softcap": 1.5, "mask": rng.standard_normal((h, l_q, l_k))},
        "strip": {"position": rp.T5(rng.standard_normal((32, h))), "offset": 9},
        "key terms": {"position": rp.ALiBi(rng.random(h) / 10, form="key"), "offset": 3},
        "query terms": {"position": rp.Shaw(rng.standard_normal((9, d)))},
    }


def compare(q, k, v, generally=None, terms=200, **chosen):
    """The kernel, the formulas and, if there is something to call it with, the general kernel."""
    found = rp.attention(q, k, v, backend="cuda", return_lse=True, **chosen)
    others = [rp.attention(q, k, v, backend="numpy", return_lse=True, **chosen)]
    if generally:
        others.append(generally(rp.attention, q, k, v, backend="cuda", return_lse=True, **chosen))
    # Scores below 10, sums of at most 65 products of standard normal numbers.
    for other in others:
        for a, b in zip(found, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=terms * EPS[q.dtype.name])
    return found


@pytest.mark.parametrize("name", list(options(np.random.default_rng(0), SHAPES[0])))
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 2, 1, 1, 33, 8, 4), "float32"), ((1, 2, 1, 3, 65, 5, 3), "float64")], ids=str
)
def test_every_option(shape, dtype, name, blocks, rng):
    chosen = options(rng, shape)[name]
    for key, x in chosen.items():
        if isinstance(x, np.ndarray) and x.dtype == float:
            chosen[key] = x.astype(dtype)
    if "position" in chosen and dtype == "float32":
        chosen["position"] = options_in_single(chosen["position"])
    out, lse = compare(*(x.astype(dtype) for x in operands(rng, *shape)), **chosen)
    assert len(blocks) == 1
    # A query without keys has exactly 0.
    assert not out[np.isneginf(lse)].any()


def options_in_single(position):
    """The same scheme with arrays in float32."""
    for name in ("table", "keys", "slopes"):
        x = getattr(position, name, None)
        if isinstance(x, np.ndarray):
            setattr(position, name, x.astype(np.float32))
    return position


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, blocks, generally, rng):
    """Also loads of one element and of 16 bytes."""
    compare(*(x.astype(dtype) for x in operands(rng, *shape)), generally)
    assert [block.rows for block in blocks] == [1 << (shape[1] // shape[2] * shape[3] - 1).bit_length()]


@pytest.mark.parametrize(("kind", "dtype"), [("distances", "float32"), ("pairs", "float64")])
def test_terms_of_every_kind(kind, dtype, blocks, generally):
    """But those of values, which it leaves to the general kernel."""
    (q, k, v), terms, _ = every_kind(np.random.default_rng(3), (1, 2), 2, 1, 3, 40, (4, 4), kind, dtype)
    terms.values = ()
    problem, _, _ = check.problem(q, k, v, causal=True, offset=36)
    wide, _, _ = check.problem(*(x.astype(np.float64) for x in (q, k, v)), causal=True, offset=36)
    expected = from_terms.attention(wide, in_float64(terms))
    for call in (lambda f, *args: f(*args), generally):
        found = [np.full(shape, np.nan, dtype) for shape in (problem.out_shape, problem.out_shape[:-1])]
        call(_cuda.attention, problem, terms, *found)
        # A score is a sum of fewer than 40 products and reaches 20; outputs are means of numbers below 4.
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=4 * 40 * EPS[dtype])
    assert len(blocks) == 1


def test_operands_that_repeat(blocks, rng):
    q, k, v = (x.reshape(2, 1, *x.shape[1:]) for x in operands(rng, 2, 2, 1, 2, 9))
    compare(np.broadcast_to(q, (2, 2, *q.shape[2:])), k[:1], np.broadcast_to(v[1, 0, :, :, :1], (1, 9, 3)))
    steps = np.lib.stride_tricks.as_strided(k[0, 0], (1, 9, 4), (8, 8, 8))
    compare(q[0, 0], steps, v[0, 0])
    assert len(blocks) == 2


@pytest.mark.parametrize("dim", [4, 3], ids=["16 bytes", "one by one"])
@pytest.mark.parametrize("how", ["length", "window"])
def test_keys_behind_the_last_are_not_read(how, dim, monkeypatch, rng):
    """The simulator refuses to read behind the end of an array."""
    q, k, v = operands(rng, 1, 2, 1, 2, 40, dim, dim)
    chosen = {"key_lengths": 34} if how == "length" else {"window": (30, 2), "offset": 30}
    expected = rp.attention(q, k, v, backend="numpy", **chosen)
    run = decode.run

    def shortened(block, given, *args):
        assert given.k.size == given.v.size == 40 * dim
        k, v = (upload(x.copy_to_host()[: 34 * dim]) for x in (given.k, given.v))
        run(block, given._replace(k=k, v=v), *args)

    monkeypatch.setattr(decode, "run", shortened)
    found = rp.attention(q, k, v, backend="cuda", **chosen)
    np.testing.assert_allclose(found, expected, rtol=0, atol=200 * EPS["float64"])
    chosen = {"key_lengths": 35} if how == "length" else {"window": (30, 3), "offset": 30}
    with pytest.raises((IndexError, ValueError)):
        rp.attention(q, k, v, backend="cuda", **chosen)


def test_large_scores_and_late_maxima(blocks, generally, rng):
    """The maximum grows from one range of keys to the next, and in each."""
    q, k, v = operands(rng, k_len=70, q_len=2)
    k *= np.linspace(0, 100, 70)[:, None]
    # Scores reach some hundreds, and so do their rounding errors in units of eps.
    _, lse = compare(q, k, v, generally, terms=5000)
    assert np.abs(lse).max() > 50
    assert len(blocks) == 1


def test_one_range_and_several_agree(monkeypatch, rng):
    q, k, v = operands(rng, 1, 2, 1, 1, 65)
    found = []
    for size in (32, 64, 1000):
        monkeypatch.setattr(decode, "RANGE", size)
        found.append(rp.attention(q, k, v, backend="cuda", return_lse=True))
    for out, lse in found[1:]:
        np.testing.assert_allclose(out, found[0][0], rtol=0, atol=200 * EPS["float64"])
        np.testing.assert_allclose(lse, found[0][1], rtol=0, atol=200 * EPS["float64"])


@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 65, 8, 16), (1, 1, 1, 3, 33, 5, 3)], ids=["16 bytes", "one by one"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision(dtype, shape, blocks, rng):
    q, k, v = (x.astype(dtype) for x in operands(rng, *shape))
    out, lse = rp.attention(q, k, v, backend="cuda", return_lse=True, causal=True, offset=shape[4] - 2)
    expected, expected_lse = rp.attention(
        *(x.astype(np.float64) for x in (q, k, v)), backend="numpy", return_lse=True, causal=True, offset=shape[4] - 2
    )
    assert len(blocks) == 1
    eps = float(ml_dtypes.finfo(dtype).eps)
    # Arithmetic is in float32; results are rounded once.
    for found, wanted in ((out, expected), (lse, expected_lse)):
        rounding = eps if found.dtype == dtype else 0.0
        np.testing.assert_allclose(found.astype(float), wanted, rtol=rounding, atol=200 * EPS["float32"])


@pytest.mark.parametrize("what", ["values", "dropout", "rows", "only the log-sum-exp"])
def test_what_it_leaves_to_the_general_kernel(what, blocks, rng):
    heads = 17 if what == "rows" else 2
    chosen = {
        "values": {"position": rp.Shaw(*rng.standard_normal((2, 3, 4)))},
        "dropout": {"dropout": 0.5, "rng": np.random.default_rng(1)},
    }.get(what, {})
    q, k, v = operands(rng, heads=heads, k_len=9, v_dim=0 if what == "only the log-sum-exp" else 4)
    found = rp.attention(q, k, v, backend="cuda", return_lse=True, **chosen)
    if what == "dropout":
        chosen["rng"] = np.random.default_rng(1)
    expected = rp.attention(q, k, v, backend="numpy", return_lse=True, **chosen)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=100 * EPS["float64"])
    assert len(blocks) == (what == "only the log-sum-exp")


def test_ranges_and_blocks(monkeypatch):
    assert [decode.ranges(n) for n in (1, 256, 257, 1 << 15, 1 << 20)] == [1, 1, 2, 128, 128]
    call = decode.Call(**dict.fromkeys(decode.Call._fields, 0))._replace(keep=-1, k_group=4, v_group=4, q_len=4)
    monkeypatch.setattr(decode, "simulated", lambda: False)
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    for v_dim, depth, dtype, threads in (
        *((64, 64, single, 64), (65, 128, single, 128), (128, 256, single, 128), (128, 128, double, 64)),
        *((128, 64, double, 128), (64, 128, double, 64)),
    ):
        assert decode.block_for(call._replace(v_dim=v_dim), depth, dtype).threads == threads
    # Too many queries for what shared memory holds.
    assert decode.block_for(call, 1024, single) is None
    assert decode.block_for(call._replace(k_group=1, v_group=1, q_len=1), 1024, single).rows == 1
