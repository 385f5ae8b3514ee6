r"""Rotary positions: queries and keys turned by angles that grow with their positions; xPos, which also scales them."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Terms, ValueTurn
from relpos_np._contract.turned import Turned, TurnedBack, paired_channels, parts_of, turn_channels
from relpos_np.errors import RelposValueError
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.formulas.rotations import rotary_matrices, rotate_pairs, xpos_scales
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, in_order, register
from relpos_np.schemes.checks import finite
from relpos_np.schemes.positioned import Positioned
from relpos_np.types import Array

LAYOUTS = ("half", "interleaved")
# Angles whose gradients are made at a time.
_PART = 1 << 14
XPOS_LAYOUTS = ("interleaved", "half")
# Largest size e^x of an operand of xPos; its products with others of ordinary size stay in range.
_LARGEST = {"float32": 60.0, "float64": 600.0}


def _channels(value: Any, dim: Any) -> tuple[int, int]:
    """A range with an even number of channels, which may be said twice."""
    bounds = check.integers("channels", value)
    if bounds.shape != (2,):
        raise RelposValueError(f"channels: expected (first, stop), found shape {bounds.shape}")
    first, stop = bounds.tolist()
    if not 0 <= first < stop or (stop - first) % 2:
        raise RelposValueError(f"channels: expected (first, stop) with an even number between, found {(first, stop)}")
    if dim is not None and check.integer("dim", dim) != stop - first:
        raise RelposValueError(f"dim: expected {stop - first} for channels {(first, stop)}, found {dim}")
    return first, stop


class Rotary(Positioned):
    r"""Rotary positions (RoPE): a pair of channels is a plane in which queries and keys turn.

    .. math::

        s_{ij} = \sigma\, (R_{i + M}\, q_i) \cdot (R_j\, k_j) = \sigma\, q_i \cdot R_{j - i - M}\, k_j, \qquad
        \omega_p = \mathrm{base}^{-2p/d}

    with :math:`R_t` the `rotary_matrices` of position t, applied by `rotate_pairs`, and M the call's ``offset``.
    The second form holds for ``magnitude=1``.

    Parameters
    ----------
    dim : int, optional
        Number d of channels that turn, the first ones of each head, even; default all.
    base : float
        Ratio between the longest and the shortest wavelength (`rope_theta`).
    layout : {"half", "interleaved"}
        - "half": channel p turns with p + d/2 (GPT-NeoX; Llama in transformers).
        - "interleaved": channel 2p turns with 2p + 1 (the paper, GPT-J, Llama's own code).

        The two are the same up to a permutation of channels, but weights trained for one are wrong in the other.
    frequencies : ndarray, shape (d / 2,), (A, d / 2) or (A, H_kv, d / 2), optional
        Angles per step of position in place of :math:`\omega_p`, such as from `linear_frequencies`,
        `ntk_frequencies`, `yarn_frequencies`, `longrope_frequencies`, `llama3_frequencies` or
        `proportional_frequencies`. With A rows, positions have A coordinates, and the angle is
        :math:`\sum_a t_a\, \Omega_{a,p}`: `axial_frequencies` for images, `axis_frequencies` with `section_axes` for
        multimodal positions, any matrix for RoPE-Mixed, where each head may have its own (grouped query heads that
        of their key head). `attention_vjp` has their gradient.
    magnitude : float
        Factor on all cosines and sines: the attention factor of YaRN and LongRoPE.
    positions : ndarray of int or float, shape (..., L) or (..., A, L), optional
        Positions in place of i + M and j, with the batch axes of the call or some that broadcast to them. Without
        `key_positions` they are those of the keys, L = L_k, and query i stands where key i + M does: at its own
        position in self-attention, at the last ones in decoding. Masks and windows still count from the start.
    key_positions : ndarray of int or float, shape (..., L_k) or (..., A, L_k), optional
        Positions of the keys, where those of the queries are others; then `positions` are those of the queries,
        L = L_q, whatever M.
    channels : pair of int, optional
        First channel that turns, and the one after the last, in place of the first d: d is their difference. DeepSeek's
        models turn the last channels of a head.
    blocks : int
        Number of equal parts of the d channels, each laid out on its own: with 2 and "half", channel p of either half
        turns with p + d/4 (vision of Gemma 4; Allegro has 3). Without effect on "interleaved".
    values : bool
        Whether the same channels of the values turn too, and those of the output back (DeepSeek V4):

        .. math::

            o_i = R_{i + M}^\top \sum_j p_{ij}\, R_j\, v_j = m^2 \sum_j p_{ij}\, \hat R_{j - i - M}\, v_j

        with :math:`R_t = m \hat R_t` and m the `magnitude`, which values and output both get in that model's code. The
        second form holds where distances alone decide. :math:`D_v` may be any number that has these channels.

    Raises
    ------
    RelposValueError
        If d is odd or in disagreement with `frequencies` or `channels`; if a head of the call, or of its values where
        these turn too, has fewer channels than are to turn; if `base` is not positive, or is given along with
        `frequencies`; if positions do not fit the call, are missing where `frequencies` have several axes, or
        `key_positions` stand alone.

    Notes
    -----
    Angles, cosines and sines are computed in float64 for every dtype and rounded once to that of the call (float32 for
    half precision), in which the products are made. Angles are those of absolute positions: at position t they are
    exact to about :math:`10^{-16}\, t`.

    Kernels turn queries and keys as they read them, and their gradients back as they write them. Of values and of the
    output turned copies are made, in the dtype of the computation, and each result is rounded once.
    A scheme that adds vectors to the output cannot be combined with `values`: no paper says how these would turn.

    All keys are turned in every call. For a cache of turned keys, turn new ones with `rotate_pairs` and pass no scheme.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (Neurocomputing 2024). Several
    coordinates: Heo et al., "Rotary Position Embedding for Vision Transformer", ECCV 2024. Values: DeepSeek V4 in
    transformers, 2026.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> whole = rp.attention(q, k, v, position=rp.Rotary(), causal=True)
    >>> # One token that reads a cache stands at its end.
    >>> last = rp.attention(q[:, :, 9:], k, v, position=rp.Rotary())
    >>> np.allclose(last, whole[:, :, 9:])
    True
    """

    @property
    def covers(self) -> bool:
        """Whatever the call, a position that is counted has the same angles; values turn in other kernels."""
        return not self.values and self.positions is None

    @property
    def covers_gradients(self) -> bool:
        """Angles that are trained collect from every token by its position."""
        return self.covers and self.frequencies is None

    def __init__(
        self,
        dim: int | None = None,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        frequencies: Any = None,
        magnitude: float = 1.0,
        positions: Any = None,
        key_positions: Any = None,
        channels: tuple[int, int] | None = None,
        blocks: int = 1,
        values: bool = False,
    ) -> None:
        self.values = check.flag("values", values)
        self.turns_values = self.values
        self.layout = check.choice("layout", layout, LAYOUTS)
        self.magnitude = check.real("magnitude", magnitude)
        self.base = check.positive("base", base)
        self.frequencies: Array | None = None
        self.channels = None if channels is None else _channels(channels, dim)
        self._first = 0
        if self.channels is not None:
            self._first, dim = self.channels[0], self.channels[1] - self.channels[0]
        self.dim = dim if dim is None else 2 * len(rotary_frequencies(dim, base=base))
        self.blocks = check.integer("blocks", blocks, 1)
        if frequencies is not None:
            self.frequencies = check.table("frequencies", frequencies, "pairs | axes pairs | axes kv_heads pairs")
            finite("frequencies", self.frequencies)
            if self.base != 10000.0:
                raise RelposValueError(f"base: {base} has no effect together with frequencies")
            self.dim = 2 * self.frequencies.shape[-1]
            if dim is not None and dim != self.dim:
                raise RelposValueError(
                    f"frequencies: expected {dim // 2} pairs for dim {dim}, found {self.dim // 2}, "
                    f"shape {self.frequencies.shape}"
                )
        self._place(positions, key_positions)

    @property
    def _axes(self) -> int | None:
        """Coordinates of a position; None for a position that is a number."""
        return None if self.frequencies is None or self.frequencies.ndim == 1 else self.frequencies.shape[0]

    def check(self, site: Site) -> None:
        """The turning channels must exist, in pairs, and every query and key needs a position."""
        if self.dim is None and site.head_dim % 2:
            raise RelposValueError(f"dim: head_dim {site.head_dim} of the call is odd; say how many channels turn")
        dim = site.head_dim if self.dim is None else self.dim
        if dim % (2 * self.blocks):
            raise RelposValueError(f"blocks: {dim} channels do not fall into pairs of {self.blocks} blocks")
        if self.channels is not None and self.channels[1] > site.head_dim:
            raise RelposValueError(f"channels: {self.channels} are to turn, head_dim of the call is {site.head_dim}")
        if self.dim is not None and self.dim > site.head_dim:
            raise RelposValueError(f"dim: {self.dim} channels are to turn, head_dim of the call is {site.head_dim}")
        if self.values and not site.scores_only and self._first + dim > site.v_dim:
            raise RelposValueError(
                f"values: channels {(self._first, self._first + dim)} are to turn, v of the call has {site.v_dim}"
            )
        if self.frequencies is not None and self.frequencies.ndim == 3 and self.frequencies.shape[1] != site.kv_heads:
            raise RelposValueError(
                f"frequencies: expected one set for each of {site.kv_heads} key heads, found {self.frequencies.shape}"
            )
        self._check_places(site)

    def _omega(self, site: Site) -> Array:
        if self.frequencies is not None:
            return self.frequencies.astype(np.float64)
        return rotary_frequencies(site.head_dim if self.dim is None else self.dim, base=self.base)

    def _scales(self, rows: Array, columns: Array, pairs: int) -> tuple[Array, Array]:
        """Further factors of queries and of keys, per position and pair, in the formula: () or (..., L, P)."""
        return np.ones(()), np.ones(())

    def _sizes(self, rows: Array, columns: Array, pairs: int) -> tuple[Array, Array] | None:
        """The same for the tables; None for 1."""
        return None

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Both operands turned, each by the matrices of its positions."""
        omega = self._omega(site)
        rows, columns = self._stand(site)
        scales = self._scales(rows, columns, omega.shape[-1])
        operands = []
        for x, t, scale in ((q, rows, scales[0]), (k, columns, scales[1])):
            operands.append(self._rotated(x, self._matrices(t, omega, site, scale)))
        return operands[0], operands[1]

    def turn_values(self, v: Array, site: Site) -> Array:
        """Values turned by the matrices of their keys."""
        return self._rotated(v, self._matrices(self._stand(site)[1], self._omega(site), site)) if self.values else v

    def turn_output(self, out: Array, site: Site) -> Array:
        """The output turned by the transposed matrices of its queries."""
        if not self.values:
            return out
        matrices = self._matrices(self._stand(site)[0], self._omega(site), site)
        return self._rotated(out, np.swapaxes(matrices, -1, -2))

    def _matrices(self, t: Array, omega: Array, site: Site, scale: Array | None = None) -> Array:
        """For the formula: one matrix per position and pair, (..., H or 1, L, P, 2, 2)."""
        matrices = rotary_matrices(t, omega, magnitude=self.magnitude)
        matrices = matrices if scale is None else matrices * scale[..., None, None]
        if omega.ndim < 3:  # the same for all heads
            return np.expand_dims(matrices, -5)
        # Those of a key head for all that read it.
        return np.repeat(matrices, site.heads // site.kv_heads, axis=-5)

    def _rotated(self, x: Array, matrices: Array) -> Array:
        return rotate_pairs(x, matrices, layout=self.layout, first=self._first, blocks=self.blocks)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same with tables of cosines and sines, on the keys before their heads are repeated."""
        terms = self.lower_rotated(q, k, site)
        terms.query, terms.key = terms.query.made(), terms.key.made()
        return terms

    def lower_rotated(self, q: Array, k: Array, site: Site) -> Terms:
        """The same before any operand is turned."""
        of_query, of_key = self._tables(site)
        planes: Any = (self.layout, self._first, self.blocks, self.frequencies is not None)
        terms = Terms(Turned(q, *of_query, *planes), Turned(k, *of_key, *planes))
        if self.values and not site.scores_only:
            terms.turn = ValueTurn(of_key, of_query, *planes)
        return terms

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Positions of queries and of keys, and frequencies of the heads; without positions, distances decide."""
        changed = self._cut_places(site, part)
        if self.frequencies is not None and self.frequencies.ndim == 3:
            changed["frequencies"] = self.frequencies[:, part.kv_heads]
        return (self._with(**changed), *part.alone(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Turned vectors, what they are made of, and a matrix of float64 for every position and pair; tables."""
        per_item = 4 * math.prod(site.batch) * site.heads * site.dtype.itemsize
        channels = max(site.head_dim, site.v_dim) if self.values else site.head_dim
        of_heads = self.frequencies is not None and self.frequencies.ndim == 3
        sets = (1 if self.positions is None else math.prod(site.batch)) * (site.heads if of_heads else 1)
        # Angles, cosines and sines of keys and of queries in float64; both, side by side, in the dtype of the call.
        tables = sets * (site.q_len + site.k_len) * (site.head_dim // 2) * (48 + 6 * site.dtype.itemsize)
        # What the gradient of some angles is made of.
        angles = math.prod(site.batch) * site.heads * max(site.q_len, site.k_len) * (site.head_dim // 2)
        part = 12 * 8 * min(_PART + site.heads * site.head_dim, angles) if self.frequencies is not None else 0
        return MemoryBound((site.q_len + site.k_len) * channels * (32 + per_item), tables, tables + part)

    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Gradients turn back; that of an angle is the product with the turned operand, a quarter turn on."""
        to_query: Any = grad.query
        to_key: Any = grad.key
        if isinstance(to_query, TurnedBack):
            lifted = SchemeGradient(to_query.x, to_key.x)
        else:
            (cos_q, sin_q), (cos_k, sin_k) = self._tables(site)
            planes: Any = (self.layout, self._first, self.blocks)
            lifted = SchemeGradient(
                turn_channels(to_query, cos_q, -sin_q, *planes), turn_channels(to_key, cos_k, -sin_k, *planes)
            )
        if self.frequencies is not None:
            total = np.zeros(())
            for x, to, at in zip((q, k), (lifted.q, lifted.k), self._at(site), strict=True):
                total = total + self._spun(np.asarray(x), np.asarray(to), at, site)
            if grad.turn is not None:
                parts = zip(self._tables(site), (grad.turn.query, grad.turn.key), self._at(site), strict=True)
                for (cos, sin), (real, imaginary), at in parts:
                    total = total + self._summed(imaginary * cos - real * sin, at, site)
            lifted.arrays["frequencies"] = total.reshape(self.frequencies.shape)
        return lifted

    def _spun(self, x: Array, grad: Array, at: Array, site: Site) -> Array:
        """Gradient of the frequencies through one operand, (A, H_kv or 1, P), from that of the operand.

        Angles have the same gradient before the turn, as its numbers commute. A few queries or keys are done at a time.
        """
        pairs, batch = np.asarray(self.frequencies).shape[-1], x.shape[:-3]
        first, second = paired_channels(pairs, self.layout, self._first, self.blocks)
        at = np.broadcast_to(at, (*batch, *at.shape[-2:]))
        total = np.zeros((at.shape[-2], self._sets(site), pairs))

        def product(g: Array, y: Array) -> Array:
            return np.where(g == 0, 0.0, g.astype(np.float64) * y)  # an excluded key may hold anything

        for *items, rows in parts_of((*batch, x.shape[-2]), max(_PART // max(x.shape[-3] * pairs, 1), 1)):
            part = (*items, slice(None), rows)
            g, y = in_order(grad[part]), in_order(x[part])
            angle = product(g[..., second], y[..., first]) - product(g[..., first], y[..., second])
            total += self._summed(angle, at[part], site)
        return total

    def _sets(self, site: Site) -> int:
        """Heads that have frequencies of their own."""
        return site.kv_heads if np.asarray(self.frequencies).ndim == 3 else 1

    def _summed(self, angle: Array, at: Array, site: Site) -> Array:
        """Gradient of the frequencies, (A, H_kv or 1, P), from that of angles (..., H or 1, L, P)."""
        heads = self._sets(site)
        # Query heads that share frequencies, and all batch items, are summed.
        batch, (length, pairs) = angle.shape[:-3], angle.shape[-2:]
        count = math.prod(batch)
        angle = angle.reshape(count, heads, angle.shape[-3] // heads, length, pairs).sum(axis=2)
        at = in_order(np.broadcast_to(at, (*batch, *at.shape[-2:])).reshape(count, at.shape[-2], length))
        spun: Array = np.einsum("bhlp,bal->ahp", angle, at)
        return spun

    def _tables(self, site: Site) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Cosines and sines of queries and of keys, (..., H or 1, L, P) in the dtype of the call.

        Rounded from float64: angles in float32 would be off by 0.006 at position 100000, tables in float32 are off by
        half a unit in the last place. They are made anew in each call, since frequencies and positions are arrays that
        may change, and cost less than the products.
        """
        omega = self._omega(site)
        omega = omega[None, None] if omega.ndim == 1 else omega[:, None] if omega.ndim == 2 else omega
        at_query, at_key = self._at(site)

        def turns(at: Array) -> tuple[Array, Array]:
            angle = np.einsum("...al,ahp->...hlp", at, omega)
            return np.cos(angle), np.sin(angle)

        keys = turns(at_key)
        among = self.key_positions is None and 0 <= site.offset <= site.offset + site.q_len <= site.k_len
        # Queries that stand among the keys have their angles.
        span = slice(site.offset, site.offset + site.q_len)
        queries = (keys[0][..., span, :], keys[1][..., span, :]) if among else turns(at_query)
        if omega.shape[1] > 1:  # those of a key head for all that read it
            groups = site.heads // site.kv_heads
            queries = np.repeat(queries[0], groups, axis=-3), np.repeat(queries[1], groups, axis=-3)
        factors: list[Array] = [np.asarray(self.magnitude)] * 2
        sizes = self._sizes(at_query[..., 0, :], at_key[..., 0, :], omega.shape[-1])
        if sizes is not None:
            factors = [self.magnitude * size[..., None, :, :] for size in sizes]
        (cos_q, sin_q), (cos_k, sin_k) = (
            ((cos * factor).astype(site.dtype), (sin * factor).astype(site.dtype))
            for (cos, sin), factor in zip((queries, keys), factors, strict=True)
        )
        return (cos_q, sin_q), (cos_k, sin_k)


class XPos(Rotary):
    r"""Extrapolatable rotary positions (xPos): pairs also shrink with distance, those that turn fast the most.

    .. math::

        s_{ij} = \sigma \sum_p \zeta_p^{(i + M - j) / B}\; q_{i,p} \cdot R_{j - i - M,\, p}\, k_{j,p}, \qquad
        \zeta_p = \frac{2p/d + \gamma}{1 + \gamma}, \qquad \omega_p = \mathrm{base}^{-2p/d}

    with :math:`q_{i,p}` the two channels of pair p. Each operand is scaled on its own: a query at position t by
    :math:`\zeta_p^{(t - c) / B}`, a key by the inverse, as from `xpos_scales`. Keys of the future grow without bound:
    the scheme is made for ``causal=True``.

    Parameters
    ----------
    dim : int, optional
        Number d of channels that turn, the first ones of each head, even; default all. The others stay as they are.
    base : float
        See `Rotary`.
    scale_base : float
        The number B: over so many positions, pair p shrinks by :math:`\zeta_p`.
    gamma : float
        The number :math:`\gamma`; larger is milder.
    layout : {"interleaved", "half"}
        See `Rotary`; the published code interleaves.
    positions, key_positions : ndarray of int or float, shape (..., L), optional
        See `Rotary`.

    Raises
    ------
    RelposValueError
        As `Rotary`; if `scale_base` or `gamma` is not positive; or if positions lie so far apart that a factor would
        leave the range of the dtype (in float32 49 thousand positions, in float64 490 thousand, with the defaults).

    Notes
    -----
    The factors of queries and keys must have the same centre c, which then has no effect but on rounding and range.
    Here c is the middle of the keys. The paper has c = 0, as have some copies of its code. That code itself
    (torchscale) has c = (L + offset) / 2, rounded up, for queries and keys apart: where the two differ, pair p of every
    score has a factor :math:`\zeta_p` to their difference over B too many. Some copies have B = 2048 in place of 512.

    References
    ----------
    Sun et al., "A Length-Extrapolatable Transformer", ACL 2023.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.XPos(), causal=True).shape
    (2, 8, 10, 64)
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        base: float = 10000.0,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        layout: Literal["interleaved", "half"] = "interleaved",
        positions: Any = None,
        key_positions: Any = None,
    ) -> None:
        super().__init__(dim, base=base, layout=layout, positions=positions, key_positions=key_positions)
        self.scale_base, self.gamma = check.positive("scale_base", scale_base), check.positive("gamma", gamma)

    @property
    def covers(self) -> bool:
        """Factors count from the middle of a call's keys."""
        return False

    def check(self, site: Site) -> None:
        """As `Rotary`, and the factors must be in range."""
        super().check(site)
        at_query, at_key = self._at(site)
        reach = max(np.abs(at - self._centre(at_key)).max(initial=0.0) for at in (at_query, at_key))
        most = _LARGEST[site.dtype.name] * self.scale_base / math.log1p(1.0 / self.gamma)
        if reach > most:
            raise RelposValueError(
                f"positions: {reach:g} from the middle of the keys, in {site.dtype} the factors with scale_base "
                f"{self.scale_base:g} allow {most:.0f}"
            )

    @staticmethod
    def _centre(columns: Array) -> float:
        """The middle of the keys."""
        return float(columns.min() + columns.max()) / 2 if columns.size else 0.0

    def _scales(self, rows: Array, columns: Array, pairs: int) -> tuple[Array, Array]:
        options = {"scale_base": self.scale_base, "gamma": self.gamma, "centre": self._centre(columns)}
        return xpos_scales(rows, pairs, **options), 1.0 / xpos_scales(columns, pairs, **options)

    def _sizes(self, rows: Array, columns: Array, pairs: int) -> tuple[Array, Array]:
        # ln(zeta_p) / B, from whole numbers of pairs.
        rate = np.log((np.arange(pairs) + pairs * self.gamma) / (pairs + pairs * self.gamma)) / self.scale_base
        middle = self._centre(columns)
        return np.exp((rows - middle)[..., None] * rate), np.exp((middle - columns)[..., None] * rate)


def _places_of(at: Sample) -> dict[str, Any]:
    """Positions of one's own: of keys, or of queries and keys, as numbers."""
    of = at.pick("none", "keys", "both")
    if of == "none":
        return {}
    keys = np.floor(np.abs(at.normal(*at.batch, at.k_len)).astype(np.float64) * 20).astype(np.int64)
    if of == "keys":
        return {"positions": keys}
    return {"positions": _quarters(at.normal(at.q_len), 9), "key_positions": keys}


def _quarters(x: Array, spread: int) -> Array:
    """Places that single precision holds without rounding, or its angles would be others."""
    return np.rint(x.astype(np.float64) * spread * 4) / 4


def _turned_of(at: Sample) -> int:
    """The last four channels stay, as in models that turn only some."""
    every = at.dim // 2 * 2
    return at.pick(every - 4 if every > 4 else every, every, 2)


@register(
    "rotary",
    Rotary,
    adds="queries and keys turned by angles that grow with position",
    paper="Su et al., 2021 (Neurocomputing 2024)",
    doi="10.48550/arXiv.2104.09864",
    equation="15",
    variants=(*LAYOUTS, "values"),
    options="any channels; positions per item, several axes; linear, NTK, YaRN, Llama 3, LongRoPE and other rules",
    models="RoFormer, GPT-J, GPT-NeoX, Llama, Mistral, Qwen, Qwen2-VL, Phi-3, Gemma, EVA-02, DINOv3, Pixtral",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    dim, of_values = _turned_of(at), at.variant == "values"
    if of_values:  # they have these channels too
        dim = min(dim, at.v_dim // 2 * 2)
    layout = "interleaved" if of_values else at.variant or "half"
    options: dict[str, Any] = {"layout": layout, "magnitude": at.pick(1.125, 1.0), "values": of_values}
    axes = at.pick(0, 2, 3, 1, None)
    if axes is None:
        options |= {"frequencies": at.normal(dim // 2), **_places_of(at)}
    elif axes:
        kv_heads = at.pick((), (parts["k"].shape[-3],))
        options["frequencies"] = at.normal(axes, *kv_heads, dim // 2) * parts["q"].dtype.type(0.25)
        options["positions"] = _quarters(at.normal(axes, at.q_len), 3)
        options["key_positions"] = _quarters(at.normal(*at.batch, axes, at.k_len), 3)
    else:
        options |= {"dim": dim, "base": at.pick(500.0, 10000.0, 2.0), **_places_of(at)}
    spare = (min(at.dim, at.v_dim) if of_values else at.dim) - dim
    first = at.pick(None, spare, min(1, spare))
    if first is not None:
        options["channels"] = (first, first + dim)
    options["blocks"] = at.pick(1, 2 if dim % 4 == 0 else dim // 2)
    return {**parts, "position": Rotary(**options), "kwargs": {"causal": True}}


@register(
    "xpos",
    XPos,
    adds="rotary positions with a decay",
    paper="Sun et al., ACL 2023",
    doi="10.48550/arXiv.2212.10554",
    variants=XPOS_LAYOUTS,
    models="LeX Transformer, RetNet",
)
def _build_xpos(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    # A base this small that the scaling is seen within some ten positions.
    dim, scale_base, places = _turned_of(at), at.pick(64.0, 512.0), _places_of(at)
    options = {"gamma": at.pick(0.4, 1.0), "layout": at.variant or "interleaved", **places}
    position = XPos(dim, base=500.0, scale_base=scale_base, **options)
    return {**parts, "position": position, "kwargs": {"causal": True}}
