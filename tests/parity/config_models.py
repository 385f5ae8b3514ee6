"""Tiny models with random weights, one or more for each model type whose configuration is understood."""

from tests.parity.config_sizes import (
    BERT,
    BOTH,
    BOXES,
    DIA,
    GPT,
    GPT2,
    GRID,
    HEAD,
    IMAGE,
    LAYOUT,
    MPT,
    OMNI2,
    OMNI3,
    PAIR,
    PALI,
    QWEN3,
    SEAMLESS,
    SMALL,
    SPEECH,
    SWIN,
    T5,
    TOWER,
    W2V_BERT,
    WINDOWS,
    XLNET,
    Model,
)
from tests.parity.config_text import TEXT

MODELS = (
    *TEXT,
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
    Model("nllb-moe", {**PAIR, "num_experts": 2, "encoder_sparse_step": 2}, "pair", parts=BOTH),
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
    Model("parakeet_encoder", {**BERT, "num_mel_bins": 16, "subsampling_conv_channels": 8}, "bins", calls="parakeet"),
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
