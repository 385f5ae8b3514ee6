"""What published checkpoints of transformers store for positions, as the arguments of schemes."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposValueError
from relpos_np.formulas.layer_norm import layer_norm
from relpos_np.layers.state import Source, State
from relpos_np.types import Array

# Names of each argument below the prefix, which is that of the attention module, or of what is shared above it. Where
# versions of a package or the authors' code differ, any of them is read.
_TABLE = "relative_position_bias_table"
STORED: dict[str, dict[str, tuple[str, ...]]] = {
    # encoder.layers.3.attention; the table is that of layer 0.
    "wavlm": {"table": ("rel_attn_embed.weight", "layers.0.attention.rel_attn_embed.weight")},
    "wavlm_gate": {
        "weight": ("gru_rel_pos_linear.weight",),
        "bias": ("gru_rel_pos_linear.bias",),
        "const": ("gru_rel_pos_const",),
    },
    # encoder.layers.0.blocks.1.attention.self; in the authors' code layers.0.blocks.1.attn.
    "swin_v2": {
        "hidden_weight": ("continuous_position_bias_mlp.0.weight", "cpb_mlp.0.weight"),
        "hidden_bias": ("continuous_position_bias_mlp.0.bias", "cpb_mlp.0.bias"),
        "output_weight": ("continuous_position_bias_mlp.2.weight", "cpb_mlp.2.weight"),
        "logit_scale": ("logit_scale",),
    },
    # encoder.layer.3.attention.attention, or since version 5 layers.3.attention; or one for all layers.
    "beit": {"table": (f"relative_position_bias.{_TABLE}", f"shared_position_bias.{_TABLE}")},
    # vision_encoder.layers.3.attn
    "sam": {"height_table": ("rel_pos_h",), "width_table": ("rel_pos_w",)},
    # text_encoder.encoder.layers.3.attention
    "vits": {"key_table": ("emb_rel_k",), "value_table": ("emb_rel_v",)},
}
# Of DeBERTa, attention.self: projections of the embedding that all layers share, and what serves where there is none.
PROJECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "deberta": {"pos_key": ("pos_proj",), "pos_query": ("pos_q_proj",)},
    "deberta_v2": {"pos_key": ("pos_key_proj", "key_proj"), "pos_query": ("pos_query_proj", "query_proj")},
}


def scheme_arrays(
    source: Source, *, prefix: str = "", format: str, heads: int | None = None, layer_norm_eps: float = 1e-7
) -> dict[str, Array]:
    """The arrays of a scheme from the weights of a published layer, by the names of the scheme's arguments.

    Parameters
    ----------
    source : mapping, str, path-like or State
        See `tensors`: a state dict, or the path of a .safetensors file.
    prefix : str
        That of the layer's attention module in transformers. What layers share is found above it.
    format : {"wavlm", "wavlm_gate", "swin_v2", "beit", "sam", "vits", "deberta", "deberta_v2"}
        Whose names; `relpos_np.layers.published` lists them.

        - "wavlm": ``table`` of `relpos_np.WavLM`, which is that of layer 0; "wavlm_gate": ``weight``, ``bias`` and
          ``const`` of the layer itself, with which `relpos_np.reference.wavlm_gate` makes the gate of a hidden state.
        - "swin_v2": all trained arrays of `relpos_np.SwinV2`; windows are the configuration's ``window_size`` and
          ``pretrained_window_sizes``.
        - "beit": ``table`` of `relpos_np.BEiT`, also of Data2Vec's vision model, a layer's own or one for all layers.
        - "sam": both tables of `relpos_np.DecomposedBias`.
        - "vits": both tables of `relpos_np.Shaw`, which is to have ``outside="zero"``.
        - "deberta", "deberta_v2": ``pos_key`` and ``pos_query`` of `relpos_np.DeBERTa`, the shared embedding after this
          layer's projections, in v2 and v3 after the normalisation that the encoder may have. A layer of v2 or v3
          without projections for positions (``share_att_key``) uses those of its keys and queries, for both parts:
          leave one out that the configuration's ``pos_att_type`` lacks.
    heads : int, optional
        Number of heads of "deberta" and "deberta_v2", which no shape tells; not for the others.
    layer_norm_eps : float
        The configuration's, for "deberta_v2".

    Returns
    -------
    dict of str to ndarray
        As stored; what is computed, for DeBERTa, in float64 and rounded once to the dtype of the weights, or float32.

    Raises
    ------
    RelposValueError
        If a tensor is missing (the message lists the nearest names), a shape does not fit, or `heads` is missing or
        given in vain.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> from relpos_np.layers import scheme_arrays
    >>> height, width = np.zeros((7, 4)), np.zeros((5, 4))
    >>> state = {"layers.0.attn.rel_pos_h": height, "layers.0.attn.rel_pos_w": width}
    >>> arrays = scheme_arrays(state, prefix="layers.0.attn", format="sam")
    >>> rp.DecomposedBias(**arrays, grid=(4, 3)).variant
    'sam'
    """
    check.choice("format", format, (*STORED, *PROJECTED))
    state = State(source, prefix)
    if format in PROJECTED:
        if heads is None:
            raise RelposValueError(f"heads: {format!r} needs the number of heads, which no shape tells")
        eps = check.positive("layer_norm_eps", layer_norm_eps)
        return _projected(state, format, check.integer("heads", heads, 1), eps)
    if heads is not None:
        raise RelposValueError(
            f"heads: only {' and '.join(map(repr, PROJECTED))} take it, found {heads} for {format!r}"
        )
    found = {argument: state.shared(*names) for argument, names in STORED[format].items()}
    if format == "vits":
        found = {argument: _only(state, STORED[format][argument][0], x) for argument, x in found.items()}
    return found


def _only(state: State, name: str, x: Array) -> Array:
    """A table that all heads share, without its axis of heads."""
    if x.ndim != 3 or x.shape[0] != 1:
        raise RelposValueError(f"{state.prefix}{name}: expected shape (1, rows, head_dim), found {x.shape}")
    first: Array = x[0]
    return first


def _projected(state: State, format: str, heads: int, eps: float) -> dict[str, Array]:
    """DeBERTa's embedding of relative positions after a layer's projections: (H, 2s, D) each."""
    embedding = _wide(state.shared("rel_embeddings.weight"), "rel_embeddings.weight")
    scale, shift = (state.find(f"encoder.LayerNorm.{name}") for name in ("weight", "bias"))
    if format == "deberta_v2" and scale is not None and shift is not None:
        norm = (_wide(scale, "encoder.LayerNorm.weight"), _wide(shift, "encoder.LayerNorm.bias"))
        embedding = layer_norm(embedding, *norm, eps)
    own = {argument: names[0] for argument, names in PROJECTED[format].items() if state.has(f"{names[0]}.weight")}
    if not own:
        own = {argument: names[-1] for argument, names in PROJECTED[format].items()}
    found = {}
    for argument, name in own.items():
        weight = state.take(f"{name}.weight")
        dtype = check.floating(name, weight[:0]).dtype
        wide = _wide(weight, f"{name}.weight")
        if wide.ndim != 2 or wide.shape[1] != embedding.shape[1] or wide.shape[0] % heads:
            raise RelposValueError(
                f"{state.prefix}{name}.weight: expected ({heads} * D, {embedding.shape[1]}), found {wide.shape}"
            )
        table = embedding @ wide.T
        bias = state.get(f"{name}.bias")
        if bias is not None:
            table = table + _wide(bias, f"{name}.bias")
        found[argument] = np.ascontiguousarray(
            table.reshape(len(table), heads, wide.shape[0] // heads).transpose(1, 0, 2), dtype
        )
    return found


def _wide(x: Any, name: str) -> Array:
    """Weights in float64."""
    return np.asarray(check.floating(name, x), np.float64)
