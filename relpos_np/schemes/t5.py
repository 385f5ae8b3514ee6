r"""T5: one learned scalar per head and bucket of relative positions, added to the scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import t5_map
from relpos_np.formulas.buckets import T5_ROUNDING, T5Rounding, bucket_table, t5_bucket
from relpos_np.schemes.base import Sample, Site, evaluated, register
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array


def t5_bias(
    table: Array,
    q_len: int,
    k_len: int,
    *,
    offset: int = 0,
    max_distance: int = 128,
    bidirectional: bool = True,
    rounding: T5Rounding = "exact",
) -> Array:
    """The bias of every pair, written out: ``table[t5_bucket(j - i - offset), h]``.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H)
        One scalar per bucket and head.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position of the first query among the keys.
    max_distance, bidirectional
        See `t5_bucket`.
    rounding : {"exact", "float32", "flaxformer"}
        See `t5_bucket`, too.

    Returns
    -------
    ndarray, shape (H, L_q, L_k)
        To be added to the scores.
    """
    d = np.arange(k_len) - (np.arange(q_len)[:, None] + offset)
    if not d.size:
        return np.zeros((table.shape[1], q_len, k_len), table.dtype)
    # Each relative position occurs many times; its bucket is decided once.
    nearest = int(d.min())
    positions = np.arange(nearest, int(d.max()) + 1)
    bucket = t5_bucket(
        positions, num_buckets=table.shape[0], max_distance=max_distance, bidirectional=bidirectional, rounding=rounding
    )
    return table.T[:, bucket][:, d - nearest]


class T5(LookupScheme):
    r"""Bucketed relative position bias.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + T[b(j - i - M), h]

    with the buckets b of `t5_bucket`. Published T5 checkpoints use ``scale=1.0`` (they do not
    divide by the root of head_dim); MPNet divides, and uses 32 buckets and distance 128 whatever its
    configuration says. T5 shares one table among all layers, umT5 has one per layer; the bias of
    cross-attention is zero.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H)
        One scalar per bucket and head, as checkpoints store it.
    max_distance : int
        Distances from here on share a bucket: 128 in T5 and MPNet, 800 in WavLM.
    bidirectional : bool
        True in encoders, False in decoder self-attention.
    rounding : {"exact", "float32", "flaxformer"}
        How bucket borders are decided; see `t5_bucket`.

    Raises
    ------
    RelposValueError
        If the number of buckets or max_distance leaves no valid border.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", JMLR 2020.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> table = rng.standard_normal((32, 8))  # `relative_attention_bias.weight`: (buckets, heads)
    >>> rp.attention(q, k, v, position=rp.T5(table, max_distance=128), scale=1.0).shape  # T5: no scale
    (2, 8, 10, 64)
    """

    relative = True

    def __init__(
        self, table: Any, *, max_distance: int = 128, bidirectional: bool = True, rounding: T5Rounding = "exact"
    ) -> None:
        self.max_distance = check.integer("max_distance", max_distance, 1)
        self.bidirectional = check.flag("bidirectional", bidirectional)
        self.rounding = check.choice("rounding", rounding, T5_ROUNDING)
        self.table = bucket_table("table", table, self.max_distance, bidirectional=self.bidirectional)

    def check(self, site: Site) -> None:
        """The table must have one column per head."""
        check.heads("table", self.table, 1, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(t5_bias, self, site, cast=True))

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        lengths, rows = (site.q_len, site.k_len, site.offset), self.table.shape[0]
        index = t5_map(*lengths, rows, self.max_distance, self.bidirectional, self.rounding)
        yield Lookup("table", "tables", self.table.T, index, np.transpose)


@register(
    "t5",
    T5,
    adds="a scalar per bucket and head",
    paper="Raffel et al., JMLR 2020",
    doi="10.48550/arXiv.1910.10683",
    equation="section 2.1",
    variants=T5_ROUNDING,
    options="one direction or both",
    models="T5, mT5, umT5, MPNet, LongT5's local part",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    buckets, both = at.pick((32, True), (8, True), (28, True), (64, True), (2, False), (33, False))
    # Of the distances of one side, half have a bucket of their own.
    alone = (buckets // 2 if both else buckets) // 2
    position = T5(
        at.normal(buckets, parts["q"].shape[-3]),
        max_distance=at.pick(128, alone + 1, alone + 7),
        bidirectional=both,
        rounding=at.variant or "exact",
    )
    mask = np.ones((*at.batch, 1, 1, at.k_len), dtype=np.bool_)
    mask[1:, ..., -at.k_len // 3 :] = False
    return {**parts, "position": position, "kwargs": {"scale": 0.5, "mask": mask}}
