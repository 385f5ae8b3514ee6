"""Configurations of published models, read without the packages that run them."""

import json
import math
import os
import re

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.configs import layers_of, model_types, parts_of
from relpos_np.configs.families import FAMILIES

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 3, "max_position_embeddings": 256}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 4096}


def operands(heads=4, kv_heads=2, dim=16, length=9, dtype=np.float64):
    rng = np.random.default_rng(5)
    shapes = (heads, length, dim), (kv_heads, length, dim), (kv_heads, length, dim)
    return tuple(rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("name", model_types())
def test_every_type_is_read_from_its_name_alone(name):
    """Defaults say the rest; what is said can be printed, and is JSON."""
    if name in ("glm4_moe", "qwen3_omni_moe_text"):
        pytest.skip("its class has no head_dim, and heads that do not divide its channels")
    if FAMILIES[name].count is not None:
        pytest.skip("its first layers are refused: see the tests of hybrids")
    for part in parts_of({"model_type": name}):
        layer = rp.from_config({"model_type": name}, layer=0, part=part)
        assert layer.heads % layer.kv_heads == 0
        assert f"{name}" in layer.describe().splitlines()[0]
        assert json.loads(json.dumps(layer.as_dict()))["heads"] == layer.heads
        last = rp.from_config({"model_type": name}, layer=layer.layers - 1, part=part)
        assert last.layer == layer.layers - 1
        with pytest.raises(rp.RelposValueError, match=f"^layer: expected 0 ... {layer.layers - 1}, found"):
            rp.from_config({"model_type": name}, layer=layer.layers, part=part)


@pytest.mark.parametrize(
    "stored",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_a_call_of_llama_is_the_call_by_hand(stored):
    q, k, v = operands()
    out = rp.from_config(LLAMA | stored, layer=2).bind()(q, k, v)
    omega = rp.reference.llama3_frequencies(16, factor=4.0, trained_length=64, base=500000.0)
    np.testing.assert_array_equal(out, rp.attention(q, k, v, position=rp.Rotary(frequencies=omega), causal=True))


def test_from_a_dict_a_path_a_folder_or_an_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")

    class Configuration:
        def to_dict(self):
            return LLAMA

    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(rp.RelposValueError, match="cannot be read"):
        rp.from_config(deep, layer=0)
    told = rp.from_config(LLAMA, layer=1).describe()
    for config in (path, str(path), tmp_path, Configuration()):
        assert rp.from_config(config, layer=1).describe() == told
    assert len(layers_of(path)) == 3


def test_files_that_anybody_may_have_written(tmp_path):
    """A pipe and a device have no end; Python writes infinities, and a key given twice says two things."""
    pipe, twice, infinite, many = (tmp_path / name for name in ("pipe", "twice.json", "infinite.json", "list.json"))
    os.mkfifo(pipe)
    twice.write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 32}', encoding="utf-8")
    infinite.write_text(json.dumps(LLAMA | {"initializer_range": math.inf}), encoding="utf-8")
    many.write_text("[1]", encoding="utf-8")
    for path, words in (
        (pipe, "not a regular"),
        ("/dev/zero", "not a regular"),
        (twice, "twice"),
        (many, "an? .*object"),
    ):
        with pytest.raises(rp.RelposValueError, match=f"^config: .* cannot be read: .*{words}"):
            rp.from_config(path, layer=0)
    assert rp.from_config(infinite, layer=0).describe() == rp.from_config(LLAMA, layer=0).describe()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (7, "config: expected a mapping"),
        ({1: 2}, "config: expected names"),
        ("nowhere/config.json", "config: .* cannot be read"),
        (LLAMA | {"sliding_window": np.array([])}, "sliding_window: expected what JSON can hold"),
        ({"model_type": "lama"}, "model_type: 'lama' is not understood; nearest: .*llama"),
        ({}, "model_type: None"),
        (LLAMA | {"hidden_size": 65}, "hidden_size: 65"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads"),
        (LLAMA | {"num_hidden_layers": 10**9}, "layers: expected at most 16384"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "rope_type: .*'spiral'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        (LLAMA | {"rope_scaling": 2}, "rope_scaling: expected an object"),
        (LLAMA | {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: 30.0 .* not understood"),
        (LLAMA | {"sliding_window": 128}, "sliding_window: 128"),
        (LLAMA | {"alibi": True}, "alibi: True"),
        (LLAMA | {"qk_norm": True}, "qk_norm: True"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"model_type": "bert", "add_cross_attention": True}, "add_cross_attention: True"),
        ({"model_type": "falcon", "alibi": True}, "alibi: True .*bfloat16"),
        ({"model_type": "mpt", "attn_config": {"prefix_lm": True}}, "prefix_lm: True"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "alibi: False"),
        ({"model_type": "mpt", "attn_config": {"rope": True}}, "rope: True"),
        ({"model_type": "mpt", "attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max: 16"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "sliding_window: None"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 32}, "layer_types: 'linear_attention'"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        ({"model_type": "roformer", "rotary_value": True}, "rotary_value: True"),
        ({"model_type": "xlnet", "bi_data": True}, "bi_data: True"),
        ({"model_type": "deberta-v2", "pos_att_type": ["p2p"]}, "pos_att_type"),
        ({"model_type": "phimoe", "rope_scaling": {"type": "longrope", **LONG}}, "rope_type: 'longrope'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, message):
    with pytest.raises(rp.RelposError, match=message):
        rp.from_config(config, layer=0)


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, 0, True, 1.5, [None], [[1]], math.nan, 10**30], ids=repr)
@pytest.mark.parametrize("name", model_types())
def test_odd_values_are_read_or_refused_and_nothing_else(name, value):
    family = FAMILIES[name]
    for key in (*family.defaults, "rope_scaling", "rope_parameters", "layer_types", "head_dim", "is_decoder"):
        for part in family.parts:
            try:
                layer = rp.from_config({"model_type": name, family.aliases.get(key, key): value}, layer=0, part=part)
            except rp.RelposError:
                continue
            json.dumps(layer.as_dict())
            assert layer.describe()


def test_null_stands_for_the_parameters_of_the_class():
    for name in ("apertus", "gpt_oss", "ministral3"):
        told = rp.from_config({"model_type": name}, layer=0).as_dict()
        assert rp.from_config({"model_type": name, "rope_parameters": None}, layer=0).as_dict() == told


def test_keys_that_touch_nothing_are_let_through():
    more = {"vocab_size": 7, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_dropout": 0.1, "eos_token_id": 2}
    assert rp.from_config(LLAMA | more, layer=0).as_dict() == rp.from_config(LLAMA, layer=0).as_dict()


def test_layers_of_several_kinds():
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64}
    layers = layers_of(gemma)
    assert [layer.window for layer in layers] == [(63, None)] * 5 + [None, (63, None)]
    assert [layer.schemes[0].options["base"] for layer in layers] == [1e4] * 5 + [1e6, 1e4]
    # A scaling beside the thetas belongs to the full layers alone.
    older = gemma | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4}
    assert layers_of(older)[0].schemes[0].options == {"base": 2e4}
    assert layers_of(older)[5].schemes[0].options["frequencies"][0] == 1 / 8
    llama4 = layers_of({"model_type": "llama4_text", "num_hidden_layers": 4})
    assert [layer.rule is not None for layer in llama4] == [True, True, True, False]
    assert [bool(layer.schemes) for layer in llama4] == [True, True, True, False]
    assert llama4[3].query_scale.factors(np.array([0, 8190, 8191, 16383])) == pytest.approx(
        [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    )


def test_frequencies_by_length():
    """LongRoPE and dynamic rules look at the longest position of each call."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 8}
    layer = rp.from_config(phi | {"rope_scaling": {"type": "longrope", **factors}}, layer=0)
    assert "by the longest position" in layer.describe()
    (told,) = json.loads(json.dumps(layer.as_dict()))["schemes"]
    assert told["options"]["rope_parameters"]["stored"]["long_factor"] == factors["long_factor"]
    bound = layer.bind()
    for length, factor in ((8, 1.0), (9, 2.0)):
        q, k, v = operands(length=length)
        (scheme,) = bound.position(q, k)
        np.testing.assert_allclose(scheme.frequencies, rp.reference.rotary_frequencies(16) / factor)
        assert bound(q, k, v).shape == q.shape
    # One query at the end of many keys stands at the last of them.
    q, k, v = operands(length=9)
    assert bound.position(q[..., :1, :], k)[0].frequencies[0] == 0.5
    assert bound.position(q[..., :1, :], k[..., :4, :])[0].frequencies[0] == 1.0
    # The longest of several sequences decides.
    assert bound.position(q, k, segments=[0, 8, 9])[0].frequencies[0] == 1.0
    assert bound.position(q, k, segments=[0, 9])[0].frequencies[0] == 0.5
    # Also one that has no query, before a shorter one.
    longer = np.concatenate([k, k], axis=-2)[..., :10, :]
    assert bound.position(q[..., :1, :], longer, segments=([0, 0, 1], [0, 9, 10]))[0].frequencies[0] == 0.5
    assert bound.position(q[..., :1, :], k[..., :4, :], offset=np.array([3, 8]))[0].frequencies[0] == 0.5
    assert bound(q, k, v, segments=[0, 3, 9]).shape == q.shape


def test_positions_of_images_in_a_text():
    stored = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    bound = rp.from_config(LLAMA | {"model_type": "qwen2_vl_text"} | stored, layer=0).bind()
    q, k, v = operands()
    text = bound(q, k, v)
    same = np.broadcast_to(np.arange(9), (3, 9))
    np.testing.assert_allclose(bound(q, k, v, positions=same), text, rtol=0, atol=1e-14)
    assert np.abs(bound(q, k, v, positions=same * [[1], [0], [2]]) - text).max() > 1e-3


def test_parts():
    composite = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}, "vision_config": {"hidden_size": 24}}
    assert parts_of(composite) == ("text", "vision")
    assert rp.from_config(composite, layer=1, part="text").layers == 2
    with pytest.raises(rp.RelposValueError, match=r"part: expected one of 'text', 'vision', found ''"):
        rp.from_config(composite, layer=0)
    qwen = {"model_type": "qwen3_5", "text_config": {}, "vision_config": {"model_type": "qwen3_5"}}
    assert [rp.from_config(qwen, layer=3, part=part).model_type for part in parts_of(qwen)] == [
        "qwen3_5_text",
        "qwen3_5_vision",
    ]
    assert parts_of({"model_type": "t5"}) == ("encoder", "decoder", "cross")
    flat = {
        **LLAMA,
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"model_type": "qwen2_vl", "depth": 4},
    }
    assert parts_of(flat) == ("vision", "text")
    assert rp.from_config(flat, layer=0, part="text").heads == 4
    assert rp.from_config(flat, layer=0, part="vision").layers == 4


def test_weights_are_found_behind_any_prefix():
    rng = np.random.default_rng(1)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    config = {"model_type": "t5", "d_kv": 16, "num_heads": 4}
    layer = rp.from_config(config, layer=3, part="encoder")
    assert layer.weights == (name,)
    table = rng.standard_normal((32, 4)).astype(np.float32)
    q, k, v = operands(kv_heads=4)
    expected = rp.attention(q, k, v, position=rp.T5(table.astype(np.float64), rounding="float32"), scale=1.0)
    for prefix in ("", "transformer.", "a.b."):
        np.testing.assert_array_equal(layer.bind({prefix + name: table})(q, k, v), expected)
    twice = {"a." + name: table, "b." + name: table}
    with pytest.raises(rp.RelposValueError, match="prefix: 2 tensors"):
        layer.bind(twice)
    np.testing.assert_array_equal(layer.bind(twice, prefix="b.")(q, k, v), expected)
    with pytest.raises(rp.RelposValueError, match=r"no such tensor; nearest: .*bias\.bias"):
        layer.bind({name.replace("weight", "bias"): table})
    with pytest.raises(rp.RelposValueError, match="weights: needed for encoder"):
        layer.bind()
    # A name that only ends with the same letters is another tensor's.
    beside = {"my" + name: 2 * table, "model." + name: table}
    np.testing.assert_array_equal(layer.bind(beside)(q, k, v), expected)


def test_names_of_earlier_versions():
    config = {"model_type": "swin", "image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    layer = rp.from_config(config | {"window_size": 4}, layer=1)
    table = np.ones((49, 2))
    own = "encoder.layers.0.blocks.1.attention"
    for name in (
        f"{own}.self.relative_position_bias_table",
        f"swin.{own}.relative_position_bias.{'relative_position_bias_table'}",
    ):
        assert layer.bind({name: table}).position(*operands(2, 2, 8, 16)[:2])[0].table.shape == (49, 2)
    assert "shifted by 2" in layer.describe()


def test_bound_calls_refuse_what_the_configuration_decides():
    bound = rp.from_config(LLAMA, layer=0).bind()
    q, k, v = operands()
    for name, value in (("causal", False), ("scale", 1.0), ("window", 3), ("position", None)):
        with pytest.raises(rp.RelposTypeError, match=f"^{name}: the configuration decides it, layer 0 of llama"):
            bound(q, k, v, **{name: value})
    with pytest.raises(rp.RelposValueError, match=re.escape("k: expected shape (..., 2, L, 16), found (2, 4, 9, 16)")):
        bound(q, q, v)
    with pytest.raises(rp.RelposTypeError, match=r"^hidden: attention has no such argument"):
        bound(q, k, v, hidden=q)
    out, lse = bound(q, k, v, key_lengths=5, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]
    wavlm = rp.from_config({"model_type": "wavlm", "hidden_size": 64, "num_attention_heads": 4}, layer=0)
    weights = dict(zip(wavlm.weights, (np.ones((320, 4)), np.ones((8, 16)), np.ones(8), np.ones(4)), strict=True))
    q, k, v = operands(kv_heads=4)
    with pytest.raises(rp.RelposTypeError, match=r"^hidden: layer 0 of wavlm needs it in every call"):
        wavlm.bind(weights)(q, k, v)
    assert wavlm.bind(weights)(q, k, v, hidden=np.ones((2, 9, 64))).shape == q.shape


def tables_of(name):
    """A layer of a type whose weights say where pairs stand, with weights and what its calls need."""
    rng = np.random.default_rng(11)
    layer = rp.from_config({"model_type": name, "hidden_size": 64, "num_attention_heads": 4}, layer=0)
    shapes = {
        "mpnet": [(32, 4)],
        "wavlm": [(320, 4), (8, 16), (8,), (1, 4, 1, 1)],
        "layoutlmv3": [(4, 32), (4, 64), (4, 64)],
    }[name]
    needs = {"wavlm": {"hidden": rng.standard_normal((2, 9, 64))}, "layoutlmv3": {"boxes": np.full((9, 4), 7)}}
    return layer, [rng.standard_normal(shape) for shape in shapes], needs.get(name, {})


@pytest.mark.parametrize("name", ["mpnet", "wavlm", "layoutlmv3"])
def test_bound_layers_follow_their_weights(name):
    """A step of an optimiser writes into the arrays of a layer that has been called in every dtype."""
    layer, arrays, needs = tables_of(name)
    bound = layer.bind(dict(zip(layer.weights, arrays, strict=True)))
    calls = [operands(kv_heads=4, dtype=dtype) for dtype in (np.float64, np.float32)]
    before = [bound(*call, **needs) for call in calls]
    for array in arrays:
        np.multiply(array, -0.5, out=array)
        after = [bound(*call, **needs) for call in calls]
        fresh = layer.bind(dict(zip(layer.weights, arrays, strict=True)))
        for call, found, old in zip(calls, after, before, strict=True):
            np.testing.assert_array_equal(found, fresh(*call, **needs))
            assert not np.array_equal(found, old)


def test_float32_operands_take_float32_weights():
    layer = rp.from_config({"model_type": "mpnet", "hidden_size": 64, "num_attention_heads": 4}, layer=0)
    weights = {layer.weights[0]: np.linspace(-1, 1, 32 * 4).reshape(32, 4)}
    bound = layer.bind(weights)
    single, double = operands(kv_heads=4, dtype=np.float32), operands(kv_heads=4)
    assert bound(*single).dtype == np.float32
    assert bound(*double).dtype == np.float64
    # What was made for one dtype is not used for the other.
    np.testing.assert_array_equal(bound(*double), layer.bind(weights)(*double))


SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
OPTIONS = {
    "gpt_oss": ({"sliding_window": 3}, 0, {"window": (2, None)}),
    "gemma2": ({"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9}, 1, {"softcap": 2.0, "scale": 1 / 3}),
    "llama4_text": ({"attention_chunk_size": 4}, 1, {"rule": rp.Chunked(4)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_those_of_the_call(name):
    """A bound call, and its gradients, are those with the options written by hand."""
    stored, number, options = OPTIONS[name]
    layer = rp.from_config({"model_type": name, **SHAPE, **stored}, layer=number)
    q, k, v = operands()
    if layer.sinks:
        options = {**options, "sinks": np.array([0.5, -1.0, 2.0, 0.0])}
    bound = layer.bind({layer.sinks: options["sinks"]} if layer.sinks else None)
    options = {"causal": True, "position": bound.position(q, k), **options}
    np.testing.assert_array_equal(bound(q, k, v), rp.attention(q, k, v, **options))
    found = rp.attention_vjp(q, k, v, grad_out=v[:, [0, 1, 0, 1]], **bound.arguments(q, k, v))
    expected = rp.attention_vjp(q, k, v, grad_out=v[:, [0, 1, 0, 1]], **options)
    for letter in "qkv":
        np.testing.assert_array_equal(getattr(found, letter), getattr(expected, letter))
    if layer.sinks:
        np.testing.assert_array_equal(found.sinks, expected.sinks)


@pytest.mark.parametrize("name", ["llama4_text", "ministral3"])
def test_temperatures_follow_the_positions_of_a_call(name):
    """After a cache, with an offset for each item and in packed sequences, a query has its own position's factor."""
    numbers = {"floor_scale": 4, "attn_scale": 0.5}
    if name == "ministral3":
        scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
        numbers = {"rope_parameters": scaling}
    layer = rp.from_config({"model_type": name, **SHAPE, **numbers}, layer=3)
    assert f"query_temperature(variant={name.removesuffix('_text')!r}, length=4, strength=0.5)" in layer.describe()
    start = int(name == "llama4_text")
    factors = 1 + 0.5 * np.log1p((np.arange(30) + start) // 4)
    bound = layer.bind()
    q, k, v = operands()
    options = bound.options(q, k)
    np.testing.assert_allclose(options["query_scale"], factors[:9], rtol=1e-15)
    whole = bound(q, k, v)
    np.testing.assert_allclose(bound(q[..., 5:, :], k, v), whole[..., 5:, :], rtol=0, atol=1e-14)
    apart = bound(q, k, v, offset=np.array([0, 11]))
    np.testing.assert_allclose(bound.options(q, k, offset=np.array([0, 11]))["query_scale"][1, 0], factors[11:20])
    np.testing.assert_array_equal(apart[1], bound(q[1], k[1], v[1], offset=11))
    packed = bound(q, k, v, segments=[0, 4, 9])
    for part in (slice(0, 4), slice(4, 9)):
        np.testing.assert_array_equal(packed[..., part, :], bound(q[..., part, :], k[..., part, :], v[..., part, :]))
    moved = bound.options(q, k, segments=[0, 4, 9], offset=2)["query_scale"]
    np.testing.assert_allclose(moved, np.concatenate([factors[2:6], factors[2:7]]), rtol=1e-15)
    # The last query is that of the last key that exists.
    ends = bound.arguments(q[..., 6:, :], k, v, offset="end", key_lengths=np.array([9, 5]))["query_scale"]
    np.testing.assert_allclose(ends[:, 0], [factors[6:9], factors[2:5]], rtol=1e-15)


def test_what_is_added_to_the_inputs():
    rng = np.random.default_rng(2)
    x, table = rng.standard_normal((2, 5, 64)), rng.standard_normal((20, 64))
    small = {"hidden_size": 64, "num_attention_heads": 4}
    roberta = rp.from_config({"model_type": "roberta", **small}, layer=0)
    encoding = roberta.encoding({"roberta.embeddings.position_embeddings.weight": table})
    np.testing.assert_array_equal(encoding(x), x + table[2:7])
    marian = {"model_type": "marian", "d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    waves = rp.from_config(marian, layer=0, part="decoder").encoding()
    np.testing.assert_array_equal(waves(x), rp.Sinusoidal(64, layout="concatenated")(x))
    assert rp.from_config(marian, layer=0, part="cross").encoding() is None
    frames = rp.from_config({"model_type": "videomae", **small}, layer=0).encoding()
    np.testing.assert_array_equal(frames(x), rp.Sinusoidal(64)(x))
    for name, key in (("openai-gpt", "positions_embed"), ("aimv2_vision_model", "embeddings.position_embedding")):
        sizes = {"n_embd": 64, "n_head": 4} if name == "openai-gpt" else small
        encoding = rp.from_config({"model_type": name, **sizes}, layer=0).encoding({f"{key}.weight": table})
        np.testing.assert_array_equal(encoding(x), x + table[:5])
    assert rp.from_config({"model_type": "aimv2_vision_model", "is_native": True}, layer=0).encoding() is None
    assert rp.from_config(LLAMA, layer=0).encoding() is None


# ---------------------------------------------------------------------------------------------- hybrids

# What configurations say beside the number of layers, and which of 8 have a softmax.
HYBRIDS = {
    "nemotron-nas": (
        {"block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": n % 2 == 1}} for n in range(8)]},
        (0, 2, 4, 6),
    ),
    "mllama_text_model": ({}, (0, 1, 2, 4, 5, 6, 7)),
    "qwen3_next": ({}, (3, 7)),
    "qwen3_5_text": ({"full_attention_interval": 2}, (1, 3, 5, 7)),
    "qwen3_5_moe_text": ({"layer_types": ["full_attention"] + ["linear_attention"] * 7}, (0,)),
    "lfm2": ({"full_attn_idxs": [2, 5]}, (2, 5)),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"] * 4}, (1, 3, 5, 7)),
    "bamba": ({"attn_layer_indices": [6]}, (6,)),
    "jamba": ({"attn_layer_period": 3, "attn_layer_offset": 1}, (1, 4, 7)),
    "granitemoehybrid": ({"layer_types": ["mamba"] * 7 + ["attention"]}, (7,)),
    "olmo_hybrid": ({}, (3, 7)),
    "minimax": ({}, (0, 2, 4, 6)),
    "nemotron_h": ({"hybrid_override_pattern": "ME*-M*EM"}, (2, 5)),
    "lara_mini": ({}, (1, 3, 4, 6)),
    "lfm3": ({}, (2, 4, 6)),
    "kimi_linear": ({"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1]}}, (3, 7)),
    "recurrent_gemma": ({}, (2, 5)),
    "zamba": ({}, (2, 7)),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"] * 4}, (1, 3, 5, 7)),
    "minimax_m3_vl_text": ({"sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1, 1, 1, 1, 1]}}, (0, 1, 2)),
    "deepseek_v4": ({"compress_ratios": [0, 4, 128, 0] * 2}, (0, 3, 4, 7)),
}


def test_every_hybrid_is_tested():
    assert set(HYBRIDS) == {name for name in model_types() if FAMILIES[name].count is not None}


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_hybrids(name):
    """Those with a softmax are read, and others refused by their number and type."""
    stored, numbers = HYBRIDS[name]
    config = {"model_type": name, "num_hidden_layers": 8, **stored}
    for number in range(8):
        if number in numbers:
            layer = rp.from_config(config, layer=number)
            assert (layer.layer, layer.layers) == (number, 8)
            assert json.loads(json.dumps(layer.as_dict()))["causal"]
        else:
            with pytest.raises(rp.RelposValueError, match=f"^layer_types: layer {number} is [a-z_]+"):
                rp.from_config(config, layer=number)
    with pytest.raises(rp.RelposValueError, match=r"^layer: expected 0 ... 7, found 8"):
        rp.from_config(config, layer=8)


@pytest.mark.parametrize(
    ("name", "stored", "words"),
    [
        ("lfm2", {"full_attn_idxs": 3}, "full_attn_idxs: expected a list"),
        ("lfm2", {"layer_types": ["linear_attention"] * 32}, "layer_types: 'linear_attention' is not understood"),
        ("lfm2_moe", {}, "layer_types: the configuration of lfm2_moe has none"),
        ("falcon_h1", {"layers_block_type": ["mamba"] * 32}, "layers_block_type: "),
        ("bamba", {"attn_layer_indices": [0], "partial_rotary_factor": 1.0}, "partial_rotary_factor: 1.0"),
        ("jamba", {"attn_layer_offset": 0, "sliding_window": 9}, "sliding_window: 9"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 32, "position_embedding_type": "x"}, "position_emb"),
        ("olmo_hybrid", {"layer_types": ["attention"] * 32, "rope_parameters": None}, "rope_parameters: null"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm: False"),
        ("minimax_m2", {"attn_type_list": [0] * 62}, "attn_type_list: "),
        ("hy_v3", {"qk_norm": False}, "qk_norm: False"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads: 4"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1] * 24}, "hybrid_layer_pattern: .* expected .0, 1, 1"),
        ("gemma3n_text", {"num_kv_shared_layers": 35}, "num_kv_shared_layers: 35 leaves no layer"),
        ("gemma4_text", {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}, "layer_types: expected full"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all'"),
        ("gemma4_text", {"per_layer_config": {"0": {"sliding_window": 9}}}, "per_layer_config: .* of layer 0"),
        ("longcat_flash", {"num_hidden_layers": 28}, "num_hidden_layers: 28"),
        ("longcat_flash", {"mla_scale_q_lora": False}, "mla_scale_q_lora: False"),
        ("mistral4", {"partial_rotary_factor": 0.25}, "partial_rotary_factor: 0.25, though 0.5"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta: "),
        ("gpt_bigcode", {"num_key_value_heads": 4}, "num_key_value_heads: 4"),
        ("ibert", {"quant_mode": True}, "quant_mode: True"),
        ("musicgen_decoder", {"cross_attention_hidden_size": 7}, "cross_attention_hidden_size: 7"),
        ("layoutlmv3", {"has_spatial_attention_bias": False}, "has_spatial_attention_bias: False"),
        ("mimo_v2_flash", {"attention_chunk_size": 7}, "attention_chunk_size: 7"),
        ("deberta-v2", {"position_buckets": 8, "max_relative_positions": 5}, "max_relative_positions: 5 leaves"),
        ("wavlm", {"num_buckets": 17}, "num_buckets: expected an even number, found 17"),
        ("layoutlmv3", {"rel_2d_pos_bins": 17}, "rel_2d_pos_bins: expected an even number, found 17"),
    ],
)
def test_what_these_types_are_refused_for(name, stored, words):
    with pytest.raises(rp.RelposError, match=f"^{words}"):
        rp.from_config({"model_type": name, **stored}, layer=0)


def test_early_files():
    """Keys of published files from before the types came to transformers."""
    minimax = {"model_type": "minimax_m2", "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    layer = rp.from_config(minimax | {"attn_type_list": [1] * 62, "use_routing_bias": True}, layer=3)
    assert layer.schemes[0].options == {"dim": 64, "base": 5e6}
    mimo = {"model_type": "mimo_v2_flash", "rope_theta": 5e6, "swa_rope_theta": 1e4, "sliding_window_size": 128}
    mimo |= {"attention_chunk_size": 128, "sliding_window": 128, "num_hidden_layers": 3, "swa_num_key_value_heads": 8}
    mimo |= {"hybrid_layer_pattern": [1, 0, 1], "add_swa_attention_sink_bias": True}
    layers = layers_of(mimo | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]})
    assert [layer.window for layer in layers] == [(128, None), None, (128, None)]
    assert [layer.schemes[0].options for layer in layers] == [{"dim": 64, "base": b} for b in (1e4, 5e6, 1e4)]
    assert [(layer.kv_heads, bool(layer.sinks)) for layer in layers] == [(8, True), (4, False), (8, True)]


def test_speech_with_cross_attention():
    dia = {"model_type": "dia", "encoder_config": {"num_hidden_layers": 2}, "decoder_config": {"cross_head_dim": 32}}
    assert parts_of(dia) == ("encoder", "decoder", "decoder.cross")
    layer = rp.from_config(dia, layer=17, part="decoder.cross")
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.schemes, layer.causal) == (16, 16, 32, (), False)
    for stored in ({"encoder_num_attention_heads": 4}, {"decoder_num_key_value_heads": 4}):
        with pytest.raises(rp.RelposError, match=f"^{next(iter(stored))}: 4"):
            rp.from_config({"model_type": "moonshine", **stored}, layer=0, part="decoder")


def test_places_on_a_page():
    """LayoutLMv3: tables with the heads first, boxes of a call, and positions that start again."""
    rng = np.random.default_rng(3)
    layer = rp.from_config({"model_type": "layoutlmv3", "hidden_size": 64, "num_attention_heads": 4}, layer=1)
    tables = [rng.standard_normal((4, rows)) for rows in (32, 64, 64)]
    boxes, positions = rng.integers(0, 1000, (9, 4)), np.array([0, 1, 2, 3, 4, 0, 1, 2, 3])
    q, k, v = operands(kv_heads=4)
    bound = layer.bind({f"layoutlmv3.{name}": x for name, x in zip(layer.weights, tables, strict=True)})
    for given in ({}, {"positions": positions}):
        position = rp.LayoutBias(*(x.T for x in tables), boxes, variant="layoutlmv3", rounding="float32", **given)
        np.testing.assert_array_equal(bound(q, k, v, boxes=boxes, **given), rp.attention(q, k, v, position=position))
    with pytest.raises(rp.RelposTypeError, match=r"^boxes: layer 1 of layoutlmv3 needs it in every call"):
        bound(q, k, v)


def test_keys_of_earlier_layers():
    """Gemma 3n and 4: as published, and as transformers stores heads that are not those of other layers."""
    layers = layers_of({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4})
    last = [str(layer.before[-1]).partition(",")[0] for layer in layers]
    assert last[6:] == ["k and v are those of layer 5"] * 3 + ["k and v are those of layer 4"]
    assert last[:6] == ["RMS norm of v"] * 6
    assert [layer.cached for layer in layers] == [2 * 2 * 256] * 6 + [0] * 4
    assert [layer.schemes[0].options["base"] for layer in layers[:5]] == [1e4] * 4 + [1e6]
    early = {"model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 0, "rope_theta": 700.0}
    early = layers_of(early | {"rope_local_base_freq": 70.0})
    assert [layer.schemes[0].options["base"] for layer in early] == [70.0] * 4 + [700.0]
    gemma4 = {"model_type": "gemma4_text", "num_hidden_layers": 6, "attention_k_eq_v": True}
    published = layers_of(gemma4 | {"global_head_dim": 64, "num_global_key_value_heads": 2})
    stored = layers_of(gemma4 | {"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 2}}})
    assert [layer.as_dict() for layer in stored] == [layer.as_dict() for layer in published]
    assert [(layer.head_dim, layer.kv_heads) for layer in stored] == [(256, 4)] * 5 + [(64, 2)]
    kept = layers_of(gemma4 | {"attention_k_eq_v": False, "num_global_key_value_heads": 2})
    assert (kept[5].head_dim, kept[5].kv_heads) == (512, 4)


def test_windows_by_the_number_of_the_layer():
    dots = {"model_type": "dots1", "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}
    assert [layer.window for layer in layers_of(dots)] == [None, (7, None), (7, None)]
    assert [layer.window for layer in layers_of(dots | {"sliding_window": None})] == [None] * 3
    cwm = layers_of({"model_type": "cwm", "num_hidden_layers": 5, "sliding_window": 8})
    assert [layer.window for layer in cwm] == [None, (7, None), (7, None), (7, None), None]
    mimo = layers_of({"model_type": "mimo_v2_flash", "num_hidden_layers": 12})
    assert [n for n, layer in enumerate(mimo) if layer.window is None] == [0, 5, 11]
