r"""BEiT: one learned scalar per head and difference of patch coordinates, with three for the class token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import grid_map
from relpos_np._contract.terms import Dense
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Sample, Site, register
from relpos_np.schemes.checks import plane, same_tokens
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Int64


def beit_index(grid: Sequence[int]) -> Int64:
    r"""Table row of each pair of tokens, of which the first is the class token.

    With heights y, widths x, the grid (H, W) and R = (2H-1)(2W-1),

    .. math::

        r(i, j) = (y_i - y_j + H - 1)(2W - 1) + x_i - x_j + W - 1

    for patches i and j, R from the class token to a patch, R + 1 from a patch to the class token and R + 2
    from the class token to itself. The first of a pair is the query.

    Parameters
    ----------
    grid : tuple of int
        Number of patches along height and width.

    Returns
    -------
    ndarray of int64, shape (1 + H W, 1 + H W)
        Rows of a table with R + 3 entries.

    References
    ----------
    Bao et al., "BEiT: BERT Pre-Training of Image Transformers", ICLR 2022.
    """
    height, width = grid
    y, x = np.divmod(np.arange(height * width), width)
    rows = (2 * height - 1) * (2 * width - 1)
    index = np.empty((height * width + 1,) * 2, dtype=np.int64)
    index[1:, 1:] = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    index[0, :], index[:, 0], index[0, 0] = rows, rows + 1, rows + 2
    return index


# A model calls with a few grids in turn; the map of one of 64 by 64 tokens has 64 MiB.
@lru_cache(maxsize=8)
def _map(grid: tuple[int, int]) -> Dense:
    """The same from the map of a window, for the kernels."""
    side = [np.arange(n) for n in grid]
    window = grid_map(side, side, grid)
    index = np.pad(window.index, ((1, 0), (1, 0)), constant_values=window.rows)
    index[1:, 0] += 1
    index[0, 0] += 2
    index.flags.writeable = False
    return Dense(index, window.rows + 3)


class BEiT(LookupScheme):
    r"""Learned bias of a window with a class token in front.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + T[r(i, j), h]

    with the rows r of `beit_index`: those of `WindowBias`, and three more. BEiT, BEiT v2 and data2vec-vision
    store this table per layer, or once for all layers. For another number of patches, resize the table with
    `relpos_np.reference.resize_table` and ``extra_rows=3``.

    Parameters
    ----------
    table : ndarray, shape ((2H-1)(2W-1) + 3, heads)
        `relative_position_bias_table` of checkpoints.
    grid : tuple of int
        Number of patches along height and width. The call's tokens are the class token and the patches, row
        by row.

    Raises
    ------
    RelposValueError
        If the table's rows do not match the grid, or the call has other tokens or heads.

    Notes
    -----
    Published codes agree on square grids. transformers passes the table through a resizing that takes
    height for width; on a grid that is no square it therefore reads
    ``resize_table(table, (W, H), (H, W), mode="linear", extra_rows=3)``, also where nothing is to be resized.

    References
    ----------
    Bao et al., "BEiT: BERT Pre-Training of Image Transformers", ICLR 2022; Baevski et al., "data2vec",
    ICML 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 50, 64))  # (batch, heads, class token and 7 x 7, D)
    >>> table = rng.standard_normal((13 * 13 + 3, 8))
    >>> rp.attention(q, k, v, position=rp.BEiT(table, (7, 7))).shape
    (2, 8, 50, 64)
    """

    def __init__(self, table: Any, grid: Sequence[int]) -> None:
        self.table = check.table("table", table, "rows heads")
        self.grid = plane("grid", grid)
        rows = prod(2 * n - 1 for n in self.grid) + 3
        if len(self.table) != rows:
            raise RelposValueError(f"table: grid {self.grid} needs {rows} rows, found shape {self.table.shape}")

    def check(self, site: Site) -> None:
        """The table must have a column per head, and the call the tokens of the grid."""
        check.heads("table", self.table, 1, site)
        same_tokens(self.grid, site, 1)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.moveaxis(self.table.astype(site.dtype, copy=False)[beit_index(self.grid)], -1, 0)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        yield Lookup("table", "tables", self.table.T, lambda: _map(self.grid), np.transpose)


@register(
    "beit",
    BEiT,
    adds="a window's bias with a class token",
    paper="Bao et al., ICLR 2022",
    doi="10.48550/arXiv.2106.08254",
    models="BEiT, data2vec vision",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    height, width = at.grid
    length = 1 + height * width
    parts = at.operands(3, 3, length, length)
    position = BEiT(at.normal((2 * height - 1) * (2 * width - 1) + 3, parts["q"].shape[-3]), at.grid)
    return {**parts, "position": position}
