"""Tiny models with random weights, one or more for each model type whose configuration is understood."""

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


# ---------------------------------------------------------------------------------------------- models

DEPTH = {**KV, "num_codebooks": 2, "ffn_dim": 64, "sliding_window": 4, "input_size": 64, "audio_vocab_size": 50}
ZAMBA = {"n_mamba_heads": 2, "mamba_d_state": 8, "use_mamba_kernels": False}
PHI_VISION = {**IMAGE, "crop_size": 24}
PHI_AUDIO = {**SPEECH, "num_blocks": 1, "ext_pw_out_channel": 64, "nemo_conv_channels": 16, "input_size": 16}
GRID = (("grid", (8, 14)),)
MODELS = (
    Model("llama", KV),
    Model("llama", {**HEAD, "rope_parameters": LLAMA3}),
    Model("llama", {**KV, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}),
    Model("llama", {**KV, "max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    Model("llama", {**KV, "rope_parameters": YARN}),
    Model("llama", {**KV, "rope_parameters": {**MAGNITUDES, "beta_fast": 8.0, "truncate": False}}),
    Model("llama", {**KV, "rope_parameters": {**YARN, "attention_factor": 1.3}}),
    *(Model(name, KV) for name in ("arcee", "bitnet", "jais2", "apertus", "nemotron", "olmo2", "nanochat", "eurobert")),
    *(Model(name, HEAD) for name in ("seed_oss", "gemma", "glm", "glm4", "ernie4_5", "internlm3")),
    *(Model(name, KV) for name in ("exaone", "iquestcoder")),
    *(Model(name, {**HEAD, **MOE, "moe_num_experts": 4, "moe_topk": 2}) for name in ("aria_text", "solar_open")),
    Model("sarvam_moe", {**HEAD, **MOE, "n_group": 1, "topk_group": 1}),
    Model("nanochat", {**KV, "rope_parameters": YARN}),
    Model("diffllama", KV, calls="diffllama"),
    Model("jetmoe", {**SMALL, "num_key_value_heads": 2, "kv_channels": 16, **MOE}, calls="jetmoe"),
    Model("llama4_text", {**HEAD, **MOE, **LLAMA4, "rope_parameters": YARN}),
    Model("llama", {**KV, "partial_rotary_factor": 0.5}),
    Model("mistral", {**HEAD, "sliding_window": 9}),
    Model("mistral", {**KV, "sliding_window": None}),
    *(Model(name, {**KV, **MOE, "sliding_window": 9}) for name in ("mixtral", "phimoe")),
    Model("ministral", {**HEAD, "sliding_window": 9, "layer_types": SHARING[2:]}),
    Model("ministral", {**HEAD, "sliding_window": 9}),
    Model("ministral3", {**HEAD, "rope_parameters": MISTRAL4}),
    Model("qwen2", {**KV, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    Model("qwen2", KV),
    Model("qwen2_moe", {**KV, **MOE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
    Model("qwen3", {**HEAD, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    Model("qwen3_moe", {**HEAD, **MOE, "use_sliding_window": True, "sliding_window": 9}),
    *(
        Model(name, {**KV, "rope_parameters": {**PLAIN, "mrope_section": [2, 3, 3]}})
        for name in ("qwen2_vl_text", "qwen2_5_vl_text")
    ),
    Model(
        "qwen2_5_omni_text",
        {**KV, "rope_parameters": {**PLAIN, "mrope_section": [2, 3, 3]}},
        net=f"{OMNI2}ThinkerTextModel",
    ),
    Model(
        "qwen2_5_omni_talker",
        {**HEAD, "embedding_size": 64, "rope_parameters": {**PLAIN, "mrope_section": [2, 4, 4]}},
        "embedded",
        net=f"{OMNI2}TalkerModel",
    ),
    Model(
        "qwen3_omni_moe_text",
        {**KV, **MOE, "head_dim": 16, "rope_parameters": {**PLAIN, "mrope_section": [4, 2, 2], "interleaved": True}},
        net=f"{OMNI3}ThinkerTextModel",
    ),
    Model("mllama_text_model", {**KV, "cross_attention_layers": [1, 3]}, net="MllamaTextModel"),
    Model("dbrx", DBRX),
    *(
        Model("llama", KV, published=name)
        for name in ("internlm2", "xverse", "sparsellama", "PanguEmbedded", "bailing_moe")
    ),
    Model("llama", {**KV, "block_configs": [{"attention": {"n_heads_in_group": 2}}] * 4}, published="nemotron-nas"),
    Model("llama", {**SMALL, "rotary_emb_base": 10000, "seq_length": 64}, published="qwen"),
    Model("glm", {**HEAD, "multi_query_attention": True, "original_rope": True}, published="chatglm"),
    Model("phi", {**SMALL, "rotary_dim": 8}, published="mixformer-sequential"),
    Model("olmo", {**KV, "clip_qkv": 0.5, "attention_layer_norm": False}, published="molmo"),
    Model("olmo2", {**KV, "attention_layer_norm": True}, published="molmo"),
    Model("qwen2", KV, published="mimo"),
    Model("phi3", KV, published="phi3_v"),
    Model("gpt_neox", SMALL, published="gpt_neox_reward_model"),
    Model("stablelm", KV, published="stablelm_epoch"),
    Model("falcon", BERT, calls="falcon", published="RefinedWebModel"),
    Model(
        "falcon",
        {**BERT, "new_decoder_architecture": True, "num_kv_heads": 2},
        calls="falcon",
        published="RefinedWeb",
    ),
    *(
        Model(name, {**KV, **experts, "head_dim": 16, "rope_parameters": {**PLAIN, "mrope_section": [4, 2, 2]}})
        for name, experts in (("qwen3_vl_text", {}), ("qwen3_vl_moe_text", MOE))
    ),
    *(Model(name, {**HEAD, **GEMMA, "attn_logit_softcapping": 2.0}) for name in ("gemma2", "vaultgemma")),
    Model("gemma3_text", {**HEAD, **GEMMA, "layer_types": SHARING[2:]}),
    Model("gemma3_text", {**HEAD, "sliding_window": 10, "num_hidden_layers": 7, "use_bidirectional_attention": True}),
    Model("phi", KV),
    Model("phi", {**KV, "qk_layernorm": True, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25}}),
    *(
        Model(
            "phi3",
            {
                **KV,
                "original_max_position_embeddings": length,
                "rope_parameters": {**LONGROPE, "short_factor": [short] * 8},
            },
        )
        for length, short in ((16, 1.0), (48, 1.5))
    ),
    Model("stablelm", {**KV, "qk_layernorm": True}),
    *(Model(name, SMALL) for name in ("persimmon", "gpt_neox", "nomic_bert", "gte")),
    *(Model(name, {**KV, "sliding_window": 9}) for name in ("starcoder2", "phi3", "olmo3", "cohere2", "exaone4")),
    Model("olmo", {**KV, "clip_qkv": 0.5}),
    Model("olmo3", {**KV, "sliding_window": 9, "rope_scaling": YARN}),
    *(Model(name, {**KV, **MOE}) for name in ("olmoe", "flex_olmo", "ernie4_5_moe")),
    Model("cohere", {**KV, "use_qk_norm": True}),
    Model("granite", {**KV, "attention_multiplier": 0.2}),
    Model("granitemoe", {**KV, **MOE, "attention_multiplier": 0.2}),
    Model("granitemoeshared", {**KV, **MOE, "attention_multiplier": 0.2, "shared_intermediate_size": 32}),
    Model("glm4_moe", {**KV, **MOE, "head_dim": 16, "use_qk_norm": True, "n_group": 1, "topk_group": 1}),
    Model("helium", {**KV, "head_dim": 16}),
    Model("exaone4", {**KV, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Model("smollm3", KV),
    Model("smollm3", {**KV, "use_sliding_window": True, "sliding_window": 9}),
    Model("llama4_text", {**HEAD, **MOE, **LLAMA4}),
    Model("llama4_text", {**KV, **MOE, **LLAMA4, "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}),
    Model("gpt_oss", {**HEAD, **MOE, "sliding_window": 9}),
    Model("minimax_m2", {**HEAD, **MOE}),
    Model("minimax_m2", {**HEAD, **MOE, "rotary_dim": 12, "rope_theta": 100.0}),
    Model("dots1", {**KV, **MOE, "sliding_window": 9, "max_window_layers": 2, "n_shared_experts": 1}),
    Model("cwm", {**HEAD, "sliding_window": 9}),
    Model("exaone_moe", {**KV, **MOE, "sliding_window": 9, "num_shared_experts": 1}),
    Model("hy_v3", {**HEAD, **MOE, "rope_parameters": PLAIN}),
    Model(
        "mimo_v2_flash",
        {**HEAD, **MOE, "v_head_dim": 12, "sliding_window": 9}
        | {
            "rope_parameters": {
                f"{kind}_attention": {**PLAIN, "partial_rotary_factor": 0.4} for kind in ("full", "sliding")
            }
        },
    ),
    Model(
        "mimo_v2_flash",
        {**HEAD, **MOE, "v_head_dim": 12, "sliding_window_size": 8, "attention_value_scale": None}
        | {"layer_types": SHARING[2:]},
    ),
    Model("modernbert-decoder", {**SMALL, "local_attention": 18}),
    Model("modernbert-decoder", {**SMALL, "local_attention": 18, "sliding_window": 12, "global_rope_theta": 50.0}),
    Model("gpt_neox_japanese", SMALL, calls="gpt_neox_japanese"),
    Model("gpt_neox_japanese", {**SMALL, "rotary_pct": 0.5, "rotary_emb_base": 50}, calls="gpt_neox_japanese"),
    Model("csm", {**KV, "depth_decoder_config": {**KV, "backbone_hidden_size": 64}}, "codes", net="CsmBackboneModel"),
    Model(
        "csm_depth_decoder_model",
        {**KV, "backbone_hidden_size": 64, "num_codebooks": 40, "rope_parameters": LLAMA3},
        net="CsmDepthDecoderModel",
    ),
    Model("hunyuan_v1_dense", HEAD),
    Model("hunyuan_v1_moe", {**HEAD, **MOE, "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    Model("granite_swa", {**KV, "sliding_window": 9, "attention_multiplier": 0.2}),
    Model(
        "granitemoe_swa",
        {**KV, **MOE, "sliding_window": 9, "attention_multiplier": 0.2, "layer_rope_theta": [100.0, 0, 1e4, 1e4]},
    ),
    Model("laguna", {**HEAD, **MOE, "sliding_window": 9, "layer_types": SHARING[2:]}),
    Model(
        "laguna",
        {**HEAD, **MOE, "sliding_window": 9, "gating": "per-channel", "num_attention_heads_per_layer": [4, 2, 4, 8]},
    ),
    Model("lara_mini", {**HEAD, **MOE, **DELTA, "sliding_window": 9, "num_hidden_layers": 5}),
    *(Model("lfm3", {**HEAD, "sliding_window": 9, "use_attention_gate": gate}) for gate in (True, False)),
    Model("flint", {**HEAD, **MOE, "sliding_window": 9}),
    *(Model("kolibri1", {**HEAD, **MOE, "sliding_window": n, "num_hidden_layers": 5}) for n in (9,)),
    Model("phi4_multimodal", {**KV, "sliding_window": 9, "vision_config": PHI_VISION, "audio_config": PHI_AUDIO}),
    Model("apertus1p5_text", KV),
    Model("emu3_text_model", KV, net="models.emu3.modeling_emu3.Emu3TextModel"),
    Model("kimi_linear", {**LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "num_hidden_layers": 5}, last=True),
    Model("deepseek_v3", LATENT, last=True, published="sarvam_mla"),
    Model(
        "cohere_compass_text",
        {**KV, "sliding_window": 9, "layer_types": SHARING[2:]}
        | {"rope_parameters": {"full_attention": None, "sliding_attention": {**PLAIN, "mrope_section": [2, 3, 3]}}},
    ),
    Model("moshi", {**KV, "sliding_window": 9, "ffn_dim": 64, "audio_vocab_size": 50, "depth_decoder_config": DEPTH}),
    Model("recurrent_gemma", {**KV, "attention_window_size": 9, "lru_width": 64, "num_hidden_layers": 6}),
    Model("zamba", {**KV, **ZAMBA, "num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1}),
    *(
        Model(
            "zamba2",
            {**SMALL, **ZAMBA, "chunk_size": 16, "layers_block_type": ["mamba", "hybrid"] * 2, "use_mem_rope": turning},
        )
        for turning in (True, False)
    ),
    Model(
        "minimax_m3_vl_text",
        {**HEAD, **MOE, "rotary_dim": 8, "dense_intermediate_size": 64, "shared_intermediate_size": 32}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 2},
    ),
    Model("gemma4_unified_text", {**HEAD, **FOUR, "num_hidden_layers": 7}),
    Model("axk2", {**LATENT, "q_lora_rank": 16, **INDEXER, "gated_norm_rank": 4}, last=True),
    Model("ctrl", {**GPT2, "dff": 64}, calls="ctrl"),
    *(
        Model("xlm", {"vocab_size": 50, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": causal}, "ids", "xlm")
        for causal in (True, False)
    ),
    Model("mvp", PAIR, "pair", "bart", parts=BOTH),
    Model(
        "trocr",
        {**{name: x for name, x in PAIR.items() if "encoder" not in name}, "is_decoder": True}
        | {"cross_attention_hidden_size": 64},
        "decoding",
        "bart",
        ("", "cross"),
        net="models.trocr.modeling_trocr.TrOCRDecoder",
    ),
    Model(
        "musicgen_melody_decoder",
        {**BERT, "ffn_dim": 64, "num_codebooks": 2},
        "codebooks",
        net="models.musicgen_melody.modeling_musicgen_melody.MusicgenMelodyDecoder",
    ),
    Model("gemma3n_text", {**HEAD, **THREE_N}),
    Model("gemma3n_text", {**HEAD, **THREE_N, "num_kv_shared_layers": 0}),
    Model("gemma4_text", {**HEAD, **FOUR, "num_hidden_layers": 7}),
    Model("gemma4_text", {**HEAD, **FOUR, "num_kv_shared_layers": 2, "num_hidden_layers": 6, "layer_types": SHARING}),
    Model(
        "gemma4_text",
        {**HEAD, **FOUR, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": SHARING[2:]},
    ),
    Model("glm4_moe_lite", LATENT, last=True),
    Model("glm4_moe_lite", {**LATENT, "rope_interleave": False, "rope_parameters": YARN}, last=True),
    Model("mistral4", {**LATENT, "rope_parameters": MISTRAL4}, last=True),
    Model("longcat_flash", {**LATENT, **LONGCAT}, last=True),
    Model("qwen3_next", {**KV, **MOE, **DELTA, "head_dim": 32}),
    Model(
        "qwen3_next", {**KV, **MOE, **DELTA, "head_dim": 32, "layer_types": ["full_attention", "linear_attention"] * 2}
    ),
    Model("qwen3_5_text", {**KV, **DELTA, "head_dim": 16, "rope_parameters": MROPE}),
    Model("qwen3_5_moe_text", {**KV, **MOE, **DELTA, "head_dim": 16, "rope_parameters": MROPE}),
    Model("lfm2", {**KV, "full_attn_idxs": [1, 3]}),
    Model("lfm2_moe", {**KV, **MOE, "layer_types": ["conv", "full_attention"] * 2}),
    Model("falcon_h1", {**HEAD, **MAMBA, "key_multiplier": 0.5, "attention_in_multiplier": 2.0}),
    Model("bamba", {**KV, **MAMBA, "attn_layer_indices": [0, 2]}),
    Model("jamba", {**KV, **MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    Model(
        "granitemoehybrid",
        {**KV, **MOE, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32}
        | {"attention_multiplier": 0.2, "position_embedding_type": "rope"},
    ),
    Model(
        "granitemoehybrid",
        {**KV, **MOE, **MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2}
        | {"shared_intermediate_size": 32, "attention_multiplier": 0.2},
    ),
    Model("olmo_hybrid", {**KV, **DELTA}),
    Model("olmo_hybrid", {**KV, **DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    Model("afmoe", {**HEAD, **MOE, "sliding_window": 9, "num_shared_experts": 1, "num_dense_layers": 1}),
    Model("cohere2_moe", {**HEAD, **MOE, "sliding_window": 9, "first_k_dense_replace": 1}),
    Model(
        "cohere2_moe",
        {**HEAD, **MOE, "sliding_window": 9, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
    ),
    Model("mellum", {**HEAD, **MOE, "sliding_window": 9, "layer_types": SHARING[2:]}),
    Model("hyperclovax", KV),
    Model("hyperclovax", {**HEAD, "attention_multiplier": 0.3}),
    Model("minimax", {**HEAD, **MOE, "sliding_window": 9, "block_size": 16}),
    Model(
        "nemotron_h",
        {**HEAD, **MOE, "hybrid_override_pattern": "M*E*-", "mamba_num_heads": 8, "mamba_head_dim": 16}
        | {"ssm_state_size": 8, "chunk_size": 16, "n_groups": 2, "moe_shared_expert_intermediate_size": 32}
        | {"n_group": 1, "topk_group": 1, "use_mamba_kernels": False},
    ),
    Model("youtu", LATENT, last=True),
    Model("axk1", {**LATENT, "q_lora_rank": 16}, last=True),
    Model("axk1", {**LATENT, "rope_interleave": False, "q_lora_rank": 16}, last=True),
    Model("minicpm3", {**LATENT, "q_lora_rank": 16}, last=True),
    Model("minicpm3", {**LATENT, "q_lora_rank": 16, "rope_parameters": LATENT_LONG}, last=True),
    Model("nanochat", {**KV, "rope_parameters": DYNAMIC}),
    Model("modernbert", {**SMALL, "local_attention": 8}),
    Model("modernbert", {**SMALL, "local_attention": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    Model("deepseek_v2", LATENT, last=True),
    Model("deepseek_v2", {**LATENT, "rope_parameters": MAGNITUDES}, last=True),
    Model("deepseek_v3", LATENT, last=True),
    Model(
        "deepseek_v3",
        {**LATENT, "rope_interleave": False, "rope_parameters": {**YARN, "mscale_all_dim": 0.9}},
        last=True,
    ),
    Model("deepseek_v4", LATENT_VALUES, calls="deepseek_v4"),
    Model("deepseek_v4", {**LATENT_VALUES, "rope_parameters": YARN, "partial_rotary_factor": 1.0}, calls="deepseek_v4"),
    Model(
        "deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale_all_dim": 0.9}}, last=True, published="kimi_k2"
    ),
    Model("deepseek_v32", {**LATENT, "q_lora_rank": 16, **INDEXER}, last=True),
    Model("deepseek_v32", {**LATENT, "q_lora_rank": 16, **INDEXER, "rope_parameters": YARN}, last=True),
    Model(
        "glm_moe_dsa",
        {**LATENT, "q_lora_rank": 16, **INDEXER, "indexer_types": ["full", "shared", "full", "shared"]},
        last=True,
    ),
    Model(
        "inkling_text",
        {**HEAD, **MOE, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 12, "d_rel": 6}
        | {"sliding_window_size": 9, "rel_extent": 20, "local_layer_ids": [0, 2], "log_scaling_n_floor": 8}
        | {"log_scaling_alpha": 0.5},
    ),
    Model("gptj", GPT, calls="gptj"),
    Model("codegen", GPT, calls="codegen"),
    Model("roformer", BERT, calls="bert"),
    Model("esm", {**BERT, "position_embedding_type": "rotary", "token_dropout": False}, scaled=True),
    Model("esm", {**BERT, "position_embedding_type": "absolute", "token_dropout": False}, scaled=True),
    Model("falcon", BERT, calls="falcon"),
    Model("falcon", {**BERT, "new_decoder_architecture": True, "num_kv_heads": 2}, calls="falcon"),
    Model("falcon", {**BERT, "multi_query": False}, calls="falcon"),
    Model("bloom", {"vocab_size": 50, "hidden_size": 60, "n_layer": 2, "n_head": 6}, calls="bloom"),
    Model("mpt", MPT, calls="mpt"),
    Model("mpt", {**MPT, "attn_config": {"softmax_scale": 0.3, "clip_qkv": 1.5}}, calls="mpt"),
    *(Model(name, T5, "pair", parts=BOTH) for name in ("t5", "umt5")),
    Model(
        "mt5", {**T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}, "pair", parts=BOTH
    ),
    Model(
        "switch_transformers",
        {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2},
        "pair",
        parts=BOTH,
    ),
    Model(
        "pop2piano", T5, "pair", parts=BOTH, net="models.pop2piano.modeling_pop2piano.Pop2PianoForConditionalGeneration"
    ),
    Model("mpnet", {**BERT, "relative_attention_num_buckets": 32}, calls="mpnet"),
    *(
        Model("layoutlmv3", {**BERT, **LAYOUT, **more}, "boxes", "bert", given=(("boxes", BOXES),))
        for more in (
            {"rel_pos_bins": 8, "max_rel_pos": 20, "rel_2d_pos_bins": 16, "max_rel_2d_pos": 60},
            {"has_relative_attention_bias": False, "has_spatial_attention_bias": False},
        )
    ),
    *(
        Model(name, PAIR, "pair", parts=BOTH)
        for name in ("bart", "mbart", "plbart", "blenderbot", "blenderbot-small", "pegasus", "marian", "m2m_100")
    ),
    Model(
        "whisper",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 64},
        "mel",
        parts=BOTH,
        scaled=True,
    ),
    Model("bert", BERT),
    Model("bert", {**BERT, "is_decoder": True}),
    *(
        Model(name, BERT)
        for name in (
            "ernie",
            "electra",
            "albert",
            "roberta",
            "xlm-roberta",
            "xlm-roberta-xl",
            "camembert",
            "roberta-prelayernorm",
            "data2vec-text",
            "layoutlm",
            "splinter",
            "biogpt",
            "clip_text_model",
        )
    ),
    Model("megatron-bert", BERT, calls="bert"),
    Model("bert-generation", BERT),
    Model("xmod", {**BERT, "default_language": "en_XX"}),
    Model("gpt-sw3", GPT2),
    Model(
        "distilbert",
        {"vocab_size": 50, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    Model("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    Model("gpt2", {**GPT2, "scale_attn_weights": False}),
    Model(
        "gpt_neo",
        {
            "vocab_size": 50,
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "window_size": 9,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
            "intermediate_size": 64,
        },
        calls="gpt_neo",
    ),
    Model("gpt_bigcode", GPT2),
    Model("gpt_bigcode", {**GPT2, "multi_query": False, "scale_attn_weights": False}),
    Model("openai-gpt", GPT2, calls="openai"),
    Model("imagegpt", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, calls="imagegpt"),
    Model("ibert", BERT, calls="ibert"),
    Model("rembert", {**BERT, "input_embedding_size": 16, "output_embedding_size": 16}, calls="bert"),
    Model("roc_bert", {**BERT, "pronunciation_vocab_size": 50, "shape_vocab_size": 50}),
    Model("clap_text_model", {**BERT, "projection_dim": 16}, net="ClapTextModel"),
    Model("opt", {**BERT, "ffn_dim": 64, "word_embed_proj_dim": 64}, scaled=True),
    Model(
        "xglm",
        {
            "vocab_size": 50,
            "d_model": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
        },
        calls="bart",
    ),
    Model("siglip_text_model", BERT, net="SiglipTextModel"),
    *(
        Model(name, IMAGE, "pixels")
        for name in (
            "vit",
            "deit",
            "vit_msn",
            "ijepa",
            "dinov2",
            "dinov2_with_registers",
            "clip_vision_model",
            "vit_mae",
        )
    ),
    Model("siglip_vision_model", {**IMAGE, "vision_use_head": False}, "pixels"),
    Model("videomae", {**IMAGE, "num_frames": 4}, "video"),
    Model("vivit", {**IMAGE, "num_frames": 4, "tubelet_size": [2, 4, 4]}, "video"),
    Model("aimv2_vision_model", IMAGE, "pixels"),
    Model("aimv2_vision_model", {**IMAGE, "is_native": True}, "pixels"),
    Model("siglip2_vision_model", {**IMAGE, "num_patches": 36, "vision_use_head": False}, "patches"),
    Model("audio-spectrogram-transformer", {**BERT, "max_length": 40, "num_mel_bins": 24, "patch_size": 8}, "mels"),
    *(Model(name, SPEECH, "wave") for name in ("hubert", "wav2vec2", "unispeech", "unispeech-sat", "data2vec-audio")),
    Model("wavlm", {**SPEECH, "num_buckets": 16, "max_bucket_distance": 30}, "wave", "wavlm"),
    Model("wav2vec2-conformer", SPEECH, "wave", "conformer"),
    Model("wav2vec2-conformer", {**SPEECH, "position_embeddings_type": "rotary"}, "wave", "conformer"),
    Model("wav2vec2-bert", W2V_BERT, "features", "conformer"),
    Model("wav2vec2-bert", {**W2V_BERT, "position_embeddings_type": "relative"}, "features", "conformer"),
    Model(
        "seamless_m4t_v2",
        {**SEAMLESS, "speech_encoder_chunk_size": 5, "speech_encoder_left_chunk_num": 1},
        "features",
        "conformer",
        ("speech_encoder",),
        via="speech_encoder",
        attention="sdpa",  # eager adds the bool mask to the scores
    ),
    *(
        Model(name, SEAMLESS, inputs, calls, parts, via=via)
        for name in ("seamless_m4t", "seamless_m4t_v2")
        for inputs, calls, parts, via in (
            ("features", "conformer", ("speech_encoder",), "speech_encoder"),
            ("text", "interface", ("encoder",), "text_encoder"),
            ("decoding", "interface", ("decoder", "cross"), "text_decoder"),
        )
    ),
    Model(
        "speecht5",
        {
            **PAIR,
            "hidden_size": 64,
            "encoder_max_relative_position": 12,
            "encoder_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        },
        "hidden",
        "bart",
        BOTH,
    ),
    Model(
        "moonshine",
        {**SMALL, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 4}
        | {"decoder_num_attention_heads": 4, "decoder_start_token_id": 1, "pad_head_dim_to_multiple_of": 8},
        "speech",
        parts=BOTH,
    ),
    Model("dia_encoder", HEAD, net="models.dia.modeling_dia.DiaEncoder"),
    Model("dia_decoder", {**HEAD, **DIA}, "channels", parts=("", "cross"), net="models.dia.modeling_dia.DiaDecoder"),
    Model(
        "musicgen_decoder",
        {**BERT, "ffn_dim": 64, "num_codebooks": 2},
        "codebooks",
        parts=("", "cross"),
        net="models.musicgen.modeling_musicgen.MusicgenDecoder",
    ),
    Model(
        "vits",
        {**BERT, "window_size": 4, "ffn_dim": 64, "flow_size": 64, "spectrogram_bins": 9},
        "vits",
        "bart",
        via="text_encoder",
    ),
    *(
        Model(name, {**BERT, "relative_attention": True, **more}, calls=calls)
        for name, calls, more in (
            ("deberta", "deberta", {"pos_att_type": ["c2p", "p2c"], "position_biased_input": False}),
            ("deberta", "deberta", {"pos_att_type": "c2p", "max_relative_positions": 12}),
            (
                "deberta-v2",
                "deberta_v2",
                {"pos_att_type": "p2c|c2p", "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
            ),
            ("deberta-v2", "deberta_v2", {"pos_att_type": ["p2c"], "max_relative_positions": 12}),
        )
    ),
    Model("xlnet", XLNET, calls="xlnet"),
    Model("xlnet", {**XLNET, "attn_type": "uni", "clamp_len": 9}, "ids", "xlnet"),
    Model("swin", SWIN, "pixels"),
    Model("swinv2", SWIN, "pixels", "swinv2"),
    Model("swinv2", {**SWIN, "pretrained_window_sizes": [3, 3]}, "pixels", "swinv2"),
    Model("beit", {**IMAGE, "use_relative_position_bias": True}, "pixels"),
    Model("beit", {**IMAGE, "use_absolute_position_embeddings": True}, "pixels"),
    Model(
        "sam_vision_model",
        {**IMAGE, "window_size": 4, "global_attn_indexes": [1], "output_channels": 8},
        "pixels",
        "sam",
    ),
    Model(
        "qwen2_vl_vision",
        {**TOWER, "embed_dim": 64, "hidden_size": 32},
        "frames",
        net="models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        given=GRID,
    ),
    Model("qwen2_5_vl_vision", {**WINDOWS, "fullatt_block_indexes": []}, "frames", given=(("grid", (4, 4)),)),
    Model("qwen2_5_vl_vision", {**WINDOWS, "fullatt_block_indexes": [0, 1]}, "frames", given=GRID),
    Model(
        "qwen2_5_omni_vision_encoder",
        {**WINDOWS, "fullatt_block_indexes": [0, 1]},
        "frames",
        net=f"{OMNI2}VisionEncoder",
        given=GRID,
    ),
    Model(
        "qwen3_omni_moe_vision_encoder",
        {**TOWER, **QWEN3, "deepstack_visual_indexes": [0]},
        "frames",
        net=f"{OMNI3}VisionEncoder",
        given=GRID,
    ),
    *(
        Model(name, {**TOWER, **QWEN3} | deepstack, "frames", given=GRID)
        for name, deepstack in (
            ("qwen3_vl_vision", {"deepstack_visual_indexes": [0]}),
            ("qwen3_vl_moe_vision", {"deepstack_visual_indexes": [0]}),
            ("qwen3_5_vision", {}),
            ("qwen3_5_moe_vision", {}),
        )
    ),
    Model("pixtral", IMAGE, "pixels", given=(("grid", (6, 6)),)),
    *(
        Model(
            "paligemma",
            {**PALI, "text_config": {**HEAD, **text}},
            "prefix",
            parts=("vision", "text"),
            given=(("prefix_lengths", 20),),
        )
        for text in (
            {"model_type": "gemma"},
            {"model_type": "gemma2", "sliding_window": 25, "attn_logit_softcapping": 2.0},
        )
    ),
    Model("dinov3_vit", {**IMAGE, "num_register_tokens": 2}, "pixels", given=(("grid", (6, 6)),)),
)
