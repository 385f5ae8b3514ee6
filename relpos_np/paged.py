"""Attention over a paged cache: keys and values lie in pages of a fixed size, in any order, that a table names."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Unpack

import numpy as np

from relpos_np import api
from relpos_np._calls import repeated
from relpos_np._calls.call import Call
from relpos_np._calls.lowering import schemes_of
from relpos_np._calls.packed import attend_sequences
from relpos_np._calls.quantized import readable, stand_in
from relpos_np._contract import check
from relpos_np._contract.options import Options, PagedOptions, completed, takes
from relpos_np._contract.quantized import Quantized, stored
from relpos_np._contract.sequences import Pages, Sequences, in_rows
from relpos_np._runtime import memory
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Position
from relpos_np.types import Array, Int64

_PAGED = memory.Named("paged_attention")


@takes(only=PagedOptions.__annotations__.keys() - {"rule"})
def paged_attention(
    q: Array,
    k_pages: Array | Quantized,
    v_pages: Array | Quantized,
    *,
    block_table: Any,
    key_lengths: Any,
    position: Position = None,
    return_lse: bool = False,
    **options: Unpack[PagedOptions],
) -> Array | tuple[Array, Array]:
    r"""Attention over keys and values in pages: `attention` of what a table of blocks gathers.

    With the table t of an item and pages of P keys, its keys are

    .. math::

        k_j = K_{t_{\lfloor j / P \rfloor},\; j \bmod P}, \qquad 0 \le j < n,

    values likewise. The queries are the last of the n keys that exist: ``offset="end"``.

    Parameters
    ----------
    q : ndarray, shape (B, H, L_q, D)
        Queries: one of each item in decoding, several where a prompt is filled in chunks.
    k_pages : ndarray, shape (pages, P, H_kv, D)
        Keys of all items, as FlashAttention and vLLM lay them out; with `Quantized`, scales by token are
        (pages, P, H_kv, 1), by channel (1, 1, H_kv, D).
    v_pages : ndarray, shape (pages, P, H_kv, D_v)
        Values.
    block_table : ndarray of int, shape (B, M)
        The pages of each item. Entries behind its last key may hold anything.
    key_lengths : int or ndarray of int, shape (B,)
        Keys n of each item, at most M P.
    position : scheme or tuple of schemes, optional
        See `relpos_np.attention`. Positions count from the first key of each item.
    causal, window, scale, query_scale, softcap, cap_order, sinks, precision, backend
        See `relpos_np.attention`.
    return_lse : bool
        Also return the log-sum-exp of the scores.

    Returns
    -------
    out : ndarray, shape (B, H, L_q, D_v)
        In the dtype of q.
    lse : ndarray, shape (B, H, L_q)
        Only with `return_lse`.

    Raises
    ------
    RelposError
        As `relpos_np.attention`; also for a table that names a page which does not exist.

    Notes
    -----
    The CPU kernels read keys and values where they lie, for schemes that are made of distances, of queries and of
    turned vectors. Schemes that multiply keys with vectors of their own, as `DeBERTa` does, other backends, and
    `Quantized` pages beyond decoding gather the pages first, which takes the time and the memory of a copy of the keys
    and values of all items. Unused pages are never read, and what stands behind the last key changes nothing.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
    doi:10.1145/3600006.3613165.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> k, v = np.random.default_rng(0).standard_normal((2, 5, 4, 2, 8))  # 5 pages of 4 keys, 2 heads
    >>> q = np.ones((1, 2, 1, 8))
    >>> out = rp.paged_attention(q, k, v, block_table=[[3, 0]], key_lengths=6, position=rp.ALiBi())
    >>> keys, values = (np.concatenate([x[3], x[0][:2]]).swapaxes(0, 1) for x in (k, v))
    >>> np.abs(out[0] - rp.attention(q[0], keys, values, position=rp.ALiBi())).max() < 1e-15
    np.True_
    """
    return_lse = check.flag("return_lse", return_lse)
    places = {"block_table": block_table, "key_lengths": key_lengths}
    # Lists take longer to look at than what is known saves.
    known = isinstance(block_table, np.ndarray)
    form = repeated.form(q, k_pages, v_pages, position, {**options, **places}) if known else None
    ready = None if form is None else repeated.known(form)
    if ready is not None:
        k, v, scales = _by_head(k_pages, v_pages)
        with _PAGED:
            sinks: Any = options.get("sinks")
            return ready.run((q, k, v), None, None, (), return_lse=return_lse, scales=scales, sinks=sinks)
    given = completed(paged_attention, options)
    with _PAGED:
        q, k_pages, v_pages = _operands(q, k_pages, v_pages)
        table, size = _table(block_table, len(q)), _codes(k_pages).shape[1]
        lengths = check.lengths_of_keys(key_lengths, (len(q),), table.shape[1] * size)
        pages = len(_codes(k_pages))
        if table.size and table.view(np.uint64).max() >= pages:
            # Perhaps behind the last keys, where anything may stand.
            _check_pages(table[np.arange(table.shape[1]) * size < lengths[:, None]], pages)
        found: Array | tuple[Array, Array] | None = _in_place(
            (q, k_pages, v_pages), table, lengths, position, given, return_lse, form
        )
        if found is not None:
            return found
        tokens = int(lengths.sum())
        gathered = sum(tokens * math.prod(x.shape[2:]) * x.itemsize for x in map(_codes, (k_pages, v_pages)))
        memory.require("paged_attention", {"gathered pages": gathered})
    k, v = (_gathered(x, table, lengths) for x in (k_pages, v_pages))
    out, lse = _of_segments(q, k, v, lengths, position, given)
    return (out, lse) if return_lse else out


def write_pages(x: Array | Quantized, pages: Array | Quantized, *, block_table: Any, positions: Any) -> None:
    """Write the keys, or the values, of new tokens into the pages of a cache, in place.

    Parameters
    ----------
    x : ndarray, shape (B, H_kv, L, D)
        Keys or values of L new tokens of each item; `Quantized` where the pages are, with scales by token, which are
        written too, or with the pages' own scales by channel.
    pages : ndarray, shape (pages, P, H_kv, D)
        The cache that is written to, of the dtype of x.
    block_table : ndarray of int, shape (B, M)
        The pages of each item; see `paged_attention`.
    positions : ndarray of int, shape (B,) or (B, L)
        Position of the first token of each item, or of every token.

    Raises
    ------
    RelposError
        If shapes or dtypes do not fit, a position has no page, or two tokens have the same place. Nothing is written
        then.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> pages = np.zeros((5, 4, 2, 8))  # 5 pages of 4 keys, 2 heads
    >>> rp.write_pages(np.ones((1, 2, 3, 8)), pages, block_table=[[3, 0]], positions=[2])  # keys 2 to 4
    >>> pages[..., 0, 0].nonzero()
    (array([0, 3, 3]), array([0, 2, 3]))
    """
    coded = isinstance(x, Quantized) and isinstance(pages, Quantized)
    numbers = (_codes(x), _codes(pages)) if coded else (check.array("x", x), check.array("pages", pages))
    written = [(*numbers, _places(*numbers, block_table, positions))]
    if isinstance(x, Quantized) and isinstance(pages, Quantized):
        written += [(*pair, _places(*pair, block_table, positions)) for pair in _new_scales(x, pages)]
    for own, target, place in written:
        target[place] = own.swapaxes(1, 2)


def _new_scales(x: Quantized, pages: Quantized) -> list[tuple[Array, Array]]:
    """Scales of new tokens, and those of the pages; none if both have the same scales of channels."""
    shape = (*x.codes.shape[:3], pages.scale.shape[3])
    if pages.scale.shape[:3] == pages.codes.shape[:3] and x.scale.shape[3] in (1, shape[3]):
        return [(np.broadcast_to(x.scale, shape).astype(pages.scale.dtype, copy=False), pages.scale)]
    own = np.broadcast_to(x.scale, x.codes.shape)
    if pages.scale.shape[:2] != (1, 1) or not (own == pages.scale.swapaxes(1, 2)).all():
        raise RelposValueError(
            f"x: scales of shape {x.scale.shape} are not those of pages with scales of shape {pages.scale.shape}; pass "
            "one for each token of the pages, or quantize new tokens with the scales of the pages"
        )
    return []


def _places(x: Array, pages: Array, block_table: Any, positions: Any) -> tuple[Int64, Int64]:
    """Page of every new token, and its row there."""
    if x.ndim != 4 or pages.ndim != 4 or (x.shape[1], x.shape[3]) != pages.shape[2:]:
        raise RelposValueError(f"x: shape {x.shape} does not belong to pages of shape {pages.shape}")
    if x.dtype != pages.dtype:
        raise RelposTypeError(f"x: expected {pages.dtype} as in pages, found {x.dtype}")
    if not pages.flags.writeable:
        raise RelposValueError("pages: expected an array that can be written to")
    at = check.integers("positions", positions).astype(np.int64)
    at = at[:, None] + np.arange(x.shape[2]) if at.ndim == 1 else at
    if at.shape != (x.shape[0], x.shape[2]):
        raise RelposValueError(f"positions: expected shape {x.shape[:1]} or {x.shape[::2]}, found {at.shape}")
    if at.size and at.min() < 0:
        raise RelposValueError(f"positions: expected 0 or more, found {at.min()}")
    table, size = _table(block_table, len(x)), pages.shape[1]
    if at.size and at.max() >= table.shape[1] * size:
        raise RelposValueError(f"positions: expected 0 ... {table.shape[1] * size - 1}, found {at.max()}")
    page = np.take_along_axis(table, at // size, axis=1)
    _check_pages(page, len(pages))
    if len(np.unique(page * size + at % size)) < at.size:
        raise RelposValueError("positions: two tokens have the same place in the pages")
    return page, at % size


def _operands(q: Any, k_pages: Any, v_pages: Any) -> tuple[Array, Any, Any]:
    q = check.array("q", q)
    k, v = (
        x if isinstance(x, Quantized) else check.array(n, x) for n, x in (("k_pages", k_pages), ("v_pages", v_pages))
    )
    k_shape, v_shape = _codes(k).shape, _codes(v).shape
    if q.ndim != 4:
        raise RelposValueError(f"q: expected shape (B, H, L_q, D), found {q.shape}")
    if len(k_shape) != 4 or k_shape[3] != q.shape[3] or k_shape[1] == 0:
        raise RelposValueError(f"k_pages: expected shape (pages, P, H_kv, {q.shape[3]}), found {k_shape}")
    if len(v_shape) != 4 or v_shape[:3] != k_shape[:3]:
        raise RelposValueError(f"v_pages: expected shape {k_shape[:3]} + (D_v,) as k_pages has, found {v_shape}")
    return q, k, v


def _codes(pages: Array | Quantized) -> Array:
    """The array that is read: of codes, or of numbers."""
    return pages.codes if isinstance(pages, Quantized) else pages


def _by_head(k_pages: Any, v_pages: Any) -> tuple[Array, Array, list[Array]]:
    """What kernels read of pages, and scales of codes, with the axis of heads before that of keys."""
    k, v, scales = stored(k_pages, v_pages)
    return k.swapaxes(1, 2), v.swapaxes(1, 2), [x.swapaxes(1, 2) for x in scales]


def _table(block_table: Any, items: int) -> Int64:
    table: Int64 = check.integers("block_table", block_table).astype(np.int64)
    if table.ndim != 2 or len(table) != items:
        raise RelposValueError(f"block_table: expected shape ({items}, M), found {table.shape}")
    return table


def _check_pages(named: Int64, pages: int) -> None:
    """Refuse a page that does not exist, of so many."""
    wrong = named[(named < 0) | (named >= pages)]
    if wrong.size:
        raise RelposValueError(f"block_table: expected pages 0 ... {pages - 1}, found {wrong[0]}")


def _of_segments(q: Array, k: Any, v: Any, lengths: Int64, position: Position, given: Options) -> tuple[Array, Array]:
    """Output and log-sum-exp of items whose gathered keys are one after the other."""
    shape, dtype = q.shape[:3], np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    items, heads, q_len = shape
    own = {name: given[name] for name in paged_attention.options}  # type: ignore[attr-defined,literal-required]
    for name, checked in (("sinks", check.per_head), ("query_scale", check.per_query)):
        if own[name] is not None:
            own[name] = checked(name, own[name], shape, dtype).swapaxes(0, 1).reshape(heads, items * q_len)
    bounds = np.arange(items + 1) * q_len, np.concatenate([[0], np.cumsum(lengths)])
    rows = q.swapaxes(0, 1).reshape(heads, items * q_len, q.shape[3])
    found = api.attention(rows, k, v, position=position, segments=bounds, return_lse=True, **own)
    out, lse = (np.ascontiguousarray(x.reshape(heads, items, q_len, *x.shape[2:]).swapaxes(0, 1)) for x in found)
    return out, lse


def _gathered(pages: Any, table: Int64, lengths: Int64) -> Any:
    """The keys of all items one after the other, (H_kv, n, D)."""
    if isinstance(pages, Quantized):
        scale, of_pages = pages.scale, (*pages.codes.shape[:3], pages.scale.shape[3])
        if scale.shape[:2] == (1, 1):
            # Those of channels, which all keys share.
            scale = scale[0].swapaxes(0, 1)
        else:
            scale = _gathered(np.broadcast_to(scale, of_pages), table, lengths)
        return Quantized(_gathered(pages.codes, table, lengths), scale)
    size, start = pages.shape[1], 0
    found = np.empty((int(lengths.sum()), *pages.shape[2:]), pages.dtype)
    for row, length in zip(table, lengths.tolist(), strict=True):
        whole, rest = divmod(length, size)
        stop = start + whole * size
        # All of them exist; where that is asked for, NumPy fills another array first.
        np.take(pages, row[:whole], axis=0, out=found[start:stop].reshape(whole, *pages.shape[1:]), mode="clip")
        if rest:
            found[stop : stop + rest] = pages[row[whole], :rest]
        start = stop + rest
    return found.swapaxes(0, 1)


def _in_place(
    operands: tuple[Array, Any, Any],
    table: Int64,
    lengths: Int64,
    position: Position,
    given: Options,
    return_lse: bool,
    form: Hashable | None,
) -> Any:
    """Attention of a call whose pages are read where they lie; None if keys must be gathered."""
    q, k_pages, v_pages = operands
    read = _codes(k_pages), _codes(v_pages)
    coded, own = isinstance(k_pages, Quantized), q.dtype
    if memory.limit() is not None or not all(x.size for x in (q, *read)) or not lengths.any():
        return None
    if any(not x.flags.aligned or x.strides[-1] != x.itemsize for x in read):
        return None
    if not all(scheme.covers for scheme in schemes_of(position)) or any(x.dtype != own for x in read) != coded:
        return None
    if coded and not readable(q, k_pages, v_pages, given, keys=1):
        return None
    longest, steps = int(lengths.max()), [x.strides[0] // x.itemsize for x in read]
    pages = Pages(table, read[0].shape[1], *steps)
    sequences = Sequences.of_items(lengths - q.shape[2], q.shape[2], lengths, None, pages)
    k, v, scales = _by_head(k_pages, v_pages)

    def call_of_all() -> Call | None:
        rows = [in_rows(x, len(q), longest) for x in (k, v)]
        given_as = q, stand_in(rows[0].shape, own), stand_in(rows[1].shape, own)
        call = Call("paged_attention", given_as, position, Options(**{**given, "offset": 0}), sequences)
        if not call.reads_in_place(few=coded):
            return None
        call.read(rows[0], rows[1], scales)
        return call

    with np.errstate(all="ignore"):
        return attend_sequences((q, k, v), position, given, sequences, call_of_all, None, return_lse, scales, form)
