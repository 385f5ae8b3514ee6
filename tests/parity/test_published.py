"""Whole small models of transformers: their state dicts as arrays of schemes, compared layer by layer."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests.parity.modules import randomised, split_heads

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM


def state_of(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def heads_of(flat):
    return split_heads(flat, HEADS)


def identity(linear):
    """An output projection that changes nothing."""
    linear.weight.copy_(torch.eye(WIDTH, dtype=torch.float64))
    linear.bias.zero_()


@pytest.mark.parametrize("layer", [0, 1])
def test_wavlm(agrees, layer):
    """The second layer has a gate of its own, and the table of the first."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 8}
    sizes |= {"conv_dim": (4,), "conv_stride": (2,), "conv_kernel": (3,), "num_feat_extract_layers": 1}
    sizes |= {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_buckets": 32,
        "max_bucket_distance": 80,
    }
    model = randomised(transformers.WavLMModel(transformers.WavLMConfig(**sizes)))
    first, module = (model.encoder.layers[n].attention for n in (0, layer))
    identity(module.out_proj)
    state, prefix = state_of(model), f"encoder.layers.{layer}.attention"
    x = normal(2, 30, WIDTH)
    bias = first.compute_bias(30, 30)[None].repeat(2, 1, 1, 1).view(2 * HEADS, 30, 30)
    expected = heads_of(module(x, position_bias=bias)[0])
    q, k, v = (heads_of(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))
    arrays = layers.scheme_arrays(state, prefix=prefix, format="wavlm")
    gate = rp.reference.wavlm_gate(x.numpy(), **layers.scheme_arrays(state, prefix=prefix, format="wavlm_gate"))

    def scheme(dtype):
        return rp.WavLM(arrays["table"].astype(dtype), gate.astype(dtype), max_distance=80)

    agrees(expected, q, k, v, position=scheme)


@pytest.mark.parametrize(("terms", "dim"), [(("c2p", "p2c"), 12), (("c2p",), 8), (("p2c",), 8)])
def test_deberta(agrees, terms, dim):
    """Numbers of channels whose D (1 + terms) has a whole root: transformers rounds it to float32."""
    config = transformers.DebertaConfig(
        hidden_size=HEADS * dim, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=8, vocab_size=9,
        relative_attention=True, max_relative_positions=6, pos_att_type=list(terms),
    )  # fmt: skip
    model = randomised(transformers.DebertaModel(config))
    module, x = model.encoder.layer[1].attention.self, normal(2, 5, HEADS * dim)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    embedding = model.encoder.get_rel_embedding()
    expected = heads_of(module(x, mask, relative_pos=model.encoder.get_rel_pos(x), rel_embeddings=embedding)[0])
    q, k, v = np.split(heads_of(module.in_proj(x)), 3, axis=-1)
    q, v = (y + heads_of(bias[None, None]) for y, bias in ((q, module.q_bias), (v, module.v_bias)))
    given = {"prefix": "encoder.layer.1.attention.self", "format": "deberta", "heads": HEADS}
    arrays = layers.scheme_arrays(state_of(model), **given)
    assert len(arrays) == len(terms)

    def scheme(dtype):
        return rp.DeBERTa(**{name: x.astype(dtype) for name, x in arrays.items()})

    agrees(expected, q, k, v, position=scheme, scale=scheme(np.float64).scale)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "none"])
def test_deberta_v2(agrees, shared, norm):
    """Twelve channels, for the same reason."""
    width = 12 * HEADS
    config = transformers.DebertaV2Config(
        hidden_size=width, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=8, vocab_size=9,
        relative_attention=True, position_buckets=4, max_relative_positions=16, share_att_key=shared,
        pos_att_type=["c2p", "p2c"], norm_rel_ebd=norm,
    )  # fmt: skip
    model = randomised(transformers.DebertaV2Model(config))
    module, x = model.encoder.layer[1].attention.self, normal(2, 20, width)
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    expected = heads_of(module(x, mask, rel_embeddings=model.encoder.get_rel_embedding())[0])
    q, k, v = (heads_of(linear(x)) for linear in (module.query_proj, module.key_proj, module.value_proj))
    given = {"prefix": "encoder.layer.1.attention.self", "format": "deberta_v2", "heads": HEADS}
    arrays = layers.scheme_arrays(state_of(model), **given, layer_norm_eps=config.layer_norm_eps)
    assert set(arrays) == {"pos_key", "pos_query"}

    def scheme(dtype):
        return rp.DeBERTa(**{name: x.astype(dtype) for name, x in arrays.items()}, max_position=16)

    agrees(expected, q, k, v, position=scheme, scale=scheme(np.float64).scale)


def test_swin_v2():
    """Its coordinates are computed in float32 for every dtype."""
    config = transformers.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=WIDTH, depths=[1], num_heads=[HEADS], window_size=4
    )
    model = randomised(transformers.Swinv2Model(config))
    module, x = model.encoder.layers[0].blocks[0].attention.self, normal(3, 16, WIDTH)
    q, k, v = (heads_of(linear(x)) for linear in (module.query, module.key, module.value))
    arrays = layers.scheme_arrays(state_of(model), prefix="encoder.layers.0.blocks.0.attention.self", format="swin_v2")
    found = rp.attention(q, k, v, position=rp.SwinV2(**arrays, grid=(4, 4), variant="transformers"), backend="numpy")
    np.testing.assert_allclose(found, heads_of(module(x)[0]), rtol=0, atol=2e-5)


VISION = {"image_size": 16, "patch_size": 4, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}


@pytest.mark.parametrize("kind", ["use_relative_position_bias", "use_shared_relative_position_bias"])
def test_beit(kind):
    config = transformers.BeitConfig(**VISION, intermediate_size=8, **{kind: True})
    model = randomised(transformers.BeitModel(config))
    own = model.shared_position_bias if "shared" in kind else model.layers[1].relative_position_bias
    expected = own((4, 4))[0].numpy()
    arrays = layers.scheme_arrays(state_of(model), prefix="layers.1.attention", format="beit")
    found = rp.logits(*np.zeros((2, HEADS, 17, 1)), position=rp.BEiT(**arrays, grid=(4, 4)), backend="numpy")
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_data2vec_vision():
    """With the names that BEiT's published checkpoints have, too."""
    config = transformers.Data2VecVisionConfig(**VISION, intermediate_size=8, use_relative_position_bias=True)
    model = randomised(transformers.Data2VecVisionModel(config))
    module = model.encoder.layer[1].attention.attention
    arrays = layers.scheme_arrays(state_of(model), prefix="encoder.layer.1.attention.attention", format="beit")
    found = rp.logits(*np.zeros((2, HEADS, 17, 1)), position=rp.BEiT(**arrays, grid=(4, 4)), backend="numpy")
    np.testing.assert_allclose(found, module.relative_position_bias((4, 4))[0].numpy(), rtol=1e-14)


@pytest.mark.parametrize(("layer", "side"), [(0, 2), (1, 4)])
def test_sam(agrees, layer, side):
    """A layer of windows, and one of the whole image."""
    config = transformers.SamVisionConfig(
        **VISION, mlp_dim=8, output_channels=4, window_size=2, global_attn_indexes=[1]
    )
    model = randomised(transformers.SamVisionModel(config))
    module, x = model.vision_encoder.layers[layer].attn, normal(3, side, side, WIDTH)
    identity(module.proj)
    expected = heads_of(module(x)[0].reshape(3, side * side, WIDTH))
    q, k, v = (heads_of(part) for part in module.qkv(x).reshape(3, side * side, 3 * WIDTH).chunk(3, dim=-1))
    arrays = layers.scheme_arrays(state_of(model), prefix=f"vision_encoder.layers.{layer}.attn", format="sam")

    def scheme(dtype):
        return rp.DecomposedBias(*(arrays[n].astype(dtype) for n in ("height_table", "width_table")), (side, side))

    agrees(expected, q, k, v, position=scheme)


def test_vits(agrees):
    config = transformers.VitsConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, ffn_dim=8, vocab_size=9
    )
    model = transformers.VitsModel(config).double().eval()
    module = randomised(model.text_encoder.encoder.layers[1].attention)
    identity(module.out_proj)
    x = normal(2, 15, WIDTH)
    expected = heads_of(module(x)[0])
    q, k, v = (heads_of(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))
    arrays = layers.scheme_arrays(state_of(model), prefix="text_encoder.encoder.layers.1.attention", format="vits")

    def scheme(dtype):
        return rp.Shaw(**{name: x.astype(dtype) for name, x in arrays.items()}, outside="zero")

    agrees(expected, q, k, v, position=scheme, largest_value=np.abs(arrays["value_table"]).max())


@pytest.mark.parametrize("backend", rp.backend.HOST_BACKENDS)
def test_parakeet(backend):
    config = transformers.ParakeetEncoderConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=8, num_mel_bins=16, subsampling_conv_channels=8,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # the other one has its softmax in float32
    model = randomised(transformers.ParakeetEncoder(config))
    module, x = model.layers[1].self_attn, normal(2, 13, WIDTH)
    positions = model.encode_positions(x)
    expected = module(x, position_embeddings=positions)[0]
    layer = layers.RelativeMultiHeadAttention.from_state_dict(
        state_of(model), prefix="layers.1.self_attn", format="parakeet"
    )
    found = layer(x.numpy(), pos_emb=positions[:1].numpy(), backend=backend)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-12)
    # Its sinusoids are computed in float32.
    np.testing.assert_allclose(layer(x.numpy(), backend=backend), expected.numpy(), rtol=0, atol=1e-5)
    scheme = rp.TransformerXL(
        layer.content_bias, layer.position_bias, layer.rows(13, 13, positions[:1].numpy()), variant="conformer"
    )
    q, k, v = (heads_of(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))
    out = rp.attention(q, k, v, position=scheme, backend=backend)
    out = module.o_proj(torch.from_numpy(out.swapaxes(1, 2).reshape(2, 13, WIDTH)))
    np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=0, atol=1e-12)
