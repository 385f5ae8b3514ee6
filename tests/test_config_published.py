"""`relpos config` on the keys that published config.json files have: everything that they decide is said."""

import json

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands.main import main

YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
LATENT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
FILES = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    "Llama-4-Scout-17B-16E": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "model_type": "llama4",
        "text_config": {
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attention_dropout": 0.0,
            "attn_scale": 0.1,
            "attn_temperature_tuning": 4,
            "floor_scale": 8192,
            "for_llm_compressor": False,
            "head_dim": 128,
            "hidden_size": 5120,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "num_attention_heads": 40,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "use_qk_norm": True,
        },
        "vision_config": {"model_type": "llama4_vision_model", "rope_theta": 10000},
    },
    "Qwen3-VL-8B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_size": 4096,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
        },
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "in_channels": 3,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_start_token_id": 151652,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": 2048,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "DeepSeek-V3.2": LATENT
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "model_type": "deepseek_v32",
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
        "rope_scaling": YARN | {"factor": 40, "original_max_position_embeddings": 4096},
    },
    "Kimi-K2-Instruct": LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "aux_loss_alpha": 0.001,
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN | {"factor": 32.0, "original_max_position_embeddings": 4096},
        "rope_theta": 50000.0,
        "seq_aux": True,
    },
    "Ministral-3-8B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "text_config": {
            "head_dim": 128,
            "hidden_size": 4096,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "rope_parameters": YARN
            | {"factor": 16.0, "original_max_position_embeddings": 16384}
            | {"llama_4_scaling_beta": 0.1, "rope_theta": 1000000.0, "rope_type": "yarn"},
            "sliding_window": None,
        },
        "vision_config": {
            "head_dim": 64,
            "hidden_size": 1024,
            "image_size": 1540,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "vision_feature_layer": -1,
    },
    "Wan2.1-T2V-1.3B": {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": "0.33.0.dev0",
        "added_kv_proj_dim": None,
        "attention_head_dim": 128,
        "cross_attn_norm": True,
        "eps": 1e-06,
        "ffn_dim": 8960,
        "freq_dim": 256,
        "image_dim": None,
        "in_channels": 16,
        "num_attention_heads": 12,
        "num_layers": 30,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": 4096,
    },
}
SAID = {
    "gpt-oss-20b": [
        "gpt_oss, layers 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 of 24",
        "heads 64 of 64 channels",
        "key heads 8",
        "yarn: beta_fast 32.0, beta_slow 1.0, factor 32.0",
        "attends the past, at most 127 back",
        "attends the past\n",
        "sinks [layers.N.self_attn.sinks]",
    ],
    "gemma-2-9b": ["scale 0.0625", "soft cap 50, order scores", "the past, at most 4095 back", "Rotary(base=10000)"],
    "Llama-4-Scout-17B-16E": [
        "llama4_text, layers 0-2, 4-6, 8-10",
        "attends the past, Chunked(size=8192)",
        "query times query_temperature(variant='llama4', length=8192, strength=0.1)",
        "positions none",
        "layout='interleaved'",
        "llama3: factor 16.0",
        "before q and k divided by their root mean square, per head (qk_norm)",
    ],
    "Qwen3-VL-8B-Instruct": [
        "qwen3_vl_text, layers 0-35 of 36",
        "sections of pairs [24, 20, 20], cyclic",
        "rope_theta 5000000.0",
        "before RMS norm of q and k, per head (q_norm, k_norm)",
        "a call may give positions",
        "qwen3_vl_vision, layers 0-26 of 27",
        "added to inputs LearnedAbsolute(table=[pos_embed.weight])",
        "a call needs grid",
    ],
    "SmolLM3-3B": [
        "smollm3, layers 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-26, 28-30, 32-34 of 36",
        "positions Rotary(base=5000000)",
        "smollm3, layers 3, 7, 11, 15, 19, 23, 27, 31, 35 of 36",
        "positions none",
    ],
    "DeepSeek-V3.2": [
        "heads 128 of 192 channels",
        "value channels 128",
        "layout='interleaved', channels=(128, 192)",
        "scale 0.13523",
        "a call needs selected",
        "note selected: the 2048 keys that the layer's indexer chooses",
    ],
    "Kimi-K2-Instruct": ["heads 64 of 192 channels", "layout='interleaved', channels=(128, 192)", "scale 0.13086"],
    "Ministral-3-8B": [
        "query times query_temperature(variant='ministral3', length=16384, strength=0.1)",
        "yarn: beta_fast 32, beta_slow 1, factor 16.0",
        "pixtral, layers 0-23 of 24",
        "base 10000, frequencies dealt out to them in turn",
    ],
    "Wan2.1-T2V-1.3B": [
        "WanTransformer3DModel, layers 0-29 of 30",
        "44, 42, 42 channels, base 10000",
        "WanTransformer3DModel, cross, layers 0-29 of 30",
        "attends all keys of the encoder",
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_everything_is_said(name, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES[name]), encoding="utf-8")
    assert main(["config", str(path)]) == 0
    # Columns have spaces of their own.
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    text = "\n".join(lines) + "\n"
    for words in SAID[name]:
        assert words in text, (words, text)


def test_selected_keys_are_those_of_the_call():
    small = {"num_attention_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    layer = rp.from_config(FILES["DeepSeek-V3.2"] | small, layer=3)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, n)) for n in (12, 12, 6))
    bound = layer.bind()
    selected = rng.integers(0, 9, (9, 3))
    allowed = np.zeros((9, 9), bool)
    np.put_along_axis(allowed, selected, True, axis=-1)
    out = bound(q, k, v, selected=selected)
    np.testing.assert_allclose(
        out,
        rp.attention(q, k, v, position=bound.position(q, k), scale=layer.scale, causal=True, mask=allowed),
        rtol=0,
        atol=1e-14,
    )
    with pytest.raises(rp.RelposTypeError, match="selected: layer 3 of deepseek_v32 needs it in every call"):
        bound(q, k, v)
    with pytest.raises(rp.RelposValueError, match="layer_types: expected indexed_attention"):
        rp.from_config(FILES["DeepSeek-V3.2"] | {"layer_types": ["full_attention"] * 61}, layer=0)


def test_the_prefix_of_paligemma():
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6}
    config = {"model_type": "paligemma", "text_config": {"model_type": "gemma2", **sizes}, "vision_config": {}}
    bound = rp.from_config(config, layer=0, part="text").bind()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 9, 8)) for heads in (2, 1, 1))
    i, j = np.arange(9)[:, None], np.arange(9)
    masks = [((j < n) | (j <= i)) & (i - j < 6) for n in (2, 5)]
    expected = rp.attention(q, k, v, position=rp.Rotary(), scale=1 / 16, softcap=50.0, mask=np.stack(masks)[:, None])
    np.testing.assert_allclose(bound(q, k, v, prefix_lengths=[2, 5]), expected, rtol=0, atol=1e-14)
    with pytest.raises(rp.RelposValueError, match="prefix_lengths: expected at most 6, found 7"):
        bound(q, k, v, prefix_lengths=7)
    with pytest.raises(rp.RelposTypeError, match="prefix_lengths: layer 0 of gemma2 needs it"):
        bound(q, k, v)
    with pytest.raises(rp.RelposValueError, match="use_bidirectional_attention: True"):
        rp.from_config({"model_type": "gemma2", "use_bidirectional_attention": True}, layer=0)


def test_inkling():
    """Profiles that the layer's input mixes; queries and profiles have the factor of their position."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window_size": 5}
    sizes |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 6, "log_scaling_n_floor": 4}
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((3, 9, 16))
    for layer, heads, dim, floor in ((0, 2, 6, None), (5, 4, 8, 4)):
        found = rp.from_config({"model_type": "inkling_text", **sizes}, layer=layer)
        weight, proj = rng.standard_normal((heads * 3, 16)), rng.standard_normal((3, 7))
        bound = found.bind(dict(zip(found.weights, (weight, proj), strict=True)))
        q, k, v = (rng.standard_normal((3, h, 9, dim)) for h in (heads, heads // 2, heads // 2))
        factors = np.ones(9) if floor is None else 1 + 0.1 * np.log(np.maximum(1, np.arange(1, 10) / floor))
        mixed = np.einsum("blc,hrc->bhlr", hidden, weight.reshape(heads, 3, 16)) * factors[:, None]
        options = {"scale": 1 / dim, "causal": True, "window": (4, None) if floor is None else None}
        expected = rp.attention(q * factors[:, None], k, v, position=rp.Inkling(mixed, proj), **options)
        np.testing.assert_allclose(bound(q, k, v, hidden=hidden), expected, rtol=0, atol=1e-13)
        # One query after others.
        last = bound(q[..., 8:, :], k, v, hidden=hidden[:, 8:])
        np.testing.assert_allclose(last, expected[..., 8:, :], rtol=0, atol=1e-13)
        with pytest.raises(rp.RelposValueError, match=r"hidden: expected shape \(..., 9, 16\), found \(3, 8, 16\)"):
            bound(q, k, v, hidden=hidden[:, 1:])
