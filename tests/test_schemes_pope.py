"""Polar positions: extreme numbers."""

import numpy as np
import pytest

import relpos_np as rp
from tests.compare import close


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_numbers_are_their_own_magnitude(dtype, backend):
    """exp(1000) is beyond every range; ln(1 + exp(1000)) is 1000, and ln(1 + exp(-1000)) is 0."""
    q = np.array([[[1000.0, -1000.0]]], dtype)
    found = rp.logits(q, q, position=rp.PoPE(np.zeros(2)), scale=1.0, backend=backend)
    close(found, [[[1e6]]], 1e-1 if dtype == np.float32 else 1e-9)
    grads = rp.attention_vjp(q, q, q, position=rp.PoPE(np.zeros(2)), grad_out=q, backend=backend)
    assert np.isfinite(grads.q).all()
