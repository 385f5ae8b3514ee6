r"""Windows: one learned scalar per head and difference of grid coordinates (Swin, Video Swin, RSTT)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import grid_map
from relpos_np._contract.terms import IndexMap
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.schemes.base import Sample, Site, register
from relpos_np.schemes.checks import tokens
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Int64

Coordinates = Sequence[Int64]


def window_index(query: Coordinates, key: Coordinates, extent: Sequence[int]) -> Int64:
    r"""Table row of each query and key token of a window.

    .. math::

        r = \sum_a (c^q_a - c^k_a + E_a - 1) \prod_{b > a} (2 E_b - 1)

    over the axes a (frame, height, width) with coordinates c and extents E.

    Parameters
    ----------
    query, key : sequence of ndarray of int
        Coordinates along each axis; tokens are their product in row-major order.
    extent : sequence of int
        Extent E of the grid along each axis.

    Returns
    -------
    ndarray of int64, shape (L_q, L_k)
        Rows of a table with the product of 2E-1 entries.

    References
    ----------
    Liu et al., "Swin Transformer", ICCV 2021; Geng et al., "RSTT", CVPR 2022.
    """
    tokens_q = np.stack([c.ravel() for c in np.meshgrid(*query, indexing="ij")])
    tokens_k = np.stack([c.ravel() for c in np.meshgrid(*key, indexing="ij")])
    sizes = [2 * e - 1 for e in extent]
    shifted = tokens_q[:, :, None] - tokens_k[:, None, :] + np.asarray(extent)[:, None, None] - 1
    for axis, size in zip(shifted, sizes, strict=True):
        check.rows("query, key", axis, size)
    index = np.ravel_multi_index(tuple(shifted), tuple(sizes))
    return np.asarray(index, dtype=np.int64)


def rstt_frames(num_frames_q: int, num_frames_kv: int) -> Int64:
    """Frame coordinates of keys by RSTT's rule: every s-th query frame, s = (F_q + 1) // F_kv.

    Parameters
    ----------
    num_frames_q, num_frames_kv : int
        Number of query frames F_q and key frames F_kv.

    Returns
    -------
    ndarray of int64
        Coordinates 0, s, 2s ... below F_q.

    Raises
    ------
    RelposValueError
        If the rule does not yield F_kv frames, as for most pairs; it does for F_q = 2 F_kv - 1.
    """
    step = (num_frames_q + 1) // num_frames_kv
    frames = np.arange(0, num_frames_q, step) if step else np.arange(0)
    if len(frames) != num_frames_kv:
        raise RelposValueError(
            f"num_frames_kv: RSTT's rule finds {len(frames)} key frames among {num_frames_q}, not {num_frames_kv}; "
            "pass frames="
        )
    return frames


class WindowBias(LookupScheme):
    r"""Learned bias for tokens on a grid, with separate grids for queries and keys.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + T[r(i, j), h]

    with the rows r of `window_index`. Relative coordinates are query less key, the opposite of the
    sign that T5 and Shaw use.

    Parameters
    ----------
    table : ndarray, shape (rows, H)
        rows is the product of 2E-1 over the axes, E being `extent`.
    grid : tuple of int
        Lengths of the query grid along each axis, such as (Wh, Ww) or (frames, Wh, Ww).
    key_grid : tuple of int, optional
        The same for keys; default `grid`.
    key_coords : tuple, optional
        For each axis None, meaning 0, 1, 2 ..., or the coordinates of the keys in units of the query
        grid, such as the frames that keys come from.
    extent : tuple of int, optional
        Extent of the table's grid along each axis; default `grid`. A larger one serves
        a table trained on a larger window.

    Raises
    ------
    RelposValueError
        If the table's rows do not match, or a pair of coordinates lies outside the table.

    References
    ----------
    Liu et al., "Swin Transformer", ICCV 2021; Liu et al., "Video Swin Transformer", CVPR 2022;
    Geng et al., "RSTT: Real-time Spatial Temporal Transformer for Space-Time Video
    Super-Resolution", CVPR 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> table = rng.standard_normal((13 * 13, 8))  # Swin's `relative_position_bias_table`
    >>> rp.attention(q, k, v, position=rp.WindowBias(table, (7, 7))).shape
    (2, 8, 49, 64)
    """

    def __init__(
        self,
        table: Any,
        grid: Sequence[int],
        key_grid: Sequence[int] | None = None,
        *,
        key_coords: Sequence[Any] | None = None,
        extent: Sequence[int] | None = None,
    ) -> None:
        self.table = check.table("table", table, "rows heads")
        self.grid = _grid("grid", grid)
        coords = _coords(key_coords, len(self.grid))
        self.key_coords = None if key_coords is None else tuple(coords)
        if key_grid is None:
            key_grid = [n if c is None else len(c) for n, c in zip(self.grid, coords, strict=True)]
        self.key_grid = _grid("key_grid", key_grid)
        self.extent = self.grid if extent is None else _grid("extent", extent)
        for name, sizes in (("key_grid", self.key_grid), ("extent", self.extent)):
            if len(sizes) != len(self.grid):
                raise RelposValueError(f"{name}: expected {len(self.grid)} axes as in grid, found {sizes}")
        self._coords = coords
        for axis, (n, given) in enumerate(zip(self.key_grid, coords, strict=True)):
            if given is not None and len(given) != n:
                raise RelposValueError(f"key_coords: axis {axis} has {len(given)} coordinates, key_grid has {n}")
            first, last = (0, n - 1) if given is None else (int(given.min()), int(given.max()))
            low, high = -last, self.grid[axis] - 1 - first
            reach = self.extent[axis] - 1
            if low < -reach or high > reach:
                raise RelposValueError(
                    f"key_coords: on axis {axis} query less key spans {low} ... {high}, "
                    f"extent {self.extent[axis]} covers {-reach} ... {reach}; pass a larger extent="
                )
        rows = prod(2 * e - 1 for e in self.extent)
        if len(self.table) != rows:
            raise RelposValueError(f"table: extent {self.extent} needs {rows} rows, found shape {self.table.shape}")

    @cached_property
    def _query(self) -> list[Int64]:
        return [np.arange(n) for n in self.grid]

    @cached_property
    def _key(self) -> list[Int64]:
        return [np.arange(n) if c is None else c for n, c in zip(self.key_grid, self._coords, strict=True)]

    # Made by the first call that has as many tokens: a grid in a file can be of any size.
    @cached_property
    def _map(self) -> IndexMap:
        return grid_map(self._query, self._key, self.extent)

    @classmethod
    def rstt(
        cls, table: Any, num_frames_q: int, num_frames_kv: int, grid: Sequence[int], frames: Any = None
    ) -> WindowBias:
        """RSTT's window attention between video frames, self or cross.

        Parameters
        ----------
        table : ndarray, shape ((2 F_q - 1)(2 Wh - 1)(2 Ww - 1), H)
            `relative_position_bias_table` of the published module.
        num_frames_q, num_frames_kv : int
            Number of query frames F_q and key frames F_kv.
        grid : tuple of int
            Window height and width (Wh, Ww).
        frames : sequence of int, optional
            Coordinates of the key frames among the query frames; default `rstt_frames`.

        Returns
        -------
        WindowBias
            With grids (F_q, Wh, Ww) and (F_kv, Wh, Ww).
        """
        window = _grid("grid", grid)
        f_q = check.integer("num_frames_q", num_frames_q, 1)
        f_kv = check.integer("num_frames_kv", num_frames_kv, 1)
        coords = (rstt_frames(f_q, f_kv) if frames is None else frames, *([None] * len(window)))
        return cls(table, (f_q, *window), (f_kv, *window), key_coords=coords)

    def check(self, site: Site) -> None:
        """The grids must hold the call's tokens, and the table a column per head."""
        check.heads("table", self.table, 1, site)
        tokens("grid", self.grid, site.q_len)
        tokens("key_grid", self.key_grid, site.k_len)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        index = window_index(self._query, self._key, self.extent)
        return np.moveaxis(self.table.astype(site.dtype, copy=False)[index], -1, 0)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        yield Lookup("table", "tables", self.table.T, lambda: self._map, np.transpose)


def _grid(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RelposTypeError(f"{name}: expected a tuple of lengths such as (7, 7), found {shown(value)}")
    return tuple(check.integer(name, n, 1) for n in value)


def _coords(value: Any, axes: int) -> list[Int64 | None]:
    if value is None:
        return [None] * axes
    single = isinstance(value, str) or (isinstance(value, np.ndarray) and value.ndim == 0)
    if single or not isinstance(value, Sequence | np.ndarray):
        raise RelposTypeError(f"key_coords: expected a tuple with an entry for each axis, found {type(value).__name__}")
    if len(value) != axes:
        raise RelposValueError(f"key_coords: expected one entry per axis, {axes}; found {len(value)}")
    out: list[Int64 | None] = []
    for c in value:
        if c is None:
            out.append(None)
            continue
        points = check.integers("key_coords", c)
        if points.ndim != 1 or not points.size:
            raise RelposTypeError(f"key_coords: expected integers along an axis, found {shown(c)}")
        out.append(points.astype(np.int64))
    return out


@register(
    "window",
    WindowBias,
    adds="a scalar per coordinate difference and head",
    paper="Liu et al., ICCV 2021; Geng et al., CVPR 2022",
    doi="10.48550/arXiv.2103.14030",
    equation="4",
    variants=("swin", "video", "rstt"),
    options="one to three axes, keys anywhere",
    models="Swin, Video Swin, Donut, RSTT",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    height, width = at.grid
    if at.variant in (None, "swin"):
        # More keys than queries across, of which the first stand where the queries do.
        more = at.pick(0, 2)
        parts = at.operands(3, 3, height * width, height * (width + more))
        extent = height, width + more
        table = at.normal((2 * extent[0] - 1) * (2 * extent[1] - 1), parts["q"].shape[-3])
        return {**parts, "position": WindowBias(table, at.grid, extent if more else None, extent=extent)}
    frames = at.frames if at.variant == "rstt" else (at.frames[0], at.frames[0])
    height, width = (height + 1) // 2, (width + 1) // 2
    parts = at.operands(3, 3, *(n * height * width for n in frames))
    rows = (2 * frames[0] - 1) * (2 * height - 1) * (2 * width - 1)
    table = at.normal(rows, parts["q"].shape[-3])
    if at.variant == "video":
        return {**parts, "position": WindowBias(table, (frames[0], height, width))}
    return {**parts, "position": WindowBias.rstt(table, *frames, (height, width))}
