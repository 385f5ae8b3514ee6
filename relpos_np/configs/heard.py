"""Speech and music with cross-attention: Moonshine, Dia and the decoder of MusicGen."""

from __future__ import annotations

from typing import Any

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.decoders import At, Rotating, divided, equal_heads, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention


def _moonshine(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Nine tenths of the channels turn, in pairs of neighbours; nothing in cross-attention."""
    counts = {}
    for side in ("encoder", "decoder"):
        counts[side] = keys.integer(f"{side}_num_attention_heads"), keys.integer(f"{side}_num_hidden_layers")
        keys.only(f"{side}_num_key_value_heads", counts[side][0], None)
    heads, layers = counts["encoder" if part == "encoder" else "decoder"]
    keys.only("encoder_num_attention_heads", counts["decoder"][0])
    dim = divided(keys, "hidden_size", heads)
    plan = rope.plan(rope.parameters(keys, share=0.9), dim, layout="interleaved")
    found = equal_heads(layers, heads, dim) | {"causal": part == "decoder"}
    return LayerAttention(keys.model_type, part, layer, schemes=() if part == "cross" else (plan,), **found)


def _unscaled(_at: At) -> dict[str, Any]:
    return {"scale": 1.0}


def _dia(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Rotary and not scaled; cross-attention has heads of its own."""
    decoding = keys.model_type == "dia_decoder"
    own = ("cross_num_attention_heads", "cross_num_key_value_heads", "cross_head_dim")
    keys.ignore("cross_hidden_size", *(own if decoding else ()))
    if part != "cross":
        return Rotating(causal=decoding, finish=_unscaled).read(keys, layer, part)
    layers = Rotating().read(keys, layer, part).layers
    heads, kv_heads, dim = (keys.integer(name) for name in own)
    found = equal_heads(layers, heads, dim) | {"kv_heads": kv_heads, "scale": 1.0}
    return LayerAttention(keys.model_type, part, layer, causal=False, **found)


def _musicgen(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Plain attention; the sinusoids have their cosines first."""
    keys.only("is_decoder", False, None, True)
    keys.only("cross_attention_hidden_size", None, check.integer("hidden_size", keys.get("hidden_size"), 1))
    # Every layer has cross-attention, whatever this says.
    keys.ignore("add_cross_attention")
    notes = ("cosines and sines, in this order, are added to the inputs",)
    causal = part != "cross"
    return LayerAttention(keys.model_type, part, layer, causal=causal, notes=notes if causal else (), **sizes(keys))


_KIND = "Speech and music"
register(_moonshine, "moonshine", kind=_KIND, parts=("encoder", "decoder", "cross"))
register(_dia, "dia_encoder", kind=_KIND)
register(_dia, "dia_decoder", kind=_KIND, parts=("", "cross"))
register(_musicgen, "musicgen_decoder", kind=_KIND, parts=("", "cross"))
register(_musicgen, "musicgen_melody_decoder", kind=_KIND)
