r"""Sinks: one more score in each row, which takes probability and has no value.

With z the sink of a row, o and lse what the row has without it,

.. math::

    g = \frac{e^{\mathrm{lse}}}{e^{\mathrm{lse}} + e^z} = \sigma(\mathrm{lse} - z), \qquad o' = g\, o, \qquad
    \mathrm{lse}' = \ln(e^{\mathrm{lse}} + e^z),

so that no kernel need know of it. Of a loss with gradients :math:`\bar o` and :math:`\bar l` of o' and lse',

.. math::

    \frac{\partial \mathcal{L}}{\partial o} = g\, \bar o, \qquad
    \frac{\partial \mathcal{L}}{\partial \mathrm{lse}} = g\, \bar l + g (1 - g)\, \bar o \cdot o, \qquad
    \frac{\partial \mathcal{L}}{\partial z} = (1 - g)\, \bar l - g (1 - g)\, \bar o \cdot o .
"""

from __future__ import annotations

import numpy as np

from relpos_np.types import Array


def _shares(lse: Array, sinks: Array) -> tuple[Array, Array]:
    """What the keys of each row, and what its sink has of the probability; neither if all scores are -inf."""
    one = lse.dtype.type(1)
    least = np.minimum(lse, sinks)
    # Of the smaller one by its exponential, so that neither share is rounded to 0 or 1 before it must be.
    e = np.exp(np.where(lse == sinks, lse.dtype.type(0), least - np.maximum(lse, sinks)))
    small, large = e / (one + e), one / (one + e)
    keys, own = np.where(lse >= sinks, large, small), np.where(lse >= sinks, small, large)
    nothing = np.isneginf(lse) & np.isneginf(sinks)
    return np.where(nothing, 0, keys).astype(lse.dtype), np.where(nothing, 0, own).astype(lse.dtype)


def sink(out: Array, lse: Array, sinks: Array) -> None:
    """Make `out` (..., L_q, D_v) and `lse` (..., L_q) in place what they are with sinks (..., L_q)."""
    keys, _ = _shares(lse, sinks)
    out *= keys[..., None]
    lse[...] = np.logaddexp(lse, sinks)


def before_sinks(
    out: Array, lse: Array, sinks: Array, grad_out: Array, grad_lse: Array | None
) -> tuple[Array, Array, Array]:
    """Gradients of the output and log-sum-exp without sinks, and of the sinks, from those with them."""
    keys, own = _shares(lse, sinks)
    # A row whose values are not finite, but which nobody asks about, has no gradient.
    moved = np.einsum("...d,...d->...", np.where(grad_out == 0, grad_out.dtype.type(0), out), grad_out) * keys * own
    to_lse, to_sinks = moved, -moved
    if grad_lse is not None:
        to_lse, to_sinks = to_lse + keys * grad_lse, to_sinks + own * grad_lse
    return grad_out * keys[..., None], to_lse, to_sinks
