"""Infinity, NaN and the ends of the range of numbers: each reaches what depends on it, and no more."""

from dataclasses import replace

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing import cases
from tests.faults.calls import (
    FEW_SCHEMES,
    INF,
    NAN,
    SCHEMES,
    both,
    close,
    dtypes,
    gradients,
    operands,
    same,
    scheme,
    shapes,
    simulate_only,
    small,
    strict,
)


def test_row_05_infinity_in_a_query_or_mask_reaches_its_row_only(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            i, others = q_len // 2, np.arange(q_len) != q_len // 2
            expected = rp.attention(q, k, v, backend=backend)
            bad = q.copy()
            bad[1, 0, i, 1] = INF
            with strict(backend):
                out = rp.attention(bad, k, v, backend=backend)
            assert np.isnan(out[1, 0, i]).all()
            expected[1, 0, i] = out[1, 0, i]
            np.testing.assert_array_equal(out, expected)
            mask = np.zeros((q_len, k_len), dtype)
            expected = rp.attention(q, k, v, mask=mask, backend=backend)
            mask[i, 5] = INF
            with strict(backend):
                out = rp.attention(q, k, v, mask=mask, backend=backend)
            assert np.isnan(out[:, :, i]).all()
            np.testing.assert_array_equal(out[:, :, others], expected[:, :, others])
            # The same row of the logits, and of the gradient with respect to q.
            assert (rp.logits(q, k, mask=mask, backend=backend)[:, :, i, 5] == INF).all()
            found = gradients(q, k, v, mask=mask, backend=backend)["q"]
            assert np.isfinite(found[:, :, others]).all()


def test_row_05_infinity_in_a_key_reaches_its_head_only(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            expected = rp.attention(q, k, v, backend=backend)
            k[1, 0, 5, 1] = INF
            out = rp.attention(q, k, v, backend=backend)
            # Its product is +inf for some queries, for which no softmax exists, and -inf for others: p = 0.
            assert np.isnan(out[1][q[1, :, :, 1] > 0]).all()
            np.testing.assert_array_equal(out[0], expected[0])


def biased(name, x, dtype, length, dim):
    """A scheme that adds x, or x times the sum of a query, for the key before the query, and 0 for all others."""
    if name == "t5":
        table = np.zeros((4, 2), dtype)
        table[1] = x
        return rp.T5(table, bidirectional=False)
    if name == "shaw":
        table = np.zeros((3, dim), dtype)
        table[0] = x
        return rp.Shaw(table, left=1, outside="zero")
    rows = np.zeros((2 * length - 1, 2, dim), dtype)
    rows[length - 2] = x
    return rp.TransformerXL(*np.zeros((2, 2, dim), dtype), rows, variant="conformer")


@pytest.mark.parametrize("name", FEW_SCHEMES[1:])
def test_row_05_infinity_in_a_bias_reaches_rows_that_read_it(name, backend, rng):
    """A bias for the key before: query 0 has no such key."""
    for dtype in dtypes(backend):
        n = shapes(backend)[-1][0]
        q, k, v = operands(rng, backend, dtype, n, n)
        q = np.abs(q)
        clean, dirty = (biased(name, x, dtype, n, q.shape[-1]) for x in (0.0, INF))
        plain, _ = both(q, k, v, position=clean, causal=True, backend=backend)
        out, lse = both(q, k, v, position=dirty, causal=True, backend=backend)
        np.testing.assert_array_equal(out[:, :, 0], plain[:, :, 0])
        assert np.isnan(out[:, :, 1:]).all()
        assert not np.isfinite(lse[:, :, 1:]).any()


@pytest.mark.parametrize("name", SCHEMES)
def test_row_06_nan_in_a_query_reaches_its_row_only(name, backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            position = scheme(name, rng, q, k, v)
            expected, expected_lse = both(q, k, v, position=position, backend=backend)
            i = q_len // 2
            q[0, 1, i, 1] = NAN
            out, lse = both(q, k, v, position=position, backend=backend)
            assert np.isnan(out[0, 1, i]).all()
            assert np.isnan(lse[0, 1, i])
            out[0, 1, i], lse[0, 1, i] = expected[0, 1, i], expected_lse[0, 1, i]
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("how", ["causal", "window", "bool", "float", "none"])
@simulate_only(bad=[NAN], how=["window", "float", "none"])
def test_row_08_a_bad_value_reaches_the_queries_that_attend_it(how, bad, backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            seen = rng.random((q_len, k_len)) < 0.5
            seen[:, 0] = True  # no query without keys
            options = {
                "causal": {"causal": True, "offset": 3},
                "window": {"window": 2},
                "bool": {"mask": seen},
                "float": {"mask": np.where(seen, dtype(0), dtype(-INF))},
                "none": {},
            }[how]
            clean = rp.attention(q, k, v, **options, backend=backend)
            attends = rp.logits(q, k, **options, backend="numpy")[1, 0] != -INF
            j = int(attends.any(axis=0).nonzero()[0][-1])
            attends = attends[:, j]
            v[1, 0, j, 2] = bad
            out = both(q, k, v, **options, backend=backend)[0]
            assert not np.isfinite(out[1][:, attends, 2]).any()
            out[1][:, attends, 2] = clean[1][:, attends, 2]
            close(out, clean, dtype)


def test_row_08_a_bad_key_reaches_the_queries_that_attend_it(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend)[1:]:
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            clean = rp.attention(q, k, v, causal=True, offset=0, backend=backend)
            for bad in (NAN, INF):
                k[..., q_len // 2, :] = bad
                out = rp.attention(q, k, v, causal=True, offset=0, backend=backend)
                np.testing.assert_array_equal(out[..., : q_len // 2, :], clean[..., : q_len // 2, :])
                if np.isnan(bad):
                    assert np.isnan(out[..., q_len // 2 :, :]).all()


def test_row_09_large_finite_logits_take_the_maximum(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            _, _, v = operands(rng, backend, dtype, q_len, k_len)
            k = np.broadcast_to(np.linspace(-1, 1, k_len, dtype=dtype)[:, None], (*v.shape[:-1], 1))
            for size in (1e6, 1e8, 3e15, 1e30):
                q = np.full((2, 2, q_len, 1), size, dtype)
                out, lse = both(q, k, v, scale=1.0, backend=backend)
                np.testing.assert_array_equal(out, np.broadcast_to(v[..., -1:, :], out.shape))
                np.testing.assert_allclose(lse, size, rtol=1e-6)
                if size > 1e6 and small(backend):
                    continue
                found = gradients(q, k, v, scale=1.0, backend=backend)
                # The last key has all of the probability, and more of its score would change nothing.
                assert (found["v"][..., -1, :] == 2 * q_len).all(), size
                assert (found["v"][..., :-1, :] == 0).all()
                # What is left of p (g.v - o.g) has the rounding errors of that sum, times keys of at most 1.
                most = 64 * np.finfo(dtype).eps * np.abs(v).sum(axis=-1).max()
                assert np.abs(found["q"]).max() <= most, size


def test_row_10_overflow_is_nan_or_infinite_and_float64_stays_finite(backend, rng):
    for q_len, k_len in shapes(backend):
        q, k, v = (x.astype(np.float64) for x in operands(rng, backend, np.float64, q_len, k_len))
        narrow = [x.astype(np.float32) for x in (q * 1e19, k * 1e20, v)]
        out = both(*narrow, backend=backend)[0]
        assert out.shape == (*q.shape[:-1], v.shape[-1])
        # A row has +inf among its scores, or only numbers and -inf.
        s = rp.logits(*narrow[:2], backend="numpy")
        over = (s == INF).any(axis=-1)
        assert over.any()
        assert np.isnan(out[over]).all()
        assert not np.isinf(out).any()
        gradients(*narrow, backend=backend)
        if not small(backend):
            assert np.isfinite(rp.attention(q * 1e150, k * 1e150, v, backend=backend)).all()


def test_row_11_subnormal_numbers_keep_their_value(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            tiny = np.finfo(dtype).smallest_subnormal
            v[...] = tiny * 1000
            out = both(q, k, v, backend=backend)[0]
            # Each of the sums' terms is rounded to a multiple of the smallest number.
            np.testing.assert_allclose(out, float(tiny) * 1000, rtol=0, atol=float(tiny) * (8 + k_len))
            # Subnormal queries and keys: scores of 0, and not of NaN.
            out, lse = both(q * tiny, k * tiny, np.ones_like(v), backend=backend)
            close(out, 1, dtype)
            np.testing.assert_allclose(lse, np.log(k_len), rtol=8 * np.finfo(dtype).eps)


def test_row_11_subnormal_results_are_judged_by_the_smallest_number_there_is():
    one = next(one for one in cases("sinusoidal", variant="dimension_index", dtype="float16") if one.x is not None)
    assert replace(one, x=np.full_like(one.x, 5.96e-6)).backend_error("numpy") <= 1


def test_row_08_rows_that_are_not_finite_are_so_on_every_call(backend, rng):
    """The same bits again: what a row's NaN is made of does not depend on what memory held before."""
    q, k, v = operands(rng, backend, np.float32, *shapes(backend)[-1])
    q[0, 0, 1], k[1, 0, 3], v[0, 0, 2] = NAN, INF, -INF
    same(both(q, k, v, backend=backend), both(q, k, v, backend=backend))
