"""Sizes of tiny models, by family, and how calls of a model's attention are recorded."""

from dataclasses import dataclass

import numpy as np

SMALL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KV = {**SMALL, "num_key_value_heads": 2}
HEAD = {**KV, "head_dim": 20}
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MAGNITUDES = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "long_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0]}
# Of the channels of a head that turn.
LATENT_LONG = {**LONGROPE, "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0, 1.2, 1.4, 1.6]}
LATENT_LONG |= {"original_max_position_embeddings": 16}
DBRX = {"vocab_size": 50, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
DBRX |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0}}
DBRX |= {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}
OMNI2 = "models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5Omni"
OMNI3 = "models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoe"
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 9}
LLAMA4 = {"attention_chunk_size": 9, "floor_scale": 8, "attn_scale": 0.5, "intermediate_size_mlp": 64}
MPT = {"vocab_size": 50, "d_model": 60, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}
XLNET = {"vocab_size": 50, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64}
LAYOUT = {"coordinate_size": 8, "shape_size": 16, "visual_embed": False}


@dataclass
class Model:
    """A configuration, and how calls of its attention are recorded.

    `last`: the last channels turn, and are turned apart; `scaled`: queries arrive with their scale; `net`: a class
    that `AutoModel` does not know; `via`: the submodule that is called; `given`: inputs of the layers' own;
    `published`: the type that files have whose model is this one.
    """

    model_type: str
    config: dict
    inputs: str = "text"
    calls: str = "interface"
    parts: tuple = ("",)
    last: bool = False
    scaled: bool = False
    net: str = ""
    via: str = ""
    given: tuple = ()
    attention: str = "eager"
    published: str = ""


BOTH = ("encoder", "decoder", "cross")
GPT = {"vocab_size": 50, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 64, "rotary_dim": 8}
GPT2 = {name: x for name, x in GPT.items() if name != "rotary_dim"}
PAIR = {
    "vocab_size": 50,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
T5 = {"vocab_size": 50, "d_model": 64, "d_kv": 12, "num_heads": 4, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3}
BERT = {**SMALL, "num_hidden_layers": 2}
IMAGE = {**BERT, "image_size": 24, "patch_size": 4, "num_channels": 3}
SPEECH = {**BERT, "conv_dim": [16, 16], "conv_kernel": [4, 3], "conv_stride": [4, 2], "num_conv_pos_embeddings": 8}
SPEECH |= {"num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    **MOE,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 4,
    "n_group": 1,
    "topk_group": 1,
}
LATENT_VALUES = {
    **SMALL,
    **MOE,
    "num_hidden_layers": 2,
    "head_dim": 20,
    "partial_rotary_factor": 0.4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention"] * 2,
    "mlp_layer_types": ["moe"] * 2,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "hc_mult": 2,
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 128, "mamba_chunk_size": 16}
MROPE = {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
MISTRAL4 = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
LONGCAT = {
    "num_layers": 2,
    "head_dim": 8,
    "q_lora_rank": 16,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
}
SHARING = ["sliding_attention", "full_attention"] * 3
THREE_N = {"sliding_window": 9, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "laurel_rank": 8}
THREE_N |= {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": SHARING, "altup_num_inputs": 2}
FOUR = {"sliding_window": 9, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "global_head_dim": 24}
DIA = {"cross_num_attention_heads": 6, "cross_head_dim": 12, "cross_num_key_value_heads": 3, "cross_hidden_size": 48}
BOXES = np.array([[7 * n % 200, 11 * n % 300, 7 * n % 200 + 9, 11 * n % 300 + n] for n in range(37)])
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
TOWER = {"depth": 2, "num_heads": 4, "patch_size": 4, "in_channels": 3, "temporal_patch_size": 2}
TOWER |= {"spatial_merge_size": 2, "intermediate_size": 64}
WINDOWS = {**TOWER, "hidden_size": 64, "out_hidden_size": 32, "window_size": 16}
QWEN3 = {"hidden_size": 64, "out_hidden_size": 32, "num_position_embeddings": 36}
QWEN3 |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}
PALI = {
    "vision_config": {**BERT, "image_size": 16, "patch_size": 4, "vision_use_head": False},
    "projection_dim": 64,
    "image_token_index": 49,
}
W2V_BERT = {**BERT, "feature_projection_input_dim": 16, "left_max_position_embeddings": 6}
W2V_BERT |= {"right_max_position_embeddings": 3, "output_hidden_size": 64}
SEAMLESS = {
    **{
        f"{side}_{name}": n
        for side in ("encoder", "decoder", "speech_encoder", "t2u_encoder", "t2u_decoder")
        for name, n in (("layers", 2), ("attention_heads", 4))
    },
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder", "t2u_encoder", "t2u_decoder")},
    "vocab_size": 50,
    "hidden_size": 64,
    "speech_encoder_intermediate_size": 64,
    "feature_projection_input_dim": 16,
    "t2u_vocab_size": 50,
    "max_position_embeddings": 64,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 3,
    "unit_embed_dim": 16,
    "spkr_embed_dim": 8,
    "lang_embed_dim": 8,
    "upsample_initial_channel": 32,
    "char_vocab_size": 50,
    "add_adapter": False,
    "unit_hifi_gan_vocab_size": 50,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "num_channels": 3,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}


DEPTH = {**KV, "num_codebooks": 2, "ffn_dim": 64, "sliding_window": 4, "input_size": 64, "audio_vocab_size": 50}
ZAMBA = {"n_mamba_heads": 2, "mamba_d_state": 8, "use_mamba_kernels": False}
PHI_VISION = {**IMAGE, "crop_size": 24}
PHI_AUDIO = {**SPEECH, "num_blocks": 1, "ext_pw_out_channel": 64, "nemo_conv_channels": 16, "input_size": 16}
GRID = (("grid", (8, 14)),)
