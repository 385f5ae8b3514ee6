r"""WavLM's gated bias: T5's buckets, times a number per query and head that the hidden state decides."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.index_maps import t5_map
from relpos_np._contract.terms import QueryTerm, Terms, of_batch
from relpos_np.errors import RelposValueError
from relpos_np.formulas.buckets import ROUNDING, Rounding, bucket_table, t5_bucket
from relpos_np.schemes.base import Part, Sample, Scheme, SchemeGradient, Site, evaluated, register
from relpos_np.types import Array


def _gate_operands(hidden: Any, weight: Any, bias: Any, const: Any) -> tuple[Array, Array, Array, Array]:
    """Checked, with the hidden state cut into heads: (..., L, H, D); const (H,)."""
    x, w = check.floating("hidden", hidden), check.table("weight", weight, "eight head_dim")
    b, c = check.table("bias", bias, "eight"), check.table("const", const, "heads | 1 heads 1 1").reshape(-1)
    if w.shape[0] != 8 or b.shape != (8,):
        raise RelposValueError(f"weight, bias: expected shapes (8, D) and (8,), found {w.shape} and {b.shape}")
    heads, depth = len(c), w.shape[1]
    if x.ndim < 2 or x.shape[-1] != heads * depth:
        raise RelposValueError(
            f"hidden: expected shape (..., L, {heads * depth}) for {heads} heads of {depth} channels, found {x.shape}"
        )
    return x.reshape(*x.shape[:-1], heads, depth), w, b, c


@np.errstate(all="ignore")
def wavlm_gate(hidden: Any, weight: Any, bias: Any, const: Any) -> Array:
    r"""The gate of every query and head.

    .. math::

        a_{hi} = \operatorname{sig}\Big(\sum_{m=0}^{3} u_m\Big), \quad
        b_{hi} = \operatorname{sig}\Big(\sum_{m=4}^{7} u_m\Big), \quad
        u = W x_i^{(h)} + w, \qquad
        g_{hi} = a_{hi} (b_{hi} c_h - 1) + 2

    with the logistic function sig and the head's own D channels :math:`x_i^{(h)}` of the layer's input, not of q.

    Parameters
    ----------
    hidden : ndarray, shape (..., L, H * D)
        Input of the layer's attention.
    weight, bias : ndarray, shapes (8, D) and (8,)
        W and w, ``gru_rel_pos_linear`` of checkpoints; one for all heads.
    const : ndarray, shape (H,) or (1, H, 1, 1)
        c, ``gru_rel_pos_const`` of checkpoints.

    Returns
    -------
    ndarray, shape (..., H, L)
        The gates, from 1 to max(c_h, 1) + 1 for positive c_h.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit.
    """
    x, w, shift, c = _gate_operands(hidden, weight, bias, const)
    u = np.einsum("...hd,ed->...he", x, w) + shift
    # Where the exponential overflows, the gate is closed.
    first, second = 1 / (1 + np.exp(-u[..., :4].sum(axis=-1))), 1 / (1 + np.exp(-u[..., 4:].sum(axis=-1)))
    return np.asarray(np.swapaxes(first * (second * c - 1) + 2, -1, -2))


@np.errstate(all="ignore")
def wavlm_gate_vjp(hidden: Any, weight: Any, bias: Any, const: Any, grad: Any) -> dict[str, Array]:
    """Gradients of what `wavlm_gate` takes, from the gate's, which `attention_vjp` gives as ``position["gate"]``.

    Parameters
    ----------
    hidden, weight, bias, const
        See `wavlm_gate`.
    grad : ndarray, shape (..., H, L)
        Gradient of its result.

    Returns
    -------
    dict of ndarray
        By argument: "hidden", "weight", "bias" and "const", in their shapes and dtypes.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit.
    """
    x, w, shift, c = _gate_operands(hidden, weight, bias, const)
    g = check.like("grad", grad, (*x.shape[:-3], x.shape[-2], x.shape[-3]), x.dtype)
    g = np.swapaxes(g, -1, -2)
    # Both logistic functions side by side: (..., L, H, 2).
    u = (np.matmul(x, w.T) + shift).reshape(*g.shape, 2, 4).sum(axis=-1)
    s = 0.5 * np.tanh(0.5 * u) + 0.5
    by_s = np.stack([g * (s[..., 1] * c - 1), g * s[..., 0] * c], axis=-1) * s * (1 - s)
    by_u = np.repeat(by_s, 4, axis=-1)
    rows = by_u.reshape(-1, 8)
    found = {
        "hidden": (hidden, np.matmul(by_u, w)),
        "weight": (weight, rows.T @ x.reshape(-1, x.shape[-1])),
        "bias": (bias, rows.sum(axis=0)),
        "const": (const, (g * s[..., 0] * s[..., 1]).reshape(-1, len(c)).sum(axis=0)),
    }
    return {name: by_x.reshape(given.shape).astype(given.dtype) for name, (given, by_x) in found.items()}


def wavlm_bias(
    table: Array,
    gate: Array,
    q_len: int,
    k_len: int,
    *,
    offset: int = 0,
    max_distance: int = 800,
    rounding: Rounding = "exact",
) -> Array:
    """The bias of every pair, written out: ``gate[..., h, i] * table[t5_bucket(j - i - offset), h]``.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H)
        One scalar per bucket and head.
    gate : ndarray, shape (..., H, L_q)
        See `wavlm_gate`.
    q_len, k_len : int
        Number of queries and of keys.
    offset : int
        Position of the first query among the keys.
    max_distance
        See `t5_bucket`.
    rounding : {"exact", "float32"}
        See there, too.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        To be added to the scores.
    """
    d = np.arange(k_len) - (np.arange(q_len)[:, None] + offset)
    bucket = t5_bucket(d, num_buckets=len(table), max_distance=max_distance, rounding=rounding)
    return gate[..., None] * np.moveaxis(table[bucket], -1, 0)


class WavLM(Scheme):
    r"""Gated relative position bias.

    .. math::

        s_{ij} = \sigma\, q_i \cdot k_j + g_{hi}\, T[b(j - i - M), h]

    with the bidirectional buckets b of `T5` and a gate g of each query and head, from `wavlm_gate`. The
    first layer's table serves all layers; each layer has its gate's weights. Gradients of those and of
    the hidden state come from `wavlm_gate_vjp`, given that of the gate.

    Parameters
    ----------
    table : ndarray, shape (num_buckets, H)
        One scalar per bucket and head, as checkpoints store it: 320 buckets.
    gate : ndarray, shape (..., H, L_q)
        A number per query and head, for each batch item.
    max_distance : int
        Distances from here on share a bucket.
    rounding : {"exact", "float32"}
        How bucket borders are decided; see `T5`. The two agree for 320 buckets and distance 800.

    Raises
    ------
    RelposError
        If dtypes or shapes do not fit, or the number of buckets and max_distance leave no valid border.

    References
    ----------
    Chen et al., "WavLM: Large-Scale Self-Supervised Pre-Training for Full Stack Speech Processing", IEEE
    Journal of Selected Topics in Signal Processing 2022; the gate: Chi et al., "XLM-E: Cross-lingual
    Language Model Pre-training via ELECTRA", ACL 2022.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> table, gate = rng.standard_normal((320, 8)), rng.random((2, 8, 10))  # a factor for each query
    >>> rp.attention(q, k, v, position=rp.WavLM(table, gate)).shape
    (2, 8, 10, 64)
    """

    reads_operand_values = False

    def __init__(self, table: Any, gate: Any, *, max_distance: int = 800, rounding: Rounding = "exact") -> None:
        self.max_distance = check.integer("max_distance", max_distance, 1)
        self.rounding = check.choice("rounding", rounding, ROUNDING)
        self.table = bucket_table("table", table, self.max_distance)
        self.gate = check.ordered("gate", gate)
        if self.gate.ndim < 2 or self.gate.shape[-2] != self.table.shape[1]:
            raise RelposValueError(
                f"gate: expected shape (..., {self.table.shape[1]}, L_q) as table {self.table.shape} has heads, "
                f"found {self.gate.shape}"
            )

    def check(self, site: Site) -> None:
        """There must be a column per head, and a gate per query."""
        check.heads("table", self.table, 1, site)
        if self.gate.shape[-1] != site.q_len:
            raise RelposValueError(f"gate: shape {self.gate.shape} does not end in L_q = {site.q_len}")
        check.fits_batch("gate", self.gate.shape[:-2], site.batch)

    def scores(self, q: Array, k: Array, site: Site) -> Array:
        """The bias of every pair."""
        return np.asarray(evaluated(wavlm_bias, self, site, cast=True))

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """A query term of one channel: the gate, and the table as weights."""
        rows, last = len(self.table), self.max_distance
        index = t5_map(site.q_len, site.k_len, site.offset, rows, last, True, self.rounding)
        gate = self.gate[..., None].astype(site.dtype, copy=False)
        weights = self.table.T[..., None].astype(site.dtype, copy=False)
        return Terms(queries=(QueryTerm(gate, weights, index),), relative_error_ulps=0.0)

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Gates of the queries."""
        return (self._with(gate=of_batch(self.gate, 2, part.batch)[..., part.queries]), *part.nearby(site))

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """One column per head again, and the gate's only channel."""
        term = grad.queries[0]
        return SchemeGradient(arrays={"table": term.weights[..., 0].T, "gate": term.query[..., 0]})


@register(
    "wavlm",
    WavLM,
    adds="T5's bias behind a gate that the query opens",
    paper="Chen et al., 2022",
    doi="10.48550/arXiv.2110.13900",
    models="WavLM",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 4)
    heads, dtype = parts["q"].shape[-3], parts["q"].dtype
    hidden = at.normal(*at.batch, at.q_len, heads * at.dim) * dtype.type(0.25)
    gate = wavlm_gate(hidden, at.normal(8, at.dim), at.normal(8), np.abs(at.normal(heads)))
    buckets, most = at.pick((320, 800), (8, 20))
    position = WavLM(
        at.normal(buckets, heads), gate.astype(dtype), max_distance=most, rounding=at.pick("exact", "float32")
    )
    return {**parts, "position": position, "kwargs": {"scale": 0.25}}
