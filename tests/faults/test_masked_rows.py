"""Queries without keys, and keys whose scores are finite and very low."""

import itertools

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.calls import FEW_SCHEMES, INF, both, close, dtypes, gradients, operands, scheme, shapes, small


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_01_a_query_whose_keys_are_all_masked_gives_zero(kind, backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in [*shapes(backend), *([] if small(backend) else [(49, 49)])]:
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            empty = np.arange(q_len) % 3 == q_len % 2
            mask = np.repeat(~empty[:, None], k_len, axis=1)
            if kind == "float":
                mask = np.where(mask, dtype(0), dtype(-INF))
            # What these queries hold does not matter.
            held = np.where(empty[:, None], dtype(np.nan), q)
            out, lse = both(held, k, v, mask=mask, backend=backend)
            assert (out[:, :, empty] == 0).all()
            assert (lse[:, :, empty] == -INF).all()
            plain, plain_lse = both(q, k, v, backend="numpy")
            close(out[:, :, ~empty], plain[:, :, ~empty], dtype)
            close(lse[:, :, ~empty], plain_lse[:, :, ~empty], dtype)
            assert (rp.logits(q, k, mask=mask, backend=backend)[:, :, empty] == -INF).all()


@pytest.mark.parametrize("name", [*FEW_SCHEMES, "cope"])
def test_row_01_gradients_of_masked_queries_are_zero(name, backend, rng):
    """Neither does the gradient of their log-sum-exp, which may well be -inf * 0, reach anything."""
    for dtype in dtypes(backend)[:1]:
        for q_len, k_len in shapes(backend)[1:] if small(backend) else shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            position = scheme(name, rng, q, k, v)
            empty = np.arange(q_len) % 3 == q_len % 2
            options = {"position": position, "mask": np.repeat(~empty[:, None], k_len, axis=1)}
            if not small(backend):
                options["query_scale"] = np.full(q_len, 2.0, dtype)
            ones = np.ones(q.shape[:-1], dtype)
            found = gradients(q, k, v, grad_lse=ones, backend=backend, **options)
            assert all(np.isfinite(x).all() for x in found.values())
            assert (found["q"][:, :, empty] == 0).all()
            if small(backend) and name not in ("none", "conformer"):
                continue
            # What these queries hold, or are given back, does not matter.
            grad_out = np.ones((*q.shape[:-1], v.shape[-1]), dtype)
            q[:, :, empty], grad_out[:, :, empty], ones[:, :, empty] = INF, np.nan, -INF
            again = gradients(q, k, v, grad_out=grad_out, grad_lse=ones, backend=backend, **options)
            for x in found.keys() - {"q"}:
                np.testing.assert_array_equal(again[x], found[x], err_msg=x)
            assert (again["q"][:, :, empty] == 0).all()


@pytest.mark.parametrize("name", FEW_SCHEMES)
def test_row_02_nothing_to_attend_gives_zeros(name, backend, rng):
    for q_len, k_len in shapes(backend)[:1] if small(backend) else [(6, 6), *shapes(backend)]:
        q, k, v = operands(rng, backend, np.float32, q_len, k_len)
        position = scheme(name, rng, q, k, v)
        for options in (
            {"mask": np.zeros((q_len, k_len), bool)},
            {"mask": np.full((1, k_len), -INF)},
            {"key_lengths": 0},
            {"mask": np.zeros((2, 1, 1, 1), bool)},
        ):
            out, lse = both(q, k, v, position=position, **options, backend=backend)
            assert (out == 0).all()
            assert (lse == -INF).all()
            if "key_lengths" in options or not small(backend):
                found = gradients(q, k, v, position=position, **options, backend=backend)
                assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize("parts", [8, 1])
def test_row_03_a_finite_mask_of_a_whole_row_averages(parts, backend, rng):
    """However low it is, with a number per pair, per query or for all."""
    for dtype in dtypes(backend):
        for q_len, k_len in [*shapes(backend), *([] if small(backend) else [(49, 49), (1, 900)])]:
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            for shape in ((q_len, k_len), (q_len, 1), (1, 1)):
                mask = np.full(shape, np.finfo(dtype).min / parts, dtype)
                out, lse = both(q, k, v, mask=mask, backend=backend)
                expected = np.broadcast_to(v.mean(axis=-2, keepdims=True, dtype=np.float64), out.shape)
                np.testing.assert_allclose(out, expected, rtol=0, atol=16 * np.finfo(dtype).eps)
                np.testing.assert_allclose(lse, np.finfo(dtype).min / parts, rtol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30, None])
def test_row_03_gradients_where_a_finite_mask_has_a_whole_row(low, backend, rng):
    """Beside a log-sum-exp so low a sum of some keys has no digits, and each probability must still be 1 of many."""
    keys, sizes = (12, (1, 2)) if small(backend) else (100, (2, 3))
    for dtype, queries in itertools.product((np.float32, np.float64), (keys, 3)):
        q, grad_out = rng.standard_normal((2, *sizes, queries, 8)).astype(dtype)
        k, v = rng.standard_normal((2, *sizes, keys, 8)).astype(dtype)
        masked = queries // 2
        q[..., :masked, :] = 0  # scores beside which the mask is that of a row exactly
        lowest = np.finfo(dtype).min if low is None else dtype(low)
        mask = np.where(np.arange(queries)[:, None] < masked, lowest, dtype(0))
        found = gradients(q, k, v, grad_out=grad_out, mask=np.repeat(mask, keys, axis=1), backend=backend)
        expected = gradients(q, k, v, grad_out=grad_out, backend="numpy")
        for name, x in expected.items():
            room = 16 * np.finfo(dtype).eps * (1 + abs(x).max())
            np.testing.assert_allclose(found[name], x, rtol=0, atol=room, err_msg=name)


def test_row_03_a_finite_mask_of_some_keys_excludes_them(backend, rng):
    """The most negative number itself: nothing overflows to -inf or NaN, on queries with other keys."""
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            mask = np.where(np.arange(k_len) < k_len - 2, dtype(0), np.finfo(dtype).min).astype(dtype)
            out = rp.attention(q, k, v, mask=mask, backend=backend)
            close(out, rp.attention(q, k, v, key_lengths=k_len - 2, backend="numpy"), dtype)


def test_row_04_valid_rows_of_very_negative_logits(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            for low in (-1e5, -1e30):
                mask = np.full((q_len, k_len), low, dtype)
                mask[:, 2] = low / 2
                out, lse = both(q, k, v, mask=mask, backend=backend)
                np.testing.assert_allclose(out, np.broadcast_to(v[..., 2:3, :], out.shape), rtol=1e-6)
                np.testing.assert_allclose(lse, low / 2, rtol=1e-3)
                found = gradients(q, k, v, mask=mask, backend=backend)
                # Only key 2 has a probability, for every query of the two heads that share it; a log-sum-exp so far
                # from 0 has few digits behind the point.
                np.testing.assert_allclose(found["v"][:, :, 2], 2 * q_len, rtol=1e5 * np.finfo(dtype).eps)
                assert (np.delete(found["v"], 2, axis=2) == 0).all()
