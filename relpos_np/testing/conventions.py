"""What callers of attention disagree on, in one table: `identify` tries all of it, `conform` each entry alone.

An entry is one option by one convention: what an implementation does that follows it where another one is meant, and
the option's value then. `identify` looks for the combination that explains an answer. `conform` has a call whose
options are known, and asks which single entry explains an answer that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np.types import Array

# An option that a convention says nothing about.
ABSENT: Any = object()
# Gemma 2 and Grok, and round numbers below.
COMMON_CAPS = (50.0, 30.0, 20.0, 10.0)
_UNCAPPED = (None, "scores")


@dataclass(frozen=True)
class Call:
    """Lengths of a call and the options that are stated; None for those that are not."""

    dim: int
    q_len: int
    k_len: int
    scale: float | None = None
    offset: int | None = None
    causal: bool | None = None
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    cap_order: str | None = None
    heads: int | None = None
    v_dim: int | None = None

    @property
    def last(self) -> int:
        """The offset by which the last query stands at the last key."""
        return self.k_len - self.q_len

    @property
    def sides(self) -> tuple[int | None, int | None] | None:
        """The window to the left and to the right."""
        if self.window is None or isinstance(self.window, tuple):
            return self.window
        return self.window, 0 if self.causal else self.window

    def meant(self, option: str) -> Any:
        """The value of an option as stated, or else as `relpos_np.attention` has it."""
        offset = self.last if self.offset is None else self.offset
        return {
            "scale": self.dim**-0.5 if self.scale is None else self.scale,
            "offset": offset,
            "hidden": offset if self.causal else None,
            "window": self.sides,
            "cap": _UNCAPPED if self.softcap is None else (self.softcap, self.cap_order or "scores"),
        }[option]


@dataclass(frozen=True)
class Convention:
    """One option by one convention.

    `value` is the option's value for a call, or `ABSENT`; `name` is how `identify` calls that value. `mistake` is what
    `conform` says of an implementation: empty where that is no mistake. `searched`: whether `identify` tries it.
    """

    option: str
    value: Callable[[Call], Any]
    mistake: str = ""
    name: str = ""
    searched: bool = True


def _causal(value: Callable[[Call], Any], mistake: str = "", **more: Any) -> Convention:
    """The last key that query i attends is i + value, in calls that are or may be causal."""
    return Convention("hidden", lambda c: ABSENT if c.causal is False else value(c), mistake, **more)


def _wider(left: int, right: int) -> Convention:
    """A window with so many keys more on each side."""

    def moved(side: int | None, by: int) -> int | None:
        return None if side is None else max(side + by, 0)

    def value(c: Call) -> Any:
        return ABSENT if c.sides is None else (moved(c.sides[0], left), moved(c.sides[1], right))

    sides = ((left, "on the left"), (right, "on the right"))
    words = [f"one key {'more' if n > 0 else 'fewer'} {side}" for n, side in sides if n]
    return Convention("window", value, f"window off by one: {' and '.join(words)}")


def _side(value: Callable[[Any, Any], tuple[Any, Any]], mistake: str) -> Convention:
    """A window with other sides."""
    return Convention("window", lambda c: ABSENT if c.sides is None else value(*c.sides), mistake, searched=False)


def _half(less: int) -> Convention:
    """A window's width that counts both sides, with the query's own key or without."""

    def value(c: Call) -> Any:
        if not isinstance(c.window, int):
            return ABSENT
        half = c.window // 2
        return max(half - less, 0), 0 if c.causal else half

    return Convention("window", value)


def _own_scale(mistake: str, value: Callable[[Call], float | None]) -> Convention:
    """A scale that is taken where the call states none."""

    def own(c: Call) -> Any:
        found = value(c) if c.scale is None else None
        return found or ABSENT

    return Convention("scale", own, mistake, searched=False)


# The most usual convention of an option comes first.
CONVENTIONS = (
    _causal(lambda c: c.last if c.offset is None else c.offset),
    _causal(lambda c: c.last, name="last query at last key"),
    _causal(
        lambda _: 0,
        "aligns the causal mask top-left: query i attends keys up to i, not up to i + L_k - L_q",
        name="first query at first key",
    ),
    Convention(
        "offset",
        lambda c: 0 if c.offset is None else ABSENT,
        "puts queries top-left among the keys: query i stands at position i, not at i + L_k - L_q",
        name="first query at first key",
    ),
    Convention("scale", lambda c: c.dim**-0.5, name="1/sqrt(D)"),
    Convention("scale", lambda _: 1.0, "scale missing", name="none"),
    Convention(
        "scale", lambda c: 1.0 / c.dim if c.scale is None else c.scale * c.scale, "scale twice", "1/sqrt(D) twice"
    ),
    _own_scale("scale of all heads: 1/sqrt(H D)", lambda c: c.heads and (c.heads * c.dim) ** -0.5),
    _own_scale("scale of values: 1/sqrt(D_v)", lambda c: c.v_dim and c.v_dim**-0.5),
    _own_scale("scale of head_dim filled up to a power of 2", lambda c: float(2 ** np.ceil(np.log2(c.dim))) ** -0.5),
    *(_wider(left, right) for left, right in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))),
    _half(0),
    _half(1),
    Convention("window", lambda _: None, "ignores the window"),
    _side(lambda left, _: (left, None), "ignores the window's right side"),
    _side(lambda _, right: (None, right), "ignores the window's left side"),
    _side(lambda left, right: (right, left), "exchanges the window's sides"),
    _side(lambda left, _: (left, left), "takes the window's left side for both"),
    _side(lambda _, right: (right, right), "takes the window's right side for both"),
    _side(lambda left, _: (left, 0), "takes the window's right side for 0"),
    _causal(lambda _: None, "ignores causal"),
    _causal(lambda c: c.meant("offset") - 1, "causal leaves out the query's own key", searched=False),
    _causal(lambda c: c.meant("offset") + 1, "causal attends one key of the future", searched=False),
    Convention(
        "cap",
        lambda c: ABSENT if c.softcap is None or c.cap_order is not None else (c.softcap, "content"),
        "applies softcap to products, before positions are added",
    ),
    Convention("cap", lambda _: _UNCAPPED, "ignores softcap"),
)


@dataclass(frozen=True)
class Options:
    """Options of a call by some conventions.

    Query i may attend key j <= i + `hidden`, which need not be the offset that positions have.
    """

    scale: float
    offset: int
    hidden: int | None = None
    window: tuple[int | None, int | None] | None = None
    cap: tuple[float | None, str] = _UNCAPPED
    sinks: str | None = None

    def shown(self, dim: int, q_len: int, k_len: int) -> dict[str, Any]:
        """By the names of options of `relpos_np.attention`, with what a number is in words beside it."""
        call = Call(dim, q_len, k_len)
        names: dict[str, dict[Any, str]] = {"scale": {}, "hidden": {}}
        for one in CONVENTIONS:
            if one.name and one.option in names:
                names[one.option][one.value(call)] = one.name
        scales, places = names["scale"], names["hidden"]
        if q_len == k_len:
            places = {0: "first query at first key, last at last"}
        found: dict[str, Any] = {"scale": self.scale, "scale_is": scales.get(self.scale, "as stated")}
        found |= {"offset": self.offset, "offset_is": places.get(self.offset, "as stated")}
        found["causal"] = self.hidden is not None
        if self.hidden not in (None, self.offset):
            found["causal_is"] = f"keys up to i + {self.hidden}: {places.get(self.hidden, 'as stated')}"
        if self.window is not None:
            found["window"] = self.window
        if self.cap[0] is not None:
            found |= {"softcap": self.cap[0], "cap_order": self.cap[1]}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found


def _values(call: Call, option: str) -> list[Any]:
    """The option as it is meant, then by each convention."""
    found = [one.value(call) for one in CONVENTIONS if one.option == option and one.searched]
    # Whether a call is causal is not doubted where it is stated.
    if option == "hidden" and call.causal:
        found.remove(None)
    return list(dict.fromkeys(x for x in (call.meant(option), *found) if x is not ABSENT))


def combinations(call: Call, sinks: str | None) -> Iterator[Options]:
    """Every combination that agrees with what is stated; the most usual first."""
    for hidden in _values(call, "hidden"):
        windows = _values(replace(call, causal=hidden is not None), "window")
        for window in windows:
            for offset in _values(call, "offset"):
                for scale in _values(call, "scale"):
                    for cap in _values(call, "cap"):
                        yield Options(scale, offset, hidden, window, cap, sinks)


def with_caps(how: Options, call: Call) -> list[Options]:
    """The options with caps that models have, unless one was stated."""
    if call.softcap is not None:
        return []
    return [replace(how, cap=(cap, order)) for cap in COMMON_CAPS for order in ("scores", "content")]


# ------------------------------------------------------------------------------------- masks and orders of arrays


def reach(queries: slice, k_len: int, *, hidden: int | None = None, window: Any = None, offset: int = 0) -> Array:
    """Which keys causality and a window leave to some queries, (rows, L_k)."""
    i, j = np.arange(queries.start, queries.stop)[:, None], np.arange(k_len)
    left, right = window or (None, None)
    seen = np.ones((len(i), len(j)), np.bool_)
    for distance, most in ((j - i, hidden), (i + offset - j, left), (j - i - offset, right)):
        if most is not None:
            seen &= distance <= most
    return seen


def masked(mask: Array | None, seen: Array) -> Array:
    """A mask with more pairs excluded."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == np.bool_ else np.where(seen, mask, -np.inf)


@dataclass(frozen=True)
class Order:
    """Operands in another order: what `conform` says of an implementation, and `identify` of arrays."""

    mistake: str
    layout: str


IN_TURN = Order(
    "query head h uses key head h mod H_kv in place of h // (H / H_kv)", "query head h reads key head h modulo H_kv"
)
FROM_THE_END = Order("counts distances i - j where j - i is meant", "distances count from query to key, i - j")


def in_turn(heads: int, *arrays: Array | None) -> list[Array | None] | None:
    """Keys and values (..., H_kv, L, D) for query head h from head h modulo H_kv; None where that is no other one."""
    kv_heads = next(x.shape[-3] for x in arrays if x is not None)
    if kv_heads in (1, heads):
        return None
    index = np.arange(heads) % kv_heads
    return [None if x is None else x[..., index, :, :] for x in arrays]


def from_the_end(*arrays: Array | None) -> list[Any]:
    """Operands (..., L, D) with their rows from the last to the first, so that distances have the other sign."""
    return [None if x is None else x[..., ::-1, :] for x in arrays]
