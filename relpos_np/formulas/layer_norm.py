"""The layer norm that some models apply to their rows of positions."""

from __future__ import annotations

import numpy as np

from relpos_np.types import Array


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    r"""Rows with mean 0 and variance 1, times a weight, plus a bias.

    .. math::

        y = \frac{x - \bar{x}}{\sqrt{\overline{(x - \bar{x})^2} + \epsilon}} \odot w + b

    Parameters
    ----------
    x : ndarray, shape (..., D)
        Rows.
    weight, bias : ndarray, shape (D,)
        w and b.
    eps : float
        :math:`\epsilon`.

    Returns
    -------
    ndarray, shape (..., D)
        In the dtype of the operands.

    References
    ----------
    Ba et al., "Layer Normalization", 2016.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    found: Array = centred / deviation * weight + bias
    return found
