r"""Selective attention: every query may say of an earlier key that later queries need it no more."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Terms, fit
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import MemoryBound, Sample, Scheme, SchemeGradient, Site, in_order, register
from relpos_np.types import Array

Variant: TypeAlias = Literal["paper", "x_transformers"]
VARIANTS = get_args(Variant)


def selective_votes(scores: Array, *, offset: int = 0, variant: Variant = "paper") -> Array:
    r"""What each query says against each key.

    .. math::

        S_{ij} = \max(s_{ij}, 0) \;\text{ for } j \ne i + M \text{ and } j \ne j_0, \qquad 0 \text{ otherwise}

    Parameters
    ----------
    scores : ndarray, shape (..., L_q, L_k)
        Scores of the head that votes; -inf where a query may not attend a key.
    offset : int
        Position M of the first query among the keys.
    variant : {"paper", "x_transformers"}
        Which keys are spared, see `Selective`.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        Votes, at least 0. Their sum over the queries, with what was there before, is the `past` of a next call.

    Raises
    ------
    RelposValueError
        If the variant is unknown.

    References
    ----------
    Leviathan et al., "Selective Attention Improves Transformer", ICLR 2025, section 3.
    """
    q_len, k_len = scores.shape[-2:]
    keys = np.arange(k_len)
    spared = keys == np.arange(q_len)[:, None] + offset
    if check.choice("variant", variant, VARIANTS) == "paper":
        spared = spared | (keys == 0)
    else:
        spared = spared | (keys <= offset)
    return np.where(spared, scores.dtype.type(0), np.maximum(scores, 0))


class Selective(Scheme):
    r"""Selective attention.

    .. math::

        s^{(h)}_{ij} = \sigma\, q^{(h)}_i \cdot k_j - F_{ij}, \qquad F_{ij} = P_j + \sum_{i' < i} S_{i'j}, \qquad
        S_{ij} = \max(\sigma\, q^{(h_0)}_i \cdot k_j, 0)

    with :math:`S_{ij} = 0` for a query's own key, for the first key, and for keys that the call's ``causal`` and
    ``window`` keep from the query on the right. One head, :math:`h_0`, votes for all. What a query says acts on later
    queries alone.

    Votes are made of products alone. Where queries and keys turn (`Rotary`), turn them before the call; a bias of
    another scheme adds to the scores and not to the votes, while x-transformers lets it vote too. Nor does a scheme
    see the call's ``mask`` and ``key_lengths``; votes against a key have no effect on other keys, so that this matters
    only for a key that is hidden from one query and open to a later one.

    Votes are summed in float64, in time and memory of L_q L_k per batch item, also by the kernels: the scores are a
    bias that no table can say.

    Parameters
    ----------
    head : int
        The head of queries that votes.
    variant : {"paper", "x_transformers"}
        Without memory the same. "paper": key 0 is spared. "x_transformers": keys in memory, before the position of the
        first query, are spared, and the key of the first query.
    past : ndarray, shape (..., L_k), optional
        P: sums of votes of earlier queries that are not in the call, for decoding with a cache; see
        `selective_votes`.

    Raises
    ------
    RelposError
        If shapes or dtypes do not fit, or there is no such head.

    References
    ----------
    Leviathan et al., "Selective Attention Improves Transformer", ICLR 2025. Memory: lucidrains/x-transformers,
    `selective_attn`.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.Selective(), causal=True).shape  # head 0 masks tokens for all
    (2, 8, 10, 64)
    """

    _whole = "each query needs what all earlier queries say"

    def __init__(self, head: int = 0, *, variant: Variant = "paper", past: Any = None) -> None:
        self.head = check.integer("head", head, 0)
        self.variant = check.choice("variant", variant, VARIANTS)
        self.past = None if past is None else check.ordered("past", past)
        if self.past is not None and self.past.ndim < 1:
            raise RelposValueError(f"past: expected shape (..., L_k), found {self.past.shape}")

    @property
    def token_independent(self) -> bool:  # type: ignore[override]
        """What earlier queries said belongs to the keys of one call."""
        return self.past is None

    def check(self, site: Site) -> None:
        """There must be such a head, and a sum of votes for every key."""
        if self.head >= max(site.heads, 1):
            raise RelposValueError(f"head: expected 0 ... {site.heads - 1}, found {self.head}")
        if self.past is not None:
            if self.past.shape[-1] != site.k_len:
                raise RelposValueError(f"past: shape {self.past.shape} does not end in L_k = {site.k_len}")
            check.fits_batch("past", self.past.shape[:-1], site.batch)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """Minus the votes of earlier queries."""
        if not site.heads:
            return np.zeros((*site.batch, 1, site.q_len, site.k_len), site.dtype)
        keys = repeat_heads(k, site.heads)[..., self.head, :, :].astype(np.float64)
        scores = site.scale * (q[..., self.head, :, :].astype(np.float64) @ np.swapaxes(keys, -1, -2))
        d = np.arange(site.k_len) - (np.arange(site.q_len)[:, None] + site.offset)
        scores[..., d > site.right] = -np.inf
        votes = selective_votes(scores, offset=site.offset, variant=self.variant)
        before = np.cumsum(np.concatenate([np.zeros_like(votes[..., :1, :]), votes[..., :-1, :]], axis=-2), axis=-2)
        if self.past is not None:
            before += self.past[..., None, :]
        return -before[..., None, :, :].astype(site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One dense bias for all heads."""
        against = np.zeros((*site.batch, 1, site.q_len, site.k_len))
        if self.past is not None:
            against -= self.past[..., None, None, :]
        if site.heads:
            votes = self._votes(q, k, site)[2]
            against[..., 0, 1:, :] -= np.cumsum(votes[..., :-1, :], axis=-2)
        return Terms(biases=(against.astype(site.dtype),))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Numbers of float64 for every pair of every batch item: products, votes, their sums."""
        doubles = 8 * site.q_len * site.k_len * math.prod(site.batch)
        return MemoryBound(5 * doubles, 6 * doubles, 6 * doubles)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """To every open vote from all later queries, and on to the query and key that made it."""
        to_sums = -grad.biases[0][..., 0, :, :].astype(np.float64)
        arrays = {}
        if self.past is not None:
            arrays["past"] = fit(to_sums.sum(axis=-2), self.past.shape)
        if not (site.heads and site.q_len):
            return SchemeGradient(arrays=arrays)
        queries, keys, votes = self._votes(q, k, site)
        to_scores = np.zeros_like(votes)
        to_scores[..., :-1, :] = np.cumsum(to_sums[..., :0:-1, :], axis=-2)[..., ::-1, :]
        to_scores *= np.where(votes > 0, site.scale, 0.0)
        grad_q, grad_k = (np.zeros(x.shape, site.dtype) for x in (q, k))
        grad_q[..., self.head, :, :] = to_scores @ keys
        grad_k[..., self._key_head(site), :, :] = np.swapaxes(to_scores, -1, -2) @ queries
        return SchemeGradient(q=grad_q, k=grad_k, arrays=arrays)

    def _key_head(self, site: Site) -> int:
        return self.head * site.kv_heads // site.heads

    def _votes(self, q: Array, k: Array, site: Site) -> tuple[Array, Array, Array]:
        """Queries and keys of the head that votes, with 0 for what is not finite, and the votes; in float64."""
        queries = in_order(np.asarray(q)[..., self.head, :, :]).astype(np.float64)
        keys = in_order(np.asarray(k)[..., self._key_head(site), :, :]).astype(np.float64)
        with np.errstate(all="ignore"):
            votes = np.maximum(np.einsum("...id,...jd->...ij", queries, keys) * site.scale, 0.0)
        for i in range(site.q_len):
            own = i + site.offset
            if 0 <= own < site.k_len:
                votes[..., i, own] = 0.0
            votes[..., i, max(own + site.right + 1, 0) :] = 0.0
        first = 0 if self.variant == "paper" else site.offset
        votes[..., : max(first + 1, 0)] = 0.0
        return *(np.where(np.isfinite(x), x, 0.0) for x in (queries, keys)), votes


@register(
    "selective",
    Selective,
    adds="what earlier queries say against a key",
    paper="Leviathan et al., ICLR 2025",
    doi="10.48550/arXiv.2410.02703",
    variants=VARIANTS,
    models="Selective attention",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    head = at.pick(0, parts["q"].shape[-3] - 1)
    past = np.abs(at.normal(*at.batch, at.k_len)) if at.pick(False, True) else None
    return {
        **parts,
        "position": Selective(head, variant=at.variant or "paper", past=past),
        "kwargs": {"causal": True},
    }
