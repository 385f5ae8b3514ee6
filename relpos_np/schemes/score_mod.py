r"""A function of the user's own that changes scores, as FlexAttention has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relpos_np._contract.terms import Change, Terms
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.schemes.base import MemoryBound, Scheme, SchemeGradient, Site
from relpos_np.types import Array

# Matrices of scores that a function may hold at once beside its argument, as `memory_bound` counts them.
_HELD = 4


class ScoreMod(Scheme):
    r"""Scores changed by a function, written for all pairs at once.

    .. math::

        s_{ij} = f(\sigma\, q_i \cdot k_j + \text{what other schemes add},\; b,\; h,\; i,\; j)

    for batch item b, head h, and i and j counted from 0 among the queries and the keys of the call, as in
    FlexAttention: i is no position, to which the call's offset would have to be added. Masks act on what f returns.
    Functions are applied in the order of the tuple ``position=``.

    This is for comparisons: only the backends "numpy" and "terms", which hold all scores, can compute it. A formula
    that is to run in the kernels is a `Scheme` that states its terms.

    Parameters
    ----------
    function : callable
        ``function(s, b, h, i, j)`` with s (..., H, L_q, L_k) in the dtype of the computation and integer arrays that
        broadcast to it: b counts batch items through all batch axes, (..., 1, 1, 1), h is (H, 1, 1), i (L_q, 1) and j
        (L_k,). Returns floating-point scores that broadcast to the shape of s; -inf excludes a key, also
        where the call caps scores.
    derivative : callable, optional
        From the same arguments the derivative of each result by its own s; without it `attention_vjp` is refused.

    Raises
    ------
    RelposTypeError
        If one of them cannot be called; in a call, if it returns something else than floating-point numbers, or if a
        backend with kernels, or a gradient without a derivative, is asked for.
    RelposValueError
        In a call, if what is returned does not broadcast to the scores.

    Notes
    -----
    Arrays that the function itself holds receive no gradient. No limit of memory knows what it allocates.

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", MLSys 2025.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.ones((1, 2, 3, 4))
    >>> causal = rp.ScoreMod(lambda s, b, h, i, j: np.where(i >= j, s, -np.inf))
    >>> out = rp.attention(q, q, q, position=causal, backend="numpy")
    >>> bool((out == rp.attention(q, q, q, causal=True)).all())
    True
    """

    def __init__(self, function: Callable[..., Array], *, derivative: Callable[..., Array] | None = None) -> None:
        for name, value in (("function", function), ("derivative", derivative)):
            if not callable(value) and (name == "function" or value is not None):
                raise RelposTypeError(
                    f"{name}: expected a function of (s, b, h, i, j), found {shown(value)} of type "
                    f"{type(value).__name__}"
                )
        self.function, self.derivative = function, derivative

    def change(self, site: Site) -> Change:
        """The function and its derivative, with the indices of the call."""
        derivative = self.derivative
        return Change(
            lambda s: _of_pairs("function", self.function, s, site),
            None if derivative is None else lambda s: _of_pairs("derivative", derivative, s, site),
        )

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The change itself: there is no other way to state it."""
        return Terms(changes=(self.change(site),))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Some matrices of scores, which is what most functions hold."""
        return MemoryBound(
            _HELD * int(np.prod(site.batch)) * site.heads * site.q_len * site.k_len * site.dtype.itemsize
        )

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Nothing of it is trained; scores get their gradients through the change."""
        return SchemeGradient()

    def __repr__(self) -> str:
        given = "" if self.derivative is None else f", derivative={_named(self.derivative)}"
        return f"ScoreMod({_named(self.function)}{given})"


def _named(function: Any) -> str:
    """A function's name, never its contents."""
    return str(getattr(function, "__name__", type(function).__name__))[:40]


def _of_pairs(name: str, function: Callable[..., Array], s: Array, site: Site) -> Array:
    """What a function makes of scores, in their shape and dtype."""
    batch = np.arange(int(np.prod(site.batch))).reshape(*site.batch, 1, 1, 1)
    heads, queries = np.arange(site.heads)[:, None, None], np.arange(site.q_len)[:, None]
    found = np.asarray(function(s, batch, heads, queries, np.arange(site.k_len)))
    if found.dtype.kind != "f":
        raise RelposTypeError(f"{name}: expected floating-point numbers to be returned, found dtype {found.dtype}")
    try:
        return np.array(np.broadcast_to(found, s.shape), site.dtype)
    except ValueError:
        raise RelposValueError(f"{name}: what it returns, {found.shape}, does not broadcast to {s.shape}") from None
