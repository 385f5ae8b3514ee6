"""Polar positions: what they have that rotary positions lack, extreme numbers, and what is refused."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import assert_error_names, close

BIAS = np.linspace(-2.0, 0.0, 8)
Q = np.zeros((2, 4, 3, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_numbers_are_their_own_magnitude(dtype, backend):
    """exp(1000) is beyond every range; ln(1 + exp(1000)) is 1000, and ln(1 + exp(-1000)) is 0."""
    q = np.array([[[1000.0, -1000.0]]], dtype)
    found = rp.logits(q, q, position=rp.PoPE(np.zeros(2)), scale=1.0, backend=backend)
    close(found, [[[1e6]]], 1e-1 if dtype == np.float32 else 1e-9)
    grads = rp.attention_vjp(q, q, q, position=rp.PoPE(np.zeros(2)), grad_out=q, backend=backend)
    assert np.isfinite(grads.q).all()


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
