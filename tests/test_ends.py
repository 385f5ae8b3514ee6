"""Masks, tables and products up to the ends of the dtype: kernels in units of log 2 are as the formulas."""

import itertools

import numpy as np
import pytest

import relpos_np as rp

SIZES = [(1, 40), (7, 9), (49, 49), (1, 900), (300, 300)]


def masked(rng, dtype, q_len, k_len):
    """Rows of large negative numbers alone, of large numbers, and ordinary ones."""
    most = np.finfo(dtype).max
    mask = np.zeros((q_len, k_len), dtype)
    for i in range(q_len):
        kinds = [
            (-most, -0.7 * most),
            (-most, -0.75 * most, -0.8 * most),
            (0.8 * most, 0.0),
            (0.0, -most),
            (most, -most),
        ]
        mask[i] = rng.choice(np.array(kinds[i % 5], dtype), k_len)
    return mask


def agree(found, expected, dtype):
    for x, y in zip(found, expected, strict=True):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(x, y, rtol=64 * np.finfo(dtype).eps, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("q_len", "k_len"), SIZES)
def test_masks(dtype, q_len, k_len, rng):
    """Also prepared, of sequences, and in gradients."""
    q, grad = rng.standard_normal((2, 2, q_len, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, k_len, 8)).astype(dtype)
    mask = masked(rng, dtype, q_len, k_len)
    for causal, position in itertools.product((False, True), (None, rp.ALiBi())):
        call = {"mask": mask, "causal": causal, "position": position}
        expected = rp.attention(q, k, v, **call, return_lse=True, backend="numpy")
        found = rp.attention(q, k, v, **call, return_lse=True)
        agree(found, expected, dtype)
        np.testing.assert_array_equal(rp.prepare(q, k, v, **call)(q, k, v), found[0])
        grads = [rp.attention_vjp(q, k, v, grad_out=grad, **call, backend=b) for b in ("numba", "numpy")]
        agree([grads[0].q, grads[0].k, grads[0].v], [grads[1].q, grads[1].k, grads[1].v], dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [9, 40, 300])
def test_tables_and_products(dtype, n, rng):
    most = np.finfo(dtype).max
    q, k, v, grad = rng.standard_normal((4, 2, n, 8)).astype(dtype)
    table = rng.choice(np.array([-most, -0.8 * most, -0.75 * most], dtype), (32, 2))
    t5 = rp.T5(table)
    # Products and sums of powers of two are exact in whatever order: scores of 0.84 of the largest number, all equal.
    large = dtype(2.0) ** (np.finfo(dtype).maxexp // 2)
    for given, one, other in (
        ({"position": t5}, q, k),
        ({"position": t5, "segments": [0, n // 3, n]}, q, k),
        ({"scale": 1.0}, np.full_like(q, large / 16), np.full_like(k, 1.6875 * large)),
        ({"scale": -1.0}, np.full_like(q, large / 16), np.full_like(k, 1.6875 * large)),
    ):
        expected = rp.attention(one, other, v, **given, return_lse=True, backend="numpy")
        agree(rp.attention(one, other, v, **given, return_lse=True), expected, dtype)
    found, wanted = (rp.attention_vjp(q, k, v, grad_out=grad, position=t5, backend=b) for b in ("numba", "numpy"))
    agree([found.v, found.q, found.k], [wanted.v, wanted.q, wanted.k], dtype)
    np.testing.assert_allclose(
        found.position["table"], wanted.position["table"], rtol=0, atol=1e4 * np.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keys_in_pages(dtype, rng):
    """One page for all keys, so that what stands for them is far longer than the memory that they have."""
    most, size, count = np.finfo(dtype).max, 16, 60_000
    k, v = (rng.standard_normal((1, size, 1, 64)).astype(dtype) for _ in range(2))
    k[...], k[0, 3:9] = np.sqrt(most) * dtype(0.1), np.sqrt(most) * dtype(-0.1)
    q = np.full((1, 1, 1, 64), np.sqrt(most) * dtype(0.9 / 8), dtype)
    pages = {"block_table": np.zeros((1, count), np.int64), "key_lengths": [count * size], "scale": 1.0}
    found = rp.paged_attention(q, k, v, **pages)
    agree([found], [rp.attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), scale=1.0, backend="numpy")], dtype)


def test_ordinary_calls_are_made_once(monkeypatch, rng):
    """Rows without keys, and NaN, are met and cost no second call."""
    from relpos_np.kernels._numba.plan import ends

    def refuse(*_args):
        raise AssertionError

    monkeypatch.setattr(ends, "_attend_again", refuse)
    q, k, v = rng.standard_normal((3, 2, 40, 8))
    mask = np.where(rng.random((40, 40)) < 0.5, 0.0, -1e30)
    mask[3] = -np.inf
    rp.attention(q, k, v, mask=mask)
    q[0, 5] = np.nan
    assert np.isnan(rp.attention(q, k, v, mask=mask)[0, 5]).all()


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
@pytest.mark.parametrize("q_len", [3, 30])
def test_the_lowest_number_excludes_no_key(q_len, backend, rng):
    """What such a key holds reaches the output, as little as the key weighs."""
    q, k, v = (rng.standard_normal((1, n, 8)).astype(np.float32) for n in (q_len, 40, 40))
    v[:, 3, 0], v[:, 4, 1] = np.inf, np.nan
    mask = np.zeros((q_len, 40), np.float32)
    mask[:, 3:5] = np.finfo(np.float32).min
    out = rp.attention(q, k, v, mask=mask, backend=backend)
    assert not np.isfinite(out[..., :2]).any()
    assert np.isfinite(out[..., 2:]).all()
