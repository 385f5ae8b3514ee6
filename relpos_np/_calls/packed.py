"""Several calls in one: packed sequences, and offsets that differ between batch items.

Each part is computed as a call of its own, with the same schemes: results are those of separate calls, bit for bit, and
nothing is held for pairs of different sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls import repeated
from relpos_np._calls.call import Call
from relpos_np._calls.lowering import schemes_of
from relpos_np._contract import check, outputs
from relpos_np._contract.gradient import AttentionGradient
from relpos_np._contract.options import DEFAULTS, Options
from relpos_np._contract.problem import Site
from relpos_np._contract.sequences import Sequences
from relpos_np._runtime.memory import limit as memory_limit
from relpos_np.errors import RelposValueError
from relpos_np.schemes.base import Position
from relpos_np.types import Array, Int64

_ALL = slice(None)


def is_packed(given: Options) -> bool:
    """Whether a call is several."""
    offset = given["offset"]
    if given["segments"] is not None or isinstance(offset, np.ndarray | list | tuple):
        return True
    if isinstance(offset, str) and check.at_end(offset):
        # Where all items have as many keys, there is one offset.
        return check.per_item(given["key_lengths"])
    return offset is not None and type(offset) is not int and check.on_device(offset)


@dataclass(slots=True, eq=False)
class _Part:
    """One call: its items along each batch axis (none for all), queries, keys, offset, and how many keys exist."""

    items: tuple[slice, ...]
    queries: slice
    keys: slice
    offset: int | str | None
    lengths: Any = None

    def vectors(self, rows: slice) -> Any:
        """What selects its part of (..., rows, channels)."""
        return (*self.items, ..., rows, _ALL)

    @property
    def numbers(self) -> Any:
        """What selects its part of (..., queries)."""
        return (*self.items, ..., self.queries)

    def of(self, x: Any, batch: int, inner: tuple[slice, ...]) -> Any:
        """What an option holds, with `batch` axes, any of them missing or of length 1, and some ranges after them."""
        if x is None:
            return None
        x = x.reshape((1,) * (batch + len(inner) - x.ndim) + x.shape)
        index = (*(self.items or (_ALL,) * batch), *inner)
        return x[tuple(_ALL if n == 1 else own for own, n in zip(index, x.shape, strict=True))]


class Host:
    """Arrays in NumPy's memory, as a packed call needs them."""

    @staticmethod
    def checked(name: str, x: Any) -> Array:
        """An operand."""
        return check.array(name, x)

    @staticmethod
    def view(x: Array, index: Any) -> Array:
        """Part of an array, without a copy."""
        return np.asarray(x[index])

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new array with anything in it."""
        return np.empty(shape, dtype)

    @staticmethod
    def put(x: Any, target: Array, index: Any) -> None:
        """Overwrite part of an array."""
        target[index] = x


@dataclass(slots=True, eq=False)
class PackedCall:
    """A call that is several.

    Parameters
    ----------
    q, k, v : array
        Operands of all of them.
    position : scheme or tuple of schemes or None
        Of each of them.
    given : mapping
        The options of all; arrays among them are NumPy's.
    memory : Host or what has its functions
        Where the operands and results are.
    """

    q: Any
    k: Any
    v: Any
    position: Position
    given: Options
    memory: Any = Host
    _bounds: tuple[Int64, Int64] | None = field(init=False, default=None)
    _offset: int | str | None = field(init=False, default=None)
    _offsets: Int64 | None = field(init=False, default=None)
    _lengths: Array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if self.memory.checked(name, x).ndim < 2:
                raise RelposValueError(f"{name}: expected shape (..., H, L, D), found {x.shape}")
        if isinstance(self.given["mask"], np.ndarray):
            check.clear_mask(self.given["mask"], self.q.shape[:-3], self.q.shape[-2], self.k.shape[-2])
        if self.given["segments"] is None:
            self._check_items()
        else:
            self._check_segments()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return result_shape(self.q, self.k, self.v)

    def _operands(self, part: _Part) -> tuple[Any, Any, Any]:
        rows = (self.q, part.queries), (self.k, part.keys), (self.v, part.keys)
        q, k, v = (self.memory.view(x, part.vectors(own)) for x, own in rows)
        return q, k, v

    @property
    def _batch(self) -> int:
        """Batch axes."""
        most: int = max(x.ndim for x in (self.q, self.k, self.v))
        return max(most - 3, 0)

    def _calls(self) -> Iterator[tuple[_Part, dict[str, Any]]]:
        """Each of the calls, with its options."""
        return ((part, self._options(part)) for part in self._parts())

    def _parts(self) -> list[_Part]:
        return self._items() if self._bounds is None else self._segments(self._bounds)

    def sequences(self, *, backward: bool = False) -> Sequences | None:
        """The sequences, where the CPU kernels attend all of them at once; None where each is a call."""
        given = self.given
        if self.memory is not Host or _backend.current(given["backend"]) != "numba" or memory_limit() is not None:
            return None
        if given["selected"] is not None or given["dropout"] != 0.0:
            return None
        if not all(scheme.covers_gradients if backward else scheme.covers for scheme in schemes_of(self.position)):
            return None
        if self._bounds is None:
            assert self._offsets is not None
            found = Sequences.of_items(self._offsets, self.q.shape[-2], self.k.shape[-2], self._lengths)
        else:
            items = math.prod(self.shape[: self._batch])
            found = Sequences.of_segments(self._bounds, self._offset, items, self._lengths)
        return found if len(found) else None

    def _check_segments(self) -> None:
        given = self.given
        if given["selected"] is not None:
            raise RelposValueError("selected: cannot be combined with segments; make a call for each sequence")
        if given["offset"] is not None:
            self._offset = "end" if check.at_end(given["offset"]) else check.integer("offset", given["offset"])
        self._refuse_tokens("segments")
        bounds = self._bounds = segment_bounds(given["segments"], self.q.shape[-2], self.k.shape[-2])
        if given["key_lengths"] is not None:
            self._lengths = self._lengths_of_segments(*map(np.diff, bounds))

    def _lengths_of_segments(self, q_len: Int64, k_len: Int64) -> Int64:
        """How many keys of each sequence exist."""
        given = self.given
        lengths: Int64 = check.integers("key_lengths", given["key_lengths"]).astype(np.int64)
        if lengths.shape != k_len.shape or (lengths < 0).any() or (lengths > k_len).any():
            raise RelposValueError(
                f"key_lengths: expected one for each of {len(k_len)} segments, of at most its keys, found "
                f"{lengths.tolist()!r:.100}"
            )
        open_ends = (q_len > 0) & (q_len < k_len) & (lengths > 0) & (lengths < k_len)
        banded = given["causal"] or any(given[name] is not None for name in ("window", "rule"))
        if self._offset is None and open_ends.any() and (banded or schemes_of(self.position)):
            raise RelposValueError(
                "key_lengths: a segment has fewer queries than keys, of which fewer exist, and where the queries stand "
                'is not said; pass offset="end" if they are the last of the keys that exist'
            )
        return lengths

    def _segments(self, bounds: tuple[Int64, Int64]) -> list[_Part]:
        ends = zip(pairwise(bounds[0].tolist()), pairwise(bounds[1].tolist()), strict=True)
        lengths = [None] * (len(bounds[0]) - 1) if self._lengths is None else self._lengths.tolist()
        return [
            _Part((), slice(a, b), slice(c, d), self._offset, n)
            for ((a, b), (c, d)), n in zip(ends, lengths, strict=True)
        ]

    def _check_items(self) -> None:
        batch = self.q.shape[:-3]
        if any(x.shape[:-3] != batch or x.ndim < 3 for x in (self.k, self.v)) or not batch:
            raise RelposValueError(
                "offset: one for each item needs q, k and v with the same batch axes, found shapes "
                f"{self.q.shape}, {self.k.shape} and {self.v.shape}"
            )
        if self.given["key_lengths"] is not None:
            self._lengths = check.lengths_of_keys(self.given["key_lengths"], batch, self.k.shape[-2])
        if self._lengths is not None and check.at_end(self.given["offset"]):
            given = self._lengths.astype(np.int64) - self.q.shape[-2]
        else:
            given = check.integers("offset", self.given["offset"]).astype(np.int64)
        check.fits_batch("offset", given.shape, batch)
        self._offsets = given if given.shape == batch else np.broadcast_to(given, batch)
        self._refuse_tokens("an offset for each item")

    def _items(self) -> list[_Part]:
        """Runs of batch items that have the same offset: views of the operands, not copies."""
        assert self._offsets is not None
        parts = []
        for line in np.ndindex(self._offsets.shape[:-1]):
            own = self._offsets[line]
            starts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
            lead = tuple(slice(n, n + 1) for n in line)
            for a, b in pairwise(starts):
                if b > a:
                    items = (*lead, slice(a, b))
                    lengths = None if self._lengths is None else self._lengths[items]
                    parts.append(_Part(items, _ALL, _ALL, int(own[a]), lengths))
        return parts

    def _refuse_tokens(self, what: str) -> None:
        """Refuse schemes that hold something for the tokens or the items of the whole call."""
        for scheme in schemes_of(self.position):
            if not (scheme.relative or scheme.token_independent):
                raise RelposValueError(
                    f"position: {scheme!r} belongs to the tokens of one call and cannot be used with {what}; make a "
                    "call for each sequence"
                )

    def _options(self, part: _Part) -> dict[str, Any]:
        """The options of one of the calls."""
        given, batch, rows = self.given, self._batch, part.queries
        own: dict[str, Any] = {**given, "segments": None, "offset": part.offset, "key_lengths": part.lengths}
        sinks = given["sinks"]
        if isinstance(sinks, np.ndarray):
            own["sinks"] = sinks if sinks.ndim < 2 else part.of(sinks, batch, (_ALL, rows))
        if isinstance(given["query_scale"], np.ndarray):
            own["query_scale"] = part.of(given["query_scale"], batch, (_ALL, rows))
        if isinstance(given["mask"], np.ndarray):
            own["mask"] = part.of(given["mask"], batch, (_ALL, rows, part.keys))
        if part.items:
            if given["selected"] is not None:
                selected = check.integers("selected", given["selected"])
                inner = (_ALL,) * (2 if selected.ndim == batch + 2 else 3)
                own["selected"] = part.of(selected, batch, inner)
            if given["rule"] is not None:
                own["rule"] = given["rule"].of_items(part.items)
        return own

    def _checked_out(self, out: Array | None) -> Array:
        """An array of the host for the output: the caller's, or a new one."""
        dtype = self.q.dtype.newbyteorder("=")
        if out is None:
            return np.empty(self.shape, dtype)
        outputs.check(out, self.shape, dtype, (self.q, self.k, self.v, *self.given.values(), self.position))
        return out

    def at_once(self, function: str, sequences: Sequences, *, is_backward: bool = False) -> Call:
        """The call of all sequences."""
        own = Options(**{**self.given, "segments": None, "offset": 0, "key_lengths": None})
        call = Call(function, (self.q, self.k, self.v), self.position, own, sequences, is_backward=is_backward)
        if call.problem.ranges is not None:
            call.problem.ranges = self._ranges(call.problem.site)
        return call

    def _ranges(self, site: Site) -> Int64:
        """What a rule says of every query: the first key among those of its sequence, and the one after the last."""
        found, rule = np.zeros((*site.batch, self.q.shape[-2], 2), np.int64), cast("Any", self.given["rule"])
        for part in self._parts():
            q_len, k_len = (len(range(x.shape[-2])[own]) for x, own in ((self.q, part.queries), (self.k, part.keys)))
            known = k_len if part.lengths is None else part.lengths
            offset = part.offset if isinstance(part.offset, int) else (known if part.offset else k_len) - q_len
            batch = tuple(len(range(n)[own]) for n, own in zip(site.batch, part.items, strict=False)) or site.batch
            here = replace(site, q_len=q_len, k_len=k_len, offset=offset, batch=batch)
            own_rule = rule.of_items(part.items) if part.items else rule
            found[part.vectors(part.queries)] = np.clip(own_rule.ranges(here), 0, k_len)
        return found

    def on_host(
        self,
        compute: Callable[..., Any],
        out: Array | None,
        return_lse: bool,
        return_bound: bool,
        form: Hashable | None,
    ) -> Any:
        """`relpos_np.attention` in one launch where kernels can, else part by part; also bounds, if they are wanted.

        `form`: of the call, as it was given.
        """
        sequences = None if return_bound else self.sequences()
        if sequences is not None:
            if out is not None:
                self._checked_out(out)
            operands, of_all = (self.q, self.k, self.v), partial(self.at_once, "attention", sequences)
            return attend_sequences(operands, self.position, self.given, sequences, of_all, out, return_lse, step=form)
        result = self._checked_out(out)
        if return_bound:
            return self._bounded(compute, return_lse, result)
        return self.attention(compute, return_lse, result)

    def attention(self, compute: Callable[..., Any], return_lse: bool, result: Any) -> Any:
        """`relpos_np.attention` of each part, into `result`; also the log-sum-exps if they are wanted."""
        memory, lse = self.memory, None
        if return_lse:
            dtype = self.q.dtype.newbyteorder("=")
            lse = memory.empty(self.shape[:-1], np.dtype(np.float32) if dtype.itemsize == 2 else dtype)
        for part, own in self._calls():
            found = compute(*self._operands(part), position=self.position, return_lse=return_lse, **own)
            if return_lse:
                found, sums = found
                memory.put(sums, lse, part.numbers)
            memory.put(found, result, part.vectors(part.queries))
        return (result, lse) if return_lse else result

    def _bounded(self, compute: Callable[..., Any], return_lse: bool, result: Array) -> tuple[Array, ...]:
        half, own_dtype = result.dtype.itemsize == 2, result.dtype
        lse = [np.empty(self.shape[:-1], np.float32 if half else own_dtype)] if return_lse else []
        kept = [result, *lse, np.empty(self.shape), *(np.empty(x.shape) for x in lse)]
        for part, own in self._calls():
            operands, wanted = self._operands(part), {"return_lse": return_lse, "return_bound": True}
            for found, target in zip(compute(*operands, position=self.position, **wanted, **own), kept, strict=True):
                target[part.vectors(part.queries) if target.ndim == result.ndim else part.numbers] = found
        return tuple(kept)

    def attention_vjp(
        self, compute: Callable[..., AttentionGradient], grad_out: Any, grad_lse: Any, mask_gradient: bool
    ) -> AttentionGradient:
        """`relpos_np.attention_vjp` of each part, and sums of what parts share."""
        memory, shape = self.memory, self.shape
        grad_out = memory.checked("grad_out", grad_out)
        grad_lse = None if grad_lse is None else memory.checked("grad_lse", grad_lse)
        for name, x, expected in (("grad_out", grad_out, shape), ("grad_lse", grad_lse, shape[:-1])):
            if x is not None and x.shape != expected:
                raise RelposValueError(f"{name}: expected shape {expected}, found {x.shape}")
        if mask_gradient:
            raise RelposValueError("mask_gradient: cannot be combined with segments or offsets of items")
        sequences = self.sequences(backward=True)
        if sequences is not None:
            with np.errstate(all="ignore"):
                call = self.at_once("attention_vjp", sequences, is_backward=True)
                return call.differentiate(grad_out, grad_lse)
        # Every row belongs to one part.
        grads = [memory.empty(x.shape, x.dtype) for x in (self.q, self.k, self.v)]
        shared: dict[str, Any] = {"position": None, "sinks": None, "query_scale": None}
        for part, own in self._calls():
            found = compute(
                *self._operands(part),
                position=self.position,
                grad_out=memory.view(grad_out, part.vectors(part.queries)),
                grad_lse=None if grad_lse is None else memory.view(grad_lse, part.numbers),
                **own,
            )
            for whole, own_grad, rows in zip(
                grads, (found.q, found.k, found.v), (part.queries, part.keys, part.keys), strict=True
            ):
                memory.put(own_grad, whole, part.vectors(rows))
            shared["position"] = _sum(shared["position"], found.position)
            for name in ("sinks", "query_scale"):
                given = self.given[name]  # type: ignore[literal-required]
                if given is not None:
                    self._spread(shared, name, given, part, getattr(found, name))
        position = {} if shared["position"] is None else shared["position"]
        to_q, to_k, to_v = grads
        return AttentionGradient(to_q, to_k, to_v, position, sinks=shared["sinks"], query_scale=shared["query_scale"])

    def _spread(self, shared: dict[str, Any], name: str, given: Array, part: _Part, own: Array) -> None:
        """Add the gradient of a part to that of an option which holds a number per head or per query."""
        if shared[name] is None:
            shared[name] = np.zeros_like(given)
        if name == "sinks" and given.ndim < 2:
            shared[name] += own
        else:
            target = part.of(shared[name], self._batch, (_ALL, part.queries))
            target += own.reshape(target.shape)


def attend_sequences(
    operands: tuple[Array, Array, Array],
    position: Position,
    given: Options,
    sequences: Sequences,
    call_of_all: Callable[[], Call | None],
    out: Array | None,
    return_lse: bool,
    scales: SequenceABC[Array] = (),
    step: Hashable | None = None,
) -> Any:
    """Output and, if it is wanted, log-sum-exp of all sequences in one launch; None if `call_of_all` makes no call.

    `scales`: of keys and values that are codes. `step`: the form of the call, places included, if it may come again.
    """
    moved = "segments", "offset", "key_lengths"
    own = {name: x for name, x in given.items() if x is not DEFAULTS[name] and name not in moved}
    form = repeated.form_of_sequences(*operands, position, own, sequences, coded=bool(scales))
    ready = None if form is None else repeated.known(form)
    if ready is None:
        call = call_of_all()
        return None if call is None else attend(form, call, out, return_lse)
    ready, sinks = ready.of(sequences), given["sinks"]
    read = (*operands, *scales, *given.values(), position)
    results = ready.run(operands, None, out, read, return_lse=return_lse, scales=scales, sinks=sinks)
    if step is not None:
        repeated.keep_step(step, ready, sequences)
    return results


def attend(form: Hashable | None, call: Call, out: Array | None, return_lse: bool) -> Any:
    """The results of a call whose form was not known; it is remembered, if it is one that may be."""
    found, lse = call.attend(out, return_lse)
    if form is not None:
        repeated.keep(form, call.schemes, call.kept)
    return (found, lse) if return_lse else found


def segment_bounds(value: Any, q_len: int, k_len: int) -> tuple[Int64, Int64]:
    """Cumulative lengths of segments of queries and of keys."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise RelposValueError(f"segments: expected cumulative lengths, or a pair of them, found {len(pair)} arrays")
    bounds: list[Int64] = []
    for given, length, what in zip(pair, (q_len, k_len), ("queries", "keys"), strict=True):
        if bounds and given is pair[0] and q_len == k_len:
            bounds += bounds
            break
        own: Int64 = check.integers("segments", given).astype(np.int64)
        if own.ndim != 1 or not own.size or own[0] != 0 or own[-1] != length or (own[1:] < own[:-1]).any():
            raise RelposValueError(
                f"segments: expected cumulative lengths from 0 to the {length} {what}, found {own.tolist()!r:.100}"
            )
        bounds.append(own)
    if len(bounds[0]) != len(bounds[1]):
        raise RelposValueError(
            f"segments: {len(bounds[0]) - 1} of queries, but {len(bounds[1]) - 1} of keys; expected as many"
        )
    return bounds[0], bounds[1]


def result_shape(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """The shape of the output of some operands."""
    try:
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise RelposValueError(
            f"q, k, v: batch axes {q.shape[:-3]}, {k.shape[:-3]} and {v.shape[:-3]} do not broadcast"
        ) from None
    flat = q.ndim == k.ndim == v.ndim == 2
    heads = () if flat else (q.shape[-3] if q.ndim > 2 else 1,)
    return (*batch, *heads, q.shape[-2], v.shape[-1])


def _sum(total: Any, own: Any) -> Any:
    """The sum of gradients of schemes: a mapping, or a tuple of mappings."""
    if total is None:
        return own
    if isinstance(own, tuple):
        return tuple(_sum(a, b) for a, b in zip(total, own, strict=True))
    return {name: total[name] + x for name, x in own.items()}
