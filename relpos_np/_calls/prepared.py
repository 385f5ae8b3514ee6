"""Attention that is made again and again with operands of one form: checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Never, overload

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import memory_bounds
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered
from relpos_np._contract import check
from relpos_np._contract.options import DEFAULTS
from relpos_np._contract.problem import Problem
from relpos_np._runtime import memory, results
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

_NAMES = ("q", "k", "v")


class Ready:
    """What later calls of one form begin with: their plan, and what their results are."""

    def __init__(self, planned: Any, shape: tuple[int, ...], result: np.dtype[Any], lse: np.dtype[Any]) -> None:
        self._planned, self._shape, self._result, self._lse = planned, shape, result, lse
        self.fits, self.takes_lengths = planned.fits, planned.takes_lengths
        self.nbytes = sum([x.nbytes for x in planned.kept])

    def run(
        self,
        operands: tuple[Array, Array, Array],
        lengths: Array | None,
        out: Array | None,
        read: Sequence[Any],
        *,
        return_lse: bool,
    ) -> Array | tuple[Array, Array]:
        """The results of a call; `read`: what `out` may not overlap."""
        if out is None:
            result = results.empty(self._shape, self._result)[0]
        else:
            check.output(out, self._shape, self._result, read)
            result = out if out.flags.c_contiguous else np.empty(self._shape, self._result)
        lse = np.empty(self._shape[:-1], self._lse) if return_lse else None
        self._planned.run(operands, lengths, result, lse)
        if out is not None and result is not out:
            out[...] = result
            result = out
        return result if lse is None else (result, lse)


def ready(
    operands: tuple[Array, Array, Array],
    problem: Problem,
    schemes: tuple[Scheme, ...],
    shape: tuple[int, ...],
    result: np.dtype[Any],
) -> Ready | None:
    """What calls of the CPU kernels begin with; None if nothing is.

    Terms must be the same in all of them, and kernels may not read copies of operands, as they do if these are in
    another byte order or layout.
    """
    kernels = _backend.kernels("numba")
    stored = zip(operands, (problem.stored_q, problem.stored_k, problem.stored_v), strict=True)
    if result.name not in kernels.WRITES or not all(np.may_share_memory(x, own) for x, own in stored):
        return None
    if any((scheme.computes and not scheme.turns) or scheme.turns_values for scheme in schemes):
        return None
    # Queries and keys may be one array; in later calls they need not.
    problem = replace(problem, stored_k=problem.stored_k.view())
    planned = kernels.prepare(problem, all_terms(each_lowered(schemes, problem, turning=True)), result)
    return None if planned is None else Ready(planned, shape, result, problem.site.dtype)


class PreparedAttention:
    """What `relpos_np.prepare` returns: call it with q, k and v."""

    def __init__(self, attention: Callable[..., Any], operands: tuple[Any, Any, Any], position: Any, options: Any):
        q, k, v = (check.array(name, x) for name, x in zip(_NAMES, operands, strict=True))
        self._attention, self._position, self._options = attention, position, options
        admit = memory_bounds.admission("attention", position, options["backend"], out=False, return_lse=True)
        problem, result, flat = check.call(q, k, v, DEFAULTS | options, admit)
        schemes = checked_schemes(position, problem, options["backend"])
        self._forms = [(x.shape, x.strides, x.dtype) for x in (q, k, v)]
        self._batch, self._k_len = problem.batch, problem.site.k_len
        # What each call of the kernels begins with, without lengths of keys and with them.
        self._ready: dict[bool, Ready | None] = {False: None, True: None}
        if options["backend"] != "numba":
            return
        shape = problem.out_shape[1:] if flat else problem.out_shape
        made = ready((q, k, v), problem, schemes, shape, result)
        self._ready = {False: made, True: made}
        if made is not None and not made.takes_lengths:
            problem.key_lengths = check.lengths_of_keys(self._k_len, self._batch, self._k_len)
            self._ready[True] = ready((q, k, v), problem, schemes, shape, result)

    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = ...,
        return_lse: Literal[False] = ...,
        out: Array | None = ...,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = ...,
        return_lse: Literal[True],
        out: Array | None = ...,
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = ...,
        return_lse: bool,
        out: Array | None = ...,
    ) -> Array | tuple[Array, Array]: ...

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = None,
        return_lse: bool = False,
        out: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        """Attention for these operands.

        Parameters
        ----------
        q, k, v : ndarray
            Of the shapes and the dtype that the call was prepared for.
        key_lengths : int or ndarray of int, optional
            Per batch item, how many keys exist.
        return_lse : bool
            Also return the natural log-sum-exp of the scores.
        out : ndarray, optional
            Where to write the output.

        Returns
        -------
        out, lse
            As `relpos_np.attention`.

        Raises
        ------
        RelposError
            As `relpos_np.attention`, and where an operand differs from what was prepared.
        """
        operands, quick = (check.array("q", q), check.array("k", k), check.array("v", v)), True
        for x, (shape, strides, dtype) in zip(operands, self._forms, strict=True):
            if x.shape != shape or x.dtype != dtype:
                self._refuse(operands)
            quick = quick and x.strides == strides and x.flags.aligned
        ready = self._ready[key_lengths is not None]
        if not quick or ready is None or memory.limit() is not None or not ready.fits():
            given = {"key_lengths": key_lengths, "return_lse": return_lse, "out": out, **self._options}
            found: Array | tuple[Array, Array] = self._attention(q, k, v, position=self._position, **given)
            return found
        lengths = None if key_lengths is None else check.lengths_of_keys(key_lengths, self._batch, self._k_len)
        read = (*operands, *self._options.values(), self._position)
        return ready.run(operands, lengths, out, read, return_lse=return_lse)

    def _refuse(self, operands: tuple[Array, Array, Array]) -> None:
        for name, x, (shape, _, dtype) in zip(_NAMES, operands, self._forms, strict=True):
            if x.shape != shape:
                raise RelposValueError(f"{name}: the call was prepared for shape {shape}, found {x.shape}")
            if x.dtype != dtype:
                raise RelposTypeError(f"{name}: the call was prepared for dtype {dtype}, found {x.dtype}")

    def __reduce__(self) -> Never:
        """Addresses of this process mean nothing in another one."""
        raise RelposTypeError("prepare: a prepared call cannot be pickled; prepare it again where it is used")
