r"""Sandwich: the inner product of the sinusoids of two positions, as a fixed bias."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Sample, Site, evaluated, register
from relpos_np.schemes.distances import DistanceBias
from relpos_np.types import Array, Int64

Variant: TypeAlias = Literal["paper", "nemo"]
VARIANTS = get_args(Variant)
# A call takes time for each wave and relative position, whatever its operands are.
MOST = 1 << 16
_WAVES = 64


def sandwich_bias(
    heads: int,
    q_len: int,
    k_len: int,
    *,
    dim: int = 128,
    base: float = 10000.0,
    offset: int = 0,
    variant: Variant = "paper",
) -> Array:
    r"""The bias of every pair, from the sinusoidal vectors of its two positions.

    .. math::

        B_{hij} = \frac{H}{8 (h + 1)} \Big(\mathrm{PE}(i + M) \cdot \mathrm{PE}(j) - \kappa\Big), \qquad
        \mathrm{PE}(t) = \big(\sin \omega_p t, \cos \omega_p t\big)_{p = 0 \ldots \bar d / 2 - 1}

    with :math:`\omega_p = \mathrm{base}^{-2p / \bar d}` and :math:`\kappa = 0`, in the variant "nemo"
    :math:`\omega_p = \mathrm{base}^{-2(p + 1) / \bar d}` and :math:`\kappa = \bar d / 2`.

    Parameters
    ----------
    heads : int
        Number of heads H.
    q_len, k_len : int
        Number of queries and of keys.
    dim : int
        Length :math:`\bar d` of the vectors.
    base : float
        Of the frequencies.
    offset : int
        Position M of the first query among the keys.
    variant : {"paper", "nemo"}
        See `Sandwich`.

    Returns
    -------
    ndarray of float64, shape (H, L_q, L_k)
        To be added to the scores.
    """
    first = 0 if variant == "paper" else 1
    waves = base ** (-2.0 * (np.arange(dim // 2) + first) / dim)
    product = np.full((q_len, k_len), 0.0 if variant == "paper" else -dim / 2)
    for start in range(0, dim // 2, _WAVES):  # long vectors part by part
        part = waves[start : start + _WAVES]
        here, there = (np.outer(t, part) for t in (np.arange(q_len) + offset, np.arange(k_len)))
        vectors = [np.concatenate([np.sin(angle), np.cos(angle)], axis=1) for angle in (here, there)]
        product += vectors[0] @ vectors[1].T
    return np.asarray(product / (8.0 * np.arange(1, heads + 1) / heads)[:, None, None])


class Sandwich(DistanceBias):
    r"""Sandwich: a bias without parameters that falls about like a logarithm of the distance.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + \frac{H}{8 (h + 1)} \sum_{p=0}^{\bar d / 2 - 1} \cos(\omega_p d), \qquad
        \omega_p = \mathrm{base}^{-2p / \bar d}

    with d = j - i - M. The sum is the inner product of the two positions' sinusoidal vectors, of which the
    paper keeps nothing else. The bias is not multiplied by the scale, and heads h = 0 ... H - 1 are
    compressed more and more, by ratios from 8 / H to 8. The variants:

    - "paper": as above, which is the code in the paper's appendix.
    - "nemo": NVIDIA NeMo counts frequencies from :math:`\omega_1`, so that each pair lacks the fastest
      wave and gains :math:`\cos(d / \mathrm{base})`, and takes :math:`\bar d / 2` from the sum, so that
      distance 0 has bias 0 (which moves the log-sum-exp and not the output). Its causal form, 0 for all
      later keys, is this one behind a causal mask.

    Other papers print the formula with other letters and bounds, and code is in circulation that leaves out the
    cosine.

    Parameters
    ----------
    dim : int
        Length :math:`\bar d` of the vectors, even, at most 65,536; 128 in the paper. It shapes the fall, and is no
        width of the model.
    heads : int, optional
        Number of heads H, to be held against the call's; default the call's.
    base : float
        Of the frequencies.
    variant : {"paper", "nemo"}
        Which frequencies.

    Raises
    ------
    RelposError
        If dim is odd, not positive or too large, base is not positive, or the call has another number of heads.

    References
    ----------
    Chi et al., "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis",
    ACL 2023.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.Sandwich(), causal=True).shape
    (2, 8, 10, 64)
    """

    def __init__(
        self, dim: int = 128, *, heads: int | None = None, base: float = 10000.0, variant: Variant = "paper"
    ) -> None:
        self.dim = check.integer("dim", dim, 2)
        if self.dim % 2 or self.dim > MOST:
            raise RelposValueError(f"dim: expected an even number of at most {MOST}, found {dim}")
        self.heads = heads if heads is None else check.integer("heads", heads, 1)
        self.base = check.real("base", base)
        if self.base <= 0:
            raise RelposValueError(f"base: expected more than 0, found {base}")
        self.variant = check.choice("variant", variant, VARIANTS)

    def check(self, site: Site) -> None:
        """The number of heads, if it was said, must be the call's."""
        if self.heads is not None and self.heads != site.heads:
            raise RelposValueError(f"heads: {self.heads} were said, the call has {site.heads}")

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(sandwich_bias, self, site, heads=site.heads), site.dtype)

    def _table(self, d: Int64, site: Site) -> Array:
        """The sum of cosines."""
        numbers = np.arange(0, self.dim, 2) if self.variant == "paper" else np.arange(2, self.dim + 1, 2)
        sums = np.zeros(len(d))
        for wave in np.power(self.base, np.negative(numbers / self.dim)):
            sums += np.cos(wave * d)
        if self.variant == "nemo":
            sums -= len(numbers)
        return np.multiply.outer(site.heads * 0.125 / np.arange(1, site.heads + 1), sums)


@register(
    "sandwich",
    Sandwich,
    adds="a sum of cosines of the distance",
    paper="Chi et al., ACL 2023",
    doi="10.48550/arXiv.2212.10356",
    variants=VARIANTS,
    models="Sandwich",
)
def _build(at: Sample) -> dict[str, Any]:
    # Short vectors keep the scores small: half as long as they are, over 2 for the first of four heads.
    position = Sandwich(at.pick(16, 2, 32), base=at.pick(10000.0, 50.0), variant=at.variant or "paper")
    return {**at.operands(4, 2), "position": position, "kwargs": {"causal": True}}
