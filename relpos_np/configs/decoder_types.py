"""Rotary model types: the traits of each."""

from __future__ import annotations

from typing import Any

from relpos_np._contract import check
from relpos_np.configs import decoders as of
from relpos_np.configs import rope
from relpos_np.configs.decoders import Rotating
from relpos_np.configs.families import FAMILIES, register
from relpos_np.configs.keys import Keys
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import SchemePlan
from relpos_np.configs.steps import Gate, Norm, Told
from relpos_np.errors import RelposValueError

_HEADS = (Norm(),)
_ALL = (Norm(each=False),)
_LAYERNORM = (Norm(("q_layernorm", "k_layernorm"), kind="layer"),)
_ROPES = dict.fromkeys((of.FULL, of.SLIDING), "rope_theta")


def _laguna(at: of.At) -> dict[str, Any]:
    """Layers may have query heads of their own."""
    heads = at.keys.listed("num_attention_heads_per_layer", at.layers, None)
    return {} if heads is None else {"heads": check.integer("num_attention_heads_per_layer", heads[at.layer], 1)}


def _flint_pattern(at: of.At) -> str:
    """Flint: the first two layers, every fourth and the last are full."""
    return of.FULL if at.layer < 2 or at.layer % 4 == 1 or at.layer == at.layers - 1 else of.SLIDING


def _null_still(at: of.At) -> bool:
    """Cohere Compass: layers without positions have null for their rotary parameters."""
    return rope.stored(at.keys).get(at.kind, at) is None


def _granite_swa(at: of.At) -> dict[str, Any]:
    """Granite with sinks."""
    return of.scaled_by(at) | of.sinks(at)


_TYPES: dict[str, Rotating] = {
    "llama arcee seed_oss iquestcoder aria_text jais2 internlm3": Rotating(),
    "exaone": Rotating(theta=5e5),
    "bitnet": Rotating(theta=5e5, after=(Norm(("attn_sub_norm",), "o", each=False),)),
    "solar_open": Rotating(theta=1e6, share=1.0),
    "apertus": Rotating(theta=12e6, norm=_HEADS),
    "mistral starcoder2": Rotating(window="all"),
    "mixtral": Rotating(theta=1e6, window="all"),
    "ministral": Rotating(window="types", pattern=of.windows_if_any),
    "ministral3": Rotating(
        theta=1e6, window="all", elsewhere=("llama_4_scaling_beta", "max_position_embeddings"), finish=of.ministral3
    ),
    "qwen2": Rotating(window="types", switch=True, pattern=of.late_windows),
    "qwen2_moe": Rotating(window="types", switch=True, pattern=of.early_windows),
    "qwen3": Rotating(window="types", switch=True, pattern=of.late_windows, norm=_HEADS),
    "qwen3_moe": Rotating(window="all", switch=True, norm=_HEADS, ignored=("max_window_layers",)),
    "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker": Rotating(
        theta=1e6,
        window="types",
        switch=True,
        pattern=of.late_windows,
        mrope=((16, 24, 24), "chunks"),
        ignored=("spatial_merge_size",),
    ),
    "qwen3_vl_text": Rotating(theta=5e5, norm=_HEADS, mrope=((24, 20, 20), "cyclic")),
    "qwen3_vl_moe_text": Rotating(
        theta=5e5, norm=_HEADS, mrope=((24, 20, 20), "cyclic"), finish=of.unread(sliding_window=None)
    ),
    "qwen3_omni_moe_text": Rotating(
        theta=1e6,
        norm=_HEADS,
        mrope=((24, 20, 20), "cyclic"),
        elsewhere=("interleaved",),
        finish=of.unread(sliding_window=None),
    ),
    "gemma": Rotating(finish=of.gemma),
    "gemma2": Rotating(window="types", pattern=of.alternating(2), finish=of.gemma2),
    "gemma3_text": Rotating(
        theta={of.FULL: 1e6, of.SLIDING: 1e4},
        theta_keys={of.FULL: "rope_theta", of.SLIDING: "rope_local_base_freq"},
        plain=(of.SLIDING,),
        window="types",
        pattern=of.alternating(6, "sliding_window_pattern"),
        norm=(Norm(shift=1.0),),
        finish=of.gemma3,
    ),
    "phi persimmon": Rotating(share=0.5, norm=_LAYERNORM, normed="qk_layernorm"),
    "phi3": Rotating(share=1.0, window="all", finish=of.phi3),
    "phimoe": Rotating(theta=1e6, window="all", finish=of.phimoe),
    "stablelm": Rotating(share=0.25, norm=_LAYERNORM, normed="qk_layernorm"),
    "nemotron": Rotating(share=0.5),
    "gpt_neox": Rotating(share=0.25, theta_keys="rotary_emb_base", share_key="rotary_pct"),
    "olmo": Rotating(finish=of.clipped),
    "olmo2": Rotating(norm=_ALL),
    "olmo3": Rotating(
        theta=5e5,
        theta_keys=_ROPES,
        plain=(of.SLIDING,),
        window="types",
        pattern=of.alternating(4),
        norm=_ALL,
        finish=of.unread(rope_theta=5e5),
    ),
    "olmoe": Rotating(norm=_ALL, finish=of.clipped),
    "flex_olmo": Rotating(theta=5e5, norm=_ALL),
    "cohere": Rotating(theta=5e5, layout="interleaved", norm=(Norm(kind="layer"),), normed="use_qk_norm"),
    "cohere2": Rotating(
        layout="interleaved",
        window="types",
        pattern=of.alternating(4, "sliding_window_pattern"),
        still=of.full_still,
        ignored=("layer_switch", "order_of_interleaved_layers"),
    ),
    "granite granitemoe granitemoeshared": Rotating(finish=of.scaled_by),
    "glm glm4": Rotating(share=0.5, layout="interleaved"),
    "glm4_moe": Rotating(share=0.5, norm=_HEADS, normed="use_qk_norm"),
    "sarvam_moe": Rotating(theta=8e6, share=1.0, norm=_HEADS, normed="use_qk_norm"),
    "ernie4_5 ernie4_5_moe": Rotating(theta=5e5, layout="interleaved"),
    "helium": Rotating(theta=1e5, layout="interleaved"),
    "exaone4 exaone_moe": Rotating(window="types", pattern=of.exaone_pattern, still=of.exaone_still, norm=_HEADS),
    "smollm3": Rotating(theta=2e6, window="types", switch=True, pattern=of.smollm_pattern, still=of.listed_still),
    "llama4_text": Rotating(
        theta=5e5,
        layout="interleaved",
        pattern=of.llama4_pattern,
        kinds=(of.FULL, of.CHUNKED),
        magnitude="use_qk_norm",
        # After turning, which changes no length: it may as well come before.
        norm=(Norm(()),),
        normed="use_qk_norm",
        still=of.listed_still,
        finish=of.llama4,
    ),
    "gpt_oss": Rotating(theta=15e4, window="types", pattern=of.alternating(2), finish=of.sinks),
    "minimax_m2": Rotating(theta=5e6, share=1.0, norm=_ALL, turning="rotary_dim", finish=of.minimax_m2),
    "dots1": Rotating(window="types", pattern=of.windows_after, norm=_HEADS),
    "vaultgemma": Rotating(window="types", pattern=of.alternating(2), finish=of.capped),
    "cwm": Rotating(theta=1e6, window="types", pattern=of.alternating(4, first=True)),
    "hy_v3": Rotating(
        theta=11158840.0,
        norm=_HEADS,
        finish=of.hy_v3,
    ),
    "nanochat": Rotating(backwards=True, magnitude=False, norm=(Norm(()),)),
    "mimo_v2_flash": Rotating(
        theta={of.FULL: 5e6, of.SLIDING: 1e4},
        theta_keys={of.FULL: "rope_theta", of.SLIDING: "swa_rope_theta"},
        share=0.334,
        pattern=of.mimo_pattern,
        finish=of.mimo,
    ),
    "modernbert-decoder": Rotating(
        theta={of.FULL: 16e4, of.SLIDING: 1e4},
        theta_keys={of.FULL: "global_rope_theta", of.SLIDING: "local_rope_theta"},
        pattern=of.alternating(3, "global_attn_every_n_layers", first=True),
        finish=of.modernbert_decoder,
    ),
    "gpt_neox_japanese": Rotating(share=1.0, theta_keys="rotary_emb_base", share_key="rotary_pct"),
    "afmoe": Rotating(
        window="types",
        pattern=of.alternating(4, "global_attn_every_n_layers"),
        still=of.full_still,
        norm=_HEADS,
        after=(Gate("gate_proj"),),
    ),
    "cohere2_moe": Rotating(
        layout="interleaved",
        window="types",
        pattern=of.cohere2_moe_pattern,
        still=of.cohere2_moe_still,
        finish=of.unread(rope_scaling=None),
    ),
    "cohere_compass_text": Rotating(
        window="types",
        pattern=of.cycled(of.FULL),
        still=_null_still,
        mrope=((24, 20, 20), "cyclic"),
    ),
    "mellum": Rotating(
        theta={of.FULL: 5e5, of.SLIDING: 1e4},
        share=1.0,
        window="types",
        pattern=of.cycled(of.FULL),
        norm=_HEADS,
        finish=of.unread(rope_theta=None, partial_rotary_factor=1.0),
    ),
    "hyperclovax": Rotating(finish=of.scaled_by),
    "hunyuan_v1_dense hunyuan_v1_moe": Rotating(early=True, norm=(Norm(("query_layernorm", "key_layernorm")),)),
    "granite_swa granitemoe_swa": Rotating(
        window="types", pattern=of.alternating(4, first=True), thetas="layer_rope_theta", finish=_granite_swa
    ),
    "flint": Rotating(window="types", pattern=_flint_pattern, still=of.full_still, norm=_HEADS, finish=of.sinks),
    "kolibri1": Rotating(window="types", pattern=of.alternating(5), still=of.exaone_still, norm=_HEADS),
    "phi4_multimodal": Rotating(share=1.0, window="all", ignored=("vision_config",), finish=of.phi3),
    "apertus1p5_text": Rotating(theta=12e6, norm=_HEADS),
    "emu3_text_model": Rotating(theta=1e6),
    "moshi": Rotating(
        ignored=("sliding_window",),
        notes=("sliding_window: the keys that transformers keeps in a cache; its mask has none",),
    ),
    "eurobert": Rotating(causal=False),
    "nomic_bert": Rotating(theta=1000.0, causal=False),
    "gte": Rotating(theta=16e4, causal=False),
    "modernbert": Rotating(
        theta={of.FULL: 16e4, of.SLIDING: 1e4},
        theta_keys={of.FULL: "global_rope_theta", of.SLIDING: "local_rope_theta"},
        causal=False,
        pattern=of.alternating(3, "global_attn_every_n_layers", first=True),
        finish=of.modernbert,
    ),
}

for _names, _traits in _TYPES.items():
    register(_traits.read, _names, kind="Text")
_LAGUNA = Rotating(
    theta={of.FULL: 5e5, of.SLIDING: 1e4},
    share=1.0,
    window="types",
    pattern=of.cycled(of.FULL),
    norm=_HEADS,
    sized=_laguna,
    after=(Gate("g_proj", activation="softplus"),),
    finish=of.unread(partial_rotary_factor=1.0),
)
# Of a file that has its own none is added.
_SHARES = {
    of.FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    of.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
register(_LAGUNA.read, "laguna", kind="Text", defaults={"rope_parameters": _SHARES})
register(Rotating(theta=5e5).read, "csm csm_depth_decoder_model", kind="Speech and music")
# Types of files whose code beside the weights has the attention of a class.
_SAME = {
    "internlm2 xverse sparsellama PanguEmbedded bailing_moe": "llama",
    "mimo": "qwen2",
    "gpt_neox_reward_model": "gpt_neox",
}
for _names, _class in _SAME.items():
    register(FAMILIES[_class].read, _names, kind="Text", like=_class)


def _chatglm(at: of.At) -> dict[str, Any]:
    """ChatGLM 2 and later, in their own format: one head of keys for each query, or groups."""
    keys = at.keys
    keys.only("original_rope", True, None)
    keys.ignore("apply_query_key_layer_scaling", "multi_query_attention")  # of a factor that is taken out again
    if keys.get("rope_ratio", None) not in (None, 1):
        raise RelposValueError(
            f"rope_ratio: {keys.get('rope_ratio')!r} is read in two ways by published codes of chatglm, as a factor on "
            "the base and as one on positions: open the config.json of the same model as transformers stores it, of "
            "type glm"
        )
    return {} if keys.flag("multi_query_attention", False) else {"kv_heads": at.found["heads"]}


def _qwen(at: of.At) -> dict[str, Any]:
    """Qwen 1: what its code does to texts longer than those of training, others do not."""
    changed = tuple(name for name in ("use_dynamic_ntk", "use_logn_attn") if at.keys.flag(name, False))
    if changed:
        raise RelposValueError(
            f"{', '.join(changed)}: True in a configuration of qwen changes texts of more than seq_length tokens, in "
            f"which published codes differ; ignore={changed} reads what they all do with shorter ones"
        )
    return {}


_TWICE = Told(
    "q and k attend twice, to the first half of the heads of v and to the second, each half repeated; the layer takes "
    "the difference of heads (lambda_q1 ...) and a norm of it"
)
_MIXED = Told(
    "heads of q from the experts of a token, sorted by heads of k: those of all experts for the first, then the second"
)


def _differential(_at: of.At) -> dict[str, Any]:
    return {"before": (_TWICE,)}


def _experts(_at: of.At) -> dict[str, Any]:
    return {"before": (_MIXED,)}


def _jetmoe(keys: Keys, layer: int, part: str) -> LayerAttention:
    """JetMoE: each expert that a token has makes as many heads of queries as there are of keys."""
    heads = keys.integer("num_key_value_heads") * keys.integer("num_experts_per_tok")
    keys.only("num_attention_heads", heads, None)
    keys.config = {**keys.config, "num_attention_heads": heads}
    return Rotating(finish=_experts).read(keys, layer, part)


def _baichuan(keys: Keys, layer: int, part: str) -> LayerAttention:
    """Baichuan: the model with 7 billion weights turns, that with 13 has ALiBi; only its width says so."""
    width = keys.integer("hidden_size")
    if width == 5120:
        plan = SchemePlan("ALiBi", {"form": "key"})
        return LayerAttention(keys.model_type, part, layer, causal=True, schemes=(plan,), **of.sizes(keys))
    if width != 4096:
        raise RelposValueError(
            f"hidden_size: {width} in a configuration of baichuan says neither rotary positions (4096) nor ALiBi (5120)"
        )
    return Rotating().read(keys, layer, part)


_GPT = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
_GLM = {"num_layers": "num_hidden_layers", "kv_channels": "head_dim", "multi_query_group_num": "num_key_value_heads"}
register(_baichuan, "baichuan", kind="Text", like="llama")
register(_jetmoe, "jetmoe", kind="Text")
register(Rotating(finish=_differential).read, "diffllama", kind="Text")
for _name, _traits, _class, _others in (
    ("chatglm", Rotating(share=0.5, layout="interleaved", sized=_chatglm), "llama", _GLM),
    ("qwen", Rotating(theta_keys="rotary_emb_base", share_key="rotary_pct", share=1.0, finish=_qwen), "llama", {}),
    ("mixformer-sequential", Rotating(turning="rotary_dim"), "gptj", _GPT),
    (
        "molmo",
        Rotating(norm=_ALL, normed="attention_layer_norm", ignored=("use_position_ids",), finish=of.clipped),
        "olmoe",
        {},
    ),
):
    no_norm = {"attention_layer_norm": False} if _name == "molmo" else {}
    register(_traits.read, _name, kind="Text", like=_class, aliases=_others, defaults=no_norm)
register(
    FAMILIES["stablelm"].read,
    "stablelm_epoch",
    kind="Text",
    like="stablelm",
    aliases={"rope_pct": "partial_rotary_factor"},
)
register(_TYPES["phi3"].read, "phi3_v", kind="Text", like="phi3")
