"""Models with ALiBi: BLOOM and MPT; Falcon's early ones are refused, its others are rotary."""

from __future__ import annotations

from collections.abc import Mapping

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.decoders import clipped_to, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan
from relpos_np.errors import RelposValueError


def _bloom(keys: Keys, layer: int, part: str) -> LayerAttention:
    """m·j is added to the scaled scores."""
    keys.ignore("apply_residual_connection_post_layernorm", "seq_length", "slow_but_exact")
    plan = SchemePlan("ALiBi", {"form": "key"})
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), **sizes(keys))


_OFF = {"prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False}


def _mpt(keys: Keys, layer: int, part: str) -> LayerAttention:
    """The same; what matters is in `attn_config`."""
    stored = keys.get("attn_config", None) or {}
    if not isinstance(stored, Mapping):
        raise RelposValueError(f"attn_config: expected an object, found {stored!r}")
    inner = Keys({**stored, "model_type": "mpt: attn_config"}, _ATTN, {})
    for name, value in _OFF.items():
        inner.only(name, value, default=value)
    inner.only("attn_type", "multihead_attention")
    inner.only("alibi", True)
    inner.ignore("attn_impl", "attn_pdrop", "chunk_size_feed_forward")
    keys.ignore("learned_pos_emb", "max_seq_len")
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
    before = () if not clip else (clipped_to(clip),)
    layer_found = LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), before=before, **found)
    inner.close(layer_found)
    return layer_found


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
    keys.ignore("parallel_attn", "num_ln_in_parallel_attn", "apply_residual_connection_post_layernorm")
    plan = rope.plan(rope.parameters(keys), found["head_dim"])
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), **found)


_ATTN = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "softmax_scale": None,
    "clip_qkv": None,
}

register(
    _bloom,
    {"bloom": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}},
    kind="Text",
    aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
)
register(
    _mpt,
    {"mpt": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "attn_config": None}},
    kind="Text",
    aliases={"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
)
register(
    _falcon,
    {
        "falcon": {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": None,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "max_position_embeddings": 2048,
        }
    },
    kind="Text",
    aliases={"n_embed": "hidden_size"},
)
