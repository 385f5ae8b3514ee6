"""Masks, faults and memory: what must happen on input that others answer with NaN, garbage or a crash."""

import numpy as np
import pytest

import relpos_np as rp
from tests import naive

NAN, INF = np.nan, np.inf
DTYPES = [np.float32, np.float64]
EXCLUSIONS = {
    "key_lengths": {"key_lengths": np.array([50, 60])},
    "bool_key_padding": {"mask": np.arange(70)[None, None, None, :] < np.array([50, 60])[:, None, None, None]},
    "bool_full": {"mask": np.broadcast_to(np.arange(70) < 50, (2, 3, 70, 70)).copy()},
    "bool_holes": {"mask": np.arange(70)[None, :] % 7 != 3},
    "float_key_padding": {"mask": np.where(np.arange(70) < 50, 0.0, -INF)},
    "float_full": {"mask": np.broadcast_to(np.where(np.arange(70) < 50, 0.5, -INF), (70, 70)).copy()},
    "window_and_offset": {"window": 3, "offset": -30},
    "causal_and_offset": {"causal": True, "offset": -30},
    "window_right": {"window": (None, 2), "offset": -40},
    "very_negative_offset": {"causal": True, "offset": -(1 << 40)},
    "very_positive_offset": {"window": 5, "offset": 1 << 40},
}


def make(rng, dtype=np.float64, *, q_len=5, k_len=6, heads=2, batch=(2,), depth=4, v_dim=3):
    shapes = ((q_len, depth), (k_len, depth), (k_len, v_dim))
    return [rng.standard_normal((*batch, heads, *shape)).astype(dtype) for shape in shapes]


def schemes(rng, dtype, length, heads, depth, v_dim):
    """One scheme of each kind of term."""

    def table(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "none": None,
        "shaw": rp.Shaw(table(9, depth), table(9, v_dim)),
        "t5": rp.T5(table(32, heads)),
        "window": rp.WindowBias(table(2 * length - 1, heads), (length,)),
        "conformer": rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(2 * length - 1, heads, depth), variant="conformer"
        ),
        "wenet": rp.TransformerXL(
            table(heads, depth), table(heads, depth), table(length, heads, depth), variant="wenet"
        ),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_1_fully_masked_query_gives_zero(kind, dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    mask = np.ones((70, 70), bool)
    mask[[0, 33, 69]] = False
    if kind == "float":
        mask = np.where(mask, dtype(0), dtype(-INF))
    out, lse = rp.attention(q, k, v, mask=mask, backend=backend, return_lse=True)
    plain, plain_lse = rp.attention(q, k, v, backend=backend, return_lse=True)
    empty = np.zeros(70, bool)
    empty[[0, 33, 69]] = True
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -INF).all()
    atol = 64 * np.finfo(dtype).eps
    np.testing.assert_allclose(out[:, :, ~empty], plain[:, :, ~empty], rtol=0, atol=atol)
    np.testing.assert_allclose(lse[:, :, ~empty], plain_lse[:, :, ~empty], rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["none", "shaw", "t5", "window", "conformer", "wenet"])
def test_row_2_nothing_to_attend_gives_zeros(name, backend, rng):
    q, k, v = make(rng, q_len=6)
    position = schemes(rng, np.float64, 6, 2, 4, 3)[name]
    for options in (
        {"mask": np.zeros((6, 6), bool)},
        {"mask": np.full((1, 6), -INF)},
        {"key_lengths": 0},
        {"mask": np.zeros((2, 1, 1, 1), bool)},
    ):
        out, lse = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_row_2_one_batch_item_of_length_0(backend, rng):
    q, k, v = make(rng)
    out, lse = rp.attention(q, k, v, key_lengths=np.array([0, 6]), backend=backend, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -INF).all()
    np.testing.assert_array_equal(out[1], rp.attention(q, k, v, backend=backend)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_3_finite_mask_of_a_whole_row_averages(dtype, backend, rng):
    q, k, v = make(rng, dtype)
    mask = np.full((5, 6), np.finfo(dtype).min, dtype)
    out = rp.attention(q, k, v, mask=mask / 8, backend=backend)
    expected = np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out, expected, rtol=0, atol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_3_finite_mask_of_some_keys_excludes_them(dtype, backend, rng):
    """The most negative number itself: nothing overflows to -inf or NaN, on queries with other keys."""
    q, k, v = make(rng, dtype)
    mask = np.where(np.arange(6) < 4, dtype(0), np.finfo(dtype).min).astype(dtype)
    out = rp.attention(q, k, v, mask=mask, backend=backend)
    expected = rp.attention(q, k, v, key_lengths=4, backend=backend)
    np.testing.assert_allclose(out, expected, rtol=0, atol=16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_4_valid_rows_of_very_negative_logits(dtype, backend, rng):
    q, k, v = make(rng, dtype)
    for low in (-1e5, -1e30):
        mask = np.full((5, 6), low, dtype)
        mask[:, 2] = low / 2
        out, lse = rp.attention(q, k, v, mask=mask, backend=backend, return_lse=True)
        np.testing.assert_allclose(out, np.broadcast_to(v[..., 2:3, :], out.shape), rtol=1e-6)
        np.testing.assert_allclose(lse, low / 2, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_5_infinity_in_a_query_or_bias_reaches_its_row_only(dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    expected = rp.attention(q, k, v, backend=backend)
    others = np.arange(70) != 20
    bad = q.copy()
    bad[1, 0, 20, 1] = INF
    out = rp.attention(bad, k, v, backend=backend)
    assert np.isnan(out[1, 0, 20]).all()
    np.testing.assert_array_equal(out[1, 0, others], expected[1, 0, others])
    np.testing.assert_array_equal(out[0], expected[0])
    mask = np.zeros((70, 70), dtype)
    expected = rp.attention(q, k, v, mask=mask, backend=backend)
    mask[20, 5] = INF
    out = rp.attention(q, k, v, mask=mask, backend=backend)
    assert np.isnan(out[:, :, 20]).all()
    np.testing.assert_array_equal(out[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_5_infinity_in_a_key_reaches_its_head_only(dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    bad = k.copy()
    bad[1, 0, 20, 1] = INF
    out = rp.attention(q, bad, v, backend=backend)
    expected = rp.attention(q, k, v, backend=backend)
    assert np.isnan(out[1, 0][q[1, 0, :, 1] > 0]).all()
    np.testing.assert_array_equal(out[0], expected[0])
    np.testing.assert_array_equal(out[1, 1], expected[1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "shaw", "t5", "window", "conformer", "wenet"])
def test_row_6_nan_in_a_query_reaches_its_row_only(name, dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    position = schemes(rng, dtype, 70, 2, 4, 3)[name]
    expected, expected_lse = rp.attention(q, k, v, position=position, backend=backend, return_lse=True)
    q[0, 1, 33, 2] = NAN
    out, lse = rp.attention(q, k, v, position=position, backend=backend, return_lse=True)
    assert np.isnan(out[0, 1, 33]).all()
    assert np.isnan(lse[0, 1, 33])
    out[0, 1, 33], lse[0, 1, 33] = expected[0, 1, 33], expected_lse[0, 1, 33]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", EXCLUSIONS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_row_7_excluded_keys_may_hold_anything(how, bad, dtype, backend, rng):
    """A key that no query may attend is never read, whatever excludes it and whichever scheme is used."""
    options = dict(EXCLUSIONS[how])
    if options.get("mask") is not None and options["mask"].dtype != bool:
        options["mask"] = options["mask"].astype(dtype)
    q, k, v = make(rng, dtype, q_len=70, k_len=70, heads=3)
    s = rp.logits(q, k, **options, backend="numpy")
    unused = (s == -INF).all(axis=(1, 2))
    assert unused.any()
    for name, position in schemes(rng, dtype, 70, 3, 4, 3).items():
        if name in ("conformer", "wenet") and "offset" in options:
            continue
        clean = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
        dirty_k, dirty_v = k.copy(), v.copy()
        for b in range(2):
            dirty_k[b, :, unused[b]] = bad
            dirty_v[b, :, unused[b]] = bad
        with np.errstate(all="raise"):
            found = rp.attention(q, dirty_k, dirty_v, position=position, **options, backend=backend, return_lse=True)
        assert np.isfinite(found[0]).all(), name
        for a, b in zip(clean, found, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_7_each_batch_item_has_its_own_padding(dtype, backend, rng):
    """Ragged lengths across blocks of keys, NaN from each item's end on."""
    lengths = np.array([1, 191, 192, 193, 300])
    q, k, v = make(rng, dtype, q_len=3, k_len=300, batch=(5,))
    for b, n in enumerate(lengths):
        k[b, :, n:] = NAN
        v[b, :, n:] = INF
    out = rp.attention(q, k, v, key_lengths=lengths, backend=backend)
    for b, n in enumerate(lengths):
        expected = rp.attention(q[b], k[b, :, :n], v[b, :, :n], backend="numpy")
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("lengths", [[[1], [5]], [[2, 0, 6]], [[1, 2, 3], [4, 5, 6]], [3], [6, 0, 2], 4])
def test_key_lengths_broadcast_to_the_batch_axes(lengths, backend, rng):
    q, k, v = make(rng, batch=(2, 3))
    out = rp.attention(q, k, v, key_lengths=lengths, backend=backend)
    full = np.broadcast_to(lengths, (2, 3))
    for b in np.ndindex(2, 3):
        expected = rp.attention(q[b], k[b][:, : full[b]], v[b][:, : full[b]], backend="terms")
        np.testing.assert_allclose(out[b], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 2}, {"mask": "bool"}, {"mask": "float"}, {}])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_row_8_a_bad_value_reaches_the_queries_that_attend_it(options, bad, dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    if "mask" in options:
        mask = rng.random((70, 70)) < 0.5
        mask[:, 0] = True  # no query without keys
        options = {"mask": mask if options["mask"] == "bool" else np.where(mask, dtype(0), dtype(-INF))}
    clean = rp.attention(q, k, v, **options, backend=backend)
    v[1, 0, 40, 2] = bad
    with np.errstate(all="raise"):
        out = rp.attention(q, k, v, **options, backend=backend)
    attends = rp.logits(q, k, **options, backend="numpy")[1, 0, :, 40] != -INF
    assert attends.any()
    assert not np.isfinite(out[1, 0, attends, 2]).any()
    out[1, 0, attends, 2] = clean[1, 0, attends, 2]
    np.testing.assert_allclose(out, clean, rtol=0, atol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_row_8_a_bad_key_reaches_the_queries_that_attend_it(bad, backend, rng):
    q, k, v = make(rng, np.float32, q_len=70, k_len=70)
    clean = rp.attention(q, k, v, causal=True, backend=backend)
    k[..., 40, :] = bad
    out = rp.attention(q, k, v, causal=True, backend=backend)
    np.testing.assert_array_equal(out[..., :40, :], clean[..., :40, :])
    if np.isnan(bad):
        assert np.isnan(out[..., 40:, :]).all()


ROWWISE = {
    "causal": {"causal": True},
    "window": {"window": (3, 5)},
    "bool": {"mask": np.arange(70)[:, None] % 3 != np.arange(70) % 3},
    "float": {"mask": np.where(np.arange(70)[:, None] % 3 != np.arange(70) % 3, 0.5, -INF)},
    "bool_column": {"mask": np.arange(70)[:, None] % 3 != 1},
    "float_column": {"mask": np.where(np.arange(70)[:, None] % 3 != 1, 0.5, -INF)},
    "bool_heads": {"mask": np.array([True, False])[:, None, None]},
    "float_heads": {"mask": np.array([0.5, -INF])[:, None, None]},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ROWWISE)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_row_7_a_bad_key_does_not_reach_queries_that_exclude_it(how, bad, dtype, backend, rng):
    """The same key is attended by some queries and excluded for others, which must not change by a bit."""
    options = dict(ROWWISE[how])
    if "mask" in options and options["mask"].dtype != bool:
        options["mask"] = options["mask"].astype(dtype)
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    excluded = rp.logits(q, k, **options, backend="numpy")[..., 40] == -INF
    assert excluded.any()
    assert not excluded.all()
    for name, position in schemes(rng, dtype, 70, 2, 4, 3).items():
        clean = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[..., 40, :] = bad
        dirty_v[..., 40, :] = bad
        found = rp.attention(q, dirty_k, dirty_v, position=position, **options, backend=backend, return_lse=True)
        for a, b in zip(clean, found, strict=True):
            np.testing.assert_allclose(b[excluded], a[excluded], rtol=0, atol=64 * np.finfo(dtype).eps, err_msg=name)
        if np.isnan(bad):
            assert np.isnan(found[0][~excluded]).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e4, 1e8, 1e30])
def test_row_9_large_finite_logits_take_the_maximum(size, dtype, backend, rng):
    q, k, v = make(rng, dtype, depth=1, k_len=70)
    q[...] = size
    k[...] = np.linspace(-1, 1, 70)[:, None]
    out, lse = rp.attention(q, k, v, scale=1.0, backend=backend, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v[..., -1:, :], out.shape), rtol=1e-6)
    np.testing.assert_allclose(lse, size, rtol=1e-6)


def test_row_10_overflow_is_nan_or_infinite_and_float64_stays_finite(backend, rng):
    q, k, v = make(rng)
    out = rp.attention(
        (q * 1e19).astype(np.float32), (k * 1e20).astype(np.float32), v.astype(np.float32), backend=backend
    )
    assert out.shape == (2, 2, 5, 3)
    assert not np.isfinite(out).all()
    assert np.isfinite(rp.attention(q * 1e150, k * 1e150, v, backend=backend)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_11_subnormal_numbers_keep_their_value(dtype, backend, rng):
    q, k, v = make(rng, dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    v[...] = tiny * 1000
    with np.errstate(all="raise"):
        out = rp.attention(q, k, v, backend=backend)
    np.testing.assert_allclose(out, float(tiny) * 1000, rtol=0, atol=float(tiny) * 8)


@pytest.mark.parametrize("name", ["none", "shaw", "t5", "conformer"])
@pytest.mark.parametrize(
    ("row", "batch", "heads", "q_len", "k_len"),
    [(12, (2,), 2, 0, 6), (13, (2,), 2, 5, 0), (13, (2,), 2, 0, 0), (14, (0,), 2, 5, 6), (14, (2,), 0, 5, 6)],
)
def test_rows_12_to_14_empty_axes(row, batch, heads, q_len, k_len, name, backend, rng):
    q, k, v = make(rng, q_len=q_len, k_len=k_len, heads=heads, batch=batch)
    position = None
    if name == "shaw":
        position = rp.Shaw(rng.standard_normal((3, 4)), rng.standard_normal((3, 3)))
    elif heads and name == "t5":
        position = rp.T5(rng.standard_normal((32, heads)))
    elif heads and name == "conformer":
        rows = rng.standard_normal((max(q_len + k_len - 1, 0), heads, 4))
        position = rp.TransformerXL(*rng.standard_normal((2, heads, 4)), rows, variant="conformer")
    for options in ({}, {"causal": True}, {"mask": np.ones((q_len, k_len), bool)}, {"key_lengths": 0}):
        out, lse = rp.attention(q, k, v, position=position, **options, backend=backend, return_lse=True)
        assert out.shape == (*batch, heads, q_len, 3)
        assert lse.shape == (*batch, heads, q_len)
        assert (out == 0).all()
        assert (lse == -INF).all()
        assert rp.logits(q, k, position=position, backend=backend).shape == (*batch, heads, q_len, k_len)


def test_row_14_no_value_dimension(backend, rng):
    q, k, v = make(rng, v_dim=0)
    out, lse = rp.attention(q, k, v, backend=backend, return_lse=True)
    assert out.shape == (2, 2, 5, 0)
    np.testing.assert_allclose(lse, rp.attention(q, k, k, backend="numpy", return_lse=True)[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("v_dim", [1, 3, 16, 65])
def test_row_16_value_dimension_of_its_own(v_dim, backend, rng):
    q, k, v = make(rng, v_dim=v_dim)
    out = rp.attention(q, k, v, backend=backend)
    columns = [rp.attention(q, k, v[..., c : c + 1], backend="numpy") for c in range(v_dim)]
    np.testing.assert_allclose(out, np.concatenate(columns, axis=-1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
@pytest.mark.parametrize("window", [0, 3, 4, (0, 1), (2, None), (None, 0)])
def test_row_17_windows_shorter_and_longer_than_the_sequence(length, window, backend, rng):
    q, k, v = make(rng, q_len=length, k_len=length)
    allowed = naive.allowed(length, length, window=window)
    expected, _ = naive.attention(q, k, v, allowed=allowed)
    np.testing.assert_allclose(rp.attention(q, k, v, window=window, backend=backend), expected, rtol=0, atol=1e-14)


def test_row_18_queries_are_the_last_positions(backend, rng):
    q, k, v = make(rng, q_len=3, k_len=6)
    out = rp.attention(q, k, v, causal=True, backend=backend)
    np.testing.assert_allclose(
        out[..., 0, :], rp.attention(q[..., :1, :], k[..., :4, :], v[..., :4, :])[..., 0, :], rtol=0, atol=1e-14
    )
    np.testing.assert_array_equal(out, rp.attention(q, k, v, causal=True, offset=3, backend=backend))
    top_left = rp.attention(q, k, v, causal=True, offset=0, backend=backend)
    np.testing.assert_allclose(top_left[..., 0, :], v[..., 0, :], rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_19_early_queries_without_keys(dtype, backend, rng):
    q, k, v = make(rng, dtype, q_len=70, k_len=70)
    out, lse = rp.attention(q, k, v, causal=True, offset=-30, backend=backend, return_lse=True)
    assert (out[..., :30, :] == 0).all()
    assert (lse[..., :30] == -INF).all()
    np.testing.assert_array_equal(out[..., 30, :], v[..., 0, :])
    out = rp.attention(q, k, v, causal=True, offset=-(1 << 50), backend=backend)
    assert (out == 0).all()


@pytest.mark.parametrize("how", ["read-only", "too wide a view"])
def test_row_22_inputs_need_not_be_writeable(how, backend, rng):
    """Everything read-only: operands, masks, lengths and tables."""
    arrays = [*make(rng), rng.standard_normal((32, 2)), rng.random((5, 6)) < 0.8, np.array([6, 5])]
    expected = rp.attention(*arrays[:3], position=rp.T5(arrays[3]), mask=arrays[4], key_lengths=arrays[5])
    for x in arrays:
        x.flags.writeable = False
    q, k, v, table, mask, lengths = arrays
    out = rp.attention(q, k, v, position=rp.T5(table), mask=mask, key_lengths=lengths, backend=backend)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)
    assert out.flags.writeable
