r"""ALiBi: a penalty that grows linearly with the distance, with one fixed slope per head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import clip_map, difference_map
from relpos_np._contract.terms import KeyTerm, QueryTerm, Terms, fit
from relpos_np.errors import RelposValueError, shown
from relpos_np.schemes.base import MemoryBound, Sample, SchemeGradient, Site, register
from relpos_np.schemes.checks import finite
from relpos_np.schemes.distances import DistanceBias
from relpos_np.types import Array, Int64

Form: TypeAlias = Literal["symmetric", "causal", "key"]
FORMS = get_args(Form)


def alibi_slopes(heads: int, *, bias_max: float = 8.0) -> Array:
    r"""Slopes of the paper, one per head, from the steepest on.

    .. math::

        m_h = 2^{-b (h + 1) / H}, \quad h = 0 \ldots H - 1, \qquad b = 8

    if H is a power of two. Otherwise, as the published code has it, the slopes of c heads are followed
    by the first H - c of every other slope of 2c heads, c being the power of two below H:
    they are not sorted.

    Parameters
    ----------
    heads : int
        Number of heads H, at least 1.
    bias_max : float
        b, positive: `alibi_bias_max` of MPT. transformers reads it from the configuration, and computes with 8 all the
        same.

    Returns
    -------
    ndarray of float64, shape (H,)
        The slopes m.

    Raises
    ------
    RelposError
        If `heads` is not a positive integer, or `bias_max` no positive number.

    References
    ----------
    Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", ICLR 2022.
    """
    heads, bias_max = check.integer("heads", heads, 1), check.positive("bias_max", bias_max)
    whole = 1 << (heads.bit_length() - 1)
    if whole == heads:
        return np.array([2.0 ** (-bias_max * (h + 1) / heads) for h in range(heads)])
    first, second = (alibi_slopes(n, bias_max=bias_max) for n in (whole, 2 * whole))
    return np.concatenate([first, second[0::2][: heads - whole]])


def alibi_bias(slopes: Array, q_len: int, k_len: int, *, offset: int = 0, form: Form = "symmetric") -> Array:
    r"""The bias of every pair, written out.

    With the relative position d = j - (i + offset) it is

    .. math::

        -m_h |d| \;\text{(symmetric)}, \qquad m_h d \;\text{(causal)}, \qquad m_h j \;\text{(key)}.

    Parameters
    ----------
    slopes : ndarray, shape (..., H)
        Slope m of each head.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position of the first query among the keys.
    form : {"symmetric", "causal", "key"}
        Which of the three; see `ALiBi`.

    Returns
    -------
    ndarray of float64, shape (..., H, L_q, L_k)
        To be added to the scores.
    """
    i, j = np.arange(q_len)[:, None] + offset, np.arange(k_len)[None, :]
    m = np.asarray(slopes, dtype=np.float64)[..., None, None]
    if form == "symmetric":
        return np.asarray(-m * np.abs(j - i))
    return np.asarray(m * (j - i)) if form == "causal" else np.broadcast_to(m * j, (*m.shape[:-2], q_len, k_len))


class ALiBi(DistanceBias):
    r"""Attention with linear biases.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j - m_h\, |j - i - M|

    in the symmetric form, with M the call's offset. The other forms of `alibi_bias` are what published
    decoders compute: "causal" equals it for keys in the past and rewards keys in the future, hence
    belongs with ``causal=True``; "key", of BLOOM, differs from "causal" by the same amount for all keys of
    a query, so that outputs agree and log-sum-exps do not. Neither slope nor bias is multiplied by
    the scale. Falcon adds the bias before it divides by the root of head_dim: pass it
    ``alibi_slopes(H) / sqrt(D)``. BLOOM counts positions from a sequence's first token that is no padding,
    which changes its log-sum-exp alone.

    Parameters
    ----------
    slopes : ndarray, shape (H,) or (..., H), optional
        Slope m of each head, in all batch items or in each; default `alibi_slopes` of the number of heads.
    heads : int, optional
        Number of heads that the default slopes are for; default that of the call.
    form : {"symmetric", "causal", "key"}
        Which of the published forms.
    bias_max : float, optional
        Of the default slopes, see `alibi_slopes`; default 8.

    Raises
    ------
    RelposValueError
        If slopes are given along with heads or bias_max, a slope is not finite, or the number of heads or of batch
        items differs from the call's.

    References
    ----------
    Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation", ICLR 2022. The key form: Le Scao et al., "BLOOM: A 176B-Parameter Open-Access
    Multilingual Language Model", 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.ALiBi(), causal=True).shape  # slopes: from the heads
    (2, 8, 10, 64)
    >>> rp.logits(0 * q, k, position=rp.ALiBi())[0, 0, 2, :5]  # a slope of 1/2 for the first of 8 heads
    array([-1. , -0.5,  0. , -0.5, -1. ])
    """

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """All but the key form, which knows where keys stand, and slopes of items."""
        return self.form != "key" and not self._by_item

    @property
    def token_independent(self) -> bool:  # type: ignore[override]
        """Slopes of items belong to the items of one call."""
        return not self._by_item

    @property
    def _by_item(self) -> bool:
        """Whether slopes may differ between batch items."""
        return self.slopes is not None and self.slopes.ndim > 1

    def __init__(
        self, slopes: Any = None, *, heads: int | None = None, form: Form = "symmetric", bias_max: float | None = None
    ) -> None:
        if slopes is not None and heads is not None:
            raise RelposValueError(
                f"heads: found {shown(heads)} besides slopes, which already say how many heads there are"
            )
        if slopes is not None and bias_max is not None:
            raise RelposValueError(f"bias_max: found {shown(bias_max)} besides slopes, which it would have no part in")
        self.bias_max = None if bias_max is None else check.positive("bias_max", bias_max)
        self.slopes = None if slopes is None else check.ordered("slopes", slopes)
        self.heads = None if heads is None else check.integer("heads", heads, 1)
        self.form = check.choice("form", form, FORMS)
        if self.slopes is not None and not (self.slopes.ndim and self.slopes.size):
            raise RelposValueError(f"slopes: expected shape (..., H), found {self.slopes.shape}")
        finite("slopes", self.slopes)

    def check(self, site: Site) -> None:
        """There must be one slope per head."""
        if self.slopes is not None:
            check.heads("slopes", self.slopes, -1, site)
            check.fits_batch("slopes", self.slopes.shape[:-1], site.batch)
        if self.heads is not None and self.heads != site.heads:
            raise RelposValueError(f"heads: slopes are for {self.heads} heads, the call has {site.heads}")

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        slopes = self.slopes
        if slopes is None:  # also for no heads
            slopes = alibi_slopes(max(site.heads, 1), bias_max=self.bias_max or 8.0)[: site.heads]
        bias = alibi_bias(slopes, site.q_len, site.k_len, offset=site.offset, form=self.form)
        return bias.astype(site.dtype)

    def _slopes(self, site: Site) -> Array:
        if self.slopes is not None:
            return self.slopes
        # The closed form of both rules: the heads beyond the power of two lie halfway between the others.
        h = np.arange(site.heads)
        whole = 1 << max(site.heads.bit_length() - 1, 0)
        last = 8 if self.bias_max is None else self.bias_max
        return np.asarray(np.exp2(-last / whole * np.where(h < whole, h + 1, h - whole + 0.5)))

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One table term with a row per relative position; for the key form a key term with a single row.

        Slopes of items are the only channel of a query term, or of the keys.
        """
        if self._by_item:
            return self._lower_items(site)
        if self.form != "key":
            return super().lower(q, k, site)
        # m j does not depend on j - i: the key's position is multiplied with the head's slope.
        positions = np.arange(site.k_len, dtype=site.dtype)[:, None]
        key = np.broadcast_to(positions, (site.kv_heads, site.k_len, 1))
        everywhere = clip_map(site.q_len, site.k_len, site.offset, 0, "clip")
        return Terms(keys=(KeyTerm(key, self._slopes(site).astype(site.dtype)[:, None, None], everywhere),))

    def _lower_items(self, site: Site) -> Terms:
        slopes = self._slopes(site)[..., None, None].astype(site.dtype)
        if self.form == "key":
            everywhere = clip_map(site.q_len, site.k_len, site.offset, 0, "clip")
            key = slopes * np.arange(site.k_len, dtype=site.dtype)[:, None]
            return Terms(keys=(KeyTerm(key, np.ones((1, 1, 1), site.dtype), everywhere),))
        query = np.broadcast_to(slopes, (*slopes.shape[:-2], site.q_len, 1))
        factors = self._factor(site.relative_positions()).astype(site.dtype)[None, :, None]
        return Terms(queries=(QueryTerm(query, factors, difference_map(site.q_len, site.k_len)),))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula has slopes of items in float64."""
        bound = super().memory_bound(site)
        if not self._by_item:
            return bound
        pairs = math.prod(site.batch) * site.heads * site.q_len * site.k_len
        return replace(bound, formula=bound.formula + 16 * pairs)

    def _factor(self, d: Int64) -> Int64:
        """What a slope is multiplied with at each relative position."""
        return np.minimum(d, -d) if self.form == "symmetric" else d

    def _table(self, d: Int64, site: Site) -> Array:
        slopes, factor = self._slopes(site), np.asarray(self._factor(d))
        if slopes.dtype == site.dtype and (site.dtype == np.float64 or np.abs(d).max(initial=0) <= 1 << 24):
            # Whole numbers of this size are exact in float32: the product is rounded once, as that in float64 is.
            factor = factor.astype(site.dtype)
        return np.asarray(np.multiply.outer(slopes, factor))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """A slope collects each row times its distance; the default slopes are not trained."""
        if self.slopes is None:
            return SchemeGradient()
        if self._by_item and self.form == "key":
            by_key = grad.keys[0].key[..., 0].astype(np.float64) @ np.arange(site.k_len, dtype=np.float64)
            return SchemeGradient(arrays={"slopes": fit(by_key, self.slopes.shape)})
        if self._by_item:
            by_query = grad.queries[0].query[..., 0].sum(axis=-1, dtype=np.float64)
            return SchemeGradient(arrays={"slopes": fit(by_query, self.slopes.shape)})
        if self.form == "key":
            return SchemeGradient(arrays={"slopes": grad.keys[0].weights[:, 0, 0]})
        return super().lift(q, k, site, grad)

    def _gradients(self, d: Int64, grad: Array) -> dict[str, Array]:
        return {"slopes": grad @ self._factor(d).astype(grad.dtype)}


@register(
    "alibi",
    ALiBi,
    adds="a penalty in proportion to the distance, one slope per head",
    paper="Press et al., ICLR 2022",
    doi="10.48550/arXiv.2108.12409",
    equation="section 3",
    variants=FORMS,
    models="BLOOM, MPT, Falcon-RW",
)
def _build(at: Sample) -> dict[str, Any]:
    # As many heads as are no power of two, whose slopes follow another rule.
    parts = at.operands(6 if at.variant == "key" else 4, 2)
    heads = parts["q"].shape[-3]
    form: Form = at.variant or "symmetric"
    if form == "symmetric":
        given = at.pick("slopes", "nothing", "bias_max", "items")
        own = {"slopes": (heads,), "items": (*at.batch, heads)}.get(given)
        slopes = None if own is None else np.abs(at.normal(*own))
        return {**parts, "position": ALiBi(slopes, bias_max=5.0 if given == "bias_max" else None)}
    # Slopes of one's own may be negative.
    given = at.pick("not", "slopes", "items")
    options: dict[str, Any] = {"heads": heads} if form == "key" else {}
    if given != "not":
        options = {"slopes": at.normal(*(at.batch if given == "items" else ()), heads)}
    return {**parts, "position": ALiBi(**options, form=form), "kwargs": {"causal": True}}
