"""`LayerAttention.run` by hand, what it refuses, differences between two files, and bytes of caches."""

import json

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands.main import main
from relpos_np.layers import PublishedAttention

CONFIG = {"model_type": "qwen3", "hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"head_dim": 6, "num_hidden_layers": 3, "rms_norm_eps": 1e-3}
LAYER = rp.from_config(CONFIG, layer=1)
RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 5, 12))
SHAPES = {"q_proj.weight": (24, 12), "k_proj.weight": (12, 12), "v_proj.weight": (12, 12), "o_proj.weight": (12, 24)}
SHAPES |= {"q_norm.weight": (6,), "k_norm.weight": (6,), "o_proj.bias": (12,)}
OWN = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}


def below(prefix, weights=OWN):
    return {prefix + name: x for name, x in weights.items()}


def by_hand(limit=np.inf, plain=False):
    def heads(name, count):
        return (X @ OWN[f"{name}.weight"].T).clip(-limit, limit).reshape(2, 5, count, 6).swapaxes(1, 2)

    def normed(x, name):
        return x if plain else x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-3) * OWN[f"{name}.weight"]

    q, k = normed(heads("q_proj", 4), "q_norm"), normed(heads("k_proj", 2), "k_norm")
    out = rp.attention(q, k, heads("v_proj", 2), position=rp.Rotary(), causal=True, backend="numpy")
    return out.swapaxes(1, 2).reshape(2, 5, 24) @ OWN["o_proj.weight"].T + OWN["o_proj.bias"]


@pytest.mark.parametrize(
    ("weights", "prefix"),
    [
        (OWN, ""),
        (below("model.layers.1.self_attn."), ""),
        (below("layers.1.self_attn.") | below("layers.11.self_attn.", {n: x + 1 for n, x in OWN.items()}), ""),
        (below("a.layers.1.self_attn.") | below("b.layers.1.self_attn.", {n: x + 1 for n, x in OWN.items()}), "a."),
        (below("model.layers.2.self_attn."), "model.layers.2.self_attn."),
    ],
)
def test_a_whole_layer_is_the_layer_by_hand(weights, prefix):
    found = LAYER.run(X, weights, prefix=prefix, backend="numpy")
    np.testing.assert_allclose(found, by_hand(), rtol=0, atol=1e-13)
    single = LAYER.run(X.astype(np.float32), weights, prefix=prefix, backend="numpy")
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, by_hand(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (below("layers.2.self_attn."), "weights: no attention of layer 1 has one of self.query"),
        (
            below("a.layers.1.attn.") | below("b.layers.1.attn."),
            "prefix: expected that of one of a.layers.1",
        ),
        ({n: x for n, x in OWN.items() if n != "k_norm.weight"}, "k_norm.weight: no such tensor"),
        (OWN | {"g_proj.weight": np.ones((4, 12))}, "not understood in qwen3: g_proj.weight"),
        (OWN | {"v_proj.weight": np.ones((24, 12))}, "24 channels of v, expected 12"),
    ],
)
def test_what_a_layer_lacks_is_named(weights, message):
    with pytest.raises(rp.RelposValueError, match=message):
        LAYER.run(X, weights, backend="numpy")


def test_what_cannot_be_run_is_refused_by_name():
    shared = rp.from_config({"model_type": "gemma3n_text", "num_kv_shared_layers": 4}, layer=34)
    with pytest.raises(rp.RelposValueError, match="gemma3n_text: a whole layer cannot be run: k and v are those of"):
        PublishedAttention(shared, OWN)
    with pytest.raises(rp.RelposTypeError, match="context: not taken, part ''"):
        LAYER.run(X, OWN, context=X)
    early = rp.from_config(CONFIG | {"model_type": "hunyuan_v1_dense"}, layer=1)
    names = {"q_norm.weight": "query_layernorm.weight", "k_norm.weight": "key_layernorm.weight"}
    weights = {names.get(name, name): x for name, x in OWN.items()}
    with pytest.raises(rp.RelposTypeError, match="segments"):
        early.run(X, weights, segments=[0, 5])


def test_gates_multiply_the_output():
    """A gate of nothing is the softplus of 0."""
    config = CONFIG | {"model_type": "laguna", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    layer = rp.from_config(config, layer=1)
    found = layer.run(X, OWN | {"g_proj.weight": np.zeros((4, 12))}, backend="numpy")
    bias = OWN["o_proj.bias"]
    np.testing.assert_allclose(found - bias, (by_hand() - bias) * np.log(2), rtol=0, atol=1e-12)
    assert "softplus of g_proj" in layer.describe()


def test_what_is_added_to_the_weights_of_a_norm():
    config = CONFIG | {"model_type": "gemma3_text", "query_pre_attn_scalar": 6, "sliding_window": 9}
    weights = OWN | {name: OWN[name] - 1 for name in ("q_norm.weight", "k_norm.weight")}
    found = rp.from_config(config, layer=1).run(X, weights, backend="numpy")
    np.testing.assert_allclose(found, by_hand(), rtol=0, atol=1e-12)


def test_operands_within_a_limit():
    weights = {name: x for name, x in OWN.items() if "norm" not in name}
    layer = rp.from_config(
        CONFIG | {"model_type": "olmo", "clip_qkv": 0.5, "head_dim": None, "hidden_size": 24}, layer=1
    )
    found = layer.run(X, weights, backend="numpy")
    np.testing.assert_allclose(found, by_hand(0.5, plain=True), rtol=0, atol=1e-12)


def test_one_projection_in_blocks_of_key_heads():
    """Falcon: the queries of each key head, its key and its value."""
    config = {"model_type": "falcon", "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3}
    layer = rp.from_config(config | {"new_decoder_architecture": True, "num_kv_heads": 2}, layer=1)
    q, k, v = (OWN[f"{one}_proj.weight"].reshape(2, -1, 12) for one in "qkv")
    together = np.concatenate([q, k, v], axis=1).reshape(-1, 12)
    beside = {"dense.weight": OWN["o_proj.weight"], "dense.bias": OWN["o_proj.bias"]}
    found = layer.run(X, {"query_key_value.weight": together, **beside}, backend="numpy")
    np.testing.assert_allclose(found, by_hand(plain=True), rtol=0, atol=1e-12)


def test_latent_vectors_are_written_out():
    """DeepSeek: channels that stand still, from the latent vector, before those that turn, which heads share."""
    sizes = {"kv_lora_rank": 5, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    config = {"model_type": "deepseek_v3", "hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 3}
    shapes = {"q_proj": (12, 12), "kv_a_proj_with_mqa": (7, 12), "kv_b_proj": (14, 5), "o_proj": (12, 6)}
    weights = {f"{name}.weight": RNG.standard_normal(shape) for name, shape in shapes.items()}
    weights["kv_a_layernorm.weight"] = norm = RNG.standard_normal(5)
    q, both = X @ weights["q_proj.weight"].T, X @ weights["kv_a_proj_with_mqa.weight"].T
    latent = both[..., :5] / np.sqrt((both[..., :5] ** 2).mean(axis=-1, keepdims=True) + 1e-6) * norm
    made = (latent @ weights["kv_b_proj.weight"].T).reshape(2, 5, 2, 7).swapaxes(1, 2)
    shared = np.broadcast_to(both[:, None, :, 5:], (2, 2, 5, 2))
    q, k = q.reshape(2, 5, 2, 6).swapaxes(1, 2), np.concatenate([made[..., :4], shared], axis=-1)
    turning = rp.Rotary(channels=(4, 6), layout="interleaved")
    out = rp.attention(q, k, made[..., 4:], position=turning, causal=True, backend="numpy")
    expected = out.swapaxes(1, 2).reshape(2, 5, 6) @ weights["o_proj.weight"].T
    found = rp.from_config(config | sizes, layer=1).run(X, weights, backend="numpy")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_bytes_of_caches():
    assert LAYER.cached == 2 * 2 * 6
    assert LAYER.cache_bytes(10, dtype=np.float32) == 10 * 24 * 4
    latent = rp.from_config({"model_type": "deepseek_v3"}, layer=0)
    assert latent.cached == 512 + 64
    window = rp.from_config({"model_type": "mistral"}, layer=0)
    assert window.cache_bytes(10_000) == window.cache_bytes(4096) == 4096 * window.cache_bytes()
    assert rp.from_config({"model_type": "bert"}, layer=0).cached == 0
    assert rp.from_config({"model_type": "t5"}, layer=0, part="cross").cached == 2 * 8 * 64
    four = rp.from_config({"model_type": "deepseek_v4", "layer_types": ["sliding_attention"] * 43}, layer=0)
    assert four.cached == four.head_dim


def test_differences_between_two_files(tmp_path, capsys):
    files = []
    for name, config in (("a", CONFIG), ("b", CONFIG | {"rope_theta": 5.0, "num_hidden_layers": 4})):
        files.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["config", files[0], files[0]]) == 0
    assert capsys.readouterr().out == "no difference in attention\n"
    assert main(["config", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["layers 0-2", "  - positions       Rotary(base=10000)", "  + positions       Rotary(base=5)"]
    assert lines[3] == "layers 3"
    assert all(line.startswith("  + ") for line in lines[4:])
    assert main(["config", *files, "--layer", "1", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["differences"]
    assert one["layers"] == [1]
    assert one["rows"] == {"positions": ["Rotary(base=10000)", "Rotary(base=5)"]}
    assert main(["config", files[0]]) == 0
    assert capsys.readouterr().out.endswith("cache of these layers: 144 bytes a token in 16 bits\n")
