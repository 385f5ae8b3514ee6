"""Which implementation answers: names, the current choice, and lazy imports that never fall back silently."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from relpos_np._contract.backends import BACKENDS, HOST_BACKENDS, WITH_KERNELS
from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np._runtime import results
from relpos_np._runtime.forks import preparing
from relpos_np.errors import RelposImportError, RelposValueError
from relpos_np.types import Array

__all__ = [
    "BACKENDS",
    "HOST_BACKENDS",
    "WITH_KERNELS",
    "available",
    "current",
    "evaluate",
    "kernels",
    "set_backend",
    "use_backend",
]

DEFAULT = "numba"
_default: str | None = None
_scoped: ContextVar[str | None] = ContextVar("relpos_np_backend", default=None)


def _checked(name: Any) -> str:
    if name not in BACKENDS:
        raise RelposValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}; found {name!r}")
    return str(name)


def current(name: str | None = None) -> str:
    """The backend that a call would use now.

    Parameters
    ----------
    name : {"numpy", "terms", "numba", "cuda"}, optional
        What the call asks for. Without it the first of these decides: the innermost `use_backend`, `set_backend`, the
        environment variable RELPOS_BACKEND, "numba".

    Returns
    -------
    str
        Its name.

    Raises
    ------
    RelposValueError
        If there is no backend of that name.
    """
    if name is not None:
        return _checked(name)
    chosen = _scoped.get() or _default
    if chosen is None:
        chosen = _checked(os.environ.get("RELPOS_BACKEND") or DEFAULT)
    return chosen


def set_backend(name: str | None) -> None:
    """Choose the backend of all later calls in this process.

    Parameters
    ----------
    name : {"numpy", "terms", "numba", "cuda"} or None
        "numpy" is the reference, "terms" the dense evaluator of terms, "numba" the CPU kernels, "cuda"
        those for a GPU. None returns to the environment variable RELPOS_BACKEND, or "numba".

    Raises
    ------
    RelposValueError
        If there is no such backend.
    """
    global _default
    _default = None if name is None else _checked(name)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend inside a ``with`` block, for the current thread or task only.

    Parameters
    ----------
    name : {"numpy", "terms", "numba", "cuda"}
        See `set_backend`.

    Raises
    ------
    RelposValueError
        If there is no such backend.
    """
    token = _scoped.set(_checked(name))
    try:
        yield
    finally:
        _scoped.reset(token)


_numba: Any = None


def kernels(name: str) -> Any:
    """The module of a backend with kernels, imported on first use; an error that names the remedy where it cannot run.

    Parameters
    ----------
    name : {"numba", "cuda"}
        The backend.

    Returns
    -------
    module
        With `attention`, `backward` and `rel_shift`.

    Raises
    ------
    RelposImportError
        If a package, or for "cuda" both a device and the simulator, are missing.
    """
    global _numba
    if name == "cuda":
        with preparing:
            module = importlib.import_module("relpos_np.kernels._cuda")
        module.require()
        return module
    if _numba is None:
        try:
            with preparing:
                _numba = importlib.import_module("relpos_np.kernels._numba")
        except ImportError as error:
            raise RelposImportError(
                f"backend 'numba' cannot be imported ({error}); install it with `pip install numba`, "
                "or use the reference with backend='numpy' or RELPOS_BACKEND=numpy"
            ) from error
    return _numba


def available() -> tuple[tuple[str, ...], dict[str, str]]:
    """Backends that this machine can run.

    Returns
    -------
    names : tuple of str
        Those that can.
    absent : dict of str
        Why the others cannot.
    """
    absent = {}
    for name in WITH_KERNELS:
        try:
            kernels(name)
        except RelposImportError as error:
            absent[name] = str(error)
    return tuple(name for name in BACKENDS if name not in absent), absent


def evaluate(
    name: str, problem: Problem, terms: Terms, out: Array | None, want_lse: bool, dtype: np.dtype[Any]
) -> tuple[Array, Array | None]:
    """Run attention on a backend that takes terms.

    Parameters
    ----------
    name : {"terms", "numba", "cuda"}
        Which.
    problem : Problem
        The call, checked.
    terms : Terms
        Its positions, lowered.
    out : ndarray or None
        Where the result goes if dtype and layout allow; else it goes to a new array.
    want_lse : bool
        Whether to compute the log-sum-exp.
    dtype : dtype
        In which the result is wanted; where a backend does not write it, the result is in that of the computation.

    Returns
    -------
    tuple of ndarray
        Result and log-sum-exp, which is None if it was not wanted.
    """
    if name == "terms":
        from relpos_np._dense import from_terms

        return from_terms.attention(problem, terms)
    module, own = kernels(name), problem.site.dtype
    if dtype is not own and dtype.name not in module.WRITES:  # a name takes 2 µs to make
        dtype = own
    target = out
    if target is None or target.dtype != dtype or not target.flags.c_contiguous:
        target, _ = results.empty(problem.out_shape, dtype)
    lse = np.empty(problem.out_shape[:-1], own) if want_lse else None
    module.attention(problem, terms, target, lse)
    return target, lse
