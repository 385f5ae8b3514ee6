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
        *_integers("q", "k", "v", "out", "lse"),
        *_integers("q_head", "q_row", "k_head", "k_row", "v_head", "v_row", "out_batch", "out_head", "out_row"),
        *_integers("heads", "k_group", "v_group", "q_len", "k_len", "depth", "v_depth"),
        *_integers("block_queries", "blocks"),
        # positions: key j is in the band of query i if i + offset - left <= j <= i + offset + right
        *_integers("offset", "left", "right"),
        # the additive bias that is fused with the scores; `bias_tail`: its padding is -inf
        *_integers("bias", "bias_head", "bias_row", "bias_tail"),
        # `allowed`: bytes of a boolean mask; `soft`: a mask that is added; they share the strides
        *_integers("allowed", "soft", "mask_head", "mask_row", "mask_col"),
        # a query term with one row of weights per distance, multiplied tile by tile
        *_integers("skew_q", "skew_w", "skew_depth", "skew_head"),
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

# Rows of the int64 table with one column per batch item: offsets of its arrays, and its range of keys.
BATCH_Q, BATCH_K, BATCH_V, BATCH_MASK, KEY_BEGIN, KEY_END = range(6)

# One call of rel_shift.
SHIFT = np.dtype(_integers("counter", "stop", "step", "x", "out", "itemsize", "rows", "columns", "k_len", "wrapped"))
