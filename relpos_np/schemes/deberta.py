r"""DeBERTa: content to position and position to content, with linear or logarithmic relative positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import deberta_map
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import MemoryBound, Sample, Site, register
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Int64

PositionSign: TypeAlias = Literal["code", "paper"]
P2C = get_args(PositionSign)


def deberta_bucket(distance: Array, *, span: int, max_position: int | None = None, clamped: bool = False) -> Int64:
    r"""The number that stands for each distance, before it is clipped.

    Without `max_position` the distance itself. With it the distances near 0 keep their own, those further away share
    one with others at about the same ratio: with :math:`\mu = \lfloor s/2 \rfloor` and :math:`n = |\delta|`,

    .. math::

        b(\delta) = \delta \;\text{ for } n \le \mu, \qquad b(\delta) = \operatorname{sign}(\delta) \left( \mu +
        \left\lceil \frac{\ln(n / \mu)}{\ln((P - 1) / \mu)} (\mu - 1) \right\rceil \right) \;\text{ beyond,}

    at most s either way. The rounding up is decided in integers: m is enough where
    :math:`n^{\mu-1} \mu^m \le (P-1)^m \mu^{\mu-1}`.

    Parameters
    ----------
    distance : ndarray of int
        Distances :math:`\delta = i + M - j`, positive for keys in the past.
    span : int
        s, half the rows of a table: `position_buckets` of DeBERTa v2, `max_relative_positions` of v1.
    max_position : int, optional
        P: `max_relative_positions` of v2, which is its `max_position_embeddings` where it is not set. It must exceed
        :math:`\mu + 1`, and s must be at least 4.
    clamped : bool
        Whether distances are first held within :math:`\pm(P - 1)`, whose bucket is s - 1, as in Microsoft's newest
        code; its first code and Hugging Face's give distances beyond a bucket of their own, s.

    Returns
    -------
    ndarray of int64
        In the shape of `distance`.
    """
    distance = check.integers("distance", distance).astype(np.int64)
    if max_position is None:
        return distance
    if clamped:
        distance = np.clip(distance, 1 - max_position, max_position - 1)
    found, at = np.unique(distance, return_inverse=True)
    own = [_log_bucket(abs(d), span, max_position) * (1 if d > 0 else -1) for d in found.tolist()]
    return np.asarray(own, dtype=np.int64)[at].reshape(np.shape(distance))


@lru_cache(maxsize=1 << 16)
def _log_bucket(n: int, span: int, max_position: int) -> int:
    """The bucket of a distance n >= 0; float64 is sure of the rounding up but for what lies beside an integer."""
    middle = span // 2
    if n <= middle:
        return n
    x = (middle - 1) * math.log1p((n - middle) / middle) / math.log((max_position - 1) / middle)
    m = round(x)
    if abs(x - m) > 1e-9 * (1 + x):
        m = math.ceil(x)
    elif n ** (middle - 1) * middle**m > (max_position - 1) ** m * middle ** (middle - 1):
        m += 1
    return middle + min(max(m, 1), span - middle)


def deberta_scores(
    q: Array,
    k: Array,
    pos_key: Array | None,
    pos_query: Array | None,
    *,
    offset: int = 0,
    max_position: int | None = None,
    clamped: bool = False,
    p2c: PositionSign = "code",
) -> tuple[Array | None, Array | None]:
    r"""The two unscaled parts that positions add to :math:`q_i \cdot k_j`.

    .. math::

        c2p_{ij} = q_i \cdot K^r_{\delta(i,j)}, \qquad
        p2c_{ij} = k_j \cdot Q^r_{\delta(i,j)} \;\text{(code)}, \qquad
        p2c_{ij} = k_j \cdot Q^r_{\delta(j,i)} \;\text{(paper)}

    with the rows :math:`\delta(i, j) = \mathrm{clip}(b(i + M - j) + s, 0, 2s - 1)` and the numbers b of
    `deberta_bucket`.

    Parameters
    ----------
    q, k : ndarray, shapes (..., H, L_q, D) and (..., H, L_k, D)
        Queries and keys.
    pos_key, pos_query : ndarray, shape (H, 2s, D), or None
        Projected position tables.
    offset : int
        Position M of the first query among the keys.
    max_position, clamped
        See `deberta_bucket`.
    p2c : {"code", "paper"}
        Which way the second part counts.

    Returns
    -------
    c2p, p2c : ndarray, shape (..., H, L_q, L_k), or None
        Content to position and position to content; None without a table. Scores are
        ``scale * (q @ k.T + c2p + p2c)``.

    References
    ----------
    He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", ICLR 2021, section 3.1.
    """
    distance = np.arange(q.shape[-2])[:, None] + offset - np.arange(k.shape[-2])

    def rows(table: Array, delta: Array) -> Array:
        span = table.shape[-2] // 2
        bucket = deberta_bucket(delta, span=span, max_position=max_position, clamped=clamped)
        return table[:, np.clip(bucket + span, 0, 2 * span - 1)]

    content, position = None, None
    if pos_key is not None:
        content = np.asarray(np.einsum("...id,...ijd->...ij", q, rows(pos_key, distance)))
    if pos_query is not None:
        position = np.asarray(
            np.einsum("...jd,...ijd->...ij", k, rows(pos_query, distance if p2c == "code" else -distance))
        )
    return content, position


class DeBERTa(LookupScheme):
    r"""Disentangled attention of DeBERTa v1, v2 and v3.

    .. math::

        s_{ij} = \sigma \left( q_i \cdot k_j + q_i \cdot K^r_{\delta(i,j)} + k_j \cdot Q^r_{\delta(i,j)} \right),
        \qquad \delta(i, j) = \mathrm{clip}(b(i + M - j) + s, 0, 2s - 1)

    with b as in `deberta_bucket`: the distance itself in v1, logarithmic buckets in v2 and v3. Distances count from
    keys to queries, the other way round than in `Shaw`. Row 0 is reached from i + M - j = -s (-P with buckets) on,
    row 2s - 1 one earlier; `clamped`, keys that far behind a query have row 1, and none has row 0.

    Published models scale all three products by :math:`1/\sqrt{D\,(1 + t)}` with t the number of position terms,
    not by the default of `relpos_np.attention`: pass the attribute `scale`,
    ``rp.attention(q, k, v, position=p, scale=p.scale)``.

    The tables are one embedding of relative positions E (2s, D_model) after a layer's own projections, in v2 and v3
    after its layer normalisation: ``(E @ W.T + b).reshape(2 * s, H, D).transpose(1, 0, 2)`` with the weights of
    `pos_proj` and `pos_q_proj` in v1, `pos_key_proj` and `pos_query_proj` in v2, or with ``share_att_key``, as in
    v3 and v2-xlarge, those of the layer's `key_proj` and `query_proj`.

    Parameters
    ----------
    pos_key : ndarray, shape (H, 2s, D), optional
        Position keys :math:`K^r`, which queries meet (c2p).
    pos_query : ndarray, shape (H, 2s, D), optional
        Position queries :math:`Q^r`, which keys meet (p2c).
    max_position : int, optional
        P of the logarithmic buckets: 512 in v2 and v3 with s = 256. Without it distances count one by one (v1).
    clamped : bool
        Whether distances beyond P - 1 count as P - 1, as in Microsoft's newest code; see `deberta_bucket`.
    p2c : {"code", "paper"}
        Keys meet the row of :math:`\delta(i, j)`, as in both published codes, or of :math:`\delta(j, i)`, as in
        the paper's equation. Trained weights belong to "code".

    Attributes
    ----------
    scale : float
        :math:`1/\sqrt{D\,(1 + t)}`, what published models multiply the sum with.

    Raises
    ------
    RelposValueError
        If both tables are missing, they differ in shape, have an odd number of rows, or `max_position` leaves no
        bucket.

    References
    ----------
    He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", ICLR 2021. He, Gao, Chen, "DeBERTaV3",
    ICLR 2023. Of Microsoft's first code and of Hugging Face's for v1 and v2 the rows are the same where L_q = L_k;
    Microsoft's newest code is `clamped`, which differs for keys P or more after a query. A position-to-position term,
    which only Microsoft's code offers and no published model uses, is not here. Microsoft's first code takes logarithms
    in float64, the others in float32. All agree with the exact buckets for the published sizes (s = 256, P = 512); for
    s = 128 and P = 513 the first puts the distances 128 and 256 one too far.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> pos_key, pos_query = rng.standard_normal((2, 8, 2 * 256, 64))  # embeddings of 2 k distances
    >>> position = rp.DeBERTa(pos_key, pos_query)
    >>> rp.attention(q, k, v, position=position, scale=(3 * 64) ** -0.5).shape  # for 3 products
    (2, 8, 10, 64)
    """

    relative = True

    def __init__(
        self,
        pos_key: Any = None,
        pos_query: Any = None,
        *,
        max_position: Any = None,
        clamped: bool = False,
        p2c: PositionSign = "code",
    ) -> None:
        if pos_key is None and pos_query is None:
            raise RelposValueError("DeBERTa: expected pos_key, pos_query or both, found neither")
        form = "heads 2s head_dim"
        self.pos_key = None if pos_key is None else check.table("pos_key", pos_key, form)
        self.pos_query = None if pos_query is None else check.table("pos_query", pos_query, form)
        self.max_position = None if max_position is None else check.integer("max_position", max_position, 1)
        self.clamped = check.flag("clamped", clamped)
        self.p2c = check.choice("p2c", p2c, P2C)
        given = [(name, x) for name, x in (("pos_key", self.pos_key), ("pos_query", self.pos_query)) if x is not None]
        for name, table in given:
            if table.shape[1] % 2:
                raise RelposValueError(f"{name}: expected an even number 2s of rows, found shape {table.shape}")
        if len(given) == 2 and given[0][1].shape != given[1][1].shape:
            raise RelposValueError(f"pos_query: expected {given[0][1].shape} as pos_key, found {given[1][1].shape}")
        self._heads, rows, self._dim = given[0][1].shape
        self._span = span = rows // 2
        if self.max_position is not None and (span < 4 or self.max_position <= span // 2 + 1):
            raise RelposValueError(
                f"max_position: {max_position} leaves no buckets; with 2s = {rows} rows it needs s >= 4 and more than "
                f"{span // 2 + 1}"
            )
        if self.clamped and self.max_position is None:
            raise RelposValueError("clamped: expected max_position, whose buckets it is for")
        self.scale = float((self._dim * (1 + len(given))) ** -0.5)

    def check(self, site: Site) -> None:
        """Tables must match the heads and head_dim of the call."""
        if (self._heads, self._dim) != (site.heads, site.head_dim):
            name, table = ("pos_key", self.pos_key) if self.pos_key is not None else ("pos_query", self.pos_query)
            shape = () if table is None else table.shape
            raise RelposValueError(
                f"{name}: shape {shape} is for {self._heads} heads of {self._dim}, the call has {site.heads} of "
                f"{site.head_dim}"
            )

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """Both parts, scaled."""
        tables = (x if x is None else x.astype(site.dtype, copy=False) for x in (self.pos_key, self.pos_query))
        options: Any = {"max_position": self.max_position, "clamped": self.clamped, "p2c": self.p2c}
        added = deberta_scores(q, k, *tables, offset=site.offset, **options)
        first, *others = (part for part in added if part is not None)
        return np.asarray(sum(others, first) * site.dtype.type(site.scale))

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        lengths = site.q_len, site.k_len, site.offset
        span = (self._span, self.max_position, self.clamped)
        if self.pos_key is not None:
            yield Lookup("pos_key", "queries", self.pos_key, deberta_map(*lengths, *span, True), scaled=True)
        if self.pos_query is not None:
            index = deberta_map(*lengths, *span, self.p2c == "code")
            yield Lookup("pos_query", "keys", self.pos_query, index, scaled=True)

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula gathers a vector per head for every pair."""
        vectors = site.q_len * site.k_len * site.heads * site.head_dim * site.dtype.itemsize
        return MemoryBound(super().memory_bound(site).formula + vectors)


@register(
    "deberta",
    DeBERTa,
    adds="content to position and position to content",
    paper="He et al., ICLR 2021",
    doi="10.48550/arXiv.2006.03654",
    equation="4",
    variants=P2C,
    options="logarithmic buckets of v2 and v3",
    models="DeBERTa, DeBERTa v2, DeBERTa v3",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    rows = at.pick(32, 8, 100)
    tables = [at.normal(parts["q"].shape[-3], rows, at.dim) for _ in range(2)]
    given = at.pick((True, True), (True, False), (False, True))
    position_limit = at.pick(40, None) if rows < 64 else None
    position = DeBERTa(
        *(table if there else None for table, there in zip(tables, given, strict=True)),
        max_position=position_limit,
        clamped=rows < 64 and position_limit is not None and at.pick(False, True),
        p2c=at.variant or "code",
    )
    return {**parts, "position": position, "kwargs": {"scale": position.scale}}
