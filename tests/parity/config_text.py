"""Tiny rotary text models with random weights, one or more for each model type whose configuration is understood."""

from tests.parity.config_sizes import (
    BERT,
    BOTH,
    DBRX,
    DELTA,
    DEPTH,
    DYNAMIC,
    FOUR,
    GEMMA,
    GPT2,
    HEAD,
    INDEXER,
    KV,
    LATENT,
    LATENT_LONG,
    LATENT_VALUES,
    LLAMA3,
    LLAMA4,
    LONGCAT,
    LONGROPE,
    MAGNITUDES,
    MAMBA,
    MISTRAL4,
    MOE,
    MROPE,
    OMNI2,
    OMNI3,
    PAIR,
    PHI_AUDIO,
    PHI_VISION,
    PLAIN,
    SHARING,
    SMALL,
    THREE_N,
    YARN,
    ZAMBA,
    Model,
)

TEXT = (
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
)
