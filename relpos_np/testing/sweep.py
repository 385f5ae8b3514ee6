"""The sweep of `relpos check`: every scheme, variant, edge and dtype on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relpos_np.api import attention
from relpos_np.errors import RelposError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing import Example
from relpos_np.testing import cases as examples
from relpos_np.testing.arguments import rebuilt
from relpos_np.testing.compare import ratio
from relpos_np.types import Backend

__all__ = ["DTYPES", "Case", "cases", "parts"]

DTYPES = ("float16", "float32", "float64")
# What is enough for a first verdict, in float32.
_FIRST = ("own", "length_1", "length_65", "one_query", "bool_mask", "key_lengths", "causal", "one_key_head")


@dataclass(frozen=True)
class Case:
    """One call to be compared with the reference in float64.

    Attributes
    ----------
    example : Example
        The arguments, and what is right; the cases of all backends share it.
    backend : str
        What is to be checked.
    """

    example: Example
    backend: Backend

    @property
    def dtype(self) -> str:
        """Precision of the inputs, one of `DTYPES`."""
        return str(self.example.q.dtype)

    def error(self) -> float:
        """Run the case.

        Returns
        -------
        float
            The largest error in units of what is tolerated.
        """
        return self.example.backend_error(self.backend)

    def third_opinion(self) -> tuple[float, float] | None:
        """What arithmetic in long double says of the backend and of the reference: to tell which of them is wrong.

        Returns
        -------
        tuple of float, or None
            How far the backend and the reference may be from the exact value of the scheme's terms, in units of what
            is tolerated. None where that cannot be bounded.
        """
        one = self.example
        if one.encoding is not None:
            return None
        wide = replace(
            one,
            q=one.q.astype(np.float64),
            k=one.k.astype(np.float64),
            v=one.v.astype(np.float64),
            position=rebuilt(one.position, np.float64),
        )
        allowed, slack = one.tolerated()
        found: list[float] = []
        try:
            for call, backend in ((one, self.backend), (wide, "numpy")):
                position, given = call.position, {**call.kwargs, "backend": backend}
                *_, bound, lse_bound = attention(
                    call.q, call.k, call.v, position=position, return_lse=True, return_bound=True, **given
                )
                of_lse = float(lse_bound.max(initial=0.0)) / slack
                found.append(max(ratio(bound, np.zeros_like(bound), allowed), of_lse))
        except RelposError:
            return None
        return found[0], found[1]


def parts() -> list[tuple[str, str | None]]:
    """What is swept, one scheme and variant after another.

    Returns
    -------
    list of tuple
        Names of schemes and of variants, or None.
    """
    return [(name, variant) for name, info in SCHEMES.items() for variant in info.variants or (None,)]


def cases(
    name: str, variant: str | None, backends: Sequence[Backend], seed: int, thorough: bool = True
) -> Iterator[Case]:
    """All cases of one scheme and variant.

    Parameters
    ----------
    name, variant : str
        One of `parts`.
    backends : sequence of str
        Which to check; "numpy" in float64 is the reference itself, and left out.
    seed : int
        Of the random numbers.
    thorough : bool
        Whether to run every edge in every precision, instead of some in float32.

    Yields
    ------
    Case
        One at a time.
    """
    info = SCHEMES[name]
    for dtype in DTYPES if thorough else ("float32",):
        for one in examples(name, variant=variant, dtype=dtype, seed=seed, long=False):
            # Half precision is computed as float32 is, whose long examples do for both.
            if (one.edge == "blocks" and dtype == "float16") or not (thorough or one.edge in _FIRST):
                continue
            for backend in info.backends if one.encoding is not None else backends:
                if (backend, dtype) != ("numpy", "float64"):
                    yield Case(one, backend)
