"""What a user's type checker sees: `mypy` checks this file with the package, and it is never run.

`assert_type` fails if an answer has another type than promised, and an unused ignore if a mistake goes unnoticed.
"""

from pathlib import Path
from typing import Any, assert_type

import numpy as np

import relpos_np as rp
from relpos_np import layers, testing
from relpos_np.types import Array

rng = np.random.default_rng(0)
q: np.ndarray[Any, np.dtype[np.float32]] = rng.standard_normal((2, 4, 5, 8), dtype=np.float32)

# Options change what comes back.
assert_type(rp.attention(q, q, q, position=rp.ALiBi(heads=4)), Array)
assert_type(rp.attention(q, q, q, return_lse=True), tuple[Array, Array])
assert_type(rp.logits(q, q, causal=True, window=(3, None)), Array)
gradient = rp.attention_vjp(q, q, q, grad_out=q)
assert_type(gradient, rp.AttentionGradient)

attention = layers.MultiHeadAttention.from_state_dict(Path("model.safetensors"), prefix="layer.0", format="mpnet")
assert_type(attention, layers.MultiHeadAttention)
assert_type(attention(q), Array)
assert_type(attention(q, return_probabilities=True), tuple[Array, Array])
assert_type(testing.real_example()["q"], Array)

with rp.use_backend("numpy"):
    rp.set_backend(None)

# Mistakes are noticed.
rp.attention(q, q)  # type: ignore[call-overload]
rp.attention(q, q, q, position="t5")  # type: ignore[call-overload]
rp.attention(q, q, q, casual=True)  # type: ignore[call-overload]
rp.Shaw(left=2, outsde="zero")  # type: ignore[call-arg]
layers.MultiHeadAttention(q, q, q)  # type: ignore[call-arg]
