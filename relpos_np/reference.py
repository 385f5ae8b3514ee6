"""The oracle, function by function: every formula on dense arrays, importable on its own.

Each lives in its scheme's file, next to the class that lowers it; this module only gathers them, and checks the types
of arguments by the signatures. Shapes that do not fit are named in a `RelposValueError`.
"""

from relpos_np._contract.formula import checked as _checked
from relpos_np.formulas.buckets import t5_bucket
from relpos_np.formulas.frequencies import (
    linear_frequencies,
    llama3_frequencies,
    longrope_frequencies,
    ntk_alpha_frequencies,
    ntk_frequencies,
    proportional_frequencies,
    rotary_frequencies,
    yarn_frequencies,
)
from relpos_np.formulas.positions import diagonal_positions, randomized_positions
from relpos_np.formulas.relshift import rel_shift
from relpos_np.formulas.resize_tables import resize_table
from relpos_np.formulas.rope_parameters import rope_parameters
from relpos_np.formulas.rotary_axes import (
    axial_frequencies,
    axis_frequencies,
    grid_positions,
    pixel_frequencies,
    section_axes,
)
from relpos_np.formulas.rotations import rotary_matrices, rotate_inputs, rotate_pairs, xpos_scales
from relpos_np.formulas.softmax import softmax, weighted_sum
from relpos_np.formulas.temperature import query_temperature
from relpos_np.schemes.registry import SCHEMES

# The formulas of schemes are public by being registered; `reference.pyi` names them for type checkers.
_FORMULAS = {name: formula for info in SCHEMES.values() for name, formula in info.formulas.items()}
globals().update(_FORMULAS)
__all__ = [
    "axial_frequencies",
    "axis_frequencies",
    "diagonal_positions",
    "grid_positions",
    "linear_frequencies",
    "llama3_frequencies",
    "longrope_frequencies",
    "ntk_alpha_frequencies",
    "ntk_frequencies",
    "pixel_frequencies",
    "proportional_frequencies",
    "query_temperature",
    "randomized_positions",
    "rel_shift",
    "resize_table",
    "rope_parameters",
    "rotary_frequencies",
    "rotary_matrices",
    "rotate_inputs",
    "rotate_pairs",
    "section_axes",
    "softmax",
    "t5_bucket",
    "weighted_sum",
    "xpos_scales",
    "yarn_frequencies",
]
__all__ += list(_FORMULAS)
globals().update({_name: _checked(globals()[_name]) for _name in __all__})
