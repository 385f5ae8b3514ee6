"""Metadata of GGUF files, which the package gguf writes here: the layer of the same model's config.json."""

import sys

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands.main import main

gguf = pytest.importorskip("gguf")

SIZES = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2}
SIZES |= {"context_length": 2048, "feed_forward_length": 48, "vocab_size": 50}
RMS = {**SIZES, "attention.layer_norm_rms_epsilon": 1e-5}
HUGGING = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
HUGGING |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
PLAIN = {name: x for name, x in HUGGING.items() if name not in ("num_key_value_heads", "rms_norm_eps")}
PLAIN_SIZES = {name: x for name, x in SIZES.items() if name != "attention.head_count_kv"}
PLAIN_SIZES |= {"attention.layer_norm_epsilon": 1e-5}
FACTORS = np.linspace(1, 8, 8, dtype=np.float32)


def written(folder, architecture, metadata, tensors=()):
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{name}", value)
    writer.add_token_list(["a", "b"])
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Architecture, metadata, and the same model as transformers stores it.
SAME = [
    ("qwen2", {**RMS, "rope.freq_base": 1e6}, {**HUGGING, "model_type": "qwen2", "rope_theta": 1e6}),
    (
        "qwen3",
        {**RMS, "attention.key_length": 24, "attention.value_length": 24, "rope.scaling.type": "yarn"}
        | {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512},
        {**HUGGING, "model_type": "qwen3", "head_dim": 24}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    ),
    (
        "gemma2",
        {**RMS, "attention.sliding_window": 9, "attn_logit_softcapping": 30.0, "attention.key_length": 24},
        {**HUGGING, "model_type": "gemma2", "head_dim": 24, "sliding_window": 9, "attn_logit_softcapping": 30.0}
        | {"query_pre_attn_scalar": 24},
    ),
    (
        "gemma3",
        {**RMS, "block_count": 62, "attention.sliding_window": 9, "attention.key_length": 24, "rope.freq_base": 1e6}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {**HUGGING, "model_type": "gemma3_text", "num_hidden_layers": 62, "head_dim": 24, "sliding_window": 9}
        | {"query_pre_attn_scalar": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    (
        "phi2",
        {**PLAIN_SIZES, "rope.dimension_count": 8},
        {**PLAIN, "model_type": "phi", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    (
        "gptneox",
        {**PLAIN_SIZES, "rope.dimension_count": 4, "rope.freq_base": 500.0, "use_parallel_residual": True},
        {**PLAIN, "model_type": "gpt_neox", "rotary_emb_base": 500.0, "rotary_pct": 0.25},
    ),
    ("falcon", {**PLAIN_SIZES, "attention.head_count_kv": 1}, {**PLAIN, "model_type": "falcon"}),
    (
        "falcon",
        {**PLAIN_SIZES, "attention.head_count_kv": 2},
        {**PLAIN, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    (
        "starcoder2",
        {**SIZES, "attention.layer_norm_epsilon": 1e-5},
        {**HUGGING, "model_type": "starcoder2", "sliding_window": None},
    ),
    ("bloom", PLAIN_SIZES, {"model_type": "bloom", "hidden_size": 64, "n_layer": 4, "n_head": 4}),
    ("gpt2", PLAIN_SIZES, {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4}),
    (
        "mpt",
        {**PLAIN_SIZES, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 6.0},
        {"model_type": "mpt", "d_model": 64, "n_layers": 4, "n_heads": 4, "attn_config": {"clip_qkv": 6.0}},
    ),
    ("cohere2", {**SIZES, "attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": 9}, None),
]


@pytest.mark.parametrize(("architecture", "metadata", "stored"), SAME)
def test_metadata_are_the_layer_of_the_configuration(tmp_path, architecture, metadata, stored):
    path = written(tmp_path, architecture, metadata)
    stored = stored or {**HUGGING, "model_type": "cohere2", "sliding_window": 9, "rope_theta": 1e4}
    for number in (0, 3):
        found, expected = (rp.from_config(one, layer=number).as_dict() for one in (path, stored))
        for told in (found, expected):
            told.pop("before")  # whose eps is rounded to float32
        assert found == expected


def test_pairs_are_those_of_the_projections_in_the_file(tmp_path):
    """Converters permute the rows of Llama's projections, so that neighbours turn together."""
    layer = rp.from_config(
        written(tmp_path, "llama", {**RMS, "rope.freq_base": 5e5, "rope.dimension_count": 16}), layer=1
    )
    q, k, v = (np.random.default_rng(0).standard_normal((1, heads, 9, 16)) for heads in (4, 2, 2))
    order = np.arange(16).reshape(2, 8).T.ravel()
    usual = rp.from_config({**HUGGING, "model_type": "llama", "rope_theta": 5e5}, layer=1).bind()(q, k, v)
    np.testing.assert_allclose(layer.bind()(q[..., order], k[..., order], v), usual, rtol=1e-12, atol=1e-12)


def test_factors_on_frequencies_are_tensors(tmp_path):
    """Llama 3.1 has its scaling in a tensor, whatever its metadata say."""
    path = written(tmp_path, "llama", {**RMS, "rope.freq_base": 5e5}, [("rope_freqs.weight", FACTORS)])
    q, k, v = (np.random.default_rng(0).standard_normal((1, heads, 9, 16)) for heads in (4, 2, 2))
    omega = 5e5 ** (-np.arange(8) / 8) / FACTORS
    expected = rp.attention(
        q, k, v, position=rp.Rotary(frequencies=omega, layout="interleaved"), causal=True, backend="numpy"
    )
    found = rp.from_config(path, layer=0).bind()(q, k, v, backend="numpy")
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_norms_are_told_by_their_tensors(tmp_path):
    metadata = {**SIZES, "attention.layer_norm_epsilon": 1e-5}
    assert not rp.from_config(written(tmp_path, "command-r", metadata), layer=0).before
    weight = [("blk.0.attn_q_norm.weight", np.ones((4, 16), np.float32))]
    assert rp.from_config(written(tmp_path, "command-r", metadata, weight), layer=0).before


@pytest.mark.parametrize(
    ("architecture", "more", "words"),
    [
        ("clip", {}, "general.architecture: 'clip' is not understood, expected one of llama"),
        ("llama", {"attention.temperature_length": 9}, "attention.temperature_length: not understood in a GGUF"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count: 8, expected 16"),
        ("llama", {"attention.value_length": 8}, "attention.value_length: 8, expected 16"),
        ("llama", {"attention.causal": False}, "attention.causal: False"),
        ("llama", {"rope.scaling.type": "su"}, "rope.scaling.type: 'su' with attn_factor 1.0"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "rope.scaling.type: 'longrope'"),
        ("gemma2", {}, "sliding_window: None"),
        ("mpt", {"attention.max_alibi_bias": 16.0}, "alibi_bias_max: 16.0"),
    ],
)
def test_metadata_that_are_not_understood(tmp_path, architecture, more, words):
    path = written(tmp_path, architecture, RMS | more)
    with pytest.raises(rp.RelposValueError, match=f"^{words}"):
        rp.from_config(path, layer=0)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "bad.gguf"
    for content in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(rp.RelposValueError, match=r"bad\.gguf cannot be read"):
            rp.from_config(path, layer=0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(rp.RelposImportError, match=r"pip install relpos-np\[gguf\]"):
        rp.from_config(path, layer=0)


def test_the_command_reads_them(tmp_path, capsys):
    assert main(["config", str(written(tmp_path, "qwen2", RMS))]) == 0
    assert "qwen2, layers 0-3 of 4" in capsys.readouterr().out
