"""Random terms, also such as no scheme of this library makes yet: the kernels against their dense specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relpos_np._contract import check
from relpos_np._contract.terms import (
    Dense,
    KeyTerm,
    QueryTerm,
    TableTerm,
    Terms,
    Toeplitz,
    ValueTerm,
    by_row,
    of_batch,
)
from relpos_np._dense import backward as gradient
from relpos_np._dense import from_terms
from relpos_np.errors import RelposValueError
from relpos_np.kernels import _numba
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.plan import backward_job, biases
from relpos_np.kernels._numba.plan import call as planning
from tests.sizes import BLOCK_KEYS, ROW_QUANTUM

LENGTHS = st.sampled_from([1, 2, 7, 16, 65, 2 * ROW_QUANTUM + 1, BLOCK_KEYS + 1, BLOCK_KEYS + 8])


def index_map(rng, kind, q_len, k_len, rows, batch):
    """A random map with some rows missing: runs, single steps, pairs, or pairs per batch item."""
    if kind == "runs":
        steps = np.sort(rng.integers(-1, rows, q_len + k_len - 1))
        return Toeplitz(steps.astype(np.int32), rows)
    if kind == "steps":
        return Toeplitz(rng.integers(-1, rows, q_len + k_len - 1, dtype=np.int32), rows)
    lead = batch if kind == "per batch item" else ()
    return Dense(rng.integers(-1, rows, (*lead, q_len, k_len), dtype=np.int32), rows)


MAPS = ["runs", "steps", "pairs", "per batch item"]


@st.composite
def calls(draw):
    """A problem and terms of every kind for it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = draw(st.sampled_from([(), (2,), (2, 1), (1, 3)]))
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    heads, q_len, k_len = kv_heads * groups, draw(LENGTHS), draw(LENGTHS)
    depth, v_dim = draw(st.sampled_from([(8, 8), (3, 17), (33, 16)]))
    q = rng.standard_normal((*batch, heads, q_len, depth))
    k = rng.standard_normal((*batch, kv_heads, k_len, depth))
    v = rng.standard_normal((*batch, kv_heads, k_len, v_dim))
    mask = draw(st.sampled_from([None, None, "bool", "float"]))
    if mask is not None:
        allowed = rng.random((*batch, 1, q_len, k_len)) < 0.7
        mask = allowed if mask == "bool" else np.where(allowed, rng.standard_normal(allowed.shape), -np.inf)
    options = {"causal": draw(st.booleans()), "offset": draw(st.sampled_from([None, 0, 3]))}
    problem, _, _ = check.problem(q, k, v, mask=mask, **options)
    shared = st.sampled_from([1, heads])

    def weights(rows, width):
        return rng.standard_normal((draw(shared), rows, width))

    def maps(rows):
        return index_map(rng, draw(st.sampled_from(MAPS)), q_len, k_len, rows, batch)

    tables = tuple(
        TableTerm(rng.standard_normal((draw(shared), rows)), maps(rows))
        for rows in draw(st.lists(st.integers(1, 9), max_size=2))
    )
    queries = tuple(
        QueryTerm(rng.standard_normal((*batch, heads, q_len, 5)), weights(rows, 5), maps(rows))
        for rows in draw(st.lists(st.integers(1, 9), max_size=2))
    )
    keys = tuple(
        KeyTerm(
            rng.standard_normal((*batch, draw(st.sampled_from([kv_heads, heads])), k_len, 4)),
            weights(rows, 4),
            maps(rows),
        )
        for rows in draw(st.lists(st.integers(1, 9), max_size=1))
    )
    values = tuple(
        ValueTerm(weights(rows, v_dim), maps(rows)) for rows in draw(st.lists(st.integers(1, 9), max_size=2))
    )
    # As free in its axes as a scheme may leave it.
    full = ((*batch, heads, q_len, k_len), (1, q_len, k_len), (heads, 1, k_len), (*batch, 1, q_len, 1))
    biases = tuple(rng.standard_normal(shape) for shape in draw(st.lists(st.sampled_from(full), max_size=2)))
    return problem, Terms(tables=tables, queries=queries, keys=keys, values=values, biases=biases)


def kernel_result(problem, terms):
    out = np.full(problem.out_shape, np.nan)
    lse = np.full(problem.out_shape[:-1], np.nan)
    _numba.attention(problem, terms, out, lse)
    return out, lse


@pytest.mark.parametrize("gather_bytes", [0, biases.GATHER_BYTES])
@pytest.mark.parametrize("skew_share", [0.0, planning.SKEW_SHARE, 2.0])
@given(call=calls())
@settings(deadline=None, max_examples=30)
def test_kernel_equals_specification(gather_bytes, skew_share, call):
    problem, terms = call
    expected, expected_lse = from_terms.attention(problem, terms)
    with pytest.MonkeyPatch.context() as patch:
        # Each way of evaluating a term, whatever the sizes would choose.
        patch.setattr(biases, "GATHER_BYTES", gather_bytes)
        patch.setattr(planning, "SKEW_SHARE", skew_share)
        out, lse = kernel_result(problem, terms)
    # Sums of at most 65 + 200 products of standard normal numbers, scores below about 60.
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=2e-13)


def assert_gradients_agree(found, expected, tolerance):
    """Two records of gradients, and the gradients of v beside them."""
    (terms, v), (right, right_v) = found, expected
    np.testing.assert_allclose(v, right_v, rtol=0, atol=tolerance)
    for name in ("query", "key"):
        np.testing.assert_allclose(getattr(terms, name), getattr(right, name), rtol=0, atol=tolerance)
    for slot in ("tables", "queries", "keys", "values"):
        for term, other in zip(getattr(terms, slot), getattr(right, slot), strict=True):
            for name in {"table", "query", "key", "weights"} & set(term.__slots__):
                actual, wanted = getattr(term, name), getattr(other, name)
                assert actual.shape == wanted.shape
                np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance)
    for bias, other in zip(terms.biases, right.biases, strict=True):
        np.testing.assert_allclose(bias, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("skew_share", [0.0, planning.SKEW_SHARE, 2.0])
@given(call=calls(), keep=st.sampled_from([None, 0.7]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_backward_kernel_equals_specification(parts, skew_share, call, keep, seed):
    problem, terms = call
    rng = np.random.default_rng(seed)
    if keep is not None:
        problem.keep, problem.keep_scale = rng.random((*problem.out_shape[:-1], problem.site.k_len)) < keep, 1 / keep
    grad_out, grad_lse = rng.standard_normal(problem.out_shape), rng.standard_normal(problem.out_shape[:-1])
    expected = gradient.backward(problem, terms, from_terms.scores(problem, terms), grad_out, grad_lse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "SKEW_SHARE", skew_share)
        # As many pieces of work as many threads would get, or one per head.
        patch.setattr(backward_job, "part_count", lambda heads, threads: parts)
        found = _numba.backward(problem, terms, grad_out, grad_lse)
    # Sums of up to 3 x 200 x 200 products of numbers of size 1 to 60.
    assert_gradients_agree(found, expected, 2e-11)


@pytest.mark.parametrize("parts", [1, 3])
@given(call=calls(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_a_long_backward_pass_in_several_calls(parts, call, seed):
    """Between them signals are looked at; what a piece of work has summed waits, and the bits are the same."""
    problem, terms = call
    rng = np.random.default_rng(seed)
    grad_out, grad_lse = rng.standard_normal(problem.out_shape), rng.standard_normal(problem.out_shape[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_job, "part_count", lambda heads, threads: parts)
        whole = _numba.backward(problem, terms, grad_out, grad_lse)
        patch.setattr(launcher, "CALL_FLOPS", 10.0 ** (4 + seed % 4))
        assert_gradients_agree(_numba.backward(problem, terms, grad_out, grad_lse), whole, 0.0)


def test_maps_know_their_shape():
    with pytest.raises(RelposValueError, match=r"\(2, 3\)"):
        Dense(np.zeros((2, 3), np.int32), 1).dense(3, 2)
    toeplitz = Toeplitz(np.array([0, 1, 2, 3], np.int32), 4)
    np.testing.assert_array_equal(toeplitz.dense(2, 3), [[1, 2, 3], [0, 1, 2]])


def test_only_one_scheme_may_change_the_content_product():
    changed = Terms(query=np.zeros((1, 1, 1)))
    assert (changed + Terms()).query is changed.query
    with pytest.raises(RelposValueError, match="content product"):
        changed + changed


@given(st.integers(0, 999), st.integers(1, 2000), st.sampled_from([1, 2, 40, 3000]))
def test_sums_by_row(seed, positions, rows):
    """Each relative position's numbers belong to one row of the table, or to none."""
    rng = np.random.default_rng(seed)
    lookup = rng.integers(-1, rows, positions, dtype=np.int32)
    sums, expected = rng.standard_normal((3, positions, 2)), np.zeros((3, rows, 2))
    for at, row in enumerate(lookup):
        if row >= 0:
            expected[:, row] += sums[:, at]
    np.testing.assert_allclose(by_row(sums, Toeplitz(lookup, rows)), expected, rtol=0, atol=1e-12 * positions)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), max_size=4), st.integers(0, 4))
@example([(4, 0, False), (3, 2, False), (4, 1, False)], 1)
def test_batch_items_of_what_is_broadcast(axes, missing):
    """As if every batch item had numbers of its own; first axes may be missing."""
    batch = tuple(n for n, _, _ in axes)
    parts = tuple(slice(min(start, n - 1), n) for n, start, _ in axes)
    held = tuple(1 if alone else n for n, _, alone in axes)[missing:]
    x = np.arange(np.prod((*held, 5), dtype=int)).reshape(*held, 5)
    expected = np.broadcast_to(x, (*batch, 5))[parts]
    np.testing.assert_array_equal(np.broadcast_to(of_batch(x, 1, parts), expected.shape), expected)
