"""ESPnet: both of its relative attentions, their shifts and their positional encodings."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import randomised, split_heads, without

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
attention = pytest.importorskip("espnet.nets.pytorch_backend.transformer.attention")
embedding = pytest.importorskip("espnet.nets.pytorch_backend.transformer.embedding")

BATCH, HEADS, DIM = 2, 3, 8
WIDTH = HEADS * DIM
EPS32 = np.finfo(np.float32).eps


def build(cls):
    """The module in float64 with random weights, its output projection taken away."""
    return without(randomised(cls(HEADS, WIDTH, 0.0)), "linear_out")


def compare(agrees, module, rows, variant, x, pos, mask, *, causal=False):
    expected = split_heads(module(x, x, x, pos, mask), HEADS)
    q, k, v = (split_heads(linear(x), HEADS) for linear in (module.linear_q, module.linear_k, module.linear_v))
    parts = (module.pos_bias_u.numpy(), module.pos_bias_v.numpy(), rows.numpy())

    def scheme(dtype):
        return rp.TransformerXL(*(part.astype(dtype) for part in parts), variant=variant)

    given = None if mask is None or causal else mask.numpy()[:, None]
    agrees(expected, q, k, v, position=scheme, mask=given, causal=causal)


def masks(length):
    """No mask, padding, causal, and one with rows that see nothing (ESPnet gives zeros there, as we do)."""
    padded = torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    empty = causal.clone()
    empty[1, length // 2] = False
    return {"none": None, "padding": padded[:, None], "causal": causal, "empty row": empty}


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "empty row"])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_new_attention_is_the_conformer_variant(agrees, length, kind):
    module = build(attention.RelPositionMultiHeadedAttention)
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    _, pos = embedding.RelPositionalEncoding(WIDTH, 0.0, max_len=20)(x)
    own = rp.Sinusoidal(WIDTH).encode(np.arange(length - 1, -length, -1))
    np.testing.assert_allclose(own, pos[0].numpy(), rtol=0, atol=4 * EPS32 * (1 + length))
    rows = module.linear_pos(pos).view(2 * length - 1, HEADS, DIM)
    mask = masks(length)[kind]
    compare(agrees, module, rows, "conformer", x, pos, mask, causal=kind == "causal")


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "empty row"])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_legacy_attention_is_the_espnet_legacy_variant(agrees, length, kind):
    module = build(attention.LegacyRelPositionMultiHeadedAttention)
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    _, pos = embedding.LegacyRelPositionalEncoding(WIDTH, 0.0, max_len=20)(x)
    rows = module.linear_pos(pos).view(length, HEADS, DIM)
    mask = masks(length)[kind]
    compare(agrees, module, rows, "espnet_legacy", x, pos, mask, causal=kind == "causal")
    if kind == "causal":  # below the diagonal it is Transformer-XL
        compare(agrees, module, rows, "transformer_xl", x, pos, mask, causal=True)


def test_legacy_encoding_counts_down_from_its_table_not_from_the_input():
    """Its rows are max_len - 1, max_len - 2 ...: distances L-1 ... 0 only where the input fills the table."""
    x = torch.zeros(1, 13, WIDTH)
    for max_len in (13, 20):
        _, pos = embedding.LegacyRelPositionalEncoding(WIDTH, 0.0, max_len=max_len)(x)
        own = rp.Sinusoidal(WIDTH).encode(np.arange(max_len - 1, max_len - 14, -1))
        np.testing.assert_allclose(own, pos[0].numpy(), rtol=0, atol=4 * EPS32 * max_len)


def test_absolute_encoding():
    module = embedding.PositionalEncoding(WIDTH, 0.0, max_len=40)
    own = rp.Sinusoidal(WIDTH).encode(40)
    np.testing.assert_allclose(own, module.pe[0].numpy(), rtol=0, atol=4 * EPS32 * 40)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_rel_shift_of_the_new_attention(rng, length):
    x = rng.standard_normal((BATCH, HEADS, length, 2 * length - 1))
    expected = build(attention.RelPositionMultiHeadedAttention).rel_shift(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(rp.rel_shift(x, variant="conformer", backend="numpy"), expected)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (2, 2), (9, 9), (4, 11)])
def test_rel_shift_of_the_legacy_attention(rng, length, keys):
    """Bit for bit, the values above the diagonal included."""
    x = rng.standard_normal((BATCH, HEADS, length, keys))
    expected = build(attention.LegacyRelPositionMultiHeadedAttention).rel_shift(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(rp.rel_shift(x, variant="espnet_legacy", backend="numpy"), expected)
