"""The formats that an implementation may be asked for: what they round, and what computes in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.quantized import small_float
from relpos_np.types import Array


@dataclass(frozen=True)
class Format:
    """A format of floating-point numbers.

    `eps` is the distance from 1 to the next number. `computed` is the format of tables, intermediate results and output
    where q, k and v are only stored in this one.
    """

    name: str
    eps: float
    computed: str

    @property
    def dtype(self) -> Any:
        """The dtype of NumPy, or of ml_dtypes."""
        if self.name in ("float16", "float32", "float64"):
            return np.dtype(self.name)
        return small_float(self.name)

    def rounded(self, x: Array) -> Array:
        """Numbers of float64 rounded to the format, in float64."""
        return x if self.name == "float64" else np.asarray(x).astype(self.dtype).astype(np.float64)

    def unit(self, x: Array) -> Array:
        """The distance between neighbouring numbers of the format at each finite number of float64; 0 at 0."""
        return np.asarray(np.ldexp(self.eps, np.frexp(x)[1] - 1) * (x != 0))


_FORMATS = {
    one.name: one
    for one in (
        Format("float64", 2.0**-52, "float64"),
        Format("float32", 2.0**-23, "float32"),
        Format("float16", 2.0**-10, "float16"),
        Format("bfloat16", 2.0**-7, "bfloat16"),
        Format("float8_e4m3fn", 2.0**-3, "bfloat16"),
        Format("float8_e5m2", 2.0**-2, "bfloat16"),
    )
}
DTYPES = tuple(_FORMATS)


def format_of(name: Any) -> Format:
    """The format of a name; a RelposError says which there are."""
    return _FORMATS[check.choice("dtype", name, DTYPES)]
