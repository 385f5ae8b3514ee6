"""Times that a shared machine hardly changes: a call and a loop of FMA instructions in turns, the best of each.

`nox -s compare` judges commits by these. asv takes less for better, which fractions of a limit are not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import relpos_np as rp

from . import ceiling
from .shapes import SHAPES, make, small

# Where others' use of memory would show, as much of a shape as a core's own cache holds.
CACHED = {"D": {"batch": 16}, "H": {"k_len": 32}}


class Steady:
    """Attention."""

    params = ["A", "B", "D", "H", "J", "L"]
    param_names = ["shape"]
    timeout = 120

    def setup(self, shape):
        self.case = make(replace(SHAPES[shape], **CACHED.get(shape, {})))
        small(shape).attention()

    def track_time(self, shape):
        """Time of the call over that of as many operations of the FMA loop as it needs."""
        return ceiling.in_fma(self.case.into_kept, self.case.operations)

    track_time.unit = "of the FMA loop"


class SteadyBackward:
    """Gradients."""

    def setup(self):
        self.case = make(SHAPES["A"])
        small("A").attention_vjp()

    def track_time(self):
        return ceiling.in_fma(self.case.attention_vjp, self.case.backward_operations)

    track_time.unit = "of the FMA loop"


class SteadyShift:
    """rel_shift, as if each element were an operation."""

    def setup(self):
        self.x = np.ones((4, 128, 255), np.float32)
        self.kept = rp.rel_shift(self.x, variant="conformer")

    def track_time(self):
        return ceiling.in_fma(self.shift, self.kept.size)

    def shift(self):
        """The call, into an array in use."""
        rp.rel_shift(self.x, variant="conformer", out=self.kept)

    track_time.unit = "of the FMA loop"
