"""rel_shift as a parallel copy, against the same amount of memory copied."""

from __future__ import annotations

import numpy as np

import relpos_np as rp

from . import ceiling
from .shapes import products


class RelShift:
    """(8, 2048, 4095) in float32, and Transformer-XL's square shift."""

    params = ["conformer", "transformer_xl"]
    param_names = ["variant"]

    def setup(self, variant):
        self.x = products(variant)
        self.kept = rp.rel_shift(self.x, variant=variant)

    def run(self, variant):
        return rp.rel_shift(self.x, variant=variant, out=self.kept)

    def time_rel_shift(self, variant):
        self.run(variant)

    def track_fraction_of_copy(self, variant):
        """Time of copying the result once, by NumPy on one thread, over time of the shift, into arrays in use."""
        result, target = self.run(variant), np.zeros_like(self.kept)
        ratios = [
            ceiling.timed(lambda: np.copyto(target, result)) / ceiling.timed(lambda: self.run(variant))
            for _ in range(ceiling.ROUNDS)
        ]
        return float(np.median(ratios))

    track_fraction_of_copy.unit = "of a copy"
