"""Which implementation answers: names, the current choice, and lazy imports that never fall back silently."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np._contract.backends import BACKENDS, HOST_BACKENDS, WITH_KERNELS
from relpos_np._contract.problem import Problem, name_of
from relpos_np._contract.terms import Terms
from relpos_np._runtime import results
from relpos_np._runtime.forks import preparing
from relpos_np.errors import RelposImportError, RelposValueError, shown
from relpos_np.types import Array, Backend

__all__ = [
    "BACKENDS",
    "HOST_BACKENDS",
    "WITH_KERNELS",
    "available",
    "backward",
    "current",
    "evaluate",
    "kernels",
    "set_backend",
    "use_backend",
]

DEFAULT = "numba"
_default: Backend | None = None
_scoped: ContextVar[Backend | None] = ContextVar("relpos_np_backend", default=None)


def _checked(name: Any) -> Backend:
    if not isinstance(name, str) or name not in BACKENDS:
        raise RelposValueError(f"backend: expected one of {', '.join(map(repr, BACKENDS))}; found {shown(name)}")
    return str(name)  # type: ignore[return-value]


def current(name: str | None = None) -> Backend:
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


def set_backend(name: Backend | None) -> None:
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

    Examples
    --------
    >>> import relpos_np as rp
    >>> rp.set_backend("numpy")  # the formulas, for all calls from here on
    >>> rp.set_backend(None)
    """
    global _default
    _default = None if name is None else _checked(name)


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Choose the backend inside a ``with`` block, for the current thread or task only.

    Parameters
    ----------
    name : {"numpy", "terms", "numba", "cuda"}
        See `set_backend`.

    Raises
    ------
    RelposValueError
        If there is no such backend.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> q = np.eye(3)[None]
    >>> with rp.use_backend("numpy"):
    ...     rp.attention(q, q, q).round(2)[0, 0]
    array([0.47, 0.26, 0.26])
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
                _may_compile(importlib.import_module("numba"))
                _numba = importlib.import_module("relpos_np.kernels._numba")
        except RelposImportError:
            raise
        except ImportError as error:
            raise RelposImportError(
                f"backend 'numba' cannot be imported ({error}); install it with `pip install numba`, "
                "or use the reference with backend='numpy' or RELPOS_BACKEND=numpy"
            ) from error
    return _numba


def _may_compile(numba: Any) -> None:
    if numba.config.DISABLE_JIT:
        raise RelposImportError(
            "backend 'numba' runs what Numba compiles, and NUMBA_DISABLE_JIT forbids that; unset it before Python "
            "starts, or use the reference with backend='numpy' or RELPOS_BACKEND=numpy"
        )


def available() -> tuple[tuple[Backend, ...], dict[str, str]]:
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
    module, own, turn = kernels(name), problem.site.dtype, terms.turn
    if turn is not None:
        # Rounded to half precision after it has turned back.
        problem, dtype = problem.with_values(turn.of_values(problem.stored_v)), own
    if dtype is not own and name_of(dtype) not in module.WRITES:
        dtype = own
    target = out
    if target is None or target.dtype != dtype or not target.flags.c_contiguous:
        target, _ = results.empty(problem.out_shape, dtype)
    lse = np.empty(problem.out_shape[:-1], own) if want_lse else None
    module.attention(problem, terms, target, lse)
    return target if turn is None else turn.of_output(target), lse


def backward(
    name: str, problem: Problem, terms: Terms, grad_out: Array, grad_lse: Array | None, *, stored: bool = False
) -> tuple[Terms, Array]:
    """Run the way back on a backend with kernels.

    Parameters
    ----------
    name : {"numba", "cuda"}
        Which.
    problem, terms
        See `evaluate`.
    grad_out, grad_lse : ndarray
        Gradients of the output, perhaps in half precision, and of the log-sum-exp, which may be None.
    stored : bool
        Gradients of q, k and v may be in the dtypes in which these are stored, where nothing is to be added to them.

    Returns
    -------
    tuple of Terms and ndarray
        Gradients of the terms, in a record of their own form with `query` and `key` always set, and that of v.
    """
    module, turn = kernels(name), terms.turn
    found: tuple[Terms, Array]
    if turn is None and name == "numba":
        found = module.backward(problem, terms, grad_out, grad_lse, stored=stored)
        return found
    if turn is None:
        found = module.backward(problem, terms, grad_out.astype(problem.site.dtype, copy=False), grad_lse)
        return found
    turned = problem.with_values(turn.of_values(problem.stored_v))
    grads, grad_v = module.backward(turned, terms, turn.to_output(grad_out), grad_lse)
    if turn.trained:
        turned.precision = "highest"  # as kernels have it that compute an output on the way back
        out, _ = evaluate(name, turned, replace(terms, turn=None), None, False, problem.site.dtype)
        grads.turn = turn.gradient(problem.stored_v, grad_v, out, grad_out)
    return grads, turn.to_values(grad_v)
