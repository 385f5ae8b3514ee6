"""Rows whose scores are near the ends of their dtype, for which units of log 2 have no room.

Kernels say which kind of rows they have met. If masks, tables or products are that large, the call is made once more
with scores a quarter as large: beside numbers so far from 0 the scores of a row are equal or worlds apart, so that the
probabilities are the same. Rows are then taken from where they are right.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, ValueTerm
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.forward_pass.work import LOG2, MANY, NONE
from relpos_np.types import Array, Bools

Attend = Callable[..., None]
Backward = Callable[[Problem, Terms], tuple[Terms, Array]]


class _Met(threading.local):
    """What the kernels that this thread calls have met: rows without a weight, and rows of very large scores."""

    def __init__(self) -> None:
        # Reading an array of NumPy would cost a small call a fifth of its time.
        self.kinds = (ctypes.c_int64 * 2)()
        self.address = ctypes.addressof(self.kinds)


_met = _Met()


def watch() -> int:
    """Forget what was met, and return where kernels write it."""
    kinds = _met.kinds
    kinds[NONE] = kinds[MANY] = 0
    return _met.address


def see(tops: Array) -> None:
    """Look at maxima of rows, in units of log 2, that are merged here."""
    far = ~(np.abs(tops) < _most(tops.dtype) * 2)
    if far.any():
        _met.kinds[NONE] |= bool((tops == -np.inf).any())
        _met.kinds[MANY] |= bool((far & (tops != -np.inf)).any())


def _most(dtype: np.dtype[Any]) -> float:
    """Scores up to this one, and what they are sums of, have room in units of log 2."""
    return float(np.finfo(dtype).max) / 8


def met() -> bool:
    """Whether there were rows that may be wrong since `watch`."""
    kinds = _met.kinds
    return bool(kinds[NONE] or kinds[MANY])


# Repeated calls come here without what others do about warnings: of NaN that signal, and of overflows.
@np.errstate(all="ignore")
def mend(attend: Attend, problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float) -> None:
    """Make what a call has written right, if it is not; `attend` makes calls that are not watched."""
    if reached(problem, terms):
        _attend_again(attend, problem, terms, out, lse, unit)


def reached(problem: Problem, terms: Terms) -> bool:
    """Whether the kernels since `watch` have met rows that may be wrong, because something is so large."""
    if not met():
        return False
    most = _most(problem.site.dtype)
    added = [t.table for t in terms.tables] + list(terms.biases)
    if problem.mask is not None and problem.mask.dtype != np.bool_:
        added.append(problem.mask)
    if any(bool((np.isfinite(x) & (np.abs(x) > most)).any()) for x in added):
        return True
    if not _met.kinds[MANY] and _may_be_empty(problem, terms):
        return False
    if problem.is_paged or problem.scales is not None:
        # What stands for their keys are no numbers: only the kernel goes from page to page, and makes numbers of codes.
        return True
    query, key = terms.query, terms.key
    query = problem.stored_q if query is None or isinstance(query, Turned) else query
    key = problem.stored_k if key is None or isinstance(key, Turned) else key
    # A rotation may double a channel.
    pairs = [(query, key, 4 * abs(problem.site.scale))]
    pairs += [(t.query, t.weights, 1.0) for t in terms.queries] + [(t.key, t.weights, 1.0) for t in terms.keys]
    return any(_largest(a) * _largest(b) * (scale * a.shape[-1]) > most for a, b, scale in pairs)


def _may_be_empty(problem: Problem, terms: Terms) -> bool:
    """Whether rows may have no key at all, which need no look at all numbers of the operands."""
    site = problem.site
    if problem.mask is not None or problem.key_lengths is not None or problem.ranges is not None or terms.biases:
        return True
    first, last = site.offset + problem.right, site.q_len - 1 + site.offset - problem.left
    return problem.sequences is not None or problem.step > 1 or first < 0 or last >= site.k_len


def _largest(x: Array) -> np.float64:
    """The largest finite size."""
    size = np.abs(x.astype(np.float64))
    return np.float64(size.max(initial=0.0, where=np.isfinite(size)))


def _quarter(problem: Problem, terms: Terms) -> tuple[Problem, Terms]:
    """The call whose scores are a quarter as large, without a rounding."""
    part, mask = problem.site.dtype.type(0.25), problem.mask
    if mask is not None and mask.dtype != np.bool_:
        mask = mask * part
    site = replace(problem.site, scale=problem.site.scale / 4)
    own = replace(
        terms,
        tables=tuple(TableTerm(t.table * part, t.index) for t in terms.tables),
        queries=tuple(QueryTerm(t.query, t.weights * part, t.index) for t in terms.queries),
        keys=tuple(KeyTerm(t.key, t.weights * part, t.index) for t in terms.keys),
        biases=tuple(bias * part for bias in terms.biases),
    )
    return replace(problem, site=site, mask=mask, softcap=problem.softcap / 4), own


def _kinds(lse: Array) -> tuple[Bools, Bools]:
    """Rows that only a quarter has room for, and those beyond the range, where a sum is infinite: by their quarter."""
    size, largest = np.abs(lse), np.finfo(lse.dtype).max / 4
    beyond = (size > largest * (1 + 8 * np.finfo(lse.dtype).eps)) & np.isfinite(lse)
    return (4 * np.minimum(size, largest) > _most(lse.dtype)) & np.isfinite(lse) & ~beyond, beyond


def _attend_again(attend: Attend, problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float) -> None:
    """Write the rows of `out` and `lse` that a call has no room for; `attend` makes calls that are not watched."""
    found, sums = np.empty_like(out), np.empty(out.shape[:-1], problem.site.dtype)
    attend(*_quarter(problem, terms), found, sums, LOG2, watched=False)
    far, beyond = _kinds(sums)
    out[far] = found[far]
    out[beyond] = np.where(sums[beyond] < 0, 0.0, np.nan)[:, None]
    if lse is not None:
        largest = np.finfo(sums.dtype).max / 4
        lse[far] = np.clip(sums[far], -largest, largest) * 4 * (unit / LOG2)
        lse[beyond] = np.where(sums[beyond] < 0, -np.inf, np.nan)


def _only(problem: Problem, rows: Bools) -> Problem:
    """The call in which other queries may attend no key."""
    mask = problem.mask
    own = np.broadcast_to(rows[..., None], (*rows.shape, problem.stored_k.shape[-2]))
    if mask is None or mask.dtype == np.bool_:
        mask = own if mask is None else mask & own
    else:
        mask = np.where(own, mask, mask.dtype.type(-np.inf))
    return replace(problem, mask=mask, mask_of_heads=False, mask_of_keys=False)


def gradients_again(attend: Attend, backward: Backward, problem: Problem, terms: Terms) -> tuple[Terms, Array]:
    """Gradients of a call with such rows; `attend` and `backward` make calls that are not watched."""
    site = problem.site
    if not site.v_dim:
        site = replace(site, v_dim=1)
        problem_v = replace(problem, site=site, stored_v=np.zeros((*problem.v.shape[:-1], 1), site.dtype))
    else:
        problem_v = problem
    sums, quarter = np.empty(problem.out_shape[:-1], site.dtype), _quarter(problem, terms)
    attend(*_quarter(problem_v, terms), np.empty(problem_v.out_shape, site.dtype), sums, LOG2, watched=False)
    far, beyond = _kinds(sums)
    near, near_v = backward(_only(problem, ~(far | beyond)), terms)
    other, other_v = backward(_only(quarter[0], far), quarter[1])
    # What was multiplied by a quarter of something is four times as steep.
    return added(near, other, 4), near_v + other_v


def added(near: Terms, other: Terms, steep: int = 1) -> Terms:
    """Gradients of all rows, from those of two calls that have different ones; `steep`: vectors of the other one's."""
    pairs: Sequence[Any] = list(zip(near.queries, other.queries, strict=True))
    keys: Sequence[Any] = list(zip(near.keys, other.keys, strict=True))
    return replace(
        near,
        query=near.query + steep * other.query,
        key=near.key + steep * other.key,
        tables=tuple(TableTerm(a.table + b.table, a.index) for a, b in zip(near.tables, other.tables, strict=True)),
        queries=tuple(QueryTerm(a.query + steep * b.query, a.weights + b.weights, a.index) for a, b in pairs),
        keys=tuple(KeyTerm(a.key + steep * b.key, a.weights + b.weights, a.index) for a, b in keys),
        values=tuple(ValueTerm(a.weights + b.weights, a.index) for a, b in zip(near.values, other.values, strict=True)),
        biases=tuple(a + b for a, b in zip(near.biases, other.biases, strict=True)),
    )
