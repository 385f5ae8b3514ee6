r"""Layout bias of document models: buckets of positions in the text and of places on the page."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import bucket_rows, t5_map
from relpos_np._contract.terms import IndexMap, of_batch
from relpos_np.errors import RelposTypeError, RelposValueError, shown
from relpos_np.formulas.buckets import ROUNDING, Rounding, bucket_table, t5_bucket
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, Site, register
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Int64

Variant: TypeAlias = Literal["layoutlmv2", "layoutlmv3", "udop"]
VARIANTS = get_args(Variant)
# Largest distances on the page that are told apart, as published configurations have them.
_BOX_DISTANCE = {"layoutlmv2": 256, "layoutlmv3": 256, "udop": 100}
# Beyond these a distance in the units of the buckets would not fit into an integer.
_LARGEST, _LARGEST_FACTOR = 2.0**31, 2.0**20


def layout_distance(coordinates: Array, *, factor: float | None = None, queries: slice = slice(None)) -> Int64:
    r"""Distance between the places of every two tokens along one axis, in the units of the buckets.

    .. math::

        d_{ij} = c_j - c_i, \qquad d_{ij} = \operatorname{trunc}\big(F (c_j - c_i)\big)

    for integers, and for fractions of the page with a factor F, rounded towards zero.

    Parameters
    ----------
    coordinates : ndarray, shape (..., L)
        Places c of the tokens.
    factor : float, optional
        F; without it coordinates are integers. Products are rounded to the dtype of the coordinates.
    queries : slice
        Tokens i; default all.

    Returns
    -------
    ndarray of int64, shape (..., L_q, L)
        Place of token j less that of token i.
    """
    if factor is None:
        return np.asarray(coordinates[..., None, :] - coordinates[..., queries, None], dtype=np.int64)
    apart = (coordinates[..., None, :] - coordinates[..., queries, None]) * coordinates.dtype.type(factor)
    return np.asarray(np.trunc(apart), dtype=np.int64)


def layout_bias(
    table: Array | None,
    x_table: Array,
    y_table: Array,
    boxes: Array,
    *,
    positions: Int64 | None = None,
    variant: Variant = "layoutlmv2",
    max_distance: int = 128,
    max_box_distance: int | None = None,
    factor: float = 100.0,
    rounding: Rounding = "exact",
    queries: slice = slice(None),
) -> Array:
    """The bias between every two tokens of a page, written out, without the scale.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H), or None
        One scalar per bucket of positions and head.
    x_table, y_table : ndarray, shape (num_buckets, H)
        The same per bucket of horizontal and of vertical distances.
    boxes : ndarray, shape (..., L, 4)
        Left, top, right and bottom of each token.
    positions : ndarray of int, shape (..., L), optional
        Positions of the tokens in the text; default 0 ... L - 1.
    variant : {"layoutlmv2", "layoutlmv3", "udop"}
        Which point of a box counts; see `LayoutBias`.
    max_distance : int
        Distances in the text from here on share a bucket.
    max_box_distance : int, optional
        The same on the page; default 256, for "udop" 100.
    factor : float
        Only for "udop", whose boxes are fractions of the page.
    rounding : {"exact", "float32"}
        See `t5_bucket`; fractions of the page are computed with in float64 or in float32.
    queries : slice
        Tokens that are queries; default all.

    Returns
    -------
    ndarray, shape (..., H, L_q, L)
        To be added to the scores; "layoutlmv3" multiplies it by the scale of the scores first.
    """
    left, top, right, bottom = np.moveaxis(boxes, -1, 0)
    if variant == "udop":
        left, top, right, bottom = np.moveaxis(boxes.astype(np.float32 if rounding == "float32" else np.float64), -1, 0)
        distances = [
            layout_distance(c, factor=factor, queries=queries) for c in ((left + right) / 2, (top + bottom) / 2)
        ]
    else:
        distances = [layout_distance(c, queries=queries) for c in (left, bottom)]
    on_page = _BOX_DISTANCE[variant] if max_box_distance is None else max_box_distance
    tables, furthest = [x_table, y_table], [on_page, on_page]
    if table is not None:
        own = np.arange(boxes.shape[-2]) if positions is None else positions
        distances.append(layout_distance(own, queries=queries))
        tables, furthest = [*tables, table], [*furthest, max_distance]
    bias = np.zeros((), x_table.dtype)
    for d, rows, largest in zip(distances, tables, furthest, strict=True):
        bucket = t5_bucket(d, num_buckets=len(rows), max_distance=largest, rounding=rounding)
        bias = bias + np.moveaxis(rows[bucket], -1, -3)
    return bias


class LayoutBias(LookupScheme):
    r"""Bias of LayoutLMv2, LayoutLMv3 and UDOP: buckets of the distances in the text, across and down the page.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + B_{ij}, \qquad
        B_{ij} = T[b(p_j - p_i), h] + T^x[b(x_j - x_i), h] + T^y[b(y_j - y_i), h]

    with the bidirectional buckets b of `T5`, positions p and places x, y of the tokens' boxes (left, top,
    right, bottom). The variants are those of published code:

    - "layoutlmv2": x is the left edge and y the *bottom* edge, integers from 0 to 1000. 32 buckets up to
      distance 128 in the text, 64 buckets up to 256 on the page.
    - "layoutlmv3": the same, but the sum is divided by the root of head_dim along with the product:
      :math:`s_{ij} = \sigma\, (q_i \cdot k_j + B_{ij})`. If its configuration asks for boxes without
      positions, its code adds nothing at all.
    - "udop": x and y are the middle of the box, fractions of the page (floating point); a distance is
      multiplied by `factor` = 100 and rounded towards zero. 32 buckets throughout, up to distance 128 in
      the text and 100 on the page. Checkpoints take ``scale=1.0``. Only its encoder has this bias, the
      decoder has `T5`'s. Not here: its augmentation while training, and buckets of a prefix.

    Tokens of images (patches) have boxes like words, and their positions may start from 0 again: pass
    `positions`. Query i is the token of key i + M, with the call's offset M, so one box per key is enough.
    The index map takes memory of L_q L_k per batch item, and is kept for the next call.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H), or None
        One scalar per bucket of positions and head; None for boxes alone. Checkpoints of LayoutLM store
        this and the other tables transposed.
    x_table, y_table : ndarray, shape (num_buckets, H)
        The same for places across and down the page.
    boxes : ndarray, shape (..., L_k, 4)
        Left, top, right and bottom of every token, per batch item: integers, for "udop" floating point.
    positions : ndarray of int, shape (..., L_k), optional
        Positions in the text; default 0 ... L_k - 1.
    variant : {"layoutlmv2", "layoutlmv3", "udop"}
        Whose.
    max_distance : int
        Distances in the text from here on share a bucket.
    max_box_distance : int, optional
        The same on the page; default 256, in "udop" 100.
    factor : float, optional
        What "udop" multiplies a distance by; default 100.
    rounding : {"exact", "float32"}
        How borders of buckets are decided, see `T5`. For "udop" also what places and distances are computed
        in: float64, or float32 as published. Fractions of a page fall on borders often, and there the two
        differ: (0.58 - 0.29) * 100 is 28.999999999999996 in float64 and 29 in float32.

    Raises
    ------
    RelposError
        If shapes or dtypes do not fit, a coordinate is not finite or beyond 2**31, or a query is none of the keys.

    References
    ----------
    Xu et al., "LayoutLMv2: Multi-modal Pre-training for Visually-Rich Document Understanding", ACL 2021;
    Huang et al., "LayoutLMv3: Pre-training for Document AI with Unified Text and Image Masking", ACM
    Multimedia 2022; Tang et al., "Unifying Vision, Text, and Layout for Universal Document Processing",
    CVPR 2023.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> x, y = np.sort(rng.integers(0, 1000, (2, 2, 10, 2)))  # left and right, top and bottom
    >>> boxes = np.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], axis=-1)
    >>> table, x_table, y_table = (rng.standard_normal((n, 8)) for n in (32, 64, 64))
    >>> rp.attention(q, k, v, position=rp.LayoutBias(table, x_table, y_table, boxes)).shape
    (2, 8, 10, 64)
    """

    def __init__(
        self,
        table: Any,
        x_table: Any,
        y_table: Any,
        boxes: Any,
        *,
        positions: Any = None,
        variant: Variant = "layoutlmv2",
        max_distance: int = 128,
        max_box_distance: int | None = None,
        factor: float | None = None,
        rounding: Rounding = "exact",
    ) -> None:
        self.variant = check.choice("variant", variant, VARIANTS)
        self.rounding = check.choice("rounding", rounding, ROUNDING)
        self.max_distance = check.integer("max_distance", max_distance, 1)
        self.max_box_distance = (
            _BOX_DISTANCE[variant]
            if max_box_distance is None
            else check.integer("max_box_distance", max_box_distance, 1)
        )
        self.table = None if table is None else bucket_table("table", table, self.max_distance)
        self.x_table, self.y_table = (
            bucket_table(name, value, self.max_box_distance, "max_box_distance")
            for name, value in (("x_table", x_table), ("y_table", y_table))
        )
        heads = {t.shape[1] for t in (self.table, self.x_table, self.y_table) if t is not None}
        if len(heads) > 1:
            found = [None if t is None else t.shape for t in (self.table, self.x_table, self.y_table)]
            raise RelposValueError(f"table, x_table, y_table: shapes {found} are for different numbers of heads")
        if factor is not None and variant != "udop":
            raise RelposValueError(f"factor: only 'udop' has one, found {shown(factor)} for {variant!r}")
        self.factor = factor if factor is None else check.real("factor", factor)
        self._factor = 100.0 if self.factor is None else self.factor
        if not 0 < self._factor <= _LARGEST_FACTOR:
            raise RelposValueError(f"factor: expected more than 0 and at most {_LARGEST_FACTOR:g}, found {factor}")
        self._boxes = self._coordinates("boxes", boxes)
        self._positions = None
        if positions is not None:
            if self.table is None:
                raise RelposValueError("positions: nothing reads them, as table is None")
            self._positions = _integers("positions", positions)
            if self._positions.shape[-1:] != self._boxes.shape[-2:-1]:
                raise RelposValueError(
                    f"positions: expected shape (..., {self._boxes.shape[-2]}) as of boxes {self._boxes.shape}, "
                    f"found {self._positions.shape}"
                )
        self._maps: tuple[tuple[int, int], list[IndexMap]] | None = None

    @property
    def boxes(self) -> Array:
        """Left, top, right and bottom of every token, (..., L_k, 4), as a read-only copy; without a gradient."""
        return self._boxes

    @property
    def positions(self) -> Int64 | None:
        """Positions in the text, int64 of shape (..., L_k), as a copy; None for 0 ... L_k - 1."""
        return self._positions

    def _coordinates(self, name: str, value: Any) -> Array:
        """A copy of the boxes: int64, or the floating point of "udop"."""
        if self.variant == "udop":
            if check.array(name, value).dtype.kind in "iub":
                raise RelposTypeError(f"{name}: 'udop' expects fractions of the page, found {value.dtype}")
            boxes = check.floating(name, value).copy()
            if not (np.abs(boxes) <= _LARGEST).all():
                raise RelposValueError(f"{name}: expected finite numbers up to 2**31, found {_first_beyond(boxes)}")
        else:
            boxes = _integers(name, value)
        if boxes.ndim < 2 or boxes.shape[-1] != 4:
            raise RelposValueError(f"{name}: expected shape (..., L_k, 4), found {boxes.shape}")
        boxes.flags.writeable = False
        return boxes

    def check(self, site: Site) -> None:
        """There must be a column per head, a box per key, and a key for each query."""
        check.heads("x_table", self.x_table, 1, site)
        if self._boxes.shape[-2] != site.k_len:
            raise RelposValueError(f"boxes: {self._boxes.shape[-2]} of them, the call has {site.k_len} keys")
        if site.offset < 0 or site.offset + site.q_len > site.k_len:
            raise RelposValueError(
                f"offset: queries at {site.offset} ... {site.offset + site.q_len - 1} are not among "
                f"the {site.k_len} keys, which have the boxes"
            )
        for name, axes in (
            ("boxes", self._boxes.shape[:-2]),
            ("positions", () if self._positions is None else self._positions.shape[:-1]),
        ):
            check.fits_batch(name, axes, site.batch)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair: the rows of the tokens that are queries."""
        bias = layout_bias(
            None if self.table is None else self.table.astype(site.dtype),
            self.x_table.astype(site.dtype),
            self.y_table.astype(site.dtype),
            self._boxes,
            positions=self._positions,
            variant=self.variant,
            max_distance=self.max_distance,
            max_box_distance=self.max_box_distance,
            factor=self._factor,
            rounding=self.rounding,
            queries=slice(site.offset, site.offset + site.q_len),
        )
        return bias * site.dtype.type(site.scale) if self.variant == "layoutlmv3" else bias

    def _tables(self) -> dict[str, Array]:
        """Tables by attribute, in the order of the maps."""
        named = {"x_table": self.x_table, "y_table": self.y_table, "table": self.table}
        return {name: table for name, table in named.items() if table is not None}

    def _index(self, site: Site) -> list[IndexMap]:
        """Maps of the queries and keys of a call; those of the last call are kept."""
        key = (site.q_len, site.offset)
        if self._maps is None or self._maps[0] != key:
            queries = slice(site.offset, site.offset + site.q_len)
            maps: list[IndexMap] = []
            for table, place in zip((self.x_table, self.y_table), self._places(), strict=True):
                d = self._apart(place, queries)
                maps.append(bucket_rows(d, len(table), self.max_box_distance, self.rounding))
            if self.table is not None and self._positions is None:
                rows, last = len(self.table), self.max_distance
                maps.append(t5_map(site.q_len, site.k_len, site.offset, rows, last, True, self.rounding))
            elif self.table is not None and self._positions is not None:
                d = np.subtract(self._positions[..., None, :], self._positions[..., queries, None])
                maps.append(bucket_rows(d, len(self.table), self.max_distance, self.rounding))
            self._maps = key, maps
        return self._maps[1]

    def _places(self) -> tuple[Array, Array]:
        """Where tokens are across and down the page: (..., L_k) each."""
        edges = [self._boxes[..., n] for n in range(4)]
        if self.variant != "udop":
            # The left edge, but not the top one.
            return edges[0], edges[3]
        unit = np.dtype(np.float32 if self.rounding == "float32" else np.float64)
        x0, y0, x1, y1 = (edge.astype(unit) for edge in edges)
        return np.add(x0, x1) * unit.type(0.5), np.add(y0, y1) * unit.type(0.5)

    def _apart(self, place: Array, queries: slice) -> Int64:
        """Distances in the units of the buckets: (..., L_q, L_k)."""
        apart = np.subtract(place[..., None, :], place[..., queries, None])
        if self.variant == "udop":
            apart = np.multiply(apart, apart.dtype.type(self._factor))
        # Casting rounds towards zero.
        return apart.astype(np.int64)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        for (name, table), index in zip(self._tables().items(), self._index(site), strict=True):
            yield Lookup(name, "tables", table.T, index, np.transpose, scaled=self.variant == "layoutlmv3")

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """A page whose first tokens are the queries, and the others the keys."""
        here, rest = part.nearby(site)
        cut = copy.copy(self)
        at = np.concatenate([np.arange(s.start, s.stop) + m for s, m in ((part.queries, site.offset), (part.keys, 0))])
        cut._boxes = of_batch(self._boxes, 2, part.batch)[..., at, :]
        if self.table is not None:
            cut._positions = at if self._positions is None else of_batch(self._positions, 1, part.batch)[..., at]
        cut._maps = None
        page = replace(here, k_len=len(at), offset=0)
        return cut, page, replace(rest, keys=slice(here.q_len, len(at)))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Maps per page and axis; distances are integers of 64 bit."""
        pages = math.prod(self._boxes.shape[:-2])
        formula = Scheme.memory_bound(self, site).formula + 112 * pages * site.q_len * site.k_len
        return MemoryBound(formula).with_maps(site, pages)


def _integers(name: str, value: Any) -> Int64:
    """A copy in int64 of an integer array of moderate numbers."""
    x = check.array(name, value)
    if x.dtype.kind not in "iu":
        raise RelposTypeError(f"{name}: expected integers, found {x.dtype}")
    if x.ndim == 0:
        raise RelposValueError(f"{name}: expected at least one axis, found shape {x.shape}")
    if x.size and (x.min() < -_LARGEST or x.max() > _LARGEST):
        raise RelposValueError(f"{name}: expected integers up to 2**31, found {x.min()} ... {x.max()}")
    return x.astype(np.int64)


def _first_beyond(x: Array) -> float:
    return float(x[~(np.abs(x) <= _LARGEST)].flat[0])


@register(
    "layout",
    LayoutBias,
    adds="buckets of distances in the text and on the page",
    paper="Xu et al., ACL 2021; Tang et al., CVPR 2023",
    doi="10.48550/arXiv.2012.14740",
    variants=VARIANTS,
    models="LayoutLMv2, LayoutLMv3, UDOP",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads, dtype = parts["q"].shape[-3], parts["q"].dtype
    # Words about the middle of a page of 1000 units, some outside: left and top, right and bottom.
    corner, extent = at.normal(*at.batch, at.k_len, 2) * 250 + 500, np.abs(at.normal(*at.batch, at.k_len, 2)) * 40
    boxes = np.rint(np.concatenate([corner, corner + extent], axis=-1).astype(np.float64))
    mask = np.ones((*at.batch, 1, 1, at.k_len), dtype=np.bool_)
    mask[1:, ..., at.k_len - at.k_len // 3 :] = False
    kwargs = {"mask": mask, "scale": 0.25}
    if at.variant == "udop":
        tables = at.normal(32, heads), at.normal(32, heads), at.normal(32, heads)
        # Hundredths are borders, where single precision decides otherwise.
        places = boxes / 1024 if at.pick(True, False) else np.rint(boxes / 10) / 100
        options: dict[str, Any] = {"rounding": at.pick("exact", "float32"), "factor": at.pick(None, 50.0)}
        position = LayoutBias(*tables, places.astype(dtype), variant="udop", **options)
        return {**parts, "position": position, "kwargs": kwargs}
    # The last third are patches of an image, whose positions start again.
    words = at.k_len - at.k_len // 3
    tables = at.normal(32, heads), at.normal(64, heads), at.normal(64, heads)
    of = at.pick("all", "none", "each", "boxes")
    positions = np.arange(at.k_len) % max(words, 1) if of == "all" else None
    if of == "each":
        positions = np.floor(np.abs(at.normal(*at.batch, at.k_len)).astype(np.float64) * 90).astype(np.int64)
    position = LayoutBias(
        None if of == "boxes" else tables[0],
        *tables[1:],
        # One page for all items, or one for each.
        (boxes[(0,) * len(at.batch)] if at.pick(False, True) else boxes).astype(np.int64),
        positions=positions,
        rounding=at.pick("exact", "float32"),
        variant=at.variant or "layoutlmv2",
        max_distance=at.pick(128, 40),
        max_box_distance=at.pick(None, 999),
    )
    return {**parts, "position": position, "kwargs": kwargs}
