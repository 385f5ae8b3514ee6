"""Hugging Face transformers: T5, MPNet, Swin, Conformers, XLNet, VITS, SpeechT5 and the fixed sinusoids."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import additive, padding, randomised, split_heads, without

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
mpnet = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
swin = pytest.importorskip("transformers.models.swin.modeling_swin")
w2v2_conformer = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
w2v2_bert = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
seamless = pytest.importorskip("transformers.models.seamless_m4t.modeling_seamless_m4t")
xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
vits = pytest.importorskip("transformers.models.vits.modeling_vits")
speecht5 = pytest.importorskip("transformers.models.speecht5.modeling_speecht5")
whisper = pytest.importorskip("transformers.models.whisper.modeling_whisper")
marian = pytest.importorskip("transformers.models.marian.modeling_marian")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM
EPS32 = np.finfo(np.float32).eps


def merge_heads(split):
    """(B, L, H*D) or (B, L, H, D) tensor, before the output projection, to (B, H, L, D) array."""
    return split_heads(split.reshape(*split.shape[:2], WIDTH))


def random_input(length, batch=BATCH):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- T5 and MPNet


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (320, 800), (64, 256), (28, 882), (8, 20)])
def test_t5_buckets_bit_for_bit(num_buckets, max_distance, bidirectional):
    """A table that holds its own row numbers shows the bucket of every distance."""
    reach = 2000
    distances = torch.arange(-reach, reach + 1)
    expected = t5.T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance).numpy()
    table = np.arange(num_buckets, dtype=np.float64)[:, None]
    q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 2 * reach + 1, 1))
    scheme = rp.T5(table, max_distance=max_distance, bidirectional=bidirectional, rounding="float32")
    got = rp.logits(q, k, position=scheme, scale=1.0, offset=reach, backend="numpy")
    np.testing.assert_array_equal(got[0, 0, 0], expected)


def test_t5_default_buckets_are_exact():
    """With 32 buckets and 128 the single-precision rule and the exact one are the same."""
    for bidirectional in (True, False):
        distances = torch.arange(-2000, 2001)
        expected = t5.T5Attention._relative_position_bucket(distances, bidirectional).numpy()
        table = np.arange(32, dtype=np.float64)[:, None]
        q, k = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 4001, 1))
        got = rp.logits(q, k, position=rp.T5(table, bidirectional=bidirectional), offset=2000, backend="numpy")
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
    table = module.relative_attention_bias.weight.numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.q, module.k, module.v))
    agrees(expected, q, k, v, position=lambda dtype: rp.T5(table.astype(dtype)), mask=mask, scale=1.0)
    agrees(
        expected, q, k, v, position=lambda dtype: rp.T5(table.astype(dtype)), key_lengths=np.array([150, 97]), scale=1.0
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_decoder_whole_and_in_steps(agrees, implementation):
    module = t5_attention(implementation, decoder=True)
    x = random_input(40)
    causal = np.tril(np.ones((40, 40), dtype=bool))
    expected = merge_heads(module(x, mask=additive(causal[None, None]))[0])
    table = module.relative_attention_bias.weight.numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.q, module.k, module.v))

    def scheme(dtype):
        return rp.T5(table.astype(dtype), bidirectional=False)

    agrees(expected, q, k, v, position=scheme, causal=True, scale=1.0)

    cache = transformers.DynamicCache()
    module(x[:, :33], mask=additive(causal[None, None, :33, :33]), cache=cache)
    last = merge_heads(module(x[:, 33:], mask=additive(causal[None, None, 33:]), cache=cache)[0])
    np.testing.assert_allclose(last, expected[:, :, 33:], rtol=0, atol=1e-12)
    agrees(last, q[:, :, 33:], k, v, position=scheme, causal=True, scale=1.0)


def test_mpnet_encoder(agrees):
    config = transformers.MPNetConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=8, vocab_size=16
    )
    encoder = randomised(mpnet.MPNetEncoder(config))
    module = without(encoder.layer[0].attention.attn, "o")
    x = random_input(140)
    mask = padding(140, [140, 64])[:, None, None]
    expected = merge_heads(module(x, additive(mask), position_bias=encoder.compute_position_bias(x))[0])
    table = encoder.relative_attention_bias.weight.numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.q, module.k, module.v))
    agrees(expected, q, k, v, position=lambda dtype: rp.T5(table.astype(dtype)), mask=mask)


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
    table = module.relative_position_bias.relative_position_bias_table.numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))

    def scheme(dtype):
        return rp.WindowBias(table.astype(dtype), (window, window))

    if shift_mask is None:
        agrees(expected, q, k, v, position=scheme)
        return
    tiled = np.tile(shift_mask.numpy(), (BATCH, 1, 1))[:, None]
    agrees(expected, q, k, v, position=scheme, mask=tiled)
    agrees(expected, q, k, v, position=scheme, mask=tiled == 0)  # exp(-100) is below 1e-43


def test_swin_index():
    """A table that holds its own row numbers shows the index map."""
    module = swin.SwinRelativePositionBias(1, (3, 5))
    table = np.arange(5 * 9, dtype=np.float64)[:, None]
    zeros = np.zeros((1, 1, 15, 1))
    got = rp.logits(zeros, zeros, position=rp.WindowBias(table, (3, 5)), backend="numpy")[0, 0]
    np.testing.assert_array_equal(got, module.relative_position_index.view(15, 15).numpy())


# ---------------------------------------------------------------------------------------------- Transformer-XL family


CONFORMERS = {"Wav2Vec2Conformer": w2v2_conformer, "Wav2Vec2Bert": w2v2_bert, "SeamlessM4TConformer": seamless}


def conformer(name):
    """The self-attention and the positional embedding of one of the three models, which agree in their names."""
    options = {"hidden_size": WIDTH, "position_embeddings_type": "relative", "max_source_positions": 50}
    if name == "SeamlessM4TConformer":
        config = transformers.SeamlessM4TConfig(speech_encoder_attention_heads=HEADS, **options)
    else:
        config = getattr(transformers, f"{name}Config")(num_attention_heads=HEADS, **options)
    attention, embedding = (
        getattr(CONFORMERS[name], name + part) for part in ("SelfAttention", "RelPositionalEmbedding")
    )
    return without(randomised(attention(config)), "linear_out"), embedding(config)


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("name", sorted(CONFORMERS))
def test_conformer(agrees, name, length):
    module, embedding = conformer(name)
    x = random_input(length)
    encoded = embedding(x)
    own = rp.Sinusoidal(WIDTH).encode(np.arange(length - 1, -length, -1))
    np.testing.assert_allclose(own, encoded[0].numpy(), rtol=0, atol=4 * EPS32 * (1 + length))

    rows = module.linear_pos(encoded).view(2 * length - 1, HEADS, DIM).numpy()
    u, v_bias = module.pos_bias_u.numpy(), module.pos_bias_v.numpy()
    mask = padding(length, [length, (length + 1) // 2])[:, None, None]
    expected = merge_heads(module(x, attention_mask=additive(mask), relative_position_embeddings=encoded)[0])
    q, k, v = (split_heads(linear(x)) for linear in (module.linear_q, module.linear_k, module.linear_v))

    def scheme(dtype):
        return rp.TransformerXL(*(part.astype(dtype) for part in (u, v_bias, rows)), variant="conformer")

    agrees(expected, q, k, v, position=scheme, mask=mask)


@pytest.mark.parametrize(("length", "memory"), [(1, 0), (6, 0), (1, 5), (7, 11)])
def test_xlnet(agrees, rng, length, memory):
    keys = length + memory
    config = transformers.XLNetConfig(d_model=WIDTH, n_head=HEADS, n_layer=1, d_inner=8, vocab_size=16, dropout=0.0)
    module = randomised(xlnet.XLNetRelativeAttention(config))
    encoded = xlnet.XLNetModel(config).relative_positional_encoding(length, keys)[:, 0]
    own = rp.Sinusoidal(WIDTH, layout="concatenated").encode(np.arange(keys, -length, -1))
    np.testing.assert_allclose(own, encoded.numpy(), rtol=0, atol=4 * EPS32 * (1 + keys))

    rows = torch.einsum("rw,whd->rhd", encoded.double(), module.r)
    # the module counts (length, batch, heads, dim), and masks with 1 where a key is hidden
    q, k, v = (torch.from_numpy(rng.standard_normal((n, BATCH, HEADS, DIM))) for n in (length, keys, keys))
    hidden = np.triu(np.ones((length, keys)), 1 + memory)
    u, v_bias = module.r_w_bias.numpy(), module.r_r_bias.numpy()
    arrays = [t.permute(1, 2, 0, 3).numpy() for t in (q, k, v)]

    def scheme(dtype):
        return rp.TransformerXL(*(part.astype(dtype) for part in (u, v_bias, rows.numpy())), variant="xlnet")

    for mask in (None, torch.from_numpy(hidden)[:, :, None, None].expand(-1, -1, BATCH, HEADS)):
        out = module.rel_attn_core(q, k, v, rows[:, None].expand(-1, BATCH, -1, -1), attn_mask=mask)
        expected = out.permute(1, 2, 0, 3).numpy()
        agrees(expected, *arrays, position=scheme, causal=mask is not None)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (5, 5), (1, 6), (4, 9)])
def test_xlnet_rel_shift(rng, length, keys):
    x = rng.standard_normal((BATCH, HEADS, length, length + keys))
    expected = xlnet.XLNetRelativeAttention.rel_shift_bnij(torch.from_numpy(x), klen=keys).numpy()
    np.testing.assert_array_equal(rp.rel_shift(x, variant="xlnet", backend="numpy"), expected)
    one_way = x[..., : keys + 1]
    expected = xlnet.XLNetRelativeAttention.rel_shift_bnij(torch.from_numpy(one_way), klen=keys).numpy()
    for backend in rp.backend.HOST_BACKENDS:
        np.testing.assert_array_equal(rp.rel_shift(one_way, variant="xlnet_uni", backend=backend), expected)


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
    for variant in ("transformer_xl", "espnet_legacy"):
        got = rp.rel_shift(products.numpy(), variant=variant, backend="numpy")
        np.testing.assert_array_equal(got, shifted.numpy())

    scores = (torch.einsum("bhid,bhjd->bhij", tq + tu[:, None], tk) + shifted) / DIM**0.5
    later = torch.ones(length, keys, dtype=torch.bool).triu(1 + memory)
    for variant, causal in (("transformer_xl", True), ("espnet_legacy", False)):
        seen = scores.masked_fill(later, -torch.inf) if causal else scores
        expected = (torch.softmax(seen, dim=-1) @ tv).numpy()

        def scheme(dtype, variant=variant):
            return rp.TransformerXL(*(part.astype(dtype) for part in (u, v_bias, rows)), variant=variant)

        agrees(expected, q, k, v, position=scheme, causal=causal)


# ---------------------------------------------------------------------------------------------- Shaw family


@pytest.mark.parametrize("length", [1, 3, 5, 14])
def test_vits_is_shaw_with_zero_outside(agrees, length):
    config = transformers.VitsConfig(hidden_size=WIDTH, num_attention_heads=HEADS, window_size=4, attention_dropout=0.0)
    module = without(randomised(vits.VitsAttention(config)), "out_proj")
    x = random_input(length)
    mask = padding(length, [length, (length + 1) // 2])[:, None, None]
    wide = np.broadcast_to(mask, (BATCH, 1, length, length))
    expected = merge_heads(module(x, attention_mask=additive(wide))[0])
    key_table, value_table = module.emb_rel_k[0].numpy(), module.emb_rel_v[0].numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))

    def scheme(dtype):
        return rp.Shaw(key_table.astype(dtype), value_table.astype(dtype), outside="zero")

    agrees(expected, q, k, v, position=scheme, mask=mask, largest_value=np.abs(value_table).max())


@pytest.mark.parametrize(("max_length", "length"), [(4, 12), (30, 9)])
def test_speecht5_is_shaw_clipped(agrees, max_length, length):
    """SpeechT5 counts i - j and has 2 max_length rows, -max_length ... max_length - 1: upside down for j - i."""
    module = without(randomised(speecht5.SpeechT5Attention(WIDTH, HEADS)), "out_proj")
    positions = randomised(speecht5.SpeechT5RelativePositionalEncoding(DIM, max_length))
    x = random_input(length)
    expected = merge_heads(module(x, position_bias=positions(x))[0])
    table = positions.pe_k.weight.numpy()[::-1]
    q, k, v = (split_heads(linear(x)) for linear in (module.q_proj, module.k_proj, module.v_proj))
    agrees(expected, q, k, v, position=lambda dtype: rp.Shaw(table.astype(dtype), left=max_length - 1))


def test_wav2vec2_bert_is_shaw_clipped(agrees):
    """Wav2Vec2-BERT clips at 6 on the left and 2 on the right."""
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=6,
        right_max_position_embeddings=2,
    )
    module = without(randomised(w2v2_bert.Wav2Vec2BertSelfAttention(config)), "linear_out")
    x = random_input(15)
    mask = padding(15, [15, 8])[:, None, None]
    expected = merge_heads(module(x, attention_mask=additive(mask))[0])
    table = module.distance_embedding.weight.numpy()
    q, k, v = (split_heads(linear(x)) for linear in (module.linear_q, module.linear_k, module.linear_v))
    agrees(expected, q, k, v, position=lambda dtype: rp.Shaw(table.astype(dtype), left=6), mask=mask)


# ---------------------------------------------------------------------------------------------- absolute


@pytest.mark.parametrize("dim", [24, 25])
def test_tensor2tensor_sinusoids_of_fairseq(dim):
    """M2M-100's; they count from 2, and the padding's row is 0."""
    m2m = pytest.importorskip("transformers.models.m2m_100.modeling_m2m_100")
    expected = m2m.M2M100SinusoidalPositionalEmbedding.get_embedding(200, dim, 1).numpy()
    own = rp.Sinusoidal(dim, layout="tensor2tensor").encode(200)
    np.testing.assert_allclose(own[2:], expected[2:], rtol=0, atol=4 * EPS32 * 200)
    assert not expected[1].any()


def test_tensor2tensor_sinusoids_of_whisper():
    expected = whisper.sinusoids(200, 24).numpy()
    own = rp.Sinusoidal(24, layout="tensor2tensor").encode(200)
    np.testing.assert_allclose(own, expected, rtol=0, atol=4 * EPS32 * 200)


@pytest.mark.parametrize("dim", [24, 25])
def test_concatenated_sinusoids_of_marian(dim):
    expected = marian.MarianSinusoidalPositionalEmbedding(200, dim).create_weight().numpy()
    own = rp.Sinusoidal(dim, layout="concatenated").encode(200)
    np.testing.assert_allclose(own, expected, rtol=0, atol=EPS32)
