"""timm, transformers and PyTorch: Swin V2, BEiT, data2vec, SAM, ViTDet and MViTv2, and the resizing of tables."""

import importlib

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import added, chunked, normal, randomised, split_heads, timm, without

torch = pytest.importorskip("torch")
functional = torch.nn.functional

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


def transformers_module(name):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{name}")


# ---------------------------------------------------------------------------------------------- Swin V2


class Float64Torch:
    """PyTorch to a module that asks for float32 by name: its coordinates are as precise as ours then."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def wide(monkeypatch):
    """Published code computes its coordinates in float32 for every dtype; here in float64."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield monkeypatch
    torch.set_default_dtype(torch.float32)


def scheme_of(module, window, first, last, **options):
    """The scheme of a module's temperature and of the two layers of its network."""
    weights = [w.numpy() for w in (first.weight, first.bias, last.weight, module.logit_scale)]
    return rp.SwinV2(*weights, window, **options)


@pytest.mark.parametrize(
    ("window", "pretrained"),
    [((4, 4), (0, 0)), ((3, 5), (0, 0)), ((3, 5), (2, 7)), ((1, 6), (0, 0)), ((6, 1), (0, 0)), ((4, 2), (1, 1))],
)
def test_swin_v2_of_timm(agrees, wide, window, pretrained):
    swin = timm("models.swin_transformer_v2")
    module = randomised(swin.WindowAttention(WIDTH, window, HEADS, pretrained_window_size=pretrained))
    wide.setattr(swin, "torch", Float64Torch())
    module._init_buffers()
    module.proj = torch.nn.Identity()
    x = torch.randn(3, window[0] * window[1], WIDTH)
    qkv = module.qkv(x) + torch.cat((module.q_bias, module.k_bias, module.v_bias))
    trained = pretrained if pretrained[0] else None
    position = scheme_of(module, window, module.cpb_mlp[0], module.cpb_mlp[2], pretrained_grid=trained)
    agrees(split_heads(module(x)), *chunked(qkv), position=position)


@pytest.mark.parametrize("window", [(4, 4), (1, 6), (5, 1)])
def test_swin_v2_cr_of_timm(agrees, wide, window):
    """The coordinates of the paper, a bias in the last layer and no sigmoid."""
    swin = timm("models.swin_transformer_v2_cr")
    module = randomised(swin.WindowMultiHeadAttention(WIDTH, HEADS, window))
    wide.setattr(swin, "torch", Float64Torch())
    module._init_buffers()
    module.proj = torch.nn.Identity()
    x = torch.randn(3, window[0] * window[1], WIDTH)
    first, last = module.meta_mlp.fc1, module.meta_mlp.fc2
    last.weight /= 10  # of hundreds of hidden units, so that scores stay moderate
    position = scheme_of(module, window, first, last, output_bias=last.bias.numpy(), variant="paper")
    agrees(split_heads(module(x)), *chunked(module.qkv(x)), position=position)


# ---------------------------------------------------------------------------------------------- Swin


@pytest.mark.parametrize("window", [(1, 1), (1, 4), (3, 3), (2, 5), (7, 4)])
def test_indices_of_timm(window):
    """A table that holds its own row numbers shows the index map."""
    rows, area = (2 * window[0] - 1) * (2 * window[1] - 1), window[0] * window[1]
    found = added(rp.WindowBias(np.arange(rows, dtype=np.float64)[:, None], window), 1, area, area)[0]
    np.testing.assert_array_equal(found, timm("layers.pos_embed_rel").gen_relative_position_index(window).numpy())
    np.testing.assert_array_equal(found, timm("models.swin_transformer").get_relative_position_index(*window).numpy())


def test_bias_module_of_timm():
    module = randomised(timm("layers.pos_embed_rel").RelPosBias((3, 4), HEADS))
    position = rp.WindowBias(module.relative_position_bias_table.numpy(), (3, 4))
    np.testing.assert_array_equal(added(position, 1, HEADS, 12, 12), module.get_bias().numpy())


# ---------------------------------------------------------------------------------------------- BEiT and resizing


def beit_bias(grid, kind):
    """A bias module of transformers with random numbers."""
    size = {"image_size": [2 * n for n in grid], "patch_size": 2, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    if kind == "beit":
        config = transformers_module("beit.configuration_beit").BeitConfig(**size)
        module = transformers_module("beit.modeling_beit").BeitRelativePositionBias(config)
    else:
        config = transformers_module("data2vec.configuration_data2vec_vision").Data2VecVisionConfig(**size)
        module = transformers_module("data2vec.modeling_data2vec_vision").Data2VecVisionRelativePositionBias(
            config, grid
        )
    return randomised(module, 1.0), config


def own_bias(table, grid):
    length = 1 + grid[0] * grid[1]
    return added(rp.BEiT(table, grid), HEADS, length, length)


@pytest.mark.parametrize("kind", ["beit", "data2vec"])
@pytest.mark.parametrize(("old", "new"), [((3, 3), (3, 3)), ((3, 3), (5, 5)), ((5, 5), (4, 7)), ((6, 6), (1, 2))])
def test_bias_of_transformers(kind, old, new):
    """Square grids, and others that a square one is resized to."""
    module, _ = beit_bias(old, kind)
    table = rp.reference.resize_table(
        module.relative_position_bias_table.numpy(), old, new, mode="linear", extra_rows=3
    )
    length = 1 + new[0] * new[1]
    for options in ({}, {"interpolate_pos_encoding": True, "dim_size": length}):
        np.testing.assert_allclose(own_bias(table, new), module(new, **options)[0].numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("grid", [(3, 3), (2, 5), (1, 4)])
def test_beit_of_timm(agrees, grid, fused):
    module = timm("models.beit").Attention(WIDTH, HEADS, qkv_bias=True, window_size=grid)
    module = randomised(module)
    module.fused_attn, module.proj = fused, torch.nn.Identity()
    x = normal(2, 1 + grid[0] * grid[1], WIDTH)
    qkv = module.qkv(x) + torch.cat((module.q_bias, module.k_bias, module.v_bias))
    position = rp.BEiT(module.relative_position_bias_table.numpy(), grid)
    agrees(split_heads(module(x)), *chunked(qkv), position=position)
    index = timm("layers.pos_embed_rel").gen_relative_position_index(grid, class_token=True)
    np.testing.assert_array_equal(rp.reference.beit_index(grid), index.numpy())


@pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((12, 12), (7, 5)), ((3, 8), (9, 2)), ((1, 4), (3, 1))])
def test_resized_tables_of_torch(old, new, rng):
    sides = [[2 * n - 1 for n in grid] for grid in (old, new)]
    table = rng.standard_normal((np.prod(sides[0]), HEADS))
    image = torch.from_numpy(table.T.reshape(1, HEADS, *sides[0]).copy())
    for mode, name in (("cubic", "bicubic"), ("linear", "bilinear")):
        expected = functional.interpolate(image, size=sides[1], mode=name, align_corners=False)
        found = rp.reference.resize_table(table, old, new, mode=mode)
        np.testing.assert_allclose(found, expected.reshape(HEADS, -1).T.numpy(), rtol=0, atol=1e-13)


def test_resized_tables_of_timm(rng):
    """Its simple way takes every old window for a square, and keeps extra rows."""
    resize = timm("layers.pos_embed_rel").resize_rel_pos_bias_table_simple
    table = rng.standard_normal((13 * 13 + 3, HEADS))
    expected = resize(torch.from_numpy(table), (9, 6), (17 * 11 + 3, HEADS)).numpy()
    found = rp.reference.resize_table(table, (7, 7), (9, 6), extra_rows=3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about how timm indexes
@pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((7, 7), (9, 7)), ((6, 4), (9, 11)), ((7, 5), (4, 5))])
def test_geometric_tables_of_timm(wide, rng, old, new):
    """What its loaders of BEiT and Swin do, in float64 here, in float32 there."""
    resize = timm("layers.pos_embed_rel").resize_rel_pos_bias_table
    sides = [[2 * n - 1 for n in grid] for grid in (old, new)]
    table = rng.standard_normal((np.prod(sides[0]) + 3, HEADS))
    expected = resize(torch.from_numpy(table), new, (np.prod(sides[1]) + 3, HEADS), old_window_size=old).numpy()
    found = rp.reference.resize_table(table, old, new, mode="geometric", extra_rows=3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- SAM, ViTDet, MViTv2


def sam(trained=4):
    config = transformers_module("sam.configuration_sam").SamVisionConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, use_rel_pos=True, qkv_bias=True
    )
    return transformers_module("sam.modeling_sam").SamVisionSdpaAttention(config, trained)


def vitdet():
    config = transformers_module("vitdet.configuration_vitdet").VitDetConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, use_relative_position_embeddings=True
    )
    return transformers_module("vitdet.modeling_vitdet").VitDetAttention(config, input_size=(4, 4))


def sam_of_timm():
    attention = timm("models.vision_transformer_sam").Attention
    return attention(WIDTH, HEADS, qkv_bias=True, use_rel_pos=True, input_size=(4, 4))


@pytest.mark.parametrize(
    ("make", "grid"),
    [
        *((sam, grid) for grid in ((4, 4), (3, 5), (6, 2))),
        (lambda: sam(trained=3), (1, 7)),
        *((make, grid) for make in (vitdet, sam_of_timm) for grid in ((3, 5), (6, 2))),
    ],
)
def test_decomposed_bias(agrees, make, grid):
    """Tables of another grid are interpolated."""
    module = without(randomised(make()), "proj")
    x = normal(2, *grid, WIDTH)
    out = module(x)
    expected = split_heads((out[0] if isinstance(out, tuple) else out).flatten(1, 2))
    position = rp.DecomposedBias(module.rel_pos_h.numpy(), module.rel_pos_w.numpy(), grid)
    agrees(expected, *chunked(module.qkv(x.flatten(1, 2))), position=position)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(
    ("grid", "keys"), [((4, 4), (4, 4)), ((4, 6), (2, 3)), ((2, 2), (8, 4)), ((8, 8), (6, 7)), ((14, 16), (62, 15))]
)
def test_mvit_of_timm(agrees, grid, keys, class_token):
    """Pooled keys and pooled queries; ratios that are no integers need the published rounding."""
    mvit = timm("models.mvitv2")
    q, k, v = (normal(1, HEADS, n * m + class_token, DIM) for n, m in (grid, keys, keys))
    h, w = (normal(2 * max(pair) - 1, DIM) for pair in zip(grid, keys, strict=True))
    scores = mvit.cal_rel_pos_type(q * DIM**-0.5 @ k.transpose(-2, -1), q, class_token, grid, keys, h, w)
    expected = scores.softmax(-1) @ v
    whole = all(max(pair) % min(pair) == 0 for pair in zip(grid, keys, strict=True))
    for rounding in ("exact", "float32") if whole else ("float32",):
        options = {"variant": "mvit", "class_token": class_token, "rounding": rounding}
        agrees(expected, q, k, v, position=rp.DecomposedBias(h.numpy(), w.numpy(), grid, keys, **options))


def test_mvit_attention_of_timm(agrees):
    """The whole module, without pooling: its queries in the added products are not scaled either."""
    module = timm("models.mvitv2").MultiScaleAttention(WIDTH, WIDTH, (4, 4), HEADS, residual_pooling=False)
    module = without(randomised(module), "proj")
    x = normal(2, 17, WIDTH)
    tables = module.rel_pos_h.numpy(), module.rel_pos_w.numpy()
    position = rp.DecomposedBias(*tables, (4, 4), variant="mvit", class_token=True)
    agrees(split_heads(module(x, [4, 4])[0]), *chunked(module.qkv(x)), position=position)
