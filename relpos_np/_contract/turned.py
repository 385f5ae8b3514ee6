"""Vectors whose pairs of channels turn: operands before anybody computes them, and values with their output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relpos_np.types import Array

# Elements that are turned at a time, so that what is between stays in the cache.
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

    def made(self) -> Any:
        """The operand that has turned."""
        return turn_channels(self.x, self.cos, self.sin, self.layout, self.first, self.blocks)


@dataclass(slots=True, eq=False)
class TurnedBack:
    """The gradient of a `Turned`, which a kernel has turned back."""

    x: Array


def parts_of(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Slices of an array of that shape which cover it, of at most so many elements each."""
    inner = math.prod(shape[1:])
    step = max(most // max(inner, 1), 1)
    for start in range(0, shape[0], step):
        own = slice(start, start + step)
        if inner <= most:
            yield (own, *(slice(None) for _ in shape[1:]))
        else:
            yield from ((own, *rest) for rest in parts_of(shape[1:], most))


def turn_pairs(x: Array, cos: Array, sin: Array, layout: str, out: Array) -> None:
    """Fill `out` with pairs of channels (..., L, 2 P) times complex numbers (..., L, P), computed in its dtype."""
    pairs = cos.shape[-1]
    first, second = (
        (slice(0, pairs), slice(pairs, 2 * pairs))
        if layout == "half"
        else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    )
    # Both factors spread over the channels: a product of long rows costs half of one of pairs.
    along, across = np.empty((2, *cos.shape[:-1], 2 * pairs), cos.dtype)
    along[..., first] = along[..., second] = cos
    # Not np.negative(sin, out=...): where elements of both lie apart, NumPy 2.4 may write wrong numbers.
    across[..., first] = -sin
    across[..., second] = sin
    parts: Iterable[tuple[slice, ...]] = [()]
    if x.size > _BLOCK:
        parts = parts_of(x.shape[:-1], max(_BLOCK // max(2 * pairs, 1), 1))
        along, across = (np.broadcast_to(table, x.shape) for table in (along, across))
    with np.errstate(all="ignore"):  # an excluded key may hold anything
        for part in parts:
            source, turning = x[part].astype(out.dtype, copy=False), out[part]
            turning[..., first] = source[..., second]
            turning[..., second] = source[..., first]
            turning *= across[part]
            turning += source * along[part]


def turn_channels(x: Any, cos: Array, sin: Array, layout: str, first: int = 0, blocks: int = 1) -> Any:
    """Pairs of channels, from one on, times complex numbers (..., L, P); of several blocks each is laid out alone."""
    if not isinstance(x, np.ndarray):
        if not first and blocks == 1:
            return x.turned(cos, sin, layout)  # on a device an operand turns itself
        if hasattr(x, "turned_in_parts"):
            return x.turned_in_parts(cos, sin, layout, first, blocks)
        x = np.array(x)
    # Half precision is turned in the dtype of the factors.
    turned, size = np.empty(x.shape, np.result_type(x, cos)), cos.shape[-1] // blocks
    for block in range(blocks):
        channels = slice(first + 2 * size * block, first + 2 * size * (block + 1))
        pairs = slice(size * block, size * (block + 1))
        turn_pairs(x[..., channels], cos[..., pairs], sin[..., pairs], layout, turned[..., channels])
    for others in (slice(0, first), slice(first + 2 * size * blocks, None)):
        turned[..., others] = x[..., others]
    return turned


def paired_channels(pairs: int, layout: str, first: int = 0, blocks: int = 1) -> tuple[Array, Array]:
    """Both channels of each pair: two in a row, or half a block apart."""
    p, size = np.arange(pairs), pairs // blocks
    if layout == "half":
        one = first + p + p // size * size
        return one, one + size
    return first + 2 * p, first + 2 * p + 1
