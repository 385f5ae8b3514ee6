"""Polar positions of pope-pytorch."""

import numpy as np
import pytest

import relpos_np as rp

pytestmark = pytest.mark.usefixtures("with_gradients")
torch = pytest.importorskip("torch")
pope = pytest.importorskip("PoPE_pytorch.pope")


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("q_len", [9, 4])
def test_pope(dim, q_len, agrees, rng):
    """Scores and gradients, in float64: all channels or a part of them, all queries or the last ones."""
    module = pope.PoPE(dim, heads=4).double()
    module.inv_freqs = 10000.0 ** -(torch.arange(dim, dtype=torch.float64) / dim)  # theirs are rounded to float32
    module.bias.data.copy_(torch.from_numpy(rng.uniform(-6, 0, (4, dim))))
    q, k, v = (rng.standard_normal((2, 4, n, 8)) for n in (q_len, 9, 9))
    given = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    turned = pope.apply_pope_to_qk(module(9), *given[:2])
    out = torch.nn.functional.scaled_dot_product_attention(*turned, given[2], scale=8**-0.5)
    position = rp.PoPE(module.bias.detach().numpy())
    agrees(out.detach(), q, k, v, position=position)
    w = rng.standard_normal(out.shape)
    (out * torch.from_numpy(w)).sum().backward()
    found = rp.attention_vjp(q, k, v, position=position, grad_out=w, backend=agrees.backend)
    for ours, theirs in zip((found.q, found.k, found.v), given, strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.position["bias"], module.bias.grad.numpy(), rtol=0, atol=1e-13)
