r"""Sinusoidal absolute encodings, in the paper's layout and the ones found in code."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.base import Sample, register
from relpos_np.schemes.sample import encoded
from relpos_np.types import Array, Layout

LAYOUTS = ("interleaved", "concatenated", "tensor2tensor", "dimension_index")


def sinusoidal(positions: Array, dim: int, *, base: float = 10000.0, layout: Layout = "interleaved") -> Array:
    r"""Sinusoidal encoding of each position.

    With p the index of a pair of dimensions and t a position,

    .. math::

        \omega_p = \mathrm{base}^{-2p/D}, \qquad
        \mathrm{PE}(t)_{2p} = \sin(t\,\omega_p), \qquad \mathrm{PE}(t)_{2p+1} = \cos(t\,\omega_p) .

    Parameters
    ----------
    positions : ndarray, shape (L,)
        Positions t; integers or not, in any order, negative ones included.
    dim : int
        Number of dimensions D. If it is odd, there is a sine more than cosines, except in "tensor2tensor".
    base : float
        Ratio between the longest and the shortest wavelength.
    layout : {"interleaved", "concatenated", "tensor2tensor", "dimension_index"}
        - "interleaved": the paper, as above.
        - "concatenated": the same numbers, all sines before all cosines (Transformer-XL, XLNet, MarianMT).
        - "tensor2tensor": concatenated with :math:`\omega_p = \mathrm{base}^{-p/(\lfloor D/2 \rfloor-1)}`
          (tensor2tensor, fairseq, Whisper); the last of an odd number of dimensions is 0.
        - "dimension_index": :math:`\omega_i = \mathrm{base}^{-2i/D}` with i the dimension, sine at even
          i and cosine at odd i, as some notes print the formula. Partners then differ in frequency, so
          no rotation moves one position to another. Kept under its own name, not recommended.

    Returns
    -------
    ndarray of float64, shape (L, D)
        One row per position.

    Raises
    ------
    RelposValueError
        If `dim` is below 1, or `layout` unknown.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.5.
    """
    dim = check.integer("dim", dim, 1)
    t = np.asarray(positions, dtype=np.float64)[..., None]
    if layout == "dimension_index":
        i = np.arange(dim)
        angle = t * base ** (-2.0 * i / dim)
        return np.where(i % 2 == 0, np.sin(angle), np.cos(angle))
    if layout == "interleaved":
        angle = t * base ** (-2.0 * (np.arange(dim) // 2) / dim)
        return np.where(np.arange(dim) % 2 == 0, np.sin(angle), np.cos(angle))
    if layout == "concatenated":
        angle = t * base ** (-2.0 * np.arange((dim + 1) // 2) / dim)
        return np.concatenate([np.sin(angle), np.cos(angle[..., : dim // 2])], axis=-1)
    # With one pair tensor2tensor's denominator is 0; its published code guards it as max(..., 1).
    angle = t * base ** (-np.arange(dim // 2) / max(dim // 2 - 1, 1))
    return np.concatenate([np.sin(angle), np.cos(angle), np.zeros((*angle.shape[:-1], dim % 2))], axis=-1)


def rotation_matrix(delta: float, dim: int, *, base: float = 10000.0) -> Array:
    r"""The matrix that moves an interleaved encoding by delta positions, whatever the position.

    .. math::

        M(\delta)\, \mathrm{PE}(t) = \mathrm{PE}(t + \delta), \qquad
        M(\delta) = \mathrm{diag}_p \begin{bmatrix} \cos \delta\omega_p & \sin \delta\omega_p \\
        -\sin \delta\omega_p & \cos \delta\omega_p \end{bmatrix}, \qquad
        \omega_p = \mathrm{base}^{-2p/D}

    Hence :math:`M(a) M(b) = M(a + b)` and :math:`\det M = 1`.

    Parameters
    ----------
    delta : float
        Positions to move by; an integer or not, of either sign.
    dim : int
        Number of dimensions D, which must be even: the last of an odd number has no partner to turn with.
    base : float
        See `sinusoidal`.

    Returns
    -------
    ndarray of float64, shape (D, D)
        Block diagonal, one block per pair of dimensions (2p, 2p+1).

    Raises
    ------
    RelposValueError
        If `dim` is odd or below 2, or `base` is not positive.
    RelposTypeError
        If `delta` or `base` is no real number, or `dim` no integer.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.5.
    """
    delta, dim, base = check.real("delta", delta), check.integer("dim", dim, 2), check.real("base", base)
    if dim % 2:
        raise RelposValueError(f"dim: a rotation needs an even number of dimensions, found {dim}")
    if base <= 0:
        raise RelposValueError(f"base: expected a positive number, found {base}")
    even = np.arange(0, dim, 2)
    angle = delta * base ** (-even / dim)
    m = np.zeros((dim, dim))
    m[even, even] = m[even + 1, even + 1] = np.cos(angle)
    m[even, even + 1] = np.sin(angle)
    m[even + 1, even] = -np.sin(angle)
    return m


class Sinusoidal(AbsoluteEncoding):
    r"""Sinusoidal encodings to add to the inputs, for any length.

    .. math::

        x_t \leftarrow x_t + \mathrm{PE}(t)

    Parameters
    ----------
    dim : int
        Number of dimensions D of the inputs.
    base : float
        See `sinusoidal`.
    layout : {"interleaved", "concatenated", "tensor2tensor", "dimension_index"}
        See `sinusoidal`.

    Raises
    ------
    RelposValueError
        If `dim` is below 1, `base` is not positive, or there is no such layout.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.5.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((2, 10, 64))  # (batch, length, channels)
    >>> rp.Sinusoidal(64)(x).shape
    (2, 10, 64)
    """

    def __init__(self, dim: int, *, base: float = 10000.0, layout: Layout = "interleaved") -> None:
        self.dim = check.integer("dim", dim, 1)
        self.base = check.positive("base", base)
        self.layout = check.choice("layout", layout, LAYOUTS)

    def encode(self, positions: Any, dtype: Any = np.float64) -> Array:
        """Encodings of positions.

        Parameters
        ----------
        positions : int or ndarray, shape (L,)
            A length L, meaning 0 ... L-1, or the positions themselves.
        dtype : dtype
            Of the result; angles are always computed in float64.

        Returns
        -------
        ndarray, shape (L, D)
            One row per position.
        """
        t = self.positions(positions)
        if t.dtype.kind not in "iuf":
            raise RelposValueError(f"positions: expected numbers, found dtype {t.dtype}")
        return sinusoidal(t, self.dim, base=self.base, layout=self.layout).astype(dtype, copy=False)


@register(
    "sinusoidal",
    Sinusoidal,
    adds="sines added to the inputs",
    paper="Vaswani et al., NeurIPS 2017",
    doi="10.48550/arXiv.1706.03762",
    equation="section 3.5",
    variants=LAYOUTS,
    models="Transformer, fairseq, Whisper, MarianMT, ESPnet encoders",
)
def _build(at: Sample) -> dict[str, Any]:
    x = at.normal(*at.batch, at.q_len, at.dim)
    return encoded(x, Sinusoidal(at.dim, base=at.pick(10000.0, 50.0), layout=at.variant or "interleaved"))
