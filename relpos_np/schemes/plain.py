r"""Plain attention: no positions at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import softmax
from relpos_np.schemes.base import MemoryBound, Sample, Scheme, SchemeGradient, Site, Terms, register
from relpos_np.types import Array


@np.errstate(all="ignore")
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


@np.errstate(all="ignore")
def self_attention_sums(x: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    r"""The same as `self_attention`, written as a sum for one output vector after another.

    .. math::

        z_i = \sum_{j=1}^{n} \alpha_{ij}\, x_j W^V, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\left(\frac{x_i W^Q (x_j W^K)^\top}{\sqrt{d_z}}\right)

    Parameters
    ----------
    x, w_q, w_k, w_v
        See `self_attention`.

    Returns
    -------
    ndarray, shape (..., L, d_v)
        One output vector per input vector.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017; in this form in Shaw et al., NAACL 2018.
    """
    keys, values = x @ w_k, x @ w_v
    z = np.empty_like(values)
    for i in range(x.shape[-2]):
        query = x[..., i, None, :] @ w_q
        alpha, _ = softmax((query * keys).sum(axis=-1) / math.sqrt(w_q.shape[-1]))
        z[..., i, :] = (alpha[..., None] * values).sum(axis=-2)
    return z


@np.errstate(all="ignore")
def self_attention_general(x: Array, f: Callable[[Array, Sequence[tuple[Array, Array]]], Any]) -> Array:
    r"""Self-attention with any rule f: every vector asks, and all vectors serve as keys and as values.

    .. math::

        y_i = f\big(x_i, (x_1, x_1), \ldots, (x_n, x_n)\big)

    Parameters
    ----------
    x : ndarray, shape (L, d)
        Input vectors as rows.
    f : callable
        Called as ``f(query, pairs)`` for each position in turn, with query (d,) and a sequence of L pairs
        (key, value) of vectors (d,); returns the output vector, of the same shape at every position.

    Returns
    -------
    ndarray, shape (L, d_out)
        One output vector per input vector; (0, d) for an empty input.

    Raises
    ------
    RelposTypeError
        If `f` cannot be called, or `x` is not an array of floats.
    RelposValueError
        If `x` is not a matrix, or `f` returns vectors of different shapes.

    References
    ----------
    Zhang et al., "Dive into Deep Learning", chapter "Self-Attention and Positional Encoding".
    """
    x = check.floating("x", x)
    if x.ndim != 2:
        raise RelposValueError(f"x: expected shape (L, d), found {x.shape}")
    if not callable(f):
        raise RelposTypeError(f"f: expected a function of a query and pairs, found {type(f).__name__}")
    pairs = tuple((row, row) for row in x)
    y = [np.asarray(f(query, pairs)) for query in x]
    if len({row.shape for row in y}) > 1:
        raise RelposValueError(f"f: returned vectors of different shapes {sorted({row.shape for row in y})}")
    return np.stack(y) if y else x


class Plain(Scheme):
    r"""Attention without positions, the same as ``position=None``.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> bool((rp.attention(q, k, v, position=rp.Plain()) == rp.attention(q, k, v)).all())
    True
    """

    relative = True
    reads_operand_values = False

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """No terms."""
        return Terms(relative_error_ulps=0.0)

    def memory_bound(self, site: Site) -> MemoryBound:
        """Nothing."""
        return MemoryBound(0)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Nothing either."""
        return SchemeGradient()


@register(
    "plain",
    Plain,
    adds="nothing",
    paper="Vaswani et al., NeurIPS 2017",
    doi="10.48550/arXiv.1706.03762",
    equation="1",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    return {**at.operands(4, 2), "position": Plain(), "kwargs": {"causal": True}}
