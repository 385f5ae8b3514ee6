"""Positions that come from the text, in other packages: forgetting attention, selective attention, PaTH."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BATCH, HEADS, DIM = 2, 4, 8


def operands(rng, length, kv_heads=HEADS, keys=None):
    """q, k and v in double precision."""
    keys = length if keys is None else keys
    shapes = (HEADS, length, DIM), (kv_heads, keys, DIM), (kv_heads, keys, 6)
    return [rng.standard_normal((BATCH, *shape)) for shape in shapes]


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
