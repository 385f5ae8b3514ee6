"""Axes of length 0, the head dimension that must not be one, and values with a dimension of their own."""

import numpy as np
import pytest

import relpos_np as rp
from tests.faults.calls import INF, both, dtypes, gradients, make, operands, shapes, small

EMPTY = {
    12: [((2,), 2, 0, 6), ((2,), 2, 0, 300)],
    13: [((2,), 2, 5, 0), ((2,), 2, 0, 0), ((2,), 2, 1, 0), ((2,), 2, 64, 0)],
    14: [((0,), 2, 5, 6), ((2,), 0, 5, 6), ((2, 0), 2, 1, 6)],
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"key_lengths": 0}], ids=str)
@pytest.mark.parametrize(("row", "sizes"), [(row, sizes) for row in EMPTY for sizes in EMPTY[row]], ids=str)
def test_rows_12_13_14_nothing_to_attend_or_nobody_who_attends(row, sizes, options, backend, rng):
    """Outputs, logits and gradients of a call; `test_identities.py` has them of every scheme."""
    batch, heads, q_len, k_len = sizes
    q, k, v = make(rng, q_len=q_len, k_len=k_len, heads=heads, batch=batch)
    scheme = rp.Shaw(rng.standard_normal((3, 4)), rng.standard_normal((3, v.shape[-1])))
    options = options | ({"mask": np.ones((q_len, k_len), bool)} if "mask" in options else {})
    out, lse = both(q, k, v, position=scheme, **options, backend=backend)
    assert out.shape == (*batch, heads, q_len, 16)
    assert lse.shape == (*batch, heads, q_len)
    assert (out == 0).all()
    assert (lse == -INF).all()
    assert rp.attention(q, k, v[..., :0], **options, backend=backend).shape == (*out.shape[:-1], 0)
    s = rp.logits(q, k, position=scheme, **options, backend=backend)
    assert s.shape == (*batch, heads, q_len, k_len)
    # NumPy gives arrays without elements strides of 0, and a limit is divided by numbers of blocks: here by none.
    with rp.memory_limit(1 << 30):
        given = np.full(out.shape, 7.0)
        assert rp.attention(q, k, v, position=scheme, **options, out=given, backend=backend) is given
        assert (given == 0).all()
        found = gradients(q, k, v, grad_lse=np.ones(lse.shape), position=scheme, **options, backend=backend)
    for x, operand in zip("qkv", (q, k, v), strict=True):
        assert found[x].shape == operand.shape
    assert all((x == 0).all() for x in found.values())


@pytest.mark.parametrize(
    "position",
    [
        *(rp.ALiBi(), rp.ALiBi(form="key"), rp.CoPE(np.ones((3, 4))), rp.Rotary(), rp.XPos(), rp.Sandwich(8)),
        *(rp.Shaw(np.ones((3, 4)), np.ones((3, 4))), rp.LieRE(np.ones((1, 2, 2))), rp.NeighborhoodBias(None, (3,), 3)),
    ],
    ids=str,
)
def test_row_14_no_heads_of_schemes_for_any_number(position, backend):
    """Whatever has nothing for each head has nothing to do."""
    q = np.ones((1, 0, 3, 4))
    assert rp.attention(q, q, q, position=position, backend=backend).shape == q.shape
    assert rp.logits(q, q, position=position, backend=backend).shape == (1, 0, 3, 3)
    found = gradients(q, q, q, position=position, backend=backend)
    assert found["q"].shape == found["k"].shape == found["v"].shape == q.shape
    assert all((x == 0).all() for x in found.values())


def test_row_14_no_value_dimension(backend, rng):
    """Shape (..., L_q, 0), and still a log-sum-exp, with a gradient of its own."""
    for q_len, k_len in shapes(backend):
        q, k, v = operands(rng, backend, np.float32, q_len, k_len)
        out, lse = both(q, k, v[..., :0], backend=backend)
        assert out.shape == (*q.shape[:-1], 0)
        np.testing.assert_allclose(lse, both(q, k, v, backend="numpy")[1], rtol=0, atol=1e-5)
        ones = np.ones(lse.shape, np.float32)
        found = gradients(q, k, v[..., :0], grad_lse=ones, backend=backend)
        expected = gradients(q, k, 0 * v, grad_lse=ones, backend="numpy")
        assert found["v"].shape == (*v.shape[:-1], 0)
        for name in "qk":
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_row_15_no_head_dimension(scale, backend, rng):
    """Not even with a scale, because then every score would be 0 without anybody having said so."""
    for q_len, k_len in ((5, 6), (1, 200), (0, 0)):
        q, k, v = make(rng, q_len=q_len, k_len=k_len, depth=0)
        for call in (
            lambda q=q, k=k, v=v: rp.attention(q, k, v, scale=scale, backend=backend),
            lambda q=q, k=k: rp.logits(q, k, scale=scale, backend=backend),
            lambda q=q, k=k, v=v: gradients(q, k, v, scale=scale, backend=backend),
        ):
            with pytest.raises(ValueError, match=r"^q: head_dim must be at least 1") as caught:
                call()
            assert isinstance(caught.value, rp.RelposError)


@pytest.mark.parametrize("v_dim", [1, 3, 16, 65])
def test_row_16_value_dimension_of_its_own(v_dim, backend, rng):
    for dtype in dtypes(backend):
        for q_len, k_len in shapes(backend):
            q, k, _ = operands(rng, backend, dtype, q_len, k_len)
            v = rng.standard_normal((*k.shape[:-1], v_dim)).astype(dtype)
            out = rp.attention(q, k, v, backend=backend)
            columns = [rp.attention(q, k, v[..., c : c + 1], backend="numpy") for c in range(v_dim)]
            eps = np.finfo(dtype).eps
            np.testing.assert_allclose(out, np.concatenate(columns, axis=-1), rtol=0, atol=64 * eps)
            if small(backend) and v_dim > 3:
                continue
            found, expected = (gradients(q, k, v, backend=b) for b in (backend, "numpy"))
            for name, x in found.items():
                np.testing.assert_allclose(x, expected[name], rtol=0, atol=64 * (v_dim + q_len) * eps)
