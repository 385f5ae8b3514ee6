"""How many bytes the kernels' side of a call allocates, before it does: upper bounds, from shapes alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from relpos_np._contract.counted import CountedBias
from relpos_np._contract.placed import Placed
from relpos_np._contract.problem import Problem, Site
from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.backward_pass.kernel import back_layout
from relpos_np.kernels._numba.forward_pass.attend import layout
from relpos_np.kernels._numba.forward_pass.decode import MOST_ROWS
from relpos_np.kernels._numba.forward_pass.gated_positions import count_layout
from relpos_np.kernels._numba.forward_pass.planes import plane_layout
from relpos_np.kernels._numba.forward_pass.product import product_layout
from relpos_np.kernels._numba.forward_pass.work import pair_steps
from relpos_np.kernels._numba.launch.launcher import available_threads
from relpos_np.kernels._numba.plan.backward_job import BLOCK_QUERIES, MOST_CUT, group_of, part_count
from relpos_np.kernels._numba.plan.biases import GATHER_BYTES
from relpos_np.kernels._numba.plan.by_rows import counted, needed, number_of_parts
from relpos_np.kernels._numba.plan.call import is_skewed
from relpos_np.kernels._numba.plan.division import decode_workspace, heads_beside
from relpos_np.kernels._numba.plan.job import in_pairs, planes_of
from relpos_np.kernels._numba.simd.target import MOST_QUERIES, ROW_QUANTUM, TARGET, block_queries
from relpos_np.types import Array

# At most so many ranges of keys that decoding attends separately, and what `merge` holds of their numbers at once.
DECODED = 3 * 64


def _copied(x: Array, count: int) -> int:
    """Bytes of an array as it is read: none if the elements of its rows are adjacent."""
    if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize:
        return 0
    size: int = count * math.prod(x.shape[-3:]) * x.itemsize
    return size


def workspace_bytes(problem: Problem, terms: Terms, mask: Array | None, backward: bool) -> dict[str, int]:
    """Bytes by what they are for, in addition to operands, result and the terms themselves."""
    site, item = problem.site, problem.site.dtype.itemsize
    count, threads, lanes = math.prod(problem.batch), available_threads(), TARGET.lanes(item)
    lines = count * site.heads
    if not lines * site.q_len * site.k_len:
        return {}  # no kernel runs
    parts: dict[str, int] = {}
    divided = number_of_parts(problem, terms) if needed(terms) else 1
    rows = -(-site.q_len // divided)
    if counted(terms) or divided > 1:
        parts["biases that are made for some queries at a time"] = _counted(problem, terms, rows, backward)
        parts["results of some queries at a time"] = _of_parts(problem, terms, rows, backward)
        # All else is held for one part.
        site = replace(site, q_len=rows)
        problem = replace(problem, site=site)
    pairs = lines * rows * site.k_len
    query, key = _content(problem, terms)
    depth, width = query.shape[-1], -(-site.v_dim // lanes) * lanes
    skew = sum(term.weights.shape[-1] for term in terms.queries if is_skewed(term))
    bins = sum(term.weights.shape[-2] for term in terms.values)
    block = block_queries(site.q_len, depth, width, item, lines, threads, narrow=False)
    block, steps = min(block, MOST_QUERIES), pair_steps.py_func(depth)
    work = layout.py_func(block, depth, width, skew, bins, lanes).end
    work = plane_layout.py_func(work, block, steps, width, planes_of(problem, terms), lanes).end
    merged = 0
    if site.q_len <= MOST_ROWS:
        merged = lines * site.q_len * DECODED * (site.v_dim + 2) * item
        beside = heads_beside(key.strides[-3], key.strides[-2], key.shape[-3])
        work = max(work, decode_workspace(depth, site.v_dim, 1, item, beside) // item)
    multiplied = product_layout.py_func(max(depth, site.v_dim), TARGET.panel(item))[-1] * item
    found = {
        "copies of operands in another layout": sum(_copied(x, count) for x in (query, key, problem.stored_v)),
        "biases of every pair": _biases(terms, mask, pairs, item),
        "tables and index maps": _tables(site, terms) + _maps(terms, count, site.q_len, site.k_len),
        "products with the rows of tables": _products(site, terms, lines, skew),
        "parts that are merged": merged,
        "workspaces of threads": threads * (max(work * item, multiplied, _gated(terms)) + 64) + 64 * count,
    }
    found |= parts
    return found | (_backward(problem, terms, lines, depth, skew, threads, pairs) if backward else {})


def _content(problem: Problem, terms: Terms) -> tuple[Array, Array]:
    """Queries and keys of the content product."""
    given = ((terms.query, problem.stored_q), (terms.key, problem.stored_k))
    query, key = (stored if x is None else x.x if isinstance(x, Turned) else x for x, stored in given)
    return query, key


def _biases(terms: Terms, mask: Array | None, pairs: int, item: int) -> int:
    """Biases of every pair, and masks that are copied."""
    if terms.biases:
        # Their sum, what one of them excludes, and the sum with the mask; broadcast where they can be.
        made = [0 if isinstance(b, CountedBias) else b.nbytes for b in terms.biases]
        size = sum(made[1:]) + (pairs if len(made) > 1 else 0) + (0 if mask is None else 2 * pairs * item)
        return size + (made.count(0) + 1) * pairs * item if counted(terms) else size
    return pairs * mask.itemsize if mask is not None and _copied(mask, 1) else 0


def _gated(terms: Terms) -> int:
    """A thread's workspace where gates count positions, which is done in float64."""
    sizes = [0]
    for bias in terms.biases:
        if isinstance(bias, CountedBias):
            depth = bias.table.shape[-1]
            sizes += [
                count_layout.py_func(depth, TARGET.lanes(8))[-1],
                product_layout.py_func(depth, TARGET.panel(8))[-1],
            ]
    return 8 * max(sizes)


def _counted(problem: Problem, terms: Terms, rows: int, backward: bool) -> int:
    """What biases that are made for some queries at a time are made of, in float64."""
    site, item, items = problem.site, problem.site.dtype.itemsize, math.prod(problem.batch)
    of_queries, of_keys, size = items * site.heads, items * site.kv_heads * site.k_len, 0
    for bias in terms.biases:
        if isinstance(bias, CountedBias):
            sets, positions, depth = bias.table.shape
            size += 8 * (2 * of_queries * rows * (depth + positions) + of_keys * depth + 2 * sets * positions * depth)
            if backward:
                # Slopes of gates; gradients of a part's queries, and of keys, one head's of which is added at a time.
                size += 8 * of_queries * rows * (site.k_len + positions + depth)
                size += (16 + item) * (of_queries * site.q_len * depth + of_keys * depth)
                size += 16 * of_queries * positions * depth
    return size


def _of_parts(problem: Problem, terms: Terms, rows: int, backward: bool) -> int:
    """The results of a part, on the way back sums of all parts in float64, and gradients of queries side by side."""
    site, item, items = problem.site, problem.site.dtype.itemsize, math.prod(problem.batch)
    of_queries, of_keys = items * site.heads, items * site.kv_heads * site.k_len
    size = of_queries * rows * (site.v_dim + 1) * item
    if backward:
        query, key = _content(problem, terms)
        vectors: list[QueryTerm | KeyTerm | ValueTerm] = [*terms.queries, *terms.keys, *terms.values]
        shared = of_keys * site.v_dim + items * math.prod(key.shape[-3:])
        shared += sum(t.table.size for t in terms.tables) + sum(t.weights.size for t in vectors)
        shared += sum(t.key.size for t in terms.keys)
        beside = items * math.prod(query.shape[-3:]) + sum(t.query.size for t in terms.queries)
        beside += sum(x.size for x in terms.biases if isinstance(x, np.ndarray))
        size += (8 + item) * shared + 2 * item * beside
    return size


def _tables(site: Site, terms: Terms) -> int:
    """The fused bias, and scaled tables."""
    if not terms.tables:
        return 0
    item, pairs = site.dtype.itemsize, site.q_len * site.k_len
    tables = site.heads * (site.q_len + site.k_len + 64) * item * 3 + sum(2 * t.table.nbytes for t in terms.tables)
    grids = any(isinstance(t.index, Dense) and len(t.index.shape) == 2 for t in terms.tables)
    if grids and site.heads * pairs * item <= GATHER_BYTES:
        # Some tiles are padded, and a gathered table is there twice, or three times if it has gaps.
        padded = (site.q_len + ROW_QUANTUM) * (site.k_len + TARGET.panel(item))
        tables += 4 * site.heads * padded * item + 16 * pairs
    return tables


def _maps(terms: Terms, count: int, q_len: int, k_len: int) -> int:
    """Index maps that are made, or repeated for batch items, and the ends of runs while they are found."""
    maps, pairs = 0, count * q_len * k_len
    every: list[TableTerm | QueryTerm | KeyTerm | ValueTerm] = [*terms.tables, *terms.queries, *terms.keys]
    for index in {term.index for term in (*every, *terms.values)}:
        if isinstance(index, Placed):
            maps += q_len * index.made_bytes((count,)) + index.distance_bytes()
        elif isinstance(index, Dense):
            maps += 4 * pairs if index.index.ndim > 2 and index.index.size < pairs else 0
        else:
            maps += 32 * (q_len + k_len)
    return maps


def _products(site: Site, terms: Terms, lines: int, skew: int) -> int:
    """Products that are gathered, skewed queries and weights, and padded weights of value terms."""
    item, lanes, span = site.dtype.itemsize, TARGET.lanes(site.dtype.itemsize), site.q_len + site.k_len
    rows = site.q_len * sum(t.weights.shape[-2] for t in terms.queries if not is_skewed(t))
    rows += site.k_len * sum(t.weights.shape[-2] for t in terms.keys)
    padded = sum(2 * t.weights.nbytes + t.weights.shape[-2] * lanes * item * site.heads for t in terms.values)
    total: int = padded + item * (lines * (rows + site.q_len * skew) + 4 * site.heads * span * skew)
    return total


def _backward(
    problem: Problem, terms: Terms, lines: int, depth: int, skew: int, threads: int, pairs: int
) -> dict[str, int]:
    """What the backward pass needs in addition."""
    site, item = problem.site, problem.site.dtype.itemsize
    lanes = TARGET.lanes(item)
    group = group_of(problem, terms, threads)
    parts = part_count(max(lines // group, 1), threads)
    tasks, span = lines * parts, site.q_len + site.k_len
    s_width = -(-skew // lanes) * lanes
    sums = 0
    if any(isinstance(t.index, Toeplitz) for t in terms.tables):
        # Partial sums, and those of all tasks in float64 for each term.
        sums += 2 * tasks * span * item + 4 * len(terms.tables) * site.heads * span * 8
    for table in terms.tables:
        if isinstance(table.index, Dense):
            sums += 2 * tasks * table.index.rows * item + 3 * site.heads * table.index.rows * 8
    if skew:
        rows = 2 * tasks * (span + ROW_QUANTUM) * s_width * item
        sums += rows + lines * site.q_len * skew * item + 4 * site.heads * span * s_width * 8
    others: list[tuple[QueryTerm | KeyTerm | ValueTerm, int]] = [
        *((t, site.q_len) for t in terms.queries if not is_skewed(t)),
        *((t, site.k_len) for t in terms.keys),
        *((t, site.q_len) for t in terms.values),
    ]
    for term, length in others:
        rows, wide = term.weights.shape[-2:]
        # Sums, products of them, rows that have a share, a total per head and batch item in float64.
        sums += lines * length * (3 * rows + 3 * wide) * item + 3 * lines * rows * wide * 8
    dense = 2 * pairs * item if terms.biases else 0
    steps = [pair_steps.py_func(n) if in_pairs(problem, terms) else 0 for n in (depth, site.v_dim)]
    length, spaces = site.q_len, threads
    if parts > 1:
        # Ranges of queries, which all threads have under way at once where they are cut.
        length, spaces = (
            -(-length // (parts * BLOCK_QUERIES)) * BLOCK_QUERIES,
            min(MOST_CUT * threads, 2 * lines * parts),
        )
    sizes = depth, site.v_dim, skew, 1, lanes, *steps
    size = back_layout.py_func(BLOCK_QUERIES, length + BLOCK_QUERIES, site.q_len, site.k_len, *sizes).end
    return {
        "gradients": 2 * lines * site.q_len * (depth + 2 * site.v_dim + 4) * item
        + 2 * lines // group * site.k_len * (depth + site.v_dim) * item,
        "sums of gradients": sums,
        "gradients of every pair": dense,
        "workspaces of threads on the way back": spaces * (size * item + 128),
    }
