"""The oracle, function by function: every formula on dense arrays, importable on its own.

Each lives in its scheme's file, next to the class that lowers it; this module only gathers them.
"""

from relpos_np.dense import softmax, weighted_sum
from relpos_np.relshift import rel_shift
from relpos_np.schemes.alibi import alibi_bias, alibi_slopes
from relpos_np.schemes.kerple import kerple_bias
from relpos_np.schemes.learned import add_at_every_layer, learned_encoding
from relpos_np.schemes.plain import self_attention, self_attention_general, self_attention_sums
from relpos_np.schemes.rotary import (
    linear_frequencies,
    llama3_frequencies,
    ntk_frequencies,
    rotary_frequencies,
    rotary_matrices,
    rotate_pairs,
    yarn_frequencies,
)
from relpos_np.schemes.shaw import relative_vectors, shaw_attention, shaw_attention_matrix
from relpos_np.schemes.sinusoidal import rotation_matrix, sinusoidal
from relpos_np.schemes.t5 import t5_bias, t5_bucket
from relpos_np.schemes.transformer_xl import absolute_terms, relative_terms, row_distances, transformer_xl_scores
from relpos_np.schemes.window import rstt_frames, window_index

__all__ = [
    "absolute_terms",
    "add_at_every_layer",
    "alibi_bias",
    "alibi_slopes",
    "kerple_bias",
    "learned_encoding",
    "linear_frequencies",
    "llama3_frequencies",
    "ntk_frequencies",
    "rel_shift",
    "relative_terms",
    "relative_vectors",
    "rotary_frequencies",
    "rotary_matrices",
    "rotate_pairs",
    "rotation_matrix",
    "row_distances",
    "rstt_frames",
    "self_attention",
    "self_attention_general",
    "self_attention_sums",
    "shaw_attention",
    "shaw_attention_matrix",
    "sinusoidal",
    "softmax",
    "t5_bias",
    "t5_bucket",
    "transformer_xl_scores",
    "weighted_sum",
    "window_index",
    "yarn_frequencies",
]
