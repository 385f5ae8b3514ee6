"""Attention over a part of a call: some of its keys, queries, heads and batch items."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from relpos_np._calls.lowering import checked_schemes
from relpos_np._contract import check
from relpos_np._contract.options import Options, completed, takes
from relpos_np._contract.problem import Part, Site
from relpos_np.distributed.slicing import compute, evaluating, lengths_here, refuse_end
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.schemes.base import Position
from relpos_np.types import Array


def _range(name: str, given: Any, length: int) -> tuple[slice, int]:
    """The range of a part of some length, and how many there are in the call."""
    if given is None:
        return slice(0, length), length
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise RelposTypeError(f"{name}: expected (first, how many there are in all), found {given!r}")
    first, total = check.integer(name, given[0], 0), check.integer(name, given[1], 0)
    if first + length > total:
        raise RelposValueError(f"{name}: {length} from {first} on are not among {total}")
    return slice(first, first + length), total


def _part(site: Site, queries: Any, keys: Any, heads: Any, batch: Any) -> tuple[Part, dict[str, Any]]:
    """Which part of the call the operands are, and the sizes of the call."""
    q, q_len = _range("queries", queries, site.q_len)
    k, k_len = _range("keys", keys, site.k_len)
    h, in_all = _range("heads", heads, site.heads)
    group = site.heads // site.kv_heads if site.kv_heads else 1
    if h.start % group or in_all % group:
        raise RelposValueError(f"heads: {group} read one key head each, found heads {h.start} ... of {in_all}")
    if batch is None:
        batch = (None,) * len(site.batch)
    if not isinstance(batch, tuple | list) or len(batch) != len(site.batch):
        raise RelposTypeError(f"batch: expected (first, in all) or None for each axis of {site.batch}, found {batch!r}")
    axes = [_range("batch", given, n) for given, n in zip(batch, site.batch, strict=True)]
    part = Part(tuple(axis for axis, _ in axes), h, slice(h.start // group, h.stop // group), q, k)
    sizes = {"q_len": q_len, "k_len": k_len, "heads": in_all, "kv_heads": in_all // group}
    return part, sizes | {"batch": tuple(n for _, n in axes)}


@takes(only=("mask", "key_lengths", "causal", "window", "scale", "offset", "backend"))
def partial(
    q: Array,
    k: Array,
    v: Array,
    *,
    queries: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    batch: tuple[tuple[int, int] | None, ...] | None = None,
    position: Position = None,
    **options: Unpack[Options],
) -> tuple[Array, Array]:
    r"""Attention over some of the keys, for some of the queries, heads and batch items of a larger call.

    For the keys :math:`\mathcal{K}` that are given, and scores as in the larger call,

    .. math::

        \mathrm{lse}_i = \ln \sum_{j \in \mathcal{K}} e^{s_{ij}}, \qquad
        o_i = \sum_{j \in \mathcal{K}} e^{s_{ij} - \mathrm{lse}_i}\, v_j

    What different keys gave for the same queries is put together by `merge`.

    Parameters
    ----------
    q : ndarray, shape (..., H, L_q, D)
        Queries of the part, as in `relpos_np.attention`.
    k : ndarray, shape (..., H_kv, L_k, D)
        Keys of the part.
    v : ndarray, shape (..., H_kv, L_k, D_v)
        Values of the part.
    queries : tuple of int, optional
        The first query of the part, counted from 0, and how many queries the call has; default: q holds all.
    keys : tuple of int, optional
        The same for keys.
    heads : tuple of int, optional
        The same for heads of queries; those of keys follow.
    batch : tuple, optional
        The same for each batch axis, None for an axis of which the part has all.
    position : scheme or tuple of schemes, optional
        As in the larger call, with everything that it holds for that call.
    mask : ndarray of bool or float, optional
        Of the part: broadcast to (..., H, L_q, L_k) of q and k.
    key_lengths : int or ndarray of int, optional
        Keys that exist in the whole call, for each batch item of the part.
    causal, window
        See `relpos_np.attention`.
    scale : float, optional
        See `relpos_np.attention`.
    offset : int, optional
        Position of the call's first query among all keys; default: the number of keys less that of queries.
    backend : {"terms", "numba", "cuda"}, optional
        See `relpos_np.set_backend`; "numpy" knows whole calls only.

    Returns
    -------
    out : ndarray, shape (..., H, L_q, D_v)
        In the dtype of the computation: float64 for float64, else float32.
    lse : ndarray, shape (..., H, L_q)
        Log-sum-exp of the scores; -inf, and an output of 0, for a query that may attend none of these keys.

    Raises
    ------
    RelposError
        As `relpos_np.attention`; also if a part does not lie in the call, or a scheme cannot be computed for parts:
        `relpos_np.CoPE` never, and `relpos_np.TransformerXL` not for some of the queries where its shift wraps around.
    """
    given = completed(partial, options)
    name = evaluating(given["backend"])
    # Offset and lengths are those of the whole call.
    offset, key_lengths = given["offset"], given["key_lengths"]
    refuse_end(offset)
    found, _, flat = check.call(q, k, v, given | {"offset": 0 if offset is None else offset, "key_lengths": None})
    part, sizes = _part(found.site, queries, keys, heads, batch)
    whole = replace(found.site, **sizes)
    whole.offset = whole.k_len - whole.q_len if offset is None else whole.offset
    if key_lengths is not None:
        found.key_lengths = lengths_here(check.lengths_of_keys(key_lengths, found.batch, whole.k_len), part.keys)
    schemes = checked_schemes(position, replace(found, site=whole), name)
    found.site = part.alone(whole)[0]
    out, lse = compute(name, found, tuple(scheme.narrow(whole, part) for scheme in schemes))
    return (out[0], lse[0]) if flat else (out, lse)
