"""Table terms as one bias that is fused with the scores, as far as they fit into one."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from relpos_np._contract.terms import IndexMap, TableTerm, Toeplitz
from relpos_np.kernels._numba.forward_pass.work import LOG2E
from relpos_np.kernels._numba.launch.arrays import aligned
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.simd.target import ROW_QUANTUM, TARGET
from relpos_np.types import Array

# A dense bias up to this many bytes is gathered once per call and then read like any other.
GATHER_BYTES = 16 * 1024 * 1024


@cache
def _no_bias(dtype: np.dtype[Any], k_len: int) -> Array:
    """A row of zeros for so many keys, -inf up to the end of the last panel."""
    panel = TARGET.panel(dtype.itemsize)
    row = np.zeros(-(-k_len // panel) * panel, dtype)
    row[k_len:] = -np.inf
    return row


def fuse_tables(call: Call, *, windowed: bool) -> list[TableTerm]:
    """Set the bias's fields; the terms that are not in it must be gathered by the kernel."""
    site, f = call.site, call.fields
    panel = TARGET.panel(call.dtype.itemsize)
    toeplitz: list[TableTerm] = []
    grids: list[TableTerm] = []
    others: list[TableTerm] = []
    for term in call.terms.tables:
        kind = toeplitz if isinstance(term.index, Toeplitz) else grids if term.index.index.ndim == 2 else others
        kind.append(term)
    width, height = -(-site.k_len // panel) * panel, -(-site.q_len // ROW_QUANTUM) * ROW_QUANTUM
    if grids and site.heads * height * width * call.dtype.itemsize <= GATHER_BYTES:
        # Padding columns are -inf, so that a ragged last panel needs no mask of its own.
        bias = aligned((site.heads, height, width), call.dtype, -math.inf)
        bias[:, site.q_len :] = 0
        inner = bias[:, : site.q_len, : site.k_len]
        inner[...] = _by_pair(call, grids[0])
        for term in grids[1:] + toeplitz:
            inner += _by_pair(call, term)
        f["bias"] = call.keep(bias)
        f["bias_head"], f["bias_row"], f["bias_tail"] = height * width, width, 1
        return others
    if toeplitz:
        span = site.q_len + site.k_len - 1
        # Padded query rows and a ragged last panel read beyond the ends.
        buffer = np.zeros((site.heads, ROW_QUANTUM + span + panel), call.dtype)
        inner = buffer[:, ROW_QUANTUM : ROW_QUANTUM + span]
        _by_distance(toeplitz[0], inner)
        for term in toeplitz[1:]:
            also = np.empty_like(inner)
            _by_distance(term, also)
            inner += also
        f["bias"] = call.keep(buffer) + (ROW_QUANTUM + site.q_len - 1) * buffer.itemsize
        f["bias_head"], f["bias_row"] = buffer.shape[1], -1
    else:
        # Every row of every tile reads the same zeros; for windows they also cut off the end of the last panel.
        f["bias"] = call.keep(_no_bias(call.dtype, site.k_len if windowed else panel))
    return grids + others


def _by_pair(call: Call, term: TableTerm) -> Array:
    """A table's value for every pair, in units of log 2: (H or 1, L_q, L_k)."""
    index: IndexMap = term.index
    pairs = index.dense(call.site.q_len, call.site.k_len)
    picked: Array = (term.table * call.dtype.type(LOG2E))[:, pairs]
    return np.where(pairs < 0, call.dtype.type(0), picked) if index.gaps else picked


def _by_distance(term: TableTerm, out: Array) -> None:
    """Fill out (H, L_q + L_k - 1) with a table's value for every relative position, in units of log 2."""
    assert isinstance(term.index, Toeplitz)
    lookup, scale = term.index.lookup, out.dtype.type(LOG2E)
    if len(lookup) == term.index.rows and is_counting(lookup):
        np.multiply(term.table, scale, out=out)
        return
    out[...] = (term.table * scale).take(lookup, axis=1, mode="wrap" if term.index.gaps else "raise")
    if term.index.gaps:
        out[:, lookup < 0] = 0


def is_counting(lookup: Array) -> bool:
    """Whether a map is 0, 1, 2 ..., so that nothing has to be looked up."""
    return bool(len(lookup)) and lookup[0] == 0 and bool((lookup[1:] - lookup[:-1] == 1).all())
