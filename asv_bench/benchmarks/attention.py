"""Attention with a T5 bias: time, speed against the machine's limit, memory and error."""

from __future__ import annotations

import time

import numba
import numpy as np

import relpos_np as rp

from .ceiling import fma_seconds, rate, turns_for
from .shapes import SHAPES, inputs, operations, row_error


class Attention:
    """The shapes A, B and C on the default backend."""

    params = list(SHAPES)
    param_names = ["shape"]
    timeout = 120

    def setup(self, shape):
        self.q, self.k, self.v, self.scheme = inputs(shape)
        self.run()

    def run(self):
        return rp.attention(self.q, self.k, self.v, position=self.scheme)

    def time_attention(self, shape):
        self.run()

    def peakmem_attention(self, shape):
        self.run()

    def track_fraction_of_fma(self, shape):
        """Median over alternating rounds of speed / speed of the FMA loop, each for as long as the other."""
        threads = numba.get_num_threads()
        started = time.perf_counter()
        self.run()
        turns = turns_for(time.perf_counter() - started, threads)
        ratios = []
        for _ in range(7):
            limit = rate(turns, threads, fma_seconds(turns, threads))
            started = time.perf_counter()
            self.run()
            ratios.append(operations(shape) / (time.perf_counter() - started) / limit)
        return float(np.median(ratios))

    track_fraction_of_fma.unit = "of the FMA loop"

    def track_error(self, shape):
        """Largest error of 64 rows against float64."""
        return row_error(shape, self.run())

    track_error.unit = "absolute"


class Overhead:
    """One query and one key: what a call costs beside its arithmetic."""

    params = ["plain", "t5"]
    param_names = ["scheme"]

    def setup(self, scheme):
        self.x = np.ones((1, 1, 1, 16), np.float32)
        self.scheme = rp.T5(np.ones((32, 1), np.float32)) if scheme == "t5" else None
        self.time_call(scheme)

    def time_call(self, scheme):
        rp.attention(self.x, self.x, self.x, position=self.scheme)


class Reference:
    """The NumPy backend, which must stay usable."""

    def setup(self):
        self.q, self.k, self.v, self.scheme = inputs("A")

    def time_numpy(self):
        rp.attention(self.q, self.k, self.v, position=self.scheme, backend="numpy")
