"""Mistakes of positions: tokens that stand elsewhere than they should, and distances that are changed on the way.

Masks are right. What is turned by a position is given other positions; what is added to a score for a distance is
looked up at another distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from relpos_np.api import logits
from relpos_np.conform.altered import Answer, call_of, content_of, from_parts, out_of, plain_outputs, remade
from relpos_np.conform.formats import format_of
from relpos_np.schemes.rotary import Rotary
from relpos_np.testing.arguments import arguments
from relpos_np.testing.conventions import FROM_THE_END, from_the_end
from relpos_np.testing.example import Example
from relpos_np.types import Array

# Where queries and keys stand instead, and what a distance becomes.
_Places = Callable[[Array, Array], tuple[Array, Array]]
_Distance = Callable[[Array], Array]

_TILES = (128, 64, 32, 16)
_TABLES = (2048, 1024, 512, 256, 128, 64)


def of_positions() -> Iterator[tuple[str, Answer]]:
    """All that do not depend on the scheme."""
    yield FROM_THE_END.mistake, _reversed
    for words, places in _PLACES:
        yield words, partial(_placed, places)
    for words, distance in _DISTANCES:
        yield words, partial(_at_distances, distance)
    for tile in _TILES:
        yield f"positions begin anew in each tile of {tile}", partial(_placed, partial(_within, tile))
    for length in _TABLES:
        yield f"positions stop at {length - 1}", partial(_placed, partial(_stopped, length))
        yield f"positions of keys begin anew after {length}", partial(_placed, partial(_ring, length))
        yield f"distances stop at {length - 1}", partial(_at_distances, partial(_clipped, length - 1))
        yield f"distances stop at {length}", partial(_at_distances, partial(_clipped, length))


def _within(tile: int, i: Array, j: Array) -> tuple[Array, Array]:
    return i % tile, j % tile


def _stopped(length: int, i: Array, j: Array) -> tuple[Array, Array]:
    return np.minimum(i, length - 1), np.minimum(j, length - 1)


def _ring(length: int, i: Array, j: Array) -> tuple[Array, Array]:
    return i, j % length


def _clipped(most: int, d: Array) -> Array:
    return np.clip(d, -most, most)


def _held(name: str, i: Array, j: Array) -> tuple[Array, Array]:
    """Positions that a format rounds."""
    rounded = format_of(name).rounded
    return rounded(i.astype(np.float64)), rounded(j.astype(np.float64))


_PLACES: tuple[tuple[str, _Places], ...] = (
    ("positions of queries are one too far", lambda i, j: (i + 1, j)),
    ("positions of queries are one too short", lambda i, j: (i - 1, j)),
    ("leaves keys where they are: all of them have position 0", lambda i, j: (i, 0 * j)),
    ("leaves queries where they are: all of them have position 0", lambda i, j: (0 * i, j)),
    ("turns keys the other way: positions add up", lambda i, j: (i, -j)),
    ("counts positions in steps of 2", lambda i, j: (2 * i, 2 * j)),
    ("counts positions in steps of 1/2", lambda i, j: (i / 2, j / 2)),
    ("keeps positions in 8 bits: 256 is 0", lambda i, j: (i % 256, j % 256)),
    ("holds positions in bfloat16", partial(_held, "bfloat16")),
    ("holds positions in float16", partial(_held, "float16")),
)
_DISTANCES: tuple[tuple[str, _Distance], ...] = (
    ("takes later keys for earlier ones: distances without their sign", lambda d: -np.abs(d)),
    ("takes earlier keys for later ones: distances without their sign", np.abs),
    ("gives all later keys distance 0", lambda d: np.minimum(d, 0)),
    ("gives all earlier keys distance 0", lambda d: np.maximum(d, 0)),
    ("keeps distances in 8 bits: 128 is -128", lambda d: (d + 128) % 256 - 128),
    ("distances are one too large on both sides", lambda d: d + np.sign(d)),
    ("distances are one too small on both sides", lambda d: d - np.sign(d)),
)


def _placed(places: _Places, one: Example) -> Array | None:
    """Other positions."""
    position, call = one.position, call_of(one)
    if position is None:
        return None
    i, j = np.arange(call.q_len) + call.meant("offset"), np.arange(call.k_len)
    rows, columns = places(i, j)
    if np.array_equal(rows, i) and np.array_equal(columns, j):
        return None
    if isinstance(position, Rotary):
        if position.positions is not None:
            return None
        return remade(one, positions=rows.astype(np.float64), key_positions=columns.astype(np.float64))
    d = columns - rows[:, None]
    return _looked_up(one, d) if np.array_equal(d, np.round(d)) else None


def _at_distances(change: _Distance, one: Example) -> Array | None:
    """Other distances, of what is not turned."""
    if one.position is None or isinstance(one.position, Rotary):
        return None
    call = call_of(one)
    meant = np.arange(call.k_len) - (np.arange(call.q_len) + call.meant("offset"))[:, None]
    d = change(meant)
    return None if np.array_equal(d, meant) else _looked_up(one, d)


def _looked_up(one: Example, d: Array) -> Array | None:
    """What is added for distances (L_q, L_k), of a scheme that knows no more of a key; keys of 0 say what that is."""
    if one.position is None or not one.position.relative or not plain_outputs(one):
        return None
    content = content_of(one)
    before = max(0, -int(d.min()))
    batch, kv_heads, _, dim = one.k.shape
    i = np.arange(d.shape[0])[:, None]
    none = np.zeros((batch, kv_heads, before + int(d.max()) + d.shape[0], dim))
    options = {name: one.kwargs[name] for name in ("scale",) if name in one.kwargs}
    rows = logits(one.q, none, position=one.position, offset=before, backend="numpy", **options)
    at = np.broadcast_to((d.astype(np.int64) + i + before), content.shape)
    return from_parts(one, content, np.take_along_axis(rows, at, axis=-1))


def _reversed(one: Example) -> Array | None:
    """Distances with the other sign; where nothing says what these add, tables or the case read from their end."""
    found = _placed(lambda i, j: (-i, -j), one)
    if found is None and one.position is not None:
        # With a row for each distance, 0 in the middle.
        given = arguments(one.position).items()
        tables = {n: np.flip(x, -2) for n, x in given if n.endswith("_table") and x is not None and x.shape[-2] % 2}
        found = remade(one, **tables) if tables else None
    if found is not None or one.kwargs.keys() - {"scale"} or one.q.shape[2] != one.k.shape[2]:
        return found
    q, k, v = from_the_end(one.q, one.k, one.v)
    return out_of(one, q=q, k=k, v=v)[:, :, ::-1]
