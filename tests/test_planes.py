"""float32 on matrix tiles, by planes of bfloat16: within the promise of float32, whatever operands hold.

These run where products are made on tiles, or emulations of them: see `test_matrix_tiles_that_this_processor_lacks`.
"""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.kernels._numba.forward_pass.attend import attend
from relpos_np.kernels._numba.plan import job
from relpos_np.kernels._numba.simd.target import TILED
from tests.sizes import BLOCK_KEYS
from tests.test_half import CALLS, alone_and_turned, call_of, draw

pytestmark = pytest.mark.skipif(not TILED, reason="products are made without tiles")
EPS = float(np.finfo(np.float32).eps)
# What a product may be off, relative to its size: each operand's third plane, and the product of their second ones.
TWO_PLANES = 3 * 2.0**-16
# Lengths around tiles, panels, blocks of queries and of keys, and what is left of them.
SHAPES = [
    (1, 2, 63, 257, 32),
    (2, 1, 65, BLOCK_KEYS + 1, 7),
    (1, 1, 2 * BLOCK_KEYS + 1, 449, 64),
    (1, 3, 30, 1000, 1),
    (1, 1, 9, 225, 65),
    (1, 2, 17, 200, 33),
]


@pytest.fixture
def without(monkeypatch):
    """Make a call of products of float32."""

    def call(*operands, **options):
        with monkeypatch.context() as patch:
            patch.setattr(job, "planes_of", lambda *_: 0)
            return rp.attention(*operands, **options)

    return call


@pytest.fixture(autouse=True)
def by_planes(monkeypatch):
    """Every call of a test asks for the kernel that the test is about; plans of other tests are not used."""
    asked = []

    class Kernels(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr(job, "ASKED", True)
    monkeypatch.setattr(job, "attend", Kernels(attend))
    monkeypatch.setattr(repeated, "form", lambda *_, **__: None)
    yield
    assert "planes" in asked


def promised(q, k, v, **options):
    """The answer in float64, Σ p|v| of each row, Σ|q||k| of the largest score, and the largest score."""
    wide = [x.astype(np.float64) for x in (q, k, v)]
    out, lse = rp.attention(*wide, return_lse=True, **options, backend="numpy")
    size = rp.attention(wide[0], wide[1], np.abs(wide[2]), **options, backend="numpy")
    s = rp.logits(wide[0], wide[1], **options, backend="numpy")
    large = np.abs(np.where(np.isinf(s), 0, s)).max()
    products = np.abs(wide[0]) @ np.abs(wide[1]).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return out, lse, size, products.max(), large


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_the_promise(shape, name, rng):
    """Three planes: 4 eps Σ p|v| (1 + max |s|), as `relpos check --promises` has it for float32; two: 3 * 2^-16."""
    q, k, v = draw(rng, shape, np.float32)
    options = call_of(rng, shape, name) | {"position": rp.T5(rng.standard_normal((32, shape[1])))}
    truth, exact, size, products, large = promised(q, k, v, **options)
    promise = 4 * EPS * (1 + large)
    for precision, bound in (("highest", 0.0), ("high", (2 * products + 1) * TWO_PLANES)):
        found, lse = rp.attention(q, k, v, precision=precision, return_lse=True, **options)
        assert (np.abs(found - truth) <= (promise + bound) * size + 1e-30).all(), precision
        ends = np.isfinite(exact)
        np.testing.assert_array_equal(np.isneginf(lse), ~ends)
        assert (np.abs(lse[ends] - exact[ends]) <= promise + bound).all(), precision


def test_two_planes_in_figures(rng):
    """Numbers around 1 in 64 channels: 2e-5 at most."""
    for shape in ((1, 4, 512, 512, 64), (1, 2, 100, 2048, 64)):
        q, k, v = draw(rng, shape, np.float32)
        truth = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="numpy")
        assert np.abs(rp.attention(q, k, v, precision="high") - truth).max() <= 2e-5
        assert np.abs(rp.attention(q, k, v) - truth).max() <= 1e-6


def one_key_each(rng, q_len, k_len):
    """A mask that leaves each query one key, and which."""
    chosen = rng.integers(0, k_len, q_len)
    return np.arange(k_len) == chosen[:, None], chosen


def test_every_product_of_planes_of_queries_and_keys(rng):
    """Scores of two channels, read from the log-sum-exp of one key: four roundings, or 3 * 2^-16 by two planes."""
    q, k, v = (rng.standard_normal((3, n, 2)).astype(np.float32) for n in (200, 600, 600))
    mask, chosen = one_key_each(rng, 200, 600)
    left, right = q.astype(np.float64), k.astype(np.float64)[:, chosen]
    score, size = (left * right).sum(axis=-1), (np.abs(left) * np.abs(right)).sum(axis=-1)
    for precision, bound in (("highest", 4 * EPS), ("high", TWO_PLANES)):
        _, lse = rp.attention(q, k, v, mask=mask, scale=1.0, precision=precision, return_lse=True)
        assert (np.abs(lse - score) <= bound * size + EPS * np.abs(score)).all(), precision


def test_every_plane_of_values(rng):
    """A probability of 1 gives a value back: all of its bits, or 16 of them by two planes."""
    q, k, v = (rng.standard_normal((3, n, d)).astype(np.float32) for n, d in ((50, 5), (300, 5), (300, 37)))
    mask, chosen = one_key_each(rng, 50, 300)
    np.testing.assert_array_equal(rp.attention(q, k, v, mask=mask), v[:, chosen])
    half = rp.attention(q, k, v, mask=mask, precision="high")
    np.testing.assert_allclose(half, v[:, chosen], rtol=2.0**-16, atol=0)


def test_every_product_of_planes_of_probabilities_and_values(rng):
    """Two keys for each query: probabilities of any bits, of which sums have few roundings."""
    q, k, v = (rng.standard_normal((3, n, d)).astype(np.float32) for n, d in ((300, 2), (300, 2), (300, 64)))
    mask = one_key_each(rng, 300, 300)[0] | one_key_each(rng, 300, 300)[0]
    for values in (np.ones_like(v), v):
        truth, _, size, products, large = promised(q, k, values, mask=mask)
        for precision, bound in (("highest", 0.0), ("high", TWO_PLANES * (2 * products + 1))):
            found = rp.attention(q, k, values, mask=mask, precision=precision)
            # An exponential, its sum, a product and the division, and the scores of two channels.
            assert (np.abs(found - truth) <= (EPS * (4 + 2 * large) + bound) * size).all(), precision


ODD = [np.nan, np.inf, -np.inf, 3.4e38, 2.0**57, 1e-20, 1e-41]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_what_planes_do_not_stand_for(kind, precision, rng, without):
    """A query, a key and a value with such a number: the answers of float32, up to what others are off."""
    q, k, v = draw(rng, (1, 2, 130, 450, 24), np.float32)
    mask = rng.random((130, 450)) < 0.6
    mask[:, 3] = mask[:, 444] = np.arange(130) % 3 == 0
    mask[:, 1], mask[17] = True, True
    for where in ("q", "k", "v", "qkv"):
        own = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
        for name, row in (("q", 17), ("k", 3), ("v", 444)):
            if name in where:
                own[name][..., row, 5] = kind
        operands = own.values()
        found = rp.attention(*operands, mask=mask, precision=precision, return_lse=True)
        exact = without(*operands, mask=mask, return_lse=True)
        for a, b in zip(found, exact, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            np.testing.assert_array_equal(a[np.isinf(b)], b[np.isinf(b)])
            ends, size = np.isfinite(b), 8 if precision == "highest" else 2000
            # What one large value shares with others is of its size.
            np.testing.assert_allclose(a[ends], b[ends], rtol=size * EPS, atol=size * EPS)


def test_scores_of_odd_queries_have_the_bits_of_float32(rng, without):
    """The log-sum-exp of a query beyond FAR is of the same products and sums, and so is that of a key."""
    q, k, v = draw(rng, (1, 1, 70, 300, 16), np.float32)
    q[..., 33, 4] = 2.0**60
    _, lse = rp.attention(q, k, v, scale=2.0**-60, return_lse=True)
    _, exact = without(q, k, v, scale=2.0**-60, return_lse=True)
    # The scale is applied first: nothing is beyond FAR.
    assert np.isfinite(lse).all()
    _, lse = rp.attention(q, k, v, return_lse=True)
    _, exact = without(q, k, v, return_lse=True)
    np.testing.assert_array_equal(lse[..., 33], exact[..., 33])


@pytest.mark.parametrize("size", [1e-41, 1e-38, 1e-30, 1e-18, 1e18, 1e30, 1e37])
def test_values_of_any_size(size, rng):
    """Relative to Σ p|v|, down to subnormal numbers, of which some bits are gone before."""
    q, k, v = draw(rng, (1, 1, 33, 260, 8), np.float32)
    v = (v * np.float32(size)).astype(np.float32)
    truth, _, total, _, large = promised(q, k, v)
    assert (np.abs(rp.attention(q, k, v) - truth) <= 4 * EPS * (1 + large) * total + 1e-44).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_queries_and_keys_of_any_size(size, rng):
    """Their products are around 1."""
    q, k, v = draw(rng, (1, 1, 33, 260, 8), np.float32)
    q, k = (q * np.float32(size)).astype(np.float32), (k / np.float32(size)).astype(np.float32)
    truth, _, total, _, large = promised(q, k, v)
    assert (np.abs(rp.attention(q, k, v) - truth) <= 4 * EPS * (1 + large) * total).all()


@pytest.mark.parametrize("kind", [np.nan, np.inf, 3.4e38, 1e-41])
def test_neither_excluded_keys_nor_other_queries_change_a_bit(kind, rng):
    q, k, v = draw(rng, (1, 2, 101, 410, 24), np.float32)
    mask = rng.random((101, 410)) < 0.7
    mask[:, 0], mask[1::2, -1], mask[:, 7] = True, False, False
    clean = rp.attention(q, k, v, mask=mask, return_lse=True)
    k[..., 7, :], v[..., 7, 0], k[..., -1, 3], v[..., -1, 2], q[..., 8, 1] = (kind,) * 5
    found = rp.attention(q, k, v, mask=mask, return_lse=True)
    others = np.arange(101) % 2 == 1
    for a, b in zip(found, clean, strict=True):
        np.testing.assert_array_equal(a[:, :, others], b[:, :, others])


def test_layouts_threads_and_neighbours_change_no_bit(rng):
    alone_and_turned(draw(rng, (3, 2, 200, 300, 24), np.float32))


def test_what_takes_the_way_of_float32(rng, without):
    """Gradients, few queries, and keys that one window holds: the same bits; float64 is never split."""
    q, k, v = draw(rng, (1, 2, 60, 200, 15), np.float32)
    rp.attention(q, k, v)
    few, window = (q[..., :4, :], k, v), (q, k[..., :64, :], v[..., :64, :])
    for operands in (few, window):
        np.testing.assert_array_equal(rp.attention(*operands), without(*operands))
    grad = rng.standard_normal((1, 2, 60, 16)).astype(np.float32)
    found, exact = (rp.attention_vjp(q, k, v, grad_out=grad, precision=name) for name in ("high", "highest"))
    for name in "qkv":
        np.testing.assert_array_equal(getattr(found, name), getattr(exact, name))
