"""Pictures of what positions contribute to attention; matplotlib is imported only when one is drawn."""

from relpos_np.plot.bias import (
    attention_weights,
    attention_with_and_without,
    bias_by_distance,
    bias_maps,
    heat_map,
    new_figure,
    position_bias,
    save,
    span,
)

__all__ = [
    "attention_weights",
    "attention_with_and_without",
    "bias_by_distance",
    "bias_maps",
    "heat_map",
    "new_figure",
    "position_bias",
    "save",
    "span",
]
