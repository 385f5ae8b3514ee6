"""What the methods of a scheme take and return: the call, the terms, and gradients of both.

A class of one's own derives from `relpos_np.Scheme`, whose methods say where each of these belongs.
"""

from __future__ import annotations

import warnings
from typing import Any

from relpos_np._contract import terms as _records
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
from relpos_np.schemes.base import Held, SchemeGradient

__all__ = [
    "Change",
    "Dense",
    "Held",
    "KeyTerm",
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


def __getattr__(name: str) -> Any:
    """What else this module held before it was public."""
    if name.startswith("_") or not hasattr(_records, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"relpos_np.terms.{name} has moved to {_records.__name__}", DeprecationWarning, stacklevel=2)
    return getattr(_records, name)
