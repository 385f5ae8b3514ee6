"""What changes scores beyond adding to them, and the derivatives that the way back needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from relpos_np.types import Array


@dataclass(slots=True, eq=False)
class Slopes:
    """Derivatives of what was done to the product q . k alone, and one after the other to the scores."""

    content: Array | None = None
    scores: list[Array] = field(default_factory=list)
