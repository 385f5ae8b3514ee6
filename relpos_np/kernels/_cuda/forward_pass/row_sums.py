"""What becomes of a row's maximum and sum: its log-sum-exp, or for gradients both apart."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from relpos_np.kernels._cuda.launch.device import inline
from relpos_np.kernels._cuda.simd.intrinsics import u64


@cache
def write_lse(dtype: np.dtype[Any]) -> Any:
    """Write the log-sum-exp of a row from its maximum and the sum of its exponentials.

    With `apart`, which is not 0, that is a base, and the logarithm of the sum follows so many rows further: beside a
    maximum of -1e9 one number would have none of its digits.
    """
    real = dtype.type
    zero, least = real(0), real(-np.inf)

    def write_lse(lse, row, top, total, apart):  # type: ignore[no-untyped-def]
        base, more = top, least
        if top == least:
            base = zero
        if total != zero:
            more = real(math.log(total))
        if apart == 0:
            lse[u64(row)] = base + more
        else:
            lse[u64(row)] = base
            lse[u64(row + apart)] = more

    return inline(write_lse)
