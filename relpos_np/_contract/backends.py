"""Names of the backends."""

from __future__ import annotations

from relpos_np.types import Backend

# "numpy" evaluates each scheme's formula; the others evaluate terms. All but the last run on any machine.
HOST_BACKENDS: tuple[Backend, ...] = ("numpy", "terms", "numba")
BACKENDS: tuple[Backend, ...] = (*HOST_BACKENDS, "cuda")
WITH_KERNELS = ("numba", "cuda")
