"""DeepSeek V4: layers with a window, whose keys are the values too; those that compress keys are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.decoders import SLIDING, count, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys, OtherLayerError
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.steps import Told
from relpos_np.errors import RelposValueError

_COMPRESSED, _HEAVILY = "compressed_sparse_attention", "heavily_compressed_attention"
# Types of layers by `compress_ratios`.
_RATIOS = {0: SLIDING, 4: _COMPRESSED, 128: _HEAVILY}


def _type(keys: Keys, layer: int) -> str:
    """Of one layer: `layer_types`, else `compress_ratios`, else heavily compressed twice, and both kinds in turn."""
    # One more may be stored for the layer that predicts further tokens.
    types, ratios = (keys.listed(name, count(keys), None) for name in ("layer_types", "compress_ratios"))
    name, listed = ("compress_ratios", ratios) if types is None else ("layer_types", types)
    if listed is None:
        return _COMPRESSED if layer > 1 and layer % 2 else _HEAVILY
    found = listed[layer]
    known = _RATIOS if types is None else {kind: kind for kind in _RATIOS.values()}
    if isinstance(found, bool) or found not in known:
        raise RelposValueError(f"{name}: {found!r} is not understood, expected one of {', '.join(map(repr, known))}")
    return known[found]


def _parameters(keys: Keys, head_dim: int) -> tuple[rope.Parameters, int]:
    """Rotary parameters of layers with a window, and how many channels turn.

    Those of other layers stand beside them, or alone: then only base and share are of these layers too.
    """
    raw, longest = rope.stored(keys), keys.integer("max_position_embeddings")
    theta, share = keys.get("rope_theta", 10000.0), keys.get("partial_rotary_factor", None)
    turning = keys.get("qk_rope_head_dim", None)
    if share is None:
        share = 64 / 512 if turning is None else check.integer("qk_rope_head_dim", turning, 2) / head_dim
    own: dict[str, Any] = {}
    if isinstance(raw.get("main"), Mapping) and isinstance(raw.get("compress"), Mapping):
        own = dict(raw["main"])
        theta, share = own.pop("rope_theta", theta), own.pop("partial_rotary_factor", 1.0)
    elif raw.get("rope_theta", theta) != theta:
        raise RelposValueError(f"rope_theta: {theta!r}, and {raw['rope_theta']!r} among the rotary parameters")
    share = check.positive("partial_rotary_factor", share)
    theta = check.positive("rope_theta", theta)
    return rope.Parameters(own, theta, 1.0, longest, None), int(head_dim * share)


def _read(keys: Keys, layer: int, part: str) -> LayerAttention:
    """A layer with a window, with sinks; values turn as keys do, and the output turns back."""
    found = sizes(keys)
    keys.only("num_key_value_heads", 1)
    kind = _type(keys, layer)
    if kind != SLIDING:
        why = ": it attends keys that its own weights compress from several tokens, which is not understood"
        raise OtherLayerError(layer, found["layers"], kind, f"{why}, expected {SLIDING}")
    ropes, turning = _parameters(keys, found["head_dim"])
    plan = rope.plan(ropes, turning, layout="interleaved", before=found["head_dim"] - turning)
    # Of projections, and of layers that compress.
    keys.ignore("q_lora_rank", "index_topk")
    return LayerAttention(
        keys.model_type,
        part,
        layer,
        **found,
        causal=True,
        window=(keys.integer("sliding_window") - 1, None),
        schemes=(replace(plan, options={**plan.options, "values": True}),),
        sinks=f"layers.{layer}.self_attn.sinks",
        before=(Told("RMS norm of q, per head and without weights, and of the keys (q_b_norm, kv_norm)"),),
        notes=("the values are the keys: k and v of a call are the same",),
    )


register(_read, "deepseek_v4", kind="Text", count=count)
