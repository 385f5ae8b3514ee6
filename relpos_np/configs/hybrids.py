"""Hybrid text models: their layers with softmax attention; layers without one are refused by their type."""

from __future__ import annotations

from typing import Any

from relpos_np._contract import check
from relpos_np.configs import decoders as of
from relpos_np.configs import rope
from relpos_np.configs.decoders import At, Rotating
from relpos_np.configs.families import register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.steps import Gate, Norm, Times
from relpos_np.errors import RelposValueError


def _count(keys: Keys) -> int:
    return keys.integer("num_hidden_layers")


def _listed(at: At, key: str, other: str) -> str:
    """The type of a layer whose number may be in a list."""
    listed = at.keys.get(key)
    if not isinstance(listed, list | tuple):
        raise RelposValueError(f"{key}: expected a list of numbers of layers, found {listed!r}")
    return of.FULL if at.layer in [check.integer(key, n, 0) for n in listed] else other


def _lfm2(at: At) -> str:
    return of.FULL if at.keys.get("full_attn_idxs") is None else _listed(at, "full_attn_idxs", of.CONV)


def _bamba(at: At) -> str:
    return of.LINEAR if at.keys.get("attn_layer_indices") is None else _listed(at, "attn_layer_indices", of.LINEAR)


def _jamba(at: At) -> str:
    """One layer of each period."""
    every, first = at.keys.integer("attn_layer_period"), at.keys.integer("attn_layer_offset", least=0)
    return of.FULL if at.layer % every == first else of.LINEAR


def _olmo(at: At) -> str:
    """Every fourth layer, and the last one of fewer than four."""
    return of.FULL if at.layer % 4 == 3 or at.layer == at.layers - 1 < 3 else of.LINEAR


def _lfm3(at: At) -> str:
    """Layers with and without a window, two of them in four."""
    return {0: of.SLIDING, 2: of.FULL}.get(at.layer % 4, of.CONV) if at.layer else of.CONV


def _gated(at: At) -> dict[str, Any]:
    """LFM 3: a gate per head, if the key asks for it."""
    return {"after": (Gate("g_proj"),) if at.keys.flag("use_attention_gate") else ()}


def _linear(_at: At) -> str:
    return of.LINEAR


def _always(_at: At) -> bool:
    return True


def _unless_rope(at: At) -> bool:
    """Granite 4: positions only where a key asks for them."""
    return bool(at.keys.only("position_embedding_type", "rope", "nope", None) != "rope")


def _no_base(at: At) -> bool:
    """OLMo Hybrid: nothing turns where the base is null."""
    stored = at.keys.get("rope_parameters", {})
    if stored is None:
        raise RelposValueError(
            "rope_parameters: null in a configuration of olmo_hybrid is read in two ways, as no positions and as the "
            'defaults of its class; write {"rope_theta": null}, or {}'
        )
    raw = rope.stored(at.keys)
    return raw["rope_theta"] is None if "rope_theta" in raw else at.keys.get("rope_theta", 10000.0) is None


def _falcon_h1(at: At) -> dict[str, Any]:
    """Every layer has attention beside a state space; keys have a factor."""
    at.keys.only("layers_block_type", ["hybrid"] * at.layers, None)
    factor = at.keys.get("key_multiplier")
    factor = 1.0 if factor is None else check.real("key_multiplier", factor)
    return {} if factor == 1 else {"before": (Times("k", factor, "key_multiplier"),)}


_LETTERS = {"M": of.LINEAR, "*": of.FULL, "E": "moe", "-": "mlp"}


def _blocks(keys: Keys) -> int:
    """Nemotron-H: each block is of one type, by a letter or by name; how many there are is not read."""
    letters = keys.get("hybrid_override_pattern", None)
    types = keys.get("layer_types", None)
    if types is None:
        if letters is not None and (not isinstance(letters, str) or not set(letters) <= _LETTERS.keys()):
            raise RelposValueError(f"hybrid_override_pattern: expected M, *, E and -, found {letters!r}")
        types = [_LETTERS[one] for one in ("ME*-" if letters is None else letters)]
    if not isinstance(types, list | tuple):
        raise RelposValueError(f"layers_block_type: expected a list, found {types!r}")
    keys.config = {**keys.config, "layers_block_type": types, "num_hidden_layers": len(types)}
    return len(types)


def _nemotron_h(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Nemotron-H: attention without positions, in some blocks."""
    _blocks(keys)
    return _NEMOTRON.read(keys, layer, part)


_HEADS, _GATE = (Norm(shift=1.0),), (Gate("q_proj"),)
_DELTA = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_allow_neg_eigval", "attn_output_gate"),
)
_MAMBA = ("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_n_heads", "mamba_d_head")
_BLOCK = (
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_dim", "block_ff_dim"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init"),
    "use_expert_bias",
)
_FACTORS = (
    *("attention_in_multiplier", "attention_out_multiplier", "lm_head_multiplier", "mlp_multipliers"),
    *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "projectors_bias", "layer_types"),
)
_QWEN = Rotating(
    share=0.25,
    pattern=of.alternating(4, "full_attention_interval", other=of.LINEAR),
    others=(of.LINEAR,),
    norm=_HEADS,
    ignored=_DELTA,
    after=_GATE,
)
_QWEN_VL = Rotating(
    share=0.25,
    pattern=of.alternating(4, "full_attention_interval", other=of.LINEAR),
    others=(of.LINEAR,),
    norm=_HEADS,
    mrope=((11, 11, 10), "cyclic"),
    ignored=_DELTA,
    after=_GATE,
)
_LFM = Rotating(
    theta=1e6,
    pattern=_lfm2,
    others=(of.CONV,),
    norm=(Norm(("q_layernorm", "k_layernorm")),),
    ignored=_BLOCK,
)


_NEMOTRON = Rotating(
    pattern=_linear,
    others=(of.LINEAR, "moe", "mlp"),
    still=_always,
    ignored=(*_MAMBA, "time_step_rank", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "chunk_size", "expand"),
    finish=of.unread(sliding_window=None),
)
_TYPES: dict[str, Rotating] = {
    "qwen3_next": _QWEN,
    "qwen3_5_text qwen3_5_moe_text": _QWEN_VL,
    "lfm2": _LFM,
    "lfm2_moe": Rotating(theta=1e6, window="types", others=_LFM.others, norm=_LFM.norm, ignored=_BLOCK),
    "falcon_h1": Rotating(ignored=_MAMBA + _FACTORS, finish=_falcon_h1),
    "bamba": Rotating(
        share=0.5, pattern=_bamba, others=(of.LINEAR,), ignored=_MAMBA, finish=of.unread(partial_rotary_factor=0.5)
    ),
    "jamba": Rotating(
        pattern=_jamba, others=(of.LINEAR,), still=_always, ignored=_MAMBA, finish=of.unread(sliding_window=None)
    ),
    "granitemoehybrid": Rotating(
        pattern=_linear,
        others=(of.LINEAR,),
        still=_unless_rope,
        ignored=_MAMBA,
        finish=of.scaled_by,
    ),
    "minimax": Rotating(
        theta=1e6,
        window="all",
        pattern=of.alternating(2, first=True, other=of.LINEAR),
        others=(of.LINEAR,),
        ignored=("block_size",),
    ),
    "olmo_hybrid": Rotating(
        pattern=_olmo,
        others=(of.LINEAR,),
        still=_no_base,
        norm=(Norm(each=False),),
        ignored=_DELTA,
    ),
}
_TYPES |= {
    "lara_mini": Rotating(
        window="types",
        pattern=of.cycled(of.LINEAR, of.SLIDING, of.LINEAR, of.FULL, of.SLIDING),
        kinds=(of.FULL, of.SLIDING),
        others=(of.LINEAR,),
        still=of.full_still,
        norm=(Norm(),),
        ignored=_DELTA,
    ),
    "lfm3": Rotating(
        theta=1e6,
        window="types",
        pattern=_lfm3,
        kinds=(of.FULL, of.SLIDING),
        others=(of.CONV,),
        norm=(Norm(),),
        ignored=("use_sandwich_norm", "use_attention_gate"),
        finish=_gated,
    ),
}
for _names, _traits in _TYPES.items():
    register(_traits.read, _names, kind="Text", count=_count if _traits.others else None)
register(_nemotron_h, "nemotron_h", kind="Text", count=_blocks)
