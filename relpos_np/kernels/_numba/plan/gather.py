"""Terms that kernels gather by index: the map, and products of queries, keys or gradients with every row of a table."""

from __future__ import annotations

import numpy as np

from relpos_np._contract.terms import IndexMap, KeyTerm, TableTerm, Toeplitz
from relpos_np.kernels._numba.forward_pass.product import multiply
from relpos_np.kernels._numba.forward_pass.work import LOG2E
from relpos_np.kernels._numba.launch.arrays import aligned, broadcast
from relpos_np.kernels._numba.launch.records import AddRecord, MapRecord, ValueRecord
from relpos_np.kernels._numba.plan.call import Call, Product
from relpos_np.kernels._numba.simd.target import TARGET
from relpos_np.types import Array


def _run_ends(lookup: Array) -> Array:
    """For each entry where its run of equal entries ends."""
    ends = np.flatnonzero(np.append(lookup[1:] != lookup[:-1], True)) + 1
    return np.repeat(ends, np.diff(ends, prepend=0)).astype(np.int32) if len(lookup) else lookup


def map_record(call: Call, index: IndexMap, *, runs: bool) -> MapRecord:
    """A map, with the ends of its runs where `runs` asks for them and it has any."""
    site = call.site
    if isinstance(index, Toeplitz):
        ends = call.keep(_run_ends(index.lookup)) if runs else 0
        return MapRecord(call.keep(index.lookup), 0, -1, max(site.q_len - 1, 0), ends)
    dense = np.ascontiguousarray(index.index)
    per_batch = 0
    if dense.ndim > 2:
        dense = np.ascontiguousarray(np.broadcast_to(dense, (*site.batch, site.q_len, site.k_len)))
        per_batch = site.q_len * site.k_len
    return MapRecord(call.keep(dense), per_batch, site.k_len, 0, 0)


def products(call: Call, x: Array, weights: Array, scale: float) -> Array:
    """Products of vectors (..., H or H_kv, L, E) with rows of weights, scaled: (*batch, H, L, rows)."""
    wide = broadcast(x, (*call.site.batch, *x.shape[-3:]))
    made = multiply(wide, weights, scale, call.site.heads, call.threads)
    call.products.append(Product(x, weights, scale, made))
    return made


def table_add(call: Call, term: TableTerm) -> AddRecord:
    """A table of scalars."""
    table = np.ascontiguousarray(term.table * call.dtype.type(LOG2E))
    head = table.shape[1] if table.shape[0] > 1 else 0
    return AddRecord(map_record(call, term.index, runs=False), src=call.keep(table), src_head=head)


def query_add(call: Call, x: Array, weights: Array, index: IndexMap, scale: float) -> AddRecord:
    """Products of rows of x, one for each query."""
    made = products(call, x, weights, scale)
    head, row = made.shape[-2] * made.shape[-1], made.shape[-1]
    found = map_record(call, index, runs=True)
    return AddRecord(found, src=call.keep(made), src_batch=call.site.heads * head, src_head=head, src_row=row)


def key_add(call: Call, term: KeyTerm) -> AddRecord:
    """Products of a key term's vectors."""
    made = products(call, term.key, term.weights, LOG2E)
    head, row = made.shape[-2] * made.shape[-1], made.shape[-1]
    found = map_record(call, term.index, runs=False)
    return AddRecord(found, src=call.keep(made), src_batch=call.site.heads * head, src_head=head, src_col=row)


def value_records(call: Call) -> list[ValueRecord]:
    """Weights padded to whole vectors, and bins for each term's rows; sets the number of all bins."""
    lanes = TARGET.lanes(call.dtype.itemsize)
    width = -(-call.site.v_dim // lanes) * lanes
    out, bins = [], 0
    for term in call.terms.values:
        heads, rows, depth = term.weights.shape
        weights = aligned((heads, rows, width), call.dtype, 0.0)
        weights[..., :depth] = term.weights
        head = rows * width if heads > 1 else 0
        index = map_record(call, term.index, runs=True)
        out.append(ValueRecord(index, weights=call.keep(weights), weights_head=head, rows=rows, bins=bins))
        bins += rows
    call.fields["bins"] = bins
    return out
