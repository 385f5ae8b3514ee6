"""Rotations by exponentials with PyTorch's, and their gradients with its autograd."""

import numpy as np
import pytest

import relpos_np as rp

pytestmark = pytest.mark.usefixtures("with_gradients")
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("heads", [(), (4,)])
def test_liere(heads, agrees, rng):
    """As the published code of LieRE makes them, with the exponential of PyTorch in float64."""
    raw = rng.standard_normal((2, *heads, 2, 3, 3)) / 2
    places = rng.standard_normal((2, 9))
    q, k, v, w = rng.standard_normal((4, 2, 4, 9, 8))
    given = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, raw)]
    upper = torch.triu(given[3], diagonal=1)
    skew = upper - upper.transpose(-1, -2)
    shared = skew if heads else skew[:, None]
    exponent = torch.einsum("al,ahbst->hlbst", torch.from_numpy(places), shared)
    rotations = torch.matrix_exp(exponent.contiguous())

    def turn(x):
        parts = x[..., :6].reshape(2, 4, 9, 2, 3)
        turned = torch.matmul(rotations, parts[..., None])[..., 0]
        return torch.cat([turned.reshape(2, 4, 9, 6), x[..., 6:]], dim=-1)

    out = torch.nn.functional.scaled_dot_product_attention(turn(given[0]), turn(given[1]), given[2])
    (out * torch.from_numpy(w)).sum().backward()
    position = rp.LieRE(raw, positions=places)
    agrees(out.detach(), q, k, v, position=position)
    found = rp.attention_vjp(q, k, v, position=position, grad_out=w, backend=agrees.backend)
    for ours, theirs in zip((found.q, found.k, found.v, found.position["generators"]), given, strict=True):
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=0, atol=1e-12)
