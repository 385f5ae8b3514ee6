r"""Transformer-XL: content and position terms with two global biases, and what others made of them."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import distance_map, wrapped_map
from relpos_np._contract.terms import QueryTerm, Terms, fit
from relpos_np.errors import RelposValueError
from relpos_np.formulas.relshift import VARIANTS, rel_shift
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, register
from relpos_np.types import Array, Int64, Shift

# Of arguments: v is also the values of every call.


def row_distances(q_len: int, k_len: int, variant: Shift = "transformer_xl", *, clamp: int | None = None) -> Int64:
    """Distance i + M - j (or, for "wenet", key position j) that belongs to each row a variant expects.

    Parameters
    ----------
    q_len, k_len : int
        Number of queries L_q and of keys L_k = L_q + M.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        See `TransformerXL`.
    clamp : int, optional
        Distances beyond it, either way, become this one before they are encoded: `clamp_len` of Transformer-XL and
        XLNet, where 0 or less stands for none.

    Returns
    -------
    ndarray of int64
        L_k-1 ... 0; for "conformer" L_k-1 ... -(L_q-1); for "xlnet" L_k ... -(L_q-1); for "xlnet_uni" L_k ... 0;
        for "wenet" 0 ... L_k-1.

    Raises
    ------
    RelposValueError
        If `clamp` is negative.
    """
    if variant == "wenet":
        distances = np.arange(k_len)
    else:
        first = k_len if variant in ("xlnet", "xlnet_uni") else k_len - 1
        last = 1 - q_len if variant in ("conformer", "xlnet") else 0
        distances = np.arange(first, last - 1, -1)
    if clamp is None:
        return distances
    most = check.integer("clamp", clamp, 0)
    return np.clip(distances, -most, most)


def transformer_xl_scores(
    q: Array,
    k: Array,
    content_bias: Array,
    position_bias: Array,
    rows: Array,
    *,
    variant: Shift = "transformer_xl",
    zero_triu: bool = False,
) -> tuple[Array, Array]:
    r"""The two parts of the unscaled scores.

    .. math::

        A^{ac}_{ij} = (q_i + u) \cdot k_j, \qquad
        A^{bd} = \mathrm{rel\_shift}\big((q + v) R^\top\big), \qquad
        A^{bd}_{ij} = (q_i + v) \cdot R_{i + M - j} \text{ where the variant defines it}

    Parameters
    ----------
    q, k : ndarray, shapes (..., H, L_q, D) and (..., H, L_k, D)
        Projected queries and keys.
    content_bias, position_bias : ndarray, shape (H, D)
        Global biases u and v.
    rows : ndarray, shape (R, H, D)
        Projected position encodings W_R R, one row per entry of `row_distances`.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        Which shift.
    zero_triu : bool
        Whether the position part is 0 for keys after the query's position.

    Returns
    -------
    ac, bd : ndarray, shape (..., H, L_q, L_k)
        Content and position parts; scores are ``scale * (ac + bd)``.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019.
    """
    ac = np.matmul(q + content_bias[:, None, :], np.swapaxes(k, -1, -2))
    return ac, _position_scores(q, position_bias, rows, variant, zero_triu)


def _position_scores(q: Array, v: Array, rows: Array, variant: Shift, zero_triu: bool) -> Array:
    """The position part alone."""
    products = np.matmul(q + v[:, None, :], np.transpose(rows, (1, 2, 0)))
    bd = rel_shift(products, variant)
    if not zero_triu:
        return bd
    q_len, k_len = bd.shape[-2:]
    later = np.arange(k_len) > np.arange(q_len)[:, None] + (k_len - q_len)
    return np.where(later, bd.dtype.type(0), bd)


class AbsoluteTerms(NamedTuple):
    """The four parts of scores with absolute positions, each of shape (..., L, L); see `absolute_terms`."""

    a: Array
    b: Array
    c: Array
    d: Array


class RelativeTerms(NamedTuple):
    """The four parts of scores with relative positions, each of shape (..., L_q, L_k); see `relative_terms`."""

    a: Array
    b: Array
    c: Array
    d: Array

    @property
    def ac(self) -> Array:
        r"""The content part :math:`(q_i + u) \cdot k_j`, the sum a + c: (..., L_q, L_k)."""
        return np.asarray(self.a + self.c)

    @property
    def bd(self) -> Array:
        r"""The position part :math:`(q_i + v) \cdot R_{i+M-j}`, the sum b + d: (..., L_q, L_k)."""
        return np.asarray(self.b + self.d)


def absolute_terms(e: Array, u: Array, w_q: Array | None = None, w_k: Array | None = None) -> AbsoluteTerms:
    r"""What the unscaled scores of inputs with absolute positions consist of.

    .. math::

        (E_i + U_i)^\top W_q^\top W_k (E_j + U_j) =
        \underbrace{E_i^\top W_q^\top W_k E_j}_{(a)} + \underbrace{E_i^\top W_q^\top W_k U_j}_{(b)} +
        \underbrace{U_i^\top W_q^\top W_k E_j}_{(c)} + \underbrace{U_i^\top W_q^\top W_k U_j}_{(d)}

    Parameters
    ----------
    e, u : ndarray, shape (..., L, D_in)
        Embeddings E of the content and U of the positions, as rows.
    w_q, w_k : ndarray, shape (D, D_in), optional
        Projections, which act on column vectors as in the formula. Without both: the simplified form
        :math:`(E_i + U_i)^\top (E_j + U_j)`.

    Returns
    -------
    AbsoluteTerms
        The parts a, b, c and d, each (..., L, L); the scores are their sum.

    Raises
    ------
    RelposValueError
        If `e` and `u` differ in shape.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019, section 3.3.
    """
    if e.shape != u.shape:
        raise RelposValueError(f"u: expected the shape of e {e.shape}, found {u.shape}")
    queries = [x if w_q is None else x @ w_q.T for x in (e, u)]
    keys = [np.swapaxes(x if w_k is None else x @ w_k.T, -1, -2) for x in (e, u)]
    return AbsoluteTerms(*(query @ key for query in queries for key in keys))


def relative_terms(q: Array, k: Array, content_bias: Array, position_bias: Array, rows: Array) -> RelativeTerms:
    r"""What the unscaled scores with relative positions consist of.

    .. math::

        A_{ij} = \underbrace{q_i \cdot k_j}_{(a)} + \underbrace{q_i \cdot R_{i+M-j}}_{(b)} +
        \underbrace{u \cdot k_j}_{(c)} + \underbrace{v \cdot R_{i+M-j}}_{(d)}, \qquad M = L_k - L_q

    With projections :math:`q_i = W_q E_i`, :math:`k_j = W_{k,E} E_j`, and the rows are :math:`W_{k,R} R`. Without
    them :math:`q_i = k_i = E_i`, which also gives up that content and positions have projections of their own.

    Parameters
    ----------
    q, k : ndarray, shapes (..., L_q, D) and (..., L_k, D)
        Queries and keys.
    content_bias, position_bias : ndarray, shape (..., D)
        Global biases u and v: (D,), or (H, D) where axis -3 of `q` is heads.
    rows : ndarray, shape (..., L_q + L_k - 1, D)
        Encodings R of the distances L_k-1 ... -(L_q-1), as `row_distances` gives them for "conformer".

    Returns
    -------
    RelativeTerms
        The parts a, b, c and d, each (..., L_q, L_k), with the sums ``ac`` = a + c and ``bd`` = b + d.

    Raises
    ------
    RelposValueError
        If there is not one row per distance.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019, section 3.3.
    """
    q_len, k_len = q.shape[-2], k.shape[-2]
    if rows.shape[-2] != q_len + k_len - 1:
        raise RelposValueError(
            f"rows: expected {q_len + k_len - 1} for L_q = {q_len} and L_k = {k_len}, found shape {rows.shape}"
        )
    keys, distances = np.swapaxes(k, -1, -2), np.swapaxes(rows, -1, -2)
    a, b = q @ keys, rel_shift(q @ distances, "conformer")
    # The last two do not depend on the query's content: one row each, the same for all queries before the shift.
    c = np.broadcast_to(content_bias[..., None, :] @ keys, a.shape)
    d = position_bias[..., None, :] @ distances
    d = rel_shift(np.broadcast_to(d, (*d.shape[:-2], q_len, d.shape[-1])), "conformer")
    return RelativeTerms(a, b.copy(), c.copy(), np.broadcast_to(d, a.shape).copy())


class TransformerXL(Scheme):
    r"""Relative positions of Transformer-XL, XLNet and the Conformer family.

    .. math::

        s_{ij} = \sigma \left[ (q_i + u) \cdot k_j + (q_i + v) \cdot R_{i + M - j} \right], \qquad M = L_k - L_q

    Parameters
    ----------
    content_bias, position_bias : ndarray, shape (H, D)
        Global biases u and v (`r_w_bias` and `r_r_bias`, or `pos_bias_u` and `pos_bias_v`).
    rows : ndarray, shape (R, H, D)
        Position encodings after their projection W_R, one per distance, in the order of
        `row_distances`. They fix L_q + L_k of the call.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        - "transformer_xl": R = L_k rows for distances L_k-1 ... 0. The published shift leaves 0 at
          j = i + M + 1 and products of the *next* query beyond; only a causal mask hides them. They
          are reproduced here.
        - "espnet_legacy": the same arithmetic in a model that attends both ways, so that trained
          weights rely on those entries. Its published encoding counts down from the longest length
          ever seen (max_len - 1, by default 4999), not from L_k - 1: pass those rows.
        - "conformer": R = L_q + L_k - 1 rows for distances L_k-1 ... -(L_q-1) (ESPnet's current
          code, NeMo, wav2vec2-Conformer).
        - "xlnet": R = L_q + L_k rows from distance L_k down; XLNet with ``attn_type="bi"``. Also Funnel's
          "relative_shift" without pooling and class token; for those see `GraphLabels`.
        - "xlnet_uni": R = L_k + 1 rows for distances L_k ... 0; XLNet with ``attn_type="uni"``. Its shift leaves
          products of the *next* query from j = i + M + 1 on, without a 0 between; only a causal mask hides them.
        - "wenet": no shift; row j belongs to key position j, which is not a relative position. Weights
          are not interchangeable with the others'.

    zero_triu : bool
        ESPnet's option of the same name: the position part is 0 for keys after the query's position, whose content
        still counts. Not for "wenet".

    Raises
    ------
    RelposValueError
        If `rows` does not fit the lengths of the call, or the call moves the queries (``offset``
        other than L_k - L_q).

    Notes
    -----
    A call's ``cap_order="content"`` caps :math:`\sigma\,(q_i + u) \cdot k_j`; with "wenet", whose rows are further
    channels of the keys, the sum.

    References
    ----------
    Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", ACL 2019.
    Gulati et al., "Conformer", Interspeech 2020. Yang et al., "XLNet", NeurIPS 2019.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> k, v = rng.standard_normal((2, 2, 8, 16, 64))  # 6 keys of memory come first
    >>> u, w = rng.standard_normal((2, 8, 64))  # the biases of content and of positions, for each head
    >>> rows = rng.standard_normal((16, 8, 64))  # projected encodings of the distances 15, 14, ... 0
    >>> rp.attention(q, k, v, position=rp.TransformerXL(u, w, rows), causal=True).shape
    (2, 8, 10, 64)
    """

    def __init__(
        self,
        content_bias: Any,
        position_bias: Any,
        rows: Any,
        *,
        variant: Shift = "transformer_xl",
        zero_triu: bool = False,
    ) -> None:
        self.variant = check.choice("variant", variant, VARIANTS)
        self.zero_triu = check.flag("zero_triu", zero_triu)
        if zero_triu and variant == "wenet":
            raise RelposValueError("zero_triu: variant 'wenet' has no positions that are relative, found True")
        self.content_bias = check.table("content_bias", content_bias, "heads head_dim")
        self.position_bias = check.table("position_bias", position_bias, "heads head_dim")
        self.rows = check.table("rows", rows, "rows heads head_dim", empty=True)
        shape = self.content_bias.shape
        if self.position_bias.shape != shape:
            raise RelposValueError(
                f"position_bias: expected the shape of content_bias {shape}, found {self.position_bias.shape}"
            )
        if self.rows.shape[1:] != shape:
            raise RelposValueError(
                f"rows: expected (R, {shape[0]}, {shape[1]}) as in content_bias, found {self.rows.shape}"
            )
        # The row of a query's own position, where it does not follow from the lengths: in a part of a call.
        self._row: int | None = None

    def check(self, site: Site) -> None:
        """Heads, head_dim and the number of rows must match the call."""
        if self.content_bias.shape != (site.heads, site.head_dim):
            raise RelposValueError(
                f"content_bias: expected (heads, head_dim) = ({site.heads}, {site.head_dim}) of the call, found "
                f"{self.content_bias.shape}"
            )
        if site.offset != site.k_len - site.q_len:
            raise RelposValueError(
                f"offset: {self!r} needs the queries at the last positions, L_k - L_q = {site.k_len - site.q_len}; "
                f"found {site.offset}"
            )
        if site.k_len < site.q_len and self.variant in ("transformer_xl", "espnet_legacy", "xlnet_uni"):
            raise RelposValueError(f"k: variant {self.variant!r} needs L_k >= L_q, found {site.k_len} < {site.q_len}")
        wanted = len(row_distances(site.q_len, site.k_len, self.variant))
        if len(self.rows) != wanted:
            raise RelposValueError(
                f"rows: variant {self.variant!r} needs {wanted} rows for L_q = {site.q_len} and L_k = {site.k_len}, "
                f"found shape {self.rows.shape}"
            )

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """The content part is (q + u) . k; without a shift, the rows are further channels of the keys."""
        u, v, rows = (x.astype(site.dtype, copy=False) for x in (self.content_bias, self.position_bias, self.rows))
        content = q + u[:, None, :]
        if self.variant != "wenet":
            return content, k
        rows = np.broadcast_to(rows.swapaxes(0, 1), k.shape)
        return np.concatenate([content, q + v[:, None, :]], axis=-1), np.concatenate([k, rows], axis=-1)

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """The position part, (q + v) . R."""
        if self.variant == "wenet":
            return None
        v, rows = (x.astype(site.dtype, copy=False) for x in (self.position_bias, self.rows))
        return np.asarray(_position_scores(q, v, rows, self.variant, self.zero_triu) * site.dtype.type(site.scale))

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """U joins the query; the position part is a query term with a row per distance."""
        if self.variant == "wenet":
            query, key = self.lower_vectors(q, k, site)
            return Terms(query, key, relative_error_ulps=2.0)
        content, *positions = self.lower_vectors(q, k, site)
        weights = self.rows.astype(site.dtype, copy=False).transpose(1, 0, 2)
        lengths, rows, wrap = (site.q_len, site.k_len, site.offset), len(self.rows), self._wrap(site)
        both = self.variant in ("conformer", "xlnet") and not self.zero_triu
        maps = [distance_map(*lengths, self._own_row(site), rows, site.k_len - site.offset if both else 0)]
        if wrap is not None:
            maps.append(wrapped_map(*lengths, rows, wrap))
        terms = [QueryTerm(x, weights, index) for x, index in zip(positions, maps, strict=True)]
        return Terms(query=content, queries=tuple(terms), relative_error_ulps=2.0)

    def lower_vectors(self, q: Array, k: Array, site: Site) -> tuple[Array, ...]:
        """Queries with u, and with v times the scale; where the shift runs on, the latter of the next query too."""
        u, v = (x.astype(site.dtype, copy=False)[:, None, :] for x in (self.content_bias, self.position_bias))
        content, position = q + u, q + v
        if self.variant == "wenet":
            return self._absolute(k, content, position, site)
        position *= site.dtype.type(site.scale)
        if self._wrap(site) is None:
            return content, position
        following = np.concatenate([position[..., 1:, :], np.zeros_like(position[..., :1, :])], axis=-2)
        return content, position, following

    def _own_row(self, site: Site) -> int:
        """The row that belongs to a query's own position."""
        if self._row is not None:
            return self._row
        return site.k_len - (0 if self.variant in ("xlnet", "xlnet_uni") else 1)

    def _wrap(self, site: Site) -> int | None:
        """The relative position from which on the shift runs into the products of the next query, if any is reached.

        Between the diagonal and there, there may be a zero.
        """
        first = {"transformer_xl": 2, "espnet_legacy": 2, "xlnet_uni": 1}.get(self.variant)
        reached = first is not None and site.right >= first and site.q_len > first and not self.zero_triu
        return first if reached else None

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Rows of the distances that occur, or of the keys, and vectors of the heads."""
        here, rest = part.alone(site)
        cut = copy.copy(self)
        cut.content_bias, cut.position_bias = self.content_bias[part.heads], self.position_bias[part.heads]
        if self.variant == "wenet":
            cut.rows = self.rows[part.keys, part.heads]
            return cut, here, rest
        if self._wrap(site) is not None:
            if part.queries.stop < site.q_len:
                raise RelposValueError(
                    f"position: {self!r} without a causal mask cannot be computed for the first "
                    f"{part.queries.stop} of {site.q_len} queries, since the last of them needs the next query too; "
                    "divide the keys only"
                )
            cut.rows, cut._row = self.rows[:, part.heads], self._own_row(site)
            return cut, here, rest
        # The lowest and the highest row, of which there is one at least.
        own, last = self._own_row(site), len(self.rows) - 1
        low = min(max(own + 1 - here.q_len - here.offset, 0), max(last, 0))
        high = max(min(own + here.k_len - 1 - here.offset, last), low)
        cut.rows, cut._row = self.rows[low : high + 1, part.heads], own - low
        return cut, here, rest

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula shifts products with rows for distances in both directions, more than there are keys."""
        if self.variant == "wenet":  # wider queries and keys, and what they are made of
            tokens = math.prod(site.batch) * site.heads * (site.q_len + site.k_len)
            return MemoryBound(4 * tokens * site.head_dim * site.dtype.itemsize)
        products = math.prod(site.batch) * site.heads * site.q_len * (site.q_len + site.k_len) * site.dtype.itemsize
        return MemoryBound(super().memory_bound(site).formula + products)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Both vectors collect what their heads' queries receive, and rows return to (R, H, D)."""
        content, scale = np.asarray(grad.query), site.dtype.type(site.scale)
        to_key = np.asarray(grad.key)
        if self.variant == "wenet":
            # The second half of each operand is the position part.
            depth, rows = site.head_dim, to_key[..., site.head_dim :]
            content, position = content[..., :depth], content[..., depth:]
            weights = fit(rows, (site.heads, site.k_len, depth))
            to_key = fit(to_key[..., :depth], k.shape)
        else:
            position = np.asarray(grad.queries[0].query) * scale
            weights = grad.queries[0].weights
            if len(grad.queries) > 1:
                weights = weights + grad.queries[1].weights
                position[..., 1:, :] += np.asarray(grad.queries[1].query)[..., :-1, :] * scale
        arrays = {
            "content_bias": fit(content.sum(axis=-2), self.content_bias.shape),
            "position_bias": fit(position.sum(axis=-2), self.position_bias.shape),
            "rows": weights.transpose(1, 0, 2),
        }
        return SchemeGradient(content + position, to_key, arrays)

    def _absolute(self, k: Array, content: Array, position: Array, site: Site) -> tuple[Array, Array]:
        """Without a shift the rows belong to keys: append them to the keys and q + v to the queries."""
        keys = k if site.kv_heads == site.heads else np.repeat(k, site.heads // site.kv_heads, axis=-3)
        rows = self.rows.astype(site.dtype, copy=False).transpose(1, 0, 2)
        return (
            np.concatenate([content, position], axis=-1),
            np.concatenate([keys, np.broadcast_to(rows, keys.shape)], axis=-1),
        )


@register(
    "transformer_xl",
    TransformerXL,
    adds="u, v and a projected row per distance",
    paper="Dai et al., ACL 2019",
    doi="10.48550/arXiv.1901.02860",
    equation="section 3.3",
    variants=VARIANTS,
    models="Transformer-XL, XLNet, ESPnet and NeMo Conformers, Wav2Vec2-Conformer, SeamlessM4T",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(3, 3)
    variant: Shift = at.variant or "transformer_xl"
    heads = parts["q"].shape[-3]
    rows = len(row_distances(at.q_len, at.k_len, variant))
    u, v, r = at.normal(heads, at.dim), at.normal(heads, at.dim), at.normal(rows, heads, at.dim)
    position = TransformerXL(u, v, r, variant=variant, zero_triu=at.pick(False, variant != "wenet"))
    # Only these two hide what their shift leaves above the diagonal.
    return {**parts, "position": position, "kwargs": {"causal": variant in ("transformer_xl", "xlnet_uni")}}
