"""Hugging Face transformers: the layout bias of LayoutLMv2, LayoutLMv3 and UDOP."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import (
    added,
    modeling,
    randomised,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
layoutlmv2, layoutlmv3, udop = map(modeling, ("layoutlmv2", "layoutlmv3", "udop"))

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
