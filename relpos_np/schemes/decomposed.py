r"""SAM, ViTDet and MViTv2: products of queries with a vector per difference of rows and one per column difference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Dense, QueryTerm, Terms
from relpos_np.errors import RelposValueError
from relpos_np.formulas.buckets import ROUNDING, Rounding
from relpos_np.formulas.resize_tables import resize_matrix
from relpos_np.schemes.base import MemoryBound, Sample, Scheme, SchemeGradient, Site, evaluated, register
from relpos_np.schemes.checks import plane, tokens, vectors
from relpos_np.types import Array, Int64

VARIANTS = ("sam", "mvit")
Grid = tuple[int, int]


def axis_rows(q_size: int, k_size: int, *, rounding: Rounding = "exact") -> Int64:
    r"""Table row of each pair of coordinates along one axis, which queries and keys may sample differently.

    .. math::

        r(i, j) = \left\lfloor i \max\!\left(\tfrac{K}{Q}, 1\right) + (K - 1 - j) \max\!\left(\tfrac{Q}{K}, 1\right)
        \right\rfloor

    which is i - j + Q - 1 for Q = K.

    Parameters
    ----------
    q_size, k_size : int
        Number of coordinates of queries Q and of keys K.
    rounding : {"exact", "float32"}
        See `DecomposedBias`.

    Returns
    -------
    ndarray of int64, shape (Q, K)
        Rows of a table with 2 max(Q, K) - 1 entries.

    References
    ----------
    Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection", CVPR 2022.
    """
    i, j = np.arange(q_size)[:, None], np.arange(k_size)
    if rounding == "float32":
        wide, narrow = (np.float32(max(x, 1.0)) for x in (k_size / q_size, q_size / k_size))
        first = np.float32((k_size - 1) * max(q_size / k_size, 1.0))
        return ((i.astype(np.float32) * wide - j.astype(np.float32) * narrow) + first).astype(np.int64)
    if k_size > q_size:
        return np.asarray(i * k_size // q_size + (k_size - 1 - j))
    rows: Int64 = (i * k_size + (k_size - 1 - j) * q_size) // k_size
    return rows


def decomposed_scores(
    q: Array,
    height_table: Array,
    width_table: Array,
    grid: Sequence[int],
    key_grid: Sequence[int],
    *,
    rounding: Rounding = "exact",
) -> Array:
    r"""What both tables add to the scores, written out.

    .. math::

        b_{ij} = q_i \cdot R^h_{r(y_i, y_j)} + q_i \cdot R^w_{r(x_i, x_j)}

    with the rows r of `axis_rows` along heights y and widths x. A table with another number of rows is
    interpolated linearly to 2 max(Q, K) - 1 rows first, centres of its rows aligned, its ends repeated.

    Parameters
    ----------
    q : ndarray, shape (..., Q_h Q_w, D)
        Queries on their grid, without a class token.
    height_table, width_table : ndarray, shape (rows, D)
        Vectors of differences, along height and along width.
    grid, key_grid : tuple of int
        Heights and widths (Q_h, Q_w) and (K_h, K_w).
    rounding : {"exact", "float32"}
        See `DecomposedBias`.

    Returns
    -------
    ndarray, shape (..., Q_h Q_w, K_h K_w)
        In the dtype of q; not scaled.

    References
    ----------
    Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection", CVPR 2022.
    """
    vectors = []
    for table, q_size, k_size in zip((height_table, width_table), grid, key_grid, strict=True):
        rows, old = 2 * max(q_size, k_size) - 1, len(table)
        # Hats over the old rows, at the new rows' centres; places in halves of a new row, exactly.
        place = np.clip((2 * np.arange(rows) + 1) * old - rows, 0, 2 * rows * (old - 1))
        hats = np.maximum(0, 1 - np.abs(place[:, None] - 2 * rows * np.arange(old)) / (2 * rows))
        vectors.append((hats @ table).astype(q.dtype)[axis_rows(q_size, k_size, rounding=rounding)])
    image = q.reshape(*q.shape[:-2], *grid, q.shape[-1])
    down = np.einsum("...yxd,yud->...yxu", image, vectors[0])
    right = np.einsum("...yxd,xvd->...yxv", image, vectors[1])
    both = down[..., :, None] + right[..., None, :]
    return np.asarray(both.reshape(*q.shape[:-1], prod(key_grid)))


# A model calls with a few grids in turn; the map of one of 64 by 64 tokens has 64 MiB.
@lru_cache(maxsize=8)
def _maps(query: Grid, key: Grid, rounding: str, class_token: bool) -> tuple[Dense, Dense]:
    """Rows of both tables for every pair of tokens; the class token has none."""
    tokens_q, tokens_k = (np.indices(grid).reshape(2, -1) for grid in (query, key))
    maps = []
    for axis in (0, 1):
        rows = np.array(
            [[_row(i, j, query[axis], key[axis], rounding) for j in range(key[axis])] for i in range(query[axis])]
        )
        index = rows[tokens_q[axis][:, None], tokens_k[axis]].astype(np.int32)
        index = np.pad(index, ((int(class_token), 0), (int(class_token), 0)), constant_values=-1)
        index.flags.writeable = False
        maps.append(Dense(index, 2 * max(query[axis], key[axis]) - 1))
    return maps[0], maps[1]


def _row(i: int, j: int, q_size: int, k_size: int, rounding: str) -> int:
    """The row of one pair of coordinates."""
    if rounding == "exact":
        # The ratio that is not 1 is large / small; it belongs to the side with fewer coordinates.
        large, small = max(q_size, k_size), min(q_size, k_size)
        return i + (k_size - 1 - j) * large // small if q_size > k_size else i * large // small + k_size - 1 - j
    single = np.float32
    at_q, at_k = single(i) * single(max(k_size / q_size, 1)), single(j) * single(max(q_size / k_size, 1))
    return int(at_q - at_k + single((k_size - 1) * max(q_size / k_size, 1)))


class DecomposedBias(Scheme):
    r"""Decomposed relative positions: the vector of a pair is the sum of one for its rows and one for its columns.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + q_i \cdot R^h_{r(y_i, y_j)} + q_i \cdot R^w_{r(x_i, x_j)}

    with the rows r of `axis_rows`, query less key. The query in the added products is not scaled, in SAM,
    ViTDet and MViTv2 alike. Tables are shared by the heads.

    Parameters
    ----------
    height_table, width_table : ndarray, shape (rows, D)
        `rel_pos_h` and `rel_pos_w` of checkpoints; rows is 2 max(Q, K) - 1 along their axis.
    grid : tuple of int
        Height and width of the queries' grid; tokens are counted row by row.
    key_grid : tuple of int, optional
        The same for keys, where they are pooled; default `grid`.
    variant : {"sam", "mvit"}
        - "sam": a table with another number of rows is interpolated linearly (SAM, ViTDet).
        - "mvit": it is refused (MViTv2, whose code would read the wrong rows or beyond the table).
    class_token : bool
        Whether a class token stands before the queries and before the keys, as in MViTv2; it adds nothing.
    rounding : {"exact", "float32"}
        How rows are decided where one grid's length does not divide the other's: by fractions, or in the
        float32 arithmetic of published code, where for instance for 8 queries and 6 keys products such as
        6 (8/6) fall below the integer that they should be.

    Raises
    ------
    RelposValueError
        If the number of tokens, of rows ("mvit") or of channels does not match.

    References
    ----------
    Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection", CVPR 2022;
    Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection" (ViTDet), ECCV 2022;
    Kirillov et al., "Segment Anything", ICCV 2023.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> height, width = rng.standard_normal((2, 13, 64))  # SAM's `rel_pos_h` and `rel_pos_w`
    >>> rp.attention(q, k, v, position=rp.DecomposedBias(height, width, (7, 7))).shape
    (2, 8, 49, 64)
    """

    reads_operand_values = False

    def __init__(
        self,
        height_table: Any,
        width_table: Any,
        grid: Sequence[int],
        key_grid: Sequence[int] | None = None,
        *,
        variant: Literal["sam", "mvit"] = "sam",
        class_token: bool = False,
        rounding: Rounding = "exact",
    ) -> None:
        self.height_table = check.table("height_table", height_table, "rows head_dim")
        self.width_table = check.table("width_table", width_table, "rows head_dim")
        self.grid = plane("grid", grid)
        self.key_grid = self.grid if key_grid is None else plane("key_grid", key_grid)
        self.variant = check.choice("variant", variant, VARIANTS)
        self.class_token = check.flag("class_token", class_token)
        self.rounding = check.choice("rounding", rounding, ROUNDING)
        if self.width_table.shape[1] != self.height_table.shape[1]:
            raise RelposValueError(
                f"width_table: shape {self.width_table.shape} has other vectors than height_table's "
                f"{self.height_table.shape}"
            )
        for name, table, rows in self.needed():
            if variant == "mvit" and len(table) != rows:
                raise RelposValueError(
                    f"{name}: grids {self.grid} and {self.key_grid} need {rows} rows, found shape {table.shape}; "
                    "resize it, or use variant='sam'"
                )

    def needed(self) -> list[tuple[str, Array, int]]:
        """How many rows the grids need along each axis.

        Returns
        -------
        list of (str, ndarray, int)
            Name and table of the axis, and its rows.
        """
        rows = [2 * max(sizes) - 1 for sizes in zip(self.grid, self.key_grid, strict=True)]
        return [("height_table", self.height_table, rows[0]), ("width_table", self.width_table, rows[1])]

    def check(self, site: Site) -> None:
        """The grids must hold the call's tokens, and the vectors have the call's head_dim."""
        vectors("height_table", self.height_table, site.head_dim, site)
        tokens("grid", self.grid, site.q_len, int(self.class_token))
        tokens("key_grid", self.key_grid, site.k_len, int(self.class_token))

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """Products of the queries with both vectors."""
        start = 1 if self.class_token else 0
        added = np.asarray(evaluated(decomposed_scores, self, site, q=q[..., start:, :]))
        if start:
            added = np.pad(added, [(0, 0)] * (added.ndim - 2) + [(1, 0), (1, 0)])
        return added

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One query term along each axis."""
        maps = _maps(self.grid, self.key_grid, self.rounding, self.class_token)
        terms = []
        for index, (_, table, rows) in zip(maps, self.needed(), strict=True):
            weights = table if len(table) == rows else resize_matrix(len(table), rows, "linear") @ table
            terms.append(QueryTerm(q, weights.astype(site.dtype, copy=False)[None], index))
        return Terms(queries=tuple(terms))

    def memory_bound(self, site: Site) -> MemoryBound:
        """A map of every pair."""
        return super().memory_bound(site).with_maps(site)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Back through the interpolation of the tables."""
        arrays = {}
        for term, (name, table, rows) in zip(grad.queries, self.needed(), strict=True):
            weights = term.weights[0]
            arrays[name] = weights if len(table) == rows else resize_matrix(len(table), rows, "linear").T @ weights
        return SchemeGradient(q=grad.queries[0].query + grad.queries[1].query, arrays=arrays)


@register(
    "decomposed",
    DecomposedBias,
    adds="a vector per row and per column difference",
    paper="Li et al., CVPR 2022; Kirillov et al., ICCV 2023",
    doi="10.48550/arXiv.2112.01526",
    equation="4",
    variants=VARIANTS,
    models="SAM, ViTDet, MViTv2",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    height, width = at.grid
    if at.variant == "mvit":
        # Keys are pooled and there is a class token.
        keys, token = ((height + 1) // 2, (width + 1) // 2), at.pick(True, False)
        down, right = (at.normal(2 * n - 1, at.dim) / 4 for n in at.grid)
        position = DecomposedBias(down, right, at.grid, keys, variant="mvit", class_token=token)
        return {**at.operands(3, 3, token + height * width, token + keys[0] * keys[1]), "position": position}
    # One table is that of a larger grid, the other that of a smaller one.
    down, right = (at.normal(rows, at.dim) / 4 for rows in (2 * height + 2, width))
    keys, token = at.pick(at.grid, (height, 2 * width), ((height + 1) // 2, width)), at.pick(False, True)
    position = DecomposedBias(down, right, at.grid, keys if keys != at.grid else None, class_token=token)
    return {**at.operands(3, 3, token + height * width, token + keys[0] * keys[1]), "position": position}
