"""What the methods of a scheme take and return: the call, the terms, and gradients of both.

A class of one's own derives from `relpos_np.Scheme`, whose methods say where each of these belongs.
"""

from __future__ import annotations

from relpos_np._contract.problem import Part, Site
from relpos_np._contract.terms import (
    Change,
    Dense,
    KeyTerm,
    QueryTerm,
    TableTerm,
    Terms,
    Toeplitz,
    ValueTerm,
    ValueTurn,
)
from relpos_np.schemes.base import MemoryBound, SchemeGradient

__all__ = [
    "Change",
    "Dense",
    "KeyTerm",
    "MemoryBound",
    "Part",
    "QueryTerm",
    "SchemeGradient",
    "Site",
    "TableTerm",
    "Terms",
    "Toeplitz",
    "ValueTerm",
    "ValueTurn",
]
