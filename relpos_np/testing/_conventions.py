"""What callers disagree on beside positions: scale, alignment, windows, caps, sinks, axes and orders of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Part, Site
from relpos_np.api import attention, logits
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

# Scores that are computed at once: of larger operands the last queries of the first batch item.
CUT = 1 << 16


@dataclass(frozen=True)
class Convention:
    """Options of a call; `shown` is the part of them that a reader wants to know.

    Query i may attend key j <= i + `hidden`, which need not be the offset that positions have.
    """

    scale: float
    offset: int
    hidden: int | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    cap_order: str = "scores"
    sinks: str | None = None

    def shown(self, dim: int, q_len: int, k_len: int) -> dict[str, Any]:
        """By the names of options of `relpos_np.attention`, with what a number is in words beside it."""
        scales = {dim**-0.5: "1/sqrt(D)", 1.0: "none", 1.0 / dim: "1/sqrt(D) twice"}
        places = {k_len - q_len: "last query at last key", 0: "first query at first key"}
        if q_len == k_len:
            places = {0: "first query at first key, last at last"}
        found: dict[str, Any] = {"scale": self.scale, "scale_is": scales.get(self.scale, "as stated")}
        found |= {"offset": self.offset, "offset_is": places.get(self.offset, "as stated")}
        found["causal"] = self.hidden is not None
        if self.hidden not in (None, self.offset):
            found["causal_is"] = f"keys up to i + {self.hidden}: {places.get(self.hidden, 'as stated')}"
        if self.window is not None:
            found["window"] = self.window
        if self.softcap is not None:
            found |= {"softcap": self.softcap, "cap_order": self.cap_order}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found


@dataclass(frozen=True, eq=False)
class Operands:
    """A call in float64, (*batch, H, L, D) each, and what it returned; `layout` says how it was read."""

    q: Array
    k: Array
    v: Array | None
    out: Array | None
    scores: Array | None
    lse: Array | None
    mask: Array | None
    key_lengths: Array | None
    layout: tuple[str, ...] = ()
    backwards: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the scores, (*batch, H, L_q, L_k)."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    @property
    def cut(self) -> tuple[tuple[slice, ...], slice]:
        """The batch items and the queries that are computed."""
        shape = self.sizes
        if np.prod(shape, dtype=float) <= CUT:
            return tuple(slice(0, n) for n in shape[:-3]), slice(0, shape[-2])
        rows = max(1, min(shape[-2], CUT // max(1, shape[-3] * shape[-1])))
        return tuple(slice(0, 1) for _ in shape[:-3]), slice(shape[-2] - rows, shape[-2])

    @property
    def whole(self) -> bool:
        """Whether all of the call is computed."""
        batch, rows = self.cut
        return rows.start == 0 and all(s.stop == n for s, n in zip(batch, self.sizes[:-3], strict=True))


def conventions(at: Operands, stated: Mapping[str, Any], sinks: str | None) -> Iterator[Convention]:
    """Every combination that agrees with what is stated; the most usual first."""
    q_len, k_len, dim = at.q.shape[-2], at.k.shape[-2], at.q.shape[-1]
    scale = stated.get("scale")
    scales = [scale, dim**-0.5, 1.0, scale * scale] if scale is not None else [dim**-0.5, 1.0, 1.0 / dim]
    places = [stated["offset"]] if stated.get("offset") is not None else [k_len - q_len, 0]
    caps: list[tuple[float | None, str]] = [(None, "scores")]
    if stated.get("softcap") is not None:
        orders = [stated["cap_order"]] if stated.get("cap_order") is not None else ["scores", "content"]
        caps = [*((stated["softcap"], order) for order in orders), (None, "scores")]
    for hidden in _hidden(stated.get("causal"), places, k_len - q_len):
        for window in _windows(stated.get("window"), hidden is not None):
            for offset in dict.fromkeys(places):
                for factor in dict.fromkeys(scales):
                    for cap, order in caps:
                        yield Convention(factor, offset, hidden, window, cap, order, sinks)


def _hidden(causal: bool | None, places: list[int], last: int) -> list[int | None]:
    shifts: list[int | None] = list(dict.fromkeys([*places, last, 0]))
    if causal is None:
        return [None, *shifts]
    return shifts if causal else [None]


def _windows(stated: Any, causal: bool) -> list[tuple[int | None, int | None] | None]:
    """The window as stated, one less and one more on either side or both, half of it, and none."""
    if stated is None:
        return [None]
    left, right = stated if isinstance(stated, tuple) else (stated, 0 if causal else stated)
    sides = [(left, right)]
    for by in (-1, 1):
        sides += [(_moved(left, by), right), (left, _moved(right, by)), (_moved(left, by), _moved(right, by))]
    if not isinstance(stated, tuple):
        half = stated // 2
        sides += [(half, 0 if causal else half), (max(half - 1, 0), 0 if causal else half)]
    return [*dict.fromkeys(sides), None]


def _moved(side: int | None, by: int) -> int | None:
    return None if side is None else max(side + by, 0)


def _allowed(at: Operands, how: Convention, rows: slice) -> Array:
    """Which keys causality and a window leave to some queries, (rows, L_k)."""
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(at.k.shape[-2])
    seen = np.ones((len(i), len(j)), np.bool_)
    if how.hidden is not None:
        seen &= j - i <= how.hidden
    left, right = how.window or (None, None)
    distance = j - i - how.offset
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _masked(mask: Array | None, seen: Array) -> Array:
    """A mask with more pairs excluded."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == np.bool_ else np.where(seen, mask, -np.inf)


def computed(
    at: Operands, position: Scheme | None, how: Convention, sinks: Array | None, *, scores: bool = False
) -> tuple[Array, Array | None]:
    """Output and log-sum-exp of the part of a call that is compared, by the reference, or its scores.

    A RelposError says that there is no such call, or no form of the scheme for the part.
    """
    batch, rows = at.cut
    q, k, v, offset = at.q[(*batch, slice(None), rows)], at.k[batch], at.v, how.offset
    v = None if v is None else v[batch]
    mask = None if at.mask is None else np.broadcast_to(at.mask, at.sizes)[(*batch, slice(None), rows)]
    lengths = None if at.key_lengths is None else np.broadcast_to(at.key_lengths, at.sizes[:-3])[batch]
    options: dict[str, Any] = {"scale": how.scale, "softcap": how.softcap, "cap_order": how.cap_order}
    if at.backwards or how.hidden not in (None, offset):
        mask = _masked(mask, _allowed(at, how, rows))
    else:
        options |= {"causal": how.hidden is not None, "window": how.window}
    if at.backwards:
        q_len, k_len = at.sizes[-2:]
        if lengths is not None:
            mask = _masked(mask, (np.arange(k_len) < lengths[..., None])[..., None, None, :])
            lengths = None
        assert mask is not None
        mask = np.broadcast_to(mask, (*q.shape[:-1], k_len))[..., ::-1, ::-1]
        q, k = q[..., ::-1, :], k[..., ::-1, :]
        v = None if v is None else v[..., ::-1, :]
        offset = k_len - q_len - offset
        rows = slice(q_len - rows.stop, q_len - rows.start)
    backend = "numpy"
    if not at.whole:
        position, offset, backend = _narrowed(at, position, offset, how, batch, rows)
        sinks = None if sinks is None else sinks if sinks.ndim < 2 else sinks[..., rows]
    options |= {"mask": mask, "key_lengths": lengths, "offset": offset, "position": position, "backend": backend}
    flip = slice(None, None, -1 if at.backwards else 1)
    if scores or v is None:
        return logits(q, k, **options)[..., flip, flip], None
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    return out[..., flip, :], lse[..., flip]


def _right(how: Convention) -> int:
    """The largest relative position that is attended."""
    right = UNBOUNDED if how.window is None or how.window[1] is None else how.window[1]
    return right if how.hidden is None else min(right, 0)


def _narrowed(
    at: Operands, position: Scheme | None, offset: int, how: Convention, batch: tuple[slice, ...], rows: slice
) -> tuple[Scheme | None, int, str]:
    """The scheme for a part of the queries, where it has one."""
    shape = at.sizes
    own = Site(
        heads=shape[-3],
        kv_heads=at.k.shape[-3],
        q_len=shape[-2],
        k_len=shape[-1],
        head_dim=at.q.shape[-1],
        v_dim=0 if at.v is None else at.v.shape[-1],
        offset=offset,
        right=_right(how) if how.hidden in (None, how.offset) and not at.backwards else UNBOUNDED,
        scale=how.scale,
        dtype=np.dtype(np.float64),
        scores_only=at.v is None,
        batch=shape[:-3],
    )
    part = replace(Part.of(own), batch=batch, queries=rows)
    if position is None:
        return None, offset + rows.start, "numpy"
    position.check(own)
    cut, site, rest = position.narrow(own, part)
    alone, _ = part.alone(own)
    if (site.q_len, site.k_len, site.batch, site.offset) != (alone.q_len, alone.k_len, alone.batch, alone.offset):
        raise RelposValueError("position: the scheme has no form for a part of the queries")
    assert rest.queries == slice(0, site.q_len)
    return cut, site.offset, "terms"


# --------------------------------------------------------------------------------- other ways to read arrays


def readings(at: Operands, tables: Mapping[str, Array]) -> Iterator[tuple[Operands, dict[str, Array]]]:
    """The arrays in other orders that are in use, one change at a time."""
    same = dict(tables)
    yield replace(at, layout=(*at.layout, "distances count from query to key, i - j"), backwards=True), same
    if at.k.shape[-3] not in (1, at.q.shape[-3]):
        groups = at.q.shape[-3] // at.k.shape[-3]
        # Head h reads key head h modulo H_kv.
        index = np.arange(at.k.shape[-3] * groups) % at.k.shape[-3]
        layout = (*at.layout, "query head h reads key head h modulo H_kv")
        v = None if at.v is None else at.v[..., index, :, :]
        yield replace(at, k=at.k[..., index, :, :], v=v, layout=layout), same
    if any(x.ndim == 2 for x in tables.values()):
        turned = {name: x.T if x.ndim == 2 else x for name, x in tables.items()}
        yield replace(at, layout=(*at.layout, "tables with their two axes swapped")), turned
    if any(x.ndim > 1 for x in tables.values()):
        for axis in (0, -2):
            if axis == 0 or any(x.ndim > 2 for x in tables.values()):
                flipped = {name: np.flip(x, axis) if x.ndim > 1 else x for name, x in tables.items()}
                words = f"tables with their rows (axis {axis}) in the other order"
                yield replace(at, layout=(*at.layout, words)), flipped


def swapped(at: Mapping[str, Array | None]) -> Iterator[tuple[tuple[str, ...], dict[str, Array | None]]]:
    """Operands as they are, and with axes (..., L, H, D) in operands, the output or both, where shapes allow it."""
    for inputs in (False, True):
        for output in (False, True):
            found = dict(at)
            for name in ("q", "k", "v", "out"):
                x = found.get(name)
                if x is not None and x.ndim >= 3 and (output if name == "out" else inputs):
                    found[name] = np.swapaxes(x, -2, -3)
            q, k, v, out = (found.get(name) for name in ("q", "k", "v", "out"))
            assert q is not None
            assert k is not None
            if (inputs and q.ndim < 3) or (output and (out is None or out.ndim < 3)):
                continue
            if not _fits(q, k, v, out, found.get("scores"), found.get("lse")):
                continue
            words = [f"{names} (..., L, H, D)" for names, yes in (("q, k, v", inputs), ("out", output)) if yes]
            yield tuple(words), found


def _fits(q: Array, k: Array, v: Array | None, out: Array | None, scores: Array | None, lse: Array | None) -> bool:
    heads, kv_heads = (1 if x.ndim == 2 else x.shape[-3] for x in (q, k))
    if q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3] or not kv_heads or heads % kv_heads:
        return False
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        return False
    if out is not None and (v is None or out.shape != (*q.shape[:-1], v.shape[-1])):
        return False
    if scores is not None and scores.shape != (*q.shape[:-1], k.shape[-2]):
        return False
    return lse is None or lse.shape == q.shape[:-1]
