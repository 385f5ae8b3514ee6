r"""DAPE: a small network that sees the scores and the bias of all heads adapts the bias to the text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import TableTerm, Terms, cut_map, fit
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.alibi import ALiBi
from relpos_np.schemes.base import MemoryBound, Sample, Scheme, SchemeGradient, Site, in_order, register
from relpos_np.schemes.fire import FIRE
from relpos_np.schemes.kerple import KERPLE
from relpos_np.schemes.t5 import T5
from relpos_np.types import Array

# Numbers of an item that are made of some queries at a time, of all their keys; fewer than one query's keys take are
# not. How many items there are does not count, so that each has the bits that it has alone.
_BLOCK = 1 << 10


def dape_bias(scores: Array, bias: Array, w1: Array, b1: Array, w2: Array, b2: Array, *, slope: float = 0.01) -> Array:
    r"""What is added to the scores.

    .. math::

        b_{ij} + W_2\, \phi(W_1 [s_{ij}; b_{ij}] + \beta_1) + \beta_2, \qquad
        \phi(x) = \max(x, 0) + \lambda \min(x, 0)

    where :math:`s_{ij}` and :math:`b_{ij}` are vectors with a number for each head.

    Parameters
    ----------
    scores : ndarray, shape (..., H, L_q, L_k)
        Scaled products s.
    bias : ndarray, shape (H, L_q, L_k)
        Bias b of the positions.
    w1, b1, w2, b2 : ndarray, shapes (E, 2 H), (E,), (H, E) and (H,)
        The network.
    slope : float
        Of negative numbers, :math:`\lambda`.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        The bias and the network's output.

    References
    ----------
    Zheng et al., "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation", NeurIPS 2024, eq. 4.
    """
    pair = np.concatenate([scores, np.broadcast_to(bias, scores.shape)], axis=-3)
    hidden = np.moveaxis(pair, -3, -1) @ w1.T + b1
    out = np.maximum(hidden, slope * hidden) if slope <= 1 else np.minimum(hidden, slope * hidden)
    return np.asarray(np.moveaxis(out @ w2.T + b2, -1, -3) + bias)


class DAPE(Scheme):
    r"""Data-adaptive positions, version 1, around another scheme's bias.

    .. math::

        s'_{ij} = s_{ij} + b_{ij} + W_2\, \phi(W_1 [s_{ij}; b_{ij}] + \beta_1) + \beta_2, \qquad
        s^{(h)}_{ij} = \sigma\, q^{(h)}_i \cdot k_j

    with the leaky ReLU :math:`\phi`. The network works on every pair alone and mixes its heads, so that what a key
    holds for one head reaches the scores of the others; version 2, which also mixes neighbouring keys, is not this.
    Its input is made of products alone: other schemes of the call and its masks are added afterwards.

    It is computed in float64, in time of L_q L_k H E and memory of L_q L_k H per batch item, also by the kernels: the
    scores are a bias that no table can say.

    Parameters
    ----------
    bias : ALiBi, KERPLE, FIRE or T5
        What makes b. ALiBi in its symmetric or causal form.
    w1, b1, w2, b2 : ndarray, shapes (E, 2 H), (E,), (H, E) and (H,)
        The network, as checkpoints store it (`mlp2.0`, `mlp2.2`): its first H inputs are scores, the others biases.
    slope : float
        :math:`\lambda` of the leaky ReLU.

    Raises
    ------
    RelposError
        If shapes do not fit, or `bias` is another scheme.

    Notes
    -----
    Gradients of what `bias` was made of have names with a dot, such as ``position["bias.slopes"]``.

    References
    ----------
    Zheng et al., "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation", NeurIPS 2024
    (chuanyang-Zheng/DAPE).

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> w1, b1 = rng.standard_normal((32, 16)), np.zeros(32)  # of scores and biases of 8 heads
    >>> w2, b2 = rng.standard_normal((8, 32)), np.zeros(8)
    >>> rp.attention(q, k, v, position=rp.DAPE(rp.ALiBi(), w1, b1, w2, b2), causal=True).shape
    (2, 8, 10, 64)
    """

    token_independent = True
    _whole = "its network needs all heads"

    def __init__(self, bias: Scheme, w1: Any, b1: Any, w2: Any, b2: Any, *, slope: float = 0.01) -> None:
        if not isinstance(bias, ALiBi | KERPLE | FIRE | T5):
            raise RelposTypeError(f"bias: expected ALiBi, KERPLE, FIRE or T5, found {type(bias).__name__}")
        if isinstance(bias, ALiBi) and bias.form == "key":
            raise RelposValueError("bias: expected ALiBi by distances, 'symmetric' or 'causal', found its form 'key'")
        self.bias = bias
        self.w1 = check.table("w1", w1, "hidden two_heads")
        self.b1 = check.table("b1", b1, "hidden")
        self.w2 = check.table("w2", w2, "heads hidden")
        self.b2 = check.table("b2", b2, "heads")
        self.slope = check.real("slope", slope)
        heads, hidden = self.w2.shape
        if self.w1.shape != (hidden, 2 * heads) or self.b1.shape != (hidden,) or self.b2.shape != (heads,):
            raise RelposValueError(
                f"w1, b1, w2, b2: shapes {self.w1.shape}, {self.b1.shape}, {self.w2.shape} and {self.b2.shape} "
                "are not those of a network: expected (E, 2 H), (E,), (H, E) and (H,)"
            )

    def check(self, site: Site) -> None:
        """There must be one output per head, and a bias for each."""
        check.heads("w2", self.w2, 0, site)
        self.bias.check(site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """Bias and network of every pair at once."""
        wide = replace(site, dtype=np.dtype(np.float64))
        q, k = (x.astype(np.float64) for x in (q, k))
        bias = self.bias.scores(q, k, wide)
        assert bias is not None
        network = (x.astype(np.float64) for x in (self.w1, self.b1, self.w2, self.b2))
        products = site.scale * (q @ np.swapaxes(k, -1, -2))
        return dape_bias(products, bias, *network, slope=self.slope).astype(site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One dense bias, some queries at a time."""
        q, k = in_order(q), in_order(k)
        out = np.empty((*site.batch, site.heads, site.q_len, site.k_len), site.dtype)
        w2, b2 = self.w2.astype(np.float64), self.b2.astype(np.float64)
        for rows, _, bias, hidden in self._blocks(q, k, site, self._inner(q, k, site)):
            added = np.matmul(w2, np.where(hidden > 0, hidden, self.slope * hidden)) + b2[:, None]
            out[..., rows, :] = added.reshape(*site.batch, *bias.shape) + bias
        return Terms(biases=(out,))

    def memory_bound(self, site: Site) -> MemoryBound:
        """In the formula numbers of float64 for every pair of all heads and hidden units; else a block of them."""
        pairs, batch, (heads, hidden) = site.q_len * site.k_len, math.prod(site.batch), self.w2.shape
        inner = self.bias.memory_bound(replace(site, dtype=np.dtype(np.float64)))
        block = 8 * min(self._step(site), site.q_len) * site.k_len * (batch + 1) * (3 * hidden + 4 * heads)
        formula = 8 * pairs * (batch * (6 * heads + 4 * hidden) + heads)
        lower = inner.lower + pairs * batch * heads * site.dtype.itemsize + block
        return MemoryBound(inner.formula + formula, lower, 2 * inner.lower + inner.lift + 2 * block)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Through the network of each pair, to its scores and to the bias, and with that through its scheme."""
        wide = replace(site, dtype=np.dtype(np.float64))
        inner = self._inner(q, k, site)
        heads, (w1, w2) = site.heads, (x.astype(np.float64) for x in (self.w1, self.w2))
        total = {name: np.zeros(getattr(self, name).shape) for name in ("w1", "b1", "w2", "b2")}
        queries, keys = (np.where(np.isfinite(x), x, 0.0) for x in self._operands(q, k, site))
        grad_q, grad_k = np.zeros(queries.shape), np.zeros(keys.shape)
        grads = Terms(
            tables=tuple(TableTerm(np.zeros(term.table.shape), term.index) for term in inner.tables),
            biases=tuple(np.zeros(pairs.shape) for pairs in inner.biases),
        )
        for rows, products, bias, hidden in self._blocks(queries, keys, wide, inner):
            g = grad.biases[0][..., rows, :].astype(np.float64).reshape(-1, heads, bias[0].size)
            by_hidden = np.matmul(w2.T, g) * np.where(hidden > 0, 1.0, self.slope)
            active = np.where(hidden > 0, hidden, self.slope * hidden)
            total["w2"] += np.matmul(g, np.swapaxes(active, -1, -2)).sum(axis=0)
            total["b2"] += g.sum(axis=(0, 2))
            total["w1"][:, :heads] += np.matmul(by_hidden, np.swapaxes(products, -1, -2)).sum(axis=0)
            total["w1"][:, heads:] += by_hidden.sum(axis=0) @ bias.reshape(heads, -1).T
            total["b1"] += by_hidden.sum(axis=(0, 2))
            by_pair = np.matmul(w1.T, by_hidden)
            to_bias = (g + by_pair[:, heads:]).sum(axis=0)
            for term in grads.tables:
                row = self._rows(term, rows, site).ravel()
                term.table += [np.bincount(row, of_head, term.index.rows) for of_head in to_bias]
            for pairs in grads.biases:
                pairs[:, rows] = to_bias.reshape(bias.shape)
            to_scores = site.scale * by_pair[:, :heads].reshape(*site.batch, *bias.shape)
            grad_q[..., rows, :] = to_scores @ keys
            grad_k += np.swapaxes(to_scores, -1, -2) @ queries[..., rows, :]
        share = self.bias.lift(q, k, wide, grads)
        arrays = total | {f"bias.{name}": x for name, x in share.arrays.items()}
        return SchemeGradient(grad_q.astype(site.dtype), fit(grad_k, k.shape).astype(site.dtype), arrays)

    def _inner(self, q: Array, k: Array, site: Site) -> Terms:
        """The terms of the bias, in float64: tables or one array for all pairs."""
        return self.bias.lower(q, k, replace(site, dtype=np.dtype(np.float64)))

    def _step(self, site: Site) -> int:
        """Queries of a block."""
        return max(1, _BLOCK // max(1, site.k_len * (len(self.b1) + site.heads)))

    def _operands(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Queries and, for each of their heads, keys in float64."""
        queries, keys = (np.asarray(x).astype(np.float64) for x in (q, k))
        return queries, keys[..., np.arange(site.heads) * keys.shape[-3] // max(site.heads, 1), :, :]

    def _blocks(self, q: Array, k: Array, site: Site, inner: Terms) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Some queries at a time: their products (B, H, n), bias (H, L, L_k), and the hidden layer (B, E, n)."""
        queries, keys = self._operands(q, k, site)
        w1, b1 = self.w1.astype(np.float64), self.b1.astype(np.float64)[:, None]
        step = self._step(site)
        for first in range(0, site.q_len if site.heads and site.k_len else 0, step):
            rows = slice(first, min(first + step, site.q_len))
            bias = np.zeros((site.heads, rows.stop - first, site.k_len))
            for term in inner.tables:
                bias += term.table[:, self._rows(term, rows, site)]
            for pairs in inner.biases:
                bias += pairs[:, rows]
            products = np.einsum("...id,...jd->...ij", queries[..., rows, :], keys) * site.scale
            products = products.reshape(math.prod(site.batch), site.heads, bias[0].size)
            hidden = np.matmul(w1[:, : site.heads], products)
            hidden += w1[:, site.heads :] @ bias.reshape(site.heads, bias[0].size) + b1
            yield rows, products, bias, hidden

    def _rows(self, term: TableTerm, queries: slice, site: Site) -> Array:
        """The rows of a table that belong to some queries."""
        index = cut_map(term.index, site.q_len, queries, slice(0, site.k_len))
        return index.dense(queries.stop - queries.start, site.k_len)


@register(
    "dape",
    DAPE,
    adds="a bias that a network adapts to the scores of all heads",
    paper="Zheng et al., NeurIPS 2024",
    doi="10.48550/arXiv.2405.14722",
    options="around `ALiBi`, `KERPLE`, `FIRE` or `T5`",
    models="DAPE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads = parts["q"].shape[-3]
    w1, b1, w2, b2 = at.normal(6, 2 * heads) * 0.5, at.normal(6), at.normal(heads, 6) * 0.5, at.normal(heads)
    kind = at.pick("alibi", "kerple", "fire", "t5")
    if kind == "alibi":
        bias: Scheme = ALiBi()
    elif kind == "kerple":
        bias = KERPLE(np.abs(at.normal(heads)), np.abs(at.normal(heads)))
    elif kind == "t5":
        bias = T5(at.normal(8, heads), bidirectional=False, max_distance=20)
    else:
        network = at.normal(5), np.abs(at.normal(5)), at.normal(heads, 5), at.normal(heads)
        bias = FIRE(*network, c=np.asarray(0.25, b1.dtype), threshold=np.asarray(at.pick(4.75, 300.5), b1.dtype))
    position = DAPE(bias, w1.astype(b1.dtype), b1, w2.astype(b1.dtype), b2, slope=at.pick(0.01, 0.5, 0.0))
    return {**parts, "position": position, "kwargs": {"causal": True}}
