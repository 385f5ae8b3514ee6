"""Hugging Face transformers: T5, MPNet, Swin, Conformers, XLNet, VITS, SpeechT5 and the fixed sinusoids."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import (
    EPS32,
    added,
    additive,
    half_padded,
    modeling,
    normal,
    padding,
    projected,
    randomised,
    split_heads,
    without,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
t5, mpnet, swin, xlnet, vits, speecht5 = map(modeling, ("t5", "mpnet", "swin", "xlnet", "vits", "speecht5"))
w2v2_bert = modeling("wav2vec2_bert")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS}


def merge_heads(split):
    """(B, L, H*D) or (B, L, H, D) tensor, before the output projection, to (B, H, L, D) array."""
    return split_heads(split.reshape(*split.shape[:2], WIDTH))


def random_input(length, batch=BATCH):
    return normal(batch, length, WIDTH)


# ---------------------------------------------------------------------------------------------- T5 and MPNet


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "rounding"),
    [
        *((n, far, "float32") for n, far in ((32, 128), (320, 800), (64, 256), (28, 882), (8, 20))),
        (32, 128, "exact"),  # where the single-precision rule and the exact one are the same
    ],
)
def test_t5_buckets_bit_for_bit(num_buckets, max_distance, rounding, bidirectional):
    """A table that holds its own row numbers shows the bucket of every distance."""
    reach = 2000
    distances = torch.arange(-reach, reach + 1)
    expected = t5.T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance).numpy()
    table = np.arange(num_buckets, dtype=np.float64)[:, None]
    q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 2 * reach + 1, 1))
    scheme = rp.T5(table, max_distance=max_distance, bidirectional=bidirectional, rounding=rounding)
    got = rp.logits(q, k, position=scheme, offset=reach, backend="numpy")
    np.testing.assert_array_equal(got[0, 0, 0], expected)


def t5_attention(implementation, *, decoder):
    config = transformers.T5Config(d_model=WIDTH, d_kv=DIM, num_heads=HEADS, is_decoder=decoder, dropout_rate=0.0)
    config._attn_implementation = implementation
    return without(randomised(t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)), "o")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_encoder(agrees, implementation):
    module = t5_attention(implementation, decoder=False)
    x = random_input(150)  # farther than max_distance, so that the last bucket is used
    mask = padding(150, [150, 97])[:, None, None]
    expected = merge_heads(module(x, mask=additive(mask))[0])
    position = rp.T5(module.relative_attention_bias.weight.numpy())
    for hidden in ({"mask": mask}, {"key_lengths": np.array([150, 97])}):
        agrees(expected, *projected(module, "q k v", x), position=position, scale=1.0, **hidden)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_decoder_whole_and_in_steps(agrees, implementation):
    module = t5_attention(implementation, decoder=True)
    x = random_input(40)
    causal = np.tril(np.ones((40, 40), dtype=bool))
    expected = merge_heads(module(x, mask=additive(causal[None, None]))[0])
    position = rp.T5(module.relative_attention_bias.weight.numpy(), bidirectional=False)
    q, k, v = projected(module, "q k v", x)
    agrees(expected, q, k, v, position=position, causal=True, scale=1.0)

    cache = transformers.DynamicCache()
    module(x[:, :33], mask=additive(causal[None, None, :33, :33]), cache=cache)
    last = merge_heads(module(x[:, 33:], mask=additive(causal[None, None, 33:]), cache=cache)[0])
    np.testing.assert_allclose(last, expected[:, :, 33:], rtol=0, atol=1e-12)
    agrees(last, q[:, :, 33:], k, v, position=position, causal=True, scale=1.0)


def test_mpnet_encoder(agrees):
    config = transformers.MPNetConfig(**SIZES, num_hidden_layers=1, intermediate_size=8, vocab_size=16)
    encoder = randomised(mpnet.MPNetEncoder(config))
    module = without(encoder.layer[0].attention.attn, "o")
    x = random_input(140)
    mask = padding(140, [140, 64])[:, None, None]
    expected = merge_heads(module(x, additive(mask), position_bias=encoder.compute_position_bias(x))[0])
    position = rp.T5(encoder.relative_attention_bias.weight.numpy())
    agrees(expected, *projected(module, "q k v", x), position=position, mask=mask)


# ---------------------------------------------------------------------------------------------- Swin


@pytest.mark.parametrize(("window", "shift"), [(1, 0), (3, 0), (4, 2), (5, 1)])
def test_swin_windows(agrees, window, shift):
    config = transformers.SwinConfig(embed_dim=WIDTH, window_size=window, qkv_bias=True)
    config._attn_implementation = "sdpa"  # the eager path takes its softmax in float32
    side = 2 * window
    layer = randomised(swin.SwinLayer(config, WIDTH, (side, side), HEADS, shift_size=shift))
    module = without(layer.attention, "o_proj")
    shift_mask = layer.get_attn_mask(side, side, torch.float64, "cpu")
    windows, area = (side // window) ** 2, window * window
    x = random_input(area, batch=BATCH * windows)
    expected = merge_heads(module(x, shift_mask)[0])
    position = rp.WindowBias(module.relative_position_bias.relative_position_bias_table.numpy(), (window, window))
    masks = [None]
    if shift_mask is not None:
        tiled = np.tile(shift_mask.numpy(), (BATCH, 1, 1))[:, None]
        masks = [tiled, tiled == 0]  # exp(-100) is below 1e-43
    for mask in masks:
        agrees(expected, *projected(module, "q_proj k_proj v_proj", x), position=position, mask=mask)


def test_swin_index():
    """A table that holds its own row numbers shows the index map."""
    module = swin.SwinRelativePositionBias(1, (3, 5))
    table = np.arange(5 * 9, dtype=np.float64)[:, None]
    got = added(rp.WindowBias(table, (3, 5)), 1, 15, 15)[0]
    np.testing.assert_array_equal(got, module.relative_position_index.view(15, 15).numpy())


# ---------------------------------------------------------------------------------------------- Transformer-XL family


CONFORMERS = {
    "Wav2Vec2Conformer": "wav2vec2_conformer",
    "Wav2Vec2Bert": "wav2vec2_bert",
    "SeamlessM4TConformer": "seamless_m4t",
}


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("name", sorted(CONFORMERS))
def test_conformer(agrees, name, length):
    """Three models, which agree in their names."""
    options = {"hidden_size": WIDTH, "position_embeddings_type": "relative", "max_source_positions": 50}
    if name == "SeamlessM4TConformer":
        config = transformers.SeamlessM4TConfig(speech_encoder_attention_heads=HEADS, **options)
    else:
        config = getattr(transformers, f"{name}Config")(num_attention_heads=HEADS, **options)
    peer = modeling(CONFORMERS[name])
    module = without(randomised(getattr(peer, f"{name}SelfAttention")(config)), "linear_out")
    x = random_input(length)
    encoded = getattr(peer, f"{name}RelPositionalEmbedding")(config)(x)
    own = rp.Sinusoidal(WIDTH).encode(np.arange(length - 1, -length, -1))
    np.testing.assert_allclose(own, encoded[0].numpy(), rtol=0, atol=4 * EPS32 * (1 + length))

    rows = module.linear_pos(encoded).view(2 * length - 1, HEADS, DIM).numpy()
    mask = half_padded(length)
    expected = merge_heads(module(x, attention_mask=additive(mask), relative_position_embeddings=encoded)[0])
    position = rp.TransformerXL(module.pos_bias_u.numpy(), module.pos_bias_v.numpy(), rows, variant="conformer")
    agrees(expected, *projected(module, "linear_q linear_k linear_v", x), position=position, mask=mask)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (5, 5), (1, 6), (4, 9)])
def test_xlnet_rel_shift(rng, length, keys):
    x = rng.standard_normal((BATCH, HEADS, length, length + keys))
    one_way = x[..., : keys + 1]
    for columns, variant, backends in (
        (x, "xlnet", ["numpy"]),
        (one_way, "xlnet_uni", rp.backend.HOST_BACKENDS),
    ):
        expected = xlnet.XLNetRelativeAttention.rel_shift_bnij(torch.from_numpy(columns), klen=keys).numpy()
        for backend in backends:
            np.testing.assert_array_equal(rp.rel_shift(columns, variant=variant, backend=backend), expected)


def published_shift(x):
    """Appendix B of the Transformer-XL paper: a zero column in front, then the same memory read with other strides."""
    *lead, rows, columns = x.shape
    padded = torch.cat([x.new_zeros(*lead, rows, 1), x], dim=-1)
    return padded.reshape(*lead, columns + 1, rows)[..., 1:, :].reshape(x.shape)


@pytest.mark.parametrize(("length", "memory"), [(1, 0), (1, 4), (6, 0), (5, 1), (5, 8)])
def test_transformer_xl(agrees, rng, length, memory):
    """Self-attention with memory as in section 3.3, the score matrix assembled by the published trick."""
    keys = length + memory
    q, k, v = (rng.standard_normal((BATCH, HEADS, n, DIM)) for n in (length, keys, keys))
    u, v_bias, rows = (rng.standard_normal(shape) for shape in ((HEADS, DIM), (HEADS, DIM), (keys, HEADS, DIM)))
    tq, tk, tv, tu, tb, tr = map(torch.from_numpy, (q, k, v, u, v_bias, rows))
    products = torch.einsum("bhid,rhd->bhir", tq + tb[:, None], tr)
    shifted = published_shift(products)
    scores = (torch.einsum("bhid,bhjd->bhij", tq + tu[:, None], tk) + shifted) / DIM**0.5
    later = torch.ones(length, keys, dtype=torch.bool).triu(1 + memory)
    for variant, causal in (("transformer_xl", True), ("espnet_legacy", False)):
        got = rp.rel_shift(products.numpy(), variant=variant, backend="numpy")
        np.testing.assert_array_equal(got, shifted.numpy())
        seen = scores.masked_fill(later, -torch.inf) if causal else scores
        expected = torch.softmax(seen, dim=-1) @ tv
        agrees(expected, q, k, v, position=rp.TransformerXL(u, v_bias, rows, variant=variant), causal=causal)


# ---------------------------------------------------------------------------------------------- Shaw family


@pytest.mark.parametrize("length", [1, 3, 5, 14])
def test_vits_is_shaw_with_zero_outside(agrees, length):
    config = transformers.VitsConfig(**SIZES, window_size=4, attention_dropout=0.0)
    module = without(randomised(vits.VitsAttention(config)), "out_proj")
    x = random_input(length)
    mask = half_padded(length)
    wide = np.broadcast_to(mask, (BATCH, 1, length, length))
    expected = merge_heads(module(x, attention_mask=additive(wide))[0])
    tables = module.emb_rel_k[0].numpy(), module.emb_rel_v[0].numpy()
    options = {"position": rp.Shaw(*tables, outside="zero"), "mask": mask, "largest_value": np.abs(tables[1]).max()}
    agrees(expected, *projected(module, "q_proj k_proj v_proj", x), **options)


@pytest.mark.parametrize(("max_length", "length"), [(4, 12), (30, 9)])
def test_speecht5_is_shaw_clipped(agrees, max_length, length):
    """SpeechT5 counts i - j and has 2 max_length rows, -max_length ... max_length - 1: upside down for j - i."""
    module = without(randomised(speecht5.SpeechT5Attention(WIDTH, HEADS)), "out_proj")
    positions = randomised(speecht5.SpeechT5RelativePositionalEncoding(DIM, max_length))
    x = random_input(length)
    expected = merge_heads(module(x, position_bias=positions(x))[0])
    position = rp.Shaw(positions.pe_k.weight.numpy()[::-1], left=max_length - 1)
    agrees(expected, *projected(module, "q_proj k_proj v_proj", x), position=position)


def test_wav2vec2_bert_is_shaw_clipped(agrees):
    """Wav2Vec2-BERT clips at 6 on the left and 2 on the right."""
    reach = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
    config = transformers.Wav2Vec2BertConfig(**SIZES, **reach, position_embeddings_type="relative_key")
    module = without(randomised(w2v2_bert.Wav2Vec2BertSelfAttention(config)), "linear_out")
    x = random_input(15)
    mask = half_padded(15)
    expected = merge_heads(module(x, attention_mask=additive(mask))[0])
    position = rp.Shaw(module.distance_embedding.weight.numpy(), left=6)
    agrees(expected, *projected(module, "linear_q linear_k linear_v", x), position=position, mask=mask)


# ---------------------------------------------------------------------------------------------- absolute


@pytest.mark.parametrize(
    ("model", "dim", "layout"),
    [
        *(("m2m_100", dim, "tensor2tensor") for dim in (24, 25)),
        ("whisper", 24, "tensor2tensor"),
        *(("marian", dim, "concatenated") for dim in (24, 25)),
    ],
)
def test_sinusoids(model, dim, layout):
    """M2M-100 counts from 2, and the padding's row is 0; Marian's table is computed in float64."""
    peer = modeling(model)
    expected = {
        "m2m_100": lambda: peer.M2M100SinusoidalPositionalEmbedding.get_embedding(200, dim, 1),
        "whisper": lambda: peer.sinusoids(200, dim),
        "marian": lambda: peer.MarianSinusoidalPositionalEmbedding(200, dim).create_weight(),
    }[model]().numpy()
    own = rp.Sinusoidal(dim, layout=layout).encode(200)
    start = 2 if model == "m2m_100" else 0
    atol = EPS32 if model == "marian" else 4 * EPS32 * 200
    np.testing.assert_allclose(own[start:], expected[start:], rtol=0, atol=atol)
    assert model != "m2m_100" or not expected[1].any()
