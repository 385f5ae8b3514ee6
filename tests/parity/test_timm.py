"""timm: Swin's window attention with its shift mask, rectangular windows, and the index map itself."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import randomised, without_torchvision

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

with without_torchvision():
    timm_swin = pytest.importorskip("timm.models.swin_transformer")
    timm_pos = pytest.importorskip("timm.layers.pos_embed_rel")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM


def qkv(module, x):
    """What WindowAttention computes from one projection, as three (B, H, N, D) arrays."""
    windows, area, _ = x.shape
    return module.qkv(x).reshape(windows, area, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).numpy()


def own_index(window):
    """A table that holds its own row numbers shows the index map."""
    rows, area = (2 * window[0] - 1) * (2 * window[1] - 1), window[0] * window[1]
    zeros = np.zeros((1, 1, area, 1))
    table = np.arange(rows, dtype=np.float64)[:, None]
    return rp.logits(zeros, zeros, position=rp.WindowBias(table, window), backend="numpy")[0, 0]


@pytest.mark.parametrize("window", [(1, 1), (1, 4), (3, 3), (2, 5), (7, 4)])
def test_index(window):
    np.testing.assert_array_equal(own_index(window), timm_pos.gen_relative_position_index(window).numpy())
    np.testing.assert_array_equal(own_index(window), timm_swin.get_relative_position_index(*window).numpy())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [(1, 1), (3, 3), (2, 5)])
def test_window_attention(agrees, window, fused):
    module = randomised(timm_swin.WindowAttention(WIDTH, HEADS, window_size=window))
    module.fused_attn, module.proj = fused, torch.nn.Identity()
    area = window[0] * window[1]
    x = torch.randn(3, area, WIDTH, dtype=torch.float64)
    expected = module(x).reshape(3, area, HEADS, DIM).transpose(1, 2).numpy()
    table = module.relative_position_bias_table.numpy()
    agrees(expected, *qkv(module, x), position=lambda dtype: rp.WindowBias(table.astype(dtype), window))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("window", "shift"), [((4, 4), (2, 2)), ((3, 5), (1, 2)), ((2, 2), (1, 0))])
def test_shifted_windows(agrees, window, shift, fused):
    side = (3 * window[0], 2 * window[1])
    block = timm_swin.SwinTransformerBlock(
        WIDTH, side, HEADS, window_size=window, shift_size=shift, always_partition=True
    )
    module = randomised(block).attn
    module.fused_attn, module.proj = fused, torch.nn.Identity()
    mask = block.attn_mask.double()
    area, windows = window[0] * window[1], 6
    assert mask.shape == (windows, area, area)
    x = torch.randn(BATCH * windows, area, WIDTH, dtype=torch.float64)
    expected = module(x, mask).reshape(BATCH * windows, area, HEADS, DIM).transpose(1, 2).numpy()
    table = module.relative_position_bias_table.numpy()
    tiled = np.tile(mask.numpy(), (BATCH, 1, 1))[:, None]

    def scheme(dtype):
        return rp.WindowBias(table.astype(dtype), window)

    agrees(expected, *qkv(module, x), position=scheme, mask=tiled)
    agrees(expected, *qkv(module, x), position=scheme, mask=tiled == 0)  # -100 stands for "never": exp(-100) < 1e-43


def test_rel_pos_bias_module(rng):
    module = randomised(timm_pos.RelPosBias((3, 4), HEADS))
    table = module.relative_position_bias_table.numpy()
    zeros = np.zeros((1, HEADS, 12, 1))
    got = rp.logits(zeros, zeros, position=rp.WindowBias(table, (3, 4)), backend="numpy")
    np.testing.assert_array_equal(got, module.get_bias().numpy())
