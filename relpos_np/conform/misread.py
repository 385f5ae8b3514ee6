"""Mistakes of reading: another head's, item's or row's numbers, too few channels, and arguments that are ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.conform.altered import Answer, call_of, out_of, remade, scale_of, seen
from relpos_np.conform.arithmetic import coarser_than
from relpos_np.conform.formats import Format
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.schemes.alibi import ALiBi, alibi_slopes
from relpos_np.schemes.registry import SCHEMES
from relpos_np.schemes.rotary import Rotary
from relpos_np.schemes.t5 import T5
from relpos_np.testing.arguments import arguments
from relpos_np.testing.conventions import masked
from relpos_np.testing.example import Example
from relpos_np.testing.frozen import coarse
from relpos_np.testing.one_number import PUBLISHED
from relpos_np.types import Array


def of_arrays(scheme: str, kept: Format) -> Iterator[tuple[str, Answer]]:
    """All for a scheme."""
    yield from _OPERANDS
    yield from _OPTIONS
    for name, parameter in inspect.signature(SCHEMES[scheme].cls).parameters.items():
        for step, words in ((1, "one row too early"), (-1, "one row too late")):
            for wraps in (True, False):
                yield f"reads {name} {words}", partial(_rolled, name, step, wraps)
        for held, bits in coarser_than(kept):
            yield f"holds {name} in {held}", partial(_held, name, bits)
        for before, behind, change in _HEADS:
            yield f"{before}{name}{behind}", partial(_by_heads, name, change)
        yield f"exchanges the axes of {name}", partial(_exchanged, name)
        if parameter.default is not parameter.empty and not isinstance(parameter.default, str | bool):
            yield f"ignores {name}", partial(_ignored, name, parameter.default)
    yield "clips distances one row before the ends of its tables", _without_ends
    yield from ((words, partial(_of_differences, rows)) for words, rows in _DIFFERENCES)
    if scheme == "alibi":
        yield from ((words, partial(_slopes, make)) for words, make in _SLOPES)
        for held, bits in coarser_than(kept):
            yield f"holds slopes in {held}", partial(_slopes, partial(_coarse_slopes, bits))
        yield "slopes of the key heads, each for a group of query heads", _slopes_of_keys
    if scheme == "rotary":
        yield from _TURNS
    if scheme == "t5":
        yield "never reads the last bucket: distances stop one bucket too early", _last_bucket
        yield "max_distance is half of what is meant", partial(_longest, 0.5)
        yield "max_distance is twice what is meant", partial(_longest, 2.0)


# ---------------------------------------------------------------------------------------------- operands


def _channels(count: Callable[[int], int], one: Example) -> Array | None:
    dim = one.q.shape[-1]
    if not 0 < count(dim) < dim:
        return None
    return out_of(one, q=np.where(np.arange(dim) < count(dim), one.q, 0.0), scale=scale_of(one))


def _kv_heads(heads: slice, one: Example) -> Array | None:
    return None if one.k.shape[1] == 1 else out_of(one, k=one.k[:, heads], v=one.v[:, heads])


def _first_item(names: str, one: Example) -> Array | None:
    if len(one.q) == 1:
        return None
    return out_of(one, **{n: np.repeat(getattr(one, n)[:1], len(one.q), 0) for n in names})


_OPERANDS: tuple[tuple[str, Answer], ...] = (
    *(
        (f"reads {words} channels of q and k", partial(_channels, count))
        for words, count in (
            ("the first half of the", lambda d: d // 2),
            ("only whole vectors of 8", lambda d: d // 8 * 8),
            ("only whole vectors of 16", lambda d: d // 16 * 16),
            ("only whole vectors of 32", lambda d: d // 32 * 32),
            ("no more than 64", lambda _: 64),
            ("no more than 32", lambda _: 32),
            ("no more than 16", lambda _: 16),
        )
    ),
    ("all query heads read the first key head", partial(_kv_heads, slice(0, 1))),
    ("reads key heads from the last to the first", partial(_kv_heads, slice(None, None, -1))),
    *((f"reads {n} of the first batch item for all", partial(_first_item, n)) for n in ("k", "v", "kv", "q")),
)


# ---------------------------------------------------------------------------------------------- options


# What a mistake makes of an option that is given: its value, several options by name, or None where it makes no sense.
_Change = Callable[[Any, Example], Any]


def _changed(name: str, change: _Change, one: Example) -> Array | None:
    """The output with something else in place of an option that the case has."""
    value = one.kwargs.get(name)
    other = None if value is None else change(value, one)
    return None if other is None else out_of(one, **(other if isinstance(other, dict) else {name: other}))


def _without(name: str) -> Answer:
    return partial(_changed, name, lambda *_: {name: None})


def _mask_of(axis: int) -> Answer:
    """The mask of the first item or head for all."""

    def first(mask: Array, _: Example) -> Array | None:
        if mask.ndim < -axis or mask.shape[axis] == 1:
            return None
        return np.broadcast_to(np.take(mask, [0], axis), mask.shape).copy()

    return partial(_changed, "mask", first)


def _of_floats(change: Callable[[Array, Example], Array]) -> Answer:
    """A change of a mask of floats."""
    return partial(_changed, "mask", lambda mask, one: None if mask.dtype == np.bool_ else change(mask, one))


def _times(factor: Callable[[Example], float]) -> Answer:
    return _of_floats(lambda mask, one: np.where(np.isfinite(mask), mask * factor(one), mask))


def _lengths(change: Callable[[Array], Array]) -> Answer:
    return partial(_changed, "key_lengths", lambda n, one: np.clip(change(np.asarray(n)), 0, one.k.shape[2]))


def _shown(seen: Callable[[Array, Example], Array]) -> Answer:
    """Lengths that are read as a mask, (..., L_k)."""

    def as_mask(lengths: Any, one: Example) -> dict[str, Any]:
        return {"key_lengths": None, "mask": masked(one.kwargs.get("mask"), seen(np.asarray(lengths), one))}

    return partial(_changed, "key_lengths", as_mask)


def _last_keys(lengths: Array, one: Example) -> Array:
    """Lengths that count from the last key."""
    k_len = one.k.shape[2]
    return np.asarray(np.arange(k_len) >= k_len - lengths[:, None, None, None])


def _lengths_of(number: Callable[[Array, Array], Array]) -> Answer:
    """Lengths of other items, which are numbers made of an item and a head."""

    def seen(lengths: Array, one: Example) -> Array:
        item, head = np.arange(len(one.q))[:, None], np.arange(one.q.shape[1])
        return np.asarray(np.arange(one.k.shape[2]) < lengths[number(item, head) % len(one.q)][..., None, None])

    return _shown(seen)


def _sink_of_zero(one: Example) -> Array | None:
    return None if one.kwargs.get("sinks") is not None else out_of(one, sinks=np.zeros(one.q.shape[1]))


def _top_left(one: Example) -> Array | None:
    """Positions from the first query on, under the right masks."""
    call = call_of(one)
    if one.position is None or call.meant("offset") == 0:
        return None
    limits: dict[str, Any] = {"hidden": call.meant("hidden"), "window": call.sides, "offset": call.meant("offset")}
    return out_of(one, causal=None, window=None, mask=seen(one, **limits), offset=0)


_OPTIONS: tuple[tuple[str, Answer], ...] = (
    ("ignores the mask", _without("mask")),
    ("ignores key_lengths", _without("key_lengths")),
    ("ignores the scale of the call", _without("scale")),
    ("ignores offset", _without("offset")),
    ("ignores selected", _without("selected")),
    ("ignores sinks", _without("sinks")),
    ("puts queries top-left among the keys, under a right mask: positions count from 0", _top_left),
    ("reads the mask of the first batch item for all", _mask_of(-4)),
    ("reads the mask of the first head for all", _mask_of(-3)),
    ("reads the mask of the first query for all", _mask_of(-2)),
    (
        "adds a mask of bool as 0 and 1",
        partial(_changed, "mask", lambda mask, _: mask.astype(np.float64) if mask.dtype == np.bool_ else None),
    ),
    ("scales a mask of floats with the products", _times(scale_of)),
    ("divides a mask of floats by the scale", _times(lambda one: 1 / scale_of(one))),
    ("subtracts a mask of floats", _times(lambda _: -1.0)),
    ("takes a mask of floats in powers of 2", _times(lambda _: float(np.log(2)))),
    ("takes of a mask of floats only what it excludes", _of_floats(lambda mask, _: np.isfinite(mask))),
    ("reads key_lengths of the first batch item for all", _lengths(lambda n: np.full_like(n, n[0]))),
    ("reads key_lengths of the last batch item for all", _lengths(lambda n: np.full_like(n, n[-1]))),
    ("reads key_lengths of item (b H + h) mod B in place of b", _lengths_of(lambda b, h: b * len(h) + h)),
    ("reads key_lengths of item h mod B in place of b", _lengths_of(lambda b, h: h + 0 * b)),
    ("reads key_lengths of the batch item before", _lengths_of(lambda b, h: b - 1 + 0 * h)),
    ("reads key_lengths of the batch item after", _lengths_of(lambda b, h: b + 1 + 0 * h)),
    ("key_lengths off by one: one key more", _lengths(lambda n: n + 1)),
    ("key_lengths off by one: one key fewer", _lengths(lambda n: n - 1)),
    ("takes key_lengths for the last keys, as with padding on the left", _shown(_last_keys)),
    ("scales sinks with the products", partial(_changed, "sinks", lambda x, one: x * scale_of(one))),
    ("reads the sink of the first head for all", partial(_changed, "sinks", lambda x, _: np.full_like(x, x[0]))),
    ("reads sinks from the last head to the first", partial(_changed, "sinks", lambda x, _: x[::-1])),
    ("subtracts sinks", partial(_changed, "sinks", lambda x, _: -x)),
    ("adds 1 to the sum of exponentials, as a sink of score 0 would", _sink_of_zero),
)


# ---------------------------------------------------------------------------------------------- arguments of schemes


def _array(name: str, one: Example) -> Array | None:
    value = None if one.position is None else arguments(one.position).get(name)
    return value if isinstance(value, np.ndarray) and value.ndim else None


def _rolled(name: str, step: int, wraps: bool, one: Example) -> Array | None:
    """Rows read too early or too late; the last one is followed by the first one, or by itself."""
    x = _array(name, one)
    if x is None or x.dtype.kind != "f" or x.ndim < 2:
        return None
    axis = _rows_axis(x, one.q.shape[1])
    if wraps:
        return remade(one, **{name: np.roll(x, step, axis)})
    at = np.clip(np.arange(x.shape[axis]) - step, 0, x.shape[axis] - 1)
    return remade(one, **{name: np.take(x, at, axis)})


def _held(name: str, bits: int, one: Example) -> Array | None:
    x = _array(name, one)
    return None if x is None or x.dtype.kind != "f" else remade(one, **{name: coarse(x, bits)})


def _rows_axis(x: Array, heads: int) -> int:
    """Rows are the first axis of (rows, H), and the last but one of (H, rows, D) and (rows, D)."""
    return 0 if x.shape[-1] == heads else -2


def _of_differences(rows: Callable[[Array, int, int], Array], one: Example) -> Array | None:
    """A table with a row for each difference of places in a grid, (2 h - 1) (2 w - 1) of them, whose rows are others.

    Those beyond the last are the last one.
    """
    grid: tuple[int, ...] = getattr(one.position, "grid", ())
    table = _array("table", one)
    if len(grid) != 2 or table is None or len(table) != (2 * grid[0] - 1) * (2 * grid[1] - 1):
        return None
    read = rows(np.arange(len(table)), *grid)
    return remade(one, table=table[np.minimum(read, len(table) - 1)])


_DIFFERENCES: tuple[tuple[str, Callable[[Array, int, int], Array]], ...] = (
    (
        "reads a table of rows and columns column by column",
        lambda n, h, w: n % (2 * w - 1) * (2 * h - 1) + n // (2 * w - 1),
    ),
    (
        "counts 2 h - 1 columns where the table has 2 w - 1",
        lambda n, h, w: n // (2 * w - 1) * (2 * h - 1) + n % (2 * w - 1),
    ),
)


def _longest(factor: float, one: Example) -> Array | None:
    position = one.position
    return remade(one, max_distance=int(factor * position.max_distance)) if isinstance(position, T5) else None


def _without_ends(one: Example) -> Array | None:
    """The first and the last row of each table replaced by their neighbours."""
    given = {} if one.position is None else arguments(one.position)
    tables = {n: x for n, x in given.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim > 1}
    cut = {}
    for name, x in tables.items():
        axis = _rows_axis(x, one.q.shape[1])
        rows = x.shape[axis]
        if rows > 2:
            cut[name] = np.take(x, np.clip(np.arange(rows), 1, rows - 2), axis)
    return remade(one, **cut) if cut else None


def _last_bucket(one: Example) -> Array | None:
    table = _array("table", one)
    if table is None:
        return None
    half = len(table) // (2 if getattr(one.position, "bidirectional", True) else 1)
    rows = np.arange(len(table))
    return remade(one, table=table[np.where(rows % half == half - 1, rows - 1, rows)])


def _by_heads(name: str, change: Callable[[Array, int, Example], Array | None], one: Example) -> Array | None:
    """An array with an axis of heads, changed along it."""
    x = _array(name, one)
    axes = [] if x is None else [n for n, size in enumerate(x.shape) if size == one.q.shape[1] > 1]
    other = None if x is None or not axes else change(x, axes[-1], one)
    return None if other is None else remade(one, **{name: other})


def _by_key_head(x: Array, axis: int, one: Example) -> Array | None:
    heads, kv_heads = one.q.shape[1], one.k.shape[1]
    return None if heads == kv_heads else np.take(x, np.arange(heads) // (heads // kv_heads), axis)


# How heads are misread: words before and behind the name of an array.
_HEADS: tuple[tuple[str, str, Callable[[Array, int, Example], Array | None]], ...] = (
    ("reads ", " of the first head for all", lambda x, axis, _: np.repeat(np.take(x, [0], axis), x.shape[axis], axis)),
    ("reads the heads of ", " from the last to the first", lambda x, axis, _: np.flip(x, axis)),
    ("reads ", " of as many heads as keys have, each for a group", _by_key_head),
)


def _exchanged(name: str, one: Example) -> Array | None:
    value = None if one.position is None else arguments(one.position).get(name)
    if not isinstance(value, tuple) or len(value) != 2 or value[0] == value[1] or not isinstance(value[0], int):
        return None
    return remade(one, **{name: value[::-1]})


def _ignored(name: str, default: Any, one: Example) -> Array | None:
    value = None if one.position is None else arguments(one.position).get(name)
    if value is None or (not isinstance(value, np.ndarray) and value == default):
        return None
    return remade(one, **{name: default})


def _slopes(make: Callable[[int], Array], one: Example) -> Array | None:
    """Other default slopes."""
    if not isinstance(one.position, ALiBi) or one.position.slopes is not None:
        return None
    return remade(one, heads=None, bias_max=None, slopes=make(one.q.shape[1]))


def _coarse_slopes(bits: int, heads: int) -> Array:
    return coarse(alibi_slopes(heads), bits)


def _slopes_of_keys(one: Example) -> Array | None:
    """Default slopes of the key heads, each for a group of query heads."""
    heads, kv_heads = one.q.shape[1], one.k.shape[1]
    if heads == kv_heads:
        return None
    return _slopes(lambda _: np.repeat(alibi_slopes(kv_heads), heads // kv_heads), one)


def _powers(heads: int) -> int:
    return int(2 ** np.ceil(np.log2(heads)))


_SLOPES: tuple[tuple[str, Callable[[int], Array]], ...] = (
    ("slopes of twice as many heads", lambda h: alibi_slopes(2 * h)[:h]),
    ("slopes of the next power of 2 of heads, of which the first are taken", lambda h: alibi_slopes(_powers(h))[:h]),
    (
        "slopes 2^(-8 h / H) for a number of heads that is no power of 2",
        lambda h: 2.0 ** (-8 * np.arange(1, h + 1) / h),
    ),
    ("slopes count heads from 0: 2^(-8 h / H)", lambda h: 2.0 ** (-8 * np.arange(h) / h)),
    ("slopes from the last head to the first", lambda h: alibi_slopes(h)[::-1]),
    ("slopes 2^-h whatever the number of heads", lambda h: 2.0 ** -np.arange(1.0, h + 1)),
)


def _turned(change: Callable[..., Array], one: Example, **more: float) -> Array | None:
    """Other frequencies."""
    position = one.position
    if type(position) is not Rotary or position.frequencies is not None:
        return None
    dim = position.dim or one.q.shape[-1]
    return remade(one, base=10000.0, dim=None, frequencies=change(dim, position.base, **more))


def _of_all_channels(one: Example) -> Array | None:
    """Frequencies of all channels, of which some turn."""
    position, dim = one.position, one.q.shape[-1]
    if type(position) is not Rotary or position.dim in (None, dim) or dim % 2:
        return None
    return _turned(lambda d, b: rotary_frequencies(dim, base=b)[: d // 2], one)


def _values_turned(one: Example) -> Array | None:
    """Values turned as keys are, and the output not back."""
    position = one.position
    if type(position) is not Rotary or position.values or one.v.shape[-1] != one.q.shape[-1]:
        return None
    problem, _, _ = check.problem(one.q, one.k, one.v, **{n: x for n, x in one.kwargs.items() if n != "sinks"})
    return out_of(one, v=position.transform(one.q, one.v, problem.site)[1])


def _some_pairs(d: int, base: float) -> Array:
    return np.where(np.arange(d // 2) < d // 4, rotary_frequencies(d, base=base), 0.0)


def _fewer_turn(share: int, one: Example) -> Array | None:
    """Some channels turn, with frequencies of as many, where all are meant."""
    position, dim = one.position, one.q.shape[-1] // (2 * share) * 2
    if type(position) is not Rotary or position.frequencies is not None or position.dim not in (None, one.q.shape[-1]):
        return None
    return remade(one, dim=dim, channels=None) if dim else None


_SHARES = (("half", 2), ("quarter", 4))
_TURNS: tuple[tuple[str, Answer], ...] = (
    (
        "exponent 2i / (d - 2) in place of 2i / d",
        partial(_turned, lambda d, b: b ** (-np.arange(0, d, 2) / max(d - 2, 1))),
    ),
    ("exponent i / d in place of 2i / d", partial(_turned, lambda d, b: b ** (-np.arange(d // 2) / d))),
    ("exponent 2 (i + 1) / d in place of 2i / d", partial(_turned, lambda d, b: b ** (-np.arange(2, d + 2, 2) / d))),
    ("frequencies from the lowest to the highest", partial(_turned, lambda d, b: rotary_frequencies(d, base=b)[::-1])),
    *((f"turns the first {words} of the channels alone", partial(_fewer_turn, n)) for words, n in _SHARES),
    ("turns the first half of the pairs alone", partial(_turned, _some_pairs)),
    ("frequencies of all channels, of which some turn", _of_all_channels),
    ("turns values too", _values_turned),
    *(
        (f"base {base:.0f}", partial(_turned, lambda d, _, base: rotary_frequencies(d, base=base), base=base))
        for base in PUBLISHED[:4]
    ),
)
