"""The records through which the host tells a kernel what to do: addresses, strides and sizes.

A kernel has few arguments this way and is compiled once per element type. Addresses are bytes;
strides and origins are elements. `plan/call.py` packs the records and keeps the arrays alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relpos_np.types import Array


def _integers(*names: str) -> list[tuple[str, str]]:
    return [(name, "<i8") for name in names]


# One call of attention.
CALL = np.dtype(
    [
        # work: a counter of blocks shared by all threads, its limit, and one workspace per thread;
        # the counter is the first field, so that its address is the record's; `next`: the record with which a thread
        # goes on when no block is left, or 0
        *_integers("counter", "stop", "work", "work_stride", "next"),
        # pieces of work that a thread takes at a time, as one count (windows only)
        *_integers("run"),
        *_integers("q", "k", "v", "out", "lse"),
        # for gradients: that of the output, and how it is stored
        *_integers("grad_out", "grad_head", "grad_row", "grad_kind"),
        # what the log-sum-exp, in units of log 2, is multiplied by; for gradients, so many elements behind it lies what
        # its rounding has lost; else 0
        ("lse_unit", "<f8"),
        *_integers("lse_low"),
        # where a call learns what kinds of rows it has had (`plan/ends.py`), or 0
        *_integers("ends"),
        *_integers("q_head", "q_row", "k_head", "k_row", "v_head", "v_row", "out_batch", "out_head", "out_row"),
        # how each of them is stored (`forward_pass/work.py`); elements of a packed query or key, half as many as
        # channels where each is a pair of bfloat16; planes into which they are split (`forward_pass/planes.py`), or 0
        *_integers("q_kind", "k_kind", "v_kind", "out_kind", "steps", "planes"),
        *_integers("heads", "k_group", "v_group", "q_len", "k_len", "depth", "v_depth"),
        # rows of a head in what has a row for each query, or each key: more than the call has, where sequences share it
        *_integers("q_rows", "k_rows"),
        *_integers("block_queries", "blocks"),
        # the page of every `page_keys` keys, and elements from page to page; or 0, where keys lie in a row. From key to
        # key within a page, where blocks of keys are copied, so that their rows are no longer those of a page
        *_integers("pages", "page_keys", "k_page", "v_page", "k_page_row", "v_page_row"),
        # positions: key j is in the band of query i if i + offset - left <= j <= i + offset + right
        *_integers("offset", "left", "right"),
        # the additive bias that is fused with the scores; `bias_tail`: its padding is -inf
        *_integers("bias", "bias_head", "bias_row", "bias_tail"),
        # `allowed`: bytes of a boolean mask; `soft`: a mask that is added; they share the strides
        *_integers("allowed", "soft", "mask_head", "mask_row", "mask_col"),
        # c of c tanh(s / c), in units of log 2, or 0, and 1 / c; `cap_content`: it is for products alone; `cap_slopes`:
        # its derivatives are wanted; `inner`: a bias of every pair that is within the cap, rows of adjacent elements
        ("cap", "<f8"),
        ("cap_inverse", "<f8"),
        *_integers("cap_content", "cap_slopes", "inner", "inner_head", "inner_row"),
        # the first key of each query and the one after its last, as pairs of int64; attended keys are `step` apart
        *_integers("ranges", "ranges_batch", "step"),
        # a query term with one row of weights per distance, multiplied tile by tile: distance j - i has the row
        # skew_index[j - i + q_len - 1], or none
        *_integers("skew_q", "skew_w", "skew_index", "skew_depth", "skew_head", "skew_row"),
        *_integers("batches", "count", "adds", "add_count", "values", "value_count", "bins"),
        # queries and keys that turn as they are read (`simd/rotation.py`): 1 by halves, 2 by neighbours; pairs of
        # channels, the first channel and blocks of them; and for either a row of their cosines and sines for each
        # position
        *_integers("turn", "turn_pairs", "turn_first", "turn_blocks", "q_turn", "q_turn_batch", "q_turn_head"),
        *_integers("k_turn", "k_turn_batch", "k_turn_head"),
        # dropout: bytes, and the factor on what is kept
        *_integers("keep"),
        ("keep_scale", "<f8"),
        ("scale", "<f8"),
    ]
)


class MapRecord(NamedTuple):
    """An index map: of query i and key j of item b it has row map[t], t = b * map_batch + i * map_row + j + map_origin.

    `runs[t]` is where the run of equal indices that contains t ends; 0 if runs are not known.
    """

    map: int
    map_batch: int
    map_row: int
    map_origin: int
    runs: int


class AddRecord(NamedTuple):
    """Something gathered and added to the scores: src[i, j, map[i, j]]."""

    map: MapRecord
    src: int
    src_batch: int = 0
    src_head: int = 0
    src_row: int = 0
    src_col: int = 0


class ValueRecord(NamedTuple):
    """Rows added to the output: weights[map[i, j]], times the probabilities that are summed from `bins` on."""

    map: MapRecord
    weights: int
    weights_head: int
    rows: int
    bins: int


class SinkRecord(NamedTuple):
    """Where the gradient of a gathered term is summed: dst[row of map[i, j]], maybe one sum for each query or key.

    `low`: where what sums of many numbers lose to rounding is summed, if it is. `of_keys`: the owner of the keys sums
    it; `of_probabilities`: p is summed, and not the gradient of the scores.
    """

    map: MapRecord
    dst: int
    low: int = 0
    dst_task: int = 0
    dst_batch: int = 0
    dst_head: int = 0
    dst_row: int = 0
    dst_col: int = 0
    of_keys: int = 0
    of_probabilities: int = 0


ADD, VALUE, SINK = (
    np.dtype(_integers(*MapRecord._fields, *kind._fields[1:])) for kind in (AddRecord, ValueRecord, SinkRecord)
)


def table(kind: np.dtype[Any], records: Sequence[AddRecord | ValueRecord | SinkRecord]) -> Array:
    """Records of one kind as the array that a kernel reads."""
    return np.array([(*record.map, *record[1:]) for record in records], kind)


# What the backward pass needs too, right behind its CALL, in which `lse` is an input in units of log 2: what is
# subtracted from each row of dp; where gradients go, stored how; records of what is gathered and added to dp.
# The work is divided into `parts` ranges of keys and then as many of queries, or with one part into whole heads.
# Who owns keys takes all `group` heads of queries that share them, one after the other. `diag`, `skew_dw` and sinks
# with a `dst_task` hold one partial sum per head and part. A call may do one of several `cuts` of each piece's keys
# only, for heads from `first_head` on of each group: each piece from `origin` on then has a workspace of its own.
BACKWARD = np.dtype(
    _integers("delta", "dq", "dk", "dv", "dq_kind", "dk_kind", "dv_kind", "dense")
    + _integers("parts", "query_step", "key_step", "diag", "diag_low", "diag_task")
    + _integers("skew_dq", "skew_dw", "skew_dw_low", "skew_dw_task")
    + _integers("sinks", "sink_count", "dp_adds", "dp_add_count", "cut", "cuts", "origin")
    + _integers("group", "first_head", "stop_head")
)

# Where keys and values are codes: the scales of the first key head, elements from head to head, and 1 if these are of
# keys, 0 of channels. Those of keys in pages lie in pages, too: elements from key to key, and from page to page.
SCALE_FIELDS = tuple(f"{name}_scale{part}" for name in "kv" for part in ("", "_head", "_row", "_page_row", "_page"))

# What decoding needs too, right behind its CALL: the number of parts of the keys that are attended separately, and
# where each leaves its maximum, its sum and its weighted sum of values per row, 0 if the only part is the result; and
# of how many key heads a piece of work is.
DECODE = np.dtype(_integers("parts", "partial", "together", *SCALE_FIELDS))


def places(*kinds: np.dtype[Any]) -> dict[str, int]:
    """Where each field is in a record of these kinds, one right behind the other, in integers."""
    return {name: n for n, name in enumerate(name for kind in kinds for name in kind.names or ())}


# Rows of the int64 table with one column per batch item: offsets of its arrays, and its range of keys.
BATCH_Q, BATCH_K, BATCH_V, BATCH_GRAD, BATCH_MASK, BATCH_INNER, KEY_BEGIN, KEY_END = BATCH_ROWS = range(8)

# Products of vectors with rows of a table: out[b, h, i, r] = scale * x[b, h, i] . table[h, r].
PRODUCT = np.dtype(
    [
        *_integers("counter", "stop", "work", "work_stride", "next"),
        *_integers("x", "x_head", "x_row", "x_group", "table", "table_head", "table_row", "out"),
        *_integers("heads", "length", "depth", "rows", "blocks", "batches"),
        ("scale", "<f8"),
    ]
)

# Positions that gates count, for queries that are C-contiguous and keys that need not be. `last`: query 0 counts keys
# before it. `out` is the bias; on the way back `ds` is its gradient, `slopes` that of products in gates, `to_whole`
# that of products with `positions` rows of the table, and `starts` has the first key of each piece that has a slope.
COUNT = np.dtype(
    [
        *_integers("counter", "stop", "work", "work_stride", "next"),
        *_integers("q", "k", "k_head", "k_row", "k_group", "whole", "batches", "out", "ds", "slopes", "to_whole"),
        *_integers("starts", "counted", "counted_head", "counted_row", "counted_col"),
        *_integers("count", "heads", "q_len", "k_len", "depth", "positions", "blocks", "last"),
        ("scale", "<f8"),
        ("factor", "<f8"),
    ]
)

# One call of rel_shift; `past`: the result is written past the caches.
SHIFT = np.dtype(
    _integers("counter", "stop", "step", "lines", "x", "out", "itemsize", "rows", "columns", "k_len", "wrapped", "past")
)
