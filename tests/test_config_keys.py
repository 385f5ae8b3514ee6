"""Keys as files have them: read, known to change nothing, left out by name, or refused all at once."""

import json

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands.main import main
from relpos_np.configs import layers_of, parts_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
FOREIGN = {
    "use_dynamic_ntk": True,
    "use_logn": True,
    "use_xpos": True,
    "bidirectional": True,
    "is_bidirectional": True,
    "prefix_lm": True,
    "swa": 128,
    "yarn_factor": 4.0,
    "ntk_alpha": 2.0,
    "logits_soft_cap": 30.0,
    "softmax_type": "off_by_one",
    "use_cla": True,
    "never_heard_of": 3,
    "n_layer": 7,
    "rotary_emb_base": 5.0,
    "is_causal": False,
    "use_rope": False,
    "k_norm": True,
    "use_qk_norm": True,
    "head_dim_of_values": 3,
    "encoder_config": {"hidden_size": 3},
}
# What classes wrote into their files, and other libraries into theirs.
DUMPED = {
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "pruned_heads": {},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "temperature": 1.0,
    "top_k": 50,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "exponential_decay_length_penalty": None,
    "id2label": {"0": "LABEL_0"},
    "task_specific_params": None,
    "torch_dtype": "float16",
    "use_mrope": False,
    "rope_interleaved": False,
    "is_causal": True,
    "use_logn_attn": False,
    "use_dynamic_ntk": False,
    "position_embedding_type": "absolute",
    "num_key_value_groups": 1,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "draft_vocab_size": 32000,
    "n_layer": 2,
    "n_embd": 64,
    "rotary_emb_base": 10000,
    "unsloth_version": "2026.1",
    "scale_attn_weights": True,
}


def test_keys_that_nothing_is_known_of_are_refused_all_at_once():
    with pytest.raises(rp.RelposValueError) as raised:
        rp.from_config(LLAMA | FOREIGN, layer=0)
    for name in FOREIGN:
        assert f"{name}: " in str(raised.value), name
    assert str(raised.value).count("is not understood") == len(FOREIGN)


def test_null_false_and_what_is_usual_pass():
    assert rp.from_config(LLAMA | DUMPED, layer=0) == rp.from_config(LLAMA, layer=0)


def test_keys_are_left_out_by_name(capsys, tmp_path):
    foreign = {"use_xpos": True, "rope_scaling": {"type": "linear", "factor": 2.0, "unheard": 1}}
    with pytest.raises(rp.RelposValueError, match=r"use_xpos: .*ignore=\('use_xpos',\)|unheard"):
        rp.from_config(LLAMA | foreign, layer=0)
    layer = rp.from_config(LLAMA | foreign, layer=0, ignore=["use_xpos", "unheard"])
    assert layer.schemes[0].options["frequencies"][0] == 0.5
    assert layer.ignored == ("use_xpos", "unheard")
    assert "ignored keys    use_xpos, unheard" in layer.describe()
    assert json.loads(json.dumps(layer.as_dict()))["ignored"] == ["use_xpos", "unheard"]
    assert layers_of(LLAMA | foreign, ignore=iter(["use_xpos", "unheard"]))[1].ignored == layer.ignored
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | foreign))
    assert main(["config", str(tmp_path), "--ignore", "use_xpos,unheard"]) == 0
    assert "ignored keys    use_xpos, unheard" in capsys.readouterr().out
    for wrong in (["use_xpo"], ["model_type"]):
        with pytest.raises(rp.RelposValueError, match="ignore: "):
            rp.from_config(LLAMA | foreign, layer=0, ignore=wrong)
    with pytest.raises(rp.RelposTypeError, match="ignore: expected names"):
        rp.from_config(LLAMA | foreign, layer=0, ignore="use_xpos")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "an adapter.*open the config.json of org/base"),
        (
            {"_class_name": "FluxPipeline", "transformer": ["diffusers", "X"], "vae": ["diffusers", "Y"]},
            "a pipeline.*open transformer/config.json$",
        ),
        ({"hidden_size": 8, "num_attention_heads": 2}, "bert_config.json"),
        ({"dim": 8, "n_heads": 2}, "params.json"),
        ({"weight_map": {}}, "a list of files with weights"),
        ({"tokenizer_class": "X"}, "of a tokenizer"),
        ({"model_type": "resnet"}, "model_type: 'resnet' has no attention$"),
        ({"model_type": "longformer"}, "'longformer' attends a window .* pass both as mask$"),
        ({"model_type": "funnel"}, "'funnel' halves its queries"),
        ({"model_type": "SegformerForSemanticSegmentation"}, "attends keys that convolutions make fewer"),
        ({"model_type": "phi4", "architectures": ["Phi3ForCausalLM"]}, 'that of phi3; .*write "model_type": "phi3"$'),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}, "that of gemma3_text"),
        ({"model_type": "unheard", "architectures": 7}, "'unheard' is not understood$"),
        ({"model_type": "qwen", "use_dynamic_ntk": True}, r"ignore=\('use_dynamic_ntk',\) reads what"),
        ({"model_type": "chatglm", "rope_ratio": 16}, "rope_ratio: 16 is read in two ways"),
        ({"model_type": "baichuan", "hidden_size": 64}, "hidden_size: 64 in a configuration of baichuan"),
        ({"model_type": "nemotron-nas"}, "block_configs: "),
    ],
)
def test_what_to_open_instead(config, said):
    with pytest.raises(rp.RelposValueError, match=said):
        rp.from_config(config, layer=0)


def test_a_folder_without_a_configuration_says_what_it_has(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    with pytest.raises(rp.RelposValueError, match=r"open the config\.json of org/base"):
        rp.from_config(tmp_path, layer=0)


def test_parts_that_are_not_understood_are_named():
    config = {
        "model_type": "mistral3",
        "text_config": LLAMA,
        "vision_config": {"model_type": "unheard"},
        "audio_config": {"hidden_size": 3},
    }
    assert parts_of(config) == ("text",)
    notes = rp.from_config(config, layer=0, part="text").notes
    assert "the model's part vision (unheard) is not understood" in notes
    assert "the model's part audio (no model_type) is not understood" in notes
    with pytest.raises(rp.RelposValueError, match=r"part: 'vision' is not understood \(unheard\)"):
        rp.from_config(config, layer=0, part="vision")


def test_code_of_its_own_is_said():
    (note,) = rp.from_config(LLAMA | {"auto_map": {"AutoModel": "modeling_x.X"}}, layer=0).notes
    assert note.startswith("auto_map: ")


def layer(model_type, number=0, part="", **keys):
    return rp.from_config({"model_type": model_type, **keys}, layer=number, part=part)


def test_numbers_of_layers_are_numbers():
    """Gemma 4 saves them as "05"."""
    few = {
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    for key in ("5", "05", 5):
        found = layer("gemma4_text", 5, **few, per_layer_config={key: {"head_dim": 16, "num_key_value_heads": 2}})
        assert (found.head_dim, found.kv_heads) == (16, 2)
        assert layer("gemma4_text", 4, **few, per_layer_config={key: {"head_dim": 16}}).head_dim == 8
    with pytest.raises(rp.RelposValueError, match="per_layer_config: expected numbers of layers, found 'five'"):
        layer("gemma4_text", 5, **few, per_layer_config={"five": {"head_dim": 16}})


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("bloom", {"n_embed": 128, "hidden_size": 64, "n_head": 4}, (4, 32)),
        ("falcon", {"n_embed": 128, "hidden_size": 64, "num_attention_heads": 4}, (4, 32)),
        ("gpt2", {"n_embd": 64, "hidden_size": 128, "n_head": 4}, (4, 32)),
        ("bart", {"d_model": 64, "hidden_size": 128, "encoder_attention_heads": 4}, (4, 32)),
        ("whisper", {"d_model": 128, "num_attention_heads": 4, "encoder_attention_heads": 8}, (4, 32)),
        ("t5", {"d_kv": 8, "head_dim": 32, "num_attention_heads": 4}, (4, 32)),
    ],
)
def test_other_names_go_first(model_type, keys, expected):
    found = layer(model_type, part=parts_of({"model_type": model_type})[0], **keys)
    assert (found.heads, found.head_dim) == expected


def test_other_names_of_counts():
    assert layer("t5", part="encoder", num_layers=6, num_hidden_layers=3).layers == 3
    # The class of T5 copies its own key for the decoder, before it takes the other name.
    assert layer("t5", part="decoder", num_layers=8, num_hidden_layers=3).layers == 8
    with pytest.raises(rp.RelposValueError, match="relative_attention_num_buckets: expected an even number, found 33"):
        layer("t5", part="encoder", relative_attention_num_buckets=33)
    assert layer("t5", part="cross", num_hidden_layers=3).layers == 6
    assert layer("bart", part="encoder", encoder_layers=6, num_hidden_layers=3).layers == 3


def test_modernbert_scales_both_kinds_of_layers():
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for number in (0, 1):
        assert layer("modernbert", number, **scaled).schemes[0].options["frequencies"][0] == 0.5


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "modernbert", "modernbert-decoder"])
def test_parameters_for_all_are_not_read_where_each_kind_has_its_own(model_type):
    with pytest.raises(rp.RelposValueError, match="rope_parameters: expected an object for each type of layer"):
        layer(model_type, 1, rope_parameters={"rope_type": "default", "rope_theta": 5.0})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "factor": 4.0} | {
    "original_max_position_embeddings": 8
}


def test_a_norm_after_turning_takes_the_attention_factor_out():
    assert layer("llama", rope_parameters=YARN).schemes[0].options["magnitude"] > 1.1
    assert "magnitude" not in layer("nanochat", rope_parameters=YARN).schemes[0].options
    assert "magnitude" not in layer("llama4_text", rope_parameters=YARN).schemes[0].options
    assert layer("llama4_text", rope_parameters=YARN, use_qk_norm=False).schemes[0].options["magnitude"] > 1.1
    q, k, v = (np.random.default_rng(0).standard_normal((heads, 12, 128)) for heads in (40, 8, 8))
    for normed, factor in ((True, 1.0), (False, 1.2)):
        bound = layer("llama4_text", rope_parameters=LONG, use_qk_norm=normed).bind()
        (scheme,) = bound.position(q, k)
        assert (scheme.magnitude > 1) == (factor > 1)
        assert bound(q, k, v).shape == q.shape


def test_what_a_class_does_not_read_is_not_read():
    plain = layer("llama", hidden_size=64, num_attention_heads=4)
    for keys in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        found = layer("llama", hidden_size=64, num_attention_heads=4, **keys)
        assert found.schemes == plain.schemes
        assert found.notes == ("partial_rotary_factor: the class of llama does not read it",)
    linear = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    assert len(layer("llama", rope_parameters=linear).schemes[0].options["frequencies"]) == 32
    assert layer("phi3", partial_rotary_factor=0.5).schemes[0].options["dim"] == 48
    told = layer("llama", rope_parameters=LONG | {"short_mscale": 2.0, "long_mscale": 3.0})
    bound = told.bind()
    q, k, _ = (np.zeros((32, 9, 128)) for _ in range(3))
    assert bound.position(q, k)[0].magnitude < 2
    assert told.notes == tuple(f"{name}_mscale: the class of llama does not read it" for name in ("short", "long"))
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    told = layer("llama", rope_scaling=yarn | {"finetuned": True}, max_position_embeddings=65536)
    assert str(told.schemes) == str(layer("llama", rope_scaling=yarn, max_position_embeddings=65536).schemes)
    assert told.notes == ("finetuned: the class of llama does not read it",)
    with pytest.raises(rp.RelposValueError, match=r"rope_theta: 3.0 .*swa_rope_theta: 4.0 "):
        layer("mimo_v2_flash", rope_theta=3.0, swa_rope_theta=4.0)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["local"], 2]], "attention_layers": ["global", "local"]}),
        ("mpnet", {"relative_attention_num_buckets": 64}),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}),
        ("cohere2", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}),
        ("llama4_text", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
        ("qwen3_next", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ],
)
def test_what_a_class_knows_otherwise_or_not_at_all(model_type, keys):
    with pytest.raises(rp.RelposValueError, match="is not understood"):
        layer(model_type, **keys)


def test_encoders_that_are_none_but_encoders():
    for model_type in ("clap_text_model", "layoutlm"):
        assert not layer(model_type, is_decoder=True).causal


def test_widths_that_are_missing_are_those_of_the_class():
    assert layer("qwen3_vl_moe_text", hidden_size=64, num_attention_heads=4, num_key_value_heads=2).head_dim == 16


def test_left_padding_of_chunks_is_said():
    assert any("padding at the left" in note for note in layer("llama4_text").notes)


def test_yarn_whose_ends_are_one_number():
    """Kimi K2: rounding to both sides makes the ramp."""
    found = layer("llama", rope_parameters=YARN | {"beta_fast": 1.0, "beta_slow": 1.0})
    omega, plain = found.schemes[0].options["frequencies"], rp.reference.rotary_frequencies(128)
    # 64 / (2π) turns once where 128·ln(64 / 2π) / (2·ln 10000) = 16.1.
    np.testing.assert_allclose(omega[:17], plain[:17], rtol=1e-15)
    np.testing.assert_allclose(omega[17:], plain[17:] / 4, rtol=1e-15)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("bert", {"num_key_value_heads": 1}),
        ("gpt_neox", {"head_dim": 24}),
        ("gptj", {"num_key_value_heads": 1}),
        ("albert", {"inner_group_num": 2}),
        ("deberta-v2", {"pos_att_type": ["c2p", "c2p"]}),
        ("olmo3", {"rope_theta": 77.0}),
        ("gemma3_text", {"is_causal": False, "use_bidirectional_attention": True}),
        ("olmo3", {"rope_scaling": YARN, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}),
    ],
)
def test_what_the_class_does_not_read_and_would_change_the_layer_is_refused(model_type, keys):
    assert layer(model_type).layers
    with pytest.raises(rp.RelposValueError, match=next(iter(keys))):
        layer(model_type, **keys)


def test_sizes_that_a_class_does_not_read_may_say_what_the_layer_is():
    found = layer("bert", num_key_value_heads=12, head_dim=64)
    assert (found.kv_heads, found.head_dim) == (12, 64)


@pytest.mark.parametrize("model_type", ["falcon", "deepseek_v3"])
def test_shares_that_a_class_does_not_read(model_type):
    found = layer(model_type, partial_rotary_factor=0.5)
    assert found.schemes == layer(model_type).schemes
    assert f"partial_rotary_factor: the class of {model_type} does not read it" in found.notes


def test_the_length_beside_the_rotary_parameters_goes_first():
    """Ministral 3: of the temperature, as of the frequencies."""
    told = {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}
    assert layer("ministral3", **told).query_scale.length == 64
    assert layer("ministral3", **told, original_max_position_embeddings=8).query_scale.length == 8


def test_windows_that_are_switched_off_are_none():
    off = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    assert rp.from_config(LLAMA | off, layer=0) == rp.from_config(LLAMA, layer=0)
    with pytest.raises(rp.RelposValueError, match="sliding_window: 4096"):
        rp.from_config(LLAMA | {"sliding_window": 4096}, layer=0)


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("gemma4_text", {"top_k_experts": 8}),
        ("glm_moe_dsa", {"index_share_for_mtp_iteration": True, "layer_types": ["deepseek_sparse_attention"] * 78}),
        ("llama", {"target_model_type": "qwen2_5_vl", "max_window_layers": 28}),
    ],
)
def test_keys_of_published_files_that_are_not_about_attention(model_type, keys):
    assert layer(model_type, **keys).as_dict() == layer(model_type).as_dict()


def test_layers_of_a_hybrid_are_those_with_softmax():
    """Nemotron-H says by a letter what each block is."""
    found = layers_of({"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E-*"})
    assert [(one.layer, one.layers, one.schemes) for one in found] == [(3, 7, ()), (6, 7, ())]
    for one in found:
        assert one.notes[-3:] == tuple(
            f"{kind} is not understood: layers {numbers}"
            for kind, numbers in (("linear_attention", "0, 2"), ("moe", "1, 4"), ("mlp", "5"))
        )
    with pytest.raises(rp.RelposValueError, match="layer_types: layer 0 is linear_attention"):
        layers_of({"model_type": "nemotron_h", "hybrid_override_pattern": "MM"})
    with pytest.raises(rp.RelposValueError, match="hybrid_override_pattern: expected M"):
        layers_of({"model_type": "nemotron_h", "hybrid_override_pattern": "XY"})


def test_cohere_2_moe_has_two_patterns():
    sizes = {"num_hidden_layers": 8, "first_k_dense_replace": 3}
    found = layers_of({"model_type": "cohere2_moe", **sizes, "prefix_dense_sliding_window_pattern": 2})
    assert [one.window is None for one in found] == [False, True, False, False, False, False, True, False]
    assert [not one.schemes for one in found] == [one.window is None for one in found]
    first = layers_of({"model_type": "cohere2_moe", **sizes})[:3]
    assert [(one.window, len(one.schemes)) for one in first] == [(None, 1)] * 3
