r"""Neighbourhood attention: every query sees the keys around it, with a learned scalar per head and difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Dense, Terms
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.schemes.base import MemoryBound, Sample, Site, register
from relpos_np.schemes.checks import same_tokens
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Bools, Int64

VARIANTS = ("nat", "dinat")


def neighborhood_axis(length: int, kernel: int, dilation: int = 1) -> tuple[Bools, Int64]:
    r"""Which coordinates are neighbours along one axis, and how far apart they are in steps of the dilation.

    With dilation :math:`\delta`, coordinate i belongs to the :math:`m_i` coordinates with the same remainder
    by :math:`\delta` and is number :math:`t_i = \lfloor i / \delta \rfloor` of them. Its neighbours are those of the
    same remainder with

    .. math::

        a_i \le t_j < a_i + K, \qquad
        a_i = \min\!\left(\max\!\left(t_i - \lfloor K / 2 \rfloor,\; 0\right),\; m_i - K\right)

    so that at a border the window moves inward and every query has K keys.

    Parameters
    ----------
    length : int
        Number of coordinates.
    kernel : int
        Number of neighbours K, odd.
    dilation : int
        Step between neighbours, with K times the dilation at most `length`.

    Returns
    -------
    near : ndarray of bool, shape (length, length)
        Whether the second is a neighbour of the first.
    step : ndarray of int64, shape (length, length)
        :math:`t_j - t_i`, between -(K-1) and K-1 for neighbours.

    Raises
    ------
    RelposError
        If an argument is no integer, `length` is negative, or another is below 1.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", CVPR 2023; Hassani & Shi, "Dilated Neighborhood
    Attention Transformer", 2022.
    """
    for name, value, least in (("length", length, 0), ("kernel", kernel, 1), ("dilation", dilation, 1)):
        check.integer(name, value, least)
    t, group = np.divmod(np.arange(length), dilation)
    members = -((group - length) // dilation)
    first = np.clip(t - kernel // 2, 0, members - kernel)
    near = (group[:, None] == group) & (t >= first[:, None]) & (t < first[:, None] + kernel)
    return near, t - t[:, None]


def neighborhood_bias(
    table: Array | None, grid: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> Array:
    r"""The bias of every pair of tokens, minus infinity for keys that are no neighbours, written out.

    Parameters
    ----------
    table : ndarray, shape (H, 2 K_1 - 1, 2 K_2 - 1 ...), or None
        One scalar per head and difference, or 0 for all.
    grid, kernel, dilation : sequence of int
        Along each axis the number of tokens, the number of neighbours and the step between them.

    Returns
    -------
    ndarray, shape (H or 1, L, L)
        To be added to the scores of the grid's L tokens, in row-major order.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", CVPR 2023.
    """
    at = np.unravel_index(np.arange(prod(grid)), tuple(grid))
    seen = np.ones((prod(grid),) * 2, np.bool_)
    rows = []
    for c, axis in zip(at, zip(grid, kernel, dilation, strict=True), strict=True):
        near, step = neighborhood_axis(*axis)
        seen &= near[c[:, None], c]
        rows.append(np.clip(step[c[:, None], c] + axis[1] - 1, 0, 2 * axis[1] - 2))
    values = np.zeros((1, 1, 1)) if table is None else np.stack([image[tuple(rows)] for image in table])
    return np.asarray(np.where(seen, values, -np.inf), dtype=values.dtype)


# A model calls with a few grids in turn; the map of one of 64 by 64 tokens has 64 MiB.
@lru_cache(maxsize=8)
def _maps(grid: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[Dense, Bools]:
    """Rows of the flattened table, -1 for keys that are no neighbours; and which are neighbours."""
    index = np.zeros((1, 1), dtype=np.int64)
    for n, k, gap in zip(grid, kernel, dilation, strict=True):
        row = np.full((n, n), -1, dtype=np.int64)
        for i in range(n):
            same = range(i % gap, n, gap)
            start = max(0, min(i // gap - k // 2, len(same) - k))
            for j in same[start : start + k]:
                row[i, j] = (j - i) // gap + k - 1
        # Each axis refines the grid, as in a window; whatever is out along one axis stays out.
        outer, inner = index[:, None, :, None], row[None, :, None, :]
        index = np.where((outer < 0) | (inner < 0), -1, outer * (2 * k - 1) + inner)
        index = index.reshape(index.shape[0] * n, -1)
    flat = np.ascontiguousarray(index, dtype=np.int32)
    near = flat >= 0
    flat.flags.writeable = near.flags.writeable = False
    return Dense(flat, prod(2 * k - 1 for k in kernel)), near


class NeighborhoodBias(LookupScheme):
    r"""Neighbourhood attention on a line, in a plane or in space, optionally dilated.

    .. math::

        s_{ij} = \begin{cases}
        \sigma\, q_i \cdot k_j + T[h, t_j - t_i + K - 1] & j \text{ is a neighbour of } i \\
        -\infty & \text{otherwise}
        \end{cases}

    with the neighbours and steps t of `neighborhood_axis`, along every axis. Differences are key less query, the
    opposite of Swin's. Masks of the call exclude further keys.

    Parameters
    ----------
    table : ndarray, shape (H, 2 K_1 - 1, 2 K_2 - 1 ...), or None
        `rpb` of checkpoints, with as many axes after the first as the grid; None for no bias.
    grid : tuple of int
        Number of tokens along each axis; queries and keys are the same tokens in row-major order.
    kernel : int or tuple of int
        Number of neighbours K along each axis, odd.
    dilation : int or tuple of int
        Step between neighbours along each axis: 1 in NAT (variant "nat"), more in DiNAT ("dinat").

    Raises
    ------
    RelposValueError
        If a kernel is even or, times its dilation, longer than its axis; if the table, the heads or the tokens do
        not match.

    Notes
    -----
    Every pair has a score here, excluded ones too: memory grows with the square of the number of tokens. What keys
    and values hold is seen by the queries whose neighbours they are, and by no other.

    References
    ----------
    Hassani et al., "Neighborhood Attention Transformer", CVPR 2023; Hassani & Shi, "Dilated Neighborhood
    Attention Transformer", 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> table = rng.standard_normal((8, 5, 5))  # for each head and offset of 3 x 3 neighbours
    >>> rp.attention(q, k, v, position=rp.NeighborhoodBias(table, (7, 7), kernel=3)).shape
    (2, 8, 49, 64)
    """

    def __init__(
        self, table: Any, grid: Sequence[int], kernel: int | Sequence[int], dilation: int | Sequence[int] = 1
    ) -> None:
        if not isinstance(grid, tuple | list) or not 1 <= len(grid) <= 3:
            raise RelposTypeError(f"grid: expected one to three lengths such as (14, 14), found {shown(grid)}")
        self.grid = tuple(check.integer("grid", n, 1) for n in grid)
        self.kernel = self._along("kernel", kernel)
        self.dilation = self._along("dilation", dilation)
        for n, k, gap in zip(self.grid, self.kernel, self.dilation, strict=True):
            if k % 2 == 0:
                raise RelposValueError(f"kernel: expected odd numbers, found {kernel}")
            if k * gap > n:
                raise RelposValueError(
                    f"kernel: {k} times the dilation {gap} exceeds the axis of {n} in grid {self.grid}"
                )
        sides = tuple(2 * k - 1 for k in self.kernel)
        self.table = None if table is None else check.table("table", table, " ".join(["heads", *map(str, sides)]))
        if self.table is not None and self.table.shape[1:] != sides:
            raise RelposValueError(
                f"table: kernel {self.kernel} needs shape (heads, {', '.join(map(str, sides))}), "
                f"found {self.table.shape}"
            )

    def _along(self, name: str, value: Any) -> tuple[int, ...]:
        """One integer per axis."""
        given = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * len(self.grid)
        if len(given) != len(self.grid):
            raise RelposValueError(f"{name}: expected {len(self.grid)} integers as in grid, found {shown(value)}")
        return tuple(check.integer(name, n, 1) for n in given)

    def check(self, site: Site) -> None:
        """The table must be for the call's heads, and the grid hold its tokens."""
        check.heads("table", self.table, 0, site)
        same_tokens(self.grid, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return neighborhood_bias(self.table, self.grid, self.kernel, self.dilation).astype(site.dtype, copy=False)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A table term on a dense map, and a bias that excludes whatever the map does not reach."""
        terms, near = super().lower(q, k, site), self._maps()[1]
        terms.biases = (np.where(near, site.dtype.type(0), site.dtype.type(-np.inf)),)
        return terms

    def _maps(self) -> tuple[Dense, Bools]:
        return _maps(self.grid, self.kernel, self.dilation)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        if self.table is not None:
            yield Lookup("table", "tables", self.table.reshape(len(self.table), -1), lambda: self._maps()[0])

    def memory_bound(self, site: Site) -> MemoryBound:
        """The map, also where there is no table."""
        return super().memory_bound(site).with_maps(site)


@register(
    "neighborhood",
    NeighborhoodBias,
    adds="a window that slides with the query",
    paper="Hassani et al., CVPR 2023; Hassani & Shi, 2022",
    doi="10.48550/arXiv.2204.07143",
    variants=VARIANTS,
    models="NAT, DiNAT",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    # As many neighbours as a small grid has, an odd number.
    gaps = tuple(min(2, n) if at.variant == "dinat" else 1 for n in at.grid)
    kernel = tuple(min(k, (n // gap - 1) // 2 * 2 + 1) for k, n, gap in zip((3, 5), at.grid, gaps, strict=True))
    length = at.grid[0] * at.grid[1]
    parts = at.operands(4, 2, length, length)
    given = at.pick(True, False)
    table = at.normal(parts["q"].shape[-3], *(2 * k - 1 for k in kernel)) if given else None
    return {**parts, "position": NeighborhoodBias(table, at.grid, kernel, gaps)}
