"""Keys that change nothing in attention, in any model; a key that is neither read nor one of these is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relpos_np.configs.layer import LayerAttention


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A key whose name contains one of these may change attention, whatever its other words are.
TOUCHES = _names("""
    alibi attn attention band bias block bucket capping causal chunk clip conv_pos cross_ dilat global head index kv
    local mask mscale multiplier nope norm_q norm_k pos_ position qk query relative rel_ rope rotary scal sink slid
    softcap sparse stride temperature window bidirectional logn ntk prefix softmax soft_cap swa xpos yarn
""")
_LETTERS = _names("q k v")
# Words that say what a key is about; a key that has one, and touches nothing, is about that.
_WORDS = _names("""
    act activation activations adapter adaptor altup audio aux auxiliary bbox beams bos box channels checkpoint
    checkpointing classes classif classifier codebook codebooks codec codevector coef coefficient conv cost ctc
    denoising depthwise dice distogram downsample downsampling draft drop dropout droppath dtype embd embeds eos eps
    epsilon expert experts feat featmap feature features feedforward ff ffn filter focal forced fpn frames freeze
    fusion gelu giou gnn hc hop id ids image images img init initializer inner input inputs intermediate jitter kernel
    kernels label labels lang languages layerdrop layernorm linear lm logits lora loss losses mamba matcher mel mels
    mlp modality moe mtp ngram norm normalize normalized object objects onnx pad padding patch patches pdrop pitch
    pixel pixels pooler pooling postnet predictor prenet probs projector prompt prototypes qformer quantization
    quantize quantizer quantizers register registers resampler resnet retrieval routed router routing sampling
    segmentation semantic smoothing speaker speakers spectrogram speech ssm std stem subsample subsampling summary
    suppress swiglu talker tdnn tie tied timestamp token tokenizer tokens topk tts upsample upsampling video vision
    visual vocab vocabulary vocoder wavenet xpath xvector
""")

# Keys that are about something else though their names do not say so, in groups, each with its reason.
NEUTRAL: Mapping[str, frozenset[str]] = {
    "dropout acts in training only": _names("""
        attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_dropout attn_dropout_prob
        attn_pdrop positional_dropout attention_hidden_dropout pos_dropout replacing_rate
    """),
    "biases of projections, which are in what is passed as q, k and v, and of other layers": _names("""
        attention_bias attention_out_bias qkv_bias use_qkv_bias use_bias bias mlp_bias conv_bias enable_bias
        add_qkv_bias lm_head_bias norm_bias proj_bias query_bias key_bias value_bias decoder_bias classifier_bias
        no_bias add_bias_linear attn_qkv_bias attn_out_bias use_attn_bias use_mlp_bias qkv_proj_bias head_bias
        use_conv_bias ffn_bias skip_bias_add skip_bias_add_qkv bias_dropout_fusion offset_alibi add_bias_logits
        qkv_fc_bias
    """),
    "which implementation computes it, and what else is returned": _names("""
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation attn_impl
        reorder_and_upcast_attn deterministic_flash_attn output_attentions use_flash_attn use_flash_attention
        use_flash_attention_2 _flash_attn_2_enabled flash_attn fused_bias_fc masked_softmax_fusion
        attention_softmax_in_fp32 scale_attention_softmax_in_fp32 slow_but_exact use_memory_efficient_attention
        use_xformers fused_dropout_add_ln use_fused_rope upcast_attn fp32_attention softmax_use_fp32 use_flash_rotary
        kv_cache_dtype reference_compile repad_logits_with_grad inference_runner move_model_to_device softmax_in_fp32
        use_cache_quantization use_cache_kernel
    """),
    "embeddings of a diffusion model's time step and of its text, and how its frames were made": _names("""
        flip_sin_to_cos freq_shift pooled_projection_dim text_embed_dim time_embed_dim temporal_compression_ratio
    """),
    "spans that are masked in training": _names("""
        mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length
        mask_feature_min_masks use_mask_token mask_channel_prob mask_channel_length mask_channel_min_space
        mask_channel_other mask_channel_selection mask_time_min_space mask_time_other mask_time_selection
        no_mask_channel_overlap no_mask_time_overlap
    """),
    "factors outside attention": _names("""
        embedding_multiplier logits_scaling logit_scale residual_multiplier scale_embedding scale_decoder_outputs
        final_logit_softcapping routed_scaling_factor layer_scale_init_value layerscale_value router_scaling_factor
        scale_emb scale_depth dim_model_base logit_scale_init_value
    """),
    "heads for tasks, and losses": _names("""
        semantic_loss_ignore_index sparse_pred_ignore_index sparse_prediction use_auxiliary_head vision_use_head
        use_guided_attention_loss guided_attention_loss_num_heads guided_attention_loss_sigma
        guided_attention_loss_scale contrastive_logits_temperature alignment_heads pooler_num_attention_heads
        pooler_size_per_head image_token_index ignore_index use_lm_head tie_lm_head untie_lm_head enable_lm_head_fp32
        seq_classif_head class_num pool_type dense_list mask_init_id output_projection lm_head norm_head norm_softmax
    """),
    "layers between those of attention": _names("""
        num_local_experts router_bias resblock_dilation_sizes resblock_kernel_sizes noise_scale noise_scale_duration
        pool_scales encoder_sparse_step decoder_sparse_step moe_layer_start_index moe_layer_end_index encoder_stride
        conv_stride conv_pos_kernel_size adapter_attn_dim adapter_stride num_conv_pos_embeddings
        num_conv_pos_embedding_groups conv_pos_batch_norm tdnn_dilation chunk_size_feed_forward
        moe_router_enable_expert_bias use_routing_bias first_k_dense_replace n_group topk_method scoring_func
        num_nextn_predict_layers ep_size num_dense_layers mlp_only_layers num_hidden_groups
        net_structure_type gap_size down_scale_factor num_memory_blocks layers_to_keep use_associative_scan
        linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max
        use_parallel_residual use_parallel_block use_gated_activation apply_residual_connection_post_layernorm
        num_feat_extract_layers apply_spec_augment num_ln_in_parallel_attn parallel_attn classif_dropout afn
        feed_forward_proj legacy moe_k expansion_ratio embedding_fraction time_step_limit tubelet_size
        index_share_for_mtp_iteration num_hash_layers
        leaky_relu_slope num_clusters num_codevectors_per_group num_negatives replace_prob reduction_factor
        reshape_hidden_states out_indices stage_names codec_config depth_decoder_config depth_separable_num_layers
        flow_size prior_encoder_num_flows speaking_rate decoder_num_hidden_layers enable_pronunciation enable_shape
        force_dequant verbose use_xentropy init_config eagle_config target_hidden_size dense_seq_output end_n_top
        rmsnorm multi_gate mm_hidden_size use_mm_proj
        start_n_top use_mems_eval use_mems_train dspark_block_size dspark_markov_rank
    """),
    "where windows begin, in a class that has none": _names("max_window_layers"),
    "lengths that tables are made for; rules of rotary positions that need one take it": _names("""
        max_position_embeddings n_positions max_source_positions max_target_positions max_speech_positions
        max_text_positions t2u_max_position_embeddings max_2d_position_embeddings max_length min_length seq_length
        max_sequence_length max_seq_len max_seq_length model_max_length n_ctx context_length initial_context_length
        max_trained_positions ntk_max_position_embeddings
    """),
    "widths, which the numbers of heads and of their channels leave nothing to say of": _names("""
        hidden_size embedding_size word_embed_proj_dim d_model d_rel hidden_dim out_hidden_size projection_dim
        output_hidden_size output_embedding_size backbone_hidden_size decoder_hidden_size projection_size
        projection_hidden_size in_chans unit_embed_dim spkr_embed_dim coordinate_size shape_size
        shape_embed_dim pronunciation_embed_dim text_dim
        freq_dim
    """),
    "generation, training and what all configurations have": _names("""
        temperature architectures architecture transformers_version diffusers_version _diffusers_version
        adapters_version _name_or_path name_or_path model_name _class_name use_cache cache_implementation torchscript
        return_dict output_hidden_states is_encoder_decoder problem_type finetuning_task task_specific_params
        tf_legacy_loss pruned_heads use_bfloat16 bf16 fp16 fp32 use_fp32 do_sample early_stopping length_penalty
        repetition_penalty diversity_penalty num_beam_groups top_k top_p typical_p num_return_sequences
        return_dict_in_generate output_scores remove_invalid_values pretraining_tp prefix _commit_hash
        gradient_checkpointing mode model_parallel_size tensor_parallel tensor_parallel_degree tensor_parallel_size
        seed total_flos is_llama_config unsloth_version unsloth_fixed use_tensor_core description language name
        target_model_type
        onnx_safe scale_grad_by_freq residual_in_fp32 init_method init_method_std mup_enabled use_mup rescale_every
        _from_model_config sequence_parallel_enabled num_parallel_samples gradient_accumulation_steps directionality
        use_parallel_embedding use_embedding_sharing output_past normalize_before normalize_embedding
        add_final_layer_norm add_final_layernorm extra_pos_embeddings static_position_embeddings save_step ve_type
        auto_map quant_config compression_config tie_embeddings_and_weights share_encoder_decoder_embeddings
        do_blenderbot_90_layernorm modal_type author created_date license welcome antemplate
        use_scaled_init_for_output_weights for_llm_compressor max_tokenizer_truncation decay min_decay inv_gamma power
        optimization_step update_after_step
    """),
}
_NEUTRAL = frozenset().union(*NEUTRAL.values())
# What is on unless a key says false.
_ON = _names("causal rope rotary scal softmax position")


def _norms(layer: LayerAttention) -> bool:
    return any("norm" in str(step) for step in layer.before)


def _turns(layer: LayerAttention) -> bool:
    return layer.added is None and not any(plan.scheme != "Rotary" for plan in layer.schemes)


def _base(layer: LayerAttention) -> Any:
    return next((plan.options.get("base") for plan in layer.schemes if plan.scheme == "Rotary"), None)


def _share(layer: LayerAttention) -> Any:
    plans = [plan.options for plan in layer.schemes if plan.scheme == "Rotary" and "base" in plan.options]
    return plans[0].get("dim", layer.head_dim) / layer.head_dim if plans else None


def _interleaved(layer: LayerAttention) -> Any:
    layouts = {plan.options.get("layout", "half") for plan in layer.schemes if plan.scheme == "Rotary"}
    return layouts == {"interleaved"} if layouts else None


# Keys that a class may not read, which then must say what the layer is all the same.
_SAYS: dict[tuple[str, ...], Callable[[LayerAttention], Any]] = {
    (
        "head_dim",
        "head_size",
        "attention_head_dim",
        "attention_head_size",
        "kv_channels",
        "d_kv",
        "n_embd_head",
        "qk_head_dim",
    ): lambda at: at.head_dim,
    ("v_head_dim",): lambda at: at.value_dim,
    ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"): lambda at: at.kv_heads,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): lambda at: at.heads,
    ("num_key_value_groups",): lambda at: at.heads // at.kv_heads,
    ("is_causal", "causal", "use_causal_mask"): lambda at: at.causal,
    ("use_qk_norm", "qk_norm", "use_qk_layernorm", "qk_layernorm", "use_qknorm"): _norms,
    (
        "use_rope",
        "rotary",
        "use_rotary",
        "use_rotary_embeddings",
        "use_rotary_position_embeddings",
        "use_rotary_pos_emb",
    ): _turns,
    ("rope_interleaved", "rope_interleave", "rotary_emb_interleaved", "use_interleaved_rope"): _interleaved,
    ("n_layer", "n_layers", "num_layers", "num_hidden_layers"): lambda at: at.layers,
    ("n_embd", "d_model", "n_embed"): lambda at: at.heads * at.head_dim,
    ("rotary_emb_base", "rope_theta"): _base,
    ("partial_rotary_factor", "rotary_pct"): _share,
    ("use_alibi", "alibi"): lambda at: any(plan.scheme == "ALiBi" for plan in at.schemes),
    ("scale_attn_weights",): lambda at: at.scale != 1,
}
_SAID = {name: said for names, said in _SAYS.items() for name in names}
# Values that are those of any model, or of the class of BERT, which later classes wrote into their files.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "rotary_emb_fraction": (1, 1.0),
    "rope_ratio": (1, 1.0),
    "full_attn_mod": (1,),
    "mask_value": (-10000, -10000.0),
    "interpolate_factor": (1, 1.0),
    "use_mrope": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (1, 1.0),
    "rope_scaling_type": ("default",),
    "attention_type": ("full_attention", "original_full"),
}


def harmless(name: str, value: Any, layer: LayerAttention) -> bool:
    """Whether a key that the reader of a layer did not take changes nothing in it."""
    if value is None or name in _NEUTRAL or name.endswith("_token_id") or value in ({}, [], ""):
        return True
    if name in _USUAL and value in _USUAL[name]:
        return True
    if name == "position_embedding_type" and value in ("rope", "rotary", "rope_gptj"):
        return _turns(layer)
    if name in _SAID:
        return bool(value == _SAID[name](layer))
    lower = name.lower()
    if value is False:
        return not any(part in lower for part in _ON)
    if isinstance(value, Mapping) and name.endswith("_config") and name != "quantization_config":
        # A model within this one.
        return False
    return harmless_name(name)


def harmless_name(name: str) -> bool:
    """Whether the words of a key say that it changes nothing, in any model and whatever its value is."""
    words = set(re.split(r"[_\W\d]+", name.lower()))
    return name in _NEUTRAL or (not touches(name) and bool(words & _WORDS))


def touches(name: str) -> bool:
    """Whether a word of a key says that it may be about attention."""
    lower = name.lower()
    return any(part in lower for part in TOUCHES) or bool(set(re.split(r"[_\W\d]+", lower)) & _LETTERS)
