"""rel_shift as a parallel copy, against the same amount of memory copied."""

from __future__ import annotations

import time

import numpy as np

import relpos_np as rp


class RelShift:
    """(8, 2048, 4095) in float32, and Transformer-XL's square shift."""

    params = [["conformer", "transformer_xl"]]
    param_names = ["variant"]

    def setup(self, variant):
        columns = 4095 if variant == "conformer" else 2048
        self.x = np.random.default_rng(0).standard_normal((8, 2048, columns), dtype=np.float32)
        self.run(variant)

    def run(self, variant):
        return rp.rel_shift(self.x, variant=variant)

    def time_rel_shift(self, variant):
        self.run(variant)

    def track_fraction_of_copy(self, variant):
        """Time of copying the result once, by NumPy on one thread, over time of the shift."""
        result = self.run(variant)
        ratios = []
        for _ in range(7):
            started = time.perf_counter()
            result.copy()
            middle = time.perf_counter()
            self.run(variant)
            ratios.append((middle - started) / (time.perf_counter() - middle))
        return float(np.median(ratios))

    track_fraction_of_copy.unit = "of a copy"
