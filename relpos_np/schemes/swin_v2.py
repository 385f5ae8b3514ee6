r"""Swin V2: products of unit vectors, and a bias that a small network finds from coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import log, prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import grid_map
from relpos_np._contract.terms import IndexMap, TableTerm, Terms, cut_map
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import (
    MemoryBound,
    Part,
    Sample,
    Scheme,
    SchemeGradient,
    Site,
    evaluated,
    in_order,
    register,
)
from relpos_np.schemes.checks import plane, same_tokens
from relpos_np.types import Array

Variant: TypeAlias = Literal["microsoft", "transformers", "paper"]
VARIANTS = get_args(Variant)
# Of arguments, before grids had one name everywhere; `window` is also an option of every call.
# Norms are at least this; logit_scale counts up to the logarithm of 100.
_LEAST_NORM, _LARGEST_SCALE = 1e-12, log(100.0)


def unit_vectors(x: Array) -> Array:
    r"""Vectors of length 1: :math:`x / \max(\lVert x \rVert, 10^{-12})`.

    Parameters
    ----------
    x : ndarray, shape (..., D)
        Vectors; those shorter than the smallest length are divided by it.

    Returns
    -------
    ndarray, shape (..., D)
        In the dtype of x.

    References
    ----------
    Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", CVPR 2022.
    """
    norm = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    return np.asarray(x / np.maximum(norm, 1e-12), dtype=x.dtype)


def swin_v2_coordinates(
    grid: Sequence[int], *, pretrained_grid: Sequence[int] | None = None, variant: Variant = "microsoft"
) -> list[Array]:
    r"""What the network reads for each difference of coordinates, axis by axis.

    For the differences D = -(W-1) ... W-1 along an axis of length W, with P the axis of the window that the
    network was trained on (W itself unless given),

    .. math::

        c(D) = \operatorname{sign}(D)\, \frac{\log_2\!\left(1 + 8 |D| / \max(P - 1, 1)\right)}{\log_2 8}, \qquad
        c_\mathrm{paper}(D) = \operatorname{sign}(D) \ln(1 + |D|)

    so that in an axis of length 1, whose only difference is 0, the coordinate is 0.

    Parameters
    ----------
    grid : tuple of int
        Height and width W.
    pretrained_grid : tuple of int, optional
        Height and width P.
    variant : {"microsoft", "transformers", "paper"}
        See `SwinV2`.

    Returns
    -------
    list of ndarray of float64, shapes (2 W_h - 1,) and (2 W_w - 1,)
        The coordinates, computed in float64; published code computes them in float32 for every dtype.

    References
    ----------
    Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", CVPR 2022.
    """
    differences = [np.arange(1 - w, w, dtype=np.float64) for w in grid]
    if variant == "paper":
        return [np.sign(d) * np.log1p(np.abs(d)) for d in differences]
    spans = [max(p - 1, 1) for p in (grid if pretrained_grid is None else pretrained_grid)]
    if variant == "transformers" and pretrained_grid is None and grid[0] == 1:
        spans = [1, 1]
    ratios = [8 * d / span for d, span in zip(differences, spans, strict=True)]
    return [np.sign(r) * np.log2(1 + np.abs(r)) / np.log2(8) for r in ratios]


def swin_v2_bias(
    hidden_weight: Array,
    hidden_bias: Array,
    output_weight: Array,
    grid: Sequence[int],
    *,
    output_bias: Array | None = None,
    pretrained_grid: Sequence[int] | None = None,
    variant: Variant = "microsoft",
) -> Array:
    r"""The bias of every pair of tokens, row by row of the window.

    .. math::

        B_{h}(D) = \frac{16}{1 + e^{-z_h(D)}}, \qquad z(D) = W_2 \max(0,\, W_1 c(D) + b_1) + b_2

    with the coordinates c of `swin_v2_coordinates` and D those of the query less those of the key. The variant
    "paper" has B = z.

    Parameters
    ----------
    hidden_weight : ndarray, shape (M, 2)
        W_1.
    hidden_bias : ndarray, shape (M,)
        b_1.
    output_weight : ndarray, shape (H, M)
        W_2.
    grid : tuple of int
        Height and width.
    output_bias : ndarray, shape (H,), optional
        b_2; default 0.
    pretrained_grid
        See `swin_v2_coordinates`.
    variant : {"microsoft", "transformers", "paper"}
        See there, too.

    Returns
    -------
    ndarray of float64, shape (H, L, L)
        To be added to the scores of L = height times width tokens.

    References
    ----------
    Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", CVPR 2022.
    """
    down, right = swin_v2_coordinates(grid, pretrained_grid=pretrained_grid, variant=variant)
    c = np.stack(np.broadcast_arrays(down[:, None], right[None, :]), axis=-1)
    hidden = np.maximum(0, np.einsum("yxa,ma->yxm", c, hidden_weight) + hidden_bias)
    z = np.einsum("yxm,hm->hyx", hidden, np.asarray(output_weight, np.float64))
    if output_bias is not None:
        z = z + np.asarray(output_bias)[:, None, None]
    image = z if variant == "paper" else 8 * (1 + np.tanh(z / 2))
    y, x = (axis.ravel() for axis in np.indices(tuple(grid)))
    return np.asarray(image[:, y[:, None] - y + grid[0] - 1, x[:, None] - x + grid[1] - 1])


class SwinV2(Scheme):
    r"""Scaled cosine attention with a continuous position bias, for tokens of a window.

    .. math::

        s_{ij} = \sigma \sqrt{D}\; e^{\min(t_h,\, \ln 100)}\;
        \frac{q_i}{\lVert q_i \rVert} \cdot \frac{k_j}{\lVert k_j \rVert} + B_h(i, j)

    with the bias B of `swin_v2_bias`, and norms of at least :math:`10^{-12}`. Published Swin V2 has no factor on
    the product besides the learned one: with the call's default scale :math:`\sigma = 1/\sqrt{D}` the two factors
    in front cancel, and any other ``scale`` multiplies the product as it does for every scheme. The bias is not
    multiplied.

    Parameters
    ----------
    hidden_weight : ndarray, shape (M, 2)
        First layer of the network, for the coordinates down and right; M = 512 in checkpoints
        (`cpb_mlp.0.weight`).
    hidden_bias : ndarray, shape (M,)
        Its bias.
    output_weight : ndarray, shape (H, M)
        Last layer (`cpb_mlp.2.weight`).
    logit_scale : ndarray, shape (H,) or (H, 1, 1)
        t, as checkpoints store it; above ln 100 it has no effect and no gradient.
    grid : tuple of int
        Height and width of the window; queries and keys are its tokens row by row.
    output_bias : ndarray, shape (H,), optional
        Bias of the last layer; the published network has none, timm's "cr" models have one.
    pretrained_grid : tuple of int, optional
        Window that the network was trained on, if it was another one.
    variant : {"microsoft", "transformers", "paper"}
        - "microsoft": the published code, and timm's swin_transformer_v2. Each axis is divided by its own
          length less 1, but never by 0: in an axis of length 1 the coordinate is 0, as in timm, where the
          published code has 0/0, which is NaN.
        - "transformers": in a window of height 1 without `pretrained_grid` nothing is divided. Other windows as
          above, also those of width 1, where transformers finds NaN.
        - "paper": the coordinates of the text, and no sigmoid, as in timm's swin_transformer_v2_cr.

    Raises
    ------
    RelposValueError
        If shapes disagree with each other, with the number of heads or with the number of tokens.

    Notes
    -----
    The bias is computed in float64 and rounded once. transformers adds its mask of shifted windows, -100, twice; the
    published code once. Where t is at its limit that matters, since products then reach from -100 to 100: of two keys,
    one opposite to the query in its own region and one along it in another, the other region gets all of the
    probability with -100, and half of it with -200. Pass the mask that the model adds.

    References
    ----------
    Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", CVPR 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> hidden, bias = rng.standard_normal((512, 2)), rng.standard_normal(512)
    >>> output = rng.standard_normal((8, 512))
    >>> position = rp.SwinV2(hidden, bias, output, logit_scale=np.full(8, np.log(10.0)), grid=(7, 7))
    >>> rp.attention(q, k, v, position=position).shape
    (2, 8, 49, 64)
    """

    def __init__(
        self,
        hidden_weight: Any,
        hidden_bias: Any,
        output_weight: Any,
        logit_scale: Any,
        grid: Sequence[int],
        *,
        output_bias: Any = None,
        pretrained_grid: Sequence[int] | None = None,
        variant: Variant = "microsoft",
    ) -> None:
        self.hidden_weight = check.table("hidden_weight", hidden_weight, "hidden 2")
        self.hidden_bias = check.table("hidden_bias", hidden_bias, "hidden")
        self.output_weight = check.table("output_weight", output_weight, "heads hidden")
        self.logit_scale = check.table("logit_scale", logit_scale, "heads | heads 1 1")
        self.output_bias = None if output_bias is None else check.table("output_bias", output_bias, "heads")
        self.grid = plane("grid", grid, "(8, 8)")
        self.pretrained_grid = None if pretrained_grid is None else plane("pretrained_grid", pretrained_grid, "(8, 8)")
        self.variant = check.choice("variant", variant, VARIANTS)
        if variant == "paper" and pretrained_grid is not None:
            raise RelposValueError("pretrained_grid: the coordinates of variant 'paper' are not divided by a window")
        heads, hidden = self.output_weight.shape
        for name, found, expected in (
            ("hidden_weight", self.hidden_weight.shape, (hidden, 2)),
            ("hidden_bias", self.hidden_bias.shape, (hidden,)),
            ("logit_scale", (self.logit_scale.size,), (heads,)),
            ("output_bias", (heads,) if self.output_bias is None else self.output_bias.shape, (heads,)),
        ):
            if found != expected:
                raise RelposValueError(
                    f"{name}: expected shape {expected} for output_weight {(heads, hidden)}, found {found}"
                )

    # Made by the first call that has as many tokens: a window in a file can be of any size.
    @cached_property
    def _map(self) -> IndexMap:
        side = [np.arange(n) for n in self.grid]
        return grid_map(side, side, self.grid)

    def check(self, site: Site) -> None:
        """There must be a row of weights per head, and the tokens of one window."""
        check.heads("output_weight", self.output_weight, 0, site)
        same_tokens(self.grid, site)

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Unit vectors; the learned factor, and what cancels the default scale, go to the queries."""
        factor = np.exp(np.minimum(self.logit_scale.astype(np.float64).reshape(-1, 1, 1), np.log(100)))
        return unit_vectors(q) * (factor * np.sqrt(site.head_dim)).astype(site.dtype), unit_vectors(k)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(swin_v2_bias, self, site), site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """Operands of length 1, and the network's answers as a table with a row per difference."""
        table = np.ascontiguousarray(self._network()[-1].T, site.dtype)
        return Terms(*self.lower_vectors(q, k, site), tables=(TableTerm(table, self._map),))

    def lower_vectors(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Operands of length 1, the queries times the factors of their heads."""
        q, k = in_order(q), in_order(k)
        with np.errstate(all="ignore"):  # an excluded key may hold anything
            query = q * (self._factors(site) / self._lengths(q)).astype(site.dtype)
            key = k * (1 / self._lengths(k)).astype(site.dtype)
        return query, key

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """The network's outputs and factors of the heads, and the map of the pairs."""
        of_heads = {
            name: None if (x := getattr(self, name)) is None else x[part.heads]
            for name in ("output_weight", "logit_scale", "output_bias")
        }
        index = cut_map(self._map, site.q_len, part.queries, part.keys)
        return (self._with(**of_heads, _map=index), *part.alone(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """A map of every pair."""
        return super().memory_bound(site).with_maps(site)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Through the lengths of q and k, and back through the network."""
        to_query, to_key = np.asarray(grad.query), np.asarray(grad.key)
        factors = self._factors(site)
        dq, along = self._through_length(q, to_query * factors)
        dk, _ = self._through_length(k, to_key)
        # The product's share of the gradient, along each query, is that of its factor's logarithm.
        scale = along.sum(axis=(*range(along.ndim - 3), -2, -1))
        scale = np.where(self.logit_scale.ravel() <= _LARGEST_SCALE, scale, 0).reshape(self.logit_scale.shape)
        c, hidden, z, _ = self._network()
        dz = grad.tables[0].table.T.astype(np.float64)
        if self.variant != "paper":
            # 16 s (1 - s) of the sigmoid s, which is (1 + tanh(z / 2)) / 2.
            dz = dz * (4 / np.cosh(z / 2) ** 2)
        back = (dz @ self.output_weight.astype(np.float64)) * (hidden > 0)
        arrays = {
            "hidden_weight": back.T @ c,
            "hidden_bias": back.sum(axis=0),
            "output_weight": dz.T @ hidden,
            "logit_scale": scale,
        }
        if self.output_bias is not None:
            arrays["output_bias"] = dz.sum(axis=0)
        return SchemeGradient(dq, dk, arrays)

    def _factors(self, site: Site) -> Array:
        """The factor on each head's queries: (H, 1, 1)."""
        t = np.minimum(self.logit_scale.astype(np.float64).ravel(), _LARGEST_SCALE)
        return np.asarray(np.exp(t)[:, None, None] * site.head_dim**0.5)

    @staticmethod
    def _lengths(x: Array) -> Array:
        """Lengths of vectors, in float64 so that squares of small components do not vanish: (..., L, 1)."""
        wide = x.astype(np.float64, copy=False)
        squares = np.einsum("...d,...d->...", wide, wide)
        lengths: Array = np.maximum(np.sqrt(squares), _LEAST_NORM)
        return lengths[..., None]

    def _through_length(self, x: Array, grad: Array) -> tuple[Array, Array]:
        """Gradients of x from those of x / length(x), and each one's product with that unit vector (..., L, 1)."""
        length = self._lengths(x)
        # A key that no query reads has no gradient, whatever it holds.
        unit = np.where(grad.any(axis=-1, keepdims=True), x / length, 0)
        along = np.sum(unit * grad, axis=-1, keepdims=True)
        # A length that was raised to the smallest one does not depend on x.
        turned = grad - np.where(length > _LEAST_NORM, along, 0) * unit
        return np.where(turned == 0, 0, turned / length).astype(x.dtype), along

    def _network(self) -> tuple[Array, Array, Array, Array]:
        """Coordinates (rows, 2), hidden layer (rows, M), last layer and bias (rows, H), in float64."""
        w1, b1, w2 = (x.astype(np.float64) for x in (self.hidden_weight, self.hidden_bias, self.output_weight))
        window, trained = np.array(self.grid), np.array(self.pretrained_grid or self.grid)
        c = np.stack(np.divmod(np.arange(prod(2 * window - 1)), 2 * window[1] - 1), axis=-1) - (window - 1.0)
        if self.variant == "paper":
            c = np.copysign(np.log(1 + np.abs(c)), c)
        else:
            flat = self.variant == "transformers" and self.pretrained_grid is None and window[0] == 1
            c = c * 8 / (1 if flat else np.maximum(trained - 1, 1))
            c = np.copysign(np.log1p(np.abs(c)) / np.log(8), c)
        hidden = np.maximum(c @ w1.T + b1, 0)
        z = hidden @ w2.T + (0 if self.output_bias is None else self.output_bias)
        return c, hidden, z, z if self.variant == "paper" else 8 + 8 * np.tanh(z / 2)


@register(
    "swin_v2",
    SwinV2,
    adds="cosine scores, and a bias that a small network computes",
    paper="Liu et al., CVPR 2022",
    doi="10.48550/arXiv.2111.09883",
    variants=VARIANTS,
    models="Swin V2, Swin2SR",
)
def _build(at: Sample) -> dict[str, Any]:
    # In a window of height 1, where the variants differ most.
    length = at.grid[0] * at.grid[1]
    window = at.pick((1, length), at.grid)
    parts = at.operands(4, 2, length, length)
    dtype, heads = parts["q"].dtype, parts["q"].shape[-3]
    hidden = at.normal(24, 2), at.normal(24)
    last, scale = at.normal(heads, 24) / 4, np.log(1 + np.abs(at.normal(heads))) * at.pick(1, 9)
    bias = at.pick(False, True)
    position = SwinV2(
        *hidden,
        last.astype(dtype),
        scale.astype(dtype),
        window,
        output_bias=at.normal(heads) if bias else None,
        pretrained_grid=at.pick(None, None if at.variant == "paper" else (7, 9)),
        variant=at.variant or "microsoft",
    )
    return {**parts, "position": position}
