"""Polar positions: what they have that rotary positions lack, extreme numbers, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import assert_error_names, close

BIAS = np.linspace(-2.0, 0.0, 8)
Q = np.zeros((2, 4, 3, 8))


def test_only_positions_have_an_angle(backend, rng):
    """Of one channel the score is a cosine times what does not depend on positions, whatever the signs of q and k."""
    q, k = rng.standard_normal((2, 1, 9, 1))
    s = rp.logits(q, k, position=rp.PoPE(np.array([-0.3]), frequencies=np.array([0.7])), scale=1.0, backend=backend)
    d = np.arange(9) - np.arange(9)[:, None]
    close(s[0], np.log1p(np.exp(q[0])) * np.log1p(np.exp(k[0])).T * np.cos(0.7 * d - 0.3), 1e-13)


def test_moving_all_positions_changes_nothing(backend, rng):
    q, k = rng.standard_normal((2, 4, 9, 8))
    here = rp.logits(q, k, position=rp.PoPE(BIAS), backend=backend)
    moved = rp.PoPE(BIAS, positions=np.arange(9) + 1000.25)
    close(rp.logits(q, k, position=moved, backend=backend), here, 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_numbers_are_their_own_magnitude(dtype, backend):
    """exp(1000) is beyond every range; ln(1 + exp(1000)) is 1000, and ln(1 + exp(-1000)) is 0."""
    q = np.array([[[1000.0, -1000.0]]], dtype)
    found = rp.logits(q, q, position=rp.PoPE(np.zeros(2)), scale=1.0, backend=backend)
    close(found, [[[1e6]]], 1e-1 if dtype == np.float32 else 1e-9)
    grads = rp.attention_vjp(q, q, q, position=rp.PoPE(np.zeros(2)), grad_out=q, backend=backend)
    assert np.isfinite(grads.q).all()


def test_repr():
    assert repr(rp.PoPE(BIAS)) == "PoPE(bias=(8,))"
    scheme = rp.PoPE(BIAS[None], frequencies=BIAS, positions=np.ones(3), key_positions=np.ones((2, 4)))
    assert repr(scheme) == "PoPE(bias=(1, 8), frequencies=(8,), positions=(3,), key_positions=(2, 4))"


BAD = {
    "bias: nan": (lambda: rp.PoPE(np.array([np.nan])), ["bias", "NaN"]),
    "frequencies: count": (lambda: rp.PoPE(BIAS, frequencies=np.ones(4)), ["frequencies", "(8,)", "(4,)"]),
    "frequencies: inf": (lambda: rp.PoPE(np.ones(1), frequencies=np.array([np.inf])), ["frequencies"]),
    "base: and frequencies": (lambda: rp.PoPE(BIAS, base=5.0, frequencies=BIAS), ["base", "5.0"]),
    "base: 0": (lambda: rp.PoPE(BIAS, base=0.0), ["base", "0.0"]),
    "positions: length": (
        lambda: rp.logits(Q, Q, position=rp.PoPE(BIAS, positions=np.ones(4))),
        ["positions", "(4,)", "(..., 3)"],
    ),
    "positions: none": (lambda: rp.PoPE(BIAS, key_positions=np.ones(4)), ["positions", "key_positions"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    assert_error_names(*BAD[name])
