"""One comparison of a call with a peer, gradients and all, and what peers have of options of the call.

A peer is a function of tensors that gives (output, log-sum-exp); PyTorch's autograd goes through its own code.
"""

import os
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import modeling as peer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
flex_module = pytest.importorskip("torch.nn.attention.flex_attention")
functional = torch.nn.functional

IN_SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
BACKENDS = ("cuda",) if IN_SIMULATOR else ("numpy", "terms", "numba")

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
OPERANDS = ("q", "k", "v")
OPTIONS = ("sinks", "query_scale", "mask")


# ---------------------------------------------------------------------------------------------- comparing


def operands(rng, q_len=20, k_len=None, batch=BATCH):
    """Two query heads per head of keys."""
    k_len = q_len if k_len is None else k_len
    q = 2 * rng.standard_normal((batch, HEADS, q_len, DIM))
    k, v = rng.standard_normal((2, batch, KV_HEADS, k_len, DIM))
    return {"q": q, "k": k, "v": v}


def assert_close(found, expected, what):
    """Within 1e-12; a gradient that is larger than 1, within so much of its largest element."""
    found, expected = np.asarray(found), expected.detach().numpy()
    assert found.dtype == np.float64
    assert found.shape == expected.shape, what
    assert np.isfinite(expected).all(), what
    size = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * size, err_msg=what)


def agrees(other, arrays, position=None, **call):
    """Compare a call with a peer: `other` takes the arrays as tensors, `position` makes the scheme of them.

    Arrays are operands, options that have a gradient, and trained arrays of the scheme; what else there is in the call
    has none.
    """
    rng = np.random.default_rng(7)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    with torch.enable_grad():
        out, lse = other(**leaves)
        grads = {"grad_out": rng.standard_normal(out.shape), "grad_lse": rng.standard_normal(lse.shape)}
        loss = (out * torch.tensor(grads["grad_out"])).sum() + (lse * torch.tensor(grads["grad_lse"])).sum()
        wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    q, k, v = (arrays[name] for name in OPERANDS)
    call |= {name: arrays[name] for name in OPTIONS if name in arrays}
    call["position"] = None if position is None else position(arrays)
    for backend in BACKENDS:
        found = rp.attention(q, k, v, return_lse=True, backend=backend, **call)
        assert_close(found[0], out, f"output, {backend}")
        assert_close(found[1], lse, f"log-sum-exp, {backend}")
        own = rp.attention_vjp(q, k, v, **grads, mask_gradient="mask" in arrays, backend=backend, **call)
        for name, expected in wanted.items():
            gradient = getattr(own, name) if name in (*OPERANDS, *OPTIONS) else own.position[name]
            assert_close(gradient, expected, f"gradient of {name}, {backend}")


# ---------------------------------------------------------------------------------------------- what the peers are


@contextmanager
def in_double():
    """Run a model in float64 where its code turns to float32, and give the scores that reached its softmax."""
    softmax, scores, before = functional.softmax, [], torch.get_default_dtype()

    def kept(x, dim=-1, **ignored):
        scores.append(x)
        return softmax(x, dim=dim)

    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(functional, "softmax", kept),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
            patch.object(torch, "float", torch.float64),
        ):
            yield scores
    finally:
        torch.set_default_dtype(before)


def eager(name, q, k, v, mask=None, **more):
    """`eager_attention_forward` of a model."""
    groups = q.shape[1] // k.shape[1]
    module = SimpleNamespace(num_key_value_groups=groups, training=False, head_dim=DIM)
    with in_double() as scores:
        out, _ = peer(name).eager_attention_forward(module, q, k, v, mask, scaling=DIM**-0.5, **more)
    return out.transpose(1, 2), scores[-1].logsumexp(-1)


def gpt_oss(q, k, v, sinks, mask=None):
    """Their scores lost each row's maximum; the last of a row is its sink, whose score is known."""
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=sinks)
    with in_double() as scores:
        out, _ = peer("gpt_oss").eager_attention_forward(module, q, k, v, mask, scaling=DIM**-0.5)
    (less,) = scores
    return out.transpose(1, 2), less.logsumexp(-1) + sinks[:, None] - less[..., -1]


def flex(q, k, v, score_mod=None, mask_mod=None):
    """PyTorch's flex_attention, whose dense form differentiates on a CPU as well, though its front door says no."""
    torch._dynamo.reset()
    mask = None
    if mask_mod is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mask = flex_module.create_block_mask(mask_mod, *shape, device="cpu")
    with patch.object(flex_module, "_validate_device", lambda *_: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the dense form is slow, and of tensors that its tracer looks at
        options = {"enable_gqa": True, "return_aux": flex_module.AuxRequest(lse=True)}
        out, more = flex_module.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, **options)
    return out, more.lse


def masked(function, q_len, k_len=None, offset=0, batch=BATCH):
    """What transformers adds to scores for one of its rules."""
    k_len = q_len if k_len is None else k_len
    return masking.eager_mask(
        batch, q_len, k_len, q_offset=offset, mask_function=function, dtype=torch.float64, device="cpu"
    )


def causal(q_len, k_len=None, offset=0):
    return masked(masking.causal_mask_function, q_len, k_len, offset)


class Rows(torch.nn.Module):
    """An embedding whose table is a tensor of autograd."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, index):
        return functional.embedding(index, self.table)


def t5_bias(table, q_len, k_len=None):
    """Of transformers' T5, queries at the end; the table has a column per head."""
    k_len = q_len if k_len is None else k_len
    buckets = {"relative_attention_num_buckets": table.shape[0], "relative_attention_max_distance": 20}
    config = transformers.T5Config(d_model=32, num_heads=HEADS, **buckets)
    module = peer("t5").T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module.relative_attention_bias = Rows(table)
    return module.compute_bias(q_len, k_len, device="cpu", past_seen_tokens=k_len - q_len)


def t5(arrays):
    return rp.T5(arrays["table"], max_distance=20)


def turned(q, k, q_at, k_at):
    """Queries and keys that Gemma 2's code has turned to their positions (B, L)."""
    gemma2 = peer("gemma2")
    with in_double():
        config = transformers.Gemma2Config(head_dim=DIM, hidden_size=HEADS * DIM, num_attention_heads=HEADS)
        rotary = gemma2.Gemma2RotaryEmbedding(config)
        q = gemma2.apply_rotary_pos_emb(q, q, *rotary(q, q_at))[0]
        return q, gemma2.apply_rotary_pos_emb(k, k, *rotary(k, k_at))[0]
