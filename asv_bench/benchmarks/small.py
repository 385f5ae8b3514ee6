"""Small calls: what is paid beside the kernel."""

from __future__ import annotations

import timeit

import numpy as np

import relpos_np as rp

from . import ceiling

# By name: queries, keys, and what positions contribute, for two heads of 8 channels.
CALLS = {"no positions": (16, 16, False), "T5": (16, 16, True), "decoding": (1, 64, False)}
REPEAT = 1000


def small_call(name):
    """A call as a function of nothing, on seeded operands."""
    q_len, k_len, biased = CALLS[name]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 8), dtype=np.float32) for n in (q_len, k_len, k_len))
    position = rp.T5(rng.standard_normal((32, 2), dtype=np.float32)) if biased else None
    return lambda: rp.attention(q, k, v, position=position, backend="numba")


def microseconds(call):
    """Median over rounds of many calls each."""
    call()
    return 1e6 / REPEAT * float(np.median(timeit.repeat(call, number=REPEAT, repeat=max(ceiling.ROUNDS, 3))))


def beside_kernel(call):
    """The same where the kernel is not run: all that the library does before and after."""
    from relpos_np.kernels._numba.launch import launcher

    run = launcher.run
    launcher.run = lambda *_: None
    try:
        return microseconds(call)
    finally:
        launcher.run = run


class SmallCalls:
    """One call as a server with short inputs makes it, again and again."""

    params = list(CALLS)
    param_names = ["call"]

    def setup(self, name):
        self.call = small_call(name)
        self.call()

    def time_call(self, name):
        self.call()

    def track_beside_kernel(self, name):
        return beside_kernel(self.call)

    track_beside_kernel.unit = "µs"
