"""One call on the host, from its arguments to its results: check, lower, run, lift, the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import memory_bounds
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lifted, each_lowered, fit_option
from relpos_np._calls.prepared import Ready, own_array, ready, ready_for_sequences
from relpos_np._calls.sinks import before_sinks, sink
from relpos_np._contract import check, outputs
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import Options
from relpos_np._contract.sequences import Sequences
from relpos_np._contract.terms import Terms, fit
from relpos_np._contract.turned import Turned
from relpos_np._dense import forward
from relpos_np._dense.backward import backward
from relpos_np._dense.slopes import Slopes
from relpos_np._runtime import memory
from relpos_np.schemes.base import Position, Scheme, in_order
from relpos_np.types import Array


class Call:
    """A checked call: its problem, its schemes and the backend that is to compute it.

    Raises
    ------
    RelposError
        From the constructor alone, before any work.
    """

    def __init__(
        self,
        function: str,
        operands: tuple[Array, Array, Array | None],
        position: Position,
        given: Options,
        sequences: Sequences | None = None,
        *,
        is_backward: bool = False,
        **returned: bool,
    ) -> None:
        self.operands, self.position, self.given = operands, position, given
        self._admitted = memory_bounds.admission(function, position, given["backend"], **returned)
        self.problem, self.dtype, self.flat = check.call(*operands, given, self._admitted)
        if sequences is not None:
            self.problem.sequences = sequences
            site = self.problem.site
            site.offset, site.q_len, site.k_len = sequences.covering()
        self.backend = _backend.current(given["backend"])
        if operands[2] is None and self.backend != "terms":
            # Kernels never hold the scores.
            self.backend = "numpy"
        self.schemes = checked_schemes(position, self.problem, self.backend, backward=is_backward)
        self._lowered: list[Terms] | None = None
        self.has_kernels = self.backend in _backend.WITH_KERNELS
        if not self.has_kernels:
            memory.countable(function, (*self.problem.out_shape[:-1], self.problem.site.k_len))

    def _lower(self) -> list[Terms]:
        """The terms of each scheme; those that were counted or looked at before are not made again."""
        if self._admitted is not None:
            return self._admitted.lowered
        if self._lowered is None:
            self._lowered = each_lowered(self.schemes, self.problem, by_kernels=self.backend == "numba")
        return self._lowered

    def reads_in_place(self, *, few: bool) -> bool:
        """Whether CPU kernels do the call, and nothing is made of keys and values before; `few`: those for few rows."""
        problem, site = self.problem, self.problem.site
        if self.backend != "numba" or self._admitted is not None or problem.keep is not None:
            return False
        q_len = site.q_len if problem.sequences is None else int(problem.sequences.q_len.max(initial=0))
        rows = site.heads // max(site.kv_heads, 1) * q_len
        known = _backend.kernels("numba").decodes(problem.stored_q.dtype, rows if few else 1)
        if not known or not math.prod(problem.out_shape):
            return False
        if any(s.turns_values or (s.reads_operand_values and not s.rotates_operands) for s in self.schemes):
            return False
        terms = all_terms(self._lower())
        made = terms.keys or terms.biases or (few and (terms.queries or terms.values))
        return not made and (terms.key is None or isinstance(terms.key, Turned))

    def read(self, k: Array, v: Array, scales: Sequence[Array] = ()) -> None:
        """Let keys and values be these, perhaps codes, of the shapes of those that have stood for them."""
        self.operands, problem = (self.operands[0], k, v), self.problem
        problem.stored_k = np.broadcast_to(k, problem.stored_k.shape)
        problem.stored_v = np.broadcast_to(v, problem.stored_v.shape)
        problem.scales = tuple(scales) or None

    def kept(self, schemes: tuple[Scheme, ...]) -> Ready | None:
        """What later calls of this form begin with; `schemes` are copies of the call's."""
        problem, sequences, (q, k, v) = self.problem, self.problem.sequences, self.operands
        assert v is not None
        shape = problem.out_shape[1:] if self.flat else problem.out_shape
        problem, has_sinks = replace(problem, mask=own_array(problem.mask)), self.given["sinks"] is not None
        by_item, dtype = check.per_item(self.given["key_lengths"]), problem.site.dtype if has_sinks else self.dtype
        if self.flat and (by_item or has_sinks):
            return None
        if sequences is not None:
            reach = sequences.reach()
            made = ready_for_sequences((q, k, v), problem, schemes, shape, dtype, sequences, reach)
        elif by_item and problem.unplaced and (schemes or problem.is_banded):
            # Lengths, which come with each call, decide whether it says where its queries stand.
            return None
        else:
            if by_item:
                problem.key_lengths = check.lengths_of_keys(problem.site.k_len, problem.batch, problem.site.k_len)
            made = ready((q, k, v), problem, schemes, shape, dtype)
        if made is not None:
            made.by_item, made.dtype = by_item, self.dtype
        return made

    def _sinks(self) -> Array | None:
        given = self.given["sinks"]
        if given is None:
            return None
        return check.per_head("sinks", given, self.problem.out_shape[:-1], self.problem.site.dtype)

    def check_output(self, out: Array | None) -> None:
        """Refuse an `out` that cannot hold the result, or shares memory with what is read."""
        if out is not None:
            shape, read = self.problem.out_shape, (*self.operands, *self.given.values(), self.position)
            outputs.check(out, shape[1:] if self.flat else shape, self.dtype, read)

    def attend(self, out: Array | None, return_lse: bool) -> tuple[Array, Array | None]:
        """Output and, if it was asked for, log-sum-exp."""
        if not self.has_kernels:
            self.problem.pack()
        result, lse = self._attend(out, self._sinks(), return_lse)
        if self.flat:
            result, lse = result[0], None if lse is None else lse[0]
        if out is None:
            return (result if result.dtype == self.dtype else result.astype(self.dtype)), lse
        if result.base is not out and result is not out:
            out[...] = result
        return out, lse

    def _attend(self, out: Array | None, sinks: Array | None, return_lse: bool) -> tuple[Array, Array | None]:
        if self.backend == "numpy":
            return forward.attention(self.problem, self.schemes, sinks)
        terms = all_terms(self._lower())
        if sinks is None:
            target = out[None] if out is not None and self.flat else out
            return _backend.evaluate(self.backend, self.problem, terms, target, return_lse, self.dtype)
        # Rounded to half precision after the sinks have taken their share.
        result, lse = _backend.evaluate(self.backend, self.problem, terms, None, True, self.problem.site.dtype)
        assert lse is not None
        sink(result, lse, sinks)
        return result, lse

    def differentiate(self, grad_out: Any, grad_lse: Any) -> AttentionGradient:
        """Gradients of operands, of the schemes' arrays, and of the options that have one."""
        gradients = check.output_gradients({"grad_out": grad_out, "grad_lse": grad_lse}, self.problem, self.flat)
        grad_out, grad_lse = gradients["grad_out"], gradients.get("grad_lse")
        if self.flat:
            grad_out, grad_lse = grad_out[None], None if grad_lse is None else grad_lse[None]
        if not self.has_kernels:
            self.problem.pack()
            grad_out = np.ascontiguousarray(grad_out, self.problem.site.dtype)
        lowered = self._lower()
        terms = all_terms(lowered)
        # Gradients of schemes that do not compute with queries and keys do not need their numbers, either.
        computing = any(scheme.reads_operand_values and not scheme.rotates_operands for scheme in self.schemes)
        sinks, grad_sinks = self._sinks(), None
        if sinks is not None:
            out, lse = self._without_sinks(terms)
            grad_out = np.ascontiguousarray(grad_out, self.problem.site.dtype)
            grad_out, grad_lse, grad_sinks = before_sinks(out, lse, sinks, grad_out, grad_lse)
            grad_sinks = fit_option(grad_sinks, self.given["sinks"], per_head=True)
        grads, grad_v = self._backward(terms, grad_out, grad_lse, stored=not computing)
        operands = (self.problem.stored_q, self.problem.stored_k)
        if computing:
            operands = (in_order(self.problem.q), in_order(self.problem.k))
        grad_q, grad_k, arrays = each_lifted(operands, self.problem, self.position, self.schemes, lowered, grads)
        grad_scale = None
        if self.given["query_scale"] is not None:
            grad_q, grad_scale = self._unscaled(grad_q)
        return AttentionGradient(
            self._fitted(grad_q, 0),
            self._fitted(grad_k, 1),
            self._fitted(grad_v, 2),
            arrays,
            sinks=grad_sinks,
            query_scale=grad_scale,
        )

    def _without_sinks(self, terms: Terms) -> tuple[Array, Array]:
        """Output and log-sum-exp before sinks have their share."""
        if self.backend == "numpy":
            return forward.attention(self.problem, self.schemes)
        out, lse = _backend.evaluate(self.backend, self.problem, terms, None, True, self.problem.site.dtype)
        assert lse is not None
        return out, lse

    def _backward(self, terms: Terms, grad_out: Array, grad_lse: Any, *, stored: bool) -> tuple[Terms, Array]:
        """Gradients of terms and values."""
        if self.has_kernels:
            return _backend.backward(self.backend, self.problem, terms, grad_out, grad_lse, stored=stored)
        slopes = Slopes()
        if self.backend == "numpy":
            s = forward.scores(self.problem, self.schemes, slopes)
        else:
            from relpos_np._dense import from_terms

            s = from_terms.scores(self.problem, terms, slopes)
        return backward(self.problem, terms, s, grad_out, grad_lse, slopes)

    def _unscaled(self, grad_q: Array) -> tuple[Array, Array]:
        """Gradients of queries before their factors, and of the factors."""
        dtype, given = self.problem.site.dtype, self.given["query_scale"]
        factors = check.per_query("query_scale", given, grad_q.shape[:-1], dtype)
        queries = np.ascontiguousarray(self.operands[0], dtype)
        if not np.isfinite(queries).all():
            # A query without keys, whose gradient is 0, may hold anything.
            queries = np.where(grad_q == 0, dtype.type(0), queries)
        grad_scale = np.einsum("...d,...d->...", grad_q, queries)
        return grad_q * factors[..., None], fit_option(grad_scale, given, per_head=False)

    def _fitted(self, x: Array, n: int) -> Array:
        """A gradient as its operand is, which may have been broadcast over batch axes, or had no axis of heads."""
        operand = self.operands[n]
        assert operand is not None
        return fit(x[0] if self.flat else x, operand.shape).astype(operand.dtype, copy=False)

    def scores(self) -> Array:
        """The scores of all pairs: by the schemes' formulas, or by the terms where that backend is asked for."""
        self.problem.pack()
        if self.backend == "terms":
            from relpos_np._dense import from_terms

            s = from_terms.scores(self.problem, all_terms(self._lower()))
        else:
            s = forward.scores(self.problem, self.schemes)
        return s[0] if self.flat else s
