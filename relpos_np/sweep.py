"""The sweep of `relpos check`: every scheme, variant, length, mask and dtype on every backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np.errors import RelposImportError
from relpos_np.registry import SCHEMES
from relpos_np.testing import Example, example
from relpos_np.types import Array

__all__ = ["DTYPES", "Case", "available_backends", "cases"]

# "own" stands for the arguments that an example comes with.
_MASKS = ("own", "bool", "float", "lengths", "band")
DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One call to be compared with the reference in float64.

    Attributes
    ----------
    example : Example
        The arguments, and what is right; the cases of all backends share it.
    backend : str
        What is to be checked.
    where : str
        Lengths and mask, for people.
    """

    example: Example
    backend: str
    where: str

    @property
    def scheme(self) -> str:
        """Name of the scheme.

        Returns
        -------
        str
            Key in `relpos_np.SCHEMES`.
        """
        return self.example.name

    @property
    def variant(self) -> str | None:
        """Variant of the scheme.

        Returns
        -------
        str or None
            One of the scheme's variants.
        """
        return self.example.variant

    @property
    def dtype(self) -> str:
        """Precision of the inputs.

        Returns
        -------
        str
            One of `DTYPES`.
        """
        return str(self.example.q.dtype)

    def error(self) -> float:
        """Run the case.

        Returns
        -------
        float
            The largest error in units of what is tolerated.
        """
        if self.example.encoding is not None and self.example.x is not None:
            return _encoding_error(self.example.encoding, self.example.x)
        return self.example.error(*self.example.run(self.backend))


def _encoding_error(encoding: Any, x: Array) -> float:
    """Error of encoded inputs in units of eps (|x| + |encoding|): both summands are rounded, and their sum."""
    exact = x.astype(np.float64)
    wanted = encoding(exact)
    found = encoding(x)
    if found.shape != wanted.shape:
        return np.inf
    tolerated = np.finfo(x.dtype).eps * (np.abs(exact) + np.abs(wanted - exact))
    with np.errstate(all="ignore"):
        ratio = np.where(found == wanted, 0.0, np.abs(found - wanted) / tolerated)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


def available_backends() -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends that this machine can run.

    Returns
    -------
    names : tuple of str
        Those that can.
    absent : dict of str
        Why the others cannot.
    """
    try:
        _backend.numba_kernels()
    except RelposImportError as error:
        return tuple(name for name in _backend.BACKENDS if name != "numba"), {"numba": str(error)}
    return _backend.BACKENDS, {}


def _masked(base: Example, mask: str) -> Example:
    """The example with another mask; its scale stays."""
    if mask == "own":
        return base
    (batch, heads, q_len), k_len = base.q.shape[:3], base.k.shape[2]
    rng = np.random.default_rng(base.q.size)
    options: dict[str, Any] = {name: value for name, value in base.kwargs.items() if name == "scale"}
    if mask == "bool":
        options["mask"] = rng.random((batch, heads, q_len, k_len)) < 0.7
        # A query without keys has output 0 and log-sum-exp -inf.
        options["mask"][0, :, q_len // 2] = False
    elif mask == "float":
        options["mask"] = np.where(rng.random((q_len, k_len)) < 0.2, -np.inf, rng.standard_normal((q_len, k_len)))
        options["mask"] = options["mask"].astype(base.q.dtype)
    elif mask == "lengths":
        options["key_lengths"] = np.array([k_len // 3, k_len - 1])
    else:
        options |= {"window": (11, 6), "causal": False}
    return replace(base, kwargs=options)


def cases(backends: Sequence[str], seed: int) -> Iterator[Case]:
    """All cases: small examples with each mask, long ones as they come.

    Parameters
    ----------
    backends : sequence of str
        Which to check; "numpy" in float64 is the reference itself, and left out.
    seed : int
        Of the random numbers.

    Yields
    ------
    Case
        One at a time.
    """
    for name, info in SCHEMES.items():
        for variant in info.variants or (None,):
            for size, dtypes, masks in (("small", DTYPES, _MASKS), ("blocks", DTYPES[1:], _MASKS[:1])):
                for dtype in dtypes:
                    base = example(name, dtype=dtype, seed=seed, variant=variant, size=size)
                    absolute = base.encoding is not None
                    for mask in masks[:1] if absolute else masks:
                        one = _masked(base, mask)
                        where = f"{size}, {'inputs' if absolute else mask + ' mask'}"
                        for backend in info.backends if absolute else backends:
                            if (backend, dtype) != ("numpy", "float64"):
                                yield Case(one, backend, where)
