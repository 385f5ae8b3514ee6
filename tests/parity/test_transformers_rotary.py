"""Rotary positions: rules, rotations, multimodal and image positions of Hugging Face transformers and timm."""

import importlib
import math

import numpy as np
import pytest

import relpos_np as rp

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rope = pytest.importorskip("transformers.modeling_rope_utils")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")

# The peer's frequencies are float32, and go through a power and a few products.
RTOL = 16 * np.finfo(np.float32).eps
BASE = 500000.0
DIM = 64


def theirs(kind, **parameters):
    """Their frequencies and attention factor for one head of 64 channels."""
    length = parameters.pop("max_position_embeddings", 8192)
    seq_len = parameters.pop("seq_len", None)
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=length,
        rope_parameters={"rope_type": kind, "rope_theta": BASE, **parameters},
    )
    if kind == "default":
        module = llama.LlamaRotaryEmbedding(config)
        return module.inv_freq.numpy(), module.attention_scaling
    found, factor = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return found.numpy(), factor


def same(ours, expected):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=RTOL)


def test_default():
    found, factor = theirs("default")
    same(rp.reference.rotary_frequencies(DIM, base=BASE), found)
    assert factor == 1


@pytest.mark.parametrize("factor", [1.0, 4.0, 7.5])
def test_linear(factor):
    same(rp.reference.linear_frequencies(DIM, base=BASE, factor=factor), theirs("linear", factor=factor)[0])


@pytest.mark.parametrize("length", [100, 8192, 8193, 20000, 131072])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_dynamic(length, factor):
    found, _ = theirs("dynamic", factor=factor, seq_len=length)
    same(rp.reference.ntk_frequencies(DIM, length=length, trained_length=8192, factor=factor, base=BASE), found)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("factor", "length"), [(1.0, 4096), (4.0, 8192), (40.0, 4096), (16.0, 100)])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 8.0, "beta_slow": 2.0}])
def test_yarn(factor, length, truncate, betas):
    ours, magnitude = rp.reference.yarn_frequencies(
        DIM, factor=factor, trained_length=length, base=BASE, truncate=truncate, **betas
    )
    found, expected = theirs(
        "yarn",
        factor=factor,
        original_max_position_embeddings=length,
        max_position_embeddings=int(factor * length),
        truncate=truncate,
        **betas,
    )
    same(ours, found)
    assert math.isclose(magnitude, expected, rel_tol=1e-15)


@pytest.mark.parametrize(("mscale", "mscale_all"), [(0.707, 0.707), (1.0, 0.5), (0.3, 2.0)])
def test_yarn_with_magnitudes_of_deepseek(mscale, mscale_all):
    ours, magnitude = rp.reference.yarn_frequencies(
        DIM, factor=40.0, trained_length=4096, base=BASE, mscale=mscale, mscale_all=mscale_all
    )
    long = {"factor": 40.0, "original_max_position_embeddings": 4096, "max_position_embeddings": 163840}
    found, expected = theirs("yarn", **long, mscale=mscale, mscale_all_dim=mscale_all)
    same(ours, found)
    assert math.isclose(magnitude, expected, rel_tol=1e-15)
    # Alone, neither has an effect there: the attention factor is the paper's.
    paper = rp.reference.yarn_frequencies(DIM, factor=40.0, trained_length=4096)[1]
    assert math.isclose(theirs("yarn", **long, mscale=mscale)[1], paper, rel_tol=1e-15)
    assert math.isclose(theirs("yarn", **long, mscale_all_dim=mscale_all)[1], paper, rel_tol=1e-15)


@pytest.mark.parametrize("length", [1, 4096, 4097, 131072])
@pytest.mark.parametrize("longest", [4096, 131072])
def test_longrope(length, longest, rng):
    short, long = (1 + np.sort(rng.random(DIM // 2)) * n for n in (3, 60))
    ours, magnitude = rp.reference.longrope_frequencies(
        DIM,
        short_factors=short,
        long_factors=long,
        length=length,
        trained_length=4096,
        factor=longest / 4096,
        base=BASE,
    )
    found, expected = theirs(
        "longrope",
        short_factor=short.tolist(),
        long_factor=long.tolist(),
        original_max_position_embeddings=4096,
        max_position_embeddings=longest,
        seq_len=length,
    )
    same(ours, found)
    assert math.isclose(magnitude, expected, rel_tol=1e-15)
    assert (magnitude > 1) == (longest > 4096)


@pytest.mark.parametrize("share", [0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_proportional(share, factor):
    found, expected = theirs("proportional", factor=factor, partial_rotary_factor=share)
    same(rp.reference.proportional_frequencies(DIM, share=share, factor=factor, base=BASE), found)
    assert expected == 1


def test_every_rule_of_theirs_is_ours():
    """A rule that a new release brings must be looked at."""
    rules = {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
    assert set(rope.ROPE_INIT_FUNCTIONS) == rules
    assert all(f"test_{name}" in globals() for name in rules)


@pytest.mark.parametrize("bands", [(1.0, 4.0), (2.0, 16.0), (1.0, 1.0)])
@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192), (4.0, 512)])
def test_llama3(factor, length, bands):
    low, high = bands
    ours = rp.reference.llama3_frequencies(
        DIM, factor=factor, trained_length=length, base=BASE, low_factor=low, high_factor=high
    )
    found, _ = theirs(
        "llama3",
        factor=factor,
        original_max_position_embeddings=length,
        low_freq_factor=low,
        high_freq_factor=high,
    )
    same(ours, found)


def tables(positions, omega, *, magnitude=1.0):
    """Cosines and sines as the peers lay them out, in float64: (1, L, 2P)."""
    angle = torch.outer(torch.as_tensor(positions, dtype=torch.float64), torch.as_tensor(omega))
    both = torch.cat([angle, angle], dim=-1)[None]
    return both.cos() * magnitude, both.sin() * magnitude


@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_llama_attention(agrees, rng, magnitude):
    """Half layout: the rotated operands, and attention over them with grouped heads."""
    q, k, v = (rng.standard_normal((2, heads, 11, 16)) for heads in (4, 2, 2))
    cos, sin = tables(np.arange(11), rp.reference.rotary_frequencies(16), magnitude=magnitude)
    turned = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    keys, values = (torch.repeat_interleave(x, 2, dim=1) for x in (turned[1], torch.from_numpy(v)))
    expected = torch.nn.functional.scaled_dot_product_attention(turned[0], keys, values, is_causal=True)
    agrees(expected.numpy(), q, k, v, position=lambda dtype: rp.Rotary(magnitude=magnitude), causal=True)


def test_neox_attention_turns_a_part(agrees, rng):
    q, k, v = (rng.standard_normal((2, 3, 9, 16)) for _ in "qkv")
    cos, sin = tables(np.arange(9), rp.reference.rotary_frequencies(4))
    turned = neox.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, torch.from_numpy(v))
    agrees(expected.numpy(), q, k, v, position=lambda dtype: rp.Rotary(4))


def test_gptj_is_interleaved(rng):
    """Their tensors are (B, L, H, D); their table holds sines, then cosines, one per pair, in float32."""
    x = rng.standard_normal((2, 7, 3, 8))
    table = gptj.create_sinusoidal_positions(7, 8).double()
    sin, cos = torch.tensor_split(table[None].expand(2, -1, -1), 2, dim=-1)
    expected = gptj.apply_rotary_pos_emb(torch.from_numpy(x), sin, cos).numpy().swapaxes(1, 2)
    matrices = rp.reference.rotary_matrices(np.arange(7), rp.reference.rotary_frequencies(8))
    found = rp.reference.rotate_pairs(x.swapaxes(1, 2), matrices, layout="interleaved")
    # At position 6 the table's angles are off by 6 eps at most.
    np.testing.assert_allclose(found, expected, rtol=0, atol=16 * np.finfo(np.float32).eps * np.abs(x).max())


# ---------------------------------------------------------------------------------------------- positions given


def attend(q, k, v):
    """Plain attention over operands that the peer has turned."""
    groups = q.shape[1] // k.shape[1]
    k, v = (torch.repeat_interleave(x, groups, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).numpy()


def operands(rng, length, depth, kv_heads=2):
    return [rng.standard_normal((2, heads, length, depth)) for heads in (4, kv_heads, kv_heads)]


def test_position_ids(agrees, rng):
    """Padding on the left, as `generate` counts it."""
    q, k, v = operands(rng, 11, 16)
    real = np.ones((2, 11), bool)
    real[1, :4] = False
    ids = np.cumsum(real, axis=-1) - 1
    ids[~real] = 1
    omega = torch.from_numpy(rp.reference.rotary_frequencies(16))
    angle = torch.from_numpy(ids)[..., None].double() * omega
    angle = torch.cat([angle, angle], dim=-1)
    turned = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), angle.cos(), angle.sin())
    expected = attend(*turned, torch.from_numpy(v))
    agrees(expected, q, k, v, position=lambda dtype: rp.Rotary(positions=ids))


MULTIMODAL = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", (16, 24, 24), "half"),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", (24, 20, 20), "half"),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeTextRotaryEmbedding", "Ernie4_5_VLMoeTextConfig", (22, 22, 20), "interleaved"),
}


@pytest.mark.parametrize("model", MULTIMODAL)
def test_multimodal_positions(model, agrees, rng):
    """Angles put together by their module, from frequencies it rounded to float32; the rest in float64."""
    name, config_name, sections, layout = MULTIMODAL[model]
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(importlib.import_module(f"transformers.models.{model}.configuration_{model}"), config_name)(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": BASE, "mrope_section": list(sections)},
    )
    config.head_dim = 128
    module = getattr(modeling, name)(config)
    q, k, v = operands(rng, 9, 128)
    ids = rng.integers(0, 60, (3, 2, 9))
    freqs = torch.from_numpy(ids)[..., None].double() * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x) for x in (freqs.cos(), freqs.sin()))
    if layout == "half":
        turned = modeling.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    else:  # theirs turns in float32, GPT-J's, the same, in float64
        turned = [
            gptj.apply_rotary_pos_emb(torch.from_numpy(x).transpose(1, 2), sin[..., ::2], cos[..., ::2]).transpose(1, 2)
            for x in (q, k)
        ]
        single = modeling.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
        np.testing.assert_allclose(single[0], turned[0], rtol=0, atol=1e-6)
    assert turned[0].dtype == torch.float64
    expected = attend(*turned, torch.from_numpy(v))

    omega = rp.reference.rotary_frequencies(128, base=BASE)
    if model == "ernie4_5_vl_moe":
        # Height and width in turn, then time; their frequencies are stored apart, and put together again.
        axes = np.array([1, 2] * 22 + [0] * 20)
        stored = np.concatenate([omega[:44:2], omega[1:44:2], omega[44:]])
        same(stored, module.inv_freq.numpy())
        rounded = module.inv_freq.double().numpy()
        rounded = np.concatenate([np.stack([rounded[:22], rounded[22:44]], -1).reshape(-1), rounded[44:]])
    else:
        axes = rp.reference.section_axes(sections, order="chunks" if model == "qwen2_vl" else "cyclic")
        rounded = module.inv_freq.double().numpy()
    same(omega, rounded)
    frequencies = rp.reference.axis_frequencies(rounded, axes, 3)
    positions = ids.transpose(1, 0, 2)
    agrees(
        expected,
        q,
        k,
        v,
        position=lambda dtype: rp.Rotary(frequencies=frequencies, positions=positions, layout=layout),
    )


def test_multimodal_frequencies_can_be_rounded_like_theirs():
    """The whole of their forward pass in float32: positions up to 60 leave angles exact to 60 eps."""
    modeling = importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")
    config = importlib.import_module("transformers.models.qwen3_vl.configuration_qwen3_vl").Qwen3VLTextConfig()
    module = modeling.Qwen3VLTextRotaryEmbedding(config)
    ids = np.random.default_rng(0).integers(0, 60, (3, 2, 9))
    cos, sin = module(torch.zeros(1), torch.from_numpy(ids))
    omega = rp.reference.rotary_frequencies(config.head_dim, base=config.rope_parameters["rope_theta"])
    axes = rp.reference.section_axes(module.mrope_section, order="cyclic")
    matrices = rp.reference.rotary_matrices(ids.transpose(1, 0, 2), rp.reference.axis_frequencies(omega, axes))
    half = config.head_dim // 2
    for found, expected in ((matrices[..., 0, 0], cos), (matrices[..., 1, 0], sin)):
        np.testing.assert_allclose(expected.numpy()[..., :half], found, rtol=0, atol=60 * 2 * RTOL)


def test_qwen2_vl_images(agrees, rng):
    """Height and width of patches, half of the pairs each."""
    modeling = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = importlib.import_module("transformers.models.qwen2_vl.configuration_qwen2_vl").Qwen2VLVisionConfig(
        embed_dim=64, num_heads=4
    )
    module = modeling.Qwen2VLVisionRotaryEmbedding(config)
    grid = rp.reference.grid_positions((3, 4))
    freqs = torch.from_numpy(grid.T)[..., None] * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x)[None] for x in (freqs.cos(), freqs.sin()))
    q, k, v = operands(rng, 12, 16, 4)
    turned = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    ours = rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"])
    rounded = rp.reference.axis_frequencies(module.inv_freq.double().repeat(2).numpy(), np.array([0] * 4 + [1] * 4))
    same(ours, rounded)
    expected = attend(*turned, torch.from_numpy(v))
    agrees(expected, q, k, v, position=lambda dtype: rp.Rotary(frequencies=rounded, positions=grid))


def test_pixtral(agrees, rng):
    """The frequencies of all channels, dealt to height and width in turn."""
    modeling = importlib.import_module("transformers.models.pixtral.modeling_pixtral")
    config = importlib.import_module("transformers.models.pixtral.configuration_pixtral").PixtralVisionConfig(
        hidden_size=64, num_attention_heads=4, image_size=64, patch_size=16
    )
    module = modeling.PixtralVisionRotaryEmbedding(config)
    grid = rp.reference.grid_positions((3, 4))
    q, k, v = operands(rng, 12, 16, 4)
    ours = rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"], spread="alternate")
    rounded = rp.reference.axis_frequencies(module.inv_freq.double().numpy(), np.array([0] * 4 + [1] * 4))
    same(ours, rounded)
    freqs = torch.from_numpy(grid)[None, ..., None] * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x) for x in (freqs.cos(), freqs.sin()))
    turned = modeling.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    expected = attend(*turned, torch.from_numpy(v))
    agrees(expected, q, k, v, position=lambda dtype: rp.Rotary(frequencies=rounded, positions=grid))


def test_dinov3(agrees, rng, monkeypatch):
    """Centres of patches from -1 to 1, whole turns; class token and registers in front are not turned."""
    modeling = importlib.import_module("transformers.models.dinov3_vit.modeling_dinov3_vit")
    config = importlib.import_module("transformers.models.dinov3_vit.configuration_dinov3_vit").DINOv3ViTConfig(
        hidden_size=64, num_attention_heads=4, image_size=64, patch_size=16
    )
    module = modeling.DINOv3ViTRopePositionEmbedding(config).double().eval()
    centres = modeling.get_patches_center_coordinates  # which would be float32
    monkeypatch.setattr(
        modeling,
        "get_patches_center_coordinates",
        lambda height, width, dtype, device: centres(height, width, dtype=torch.float64, device=device),
    )
    cos, sin = module(torch.zeros(1, 3, 48, 80, dtype=torch.float64))
    prefix = 3
    q, k, v = operands(rng, 15 + prefix, 16, 4)
    turned = modeling.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    expected = attend(*turned, torch.from_numpy(v))
    ours = rp.reference.axial_frequencies(16, base=config.rope_theta)
    rounded = rp.reference.axis_frequencies(module.inv_freq.repeat(2).numpy(), np.array([0] * 4 + [1] * 4))
    same(ours, rounded)
    grid = np.pad(rp.reference.grid_positions((3, 5), coordinates="centered"), [(0, 0), (prefix, 0)])
    agrees(expected, q, k, v, position=lambda dtype: rp.Rotary(frequencies=2 * np.pi * rounded, positions=grid))


def test_wav2vec2_conformer_turns_its_inputs(rng):
    """Their rotary mode turns hidden states, and projects afterwards: not relative, and not `Rotary`."""
    modeling = importlib.import_module("transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer")
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_attention_heads=4, position_embeddings_type="rotary", attention_dropout=0.0
    )
    config._attn_implementation = "eager"
    layer = modeling.Wav2Vec2ConformerSelfAttention(config).double().eval()
    x = rng.standard_normal((2, 9, 32))
    angle = np.multiply.outer(np.arange(9), rp.reference.rotary_frequencies(8))
    both = torch.from_numpy(np.concatenate([angle, angle], axis=-1))[:, None, None, :]
    given = torch.stack([both.cos(), both.sin()])
    expected = layer(torch.from_numpy(x), relative_position_embeddings=given)[0].numpy()
    # Their own table is the same in float32.
    table = modeling.Wav2Vec2ConformerRotaryPositionalEmbedding(config)(torch.zeros(2, 9, 32))
    np.testing.assert_allclose(given.numpy(), table.numpy(), rtol=0, atol=16 * RTOL)

    def heads(y, linear):
        z = y @ linear.weight.numpy().T + linear.bias.numpy()
        return z.reshape(2, 9, 4, 8).swapaxes(1, 2)

    turned = rp.reference.rotate_inputs(x, 4)
    q, k, v = heads(turned, layer.linear_q), heads(turned, layer.linear_k), heads(x, layer.linear_v)

    def projected(out):
        return out.swapaxes(1, 2).reshape(2, 9, 32) @ layer.linear_out.weight.numpy().T + layer.linear_out.bias.numpy()

    np.testing.assert_allclose(projected(rp.attention(q, k, v, backend="numpy")), expected, rtol=0, atol=1e-12)
    relative = rp.attention(
        heads(x, layer.linear_q), heads(x, layer.linear_k), v, position=rp.Rotary(), backend="numpy"
    )
    assert np.abs(projected(relative) - expected).max() > 1e-3


# ---------------------------------------------------------------------------------------------- timm


@pytest.fixture
def timm_rope():
    from tests.parity.modules import without_torchvision

    with without_torchvision():
        return pytest.importorskip("timm.layers.pos_embed_sincos")


TIMM = {
    # in_pixels, further arguments of theirs, coordinates and reference of ours
    "index": ({"in_pixels": False}, {}),
    "eva02": ({"in_pixels": False, "ref_feat_shape": [16, 16]}, {"reference": (16, 16)}),
    "pixel": ({"in_pixels": True}, {"coordinates": "ends"}),
    "centered": ({"in_pixels": False, "grid_type": "centered"}, {"coordinates": "centered"}),
}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("mode", TIMM)
def test_timm_images(mode, layout, timm_rope, agrees, rng):
    """Grids whose coordinates are exact in float32, which theirs are; bands and angles in float64."""
    theirs, ours = TIMM[mode]
    bands = rp.reference.pixel_frequencies(4) if theirs["in_pixels"] else rp.reference.rotary_frequencies(8, base=100.0)
    found = timm_rope._build_bands(4, in_pixels=theirs["in_pixels"], temperature=100.0, linear_bands=True)
    same(bands, found.numpy())
    shape = (5, 3) if mode == "pixel" else (8, 4)
    sin, cos = timm_rope.build_rotary_pos_embed(
        shape, bands=torch.from_numpy(bands), dtype=torch.float64, rotate_half=layout == "half", **theirs
    )
    q, k, v = operands(rng, shape[0] * shape[1] + 1, 16, 4)

    def turn(x):
        """As EVA does: the class token is left out."""
        x = torch.from_numpy(x)
        turned = timm_rope.apply_rot_embed(x[:, :, 1:], sin, cos, half=layout == "half")
        return torch.cat([x[:, :, :1], turned], dim=2)

    expected = attend(turn(q), turn(k), torch.from_numpy(v))
    frequencies = rp.reference.axis_frequencies(np.tile(bands, 2), np.array([0] * 4 + [1] * 4))
    if not theirs["in_pixels"]:
        np.testing.assert_array_equal(frequencies, rp.reference.axial_frequencies(16, base=100.0))
    positions = np.pad(rp.reference.grid_positions(shape, **ours), [(0, 0), (1, 0)])
    agrees(
        expected,
        q,
        k,
        v,
        position=lambda dtype: rp.Rotary(frequencies=frequencies, positions=positions, layout=layout),
    )


def test_timm_log_bands(timm_rope):
    found = timm_rope.pixel_freq_bands(6, max_freq=224.0, linear_bands=False).numpy()
    same(rp.reference.pixel_frequencies(6, spacing="log"), found)


def test_timm_mixed(timm_rope, rng):
    """RoPE-Mixed: frequencies per head for width and height; they compute in float32, also the gradient."""
    torch.set_grad_enabled(True)
    module = timm_rope.RotaryEmbeddingMixed(32, 2, 4, feat_shape=[3, 5])
    layer = 1
    frequencies = module.freqs.detach()[:, layer].numpy()  # (2, H, d / 2)
    positions = rp.reference.grid_positions((3, 5))[::-1]
    q, k, v = (rng.standard_normal((2, 4, 15, 8)).astype(np.float32) for _ in "qkv")
    scheme = rp.Rotary(frequencies=frequencies, positions=positions, layout="interleaved")
    emb = module.get_embed()[layer]
    turned = [timm_rope.apply_rot_embed_cat(torch.from_numpy(x), emb) for x in (q, k)]
    out = torch.nn.functional.scaled_dot_product_attention(*turned, torch.from_numpy(v))
    w = rng.standard_normal(out.shape).astype(np.float32)
    (out * torch.from_numpy(w)).sum().backward()
    found = rp.attention(q, k, v, position=scheme)
    # Angles up to 10, exact to 10 eps.
    np.testing.assert_allclose(found, out.detach().numpy(), rtol=0, atol=32 * RTOL)
    gradient = rp.attention_vjp(q, k, v, position=scheme, grad_out=w).position["frequencies"]
    expected = module.freqs.grad[:, layer].numpy()
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=32 * RTOL * np.abs(expected).max())


# ---------------------------------------------------------------------------------------------- torchscale


@pytest.fixture
def xpos(monkeypatch):
    """The module of xPos's authors; where it asks for single precision it gets double."""
    found = pytest.importorskip("torchscale.component.xpos_relative_position")
    monkeypatch.setattr(torch, "float", torch.float64)
    torch.set_default_dtype(torch.float64)
    yield found.XPOS
    torch.set_default_dtype(torch.float32)


def flat(x):
    """Heads are part of the batch there."""
    return torch.from_numpy(x.reshape(-1, *x.shape[2:]))


@pytest.mark.parametrize("length", [1, 2, 11, 64])
@pytest.mark.parametrize("scale_base", [512, 20])
def test_xpos(length, scale_base, xpos, agrees, rng):
    q, k, v = operands(rng, length, 16, 4)
    module = xpos(16, scale_base)
    turned = module(flat(q)), module(flat(k), downscale=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, flat(v), is_causal=True)
    expected = expected.numpy().reshape(q.shape)
    agrees(expected, q, k, v, position=lambda dtype: rp.XPos(scale_base=float(scale_base)), causal=True)


def test_xpos_decodes_one_token(xpos, agrees, rng):
    """Their query has the offset L_k - 1, so that its centre is the keys'."""
    q, k, v = operands(rng, 11, 16, 4)
    q = q[:, :, -1:]
    module = xpos(16)
    turned = module(flat(q), offset=10), module(flat(k), downscale=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, flat(v)).numpy().reshape(q.shape)
    agrees(expected, q, k, v, position=lambda dtype: rp.XPos())


def test_xpos_has_centres_of_its_own_for_queries_and_keys(xpos, rng):
    """Where lengths plus offsets differ, their scores are ours times zeta^(difference of the centres / B)."""
    q, k, _ = operands(rng, 12, 16, 4)
    q = q[:, :, :5]
    module = xpos(16)
    theirs = torch.bmm(module(flat(q)), module(flat(k), downscale=True).transpose(1, 2)).numpy() / 4
    ours = rp.logits(q, k, position=rp.XPos(), offset=0).reshape(theirs.shape)
    assert np.abs(theirs - ours).max() > 1e-3
    # Centres are 3 and 6: a query is scaled by zeta^3 too much.
    factor = rp.reference.xpos_scales(np.array([3]), 8)[0].repeat(2)
    moved = rp.logits(q * factor, k, position=rp.XPos(), offset=0).reshape(theirs.shape)
    np.testing.assert_allclose(theirs, moved, rtol=0, atol=1e-12)
