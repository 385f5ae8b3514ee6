"""A call that is made again with other operands of the same form: its record is packed once, and addresses change."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.forward_pass.product import multiply
from relpos_np.kernels._numba.forward_pass.work import LOG2
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, broadcast, rowwise
from relpos_np.kernels._numba.launch.records import CALL, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.plan import ends
from relpos_np.kernels._numba.plan.by_rows import whole
from relpos_np.kernels._numba.plan.call import Product, is_skewed
from relpos_np.kernels._numba.plan.job import attention, planned, run_plan, with_scales
from relpos_np.kernels._numba.plan.masks import range_in_rows
from relpos_np.kernels._numba.plan.skew import skewed_queries
from relpos_np.types import Array

_OPERANDS, _BATCHES, _SKEW, _ADDS, _ENDS = (
    CALL.fields[name][1]  # type: ignore[index]
    for name in ("q", "batches", "skew_q", "adds", "ends")
)
_PACK_OPERANDS, _PACK_ADDRESS = struct.Struct("<5q").pack_into, struct.Struct("<q").pack_into


class _Product(NamedTuple):
    """A product of vectors that differ between calls, which lies where a row of the record's `adds` says."""

    row: int
    source: int
    shape: tuple[int, ...]
    weights: Array
    scale: float
    heads: int

    @classmethod
    def of(cls, p: Product, adds: Array | None, sources: Sequence[Array], heads: int) -> _Product:
        """One that was made for the call."""
        assert adds is not None
        (row,) = np.flatnonzero(adds["src"] == address_of(p.made))
        return cls(int(row), _place(p.x, sources), p.x.shape, p.weights, p.scale, heads)


class Form:
    """A call without its operands, for rows that its record has no room for."""

    def __init__(self, problem: Problem, terms: Terms, sources: Sequence[Array]) -> None:
        q, k, v = (_blank(x) for x in (problem.stored_q, problem.stored_k, problem.stored_v))
        self.problem = replace(problem, stored_q=q, stored_k=k, stored_v=v)
        self.places = [_place(x, sources) for x in terms.vectors()]
        kept = [
            x if at < 0 and not isinstance(x, Turned) else _blank(x)
            for x, at in zip(terms.vectors(), self.places, strict=True)
        ]
        self.terms = _with_vectors(terms, kept)

    def call(
        self, operands: tuple[Array, Array, Array], lengths: Array | None, sources: Sequence[Array]
    ) -> tuple[Problem, Terms]:
        """The call of these operands."""
        q, k, v = operands
        problem = replace(self.problem, stored_q=q, stored_k=k, stored_v=v)
        if lengths is not None:
            known = problem.site.k_len if problem.key_lengths is None else problem.key_lengths
            problem = replace(problem, key_lengths=np.minimum(known, lengths.reshape(problem.site.batch)))
        vectors = [sources[at] if at >= 0 else x for x, at in zip(self.terms.vectors(), self.places, strict=True)]
        return problem, _with_vectors(self.terms, vectors)


def _blank(x: Any) -> Any:
    """An array of the same form that holds nothing; of what turns, the turns stay."""
    if isinstance(x, Turned):
        return replace(x, x=_blank(x.x))
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _with_vectors(terms: Terms, vectors: Sequence[Any]) -> Terms:
    """The terms with other vectors, in the order of `Terms.vectors`."""
    rest = iter(vectors)
    return replace(
        terms,
        query=None if terms.query is None else next(rest),
        key=None if terms.key is None else next(rest),
        queries=tuple(replace(t, query=next(rest)) for t in terms.queries),
        keys=tuple(replace(t, key=next(rest)) for t in terms.keys),
    )


class Prepared:
    """The plan and the record of a call.

    Operands may lie elsewhere later, and each batch item may have fewer keys; all else is as it was, the arrays of the
    terms and the mask included. Sources are queries and keys, and `vectors` that are made of them anew in each call, as
    are their products with tables.
    """

    def __init__(self, problem: Problem, terms: Terms, dtype: np.dtype[Any], vectors: Sequence[Array] = ()) -> None:
        # Of the result only the shape and the dtype are planned with.
        out, sources = (
            np.broadcast_to(np.empty((), dtype), problem.out_shape),
            (problem.stored_q, problem.stored_k, *vectors),
        )
        self.threads, self.form = launcher.available_threads(), Form(problem, terms, sources)
        self.plan, call = planned(problem, terms, out, None)
        call.fields["lse_unit"] = LOG2
        self.dtype, self.record = call.dtype, bytes(call.pack())
        # Where the queries and the keys of the content product are among the sources.
        self.query = 0 if terms.query is None else max(_place(terms.query, sources), 0)
        self.key = 1 if terms.key is None else max(_place(terms.key, sources), 1)
        # Those of the product that the kernel makes itself, side by side.
        skewed = [_place(term.query, sources) for term in call.skewed]
        self.skewed, self.skew_shape = skewed if min(skewed, default=-1) >= 0 else [], call.shape(problem.site.q_len, 0)
        made = [p for p in call.products if _place(p.x, sources) >= 0]
        left = {id(x) for x in (*_operands(problem), *vectors, out, *[p.made for p in made])}
        copied = call.fields["skew_q"] if self.skewed else None
        self.kept = [x for x in call.kept if id(x) not in left and address_of(x) != copied]
        named = {address_of(x): x for x in self.kept}
        self.batches, self.adds = named[call.fields["batches"]], named.get(call.fields["adds"])
        self.products = [_Product.of(p, self.adds, sources, problem.site.heads) for p in made]
        self.kept += [p.weights for p in made]
        # Whose ranges lengths of keys may shorten.
        self.mask_rows = call.mask_rows
        # Work that is too small for two threads, however many there are.
        self.alone = self.plan.division.size < 1.0 and not made

    @property
    def takes_lengths(self) -> bool:
        """Whether it can be run with lengths of keys."""
        return not self.plan.windowed

    def fits(self) -> bool:
        """Whether a call may still use the threads that the plan is for."""
        return self.alone or launcher.available_threads() == self.threads

    def run(
        self,
        operands: tuple[Array, Array, Array],
        lengths: Array | None,
        out: Array,
        lse: Array | None,
        vectors: Sequence[Array] = (),
        scales: Sequence[Array] = (),
    ) -> None:
        """Fill `out` and `lse`, both C-contiguous; `vectors` are those of these operands, and `scales`, if codes."""
        record = bytearray(self.record)
        sources = (operands[0], operands[1], *vectors)
        q, k, at = sources[self.query], sources[self.key], 0 if lse is None else address_of(lse)
        _PACK_OPERANDS(record, _OPERANDS, address_of(q), address_of(k), address_of(operands[2]), address_of(out), at)
        if self.skewed:
            skewed = skewed_queries([sources[n] for n in self.skewed], self.skew_shape)
            _PACK_ADDRESS(record, _SKEW, address_of(skewed))
        made = self._made(record, sources) if self.products else None
        batches = self.batches
        if lengths is not None:
            batches = batches.copy()
            if self.mask_rows is None:
                np.minimum(batches[KEY_END], lengths.ravel(), out=batches[KEY_END])
            else:
                batches[KEY_BEGIN], batches[KEY_END], _ = range_in_rows(self.mask_rows, lengths.ravel())
            _PACK_ADDRESS(record, _BATCHES, address_of(batches))
        _PACK_ADDRESS(record, _ENDS, ends.watch())
        plan = with_scales(self.plan, scales, self.form.problem.stored[1:], self.dtype)
        run_plan(plan, record, self.dtype, out, lse, LOG2)
        del made
        if ends.met():
            problem, terms = self.form.call(operands, lengths, sources)
            problem.scales = tuple(scales) or None
            ends.mend(attention, problem, terms, out, lse, LOG2)

    def _made(self, record: bytearray, sources: Sequence[Array]) -> list[Array]:
        """Products of the sources of a call, named in its record: what must be kept until it has run."""
        assert self.adds is not None
        adds = self.adds.copy()
        made = [adds]
        for p in self.products:
            made.append(multiply(broadcast(sources[p.source], p.shape), p.weights, p.scale, p.heads, self.threads))
            adds["src"][p.row] = address_of(made[-1])
        _PACK_ADDRESS(record, _ADDS, address_of(adds))
        return made


def prepare(problem: Problem, terms: Terms, dtype: np.dtype[Any], vectors: Sequence[Array] = ()) -> Prepared | None:
    """A call that can be prepared: it has work, reads operands where they are, and terms at most hand them on.

    `vectors` are those in the terms that are made of operands anew in each call.
    """
    if not problem.site.k_len or 0 in problem.out_shape:
        return None
    sources = (problem.stored_q, problem.stored_k, *vectors)
    replaced = [x for x in (terms.query, terms.key) if not (x is None or isinstance(x, Turned))]
    if any(_place(x, sources) < 0 for x in replaced):
        return None
    read = (*sources[:2], problem.stored_v, *replaced)
    if any(rowwise(x) is not x for x in read) or not all(isinstance(bias, np.ndarray) for bias in terms.biases):
        return None
    of_terms = [term.query for term in terms.queries] + [term.key for term in terms.keys]
    if any(_place(x, sources) < 0 and _reads(x, problem) for x in of_terms):
        return None
    own = whole(problem, terms)
    if own is None:
        return None
    made = Prepared(problem, own, dtype, vectors)
    if not made.skewed and any(_place(term.query, sources) >= 0 for term in terms.queries if is_skewed(term)):
        return None  # side by side with one that lasts
    return made if made.plan.stored or all(x.dtype == problem.site.dtype for x in read) else None


def _place(x: Any, among: Sequence[Array]) -> int:
    """Where an array is in a sequence; -1 if it is not."""
    return next((n for n, one in enumerate(among) if one is x), -1)


def _reads(x: Array, problem: Problem) -> bool:
    """Whether vectors of a term are made of operands, if only by another dtype."""
    return any(np.may_share_memory(x, one) for one in _operands(problem))


def _operands(problem: Problem) -> list[Array]:
    """Operands, and what they were converted to so far."""
    stored = (problem.stored_q, problem.stored_k, problem.stored_v)
    return [x for x in (*stored, problem._q, problem._k, problem._v) if x is not None]
