"""What a user's type checker sees: `mypy` checks this file with the package, and it is never run.

`assert_type` fails if an answer has another type than promised, and an unused ignore if a mistake goes unnoticed.
"""

from pathlib import Path
from typing import Any, assert_type

import numpy as np

import relpos_np as rp
import relpos_np.interop.jax
import relpos_np.interop.torch
from relpos_np import distributed, interop, layers, testing
from relpos_np.types import Array

rng = np.random.default_rng(0)
q: np.ndarray[Any, np.dtype[np.float32]] = rng.standard_normal((2, 4, 5, 8), dtype=np.float32)

# Options change what comes back.
assert_type(rp.attention(q, q, q, position=rp.ALiBi(heads=4)), Array)
chosen: bool = len(q) > 1
assert_type(rp.attention(q, q, q, return_lse=False, return_bound=False), Array)
assert_type(rp.attention(q, q, q, return_lse=True), Any)
assert_type(rp.attention(q, q, q, return_bound=chosen), Any)
ready = rp.prepare(q, q, q, position=rp.ALiBi(heads=4))
assert_type(ready(q, q, q), Array)
assert_type(ready(q, q, q, return_lse=chosen), Any)
# Arrays of other packages have no type here: only how many there are is known.
assert_type(distributed.attention(q, q, q), Any)
assert_type(distributed.attention(q, q, q, return_lse=True), tuple[Any, Any])
assert_type(interop.torch.attention(q, q, q, return_lse=True), tuple[Any, Any])
assert_type(interop.jax.attention(q, q, q, return_lse=True), tuple[Any, Any])
assert_type(rp.logits(q, q, causal=True, window=(3, None)), Array)
gradient = rp.attention_vjp(q, q, q, grad_out=q)
assert_type(gradient, rp.AttentionGradient)

attention = layers.MultiHeadAttention.from_state_dict(Path("model.safetensors"), prefix="layer.0", format="mpnet")
assert_type(attention, layers.MultiHeadAttention)
assert_type(attention(q), Array)
assert_type(attention(q, return_probabilities=True), tuple[Array, Array])
assert_type(attention(q, return_probabilities=chosen), Array | tuple[Array, Array])
assert_type(testing.real_example()["q"], Array)


class Own(rp.Scheme):
    """A scheme of the user's."""

    def scores(self, q: Array, k: Array, site: rp.terms.Site) -> Array:
        """Nothing."""
        return np.zeros((site.q_len, site.k_len), site.dtype)

    def lower(self, q: Array, k: Array, site: rp.terms.Site) -> rp.terms.Terms:
        """No term."""
        return rp.terms.Terms()


assert_type(rp.attention(q, q, q, position=(Own(), rp.ScoreMod(lambda s, b, h, i, j: s - i))), Array)
assert_type(testing.check_scheme(Own(), q, q, q, gradients=False), dict[str, float])
rp.WindowBias(q, query_grid=(2, 2))  # type: ignore[call-arg]

with rp.use_backend("numpy"):
    rp.set_backend(None)

# Mistakes are noticed.
rp.attention(q, q)  # type: ignore[call-overload]
ready(q, q, q, return_lsee=True)  # type: ignore[call-overload]
rp.attention(q, q, q, position="t5")  # type: ignore[call-overload]
rp.attention(q, q, q, casual=True)  # type: ignore[call-overload]
rp.Shaw(left=2, outsde="zero")  # type: ignore[call-arg]
rp.Shaw(left=2, outside="wrap")  # type: ignore[arg-type]
rp.Sandwich(variant="published")  # type: ignore[arg-type]
rp.rel_shift(q, variant="conformers")  # type: ignore[arg-type]
rp.attention(q, q, q, backend="torch")  # type: ignore[call-overload]
rp.logits(q, q, cap_order="content first")  # type: ignore[arg-type]
rp.set_backend("cupy")  # type: ignore[arg-type]
rp.set_precision("low")  # type: ignore[arg-type]
layers.MultiHeadAttention(q, q, q)  # type: ignore[call-arg]
