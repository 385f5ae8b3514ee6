"""Whole small models of transformers: their state dicts as arrays of schemes, compared layer by layer."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests.parity.modules import added, chunked, normal, projected, randomised, split_heads, state_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 8}
VISION = SIZES | {"image_size": 16, "patch_size": 4}


def model_of(name, **sizes):
    return randomised(getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)))


def heads_of(flat):
    return split_heads(flat, HEADS)


def identity(linear):
    """An output projection that changes nothing."""
    linear.weight.copy_(torch.eye(WIDTH, dtype=torch.float64))
    linear.bias.zero_()


@pytest.mark.parametrize("layer", [0, 1])
def test_wavlm(agrees, layer):
    """The second layer has a gate of its own, and the table of the first."""
    sizes = SIZES | {"conv_dim": (4,), "conv_stride": (2,), "conv_kernel": (3,), "num_feat_extract_layers": 1}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    model = model_of("WavLM", **sizes, num_buckets=32, max_bucket_distance=80)
    first, module = (model.encoder.layers[n].attention for n in (0, layer))
    identity(module.out_proj)
    given = {"source": state_of(model), "prefix": f"encoder.layers.{layer}.attention"}
    x = normal(2, 30, WIDTH)
    bias = first.compute_bias(30, 30)[None].repeat(2, 1, 1, 1).view(2 * HEADS, 30, 30)
    expected = heads_of(module(x, position_bias=bias)[0])
    arrays = layers.scheme_arrays(**given, format="wavlm")
    gate = rp.reference.wavlm_gate(x.numpy(), **layers.scheme_arrays(**given, format="wavlm_gate"))
    position = rp.WavLM(arrays["table"], gate, max_distance=80)
    agrees(expected, *projected(module, "q_proj k_proj v_proj", x, HEADS), position=position)


@pytest.mark.parametrize(("terms", "dim"), [(("c2p", "p2c"), 12), (("c2p",), 8), (("p2c",), 8)])
def test_deberta(agrees, terms, dim):
    """Numbers of channels whose D (1 + terms) has a whole root: transformers rounds it to float32."""
    sizes = SIZES | {"hidden_size": HEADS * dim, "vocab_size": 9, "relative_attention": True}
    model = model_of("Deberta", **sizes, max_relative_positions=6, pos_att_type=list(terms))
    module, x = model.encoder.layer[1].attention.self, normal(2, 5, HEADS * dim)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    embedding = model.encoder.get_rel_embedding()
    expected = heads_of(module(x, mask, relative_pos=model.encoder.get_rel_pos(x), rel_embeddings=embedding)[0])
    q, k, v = np.split(heads_of(module.in_proj(x)), 3, axis=-1)
    q, v = (y + heads_of(bias[None, None]) for y, bias in ((q, module.q_bias), (v, module.v_bias)))
    given = {"prefix": "encoder.layer.1.attention.self", "format": "deberta", "heads": HEADS}
    arrays = layers.scheme_arrays(state_of(model), **given)
    assert len(arrays) == len(terms)
    position = rp.DeBERTa(**arrays)
    agrees(expected, q, k, v, position=position, scale=position.scale)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "none"])
def test_deberta_v2(agrees, shared, norm):
    """Twelve channels, for the same reason."""
    width = 12 * HEADS
    sizes = SIZES | {"hidden_size": width, "vocab_size": 9, "relative_attention": True, "position_buckets": 4}
    sizes |= {"max_relative_positions": 16, "share_att_key": shared, "pos_att_type": ["c2p", "p2c"]}
    model = model_of("DebertaV2", **sizes, norm_rel_ebd=norm)
    module, x = model.encoder.layer[1].attention.self, normal(2, 20, width)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    expected = heads_of(module(x, mask, rel_embeddings=model.encoder.get_rel_embedding())[0])
    given = {"prefix": "encoder.layer.1.attention.self", "format": "deberta_v2", "heads": HEADS}
    arrays = layers.scheme_arrays(state_of(model), **given, layer_norm_eps=model.config.layer_norm_eps)
    assert set(arrays) == {"pos_key", "pos_query"}
    position = rp.DeBERTa(**arrays, max_position=16)
    qkv = projected(module, "query_proj key_proj value_proj", x, HEADS)
    agrees(expected, *qkv, position=position, scale=position.scale)


def test_swin_v2():
    """Its coordinates are computed in float32 for every dtype."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": WIDTH, "depths": [1], "num_heads": [HEADS]}
    model = model_of("Swinv2", **sizes, window_size=4)
    module, x = model.encoder.layers[0].blocks[0].attention.self, normal(3, 16, WIDTH)
    arrays = layers.scheme_arrays(state_of(model), prefix="encoder.layers.0.blocks.0.attention.self", format="swin_v2")
    position = rp.SwinV2(**arrays, grid=(4, 4), variant="transformers")
    found = rp.attention(*projected(module, "query key value", x, HEADS), position=position, backend="numpy")
    np.testing.assert_allclose(found, heads_of(module(x)[0]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "kind", "bias", "prefix"),
    [
        ("Beit", "use_relative_position_bias", "layers.1.relative_position_bias", "layers.1.attention"),
        ("Beit", "use_shared_relative_position_bias", "shared_position_bias", "layers.1.attention"),
        # With the names that BEiT's published checkpoints have, too.
        (
            "Data2VecVision",
            "use_relative_position_bias",
            "encoder.layer.1.attention.attention.relative_position_bias",
            "encoder.layer.1.attention.attention",
        ),
    ],
)
def test_beit(name, kind, bias, prefix):
    model = model_of(name, **VISION, **{kind: True})
    expected = model.get_submodule(bias)((4, 4))[0].numpy()
    arrays = layers.scheme_arrays(state_of(model), prefix=prefix, format="beit")
    found = added(rp.BEiT(**arrays, grid=(4, 4)), HEADS, 17, 17)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize(("layer", "side"), [(0, 2), (1, 4)])
def test_sam(agrees, layer, side):
    """A layer of windows, and one of the whole image."""
    model = model_of("SamVision", **VISION, mlp_dim=8, output_channels=4, window_size=2, global_attn_indexes=[1])
    module, x = model.vision_encoder.layers[layer].attn, normal(3, side, side, WIDTH)
    identity(module.proj)
    expected = heads_of(module(x)[0].flatten(1, 2))
    arrays = layers.scheme_arrays(state_of(model), prefix=f"vision_encoder.layers.{layer}.attn", format="sam")
    agrees(
        expected, *chunked(module.qkv(x).flatten(1, 2), HEADS), position=rp.DecomposedBias(**arrays, grid=(side, side))
    )


def test_vits(agrees):
    model = model_of("Vits", **SIZES, ffn_dim=8, vocab_size=9)
    module = model.text_encoder.encoder.layers[1].attention
    identity(module.out_proj)
    x = normal(2, 15, WIDTH)
    arrays = layers.scheme_arrays(state_of(model), prefix="text_encoder.encoder.layers.1.attention", format="vits")
    options = {"position": rp.Shaw(**arrays, outside="zero"), "largest_value": np.abs(arrays["value_table"]).max()}
    agrees(heads_of(module(x)[0]), *projected(module, "q_proj k_proj v_proj", x, HEADS), **options)


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_parakeet(backend):
    config = transformers.ParakeetEncoderConfig(
        **SIZES, num_key_value_heads=HEADS, num_mel_bins=16, subsampling_conv_channels=8
    )
    config._attn_implementation = "sdpa"  # the other one has its softmax in float32
    model = randomised(transformers.ParakeetEncoder(config))
    module, x = model.layers[1].self_attn, normal(2, 13, WIDTH)
    positions = model.encode_positions(x)
    expected = module(x, position_embeddings=positions)[0].numpy()
    layer = layers.RelativeMultiHeadAttention.from_state_dict(
        state_of(model), prefix="layers.1.self_attn", format="parakeet"
    )
    found = layer(x.numpy(), pos_emb=positions[:1].numpy(), backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    # Its sinusoids are computed in float32.
    np.testing.assert_allclose(layer(x.numpy(), backend=backend), expected, rtol=0, atol=1e-5)
    rows = layer.rows(13, 13, positions[:1].numpy())
    scheme = rp.TransformerXL(layer.content_bias, layer.position_bias, rows, variant="conformer")
    out = rp.attention(*projected(module, "q_proj k_proj v_proj", x, HEADS), position=scheme, backend=backend)
    out = module.o_proj(torch.from_numpy(out.swapaxes(1, 2).reshape(2, 13, WIDTH)))
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12)
