"""DeepSeek V4 in transformers: keys that are values too, turned as keys, and an output that turns back; with sinks."""

import math

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
theirs = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

LENGTH, HEADS, DEPTH, TURNING, WINDOW, BASE = 23, 6, 20, 8, 9, 100.0
CONFIG = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "head_dim": DEPTH,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": WINDOW,
    "partial_rotary_factor": TURNING / DEPTH,
    "rope_theta": BASE,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["moe", "moe"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
TURNS = {"channels": (DEPTH - TURNING, DEPTH), "layout": "interleaved", "base": BASE}


def module():
    settings = transformers.DeepseekV4Config(**CONFIG)
    settings._attn_implementation = "eager"
    attention = theirs.DeepseekV4Attention(settings, 0).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in attention.parameters():
            x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return attention


def angles(first, factor):
    """Cosines and sines as their embedding has them, of float64 throughout."""
    steps = BASE ** (-torch.arange(0, TURNING, 2, dtype=torch.float64) / TURNING)
    angle = (torch.arange(LENGTH, dtype=torch.float64) + first)[None, :, None] * steps
    return factor * angle.cos(), factor * angle.sin()


def banded():
    d = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    return torch.where((d <= 0) & (d > -WINDOW), 0.0, -math.inf).double()[None, None]


@pytest.mark.parametrize(("first", "factor"), [(0, 1.0), (1000, 1.0), (0, 1.2)])
def test_a_layer_and_its_gradients(first, factor, backend, monkeypatch):
    """Their module's own code on float64, which it would round to float32 where it turns; and an attention factor."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)
    attention = module()
    seen = {}

    def keep(name):
        def hook(_, args, out):
            seen[name] = out.detach().requires_grad_()
            return seen[name]

        return hook

    def last(_, args):
        seen["out"] = args[0]
        seen["out"].retain_grad()

    attention.q_b_norm.register_forward_hook(keep("q"))
    attention.kv_norm.register_forward_hook(keep("kv"))
    attention.o_a_proj.register_forward_pre_hook(last)
    hidden = torch.randn(2, LENGTH, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.enable_grad():
        result, _ = attention(hidden, {"main": angles(first, factor)}, None, banded())
        result.square().sum().backward()
    q, kv = seen["q"].detach().numpy(), seen["kv"].detach().numpy()[:, None]
    sinks = attention.sinks.detach().numpy()

    def merged(out):
        return np.moveaxis(out, -3, -2).reshape(seen["out"].shape)

    options = {"causal": True, "window": WINDOW - 1, "sinks": sinks, "backend": backend}
    options["position"] = rp.Rotary(**TURNS, magnitude=factor, values=True)
    found = rp.attention(q, kv, kv, **options)
    expected = seen["out"].detach().numpy()
    assert np.abs(merged(found) - expected).max() <= 1e-12
    # Neither of both turns is missed.
    for other in (
        {"position": rp.Rotary(**TURNS, magnitude=factor)},
        {"sinks": None},
    ):
        assert np.abs(merged(rp.attention(q, kv, kv, **(options | other))) - expected).max() > 1e-2
    grad_out = seen["out"].grad.numpy().reshape(2, LENGTH, HEADS, DEPTH).swapaxes(1, 2)
    grads = rp.attention_vjp(q, kv, kv, grad_out=grad_out, **options)
    size = float(np.abs(grad_out).max())
    assert np.abs(grads.q - seen["q"].grad.numpy()).max() <= 1e-12 * size
    assert np.abs(grads.k + grads.v - seen["kv"].grad.numpy()[:, None]).max() <= 1e-12 * size
    assert np.abs(grads.sinks - attention.sinks.grad.numpy()).max() <= 1e-11 * size
