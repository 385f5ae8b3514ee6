"""Positions that come from the text, in other packages: Inkling, forgetting attention, CABLE."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import added, modeling, randomised, sdpa

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BATCH, HEADS, DIM = 2, 4, 8


def operands(rng, length, kv_heads=HEADS, keys=None):
    """q, k and v in double precision."""
    keys = length if keys is None else keys
    shapes = (HEADS, length, DIM), (kv_heads, keys, DIM), (kv_heads, keys, 6)
    return [rng.standard_normal((BATCH, *shape)) for shape in shapes]


# ---------------------------------------------------------------------------------------------- Inkling


def inkling_bias(rng, extent, queries, keys):
    """The bias of Inkling, the states of which it is made, and its trained profiles."""
    module = modeling("inkling").InklingRelativeLogits(5, extent).double()
    torch.nn.init.normal_(module.proj)
    states = torch.from_numpy(rng.standard_normal((BATCH, len(queries), HEADS, 5)))
    return module(states, queries, keys), states, module.proj


def inkling2_bias(rng, extent, queries, keys):
    """That of Inkling 2, whose module makes the states of the hidden ones."""
    peer = modeling("inkling2")
    config = peer.Inkling2TextConfig(hidden_size=24, d_rel=5, rel_l2_clip_threshold=1.5)
    module = peer.Inkling2RelativePositionBias(config, HEADS, extent, log_scaling=False).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.from_numpy(rng.standard_normal((BATCH, len(queries), 24)))
    states = module.norm(module.linear(hidden).unflatten(-1, (HEADS, 5)), queries)
    return module(hidden, queries[:, None] - keys, queries), states, module.proj


@pytest.mark.parametrize("model", [inkling_bias, inkling2_bias])
@pytest.mark.parametrize("extent", [1, 4, 30])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (9, 0), (4, 7)])
def test_inkling(agrees, rng, length, memory, extent, model):
    """The module's bias, and attention with it in float64."""
    q, k, v = operands(rng, length, 2, length + memory)
    places = torch.arange(length + memory)
    bias, states, proj = (x.detach() for x in model(rng, extent, places[memory:], places))
    seen = places <= places[memory:, None]
    expected = sdpa(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf), scale=1 / DIM)
    position = rp.Inkling(states.transpose(1, 2).numpy(), proj.numpy())
    found = added(position, *bias.shape)
    np.testing.assert_allclose(found, bias.numpy(), rtol=0, atol=1e-13)
    agrees(expected, q, k, v, position=position, causal=True, scale=1 / DIM)


@pytest.mark.parametrize("layer", [0, 1])
def test_bias_of_a_layer_of_inkling(rng, layer):
    """Queries and bias grow with the logarithm of the position in a layer without a window."""
    peer = modeling("inkling")
    config = peer.InklingTextConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=5,
        local_layer_ids=[1],
        d_rel=3,
        rel_extent=7,
        log_scaling_n_floor=4,
        attn_implementation="eager",
    )
    module = randomised(peer.InklingAttention(config, layer))
    seen = {}

    def keep(module, query, key, value, mask, *, scaling, position_bias, **rest):
        seen.update(q=query, k=key, v=value, bias=position_bias, scale=scaling)
        return value.repeat_interleave(2, dim=1).transpose(1, 2), None

    length = 12
    x = torch.from_numpy(rng.standard_normal((BATCH, length, 24)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "eager_attention_forward", keep)
        module(x, None)
    states = module.r_proj(x).unflatten(-1, (4, 3)).transpose(1, 2)
    if not module.is_sliding:
        tau = 1 + config.log_scaling_alpha * torch.log(((torch.arange(length) + 1) / 4).clamp(min=1.0))
        states = states * tau.float().double()[:, None]
    scheme = rp.Inkling(states.numpy(), module.rel_logits_proj.proj.numpy())
    q, k = seen["q"].numpy(), seen["k"].numpy()
    found = rp.logits(0 * q, 0 * k, position=scheme, scale=seen["scale"], backend="terms")
    # The model multiplies its bias with the logarithm in float32.
    np.testing.assert_allclose(found, seen["bias"].numpy(), rtol=0, atol=1e-6 * np.abs(found).max())


# ---------------------------------------------------------------------------------------------- forget gates


@pytest.mark.parametrize("window", [None, 1, 5])
def test_forgetting_attention(rng, window):
    """flash-linear-attention computes in float32, and takes logarithms of gates."""
    peer = pytest.importorskip("fla.ops.forgetting_attn.naive", exc_type=ImportError)
    q, k, v = operands(rng, 19, 2)
    gates = rng.standard_normal((BATCH, HEADS, 19))
    logs = functional.logsigmoid(torch.from_numpy(gates))
    expected = peer.naive_forgetting_attn(
        *(torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)), logs.transpose(1, 2), window_size=window
    ).transpose(1, 2)
    options = {"causal": True, "window": None if window is None else (window - 1, 0)}
    for scheme in (rp.FoX(gates), rp.FoX(logs.numpy(), variant="log")):
        for backend in ("numpy", "terms", "numba"):
            found = rp.attention(q, k, v, position=scheme, **options, backend=backend)
            np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_cable(agrees, rng, length):
    """axiomlab/Cable is no package: its computation, step by step, with products that are not scaled."""
    q, k, v = operands(rng, length)
    gates = rng.standard_normal((BATCH, HEADS, length))
    sums = torch.zeros(BATCH, HEADS, length, dtype=torch.float64)
    total = torch.zeros(BATCH, HEADS, dtype=torch.float64)
    for j in range(length):
        total = total - functional.softplus(torch.from_numpy(gates[..., j]))
        sums[..., j] = total
    bias = sums[..., :, None] - sums[..., None, :]
    s = torch.from_numpy(q) @ torch.from_numpy(k).mT + bias.masked_fill(torch.ones_like(bias).triu(1) > 0, -torch.inf)
    expected = s.softmax(-1) @ torch.from_numpy(v)
    agrees(expected, q, k, v, position=rp.FoX(gates, variant="cable"), causal=True, scale=1.0)


# ---------------------------------------------------------------------------------------------- selective attention


@pytest.mark.parametrize(("length", "memory"), [(1, 0), (9, 0), (4, 7), (1, 5)])
def test_selective(agrees, rng, length, memory):
    """The function of x-transformers, on scores behind its mask."""
    peer = pytest.importorskip("x_transformers.attend")
    q, k, v = operands(rng, length, keys=length + memory)
    s = torch.from_numpy(q @ k.swapaxes(-1, -2) / np.sqrt(DIM))
    s = s.masked_fill(torch.ones(length, length + memory, dtype=torch.bool).triu(1 + memory), -1e300)
    expected = peer.selective_attn(s).softmax(-1) @ torch.from_numpy(v)
    for variant in ("x_transformers", "paper")[: 1 if memory else 2]:
        agrees(expected, q, k, v, position=rp.Selective(variant=variant), causal=True)


def test_selective_of_the_paper(agrees, rng):
    """With memory: step by step as section 3 says, one row of sums after the other."""
    length, memory = 6, 5
    q, k, v = operands(rng, length, keys=length + memory)
    s = torch.from_numpy(q @ k.swapaxes(-1, -2) / np.sqrt(DIM))
    total, rows = torch.zeros(BATCH, length + memory, dtype=torch.float64), []
    for i in range(length):
        own = i + memory
        rows.append((s[:, :, i] - total[:, None]).index_fill(-1, torch.arange(own + 1, length + memory), -torch.inf))
        said = s[:, 1, i].clamp(min=0)
        said[:, own:] = 0
        said[:, 0] = 0
        total = total + said
    expected = torch.stack(rows, dim=-2).softmax(-1) @ torch.from_numpy(v)
    agrees(expected, q, k, v, position=rp.Selective(1), causal=True)


# ---------------------------------------------------------------------------------------------- DAPE


@pytest.mark.parametrize("kind", ["alibi", "kerple"])
def test_dape(agrees, rng, kind):
    """chuanyang-Zheng/DAPE is no package: its module around causal biases, with layers of torch."""
    q, k, v = operands(rng, 11)
    layers = randomised(
        torch.nn.Sequential(torch.nn.Linear(2 * HEADS, 7), torch.nn.LeakyReLU(), torch.nn.Linear(7, HEADS))
    )
    p, a = np.abs(rng.standard_normal((2, HEADS)))
    behind = (torch.arange(11)[:, None] - torch.arange(11)).tril()
    slopes, scales = (torch.from_numpy(x)[:, None, None] for x in (p, a))
    bias = -slopes * (behind if kind == "alibi" else torch.log(1 + scales * behind))
    s = torch.from_numpy(q @ k.swapaxes(-1, -2) / np.sqrt(DIM))
    pairs = torch.cat([s, bias.expand_as(s)], dim=1).permute(0, 2, 3, 1)
    s = s + bias + layers(pairs).permute(0, 3, 1, 2)
    expected = s.masked_fill(behind.new_ones(11, 11).triu(1) > 0, -torch.inf).softmax(-1) @ torch.from_numpy(v)
    inner = rp.ALiBi(p) if kind == "alibi" else rp.KERPLE(p, a)
    agrees(expected, q, k, v, position=rp.DAPE(inner, *(x.numpy() for x in layers.parameters())), causal=True)


# ---------------------------------------------------------------------------------------------- PaTH


@pytest.mark.parametrize("length", [1, 9, 70])
def test_path(rng, length):
    """flash-linear-attention computes in float32 and in chunks, and multiplies forget gates with the scale."""
    peer = pytest.importorskip("fla.ops.path_attn.naive", exc_type=ImportError)
    q, k, v = operands(rng, length, 2)
    w = rng.standard_normal((BATCH, 2, length, DIM))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta, gates = 2 * rng.random((BATCH, 2, length)), -rng.random((BATCH, HEADS, length))
    turned = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v, w, beta, gates)]
    expected = peer.naive_path_attn(*turned, scale=DIM**-0.5, chunk_size=16).transpose(1, 2).numpy()
    scheme = rp.PaTH(w, beta), rp.FoX(gates * DIM**-0.5, variant="log")
    for backend in ("numpy", "terms", "numba"):
        found = rp.attention(q, k, v, position=scheme, causal=True, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_path_of_the_paper(agrees, rng):
    """In float64: the matrix between query and key, multiplied out for every pair (equation 1)."""
    length, memory = 6, 4
    q, k, v = operands(rng, length, 2, length + memory)
    w, beta = rng.standard_normal((BATCH, 2, length + memory, DIM)) / 3, 2 * rng.random((BATCH, 2, length + memory))
    heads = np.arange(HEADS) // 2
    s = torch.full((BATCH, HEADS, length, length + memory), -torch.inf, dtype=torch.float64)
    for b, h, i in np.ndindex(BATCH, HEADS, length):
        between = torch.eye(DIM, dtype=torch.float64)
        for j in range(i + memory, -1, -1):
            s[b, h, i, j] = torch.from_numpy(q[b, h, i]) @ between @ torch.from_numpy(k[b, heads[h], j])
            axis = torch.from_numpy(w[b, heads[h], j])
            between = between @ (torch.eye(DIM) - beta[b, heads[h], j] * torch.outer(axis, axis))
    expected = (s / DIM**0.5).softmax(-1) @ torch.from_numpy(v[:, heads])
    agrees(expected, q, k, v, position=rp.PaTH(w, beta), causal=True)
