r"""Relative positions of images (iRPE): vectors or scalars per bucket, for queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Dense
from relpos_np.errors import RelposValueError
from relpos_np.formulas.softmax import weighted_vectors
from relpos_np.schemes.base import MemoryBound, Sample, Site, evaluated, register
from relpos_np.schemes.checks import plane, same_tokens, vectors
from relpos_np.schemes.lookups import Lookup, LookupScheme
from relpos_np.types import Array, Int64

Method: TypeAlias = Literal["product", "euclidean", "quantization", "cross"]
METHODS = get_args(Method)
Mode: TypeAlias = Literal["contextual", "bias"]
MODES = get_args(Mode)
# The terms of each table of vectors: of the query with those of its keys, of the key with those of its queries.
_KINDS: dict[str, Literal["queries", "keys", "values"]] = {
    "key_table": "queries",
    "query_table": "keys",
    "value_table": "values",
}
# What decides between two buckets is rounded to this many decimals, so that an exact half is one.
_DECIMALS = 9
_LEAST = 1e-100


def piecewise_index(x: Int64, *, alpha: float = 1.9, beta: float = 3.8, gamma: float = 15.2) -> Int64:
    r"""Near offsets as they are, far ones on a logarithmic scale, up to a largest one.

    .. math::

        g(x) = \begin{cases} x & |x| \le \alpha \\
        \operatorname{sign}(x) \min\!\left(\lfloor\beta\rfloor,\; \left[\alpha +
        \frac{\ln(|x| / \alpha)}{\ln(\gamma / \alpha)} (\beta - \alpha)\right]\right) & |x| > \alpha
        \end{cases}

    with [ ] the nearest integer, the even one where two are equally near.

    Parameters
    ----------
    x : ndarray of int
        Offsets.
    alpha, beta, gamma : float
        Up to where offsets are exact, the largest index, and the offset that reaches it.

    Returns
    -------
    ndarray of int64
        Between -floor(beta) and floor(beta).

    Notes
    -----
    The logarithm is taken in float64 and the bracket rounded to 9 decimals first, so that a half is met as one.
    Published code takes it in float32. For its own settings, (alpha, beta, gamma) = c (1, 2, 8) with c = 1.9 for
    "product", 20 for "euclidean" and "cross" and 33 for "quantization", no distance below 4000 gets another index
    there.

    References
    ----------
    Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", ICCV 2021.
    """
    x = check.integers("x", x).astype(np.int64)
    distance = np.maximum(np.abs(x), alpha)
    y = alpha + np.log(distance / alpha) / np.log(gamma / alpha) * (beta - alpha)
    far = np.minimum(np.rint(np.round(y, _DECIMALS)), np.floor(beta)) * np.sign(x)
    return np.where(np.abs(x) <= alpha, x, far).astype(np.int64)


def irpe_buckets(
    grid: Sequence[int],
    *,
    method: Method = "product",
    alpha: float = 1.9,
    beta: float = 3.8,
    gamma: float = 15.2,
    class_tokens: int = 0,
) -> Int64:
    r"""Table row of each pair of tokens.

    With the offset (Δy, Δx) of the first less that of the second, g from `piecewise_index` and
    :math:`b = \lfloor\beta\rfloor`,

    .. math::

        g\!\left(\left[\sqrt{\Delta y^2 + \Delta x^2}\right]\right) + b, \qquad
        g(\Delta y^2 + \Delta x^2) + b, \qquad
        (g(\Delta y) + b)(2b + 1) + g(\Delta x) + b

    for "euclidean", "quantization" and "product". "cross" has two maps, g(Δy) + b and g(Δx) + b.

    Parameters
    ----------
    grid : tuple of int
        Height and width of the image in tokens.
    method : {"product", "euclidean", "quantization", "cross"}
        How the offset becomes a number.
    alpha, beta, gamma : float
        See `piecewise_index`.
    class_tokens : int
        Number of tokens before those of the image. Pairs with one of them share a row of their own, the last.

    Returns
    -------
    ndarray of int64, shape (maps, L, L)
        L = class_tokens + height times width; one map, or two for "cross".

    References
    ----------
    Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", ICCV 2021.
    """
    y, x = (axis.ravel() for axis in np.indices(tuple(grid)))
    down, right = y[:, None] - y, x[:, None] - x
    b = math.floor(beta)

    def g(offset: Int64) -> Int64:
        return piecewise_index(offset, alpha=alpha, beta=beta, gamma=gamma) + b

    if method == "euclidean":
        maps = [g(np.rint(np.sqrt(down**2 + right**2)).astype(np.int64))]
    elif method == "quantization":
        maps = [g(down**2 + right**2)]
    else:
        maps = [g(down) * (2 * b + 1) + g(right)] if method == "product" else [g(down), g(right)]
    rows = (2 * b + 1) ** (2 if method == "product" else 1)
    ahead = [(0, 0), (class_tokens, 0), (class_tokens, 0)]
    return np.pad(np.stack(maps), ahead, constant_values=rows)


def _index_of(distance: int, alpha: float, beta: float, gamma: float) -> int:
    """The bucket of one distance, without its sign."""
    if distance <= alpha:
        return distance
    y = alpha + (beta - alpha) * math.log(distance / alpha) / math.log(gamma / alpha)
    return min(int(beta), round(round(y, _DECIMALS)))


# A model calls with a few grids in turn; the map of one of 64 by 64 tokens has 64 MiB.
@lru_cache(maxsize=8)
def _maps(
    grid: tuple[int, int], method: str, alpha: float, beta: float, gamma: float, class_tokens: int
) -> tuple[tuple[Dense, Dense], ...]:
    """The same for the kernels, one lookup per offset spread over the tokens; also for the pairs (j, i)."""
    height, width = grid
    b = int(beta)
    down, right = (range(1 - n, n) for n in grid)
    signed = {
        d: int(math.copysign(_index_of(abs(d), alpha, beta, gamma), d)) + b for d in range(1 - max(grid), max(grid))
    }
    if method == "product":
        lookups = [[[signed[dy] * (2 * b + 1) + signed[dx] for dx in right] for dy in down]]
    elif method == "cross":
        lookups = [[[signed[dy] for _ in right] for dy in down], [[signed[dx] for dx in right] for _ in down]]
    else:
        squares = [[dy * dy + dx * dx for dx in right] for dy in down]
        if method == "euclidean":
            # The nearest integer r to a root has r(r-1) < n <= r(r+1): a root is never halfway.
            squares = [[(math.isqrt(4 * n) + 1) // 2 for n in line] for line in squares]
        lookups = [[[_index_of(n, alpha, beta, gamma) + b for n in line] for line in squares]]
    rows = (2 * b + 1) ** (2 if method == "product" else 1) + (class_tokens > 0)
    length = class_tokens + height * width
    y, x = np.divmod(np.arange(height * width), width)
    maps = []
    for lookup in lookups:
        index = np.full((length, length), rows - 1, dtype=np.int32)
        index[class_tokens:, class_tokens:] = np.array(lookup)[y[:, None] - y + height - 1, x[:, None] - x + width - 1]
        pair = index, np.ascontiguousarray(index.T)
        for one in pair:
            one.flags.writeable = False
        maps.append((Dense(pair[0], rows), Dense(pair[1], rows)))
    return tuple(maps)


class IRPE(LookupScheme):
    r"""Image relative position encoding on keys, queries and values.

    .. math::

        s_{ij} = \sigma \left( q_i \cdot k_j + q_i \cdot R^K_{h, b(i, j)} + k_j \cdot R^Q_{h, b(j, i)} \right), \qquad
        o_i = \sum_j p_{ij} \left( v_j + R^V_{h, b(i, j)} \right)

    in the contextual mode, and in the bias mode, whose numbers are not scaled,

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + R^K_{h, b(i, j)} + R^Q_{h, b(j, i)}

    with the buckets b of `irpe_buckets`. The vectors of queries use the offset in the other direction: the
    published code looks them up for (key, query) and transposes.

    Parameters
    ----------
    grid : tuple of int
        Height and width of the image in tokens; tokens are counted row by row.
    key_table, query_table, value_table : ndarray, optional
        Contextual: shape (H or 1, buckets, D), with a first axis of 1 shared by the heads; the published
        ``rpe_k`` and ``rpe_q`` store (H or 1, D, buckets), ``rpe_v`` as here. Bias: shape (H or 1, buckets), and
        none for values. For method "cross" a further axis of 2 comes first: by rows, then by columns. At least
        one is needed.
    mode : {"contextual", "bias"}
        Vectors or numbers.
    method : {"product", "euclidean", "quantization", "cross"}
        See `irpe_buckets`. There are :math:`(2\lfloor\beta\rfloor + 1)^2` buckets for "product", otherwise
        :math:`2\lfloor\beta\rfloor + 1`, and one more with class tokens.
    alpha, beta, gamma : float
        See `piecewise_index`, also for the published settings of each method.
    class_tokens : int
        Tokens before those of the image (`skip`); their pairs share the last bucket.

    Raises
    ------
    RelposValueError
        If no table is given, or shapes do not match the buckets, the heads, the channels or the tokens; if not
        1e-100 <= alpha <= beta, alpha < gamma <= 1e100 and beta at least 1.

    References
    ----------
    Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", ICCV 2021.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> table = rng.standard_normal((8, 49, 64))  # a vector for each head and bucket
    >>> rp.attention(q, k, v, position=rp.IRPE((7, 7), key_table=table)).shape
    (2, 8, 49, 64)
    """

    def __init__(
        self,
        grid: Sequence[int],
        key_table: Any = None,
        query_table: Any = None,
        value_table: Any = None,
        *,
        mode: Mode = "contextual",
        method: Method = "product",
        alpha: float = 1.9,
        beta: float = 3.8,
        gamma: float = 15.2,
        class_tokens: int = 0,
    ) -> None:
        self.grid = plane("grid", grid)
        self.mode = check.choice("mode", mode, MODES)
        self.method = check.choice("method", method, METHODS)
        self.alpha, self.beta, self.gamma = (
            check.real(name, x) for name, x in (("alpha", alpha), ("beta", beta), ("gamma", gamma))
        )
        self.class_tokens = check.integer("class_tokens", class_tokens, 0)
        # Beyond these sizes, which no grid needs, quotients of them would leave the range of float64.
        bounded = self.alpha >= _LEAST and self.gamma <= 1 / _LEAST
        if not (bounded and self.alpha <= self.beta and self.alpha < self.gamma and self.beta >= 1):
            raise RelposValueError(
                f"alpha, beta, gamma: expected {_LEAST} <= alpha <= beta, alpha < gamma <= {1 / _LEAST} and beta >= 1, "
                f"found {self.alpha}, {self.beta}, {self.gamma}"
            )
        if mode == "bias" and value_table is not None:
            raise RelposValueError("value_table: values have no bias; use mode='contextual'")
        self.key_table = None if key_table is None else self._table("key_table", key_table)
        self.query_table = None if query_table is None else self._table("query_table", query_table)
        self.value_table = None if value_table is None else self._table("value_table", value_table)
        if key_table is None and query_table is None and value_table is None:
            raise RelposValueError("key_table: at least one of the tables is needed")

    def _table(self, name: str, value: Any) -> Array:
        axes = "heads buckets" + (" head_dim" if self.mode == "contextual" else "")
        table = check.table(name, value, f"2 {axes}" if self.method == "cross" else axes)
        side = 2 * math.floor(self.beta) + 1
        buckets = side ** (2 if self.method == "product" else 1) + (self.class_tokens > 0)
        lead = table.shape[: 2 if self.method == "cross" else 1]
        if table.shape[len(lead)] != buckets or (self.method == "cross" and lead[0] != 2):
            wanted = "(2, heads, " if self.method == "cross" else "(heads, "
            raise RelposValueError(f"{name}: expected {wanted}{buckets} buckets ...), found shape {table.shape}")
        return table

    def check(self, site: Site) -> None:
        """Tables must match the heads and channels, and the grid the call's tokens."""
        for name, table in self._tables().items():
            of_values, axis = name == "value_table", 1 if self.method == "cross" else 0
            if of_values and site.scores_only:
                continue
            if table.shape[axis] != 1:
                check.heads(name, table, axis, site)
            if self.mode == "contextual":
                vectors(name, table, site.v_dim if of_values else site.head_dim, site, per_head=False)
        same_tokens(self.grid, site, self.class_tokens)

    def _looked_up(self, table: Array, site: Site) -> list[tuple[Array, Array]]:
        """For each map the entries of pairs (i, j), and those of (j, i) in the same place."""
        buckets = evaluated(irpe_buckets, self, site)
        tables = (table if self.method == "cross" else table[None]).astype(site.dtype, copy=False)
        return [(t[:, rows], t[:, rows.T]) for t, rows in zip(tables, buckets, strict=True)]

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """What keys' and queries' entries add."""
        total: Array | None = None
        scale = site.dtype.type(site.scale)
        for table, x, letters, turned in (
            (self.key_table, q, "...id,...ijd->...ij", 0),
            (self.query_table, k, "...jd,...ijd->...ij", 1),
        ):
            for entries in [] if table is None else self._looked_up(table, site):
                r = entries[turned]
                added = r if self.mode == "bias" else np.einsum(letters, x, r) * scale
                total = added if total is None else total + added
        return total

    def outputs(self, p: Array, site: Site) -> Array | None:
        """Vectors of values weighted by the probabilities."""
        if self.value_table is None:
            return None
        parts = [weighted_vectors(p, r) for r, _ in self._looked_up(self.value_table, site)]
        return np.asarray(sum(parts[1:], parts[0]))

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        for n in range(2 if self.method == "cross" else 1):
            for name, table in self._tables().items():
                kind = "tables" if self.mode == "bias" else _KINDS[name]
                own = np.asarray(table[n] if self.method == "cross" else table)
                index = partial(self._map, n, name == "query_table")
                yield Lookup(name, kind, own, index, scaled=kind in ("queries", "keys"))

    def _map(self, n: int, mirrored: bool) -> Dense:
        """The rows of one table, of pairs (i, j) or (j, i)."""
        return _maps(self.grid, self.method, self.alpha, self.beta, self.gamma, self.class_tokens)[n][mirrored]

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula gathers a vector for every pair, in both directions."""
        pairs, sizes = site.q_len * site.k_len, 0
        for table in self._tables().values():
            sizes += 2 * table[..., 0, :].size if self.mode == "contextual" else 2 * table[..., 0].size
        bound = super().memory_bound(site)
        return replace(bound, formula=bound.formula + pairs * sizes * site.dtype.itemsize)

    def _tables(self) -> dict[str, Array]:
        """The tables that there are, by name."""
        tables = {"key_table": self.key_table, "query_table": self.query_table, "value_table": self.value_table}
        return {name: table for name, table in tables.items() if table is not None}


@register(
    "irpe",
    IRPE,
    adds="piecewise indices in two dimensions, on scores, queries, keys, values",
    paper="Wu et al., ICCV 2021",
    doi="10.48550/arXiv.2107.14222",
    equation="section 3",
    variants=(*METHODS, "bias"),
    models="DeiT with iRPE",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    tokens = at.pick(1, 0, 2)
    length = tokens + at.grid[0] * at.grid[1]
    parts = at.operands(4, 2, length, length)
    mode: Mode = "bias" if at.variant == "bias" else "contextual"
    method: Method
    method = "product" if mode == "bias" else at.variant or "product"
    buckets = (49 if method == "product" else 7) + (tokens > 0)
    maps = (2,) if method == "cross" else ()
    vectors = () if mode == "bias" else (at.dim,)
    tables = {
        "key_table": at.normal(*maps, 1, buckets, *vectors),
        "query_table": at.normal(*maps, parts["q"].shape[-3], buckets, *vectors),
        "value_table": None if mode == "bias" else at.normal(*maps, 1, buckets, at.v_dim),
    }
    # All of them, or one alone.
    kept = at.pick(
        tuple(tables), ("key_table",), ("query_table",), ("query_table" if mode == "bias" else "value_table",)
    )
    position = IRPE(
        at.grid,
        **{name: tables[name] for name in kept},
        mode=mode,
        method=method,
        # Lower limits than the published ones, so that small grids have offsets beyond them.
        alpha=1.5,
        beta=3.0,
        gamma=6.0,
        class_tokens=tokens,
    )
    return {**parts, "position": position}
