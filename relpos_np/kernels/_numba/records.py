"""The records through which the host tells a kernel what to do: addresses, strides and sizes.

A kernel has few arguments this way and is compiled once per element type. Addresses are bytes;
strides and origins are elements. `plan.py` fills the records and keeps the arrays alive.
"""

from __future__ import annotations

import numpy as np


def _integers(*names: str) -> list[tuple[str, str]]:
    return [(name, "<i8") for name in names]


# One call of attention.
CALL = np.dtype(
    [
        # work: a counter of blocks shared by all threads, its limit, and one workspace per thread;
        # the counter is the first field, so that its address is the record's
        *_integers("counter", "stop", "work", "work_stride"),
        # pieces of work that a thread takes at a time, which the counter then counts in (windows only)
        *_integers("run"),
        *_integers("q", "k", "v", "out", "lse"),
        # what the log-sum-exp, in units of log 2, is multiplied by
        ("lse_unit", "<f8"),
        *_integers("q_head", "q_row", "k_head", "k_row", "v_head", "v_row", "out_batch", "out_head", "out_row"),
        *_integers("heads", "k_group", "v_group", "q_len", "k_len", "depth", "v_depth"),
        *_integers("block_queries", "blocks"),
        # positions: key j is in the band of query i if i + offset - left <= j <= i + offset + right
        *_integers("offset", "left", "right"),
        # the additive bias that is fused with the scores; `bias_tail`: its padding is -inf
        *_integers("bias", "bias_head", "bias_row", "bias_tail"),
        # `allowed`: bytes of a boolean mask; `soft`: a mask that is added; they share the strides
        *_integers("allowed", "soft", "mask_head", "mask_row", "mask_col"),
        # a query term with one row of weights per distance, multiplied tile by tile: distance j - i has the row
        # skew_index[j - i + q_len - 1], or none
        *_integers("skew_q", "skew_w", "skew_index", "skew_depth", "skew_head", "skew_row"),
        *_integers("batches", "count", "adds", "add_count", "values", "value_count", "bins"),
        # dropout: bytes, and the factor on what is kept
        *_integers("keep"),
        ("keep_scale", "<f8"),
        ("scale", "<f8"),
    ]
)

# Something gathered and added to the scores: src[i, j, index[i, j]]. `runs[t]` is where the run of
# equal indices that contains t ends.
ADD = np.dtype(
    _integers("src", "src_batch", "src_head", "src_row", "src_col", "index", "index_batch", "index_row", "runs")
)

# Rows added to the output: weights[index[i, j]], weighted by the probabilities.
VALUE = np.dtype(_integers("weights", "weights_head", "rows", "bins", "index", "index_batch", "index_row", "runs"))

# What the backward pass needs besides, right behind its CALL: the gradient of the output, rows of the sums that every
# dp is reduced by (and `lse` there is read, in units of log 2); where gradients go; and
# how work is divided: `parts` ranges of queries and then as many of keys, or with one part both at once. `diag`,
# `skew_dw` and sinks with a `dst_task` hold one partial sum per task. A call may do one of several `cuts` of each
# piece's keys only: pieces from `origin` on then have a workspace each, and not threads.
BACKWARD = np.dtype(
    _integers("grad_out", "delta", "dq", "dk", "dv", "dense")
    + _integers("parts", "query_step", "key_step", "diag", "diag_task", "skew_dq", "skew_dw", "skew_dw_task")
    + _integers("sinks", "sink_count", "lifted", "lifted_count", "cut", "cuts", "origin")
)

# What decoding needs besides, right behind its CALL: parts of the keys that are attended apart, and where each leaves
# its maximum, its sum and its weighted sum of values per row; 0 if there is one part, which is then the result.
DECODE = np.dtype(_integers("parts", "partial"))

# Where the gradient of a gathered term is collected: dst[row of index[i, j]], which may lie apart for each query or
# key. `of_keys`: the key range owns it; `of_probabilities`: p is collected, and not the gradient of the scores.
SINK = np.dtype(
    _integers("index", "index_batch", "index_row", "runs")
    + _integers("dst", "dst_task", "dst_batch", "dst_head", "dst_row", "dst_col", "of_keys", "of_probabilities")
)

# Rows of the int64 table with one column per batch item: offsets of its arrays, and its range of keys.
BATCH_Q, BATCH_K, BATCH_V, BATCH_MASK, KEY_BEGIN, KEY_END = range(6)

# Products of vectors with rows of a table: out[b, h, i, r] = scale * x[b, h, i] . table[h, r].
PRODUCT = np.dtype(
    [
        *_integers("counter", "stop", "work", "work_stride"),
        *_integers("x", "x_head", "x_row", "x_group", "table", "table_head", "table_row", "out"),
        *_integers("heads", "length", "depth", "rows", "blocks", "batches"),
        ("scale", "<f8"),
    ]
)

# One call of rel_shift; `past`: the result is written past the caches.
SHIFT = np.dtype(
    _integers("counter", "stop", "step", "lines", "x", "out", "itemsize", "rows", "columns", "k_len", "wrapped", "past")
)
