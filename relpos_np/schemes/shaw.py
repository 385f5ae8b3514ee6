r"""Shaw et al.: a learned vector per clipped relative position, added to keys and to values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import reached_rows
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import softmax, weighted_vectors
from relpos_np.schemes.base import MemoryBound, Sample, Site, register
from relpos_np.schemes.checks import vectors_per_pair
from relpos_np.schemes.lookups import Lookup, LookupScheme, per_head
from relpos_np.types import Array

Outside: TypeAlias = Literal["clip", "zero"]
OUTSIDE = get_args(Outside)


def relative_vectors(
    table: Array, q_len: int, k_len: int, *, offset: int = 0, outside: Outside = "clip", left: int | None = None
) -> Array:
    r"""The vectors :math:`a_{ij}` of every query and key, written out.

    .. math::

        a_{ij} = w_{\mathrm{clip}(j - i - M)}, \qquad \mathrm{clip}(x) = \max(-\ell, \min(r, x))

    Parameters
    ----------
    table : ndarray, shape (R, D) or (H, R, D)
        Vectors :math:`w_{-\ell}, \ldots, w_r`, shared by all heads or one set per head; R = :math:`\ell + 1 + r`.
    q_len, k_len : int
        Number of queries L_q and of keys L_k.
    offset : int
        Position M of the first query among the keys.
    outside : {"clip", "zero"}
        Beyond the table: its outermost vector, or zero.
    left : int, optional
        Rows :math:`\ell` before that of the query's own position; default R // 2, the same on both sides where R is
        odd.

    Returns
    -------
    ndarray, shape (L_q, L_k, D) or (H, L_q, L_k, D)
        One vector per pair.
    """
    before = table.shape[-2] // 2 if left is None else left
    after = table.shape[-2] - 1 - before
    d = np.arange(k_len) - (np.arange(q_len)[:, None] + offset)
    a = table[..., np.maximum(-before, np.minimum(after, d)) + before, :]
    return a if outside == "clip" else np.where(((d >= -before) & (d <= after))[..., None], a, table.dtype.type(0))


def _lefts(left: Any) -> tuple[Any, Any]:
    """What `left` says of the key table and of the value table."""
    return left if isinstance(left, tuple) and len(left) == 2 else (left, left)


def _row_of_zero(name: str, table: Array, left: Any) -> int:
    """The row that belongs to d = 0: `left`, or the middle one of an odd number."""
    rows: int = table.shape[-2]
    if left is None:
        if rows % 2 == 0:
            raise RelposValueError(
                f"{name}: expected an odd number 2k+1 of rows, or left=, found {rows} in {table.shape}"
            )
        return rows // 2
    before = check.integer("left", left, 0)
    if before >= rows:
        raise RelposValueError(f"left: expected 0 ... {rows - 1} for {name} of shape {table.shape}, found {left}")
    return before


@np.errstate(all="ignore")
def shaw_attention(
    q: Array,
    k: Array,
    v: Array,
    key_table: Array,
    value_table: Array,
    *,
    offset: int = 0,
    outside: Outside = "clip",
    left: Any = None,
) -> Array:
    r"""Attention with relative position vectors on keys and values, as the paper writes it.

    .. math::

        e_{ij} = \frac{q_i \cdot (k_j + a^K_{ij})}{\sqrt{D}}, \qquad
        \alpha_{ij} = \mathrm{softmax}_j(e_{ij}), \qquad z_i = \sum_j \alpha_{ij} (v_j + a^V_{ij})

    Parameters
    ----------
    q, k, v : ndarray, shapes (..., H, L_q, D), (..., H, L_k, D) and (..., H, L_k, D_v)
        Queries, keys and values.
    key_table, value_table : ndarray, shapes (2k+1, D) and (2k+1, D_v)
        Relative position vectors; see `relative_vectors`.
    offset : int
        Position of the first query among the keys.
    outside : {"clip", "zero"}
        Beyond the table: its outermost vector, or zero.
    left : int or tuple of (int or None), optional
        Rows before that of d = 0, of both tables or of each; default as many as after it.

    Returns
    -------
    ndarray, shape (..., H, L_q, D_v)
        The output z.

    Raises
    ------
    RelposValueError
        If a table has an even number of rows and no `left` says which belongs to d = 0, or an option is unknown.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018.
    """
    tables = zip(("key_table", "value_table"), (key_table, value_table), _lefts(left), strict=True)
    a_k, a_v = (
        relative_vectors(one[1], q.shape[-2], k.shape[-2], offset=offset, outside=outside, left=_row_of_zero(*one))
        for one in tables
    )
    e = (np.einsum("...id,...jd->...ij", q, k) + np.einsum("...id,...ijd->...ij", q, a_k)) / np.sqrt(q.shape[-1])
    p, _ = softmax(e)
    return np.asarray(np.einsum("...ij,...jd->...id", p, v) + np.einsum("...ij,...ijd->...id", p, a_v))


@np.errstate(all="ignore")
def shaw_attention_matrix(
    q: Array,
    k: Array,
    v: Array,
    key_table: Array,
    value_table: Array,
    *,
    offset: int = 0,
    outside: Outside = "clip",
    left: Any = None,
) -> Array:
    r"""The same as `shaw_attention` in matrices: no vector :math:`a_{ij}` is ever written out.

    Although the :math:`a_{ij}` are L L D numbers, only 2k+1 vectors differ. So with c the row of a pair,

    .. math::

        S_{ij} = \frac{(Q K^\top)_{ij} + (Q\, {w^K}^\top)_{i,\,c(i,j)}}{\sqrt{D}}, \qquad
        Z = P V + \tilde P\, w^V, \qquad \tilde P_{ir} = \sum_{j\,:\,c(i,j) = r} P_{ij},

    .. math::

        P = \mathrm{softmax}(S), \qquad c(i, j) = \mathrm{clip}(j - i - M,\, k) + k .

    Beyond the scores the positions need O(L k) memory: the L (2k+1) products with the key table and as many sums
    of probabilities.

    Parameters
    ----------
    q, k, v : ndarray, shapes (..., H, L_q, D), (..., H, L_k, D) and (..., H, L_k, D_v)
        Queries, keys and values.
    key_table, value_table : ndarray, shapes (2k+1, D) and (2k+1, D_v), or (H, 2k+1, D) and (H, 2k+1, D_v)
        Relative position vectors; k may differ between the two.
    offset : int
        Position M of the first query among the keys.
    outside : {"clip", "zero"}
        See `shaw_attention`.
    left : int or tuple of (int or None), optional
        See there, too.

    Returns
    -------
    ndarray, shape (..., H, L_q, D_v)
        The output z.

    Raises
    ------
    RelposValueError
        If a table has an even number of rows and no `left` says which belongs to d = 0, or an option is unknown.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018, section 3.3.
    """
    d = np.arange(k.shape[-2]) - (np.arange(q.shape[-2])[:, None] + offset)
    tables = zip(("key_table", "value_table"), (key_table, value_table), _lefts(left), strict=True)
    spans = [(_row_of_zero(*one), one[1].shape[-2]) for one in tables]
    # -1: the pair has no vector.
    key_row, value_row = (
        np.where(
            ((d + zero >= 0) & (d + zero < rows)) | (outside == "clip"), np.clip(d, -zero, rows - 1 - zero) + zero, -1
        )
        for zero, rows in spans
    )
    products = q @ np.swapaxes(key_table, -1, -2)
    s = q @ np.swapaxes(k, -1, -2)
    picked = np.take_along_axis(products, np.broadcast_to(key_row, s.shape), axis=-1)
    p, _ = softmax((s + np.where(key_row >= 0, picked, s.dtype.type(0))) / math.sqrt(q.shape[-1]))
    sums = [np.where(value_row == r, p, p.dtype.type(0)).sum(axis=-1) for r in range(value_table.shape[-2])]
    return np.asarray(p @ v + np.stack(sums, axis=-1) @ value_table)


class Shaw(LookupScheme):
    r"""Relative position vectors on keys, on values, or on both.

    .. math::

        s_{ij} = \sigma\, q_i \cdot (k_j + w^K_{r(d)}), \qquad o_i = \sum_j p_{ij} (v_j + w^V_{r(d)}),
        \qquad d = j - i - M

    where :math:`r(d) = \mathrm{clip}(d, -\ell, R - 1 - \ell) + \ell` for a table of R rows, of which :math:`\ell`
    come before that of d = 0. In the paper R = 2k+1 and :math:`\ell = k`. With ``outside="zero"`` a pair whose d lies
    beyond the table gets no vector. The matrix form needs O(L k) memory: queries meet the R rows once and each
    score picks its product; probabilities are summed per row before they meet the value table.

    Parameters
    ----------
    key_table : ndarray, shape (2k+1, D) or (H, 2k+1, D), optional
        Vectors :math:`w^K_{-k} \ldots w^K_k`; any number R of rows if `left` is given.
    value_table : ndarray, shape (2k+1, D_v) or (H, 2k+1, D_v), optional
        Vectors :math:`w^V_{-k} \ldots w^V_k`; its k may differ from the key table's.
    outside : {"clip", "zero"}
        "clip" in the paper, SpeechT5 and wav2vec2-BERT; "zero" in VITS, Music Transformer and
        later tensor2tensor. The weights are not interchangeable.
    left : int or tuple of (int or None, int or None), optional
        Rows :math:`\ell` before that of d = 0, of both tables or of the key table and the value table; default the
        middle row of an odd number. Tables that reach differently far to both sides:

        - wav2vec2-BERT and Seamless M4T v2: ``left=64`` with 73 rows, 8 of them for later keys.
        - SpeechT5 counts i - j from -m to m-1: its table upside down (``table[::-1]``) with ``left=m-1``.
        - Music Transformer: rows for -(L-1) ... 0 and nothing for later keys, ``left=rows-1`` and
          ``outside="zero"``. Behind a causal mask this is its skewing procedure.

    Raises
    ------
    RelposValueError
        If both tables are missing, one has an even number of rows and no `left`, or `left` is no row of it.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018.
    Indices there run over j - i, as here. Huang et al., "Music Transformer", ICLR 2019.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> tables = rng.standard_normal((2, 2 * 4 + 1, 64))  # distances are clipped at 4 either way
    >>> position = rp.Shaw(key_table=tables[0], value_table=tables[1])
    >>> rp.attention(q, k, v, position=position).shape
    (2, 8, 10, 64)
    """

    relative = True

    def __init__(
        self, key_table: Any = None, value_table: Any = None, *, outside: Outside = "clip", left: Any = None
    ) -> None:
        if key_table is None and value_table is None:
            raise RelposValueError("Shaw: expected key_table, value_table or both, found neither")
        self.outside = check.choice("outside", outside, OUTSIDE)
        form = "2k+1 head_dim | heads 2k+1 head_dim"
        self.key_table = None if key_table is None else check.table("key_table", key_table, form)
        self.value_table = None if value_table is None else check.table("value_table", value_table, form)
        self.left = left
        for_keys, for_values = _lefts(left)
        self._key_zero = 0 if self.key_table is None else _row_of_zero("key_table", self.key_table, for_keys)
        self._value_zero = 0 if self.value_table is None else _row_of_zero("value_table", self.value_table, for_values)

    def check(self, site: Site) -> None:
        """Tables must match the head dimensions and, where they are per head, the heads."""
        vectors_per_pair(self, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """Scaled products of queries with the relative vectors of their keys."""
        if self.key_table is None:
            return None
        table = self.key_table.astype(site.dtype, copy=False)
        a = relative_vectors(
            table, site.q_len, site.k_len, offset=site.offset, outside=self.outside, left=self._key_zero
        )
        return np.asarray(np.einsum("...id,...ijd->...ij", q, a) * site.dtype.type(site.scale))

    def outputs(self, p: Array, site: Site) -> Array | None:
        """Relative vectors weighted by the probabilities."""
        if self.value_table is None:
            return None
        table = self.value_table.astype(site.dtype, copy=False)
        a = relative_vectors(
            table, site.q_len, site.k_len, offset=site.offset, outside=self.outside, left=self._value_zero
        )
        return weighted_vectors(p, a)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        if self.key_table is not None:
            yield self._lookup("key_table", "queries", self.key_table, self._key_zero, site)
        if self.value_table is not None:
            yield self._lookup("value_table", "values", self.value_table, self._value_zero, site)

    def _lookup(self, name: str, kind: Literal["queries", "values"], table: Array, zero: int, site: Site) -> Lookup:
        """The rows that some pair has."""
        after = table.shape[-2] - 1 - zero
        rows, index = reached_rows(site.q_len, site.k_len, site.offset, zero, self.outside, after)

        def back(to_rows: Array) -> Array:
            whole = np.zeros_like(per_head(table), to_rows.dtype)
            whole[:, rows] = to_rows
            return whole

        return Lookup(name, kind, per_head(table)[:, rows], index, back, scaled=kind == "queries")

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula gathers a vector for every pair, twice where pairs beyond the table have none."""
        copies = 1 if self.outside == "clip" else 2
        sizes = [
            site.dtype.itemsize * (1 if table.ndim == 2 else len(table)) * table.shape[-1]
            for table in (self.key_table, self.value_table)
            if table is not None
        ]
        return MemoryBound(super().memory_bound(site).formula + site.q_len * site.k_len * copies * max(sizes))


@register(
    "shaw",
    Shaw,
    adds="a vector per relative position, on keys and values",
    paper="Shaw et al., NAACL 2018",
    doi="10.48550/arXiv.1803.02155",
    equation="3 and 4",
    variants=OUTSIDE,
    options="outside the table; one-sided tables (wav2vec2-BERT, SpeechT5, Music Transformer, VITS)",
    models="Shaw's Transformer, Music Transformer, VITS, SpeechT5, Wav2Vec2-BERT, SeamlessM4T v2",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(3, 3)
    lead = at.pick((), (parts["q"].shape[-3],))
    reach = at.pick((5, 4), (0, 2), (20, 1), (2, 40), (3, None), (None, 3))
    # Rows for later keys than the table of one's own would have, so that there may be an even number of them.
    more = at.pick(0, 1)
    key, value = (
        None if k is None else at.normal(*lead, 2 * k + 1 + more, dim)
        for k, dim in zip(reach, (at.dim, at.v_dim), strict=True)
    )
    middle = None if more == 0 else tuple(reach)
    left = at.pick(middle, tuple(None if k is None else k // 2 for k in reach), 0)
    return {**parts, "position": Shaw(key, value, outside=at.variant or "clip", left=left)}
