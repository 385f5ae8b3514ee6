"""Which axis each pair of channels follows, in models of images, videos and several media."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, modeling, sdpa, timm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RTOL = 16 * EPS32


def recomposed(model, name, sections):
    """What their module makes of tables that hold the number of their axis."""
    cls = getattr(modeling(model), name)
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module.mrope_section = list(sections)
    tables = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, sum(sections)).clone()
    return module.recomposition_frequencies(tables)[0, 0].numpy()


@pytest.mark.parametrize("sections", [(24, 20, 20), (3, 5, 5), (8, 12, 12), (11, 11, 10), (5, 1, 4)])
def test_sections_in_turn_of_qwen3_vl(sections):
    found = recomposed("qwen3_vl", "Qwen3VLTextRotaryEmbedding", sections)[: sum(sections)]
    np.testing.assert_array_equal(rp.reference.section_axes(sections, order="cyclic"), found)


def test_time_last_of_ernie():
    """Sections are those of height, width and time."""
    found = recomposed("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextRotaryEmbedding", (22, 22, 20))[::2]
    np.testing.assert_array_equal(rp.reference.section_axes((20, 22, 22), order="time_last"), found)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_sections_in_turn_of_timm(head_dim):
    """Sections of GenLIP, which fill 36 pairs and are too many for 32."""
    module = timm("layers.pos_embed_sincos").RotaryEmbeddingMRope(head_dim)
    found = rp.reference.section_axes(module.mrope_section, order="cyclic", pairs=head_dim // 2)
    np.testing.assert_array_equal(found, module.axis.numpy())
    # Time stands still.
    omega = rp.reference.axis_frequencies(rp.reference.rotary_frequencies(head_dim), found)
    grid = np.concatenate([np.zeros((1, 12)), rp.reference.grid_positions((3, 4))])
    angle = np.einsum("al,ap->lp", grid, omega)
    expected = module.get_embed([3, 4]).numpy()
    both = np.concatenate([np.sin(angle), np.sin(angle), np.cos(angle), np.cos(angle)], axis=-1)
    np.testing.assert_allclose(both, expected, rtol=0, atol=4 * RTOL)


def turned(x, frequencies, positions, **options):
    matrices = rp.reference.rotary_matrices(positions, frequencies)
    return rp.reference.rotate_pairs(x, matrices, **options)


def test_halves_of_each_axis_of_gemma4(rng):
    """Tables in float64 from our angles, put together and applied by their code; and their tables in float32."""
    peer = modeling("gemma4")
    config = transformers.Gemma4VisionConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    module = peer.Gemma4VisionRotaryEmbedding(config)
    frequencies = rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"])
    grid = rp.reference.grid_positions((3, 5))
    freqs = torch.from_numpy(np.einsum("al,ap->lap", grid, frequencies[[0, 0], :4][:, :4]))[None]
    cos, sin = (module.recomposition_frequencies(x) for x in (freqs.cos(), freqs.sin()))
    ids = torch.from_numpy(grid.T)[None]
    for x, y in zip((cos, sin), module(torch.zeros(1, dtype=torch.float32), ids), strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=0, atol=5 * RTOL)
    q, k, v = rng.standard_normal((3, 1, 4, 15, 16))
    theirs = [
        peer.apply_multidimensional_rope(torch.from_numpy(x).transpose(1, 2), cos, sin, ids).transpose(1, 2)
        for x in (q, k)
    ]
    expected = sdpa(*theirs, v).numpy()
    np.testing.assert_allclose(turned(q, frequencies, grid, blocks=2), theirs[0].numpy(), rtol=0, atol=1e-14)
    position = rp.Rotary(frequencies=frequencies, positions=grid, blocks=2)
    for backend in ("numpy", "numba"):
        found = rp.attention(q, k, v, position=position, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_memory_attention_of_sam2(rng):
    """Width before height, interleaved."""
    peer = modeling("sam2_video")
    config = transformers.Sam2VideoConfig(
        memory_attention_hidden_size=32,
        memory_attention_num_attention_heads=2,
        memory_attention_rope_feat_sizes=[4, 4],
        memory_attention_downsample_rate=1,
    )
    module = peer.Sam2VideoVisionRotaryEmbedding(config)
    grid = rp.reference.grid_positions((4, 4))[::-1]
    cos, sin = module(torch.zeros(1), torch.from_numpy(grid.T.copy()))
    frequencies = rp.reference.axial_frequencies(16, base=config.rope_parameters["rope_theta"])
    x = rng.standard_normal((1, 2, 16, 16)).astype(np.float32)
    theirs, _ = peer.apply_rotary_pos_emb_2d(torch.from_numpy(x), torch.from_numpy(x), cos[:, None], sin[:, None])
    found = turned(x, frequencies, grid, layout="interleaved")
    np.testing.assert_allclose(found, theirs.numpy(), rtol=0, atol=4 * RTOL * np.abs(x).max())


# ---------------------------------------------------------------------------------------------- videos of diffusers

VIDEO = (3, 4, 5)


def video(name):
    """Shares and base of ours, and their tables of cosines and sines, one number per channel."""
    diffusers = pytest.importorskip("diffusers.models.embeddings")
    if name == "cogvideox":
        tables = diffusers.get_3d_rotary_pos_embed(64, ((0, 0), VIDEO[1:]), VIDEO[1:], VIDEO[0])
        return (16, 24, 24), 10000.0, tables
    hidden = torch.zeros(1, 16, *VIDEO)
    if name == "wan":
        module = pytest.importorskip("diffusers.models.transformers.transformer_wan")
        tables = module.WanRotaryPosEmbed(128, (1, 1, 1), 64)(hidden)
        return (44, 42, 42), 10000.0, [x.reshape(60, 128) for x in tables]
    module = pytest.importorskip("diffusers.models.transformers.transformer_hunyuan_video")
    return (16, 56, 56), 256.0, module.HunyuanVideoRotaryPosEmbed(1, 1, [16, 56, 56], 256.0)(hidden)


@pytest.mark.parametrize("name", ["wan", "cogvideox", "hunyuan"])
def test_shares_of_videos(name, rng):
    shares, base, tables = video(name)
    diffusers = pytest.importorskip("diffusers.models.embeddings")
    x = rng.standard_normal((1, 2, 60, sum(shares)))
    expected = diffusers.apply_rotary_emb(torch.from_numpy(x), tables).numpy()
    frequencies = rp.reference.axial_frequencies(shares, base=base)
    found = turned(x, frequencies, rp.reference.grid_positions(VIDEO), layout="interleaved")
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * RTOL * np.abs(x).max())


def test_allegro_has_three_blocks(rng):
    """Chunks of channels per axis, each with its halves; height and width in units of their own there."""
    diffusers = pytest.importorskip("diffusers.models.embeddings")
    grid = rp.reference.grid_positions(VIDEO).astype(np.int64)
    tables = [
        diffusers.get_1d_rotary_pos_embed(8, torch.arange(6.0), 10000.0, use_real=True, repeat_interleave_real=False)
        for _ in VIDEO
    ]
    x = rng.standard_normal((1, 2, 60, 24)).astype(np.float32)
    places = [torch.from_numpy(row)[None] for row in grid]
    expected = diffusers.apply_rotary_emb_allegro(torch.from_numpy(x), tables, places).numpy()
    found = turned(x, rp.reference.axial_frequencies(24, 3), grid, blocks=3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * RTOL * np.abs(x).max())
