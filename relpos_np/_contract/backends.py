"""Names of the backends."""

from __future__ import annotations

# "numpy" evaluates each scheme's formula; the others evaluate terms. All but the last run on any machine.
HOST_BACKENDS = ("numpy", "terms", "numba")
BACKENDS = (*HOST_BACKENDS, "cuda")
WITH_KERNELS = ("numba", "cuda")
