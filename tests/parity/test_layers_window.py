"""Whole window attentions: transformers' and timm's blocks, torchvision's, and one composed of torch functions."""

import numpy as np
import pytest

from relpos_np.layers import SwinAttention, VideoSwinAttention, WindowAttention, shift_mask
from tests.parity.modules import modeling, normal, randomised, timm

torch = pytest.importorskip("torch")

BATCH, HEADS, WIDTH = 2, 2, 8


def close(got, expected):
    expected = np.asarray(expected)
    assert got.dtype == expected.dtype == np.float64
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def random_map(*grid):
    return normal(BATCH, *grid, WIDTH)


class Nothing(torch.nn.Module):
    """In the place of the layers after the attention."""

    def forward(self, x):
        return torch.zeros_like(x)


# ---------------------------------------------------------------------------------------------- transformers
MAPS = [((8, 8), 4, 2), ((8, 12), 4, 0), ((9, 14), 4, 2), ((7, 5), 3, 1), ((4, 9), 4, 2), ((13, 6), 5, 3)]


def transformers_swin(window, shift, grid, qkv_bias):
    """A block of which only the attention is left. SDPA, because the eager softmax is in float32 whatever the input."""
    swin = modeling("swin")
    config = swin.SwinConfig(window_size=window, qkv_bias=qkv_bias)
    config._attn_implementation = "sdpa"
    layer = randomised(swin.SwinLayer(config, WIDTH, grid, HEADS, shift_size=shift))
    layer.layernorm_before = layer.layernorm_after = torch.nn.Identity()
    layer.mlp = Nothing()
    return layer, "transformers5"


def donut_swin(window, shift, grid, qkv_bias):
    """The same in a module whose tensors have the names of published checkpoints."""
    donut = pytest.importorskip("transformers.models.donut.modeling_donut_swin")
    config = donut.DonutSwinConfig(window_size=window, qkv_bias=qkv_bias)
    layer = randomised(donut.DonutSwinLayer(config, WIDTH, grid, HEADS, shift_size=shift))
    layer.layernorm_before = layer.layernorm_after = layer.intermediate = torch.nn.Identity()
    state = layer.state_dict()
    layer.output = Nothing()
    layer.state_dict = lambda: state
    return layer, "transformers"


def check(block, style, grid, window, shift, small_maps, backend, **how):
    options = {"format": style, "shift_size": (shift,) * 2, "small_maps": small_maps}
    ours = SwinAttention.from_state_dict(block.state_dict(), (window,) * 2, **options)
    x = random_map(*grid)
    flat = x.reshape(BATCH, -1, WIDTH)
    close(ours(x.numpy(), backend=backend), (block(flat, grid, **how)[0] - flat).reshape(x.shape))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("make", [transformers_swin, donut_swin])
@pytest.mark.parametrize(("grid", "window", "shift"), MAPS)
def test_transformers(grid, window, shift, make, qkv_bias, backend):
    check(*make(window, shift, grid, qkv_bias), grid, window, shift, "all", backend)


@pytest.mark.parametrize("grid", [(3, 9), (4, 4), (2, 3)])
def test_transformers_always_partition(grid, backend):
    check(*transformers_swin(4, 2, grid, True), grid, 4, 2, "keep", backend, always_partition=True)


def test_transformers_fails_where_the_window_shrinks():
    """Of `small_maps="all"` only maps as long as the window can be compared: the peer's index does not shrink."""
    block, _ = transformers_swin(4, 2, (3, 9), True)
    with pytest.raises(RuntimeError):
        block(random_map(3, 9).reshape(BATCH, -1, WIDTH), (3, 9))


def test_transformers_attention_probabilities(backend):
    donut = pytest.importorskip("transformers.models.donut.modeling_donut_swin")
    module = randomised(donut.DonutSwinAttention(donut.DonutSwinConfig(qkv_bias=True), WIDTH, HEADS, 3))
    ours = WindowAttention.from_state_dict(module.state_dict(), 1, 1, (3, 3), format="transformers")
    mask = shift_mask((9, 6), (3, 3), (1, 2))
    x = normal(BATCH * 6, 9, WIDTH)
    expected = module(x, torch.from_numpy(mask.astype(np.float64)), output_attentions=True)
    for got, there in zip(ours(x.numpy(), mask=mask, backend=backend), expected, strict=True):
        close(got, there)


@pytest.mark.parametrize(("grid", "window", "shift"), [((8, 12), 4, 2), ((6, 6), 3, 1), ((10, 5), 5, 4)])
def test_transformers_mask(grid, window, shift):
    block, _ = transformers_swin(window, shift, grid, True)
    expected = block.get_attn_mask(*grid, dtype=torch.float32, device="cpu")
    np.testing.assert_array_equal(shift_mask(grid, (window,) * 2, (shift,) * 2), expected)


# ---------------------------------------------------------------------------------------------- timm
TIMM = [
    # map, window, shift, whether windows are kept whole on small maps
    ((8, 8), (4, 4), (2, 2), False),
    ((9, 14), (4, 4), (2, 2), False),
    ((7, 5), (3, 2), (1, 1), False),
    ((11, 13), (5, 4), (4, 1), False),
    ((6, 9), (2, 3), (0, 1), False),
    ((4, 9), (4, 4), (2, 2), False),
    ((3, 9), (4, 4), (2, 2), False),
    ((3, 9), (4, 4), (2, 2), True),
    ((2, 2), (4, 3), (2, 1), True),
]


@pytest.mark.parametrize("head_dim", [None, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("grid", "window", "shift", "whole"), TIMM)
def test_timm(grid, window, shift, whole, fused, head_dim, backend):
    block = randomised(
        timm("models.swin_transformer").SwinTransformerBlock(
            WIDTH, grid, HEADS, head_dim, window_size=window, shift_size=shift, always_partition=whole
        )
    )
    if block.attn_mask is not None:
        block.attn_mask = block.attn_mask.double()
    block.attn.fused_attn = fused
    # timm makes the table for the window that is used, which may be smaller than the one asked for.
    ours = SwinAttention.from_state_dict(
        block.state_dict(),
        block.window_size,
        shift_size=block.shift_size,
        pad_order="shift_then_pad",
        small_maps="keep" if whole else "axis",
    )
    x = random_map(*grid)
    close(ours(x.numpy(), backend=backend), block._attn(x))


def test_timm_lets_opposite_edges_meet_where_it_pads():
    """Shifted before it is padded, a map's first rows attend its last ones; padded first, a mask keeps them apart."""
    swin = timm("models.swin_transformer")
    block = randomised(swin.SwinTransformerBlock(WIDTH, (9, 8), HEADS, window_size=4, shift_size=2))
    block.attn_mask = block.attn_mask.double()
    x = random_map(9, 8)
    changed = x.clone()
    changed[:, 0] += 1
    moved = (block._attn(changed) - block._attn(x)).abs().amax((0, 2, 3)) > 1e-9
    assert moved[8]
    options = {"shift_size": (2, 2), "pad_order": "pad_then_shift"}
    ours = SwinAttention.from_state_dict(block.state_dict(), (4, 4), **options)
    difference = ours(changed.numpy(), backend="numpy") - ours(x.numpy(), backend="numpy")
    assert not (np.abs(difference).max((0, 2, 3)) > 1e-9)[8]


# ---------------------------------------------------------------------------------------------- videos, RSTT


VIDEOS = [
    # map, window, shift, what is used of them
    ((4, 6, 8), (2, 3, 4), (1, 1, 2), (2, 3, 4), (1, 1, 2)),
    ((5, 7, 6), (2, 3, 4), (1, 1, 2), (2, 3, 4), (1, 1, 2)),
    ((3, 8, 7), (4, 4, 4), (2, 2, 2), (3, 4, 4), (0, 2, 2)),
    ((2, 3, 9), (4, 4, 4), (2, 2, 2), (2, 3, 4), (0, 0, 2)),
    ((4, 8, 8), (8, 7, 7), (0, 0, 0), (4, 7, 7), (0, 0, 0)),
]


@pytest.mark.parametrize(("grid", "window", "shift"), [case[:3] for case in VIDEOS[:3]])
def test_torchvision_video(grid, window, shift, backend):
    """Where only the number of frames shrinks; else torchvision reads the rows of other differences."""
    theirs = pytest.importorskip("torchvision.models.video.swin_transformer")
    module = randomised(theirs.ShiftedWindowAttention3d(WIDTH, list(window), list(shift), HEADS))
    ours = VideoSwinAttention.from_state_dict(module.state_dict(), window, shift_size=shift)
    x = random_map(*grid)
    close(ours(x.numpy(), backend=backend), module(x))


@pytest.mark.parametrize(("grid", "window", "shift"), [((8, 8), 4, 2), ((9, 14), 4, 2), ((3, 9), 4, 2), ((2, 2), 3, 1)])
def test_torchvision(grid, window, shift, backend):
    theirs = pytest.importorskip("torchvision.models.swin_transformer")
    module = randomised(theirs.ShiftedWindowAttention(WIDTH, [window] * 2, [shift] * 2, HEADS))
    ours = SwinAttention.from_state_dict(module.state_dict(), (window,) * 2, shift_size=(shift,) * 2, small_maps="pad")
    x = random_map(*grid)
    close(ours(x.numpy(), backend=backend), module(x))
