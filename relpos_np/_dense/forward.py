"""The reference: dense scores of each scheme's formula, masks, softmax and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relpos_np._contract.problem import UNBOUNDED, Problem
from relpos_np.formulas.softmax import repeat_heads, softmax, weighted_sum
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array, Bools


def allowed_keys(problem: Problem) -> Bools:
    """Which key each query may attend, without the float mask: broadcastable to (..., H, L_q, L_k)."""
    site = problem.site
    soft = problem.mask is None or problem.mask.dtype != np.bool_
    if soft and problem.key_lengths is None and problem.left == problem.right == UNBOUNDED:
        return np.ones((1, 1), np.bool_)
    d = np.arange(site.k_len) - (np.arange(site.q_len)[:, None] + site.offset)
    allowed = (d >= -problem.left) & (d <= problem.right)
    if problem.key_lengths is not None:
        allowed = allowed & (np.arange(site.k_len) < problem.key_lengths[..., None, None, None])
    if problem.mask is not None and problem.mask.dtype == np.bool_:
        allowed = allowed & problem.mask
    return allowed


def scores(problem: Problem, schemes: Sequence[Scheme]) -> Array:
    """Scaled products plus what each scheme adds, then the masks: (..., H, L_q, L_k)."""
    site = problem.site
    q, k = problem.q, repeat_heads(problem.k, site.heads)
    with np.errstate(all="ignore"):
        content = q, k
        for scheme in schemes:
            content = scheme.transform(*content, site)
        s = np.matmul(content[0], np.swapaxes(content[1], -1, -2)) * site.dtype.type(site.scale)
        for scheme in schemes:
            added = scheme.scores(q, k, site)
            if added is not None:
                s = np.where(added == -np.inf, added, s + added) if scheme.excludes else s + added
        if problem.mask is not None and problem.mask.dtype != np.bool_:
            s = np.where(problem.mask == -np.inf, -np.inf, s + problem.mask)
        allowed = allowed_keys(problem)
        return s if allowed.all() else np.asarray(np.where(allowed, s, site.dtype.type(-np.inf)), site.dtype)


def attention(problem: Problem, schemes: Sequence[Scheme]) -> tuple[Array, Array]:
    """The reference: scores of each scheme's formula, softmax, weighted sum, and what schemes add to the output."""
    site = problem.site
    s = scores(problem, schemes)
    p, lse = softmax(s)
    if problem.keep is not None:
        p = np.where(problem.keep, p * site.dtype.type(problem.keep_scale), site.dtype.type(0))
    out = weighted_sum(p, repeat_heads(problem.v, site.heads), s != -np.inf)
    for scheme in schemes:
        added = scheme.outputs(p, site)
        if added is not None:
            out = out + added
    return out, lse
