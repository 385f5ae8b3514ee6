"""Rotary positions: rotations, multimodal and image positions of Hugging Face transformers, timm and torchscale."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, modeling, projected, randomised, sdpa, timm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
llama, neox, gptj = map(modeling, ("llama", "gpt_neox", "gptj"))

# The peer's frequencies are float32, and go through a power and a few products.
RTOL = 16 * EPS32
BASE = 500000.0


def same(ours, expected):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=RTOL)


def operands(rng, length, depth, kv_heads=2):
    return [rng.standard_normal((2, heads, length, depth)) for heads in (4, kv_heads, kv_heads)]


def turned(q, k, cos, sin, by=llama):
    """Queries and keys that the code of a model has turned."""
    return by.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)


def tables(positions, omega, *, magnitude=1.0):
    """Cosines and sines as the peers lay them out, in float64: (..., L, 2P)."""
    angle = torch.as_tensor(positions, dtype=torch.float64)[..., None] * torch.as_tensor(omega)
    both = torch.cat([angle, angle], dim=-1)
    return both.cos() * magnitude, both.sin() * magnitude


@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_llama_attention(agrees, rng, magnitude):
    """Half layout: the rotated operands, and attention over them with grouped heads."""
    q, k, v = operands(rng, 11, 16)
    cos, sin = tables(np.arange(11)[None], rp.reference.rotary_frequencies(16), magnitude=magnitude)
    expected = sdpa(*turned(q, k, cos, sin), v, is_causal=True)
    agrees(expected, q, k, v, position=rp.Rotary(magnitude=magnitude), causal=True)


def test_neox_attention_turns_a_part(agrees, rng):
    q, k, v = (rng.standard_normal((2, 3, 9, 16)) for _ in "qkv")
    cos, sin = tables(np.arange(9)[None], rp.reference.rotary_frequencies(4))
    agrees(sdpa(*turned(q, k, cos, sin, neox), v), q, k, v, position=rp.Rotary(4))


def test_gptj_is_interleaved(rng):
    """Their tensors are (B, L, H, D); their table holds sines, then cosines, one per pair, in float32."""
    x = rng.standard_normal((2, 7, 3, 8))
    table = gptj.create_sinusoidal_positions(7, 8).double()
    sin, cos = torch.tensor_split(table[None].expand(2, -1, -1), 2, dim=-1)
    expected = gptj.apply_rotary_pos_emb(torch.from_numpy(x), sin, cos).numpy().swapaxes(1, 2)
    matrices = rp.reference.rotary_matrices(np.arange(7), rp.reference.rotary_frequencies(8))
    found = rp.reference.rotate_pairs(x.swapaxes(1, 2), matrices, layout="interleaved")
    # At position 6 the table's angles are off by 6 eps at most.
    np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL * np.abs(x).max())


# ---------------------------------------------------------------------------------------------- positions given


def test_position_ids(agrees, rng):
    """Padding on the left, as `generate` counts it."""
    q, k, v = operands(rng, 11, 16)
    real = np.ones((2, 11), bool)
    real[1, :4] = False
    ids = np.cumsum(real, axis=-1) - 1
    ids[~real] = 1
    cos, sin = tables(ids, rp.reference.rotary_frequencies(16))
    agrees(sdpa(*turned(q, k, cos, sin), v), q, k, v, position=rp.Rotary(positions=ids))


MULTIMODAL = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", (16, 24, 24), "half"),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", (24, 20, 20), "half"),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeTextRotaryEmbedding", "Ernie4_5_VLMoeTextConfig", (22, 22, 20), "interleaved"),
}


@pytest.mark.parametrize("model", MULTIMODAL)
def test_multimodal_positions(model, agrees, rng):
    """Angles put together by their module, from frequencies it rounded to float32; the rest in float64."""
    name, config_name, sections, layout = MULTIMODAL[model]
    peer = modeling(model)
    config = getattr(peer, config_name)(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": BASE, "mrope_section": list(sections)},
    )
    config.head_dim = 128
    module = getattr(peer, name)(config)
    q, k, v = operands(rng, 9, 128)
    ids = rng.integers(0, 60, (3, 2, 9))
    freqs = torch.from_numpy(ids)[..., None].double() * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x) for x in (freqs.cos(), freqs.sin()))
    if layout == "half":
        both = turned(q, k, cos, sin, peer)
    else:  # theirs turns in float32, GPT-J's, the same, in float64
        both = [
            gptj.apply_rotary_pos_emb(torch.from_numpy(x).transpose(1, 2), sin[..., ::2], cos[..., ::2]).transpose(1, 2)
            for x in (q, k)
        ]
        np.testing.assert_allclose(turned(q, k, cos, sin, peer)[0], both[0], rtol=0, atol=1e-6)
    assert both[0].dtype == torch.float64

    omega, rounded = rp.reference.rotary_frequencies(128, base=BASE), module.inv_freq.double().numpy()
    if model == "ernie4_5_vl_moe":
        # Height and width in turn, then time; their frequencies are stored apart, and put together again.
        axes = np.array([1, 2] * 22 + [0] * 20)
        same(np.concatenate([omega[:44:2], omega[1:44:2], omega[44:]]), rounded)
        rounded = np.concatenate([np.stack([rounded[:22], rounded[22:44]], -1).reshape(-1), rounded[44:]])
    else:
        axes = rp.reference.section_axes(sections, order="chunks" if model == "qwen2_vl" else "cyclic")
    same(omega, rounded)
    frequencies = rp.reference.axis_frequencies(rounded, axes, 3)
    position = rp.Rotary(frequencies=frequencies, positions=ids.transpose(1, 0, 2), layout=layout)
    agrees(sdpa(*both, v), q, k, v, position=position)


def test_multimodal_frequencies_can_be_rounded_like_theirs():
    """The whole of their forward pass in float32: positions up to 60 leave angles exact to 60 eps."""
    peer = modeling("qwen3_vl")
    config = peer.Qwen3VLTextConfig()
    module = peer.Qwen3VLTextRotaryEmbedding(config)
    ids = np.random.default_rng(0).integers(0, 60, (3, 2, 9))
    cos, sin = module(torch.zeros(1), torch.from_numpy(ids))
    omega = rp.reference.rotary_frequencies(config.head_dim, base=config.rope_parameters["rope_theta"])
    axes = rp.reference.section_axes(module.mrope_section, order="cyclic")
    matrices = rp.reference.rotary_matrices(ids.transpose(1, 0, 2), rp.reference.axis_frequencies(omega, axes))
    half = config.head_dim // 2
    for found, expected in ((matrices[..., 0, 0], cos), (matrices[..., 1, 0], sin)):
        np.testing.assert_allclose(expected.numpy()[..., :half], found, rtol=0, atol=60 * 2 * RTOL)


# Height and width have half of the pairs each.
TWO_AXES = np.array([0] * 4 + [1] * 4)


def test_qwen2_vl_images(agrees, rng):
    peer = modeling("qwen2_vl")
    config = peer.Qwen2VLVisionConfig(embed_dim=64, num_heads=4)
    module = peer.Qwen2VLVisionRotaryEmbedding(config)
    grid = rp.reference.grid_positions((3, 4))
    freqs = torch.from_numpy(grid.T)[..., None] * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x)[None] for x in (freqs.cos(), freqs.sin()))
    q, k, v = operands(rng, 12, 16, 4)
    rounded = rp.reference.axis_frequencies(module.inv_freq.double().repeat(2).numpy(), TWO_AXES)
    same(rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"]), rounded)
    expected = sdpa(*turned(q, k, cos, sin), v)
    agrees(expected, q, k, v, position=rp.Rotary(frequencies=rounded, positions=grid))


def test_pixtral(agrees, rng):
    """The frequencies of all channels, dealt to height and width in turn."""
    peer = modeling("pixtral")
    config = peer.PixtralVisionConfig(hidden_size=64, num_attention_heads=4, image_size=64, patch_size=16)
    module = peer.PixtralVisionRotaryEmbedding(config)
    grid = rp.reference.grid_positions((3, 4))
    q, k, v = operands(rng, 12, 16, 4)
    rounded = rp.reference.axis_frequencies(module.inv_freq.double().numpy(), TWO_AXES)
    same(rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"], spread="alternate"), rounded)
    freqs = torch.from_numpy(grid)[None, ..., None] * module.inv_freq.double()
    cos, sin = (module.recomposition_frequencies(x) for x in (freqs.cos(), freqs.sin()))
    expected = sdpa(*turned(q, k, cos, sin, peer), v)
    agrees(expected, q, k, v, position=rp.Rotary(frequencies=rounded, positions=grid))


def test_dinov3(agrees, rng, monkeypatch):
    """Centres of patches from -1 to 1, whole turns; class token and registers in front are not turned."""
    peer = modeling("dinov3_vit")
    config = peer.DINOv3ViTConfig(hidden_size=64, num_attention_heads=4, image_size=64, patch_size=16)
    module = peer.DINOv3ViTRopePositionEmbedding(config).double().eval()
    centres = peer.get_patches_center_coordinates  # which would be float32
    monkeypatch.setattr(
        peer,
        "get_patches_center_coordinates",
        lambda height, width, dtype, device: centres(height, width, dtype=torch.float64, device=device),
    )
    cos, sin = module(torch.zeros(1, 3, 48, 80, dtype=torch.float64))
    prefix = 3
    q, k, v = operands(rng, 15 + prefix, 16, 4)
    rounded = rp.reference.axis_frequencies(module.inv_freq.repeat(2).numpy(), TWO_AXES)
    same(rp.reference.axial_frequencies(16, base=config.rope_theta), rounded)
    grid = np.pad(rp.reference.grid_positions((3, 5), coordinates="centered"), [(0, 0), (prefix, 0)])
    position = rp.Rotary(frequencies=2 * np.pi * rounded, positions=grid)
    agrees(sdpa(*turned(q, k, cos, sin, peer), v), q, k, v, position=position)


def test_wav2vec2_conformer_turns_its_inputs(rng):
    """Their rotary mode turns hidden states, and projects afterwards: not relative, and not `Rotary`."""
    peer = modeling("wav2vec2_conformer")
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_attention_heads=4, position_embeddings_type="rotary", attention_dropout=0.0
    )
    config._attn_implementation = "eager"
    layer = randomised(peer.Wav2Vec2ConformerSelfAttention(config))
    layer.linear_out = torch.nn.Identity()
    x = rng.standard_normal((2, 9, 32))
    cos, sin = tables(np.arange(9), rp.reference.rotary_frequencies(8))
    given = torch.stack([cos, sin])[:, :, None, None]
    expected = layer(torch.from_numpy(x), relative_position_embeddings=given)[0]
    expected = expected.unflatten(-1, (4, 8)).transpose(1, 2).numpy()
    # Their own table is the same in float32.
    table = peer.Wav2Vec2ConformerRotaryPositionalEmbedding(config)(torch.zeros(2, 9, 32))
    np.testing.assert_allclose(given.numpy(), table.numpy(), rtol=0, atol=16 * RTOL)

    q, k = projected(layer, "linear_q linear_k", torch.from_numpy(rp.reference.rotate_inputs(x, 4)))
    plain_q, plain_k, v = projected(layer, "linear_q linear_k linear_v", torch.from_numpy(x))
    np.testing.assert_allclose(rp.attention(q, k, v, backend="numpy"), expected, rtol=0, atol=1e-12)
    relative = rp.attention(plain_q, plain_k, v, position=rp.Rotary(), backend="numpy")
    assert np.abs(relative - expected).max() > 1e-3


# ---------------------------------------------------------------------------------------------- timm


@pytest.fixture
def timm_rope():
    return timm("layers.pos_embed_sincos")


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
        return torch.cat([x[:, :, :1], timm_rope.apply_rot_embed(x[:, :, 1:], sin, cos, half=layout == "half")], dim=2)

    frequencies = rp.reference.axis_frequencies(np.tile(bands, 2), TWO_AXES)
    if not theirs["in_pixels"]:
        np.testing.assert_array_equal(frequencies, rp.reference.axial_frequencies(16, base=100.0))
    positions = np.pad(rp.reference.grid_positions(shape, **ours), [(0, 0), (1, 0)])
    position = rp.Rotary(frequencies=frequencies, positions=positions, layout=layout)
    agrees(sdpa(turn(q), turn(k), v), q, k, v, position=position)


def test_timm_log_bands(timm_rope):
    found = timm_rope.pixel_freq_bands(6, max_freq=224.0, linear_bands=False).numpy()
    same(rp.reference.pixel_frequencies(6, spacing="log"), found)


@pytest.mark.usefixtures("with_gradients")
def test_timm_mixed(timm_rope, rng):
    """RoPE-Mixed: frequencies per head for width and height; they compute in float32, also the gradient."""
    module = timm_rope.RotaryEmbeddingMixed(32, 2, 4, feat_shape=[3, 5])
    layer = 1
    frequencies = module.freqs.detach()[:, layer].numpy()  # (2, H, d / 2)
    positions = rp.reference.grid_positions((3, 5))[::-1]
    q, k, v = (rng.standard_normal((2, 4, 15, 8)).astype(np.float32) for _ in "qkv")
    scheme = rp.Rotary(frequencies=frequencies, positions=positions, layout="interleaved")
    emb = module.get_embed()[layer]
    out = sdpa(*(timm_rope.apply_rot_embed_cat(torch.from_numpy(x), emb) for x in (q, k)), v)
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


@pytest.mark.parametrize(("length", "scale_base"), [(n, base) for n in (1, 2, 11, 64) for base in (512, 20)])
def test_xpos(length, scale_base, xpos, agrees, rng):
    q, k, v = operands(rng, length, 16, 4)
    module = xpos(16, scale_base)
    expected = sdpa(module(flat(q)), module(flat(k), downscale=True), flat(v), is_causal=True).reshape(q.shape)
    agrees(expected, q, k, v, position=rp.XPos(scale_base=float(scale_base)), causal=True)


def test_xpos_decodes_one_token(xpos, agrees, rng):
    """Their query has the offset L_k - 1, so that its centre is the keys'."""
    q, k, v = operands(rng, 11, 16, 4)
    q = q[:, :, -1:]
    module = xpos(16)
    expected = sdpa(module(flat(q), offset=10), module(flat(k), downscale=True), flat(v)).reshape(q.shape)
    agrees(expected, q, k, v, position=rp.XPos())


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
