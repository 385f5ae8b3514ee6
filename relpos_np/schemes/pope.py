r"""Polar positions (PoPE): channels say how large a product is, positions alone at which angle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.formulas.angles import cos_sin, geometric_frequencies
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, Terms, register
from relpos_np.schemes.checks import finite
from relpos_np.schemes.positioned import Positioned
from relpos_np.types import Array


@np.errstate(all="ignore")
def polar_vectors(x: Array, angles: Array) -> Array:
    r"""Each of the first C channels as a vector in a plane of its own; the others stay, behind them.

    .. math::

        y_{t,c} = \mu(x_{t,c}) \cos \theta_{t,c}, \qquad y_{t,C+c} = \mu(x_{t,c}) \sin \theta_{t,c}, \qquad
        \mu(x) = \ln(1 + e^x)

    Parameters
    ----------
    x : ndarray, shape (..., L, D)
        Queries or keys with D at least C.
    angles : ndarray, shape (..., L, C)
        Angles :math:`\theta`; leading axes broadcast.

    Returns
    -------
    ndarray, shape (..., L, D + C)
        In the dtype of x, computed in that of the angles where it is wider.

    References
    ----------
    Gopalakrishnan et al., "Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings", 2025.
    """
    return _polar_vectors(x, np.cos(angles), np.sin(angles))


@np.errstate(all="ignore")
def _polar_vectors(x: Array, cos: Array, sin: Array) -> Array:
    count = cos.shape[-1]
    size = np.logaddexp(0.0, x[..., :count])
    whole = np.concatenate([size * cos, size * sin, x[..., count:]], axis=-1)
    return whole.astype(x.dtype, copy=False)


class PoPE(Positioned):
    r"""Polar positions (PoPE): products of magnitudes, at angles on which only positions have an effect.

    .. math::

        s_{ij} = \sigma \sum_{c < C} \mu(q_{i,c})\, \mu(k_{j,c}) \cos\left((j - i - M)\, \omega_c + \delta_c\right)
        + \sigma \sum_{c \ge C} q_{i,c}\, k_{j,c}, \qquad \mu(x) = \ln(1 + e^x), \qquad \omega_c = \mathrm{base}^{-c/C}

    with :math:`\sigma = D^{-1/2}` as ever. A pair of channels of rotary positions has an angle of its own, which
    adds to that of the positions; here a channel has none, and frequencies are as many as channels.

    Parameters
    ----------
    bias : ndarray, shape (C,) or (H, C)
        Angles :math:`\delta` that are learned, for all heads or for each. C is the number of channels that have one.
        Published code limits them to :math:`-2\pi \dots 0` in each step: ``np.clip(bias, -2 * np.pi, 0)``.
    base : float
        Ratio between the longest and the shortest wavelength, nearly.
    frequencies : ndarray, shape (C,), optional
        Angles per step of position in place of :math:`\omega_c`. `attention_vjp` has their gradient.
    positions, key_positions : ndarray of int or float, shape (..., L), optional
        See `Rotary`.

    Raises
    ------
    RelposValueError
        If the call's heads or head_dim do not fit, `frequencies` are not as many as channels, `base` is not positive or
        is given along with `frequencies`, or positions do not fit the call.

    Notes
    -----
    Magnitudes and angles make queries and keys of C more channels, on which kernels run as ever. Angles are computed in
    float64 and rounded once as cosines and sines.

    References
    ----------
    Gopalakrishnan et al., "Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings", 2025.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 10, 64))  # (batch, heads, length, channels)
    >>> rp.attention(q, k, v, position=rp.PoPE(rng.standard_normal((8, 64))), causal=True).shape
    (2, 8, 10, 64)
    """

    def __init__(
        self,
        bias: Any,
        *,
        base: float = 10000.0,
        frequencies: Any = None,
        positions: Any = None,
        key_positions: Any = None,
    ) -> None:
        self.bias = check.table("bias", bias, "channels | heads channels")
        self.base = check.positive("base", base)
        self.frequencies = None if frequencies is None else check.table("frequencies", frequencies, "channels")
        finite("bias", self.bias)
        finite("frequencies", self.frequencies)
        if self.frequencies is not None:
            if self.base != 10000.0:
                raise RelposValueError(f"base: {base} has no effect together with frequencies")
            if self.frequencies.shape != self.bias.shape[-1:]:
                raise RelposValueError(
                    f"frequencies: expected shape {self.bias.shape[-1:]} as bias {self.bias.shape} has channels, "
                    f"found {self.frequencies.shape}"
                )
        self._place(positions, key_positions)

    def check(self, site: Site) -> None:
        """The channels must exist, and every query and key needs a position."""
        if self.bias.shape[-1] > site.head_dim:
            raise RelposValueError(f"bias: {self.bias.shape[-1]} channels, head_dim of the call is {site.head_dim}")
        if self.bias.ndim == 2:
            check.heads("bias", self.bias, 0, site)
        self._check_places(site)

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Both operands in polar coordinates; the bias is taken off the angles of queries, which have all heads."""
        rows, columns = (np.asarray(at, np.float64)[..., None, :, None] for at in self._stand(site))
        bias = self.bias[..., None, :].astype(np.float64)  # (H or none, 1, C)
        queries, keys = (cos_sin(at, self._omega(), shift) for at, shift in ((rows, bias), (columns, np.zeros(()))))
        return _polar_vectors(q, *queries), _polar_vectors(k, *keys)

    def _omega(self) -> tuple[Array, Array]:
        """Frequencies in float64, and what rounding took off them."""
        if self.frequencies is None:
            return geometric_frequencies(self.base, self.bias.shape[-1])
        return self.frequencies.astype(np.float64), np.zeros(self.frequencies.shape)

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same with tables of cosines and sines, on the keys before their heads are repeated."""
        return Terms(*self.lower_vectors(np.asarray(q), np.asarray(k), site))

    def lower_vectors(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Magnitudes times turns."""
        (to_query, _), (to_key, _) = self._turns(site)
        return _polar(q, to_query), _polar(k, to_key)

    def _turns(self, site: Site) -> list[tuple[Array, Array]]:
        """e^(i theta) of queries and of keys in float64, (..., H or 1, L, C), and positions (..., 1, L, 1)."""
        count = self.bias.shape[-1]
        places = [np.moveaxis(at, -1, -2)[..., None, :, :] for at in self._at(site)]
        shift = self.bias.astype(np.float64).reshape(-1, 1, count)
        turns = []
        for place, off in ((places[0], shift), (places[1], np.zeros(()))):
            cos, sin = cos_sin(place, self._omega(), off)
            turn = np.empty(cos.shape, np.complex128)
            turn.real, turn.imag = cos, sin
            turns.append((turn, place))
        return turns

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Positions of queries and of keys, and the bias of the heads; without positions, distances decide."""
        bias = self.bias[part.heads] if self.bias.ndim == 2 else self.bias
        return (self._with(bias=bias, **self._cut_places(site, part)), *part.alone(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Queries and keys with twice the channels, and what they are made of."""
        length, items = site.q_len + site.k_len, math.prod(site.batch)
        # Angles of float64 and complex numbers for every head that has a bias, and every item that has positions.
        angles = (1 if self.positions is None else items) * (site.heads if self.bias.ndim == 2 else 1)
        made = length * site.head_dim * (items * site.heads * (4 * site.dtype.itemsize + 40) + angles * 40)
        return MemoryBound(made, made, 2 * made)

    @np.errstate(all="ignore")
    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Through magnitudes, whose derivative is the logistic function, and through angles, a quarter turn on."""
        count = self.bias.shape[-1]
        to_bias, to_omega = np.zeros(self.bias.shape), np.zeros(count)
        lifted: list[Array] = []
        operands = [(np.asarray(x), np.asarray(to)) for x, to in ((q, grad.query), (k, grad.key))]
        for (x, to), (turn, place) in zip(operands, self._turns(site), strict=True):
            wide = x[..., :count].astype(np.float64)
            given = to[..., :count] + 1j * to[..., count : 2 * count].astype(np.float64)
            there = given != 0  # an excluded key may hold anything
            size = np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))
            # The parts of the gradient along a vector and across it.
            given = given * np.conj(turn)
            slope = np.where(wide >= 0, 1.0, np.exp(wide)) / (1.0 + np.exp(-np.abs(wide)))
            back = np.empty(x.shape, x.dtype)
            back[..., :count] = np.where(there, given.real * slope, 0.0)
            back[..., count:] = to[..., 2 * count :]
            angle = np.where(there, given.imag * size, 0.0)
            if self.frequencies is not None:
                to_omega += (angle * place).reshape(-1, count).sum(axis=0)
            if not lifted:  # queries, off whose angles the bias was taken
                each = angle.sum(axis=(*range(len(site.batch)), -2))  # (H, C)
                to_bias -= each if self.bias.ndim == 2 else each.sum(axis=0)
            lifted.append(back)
        found = SchemeGradient(lifted[0], lifted[1], {"bias": to_bias})
        if self.frequencies is not None:
            found.arrays["frequencies"] = to_omega
        return found


@np.errstate(all="ignore")
def _polar(x: Array, turn: Array) -> Array:
    """Magnitudes times turns, rounded once to the dtype of x, and the channels that have none."""
    count = turn.shape[-1]
    out = np.empty((*x.shape[:-1], x.shape[-1] + count), x.dtype)
    size = x[..., :count].astype(np.float64)
    size = np.maximum(size, 0) + np.log1p(np.exp(-np.abs(size)))
    np.multiply(size, turn.real, out=out[..., :count], casting="same_kind")
    np.multiply(size, turn.imag, out=out[..., count : 2 * count], casting="same_kind")
    out[..., 2 * count :] = x[..., count:]
    return out


@register(
    "pope",
    PoPE,
    adds="magnitudes at angles that grow with position",
    paper="Gopalakrishnan et al., 2025",
    doi="10.48550/arXiv.2509.10534",
    models="PoPE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    heads, count = parts["q"].shape[-3], at.pick(max(at.dim - 2, 1), at.dim, 1)
    options: dict[str, Any] = {"bias": at.normal(*at.pick((heads,), ()), count)}
    if at.pick(False, True):
        options["frequencies"] = at.normal(count)
    else:
        options["base"] = at.pick(100.0, 10000.0)
    of = at.pick("none", "keys", "both")
    # Places that single precision holds without rounding.
    if of != "none":
        options["positions"] = np.rint(at.normal(*at.batch, at.k_len).astype(np.float64) * 20) / 4
    if of == "both":
        options["key_positions"] = options["positions"]
        options["positions"] = np.rint(at.normal(at.q_len).astype(np.float64) * 20) / 4
    return {**parts, "position": PoPE(**options), "kwargs": {"causal": True}}
