"""ESPnet: both of its relative attentions, their shifts and their positional encodings."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, normal, projected, randomised, split_heads, without

torch = pytest.importorskip("torch")
attention = pytest.importorskip("espnet.nets.pytorch_backend.transformer.attention")
embedding = pytest.importorskip("espnet.nets.pytorch_backend.transformer.embedding")

BATCH, HEADS, DIM = 2, 3, 8
WIDTH = HEADS * DIM
PREFIX = {"conformer": "", "espnet_legacy": "Legacy"}


def build(variant, **options):
    """The module in float64 with random weights, its output projection taken away."""
    cls = getattr(attention, f"{PREFIX[variant]}RelPositionMultiHeadedAttention")
    return without(randomised(cls(HEADS, WIDTH, 0.0, **options)), "linear_out")


def encoding(variant, max_len=20):
    return getattr(embedding, f"{PREFIX[variant]}RelPositionalEncoding")(WIDTH, 0.0, max_len=max_len)


def masks(length):
    """No mask, padding, causal, and one with rows that see nothing (ESPnet gives zeros there, as we do)."""
    padded = torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    empty = causal.clone()
    empty[1, length // 2] = False
    return {"none": None, "padding": padded[:, None], "causal": causal, "empty row": empty}


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "empty row", "zero_triu"])
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("variant", PREFIX)
def test_attention(agrees, variant, length, kind):
    """With `zero_triu`, without a mask."""
    later = {"zero_triu": True} if kind == "zero_triu" else {}
    module = build(variant, **later)
    x = normal(BATCH, length, WIDTH)
    _, pos = encoding(variant)(x)
    if variant == "conformer":
        own = rp.Sinusoidal(WIDTH).encode(np.arange(length - 1, -length, -1))
        np.testing.assert_allclose(own, pos[0].numpy(), rtol=0, atol=4 * EPS32 * (1 + length))
    rows = module.linear_pos(pos).view(-1, HEADS, DIM)
    parts = [part.numpy() for part in (module.pos_bias_u, module.pos_bias_v, rows)]
    mask, causal = masks(length).get(kind), kind == "causal"
    expected = split_heads(module(x, x, x, pos, mask), HEADS)
    qkv = projected(module, "linear_q linear_k linear_v", x, HEADS)
    given = None if mask is None or causal else mask.numpy()[:, None]
    # Below the diagonal the legacy one is Transformer-XL.
    same = ["transformer_xl"] if causal and variant == "espnet_legacy" else []
    for name in (variant, *same):
        agrees(expected, *qkv, position=rp.TransformerXL(*parts, variant=name, **later), mask=given, causal=causal)


def test_legacy_encoding_counts_down_from_its_table_not_from_the_input():
    """Its rows are max_len - 1, max_len - 2 ...: distances L-1 ... 0 only where the input fills the table."""
    for max_len in (13, 20):
        _, pos = encoding("espnet_legacy", max_len)(torch.zeros(1, 13, WIDTH))
        own = rp.Sinusoidal(WIDTH).encode(np.arange(max_len - 1, max_len - 14, -1))
        np.testing.assert_allclose(own, pos[0].numpy(), rtol=0, atol=4 * EPS32 * max_len)


def test_absolute_encoding():
    module = embedding.PositionalEncoding(WIDTH, 0.0, max_len=40)
    own = rp.Sinusoidal(WIDTH).encode(40)
    np.testing.assert_allclose(own, module.pe[0].numpy(), rtol=0, atol=4 * EPS32 * 40)


@pytest.mark.parametrize(
    ("variant", "length", "columns"),
    [
        *(("conformer", n, 2 * n - 1) for n in (1, 2, 9)),
        *(("espnet_legacy", n, keys) for n, keys in ((1, 1), (2, 2), (9, 9), (4, 11))),
    ],
)
def test_rel_shift(rng, variant, length, columns):
    """Bit for bit, the values above the diagonal of the legacy one included."""
    x = rng.standard_normal((BATCH, HEADS, length, columns))
    expected = build(variant).rel_shift(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(rp.rel_shift(x, variant=variant, backend="numpy"), expected)
