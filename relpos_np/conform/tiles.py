"""Mistakes of kernels that go through keys and queries in tiles: tiles left out, padding that counts, no rescaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from relpos_np.conform.altered import Answer, call_of, hiding, out_of, plain_outputs, scores_of, values_of
from relpos_np.testing.conventions import masked, reach
from relpos_np.testing.example import Example
from relpos_np.types import Array

# From large to small: what a smaller tile explains in a few cases, a larger one may explain in all.
_TILES = (128, 64, 32, 16, 8)

# From the tiles of queries (L_q, 1) and of keys (L_k,), which pairs are skipped.
_Skipped = Callable[[Array, Array], Array]


def of_tiles() -> Iterator[tuple[str, Answer]]:
    """Each with every size of a tile."""
    for tile in _TILES:
        of = f"tiles of {tile}"
        yield f"leaves out the keys after the last whole tile, in {of} keys", partial(_last_keys, tile)
        yield f"leaves out the last tile of keys where it is whole, in {of} keys", partial(_last_whole, tile)
        yield f"reads no tile of keys but the first, in {of} keys", partial(_keys_from, tile)
        for words, skipped in _CAUSAL:
            for from_keys in (True, False):
                yield f"causal {words}, in {of}", partial(_causal, tile, skipped, from_keys)
        yield f"decides causal by whole {of}, not by keys", partial(_by_tile, tile)
        yield f"decides a window by whole {of}, not by keys", partial(_window_by_tile, tile)
        yield f"rounds key_lengths up to whole {of}", partial(_whole_lengths, tile)
        yield f"key_lengths one key short where they end with whole {of}", partial(_short_lengths, tile)
        yield f"keys of padding count as scores of 0, in {of} keys", partial(_padded, tile)
        yield f"counts sinks once for each tile, in {of} keys", partial(_many_sinks, tile)
        yield f"the scale is that of head_dim rounded up to a multiple of {tile}", partial(_scale_of_whole, tile)
        for words, sums, outputs in _UNSCALED:
            yield (
                f"does not rescale {words} where a later tile has a larger score, in {of} keys",
                partial(_unscaled, tile, sums, outputs),
            )


_UNSCALED = (
    ("sums of weights and of values", False, False),
    ("the sum of values", True, False),
    ("the sum of weights", False, True),
)
_CAUSAL: tuple[tuple[str, _Skipped], ...] = (
    ("skips the tile on the diagonal after the first row of tiles", lambda r, c: (r == c) & (r > 0)),
    ("skips the tile on the diagonal", lambda r, c: r == c),
    ("sees the tile on the diagonal alone", lambda r, c: r != c),
    ("skips the first tile of keys after the first row of tiles", lambda r, c: (c == 0) & (r > 0)),
    ("skips the tile before the diagonal", lambda r, c: c == r - 1),
    ("stops at the last whole tile before the diagonal", lambda r, c: (c >= r) & (r > 0)),
)


def _keys_from(start: int, one: Example) -> Array | None:
    """Keys from some number on are left out."""
    k_len = one.k.shape[2]
    return hiding(one, np.arange(k_len) >= start) if 0 < start < k_len else None


def _last_keys(tile: int, one: Example) -> Array | None:
    return _keys_from(one.k.shape[2] // tile * tile, one)


def _last_whole(tile: int, one: Example) -> Array | None:
    return None if one.k.shape[2] % tile else _keys_from(one.k.shape[2] - tile, one)


def _causal(tile: int, skipped: _Skipped, from_keys: bool, one: Example) -> Array | None:
    """A tile of a causal call skipped; its row is that of the position among the keys, or of the query's number."""
    call = call_of(one)
    start = call.meant("offset") if from_keys else 0
    if not call.causal or (not from_keys and call.meant("offset") == 0):
        return None
    rows, columns = (np.arange(call.q_len)[:, None] + start) // tile, np.arange(call.k_len) // tile
    return hiding(one, skipped(rows, columns))


def _by_tile(tile: int, one: Example) -> Array | None:
    """All keys of the tiles that hold some key of a query's."""
    call = call_of(one)
    if not call.causal or call.k_len <= tile:
        return None
    last = (np.arange(call.q_len)[:, None] + call.meant("offset")) // tile * tile + tile - 1
    seen = np.arange(call.k_len) <= last
    if call.sides is not None:
        seen = seen & reach(slice(0, call.q_len), call.k_len, window=call.sides, offset=call.meant("offset"))
    return out_of(one, causal=None, window=None, mask=masked(one.kwargs.get("mask"), seen))


def _window_by_tile(tile: int, one: Example) -> Array | None:
    """All keys of the tiles that hold some key of the window; causality goes by keys."""
    call = call_of(one)
    if call.sides is None:
        return None
    start, i, j = call.meant("offset"), np.arange(call.q_len)[:, None], np.arange(call.k_len)
    left, right = call.sides
    seen = np.ones((call.q_len, call.k_len), np.bool_)
    if left is not None:
        seen &= j // tile * tile + tile - 1 >= i + start - left
    if right is not None and not (call.causal and right == 0):
        seen &= j // tile * tile <= i + start + right
    return out_of(one, window=None, mask=masked(one.kwargs.get("mask"), seen))


def _whole_lengths(tile: int, one: Example) -> Array | None:
    lengths = one.kwargs.get("key_lengths")
    if lengths is None:
        return None
    return out_of(one, key_lengths=np.minimum(-(-np.asarray(lengths) // tile) * tile, one.k.shape[2]))


def _short_lengths(tile: int, one: Example) -> Array | None:
    lengths = np.asarray(one.kwargs.get("key_lengths", 1))
    whole = (lengths % tile == 0) & (lengths > 0)
    return out_of(one, key_lengths=lengths - whole) if whole.any() else None


def _padded(tile: int, one: Example) -> Array | None:
    """Zeros after the last key are attended, too, by what may attend the last key."""
    more = -one.k.shape[2] % tile
    if not more or not plain_outputs(one):
        return None
    s = scores_of(one)
    open_ended = np.isfinite(s[..., -1:])
    top = np.maximum(np.where(np.isfinite(s), s, -np.inf).max(axis=-1, keepdims=True), 0.0)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True) + more * np.exp(-top) * open_ended
    return np.asarray(p @ values_of(one) / np.where(total > 0, total, 1.0))


def _many_sinks(tile: int, one: Example) -> Array | None:
    sinks, tiles = one.kwargs.get("sinks"), -(-one.k.shape[2] // tile)
    return None if sinks is None or tiles == 1 else out_of(one, sinks=sinks + np.log(tiles))


def _scale_of_whole(tile: int, one: Example) -> Array | None:
    dim = one.q.shape[-1]
    return out_of(one, scale=(-(-dim // tile) * tile) ** -0.5) if dim % tile and "scale" not in one.kwargs else None


def _unscaled(tile: int, sums: bool, outputs: bool, one: Example) -> Array | None:
    """Weights relative to the largest score so far; those that are rescaled are relative to the largest of all."""
    k_len = one.k.shape[2]
    if k_len <= tile or not plain_outputs(one) or one.kwargs.get("sinks") is not None:
        return None
    s, starts = scores_of(one), range(0, k_len, tile)
    running = np.maximum.accumulate(np.stack([s[..., n : n + tile].max(axis=-1) for n in starts], axis=-1), axis=-1)
    so_far = np.repeat(running, tile, axis=-1)[..., :k_len]
    weights = {}
    for rescaled in (False, True):
        top = running[..., -1:] if rescaled else so_far
        weights[rescaled] = np.exp(s - np.where(np.isfinite(top), top, 0.0))
    total = weights[sums].sum(axis=-1, keepdims=True)
    return np.asarray(weights[outputs] @ values_of(one) / np.where(total > 0, total, 1.0))
