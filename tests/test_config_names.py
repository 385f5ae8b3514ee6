"""Names that a class takes for another one: a file may have either, and the layer is the same."""

import numpy as np
import pytest

import relpos_np as rp

SAME = {
    "speecht5": ("encoder", {"encoder_attention_heads": 6}, {"num_attention_heads": 6}),
    "seamless_m4t": ("decoder", {"decoder_attention_heads": 8}, {"num_attention_heads": 8}),
    "moonshine": ("decoder", {"decoder_num_hidden_layers": 4}, {"num_hidden_layers": 4}),
    "swin": ("", {"num_heads": [2, 4, 8, 16]}, {"num_attention_heads": [2, 4, 8, 16]}),
    "granitemoehybrid": ("", {"layer_types": ["attention"] * 32}, {"layers_block_type": ["attention"] * 32}),
    "bamba": ("", {"layers_block_type": ["attention"] * 32}, {"layer_types": ["attention"] * 32}),
    "glm4_moe_lite": ("", {"qk_rope_head_dim": 32}, {"head_dim": 32}),
}


@pytest.mark.parametrize("name", SAME)
def test_either_name_is_read(name):
    part, own, other = SAME[name]
    told = rp.from_config({"model_type": name, **own}, layer=0, part=part).as_dict()
    assert rp.from_config({"model_type": name, **other}, layer=0, part=part).as_dict() == told
    try:
        usual = rp.from_config({"model_type": name}, layer=0, part=part).as_dict()
    except rp.RelposError:  # a layer without softmax
        usual = None
    assert told != usual


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_sizes_of_the_other_stack_are_no_surprise(part):
    layer = rp.from_config({"model_type": "t5", "num_layers": 6, "num_decoder_layers": 4}, layer=0, part=part)
    assert layer.layers == (6 if part == "encoder" else 4)


@pytest.mark.parametrize(
    ("name", "part", "more"),
    [
        ("modernbert", "", {"position_embedding_type": "absolute", "reference_compile": True, "decoder_bias": True}),
        ("bart", "decoder", {"replacing_rate": 0, "classif_dropout": 0.0, "normalize_before": False, "prefix": " "}),
        ("cohere2", "", {"_sliding_window_pattern": 4, "position_embedding_type": "rope_gptj", "layer_switch": 4}),
        ("stablelm", "", {"rotary_scaling_factor": 1.0}),
        ("stablelm_epoch", "", {"rope_pct": 0.25}),
        ("gpt_neox", "", {"partial_rotary_factor": 0.25}),
        ("mimo_v2_flash", "", {"partial_rotary_factor": 0.334}),
        ("gpt_bigcode", "", {"inference_runner": 0}),
        ("opt", "", {"output_projection": True}),
        ("qwen2_5_vl_vision", "", {"in_chans": 3, "num_key_value_heads": 16}),
        ("qwen2", "", {"mask_value": -10000}),
        ("gemma4_text", "", {"rope_local_base_freq": 10000.0}),
        ("mllama_text_model", "", {"vision_num_cross_attention_layers": 8}),
        ("deepseek_v2", "", {"lm_head": True, "use_mla": True}),
        ("qwen3_omni_moe_vision_encoder", "", {"apply_vit_abs_pos_embed": True}),
        ("llama4_text", "", {"for_llm_compressor": True, "nope_layer_interval": 4}),
        ("mbart", "cross", {"is_decoder": True, "add_cross_attention": True}),
        ("llama", "", {"use_cla": False, "cla_share_factor": 2, "class_num": 0, "use_rotary_pos_emb": True}),
        ("umt5", "encoder", {"scalable_attention": True}),
        ("qwen3_next", "", {"output_gate_type": "swish", "layer_types": ["full_attention"] * 48}),
    ],
)
def test_keys_of_published_files_that_change_nothing(name, part, more):
    types = {key: value for key, value in more.items() if key == "layer_types"}
    told = rp.from_config({"model_type": name, **types}, layer=0, part=part).as_dict()
    assert rp.from_config({"model_type": name, **more}, layer=0, part=part).as_dict() == told


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt_neox", {"partial_rotary_factor": 0.5}),
        ("llama4_text", {"nope_layer_interval": 2}),
        ("llama", {"use_cla": True, "cla_share_factor": 2}),
        ("llama", {"use_rotary_pos_emb": False}),
        ("qwen2_5_vl_vision", {"num_key_value_heads": 4}),
        ("qwen2", {"mask_value": -1}),
        ("gemma4_text", {"rope_local_base_freq": 5000.0}),
        ("cohere2", {"_sliding_window_pattern": 2}),
        # It has its share among the parameters of each type of layer; beside them it is the usual one, or nothing.
        ("mimo_v2_flash", {"partial_rotary_factor": 0.5}),
    ],
)
def test_the_same_keys_are_refused_where_they_say_something_else(name, more):
    with pytest.raises(rp.RelposValueError, match=f"{next(iter(more))}: .*ignore="):
        rp.from_config({"model_type": name, **more}, layer=0)


def test_types_that_say_little():
    """Baichuan is told by its width; the layers of Nemotron-NAS have key heads of their own, or no attention."""
    baichuan = {"model_type": "baichuan", "num_attention_heads": 32, "hidden_size": 4096}
    assert rp.from_config(baichuan, layer=0).schemes[0].words() == "Rotary(base=10000)"
    wide = rp.from_config(baichuan | {"num_attention_heads": 40, "hidden_size": 5120}, layer=0)
    assert (wide.schemes[0].words(), wide.head_dim) == ("ALiBi(form='key')", 128)
    blocks = [{"attention": own} for own in ({"n_heads_in_group": 4}, {"no_op": True}, {"n_heads_in_group": 8})]
    nas = {"model_type": "nemotron-nas", "num_hidden_layers": 3, "num_attention_heads": 16, "block_configs": blocks}
    assert [layer.kv_heads for layer in rp.configs.layers_of(nas)] == [4, 2]
    with pytest.raises(rp.RelposError, match="layer 1 is no attention"):
        rp.from_config(nas, layer=1)
    blocks[2]["attention"]["window_length"] = 512
    with pytest.raises(rp.RelposError, match="window_length 512 of layer 2"):
        rp.from_config(nas, layer=2)


def test_a_small_deepseek_has_no_latent_vectors():
    """`use_mla`: false, in DeepSeek-VL2's smallest model: the channels of latent heads are stored as 0."""
    stored = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0) | {"use_mla": False}
    sizes = {"hidden_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 10, "kv_lora_rank": None}
    layer = rp.from_config({"model_type": "deepseek_v2", **sizes, **stored}, layer=0)
    assert (layer.heads, layer.head_dim, layer.before) == (10, 128, ())
    assert layer.schemes[0].words() == "Rotary(base=10000)"


def test_layers_behind_an_encoder_are_named():
    for name, part, default in (("wav2vec2-bert", "", False), ("seamless_m4t_v2", "speech_encoder", True)):
        for given, noted in (({}, default), ({"add_adapter": True}, True), ({"add_adapter": False}, False)):
            layer = rp.from_config({"model_type": name, **given}, layer=0, part=part)
            assert ("the adapter behind these layers" in layer.describe()) == noted


def test_transformer_xl_is_read_though_its_class_is_gone():
    bare = rp.from_config({"model_type": "transfo-xl"}, layer=17)
    assert (bare.layers, bare.heads, bare.head_dim, bare.window) == (18, 16, 64, (1599, None))
    assert rp.from_config({"model_type": "transfo-xl", "same_length": False}, layer=0).window is None
    with pytest.raises(rp.RelposError, match="attn_type: 1 is not understood in transfo-xl"):
        rp.from_config({"model_type": "transfo-xl", "attn_type": 1}, layer=0)


@pytest.mark.parametrize(("clamp", "same"), [(-1, False), (4, False), (4, True)])
def test_transformer_xl_by_its_formula(rng, clamp, same):
    """Entry by entry: seven keys, of which the first two are of the segment before."""
    heads, dim, q_len, k_len, memory = 3, 4, 5, 7, 6
    small = {"model_type": "transfo-xl", "d_model": 8, "n_head": heads, "d_head": dim}
    small |= {"mem_len": memory, "clamp_len": clamp, "same_length": same}
    shapes = {"r_w_bias": (heads, dim), "r_r_bias": (heads, dim), "r_net.weight": (heads * dim, 8)}
    u, v, weight = (rng.standard_normal(shape) for shape in shapes.values())
    weights = dict(zip((f"transformer.layers.1.dec_attn.{name}" for name in shapes), (u, v, weight), strict=True))
    q, k, values = (rng.standard_normal((1, heads, length, dim)) for length in (q_len, k_len, k_len))
    scores = np.full((heads, q_len, k_len), -np.inf)
    for h, i, j in np.ndindex(scores.shape):
        distance = i + k_len - q_len - j
        if distance >= 0 and not (same and distance >= memory):
            angles = (min(distance, clamp) if clamp > 0 else distance) / 10000.0 ** (np.arange(0, 8, 2) / 8)
            row = weight[h * dim : (h + 1) * dim] @ np.concatenate([np.sin(angles), np.cos(angles)])
            scores[h, i, j] = ((q[0, h, i] + u[h]) @ k[0, h, j] + (q[0, h, i] + v[h]) @ row) * dim**-0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ values[0]
    layer = rp.from_config(small, layer=1)
    assert np.allclose(layer.bind(weights)(q, k, values)[0], expected, rtol=1e-12, atol=1e-12)


def test_parakeet_is_a_conformer():
    """With names of its own, in a file of the encoder and in one of the whole model."""
    own = {"model_type": "parakeet_encoder", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"subsampling_conv_stride": 2, "dropout_positions": 0.0, "convolution_bias": False, "scale_input": False}
    layer = rp.from_config(own | more, layer=1)
    assert layer.schemes[0].options == {"variant": "conformer"}
    assert layer.schemes[0].weights["rows"] == "layers.1.self_attn.relative_k_proj.weight"
    whole = {"model_type": "parakeet_ctc", "encoder_config": own | more, "vocab_size": 9}
    assert rp.from_config(whole, layer=1, part="encoder").schemes == layer.schemes
    with pytest.raises(rp.RelposError, match="num_key_value_heads: 2 is not understood in parakeet_encoder"):
        rp.from_config(own | {"num_key_value_heads": 2}, layer=0)
