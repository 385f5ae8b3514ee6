r"""Rotations by exponentials of matrices (LieRE, GRAPE): rotary positions in planes that are learned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, SchemeGradient, Site, Terms, in_order, register
from relpos_np.schemes.checks import finite
from relpos_np.schemes.positioned import Positioned
from relpos_np.types import Array


def skew_generators(generators: Array) -> Array:
    r"""Skew-symmetric matrices of the numbers above a diagonal: :math:`G = U - U^\top`, U the strict upper triangle.

    Parameters
    ----------
    generators : ndarray, shape (..., S, S)
        Only what is above the diagonal counts.

    Returns
    -------
    ndarray, shape (..., S, S)
        Of which every exponential is a rotation.

    References
    ----------
    Ostmeier et al., "LieRE: Lie Rotational Positional Encodings", ICML 2025.
    """
    upper = np.triu(generators, 1)
    skew: Array = upper - np.swapaxes(upper, -1, -2)
    return skew


def plane_generators(a: Array, b: Array) -> Array:
    r"""Generators of rotations in one plane: :math:`L = a b^\top - b a^\top`.

    Parameters
    ----------
    a, b : ndarray, shape (..., S)
        Two vectors that span the plane. For unit vectors at a right angle :math:`e^{t L}` turns by t.

    Returns
    -------
    ndarray, shape (..., S, S)
        For `LieRE`'s ``generators``.

    References
    ----------
    Zhang et al., "Group Representational Position Encoding", 2025 (multiplicative GRAPE).
    """
    product = np.asarray(a)[..., :, None] * np.asarray(b)[..., None, :]
    generators: Array = product - np.swapaxes(product, -1, -2)
    return generators


def exponential_rotations(positions: Array, generators: Array) -> Array:
    r"""The rotation of each position.

    .. math::

        R(t) = \exp(t\, G) \quad \text{or} \quad \exp\Big(\sum_a t_a\, G_a\Big)

    Parameters
    ----------
    positions : ndarray, shape (..., L) or (..., A, L)
        Positions t; where the generators have axes, A coordinates of each.
    generators : ndarray, shape (B, S, S), (A, B, S, S) or (A, H, B, S, S)
        Skew-symmetric matrices G: B blocks for all heads or each.

    Returns
    -------
    ndarray of float64, shape (..., L, B, S, S) or (..., H, L, B, S, S)
        The rotations, by the series of small exponents that are squared again.

    References
    ----------
    Ostmeier et al., "LieRE: Lie Rotational Positional Encodings", ICML 2025.
    """
    t, g = np.asarray(positions, np.float64), np.asarray(generators, np.float64)
    if g.ndim == 3:
        exponent = t[..., None, None, None] * g
    else:
        exponent = np.zeros(())
        for a, one in enumerate(g):
            at = t[..., a, :, None, None, None]
            exponent = exponent + (at * one if one.ndim == 3 else at[..., None, :, :, :, :] * one[:, None])
    # Each exponent is halved until it is below a half, where the series takes few terms.
    largest = np.abs(exponent).sum(axis=-1).max(axis=-1, initial=0.0)
    halvings = np.maximum(np.frexp(largest)[1] + 1, 0)
    small = np.ldexp(exponent, -halvings[..., None, None])
    unit = np.eye(g.shape[-1])
    rotations: Array = np.broadcast_to(unit, exponent.shape)
    for n in range(18, 0, -1):
        rotations = unit + np.matmul(small, rotations) / n
    for step in range(halvings.max(initial=0)):
        again = halvings > step
        rotations[again] = np.matmul(rotations[again], rotations[again])
    return rotations


@np.errstate(all="ignore")
def rotate_blocks(x: Array, rotations: Array) -> Array:
    r"""Turn the first B S channels of each vector, S at a time; the others stay.

    Parameters
    ----------
    x : ndarray, shape (..., L, D)
        Vectors with D at least B S.
    rotations : ndarray, shape (..., L, B, S, S)
        As from `exponential_rotations`; leading axes broadcast.

    Returns
    -------
    ndarray, shape (..., L, D)
        In the dtype of x, computed in that of the rotations where it is wider.

    References
    ----------
    Ostmeier et al., "LieRE: Lie Rotational Positional Encodings", ICML 2025.
    """
    count = rotations.shape[-3] * rotations.shape[-1]
    parts = x[..., :count].reshape(*x.shape[:-1], rotations.shape[-3], rotations.shape[-1])
    turned = np.matmul(rotations, parts[..., None])[..., 0].reshape(*x.shape[:-1], count)
    return np.concatenate([turned, x[..., count:]], axis=-1).astype(x.dtype, copy=False)


# Exponents beyond have no digits left of their angles in float64.
_LONGEST = 2.0**52


class LieRE(Positioned):
    r"""Rotations by exponentials of skew-symmetric matrices: rotary positions without fixed planes.

    .. math::

        s_{ij} = \sigma\, (R(x_i)\, q_i) \cdot (R(x_j)\, k_j), \qquad
        R(x) = \exp\Big(\sum_a x_a\, G_a\Big), \qquad G_a = U_a - U_a^\top

    with U the part of `generators` above the diagonal, and x the coordinates of a query or key. With a single axis,
    or generators that commute, :math:`s_{ij} = \sigma\, q_i \cdot \exp\big(\sum_a (x_j - x_i)_a G_a\big) k_j`, which is
    GRAPE's multiplicative form; with others, scores depend on more than differences. `Rotary` is the case of
    blocks of two channels.

    Parameters
    ----------
    generators : ndarray, shape (B, S, S), (A, B, S, S) or (A, H_kv, B, S, S)
        Matrices for each of B blocks of S channels, the first B S of a head; for A coordinates; for all heads or each
        (grouped query heads have that of their key head). Only what is above their diagonals counts. For GRAPE,
        `plane_generators`.
    positions, key_positions : ndarray of int or float, shape (..., L) or (..., A, L), optional
        See `Rotary`. The published code has coordinates from 0 to 1 along each axis of an image.

    Raises
    ------
    RelposValueError
        If the matrices are not square, blocks have fewer than two channels or all more than the call's head_dim;
        positions do not fit the call, are missing where there are several axes, or so large that nothing is left of an
        angle's digits.

    Notes
    -----
    Each position has its rotations, of B S S numbers in float64, that are rounded once. They are made from the
    eigenvalues of :math:`i G`, which for a single axis are computed once for all positions, and exact to about
    :math:`10^{-16} \lVert x \rVert \lVert G \rVert`.

    References
    ----------
    Ostmeier et al., "LieRE: Lie Rotational Positional Encodings", ICML 2025; Zhang et al., "Group Representational
    Position Encoding", 2025, whose published code has `Rotary`'s planes and learned frequencies, of the other sign.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 49, 64))  # (batch, heads, 7 x 7 patches, channels)
    >>> generators = 0.1 * rng.standard_normal((2, 8, 8, 8))  # for each axis, 8 blocks of 8 channels
    >>> places = np.stack(np.divmod(np.arange(49), 7)).astype(float)  # row and column of each patch
    >>> rp.attention(q, k, v, position=rp.LieRE(generators, positions=places)).shape
    (2, 8, 49, 64)
    """

    def __init__(self, generators: Any, *, positions: Any = None, key_positions: Any = None) -> None:
        forms = "blocks size size | axes blocks size size | axes kv_heads blocks size size"
        self.generators = check.table("generators", generators, forms)
        if self.generators.shape[-1] != self.generators.shape[-2] or self.generators.shape[-1] < 2:
            raise RelposValueError(
                f"generators: expected square matrices of at least 2 channels, found shape {self.generators.shape}"
            )
        finite("generators", self.generators)
        self._place(positions, key_positions)

    @property
    def _axes(self) -> int | None:
        return None if self.generators.ndim == 3 else self.generators.shape[0]

    @property
    def _channels(self) -> int:
        return int(self.generators.shape[-3] * self.generators.shape[-1])

    def check(self, site: Site) -> None:
        """The channels must exist, and every query and key needs a position."""
        if self._channels > site.head_dim:
            raise RelposValueError(
                f"generators: shape {self.generators.shape} turns {self._channels} channels, head_dim of the call is "
                f"{site.head_dim}"
            )
        if self.generators.ndim == 5 and self.generators.shape[1] != site.kv_heads:
            raise RelposValueError(
                f"generators: expected one set for each of {site.kv_heads} key heads, found {self.generators.shape}"
            )
        self._check_places(site)
        largest = np.abs(self.generators).max(initial=0.0) * float(self.generators.shape[-1])
        reach = max(float(np.abs(at).max(initial=0.0)) for at in self._at(site)) * (self._axes or 1)
        if not reach * largest < _LONGEST:
            raise RelposValueError(
                f"positions: up to {reach:g} with generators up to {largest:g} leave no digits of a rotation; expected "
                f"products below {_LONGEST:g}"
            )

    def transform(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Both operands turned, each by the rotations of its positions."""
        skew = skew_generators(self.generators.astype(np.float64))
        operands = []
        for x, t in zip((q, k), self._stand(site), strict=True):
            rotations = exponential_rotations(t, skew)
            if skew.ndim < 5:  # the same for all heads
                rotations = np.expand_dims(rotations, -5)
            else:  # those of a key head for all that read it
                rotations = np.repeat(rotations, site.heads // site.kv_heads, axis=-5)
            operands.append(rotate_blocks(x, rotations))
        return operands[0], operands[1]

    def lower(self, q: Array, k: Array, site: Site) -> Terms:
        """The same with rotations from eigenvalues, on the keys before their heads are repeated."""
        return Terms(*self.lower_vectors(q, k, site))

    def lower_vectors(self, q: Array, k: Array, site: Site) -> tuple[Array, Array]:
        """Queries and keys times the rotations of their positions."""
        to_query, to_key = self._rotations(site)
        return _blockwise(np.asarray(in_order(q)), to_query), _blockwise(np.asarray(in_order(k)), to_key)

    def _rotations(self, site: Site) -> list[Array]:
        """Of queries and of keys, (..., H_kv or 1, L, B, S, S)."""
        return [_Spectrum(self.generators, at).rotations().astype(site.dtype) for at in self._at(site)]

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Positions of queries and of keys, and generators of the heads; without positions, distances decide."""
        generators = self.generators[:, part.kv_heads] if self.generators.ndim == 5 else self.generators
        return (self._with(generators=generators, **self._cut_places(site, part)), *part.alone(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """Turned queries and keys, and rotations of every position, with what they are made of."""
        items = math.prod(site.batch)
        length = site.q_len + site.k_len
        sets = (1 if self.positions is None else items) * (site.heads if self.generators.ndim == 5 else 1)
        numbers = length * sets * self._channels * self.generators.shape[-1]
        turned = 4 * length * site.head_dim * items * site.heads * site.dtype.itemsize
        return MemoryBound(turned + 48 * numbers, turned + 80 * numbers, 2 * turned + 160 * numbers)

    @np.errstate(all="ignore")
    def lift(self, q: Array, k: Array, site: Site, grad: Terms) -> SchemeGradient:
        """Gradients turn back; those of the exponents go through the derivative of the exponential."""
        lifted, total = [], np.zeros(())
        for x, to, at in zip((q, k), (grad.query, grad.key), self._at(site), strict=True):
            spectrum = _Spectrum(self.generators, at)
            given = np.asarray(to)
            back = np.swapaxes(spectrum.rotations(), -1, -2)
            lifted.append(_blockwise(given, back.astype(given.dtype)))
            total = total + self._spun(spectrum, np.asarray(x), given, at, site)
        above = np.triu(total - np.swapaxes(total, -1, -2), 1)
        return SchemeGradient(lifted[0], lifted[1], {"generators": above.reshape(self.generators.shape)})

    def _spun(self, spectrum: _Spectrum, x: Array, grad: Array, at: Array, site: Site) -> Array:
        """Gradient of the matrices as if all their entries counted, (A, H_kv or 1, B, S, S)."""
        blocks, size = self.generators.shape[-3], self.generators.shape[-1]
        sets = site.kv_heads if self.generators.ndim == 5 else 1
        count, length = math.prod(site.batch), x.shape[-2]
        shape = (count, sets, x.shape[-3] // sets, length, blocks, size)
        given = grad[..., : self._channels].astype(np.float64).reshape(shape)
        # An excluded key may hold anything.
        there = (given != 0).any(axis=(-1, -2), keepdims=True)
        vectors = np.where(there, x[..., : self._channels].astype(np.float64).reshape(shape), 0.0)
        total = np.zeros((at.shape[-2], sets, blocks, size, size))
        own = at.ndim > 2 and math.prod(at.shape[:-2]) > 1
        places = np.broadcast_to(at, (*site.batch, *at.shape[-2:])).reshape(count, *at.shape[-2:])
        # Items that share positions are summed before their exponent's gradient is made.
        products = np.zeros((sets, length, blocks, size, size))
        for item in range(count):
            products += np.einsum("hglbs,hglbt->hlbst", given[item], vectors[item])
            if own or item == count - 1:
                exponents = spectrum.gradient(products, np.unravel_index(item, site.batch) if own else ())
                total += np.einsum("al,hlbst->ahbst", places[item], exponents)
                products[...] = 0.0
        return total


class _Spectrum:
    """Exponents of positions as V diag(i lambda) V^H: of the matrices of iG, which are Hermitian.

    `values` (..., L, B, S) and `vectors` (..., L or 1, B, S, S), after the axis of heads (H_kv or 1).
    """

    def __init__(self, generators: Array, at: Array) -> None:
        upper = np.triu(generators, 1).astype(np.float64)
        hermitian = -1j * (upper - np.swapaxes(upper, -1, -2))
        if generators.ndim < 5:
            hermitian = hermitian[..., None, :, :, :]  # (H or 1, B, S, S) or (A, H or 1, B, S, S)
        if generators.ndim == 3:
            values, self.vectors = np.linalg.eigh(hermitian[:, None])
            self.values = at[..., 0, None, :, None, None] * values
        else:
            summed = np.einsum("...al,ahbst->...hlbst", at, hermitian)
            self.values, self.vectors = np.linalg.eigh(summed)

    def rotations(self) -> Array:
        """Real parts of V diag(e^(i lambda)) V^H."""
        turned = self.vectors * np.exp(1j * self.values)[..., None, :]
        made: Array = np.matmul(turned, np.conj(np.swapaxes(self.vectors, -1, -2))).real
        return made

    def gradient(self, products: Array, item: tuple[Any, ...]) -> Array:
        """From gradients of the rotations of one batch item, (H_kv or 1, L, B, S, S), to those of the exponents.

        Divided differences of the exponential: e^(i (a + b) / 2) sinc((a - b) / 2), however near a and b are.
        """
        values, vectors = (self._of(x, inner, item) for x, inner in ((self.values, 4), (self.vectors, 5)))
        back = np.conj(np.swapaxes(vectors, -1, -2))
        half, other = values[..., :, None] / 2, values[..., None, :] / 2
        divided = np.exp(-1j * (half + other)) * np.sinc((half - other) / np.pi)
        made: Array = np.matmul(np.matmul(vectors, divided * np.matmul(np.matmul(back, products), vectors)), back).real
        return made

    @staticmethod
    def _of(x: Array, inner: int, item: tuple[Any, ...]) -> Array:
        """One batch item of an array whose axes before the last `inner` ones broadcast to those of the batch."""
        lead = x.ndim - inner
        at = item[len(item) - lead :] if item else (0,) * lead
        one: Array = x[tuple(0 if size == 1 else n for size, n in zip(x.shape[:lead], at, strict=True))]
        return one


@np.errstate(all="ignore")
def _blockwise(x: Array, rotations: Array) -> Array:
    """Blocks of channels turned: x (..., H, L, D) by rotations (..., H_kv or 1, L, B, S, S)."""
    sets, blocks, size = rotations.shape[-5], rotations.shape[-3], rotations.shape[-1]
    count = blocks * size
    parts = x[..., :count].reshape(*x.shape[:-3], sets, x.shape[-3] // sets, x.shape[-2], blocks, size)
    out = np.empty(x.shape, x.dtype)
    turned = np.einsum("...lbst,...lbt->...lbs", rotations[..., None, :, :, :, :], parts)
    out[..., :count] = turned.reshape(*x.shape[:-1], count)
    out[..., count:] = x[..., count:]
    return out


@register(
    "liere",
    LieRE,
    adds="queries and keys turned by exponentials of matrices",
    paper="Ostmeier et al., ICML 2025; Zhang et al., 2025",
    doi="10.48550/arXiv.2406.10322",
    options="positions per item, several axes; planes of GRAPE",
    models="LieRE, GRAPE",
)
def _build(at: Sample) -> dict[str, Any]:
    parts = at.operands(4, 2)
    size = at.pick(min(3, at.dim), 2, min(4, at.dim))
    # Not many: each has a matrix for every position, in loops, too.
    most = min(at.dim // size, 4)
    blocks = at.pick(max(most - 1, 1), most)
    axes = at.pick(2, None, 1)
    if axes is None:
        generators = at.normal(blocks, size, size)
    else:
        kv_heads = at.pick((), (parts["k"].shape[-3],))
        generators = at.normal(axes, *kv_heads, blocks, size, size)
    # Rotations of long exponents lose digits, whatever computes them.
    generators = generators * generators.dtype.type(1 / 32 if axes is None else 1 / 4)
    options: dict[str, Any] = {}
    inner = () if axes is None else (axes,)
    lead = at.pick((), at.batch)
    of = at.pick("both", "keys") if axes else at.pick("none", "keys", "both")
    # Places that single precision holds without rounding.
    if of != "none":
        options["positions"] = np.rint(at.normal(*lead, *inner, at.k_len).astype(np.float64) * 8) / 4
    if of == "both":
        options["key_positions"] = options["positions"]
        options["positions"] = np.rint(at.normal(*inner, at.q_len).astype(np.float64) * 8) / 4
    return {**parts, "position": LieRE(generators, **options)}
