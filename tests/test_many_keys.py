"""More keys than a group of tiles has: small errors at any length, and a row's bits wherever its block begins."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.formulas.sums import total
from relpos_np.kernels._numba.backward_pass.kernel import GROUP_BLOCKS, backward_head
from relpos_np.kernels._numba.forward_pass.attend import GROUP_KEYS, attend_block
from relpos_np.kernels._numba.plan import backward_job, gradients
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS
from tests.interpreted.agreement import assert_agrees
from tests.interpreted.machine import interpreted
from tests.strategies import KINDS, SHAW_PER_HEAD, T5_CAUSAL, Case

EPS = {np.float32: np.finfo(np.float32).eps, np.float64: np.finfo(np.float64).eps}


def exact(q, k, v):
    """Output, mean of \\|v\\| and log-sum-exp, in more digits than float64 has."""
    s = (q.astype(np.longdouble) @ k.astype(np.longdouble).swapaxes(-1, -2)) * np.longdouble(q.shape[-1]) ** -0.5
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    p /= total
    return p @ v.astype(np.longdouble), p @ np.abs(v).astype(np.longdouble), (top + np.log(total))[..., 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_errors_do_not_grow_with_the_length(dtype, rng):
    """In units of rounding of the mean of \\|v\\|: sums over all tiles, one after the other, had errors of 6 here."""
    q, k, v = ((0.3 * rng.standard_normal((1, n, 8))).astype(dtype) for n in (24, 100_000, 100_000))
    v += dtype(0.5)
    out, lse = rp.attention(q, k, v, return_lse=True)
    expected, size, expected_lse = exact(q, k, v)
    assert float(np.max(np.abs(out - expected) / size)) <= 3 * EPS[dtype]
    assert float(np.max(np.abs(lse - expected_lse) / expected_lse)) <= 2 * EPS[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", ["numpy", "terms"])
@pytest.mark.parametrize("n", [2 * BLOCK_KEYS - 1, 5000, 200_000])
def test_errors_of_the_references_do_not_grow_either(n, backend, dtype, rng):
    """Also of numbers that are all equal, whose roundings are too, and beside a key that takes nearly all weight."""
    q, k, v = ((0.3 * rng.standard_normal((1, m, 8))).astype(dtype) for m in (3, n, n))
    expected, size, _ = exact(q, k, v)
    out = rp.attention(q, k, v, backend=backend)
    assert float(np.max(np.abs(out - expected) / size)) <= 4 * EPS[dtype]
    v[:] = 0.1
    equal = rp.attention(0 * q, k, v, backend=backend)
    assert float(np.max(np.abs(equal / v[0, 0] - 1))) <= 2 * EPS[dtype]
    mask = np.zeros((3, n), dtype)
    mask[:, 0], v[:, 0] = 20, 0
    rest = (n - 1) / (np.exp(np.longdouble(20)) + (n - 1))
    beside = rp.attention(0 * q, k, v, mask=mask, backend=backend)
    assert float(np.max(np.abs(beside / (rest * v[0, 1]) - 1))) <= 4 * EPS[dtype]
    grad = rp.attention_vjp(0 * k, q, 0 * q, grad_out=v, offset=0, backend="numpy").v
    assert float(np.max(np.abs(grad / (v[0, 1] * np.longdouble(n - 1) / 3) - 1))) <= 4 * EPS[dtype]


def test_sums_in_pairs_keep_what_each_level_loses():
    """On every level the first sum has a partner of just less than half a unit, of which nothing is left."""
    levels, x = 12, np.zeros(1 << 12)
    x[0], x[1 << np.arange(levels)] = 1.0, 0.49 * EPS[np.float64]
    assert abs(total(x) - math.fsum(x)) <= EPS[np.float64]


@pytest.mark.parametrize("backend", ["numpy", "terms"])
@pytest.mark.parametrize("n", [1000, 10_000, 100_000])
@pytest.mark.parametrize("labelled", [False, True])
def test_sums_over_value_tables_do_not_either(labelled, n, backend, rng):
    """Nearly all keys share one vector of Shaw's; with labels, a fifth of them each."""
    q, k, v = ((0.3 * rng.standard_normal((1, m, 8))).astype(np.float32) for m in (3, n, n))
    table = np.full((5, 8), 0.7, np.float32)
    labels = rng.integers(0, 5, (3, n))
    position = rp.GraphLabels(labels, value_table=table) if labelled else rp.Shaw(None, table)
    out = rp.attention(q, k, 0 * v, position=position, backend=backend)
    assert float(np.max(np.abs(out / np.float64(table[0]) - 1))) <= 24 * EPS[np.float32]


@pytest.mark.parametrize("where", [0, 5 * BLOCK_KEYS, GROUP_KEYS - 40])
@pytest.mark.parametrize("right", [0, 3, 40])
def test_the_bits_of_a_row_do_not_depend_on_its_block(where, right, rng):
    """Rows whose keys reach beyond a group, beside rows whose keys do not; a batch item alone has smaller blocks.

    Of up to 40 keys after a query more share a row of a table than a vector has lanes, so that where their sum ends
    decides about its rounding.
    """
    options = {"window": (GROUP_KEYS // 2, right)} if right else {"causal": True}
    q_len, k_len = 97, GROUP_KEYS + where + 60
    q, k, v = (rng.standard_normal((16, 1, n, 8)).astype(np.float32) for n in (q_len, k_len, k_len))
    v[:, 0, 3, 0], v[:, 0, GROUP_KEYS + 5, 1] = np.inf, np.nan
    shaw = rp.Shaw(rng.standard_normal((5, 8)), rng.standard_normal((5, 8)))
    for position in (None, shaw):
        for offset in (where, GROUP_KEYS - 50):
            given = {"position": position, "offset": offset, "return_lse": True, **options}
            whole = rp.attention(q, k, v, **given)
            alone = rp.attention(q[3], k[3], v[3], **given)
            for x, y in zip(whole, alone, strict=True):
                np.testing.assert_array_equal(x[3], y)


def test_rows_whose_earlier_sums_fade_to_nothing(rng):
    """Scores that rise by thousands from group to group; of an infinity there, 0 * inf is left, as in the formula."""
    n = 2 * GROUP_KEYS + 100
    q, k = np.ones((1, 24, 1), np.float32), np.zeros((1, n, 1), np.float32)
    v = rng.standard_normal((1, n, 3)).astype(np.float32)
    for begin, score in ((GROUP_KEYS, 3000), (2 * GROUP_KEYS, 6000)):
        k[:, begin:] = score
    expected = v[:, 2 * GROUP_KEYS :].mean(1, dtype=np.float64)
    v[:, 7] = np.inf
    mask = np.ones((24, n), bool)
    mask[:3, 7] = False
    out = rp.attention(q, k, v, scale=1.0, mask=mask)
    np.testing.assert_allclose(out[0, :3], np.broadcast_to(expected, (3, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[0, 3:], np.nan)
    np.testing.assert_array_equal(rp.attention(q, k, v, scale=1.0, mask=mask, backend="numpy")[0, 3:], np.nan)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_from_many_queries(dtype, rng):
    """Of keys and values, in the same units; without groups those of values were off by 5."""
    q, k, v, g = ((0.3 * rng.standard_normal((1, n, 8))).astype(dtype) for n in (100_000, 24, 24, 100_000))
    g += dtype(0.3)
    found = rp.attention_vjp(q, k, v, grad_out=g, offset=0)
    wide = [x[0].astype(np.longdouble) for x in (q, k, v, g)]
    s = wide[0] @ wide[1].T / np.sqrt(np.longdouble(8))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = wide[3] @ wide[2].T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(np.longdouble(8))
    for x, expected, size in (
        (found.v, p.T @ wide[3], p.T @ np.abs(wide[3])),
        (found.k, ds.T @ wide[0], np.abs(ds).T @ np.abs(wide[0])),
    ):
        assert float(np.max(np.abs(x[0] - expected) / size)) <= 3 * EPS[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_a_block_are_not_those_of_the_block_before(dtype, rng):
    """Also by what its sums lost: in one piece of work, keys of hardly any weight follow keys that have nearly all."""
    heads, first, last, groups = 4, BLOCK_KEYS, 8, 3
    n = (groups - 1) * GROUP_BLOCKS * backward_job.BLOCK_QUERIES + 100
    q, g = (rng.random((heads, n, 4)).astype(dtype) for _ in range(2))
    k, v = (rng.random((heads, first + last, 4)).astype(dtype) for _ in range(2))
    share = np.repeat(np.log([1.0, EPS[dtype]]), [first, last]).astype(dtype)
    with rp.threads(2):  # so that heads are not divided
        found = rp.attention_vjp(q, k, v, grad_out=g, mask=share, offset=0)
    wide = [x.astype(np.longdouble) for x in (q, k, v, g, share)]
    s = wide[0] @ wide[1].swapaxes(-1, -2) / 2 + wide[4]
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # Each factor of the sums may be off by some units, and the sums by three.
    for at in (0, first):
        own = p[..., at : at + last].swapaxes(-1, -2) @ wide[3]
        assert float(np.max(np.abs(found.v[:, at : at + last] / own - 1))) <= 8 * EPS[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_sums_that_all_have_one_sign(dtype, rng):
    """Equal numbers are rounded the same way each time: of a million, errors were 22 over keys and 10,000 by label."""
    n, wide = 40_000, np.longdouble
    sign = rng.choice([-1.0, 1.0], n)
    q, g = np.ones((1, 3, 4), dtype), np.ones((1, 3, 4), dtype)
    v = np.broadcast_to(sign[:, None], (1, n, 4)).astype(dtype)
    k = (v * (1 + 0.1 * rng.random(v.shape))).astype(dtype)
    labels = rng.integers(0, 4, (3, n))
    graph = rp.GraphLabels(labels, key_table=np.zeros((4, 4), dtype), value_table=np.zeros((4, 4), dtype))
    found = rp.attention_vjp(q, k, v, position=graph, grad_out=g, scale=0.0)
    # All weights are 1 / n. Their units, with the log-sum-exp that they are made of.
    unit = (4 + np.log(n)) * EPS[dtype]
    by_label = np.array([(labels == label).sum() for label in range(4)], wide) / n
    assert np.abs(found.position["value_table"] / by_label[:, None] - 1).max() <= unit
    found = rp.attention_vjp(q, k, v, grad_out=g, scale=dtype(2.0**-10))
    p = np.exp((q.astype(wide) @ k.astype(wide).swapaxes(-1, -2)) / 1024)
    p /= p.sum(-1, keepdims=True)
    dp = g.astype(wide) @ v.astype(wide).swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 1024
    size = np.abs(ds) @ np.abs(k.astype(wide))
    assert np.abs((found.q - ds @ k.astype(wide)) / size).max() <= unit


@pytest.mark.parametrize("first", [0, 101])
def test_gradients_from_many_keys(first, rng):
    """Of one sign and size, in groups, also where no block of keys begins at the first one: in one sum 200 off."""
    n = 1_000_000
    v = rng.choice([-1.0, 1.0], (1, n, 1)).astype(np.float32)
    k, one = v * np.float32(1.1), np.ones((1, 1, 1), np.float32)
    found = rp.attention_vjp(one, k, v, grad_out=one, scale=2.0**-10, window=(n - 1 - first, 0)).q.item()
    k, v = (x[0, first:, 0].astype(np.longdouble) for x in (k, v))
    p = np.exp(k / 1024)
    p /= p.sum()
    ds = p * (v - p @ v) / 1024
    # A group adds up 16 tiles, and a probability is off by as many units as its score and the log-sum-exp have.
    assert abs(found - ds @ k) <= (16 + 1 + np.log(n)) * EPS[np.float32] * (np.abs(ds) @ np.abs(k))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_probabilities_by_label(dtype, rng):
    """Dropout makes them 1 / 0.9, which is rounded the same way in each sum of a tile."""
    n, row = 180, np.ones((2, 4), dtype)
    labels = rng.integers(0, 2, (7, n))
    graph = rp.GraphLabels(labels, key_table=0 * row, value_table=row)
    q, k = np.zeros((1, 7, 4), dtype), np.zeros((1, n, 4), dtype)
    seed = int(rng.integers(1 << 30))
    out = rp.attention(q, k, k, position=graph, dropout=0.1, rng=np.random.default_rng(seed))
    share = rp.attention(q, k, np.ones_like(k), dropout=0.1, rng=np.random.default_rng(seed))
    exact = np.rint(share * (0.9 * n)) / (0.9 * n)  # as many as are left
    assert np.abs(out / exact - 1).max() <= 3 * EPS[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels_of_keys_that_fade(dtype, rng):
    """Also what their sums lost to rounding: a key of the next block has a million times their weight."""
    n = BLOCK_KEYS + 1
    q, k = np.ones((1, 24, 1), dtype), rng.random((1, n, 1)).astype(dtype)
    k[:, -1] += dtype(14)
    labels = np.broadcast_to(np.arange(n) % 2, (24, n))
    graph = rp.GraphLabels(labels, value_table=np.eye(2, dtype=dtype))
    out = rp.attention(q, k, np.zeros((1, n, 2), dtype), position=graph, scale=1.0)
    p = np.exp(k[0, :, 0].astype(np.longdouble))
    expected = np.array([p[label::2].sum() for label in range(2)]) / p.sum()
    # Scores of 14 have as many units of rounding.
    assert float(np.abs(out / expected - 1).max()) <= 16 * EPS[dtype]


@pytest.mark.parametrize("n", [2000, 6000])
@pytest.mark.parametrize("name", ["T5", "Shaw"])
def test_gradients_by_distance_over_many_queries(name, n):
    """Every query adds as much to a distance: with one sum for all the table of T5 was off by 40 here."""
    third = 1 / 3  # whose sums are rounded, which those of powers of 2 are not for long
    q, v = np.ones((1, n, 1), np.float32), np.where(np.arange(n) < n // 2, third, -third)[None, :, None].astype("f")
    k = np.zeros_like(q)

    def found(dtype):
        zero = dtype(0)
        position = rp.T5(np.full((32, 1), zero)) if name == "T5" else rp.Shaw(np.full((2 * n - 1, 1), zero))
        one, two, three = (x.astype(dtype) for x in (q, k, v))
        own = rp.attention_vjp(one, two, three, position=position, grad_out=np.ones_like(one), scale=1.0)
        return next(iter(own.position.values()))

    expected = found(np.float64)
    assert np.abs(found(np.float32) - expected).max() <= (4 + np.log(n)) * EPS[np.float32] * np.abs(expected).max()


def test_gradients_of_weights_in_a_narrow_band():
    """Tiles add as much each, of as many queries as a band of two keys can have: in one sum they were off by 17."""
    n = 100_000
    q, v = np.full((1, n, 1), 1 / 3, np.float32), np.arange(n, dtype=np.float32)[None, :, None]
    shaw = rp.Shaw(np.zeros((2 * n - 1, 1), np.float32))
    ones = np.ones_like(q)
    found = rp.attention_vjp(q, 0 * q, v, position=shaw, grad_out=ones, scale=1.0, window=(1, 0))
    # Both keys of a query have half of its probability, and values that are 1 apart.
    expected = (n - 1) / 4 * np.float64(q[0, 0, 0])
    (table,) = found.position.values()
    own, before = table[n - 1, 0], table[n - 2, 0]
    assert abs(own / expected - 1) <= 6 * EPS[np.float32]
    assert abs(before / expected + 1) <= 6 * EPS[np.float32]


CASES = {
    "plain": {},
    "causal": {"positions": (T5_CAUSAL,), "causal": True},
    "band": {"positions": (KINDS["t5"],), "window": (300, 5)},
    "values": {"positions": (SHAW_PER_HEAD,), "causal": True},
    "values for all keys": {"positions": (KINDS["shaw"],), "amplitude": 5.0},
    "keys": {"positions": (KINDS["deberta"],), "window": (250, None)},
    "rows for most distances": {"positions": (KINDS["transformer_xl conformer"],)},
    "a map of pairs": {"positions": (KINDS["graph shaw"],)},
}


@pytest.mark.parametrize("name", CASES)
def test_groups_in_checked_memory(name, monkeypatch):
    """A group for each tile, which the interpreter can be waited for."""
    monkeypatch.setitem(attend_block.py_func.__globals__, "GROUP_KEYS", BLOCK_KEYS)
    for constant, least in (("GROUP_BLOCKS", 1), ("GROUP_KEYS", BLOCK_KEYS)):
        monkeypatch.setitem(backward_head.py_func.__globals__, constant, least)
    monkeypatch.setattr(gradients, "many", lambda *_: True)
    monkeypatch.setattr(gradients, "SKEWED", 0)
    case = Case(5, ((), (), ()), (), 1, 2, 30, 2 * BLOCK_KEYS + 30, 5, 3, **CASES[name])
    assert_agrees(case, np.float32)
    # One piece of work for all blocks of a head's keys, each of which begins with sums of its own.
    monkeypatch.setattr(backward_job, "part_count", lambda heads, threads: 1)
    many = replace(case, q_len=290, k_len=BLOCK_KEYS + 20, given=None)
    operands, options = many.operands(np.float64), many.options(np.float64)
    grad_out = np.ones((2, 290, 3))
    expected = rp.attention_vjp(*operands, grad_out=grad_out, **options, backend="numpy")
    with interpreted():
        found = rp.attention_vjp(*operands, grad_out=grad_out, **options, backend="numba")
    for x, wanted in ((found.q, expected.q), (found.k, expected.k), (found.v, expected.v)):
        np.testing.assert_allclose(x, wanted, rtol=1e-11, atol=1e-13)


def test_half_precision(rng):
    """Products of pairs are summed in float32, too."""
    q, k, v = (rng.standard_normal((1, n, 16)).astype(ml_dtypes.bfloat16) for n in (24, 3 * GROUP_KEYS, 3 * GROUP_KEYS))
    found = rp.attention(q, k, v).astype(np.float64)
    expected, size, _ = exact(*(x.astype(np.float64) for x in (q, k, v)))
    assert float(np.max(np.abs(found - expected))) <= 2**-8 * float(size.max())
