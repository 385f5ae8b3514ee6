"""The oracle, function by function: every formula on dense arrays, importable on its own.

Each lives in its scheme's file, next to the class that lowers it; this module only gathers them.
"""

from relpos_np.formulas.buckets import t5_bucket
from relpos_np.formulas.frequencies import (
    linear_frequencies,
    llama3_frequencies,
    longrope_frequencies,
    ntk_frequencies,
    proportional_frequencies,
    rotary_frequencies,
    yarn_frequencies,
)
from relpos_np.formulas.relshift import rel_shift
from relpos_np.formulas.resize_tables import resize_table
from relpos_np.formulas.rotary_axes import (
    axial_frequencies,
    axis_frequencies,
    grid_positions,
    pixel_frequencies,
    section_axes,
)
from relpos_np.formulas.rotations import rotary_matrices, rotate_inputs, rotate_pairs, xpos_scales
from relpos_np.formulas.softmax import softmax, weighted_sum
from relpos_np.schemes.alibi import alibi_bias, alibi_slopes
from relpos_np.schemes.beit import beit_index
from relpos_np.schemes.cope import contextual_positions, cope_scores
from relpos_np.schemes.deberta import deberta_bucket, deberta_scores
from relpos_np.schemes.decomposed import axis_rows, decomposed_scores
from relpos_np.schemes.fire import fire_bias
from relpos_np.schemes.graph import label_bias, label_vectors
from relpos_np.schemes.irpe import irpe_buckets, piecewise_index
from relpos_np.schemes.kerple import kerple_bias
from relpos_np.schemes.layout import layout_bias, layout_distance
from relpos_np.schemes.learned import add_at_every_layer, learned_encoding
from relpos_np.schemes.neighborhood import neighborhood_axis, neighborhood_bias
from relpos_np.schemes.plain import self_attention, self_attention_general, self_attention_sums
from relpos_np.schemes.sandwich import sandwich_bias
from relpos_np.schemes.shaw import relative_vectors, shaw_attention, shaw_attention_matrix
from relpos_np.schemes.sinusoidal import rotation_matrix, sinusoidal
from relpos_np.schemes.swin_v2 import swin_v2_bias, swin_v2_coordinates, unit_vectors
from relpos_np.schemes.t5 import t5_bias
from relpos_np.schemes.tisa import tisa_bias
from relpos_np.schemes.transformer_xl import absolute_terms, relative_terms, row_distances, transformer_xl_scores
from relpos_np.schemes.wavlm import wavlm_bias, wavlm_gate, wavlm_gate_vjp
from relpos_np.schemes.window import rstt_frames, window_index

__all__ = [
    "absolute_terms",
    "add_at_every_layer",
    "alibi_bias",
    "alibi_slopes",
    "axial_frequencies",
    "axis_frequencies",
    "axis_rows",
    "beit_index",
    "contextual_positions",
    "cope_scores",
    "deberta_bucket",
    "deberta_scores",
    "decomposed_scores",
    "fire_bias",
    "grid_positions",
    "irpe_buckets",
    "kerple_bias",
    "label_bias",
    "label_vectors",
    "layout_bias",
    "layout_distance",
    "learned_encoding",
    "linear_frequencies",
    "llama3_frequencies",
    "longrope_frequencies",
    "neighborhood_axis",
    "neighborhood_bias",
    "ntk_frequencies",
    "piecewise_index",
    "pixel_frequencies",
    "proportional_frequencies",
    "rel_shift",
    "relative_terms",
    "relative_vectors",
    "resize_table",
    "rotary_frequencies",
    "rotary_matrices",
    "rotate_inputs",
    "rotate_pairs",
    "rotation_matrix",
    "row_distances",
    "rstt_frames",
    "sandwich_bias",
    "section_axes",
    "self_attention",
    "self_attention_general",
    "self_attention_sums",
    "shaw_attention",
    "shaw_attention_matrix",
    "sinusoidal",
    "softmax",
    "swin_v2_bias",
    "swin_v2_coordinates",
    "t5_bias",
    "t5_bucket",
    "tisa_bias",
    "transformer_xl_scores",
    "unit_vectors",
    "wavlm_bias",
    "wavlm_gate",
    "wavlm_gate_vjp",
    "weighted_sum",
    "window_index",
    "xpos_scales",
    "yarn_frequencies",
]
