"""Rotary positions of images in timm, and xPos of torchscale."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, sdpa, timm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The peer's frequencies are float32, and go through a power and a few products.
RTOL = 16 * EPS32


def same(ours, expected):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=RTOL)


def operands(rng, length, depth, kv_heads=2):
    return [rng.standard_normal((2, heads, length, depth)) for heads in (4, kv_heads, kv_heads)]


# Height and width have half of the pairs each.
TWO_AXES = np.array([0] * 4 + [1] * 4)


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
