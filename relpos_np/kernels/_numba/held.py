"""How many bytes the kernels' side of a call allocates, before it does: upper bounds, from shapes alone."""

from __future__ import annotations

import math

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Dense, KeyTerm, QueryTerm, TableTerm, Terms, Toeplitz, ValueTerm
from relpos_np.kernels._numba.attend import layout
from relpos_np.kernels._numba.backjob import BLOCK_QUERIES, part_count
from relpos_np.kernels._numba.backward import back_layout
from relpos_np.kernels._numba.biases import GATHER_BYTES
from relpos_np.kernels._numba.launch import available_threads
from relpos_np.kernels._numba.product import BLOCK_ROWS
from relpos_np.kernels._numba.skew import is_skewed
from relpos_np.kernels._numba.target import BLOCK_KEYS, MOST_QUERIES, ROW_QUANTUM, TARGET, block_queries
from relpos_np.types import Array

# Ranges of keys that decoding attends apart, at most, and what `merge` holds of their numbers at once.
DECODED = 3 * 64


def _copied(x: Array, count: int) -> int:
    """Bytes of an array as it is read: none if the elements of its rows are adjacent."""
    if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize:
        return 0
    size: int = count * math.prod(x.shape[-3:]) * x.itemsize
    return size


def held(problem: Problem, terms: Terms, mask: Array | None, backward: bool) -> dict[str, int]:
    """Bytes by what they are for, beside operands, result and the terms themselves."""
    site, item = problem.site, problem.site.dtype.itemsize
    count, threads, lanes = math.prod(problem.batch), available_threads(), TARGET.lanes(problem.site.dtype.itemsize)
    lines, pairs = count * site.heads, site.q_len * site.k_len
    if not lines * pairs:
        return {}  # no kernel runs
    query = problem.q if terms.query is None else terms.query
    key = problem.stored_k if terms.key is None else terms.key
    depth = query.shape[-1]
    copies = sum(_copied(x, count) for x in (query, key, problem.stored_v))
    biases = 0
    if terms.biases:
        # Their sum, and that with the mask; broadcast where they can be.
        biases = sum(b.nbytes for b in terms.biases[1:])
        if mask is not None:
            biases += 2 * lines * pairs * item
    elif mask is not None and mask.shape[-1] > 1 and mask.strides[-1] != mask.itemsize:
        biases = lines * pairs * mask.itemsize
    tables, maps = 0, 0
    if terms.tables:
        tables += site.heads * (site.q_len + site.k_len + 64) * item * 3
        if any(isinstance(t.index, Dense) and t.index.index.ndim == 2 for t in terms.tables):
            # Some tiles are padded, and a gathered table is there twice, or three times if it has gaps.
            padded = (site.q_len + ROW_QUANTUM) * (site.k_len + TARGET.panel(item))
            if site.heads * pairs * item <= GATHER_BYTES:
                tables += 4 * site.heads * padded * item + 16 * pairs
        tables += sum(2 * t.table.nbytes for t in terms.tables)
    products, skew, bins = 0, 0, 0
    every: list[TableTerm | QueryTerm | KeyTerm | ValueTerm] = [
        *terms.tables,
        *terms.queries,
        *terms.keys,
        *terms.values,
    ]
    for index in {id(t.index): t.index for t in every}.values():
        if isinstance(index, Dense):
            maps += 4 * count * pairs if index.index.ndim > 2 and index.index.size < count * pairs else 0
        else:
            # The ends of runs, while they are found.
            maps += 32 * (site.q_len + site.k_len)
    for term in terms.queries:
        if is_skewed(term):
            skew += term.weights.shape[-1]
        else:
            products += lines * site.q_len * term.weights.shape[-2] * item
    for key_term in terms.keys:
        products += lines * site.k_len * key_term.weights.shape[-2] * item
    for value in terms.values:
        bins += value.weights.shape[-2]
        products += value.weights.nbytes * 2 + value.weights.shape[-2] * lanes * item * site.heads
    span = site.q_len + site.k_len
    if skew:
        products += lines * site.q_len * skew * item + 4 * site.heads * span * skew * item
    width = -(-site.v_dim // lanes) * lanes
    block = block_queries(site.q_len, depth, width, item, lines, threads, narrow=False)
    work = layout.py_func(min(block, MOST_QUERIES), depth, width, skew, bins, lanes).end
    multiplied = BLOCK_ROWS * (depth + BLOCK_KEYS) + BLOCK_KEYS * depth
    found = {
        "copies of operands in another layout": copies,
        "biases of every pair": biases,
        "tables and index maps": tables + maps,
        "products with the rows of tables": products,
        "parts that are merged": lines * site.q_len * DECODED * (site.v_dim + 2) * item if site.q_len <= 8 else 0,
        "workspaces of threads": threads * (max(work, multiplied) * item + 64) + 64 * count,
    }
    return found | (_backward(problem, terms, lines, depth, skew, threads) if backward else {})


def _backward(problem: Problem, terms: Terms, lines: int, depth: int, skew: int, threads: int) -> dict[str, int]:
    """What the way back needs beside."""
    site, item = problem.site, problem.site.dtype.itemsize
    lanes = TARGET.lanes(item)
    tasks, span = lines * part_count(max(lines, 1), threads), site.q_len + site.k_len
    s_width = -(-skew // lanes) * lanes
    sums = 0
    if any(isinstance(t.index, Toeplitz) for t in terms.tables):
        # Partial sums, and those of all tasks in float64 for each term.
        sums += tasks * span * item + 4 * len(terms.tables) * site.heads * span * 8
    for table in terms.tables:
        if isinstance(table.index, Dense):
            sums += tasks * table.index.rows * item + 3 * site.heads * table.index.rows * 8
    if skew:
        rows = tasks * (span + ROW_QUANTUM) * s_width * item
        sums += rows + lines * site.q_len * skew * item + 4 * site.heads * span * s_width * 8
    others: list[tuple[QueryTerm | KeyTerm | ValueTerm, int]] = [
        *((t, site.q_len) for t in terms.queries if not is_skewed(t)),
        *((t, site.k_len) for t in terms.keys),
        *((t, site.q_len) for t in terms.values),
    ]
    for term, length in others:
        rows, wide = term.weights.shape[-2:]
        # Sums, products of them, rows that have a share, a total per head and batch item in float64.
        sums += lines * length * (2 * rows + 3 * wide) * item + 3 * lines * rows * wide * 8
    dense = 2 * lines * site.q_len * site.k_len * item if terms.biases else 0
    size = back_layout.py_func(BLOCK_QUERIES, site.q_len + BLOCK_QUERIES, depth, site.v_dim, skew, lanes).end
    return {
        "gradients": 2 * lines * (site.q_len * (depth + 2 * site.v_dim + 4) + site.k_len * (depth + site.v_dim)) * item,
        "sums of gradients": sums,
        "gradients of every pair": dense,
        "workspaces of threads on the way back": threads * (size * item + 64),
    }
