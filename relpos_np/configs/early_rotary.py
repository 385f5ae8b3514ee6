"""Rotary models from before configurations agreed on names, and DeepSeek's, which turn the last channels of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relpos_np._contract import check
from relpos_np.configs import rope
from relpos_np.configs.absolute import learned
from relpos_np.configs.decoders import FULL, LINEAR, At, Rotating, count, divided, ministral3, sizes
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys, OtherLayerError
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan, Temperature
from relpos_np.configs.steps import Clip, Latent, Told
from relpos_np.errors import RelposValueError
from relpos_np.formulas.frequencies import yarn_magnitude


def _gptj(keys: Keys, layer: int, part: str) -> LayerAttention:
    """The first `rotary_dim` channels, interleaved, base 10000."""
    found = sizes(keys)
    keys.only("is_decoder", False, None, True)
    keys.only("add_cross_attention", False, None)
    plan = SchemePlan("Rotary", {"dim": keys.integer("rotary_dim"), "layout": "interleaved"})
    return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), **found)


def _dbrx(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Key heads, clipping and the base are in `attn_config`."""
    inner = keys.inner("attn_config", {"kv_n_heads": 1, "clip_qkv": None, "rope_theta": None})
    found = sizes(keys) | {"kv_heads": inner.integer("kv_n_heads")}
    base, clip = inner.get("rope_theta"), inner.get("clip_qkv")
    ropes = rope.parameters(keys, theta=1e4 if base is None else inner.real("rope_theta"), share=None)
    plan = rope.plan(ropes, found["head_dim"])
    note = "rope_theta of attn_config, as published code reads it; transformers 5.24 turns as if it were 10000"
    notes = ropes.notes if base in (None, 1e4) else (note, *ropes.notes)
    before = () if clip is None else (Clip(check.positive("clip_qkv", clip)),)
    return LayerAttention(
        keys.model_type, part, layer, causal=True, schemes=(plan,), before=before, notes=notes, **found
    )


def _roformer(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Interleaved; values may turn with queries and keys, without turning back."""
    found = sizes(keys)
    keys.only("add_cross_attention", False, None)
    keys.only("rotary_value", False)
    plan = SchemePlan("Rotary", {"layout": "interleaved"})
    decoding = keys.flag("is_decoder", False)
    return LayerAttention(keys.model_type, part, layer, causal=decoding, schemes=(plan,), **found)


def _esm(keys: Keys, layer: int, part: str) -> LayerAttention:
    """ESM-2 turns in halves; ESM-1b has a trained table."""
    found = sizes(keys)
    kind = keys.only("position_embedding_type", "rotary", "absolute")
    keys.only("add_cross_attention", False, None)
    keys.only("is_folding_model", False, None)
    base = keys.real("rope_theta")
    if kind == "absolute":
        found["added"] = learned("embeddings.position_embeddings.weight", 2, "positions count tokens, not padding")
    else:
        found["schemes"] = (SchemePlan("Rotary", {"base": base}),)
    found["causal"] = keys.flag("is_decoder", False)
    return LayerAttention(keys.model_type, part, layer, **found)


def _deepseek(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Latent attention, written out: heads of channels that stand still, and then of some that turn."""
    if keys.only("use_mla", True, False, None) is False:
        # Small models of the same type.
        keys.ignore("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "head_dim")
        return Rotating().read(keys, layer, part)
    heads = keys.integer("num_attention_heads")
    still, turning = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    interleaved = keys.model_type not in ("minicpm3", "kimi_linear")
    if keys.model_type in _EITHER:
        interleaved = keys.flag("rope_interleave", True)
    else:
        keys.only("rope_interleave", interleaved, default=interleaved)
    theta = 1e7 if keys.model_type == "longcat_flash" else 1e4
    share = 1.0 if keys.model_type == "mistral4" else None
    others = ("llama_4_scaling_beta", "max_position_embeddings")
    ropes = rope.parameters(keys, theta=theta, share=share, elsewhere=others)
    temperature, latent = None, Latent(keys.integer("kv_lora_rank"), turning)
    if keys.model_type == "mistral4":
        ropes, temperature = _mistral4(keys, ropes, turning / (still + turning))
    elif "llama_4_scaling_beta" in rope.stored(keys):
        raise RelposValueError(f"llama_4_scaling_beta: not understood in a configuration of {keys.model_type}")
    layers = keys.get("num_hidden_layers", None)
    if keys.model_type == "longcat_flash":
        # Two layers of attention in each.
        twice = 2 * keys.integer("num_layers")
        layers = keys.only("num_hidden_layers", twice, None) or twice
        keys.only("attention_method", "MLA", None)
        keys.only("mla_scale_q_lora", True, default=True)
        keys.only("mla_scale_kv_lora", True, default=True)
        width, query_rank = keys.integer("hidden_size"), keys.integer("q_lora_rank")
        latent = replace(latent, query_factor=(width / query_rank) ** 0.5, factor=(width / latent.rank) ** 0.5)
    scale = (still + turning) ** -0.5
    every = ropes.stored.get("mscale_all_dim")
    if ropes.rule != "default" and every:
        scale *= yarn_magnitude(check.real("factor", ropes.stored.get("factor")), every) ** 2
    # Of the projections: they are done before.
    keys.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "q_lora_rank")
    values = keys.get("v_head_dim")
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if keys.model_type in ("deepseek_v32", "glm_moe_dsa", "axk2"):
        keys.ignore(*_INDEXERS)
        needs = ("selected",)
        notes = (f"selected: the {keys.integer('index_topk')} keys that the layer's indexer chooses for a query",)
        if keys.model_type == "glm_moe_dsa":
            notes = (f"{notes[0]}, or that of a layer before",)
        types = keys.get("layer_types", None)
        if types is not None and (not isinstance(types, list | tuple) or not {*map(str, types)} <= _INDEXED):
            raise RelposValueError(f"layer_types: expected indexed_attention, found {types!r}")
    plan = rope.plan(ropes, turning, layout="interleaved" if interleaved else "half", before=still)
    return LayerAttention(
        keys.model_type,
        part,
        layer,
        layers=check.integer("num_hidden_layers", layers, 1),
        heads=heads,
        kv_heads=heads,
        head_dim=still + turning,
        value_dim=divided(keys, "hidden_size", heads) if values is None else check.integer("v_head_dim", values, 1),
        scale=scale,
        causal=True,
        schemes=() if keys.model_type == "kimi_linear" else (plan,),
        needs=needs,
        query_scale=temperature,
        before=(latent, Told("a gate beside the queries (q_gate_proj)")) if keys.model_type == "axk2" else (latent,),
        address=divmod(layer, 2) if keys.model_type == "longcat_flash" else (),
        notes=(*notes, *ropes.notes),
    )


def _kimi_linear(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Kimi Linear: latent attention without positions, in some layers; early files count them from 1."""
    layers, inner = count(keys), keys.get("linear_attn_config", None) or {}
    types = keys.listed("layer_types", layers, None)
    if not isinstance(inner, Mapping):
        raise RelposValueError(f"linear_attn_config: expected an object, found {inner!r}")
    listed = inner.get("full_attn_layers")
    if types is None and listed is not None:
        if not isinstance(listed, list | tuple):
            raise RelposValueError(f"full_attn_layers: expected a list, found {listed!r}")
        full = layer + 1 in [check.integer("full_attn_layers", n, 1) for n in listed]
    elif types is not None:
        if types[layer] not in (FULL, LINEAR):
            raise RelposValueError(f"layer_types: expected {FULL} or {LINEAR} for each layer, found {types!r}")
        full = types[layer] == FULL
    else:
        full = layer > 0 and layer % 4 == 0
    if not full:
        raise OtherLayerError(layer, layers, LINEAR, ", which has no softmax and is not understood")
    keys.only("mla_use_nope", True, None)
    return _deepseek(keys, layer, part)


def _mistral4(keys: Keys, ropes: rope.Parameters, share: float) -> tuple[rope.Parameters, Temperature | None]:
    """The share of a head that turns is that of the channels which turn; queries have Ministral 3's temperature."""
    for stored in (ropes.stored.get("partial_rotary_factor"), keys.get("partial_rotary_factor", None)):
        if stored is not None and check.positive("partial_rotary_factor", stored) != share:
            raise RelposValueError(f"partial_rotary_factor: {stored!r}, though {share:g} of a head's channels turn")
    left = {name: value for name, value in ropes.stored.items() if name != "partial_rotary_factor"}
    return replace(ropes, stored=left, share=1.0), ministral3(At(keys, 0, 1)).get("query_scale")


_EITHER = ("deepseek_v3", "kimi_k2", "sarvam_mla", "glm4_moe_lite", "mistral4", "youtu", "axk1")
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}
# Of indexers: which layers take what another one chose, and how they turn queries and keys of their own.
_INDEXERS = (
    *("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "indexer_rope_interleave",
)


register(_gptj, "gptj codegen", kind="Text")
register(_dbrx, "dbrx", kind="Text")
register(_roformer, "roformer", kind="Text")
register(_esm, "esm", kind="Text")
register(
    _deepseek,
    "glm4_moe_lite deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa mistral4 longcat_flash youtu axk1 minicpm3 "
    "sarvam_mla axk2",
    kind="Text",
)
register(_kimi_linear, "kimi_linear", kind="Text", count=count)
# The code beside its weights is that of DeepSeek-V3.
register(_deepseek, "kimi_k2", kind="Text", like="deepseek_v3")
