"""A call that is made again with other operands of the same form: its record is packed once, and addresses change."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np.kernels._numba import launch
from relpos_np.kernels._numba.arrays import address_of, rowwise
from relpos_np.kernels._numba.job import planned, run_plan
from relpos_np.kernels._numba.pieces import LOG2
from relpos_np.kernels._numba.records import CALL, KEY_END
from relpos_np.types import Array

_OPERANDS, _BATCHES = (CALL.fields[name][1] for name in ("q", "batches"))  # type: ignore[index]
_PACK_OPERANDS, _PACK_ADDRESS = struct.Struct("<5q").pack_into, struct.Struct("<q").pack_into


class Prepared:
    """The plan and the record of a call.

    Operands may lie elsewhere later, and each batch item may have fewer keys; all else is as it was, the arrays of the
    terms and the mask included.
    """

    def __init__(self, problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> None:
        out = np.empty(problem.out_shape, dtype)
        self.threads = launch.available_threads()
        self.plan, call = planned(problem, terms, out, None)
        call.fields["lse_unit"] = LOG2
        self.dtype, self.record = call.dtype, bytes(call.pack())
        operands = (problem.stored_q, problem.stored_k, problem.stored_v, problem.q, problem.k, problem.v, out)
        self.kept = [x for x in call.kept if all(x is not one for one in operands)]
        self.batches = next(x for x in self.kept if address_of(x) == call.fields["batches"])

    @property
    def takes_lengths(self) -> bool:
        """Whether it can be run with lengths of keys."""
        return not self.plan.windowed

    def fits(self) -> bool:
        """Whether a call may still use the threads that the plan is for."""
        return launch.available_threads() == self.threads

    def run(self, operands: tuple[Array, Array, Array], lengths: Array | None, out: Array, lse: Array | None) -> None:
        """Fill `out` and `lse`, both C-contiguous."""
        record = bytearray(self.record)
        q, k, v = operands
        at = 0 if lse is None else address_of(lse)
        _PACK_OPERANDS(record, _OPERANDS, address_of(q), address_of(k), address_of(v), address_of(out), at)
        batches = self.batches
        if lengths is not None:
            batches = batches.copy()
            np.minimum(batches[KEY_END], lengths.ravel(), out=batches[KEY_END])
            _PACK_ADDRESS(record, _BATCHES, address_of(batches))
        run_plan(self.plan, record, self.dtype, out, lse, LOG2)


def prepare(problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> Prepared | None:
    """A call that can be prepared: it has work, reads operands where they are, and no term is made of them."""
    if not problem.site.k_len or 0 in problem.out_shape:
        return None
    if terms.query is not None or terms.key is not None or terms.queries or terms.keys or terms.biases:
        return None
    stored = (problem.stored_q, problem.stored_k, problem.stored_v)
    if any(rowwise(x) is not x for x in stored):
        return None
    made = Prepared(problem, terms, dtype)
    return made if made.plan.stored or all(x.dtype == problem.site.dtype for x in stored) else None
