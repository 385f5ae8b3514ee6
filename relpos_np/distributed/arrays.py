"""Attention over Dask arrays: a task for each block of queries and keys, and a tree that merges them."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack, overload
from uuid import uuid4

import numpy as np

from relpos_np._calls.lowering import checked_schemes
from relpos_np._contract import check
from relpos_np._contract.options import ForeignOptions, Options, completed, takes
from relpos_np._contract.problem import Part, Problem, Site
from relpos_np._runtime import precision
from relpos_np.distributed.merging import merge
from relpos_np.distributed.slicing import Narrowed, compute, evaluating, lengths_here, refuse_end
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.schemes.base import Position, Scheme
from relpos_np.types import Array

_HALVES = ("float16", "bfloat16")
# Small chunks are merged until a block has so many operations, which take many times what Dask needs for a task, or so
# many bytes of queries, or of keys and values.
LEAST_OPERATIONS, MOST_BYTES = 4 * 10**9, 1 << 26
# What a processor computes while Dask handles one chunk, and how many chunks are too few to speak of.
CHUNK_OPERATIONS, FEW_CHUNKS = 10**7, 100


def _dask() -> tuple[Any, Any]:
    try:
        import dask.array
        from dask.highlevelgraph import HighLevelGraph
    except ImportError as error:
        raise RelposImportError(
            f'attention over Dask arrays needs dask ({error}); install it with `pip install "relpos-np[dask]"`'
        ) from error
    return dask.array, HighLevelGraph


class _Schemes:
    """Schemes that travel to a worker once and not with each task."""

    def __init__(self, schemes: tuple[Scheme, ...]) -> None:
        self.schemes = schemes


class _Block:
    """What a task does, without its operands."""

    def __init__(self, name: str, narrowed: Narrowed, schemes: tuple[Scheme, ...], options: Options) -> None:
        self.name, self.options = name, options
        # None: the scheme itself, which all tasks share.
        self.narrowed = [
            (None if mine is scheme else mine, site, part)
            for (mine, site, part), scheme in zip(narrowed, schemes, strict=True)
        ]

    def __call__(self, q: Array, k: Array, v: Array, mask: Array | None, shared: _Schemes) -> tuple[Array, Array]:
        """Output and log-sum-exp of one block."""
        if mask is not None:
            # All axes, so that a block of (L_q, L_k) is never mistaken for rows of items.
            mask = mask.reshape((1,) * (q.ndim - mask.ndim) + mask.shape)
        problem, _, _ = check.call(q, k, v, self.options | {"mask": mask})
        narrowed = tuple(
            (scheme if mine is None else mine, site, part)
            for (mine, site, part), scheme in zip(self.narrowed, shared.schemes, strict=True)
        )
        return compute(self.name, problem, narrowed)


def _merged(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    return merge(*parts)


def _output(pair: tuple[Array, Array], dtype: np.dtype[Any]) -> Array:
    return pair[0].astype(dtype, copy=False)


def _log_sum(pair: tuple[Array, Array]) -> Array:
    return pair[1]


def _slices(chunks: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(chunks))
    return [slice(end - n, end) for end, n in zip(ends, chunks, strict=True)]


def _stand_in(x: Any) -> Array:
    """An array of the same shape without the memory, in the dtype of the computation."""
    dtype = np.dtype(np.float32) if x.dtype.name in _HALVES else x.dtype.newbyteorder("=")
    return np.broadcast_to(np.zeros((), dtype), x.shape)


def _operands(da: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The checks that only Dask arrays need."""
    for name, x in named.items():
        if not isinstance(x, da.Array):
            raise RelposTypeError(
                f"{name}: expected a Dask array, found {type(x).__name__}; convert it with dask.array.from_array"
            )
        if any(np.isnan(n) for axis in x.chunks for n in axis):
            raise RelposValueError(f"{name}: chunks of unknown size {x.chunks}; call its compute_chunk_sizes() first")
    if len({x.dtype for x in named.values()}) > 1:
        check.one_dtype({name: x.dtype for name, x in named.items()})
    return {name: x[None] if x.ndim == 2 else x for name, x in named.items()}


_Chunks = tuple[tuple[int, ...], ...]


def _merged_chunks(chunks: _Chunks, site: Site, least: float) -> _Chunks:
    """Chunks of batch axes, heads of keys, queries and keys, neighbours merged until a block has `least` operations.

    Keys come first: what they give is merged in one block less. Then come queries, heads and items.
    """
    merged = list(chunks)
    for axis in (-1, -2, -3, *range(-4, -len(chunks) - 1, -1)):
        *items, kv_heads, q_len, k_len = (max(own, default=0) for own in merged)
        copies, rows = math.prod(items) * kv_heads, q_len * (site.heads // max(site.kv_heads, 1))
        size = copies * (site.head_dim + site.v_dim)
        if not size * rows * k_len:
            break
        # What grows is the keys, or the queries, or all.
        grown = {-1: k_len, -2: rows}.get(axis, max(rows, k_len)) * size * site.dtype.itemsize
        count = min(math.ceil(least / (2 * size * rows * k_len)), MOST_BYTES // grown)
        if count > 1:
            groups = np.array_split(merged[axis], max(len(merged[axis]) // count, 1))
            merged[axis] = tuple(int(group.sum()) for group in groups)
    return tuple(merged)


def _warn_of_small_chunks(da: Any, operands: dict[str, Any], site: Site) -> None:
    """Say that Dask will take longer for the chunks than the call does, and what helps."""
    chunks = sum(x.npartitions for x in operands.values()) + operands["q"].npartitions
    pairs = math.prod(site.batch) * site.heads * site.q_len * site.k_len
    if chunks > FEW_CHUNKS and chunks * CHUNK_OPERATIONS > 2 * pairs * (site.head_dim + site.v_dim):
        warnings.warn(
            f"q, k and v have {sum(x.npartitions for x in operands.values())} chunks, which take Dask longer than "
            "the call takes one process; rechunk them (q.rechunk), or pass arrays of NumPy to relpos_np.attention",
            da.PerformanceWarning,
            stacklevel=4,
        )


def _aligned(
    da: Any, operands: dict[str, Any], problem: Problem, least: float
) -> tuple[dict[str, Any], _Chunks, _Chunks]:
    """Operands in matching blocks, the chunks of batch axes, heads of keys, queries and keys, and those of the output.

    Those of the output, (*batch, H, L_q), are as the operands had them.
    """
    batch, site = problem.batch, problem.site
    q, k = operands["q"], operands["k"]
    chunks: list[tuple[int, ...]] = []
    for axis, n in enumerate(batch, start=-len(batch) - 3):
        # The first operand that has the axis says how it is divided.
        chunks.append(next(x.chunks[axis] for x in operands.values() if x.ndim >= -axis and x.shape[axis] == n))
    group = site.heads // site.kv_heads if site.kv_heads else 1
    heads = q.chunks[-3]
    kv_heads = k.chunks[-3] if any(n % group for n in heads) else tuple(n // group for n in heads)
    of_output = (*chunks, tuple(n * group for n in kv_heads), q.chunks[-2])
    divided = _merged_chunks((*chunks, kv_heads, q.chunks[-2], k.chunks[-2]), site, least)
    *chunks, kv_heads, q_chunks, k_chunks = divided
    lengths = {"q": q_chunks, "k": k_chunks, "v": k_chunks}
    aligned = {}
    for name, x in operands.items():
        # Vectors are whole in each block.
        own = tuple(n * group for n in kv_heads) if name == "q" else kv_heads
        wide = da.broadcast_to(x, (*batch, *x.shape[-3:]))
        aligned[name] = wide.rechunk((*chunks, own, lengths[name], (x.shape[-1],)))
    return aligned, divided, of_output


def _mask_blocks(da: Any, mask: Any, chunks: Sequence[tuple[int, ...]]) -> Any:
    """A mask (..., H, L_q, L_k) in matching blocks; there is one along axes of size 1 and along missing axes."""
    fitting = tuple(
        (1,) if n == 1 else own for n, own in zip(mask.shape, chunks[len(chunks) - mask.ndim :], strict=True)
    )
    return mask.rechunk(fitting) if isinstance(mask, da.Array) else da.from_array(mask, chunks=fitting)


def _block_of(mask: Any, index: tuple[int, ...]) -> tuple[Any, ...]:
    """The key of the block of a mask that a block of scores reads."""
    own = index[len(index) - mask.ndim :]
    return (mask.name, *(min(i, n - 1) for i, n in zip(own, mask.numblocks, strict=True)))


def _reached(problem: Problem, part: Part) -> bool:
    """Whether any pair of a block may attend."""
    low = part.keys.start - (part.queries.stop - 1 + problem.site.offset)
    high = part.keys.stop - 1 - (part.queries.start + problem.site.offset)
    lengths = problem.key_lengths
    exists = lengths is None or bool((lengths[part.batch] > part.keys.start).any())
    return exists and low <= problem.right and high >= -problem.left


def _parts(problem: Problem, chunks: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], list[Part]]]:
    """For each block of the output its index, (..., heads, queries), and a part for each block of keys."""
    group = problem.site.heads // problem.site.kv_heads if problem.site.kv_heads else 1
    ranges = [_slices(axis) for axis in chunks]
    for index in itertools.product(*(range(len(axis)) for axis in ranges[:-1])):
        *batch, kv_heads, queries = (axis[n] for axis, n in zip(ranges[:-1], index, strict=True))
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        yield index, [Part(tuple(batch), heads, kv_heads, queries, keys) for keys in ranges[-1]]


def _reduced(tasks: dict[Any, Any], keys: list[str], split_every: int) -> str:
    """Add a tree over results in the order of the keys, and say where it ends."""
    n = 0
    while len(keys) > 1:
        groups = [keys[first : first + split_every] for first in range(0, len(keys), split_every)]
        # A single one that is left over is handed on.
        keys = [group[0] if len(group) == 1 else f"{group[0]}-{n}".replace("part", "merge") for group in groups]
        tasks.update((key, (_merged, group)) for key, group in zip(keys, groups, strict=True) if len(group) > 1)
        n += 1
    return keys[0]


class _Options(ForeignOptions, total=False):
    position: Position
    mask: Any
    key_lengths: Any
    offset: int | None
    split_every: int
    min_operations: float


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[False] = ..., **options: Unpack[_Options]) -> Any: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[_Options]) -> tuple[Any, Any]: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[_Options]) -> Any | tuple[Any, Any]: ...


@takes(only=("causal", "window", "scale", "offset", "precision", "backend"))
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    position: Position = None,
    mask: Any = None,
    key_lengths: Any = None,
    return_lse: bool = False,
    split_every: int = 8,
    min_operations: float = LEAST_OPERATIONS,
    **options: Any,
) -> Any:
    """Attention of Dask arrays, as a Dask array: `relpos_np.attention` in blocks.

    Parameters
    ----------
    q : dask.array.Array, shape (..., H, L_q, D)
        Queries, in chunks along any axes. Vectors are put in one chunk.
    k : dask.array.Array, shape (..., H_kv, L_k, D)
        Keys. Their chunks divide the work along L_k; along other axes they are divided as q is.
    v : dask.array.Array, shape (..., H_kv, L_k, D_v)
        Values, divided as k is.
    position : scheme or tuple of schemes, optional
        See `relpos_np.attention`; see `partial` for what cannot be divided.
    mask : dask.array.Array or ndarray of bool or float, optional
        Broadcast to (..., H, L_q, L_k).
    key_lengths, causal, window, scale, offset, precision
        See `relpos_np.attention`.
    backend : {"terms", "numba", "cuda"}, optional
        What computes each block; see `relpos_np.set_backend`.
    return_lse : bool
        Also return the natural log-sum-exp of the scores.
    split_every : int
        How many results of blocks of keys are merged at a time, 2 or more.
    min_operations : float
        Neighbouring chunks are merged until a block has so many operations, or 64 MiB of queries or of keys and
        values; 0 keeps all chunks. A multiplication and an addition count 2.

    Returns
    -------
    out : dask.array.Array, shape (..., H, L_q, D_v)
        In the dtype and the chunks of q.
    lse : dask.array.Array, shape (..., H, L_q)
        Only with `return_lse`.

    Raises
    ------
    RelposError
        As `relpos_np.attention` and `partial`, when it is called and not when it is computed, but for a scheme that
        turns out to depend on queries and keys as a whole.
    RelposImportError
        If dask is not installed.

    Notes
    -----
    Nothing is computed before the result is. A task holds one block of queries, one of keys and values, and what the
    schemes say of these; blocks without a pair that may attend are left out. The same chunks give the same bits,
    whatever the scheduler and the number of workers.
    """
    given = completed(attention, options) | {"key_lengths": key_lengths}
    refuse_end(given["offset"])
    # Tasks run in other threads and processes, where a block of this one does not count.
    given["precision"] = precision.chosen(given["precision"])
    da, graphs = _dask()
    name = evaluating(given["backend"])
    split_every = check.integer("split_every", split_every, 2)
    check.flag("return_lse", return_lse)
    if min_operations:
        min_operations = check.positive("min_operations", min_operations)
    named = {"q": q, "k": k, "v": v}
    flat = all(getattr(x, "ndim", 0) == 2 for x in named.values())
    operands = _operands(da, named)
    if mask is not None and not isinstance(mask, da.Array):
        mask = check.array("mask", mask)
    # Shapes are checked on stand-ins, numbers when they are there.
    like_q, like_k, like_v = map(_stand_in, operands.values())
    problem, _, _ = check.call(like_q, like_k, like_v, given | {"mask": None if mask is None else _stand_in(mask)})
    site = problem.site
    schemes = checked_schemes(position, problem, name)
    if min_operations:
        _warn_of_small_chunks(da, operands, site)
    operands, chunks, of_output = _aligned(da, operands, problem, min_operations)
    sources = list(operands.values())
    if mask is not None:
        mask = _mask_blocks(da, mask, (*chunks[:-3], operands["q"].chunks[-3], *chunks[-2:]))
        sources.append(mask)
    # By what stands before the token, progress bars and dashboards name the tasks.
    token = uuid4().hex
    part_of, schemes_of, out_of, sum_of = (f"attention-{what}-{token}" for what in ("part", "schemes", "out", "lse"))
    tasks: dict[Any, Any] = {schemes_of: _Schemes(schemes)}
    outs, sums = {}, {}
    lead = len(site.batch) + 1
    for index, parts in _parts(problem, chunks):
        keys = []
        needed = [n for n, part in enumerate(parts) if _reached(problem, part)] or [0]
        for n in needed:
            part = parts[n]
            here = given | {"offset": part.alone(site)[0].offset}
            if problem.key_lengths is not None:
                here["key_lengths"] = lengths_here(problem.key_lengths[part.batch], part.keys)
            narrowed = tuple(scheme.narrow(site, part) for scheme in schemes)
            allowed = None if mask is None else _block_of(mask, (*index, n))
            at_key = (*index[:lead], n, 0)
            operand = (operands["q"].name, *index, 0), (operands["k"].name, *at_key), (operands["v"].name, *at_key)
            keys.append("-".join(map(str, (part_of, *index, n))))
            tasks[keys[-1]] = (_Block(name, narrowed, schemes, here), *operand, allowed, schemes_of)
        pair = _reduced(tasks, keys, split_every)
        # Vectors have an axis of their own.
        outs[(out_of, *index, 0)] = (_output, pair, q.dtype)
        sums[(sum_of, *index)] = (_log_sum, pair)
    graph = graphs.from_collections(part_of, tasks, dependencies=sources)
    heads = tuple(n * (site.heads // max(site.kv_heads, 1)) for n in chunks[-3])
    divided = (*chunks[:-3], heads, chunks[-2])

    def array(name: str, blocks: dict[Any, Any], inner: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        layers, needed = {**graph.layers, name: blocks}, {**graph.dependencies, name: {part_of}}
        whole = da.Array(graphs(layers, needed), name, (*divided, *((n,) for n in inner)), dtype=dtype)
        whole = whole.rechunk((*of_output, *((n,) for n in inner)))
        return whole[0] if flat else whole

    out = array(out_of, outs, (site.v_dim,), q.dtype)
    return (out, array(sum_of, sums, (), site.dtype)) if return_lse else out
