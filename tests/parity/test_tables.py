"""Hugging Face transformers: the layout bias of LayoutLMv2, LayoutLMv3 and UDOP, WavLM's gate, umT5."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import (
    EPS32,
    added,
    additive,
    modeling,
    normal,
    projected,
    randomised,
    sdpa,
    split_heads,
    without,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
layoutlmv2, layoutlmv3, udop, umt5, wavlm = map(modeling, ("layoutlmv2", "layoutlmv3", "udop", "umt5", "wavlm"))

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM


def bias(scheme, length):
    """What a scheme adds, unscaled: (B, H, L, L)."""
    return added(scheme, BATCH, HEADS, length, length)


def words(rng, length):
    """Boxes on a page of 1000 units, and positions that start again for the patches of an image."""
    corner = rng.integers(0, 1001, (BATCH, length, 2))
    boxes = np.concatenate([corner, np.minimum(corner + rng.integers(0, 200, corner.shape), 1000)], axis=-1)
    first = length * 2 // 3
    positions = np.tile(np.concatenate([np.arange(first), np.arange(length - first)]), (BATCH, 1))
    return boxes, positions


# ---------------------------------------------------------------------------------------------- LayoutLM


def layoutlm_config(version):
    kind = {2: transformers.LayoutLMv2Config, 3: transformers.LayoutLMv3Config}[version]
    return kind(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
        attention_probs_dropout_prob=0.0,
        has_relative_attention_bias=True,
        has_spatial_attention_bias=True,
    )


def layoutlm(version, boxes, positions, **options):
    """An encoder in float64, its two biases, and the scheme of its tables."""
    module = {2: layoutlmv2.LayoutLMv2Encoder, 3: layoutlmv3.LayoutLMv3Encoder}[version](layoutlm_config(version))
    encoder = randomised(module)
    layers = (encoder.rel_pos_bias, encoder.rel_pos_x_bias, encoder.rel_pos_y_bias)
    tables = [linear.weight.numpy().T for linear in layers]
    assert [t.shape for t in tables] == [(32, HEADS), (64, HEADS), (64, HEADS)]
    at, boxed = torch.from_numpy(positions), torch.from_numpy(boxes)
    if version == 2:
        parts = encoder._calculate_1d_position_embeddings(at), encoder._calculate_2d_position_embeddings(boxed)
    else:
        parts = encoder._cal_1d_pos_emb(at), encoder._cal_2d_pos_emb(boxed)
    scheme = rp.LayoutBias(*tables, boxes, positions=positions, variant=f"layoutlmv{version}", **options)
    return encoder, parts, scheme


@pytest.mark.parametrize("rounding", ["exact", "float32"])
@pytest.mark.parametrize("version", [2, 3])
def test_layoutlm_biases(version, rounding, rng):
    """Bucket for bucket, up to distances of a whole page."""
    _, parts, scheme = layoutlm(version, *words(rng, 300), rounding=rounding)
    np.testing.assert_allclose(bias(scheme, 300), sum(parts).numpy(), rtol=0, atol=1e-15)


def test_layoutlmv3_attention(agrees, rng):
    encoder, (text, page), scheme = layoutlm(3, *words(rng, 50))
    attention = encoder.layer[0].attention.self
    x = normal(BATCH, 50, WIDTH)
    expected = split_heads(attention(x, position_bias=(text + page) / DIM**0.5)[0])
    agrees(expected, *projected(attention, "query key value", x), position=scheme)


def test_layoutlmv2_attention(agrees, rng):
    """Its code refuses float64 (it masks with a number that float32 has not); PyTorch's takes the same scores."""
    encoder, (text, page), scheme = layoutlm(2, *words(rng, 50))
    attention = encoder.layer[0].attention.self
    x = normal(BATCH, 50, WIDTH)
    hidden = torch.zeros(BATCH, 1, 1, 50, dtype=torch.bool)
    hidden[1, ..., 41:] = True
    q, k, v = (split_heads(part) for part in attention.compute_qkv(x))
    expected = sdpa(q, k, v, attn_mask=(text + page).masked_fill(hidden, -torch.inf))
    agrees(expected, q, k, v, position=scheme, key_lengths=np.array([50, 41]))
    own = attention.float()(x.float(), attention_mask=hidden, rel_pos=text.float(), rel_2d_pos=page.float())[0]
    # A score is a sum of products of sums, whose terms are rounded to eps; probabilities are then wrong by as much.
    size = np.abs(q).max() * np.abs(k).max() * DIM**0.5 + np.abs((text + page).numpy()).max()
    np.testing.assert_allclose(split_heads(own), expected, rtol=0, atol=8 * EPS32 * (1 + size) * np.abs(v).max())


def test_layoutlmv3_without_positions_adds_nothing(rng):
    """A configuration with boxes alone: its encoder asks for both."""
    config = layoutlm_config(3)
    config.has_relative_attention_bias = False
    boxes, positions = (torch.from_numpy(x) for x in words(rng, 9))
    assert randomised(layoutlmv3.LayoutLMv3Encoder(config))._compute_position_bias(positions, boxes) is None


# ---------------------------------------------------------------------------------------------- UDOP


def udop_boxes(rng, length):
    return words(rng, length)[0].astype(np.float32) / np.float32(1000)


def udop_bias(boxes, **arguments):
    """What the encoder's bias modules add in float64, and their tables."""
    kinds = [{"type": "1d"}, {"type": "horizontal", **arguments}, {"type": "vertical", **arguments}]
    config = transformers.UdopConfig(
        d_model=WIDTH, d_kv=DIM, num_heads=HEADS, dropout_rate=0.0, relative_bias_args=kinds
    )
    module = randomised(udop.RelativePositionBiasAggregated(udop.create_relative_bias(config)))
    expected = module(attention_mask=torch.ones(boxes.shape[:2]), bbox=torch.from_numpy(boxes))
    return config, expected, [one.relative_attention_bias.weight.numpy() for one in module.biases]


def udop_scheme(tables, boxes, rounding="float32", **options):
    return rp.LayoutBias(*tables, boxes, variant="udop", rounding=rounding, **options)


@pytest.mark.parametrize("unit", [1.0, 0.01, 1 / 224, 0.001])
def test_udop_bias(unit, rng):
    """Boxes in hundredths and other fractions of a page, where float32 decides."""
    boxes = udop_boxes(rng, 200)
    boxes = (np.round(boxes / unit) * unit).astype(np.float32)
    _, expected, tables = udop_bias(boxes)
    np.testing.assert_allclose(bias(udop_scheme(tables, boxes), 200), expected.numpy(), rtol=0, atol=1e-15)
    if unit == 0.01:
        assert not np.allclose(bias(udop_scheme(tables, boxes, "exact"), 200), expected.numpy())


def test_udop_bias_with_other_units(rng):
    boxes = udop_boxes(rng, 60)
    _, expected, tables = udop_bias(boxes, scaling_factor=37.5, max_distance=40, relative_attention_num_buckets=16)
    found = bias(udop_scheme(tables, boxes, factor=37.5, max_box_distance=40), 60)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-15)


def test_udop_attention(agrees, rng):
    boxes = udop_boxes(rng, 50)
    config, table, tables = udop_bias(boxes)
    config._attn_implementation = "eager"
    attention = without(randomised(udop.UdopAttention(config)), "o")
    x = normal(BATCH, 50, WIDTH)
    expected = split_heads(attention(x, position_bias=table)[0])
    agrees(expected, *projected(attention, "q k v", x), position=udop_scheme(tables, boxes), scale=1.0)


# ---------------------------------------------------------------------------------------------- WavLM


def wavlm_attention():
    module = randomised(wavlm.WavLMAttention(WIDTH, HEADS))
    # The projection of the output is an argument there, so it becomes one that changes nothing.
    module.out_proj.weight.copy_(torch.eye(WIDTH, dtype=torch.float64))
    module.out_proj.bias.zero_()
    return module


def gate_arguments(module):
    linear = module.gru_rel_pos_linear
    return linear.weight, linear.bias, module.gru_rel_pos_const


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("length", [1, 60, 950])
def test_wavlm(agrees, length):
    """Up to distances beyond 800."""
    module = wavlm_attention()
    x = normal(BATCH, length, WIDTH)
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length * 3 // 4 + 1 :] = 0
    expected = split_heads(module(x, attention_mask=mask)[0])
    gate = rp.reference.wavlm_gate(x.numpy(), *(a.numpy() for a in gate_arguments(module)))
    options = {"position": rp.WavLM(module.rel_attn_embed.weight.numpy(), gate), "key_lengths": mask.sum(1).numpy()}
    agrees(expected, *projected(module, "q_proj k_proj v_proj", x), **options)


def test_wavlm_gradients(rng):
    """PyTorch's own derivatives of table, gate weights and the hidden state behind the gate."""
    module = wavlm_attention()
    x = normal(BATCH, 30, WIDTH)
    q, k, v = projected(module, "q_proj k_proj v_proj", x)
    weight = rng.standard_normal((BATCH, HEADS, 30, DIM))
    with torch.enable_grad():
        x.requires_grad_(True)
        # The operands are held fixed, so that x acts through the gate alone.
        products = torch.from_numpy(q @ k.swapaxes(-1, -2) / np.sqrt(DIM))
        linear = module.gru_rel_pos_linear
        sums = linear(x.reshape(BATCH, 30, HEADS, DIM).transpose(1, 2)).unflatten(-1, (2, 4)).sum(-1).sigmoid()
        gate = sums[..., :1] * (sums[..., 1:] * module.gru_rel_pos_const - 1) + 2
        scores = products + gate * module.compute_bias(30, 30)
        ((scores.softmax(-1) @ torch.from_numpy(v)) * torch.from_numpy(weight)).sum().backward()
    arguments = [a.detach().numpy() for a in (x, *gate_arguments(module))]
    scheme = rp.WavLM(module.rel_attn_embed.weight.detach().numpy(), rp.reference.wavlm_gate(*arguments))
    grads = rp.attention_vjp(q, k, v, position=scheme, grad_out=weight).position
    found = rp.reference.wavlm_gate_vjp(*arguments, grads["gate"])
    np.testing.assert_allclose(grads["table"], module.rel_attn_embed.weight.grad, rtol=0, atol=1e-12)
    for name, parameter in zip(("hidden", "weight", "bias", "const"), (x, *gate_arguments(module)), strict=True):
        np.testing.assert_allclose(found[name], parameter.grad, rtol=0, atol=1e-12, err_msg=name)


# ---------------------------------------------------------------------------------------------- umT5


@pytest.mark.parametrize("decoder", [False, True])
def test_umt5_is_t5(agrees, decoder):
    """A table of its own in each layer, else T5."""
    config = transformers.UMT5Config(d_model=WIDTH, d_kv=DIM, num_heads=HEADS, is_decoder=decoder, dropout_rate=0.0)
    config._attn_implementation = "eager"
    module = without(randomised(umt5.UMT5Attention(config, has_relative_attention_bias=True, layer_idx=0)), "o")
    x = normal(BATCH, 150, WIDTH)
    seen = np.tri(150, dtype=bool) if decoder else np.ones((150, 150), bool)
    expected = split_heads(module(x, attention_mask=additive(seen[None, None]))[0])
    position = rp.T5(module.relative_attention_bias.weight.numpy(), bidirectional=not decoder)
    agrees(expected, *projected(module, "q k v", x), position=position, scale=1.0, causal=decoder)
