"""Whole modules of transformers, ESPnet and PyTorch: their own state dicts give our modules, and both agree."""

import importlib

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests.parity.modules import EPS32, additive, half_padded, modeling, normal, padding, randomised, state_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS}


def close(got, expected):
    """Float64 on both sides: 1e-12 in absolute terms, with values of order 1."""
    expected = expected.detach().numpy()
    assert np.isfinite(expected).all()
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def near(got, expected, size):
    """Tables that are computed in float32, at positions up to a size."""
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=4 * EPS32 * size)


@pytest.fixture
def espnet():
    """What compares schemes with ESPnet, which may not be installed."""
    return importlib.import_module("tests.parity.test_espnet")


def random_input(length, batch=BATCH):
    return normal(batch, length, WIDTH)


def multihead(source, prefix="", **options):
    return layers.MultiHeadAttention.from_state_dict(state_of(source), prefix=prefix, **options)


def relative(source, prefix="", **options):
    return layers.RelativeMultiHeadAttention.from_state_dict(state_of(source), prefix=prefix, **options)


# ---------------------------------------------------------------------------------------------- T5 and MPNet


def t5_model(layers):
    options = {"d_model": WIDTH, "d_kv": DIM, "num_heads": HEADS, "d_ff": 16, "vocab_size": 8, "dropout_rate": 0.0}
    return randomised(
        transformers.T5Model(transformers.T5Config(num_layers=layers, num_decoder_layers=layers, **options))
    )


def test_t5_encoder_layers_share_the_first_ones_table(backend):
    model = t5_model(2)
    x = random_input(140)  # farther than max_distance
    mask = padding(140, [140, 97])[:, None, None]
    bias = None
    for number, block in enumerate(model.encoder.block):
        expected, bias, *_ = block.layer[0].SelfAttention(x, mask=additive(mask), position_bias=bias)
        layer = multihead(model, f"encoder.block.{number}.layer.0.SelfAttention", format="t5")
        assert (layer.heads, layer.scale) == (HEADS, 1.0)
        close(layer(x.numpy(), mask=mask, backend=backend), expected)
        close(layer(x.numpy(), key_lengths=np.array([140, 97]), backend=backend), expected)


def test_t5_decoder_and_cross_attention(backend):
    model = t5_model(1)
    own, across = (one for one in model.decoder.block[0].layer[:2])
    x, context = random_input(30), random_input(17)
    expected = own.SelfAttention(x, mask=additive(np.tri(30, dtype=bool)[None, None]))[0]
    layer = multihead(model, "decoder.block.0.layer.0.SelfAttention", format="t5")
    close(layer(x.numpy(), causal=True, backend=backend), expected)
    cache = layers.Cache()
    steps = [layer(x.numpy()[:, t : t + 1], cache=cache, causal=True, backend=backend) for t in range(30)]
    close(np.concatenate(steps, axis=1), expected)

    mask = padding(17, [17, 9])[:, None, None]
    expected = across.EncDecAttention(x, mask=additive(mask), key_value_states=context)[0]
    layer = multihead(model, "decoder.block.0.layer.1.EncDecAttention", format="t5", heads=HEADS)
    assert layer.position is None
    for keys in (context.numpy(), layer.project(context.numpy())):
        close(layer(x.numpy(), keys, mask=mask, backend=backend), expected)


def test_mpnet_reads_the_encoders_table(backend):
    config = transformers.MPNetConfig(**SIZES, num_hidden_layers=2, intermediate_size=8, vocab_size=16)
    model = randomised(transformers.MPNetModel(config))
    x = random_input(140)
    mask = padding(140, [140, 64])[:, None, None]
    attention, bias = model.encoder.layer[1].attention.attn, model.encoder.compute_position_bias(x)
    expected = attention(x, additive(mask), position_bias=bias, output_attentions=True)
    layer = multihead(model, "encoder.layer.1.attention.attn", format="mpnet")
    for got, wanted in zip(
        layer(x.numpy(), mask=mask, backend=backend, return_probabilities=True), expected, strict=True
    ):
        close(got, wanted)


# ---------------------------------------------------------------------------------------------- learned and rotary


def check_embeddings(embeddings, tokens, encoding):
    """Words and types with learned positions, without their norm."""
    embeddings.LayerNorm = torch.nn.Identity()
    words = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings(torch.zeros_like(tokens))
    close(encoding(words.numpy()), embeddings(tokens))


def test_bert_attention_and_learned_positions(backend):
    config = transformers.BertConfig(**SIZES, num_hidden_layers=1, intermediate_size=8, vocab_size=16)
    model = randomised(transformers.BertModel(config))
    x = random_input(11)
    mask = padding(11, [11, 4])[:, None, None]
    attention = model.encoder.layer[0].attention
    layer = multihead(model, "encoder.layer.0.attention", format="bert", heads=HEADS)
    attention.output.LayerNorm = torch.nn.Identity()
    expected = attention(x, attention_mask=additive(mask))[0] - x
    close(layer(x.numpy(), mask=mask, backend=backend), expected)
    encoding = layers.PositionalEncoding.from_state_dict(state_of(model), format="bert")
    check_embeddings(model.embeddings, torch.arange(11)[None] % 16, encoding)


def test_roberta_and_bart_leave_two_rows_out():
    config = transformers.RobertaConfig(**SIZES, vocab_size=16, pad_token_id=1)
    embeddings = randomised(modeling("roberta").RobertaEmbeddings(config))
    state = {f"embeddings.{name}": tensor for name, tensor in state_of(embeddings).items()}
    encoding = layers.PositionalEncoding.from_state_dict(state, format="roberta")
    check_embeddings(embeddings, torch.arange(3, 14)[None], encoding)

    table = randomised(modeling("bart").BartLearnedPositionalEmbedding(20, WIDTH))
    state = {f"encoder.embed_positions.{name}": tensor for name, tensor in state_of(table).items()}
    x = random_input(9)
    encoding = layers.PositionalEncoding.from_state_dict(state, prefix="encoder", format="bart")
    close(encoding(x.numpy()), x + table(torch.zeros(BATCH, 9, dtype=torch.long)))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 12, "vdim": 20}], ids=str)
def test_torch_multihead_attention(backend, options):
    module = randomised(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options))
    x = random_input(7)
    keys, values = (normal(BATCH, 9, options.get(name, WIDTH)) for name in ("kdim", "vdim"))
    mask = padding(9, [9, 4])
    expected = module(x, keys, values, key_padding_mask=torch.from_numpy(~mask), average_attn_weights=False)
    layer = layers.MultiHeadAttention.from_state_dict(module.state_dict(), format="torch", heads=HEADS)
    given = {"values": values.numpy(), "mask": mask[:, None, None], "return_probabilities": True}
    for got, wanted in zip(layer(x.numpy(), keys.numpy(), **given, backend=backend), expected, strict=True):
        close(got, wanted)


# ---------------------------------------------------------------------------------------------- Conformers, Shaw family


def conformer(name, kind, **more):
    """Self-attention of one of two models with equal names."""
    config = getattr(transformers, f"{name}Config")(**SIZES, position_embeddings_type=kind, **more)
    model = {"Wav2Vec2Conformer": "wav2vec2_conformer", "Wav2Vec2Bert": "wav2vec2_bert"}[name]
    return randomised(getattr(modeling(model), f"{name}SelfAttention")(config)), config


def test_wav2vec2_conformer_rotary_turns_the_inputs(backend):
    """It rotates before the projections, so the inputs of queries and keys are turned, and the values' are not."""
    module, _ = conformer("Wav2Vec2Conformer", "rotary")
    x = random_input(13)
    mask = half_padded(13)
    matrices = rp.reference.rotary_matrices(np.arange(13), rp.reference.rotary_frequencies(DIM))
    sin, cos = (np.tile(matrices[..., row, 0], 2)[:, None, None] for row in (1, 0))
    tables = torch.from_numpy(np.stack([cos, sin]))
    expected = module(x, attention_mask=additive(mask), relative_position_embeddings=tables)[0]
    turned = rp.reference.rotate_inputs(x.numpy(), HEADS)
    layer = multihead(module, format="espnet", heads=HEADS)
    close(layer(turned, turned, values=x.numpy(), mask=mask, backend=backend), expected)


@pytest.mark.parametrize("length", [5, 80])
def test_wav2vec2_bert(backend, length):
    """Its table reaches 64 to the left and 8 to the right by default."""
    module, _ = conformer("Wav2Vec2Bert", "relative_key")
    x = random_input(length)
    mask = half_padded(length)
    layer = multihead(module, format="wav2vec2_bert")
    assert layer.heads == HEADS
    close(layer(x.numpy(), mask=mask, backend=backend), module(x, attention_mask=additive(mask))[0])


def test_wav2vec2_bert_with_another_reach(backend):
    reach = {"left_max_position_embeddings": 2, "right_max_position_embeddings": 6}
    module, _ = conformer("Wav2Vec2Bert", "relative_key", **reach)
    x = random_input(15)
    layer = multihead(module, format="wav2vec2_bert", left=2, right=6)
    close(layer(x.numpy(), backend=backend), module(x)[0])
    with pytest.raises(rp.RelposValueError, match=r"left: 64 \+ 8 \+ 1 = 73 rows expected, found \(9, 8\)"):
        multihead(module, format="wav2vec2_bert")


@pytest.mark.parametrize("length", [6, 24])
def test_speecht5_reads_the_encoders_table(backend, length):
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 8))}
    sizes |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_max_relative_position": 8}
    encoder = randomised(modeling("speecht5").SpeechT5Encoder(transformers.SpeechT5Config(hidden_size=WIDTH, **sizes)))
    x = random_input(length)
    mask = np.broadcast_to(padding(length, [length, 4])[:, None, None], (BATCH, 1, length, length))
    bias = encoder.embed_positions(x)
    expected = encoder.layers[0].attention(x, attention_mask=additive(mask), position_bias=bias)[0]
    layer = multihead(encoder, "layers.0.attention", format="speecht5")
    assert layer.heads == HEADS
    close(layer(x.numpy(), mask=mask, backend=backend), expected)


# ---------------------------------------------------------------------------------------------- Transformer-XL family


@pytest.mark.parametrize("length", [1, 2, 13])
def test_wav2vec2_conformer_relative(backend, length):
    module, config = conformer("Wav2Vec2Conformer", "relative")
    x = random_input(length)
    mask = half_padded(length)
    layer = relative(module, format="wav2vec2_conformer")
    # Theirs are made in float32; ours, in float64, are given to them.
    encoded = torch.from_numpy(layer.encoding.encode(length, length))[None]
    theirs = modeling("wav2vec2_conformer").Wav2Vec2ConformerRelPositionalEmbedding(config)(x).double()
    near(encoded.numpy(), theirs, 1 + length)
    for rows, given in ((encoded, {}), (theirs, {"pos_emb": theirs.numpy()})):
        expected = module(x, attention_mask=additive(mask), relative_position_embeddings=rows)[0]
        close(layer(x.numpy(), mask=mask, **given, backend=backend), expected)


@pytest.mark.parametrize("zero_triu", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "empty row"])
@pytest.mark.parametrize("which", ["espnet", "espnet_legacy"])
def test_espnet(espnet, backend, which, kind, zero_triu):
    variant = "espnet_legacy" if which == "espnet_legacy" else "conformer"
    cls = getattr(espnet.attention, f"{espnet.PREFIX[variant]}RelPositionMultiHeadedAttention")
    module = randomised(cls(HEADS, WIDTH, 0.0, zero_triu=zero_triu))
    length, max_len = 12, 20
    layer = relative(module, format=which, zero_triu=zero_triu, max_len=max_len)
    assert layer.variant == variant
    theirs = getattr(espnet.embedding, f"{espnet.PREFIX[variant]}RelPositionalEncoding")(WIDTH, 0.0, max_len=max_len)
    ours = layers.RelativePositionalEncoding(WIDTH, variant=layer.variant, max_len=max_len, scaled=True)
    inputs = random_input(length)
    x, pos_emb = ours(inputs.numpy())
    scaled, single = theirs(inputs)
    close(x, scaled)
    assert single.shape == pos_emb.shape
    near(pos_emb, single, max_len)

    mask = espnet.masks(length)[kind]
    # Inputs of order 1, so that 1e-12 is a few roundings: scaled ones make the scores of order 100.
    expected = module(inputs, inputs, inputs, torch.from_numpy(pos_emb), mask)
    mask = None if mask is None else mask.numpy()[:, None]
    for given in ({}, {"pos_emb": pos_emb}):
        close(layer(inputs.numpy(), mask=mask, **given, backend=backend), expected)


def test_espnet_absolute_encoding(espnet):
    x = random_input(30)
    theirs = espnet.embedding.PositionalEncoding(WIDTH, 0.0)(x)
    near(layers.PositionalEncoding(WIDTH, scaled=True)(x.numpy()), theirs, 30)
    module = espnet.embedding.ScaledPositionalEncoding(WIDTH, 0.0)
    module.alpha.data = torch.tensor(0.375)
    near(layers.PositionalEncoding(WIDTH, alpha=state_of(module)["alpha"])(x.numpy()), module(x), 30)


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("clamp_len", [None, 4])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (6, 0), (1, 5), (7, 11)])
def test_xlnet(backend, length, memory, clamp_len, attn_type):
    """Both streams; the module's residual connection is taken off, its LayerNorm away."""
    keys = length + memory
    options = {"d_model": WIDTH, "n_head": HEADS, "n_layer": 1, "d_inner": 8, "vocab_size": 16, "dropout": 0.0}
    config = transformers.XLNetConfig(clamp_len=clamp_len or -1, attn_type=attn_type, **options)
    model = randomised(transformers.XLNetModel(config))
    module = model.layer[0].rel_attn
    style = "xlnet" if attn_type == "bi" else "xlnet_uni"
    layer = relative(model, "layer.0.rel_attn", format=style, clamp_len=clamp_len)
    module.layer_norm = torch.nn.Identity()
    encoded = layer.encoding.encode(length, keys)
    near(encoded, model.relative_positional_encoding(length, keys)[:, 0], 1 + keys)

    # The module counts (length, batch, ...), and masks with 1 where a key is hidden.
    streams = [random_input(n) for n in (length, length, memory)]
    h, g, memories = (part.transpose(0, 1) for part in streams)
    hidden = torch.from_numpy(np.triu(np.ones((length, keys)), 1 + memory))
    wide = hidden[:, :, None, None].expand(-1, -1, BATCH, HEADS)
    rows = torch.from_numpy(encoded)[:, None].expand(-1, BATCH, -1)
    seen_h, seen_g = module(h, g, wide, wide, rows, None, mems=memories)
    everywhere = module(h, None, None, None, rows, None, mems=memories)[0]
    before = streams[2].numpy() if memory else None
    context = torch.cat([streams[2], streams[0]], dim=1).numpy()
    for x, given, seen in (
        (h, {"memory": before, "causal": True}, seen_h),
        (g, {"context": context, "causal": True}, seen_g),
        (h, {"memory": before}, everywhere),
    ):
        close(layer(x.transpose(0, 1).numpy(), **given, backend=backend), (seen - x).transpose(0, 1))
