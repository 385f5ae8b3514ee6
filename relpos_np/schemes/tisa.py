r"""TISA: a sum of bell curves of the relative position, with three learned numbers per curve and head."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import MemoryBound, Sample, Site, evaluated, register
from relpos_np.schemes.checks import finite
from relpos_np.schemes.distances import DistanceBias
from relpos_np.types import Array, Int64

Variant: TypeAlias = Literal["paper", "published"]
VARIANTS = get_args(Variant)


@np.errstate(all="ignore")
def tisa_bias(
    amplitudes: Array,
    sharpness: Array,
    offsets: Array,
    q_len: int,
    k_len: int,
    *,
    offset: int = 0,
    variant: Variant = "paper",
) -> Array:
    r"""The bias of every pair, written out.

    .. math::

        F_{ij} = \sum_s a_{sh} \exp\big(-|b_{sh}| (d_{ij} - c_{sh})^2\big)

    with :math:`d_{ij} = j - (i + M)`, in the variant "published" :math:`d_{ij} = (i + M) - j - 1`.

    Parameters
    ----------
    amplitudes, sharpness, offsets : ndarray, shape (S, H)
        a, b and c of each curve and head.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position M of the first query among the keys.
    variant : {"paper", "published"}
        See `TISA`.

    Returns
    -------
    ndarray of float64, shape (H, L_q, L_k)
        To be added to the scores.
    """
    d = np.arange(k_len)[None, :] - np.arange(q_len)[:, None] - offset
    if variant == "published":
        d = -d - 1
    a, b, c = (np.asarray(x, np.float64)[:, :, None, None] for x in (amplitudes, sharpness, offsets))
    return np.asarray((a * np.exp(-np.abs(b) * (d - c) ** 2)).sum(axis=0))


class TISA(DistanceBias):
    r"""Translation-invariant self-attention.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + \sum_{s=1}^{S} a_{sh} \exp\big(-|b_{sh}| (d_{ij} - c_{sh})^2\big)

    The bias is not multiplied by the scale. The variants differ in d:

    - "paper": :math:`d_{ij} = j - i - M`, the position of the key less that of the query.
    - "published": :math:`d_{ij} = i + M - j - 1`, as the authors' code has it: it evaluates the curves at
      -L ... L, but reads the result as if it started at -L + 1, and by query less key. Weights trained
      with it are those of "paper" with offsets -1 - c.

    Parameters
    ----------
    amplitudes : ndarray, shape (S, H)
        Heights a of the S curves of each head; 5 curves in the paper.
    sharpness : ndarray, shape (S, H)
        b; only its size counts. At 0 the curve is a constant.
    offsets : ndarray, shape (S, H)
        Where the curves have their tops, c.
    variant : {"paper", "published"}
        Which relative position.

    Raises
    ------
    RelposValueError
        If shapes differ, a number is not finite, or the call has another number of heads.

    References
    ----------
    Wennberg and Henter, "The Case for Translation-Invariant Self-Attention in Transformer-Based
    Language Models", ACL 2021.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> amplitudes, sharpness, offsets = rng.standard_normal((3, 5, 8))  # five bells for each head
    >>> rp.attention(q, k, v, position=rp.TISA(amplitudes, abs(sharpness), offsets)).shape
    (2, 8, 10, 64)
    """

    def __init__(self, amplitudes: Any, sharpness: Any, offsets: Any, *, variant: Variant = "paper") -> None:
        self.amplitudes = check.table("amplitudes", amplitudes, "curves heads")
        self.sharpness = check.table("sharpness", sharpness, "curves heads")
        self.offsets = check.table("offsets", offsets, "curves heads")
        self.variant = check.choice("variant", variant, VARIANTS)
        for name in ("amplitudes", "sharpness", "offsets"):
            x = getattr(self, name)
            if x.shape != self.amplitudes.shape:
                raise RelposValueError(
                    f"{name}: shape {x.shape} differs from {self.amplitudes.shape}, that of amplitudes"
                )
            finite(name, x)

    def check(self, site: Site) -> None:
        """There must be a column per head."""
        check.heads("amplitudes", self.amplitudes, 1, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(tisa_bias, self, site), site.dtype)

    def _curves(self, at: Int64) -> tuple[Array, Array, Array]:
        """Steps from the top, sharpness, and curves of height 1: (S, H, rows) each, but for the sharpness (S, H, 1)."""
        d = at.astype(np.float64)
        steps = np.subtract(d if self.variant == "paper" else np.negative(d + 1), self.offsets[..., None])
        sharp = self.sharpness[..., None].astype(np.float64)
        return steps, sharp, np.exp(np.negative(np.abs(sharp)) * np.square(steps))

    def _table(self, d: Int64, site: Site) -> Array:
        return np.asarray(np.einsum("sh,shr->hr", self.amplitudes.astype(np.float64), self._curves(d)[2]))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula has every curve of every pair at once, twice."""
        return MemoryBound(super().memory_bound(site).formula + 16 * site.q_len * site.k_len * self.amplitudes.size)

    def _gradients(self, d: Int64, grad: Array) -> dict[str, Array]:
        """Each number collects the rows times the slope of its curve in it."""
        steps, sharp, curves = self._curves(d)
        shares, high = grad * curves, self.amplitudes.astype(np.float64)
        return {
            "amplitudes": shares.sum(axis=-1),
            "sharpness": -high * np.sign(sharp[..., 0]) * (shares * np.square(steps)).sum(axis=-1),
            "offsets": 2 * high * np.abs(sharp[..., 0]) * (shares * steps).sum(axis=-1),
        }


@register(
    "tisa",
    TISA,
    adds="radial basis functions of the distance",
    paper="Wennberg and Henter, ACL 2021",
    doi="10.18653/v1/2021.acl-short.18",
    variants=VARIANTS,
    models="ALBERT with TISA",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    shape = at.pick(5, 1), parts["q"].shape[-3]
    # Curves some positions wide, with tops some positions away.
    curves = at.normal(*shape), at.normal(*shape) * parts["q"].dtype.type(0.25), at.normal(*shape) * 5
    return {**parts, "position": TISA(*curves, variant=at.variant or "paper")}
