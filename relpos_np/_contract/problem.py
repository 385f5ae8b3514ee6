"""One validated call of attention, as the schemes and every backend see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relpos_np.types import Array

# A band without a limit on one side: far beyond any length, far below overflow.
UNBOUNDED = 1 << 60


@dataclass(slots=True, eq=False)
class Site:
    """What a scheme may know of the call it is lowered for.

    Query i stands at position i + offset among the keys, so its relative position to key j is
    j - (i + offset). `right` is the largest relative position that is attended (0 if causal).
    `scores_only` means that there are no values.
    """

    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    offset: int
    right: int
    scale: float
    dtype: np.dtype[Any]
    scores_only: bool
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a call: of each batch axis, of the heads of queries and of keys, of queries and of keys."""

    batch: tuple[slice, ...]
    heads: slice
    kv_heads: slice
    queries: slice
    keys: slice

    def nearby(self, site: Site) -> tuple[Site, Part]:
        """The call cut to the part, with all of its heads, and the part as that call sees it."""
        here, _ = self.alone(site)
        here = replace(here, heads=site.heads, kv_heads=site.kv_heads)
        return here, replace(self.of(here), heads=self.heads, kv_heads=self.kv_heads)

    def alone(self, site: Site) -> tuple[Site, Part]:
        """The call cut to the part, and all of it."""
        here = replace(
            site,
            batch=tuple(axis.stop - axis.start for axis in self.batch),
            heads=self.heads.stop - self.heads.start,
            kv_heads=self.kv_heads.stop - self.kv_heads.start,
            q_len=self.queries.stop - self.queries.start,
            k_len=self.keys.stop - self.keys.start,
            offset=site.offset + self.queries.start - self.keys.start,
        )
        return here, self.of(here)

    @classmethod
    def of(cls, site: Site) -> Part:
        """All of a call."""
        batch = tuple(slice(0, n) for n in site.batch)
        return cls(batch, *(slice(0, n) for n in (site.heads, site.kv_heads, site.q_len, site.k_len)))


def _converted(x: Array, dtype: np.dtype[Any]) -> Array:
    """An array in another dtype; what is repeated, as batch items are that were broadcast, is converted once."""
    if x.dtype == dtype:
        return x
    own = x[tuple(slice(None, None if stride else 1) for stride in x.strides)]
    return np.broadcast_to(own.astype(dtype), x.shape)


@dataclass(slots=True, eq=False)
class Problem:
    """Checked operands: q (*batch, H, L_q, D), k (*batch, H_kv, L_k, D), v (*batch, H_kv, L_k, D_v).

    Batch axes are broadcast without copies. What is `stored_...` may be of half precision; q, k and v are
    the same in the dtype of the computation, converted when they are first asked for. `mask`, bool or float,
    and `keep`, the survivors of dropout, are broadcast to (*batch, H, L_q, L_k); `key_lengths` to batch.
    `mask_of_keys`: the mask was given with one row for all heads and queries. `precision`: one that was chosen.
    """

    stored_q: Array
    stored_k: Array
    stored_v: Array
    site: Site
    left: int
    right: int
    mask: Array | None
    key_lengths: Array | None
    keep: Array | None
    keep_scale: float
    mask_of_keys: bool = False
    precision: str | None = None
    _q: Array | None = field(init=False, default=None)
    _k: Array | None = field(init=False, default=None)
    _v: Array | None = field(init=False, default=None)

    @property
    def q(self) -> Array:
        """Queries in the dtype of the computation."""
        if self._q is None:
            self._q = _converted(self.stored_q, self.site.dtype)
        return self._q

    @property
    def k(self) -> Array:
        """Keys in the dtype of the computation."""
        if self._k is None:
            self._k = _converted(self.stored_k, self.site.dtype)
        return self._k

    @property
    def v(self) -> Array:
        """Values in the dtype of the computation."""
        if self._v is None:
            self._v = _converted(self.stored_v, self.site.dtype)
        return self._v

    def pack(self) -> None:
        """Lay q, k and v out in C order: a BLAS and einsum add in an order that depends on strides."""
        stored = (self.stored_q, self.stored_k, self.stored_v)
        self.stored_q, self.stored_k, self.stored_v = map(np.ascontiguousarray, stored)
        self._q = self._k = self._v = None

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch axes."""
        return self.site.batch

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.batch, self.site.heads, self.site.q_len, self.site.v_dim)
