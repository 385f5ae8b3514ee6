"""Models with ALiBi: BLOOM and MPT; Falcon's early ones are refused, its others are rotary."""

from __future__ import annotations

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.decoders import sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan
from relpos_np.configs.steps import Clip
from relpos_np.errors import RelposValueError


def _bloom(keys: Keys, layer: int, part: str) -> LayerAttention:
    """m·j is added to the scaled scores."""
    plan = SchemePlan("ALiBi", {"form": "key"})
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), **sizes(keys))


def _mpt(keys: Keys, layer: int, part: str) -> LayerAttention:
    """The same; what matters is in `attn_config`."""
    inner = keys.inner("attn_config", _ATTN)
    for name in ("attn_type", "alibi", "prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        inner.only(name, _ATTN[name])
    found = sizes(keys)
    scale, clip = inner.get("softmax_scale"), inner.get("clip_qkv")
    if scale is not None:
        found["scale"] = check.real("softmax_scale", scale)
    if inner.real("alibi_bias_max") != 8:
        raise RelposValueError(
            f"alibi_bias_max: {inner.get('alibi_bias_max')!r} in a configuration of mpt is not supported, as the code "
            "of transformers computes with 8 all the same; the formula is rp.ALiBi(rp.reference.alibi_slopes(H) ** "
            '(alibi_bias_max / 8), form="key")'
        )
    plan = SchemePlan("ALiBi", {"form": "key"})
    before = () if not clip else (Clip(check.positive("clip_qkv", clip)),)
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), before=before, **found)


def _falcon(keys: Keys, layer: int, part: str) -> LayerAttention:
    """One key head, some, or one for each query, in several generations."""
    if keys.flag("alibi"):
        raise RelposValueError(
            "alibi: True in a configuration of falcon is not supported, as its published code rounds the bias to "
            'bfloat16; the formula is rp.ALiBi(rp.reference.alibi_slopes(H) / sqrt(D), form="key")'
        )
    found = sizes(keys)
    grouped, one = keys.flag("new_decoder_architecture"), keys.flag("multi_query")
    kv_heads = keys.get("num_kv_heads", None)
    if grouped:
        found["kv_heads"] = found["heads"] if kv_heads is None else check.integer("num_kv_heads", kv_heads, 1)
    else:
        found["kv_heads"] = 1 if one else found["heads"]
    ropes = rope.parameters(keys, share=None)
    plan = rope.plan(ropes, found["head_dim"])
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), notes=ropes.notes, **found)


_ATTN = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "alibi_bias_max": 8,
    "softmax_scale": None,
    "clip_qkv": None,
}

register(_bloom, "bloom", kind="Text", aliases={"n_embed": "hidden_size"})
register(_mpt, "mpt", kind="Text")
register(_falcon, "falcon", kind="Text", aliases={"n_embed": "hidden_size"})
# As its files were before the class.
_EARLY = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
register(_falcon, "RefinedWebModel", kind="Text", like="falcon", aliases=_EARLY)
register(_falcon, "RefinedWeb", kind="Text", like="falcon", aliases=_EARLY, defaults={"new_decoder_architecture": True})
