"""The reference: dense scores of each scheme's formula, masks, softmax and weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem
from relpos_np._dense.slopes import Slopes
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import repeat_heads, softmax, weighted_sum
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array, Bools


def allowed_keys(problem: Problem) -> Bools:
    """Which key each query may attend, without the float mask: broadcastable to (..., H, L_q, L_k)."""
    site = problem.site
    soft = problem.mask is None or problem.mask.dtype != np.bool_
    ruled = problem.ranges is not None or problem.step > 1
    if soft and not ruled and problem.key_lengths is None and problem.left == problem.right == UNBOUNDED:
        return np.ones((1, 1), np.bool_)
    d = np.arange(site.k_len) - (np.arange(site.q_len)[:, None] + site.offset)
    allowed = (d >= -problem.left) & (d <= problem.right)
    if problem.step > 1:
        allowed = allowed & (d % problem.step == 0)
    if problem.ranges is not None:
        # One for all heads.
        first, stop = np.moveaxis(problem.ranges, -1, 0)[..., None, :, None]
        allowed = allowed & (np.arange(site.k_len) >= first) & (np.arange(site.k_len) < stop)
    if problem.key_lengths is not None:
        allowed = allowed & (np.arange(site.k_len) < problem.key_lengths[..., None, None, None])
    if problem.mask is not None and problem.mask.dtype == np.bool_:
        allowed = allowed & problem.mask
    return allowed


def capped(s: Array, c: float) -> tuple[Array, Array]:
    """The cap c tanh(s / c), and its derivative."""
    t = np.tanh(s / s.dtype.type(c))
    return t * s.dtype.type(c), 1 - t * t


def scores(problem: Problem, schemes: Sequence[Scheme], slopes: Slopes | None = None) -> Array:
    """Scaled products plus what each scheme adds, then changes, a cap and the masks: (..., H, L_q, L_k).

    The derivatives of what changes scores go to `slopes`.
    """
    site = problem.site
    with np.errstate(all="ignore"):
        s = _before_masks(problem, schemes, Slopes() if slopes is None else slopes)
        if problem.mask is not None and problem.mask.dtype != np.bool_:
            s = np.where(problem.mask == -np.inf, -np.inf, s + problem.mask)
        allowed = allowed_keys(problem)
        return s if allowed.all() else np.asarray(np.where(allowed, s, site.dtype.type(-np.inf)), site.dtype)


def _before_masks(problem: Problem, schemes: Sequence[Scheme], slopes: Slopes) -> Array:
    site = problem.site
    q, k = problem.q, repeat_heads(problem.k, site.heads)
    content = q, k
    for scheme in schemes:
        content = scheme.transform(*content, site)
    s = np.matmul(content[0], np.swapaxes(content[1], -1, -2)) * site.dtype.type(site.scale)
    if problem.cap_content:
        s, slopes.content = capped(s, problem.softcap)
    shut: list[Bools] = []
    for scheme in schemes:
        added = scheme.scores(q, k, site)
        if added is not None:
            s = s + added
            hidden = added == -np.inf
            shut += [hidden] if hidden.any() else []
    for pairs in shut:
        s = np.where(pairs, site.dtype.type(-np.inf), s)
    _same_shape("scores have", s, (*problem.batch, site.heads, site.q_len, site.k_len), schemes)
    for scheme in schemes:
        change = scheme.change(site)
        if change is not None:
            if change.slope is not None:
                slopes.scores.append(change.slope(s))
            s = change.apply(s)
            shut.append(s == -np.inf)
    if problem.softcap and not problem.cap_content:
        s, slope = capped(s, problem.softcap)
        slopes.scores.append(slope)
    for pairs in shut:
        s = np.where(pairs, site.dtype.type(-np.inf), s)
    return np.asarray(s)


def _same_shape(what: str, x: Array, wanted: tuple[int, ...], schemes: Sequence[Scheme]) -> None:
    """Refuse what a scheme has broadcast to another shape."""
    if x.shape != wanted:
        names = ", ".join(type(scheme).__name__ for scheme in schemes)
        raise RelposValueError(f"position: with what {names} adds the {what} shape {x.shape}, expected {wanted}")


def attention(problem: Problem, schemes: Sequence[Scheme], sinks: Array | None = None) -> tuple[Array, Array]:
    """The reference: scores of each scheme's formula, softmax, weighted sum, and what schemes add to the output.

    `sinks` are one more score in each row, (*batch, H, L_q), that has no value.
    """
    site = problem.site
    s = scores(problem, schemes)
    if sinks is None:
        p, lse = softmax(s)
    else:
        p, lse = softmax(np.concatenate([s, sinks[..., None]], axis=-1))
        p = p[..., :-1]
    if problem.keep is not None:
        p = np.where(problem.keep, p * site.dtype.type(problem.keep_scale), site.dtype.type(0))
    return outputs(problem, schemes, p, lambda p, v: weighted_sum(p, v, s != -np.inf)), lse


def outputs(problem: Problem, schemes: Sequence[Scheme], p: Array, weighted: Callable[[Array, Array], Array]) -> Array:
    """The output of probabilities: values `weighted` by them, and what schemes add to it."""
    site = problem.site
    v = repeat_heads(problem.v, site.heads)
    for scheme in schemes:
        v = scheme.turn_values(v, site)
    out = weighted(p, v)
    for scheme in schemes:
        added = scheme.outputs(p, site)
        if added is not None:
            out = out + added
    for scheme in schemes:
        out = scheme.turn_output(out, site)
    _same_shape("output has", out, problem.out_shape, schemes)
    return out
