r"""Plain attention: no positions at all."""

from __future__ import annotations

import numpy as np

from relpos_np.dense import softmax
from relpos_np.problem import Site
from relpos_np.schemes.base import Scheme
from relpos_np.terms import Terms
from relpos_np.types import Array


def self_attention(x: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    r"""Self-attention of one head with its projections, in matrix form.

    .. math::

        Z = \mathrm{softmax}\left(\frac{(X W^Q)(X W^K)^\top}{\sqrt{d_z}}\right) X W^V

    Parameters
    ----------
    x : ndarray, shape (..., L, d_model)
        Input vectors as rows.
    w_q, w_k : ndarray, shape (d_model, d_z)
        Projections of queries and keys.
    w_v : ndarray, shape (d_model, d_v)
        Projection of values.

    Returns
    -------
    ndarray, shape (..., L, d_v)
        One output vector per input vector.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
    """
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    p, _ = softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(w_q.shape[-1]))
    return np.asarray(p @ v)


class Plain(Scheme):
    r"""Attention without positions, the same as ``position=None``.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
    """

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """No terms."""
        return Terms()

    def __repr__(self) -> str:
        return "Plain()"
