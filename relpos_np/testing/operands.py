"""A call whose arrays were saved: in which orders its arrays may be read, and what it returns by some conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from relpos_np._calls.lowering import checked_schemes, schemes_of
from relpos_np._contract import check
from relpos_np._contract.problem import Part, Problem
from relpos_np._dense import forward
from relpos_np.api import attention, logits
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import Scheme
from relpos_np.testing.conventions import FROM_THE_END, IN_TURN, Options, from_the_end, in_turn, masked, reach
from relpos_np.types import Array

# Scores that are computed at once: of larger operands the last queries of the first batch item.
_CUT = 1 << 16
# What is left over of an output, in units of it, that is no sum of some values; and of one that is, by rounding.
_LEFT_OVER, _ROUNDED = 2.0**-4, 2.0**-6


@dataclass(frozen=True, eq=False)
class Operands:
    """A call in float64, (*batch, H, L, D) each, and what it returned; `layout` says how it was read."""

    q: Array
    k: Array
    v: Array | None
    out: Array | None
    scores: Array | None
    lse: Array | None
    mask: Array | None = None
    key_lengths: Array | None = None
    layout: tuple[str, ...] = ()
    backwards: bool = False
    # Checked calls by their options: candidates share them.
    _problems: dict[Options, Problem] = field(default_factory=dict, init=False)
    _residues: dict[int, float | None] = field(default_factory=dict, init=False)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the scores, (*batch, H, L_q, L_k)."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    @property
    def lengths(self) -> tuple[int, int, int]:
        """D, L_q and L_k."""
        return self.q.shape[-1], self.q.shape[-2], self.k.shape[-2]

    @property
    def wanted(self) -> Array:
        """What is to be explained."""
        found = self.scores if self.out is None else self.out
        assert found is not None
        return found

    @cached_property
    def cut(self) -> tuple[tuple[slice, ...], slice]:
        """The batch items and the queries that are computed."""
        shape = self.sizes
        if np.prod(shape, dtype=float) <= _CUT:
            return tuple(slice(0, n) for n in shape[:-3]), slice(0, shape[-2])
        rows = max(1, min(shape[-2], _CUT // max(1, shape[-3] * shape[-1])))
        return tuple(slice(0, 1) for _ in shape[:-3]), slice(shape[-2] - rows, shape[-2])

    @cached_property
    def whole(self) -> bool:
        """Whether all of the call is computed."""
        batch, rows = self.cut
        return rows.start == 0 and all(s.stop == n for s, n in zip(batch, self.sizes[:-3], strict=True))


def may_be_causal(at: Operands, hidden: int) -> bool:
    """Whether query i may attend no key after i + `hidden`: an answer can say no, and only for values as they are."""
    return (left := _left_over(at, hidden)) is None or left <= _LEFT_OVER


def is_causal(at: Operands, hidden: int) -> bool:
    """Whether the first outputs are sums of the values of keys up to i + `hidden`, for values as they are."""
    return (left := _left_over(at, hidden)) is not None and left <= _ROUNDED


def _left_over(at: Operands, hidden: int) -> float | None:
    """What is left of the first outputs after the best sums of values of keys up to i + `hidden`, in units of them.

    None where that says nothing, because there are not twice as many channels as keys.
    """
    if hidden not in at._residues:
        batch, rows = at.cut
        found = []
        if at.v is not None and at.out is not None:
            v = repeat_heads(at.v[batch], at.sizes[-3])
            out = at.out[(*batch, slice(None), rows)]
            most = min(v.shape[-1] // 2, at.sizes[-1] - 1)
            for row in (row for row in range(rows.start, rows.stop) if 0 < row + hidden + 1 <= most):
                x, keys = out[..., row - rows.start, :], v[..., : row + hidden + 1, :]
                size = np.linalg.norm(x, axis=-1)
                if not (np.isfinite(x).all() and np.isfinite(keys).all() and size.all()):
                    continue
                basis = np.linalg.qr(keys.swapaxes(-1, -2))[0]
                rest = x - (basis @ (basis.swapaxes(-1, -2) @ x[..., None]))[..., 0]
                found.append(float((np.linalg.norm(rest, axis=-1) / size).max()))
        at._residues[hidden] = max(found, default=None)
    return at._residues[hidden]


def keeps_values(position: Any) -> bool:
    """Whether outputs are sums of the values as they are."""
    schemes = schemes_of(position)
    return not any(one.turns_values or type(one).outputs is not Scheme.outputs for one in schemes)


def computed(
    at: Operands, position: Scheme | None, how: Options, sinks: Array | None, *, scores: bool = False
) -> tuple[Array, Array | None]:
    """Output and log-sum-exp of the part of a call that is compared, by the reference, or its scores.

    A RelposError says that there is no such call, or no form of the scheme for the part.
    """
    flip = slice(None, None, -1 if at.backwards else 1)
    scores = scores or at.v is None
    if at.whole and (at.v is None or np.isfinite(at.v).all()):
        problem = at._problems.get(how)
        if problem is None:
            (q, k, v), options = _call(at, how)
            problem = at._problems[how] = check.problem(q, k, v, **options)[0]
        schemes = checked_schemes(position, problem, "numpy")
        s = forward.scores(problem, schemes)
        if scores:
            return s[..., flip, flip], None
        out, lse = _output(problem, schemes, s, sinks)
        return out[..., flip, :], lse[..., flip]
    (q, k, v), options = _call(at, how)
    options |= {"position": position, "backend": "numpy"}
    if not at.whole:
        options |= _narrowed(at, position, options)
        sinks = sinks if sinks is None or sinks.ndim < 2 else sinks[..., at.cut[1]]
    if scores or v is None:
        return logits(q, k, **options)[..., flip, flip], None
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    return out[..., flip, :], lse[..., flip]


def _call(at: Operands, how: Options) -> tuple[tuple[Array, Array, Array | None], dict[str, Any]]:
    """Operands of the part of a call that is compared, and its options."""
    batch, rows = at.cut
    q, k, v = at.q[(*batch, slice(None), rows)], at.k[batch], None if at.v is None else at.v[batch]
    mask = None if at.mask is None else np.broadcast_to(at.mask, at.sizes)[(*batch, slice(None), rows)]
    lengths = None if at.key_lengths is None else np.broadcast_to(at.key_lengths, at.sizes[:-3])[batch]
    q_len, k_len = at.sizes[-2:]
    options: dict[str, Any] = {"scale": how.scale, "offset": how.offset}
    options |= {"softcap": how.cap[0], "cap_order": how.cap[1]}
    if at.backwards or how.hidden not in (None, how.offset):
        seen = reach(rows, k_len, hidden=how.hidden, window=how.window, offset=how.offset)
        mask = masked(mask, seen)
    else:
        options |= {"causal": how.hidden is not None, "window": how.window}
    if at.backwards:
        assert mask is not None
        if lengths is not None:
            mask = masked(mask, (np.arange(k_len) < lengths[..., None])[..., None, None, :])
            lengths = None
        mask = np.broadcast_to(mask, (*q.shape[:-1], k_len))[..., ::-1, ::-1]
        q, k, v = from_the_end(q, k, v)
        options["offset"] = k_len - q_len - how.offset
    return (q, k, v), options | {"mask": mask, "key_lengths": lengths}


def _output(problem: Problem, schemes: Sequence[Scheme], s: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Output and log-sum-exp of scores, with sums in float64 as they come: there are thousands of calls."""
    with np.errstate(all="ignore"):
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        extra = None if sinks is None else sinks.reshape(*sinks.shape, *[1] * (3 - sinks.ndim))
        top = top if extra is None else np.maximum(top, extra)
        top = np.where(np.isneginf(top), 0.0, top)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        total = total if extra is None else total + np.exp(extra - top)
        p /= np.where(total == 0, 1.0, total)
        out = forward.outputs(problem, schemes, p, np.matmul)
        return out, (top + np.log(total))[..., 0]


def _narrowed(at: Operands, position: Scheme | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Position, offset and backend for a part of the queries, where the scheme has a form for it."""
    batch, rows = at.cut
    if at.backwards:
        q_len = at.sizes[-2]
        rows = slice(q_len - rows.stop, q_len - rows.start)
    if position is None:
        return {"offset": given["offset"] + rows.start}
    scoring = {name: given[name] for name in ("scale", "offset", "causal", "window") if name in given}
    own = check.problem(at.q, at.k, at.v, **scoring)[0].site
    part = replace(Part.of(own), batch=batch, queries=rows)
    position.check(own)
    cut, site, rest = position.narrow(own, part)
    alone, _ = part.alone(own)
    if (site.q_len, site.k_len, site.batch, site.offset) != (alone.q_len, alone.k_len, alone.batch, alone.offset):
        raise RelposValueError("position: the scheme has no form for a part of the queries")
    assert rest.queries == slice(0, site.q_len)
    return {"position": cut, "offset": site.offset, "backend": "terms"}


def fitted_window(at: Operands, position: Scheme | None, how: Options) -> tuple[int | None, int | None] | None:
    """The window on either side that explains an output, by queries at the beginning, in the middle and at the end."""
    assert at.out is not None
    assert at.v is not None
    batch, rows = at.cut
    s, _ = computed(at, position, how, None, scores=True)
    out = at.out[(*batch, slice(None), rows)]
    v = repeat_heads(at.v[batch], s.shape[-3])
    left: int | None = None
    right: int | None = None
    for row in sorted({0, s.shape[-2] // 2, s.shape[-2] - 1}):
        first, stop = _keys_of(s[..., row, :], v, out[..., row, :])
        place, last = rows.start + row + how.offset, np.flatnonzero(np.isfinite(s[..., row, :]).any(axis=(0, 1)))
        if first > last[0]:
            left = place - first
        if stop <= last[-1]:
            right = stop - 1 - place
    return None if left is None and right is None else (left, right)


def _keys_of(s: Array, v: Array, out: Array) -> tuple[int, int]:
    """The first key and the one after the last, between which weights of scores (..., H, L_k) give an output."""
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0.0))
    none = np.zeros_like(p[..., :1])
    totals = np.concatenate([none, np.cumsum(p, axis=-1)], axis=-1)
    sums = np.concatenate([none[..., None] * v[..., :1, :], np.cumsum(p[..., None] * v, axis=-2)], axis=-2)
    best = np.inf, 0, s.shape[-1]
    with np.errstate(all="ignore"):
        for first in range(s.shape[-1]):
            stops = slice(first + 1, None)
            found = (sums[..., stops, :] - sums[..., first : first + 1, :]) / (
                totals[..., stops] - totals[..., first : first + 1]
            )[..., None]
            errors = np.abs(found - out[..., None, :]).max(
                axis=tuple(n for n in range(found.ndim) if n != found.ndim - 2)
            )
            errors = np.where(np.isfinite(errors), errors, np.inf)
            at = int(errors.argmin())
            best = min(best, (float(errors[at]), first, first + 1 + at))
    return best[1], best[2]


# --------------------------------------------------------------------------------- other ways to read arrays


def readings(at: Operands, tables: Mapping[str, Array]) -> Iterator[tuple[Operands, dict[str, Array]]]:
    """The arrays in other orders that are in use, one change at a time."""
    same = dict(tables)
    yield replace(at, layout=(*at.layout, FROM_THE_END.layout), backwards=True), same
    turned = in_turn(at.q.shape[-3], at.k, at.v)
    if turned is not None:
        yield replace(at, k=turned[0], v=turned[1], layout=(*at.layout, IN_TURN.layout)), same  # type: ignore[arg-type]
    deepest = max((x.ndim for x in tables.values()), default=0)
    for axes, words in ((2, "tables with their two axes swapped"), (3, "tables with their first two axes swapped")):
        if any(x.ndim == axes for x in tables.values()):
            swapped = {name: x.swapaxes(0, 1) if x.ndim == axes else x for name, x in tables.items()}
            yield replace(at, layout=(*at.layout, words)), swapped
    for axis in [0, -2][: max(deepest - 1, 0)]:
        flipped = {name: np.flip(x, axis) if x.ndim > 1 else x for name, x in tables.items()}
        words = f"tables with their rows (axis {axis}) in the other order"
        yield replace(at, layout=(*at.layout, words)), flipped


ONE_AXIS = "tables without their first axis, which has length 1"


def has_axis_of_one(x: Array) -> bool:
    """Whether an array may be a table as some checkpoints have them, (1, R, D)."""
    return x.ndim > 1 and x.shape[0] == 1


def without_axis_of_one(tables: Mapping[str, Array]) -> dict[str, Array]:
    """Tables of a checkpoint (1, R, D) as (R, D)."""
    return {name: x[0] if has_axis_of_one(x) else x for name, x in tables.items()}


def axes_swapped(at: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Operands as they are, and with axes (..., L, H, D) in operands, the output or both, where shapes allow it."""
    for inputs, output in product((False, True), repeat=2):
        names = [name for name, yes in (("q", inputs), ("k", inputs), ("v", inputs), ("out", output)) if yes]
        if any(at[name] is None or at[name].ndim < 3 for name in names if name in ("q", "out")):
            continue
        turned = {n: np.swapaxes(at[n], -2, -3) for n in names if at[n] is not None and at[n].ndim >= 3}
        found = {**at, **turned}
        if _belong_together(**found):
            words = [f"{text} (..., L, H, D)" for text, yes in (("q, k, v", inputs), ("out", output)) if yes]
            yield tuple(words), found


def _belong_together(
    q: Array, k: Array, v: Array | None, out: Array | None, scores: Array | None, lse: Array | None
) -> bool:
    heads, kv_heads = (1 if x.ndim == 2 else x.shape[-3] for x in (q, k))
    if q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3] or not kv_heads or heads % kv_heads:
        return False
    wanted = [
        (v, k, 0 if v is None else v.shape[-1]),
        (scores, q, k.shape[-2]),
        (out, q, 0 if v is None else v.shape[-1]),
    ]
    if any(x is not None and x.shape != (*like.shape[:-1], last) for x, like, last in wanted):
        return False
    return lse is None or lse.shape == q.shape[:-1]
