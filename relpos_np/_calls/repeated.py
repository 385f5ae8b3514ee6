"""Calls of `attention` whose form was met before: they are checked, lowered and planned once.

All that decides how a call is done, but for the numbers in q, k and v, is its form: shapes and strides, options, what
was chosen for the process, and what its schemes hold, byte for byte, so that a table whose numbers were changed in
place makes another form. A form that is met again is prepared as by `relpos_np.prepare`; later calls take that way,
which gives the same bits, and beside their kernel do little more than find their form. Where a call has many sequences,
their lengths are no part of its form, nor is how many rows all of them have. The layers of a model make such calls one
after the other with the same sequences: a step, which is found by all that was given, lengths included.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls.lowering import has_reusable_terms
from relpos_np._calls.prepared import Ready, own_schemes
from relpos_np._contract import check
from relpos_np._contract.quantized import Quantized
from relpos_np._contract.sequences import Sequences
from relpos_np._contract.terms import Dense, IndexMap, Toeplitz
from relpos_np._runtime import memory, precision
from relpos_np.schemes.base import Scheme
from relpos_np.schemes.registry import is_registered

# Entries at most. Bytes of queries, of an array and of a map in a form, and of all that is kept for it: with more, the
# call takes long anyway. Bytes of all that is kept.
MOST, QUERY_BYTES, FORM_BYTES, MAP_BYTES, KEPT_BYTES, ALL_BYTES = 512, 1 << 23, 1 << 16, 1 << 18, 1 << 24, 1 << 26
# Steps at most, and sequences of one, of which each takes a KiB.
STEPS, SEQUENCES = 16, 1 << 11
# Bytes that are hashed at once, and of a longer array.
_HASHED, _SAMPLE = 1 << 12, 1 << 8
# What nobody can change in place.
_PLAIN = frozenset({type(None), bool, int, float, str})
# Options whose arrays count by their numbers, as layers share them; and types of an offset of all items.
_ARRAYS, _ONE_PLACE = frozenset({"segments", "offset", "key_lengths", "block_table", "mask"}), {type(None), int}
# What is ready for a form. By the hash of a form: False if one was met, None if nothing can be ready for it.
_known: dict[Hashable, Ready | Literal[False] | None] = {}
# What is ready for the last steps.
_steps: dict[Hashable, Ready] = {}


class _Bytes:
    """Bytes of an array, all of which are compared and few hashed, which takes longer."""

    __slots__ = ("all",)

    def __init__(self, data: bytes) -> None:
        self.all = data

    def __hash__(self) -> int:
        return hash(self.all[:: len(self.all) // _SAMPLE | 1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bytes) and self.all == other.all


def form(q: Any, k: Any, v: Any, position: Any, options: Mapping[str, Any]) -> Hashable | None:
    """The form of a call, of which nothing was checked yet; None if no call like it is kept."""
    found: list[Hashable] = []
    if type(k) is type(v) is Quantized:
        found += k.scale.shape, v.scale.shape
        k, v = k.codes, v.codes
    if not (type(q) is type(k) is type(v) is np.ndarray and q.flags.aligned and k.flags.aligned and v.flags.aligned):
        return None
    if q.nbytes > QUERY_BYTES and options.get("segments") is None:
        return None
    for x in (q, k, v):
        found += x.shape, x.strides, x.dtype
    return _with_options(found, position, options)


def form_of_sequences(
    q: Any, k: Any, v: Any, position: Any, options: Mapping[str, Any], sequences: Sequences, *, coded: bool = False
) -> Hashable | None:
    """The same of a call with sequences, whose `options` do not say where they are.

    Many short ones have many bytes of queries, and take little time beside their plan.
    """
    reach, operands = sequences.reach(), (q, k, v)
    if not (all(type(x) is np.ndarray and x.flags.aligned for x in operands) and sequences.within(reach)):
        return None
    # Kernels read rows of adjacent elements where they are.
    if k.shape[-2] != v.shape[-2] or any(x.strides[-1] != x.itemsize for x in operands):
        return None
    found: list[Hashable] = [coded, sequences.pages is not None, reach, q.shape[:-2], q.shape[-1], q.dtype]
    for x in operands[1:]:
        # There may be any number of pages.
        found += x.shape[:-2] if sequences.pages is None else x.shape[1:-2], x.shape[-1], x.dtype
    return _with_options(found, position, options)


def _with_options(found: list[Hashable], position: Any, options: Mapping[str, Any]) -> Hashable | None:
    offset, table = options.get("offset"), options.get("block_table")
    has_places = table is not None or options.get("segments") is not None or type(offset) not in _ONE_PLACE
    for name, value in options.items():
        own: Hashable | None
        if name == "key_lengths" and not has_places and check.per_item(value):
            # They come with each call.
            own = ()
        elif name == "sinks" and type(value) is np.ndarray:
            # Likewise.
            own = value.shape, value.dtype
        else:
            own = None if isinstance(value, np.ndarray) and name not in _ARRAYS else _of(value)
        if own is None:
            return None
        found += name, own
    held = _of(position)
    if held is None or memory.limit() is not None or _backend.current(options.get("backend")) != "numba":
        return None
    found += held, precision.chosen(options.get("precision"))
    return tuple(found)


def _of(value: Any) -> Hashable | None:
    """What decides in a position or an option, with all types; None if that may change unseen, or is too large."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is np.ndarray:
        size = value.nbytes
        if size <= _HASHED:
            return value.shape, value.dtype, value.tobytes()
        return (value.shape, value.dtype, _Bytes(value.tobytes())) if size <= FORM_BYTES else None
    if kind is Dense or kind is Toeplitz:
        return _of_map(value)
    found: list[Any] = [kind]
    parts: Iterable[Any] = value
    if kind is not tuple and kind is not list:
        if not is_registered(kind) or not isinstance(value, Scheme) or not has_reusable_terms(value):
            return None
        held = vars(value)
        found += held
        parts = held.values()
    for part in parts:
        own = _of(part)
        if own is None:
            return None
        found.append(own)
    return tuple(found)


def _of_map(index: IndexMap) -> Hashable | None:
    """A small map that nobody can change stands for itself."""
    x = index.lookup if isinstance(index, Toeplitz) else index.index
    return index if x.nbytes <= MAP_BYTES and x.base is None and not x.flags.writeable else None


def known(given: Hashable) -> Ready | None:
    """What is ready for calls of a form, or for the next layer of a step."""
    found = _known.get(given) or _steps.get(given)
    return found if found and found.fits() else None


def keep(given: Hashable, schemes: tuple[Scheme, ...], ready: Callable[[tuple[Scheme, ...]], Ready | None]) -> None:
    """Remember the form of a call that was done; of one that is met again, what makes later calls shorter."""
    met = hash(given)
    if met not in _known:
        _add(met, False)
    elif _known.get(met) is False:
        # Of copies, since records name arrays by where they lie, and users may change theirs.
        made = ready(own_schemes(schemes))
        size = 0 if made is None else made.nbytes + _size(given)
        if made is None or size > KEPT_BYTES:
            _known[met] = None
            return
        made.nbytes = size
        if size + sum([x.nbytes for x in list(_known.values()) if x]) > ALL_BYTES:
            _forget()
        _add(given, made)


def keep_step(given: Hashable, ready: Ready, sequences: Sequences) -> None:
    """Remember what a call of these sequences has left, in place of what has been longest there."""
    if len(sequences) <= SEQUENCES:
        _steps[given] = ready
        for oldest in list(_steps)[:-STEPS]:
            _steps.pop(oldest, None)


def _add(key: Hashable, value: Ready | Literal[False]) -> None:
    if len(_known) >= MOST:
        _forget()
    _known[key] = value


def _forget() -> None:
    """Forget all forms, and steps, which hold what is ready for forms."""
    _known.clear()
    _steps.clear()


def _size(form: Any) -> int:
    """Bytes of arrays in a form."""
    if type(form) is tuple:
        return sum(map(_size, form))
    return len(form.all) if type(form) is _Bytes else len(form) if type(form) is bytes else 0
