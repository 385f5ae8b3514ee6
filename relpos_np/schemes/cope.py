r"""CoPE: positions that count only the keys which a query wants counted, and fall between whole numbers."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.counted import CountedBias
from relpos_np._contract.terms import Terms, fit
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, in_order, register
from relpos_np.schemes.checks import vectors
from relpos_np.types import Array

VARIANTS = ("paper", "ram")


def contextual_positions(gates: Array, npos: int) -> Array:
    r"""Position of every key as its query counts them.

    .. math::

        p_{ij} = \min\Big(\sum_{t \ge j} g_{it},\; n - 1\Big)

    Parameters
    ----------
    gates : ndarray, shape (..., L_q, L_k)
        How much each key counts, from 0 to 1; 0 for keys after the query's own.
    npos : int
        Number n of positions that have a vector.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        Positions between 0 and n - 1.

    References
    ----------
    Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important", 2024, eq. 4.
    """
    return np.asarray(np.minimum(np.flip(np.cumsum(np.flip(gates, axis=-1), axis=-1), axis=-1), npos - 1))


def cope_scores(q: Array, table: Array, positions: Array) -> Array:
    r"""Products of queries with the vectors of positions between whole numbers.

    .. math::

        z_i[p] = (p - \lfloor p \rfloor)\, q_i \cdot e[\lceil p \rceil] +
        (1 - p + \lfloor p \rfloor)\, q_i \cdot e[\lfloor p \rfloor]

    Parameters
    ----------
    q : ndarray, shape (..., H, L_q, D)
        Queries.
    table : ndarray, shape (n, D) or (H, n, D)
        Vectors e of whole positions.
    positions : ndarray, shape (..., H, L_q, L_k)
        Positions p from 0 to n - 1.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        One product per pair, not scaled.

    References
    ----------
    Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important", 2024, eq. 5 and 8.
    """
    whole = q @ np.swapaxes(table, -1, -2)
    below, above = np.floor(positions), np.ceil(positions)
    for row in (below, above):
        check.rows("positions", row, table.shape[-2])
    z_below, z_above = (np.take_along_axis(whole, x.astype(np.intp), axis=-1) for x in (below, above))
    weight = positions - below
    return np.asarray(weight * z_above + (1 - weight) * z_below)


class CoPE(Scheme):
    r"""Contextual position encoding.

    .. math::

        g_{ij} = \operatorname{sigmoid}(\sigma\, q_i \cdot k_j), \qquad
        p_{ij} = \min\Big(\sum_{t=j}^{i+M} g_{it},\; n - 1\Big), \qquad
        s_{ij} = \sigma\, q_i \cdot k_j + q_i \cdot e[p_{ij}]

    with :math:`e[p]` between two whole positions on the straight line from one vector to the next. The sum begins at
    the last key that the call's ``causal`` and ``window`` let the query see (the query's own in a causal call), so
    that later keys are not counted; without either it begins at the last key, as published code does without a mask.
    A scheme does not see the call's ``mask`` and ``key_lengths``: keys that these hide are counted here, except
    where their products with the query are NaN. Published code does not count them. For the same positions
    say so in `counted`; padding behind the keys of a causal call needs no such thing.

    Everything about positions is computed in float64. The scores are a bias that no table can say: a number for every
    pair, which the CPU kernels make for some queries at a time, in memory of L_k per head, and all other backends at
    once. In the CPU kernels a query needs gates for no key before the one at which it has counted to n - 1.

    Parameters
    ----------
    table : ndarray, shape (n, D) or (H, n, D)
        Vectors e[0] ... e[n-1], shared by all heads or one set per head; published code stores them as
        `pos_emb` (1, D, n). Position 0 occurs if no gate is open, so that L keys need up to n = L + 1.
    variant : {"paper", "ram"}
        "paper": the products with e are not scaled, as in the listing of the paper's appendix. "ram": they are
        multiplied by :math:`\sigma` like q·k, as in the authors' repository facebookresearch/RAM, unless its
        `cope_nodiv` is set. In both the gates see scaled products. Weights are not interchangeable.
    gate_key : ndarray, shape (..., H_kv, L_k, D), optional
        Keys for the gates alone, from a projection of their own (`cope_sep_key`); the values for
        `cope_val_gates`.
    counted : ndarray of bool, optional
        Broadcastable to (..., H, L_q, L_k): keys that may be counted. It hides none: that is the call's ``mask``.

    Raises
    ------
    RelposValueError
        If shapes do not fit the call.
    RelposTypeError
        If `counted` is not of bool.

    References
    ----------
    Golovneva et al., "Contextual Position Encoding: Learning to Count What's Important", 2024.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> table = rng.standard_normal((16, 64))  # for each position that a sum of gates may reach
    >>> rp.attention(q, k, v, position=rp.CoPE(table), causal=True).shape
    (2, 8, 10, 64)
    """

    @property
    def token_independent(self) -> bool:  # type: ignore[override]
        """Gates and pairs that are given belong to the tokens of one call."""
        return self.gate_key is None and self.counted is None

    def __init__(
        self, table: Any, *, variant: Literal["paper", "ram"] = "paper", gate_key: Any = None, counted: Any = None
    ) -> None:
        self.table = check.table("table", table, "npos head_dim | heads npos head_dim")
        self.variant = check.choice("variant", variant, VARIANTS)
        self.gate_key = None if gate_key is None else check.ordered("gate_key", gate_key)
        if self.gate_key is not None and self.gate_key.ndim < 3:
            raise RelposValueError(f"gate_key: expected shape (..., H_kv, L_k, D), found {self.gate_key.shape}")
        self.counted = None if counted is None else check.array("counted", counted)
        if self.counted is not None and self.counted.dtype != np.bool_:
            raise RelposTypeError(f"counted: expected bool, True where a key counts, found dtype {self.counted.dtype}")

    def check(self, site: Site) -> None:
        """Vectors must match the queries, and what is given per key its shape."""
        vectors("table", self.table, site.head_dim, site)
        wanted = (site.kv_heads, site.k_len, site.head_dim)
        if self.gate_key is not None:
            if self.gate_key.shape[-3:] != wanted:
                raise RelposValueError(
                    f"gate_key: expected (..., H_kv, L_k, D) = {wanted}, found {self.gate_key.shape}"
                )
            check.fits_batch("gate_key", self.gate_key.shape[:-3], site.batch)
        if self.counted is not None:
            full = (*site.batch, site.heads, site.q_len, site.k_len)
            padded = (1,) * (len(full) - self.counted.ndim) + self.counted.shape
            if len(padded) > len(full) or any(n not in (1, m) for n, m in zip(padded, full, strict=True)):
                raise RelposValueError(
                    f"counted: shape {self.counted.shape} does not broadcast to (..., H, L_q, L_k) = {full}"
                )

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """Products with the interpolated vectors of the positions that the gates count."""
        q, table = q.astype(np.float64), self.table.astype(np.float64)
        keys = repeat_heads(k if self.gate_key is None else self.gate_key, site.heads).astype(np.float64)
        logits = site.scale * (q @ np.swapaxes(keys, -1, -2))
        d = np.arange(site.k_len) - (np.arange(site.q_len)[:, None] + site.offset)
        counts = (d <= site.right) & ~np.isnan(logits)
        if self.counted is not None:
            counts = counts & self.counted
        gates = np.where(counts, 0.5 * (1 + np.tanh(0.5 * logits)), 0.0)
        added = cope_scores(q, table, contextual_positions(gates, table.shape[-2]))
        return (added if self.variant == "paper" else added * site.scale).astype(site.dtype)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """One dense bias."""
        q, k = in_order(q), in_order(k)
        _, _, whole, row, part = self._steps(q, k, site)
        low = np.take_along_axis(whole, row, axis=-1)
        bias = low + part * (np.take_along_axis(whole, self._next(row), axis=-1) - low)
        return Terms(biases=((bias * self._factor(site)).astype(site.dtype, copy=False),))

    def lower_by_rows(self, q: Array, k: Array, site: Site) -> Terms:
        """What the bias is made of."""
        gate_key = k if self.gate_key is None else self.gate_key
        bias = CountedBias(
            query=q,
            key=gate_key,
            table=self.table.reshape(-1, *self.table.shape[-2:]),
            scale=site.scale,
            factor=self._factor(site),
            last=site.offset + site.right,
            counted=self.counted,
            dtype=site.dtype,
        )
        return Terms(biases=(bias,))

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Nothing: positions are sums over gates of all later keys."""
        raise RelposValueError(
            f"position: {self!r} cannot be computed for a part of a call, since each position is a sum over all "
            "keys between query and key"
        )

    def memory_bound(self, site: Site) -> MemoryBound:
        """Numbers of float64 for every pair of every head and batch item: products, gates, positions, places."""
        doubles = 8 * site.q_len * site.k_len * site.heads * math.prod(site.batch)
        return MemoryBound(11 * doubles, 8 * doubles, 12 * doubles)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Back through the interpolation to query and table, and through the counting to the gates' products."""
        if isinstance(grad.biases[0], CountedBias):
            made = grad.biases[0]
            return self._gradient(made.query, made.key, made.table, k, site)
        # Queries without keys may hold anything; those with some have gradients that say so.
        q = np.where(np.isfinite(q), q, 0.0)
        keys, gates, whole, row, part = self._steps(q, k, site)
        to_bias = grad.biases[0].astype(np.float64) * self._factor(site)
        # Each pair's gradient goes to the two positions that it lies between.
        to_whole = np.zeros_like(whole)
        lines, width = whole.size // whole.shape[-1], whole.shape[-1]
        for at, share in ((row, 1 - part), (self._next(row), part)):
            cells = at.reshape(lines, site.k_len) + np.arange(lines)[:, None] * width
            to_whole += np.bincount(cells.ravel(), (to_bias * share).ravel(), whole.size).reshape(whole.shape)
        table = self._sets()
        to_table = np.swapaxes(to_whole, -1, -2) @ q.astype(np.float64)
        to_query = to_whole @ table
        # From the last position on nothing rises; a gate moves the positions of all keys up to its own.
        rise = np.take_along_axis(whole, self._next(row), axis=-1) - np.take_along_axis(whole, row, axis=-1)
        to_gates = np.cumsum(to_bias * rise, axis=-1)
        with np.errstate(under="ignore"):
            to_logits = to_gates * gates * (1 - gates) * site.scale
        to_query = to_query + to_logits @ keys
        to_keys = np.swapaxes(to_logits, -1, -2) @ q.astype(np.float64)
        return self._gradient(to_query, to_keys, to_table, k, site)

    def _gradient(self, to_query: Array, to_keys: Array, to_table: Array, k: Array, site: Site) -> SchemeGradient:
        """Gradients of queries, of what gates compare them with, for every head of either, and of the table."""
        to_table = fit(to_table, self._sets().shape).reshape(self.table.shape)
        arrays = {"table": to_table.astype(site.dtype, copy=False)}
        of_gates = fit(to_keys, (k if self.gate_key is None else self.gate_key).shape).astype(site.dtype, copy=False)
        to_query = to_query.astype(site.dtype, copy=False)
        if self.gate_key is not None:
            return SchemeGradient(q=to_query, arrays={**arrays, "gate_key": of_gates})
        return SchemeGradient(q=to_query, k=of_gates, arrays=arrays)

    def _factor(self, site: Site) -> float:
        return 1.0 if self.variant == "paper" else site.scale

    def _sets(self) -> Array:
        return self.table.astype(np.float64).reshape(-1, *self.table.shape[-2:])

    def _next(self, row: Array) -> Array:
        return np.asarray(np.minimum(row + 1, self.table.shape[-2] - 1))

    def _steps(self, q: Array, k: Array, site: Site) -> tuple[Array, Array, Array, Array, Array]:
        """Keys of the gates, gates, products with whole positions, row below, the way to the next."""
        keys = (k if self.gate_key is None else self.gate_key).astype(np.float64)
        keys = keys[..., np.arange(site.heads) * site.kv_heads // max(site.heads, 1), :, :]
        queries = q.astype(np.float64)
        with np.errstate(all="ignore"):
            x = np.matmul(queries, np.swapaxes(keys, -1, -2)) * site.scale
            gates = np.exp(-np.logaddexp(0.0, -x))
        # No key of an excluded pair, nor what is not a number in it, may reach another pair.
        last = np.arange(site.q_len) + site.offset + site.right
        gates[np.isnan(gates) | (np.arange(site.k_len) > last[:, None])] = 0.0
        if self.counted is not None:
            gates *= self.counted
        positions = np.minimum(np.cumsum(gates[..., ::-1], axis=-1)[..., ::-1], self.table.shape[-2] - 1)
        row = positions.astype(np.intp)
        with np.errstate(all="ignore"):
            whole = np.matmul(queries, np.swapaxes(self._sets(), -1, -2))
        clean = np.where(np.isfinite(keys), keys, 0.0)
        return clean, gates, whole, row, positions - row


# Positions stay this far from whole numbers, where their slope changes, so that difference quotients of an example say
# something; and how many positions there are.
_MARGIN, _POSITIONS = 4e-3, 12


@register(
    "cope",
    CoPE,
    adds="positions counted by gates, interpolated",
    paper="Golovneva et al., 2024",
    doi="10.48550/arXiv.2405.18719",
    variants=VARIANTS,
    models="CoPE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    if at.q_len * at.k_len <= 1 << 12:
        parts["q"] = _between(parts["q"], parts["k"])
    lead = at.pick((), (parts["q"].shape[-3],))
    # Small, because the paper does not scale these products, and a steep table makes much of a rounded position.
    table = at.normal(*lead, at.pick(_POSITIONS, 40, 1), at.dim) * 0.125
    gate_key = at.normal(*parts["k"].shape) if at.pick(False, True) else None
    counted = at.normal(*at.batch, 1, at.q_len, at.k_len) < 0.5 if at.pick(False, True) else None
    table = table.astype(parts["q"].dtype)
    position = CoPE(table, variant=at.variant or "paper", gate_key=gate_key, counted=counted)
    return {**parts, "position": position, "kwargs": {"causal": True}}


def _between(q: Array, k: Array) -> Array:
    """Queries whose lengths are changed a little wherever a position would come close to a whole number."""
    # Decided on numbers of half precision, so that examples of every dtype are the same but for rounding.
    queries, keys = (x.astype(np.float16).astype(np.float64) for x in (q, k))
    keys = np.repeat(keys, q.shape[-3] // k.shape[-3], axis=-3).swapaxes(-1, -2)
    later = np.arange(k.shape[-2]) > np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
    factor = np.ones((*q.shape[:-1], 1))
    for _ in range(64):
        s = (queries * factor) @ keys / np.sqrt(q.shape[-1])
        gates = np.where(later, 0.0, 0.5 * (1 + np.tanh(0.5 * s)))
        positions = np.cumsum(gates[..., ::-1], axis=-1)[..., ::-1]
        close = (np.abs(positions - np.rint(positions)) < _MARGIN) & (positions < _POSITIONS) & ~later
        again = close.any(axis=-1, keepdims=True)
        if not again.any():
            break
        factor += again / 64
    return (q * factor).astype(q.dtype)
