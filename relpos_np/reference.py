"""The oracle, function by function: every formula on dense arrays, importable on its own.

Each lives in its scheme's file, next to the class that lowers it; this module only gathers them.
"""

from relpos_np.dense import softmax, weighted_sum
from relpos_np.relshift import rel_shift
from relpos_np.schemes.learned import learned_encoding
from relpos_np.schemes.plain import self_attention
from relpos_np.schemes.shaw import relative_vectors, shaw_attention
from relpos_np.schemes.sinusoidal import sinusoidal
from relpos_np.schemes.t5 import t5_bias, t5_bucket
from relpos_np.schemes.transformer_xl import row_distances, transformer_xl_scores
from relpos_np.schemes.window import rstt_frames, window_index

__all__ = [
    "learned_encoding",
    "rel_shift",
    "relative_vectors",
    "row_distances",
    "rstt_frames",
    "self_attention",
    "shaw_attention",
    "sinusoidal",
    "softmax",
    "t5_bias",
    "t5_bucket",
    "transformer_xl_scores",
    "weighted_sum",
    "window_index",
]
