"""Hugging Face transformers: buckets of T5, indices of Swin, the shifts of XLNet and the fixed sinusoids."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import (
    EPS32,
    added,
    modeling,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
t5, swin, xlnet = map(modeling, ("t5", "swin", "xlnet"))

BATCH, HEADS = 2, 4


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


# ---------------------------------------------------------------------------------------------- Swin


def test_swin_index():
    """A table that holds its own row numbers shows the index map."""
    module = swin.SwinRelativePositionBias(1, (3, 5))
    table = np.arange(5 * 9, dtype=np.float64)[:, None]
    got = added(rp.WindowBias(table, (3, 5)), 1, 15, 15)[0]
    np.testing.assert_array_equal(got, module.relative_position_index.view(15, 15).numpy())


# ---------------------------------------------------------------------------------------------- Transformer-XL family


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
