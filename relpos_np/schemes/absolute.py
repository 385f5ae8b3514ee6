"""What an encoding that is added to the inputs must offer."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import drop
from relpos_np.schemes.printing import printed
from relpos_np.types import Array


class AbsoluteEncoding:
    """A vector per position that is added to the inputs; subclasses say which, in `encode`, and set `dim`."""

    dim: int
    # The first position that exists; None where every integer is one.
    least: int | None = None

    def encode(self, positions: Any) -> Array:
        """Vectors of positions, one row each: (L, D)."""
        raise NotImplementedError

    def gradient(self, positions: Any, grad: Array) -> dict[str, Array]:
        """Gradients of trained arrays, by attribute, from that of `encode`'s result: (..., L, D)."""
        return {}

    @staticmethod
    def positions(given: Any) -> Array:
        """Positions themselves, or 0 ... L-1 for a length L."""
        if isinstance(given, np.ndarray) and given.ndim:
            return check.array("positions", given)
        if isinstance(given, list | tuple):
            numbers = [check.real("positions", x) for x in given]
            return np.asarray(given if all(isinstance(x, Integral) for x in given) else numbers)
        return np.arange(check.integer("positions", given[()] if isinstance(given, np.ndarray) else given, 0))

    def __repr__(self) -> str:
        return printed(self)

    @np.errstate(all="ignore")
    def __call__(
        self, x: Any, start: int = 0, *, dropout: float = 0.0, rng: np.random.Generator | None = None
    ) -> Array:
        """Add the vectors of positions start ... start + L - 1, then drop elements of the sum.

        Parameters
        ----------
        x : ndarray, shape (..., L, D)
            Inputs.
        start : int
            Position of the first.
        dropout : float
            Rate at which elements of the sum become 0; the others are divided by 1 - dropout.
        rng : numpy.random.Generator, optional
            Source of the dropout mask.

        Returns
        -------
        ndarray, shape (..., L, D)
            In the dtype of `x`.
        """
        dtype = check.array("x", x).dtype
        x = check.floating("x", x)
        if x.ndim < 2 or x.shape[-1] != self.dim:
            raise RelposValueError(f"x: expected shape (..., L, {self.dim}), found {x.shape}")
        start = check.integer("start", start, self.least)
        total = x + self.encode(np.arange(start, start + x.shape[-2])).astype(x.dtype, copy=False)
        return np.asarray(drop(total, *check.survivors(dropout, rng, x.shape)), dtype)
