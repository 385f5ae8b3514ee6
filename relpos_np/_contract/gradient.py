"""The result of a backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relpos_np.types import Array


@dataclass(frozen=True, eq=False)
class AttentionGradient:
    """Gradients of one call of attention.

    Attributes
    ----------
    q, k, v : ndarray
        In the shape and dtype of the call's operands.
    position : mapping or tuple of mappings
        For the call's scheme the gradient of each of its arrays, by the name of the argument, such as
        ``position["table"]``; one mapping per scheme where the call had a tuple of them.
    sinks, query_scale : ndarray or None
        In the shape of the option, where the call had it.
    mask : ndarray or None
        In the shape of the mask, if it was asked for.
    """

    q: Array
    k: Array
    v: Array
    position: Any
    sinks: Array | None = None
    query_scale: Array | None = None
    mask: Array | None = None
