"""How many bytes a call will allocate on the host, before it does: upper bounds, compared with the limit.

Arrays of the caller are not counted. For each stage of a call a bound counts what is alive at once, and never too
little. Where only the call itself would show the exact number (which pages a buffer shares, what a reduction holds),
the bound is rounded up; for a call with large arrays the sum is less than four times what is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered
from relpos_np._contract.placed import placed_maps
from relpos_np._contract.problem import Problem, Site
from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, Terms, ValueTerm, ValueTurn
from relpos_np._dense import bounds
from relpos_np._runtime import memory
from relpos_np.formulas.sums import HELD_BYTES
from relpos_np.schemes.base import MemoryBound, Scheme
from relpos_np.types import Array

# What a call holds in small things: records, offsets, strings of checks.
SMALL = 1 << 15
# Matrices of scores that are alive at once: while they are made, beside what schemes hold; in the softmax and the
# products after it; in the backward pass.
SCORE_MATRICES, SOFTMAX_MATRICES, BACKWARD_MATRICES = 2, 3, 8


class Admission:
    """Decides whether a call may take its memory, and keeps the terms that it lowered to find out."""

    def __init__(
        self, function: str, position: Any, chosen: str | None, out: bool, return_lse: bool, return_bound: bool
    ) -> None:
        self.function, self.position, self.name = function, position, _backend.current(chosen)
        self.out, self.return_lse, self.return_bound = out, return_lse, return_bound
        self.lowered: list[Terms] = []

    def __call__(self, problem: Problem, result: np.dtype[Any], converted: int, mask: Any, dropped: bool) -> None:
        """Raise `RelposMemoryError` for a call, of which the mask and dropout are still missing in `problem`.

        `converted`: bytes of operands in another dtype or layout than that in which they were given.
        """
        site = problem.site
        backward = self.function == "attention_vjp"
        formulas = self.function == "logits" and self.name != "terms"
        schemes = checked_schemes(self.position, problem, None if formulas else self.name, backward=backward)
        dense = self.function == "logits" or self.name not in _backend.WITH_KERNELS
        # What kernels make some queries at a time is among what they hold.
        by_rows = self.name == "numba" and not dense
        holds = [MemoryBound(0) if by_rows and scheme.by_rows else scheme.memory_bound(site) for scheme in schemes]
        parts = {"small things": SMALL, **self._results(problem, result), "copies of operands": converted}
        lines, pairs = math.prod(site.batch) * site.heads, site.q_len * site.k_len
        item = site.dtype.itemsize
        if dropped:
            # The numbers that are drawn are as many float64.
            parts["dropout's mask"] = 9 * lines * pairs
        mask_bytes = _mask(mask, site, dense)
        if mask_bytes:
            parts["masks and bands"] = mask_bytes
        lowering = self.name != "numpy" if self.function != "logits" else self.name == "terms"
        if dense:
            given = (problem.stored_q, problem.stored_k, problem.stored_v)
            parts["copies of operands"] += _repeated(site) + sum(x.nbytes for x in given if not x.flags.c_contiguous)
            extra = 2 if dropped else 0
            forward = max(
                SCORE_MATRICES * lines * pairs * item + (0 if lowering else max((h.formula for h in holds), default=0)),
                (SOFTMAX_MATRICES + extra) * lines * pairs * item,
                # Scores, probabilities, and products with values.
                (2 + extra) * lines * pairs * item + HELD_BYTES,
            )
            parts["dense matrices of scores"] = forward
        if self.return_bound:
            parts["bounds"] = _bounded(site, schemes, mask)
        # The CPU kernels turn what they read, and gradients back.
        making = [scheme for scheme in schemes if not (by_rows and scheme.rotates_operands)]
        if schemes and (lowering or backward):
            parts["what schemes hold"] = sum(h.lower for h in holds) + 3 * _vectors(site, making)
        if backward and schemes:
            parts["gradients of schemes"] = max(h.lift for h in holds) + 3 * _vectors(site, making)
        memory.require(self.function, parts)
        if not schemes and dense and not backward:
            return
        # What follows is known from what the schemes are lowered to, which is within the limit.
        if lowering or backward:
            if dense:
                # As the call itself does before: what schemes make of operands depends on their layout.
                problem.pack()
            self.lowered = each_lowered(schemes, problem, by_kernels=by_rows)
            terms = all_terms(self.lowered)
            if terms.turn is not None:
                parts["turned values and output"] = _turned(site, terms.turn, backward)
            if not by_rows:
                # Made when they are asked for, and then kept.
                maps = placed_maps(terms)
                parts["index maps"] = sum(4 * math.prod(x.shape) + x.distance_bytes() for x in maps)
            if dense:
                parts["what terms hold"] = _dense_terms(terms, site, lines, backward)
                if backward:
                    parts["dense matrices of scores"] = max(
                        parts["dense matrices of scores"], BACKWARD_MATRICES * lines * pairs * item
                    )
                    parts["gradients"] = _gradients(site, lines)
            elif self.name == "numba":
                parts |= _backend.kernels("numba").workspace_bytes(problem, terms, _strided(mask, site), backward)
            memory.require(self.function, parts)

    def _results(self, problem: Problem, result: np.dtype[Any]) -> dict[str, int]:
        site = problem.site
        lines, item = math.prod(site.batch) * site.heads, site.dtype.itemsize
        if self.function == "logits":
            return {}
        output = lines * site.q_len * site.v_dim
        own = self.out and self.name in _backend.WITH_KERNELS and result == site.dtype
        found = {"the result": 0 if own else output * item + (output * result.itemsize if result != site.dtype else 0)}
        if self.return_lse or self.function != "attention" or self.name not in _backend.WITH_KERNELS:
            found["log-sum-exp"] = 4 * lines * site.q_len * item
        if self.name not in _backend.WITH_KERNELS:
            # Two more copies while schemes, or values that are not finite, add to it.
            found["the result"] += 2 * output * item
        return found


def admission(
    function: str,
    position: Any,
    backend: str | None,
    *,
    out: bool = False,
    return_lse: bool = False,
    return_bound: bool = False,
) -> Admission | None:
    """What decides for a call; None where there is no limit."""
    return None if memory.limit() is None else Admission(function, position, backend, out, return_lse, return_bound)


def _repeated(site: Site) -> int:
    """Keys and values repeated for every head of queries, and the copies that matrix products need."""
    lines = math.prod(site.batch) * site.heads
    wide = site.head_dim + site.v_dim
    return (2 * site.k_len * wide + site.q_len * site.head_dim) * lines * site.dtype.itemsize


def _strided(mask: Any, site: Site) -> Array | None:
    """The mask with the strides that kernels will see; None if it is not one, which `check` reports later."""
    if not isinstance(mask, np.ndarray):
        return None
    try:
        return np.broadcast_to(mask, (*site.batch, site.heads, site.q_len, site.k_len))
    except ValueError:
        return None


def _mask(mask: Any, site: Site, dense: bool) -> int:
    """A converted copy of the mask and, in a dense evaluation, the matrices that it is combined into."""
    pairs, lines = site.q_len * site.k_len, math.prod(site.batch) * site.heads
    size = 24 * pairs if dense else 0
    if isinstance(mask, np.ndarray):
        if mask.dtype not in (np.bool_, site.dtype):
            size += mask.size * (site.dtype.itemsize + 4)
        if dense:
            size += (2 if mask.dtype == np.bool_ else 3 * site.dtype.itemsize) * lines * pairs
    return size + (2 * lines * pairs if dense else 0)


def _vectors(site: Site, schemes: Sequence[Scheme]) -> int:
    """Bytes of the queries and keys that some schemes make."""
    if not any(scheme.content or scheme.reads_operand_values for scheme in schemes):
        return 0
    count, item = math.prod(site.batch), 2 * site.dtype.itemsize
    return count * site.head_dim * item * (site.heads * site.q_len + site.kv_heads * site.k_len)


def _turned(site: Site, turn: ValueTurn, backward: bool) -> int:
    """Values and the output that have turned, on the way back their gradients or the output once more, and factors."""
    count, rows, item = math.prod(site.batch), site.heads * site.q_len + site.kv_heads * site.k_len, site.dtype.itemsize
    pairs = int(turn.key[0].shape[-1])
    # Factors spread over channels may be one set for all items, or each item's own.
    size = (2 if backward else 1) * count * rows * site.v_dim * item + 4 * rows * pairs * item
    # Two channels of vectors and of their gradients, and four products, in float64.
    return size + (count * rows * 12 * 8 * pairs if backward and turn.trained else 0)


def _bounded(site: Site, schemes: Sequence[Scheme], mask: Any) -> int:
    """Operands, a mask, results and what schemes hold, all in wide arithmetic, and what bounds are made of."""
    wide = bounds.widest(site.dtype)
    site = replace(site, dtype=wide)
    items, width = math.prod(site.batch), site.head_dim + site.v_dim
    operands = items * (site.heads * site.q_len * site.head_dim + site.kv_heads * site.k_len * width)
    operands *= 8 + 2 * wide.itemsize
    lowered = sum(scheme.memory_bound(site).lower for scheme in schemes) + 3 * _vectors(site, schemes)
    return (
        operands
        + _mask(mask, replace(site, dtype=np.dtype(np.float64)), dense=False)
        + lowered
        + bounds.workspace_bytes(site)
    )


def _gradients(site: Site, lines: int) -> int:
    item = site.dtype.itemsize
    return 4 * lines * (site.q_len + site.k_len) * (site.head_dim + site.v_dim) * item


def _dense_terms(terms: Terms, site: Site, lines: int, backward: bool) -> int:
    """What the dense evaluation of terms, or its backward pass, holds for the term that needs most."""
    pairs, item = site.q_len * site.k_len, site.dtype.itemsize
    worst, kept = 0, 0
    for term in terms.tables:
        per_item = math.prod(site.batch) if isinstance(term.index, Dense) and len(term.index.shape) > 2 else 1
        size = (24 * per_item + (2 * per_item * site.heads + 1) * item) * pairs + lines * pairs * item
        if backward:
            size = max(size, _summed(lines, pairs, site.q_len, term.index.rows, item))
        worst = max(worst, size)
    others: list[tuple[QueryTerm | KeyTerm | ValueTerm, int]] = [
        *((t, site.q_len) for t in terms.queries),
        *((t, site.k_len) for t in terms.keys),
        *((t, site.q_len) for t in terms.values),
    ]
    for one, length in others:
        rows = one.weights.shape[-2]
        size = lines * pairs * (8 + 2 * item) + 24 * pairs + 2 * lines * length * rows * item
        if backward:
            size = max(size, _summed(lines, pairs, length, rows, item))
        worst = max(worst, size)
        if isinstance(one, ValueTerm):
            # Dropout or not, the terms of values see the probabilities and the scores.
            kept = max(kept, lines * length * 4 * rows * item)
    query = terms.query
    if query is not None:
        kept += 2 * lines * site.k_len * query.shape[-1] * item
    return worst + kept + 2 * len(terms.biases) * lines * pairs * item


def _summed(lines: int, pairs: int, length: int, rows: int, item: int) -> int:
    """Sums over the pairs of each row: indices and weights as `bincount` wants them, and a float64 per row."""
    return lines * (pairs * (2 * 8 + 8 + item) + length * (rows + 1) * (8 + 2 * item))


def shifted(x: Array, shape: tuple[int, ...], variant: str, kernels: bool, out: Array | None) -> None:
    """Raise `RelposMemoryError` for a call of rel_shift."""
    size = math.prod(shape) * x.dtype.itemsize
    parts = {"small things": SMALL}
    if kernels:
        straight = x.flags.c_contiguous and x.dtype.isnative
        parts["a contiguous copy of x"] = 0 if straight else math.prod(x.shape) * x.dtype.itemsize
        parts["the result"] = 0 if out is not None and out.flags.c_contiguous else size
    elif variant == "xlnet_uni" and x.strides[-2] != x.shape[-1] * x.strides[-1]:
        # Rows that do not follow one another are not read as one.
        parts["a contiguous copy of x"] = math.prod(x.shape) * x.dtype.itemsize
    elif variant in ("transformer_xl", "espnet_legacy"):
        parts["a copy of x with a column more"] = (math.prod(x.shape) + 2 * math.prod(x.shape[:-1])) * x.dtype.itemsize
        parts["the result"] = size
    memory.require("rel_shift", parts)
