"""Whole modules of transformers, ESPnet and PyTorch: their own state dicts give our modules, and both agree."""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np.reference import rotary_frequencies, rotary_matrices, rotate_pairs
from tests.parity.modules import additive, padding, randomised

torch = pytest.importorskip("torch")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM


def close(got, expected):
    """Float64 on both sides: 1e-12 in absolute terms, with values of order 1."""
    expected = expected.detach().numpy()
    assert np.isfinite(expected).all()
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def state_of(module):
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def random_input(length, batch=BATCH):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


@pytest.fixture(params=rp.backend.HOST_BACKENDS)
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


# ---------------------------------------------------------------------------------------------- T5 and MPNet


def t5_stack(transformers, *, decoder, layers=2):
    options = {"d_model": WIDTH, "d_kv": DIM, "num_heads": HEADS, "d_ff": 16, "vocab_size": 8, "dropout_rate": 0.0}
    config = transformers.T5Config(num_layers=layers, num_decoder_layers=layers, **options)
    model = randomised(transformers.T5Model(config))
    return model, (model.decoder if decoder else model.encoder)


def test_t5_encoder_layers_share_the_first_ones_table(transformers, backend):
    model, stack = t5_stack(transformers, decoder=False)
    x = random_input(140)  # farther than max_distance
    mask = padding(140, [140, 97])[:, None, None]
    first, second = (block.layer[0].SelfAttention for block in stack.block)
    expected, bias, _ = first(x, mask=additive(mask))
    state = state_of(model)
    prefix = "encoder.block.{}.layer.0.SelfAttention"
    layer = layers.MultiHeadAttention.from_state_dict(state, prefix=prefix.format(0), format="t5")
    assert layer.heads == HEADS
    assert layer.scale == 1.0
    close(layer(x.numpy(), mask=mask, backend=backend), expected)
    close(layer(x.numpy(), key_lengths=np.array([140, 97]), backend=backend), expected)

    expected = second(x, mask=additive(mask), position_bias=bias)[0]
    layer = layers.MultiHeadAttention.from_state_dict(state, prefix=prefix.format(1), format="t5")
    close(layer(x.numpy(), mask=mask, backend=backend), expected)


def test_t5_decoder_and_cross_attention(transformers, backend):
    model, stack = t5_stack(transformers, decoder=True, layers=1)
    x, context = random_input(30), random_input(17)
    state = state_of(model)
    later = np.tril(np.ones((30, 30), bool))[None, None]
    expected = stack.block[0].layer[0].SelfAttention(x, mask=additive(later))[0]
    layer = layers.MultiHeadAttention.from_state_dict(
        state, prefix="decoder.block.0.layer.0.SelfAttention", format="t5"
    )
    close(layer(x.numpy(), causal=True, backend=backend), expected)
    cache = layers.Cache()
    steps = [layer(x.numpy()[:, t : t + 1], cache=cache, causal=True, backend=backend) for t in range(30)]
    close(np.concatenate(steps, axis=1), expected)

    mask = padding(17, [17, 9])[:, None, None]
    expected = stack.block[0].layer[1].EncDecAttention(x, mask=additive(mask), key_value_states=context)[0]
    layer = layers.MultiHeadAttention.from_state_dict(
        state, prefix="decoder.block.0.layer.1.EncDecAttention", format="t5", heads=HEADS
    )
    assert layer.position is None
    close(layer(x.numpy(), context.numpy(), mask=mask, backend=backend), expected)
    close(layer(x.numpy(), layer.project(context.numpy()), mask=mask, backend=backend), expected)


def test_mpnet_reads_the_encoders_table(transformers, backend):
    config = transformers.MPNetConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=2, intermediate_size=8, vocab_size=16
    )
    model = randomised(transformers.MPNetModel(config))
    x = random_input(140)
    mask = padding(140, [140, 64])[:, None, None]
    attention = model.encoder.layer[1].attention.attn
    expected, probabilities = attention(
        x, additive(mask), position_bias=model.encoder.compute_position_bias(x), output_attentions=True
    )
    layer = layers.MultiHeadAttention.from_state_dict(
        state_of(model), prefix="encoder.layer.1.attention.attn", format="mpnet"
    )
    got, p = layer(x.numpy(), mask=mask, backend=backend, return_probabilities=True)
    close(got, expected)
    close(p, probabilities)


# ---------------------------------------------------------------------------------------------- learned and rotary


def test_bert_attention_and_learned_positions(transformers, backend):
    config = transformers.BertConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, intermediate_size=8, vocab_size=16
    )
    model = randomised(transformers.BertModel(config))
    state = state_of(model)
    x = random_input(11)
    mask = padding(11, [11, 4])[:, None, None]
    attention = model.encoder.layer[0].attention
    attention.output.LayerNorm = torch.nn.Identity()
    expected = attention(x, attention_mask=additive(mask))[0] - x
    layer = layers.MultiHeadAttention.from_state_dict(
        state, prefix="encoder.layer.0.attention", format="bert", heads=HEADS
    )
    close(layer(x.numpy(), mask=mask, backend=backend), expected)

    embeddings = model.embeddings
    embeddings.LayerNorm = torch.nn.Identity()
    tokens = torch.arange(11)[None] % 16
    words = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings(torch.zeros_like(tokens))
    encoding = layers.PositionalEncoding.from_state_dict(state, format="bert")
    close(encoding(words.numpy()), embeddings(tokens))


def test_roberta_and_bart_leave_two_rows_out(transformers):
    roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta")
    config = transformers.RobertaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, vocab_size=16, pad_token_id=1)
    embeddings = randomised(roberta.RobertaEmbeddings(config))
    embeddings.LayerNorm = torch.nn.Identity()
    state = {f"embeddings.{name}": tensor for name, tensor in state_of(embeddings).items()}
    tokens = torch.arange(3, 14)[None]
    words = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings(torch.zeros_like(tokens))
    close(layers.PositionalEncoding.from_state_dict(state, format="roberta")(words.numpy()), embeddings(tokens))

    bart = pytest.importorskip("transformers.models.bart.modeling_bart")
    table = randomised(bart.BartLearnedPositionalEmbedding(20, WIDTH))
    state = {f"encoder.embed_positions.{name}": tensor for name, tensor in state_of(table).items()}
    x = random_input(9)
    encoding = layers.PositionalEncoding.from_state_dict(state, prefix="encoder", format="bart")
    close(encoding(x.numpy()), x + table(torch.zeros(BATCH, 9, dtype=torch.long)))


def test_torch_multihead_attention(backend):
    for options in ({}, {"bias": False}, {"kdim": 12, "vdim": 20}):
        module = randomised(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options))
        x = random_input(7)
        keys = torch.randn(BATCH, 9, options.get("kdim", WIDTH), dtype=torch.float64)
        values = torch.randn(BATCH, 9, options.get("vdim", WIDTH), dtype=torch.float64)
        mask = padding(9, [9, 4])
        expected, probabilities = module(
            x, keys, values, key_padding_mask=torch.from_numpy(~mask), average_attn_weights=False
        )
        layer = layers.MultiHeadAttention.from_state_dict(module.state_dict(), format="torch", heads=HEADS)
        got, p = layer(
            x.numpy(),
            keys.numpy(),
            values=values.numpy(),
            mask=mask[:, None, None],
            return_probabilities=True,
            backend=backend,
        )
        close(got, expected)
        close(p, probabilities)


def test_wav2vec2_conformer_rotary_turns_the_inputs(transformers, backend):
    """It rotates before the projections, so the inputs of queries and keys are turned, and the values' are not."""
    modeling = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="rotary"
    )
    module = randomised(modeling.Wav2Vec2ConformerSelfAttention(config))
    x = random_input(13)
    mask = padding(13, [13, 6])[:, None, None]
    matrices = rotary_matrices(np.arange(13), rotary_frequencies(DIM))
    sin, cos = (np.tile(matrices[..., row, 0], 2)[:, None, None] for row in (1, 0))
    tables = torch.from_numpy(np.stack([cos, sin]))
    expected = module(x, attention_mask=additive(mask), relative_position_embeddings=tables)[0]
    layer = layers.MultiHeadAttention.from_state_dict(state_of(module), format="espnet", heads=HEADS)
    split = x.numpy().reshape(BATCH, 13, HEADS, DIM).swapaxes(1, 2)
    turned = rotate_pairs(split, matrices).swapaxes(1, 2).reshape(BATCH, 13, WIDTH)
    close(layer(turned, turned, values=x.numpy(), mask=mask, backend=backend), expected)


# ---------------------------------------------------------------------------------------------- Shaw family


@pytest.mark.parametrize("length", [5, 80])
def test_wav2vec2_bert(transformers, backend, length):
    """Its table reaches 64 to the left and 8 to the right by default."""
    modeling = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="relative_key"
    )
    module = randomised(modeling.Wav2Vec2BertSelfAttention(config))
    x = random_input(length)
    mask = padding(length, [length, (length + 1) // 2])[:, None, None]
    expected = module(x, attention_mask=additive(mask))[0]
    layer = layers.MultiHeadAttention.from_state_dict(state_of(module), format="wav2vec2_bert")
    assert layer.heads == HEADS
    close(layer(x.numpy(), mask=mask, backend=backend), expected)


def test_wav2vec2_bert_with_another_reach(transformers, backend):
    modeling = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    options = {"left_max_position_embeddings": 2, "right_max_position_embeddings": 6}
    config = transformers.Wav2Vec2BertConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="relative_key", **options
    )
    module = randomised(modeling.Wav2Vec2BertSelfAttention(config))
    x = random_input(15)
    layer = layers.MultiHeadAttention.from_state_dict(state_of(module), format="wav2vec2_bert", left=2, right=6)
    close(layer(x.numpy(), backend=backend), module(x)[0])
    with pytest.raises(rp.RelposValueError, match=r"left: 64 \+ 8 \+ 1 = 73 rows expected, found \(9, 8\)"):
        layers.MultiHeadAttention.from_state_dict(state_of(module), format="wav2vec2_bert")


@pytest.mark.parametrize("length", [6, 24])
def test_speecht5_reads_the_encoders_table(transformers, backend, length):
    config = transformers.SpeechT5Config(
        hidden_size=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        encoder_max_relative_position=8,
    )
    modeling = pytest.importorskip("transformers.models.speecht5.modeling_speecht5")
    encoder = randomised(modeling.SpeechT5Encoder(config))
    attention = encoder.layers[0].attention
    x = random_input(length)
    mask = np.broadcast_to(padding(length, [length, 4])[:, None, None], (BATCH, 1, length, length))
    expected = attention(x, attention_mask=additive(mask), position_bias=encoder.embed_positions(x))[0]
    layer = layers.MultiHeadAttention.from_state_dict(state_of(encoder), prefix="layers.0.attention", format="speecht5")
    assert layer.heads == HEADS
    close(layer(x.numpy(), mask=mask, backend=backend), expected)


# ---------------------------------------------------------------------------------------------- Transformer-XL family


@pytest.mark.parametrize("length", [1, 2, 13])
def test_wav2vec2_conformer_relative(transformers, backend, length):
    modeling = pytest.importorskip("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="relative"
    )
    module = randomised(modeling.Wav2Vec2ConformerSelfAttention(config))
    x = random_input(length)
    mask = padding(length, [length, (length + 1) // 2])[:, None, None]
    layer = layers.RelativeMultiHeadAttention.from_state_dict(state_of(module), format="wav2vec2_conformer")
    # Theirs are made in float32; ours, in float64, are given to them.
    encoded = torch.from_numpy(layer.encoding.encode(length, length))[None]
    expected = module(x, attention_mask=additive(mask), relative_position_embeddings=encoded)[0]
    close(layer(x.numpy(), mask=mask, backend=backend), expected)

    theirs = modeling.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    np.testing.assert_allclose(
        encoded.numpy(), theirs.numpy(), rtol=0, atol=4 * np.finfo(np.float32).eps * (1 + length)
    )
    expected = module(x, attention_mask=additive(mask), relative_position_embeddings=theirs.double())[0]
    close(layer(x.numpy(), mask=mask, pos_emb=theirs.double().numpy(), backend=backend), expected)


def espnet_masks(length):
    """No mask, padding, causal, and one with a row that sees nothing (both give zeros there)."""
    padded = np.broadcast_to(padding(length, [length, (length + 1) // 2])[:, None], (BATCH, length, length))
    causal = np.broadcast_to(np.tril(np.ones((length, length), bool)), (BATCH, length, length))
    empty = causal.copy()
    empty[1, length // 2] = False
    return {"none": None, "padding": padded, "causal": causal, "empty row": empty}


@pytest.mark.parametrize("zero_triu", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "empty row"])
@pytest.mark.parametrize("which", ["espnet", "espnet_legacy"])
def test_espnet(backend, which, kind, zero_triu):
    attention = pytest.importorskip("espnet.nets.pytorch_backend.transformer.attention")
    embedding = pytest.importorskip("espnet.nets.pytorch_backend.transformer.embedding")
    legacy = "Legacy" if which == "espnet_legacy" else ""
    module = randomised(
        getattr(attention, f"{legacy}RelPositionMultiHeadedAttention")(HEADS, WIDTH, 0.0, zero_triu=zero_triu)
    )
    length, max_len = 12, 20
    layer = layers.RelativeMultiHeadAttention.from_state_dict(
        state_of(module), format=which, zero_triu=zero_triu, max_len=max_len
    )
    theirs = getattr(embedding, f"{legacy}RelPositionalEncoding")(WIDTH, 0.0, max_len=max_len)
    ours = layers.RelativePositionalEncoding(WIDTH, variant=layer.variant, max_len=max_len, scaled=True)
    inputs = random_input(length)
    x, pos_emb = ours(inputs.numpy())
    scaled, single = theirs(inputs)
    close(x, scaled)
    assert single.shape == pos_emb.shape
    np.testing.assert_allclose(pos_emb, single.numpy(), rtol=0, atol=4 * np.finfo(np.float32).eps * max_len)

    mask = espnet_masks(length)[kind]
    given = None if mask is None else torch.from_numpy(mask.copy())
    # Inputs of order 1, so that 1e-12 is a few roundings: scaled ones make the scores of order 100.
    expected = module(inputs, inputs, inputs, torch.from_numpy(pos_emb), given)
    mask = None if mask is None else mask[:, None]
    close(layer(inputs.numpy(), mask=mask, backend=backend), expected)
    close(layer(inputs.numpy(), mask=mask, pos_emb=pos_emb, backend=backend), expected)


def test_espnet_absolute_encoding():
    embedding = pytest.importorskip("espnet.nets.pytorch_backend.transformer.embedding")
    x = random_input(30)
    eps = np.finfo(np.float32).eps
    theirs = embedding.PositionalEncoding(WIDTH, 0.0)(x)
    ours = layers.PositionalEncoding(WIDTH, scaled=True)(x.numpy())
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=4 * eps * 30)
    module = embedding.ScaledPositionalEncoding(WIDTH, 0.0)
    module.alpha.data = torch.tensor(0.375)
    ours = layers.PositionalEncoding(WIDTH, alpha=module.state_dict()["alpha"].numpy())(x.numpy())
    np.testing.assert_allclose(ours, module(x).numpy(), rtol=0, atol=4 * eps * 30)


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("clamp_len", [None, 4])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (6, 0), (1, 5), (7, 11)])
def test_xlnet(transformers, backend, length, memory, clamp_len, attn_type):
    """Both streams; the module's residual connection is taken off, its LayerNorm away."""
    keys = length + memory
    options = {"d_model": WIDTH, "n_head": HEADS, "n_layer": 1, "d_inner": 8, "vocab_size": 16, "dropout": 0.0}
    model = randomised(
        transformers.XLNetModel(transformers.XLNetConfig(clamp_len=clamp_len or -1, attn_type=attn_type, **options))
    )
    module = model.layer[0].rel_attn
    module.layer_norm = torch.nn.Identity()
    layer = layers.RelativeMultiHeadAttention.from_state_dict(
        state_of(model),
        prefix="layer.0.rel_attn",
        format="xlnet" if attn_type == "bi" else "xlnet_uni",
        clamp_len=clamp_len,
    )
    encoded = layer.encoding.encode(length, keys)
    theirs = model.relative_positional_encoding(length, keys)[:, 0].numpy()
    np.testing.assert_allclose(encoded, theirs, rtol=0, atol=4 * np.finfo(np.float32).eps * (1 + keys))

    # The module counts (length, batch, ...), and masks with 1 where a key is hidden.
    h, g, memories = random_input(length), random_input(length), random_input(memory)
    hidden = np.triu(np.ones((length, keys)), 1 + memory)
    wide = torch.from_numpy(hidden)[:, :, None, None].expand(-1, -1, BATCH, HEADS)
    rows = torch.from_numpy(encoded)[:, None].expand(-1, BATCH, -1)
    swapped = [part.transpose(0, 1) for part in (h, g, memories)]
    seen_h, seen_g = module(swapped[0], swapped[1], wide, wide, rows, None, mems=swapped[2])
    before = memories.numpy() if memory else None
    close(layer(h.numpy(), memory=before, causal=True, backend=backend), (seen_h - swapped[0]).transpose(0, 1))
    context = torch.cat([memories, h], dim=1).numpy()
    close(layer(g.numpy(), context, causal=True, backend=backend), (seen_g - swapped[1]).transpose(0, 1))
    everywhere = module(swapped[0], None, None, None, rows, None, mems=swapped[2])[0]
    close(layer(h.numpy(), memory=before, backend=backend), (everywhere - swapped[0]).transpose(0, 1))
