"""Two schemes together: every way in which one takes some of the arrays that are given, and the other all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from relpos_np.testing.candidates import Candidate, Lengths, candidates
from relpos_np.types import Array

# Arrays beyond which there are too many ways to share them out.
_ARRAYS = 6

Scores = Callable[[Candidate], Array | None]


def shared(given: Mapping[str, Array]) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """The arrays in two parts, the first the larger one; one of two parts of one size comes once."""
    names = list(given)
    for count in range(len(names), (len(names) - 1) // 2, -1):
        for part in combinations(names, count):
            if 2 * count == len(names) and names and names[0] not in part:
                continue
            yield {n: given[n] for n in part}, {n: x for n, x in given.items() if n not in part}


def pairs_of_schemes(
    lengths: Lengths, given: Mapping[str, Array], stated: Mapping[str, Any], scores: Scores
) -> Iterator[Candidate]:
    """Candidates of two schemes, of which each says something about this call and no other says the same."""
    if len(given) > _ARRAYS:
        return
    kept: dict[tuple[str, ...], list[Candidate]] = {}

    def told_apart(part: Mapping[str, Array]) -> list[Candidate]:
        if tuple(part) not in kept:
            found, seen = [], set()
            for one in candidates(lengths, part, stated, "attention").found:
                s = None if one.scheme == "plain" else scores(one)
                if s is not None and (key := (one.scheme, one.variant, np.round(s, 9).tobytes())) not in seen:
                    seen.add(key)
                    found.append(one)
            kept[tuple(part)] = found
        return kept[tuple(part)]

    for first, second in shared(given):
        for n, one in enumerate(told_apart(first)):
            for m, other in enumerate(told_apart(second)):
                # Without arrays both lists are the same, and a scheme beside itself is one with other numbers.
                if (given or n < m) and not (one.scheme == other.scheme and not (first and second)):
                    yield both(one, other)


def both(one: Candidate, other: Candidate) -> Candidate:
    """Two candidates as one."""
    parts = sorted((one, other), key=lambda part: part.scheme)
    variant = " + ".join(part.variant or "-" for part in parts) if one.variant or other.variant else None
    settings: dict[str, Any] = {}
    arrays: dict[str, str] = {}
    for n, part in enumerate(parts):
        name = part.scheme if parts[0].scheme != parts[1].scheme else f"{part.scheme}.{n}"
        settings |= {f"{name}.{key}": value for key, value in part.settings.items()}
        arrays |= {f"{name}.{key}": value for key, value in part.arrays.items()}
    made = tuple(part.made for part in parts)
    return Candidate(" + ".join(part.scheme for part in parts), variant, made, settings, arrays)
