"""Names that a class takes for another one: a file may have either, and the layer is the same."""

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
