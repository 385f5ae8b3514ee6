"""timm: Swin's window attention with its shift mask, rectangular windows, and the index map itself."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import added, chunked, normal, randomised, split_heads, timm

torch = pytest.importorskip("torch")
timm_swin, timm_pos = timm("models.swin_transformer"), timm("layers.pos_embed_rel")

BATCH, HEADS, DIM = 2, 4, 8
WIDTH = HEADS * DIM


@pytest.mark.parametrize("window", [(1, 1), (1, 4), (3, 3), (2, 5), (7, 4)])
def test_index(window):
    """A table that holds its own row numbers shows the index map."""
    rows, area = (2 * window[0] - 1) * (2 * window[1] - 1), window[0] * window[1]
    found = added(rp.WindowBias(np.arange(rows, dtype=np.float64)[:, None], window), 1, area, area)[0]
    np.testing.assert_array_equal(found, timm_pos.gen_relative_position_index(window).numpy())
    np.testing.assert_array_equal(found, timm_swin.get_relative_position_index(*window).numpy())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [(1, 1), (3, 3), (2, 5)])
def test_window_attention(agrees, window, fused):
    module = randomised(timm_swin.WindowAttention(WIDTH, HEADS, window_size=window))
    module.fused_attn, module.proj = fused, torch.nn.Identity()
    x = normal(3, window[0] * window[1], WIDTH)
    position = rp.WindowBias(module.relative_position_bias_table.numpy(), window)
    agrees(split_heads(module(x)), *chunked(module.qkv(x)), position=position)


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
    x = normal(BATCH * windows, area, WIDTH)
    position = rp.WindowBias(module.relative_position_bias_table.numpy(), window)
    tiled = np.tile(mask.numpy(), (BATCH, 1, 1))[:, None]
    for hidden in (tiled, tiled == 0):  # -100 stands for "never": exp(-100) < 1e-43
        agrees(split_heads(module(x, mask)), *chunked(module.qkv(x)), position=position, mask=hidden)


def test_rel_pos_bias_module(rng):
    module = randomised(timm_pos.RelPosBias((3, 4), HEADS))
    position = rp.WindowBias(module.relative_position_bias_table.numpy(), (3, 4))
    np.testing.assert_array_equal(added(position, 1, HEADS, 12, 12), module.get_bias().numpy())
