"""Hybrid text models: their layers with softmax attention; layers without one are refused by their type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


def _listed(at: At, key: str, other: str) -> str:
    """The type of a layer whose number may be in a list."""
    return of.FULL if at.layer in at.keys.numbers(key) else other


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


def _recurrent(at: At) -> str:
    """RecurrentGemma: two layers without attention and one with a window, or as the key has it."""
    kinds = at.keys.get("block_types", None) or ("recurrent", "recurrent", "attention")
    if not isinstance(kinds, list | tuple) or not {*map(str, kinds)} <= {"recurrent", "attention"}:
        raise RelposValueError(f"block_types: expected recurrent and attention, found {kinds!r}")
    return of.SLIDING if kinds[at.layer % len(kinds)] == "attention" else of.LINEAR


_HYBRID = "hybrid"
# Which objects write beside the keys that say them.
_SIZES = ("attention_hidden_size", "kv_channels", "mamba_headdim", "num_query_groups")


def _zamba(at: At) -> str:
    """Zamba: the third layer, then one of each period."""
    every, first = at.keys.integer("attn_layer_period"), at.keys.integer("attn_layer_offset", least=0)
    return _HYBRID if at.layer == 2 or (at.layer > 2 and (at.layer - 3) % every == first) else of.LINEAR


def _zamba2(at: At) -> str:
    """Zamba 2: every sixth layer of the first 43, and two later ones, where 54 have no types."""
    return _HYBRID if at.layer in (*range(6, 43, 6), 47, 51) else of.LINEAR


def _unless_mem_rope(at: At) -> bool:
    return not at.keys.flag("use_mem_rope", False)


def _doubled(at: At) -> dict[str, Any]:
    """Zamba: the input is twice as wide, and so is a head, but for its scale."""
    dim = at.keys.get("attention_head_dim", None)
    dim = 2 * at.keys.integer("hidden_size") // at.found["heads"] if dim is None else dim
    dim = check.integer("attention_head_dim", dim, 1)
    return {"head_dim": dim, "value_dim": dim, "scale": (dim / 2) ** -0.5}


def _minimax_m3(at: At) -> str:
    """MiniMax M3: early files have a number for each layer."""
    inner = at.keys.get("sparse_attention_config", None) or {}
    listed = inner.get("sparse_attention_freq") if isinstance(inner, Mapping) else inner
    if listed is None:
        return of.FULL
    if not isinstance(listed, list | tuple) or len(listed) < at.layers:
        raise RelposValueError(f"sparse_attention_freq: expected one for each of {at.layers} layers, found {listed!r}")
    return "minimax_m3_sparse" if listed[at.layer] else of.FULL


def _lfm3(at: At) -> str:
    """Layers with and without a window, two of them in four."""
    return {0: of.SLIDING, 2: of.FULL}.get(at.layer % 4, of.CONV) if at.layer else of.CONV


def _gated(at: At) -> dict[str, Any]:
    """LFM 3: a gate per head, if the key asks for it."""
    return {"after": (Gate("g_proj"),) if at.keys.flag("use_attention_gate") else ()}


def _mllama(at: At) -> str:
    """Llama 3.2 Vision: some layers attend the image."""
    if at.keys.get("cross_attention_layers") is None:
        return "cross_attention" if at.layer in range(3, 40, 5) else of.FULL
    return of.FULL if _listed(at, "cross_attention_layers", "") == "" else "cross_attention"


_NO_ATTENTION = "no attention"
# Of a block's attention, what is not understood where it is something else.
_SEARCHED = (
    *("sparsify", "window_length", "num_sink_tokens", "unshifted_sink"),
    "use_prefill_window_in_sink_attention",
)


def _block(at: At) -> Mapping[str, Any]:
    """Nemotron-NAS: each layer's attention has an object of its own."""
    listed = at.keys.get("block_configs")
    try:
        own = listed[at.layer]["attention"]
    except (TypeError, LookupError):
        raise RelposValueError("block_configs: expected an object with attention for each layer") from None
    if not isinstance(own, Mapping):
        raise RelposValueError(f"block_configs: expected an object for attention, found {own!r}")
    for name in _SEARCHED:
        if own.get(name):
            raise RelposValueError(f"block_configs: {name} {own[name]!r} of layer {at.layer} is not understood")
    return own


def _searched(at: At) -> str:
    own = _block(at)
    return _NO_ATTENTION if own.get("no_op") or own.get("replace_with_linear") else of.FULL


def _grouped(at: At) -> dict[str, Any]:
    """So many heads of queries share one of keys."""
    size = check.integer("n_heads_in_group", _block(at).get("n_heads_in_group"), 1)
    if at.found["heads"] % size:
        raise RelposValueError(f"n_heads_in_group: {at.found['heads']} heads are no multiple of {size}")
    return {"kv_heads": at.found["heads"] // size}


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
_DELTA = ("linear_allow_neg_eigval", "attn_output_gate", "output_gate_type")
_MAMBA = ("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_n_heads", "mamba_d_head")
_BLOCK = (
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "block_dim", "block_ff_dim"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init"),
    "use_expert_bias",
)
_QWEN = Rotating(
    share=0.25,
    pattern=of.alternating(4, "full_attention_interval", other=of.LINEAR),
    others=(of.LINEAR,),
    norm=_HEADS,
    ignored=_DELTA,
    after=_GATE,
)
_QWEN_VL = replace(_QWEN, mrope=((11, 11, 10), "cyclic"))
_LFM = Rotating(
    theta=1e6,
    pattern=_lfm2,
    others=(of.CONV,),
    norm=(Norm(("q_layernorm", "k_layernorm")),),
    ignored=_BLOCK,
)


_NEMOTRON = Rotating(
    pattern=of.cycled(of.LINEAR),
    others=(of.LINEAR, "moe", "mlp"),
    still=_always,
    ignored=(*_MAMBA, "time_step_rank", "mtp_hybrid_override_pattern"),
    finish=of.unread(sliding_window=None),
)
_TYPES: dict[str, Rotating] = {
    "qwen3_next": _QWEN,
    "qwen3_5_text qwen3_5_moe_text": _QWEN_VL,
    "lfm2": _LFM,
    "lfm2_moe": Rotating(theta=1e6, window="types", others=_LFM.others, norm=_LFM.norm, ignored=_BLOCK),
    "falcon_h1": Rotating(ignored=(*_MAMBA, "layer_types"), finish=_falcon_h1),
    "bamba": Rotating(
        share=0.5, pattern=_bamba, others=(of.LINEAR,), ignored=_MAMBA, finish=of.unread(partial_rotary_factor=0.5)
    ),
    "jamba": Rotating(
        pattern=_jamba, others=(of.LINEAR,), still=_always, ignored=_MAMBA, finish=of.unread(sliding_window=None)
    ),
    "granitemoehybrid": Rotating(
        pattern=of.cycled(of.LINEAR),
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
    "recurrent_gemma": Rotating(
        share=0.5,
        window="types",
        pattern=_recurrent,
        kinds=(of.SLIDING,),
        others=(of.LINEAR,),
        ignored=("final_w_init_variance_scale",),
    ),
    "zamba": Rotating(
        pattern=_zamba,
        kinds=(_HYBRID,),
        others=(of.LINEAR,),
        still=_always,
        ignored=(*_MAMBA, "attention_hidden_size", "attn_layer_period", "attn_layer_offset"),
        sized=_doubled,
    ),
    "zamba2": Rotating(
        pattern=_zamba2,
        kinds=(_HYBRID,),
        others=(of.LINEAR,),
        still=_unless_mem_rope,
        ignored=(*_MAMBA, *_SIZES),
        sized=_doubled,
        notes=("adapters of a layer add to its projections, which it shares with others",),
    ),
    "mllama_text_model": Rotating(
        theta=5e5,
        pattern=_mllama,
        others=("cross_attention",),
        # How many, which the list of them says.
        ignored=("vision_num_cross_attention_layers",),
    ),
    "nemotron-nas": Rotating(pattern=_searched, others=(_NO_ATTENTION,), sized=_grouped, ignored=("block_configs",)),
    "minimax_m3_vl_text": Rotating(
        theta=5e6,
        share=1.0,
        pattern=_minimax_m3,
        others=("minimax_m3_sparse",),
        norm=(Norm(shift=1.0),),
        # The number of turning channels, which the class does not read, is beside its share.
        ignored=("rotary_dim",),
    ),
    "lfm3": Rotating(
        theta=1e6,
        window="types",
        pattern=_lfm3,
        kinds=(of.FULL, of.SLIDING),
        others=(of.CONV,),
        norm=(Norm(),),
        ignored=("use_attention_gate",),
        finish=_gated,
    ),
}
for _names, _traits in _TYPES.items():
    like = "llama" if _names == "nemotron-nas" else ""
    register(_traits.read, _names, kind="Text", count=of.count if _traits.others else None, like=like)
register(_nemotron_h, "nemotron_h", kind="Text", count=_blocks)
