"""Vectors whose pairs of channels turn: operands before anybody computes them, and values with their output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np.types import Array

# Elements of a head from which heads are turned one by one.
_BLOCK = 1 << 14


@dataclass(slots=True, eq=False)
class Turned:
    """An operand whose pairs of channels are multiplied by complex numbers: cos and sin (..., H or 1, L, P).

    Kernels turn its gradient back. `trained`: the gradient of these numbers is made of it, before it is rounded.
    """

    x: Array
    cos: Array
    sin: Array
    layout: str
    first: int = 0
    blocks: int = 1
    trained: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the operand."""
        shape: tuple[int, ...] = self.x.shape
        return shape


@dataclass(slots=True, eq=False)
class Turning:
    """An operand as it is stored, for a kernel that turns what it reads."""

    x: Array
    trained: bool = False


@dataclass(slots=True, eq=False)
class TurnedBack:
    """The gradient of a `Turned`, which a kernel has turned back."""

    x: Array


def turn_pairs(x: Array, cos: Array, sin: Array, layout: str) -> Array:
    """Pairs of channels times complex numbers (..., L, P), in the dtype of all three."""
    pairs = cos.shape[-1]
    first, second = (
        (slice(0, pairs), slice(pairs, 2 * pairs))
        if layout == "half"
        else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    )
    # Both factors spread over the channels: a product of long rows costs half of one of pairs.
    along, across = np.empty((2, *cos.shape[:-1], 2 * pairs), cos.dtype)
    along[..., first] = along[..., second] = cos
    np.negative(sin, out=across[..., first])
    across[..., second] = sin
    out = np.empty(x.shape, x.dtype)
    parts: Iterable[tuple[int, ...]] = [()]
    if x.shape[-2] * x.shape[-1] >= _BLOCK:  # head by head, so that what is between stays in the cache
        parts = np.ndindex(x.shape[:-2])
        along, across = (np.broadcast_to(table, (*x.shape[:-1], 2 * pairs)) for table in (along, across))
    with np.errstate(all="ignore"):  # an excluded key may hold anything
        for part in parts:
            source, turning = x[part], out[part][..., : 2 * pairs]
            turning[..., first] = source[..., second]
            turning[..., second] = source[..., first]
            turning *= across[part]
            turning += source[..., : 2 * pairs] * along[part]
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


def turn_channels(x: Any, cos: Array, sin: Array, layout: str, first: int = 0, blocks: int = 1) -> Any:
    """Pairs of channels, from one on, times complex numbers (..., L, P); of several blocks each is laid out alone."""
    if isinstance(x, Turning):
        return Turned(x.x, cos, sin, layout, first, blocks, x.trained)
    if first or blocks > 1:
        turned = np.array(x)
        size = cos.shape[-1] // blocks
        for block in range(blocks):
            channels = slice(first + 2 * size * block, first + 2 * size * (block + 1))
            pairs = slice(size * block, size * (block + 1))
            turned[..., channels] = turn_pairs(turned[..., channels], cos[..., pairs], sin[..., pairs], layout)
        return turned
    # On a device an operand turns itself.
    return turn_pairs(x, cos, sin, layout) if isinstance(x, np.ndarray) else x.turned(cos, sin, layout)


def paired_channels(pairs: int, layout: str, first: int = 0, blocks: int = 1) -> tuple[Array, Array]:
    """Both channels of each pair: two in a row, or half a block apart."""
    p, size = np.arange(pairs), pairs // blocks
    if layout == "half":
        one = first + p + p // size * size
        return one, one + size
    return first + 2 * p, first + 2 * p + 1
