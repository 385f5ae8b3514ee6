"""Options of a call that cost time, each beside the plain call of its length."""

from __future__ import annotations

import numpy as np

import relpos_np as rp

HEADS, HEAD_DIM = 2, 64
# Tokens, and what the options are made of: the operands' length, and numbers to draw.
CALLS = {
    "none": (2048, lambda n, rng: {}),
    "sinks": (2048, lambda n, rng: {"sinks": rng.standard_normal(HEADS, dtype=np.float32)}),
    "softcap": (2048, lambda n, rng: {"softcap": 30.0}),
    "query_scale": (2048, lambda n, rng: {"query_scale": 1 + rng.random(n, dtype=np.float32)}),
    "selected": (2048, lambda n, rng: {"selected": rng.integers(0, n, (n, 256))}),
    "none, long": (8192, lambda n, rng: {}),
    "chunked": (8192, lambda n, rng: {"rule": rp.Chunked(512)}),
    "prefix": (8192, lambda n, rng: {"rule": rp.Prefix(1024)}),
    "segments": (8192, lambda n, rng: {"segments": np.arange(0, n + 1, 512)}),
}


class CallOptions:
    """Causal attention without positions, but for a prefix, which is causal itself."""

    params = list(CALLS)
    param_names = ["option"]
    timeout = 120

    def setup(self, option):
        length, made = CALLS[option]
        rng = np.random.default_rng(0)
        self.operands = rng.standard_normal((3, HEADS, length, HEAD_DIM), dtype=np.float32)
        self.options = made(length, rng)
        self.causal = option != "prefix"
        self.time_attention(option)  # compiles the kernels or loads them

    def time_attention(self, option):
        rp.attention(*self.operands, causal=self.causal, backend="numba", **self.options)

    def time_vjp(self, option):
        rp.attention_vjp(*self.operands, grad_out=self.operands[0], causal=self.causal, backend="numba", **self.options)

    def peakmem_attention(self, option):
        self.time_attention(option)
