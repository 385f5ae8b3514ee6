r"""Rotary positions on arrays: the formulas of the reference, on matrices and vectors."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.formulas.frequencies import rotary_frequencies
from relpos_np.types import Array


def rotary_matrices(positions: Array, frequencies: Array, *, magnitude: float = 1.0) -> Array:
    r"""One 2 by 2 matrix per position and pair of channels.

    .. math::

        R_{t,p} = m \begin{pmatrix} \cos \theta_{t,p} & -\sin \theta_{t,p} \\
        \sin \theta_{t,p} & \cos \theta_{t,p} \end{pmatrix}, \qquad
        \theta_{t,p} = t\,\omega_p \quad \text{or} \quad \sum_a t_a\, \Omega_{a,p}

    Parameters
    ----------
    positions : ndarray, shape (..., L) or (..., A, L)
        Positions t; integers or not, in any order, negative ones included. Where the frequencies have axes, A
        coordinates of each.
    frequencies : ndarray, shape (P,), (A, P) or (A, H, P)
        Angle :math:`\omega_p` per step of position, or of each coordinate, for all heads or each.
    magnitude : float
        The factor m.

    Returns
    -------
    ndarray of float64, shape (..., L, P, 2, 2) or (..., H, L, P, 2, 2)
        The matrices.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.2; Heo et al., "Rotary
    Position Embedding for Vision Transformer", ECCV 2024, for sums over coordinates.
    """
    positions, frequencies = np.asarray(positions, np.float64), np.asarray(frequencies, np.float64)
    if frequencies.ndim == 1:
        angle = positions[..., None] * frequencies
    else:
        angle = np.zeros(())
        for a, omega in enumerate(frequencies):
            t = positions[..., a, :, None]
            angle = angle + (t * omega if omega.ndim == 1 else t[..., None, :, :] * omega[:, None, :])
    rows = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return magnitude * np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


@np.errstate(all="ignore")
def rotate_pairs(
    x: Array, matrices: Array, *, layout: Literal["half", "interleaved"] = "half", first: int = 0, blocks: int = 1
) -> Array:
    r"""Turn 2P channels of each vector, pair by pair; the others stay.

    .. math::

        \begin{pmatrix} y_{t,a(p)} \\ y_{t,b(p)} \end{pmatrix} =
        R_{t,p} \begin{pmatrix} x_{t,a(p)} \\ x_{t,b(p)} \end{pmatrix}

    with (a, b) = (f + p, f + p + P) for "half" and (f + 2p, f + 2p + 1) for "interleaved". Of several blocks each has
    its halves: with m = P / blocks pairs in each, pair p = c m + r has (a, b) = (f + 2c m + r, f + 2c m + r + m).

    Parameters
    ----------
    x : ndarray, shape (..., L, D)
        Vectors with D at least f + 2P.
    matrices : ndarray, shape (..., L, P, 2, 2)
        As from `rotary_matrices`; leading axes broadcast.
    layout : {"half", "interleaved"}
        Which channels are partners.
    first : int
        The first channel that turns, f.
    blocks : int
        Number of equal parts of the channels that turn; "interleaved" has the same partners in any number.

    Returns
    -------
    ndarray, shape (..., L, D)
        The vectors in the dtype of x, computed in that of the matrices where it is wider.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 15.
    """
    pairs = matrices.shape[-3]
    before, turning, rest = x[..., :first], x[..., first : first + 2 * pairs], x[..., first + 2 * pairs :]
    # Halves of each block, or pairs: (..., blocks, 2, m) or (..., P, 2).
    apart = (blocks, 2, pairs // blocks) if layout == "half" else (pairs, 2)
    z = turning.reshape(*turning.shape[:-1], *apart)
    if layout == "half":
        z = z.swapaxes(-1, -2).reshape(*turning.shape[:-1], pairs, 2)
    z = np.matmul(matrices, z[..., None])[..., 0]
    if layout == "half":
        z = z.reshape(*z.shape[:-2], blocks, pairs // blocks, 2).swapaxes(-1, -2)
    turned = z.reshape(*z.shape[: -len(apart)], 2 * pairs)
    return np.concatenate([before, turned, rest], axis=-1).astype(x.dtype, copy=False)


@np.errstate(all="ignore")
def rotate_inputs(x: Any, heads: int, *, base: float = 10000.0) -> Array:
    r"""Turn hidden states before they are projected to queries and keys, as wav2vec 2.0 Conformers do.

    .. math::

        y_{t,h} = R_t\, x_{t,h}, \qquad q_t = W_q\, y_t, \quad k_t = W_k\, y_t

    This is **not** a relative encoding: in :math:`q_t \cdot k_s = x_t^\top R_t^\top W_q^\top W_k R_s\, x_s` the
    rotations stand on both sides of :math:`W_q^\top W_k`, and do not join to :math:`R_{s-t}`. Moving all positions
    changes the scores. `Rotary` turns the projected queries and keys, and is relative.

    Parameters
    ----------
    x : ndarray, shape (..., L, E)
        Hidden states.
    heads : int
        Number H of parts of E / H channels (an even number), each turned in the same way, in the layout "half".
    base : float
        Ratio between the longest and the shortest wavelength.

    Returns
    -------
    ndarray, shape (..., L, E)
        In the dtype of x. Values are projected from x itself.

    Raises
    ------
    RelposValueError
        If x has fewer than two axes, H does not divide E, E / H is odd, or `base` is not positive.

    References
    ----------
    The rotary mode of Wav2Vec2-Conformer in fairseq and transformers, 2022; Su et al., "RoFormer: Enhanced Transformer
    with Rotary Position Embedding", 2021, for the rotation.
    """
    states = check.floating("x", x)
    heads = check.integer("heads", heads, 1)
    if states.ndim < 2 or states.shape[-1] % (2 * heads) or not states.shape[-1]:
        raise RelposValueError(f"x: expected shape (..., L, E) with E a multiple of {2 * heads}, found {states.shape}")
    size = states.shape[-1] // heads
    matrices = rotary_matrices(np.arange(states.shape[-2]), rotary_frequencies(size, base=base))
    parts = np.moveaxis(states.reshape(*states.shape[:-1], heads, size), -2, 0)
    turned = np.moveaxis(rotate_pairs(parts, matrices), 0, -2).reshape(states.shape)
    return turned.astype(check.array("x", x).dtype, copy=False)


def xpos_scales(
    positions: Array, pairs: int, *, scale_base: float = 512.0, gamma: float = 0.4, centre: float = 0.0
) -> Array:
    r"""How xPos scales each pair of a query; a key is divided by it.

    .. math::

        \zeta_p^{(t - c) / B}, \qquad \zeta_p = \frac{p / P + \gamma}{1 + \gamma}

    Parameters
    ----------
    positions : ndarray, shape (..., L)
        Positions t.
    pairs : int
        Number of pairs P = d / 2.
    scale_base : float
        The number B.
    gamma : float
        The number :math:`\gamma`.
    centre : float
        The position c where nothing is scaled.

    Returns
    -------
    ndarray of float64, shape (..., L, P)
        The factors.

    References
    ----------
    Sun et al., "A Length-Extrapolatable Transformer", ACL 2023, algorithm 1.
    """
    zeta = (np.arange(pairs) / pairs + gamma) / (1.0 + gamma)
    scales: Array = zeta ** ((np.asarray(positions, np.float64) - centre) / scale_base)[..., None]
    return scales
