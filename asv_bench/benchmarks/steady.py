"""Times that a shared machine hardly changes: a call and the machine's limit in turns, the best of each.

`nox -s compare` judges commits by these. asv takes less for better, which fractions of a limit are not.
"""

from __future__ import annotations

import relpos_np as rp

from . import ceiling
from .shapes import SHAPES, case, make, products, small


class Steady:
    """Attention, in units of the FMA loop or of one read of the keys and values."""

    params = ["A", "B", "D", "H", "J", "L"]
    param_names = ["shape"]
    timeout = 120

    def setup(self, shape):
        self.case = case(shape)
        small(shape).attention()

    def track_time(self, shape):
        """Time of the call over that of as many operations as it needs, or over that of the read."""
        if SHAPES[shape].q_len == 1:
            return ceiling.in_reads(self.case.into_kept, (self.case.k, self.case.v))
        return ceiling.in_fma(self.case.into_kept, self.case.operations)

    track_time.unit = "of the limit"


class SteadyBackward:
    """Gradients, in units of the FMA loop."""

    def setup(self):
        self.case = make(SHAPES["A"])
        small("A").attention_vjp()

    def track_time(self):
        return ceiling.in_fma(self.case.attention_vjp, self.case.backward_operations)

    track_time.unit = "of the limit"


class SteadyShift:
    """rel_shift, in units of one read of its result."""

    def setup(self):
        self.x = products("conformer")
        self.kept = rp.rel_shift(self.x, variant="conformer")

    def track_time(self):
        return ceiling.in_reads(self.shift, (self.kept,))

    def shift(self):
        """The call, into an array in use."""
        rp.rel_shift(self.x, variant="conformer", out=self.kept)

    track_time.unit = "of the limit"
