"""The forward kernel on matrix units, in the simulator through an interpreter of their instruction, and on a GPU."""

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import check
from relpos_np._dense import from_terms
from relpos_np.kernels import _cuda
from relpos_np.kernels._cuda.forward_pass import decode, matrix, unit
from relpos_np.kernels._cuda.launch import device
from relpos_np.kernels._cuda.plan import forward
from relpos_np.kernels._cuda.simd import warp
from relpos_np.kernels._cuda.simd.planes import Block, Source, tiling_for
from relpos_np.kernels._cuda.simd.tile import Tiling
from tests.cuda.terms import every_kind, in_float64
from tests.cuda.test_cuda_decode import options

# In the simulator NumPy warns of the infinities and NaN that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

EPS = 2.0**-23
# (batch, heads, key heads, queries, keys, head size, value channels): tiles that are not whole.
SHAPE = (2, 2, 1, 17, 40, 5, 3)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Errors of a product: three planes leave out 2^-23 of it, two 3 * 2^-16. One plane is compared with rounded operands.
LOST = {"highest": 2.0**-23, "high": 3 * 2.0**-16, "medium": 0.0}
# Rounding of weights, and of results, where half precision is multiplied as it is stored; and of one plane's weights.
ROUNDED = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(autouse=True)
def _by_matrix_units(monkeypatch):
    """Few queries have a kernel of their own, which does not use them."""
    monkeypatch.setenv(unit.VARIABLE, "mma")
    monkeypatch.setattr(decode, "MOST_ROWS", 0)


@pytest.fixture
def launched(monkeypatch):
    """What kernels were made of."""
    found = []
    make = matrix.attend

    def recorded(block, *rest):
        found.append(block)
        return make(block, *rest)

    monkeypatch.setattr(matrix, "attend", recorded)
    return found


def draw(rng, dtype="float32", heads=2, kv_heads=1, q_len=7, k_len=9, dim=5, v_dim=3, batch=()):
    """Queries, keys and values."""
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    return [rng.standard_normal((*batch, *shape)).astype(DTYPES[dtype]) for shape in shapes]


def exact(precision, *operands):
    """Operands in float64, as they are multiplied."""
    if precision == "medium" and operands[0].dtype == np.float32:
        operands = [x.astype(ml_dtypes.bfloat16) for x in operands]
    return [x.astype(np.float64) for x in operands]


def allowed(q, k, v, precision):
    """How far results may be off: a weight by the error of its score, all of them by their own rounding."""
    weights = ROUNDED["bfloat16" if precision == "medium" and q.dtype == np.float32 else q.dtype.name]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    dim, largest = q.shape[-1], np.abs(v).max()
    lost = LOST[precision] + dim * EPS
    # A score's error, twice as weights are divided by their sum; then products of weights and values.
    score = np.sqrt(dim) * np.abs(q).max() * np.abs(k).max() * lost
    return float(largest * (2 * score + LOST[precision] + weights + 70 * EPS)), float(score)


def both(q, k, v, precision="highest", **options):
    """Answers of the kernel and of the formulas in float64."""
    found = rp.attention(q, k, v, backend="cuda", precision=precision, return_lse=True, **options)
    expected = rp.attention(*exact(precision, q, k, v), backend="numpy", return_lse=True, **options)
    atol, score = allowed(q, k, v, precision or "highest")
    np.testing.assert_allclose(np.asarray(found[0], np.float64), expected[0], rtol=2 * ROUNDED[q.dtype.name], atol=atol)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=score + 40 * EPS)
    return found


@pytest.mark.parametrize(
    ("dtype", "precision", "half", "planes"),
    [
        ("float32", None, "bfloat16", 3),
        ("float32", "highest", "bfloat16", 3),
        ("float32", "high", "bfloat16", 2),
        ("float32", "medium", "bfloat16", 1),
        ("float16", None, "float16", 1),
        ("float16", "medium", "float16", 1),
        ("bfloat16", None, "bfloat16", 1),
        ("bfloat16", "highest", "bfloat16", 3),
    ],
)
def test_what_is_multiplied(dtype, precision, half, planes, rng, launched):
    q, k, v = draw(rng, dtype, q_len=33, k_len=40, dim=17, v_dim=9)
    both(q, k, v, precision, position=rp.ALiBi(np.array([0.5, 0.1])))
    assert [(block.half, block.planes) for block in launched] == [(half, planes)]


@pytest.mark.parametrize("value", ["", "auto", "fma"])
def test_off_unless_asked_for(value, rng, monkeypatch, launched):
    monkeypatch.setenv(unit.VARIABLE, value)
    rp.attention(*draw(rng, "bfloat16"), backend="cuda")
    assert not launched
    monkeypatch.setenv(unit.VARIABLE, "tensor")
    with pytest.raises(rp.RelposValueError, match="RELPOS_CUDA_UNIT: expected one of auto, fma, mma, found 'tensor'"):
        rp.attention(*draw(rng, "bfloat16"), backend="cuda")


def test_what_stays_on_other_units(rng, launched):
    """float64, and gradients with what their forward pass needs."""
    q, k, v = draw(rng)
    rp.attention_vjp(q, k, v, grad_out=np.ones((2, 7, 3), np.float32), backend="cuda")
    rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="cuda")
    assert not launched


def test_operands_that_a_scheme_has_turned_are_not_rounded(rng, launched):
    q, k, v = draw(rng, "bfloat16", dim=8)
    both(q, k, v, None, position=rp.Rotary())
    assert [block.planes for block in launched] == [3]


@pytest.mark.parametrize("kind", ["distances", "per batch item"])
@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("medium", ((), 1, 1, 1, 1, 1, 1)),
        ("medium", ((2,), 2, 1, 7, 33, 17, 33)),
        ("medium", ((1, 2), 2, 2, 33, 7, 3, 5)),
        ("highest", ((), 1, 1, 7, 33, 17, 33)),
    ],
    ids=str,
)
def test_terms_of_every_kind(precision, sizes, kind):
    batch, heads, kv_heads, q_len, k_len, dim, v_dim = sizes
    rng = np.random.default_rng(q_len + k_len)
    (q, k, v), terms, _ = every_kind(rng, batch, heads, kv_heads, q_len, k_len, (dim, v_dim), kind, "float32")
    problem, _, _ = check.problem(q, k, v, causal=False, offset=2, precision=precision)
    out, lse = (np.full(shape, np.nan, np.float32) for shape in (problem.out_shape, problem.out_shape[:-1]))
    _cuda.attention(problem, terms, out, lse)
    wide, _, _ = check.problem(*exact(precision, q, k, v), causal=False, offset=2)
    expected, expected_lse = from_terms.attention(wide, in_float64(terms))
    atol, score = allowed(q, k, v, precision)
    # A score is a sum of fewer than 40 further products and reaches 20; outputs are means of numbers below 8.
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol + 8 * 40 * EPS)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=score + 8 * 40 * EPS)


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_products_with_relative_positions_made_by_the_kernel(precision, monkeypatch, launched):
    monkeypatch.setattr(forward, "FEW_ROWS", 0)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((134, 1, 17)).astype(np.float32)
    q, k, v = draw(rng, heads=1, q_len=34, k_len=35, dim=17, v_dim=33)
    position = rp.Shaw(rows[:, 0][:9], np.zeros((9, 33), np.float32), outside="zero")
    found = rp.attention(q, k, v, backend="cuda", precision=precision, position=position, causal=True)
    # What is made by relative position is of the queries as they are.
    rounded, *others = exact(precision, q, k, v)
    terms = np.float64(q) - rounded
    lookup = np.clip(np.arange(35) - np.arange(34)[:, None], -4, 4) + 4
    inside = np.abs(np.arange(35) - np.arange(34)[:, None]) <= 4
    added = np.where(inside, np.take_along_axis(terms[0] @ np.float64(rows[:9, 0]).T, lookup, 1), 0) / np.sqrt(17)
    expected = rp.attention(
        *(rounded, *others),
        backend="numpy",
        position=position,
        causal=True,
        mask=added,
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=allowed(q, k, v, precision)[0] + 200 * EPS)
    assert launched[0].skewed


@pytest.mark.parametrize("name", list(options(np.random.default_rng(0), SHAPE)))
def test_every_option(name, rng):
    chosen = options(rng, SHAPE)[name]
    q, k, v = draw(rng, "float16", *SHAPE[1:], batch=SHAPE[:1])
    out, lse = both(q, k, v, None, **chosen)
    # A query without keys has exactly 0.
    assert not out[np.isneginf(lse)].any()


def test_dropout_drops_what_the_reference_drops(rng):
    q, k, v = draw(rng, q_len=33, k_len=40, v_dim=5)
    position = rp.Shaw(*rng.standard_normal((2, 7, 5)).astype(np.float32))
    found, expected = (
        rp.attention(q, k, v, position=position, backend=b, dropout=0.4, rng=np.random.default_rng(2))
        for b in ("cuda", "numpy")
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * allowed(q, k, v, "highest")[0])


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float16", None), ("float32", "highest")])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["bool", "float", "length", "window"])
def test_what_is_excluded_may_hold_anything(how, bad, dtype, precision, rng):
    """And changes no bit of anything else."""
    q, k, v = draw(rng, dtype, heads=1, q_len=5, k_len=36, v_dim=5)
    last = np.arange(36) >= 30
    options = {
        "bool": {"mask": ~last},
        "float": {"mask": np.where(last, -np.inf, 0.0).astype(np.float32)},
        "length": {"key_lengths": 30},
        "window": {"causal": True, "offset": 25},
    }[how]
    options |= {"backend": "cuda", "precision": precision}
    expected = rp.attention(q, k, v, **options)
    k[:, last], v[:, last] = bad, bad
    np.testing.assert_array_equal(rp.attention(q, k, v, **options), expected)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", None), ("float16", None), ("float32", "highest")])
def test_bad_numbers_reach_those_that_attend_them(dtype, precision, rng):
    q, k, v = draw(rng, dtype, heads=1, q_len=9)
    clean = rp.attention(q, k, v, backend="cuda", precision=precision, causal=True)
    v[0, 3, 1], v[0, 5, 0], k[0, 7, 2] = np.inf, np.nan, np.nan
    out = rp.attention(q, k, v, backend="cuda", precision=precision, causal=True)
    np.testing.assert_array_equal(out[0, :3], clean[0, :3])
    # An infinite value makes infinite results of all who attend it, and leaves other channels as they were.
    assert np.isposinf(out[0, 3:7, 1].astype(np.float32)).all()
    assert np.isnan(out[0, 5:, 0]).all()
    np.testing.assert_array_equal(out[0, 3:7, 2], clean[0, 3:7, 2])
    assert np.isnan(out[0, 7:]).all()


@pytest.mark.parametrize("large", [2.0**60, 2.0**100])
def test_numbers_that_planes_do_not_stand_for(large, rng):
    """Scores and shares of them are made of float32; those of others keep their bits."""
    q, k, v = draw(rng, heads=1, q_len=6, k_len=33, dim=4)
    q[0, :, 3] = 0
    clean = rp.attention(q, k, v, backend="cuda")
    q[0, 2, 0], k[0, 4, 3] = large, large
    found = rp.attention(q, k, v, backend="cuda")
    # Query 2 attends the key of its largest product alone.
    best = k[0, :, 0].argmax()
    np.testing.assert_array_equal(found[0, 2], v[0, best])
    np.testing.assert_allclose(np.delete(found, 2, 1), np.delete(clean, 2, 1), rtol=0, atol=8 * 33 * EPS)
    v[0, 5, 1] = large
    found = rp.attention(q, k, v, backend="cuda")
    expected = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="numpy")
    others = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(found[0, others, 1], expected[0, others, 1], rtol=200 * EPS)


@pytest.mark.parametrize(("dim", "v_dim"), [(63, 65), (65, 130), (136, 8)])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_channels_in_several_parts(dim, v_dim, precision, rng, launched):
    q, k, v = draw(rng, heads=1, q_len=3, k_len=35, dim=dim, v_dim=v_dim)
    both(q, k, v, precision)
    assert launched[0].chunks > 1 or dim < 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_loads_and_single_ones_give_the_same_bits(dtype, rng, launched, monkeypatch):
    q, k, v = draw(rng, dtype, q_len=5, k_len=37, dim=16, v_dim=16)
    first = rp.attention(q, k, v, backend="cuda")
    monkeypatch.setattr(unit, "word_of", lambda *_: 1)
    np.testing.assert_array_equal(rp.attention(q, k, v, backend="cuda"), first)
    assert [block.key.wide for block in launched] == [True, False]


def test_results_repeat_bit_by_bit(rng):
    q, k, v = draw(rng, q_len=33, k_len=40, v_dim=5)
    position = rp.Shaw(*rng.standard_normal((2, 7, 5)).astype(np.float32))
    first, second = (rp.attention(q, k, v, position=position, backend="cuda") for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_device_s_tiles(rng, monkeypatch):
    """Elsewhere in the simulator tiles are smaller than the device's."""
    sizes = Tiling(np.dtype(np.float32), 64, 64, matrix=True)
    monkeypatch.setattr(forward, "tiling_for", lambda *_, **__: sizes)
    q, k, v = draw(rng, "bfloat16", heads=1, q_len=65, k_len=70, dim=17, v_dim=33)
    both(q, k, v, None, position=rp.ALiBi(np.array([0.1])), causal=True, window=20)


@pytest.mark.skipif(not device.simulated(), reason="the interpreter stands for the instruction in the simulator")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_interpreter_of_the_instruction(half, rng):
    """Fragments as the PTX ISA lays them out, element by element."""
    left, right, total = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    pack = warp.packed(half)
    lanes = []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        a = [
            pack(left[g + 8 * (i % 2), c], left[g + 8 * (i % 2), c + 1])
            for i in range(4)
            for c in [2 * t + 8 * (i // 2)]
        ]
        b = [pack(right[r, g], right[r + 1, g]) for r in (2 * t, 2 * t + 8)]
        c = [total[g, 2 * t], total[g, 2 * t + 1], total[g + 8, 2 * t], total[g + 8, 2 * t + 1]]
        lanes.append((*c, *a, *b))
    np.testing.assert_array_equal(warp.product_of(lanes, half), left @ right + total)


@pytest.mark.parametrize("planes", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 16, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("skewed", [False, True])
def test_blocks_fit_shared_memory(depth, planes, skewed):
    """What a block may have without asking the driver for more, for every size; and no bank conflicts of rows."""
    for width in (32, 64, 128):
        for stored in DTYPES:
            source = Source(stored, True)
            # As on a device.
            sizes = tiling_for(width, planes, crowded=skewed)._replace(rows=64)
            half = stored if planes == 1 and stored != "float32" else "bfloat16"
            block = Block(sizes, half, planes, depth, width, skewed, source, source, source)
            used = 4 * 64 * (block.left_words + 68) + block.spare + 1200
            assert used <= 48 * 1024
            assert block.channels >= 16
            assert block.keys >= 16
            assert block.planes * block.channels // 2 <= 64
            assert block.planes * block.keys // 2 * block.turns <= 64
            assert block.left_words % 8 == 4
