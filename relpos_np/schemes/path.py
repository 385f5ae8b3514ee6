r"""PaTH: between query and key lies a product of reflections that the text decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Terms, fit
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import MemoryBound, Sample, Scheme, SchemeGradient, Site, register
from relpos_np.schemes.checks import among_keys, finite
from relpos_np.types import Array

# Keys of a block.
_BLOCK = 32


def path_products(q: Array, k: Array, w: Array, beta: Array, *, offset: int = 0) -> Array:
    r"""Products of queries and keys through everything in between.

    .. math::

        q_i^\top \Big(\prod_{l = i + M}^{j + 1} (I - \beta_l w_l w_l^\top)\Big) k_j \quad \text{for } j \le i + M,
        \qquad q_i^\top k_j \quad \text{for later keys}

    with the factor of the query's own position first.

    Parameters
    ----------
    q : ndarray, shape (..., H, L_q, D)
        Queries.
    k, w : ndarray, shape (..., H, L_k, D)
        Keys, and the directions of the factors.
    beta : ndarray, shape (..., H, L_k)
        Strength of each factor; with vectors w of length 1, 2 is a reflection and 0 does nothing.
    offset : int
        Position M of the first query among the keys.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        Products, not scaled.

    References
    ----------
    Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", NeurIPS 2025, eq. 1.
    """
    place = np.arange(q.shape[-2]) + offset
    out = q @ np.swapaxes(k, -1, -2)
    x = np.array(np.broadcast_to(q, (*out.shape[:-1], q.shape[-1])))
    for j in range(k.shape[-2] - 1, -1, -1):
        seen = place >= j
        here = x[..., seen, :]
        out[..., seen, j] = (here @ k[..., j, :, None])[..., 0]
        along = here @ w[..., j, :, None]
        x[..., seen, :] = here - beta[..., j, None, None] * along * w[..., None, j, :]
    return out


class PaTH(Scheme):
    r"""Position encoding through accumulated Householder transformations.

    .. math::

        s_{ij} = \sigma\, q_i^\top \Big(\prod_{l = i + M}^{j + 1} (I - \beta_l w_l w_l^\top)\Big) k_j

    Published models are causal; in a call that is not, later keys get the plain product.

    This is a reference for all backends: there is no kernel for it. The scores are the plain ones and a bias of every
    pair, computed in float64 in time of :math:`L_q L_k D` and memory of :math:`L_q L_k` per head. What is left of a
    query after all factors up to a block of keys is its row of X; within the block, with

    .. math::

        A_{ml} = [m > l]\, \beta_m\, w_m \cdot w_l, \qquad N_{lj} = [l > j]\, \beta_l\, w_l \cdot k_j, \qquad
        R_{il} = [l \le i + M]\, x_i \cdot w_l, \qquad C = R (I + A)^{-1}

    its products are :math:`X K^\top - C N`, and :math:`X - C \operatorname{diag}(\beta) W` is what is left for the
    block before it.

    Parameters
    ----------
    w : ndarray, shape (..., H, L_k, D) or (..., H_kv, L_k, D)
        Directions, for each batch item and head of queries or, as in published models, of keys. Published code makes
        their length 1; here they are taken as they are. All must be finite.
    beta : ndarray, shape (..., H, L_k) or (..., H_kv, L_k)
        Strengths; published models take 2 sigmoid(...). All must be finite.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit, a number is not finite, or a query stands outside the keys.

    Notes
    -----
    PaTH-FoX is the tuple of this and `FoX`. The reference in flash-linear-attention, `naive_path_attn`, multiplies
    the logarithms of forget gates with the scale, too; `FoX` does not.

    References
    ----------
    Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> w, beta = rng.standard_normal((2, 8, 10, 64)), rng.random((2, 8, 10))  # turn keys at each token
    >>> w /= np.linalg.norm(w, axis=-1, keepdims=True)
    >>> rp.attention(q, k, v, position=rp.PaTH(w, beta), causal=True).shape
    (2, 8, 10, 64)
    """

    # A product of its own: with schemes that turn queries and keys it would not be what any of them says.
    content = True
    _whole = "it needs all keys between query and key"

    def __init__(self, w: Any, beta: Any) -> None:
        self.w, self.beta = check.ordered("w", w), check.ordered("beta", beta)
        for name, x, axes in (("w", self.w, "H, L_k, D"), ("beta", self.beta, "H, L_k")):
            if x.ndim < axes.count(",") + 1:
                raise RelposValueError(f"{name}: expected shape (..., {axes}), found {x.shape}")
            finite(name, x)

    def check(self, site: Site) -> None:
        """There must be a vector and a number for each key, and every query must stand at one."""
        found = self.w.shape[-3], self.beta.shape[-2]
        if found[0] != found[1] or found[0] not in (site.heads, site.kv_heads):
            raise RelposValueError(
                f"w, beta: shapes {self.w.shape} and {self.beta.shape} are for {found[0]} and {found[1]} heads, the "
                f"call has {site.heads} of queries and {site.kv_heads} of keys"
            )
        if self.w.shape[-2:] != (site.k_len, site.head_dim) or self.beta.shape[-1] != site.k_len:
            raise RelposValueError(
                f"w, beta: expected (..., {site.k_len}, {site.head_dim}) and (..., {site.k_len}) for L_k and D, "
                f"found {self.w.shape} and {self.beta.shape}"
            )
        check.fits_batch("w", self.w.shape[:-3], site.batch)
        check.fits_batch("beta", self.beta.shape[:-2], site.batch)
        among_keys("w and beta", site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """What the product of all factors changes of the plain one."""
        q, k = (x.astype(np.float64) for x in (q, k))
        w = repeat_heads(self.w.astype(np.float64), site.heads)
        beta = repeat_heads(self.beta.astype(np.float64)[..., None], site.heads)[..., 0]
        through = path_products(q, k, w, beta, offset=site.offset)
        through -= q @ np.swapaxes(k, -1, -2)
        return (site.scale * through).astype(site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The operands as they are, and one dense bias, a block of keys at a time."""
        bias = np.empty((*site.batch, site.heads, site.q_len, site.k_len), site.dtype)
        queries, keys, w, beta = self._operands(q, k, site)
        with np.errstate(all="ignore"):
            for at, lost, c, _ in self._blocks(queries, w, beta, site):
                n = self._factors(keys, w, beta, at)
                bias[..., at] = site.scale * (lost @ np.swapaxes(keys[..., at, :], -1, -2) - c @ n)
        return Terms(query=q, key=k, biases=(bias,))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Numbers of float64 for every pair, and in `lift` what is left of each query at every block of keys."""
        lines, pairs = math.prod(site.batch) * site.heads, site.q_len * site.k_len
        blocks = -(-site.k_len // _BLOCK)
        kept = 8 * lines * site.q_len * (site.head_dim * blocks + site.k_len)
        return MemoryBound(4 * 8 * lines * pairs, lines * pairs * site.dtype.itemsize, kept)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Back through the blocks, from the first keys to the last."""
        # Whoever may hold anything has no share in the gradients.
        queries, keys, w, beta = (np.where(np.isfinite(x), x, 0.0) for x in self._operands(q, k, site))
        to_q, to_lost = np.zeros(queries.shape), np.zeros(queries.shape)
        to_k, to_w = np.zeros((2, *queries.shape[:-2], site.k_len, site.head_dim))
        to_beta = np.zeros(to_w.shape[:-1])
        for at, lost, c, a in reversed(list(self._blocks(queries, w, beta, site))):
            x, n = queries + lost, self._factors(keys, w, beta, at)
            own_w, own_k, own_beta = w[..., at, :], keys[..., at, :], beta[..., at, None]
            g = site.scale * grad.biases[0][..., at].astype(np.float64)
            to_scaled, to_n = -_turned(c) @ to_lost, np.tril(-_turned(c) @ g, -1)
            to_r = -g @ _turned(n) - to_lost @ _turned(own_w * own_beta)
            for key in range(1, a.shape[-1]):
                to_r[..., key] -= (to_r[..., :key] @ a[..., key, :key, None])[..., 0]
            to_a = np.tril(-_turned(c) @ to_r, -1)
            to_r *= self._open(site, at)
            to_scaled += to_n @ own_k + to_a @ own_w
            to_beta[..., at] = (to_scaled * own_w).sum(axis=-1)
            to_w[..., at, :] = own_beta * to_scaled + _turned(to_a) @ (own_beta * own_w) + _turned(to_r) @ x
            to_k[..., at, :] = _turned(g) @ lost + _turned(to_n) @ (own_beta * own_w)
            through = to_r @ own_w
            to_q += through
            to_lost += g @ own_k + through
        arrays = {"w": fit(to_w, self.w.shape), "beta": fit(to_beta[..., None], (*self.beta.shape, 1))[..., 0]}
        to_q, to_k = to_q.astype(site.dtype), fit(to_k, k.shape).astype(site.dtype)
        return SchemeGradient(grad.query + to_q, grad.key + to_k, arrays)

    def _operands(self, q: Array, k: Array, site: Site) -> list[Array]:
        """Queries, keys, w and beta in float64, with all heads."""
        found = [np.asarray(q).astype(np.float64)]
        for x, inner in ((np.asarray(k), 2), (self.w, 2), (self.beta, 1)):
            axis = x.ndim - inner - 1
            head = np.arange(site.heads) * x.shape[axis] // max(site.heads, 1)
            found.append(np.take(x, head, axis=axis).astype(np.float64))
        return found

    def _blocks(self, queries: Array, w: Array, beta: Array, site: Site) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Blocks of keys, the last ones first: what factors of later keys have added to each query, C and A."""
        lost = np.zeros(queries.shape)
        for stop in range(site.k_len, 0, -_BLOCK):
            at = slice(max(stop - _BLOCK, 0), stop)
            a = self._factors(w, w, beta, at)
            c = ((queries + lost) @ _turned(w[..., at, :])) * self._open(site, at)
            for key in range(a.shape[-1] - 2, -1, -1):
                c[..., key] -= (c[..., key + 1 :] @ a[..., key + 1 :, key, None])[..., 0]
            yield at, lost, c, a
            lost = lost - c @ (w[..., at, :] * beta[..., at, None])

    def _factors(self, x: Array, w: Array, beta: Array, at: slice) -> Array:
        """What each factor of a block makes of vectors before it: A of w, N of keys."""
        return np.tril(beta[..., at, None] * (w[..., at, :] @ _turned(x[..., at, :])), -1)

    def _open(self, site: Site, at: slice) -> Array:
        """Which factors of a block lie at or before a query."""
        return np.arange(at.start, at.stop) <= np.arange(site.q_len)[:, None] + site.offset


def _turned(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


@register(
    "path",
    PaTH,
    adds="reflections between query and key that the text decides",
    paper="Yang et al., NeurIPS 2025",
    doi="10.48550/arXiv.2505.16381",
    options="reference: no kernel",
    models="PaTH",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    lead, heads, dtype = at.pick(at.batch, ()), parts[at.pick("q", "k")].shape[-3], parts["q"].dtype
    w = at.normal(*lead, heads, at.k_len, at.dim)
    # Longer directions would make products grow with every factor.
    w = at.pick(1, 0.5) * w / np.maximum(np.linalg.norm(w.astype(np.float64), axis=-1, keepdims=True), 0.1)
    beta = 1 + np.tanh(at.normal(*lead, heads, at.k_len).astype(np.float64))
    return {**parts, "position": PaTH(w.astype(dtype), beta.astype(dtype)), "kwargs": {"causal": True}}
