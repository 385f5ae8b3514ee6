"""Rotary model types: their traits, and the defaults of their configuration classes."""

from __future__ import annotations

from typing import Any

from relpos_np.configs import decoders as of
from relpos_np.configs.decoders import Rotating
from relpos_np.configs.families import register

Defaults = dict[str, Any]


def _sizes(hidden: int, layers: int, heads: int, kv: int | None, longest: int, head_dim: int | None = None) -> Defaults:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": longest,
        "head_dim": head_dim,
    }


_HEADS = "RMS norm of q and k, per head (q_norm, k_norm)"
_ALL = "RMS norm of q and k, over all heads (q_norm, k_norm)"
_LAYERNORM = "layer norm of q and k, per head (q_layernorm, k_layernorm)"
_ROPES = dict.fromkeys((of.FULL, of.SLIDING), "rope_theta")
_SWITCHED = {"use_sliding_window": False, "sliding_window": 4096}

_TYPES: dict[str, tuple[Rotating, Defaults]] = {
    "llama": (Rotating(), _sizes(4096, 32, 32, None, 2048)),
    "arcee": (Rotating(), _sizes(2560, 32, 32, None, 4096)),
    "seed_oss": (Rotating(), _sizes(4096, 64, 80, 8, 524288, 128)),
    "bitnet": (Rotating(theta=5e5), _sizes(2560, 30, 20, 5, 2048)),
    "exaone": (Rotating(theta=5e5), _sizes(4096, 32, 32, 8, 4096)),
    "iquestcoder": (Rotating(), _sizes(5120, 80, 40, 8, 131072, 128)),
    "aria_text": (Rotating(), _sizes(4096, 32, 32, None, 2048)),
    "solar_open": (Rotating(theta=1e6, share=1.0), _sizes(4096, 48, 64, 8, 131072, 128)),
    "jais2": (Rotating(), _sizes(3328, 32, 26, None, 8192)),
    "apertus": (
        Rotating(theta=12e6, norm=_HEADS),
        _sizes(4096, 32, 32, None, 65536)
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "mistral": (Rotating(window="all"), _sizes(4096, 32, 32, 8, 131072) | {"sliding_window": 4096}),
    "mixtral": (Rotating(theta=1e6, window="all"), _sizes(4096, 32, 32, 8, 131072) | {"sliding_window": None}),
    "ministral": (
        Rotating(window="types", pattern=of.windows_if_any),
        _sizes(4096, 32, 32, 8, 131072) | {"sliding_window": 4096},
    ),
    "ministral3": (
        Rotating(
            theta=1e6, window="all", elsewhere=("llama_4_scaling_beta", "max_position_embeddings"), finish=of.ministral3
        ),
        _sizes(4096, 34, 32, 8, 262144, 128)
        | {
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": (
        Rotating(window="types", switch=True, pattern=of.late_windows),
        _sizes(4096, 32, 32, 32, 32768) | _SWITCHED | {"max_window_layers": 28},
    ),
    "qwen2_moe": (
        Rotating(window="types", switch=True, pattern=of.early_windows),
        _sizes(2048, 24, 16, 16, 32768) | _SWITCHED | {"max_window_layers": 28},
    ),
    "qwen3": (
        Rotating(window="types", switch=True, pattern=of.late_windows, norm=_HEADS),
        _sizes(4096, 32, 32, 32, 32768, 128) | _SWITCHED | {"max_window_layers": 28},
    ),
    "qwen3_moe": (
        Rotating(window="all", switch=True, norm=_HEADS, ignored=("max_window_layers",)),
        _sizes(2048, 24, 32, 4, 32768) | _SWITCHED,
    ),
    "qwen2_vl_text": (
        Rotating(theta=1e6, window="types", switch=True, pattern=of.late_windows, mrope=((16, 24, 24), "chunks")),
        _sizes(8192, 80, 64, 8, 32768) | _SWITCHED | {"max_window_layers": 80},
    ),
    "qwen2_5_vl_text": (
        Rotating(theta=1e6, window="types", switch=True, pattern=of.late_windows, mrope=((16, 24, 24), "chunks")),
        _sizes(8192, 80, 64, 8, 32768) | _SWITCHED | {"max_window_layers": 80},
    ),
    "qwen3_vl_text": (
        Rotating(theta=5e5, norm=_HEADS, mrope=((24, 20, 20), "cyclic")),
        _sizes(4096, 32, 32, 32, 128000, 128),
    ),
    "qwen3_vl_moe_text": (
        Rotating(theta=5e5, norm=_HEADS, mrope=((24, 20, 20), "cyclic"), finish=of.windowless),
        _sizes(2048, 24, 16, 16, 128000),
    ),
    "gemma": (
        Rotating(finish=of.gemma),
        _sizes(3072, 28, 16, 16, 8192, 256) | {"use_bidirectional_attention": None},
    ),
    "gemma2": (
        Rotating(window="types", pattern=of.alternating(2), finish=of.gemma2),
        _sizes(2304, 26, 8, 4, 8192, 256)
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0}
        | {"use_bidirectional_attention": None},
    ),
    "gemma3_text": (
        Rotating(
            theta={of.FULL: 1e6, of.SLIDING: 1e4},
            theta_keys={of.FULL: "rope_theta", of.SLIDING: "rope_local_base_freq"},
            plain=(of.SLIDING,),
            window="types",
            pattern=of.alternating(6, "sliding_window_pattern"),
            norm=_HEADS,
            finish=of.gemma3,
        ),
        _sizes(2304, 26, 8, 4, 131072, 256)
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": None}
        | {"use_bidirectional_attention": False},
    ),
    "phi": (
        Rotating(share=0.5, norm=f"?qk_layernorm {_LAYERNORM}"),
        _sizes(2048, 24, 32, None, 2048) | {"qk_layernorm": False},
    ),
    "phi3": (
        Rotating(share=1.0, window="all", finish=of.phi3),
        _sizes(3072, 32, 32, None, 4096) | {"original_max_position_embeddings": 4096, "sliding_window": None},
    ),
    "phimoe": (
        Rotating(theta=1e6, window="all", finish=of.phimoe),
        _sizes(4096, 32, 32, 8, 131072) | {"sliding_window": None},
    ),
    "stablelm": (
        Rotating(share=0.25, norm=f"?qk_layernorm {_LAYERNORM}"),
        _sizes(2560, 32, 32, 32, 4096) | {"qk_layernorm": False},
    ),
    "persimmon": (
        Rotating(share=0.5, norm=f"?qk_layernorm {_LAYERNORM}"),
        _sizes(4096, 36, 64, None, 16384) | {"qk_layernorm": True},
    ),
    "starcoder2": (Rotating(window="all"), _sizes(3072, 30, 24, 2, 4096) | {"sliding_window": None}),
    "nemotron": (Rotating(share=0.5), _sizes(6144, 32, 48, None, 4096)),
    "gpt_neox": (
        Rotating(share=0.25, theta_keys="rotary_emb_base", share_key="rotary_pct"),
        _sizes(6144, 44, 64, None, 2048),
    ),
    "olmo": (Rotating(finish=of.clipped), _sizes(4096, 32, 32, None, 2048) | {"clip_qkv": None}),
    "olmo2": (Rotating(norm=_ALL), _sizes(4096, 32, 32, None, 2048)),
    "olmo3": (
        Rotating(
            theta=5e5,
            theta_keys=_ROPES,
            plain=(of.SLIDING,),
            window="types",
            pattern=of.alternating(4),
            norm=_ALL,
        ),
        _sizes(4096, 32, 32, None, 2048) | {"sliding_window": 4096},
    ),
    "olmoe": (Rotating(norm=_ALL, finish=of.clipped), _sizes(2048, 16, 16, None, 4096) | {"clip_qkv": None}),
    "flex_olmo": (Rotating(theta=5e5, norm=_ALL), _sizes(4096, 32, 32, None, 4096)),
    "cohere": (
        Rotating(theta=5e5, layout="interleaved", norm="?use_qk_norm layer norm of q and k (q_norm, k_norm)"),
        _sizes(8192, 40, 64, None, 8192) | {"use_qk_norm": False},
    ),
    "cohere2": (
        Rotating(
            layout="interleaved",
            window="types",
            pattern=of.alternating(4, "sliding_window_pattern"),
            still=of.full_still,
            ignored=("layer_switch", "order_of_interleaved_layers"),
        ),
        _sizes(8192, 40, 64, None, 8192) | {"sliding_window": 4096},
    ),
    "granite": (Rotating(finish=of.scaled_by), _sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "granitemoe": (Rotating(finish=of.scaled_by), _sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0}),
    "granitemoeshared": (
        Rotating(finish=of.scaled_by),
        _sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0},
    ),
    "glm": (Rotating(share=0.5, layout="interleaved"), _sizes(4096, 40, 32, 2, 131072, 128)),
    "glm4": (Rotating(share=0.5, layout="interleaved"), _sizes(4096, 40, 32, 2, 131072, 128)),
    "glm4_moe": (
        Rotating(share=0.5, norm=f"?use_qk_norm {_HEADS}"),
        _sizes(4096, 46, 96, 8, 131072) | {"use_qk_norm": False},
    ),
    "sarvam_moe": (
        Rotating(theta=8e6, share=1.0, norm=f"?use_qk_norm {_HEADS}"),
        _sizes(4096, 19, 64, 4, 131072, 64) | {"use_qk_norm": True},
    ),
    "ernie4_5": (Rotating(theta=5e5, layout="interleaved"), _sizes(1024, 18, 16, 2, 131072, 128)),
    "ernie4_5_moe": (Rotating(theta=5e5, layout="interleaved"), _sizes(2560, 28, 20, 4, 131072)),
    "helium": (Rotating(theta=1e5, layout="interleaved"), _sizes(2560, 24, 20, 20, 4096, 128)),
    "exaone4": (
        Rotating(window="types", pattern=of.exaone_pattern, still=of.exaone_still, norm=_HEADS),
        _sizes(4096, 32, 32, 32, 2048) | {"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": (
        Rotating(theta=2e6, window="types", switch=True, pattern=of.smollm_pattern, still=of.listed_still),
        _sizes(2048, 36, 16, 4, 32768)
        | {"use_sliding_window": False, "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4},
    ),
    "llama4_text": (
        Rotating(
            theta=5e5,
            layout="interleaved",
            pattern=of.llama4_pattern,
            kinds=(of.FULL, of.CHUNKED),
            magnitude="use_qk_norm",
            still=of.listed_still,
            finish=of.llama4,
        ),
        _sizes(5120, 48, 40, 8, 131072, 128)
        | {"no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "use_qk_norm": True}
        | {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    ),
    "gpt_oss": (
        Rotating(theta=15e4, window="types", pattern=of.alternating(2), finish=of.gpt_oss),
        _sizes(2880, 36, 64, 8, 131072, 64)
        | {
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "minimax_m2": (
        Rotating(theta=5e6, share=1.0, norm=_ALL, turning="rotary_dim", finish=of.minimax_m2),
        _sizes(3072, 62, 48, 8, 196608, 128),
    ),
    "dots1": (
        Rotating(window="types", pattern=of.windows_after, norm=_HEADS),
        _sizes(4608, 62, 32, 32, 2048) | {"sliding_window": 4096, "max_window_layers": 62},
    ),
    "vaultgemma": (
        Rotating(window="types", pattern=of.alternating(2), finish=of.capped),
        _sizes(2304, 26, 8, 4, 8192, 256)
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    ),
    "internlm3": (Rotating(), _sizes(4096, 48, 32, 2, 32768, 128)),
    "cwm": (
        Rotating(theta=1e6, window="types", pattern=of.alternating(4, first=True)),
        _sizes(6144, 64, 48, 8, 131072, 128)
        | {
            "sliding_window": 8192,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "exaone_moe": (
        Rotating(window="types", pattern=of.exaone_pattern, still=of.exaone_still, norm=_HEADS),
        _sizes(4096, 32, 32, 32, 2048) | {"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "hy_v3": (
        Rotating(
            theta=11158840.0,
            norm=_HEADS,
            ignored=("router_scaling_factor", "moe_router_enable_expert_bias", "enable_lm_head_fp32"),
            finish=of.hy_v3,
        ),
        _sizes(4096, 80, 64, 8, 131072, 128),
    ),
    "nanochat": (
        Rotating(
            backwards=True, magnitude=False, norm="q and k divided by their root mean square, per head (q_norm, k_norm)"
        ),
        _sizes(768, 12, 6, None, 2048),
    ),
    "mimo_v2_flash": (
        Rotating(
            theta={of.FULL: 5e6, of.SLIDING: 1e4},
            theta_keys={of.FULL: "rope_theta", of.SLIDING: "swa_rope_theta"},
            share=0.334,
            pattern=of.mimo_pattern,
            finish=of.mimo,
        ),
        _sizes(4096, 48, 64, 4, 131072, 192)
        | {"sliding_window": 129, "v_head_dim": 128, "attention_value_scale": 0.707},
    ),
    "modernbert-decoder": (
        Rotating(
            theta={of.FULL: 16e4, of.SLIDING: 1e4},
            theta_keys={of.FULL: "global_rope_theta", of.SLIDING: "local_rope_theta"},
            pattern=of.alternating(3, "global_attn_every_n_layers", first=True),
            finish=of.modernbert_decoder,
        ),
        _sizes(768, 22, 12, None, 8192) | {"local_attention": 128},
    ),
    "gpt_neox_japanese": (
        Rotating(share=1.0, theta_keys="rotary_emb_base", share_key="rotary_pct"),
        _sizes(2560, 32, 32, None, 2048),
    ),
    "eurobert": (Rotating(causal=False), _sizes(768, 12, 12, None, 8192)),
    "nomic_bert": (Rotating(theta=1000.0, causal=False), _sizes(768, 12, 12, None, 2048)),
    "gte": (Rotating(theta=16e4, causal=False), _sizes(768, 12, 12, None, 8192)),
    "modernbert": (
        Rotating(
            theta={of.FULL: 16e4, of.SLIDING: 1e4},
            theta_keys={of.FULL: "global_rope_theta", of.SLIDING: "local_rope_theta"},
            causal=False,
            pattern=of.alternating(3, "global_attn_every_n_layers", first=True),
            finish=of.modernbert,
        ),
        _sizes(768, 22, 12, None, 8192) | {"local_attention": 128},
    ),
}

_SPEECH: dict[str, tuple[Rotating, Defaults]] = {
    "csm": (Rotating(theta=5e5), _sizes(2048, 16, 32, 8, 2048)),
    "csm_depth_decoder_model": (Rotating(theta=5e5), _sizes(1024, 4, 8, 2, 33)),
}

_ALIASES = {"exaone": {"num_layers": "num_hidden_layers"}}

for _name, (_traits, _defaults) in _TYPES.items():
    register(_traits.read, {_name: _defaults}, kind="Text", aliases=_ALIASES.get(_name))
for _name, (_traits, _defaults) in _SPEECH.items():
    register(_traits.read, {_name: _defaults}, kind="Speech and music")
