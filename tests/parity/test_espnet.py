"""ESPnet: the shifts of both of its relative attentions; test_layers.py compares the whole of them."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import randomised, without

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


def masks(length):
    """No mask, padding, causal, and one with rows that see nothing (ESPnet gives zeros there, as we do)."""
    padded = torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1)
    empty = causal.clone()
    empty[1, length // 2] = False
    return {"none": None, "padding": padded[:, None], "causal": causal, "empty row": empty}


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
