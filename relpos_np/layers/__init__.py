"""Whole attention modules on NumPy weights: projections, heads, masks and dropout around the schemes."""

from relpos_np.layers.encoding import PositionalEncoding, RelativePositionalEncoding
from relpos_np.layers.linear import Cache, Linear
from relpos_np.layers.multihead import MultiHeadAttention
from relpos_np.layers.published import scheme_arrays
from relpos_np.layers.relative import RelativeMultiHeadAttention
from relpos_np.layers.state import State, tensors
from relpos_np.layers.swin import (
    SwinAttention,
    VideoSwinAttention,
    cyclic_shift,
    shift_mask,
    window_partition,
    window_reverse,
)
from relpos_np.layers.whole import PublishedAttention
from relpos_np.layers.window import WindowAttention, truncated_normal

__all__ = [
    "Cache",
    "Linear",
    "MultiHeadAttention",
    "PositionalEncoding",
    "PublishedAttention",
    "RelativeMultiHeadAttention",
    "RelativePositionalEncoding",
    "State",
    "SwinAttention",
    "VideoSwinAttention",
    "WindowAttention",
    "cyclic_shift",
    "scheme_arrays",
    "shift_mask",
    "tensors",
    "truncated_normal",
    "window_partition",
    "window_reverse",
]
