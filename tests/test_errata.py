"""The notes behind this library, as they print their formulas and code: where they agree with it, and where not."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers, reference
from tests import notes


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(("length", "k"), [(1, 1), (7, 2), (4, 9), (5, 0)])
def test_shaw(length, k, rng):
    x, weights = rng.standard_normal((length, 6)), rng.standard_normal((3, 6, 4))
    tables = rng.standard_normal((2, 2 * k + 1, 4))
    q, key, v = ((x @ w)[None] for w in weights)
    printed = notes.shaw_output(x, *weights, *tables)
    close(rp.attention(q, key, v, position=rp.Shaw(*tables))[0], printed)
    close(reference.shaw_attention_matrix(q, key, v, *tables)[0], printed)
    if k:  # the pair (i, j) looks up j - i, not i - j
        assert length == 1 or np.abs(notes.shaw_output(x, *weights, *tables[:, ::-1]) - printed).max() > 0.1


def rstt_weights(channels, frames_q, window, heads, rng):
    weights = {
        "relative_position_bias_table": rng.standard_normal((np.prod([2 * e - 1 for e in (frames_q, *window)]), heads))
    }
    for name, size in (("q", channels), ("kv", 2 * channels), ("proj", channels)):
        weights |= {f"{name}.weight": rng.standard_normal((size, channels)), f"{name}.bias": rng.standard_normal(size)}
    return weights


@pytest.mark.parametrize(("frames_q", "frames_kv"), [(1, 1), (4, 4), (3, 2), (7, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_rstt(frames_q, frames_kv, masked, rng):
    window, channels, heads, windows = (2, 3), 8, 2, 2
    weights = rstt_weights(channels, frames_q, window, heads, rng)
    sizes = channels, frames_q, frames_kv, window, heads
    module = layers.WindowAttention(*sizes, weights=weights)
    q, kv = (rng.standard_normal((3 * windows, frames * 6, channels)) for frames in (frames_q, frames_kv))
    mask = np.where(rng.random((windows, frames_q * 6, frames_kv * 6)) < 0.3, -100.0, 0.0) if masked else None
    printed = notes.window_attention(q, kv, *sizes[1:4], weights, mask)
    for found, expected in zip(module(q, kv, mask), printed, strict=True):
        close(found, expected)
    rows = notes.window_rows(frames_q, frames_kv, window)
    axes = [np.arange(2), np.arange(3)]
    keys = reference.rstt_frames(frames_q, frames_kv)
    np.testing.assert_array_equal(
        reference.window_index([np.arange(frames_q), *axes], [keys, *axes], (frames_q, *window)), rows
    )


def test_rstt_without_keys(rng):
    """The code takes the queries for keys: a wrong bias with two heads and half as many key frames, else an error."""
    window, channels = (2, 3), 12
    q = rng.standard_normal((2, 4 * 6, channels))
    for heads in (1, 2, 3, 4):
        weights = rstt_weights(channels, 4, window, heads, rng)
        module = layers.WindowAttention(channels, 4, 2, window, heads, weights=weights)
        with pytest.raises(rp.RelposValueError, match="kv: needed"):
            module(q)
        if heads != 2:
            with pytest.raises(ValueError, match=r"reshape|broadcast"):
                notes.window_attention(q, None, 4, 2, window, weights)
            continue
        printed, attn = notes.window_attention(q, None, 4, 2, window, weights)
        same = layers.WindowAttention(channels, 4, 4, window, heads, weights=weights)  # a table of as many rows
        assert printed.shape == same(q)[0].shape
        assert np.abs(attn - same(q)[1]).max() > 0.1


def test_sinusoid_by_channel():
    printed = np.stack([notes.channel_sinusoid(t, 10) for t in range(40)])
    close(rp.Sinusoidal(10, layout="dimension_index").encode(40), printed)
    assert np.abs(rp.Sinusoidal(10).encode(40) - printed).max() > 1


def test_terms_without_projections(rng):
    e, (u, v), rows = rng.standard_normal((5, 4)), rng.standard_normal((2, 4)), rng.standard_normal((9, 4))
    printed = notes.score_terms(e, u, v, lambda n: rows[4 - n])  # rows of distances 4 ... -4
    for found, expected in zip(reference.relative_terms(e, e, u, v, rows), printed, strict=True):
        close(found, expected)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_shift(length, rng):
    """The list in the note's order, moved by L - 1 - i; L - i is wrong, and so is a row more."""
    q, columns = rng.standard_normal((length, 4)), rng.standard_normal((4, 2 * length - 1))
    wanted = notes.position_scores(q, lambda n: columns[:, length - 1 + n])
    products = q @ columns
    np.testing.assert_allclose(notes.moved_left(products, lambda i: length - 1 - i), wanted, atol=1e-14)
    close(rp.rel_shift(products, variant="conformer"), wanted)
    one_off = notes.moved_left(np.pad(products, ((0, 0), (0, 1))), lambda i: length - i)
    assert np.abs(one_off - wanted).max() > 0.01
    longer = np.concatenate([products, rng.standard_normal((1, 2 * length - 1))])
    if length > 1:
        assert rp.rel_shift(longer, variant="conformer").shape == (length + 1, length - 1)


@pytest.mark.parametrize("memory", [0, 3])
def test_the_last_matrix(memory, rng):
    """R_0 ... R_{M+L-1} is the wrong way round for the shift of Transformer-XL."""
    length, dim = 4, 6
    q, rows = rng.standard_normal((length, dim)), rng.standard_normal((memory + length, dim))
    query, key = np.arange(length)[:, None], np.arange(memory + length)
    distance = query + memory - key
    wanted = np.where(distance >= 0, (q[:, None] * rows[np.maximum(distance, 0)]).sum(axis=-1), 0)
    printed, reverse = (rp.rel_shift(q @ r.T, variant="transformer_xl") for r in (rows, rows[::-1]))
    close(np.where(distance >= 0, reverse, 0), wanted)
    assert np.abs(np.where(distance >= 0, printed, 0) - wanted).max() > 1


def test_what_the_shift_brings_in():
    """Nothing of the same row: a zero, and the next row's beginning."""
    entries = np.arange(1.0, 26.0).reshape(5, 5)
    found = rp.rel_shift(entries, variant="transformer_xl")
    for i in range(4):
        expected = [*entries[i, 4 - i :], 0.0, *entries[i + 1]]
        np.testing.assert_array_equal(found[i], expected[:5])
    np.testing.assert_array_equal(found[4], entries[4])


def test_the_class_for_sinusoids(rng):
    exact = notes.positional_encoding(64, dtype=np.float64)[0]
    close(rp.Sinusoidal(64).encode(1000), exact, 1e-12)
    table = notes.positional_encoding(64)
    assert 5.5e-5 < np.abs(table[0] - exact).max() < 5.7e-5
    assert np.abs(rp.Sinusoidal(64)(np.zeros((1000, 64), np.float32)) - exact).max() < 6e-8
    x = rng.standard_normal((2, 9, 64)).astype(np.float32)
    close(notes.encoded(x, table), rp.Sinusoidal(64)(x), 1e-6)
    assert notes.encoded(x.astype(np.float16), table).dtype == np.float32
    assert rp.Sinusoidal(64)(x.astype(np.float16)).dtype == np.float16


def test_what_the_class_for_sinusoids_refuses():
    with pytest.raises(ValueError, match="broadcast"):
        notes.positional_encoding(7)
    table = notes.positional_encoding(8)
    with pytest.raises(ValueError, match="broadcast"):
        notes.encoded(np.zeros((1, 1001, 8)), table)
    silent = notes.encoded(np.zeros((1, 5, 8)), notes.positional_encoding(8, max_len=1))
    np.testing.assert_array_equal(silent, np.broadcast_to(table[:, :1], (1, 5, 8)))
    assert rp.Sinusoidal(7)(np.zeros((1, 1001, 7))).shape == (1, 1001, 7)
