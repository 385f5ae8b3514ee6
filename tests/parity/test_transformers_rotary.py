"""Rotary positions: frequencies and rotations of Hugging Face transformers, and ONNX's RotaryEmbedding cases."""

import math
import warnings

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


@pytest.mark.parametrize("bands", [(1.0, 4.0), (2.0, 16.0)])
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


# ---------------------------------------------------------------------------------------------- ONNX


def onnx_cases():
    """ONNX's cases of RotaryEmbedding; their tables are random numbers, not cosines and sines."""
    try:
        from onnx.backend.test.case import node
    except ImportError:
        return []
    with warnings.catch_warnings():  # building the cases of other operators overflows and divides by zero
        warnings.simplefilter("ignore")
        cases = node.collect_testcases(None)
    return [c for c in cases if len(c.model.graph.node) == 1 and c.model.graph.node[0].op_type == "RotaryEmbedding"]


CASES = onnx_cases()


def test_onnx_cases_exist():
    pytest.importorskip("onnx")
    assert len(CASES) >= 8


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_onnx(case):
    import onnx

    node = case.model.graph.node[0]
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    x, cos, sin, *rest = case.data_sets[0][0]
    (expected,) = case.data_sets[0][1]
    if rest:
        cos, sin = cos[rest[0]], sin[rest[0]]
    pairs = (options.get("rotary_embedding_dim") or 2 * cos.shape[-1]) // 2
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    flat = x.ndim == 3
    if flat:
        heads = options["num_heads"]
        x = x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
    matrices = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)[:, None]
    found = rp.reference.rotate_pairs(x, matrices, layout="interleaved" if options.get("interleaved") else "half")
    if flat:
        found = found.swapaxes(1, 2).reshape(expected.shape)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
