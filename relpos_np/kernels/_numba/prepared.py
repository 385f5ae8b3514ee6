"""A call that is made again with other operands of the same form: its record is packed once, and addresses change."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba import launch
from relpos_np.kernels._numba.arrays import address_of, broadcast, rowwise
from relpos_np.kernels._numba.call import Product
from relpos_np.kernels._numba.job import planned, run_plan
from relpos_np.kernels._numba.pieces import LOG2
from relpos_np.kernels._numba.product import multiply
from relpos_np.kernels._numba.records import CALL, KEY_END
from relpos_np.kernels._numba.skew import is_skewed
from relpos_np.types import Array

_OPERANDS, _BATCHES, _SKEW, _ADDS = (CALL.fields[name][1] for name in ("q", "batches", "skew_q", "adds"))  # type: ignore[index]
_PACK_OPERANDS, _PACK_ADDRESS = struct.Struct("<5q").pack_into, struct.Struct("<q").pack_into


class _Product(NamedTuple):
    """A product of queries (operand 0) or keys (1), which lies where a row of the record's `adds` says."""

    row: int
    operand: int
    shape: tuple[int, ...]
    weights: Array
    scale: float
    heads: int

    @classmethod
    def of(cls, p: Product, adds: Array | None, problem: Problem) -> _Product:
        """One that was made for the call."""
        assert adds is not None
        (row,) = np.flatnonzero(adds["src"] == address_of(p.made))
        return cls(int(row), int(p.x is problem.stored_k), p.x.shape, p.weights, p.scale, problem.site.heads)


class Prepared:
    """The plan and the record of a call.

    Operands may lie elsewhere later, and each batch item may have fewer keys; all else is as it was, the arrays of the
    terms and the mask included. Products of queries or keys with tables are made in each call.
    """

    def __init__(self, problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> None:
        out = np.empty(problem.out_shape, dtype)
        self.threads = launch.available_threads()
        self.plan, call = planned(problem, terms, out, None)
        call.fields["lse_unit"] = LOG2
        self.dtype, self.record = call.dtype, bytes(call.pack())
        # One product of queries is made by the kernel itself, from where they lie.
        self.skewed = call.fields["skew_q"] == address_of(problem.stored_q)
        own = [p for p in call.products if p.x is problem.stored_q or p.x is problem.stored_k]
        left = [*_operands(problem), call.terms.query, call.terms.key, out, *[p.made for p in own]]
        self.kept = [x for x in call.kept if all(x is not one for one in left)]
        named = {address_of(x): x for x in self.kept}
        self.batches, self.adds = named[call.fields["batches"]], named.get(call.fields["adds"])
        self.products = [_Product.of(p, self.adds, problem) for p in own]
        self.kept += [p.weights for p in own]

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
        if self.skewed:
            _PACK_ADDRESS(record, _SKEW, address_of(operands[0]))
        made = self._made(record, operands) if self.products else None
        batches = self.batches
        if lengths is not None:
            batches = batches.copy()
            np.minimum(batches[KEY_END], lengths.ravel(), out=batches[KEY_END])
            _PACK_ADDRESS(record, _BATCHES, address_of(batches))
        run_plan(self.plan, record, self.dtype, out, lse, LOG2)
        del made

    def _made(self, record: bytearray, operands: tuple[Array, Array, Array]) -> list[Array]:
        """Products of the operands of a call, named in its record: what must be kept until it has run."""
        assert self.adds is not None
        adds = self.adds.copy()
        made = [adds]
        for p in self.products:
            made.append(multiply(broadcast(operands[p.operand], p.shape), p.weights, p.scale, p.heads, self.threads))
            adds["src"][p.row] = address_of(made[-1])
        _PACK_ADDRESS(record, _ADDS, address_of(adds))
        return made


def prepare(problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> Prepared | None:
    """A call that can be prepared: it has work, reads operands where they are, and terms at most hand them on."""
    if not problem.site.k_len or 0 in problem.out_shape:
        return None
    if not all(x is None or isinstance(x, Turned) for x in (terms.query, terms.key)):
        return None
    stored = (problem.stored_q, problem.stored_k, problem.stored_v)
    if any(rowwise(x) is not x for x in stored) or not all(isinstance(bias, np.ndarray) for bias in terms.biases):
        return None
    own = (problem.stored_q, problem.stored_k)
    vectors = [t.query for t in terms.queries] + [t.key for t in terms.keys]
    if not all(any(x is one for one in own) or not _reads(x, problem) for x in vectors):
        return None
    made = Prepared(problem, terms, dtype)
    skewed = [term.query for term in terms.queries if is_skewed(term)]
    if any(_reads(x, problem) for x in skewed) and not (made.skewed and len(skewed) == 1 and skewed[0] is own[0]):
        return None  # the kernel reads a copy of queries
    return made if made.plan.stored or all(x.dtype == problem.site.dtype for x in stored) else None


def _reads(x: Array, problem: Problem) -> bool:
    """Whether vectors of a term are made of operands, if only by another dtype."""
    return any(np.may_share_memory(x, one) for one in _operands(problem))


def _operands(problem: Problem) -> list[Array]:
    """Operands, and what they were converted to so far."""
    stored = (problem.stored_q, problem.stored_k, problem.stored_v)
    return [x for x in (*stored, problem._q, problem._k, problem._v) if x is not None]
