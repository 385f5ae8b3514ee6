"""Every check of what users pass in, made once, at the edge, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Never, Protocol, TypeVar, Unpack, runtime_checkable

import numpy as np

from relpos_np._contract.options import DEFAULTS, Options
from relpos_np._contract.problem import UNBOUNDED, Problem, Rule, Site, name_of
from relpos_np._contract.quantized import Quantized
from relpos_np._runtime import memory, precision
from relpos_np.errors import RelposIndexError, RelposTypeError, RelposValueError, shown
from relpos_np.types import Array, Bools

_Word = TypeVar("_Word", bound=str)

_FLOAT32, _FLOAT64, _BOOL = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.bool_)
_HALVES = ("float16", "bfloat16")
# Axes of heads and of queries where a mask has one row for all of them.
_ONE_ROW = ((), (1,), (1, 1))


# Where arrays of other packages are defined, and which module here takes them.
_INTEROP = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}
# DLPack's numbers for memory that kernels read: of a device, and managed.
_ON_DEVICE = (2, 13)


@runtime_checkable
class DeviceOperand(Protocol):
    """What the checks below ask of an array on a device, once the CUDA backend has opened it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    readonly: bool

    @property
    def repeats(self) -> bool:
        """Whether elements share memory."""

    def overlaps(self, other: Any) -> bool:
        """Whether it shares memory with another one."""

    def stand_in(self) -> Array:
        """An array of its shape in the dtype of the computation, without the memory."""


def on_device(x: Any) -> bool:
    """Whether an argument says that it is in the memory of a CUDA device; nothing is imported to find out."""
    if isinstance(x, np.ndarray):
        return False
    # Numba's own arrays; those of its simulator would pass the next question on to an array of NumPy.
    if getattr(x, "__cuda_ndarray__", False) is True:
        return True
    device_of = getattr(x, "__dlpack_device__", None)
    return (device_of is not None and device_of()[0] in _ON_DEVICE) or hasattr(x, "__cuda_array_interface__")


def array(name: str, value: Any) -> Array:
    """Accept a NumPy array; refuse what NumPy would interpret in a way the user may not mean."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise RelposTypeError(f"{name}: a MaskedArray's mask would be ignored; pass its data and mask= separately")
    if isinstance(value, Quantized):
        raise RelposTypeError(f"{name}: expected an array, found codes; pass {name}.dequantized()")
    if isinstance(value, np.matrix) or not isinstance(value, np.ndarray):
        if on_device(value):
            raise RelposTypeError(
                f"{name}: expected a NumPy array, found {type(value).__name__} on a CUDA device; attention, "
                'attention_vjp and rel_shift take device arrays with backend="cuda", if all their operands are'
            )
        package = _INTEROP.get(type(value).__module__.partition(".")[0])
        remedy = f"relpos_np.interop.{package}.attention takes arrays of {package}; or " if package else ""
        raise RelposTypeError(
            f"{name}: expected a NumPy array, found {type(value).__name__}; {remedy}convert it with np.asarray"
        )
    # Nothing else of a subclass is read: its own methods and attributes may say anything.
    return np.ndarray.view(value, np.ndarray)


def _is_stored(x: Array) -> bool:
    """Whether an array is of half precision that kernels can read where it lies."""
    return name_of(x.dtype) in _HALVES and x.dtype.isnative and x.flags.aligned


def floating(name: str, value: Any) -> Array:
    """A float32 or float64 array in native byte order; half precision is widened to float32."""
    x = array(name, value)
    dtype = x.dtype
    if dtype is _FLOAT32 or dtype is _FLOAT64:
        return x if x.flags.aligned else x.copy()
    if dtype.kind == "f" and dtype.itemsize in (4, 8):
        return x.astype(dtype.newbyteorder("="))
    if name_of(dtype) in _HALVES:
        return x.astype(np.float32)
    raise RelposTypeError(f"{name}: expected dtype float16, bfloat16, float32 or float64, found {dtype}")


def stored(name: str, value: Any) -> Array:
    """As `floating`, but half precision stays so, which decides how exactly a call computes; copied if it must be."""
    x = array(name, value)
    if _is_stored(x):
        return x
    native = x.dtype.newbyteorder("=")
    return x.astype(native) if name_of(native) in _HALVES else floating(name, x)


def ordered(name: str, value: Any) -> Array:
    """As `floating`, read-only and in C order: a BLAS does not promise the same bits for any layout."""
    x = np.asarray(floating(name, value), order="C").view()
    x.flags.writeable = False
    return x


def table(name: str, value: Any, axes: str, *, empty: bool = False) -> Array:
    """A read-only float table in C order, with the axes named, for instance "rows heads" or "rows | heads rows"."""
    x = ordered(name, value)
    forms = [form.split() for form in axes.split("|")]
    if x.ndim not in {len(form) for form in forms}:
        wanted = " or ".join("(" + ", ".join(form) + ")" for form in forms)
        raise RelposValueError(f"{name}: expected shape {wanted}, found {x.shape}")
    if not empty and 0 in x.shape:
        raise RelposValueError(f"{name}: every axis must have at least one entry, found shape {x.shape}")
    return x


# Beyond it, sums of few numbers would leave int64.
_LARGEST = 1 << 61


def integer(name: str, value: Any, least: int | None = None) -> int:
    """An integer, not a bool, at least `least`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise RelposTypeError(f"{name}: expected an integer, found {shown(value)} of type {type(value).__name__}")
    if least is not None and value < least:
        raise RelposValueError(f"{name}: expected at least {least}, found {shown(value)}")
    if abs(int(value)) > _LARGEST:
        raise RelposValueError(f"{name}: {shown(value)} is too large")
    return int(value)


def real(name: str, value: Any) -> float:
    """A finite real number."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise RelposTypeError(f"{name}: expected a real number, found {shown(value)} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction
        number = math.inf
    if not math.isfinite(number):
        raise RelposValueError(f"{name}: expected a finite number, found {shown(value)}")
    return number


def positive(name: str, value: Any) -> float:
    """A finite real number above 0."""
    number = real(name, value)
    if number <= 0:
        raise RelposValueError(f"{name}: expected a positive number, found {shown(value)}")
    return number


def _all_whole(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_all_whole, value))
    return isinstance(value, Integral) and not isinstance(value, bool | np.bool_)


def integers(name: str, value: Any) -> Array:
    """Integers of at most 64 bits: one, an array of them, or nested lists; no other object is converted."""
    if isinstance(value, np.ndarray):
        x = array(name, value)
    elif _all_whole(value):
        try:
            x = np.zeros(0, np.int64) if isinstance(value, list | tuple) and not value else np.asarray(value)
        except ValueError:
            raise RelposTypeError(f"{name}: expected integers in lists of one length, found {shown(value)}") from None
    else:
        raise RelposTypeError(f"{name}: expected integers, found {shown(value)} of type {type(value).__name__}")
    if x.dtype.kind not in "iu":
        raise RelposTypeError(f"{name}: expected integers, found dtype {x.dtype}")
    if x.dtype == np.uint64 and x.size and x.max() > np.iinfo(np.int64).max:
        raise RelposValueError(f"{name}: expected integers of 63 bits, found {x.max()}")
    return x


def rows(name: str, index: Array, count: int, least: int = 0) -> None:
    """Check that an index lies within a table of `count` rows; with a least of -1, that stands for no row."""
    low, high = (index.min(), index.max()) if index.size else (0, -1)
    if not (low >= least and high < count):
        raise RelposIndexError(f"{name}: expected {least} ... {count - 1}, found {low} ... {high} (rows of the table)")


def flag(name: str, value: Any) -> bool:
    """A bool and nothing that merely looks true."""
    if not isinstance(value, bool | np.bool_):
        raise RelposTypeError(f"{name}: expected True or False, found {shown(value)}")
    return bool(value)


def choice(name: str, value: _Word, allowed: Sequence[str]) -> _Word:
    """One of the named options."""
    found: Any = value
    if not isinstance(found, str) or found not in allowed:
        raise RelposValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}; found {shown(found)}")
    # The same word, also from a subclass of str.
    return str(found)  # type: ignore[return-value]


def rate(name: str, value: Any) -> float:
    """A share that is dropped: never all."""
    found = real(name, value)
    if not 0.0 <= found < 1.0:
        raise RelposValueError(f"{name}: expected a rate in [0, 1), found {found}")
    return found


def survivors(dropout: Any, rng: Any, shape: tuple[int, ...]) -> tuple[float, Bools | None]:
    """The rate of dropout and which elements it keeps; None for all of them, and no numbers are drawn."""
    share = 0.0 if dropout == 0.0 else rate("dropout", dropout)
    if not share:
        return 0.0, None
    if not isinstance(rng, np.random.Generator):
        raise RelposTypeError("rng: dropout needs a numpy.random.Generator, as from np.random.default_rng(seed)")
    return share, rng.random(shape) >= share


def _band(causal: bool, window: Any) -> tuple[int, int]:
    left = right = UNBOUNDED
    if window is not None:
        pair = window if isinstance(window, tuple) else (window, window)
        if len(pair) != 2:
            raise RelposValueError(f"window: expected w or (left, right), found {shown(window)}")
        left, right = (UNBOUNDED if w is None else min(integer("window", w, 0), UNBOUNDED) for w in pair)
    return left, min(right, 0) if causal else right


def _broadcast(name: str, x: Array, shape: tuple[int, ...], meaning: str) -> Array:
    """Broadcast without copying, naming both shapes where that is impossible."""
    if x.shape == shape:
        return x
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        raise RelposValueError(f"{name}: shape {x.shape} does not broadcast to {meaning} = {shape}") from None


def lengths_of_keys(value: Any, batch: tuple[int, ...], k_len: int) -> Array:
    """How many keys exist, for each batch item."""
    lengths = integers("key_lengths", value)
    if lengths.ndim and lengths.size == 1 < math.prod(batch):
        raise RelposValueError(
            f"key_lengths: one entry for the {math.prod(batch)} items of the batch {batch}; pass an integer if all "
            "have as many keys"
        )
    if lengths.size and (lengths.min() < 0 or lengths.max() > k_len):
        raise RelposValueError(f"key_lengths: expected 0 ... L_k = {k_len}, found {lengths.min()} ... {lengths.max()}")
    return _broadcast("key_lengths", lengths.astype(np.int64), batch, "the batch axes")


def _mask(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    mask = array("mask", value)
    if mask.dtype.kind == "f" or mask.dtype.name == "bfloat16":
        mask = floating("mask", mask).astype(dtype, copy=False)
    elif mask.dtype != _BOOL:
        remedy = ""
        if mask.dtype.kind in "iu":
            remedy = "; where 1 means 'may attend', as in masks of tokenizers, pass mask.astype(bool)"
            if mask.ndim < 3:
                remedy += ", with axes (batch, 1, 1, L_k) if there is a row per batch item"
        raise RelposTypeError(
            f"mask: expected bool (True = may attend) or float (added), found dtype {mask.dtype}{remedy}"
        )
    clear_mask(mask, shape[:-3], *shape[-2:])
    return _broadcast("mask", mask, shape, "(..., H, L_q, L_k)")


def clear_mask(mask: Array, batch: tuple[int, ...], q_len: int, k_len: int) -> None:
    """Refuse two axes that may be (L_q, L_k), as broadcasting reads them, or a row for each item of a batch."""
    if batch == (q_len,) and q_len > 1 and mask.shape == (q_len, k_len):
        raise RelposValueError(
            f"mask: shape {mask.shape} may be (L_q, L_k) or, with {q_len} items in the batch, (B, L_k); pass "
            "mask[None] for the first and mask[:, None, None] for the second"
        )


def per_query(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A number per query, (L_q,), or per head and query, broadcast to (..., H, L_q)."""
    x = floating(name, value).astype(dtype, copy=False)
    return _broadcast(name, x, shape, "(..., H, L_q)")


def per_head(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A number per head, (H,), or per head and query, broadcast to (..., H, L_q)."""
    x = floating(name, value).astype(dtype, copy=False)
    return _broadcast(name, x[:, None] if x.ndim == 1 else x, shape, "(..., H, L_q), or (H,)")


def _selected_shape(index: Array, scores: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a selection with an axis of heads, which may be one for all."""
    shape: tuple[int, ...] = index.shape
    if len(shape) == len(scores) - 1:
        shape = (*shape[:-2], 1, *shape[-2:])
    fits = len(shape) == len(scores) and shape[-2] == scores[-2]
    if not fits or any(n not in (1, size) for n, size in zip(shape[:-2], scores[:-2], strict=True)):
        raise RelposValueError(
            f"selected: expected (..., L_q, K) or (..., H, L_q, K) with the batch axes {scores[:-3]}, H = {scores[-3]} "
            f"and L_q = {scores[-2]} of the call, found {index.shape}"
        )
    return shape


def _selection_bytes(value: Any, mask: Any, scores: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """What a selection holds as a mask, alone and joined with another one."""
    shape = _selected_shape(integers("selected", value), scores)
    alone = math.prod(shape[:-1]) * (scores[-1] + 1) + 8 * math.prod(shape)
    return alone + (0 if mask is None else math.prod(scores) * (dtype.itemsize + 1))


def _only_selected(value: Any, mask: Array | None, scores: tuple[int, ...]) -> Array:
    """The mask of the selected keys, and with it another one."""
    index = integers("selected", value)
    index = index.reshape(_selected_shape(index, scores))
    rows("selected", index, scores[-1], -1)
    # A column more takes what stands for no key.
    seen = np.zeros((*index.shape[:-1], scores[-1] + 1), np.bool_)
    np.put_along_axis(seen, np.where(index < 0, scores[-1], index), True, axis=-1)
    seen = seen[..., :-1]
    if mask is None:
        return np.broadcast_to(seen, scores)
    return mask & seen if mask.dtype == np.bool_ else np.where(seen, mask, mask.dtype.type(-np.inf))


def _add_rule(problem: Problem, rule: Any) -> None:
    """Set what a rule says of a call."""
    if not isinstance(rule, Rule):
        raise RelposTypeError(f"rule: expected one such as relpos_np.Chunked, found {type(rule).__name__}")
    if rule.causal and problem.right <= 0:
        raise RelposValueError(
            f"rule: {rule!r} is causal where it has to be; causal=True, or a window that ends at the query, would hide "
            "its prefix"
        )
    ranges, site = rule.ranges(problem.site), problem.site
    problem.step = rule.step
    if ranges is not None:
        ranges = np.clip(ranges, 0, site.k_len)
        problem.ranges = np.broadcast_to(ranges, (*problem.batch, site.q_len, 2))


def one_side(named: dict[str, Any]) -> None:
    """Refuse operands of which some are on a device and some on the host."""
    there = [on_device(x) for x in named.values()]
    if len(set(there)) > 1:
        found = ", ".join(
            f"{name} {type(x).__name__} on {'a CUDA device' if far else 'the host'}"
            for (name, x), far in zip(named.items(), there, strict=True)
        )
        raise RelposTypeError(f"{', '.join(named)}: expected all of them on a CUDA device or none, found {found}")


def one_dtype(dtypes: dict[str, np.dtype[Any]]) -> Never:
    """Refuse operands that differ in dtype."""
    found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    raise RelposTypeError(f"{', '.join(dtypes)}: expected one dtype, found {found}")


def _admit_copies(given: Sequence[Array]) -> None:
    """Ask for the memory of operands that are widened or copied."""
    if memory.limit() is None:
        return
    size = sum([x.size for x in given if name_of(x.dtype) in _HALVES]) * _FLOAT32.itemsize
    size += sum([x.nbytes for x in given if not (x.flags.aligned and x.dtype.isnative)])
    memory.require("attention", {"operands in another dtype or layout": size})


def _operands(named: dict[str, Any]) -> tuple[list[Array], np.dtype[Any]]:
    """The operands in one dtype, and the dtype of the result."""
    values = list(named.values())
    first = values[0]
    for x in values:
        if type(x) is not np.ndarray or x.dtype is not first.dtype or x.ndim < 2 or not x.flags.aligned:
            break
    else:
        # Nearly every call.
        if first.dtype is _FLOAT32 or first.dtype is _FLOAT64:
            return values, first.dtype
        if name_of(first.dtype) in _HALVES and first.dtype.isnative:
            _admit_copies(values)
            return values, first.dtype
    if any(on_device(x) for x in values):
        one_side(named)
    far = not isinstance(first, np.ndarray) and isinstance(first, DeviceOperand)
    given = values if far else [array(name, x) for name, x in named.items()]
    kinds = {x.dtype.newbyteorder("=") for x in given}
    if len(kinds) > 1:
        one_dtype(dict(zip(named, (x.dtype for x in given), strict=True)))
    if far:
        given = [x.stand_in() for x in values]
    _admit_copies(given)
    # Half precision is kept: a kernel may read it as it is.
    operands = [stored(name, x) for name, x in zip(named, given, strict=True)]
    for name, x in zip(named, operands, strict=True):
        if x.ndim < 2:
            raise RelposValueError(f"{name}: expected shape (..., H, L, D), found {x.shape}")
    return operands, kinds.pop()


def problem(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> tuple[Problem, np.dtype[Any], bool]:
    """`call` with some of the options."""
    return call(q, k, v, DEFAULTS | options)


def call(
    q: Any,
    k: Any,
    v: Any,
    given: Options,
    admit: Callable[[Problem, np.dtype[Any], int, Any, bool], None] | None = None,
) -> tuple[Problem, np.dtype[Any], bool]:
    """Check a call of attention; also return the dtype of the result and whether operands had no axis of heads.

    `v` is None where only scores are wanted. `given` holds every option; the backend is ignored. `admit` is asked
    before the mask and dropout take memory.
    """
    mask, key_lengths, offset, scale = given["mask"], given["key_lengths"], given["offset"], given["scale"]
    dropout = given["dropout"]
    if type(dropout) is not float:
        dropout = rate("dropout", dropout)
    named = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    operands, result = _operands(named)
    q, k = operands[:2]
    v = operands[2] if len(operands) == 3 else k[..., :0]
    flat = q.ndim == 2 and k.ndim == 2 and v.ndim == 2
    if q.ndim == 2 or k.ndim == 2 or v.ndim == 2:
        q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    (heads, q_len, depth), (kv_heads, k_len, k_depth) = q.shape[-3:], k.shape[-3:]
    if depth != k_depth:
        raise RelposValueError(f"k: head_dim {k_depth} differs from q's {depth}; shapes {k.shape} and {q.shape}")
    if depth == 0:
        raise RelposValueError(f"q: head_dim must be at least 1, found shape {q.shape}")
    if v.shape[-3:-1] != (kv_heads, k_len):
        raise RelposValueError(f"v: expected (..., {kv_heads}, {k_len}, D_v) like k, found {v.shape}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise RelposValueError(f"k: {kv_heads} heads do not divide q's {heads}; shapes {k.shape} and {q.shape}")
    dtype = _FLOAT32 if q.dtype.itemsize == 2 else q.dtype
    leads = q.shape[:-3], k.shape[:-3], v.shape[:-3]
    batch = leads[0]
    if leads[1] != batch or leads[2] != batch:
        try:
            batch = np.broadcast_shapes(*leads)
        except ValueError:
            raise RelposValueError(
                f"q, k, v: batch axes {leads[0]}, {leads[1]} and {leads[2]} do not broadcast"
            ) from None
        q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (q, k, v))
    if given["query_scale"] is not None:
        factors = per_query("query_scale", given["query_scale"], q.shape[:-1], dtype)
        q = np.multiply(q, factors[..., None], dtype=dtype, order="C")
    left, right = _band(flag("causal", given["causal"]), given["window"])
    site = Site(
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=k_len,
        head_dim=depth,
        v_dim=v.shape[-1],
        offset=k_len - q_len if offset is None else _first_position(offset, key_lengths, q_len, k_len),
        right=right,
        scale=float(depth**-0.5) if scale is None else real("scale", scale),
        dtype=dtype,
        scores_only=len(operands) == 2,
        batch=batch,
    )
    if abs(site.offset) >= UNBOUNDED >> 1:
        raise RelposValueError(f"offset: {site.offset} is too large")
    scores = (*batch, heads, q_len, k_len)
    selected = given["selected"]
    if mask is not None or selected is not None or len(operands) == 2 or dropout != 0.0:
        memory.countable("attention", scores)
    found = Problem(
        stored_q=q,
        stored_k=k,
        stored_v=v,
        site=site,
        left=left,
        right=right,
        mask=None,
        key_lengths=None if key_lengths is None else lengths_of_keys(key_lengths, batch, k_len),
        keep=None,
        keep_scale=1.0,
        precision=precision.chosen(given["precision"]),
    )
    if given["rule"] is not None:
        _add_rule(found, given["rule"])
    found.unplaced = offset is None and found.key_lengths is not None and 0 < q_len < k_len
    if found.unplaced and found.is_banded:
        refuse_unplaced(found)
    cap_order = choice("cap_order", given["cap_order"], ("scores", "content"))
    if given["softcap"] is not None:
        found.softcap, found.cap_content = positive("softcap", given["softcap"]), cap_order == "content"
    elif cap_order != "scores":
        raise RelposValueError(f"cap_order: {cap_order!r} without softcap")
    if admit is not None:
        pairs = zip(operands, named.values(), strict=True)
        converted = sum(x.size * dtype.itemsize for x, own in pairs if x is not own or x.dtype != dtype)
        if selected is not None:
            converted += _selection_bytes(selected, mask, scores, dtype)
        admit(found, result, converted, mask, dropout != 0.0)
    if mask is not None:
        found.mask = _mask(mask, scores, dtype)
        # By its shape and never by its strides: layouts change no bits.
        found.mask_of_heads, found.mask_of_keys = mask.shape[-3:-2] in _ONE_ROW, mask.shape[-3:-1] in _ONE_ROW
    if selected is not None:
        found.mask, found.mask_of_keys = _only_selected(selected, found.mask, scores), False
        found.mask_of_heads = False
    if dropout != 0.0:
        share, found.keep = survivors(dropout, given["rng"], scores)
        found.keep_scale = 1.0 / (1.0 - share)
    return found, result, flat


def at_end(offset: Any) -> bool:
    """Whether queries are the last of the keys that exist; any other word is refused."""
    if not isinstance(offset, str):
        return False
    if offset != "end":
        raise RelposValueError(f'offset: expected an integer, integers or "end", found {shown(offset)}')
    return True


def per_item(x: Any) -> bool:
    """Whether an option has a number for each batch item, be it on the host or on a device."""
    return bool(getattr(x, "ndim", isinstance(x, list | tuple)))


def _first_position(offset: Any, key_lengths: Any, q_len: int, k_len: int) -> int:
    """The position of the first query among the keys, from the option `offset`."""
    if not at_end(offset):
        return integer("offset", offset)
    if per_item(key_lengths):
        raise RelposValueError('offset: "end" of different lengths of keys; make a call for each batch item')
    return (k_len if key_lengths is None else integer("key_lengths", key_lengths)) - q_len


def refuse_unplaced(problem: Problem) -> None:
    """Refuse an unplaced call, in which positions matter, unless all keys exist."""
    lengths, site = problem.key_lengths, problem.site
    if lengths is not None and ((lengths > 0) & (lengths < site.k_len)).any():
        raise RelposValueError(
            f"key_lengths: {site.q_len} queries and {site.k_len} keys, of which fewer exist, do not say where the "
            f'queries stand; pass offset="end" if they are the last of the keys that exist, or '
            f"offset={site.k_len - site.q_len} if they are the last of all"
        )


def like(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, stored: bool = False) -> Array:
    """Check the shape of an array that belongs to a result, and return it in the dtype of the computation.

    `stored`: half precision stays as it is.
    """
    if not isinstance(value, np.ndarray) and isinstance(value, DeviceOperand):
        value = value.stand_in()
    x = array(name, value)
    kept = stored and _is_stored(x)
    if not kept:
        x = floating(name, x)
    if x.shape != shape:
        raise RelposValueError(f"{name}: expected shape {shape}, found {x.shape}")
    return x if kept else x.astype(dtype, copy=False)


def output_gradients(named: dict[str, Any], problem: Problem, flat: bool) -> dict[str, Array]:
    """Check the gradients of the output and, if it is there, of the log-sum-exp; the former stays in half precision."""
    out, own = problem.out_shape[1:] if flat else problem.out_shape, problem.site.dtype
    found = {"grad_out": like("grad_out", named["grad_out"], out, own, stored=True)}
    if named.get("grad_lse") is not None:
        found["grad_lse"] = like("grad_lse", named["grad_lse"], out[:-1], own)
    return found


def heads(name: str, table: Array | None, axis: int, site: Site) -> None:
    """A table, where there is one, must have an entry for each head along an axis."""
    if table is not None and table.shape[axis] != site.heads:
        raise RelposValueError(
            f"{name}: shape {table.shape} is for {table.shape[axis]} heads, the call has {site.heads}"
        )


def fits_batch(name: str, axes: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Check that what a scheme holds per batch item broadcasts to the batch axes of a call."""
    padded = (1,) * (len(batch) - len(axes)) + axes
    if len(axes) > len(batch) or any(n not in (1, size) for n, size in zip(padded, batch, strict=True)):
        raise RelposValueError(f"{name}: batch axes {axes} do not broadcast to {batch}, those of the call")
