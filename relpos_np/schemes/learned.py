r"""Learned absolute encodings: one trained vector per position, added to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.absolute import AbsoluteEncoding
from relpos_np.schemes.base import Sample, register
from relpos_np.schemes.sample import encoded
from relpos_np.types import Array, Int64


def learned_encoding(table: Array, positions: Int64) -> Array:
    r"""The vector of each position: :math:`\mathrm{PE}(t) = W_t`.

    Parameters
    ----------
    table : ndarray, shape (max_positions, D)
        Trained vectors W.
    positions : ndarray of int, shape (L,)
        Positions t.

    Returns
    -------
    ndarray, shape (L, D)
        One row per position.
    """
    check.rows("positions", check.integers("positions", positions), len(table))
    return np.stack([table[t] for t in positions]) if len(positions) else table[:0]


def add_at_every_layer(x: Array, layers: Sequence[Callable[[Array], Array]], encodings: Sequence[Array]) -> Array:
    r"""Layers one after another, with encodings added to the input of each.

    .. math::

        x^{(l)} = \mathrm{layer}_l\big(x^{(l-1)} + P_l\big), \qquad x^{(0)} = x

    Parameters
    ----------
    x : ndarray, shape (..., L, D)
        Input of the first layer.
    layers : sequence of callable
        Each takes and returns vectors (..., L, D).
    encodings : sequence of ndarray, each of shape (L, D)
        One :math:`P_l` per layer, learned or sinusoidal; the same one many times where layers share it.

    Returns
    -------
    ndarray, shape (..., L, D)
        Output of the last layer; `x` itself without layers.

    Raises
    ------
    RelposValueError
        If there are not as many encodings as layers, or one does not have the shape of its layer's input.

    References
    ----------
    Al-Rfou et al., "Character-Level Language Modeling with Deeper Self-Attention", AAAI 2019;
    Dehghani et al., "Universal Transformers", ICLR 2019.
    """
    if len(layers) != len(encodings):
        raise RelposValueError(f"encodings: expected one per layer, {len(layers)}, found {len(encodings)}")
    for number, (layer, encoding) in enumerate(zip(layers, encodings, strict=True)):
        if np.shape(encoding) != x.shape[-2:]:
            raise RelposValueError(
                f"encodings[{number}]: expected {x.shape[-2:]} as its layer's input has, found {np.shape(encoding)}"
            )
        x = layer(x + encoding)
    return x


class LearnedAbsolute(AbsoluteEncoding):
    r"""Learned encodings to add to the inputs.

    .. math::

        x_t \leftarrow x_t + W_t

    The longest input is fixed by the table; a position beyond it is an error, never wrapped or clipped.
    BERT and GPT-2 count positions from 0; RoBERTa's table begins with two rows that belong to no
    position, so pass ``table[2:]``.

    Parameters
    ----------
    table : ndarray, shape (max_positions, D)
        One vector per position.

    Raises
    ------
    RelposIndexError
        If an input is longer than the table, or a position is negative.

    References
    ----------
    Gehring et al., "Convolutional Sequence to Sequence Learning", ICML 2017; Devlin et al., "BERT", NAACL 2019.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((2, 10, 64))  # (batch, length, channels)
    >>> table = rng.standard_normal((512, 64))  # `position_embeddings.weight`
    >>> rp.LearnedAbsolute(table)(x).shape
    (2, 10, 64)
    """

    least = 0

    def __init__(self, table: Any) -> None:
        self.table = check.table("table", table, "max_positions dim")
        self.dim = self.table.shape[1]

    def encode(self, positions: Any) -> Array:
        """Vectors of positions.

        Parameters
        ----------
        positions : int or ndarray of int, shape (L,)
            A length L, meaning 0 ... L-1, or the positions themselves.

        Returns
        -------
        ndarray, shape (L, D)
            One row per position.
        """
        t = self.positions(positions)
        if t.dtype.kind not in "iu":
            raise RelposTypeError(f"positions: expected integers, found dtype {t.dtype}")
        return learned_encoding(self.table, t)

    def gradient(self, positions: Any, grad: Array) -> dict[str, Array]:
        """Each row collects what its positions receive."""
        t = self.positions(positions)
        table = np.zeros_like(self.table, dtype=np.result_type(self.table, np.float32))
        np.add.at(table, t, np.sum(grad, axis=tuple(range(np.ndim(grad) - 2))))
        return {"table": table}


@register(
    "learned",
    LearnedAbsolute,
    adds="a trained row added to the inputs",
    paper="Gehring et al., ICML 2017",
    doi="10.48550/arXiv.1705.03122",
    equation="section 3.1",
    models="GPT-2, BERT, RoBERTa, BART, ViT",
)
def _build(at: Sample) -> dict[str, Any]:
    return encoded(at.normal(*at.batch, at.q_len, at.dim), LearnedAbsolute(at.normal(at.q_len + at.pick(3, 0), at.dim)))
