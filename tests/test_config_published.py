"""`relpos config` on the keys that published config.json files have: everything that they decide is said."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands.main import main

# The keys that the published config.json has, one file for each model.
CONFIGS = Path(__file__).parent / "configs"
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
        "before RMS norm of q and k, per head (no weights; eps 1e-05)",
    ],
    "Qwen3-VL-8B-Instruct": [
        "qwen3_vl_text, layers 0-35 of 36",
        "sections of pairs [24, 20, 20], cyclic",
        "rope_theta 5000000.0",
        "before RMS norm of q and k, per head (q_norm, k_norm; eps 1e-06)",
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
    "transfo-xl-wt103": [
        "heads 16 of 64 channels",
        "TransformerXL(variant='transformer_xl', clamp=1000, u=[layers.N.dec_attn.r_w_bias]",
        "attends the past, at most 1599 back",
    ],
    "Wan2.1-T2V-1.3B": [
        "WanTransformer3DModel, layers 0-29 of 30",
        "44, 42, 42 channels, base 10000",
        "WanTransformer3DModel, cross, layers 0-29 of 30",
        "attends all keys of the encoder",
    ],
}


@pytest.mark.parametrize("name", SAID)
def test_everything_is_said(name, capsys):
    assert main(["config", str(CONFIGS / f"{name}.json")]) == 0
    # Columns have spaces of their own.
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    text = "\n".join(lines) + "\n"
    for words in SAID[name]:
        assert words in text, (words, text)


def test_selected_keys_are_those_of_the_call():
    published = json.loads((CONFIGS / "DeepSeek-V3.2.json").read_text(encoding="utf-8"))
    small = {"num_attention_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    layer = rp.from_config(published | small, layer=3)
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
        rp.from_config(published | {"layer_types": ["full_attention"] * 61}, layer=0)


def test_the_prefix_of_paligemma():
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6}
    config = {"model_type": "paligemma", "text_config": {"model_type": "gemma2", **sizes}, "vision_config": {}}
    bound = rp.from_config(config, layer=0, part="text").bind()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 9, 8)) for heads in (2, 1, 1))
    i, j = np.arange(9)[:, None], np.arange(9)
    masks = [((j < n) | (j <= i)) & (i - j < 6) for n in (2, 6)]
    expected = rp.attention(q, k, v, position=rp.Rotary(), scale=1 / 16, softcap=50.0, mask=np.stack(masks)[:, None])
    np.testing.assert_allclose(bound(q, k, v, prefix_lengths=[2, 6]), expected, rtol=0, atol=1e-14)
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


SEAMLESS = {"model_type": "seamless_m4t_v2", "hidden_size": 64, "speech_encoder_attention_heads": 4}
SEAMLESS |= {"speech_encoder_chunk_size": 8}
SWIN = {"model_type": "swinv2", "patch_size": 4, "embed_dim": 16, "num_heads": [2, 2], "window_size": 4}
SWIN |= {"depths": [2, 2], "pretrained_window_sizes": [12, 6]}
BART = {"model_type": "bart", "encoder_attention_heads": 4, "decoder_attention_heads": 8}
BART |= {"encoder_layers": 2, "decoder_layers": 3}
NEO = {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4}
FACTORS = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
# Files, the layer, and what the layer is.
MADE = {
    "a window counts the query": (NEO, {"layer": 1}, lambda own: own.window, (3, None)),
    "1 divided by the number of the layer": (
        {"model_type": "gpt2", "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        {"layer": 3},
        lambda own: own.scale,
        0.25,
    ),
    "heads of a decoder": (BART, {"layer": 0, "part": "decoder"}, lambda own: (own.heads, own.layers), (8, 3)),
    "heads of an encoder": (BART, {"layer": 0, "part": "encoder"}, lambda own: (own.heads, own.layers), (4, 2)),
    "a shift": (SWIN | {"image_size": (32, 32)}, {"layer": 1}, lambda own: "shift" in "".join(own.notes), True),
    "no shift": (SWIN | {"image_size": (16, 32)}, {"layer": 1}, lambda own: "shift" in "".join(own.notes), False),
    "a window of each stage": (
        SWIN | {"image_size": (32, 32)},
        {"layer": 2},
        lambda own: own.schemes[0].options["pretrained_grid"],
        (6, 6),
    ),
    **{
        f"{stored} chunks back": (
            SEAMLESS | {"speech_encoder_left_chunk_num": stored},
            {"layer": 0, "part": "speech_encoder"},
            lambda own: own.rule.options["left"],
            left,
        )
        for stored, left in ((-1, None), (0, 0), (3, 3))
    },
    "the older of two spellings": (
        {"model_type": "llama", **FACTORS},
        {"layer": 0},
        lambda own: "factor 2.0" in own.describe(),
        True,
    ),
    "half of a window on both sides": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 10},
        {"layer": 0},
        lambda own: own.window,
        (5, 5),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_the_classes_make_of_their_keys(name):
    """Read in the classes of transformers; `tests/parity` has the same from the classes themselves."""
    config, which, found, expected = MADE[name]
    assert found(rp.from_config(config, **which)) == expected


def test_what_false_may_switch_off_is_refused():
    with pytest.raises(rp.RelposError, match="rope_of_another_kind"):
        rp.from_config({"model_type": "llama", "rope_of_another_kind": False}, layer=0)


def test_the_last_of_many_layers_is_of_the_kind_of_its_number():
    """OLMo's hybrids end with full attention only where they have fewer than four layers."""
    for layers, full in ((2, [1]), (6, [3])):
        config = {"model_type": "olmo_hybrid", "num_hidden_layers": layers}
        for layer in range(layers):
            if layer in full:
                assert rp.from_config(config, layer=layer).layer == layer
            else:
                with pytest.raises(rp.RelposError, match=f"layer {layer}"):
                    rp.from_config(config, layer=layer)


def test_no_key_is_ahead_of_a_causal_query():
    layer = rp.from_config({"model_type": "llama"}, layer=0)
    assert replace(layer, window=(3, 2)).rows()[3] == ("attends", "the past, at most 3 back")


# ---------------------------------------------------------------------------------------------- DeepSeek V4

V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 20}
V4 |= {"sliding_window": 5, "partial_rotary_factor": 0.4, "rope_theta": 500.0}
MIXED = [f"{kind}_attention" for kind in ("heavily_compressed", "sliding", "compressed_sparse", "sliding")]


@pytest.mark.parametrize(
    "stored",
    [
        {"layer_types": MIXED},
        {"compress_ratios": [128, 0, 4, 0, 0]},
        {"layer_types": MIXED, "compress_rope_theta": 9.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"layer_types": MIXED, "partial_rotary_factor": None, "qk_rope_head_dim": 8},
        {
            "layer_types": MIXED,
            "partial_rotary_factor": 1.0,
            "rope_theta": 3.0,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
                "compress": {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4.0},
            },
        },
    ],
)
def test_layers_of_deepseek_v4_that_have_a_window(stored):
    """The call by hand; layers that compress keys are refused, and do not stand in the way of others."""
    rng = np.random.default_rng(2)
    q, kv, sinks = rng.standard_normal((2, 4, 9, 20)), rng.standard_normal((2, 1, 9, 20)), rng.standard_normal(4)
    position = rp.Rotary(channels=(12, 20), base=500.0, layout="interleaved", values=True)
    expected = rp.attention(q, kv, kv, position=position, causal=True, window=(4, None), sinks=sinks)
    for number in (1, 3):
        layer = rp.from_config(V4 | stored, layer=number)
        name = f"layers.{number}.self_attn.sinks"
        assert layer.weights == (name,)
        np.testing.assert_array_equal(layer.bind({f"model.{name}": sinks})(q, kv, kv), expected)
        assert "values=True" in layer.describe()
    for number in (0, 2):
        with pytest.raises(rp.RelposValueError, match=f"^layer_types: layer {number} is {MIXED[number]}"):
            rp.from_config(V4 | stored, layer=number)
    with pytest.raises(rp.RelposValueError, match=r"^layer: expected 0 ... 3, found 4"):
        rp.from_config(V4 | stored, layer=4)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({}, "layer_types: layer 1 is heavily_compressed_attention"),
        ({"layer_types": MIXED[:2]}, "layer_types: expected one for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types: 'full_attention' is not understood"),
        ({"compress_ratios": [0, 7, 0, 0]}, "compress_ratios: 7 is not understood"),
        ({"compress_ratios": [0, False, 0, 0]}, "compress_ratios: False is not understood"),
        ({"layer_types": MIXED, "num_key_value_heads": 2}, "num_key_value_heads: 2 is not understood"),
        ({"layer_types": MIXED, "rope_parameters": {"rope_theta": 7.0}}, r"rope_theta: 500.0, and 7.0 among"),
        ({"layer_types": MIXED, "index_bias": 1}, "index_bias: 1 in a configuration of deepseek_v4"),
    ],
)
def test_what_deepseek_v4_is_refused_for(stored, words):
    with pytest.raises(rp.RelposError, match=f"^{words}"):
        rp.from_config(V4 | stored, layer=1)
