"""Keys of configurations as files have them: read, known to change nothing, left out by name, or refused all at once."""

import json

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
    "unsloth_version": "2026.1",
    "scale_attn_weights": True,
}


def test_keys_that_nothing_is_known_of_are_refused_all_at_once():
    with pytest.raises(rp.RelposValueError) as raised:
        rp.from_config(LLAMA | FOREIGN, layer=0)
    for name in FOREIGN:
        assert f"{name}: " in str(raised.value), name
    assert str(raised.value).count("is not understood") == len(FOREIGN)


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_each_of_them_is_refused(name):
    with pytest.raises(rp.RelposValueError, match=name):
        rp.from_config(LLAMA | {name: FOREIGN[name]}, layer=0)


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
    ],
)
def test_what_to_open_instead(config, said):
    with pytest.raises(rp.RelposValueError, match=said):
        rp.from_config(config, layer=0)


def test_a_folder_without_a_configuration_says_what_it_has(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    with pytest.raises(rp.RelposValueError, match="open the config.json of org/base"):
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
