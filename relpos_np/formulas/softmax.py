r"""Softmax, log-sum-exp and weighted sums: what every formula of attention ends in.

With scores :math:`s_{ij}` (..., H, L_q, L_k), of which excluded ones are :math:`-\infty`,

.. math::

    p_{ij} = \frac{e^{s_{ij}}}{\sum_{l} e^{s_{il}}}, \qquad o_i = \sum_j p_{ij} v_j, \qquad
    \mathrm{lse}_i = \ln \sum_j e^{s_{ij}} .

A query that may attend no key has output 0 and log-sum-exp :math:`-\infty`.
"""

from __future__ import annotations

import numpy as np

from relpos_np.formulas.sums import product, sum_of_pairs, total
from relpos_np.types import Array, Bools


def repeat_heads(x: Array, heads: int) -> Array:
    """Repeat grouped key or value heads (..., H_kv, L, D) so that head h of H uses h // (H / H_kv)."""
    return x if x.shape[-3] == heads else np.repeat(x, heads // x.shape[-3], axis=-3)


def softmax(s: Array) -> tuple[Array, Array]:
    """Probabilities and log-sum-exp over the last axis.

    Parameters
    ----------
    s : ndarray, shape (..., L_k)
        Scores; excluded ones are -inf.

    Returns
    -------
    tuple of ndarray
        Probabilities (..., L_k) and log-sum-exp (...); a row of -inf has 0 and -inf.
    """
    with np.errstate(all="ignore"):
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        safe = np.where(top == -np.inf, s.dtype.type(0), top)
        e = np.exp(s - safe)
        whole = total(e)[..., None]
        p = e / np.where(whole == 0, s.dtype.type(1), whole)
        return p, (safe + np.log(whole))[..., 0]


def drop(x: Array, rate: float, keep: Bools | None) -> Array:
    """Dropout: elements not kept become 0, the others are divided by 1 - rate; None keeps all as they are."""
    return x if keep is None else np.where(keep, x * x.dtype.type(1.0 / (1.0 - rate)), x.dtype.type(0))


def weighted_vectors(p: Array, a: Array) -> Array:
    """Sum of p_ij a_ij over keys, for vectors that belong to pairs.

    Parameters
    ----------
    p : ndarray, shape (..., L_q, L_k)
        Probabilities.
    a : ndarray, shape (..., L_q, L_k, D_v)
        The vectors.

    Returns
    -------
    ndarray, shape (..., L_q, D_v)
        The sums.
    """
    return sum_of_pairs(p, a)


def weighted_sum(p: Array, v: Array, attended: Bools) -> Array:
    """Sum of p_ij v_j over attended keys.

    Parameters
    ----------
    p : ndarray, shape (..., L_q, L_k)
        Probabilities.
    v : ndarray, shape (..., L_k, D_v)
        Values. One that is not finite reaches only the queries that attend it.
    attended : ndarray of bool, shape (..., L_q, L_k)
        Which queries attend which keys.

    Returns
    -------
    ndarray, shape (..., L_q, D_v)
        The sums.
    """
    finite = np.isfinite(v)
    with np.errstate(all="ignore"):
        out = product(p, np.where(finite, v, v.dtype.type(0)))
        bad = ~finite.all(axis=-1)
        for j in np.unique(np.nonzero(bad)[-1]):
            value = np.where(finite[..., j, :], v.dtype.type(0), v[..., j, :])[..., None, :]
            out = out + np.where(attended[..., :, j, None], p[..., :, j, None] * value, v.dtype.type(0))
    return out
