"""What `identify` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Match:
    """One scheme, variant and set of conventions.

    Attributes
    ----------
    scheme : str
        Key in `relpos_np.SCHEMES`, or two of them, "alibi + t5", where both were added. Then the variants, and the
        names of settings and arrays, say whose they are: "t5.table".
    variant : str or None
        One of the scheme's variants.
    settings : dict
        Arguments of its constructor that are no arrays.
    arrays : dict of str
        For each array of the scheme the name of the one that was given.
    call : dict
        Options of the call: scale, offset, causal and what else is set, each with ``..._is`` in words.
    layout : tuple of str
        How arrays had to be read, if otherwise than this library's calls do.
    same : dict of list
        Settings and options that may have other values too, since these change nothing for the operands.
    error : float
        The largest difference from the answer.
    relative_error : float
        The root of the mean square of differences, in units of that of the answer.
    why : str
        For a match after the first: why it cannot be told apart from the first.
    """

    scheme: str
    variant: str | None
    settings: dict[str, Any]
    arrays: dict[str, str]
    call: dict[str, Any]
    layout: tuple[str, ...]
    same: dict[str, list[Any]]
    error: float
    relative_error: float
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            By the names of the attributes.
        """
        return {name: plain(value) for name, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class Identification:
    """What `identify` found.

    Attributes
    ----------
    matches : tuple of Match
        What fits within rounding, the simplest first; more than one cannot be told apart with these operands.
    nearest : tuple of Match
        What comes closest, if nothing fits.
    precision : str or None
        The precision that explains the differences: "float64", "float32", "float16" or "bfloat16" for answers that were
        rounded to it, "float16 inside" or "bfloat16 inside" if scores or probabilities must have been rounded too.
    untried : dict of str
        Schemes that were not tried, and why.
    notes : tuple of str
        What these operands cannot show, and where the search was cut short.
    calls : int
        How many calls were compared.
    """

    matches: tuple[Match, ...]
    nearest: tuple[Match, ...]
    precision: str | None
    untried: dict[str, str]
    notes: tuple[str, ...]
    calls: int

    @property
    def unique(self) -> bool:
        """Whether one scheme, variant and set of conventions fits, and no other."""
        return len(self.matches) == 1

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it.

        Returns
        -------
        dict
            By the names of the attributes, and ``unique``.
        """
        lists = {name: [match.as_dict() for match in getattr(self, name)] for name in ("matches", "nearest")}
        return {name: plain(value) for name, value in (vars(self) | lists).items()} | {"unique": self.unique}


def plain(value: Any) -> Any:
    """What JSON can hold: it has no infinity and no NaN, and null stands for them."""
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
