"""transformers, timm and PyTorch: Swin V2, BEiT, data2vec, SAM, ViTDet and MViTv2, and the resizing of tables."""

import importlib

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import randomised, split_heads, without

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
functional = torch.nn.functional

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


def timm_module(name):
    """A module of timm, which needs torchvision or the stand-in of its own tests."""
    importlib.import_module("tests.parity.test_timm")
    return importlib.import_module(f"timm.{name}")


def transformers_module(name):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{name}")


def of_linear(layer, x):
    """q, k and v of one projection: three (B, H, N, D) arrays."""
    return tuple(split_heads(part) for part in layer(x).chunk(3, dim=-1))


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


def theirs(window, pretrained=(0, 0)):
    """Swin V2's attention of transformers."""
    module = transformers_module("swinv2.modeling_swinv2")
    config = transformers_module("swinv2.configuration_swinv2").Swinv2Config(qkv_bias=True)
    return randomised(module.Swinv2SelfAttention(config, WIDTH, HEADS, window, list(pretrained)))


def from_transformers(module, x):
    """Its q, k and v, and what builds the scheme from its weights."""
    first, last = module.continuous_position_bias_mlp[0], module.continuous_position_bias_mlp[2]
    weights = [w.numpy() for w in (first.weight, first.bias, last.weight, module.logit_scale)]
    qkv = [split_heads(layer(x)) for layer in (module.query, module.key, module.value)]

    def scheme(dtype, window, **options):
        return rp.SwinV2(*(w.astype(dtype) for w in weights), window, **options)

    return qkv, scheme


@pytest.mark.parametrize(
    ("window", "pretrained"), [((4, 4), (0, 0)), ((3, 5), (0, 0)), ((3, 5), (2, 7)), ((1, 6), (0, 0)), ((1, 6), (3, 3))]
)
def test_swin_v2_of_transformers(agrees, wide, window, pretrained):
    module = theirs(window, pretrained)
    x = torch.randn(3, window[0] * window[1], WIDTH)
    qkv, scheme = from_transformers(module, x)
    trained = pretrained if pretrained[0] else None
    agrees(
        split_heads(module(x)[0]),
        *qkv,
        position=lambda dtype: scheme(dtype, window, pretrained_grid=trained, variant="transformers"),
    )


def test_swin_v2_of_transformers_adds_its_mask_twice(agrees, wide):
    window, area = (2, 3), 6
    module = theirs(window)
    x = torch.randn(4, area, WIDTH)
    seen = torch.rand(2, area, area) < 0.6
    seen |= torch.eye(area, dtype=torch.bool)
    qkv, scheme = from_transformers(module, x)

    def position(dtype):
        return scheme(dtype, window)

    soft = torch.randn(2, area, area)
    tiled = np.tile(soft.numpy(), (2, 1, 1))[:, None]
    agrees(split_heads(module(x, soft)[0]), *qkv, position=position, mask=2 * tiled)
    hidden = split_heads(module(x, torch.where(seen, 0.0, -100.0))[0])
    agrees(hidden, *qkv, position=position, mask=np.tile(seen.numpy(), (2, 1, 1))[:, None])


def test_swin_v2_of_transformers_at_the_limit_of_its_temperature(agrees, wide):
    """A key opposite to the query, and one along it in another region: there the doubled mask changes everything."""
    module = theirs((1, 2))
    for layer, sign in ((module.query, -1.0), (module.key, 1.0), (module.value, 1.0)):
        layer.weight.copy_(sign * torch.eye(WIDTH))
        if layer.bias is not None:
            layer.bias.zero_()
    module.logit_scale.fill_(9.0)
    module.continuous_position_bias_mlp[2].weight.zero_()
    x = torch.randn(1, 1, WIDTH) * torch.tensor([1.0, -1.0])[:, None]
    regions = torch.tensor([[[0.0, -100.0], [-100.0, 0.0]]])
    (q, k, v), scheme = from_transformers(module, x)
    expected, added = split_heads(module(x, regions)[0]), regions.numpy()[:, None]

    def position(dtype):
        return scheme(dtype, (1, 2))

    agrees(expected, q, k, v, position=position, mask=2 * added)
    np.testing.assert_allclose(expected, 0, atol=1e-10)  # equal shares of x and -x
    once = rp.attention(q, k, v, position=position(np.float64), mask=added, backend="numpy")
    np.testing.assert_allclose(once, v[..., ::-1, :], rtol=1e-12)


def test_swin_v2_without_patches(rng):
    """Rounded coordinates move the bias by a few float32 roundings of 16."""
    module = theirs((5, 7))
    x = torch.randn(1, 35, WIDTH, dtype=torch.float64)
    (q, k, v), scheme = from_transformers(module, x)
    found = rp.attention(q, k, v, position=scheme(np.float64, (5, 7)), backend="numpy")
    difference = np.abs(found - split_heads(module(x)[0])).max()
    assert 1e-12 < difference < 1e-5


def test_windows_of_one_column(wide):
    """0/0 in transformers; timm and this package read 0."""
    module = theirs((3, 1))
    x = torch.randn(1, 3, WIDTH)
    assert module(x)[0].isnan().all()
    (q, k, v), scheme = from_transformers(module, x)
    assert np.isfinite(rp.attention(q, k, v, position=scheme(np.float64, (3, 1), variant="transformers"))).all()


@pytest.mark.parametrize(
    ("window", "pretrained"),
    [((4, 4), (0, 0)), ((3, 5), (0, 0)), ((3, 5), (2, 7)), ((1, 6), (0, 0)), ((6, 1), (0, 0)), ((4, 2), (1, 1))],
)
def test_swin_v2_of_timm(agrees, wide, window, pretrained):
    swin = timm_module("models.swin_transformer_v2")
    module = randomised(swin.WindowAttention(WIDTH, window, HEADS, pretrained_window_size=pretrained))
    wide.setattr(swin, "torch", Float64Torch())
    module._init_buffers()
    module.proj = torch.nn.Identity()
    x = torch.randn(3, window[0] * window[1], WIDTH)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    qkv = of_linear(lambda x: module.qkv(x) + bias, x)
    first, last = module.cpb_mlp[0], module.cpb_mlp[2]
    weights = [w.numpy() for w in (first.weight, first.bias, last.weight, module.logit_scale)]
    agrees(
        split_heads(module(x)),
        *qkv,
        position=lambda dtype: rp.SwinV2(
            *(w.astype(dtype) for w in weights), window, pretrained_grid=pretrained if pretrained[0] else None
        ),
    )


@pytest.mark.parametrize("window", [(4, 4), (1, 6), (5, 1)])
def test_swin_v2_cr_of_timm(agrees, wide, window):
    """The coordinates of the paper, a bias in the last layer and no sigmoid."""
    swin = timm_module("models.swin_transformer_v2_cr")
    module = randomised(swin.WindowMultiHeadAttention(WIDTH, HEADS, window))
    wide.setattr(swin, "torch", Float64Torch())
    module._init_buffers()
    module.proj = torch.nn.Identity()
    x = torch.randn(3, window[0] * window[1], WIDTH)
    first, last = module.meta_mlp.fc1, module.meta_mlp.fc2
    weights = [w.numpy() for w in (first.weight, first.bias, last.weight / 10, module.logit_scale)]
    last.weight /= 10  # of hundreds of hidden units, so that scores stay moderate
    agrees(
        split_heads(module(x)),
        *of_linear(module.qkv, x),
        position=lambda dtype: rp.SwinV2(
            *(w.astype(dtype) for w in weights), window, output_bias=last.bias.numpy().astype(dtype), variant="paper"
        ),
    )


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
    zeros = np.zeros((HEADS, 1 + grid[0] * grid[1], 1))
    return rp.logits(zeros, zeros, position=rp.BEiT(table, grid), backend="numpy")


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


@pytest.mark.parametrize(("old", "new"), [((2, 4), (2, 4)), ((5, 3), (4, 4))])
def test_transformers_takes_height_for_width(old, new):
    """On a grid that is no square it resizes the table of the turned one, also where the grids are equal."""
    module, _ = beit_bias(old, "beit")
    table = module.relative_position_bias_table.numpy()
    turned = rp.reference.resize_table(table, old[::-1], new, mode="linear", extra_rows=3)
    expected = module(new)[0].numpy()
    np.testing.assert_allclose(own_bias(turned, new), expected, rtol=0, atol=1e-14)
    if old == new:
        assert np.abs(own_bias(table, new) - expected).max() > 0.1


@pytest.mark.parametrize("grid", [(3, 3), (5, 5)])
def test_beit_of_transformers(agrees, grid):
    bias, config = beit_bias(grid, "beit")
    config._attn_implementation = "sdpa"  # "eager" rounds the probabilities to float32
    module = randomised(transformers_module("beit.modeling_beit").BeitAttention(config))
    module.o_proj = torch.nn.Identity()
    x = torch.randn(2, 1 + grid[0] * grid[1], WIDTH, dtype=torch.float64)
    qkv = [split_heads(layer(x)) for layer in (module.q_proj, module.k_proj, module.v_proj)]
    expected = split_heads(module(x, attention_mask=bias(grid))[0])
    table = bias.relative_position_bias_table.numpy()
    agrees(expected, *qkv, position=lambda dtype: rp.BEiT(table.astype(dtype), grid))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("grid", [(3, 3), (2, 5), (1, 4)])
def test_beit_of_timm(agrees, grid, fused):
    module = timm_module("models.beit").Attention(WIDTH, HEADS, qkv_bias=True, window_size=grid)
    module = randomised(module)
    module.fused_attn, module.proj = fused, torch.nn.Identity()
    x = torch.randn(2, 1 + grid[0] * grid[1], WIDTH, dtype=torch.float64)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    table = module.relative_position_bias_table.numpy()
    agrees(
        split_heads(module(x)),
        *of_linear(lambda x: module.qkv(x) + bias, x),
        position=lambda dtype: rp.BEiT(table.astype(dtype), grid),
    )
    index = timm_module("layers.pos_embed_rel").gen_relative_position_index(grid, class_token=True)
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
    resize = timm_module("layers.pos_embed_rel").resize_rel_pos_bias_table_simple
    table = rng.standard_normal((13 * 13 + 3, HEADS))
    expected = resize(torch.from_numpy(table), (9, 6), (17 * 11 + 3, HEADS)).numpy()
    found = rp.reference.resize_table(table, (7, 7), (9, 6), extra_rows=3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about how timm indexes
@pytest.mark.parametrize(("old", "new"), [((7, 7), (12, 12)), ((7, 7), (9, 7)), ((6, 4), (9, 11)), ((7, 5), (4, 5))])
def test_geometric_tables_of_timm(wide, rng, old, new):
    """What its loaders of BEiT and Swin do, in float64 here, in float32 there."""
    resize = timm_module("layers.pos_embed_rel").resize_rel_pos_bias_table
    sides = [[2 * n - 1 for n in grid] for grid in (old, new)]
    table = rng.standard_normal((np.prod(sides[0]) + 3, HEADS))
    expected = resize(torch.from_numpy(table), new, (np.prod(sides[1]) + 3, HEADS), old_window_size=old).numpy()
    found = rp.reference.resize_table(table, old, new, mode="geometric", extra_rows=3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- SAM, ViTDet, MViTv2


def assert_decomposed(agrees, module, grid):
    """Tables of another grid are interpolated."""
    module = without(randomised(module), "proj")
    x = torch.randn(2, *grid, WIDTH, dtype=torch.float64)
    tables = [module.rel_pos_h.numpy(), module.rel_pos_w.numpy()]
    out = module(x)
    agrees(
        split_heads((out[0] if isinstance(out, tuple) else out).flatten(1, 2)),
        *of_linear(module.qkv, x.flatten(1, 2)),
        position=lambda dtype: rp.DecomposedBias(*(t.astype(dtype) for t in tables), grid),
    )


@pytest.mark.parametrize(("grid", "trained"), [((4, 4), 4), ((3, 5), 4), ((6, 2), 4), ((1, 7), 3)])
def test_sam_of_transformers(agrees, grid, trained):
    config = transformers_module("sam.configuration_sam").SamVisionConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, use_rel_pos=True, qkv_bias=True
    )
    module = transformers_module("sam.modeling_sam").SamVisionSdpaAttention(config, trained)
    assert_decomposed(agrees, module, grid)


@pytest.mark.parametrize("grid", [(3, 5), (6, 2)])
def test_vitdet_of_transformers(agrees, grid):
    config = transformers_module("vitdet.configuration_vitdet").VitDetConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, use_relative_position_embeddings=True
    )
    module = transformers_module("vitdet.modeling_vitdet").VitDetAttention(config, input_size=(4, 4))
    assert_decomposed(agrees, module, grid)


@pytest.mark.parametrize("grid", [(3, 5), (6, 2)])
def test_sam_of_timm(agrees, grid):
    module = timm_module("models.vision_transformer_sam").Attention(
        WIDTH, HEADS, qkv_bias=True, use_rel_pos=True, input_size=(4, 4)
    )
    assert_decomposed(agrees, module, grid)


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(
    ("grid", "keys"), [((4, 4), (4, 4)), ((4, 6), (2, 3)), ((2, 2), (8, 4)), ((8, 8), (6, 7)), ((14, 16), (62, 15))]
)
def test_mvit_of_timm(agrees, grid, keys, class_token):
    """Pooled keys and pooled queries; ratios that are no integers need the published rounding."""
    mvit = timm_module("models.mvitv2")
    lengths = [n * m + class_token for n, m in (grid, keys, keys)]
    q, k, v = (torch.randn(1, HEADS, n, DIM, dtype=torch.float64) for n in lengths)
    h, w = (torch.randn(2 * max(pair) - 1, DIM, dtype=torch.float64) for pair in zip(grid, keys, strict=True))
    scores = mvit.cal_rel_pos_type(q * DIM**-0.5 @ k.transpose(-2, -1), q, class_token, grid, keys, h, w)
    expected = (scores.softmax(-1) @ v).numpy()
    whole = all(max(pair) % min(pair) == 0 for pair in zip(grid, keys, strict=True))
    for rounding in ("exact", "float32") if whole else ("float32",):
        agrees(
            expected,
            *(x.numpy() for x in (q, k, v)),
            position=lambda dtype, rounding=rounding: rp.DecomposedBias(
                *(x.numpy().astype(dtype) for x in (h, w)),
                grid,
                keys,
                variant="mvit",
                class_token=class_token,
                rounding=rounding,
            ),
        )


def test_mvit_attention_of_timm(agrees):
    """The whole module, without pooling: its queries in the added products are not scaled either."""
    module = timm_module("models.mvitv2").MultiScaleAttention(WIDTH, WIDTH, (4, 4), HEADS, residual_pooling=False)
    module = randomised(module)
    module.proj = torch.nn.Identity()
    x = torch.randn(2, 17, WIDTH, dtype=torch.float64)
    tables = [module.rel_pos_h.numpy(), module.rel_pos_w.numpy()]
    agrees(
        split_heads(module(x, [4, 4])[0]),
        *of_linear(module.qkv, x),
        position=lambda dtype: rp.DecomposedBias(
            *(t.astype(dtype) for t in tables), (4, 4), variant="mvit", class_token=True
        ),
    )
