"""One validated call of attention, as the schemes and every backend see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from relpos_np._contract.index_maps import relative_positions
from relpos_np._contract.sequences import Sequences
from relpos_np.types import Array, Int64

# A band without a limit on one side: far beyond any length, far below overflow.
UNBOUNDED = 1 << 60


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, which takes 2 µs to make."""
    return dtype.name


@dataclass(slots=True, eq=False)
class Site:
    """What a scheme may know of the call it is lowered for.

    Query i stands at position i + offset among the keys, so its relative position to key j is
    j - (i + offset).

    Attributes
    ----------
    heads, kv_heads : int
        Heads H of queries and H_kv of keys and values.
    q_len, k_len : int
        Queries L_q and keys L_k.
    head_dim, v_dim : int
        Channels D of queries and keys, and D_v of values.
    offset : int
        Position of the first query among the keys.
    right : int
        The largest relative position that is attended (0 if causal).
    scale : float
        Factor of the content product.
    dtype : dtype
        Of the computation: float32 or float64.
    scores_only : bool
        Whether there are no values.
    batch : tuple of int
        Batch axes.
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

    def relative_positions(self) -> Int64:
        """Every j - (i + offset) once, in the order of the lookup of `Toeplitz`.

        Returns
        -------
        ndarray of int64, shape (L_q + L_k - 1,)
            From the smallest one up; none for a call without queries or keys.
        """
        return relative_positions(self.q_len, self.k_len, self.offset)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a call.

    Attributes
    ----------
    batch : tuple of slice
        Of each batch axis.
    heads, kv_heads : slice
        Of the heads of queries and of keys.
    queries, keys : slice
        Of queries and of keys.
    """

    batch: tuple[slice, ...]
    heads: slice
    kv_heads: slice
    queries: slice
    keys: slice

    def nearby(self, site: Site) -> tuple[Site, Part]:
        """The call cut to the part, with all of its heads.

        Parameters
        ----------
        site : Site
            The whole call.

        Returns
        -------
        tuple of Site and Part
            And the part as that call sees it.
        """
        here, _ = self.alone(site)
        here = replace(here, heads=site.heads, kv_heads=site.kv_heads)
        return here, replace(self.of(here), heads=self.heads, kv_heads=self.kv_heads)

    def alone(self, site: Site) -> tuple[Site, Part]:
        """The call cut to the part.

        Parameters
        ----------
        site : Site
            The whole call.

        Returns
        -------
        tuple of Site and Part
            And all of it.
        """
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
        """All of a call.

        Parameters
        ----------
        site : Site
            The call.

        Returns
        -------
        Part
            Every range from 0 on.
        """
        batch = tuple(slice(0, n) for n in site.batch)
        return cls(batch, *(slice(0, n) for n in (site.heads, site.kv_heads, site.q_len, site.k_len)))


class Rule:
    """Which keys a query may attend, by their places; see `rules.py`."""

    # Whether the rule is causal itself.
    causal = False
    # Keys are this many positions apart.
    step = 1

    def ranges(self, site: Site) -> Array | None:  # noqa: ARG002
        """The first key of each query and the one after its last, int64 (..., L_q, 2); None if it may attend all."""
        return None

    def of_items(self, items: tuple[slice, ...]) -> Rule:  # noqa: ARG002
        """The rule for some items along each batch axis."""
        return self


def converted(x: Array, dtype: np.dtype[Any]) -> Array:
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
    The mask was given with one row for all heads, `mask_of_heads`, and for all queries, `mask_of_keys`. `precision`:
    one that was chosen.
    `unplaced`: lengths of keys are given, and of where fewer queries stand nothing is said.
    `scales`: `stored_k` and `stored_v` are codes, to be multiplied by these, for the one kernel that reads them.
    `sequences`: each is attended alone; the operands have the rows of all, and `site` has every position of any. Where
    they lie in pages, `stored_k` and `stored_v` stand for what may only be read page by page.
    `ranges`, (*batch, L_q, 2), and `step` are what a rule says: the first key of each query and the one after its last,
    and the distance between keys. `softcap`: c of c tanh(s / c), 0 for none; `cap_content`: of the products alone.
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
    mask_of_heads: bool = False
    mask_of_keys: bool = False
    precision: str | None = None
    ranges: Array | None = None
    step: int = 1
    softcap: float = 0.0
    cap_content: bool = False
    sequences: Sequences | None = None
    unplaced: bool = False
    scales: tuple[Array, ...] | None = None
    _q: Array | None = field(init=False, default=None)
    _k: Array | None = field(init=False, default=None)
    _v: Array | None = field(init=False, default=None)

    @property
    def q(self) -> Array:
        """Queries in the dtype of the computation."""
        if self._q is None:
            self._q = converted(self.stored_q, self.site.dtype)
        return self._q

    @property
    def k(self) -> Array:
        """Keys in the dtype of the computation."""
        if self._k is None:
            self._k = converted(self.stored_k, self.site.dtype)
        return self._k

    @property
    def v(self) -> Array:
        """Values in the dtype of the computation."""
        if self._v is None:
            self._v = converted(self.stored_v, self.site.dtype)
        return self._v

    @property
    def is_paged(self) -> bool:
        """Whether keys and values lie in pages."""
        return self.sequences is not None and self.sequences.pages is not None

    @property
    def stored(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values as they are stored."""
        return self.stored_q, self.stored_k, self.stored_v

    def with_values(self, v: Array) -> Problem:
        """The call with values that a scheme has made, in the dtype of the computation."""
        other = replace(self, stored_v=v)
        other._q, other._k = self._q, self._k
        return other

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
    def is_banded(self) -> bool:
        """Whether positions decide which pairs are attended."""
        return self.left < UNBOUNDED or self.right < UNBOUNDED or self.ranges is not None or self.step > 1

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        rows = self.site.q_len if self.sequences is None else self.stored_q.shape[-2]
        return (*self.batch, self.site.heads, rows, self.site.v_dim)
