"""Caps, rules, sinks and selections at sizes just around those of tiles and blocks, forward and back."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.plan import forward

# In the simulator NumPy warns of the infinities that some tests put in.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

OPTIONS = {
    "cap": lambda rng, q, k: {"softcap": 1.5, "mask": rng.standard_normal((q, k)), "position": _table(rng)},
    "cap of products": lambda rng, q, k: {"softcap": 1.5, "cap_order": "content", "position": _table(rng)},
    "cap with vectors": lambda rng, q, k: {"softcap": 1.5, "position": rp.Shaw(rng.standard_normal((9, 3)))},
    "chunks": lambda rng, q, k: {"rule": rp.Chunked(33, left=1), "causal": True},
    "prefix": lambda rng, q, k: {"rule": rp.Prefix(64), "sinks": rng.standard_normal(2)},
    "dilated": lambda rng, q, k: {"rule": rp.Dilated(7), "window": 40, "offset": k + 3},
    "selected": lambda rng, q, k: {"selected": rng.integers(-1, k, (q, 9)), "query_scale": 1 + rng.random(q)},
}


def _table(rng):
    return rp.T5(rng.standard_normal((32, 2)), max_distance=70)


@pytest.mark.parametrize(("q_len", "k_len"), [(64, 65), (65, 129), (3, 129), (129, 64)])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, q_len, k_len, rng):
    q, k, v = (rng.standard_normal((heads, n, 3)) for heads, n in ((2, q_len), (1, k_len), (1, k_len)))
    options = OPTIONS[name](rng, q_len, k_len)
    grads = {"grad_out": rng.standard_normal(q.shape), "grad_lse": rng.standard_normal(q.shape[:-1])}
    out, expected = (rp.attention(q, k, v, return_lse=True, backend=b, **options) for b in ("cuda", "numpy"))
    if np.isneginf(expected[1]).any():
        grads["grad_lse"][np.isneginf(expected[1])] = 0
    found, wanted = (rp.attention_vjp(q, k, v, backend=b, **grads, **options) for b in ("cuda", "numpy"))
    pairs = [*zip(out, expected, strict=True), *((getattr(found, x), getattr(wanted, x)) for x in "qkv")]
    pairs += [(found.position[x], wanted.position[x]) for x in wanted.position]
    pairs += [(getattr(found, x), getattr(wanted, x)) for x in ("sinks", "query_scale") if x in options]
    for a, b in pairs:
        # Sums of at most 2 * 129 * 129 numbers.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b[np.isfinite(b)]).max(initial=1))


def test_steps_and_phases_say_which_keys_are_attended():
    """In numbers of 32 bits, whatever the step and the offset are."""
    for q_len, k_len in ((1, 1), (1, 6), (5, 1), (4, 5), (5, 4)):
        distances = np.arange(k_len) - np.arange(q_len)[:, None]
        for step in (*range(1, 13), 1 << 58):
            for offset in (*range(-14, 15), 1 << 57, 3 - (1 << 58)):
                short, phase = forward.strides_of_keys(step, offset, q_len, k_len)
                assert 0 <= phase < 3 * (q_len + k_len)
                assert short <= q_len + k_len
                assert (distances + phase).min() >= 0
                found, expected = (distances + phase) % short == 0, (distances - offset) % step == 0
                np.testing.assert_array_equal(found, expected)
