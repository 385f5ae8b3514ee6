r"""FoX and CABLE: every key forgets what lies before it, by a gate of its own."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import clip_map, difference_map, relative_positions
from relpos_np._contract.terms import KeyTerm, QueryTerm, TableTerm, Terms, of_batch
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, register
from relpos_np.schemes.checks import among_keys, finite
from relpos_np.types import Array

Variant: TypeAlias = Literal["fox", "cable", "log"]
VARIANTS = get_args(Variant)


def forget_gates(gates: Array, *, variant: Variant = "fox") -> Array:
    r"""Logarithms of forget gates.

    .. math::

        \ln f = -\ln(1 + e^{-g}) \;\text{(fox)}, \qquad -\ln(1 + e^{g}) \;\text{(cable)}, \qquad g \;\text{(log)}

    Parameters
    ----------
    gates : ndarray
        What a projection of the layer's input makes, g.
    variant : {"fox", "cable", "log"}
        See `FoX`.

    Returns
    -------
    ndarray
        In float64 and the same shape.

    Raises
    ------
    RelposValueError
        If the variant is unknown.

    References
    ----------
    Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025.
    """
    g = gates.astype(np.float64)
    if check.choice("variant", variant, VARIANTS) == "log":
        return g
    return -np.logaddexp(0.0, -g if variant == "fox" else g)


def forgetting_bias(log_gates: Array, q_len: int, *, offset: int = 0) -> Array:
    r"""The bias of every pair.

    .. math::

        b_{ij} = c_{i + M} - c_j, \quad c_j = \sum_{l \le j} \ln f_l, \qquad
        b_{ij} = \sum_{l = j + 1}^{i + M} \ln f_l \quad \text{for } j \le i + M

    Parameters
    ----------
    log_gates : ndarray, shape (..., L_k)
        Logarithms of the keys' gates, see `forget_gates`.
    q_len : int
        Number of queries.
    offset : int
        Position M of the first query among the keys.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        To be added to the scores.

    References
    ----------
    Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025, eq. 5.
    """
    c = np.cumsum(log_gates, axis=-1)
    return np.asarray(c[..., offset : offset + q_len, None] - c[..., None, :])


class FoX(Scheme):
    r"""Forgetting attention: gates of the keys between query and key.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + \sum_{l = j + 1}^{i + M} \ln f_l

    which is :math:`c_{i+M} - c_j` with the sums :math:`c_j = \sum_{l \le j} \ln f_l`. Published models are causal. In
    a call that is not, later keys get the same difference, which rewards them where gates are below 1.

    Sums are made in float64. For the kernels they are split into a slope :math:`a` per head, the mean of its
    :math:`\ln f`, and what is left of them:

    .. math::

        c_{i+M} - c_j = a (i + M - j) + r_{i+M} - r_j

    in memory of L_q + L_k. In float32 a score is then as exact as numbers of the size of r are, to about
    :math:`10^{-7} \max |r|`, with r centred at the queries. Where gates are alike all along the text, r is of the
    size of :math:`\sqrt{L_k}`: outputs are off by 6e-6 for all queries of 20,000 keys and by 1e-6 for the last ones
    of 100,000, where sums in float32 would be off by 5e-3. It grows like :math:`L_k` if one half of a text forgets and
    the other does not: 3e-4 for all queries of 20,000 keys. Operands of float64 have 9 digits more.

    Parameters
    ----------
    gates : ndarray, shape (..., H, L_k)
        What decides the gate of each key, per head and batch item, before its activation. All must be finite.
    variant : {"fox", "cable", "log"}
        "fox": :math:`f = \operatorname{sigmoid}(g)`. "cable": :math:`f = e^{-\operatorname{softplus}(g)}`, which is
        the same of :math:`-g`. "log": g is :math:`\ln f`, what the kernels of flash-linear-attention take.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit, a gate is not finite, or a query stands outside the keys.

    Notes
    -----
    The published code of CABLE does not scale q · k: pass ``scale=1``.

    References
    ----------
    Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025. CABLE: Veisi et al.,
    "Context-aware Biases for Length Extrapolation", 2025 (axiomlab/Cable).

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> gates = rng.random((2, 8, 10))  # how much of what came before each token keeps, for each head
    >>> rp.attention(q, k, v, position=rp.FoX(gates), causal=True).shape
    (2, 8, 10, 64)
    """

    reads_operand_values = False

    def __init__(self, gates: Any, *, variant: Variant = "fox") -> None:
        self.gates = check.ordered("gates", gates)
        self.variant = check.choice("variant", variant, VARIANTS)
        # Slopes, and what is left of the sums at queries and at keys, in a part of a call.
        self._cut: tuple[Array, Array, Array] | None = None
        if self.gates.ndim < 2:
            raise RelposValueError(f"gates: expected shape (..., H, L_k), found {self.gates.shape}")
        finite("gates", self.gates)

    def check(self, site: Site) -> None:
        """There must be a gate per head and key, and one at the place of every query."""
        check.heads("gates", self.gates, -2, site)
        if self.gates.shape[-1] != site.k_len:
            raise RelposValueError(f"gates: shape {self.gates.shape} does not end in L_k = {site.k_len}")
        check.fits_batch("gates", self.gates.shape[:-2], site.batch)
        among_keys("gates", site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        log_gates = forget_gates(self.gates, variant=self.variant)
        return forgetting_bias(log_gates, site.q_len, offset=site.offset).astype(site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A row per relative position for the slope, and a number per query and per key for the rest."""
        slope, of_queries, of_keys = self._cut or self._sums(site)
        d = relative_positions(site.q_len, site.k_len, site.offset)
        table = np.multiply.outer(slope, -d).astype(site.dtype)
        everywhere = clip_map(site.q_len, site.k_len, site.offset, 0, "clip")
        # A head of keys holds a channel for each head of queries that shares it, which takes its own.
        group = site.heads // max(site.kv_heads, 1)
        key = np.swapaxes(of_keys.reshape(*of_keys.shape[:-2], site.kv_heads, group, site.k_len), -1, -2)
        own = -np.tile(np.eye(group, dtype=site.dtype), (site.kv_heads, 1))[:, None]
        return Terms(
            tables=(TableTerm(table, difference_map(site.q_len, site.k_len)),),
            queries=(QueryTerm(of_queries[..., None].astype(site.dtype), np.ones((1, 1, 1), site.dtype), everywhere),),
            keys=(KeyTerm(key.astype(site.dtype), own, everywhere),),
        )

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Sums at the queries and at the keys."""
        slope, of_queries, of_keys = self._sums(site)
        of_queries = of_batch(of_queries, 2, part.batch)[..., part.queries]
        of_keys = of_batch(of_keys, 2, part.batch)[..., part.keys]
        cut = self._with(gates=self.gates[..., :0], _cut=(slope, of_queries, of_keys))
        return (cut, *part.nearby(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula has a number of float64 for every pair of every head and batch item, then one of the call's."""
        pairs = site.q_len * site.k_len * site.heads * math.prod(site.batch)
        return MemoryBound(pairs * (8 + site.dtype.itemsize))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """From the sums of queries and keys to each gate before them; the split adds nothing, whatever the slope."""
        to_sums = np.swapaxes(grad.keys[0].key.astype(np.float64), -1, -2).reshape(self.gates.shape)
        to_sums[..., site.offset : site.offset + site.q_len] += grad.queries[0].query[..., 0]
        to_log = np.cumsum(to_sums[..., ::-1], axis=-1)[..., ::-1]
        if self.variant != "log":
            sign = 1.0 if self.variant == "fox" else -1.0
            to_log = to_log * sign * 0.5 * (1 - np.tanh(0.5 * sign * self.gates.astype(np.float64)))
        return SchemeGradient(arrays={"gates": to_log})

    def _sums(self, site: Site) -> tuple[Array, Array, Array]:
        """Slope of each head, and what is left of the sums at queries (..., H, L_q) and at keys (..., H, L_k)."""
        x = self.gates.astype(np.float64)
        if self.variant != "log":
            x = x if self.variant == "fox" else -x
            x = np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))
        slope = x.mean(axis=(*range(x.ndim - 2), x.ndim - 1)) if x.size else np.zeros(x.shape[-2])
        rest = np.add.accumulate(x - slope[:, None], axis=-1)
        of_queries = rest[..., site.offset : site.offset + site.q_len]
        if of_queries.size:
            # A constant cancels between queries and keys. This one leaves small numbers at queries and keys near them.
            rest -= 0.5 * (of_queries.max(axis=-1, keepdims=True) + of_queries.min(axis=-1, keepdims=True))
        return slope, of_queries, rest


@register(
    "fox",
    FoX,
    adds="gates between query and key, as sums of logarithms",
    paper="Lin et al., ICLR 2025",
    doi="10.48550/arXiv.2503.02130",
    variants=VARIANTS,
    models="FoX, CABLE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    variant: Variant = at.variant or "fox"
    gates = at.normal(*at.pick(at.batch, ()), parts["q"].shape[-3], at.k_len)
    if variant == "log":
        gates = -np.abs(gates) / at.pick(4, 1)
    return {**parts, "position": FoX(gates, variant=variant), "kwargs": {"causal": True}}
