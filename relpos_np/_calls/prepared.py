"""Attention that is made again and again with operands of one form: checked once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Never, overload

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import memory_bounds
from relpos_np._calls.lowering import all_terms, checked_schemes, each_lowered, has_reusable_terms
from relpos_np._calls.sinks import sink
from relpos_np._contract import check, outputs
from relpos_np._contract.options import DEFAULTS
from relpos_np._contract.problem import Problem, Site, converted
from relpos_np._contract.sequences import Sequences
from relpos_np._contract.terms import Dense, Toeplitz
from relpos_np._runtime import memory, results
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Scheme
from relpos_np.types import Array

_NAMES = ("q", "k", "v")


class Ready:
    """What later calls of one form begin with: their plan, what their results are, and who computes with operands."""

    def __init__(
        self,
        planned: Any,
        shape: tuple[int, ...],
        result: np.dtype[Any],
        site: Site,
        own: tuple[tuple[int, ...], ...],
        computing: Sequence[tuple[Scheme, Sequence[Array]]],
    ) -> None:
        self._planned, self._shape, self._result, self._site, self._own = planned, shape, result, site, own
        self._computing = [(scheme, [_layout(x) for x in vectors]) for scheme, vectors in computing]
        self.fits, self.takes_lengths = planned.fits, planned.takes_lengths
        self.nbytes = sum([x.nbytes for x in planned.kept])
        # Whether each call says how many keys its items have. The dtype of what calls return, in which results are
        # rounded after sinks have taken their share.
        self.by_item, self.dtype = False, result

    def of(self, sequences: Sequences) -> Ready:
        """What calls begin with whose sequences stand where these do."""
        found = copy.copy(self)
        found._planned = self._planned.of(sequences)
        return found

    def lengths(self, given: Any) -> Array | None:
        """Lengths of keys that a call gives for its items, if it does."""
        return check.lengths_of_keys(given, self._site.batch, self._site.k_len) if self.by_item else None

    def run(
        self,
        operands: tuple[Array, Array, Array],
        lengths: Array | None,
        out: Array | None,
        read: Sequence[Any],
        *,
        return_lse: bool,
        scales: Sequence[Array] = (),
        sinks: Array | None = None,
    ) -> Array | tuple[Array, Array]:
        """The results of a call; `lengths`: of keys; `read`: what `out` may not overlap.

        `scales`: of keys and values that are codes.
        """
        # Sequences may have more rows or fewer in all.
        shape = (*self._shape[:-2], operands[0].shape[-2], self._shape[-1])
        own = None if sinks is None else check.per_head("sinks", sinks, shape[:-1], self._site.dtype)
        if out is not None:
            outputs.check(out, shape, self.dtype, read)
        if out is not None and out.flags.c_contiguous and sinks is None:
            result = out
        else:
            result = results.empty(shape, self._result)[0]
        lse = np.empty(shape[:-1], self._site.dtype) if return_lse or sinks is not None else None
        vectors = self._vectors(operands) if self._computing else ()
        self._planned.run(operands, lengths, result, lse, vectors, scales)
        if own is not None and lse is not None:
            result = self._sunk(result, lse, own)
        if out is not None and result is not out:
            out[...] = result
            result = out
        return (result, lse) if return_lse and lse is not None else result

    @np.errstate(all="ignore")
    def _sunk(self, result: Array, lse: Array, sinks: Array) -> Array:
        """A result with sinks, in its dtype; `lse` is made that with sinks."""
        sink(result, lse, sinks)
        return result.astype(self.dtype, copy=False)

    def _vectors(self, operands: tuple[Array, Array, Array]) -> list[Array]:
        """What schemes make of queries and keys."""
        q, k = [
            converted(x if x.shape == shape else np.broadcast_to(x, shape), self._site.dtype)
            for x, shape in zip(operands, self._own, strict=False)
        ]
        found: list[Array] = []
        for scheme, layouts in self._computing:
            made = scheme.lower_vectors(q, k, self._site)
            # The kernel reads them unchecked, and classes of users make them too.
            own = [_layout(x) for x in made]
            if own != layouts:
                raise RelposValueError(
                    f"position: {type(scheme).__name__}.lower_vectors: expected what `lower` makes, {_words(layouts)}, "
                    f"found {_words(own)}"
                )
            found += made
        return found


def _layout(x: Array) -> tuple[Any, ...]:
    """How an array lies in memory; strides of axes of length 1 mean nothing."""
    strides = x.strides
    if 1 in x.shape:
        strides = tuple([0 if size == 1 else stride for size, stride in zip(x.shape, strides, strict=True)])
    return x.shape, strides, x.dtype


def _words(layouts: Sequence[tuple[Any, ...]]) -> str:
    return ", ".join([f"shape {shape} with strides {strides} of {dtype}" for shape, strides, dtype in layouts])


def _in_place(operands: tuple[Array, Array, Array], problem: Problem, result: np.dtype[Any]) -> bool:
    """Whether the CPU kernels write results of the dtype, and the problem holds the operands and no copies of them."""
    stored = zip(operands, problem.stored, strict=True)
    writes: tuple[str, ...] = _backend.kernels("numba").WRITES
    return result.name in writes and all(np.may_share_memory(x, own) for x, own in stored)


def ready(
    operands: tuple[Array, Array, Array],
    problem: Problem,
    schemes: tuple[Scheme, ...],
    shape: tuple[int, ...],
    result: np.dtype[Any],
) -> Ready | None:
    """What calls of the CPU kernels begin with; None if nothing is.

    Terms must be the same in all of them, but for vectors that schemes make anew, and kernels may not read copies of
    operands, as they do if these are in another byte order or layout.
    """
    kernels = _backend.kernels("numba")
    if not _in_place(operands, problem, result):
        return None
    if not all(has_reusable_terms(scheme) and not scheme.turns_values for scheme in schemes):
        return None
    # Queries and keys may be one array; in later calls they need not.
    problem = replace(problem, stored_k=problem.stored_k.view())
    lowered, site = each_lowered(schemes, problem, by_kernels=True), problem.site
    made = zip(schemes, lowered, strict=True)
    computing = [(scheme, terms.vectors()) for scheme, terms in made if scheme.makes_vectors]
    planned = kernels.prepare(problem, all_terms(lowered), result, [x for _, vectors in computing for x in vectors])
    own = problem.stored_q.shape, problem.stored_k.shape
    return None if planned is None else Ready(planned, shape, result, site, own, computing)


def ready_for_sequences(
    operands: tuple[Array, Array, Array],
    problem: Problem,
    schemes: tuple[Scheme, ...],
    shape: tuple[int, ...],
    result: np.dtype[Any],
    sequences: Sequences,
    reach: tuple[int, int],
) -> Ready | None:
    """As `ready`, of calls whose sequences, like these, have at most so many queries and keys, and are within them."""
    kernels, (q_len, k_len) = _backend.kernels("numba"), reach
    if not _in_place(operands, problem, result):
        return None
    if (
        0 in problem.batch
        or problem.ranges is not None
        or problem.mask is not None
        or problem.step > 1
        or not all(scheme.covers for scheme in schemes)
    ):
        return None
    # Every position that a sequence can have.
    site = replace(problem.site, offset=-q_len, q_len=k_len + 2 * q_len, k_len=k_len)
    problem = replace(problem, site=site, sequences=sequences)
    terms = all_terms(each_lowered(schemes, problem, by_kernels=True))
    planned = kernels.prepare_sequences(problem, terms, result)
    own = problem.stored_q.shape, problem.stored_k.shape
    return None if planned is None else Ready(planned, shape, result, site, own, ())


def own_schemes(schemes: tuple[Scheme, ...]) -> tuple[Scheme, ...]:
    """Copies that nobody else can change; maps, which nobody changes, are shared."""
    maps = [x for scheme in schemes for x in vars(scheme).values() if isinstance(x, Dense | Toeplitz)]
    return copy.deepcopy(schemes, {id(x): x for x in maps})


def own_array(x: Any) -> Any:
    """A copy of an array, of which what is repeated is stored once; anything else as it is."""
    if type(x) is not np.ndarray:
        return x
    return np.broadcast_to(x[tuple(slice(None, None if stride else 1) for stride in x.strides)].copy(), x.shape)


class PreparedAttention:
    """What `relpos_np.prepare` returns: call it with q, k and v."""

    def __init__(self, attention: Callable[..., Any], operands: tuple[Any, Any, Any], position: Any, options: Any):
        q, k, v = (check.array(name, x) for name, x in zip(_NAMES, operands, strict=True))
        # Users may change their arrays, some of which kernels would read where they lie.
        options = {name: own_array(x) for name, x in options.items()}
        admit = memory_bounds.admission("attention", position, options["backend"], out=False, return_lse=True)
        problem, result, flat = check.call(q, k, v, DEFAULTS | options, admit)
        schemes = own_schemes(checked_schemes(position, problem, options["backend"]))
        self._attention, self._position, self._options = attention, schemes or None, options
        self._form = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
        self._batch, self._k_len = problem.batch, problem.site.k_len
        # What each call of the kernels begins with, without lengths of keys and with them.
        self._ready: dict[bool, Ready | None] = {False: None, True: None}
        # And where each item has an offset of its own; the same for the places of the last call.
        self._items: Ready | None = None
        self._step: tuple[Any, Ready] | None = None
        if options["backend"] != "numba":
            return
        shape = problem.out_shape[1:] if flat else problem.out_shape
        np.empty(shape, result)  # what no machine can hold is refused now, and not in each call
        made = ready((q, k, v), problem, schemes, shape, result)
        self._ready = {False: made, True: made}
        if made is not None and not made.takes_lengths:
            problem.key_lengths = check.lengths_of_keys(self._k_len, self._batch, self._k_len)
            self._ready[True] = ready((q, k, v), problem, schemes, shape, result)
        if options["selected"] is None and q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
            reach, lengths = (problem.site.q_len, self._k_len), np.broadcast_to(np.int64(self._k_len), self._batch)
            items, alone = Sequences.of_items(lengths - reach[0], *reach, lengths), replace(problem, key_lengths=None)
            self._items = ready_for_sequences((q, k, v), alone, schemes, shape, result, items, reach)
        if type(options["offset"]) is not int and (schemes or problem.is_banded) and problem.site.q_len < self._k_len:
            # Lengths, which come with each call, decide where its queries stand, or leave it open.
            self._ready[True] = None

    @overload
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = ...,
        offset: Any = ...,
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
        offset: Any = ...,
        return_lse: bool,
        out: Array | None = ...,
    ) -> Any: ...

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        key_lengths: Any = None,
        offset: Any = None,
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
        offset : int or ndarray of int or "end", optional
            Where the queries stand, in place of what was prepared; one for each batch item, if it is an array.
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
        if return_lse is not False:
            return_lse = check.flag("return_lse", return_lse)
        operands = q, k, v
        if not type(q) is type(k) is type(v) is np.ndarray:
            operands = q, k, v = check.array("q", q), check.array("k", k), check.array("v", v)
        quick = self._form == (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
        ready = self._ready[key_lengths is not None]
        options, moves = self._options, offset is not None
        if moves:
            options = {**options, "offset": offset}
        if moves or (key_lengths is not None and options["offset"] == "end"):
            ready = self._items
        if not (quick and q.flags.aligned and k.flags.aligned and v.flags.aligned):
            self._refuse(operands)
            ready = None
        lengths = None
        if ready is not None and key_lengths is not None:
            lengths = check.lengths_of_keys(key_lengths, self._batch, self._k_len)
        if ready is not None and ready is self._items:
            places, lengths = self._sequences(options["offset"], lengths), None
            ready = None if places is None else self._planned(ready, places)
        if ready is None or memory.limit() is not None or not ready.fits():
            given = {"key_lengths": key_lengths, "return_lse": return_lse, "out": out, **options}
            found: Array | tuple[Array, Array] = self._attention(q, k, v, position=self._position, **given)
            return found
        return ready.run(operands, lengths, out, operands, return_lse=return_lse)

    def _planned(self, items: Ready, places: Sequences) -> Ready:
        """What a call begins with whose items stand there."""
        known, step = self._step, (places.has_ends, places.numbers.tobytes())
        if known is None or known[0] != step:
            self._step = known = step, items.of(places)
        return known[1]

    def _sequences(self, offset: Any, lengths: Array | None) -> Sequences | None:
        """Where items stand; None where `attention` says what is wrong, or one stands beyond what was prepared."""
        q_len = self._form[0][-2]
        if not isinstance(offset, str):
            if offset is None or (check.per_item(offset) and not isinstance(offset, np.ndarray)):
                return None
            at = check.integers("offset", offset).astype(np.int64)
            if at.ndim and at.shape != self._batch:
                return None
        elif check.at_end(offset):
            at = (np.full((), self._k_len) if lengths is None else lengths) - q_len
        at = np.broadcast_to(at, self._batch)
        if at.size and not (-q_len <= at.min() and at.max() <= self._k_len):
            return None
        return Sequences.of_items(at, q_len, self._k_len, lengths)

    def _refuse(self, operands: tuple[Array, Array, Array]) -> None:
        """Refuse operands that differ in more than how they lie in memory."""
        forms = zip(self._form[::3], self._form[2::3], strict=True)
        for name, x, (shape, dtype) in zip(_NAMES, operands, forms, strict=True):
            if x.shape != shape:
                raise RelposValueError(f"{name}: the call was prepared for shape {shape}, found {x.shape}")
            if x.dtype != dtype:
                raise RelposTypeError(f"{name}: the call was prepared for dtype {dtype}, found {x.dtype}")

    def __reduce__(self) -> Never:
        """Addresses of this process mean nothing in another one."""
        raise RelposTypeError("prepare: a prepared call cannot be pickled; prepare it again where it is used")
