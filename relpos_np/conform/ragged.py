"""Calls that stand for several: packed sequences, an offset for each item, caches, two parts of keys, dropped weights.

A case is put to an implementation in one of these ways, and its answer is judged in parts, each of which is an
ordinary case: a sequence, an item, or all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from relpos_np.conform.altered import Answer, hiding, out_of, scores_of
from relpos_np.conform.yardstick import distance
from relpos_np.testing.example import Example
from relpos_np.types import Array

# By its name what a function must take for it.
WAYS: Mapping[str, tuple[str, ...]] = {
    "segments": ("segments",),
    "offsets": ("offset",),
    "static_cache": ("key_lengths", "offset"),
    "paged": ("block_table", "key_lengths"),
    "merged": ("return_lse",),
    "dropped": ("dropout_mask", "dropout"),
}
# Ways whose arguments ordinary cases have as numbers, so that nobody knows whether a function takes more.
ASKED = ("offsets", "static_cache")
_PAGE, _RATE = 16, 0.5


def _cuts(one: Example) -> Array:
    """Where packed sequences end, one of which is a single token."""
    length = one.q.shape[2]
    return np.unique([0, length // 3, length // 3 + 1, length])


def _lengths(one: Example) -> Array:
    """How many keys of each item exist: at least as many as queries."""
    return np.linspace(one.q.shape[2], one.k.shape[2], len(one.q)).astype(np.int64)


def _table(one: Example) -> Array:
    """Which pages an item's keys lie in, in their order."""
    batch, count = len(one.k), -(-one.k.shape[2] // _PAGE)
    return np.random.default_rng(count).permutation(batch * count).reshape(batch, count)


def _offsets(one: Example) -> Array:
    return np.asarray(np.arange(len(one.q)) + max(0, one.k.shape[2] - one.q.shape[2] - 1))


def _kept(one: Example) -> Array:
    """Which weights are not dropped; of each query at least the first."""
    kept = np.random.default_rng(one.k.shape[2]).random((*one.q.shape[:3], one.k.shape[2])) >= _RATE
    kept[..., 0] = True
    return kept


def given(way: str, one: Example) -> dict[str, Any]:
    """What a function gets beside, or in place of, the arguments of an ordinary case."""
    if way == "segments":
        return {"segments": _cuts(one)}
    if way == "offsets":
        return {"offset": _offsets(one)}
    if way == "static_cache":
        return {"key_lengths": _lengths(one), "offset": "end"}
    if way == "dropped":
        return {"dropout_mask": _kept(one), "dropout": _RATE}
    if way != "paged":
        return {}
    table = _table(one)
    return {"block_table": table, "key_lengths": _lengths(one)} | {n: _pages(getattr(one, n), table) for n in "kv"}


def _pages(x: Array, table: Array) -> Array:
    """(B, H_kv, L, D) in pages (pages, P, H_kv, D); what lies behind the last key are numbers like others."""
    more = np.resize(x, (*x.shape[:2], table.shape[1] * _PAGE - x.shape[2], x.shape[3]))
    whole = np.concatenate([x, more], axis=2).swapaxes(1, 2)
    found = np.empty((table.size, _PAGE, *whole.shape[2:]))
    found[table] = whole.reshape(*table.shape, _PAGE, *whole.shape[2:])
    return found


def parts(way: str, one: Example) -> Iterator[tuple[Example, tuple[slice, ...]]]:
    """Ordinary cases that the call stands for, and where in (B, H, L_q) of its answer theirs are."""
    everything = slice(None)
    if way == "segments":
        for a, b in zip(_cuts(one)[:-1], _cuts(one)[1:], strict=True):
            q, k, v = (x[:, :, a:b] for x in (one.q, one.k, one.v))
            yield replace(one, q=q, k=k, v=v), (everything, everything, slice(a, b))
    elif way == "merged":
        yield one, ()
    elif way == "dropped":
        # A sink of the size of what is dropped leaves the sum as it was.
        kept = _kept(one)
        s = np.where(kept, -np.inf, scores_of(one))
        top = s.max(axis=-1)
        top = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore"):
            sinks = top + np.log(np.exp(s - top[..., None]).sum(axis=-1))
        sinks = np.maximum(sinks, -1e4)  # where nothing is dropped
        yield replace(one, v=one.v / (1 - _RATE), kwargs={**one.kwargs, "mask": kept, "sinks": sinks}), ()
    else:
        cached = way != "offsets"
        offsets = _lengths(one) - one.q.shape[2] if cached else _offsets(one)
        for b, (length, offset) in enumerate(zip(_lengths(one), offsets, strict=True)):
            q, k, v = (x[b : b + 1] for x in (one.q, one.k, one.v))
            if cached:
                k, v = k[:, :, :length], v[:, :, :length]
            yield replace(one, q=q, k=k, v=v, kwargs={**one.kwargs, "offset": int(offset)}), (slice(b, b + 1),)


def halves(one: Example, *, masked: bool) -> list[Example]:
    """The case with the first keys, and with the others: by a mask, or without the rest."""
    k_len = one.k.shape[2]
    cut = k_len // 2 + 1
    if masked:
        first = np.broadcast_to(np.arange(k_len) < cut, (1, 1, one.q.shape[2], k_len))
        return [replace(one, kwargs={**one.kwargs, "mask": mask}) for mask in (first.copy(), ~first)]
    return [replace(one, k=one.k[:, :, part], v=one.v[:, :, part]) for part in (slice(0, cut), slice(cut, None))]


def merged(
    found: list[dict[str, tuple[Array, str]]],
) -> dict[str, tuple[Array, str]]:
    """Results of two parts of the keys as those of all; those of the first where log-sum-exps have another shape."""
    if any(one["lse"][0].shape != one["out"][0].shape[:-1] for one in found):
        return {name: found[0][name] for name in ("lse", "out")}
    (a, b), dtype = (one["lse"][0] for one in found), found[0]["out"][1]
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp(a, b)
        weights = [np.where(np.isneginf(x), 0.0, np.exp(x - lse))[..., None] for x in (a, b)]
    out = sum(w * one["out"][0] for w, one in zip(weights, found, strict=True))
    return {"out": (np.asarray(out), dtype), "lse": (lse, found[0]["lse"][1])}


# ---------------------------------------------------------------------------------------------- mistakes


def misread(way: str, one: Example, out: Array, allowed: float) -> str:
    """How a call was read that gave an output, in words; empty where nothing known gives it."""
    for words, answer in _MISREAD.get(way, ()):
        other = answer(one)
        if other is not None and distance(out, other) <= allowed:
            return words
    return ""


def _packed(tile: int, one: Example) -> Array:
    """Queries see the keys of their sequence, and those after it in its last tile."""
    cuts, j = _cuts(one), np.arange(one.q.shape[2])
    at = np.searchsorted(cuts, j, "right")[:, None]
    begin, end = cuts[at - 1], cuts[at]
    return hiding(one, (j < begin) | (j >= begin + -(-(end - begin) // tile) * tile))


def _cut_elsewhere(step: int, one: Example) -> Array:
    at = np.searchsorted(_cuts(one)[1:] + step, np.arange(one.q.shape[2]), "right")
    return hiding(one, at[:, None] != at)


def _by_item(change: Callable[[Example, int], dict[str, Any]], one: Example) -> Array:
    """Each item by itself, with other operands and options."""
    return np.concatenate([out_of(one, **({"q": one.q[b : b + 1]} | change(one, b))) for b in range(len(one.q))])


def _cached(length: Callable[[int], int | None], one: Example, b: int) -> dict[str, Any]:
    """Keys of another number, and queries where they are."""
    right = int(_lengths(one)[b])
    k, v = (x[b : b + 1, :, : length(right)] for x in (one.k, one.v))
    return {"k": k, "v": v, "offset": right - one.q.shape[2]}


def _whole_pages(one: Example, b: int, *, table: Array | None = None) -> dict[str, Any]:
    """All keys of an item's pages, or those of other pages."""
    right = int(_lengths(one)[b])
    read = _table(one)[b] if table is None else table[b]
    # (pages, P, H_kv, D) as one row of keys.
    k, v = (_pages(x, _table(one))[read].reshape(1, -1, *x.shape[1::2]).swapaxes(1, 2) for x in (one.k, one.v))
    last = -(-right // _PAGE) * _PAGE if table is None else right
    return {"k": k[:, :, :last], "v": v[:, :, :last], "offset": right - one.q.shape[2]}


def _in_order(one: Example, b: int) -> dict[str, Any]:
    return _whole_pages(one, b, table=np.arange(_table(one).size).reshape(_table(one).shape))


_WHOLE_CACHE = ("ignores key_lengths", partial(_by_item, partial(_cached, lambda _: None)))
_MISREAD: Mapping[str, tuple[tuple[str, Answer], ...]] = {
    "segments": (
        ("ignores segments", out_of),
        ("segments begin one token too early", partial(_cut_elsewhere, -1)),
        ("segments begin one token too late", partial(_cut_elsewhere, 1)),
        *((f"segments end with whole tiles of {n} keys", partial(_packed, n)) for n in (64, 32, 16, 8)),
    ),
    "offsets": (
        ("ignores offset", out_of),
        ("reads the offset of the first batch item for all", lambda one: out_of(one, offset=int(_offsets(one)[0]))),
    ),
    "static_cache": (_WHOLE_CACHE,),
    "paged": (
        _WHOLE_CACHE,
        ("reads the last page whole", partial(_by_item, _whole_pages)),
        ("reads pages in their order, whatever block_table says", partial(_by_item, _in_order)),
        ("leaves out the last key of a cache", partial(_by_item, partial(_cached, lambda n: n - 1))),
    ),
}
