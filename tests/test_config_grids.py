"""Configurations of image encoders and video transformers: their positions over a grid, written out pair by pair."""

import numpy as np
import pytest

import relpos_np as rp

WAN = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 3}
COG = {
    "_class_name": "CogVideoXTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "sample_height": 6,
    "sample_width": 8,
    "use_rotary_positional_embeddings": True,
}
HUNYUAN = {
    "_class_name": "HunyuanVideoTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "rope_axes_dim": [4, 12, 16],
    "rope_theta": 256.0,
}

FLUX = {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": [4, 12, 16]}
UNET = {"_class_name": "UNet2DConditionModel"}


def attended(q, k, v, angles):
    """Softmax of turned queries and keys: pair p of channels, 2p and 2p + 1, is a complex number."""
    turned = []
    for x in (q, k):
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        turned.append(np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape))
    s = turned[0] @ turned[1].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def operands(length, heads=2, dim=32):
    return np.random.default_rng(3).standard_normal((3, 2, heads, length, dim))


@pytest.mark.parametrize(
    ("config", "shares", "theta", "front", "back"),
    [
        # Wan: 2 (D // 6) channels for rows and for columns. Wan Team, 2025; diffusers, transformer_wan.py.
        (WAN, (12, 10, 10), 10000.0, 0, 0),
        # CogVideoX: 2/8, 3/8 and 3/8, the text in front. Yang et al., 2024; diffusers, get_3d_rotary_pos_embed.
        (COG, (8, 12, 12), 10000.0, 5, 0),
        # HunyuanVideo: the text behind. Kong et al., 2024; diffusers, transformer_hunyuan_video.py.
        (HUNYUAN, (4, 12, 16), 256.0, 0, 5),
    ],
    ids=["wan", "cogvideox", "hunyuan"],
)
def test_video(config, shares, theta, front, back):
    angles = []
    for place in np.ndindex(2, 3, 4):
        own = [n * theta ** -(2 * p / dim) for n, dim in zip(place, shares, strict=True) for p in range(dim // 2)]
        angles.append(own)
    angles = np.pad(np.array(angles), [(front, back), (0, 0)])
    q, k, v = operands(len(angles))
    bound = rp.from_config(config, layer=1).bind()
    np.testing.assert_allclose(bound(q, k, v, grid=(2, 3, 4)), attended(q, k, v, angles), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ChromaTransformer2DModel", "QwenImageTransformer2DModel"])
def test_images(name):
    """Text in front: at 0 in Flux, and in Qwen-Image behind the image, whose rows and columns count from its middle.

    Black Forest Labs, 2024; Wu et al., "Qwen-Image Technical Report", 2025.
    """
    middle = name.startswith("Qwen")
    rows, columns = (range(-2, 1), range(-2, 2)) if middle else (range(3), range(4))
    places = [[2 + n] * 3 if middle else [0] * 3 for n in range(5)] + [[0, i, j] for i in rows for j in columns]
    angles = [
        [n * 10000.0 ** -(2 * p / dim) for n, dim in zip(place, (4, 12, 16), strict=True) for p in range(dim // 2)]
        for place in places
    ]
    q, k, v = operands(len(angles))
    bound = rp.from_config({"_class_name": name, **FLUX}, layer=0).bind()
    np.testing.assert_allclose(bound(q, k, v, grid=(1, 3, 4)), attended(q, k, v, np.array(angles)), rtol=0, atol=1e-13)


def test_layers_of_a_unet():
    """Stable Diffusion 1.5 has 16 transformers, XL 70: heads are stored as channels, and channels follow the block."""
    sizes = [(layer.heads, layer.head_dim) for layer in rp.configs.layers_of(UNET)]
    down, up = [(8, 40)] * 2 + [(8, 80)] * 2 + [(8, 160)] * 2, [(8, 160)] * 3 + [(8, 80)] * 3 + [(8, 40)] * 3
    assert sizes == [*down, (8, 160), *up]
    large = {"block_out_channels": [320, 640, 1280], "attention_head_dim": [5, 10, 20]}
    large |= {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"]}
    large |= {"up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]}
    layers = rp.configs.layers_of(UNET | large | {"transformer_layers_per_block": [1, 2, 10]}, part="cross")
    assert len(layers) == 70
    assert {layer.head_dim for layer in layers} == {64}


def test_layers_of_video_models():
    assert rp.configs.parts_of(WAN) == ("", "cross")
    cross = rp.from_config(WAN | {"added_kv_proj_dim": 64}, layer=0, part="cross")
    assert not cross.schemes
    assert "a second call, with the image's keys" in cross.describe()
    assert rp.from_config(HUNYUAN, layer=59).layers == 60
    table = {"patch_embed.pos_embedding": np.arange(6.0 * 64).reshape(1, 6, 64)}
    encoding = rp.from_config(COG | {"use_learned_positional_embeddings": True}, layer=0).encoding(table)
    np.testing.assert_array_equal(encoding(np.zeros((6, 64))), table["patch_embed.pos_embedding"][0])
    assert not rp.from_config(COG | {"use_rotary_positional_embeddings": False}, layer=0).schemes
    # The second version counts from the corner, whatever the size.
    q, k, v = operands(16)
    with pytest.raises(rp.RelposValueError, match=r"grid: expected \(3, 4\) as rows and columns, found \(2, 2, 4\)"):
        rp.from_config(COG, layer=0).bind()(q, k, v, grid=(2, 2, 4))
    later = rp.from_config(COG | {"patch_size_t": 2}, layer=0).bind()
    assert later(q, k, v, grid=(2, 2, 4)).shape == q.shape


def test_patches_in_blocks():
    """Qwen2-VL: 2 x 2 patches that will be merged stand side by side; Qwen2.5-VL has windows around them."""
    config = {"num_heads": 2, "depth": 2, "hidden_size": 32}
    merged = rp.from_config({"model_type": "qwen3_vl_vision", **config}, layer=0).bind()
    q, k, _ = operands(24, dim=16)
    (scheme,) = merged.position(q, k, grid=(4, 6))
    found = scheme.positions.T.astype(int).tolist()
    assert found[:6] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]
    assert found[12:14] == [[2, 0], [2, 1]]
    config |= {"model_type": "qwen2_5_vl_vision", "window_size": 56, "fullatt_block_indexes": [1]}
    q, k, _ = operands(6 * 6, dim=16)
    (scheme,) = rp.from_config(config, layer=1).bind().position(q, k, grid=(6, 6))
    found = scheme.positions.T.astype(int).tolist()
    assert found[4:8] == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert found[16] == [0, 4]  # of the next window, which is narrower
    assert found[24:26] == [[4, 0], [4, 1]]
    assert sorted(found) == [list(place) for place in np.ndindex(6, 6)]
    inside = rp.from_config(config, layer=0)
    assert "windows of 4 x 4 patches" in inside.describe()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (7, "grid: expected 2 numbers of patches, found 7"),
        ((2, 3, 4), r"grid: expected 2 numbers of patches, found \(2, 3, 4\)"),
        ((2, 0), "grid: expected at least 1"),
        ((2.0, 4), "grid: expected an integer"),
        ((4, 8), r"grid: \(4, 8\) are 32 patches of 24 tokens"),
        ((2, 8), r"grid: \(2, 8\) are 16 patches of 24 tokens"),
        ((1 << 40, 1 << 40), "grid: .* patches of 24 tokens"),
        ((3, 8), r"grid: expected multiples of 2, found \(3, 8\)"),
    ],
)
def test_grids_that_do_not_fit(grid, message):
    bound = rp.from_config({"model_type": "qwen2_vl_vision", "num_heads": 2, "embed_dim": 32}, layer=0).bind()
    q, k, v = operands(24, dim=16)
    with pytest.raises(rp.RelposError, match=message):
        bound(q, k, v, grid=grid)
    with pytest.raises(rp.RelposTypeError, match="grid: layer 0 of qwen2_vl_vision needs it in every call"):
        bound(q, k, v)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "WanVACETransformer3DModel"}, "_class_name: 'WanVACE.* is not understood; nearest: .*Wan"),
        (WAN | {"qk_norm": "layer_norm"}, "qk_norm: 'layer_norm'"),
        (WAN | {"attention_head_dim": 33}, "attention_head_dim: expected an even number"),
        (WAN | {"rope_scaling": {"factor": 2.0}}, "rope_scaling: "),
        (COG | {"attention_head_dim": 40}, "attention_head_dim: expected a multiple of 16"),
        (HUNYUAN | {"rope_axes_dim": [4, 12, 18]}, "rope_axes_dim: expected three even numbers with sum 32"),
        (HUNYUAN | {"rope_axes_dim": [16, 16]}, "rope_axes_dim: expected three"),
        ({"_class_name": "QwenImageTransformer2DModel", "use_layer3d_rope": True}, "use_layer3d_rope: True"),
        ({"_class_name": "SD3Transformer2DModel", "qk_norm": "layer_norm"}, "qk_norm: 'layer_norm'"),
        (UNET | {"only_cross_attention": True}, "only_cross_attention: True"),
        (UNET | {"attention_head_dim": [8, 8]}, "attention_head_dim: expected one for each of 4 blocks"),
        (UNET | {"down_block_types": ["AttnDownBlock2D"] * 4}, "down_block_types: expected 4 of DownBlock2D and Cross"),
        (
            UNET
            | {"down_block_types": ["DownBlock2D"] * 4, "up_block_types": ["UpBlock2D"] * 4, "mid_block_type": None},
            "down_block_types: no block",
        ),
        (UNET | {"attention_head_dim": 7}, "attention_head_dim: 320 channels are no multiple of 7 heads"),
        ({"model_type": "qwen3_vl_vision", "rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: .*yarn"),
        ({"model_type": "pixtral", "rope_parameters": 7}, "rope_parameters: expected an object"),
    ],
)
def test_what_is_refused(config, message):
    with pytest.raises(rp.RelposError, match=message):
        rp.from_config(config, layer=0)
