"""Lengths of examples."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True)
class Size:
    """Lengths that no block, panel or vector of a kernel divides."""

    q_len: int
    k_len: int
    dim: int
    v_dim: int
    grid: tuple[int, int]
    frames: tuple[int, int]


SIZES = {
    "tiny": Size(11, 17, 12, 10, (3, 4), (3, 2)),
    "small": Size(37, 53, 20, 12, (5, 7), (3, 2)),
    "blocks": Size(203, 397, 36, 28, (14, 15), (7, 4)),
}


def lengths(q_len: int, k_len: int, dim: int = 20, v_dim: int = 12) -> Size:
    """Any lengths; what lies on a grid gets the most square one with as many points as there are queries."""
    height = next(n for n in range(isqrt(q_len), 0, -1) if q_len % n == 0)
    return Size(q_len, k_len, dim, v_dim, (height, q_len // height), (3, 2) if q_len > 1 else (1, 1))
