"""Error against float64 of every scheme, in every dtype: tracked as time is, so that a loss of digits shows."""

from __future__ import annotations

from relpos_np.backend import current
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing import sweep

# The same arguments for ever: the figures change with the code alone.
SEED = 0


class Accuracy:
    """The cases of `relpos check` on the default backend: all variants, lengths and masks of a scheme."""

    params = [list(SCHEMES), list(sweep.DTYPES)]
    param_names = ["scheme", "dtype"]
    timeout = 180

    def setup(self, scheme, dtype):
        info = SCHEMES[scheme]
        backend = current() if current() in info.backends else info.backends[-1]
        self.cases = [
            case
            for variant in info.variants or (None,)
            for case in sweep.cases(scheme, variant, [backend], SEED)
            if case.dtype == dtype and case.backend == backend
        ]
        if not self.cases:
            # An encoding that only NumPy computes is the reference itself in float64.
            raise NotImplementedError(f"{scheme} in {dtype} is the reference")

    def track_error(self, scheme, dtype):
        """Largest error, in units of what is tolerated (`relpos_np.testing.tolerance`): 1 is the limit."""
        return max(case.error() for case in self.cases)

    track_error.unit = "of the tolerance"
