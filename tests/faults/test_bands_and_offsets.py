"""Windows beside the length of a sequence, where queries stand, and maps that no window divides."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests import naive
from tests.faults.calls import INF, both, dtypes, gradients, make, operands, shapes, simulate_only, small


@pytest.mark.parametrize("length", [1, 3, 4, 5])
@pytest.mark.parametrize("window", [0, 3, 4, (0, 1), (2, None), (None, 0)])
def test_row_17_windows_shorter_and_longer_than_the_sequence(length, window, backend, rng):
    q, k, v = make(rng, q_len=length, k_len=length, v_dim=3)
    allowed = naive.allowed(length, length, window=window)
    expected, _ = naive.attention(q, k, v, allowed=allowed)
    np.testing.assert_allclose(rp.attention(q, k, v, window=window, backend=backend), expected, rtol=0, atol=1e-14)
    scores = naive.logits(q, k, allowed=allowed)
    np.testing.assert_allclose(rp.logits(q, k, window=window, backend=backend), scores, rtol=0, atol=1e-14)


@pytest.mark.parametrize("width", [1, 62, 63, 64, 65])
@simulate_only(width=[1, 63])
def test_row_17_windows_beside_the_length_of_a_kernels_tile(width, backend, rng):
    """The band leaves out one pair, or none: on the one side the general kernel runs, on the other that for windows."""
    length = 9 if small(backend) else 64
    width = max(width - 64 + length, 1)
    for dtype in dtypes(backend):
        q, k, v = operands(rng, backend, dtype, length, length)
        d = np.arange(length) - np.arange(length)[:, None]
        for window, seen in ((width, abs(d) <= width), ((width, None), d >= -width), ((None, width), d <= width)):
            found = both(q, k, v, window=window, backend=backend)
            expected = both(q, k, v, mask=seen, backend="numpy")
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=64 * np.finfo(dtype).eps)


def swin_weights(rng, extent):
    """Weights of a layer with 4 channels and 2 heads."""
    rows = (2 * extent[0] - 1) * (2 * extent[1] - 1)
    shapes = {
        "q.weight": (4, 4),
        "q.bias": (4,),
        "kv.weight": (8, 4),
        "kv.bias": (8,),
        "proj.weight": (4, 4),
        "proj.bias": (4,),
        "relative_position_bias_table": (rows, 2),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_row_18_queries_are_the_last_positions(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            out = both(q, k, v, causal=True, backend=backend)
            stated = both(q, k, v, causal=True, offset=k_len - q_len, backend=backend)
            for a, b in zip(out, stated, strict=True):
                np.testing.assert_array_equal(a, b)
            # The last query sees all keys, and each one before it one key less.
            for i in {q_len // 2} if small(backend) else {0, q_len // 2, q_len - 1}:
                n = k_len - q_len + i + 1
                expected = rp.attention(q[..., i : i + 1, :], k[..., :n, :], v[..., :n, :], backend="numpy")
                close = {"rtol": 0, "atol": 64 * np.finfo(dtype).eps}
                np.testing.assert_allclose(out[0][..., i : i + 1, :], expected, **close)
            top_left = rp.attention(q, k, v, causal=True, offset=0, backend=backend)
            np.testing.assert_allclose(
                top_left[..., 0, :], np.broadcast_to(v[..., 0, :], (2, 2, v.shape[-1])), rtol=1e-6
            )


def test_row_19_early_queries_without_keys(backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, v = operands(rng, backend, dtype, q_len, k_len)
            for early in (
                {q_len} if small(backend) and q_len == 1 else {4} if small(backend) else {1, q_len // 2, q_len}
            ):
                options = {"causal": True, "offset": -early, "backend": backend}
                out, lse = both(q, k, v, **options)
                assert (out[..., :early, :] == 0).all()
                assert (lse[..., :early] == -INF).all()
                assert np.isfinite(lse[..., early:]).all()
                if early < q_len:
                    first = np.broadcast_to(v[..., 0, :], out[..., early, :].shape)
                    np.testing.assert_allclose(out[..., early, :], first, rtol=8 * np.finfo(dtype).eps)
                found = gradients(q, k, v, grad_lse=np.ones(lse.shape, dtype), **options)
                assert all(np.isfinite(x).all() for x in found.values())
                assert (found["q"][..., :early, :] == 0).all()
                # Keys beyond the last query's position are nobody's.
                assert (found["k"][..., max(q_len - early, 0) :, :] == 0).all()
        out = rp.attention(q, k, v, causal=True, offset=-(1 << 50), backend=backend)
        assert (out == 0).all()


@pytest.mark.parametrize("size", [(5, 7), (4, 5), (3, 9)])
def test_row_20_the_order_of_padding_and_shifting_is_said_and_matters(size, rng):
    """What pads first and what shifts first differ on a map that the window does not divide, and only there."""
    extent, shift = (4, 4), (2, 2)
    weights = swin_weights(rng, extent)
    pad_first, shift_first = (
        layers.SwinAttention(4, extent, 2, shift_size=shift, weights=weights, pad_order=order)
        for order in ("pad_then_shift", "shift_then_pad")
    )
    default = layers.SwinAttention(4, extent, 2, shift_size=shift, weights=weights)
    assert default.pad_order == "pad_then_shift"
    assert "pad_order='pad_then_shift'" in repr(default)
    x = rng.standard_normal((2, *size, 4))
    np.testing.assert_array_equal(default(x), pad_first(x))
    assert np.abs(pad_first(x) - shift_first(x)).max() > 1e-3
    whole = rng.standard_normal((2, 8, 4, 4))
    np.testing.assert_allclose(pad_first(whole), shift_first(whole), rtol=0, atol=1e-14)
    with pytest.raises(rp.RelposValueError, match=r"pad_order.*'pad_then_shift', 'shift_then_pad'"):
        layers.SwinAttention(4, extent, 2, shift_size=shift, weights=weights, pad_order="whichever")
