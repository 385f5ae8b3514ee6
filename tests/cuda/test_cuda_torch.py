"""Tensors of torch on a GPU: read where they lie, on torch's current stream, and written to by `out=`."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")

DTYPES = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")


def draw(dtype, seed=0):
    """Queries, keys and values as projections leave them: heads behind positions in memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, 40, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16))
    made = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64) for shape in shapes)
    return [x.to(getattr(torch, dtype)).transpose(1, 2) for x in made]


def host(x):
    return x.detach().double().cpu().numpy()


@pytest.mark.parametrize("position", [None, rp.Rotary()], ids=["none", "rotary"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype, position):
    q, k, v = draw(dtype)
    expected = rp.attention(*map(host, (q, k, v)), position=position, causal=True, backend="numpy")
    result = rp.attention(q, k, v, position=position, causal=True, backend="cuda")
    found = torch.from_dlpack(result)
    assert (found.dtype, found.device, tuple(found.shape)) == (q.dtype, q.device, expected.shape)
    atol = 400 * DTYPES["float64" if dtype == "float64" else "float32"]
    np.testing.assert_allclose(host(found), expected, rtol=DTYPES[dtype], atol=atol)
    # Into a tensor whose heads are behind the positions, too.
    room = torch.full((2, 40, 4, 16), torch.nan, dtype=q.dtype, device="cuda").transpose(1, 2)
    assert rp.attention(q, k, v, position=position, causal=True, backend="cuda", out=room) is room
    assert torch.equal(room, found)


def test_nothing_is_copied():
    q, k, v = draw("float32")
    torch.cuda.synchronize()
    before = q.data_ptr()
    found = torch.from_dlpack(rp.rel_shift(q, variant="wenet", backend="cuda"))
    assert q.data_ptr() == before
    assert torch.equal(found, q)
    room = torch.from_dlpack(rp.attention(q, k, v, backend="cuda"))
    assert room.data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr())


def test_what_is_queued_on_a_stream_comes_first():
    q, k, v = draw("float32")
    stream = torch.cuda.Stream()
    expected = torch.from_dlpack(rp.attention(q + 1, k, v, backend="cuda")).clone()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # until then the operand does not hold its numbers
            late = q + 1
            result = rp.attention(late, k, v, backend="cuda")
            found = torch.from_dlpack(result).clone()
        assert result.stream == stream.cuda_stream
        stream.synchronize()
        assert torch.equal(found, expected)


def test_mixtures_and_other_backends():
    q, k, v = draw("float32")
    with pytest.raises(rp.RelposTypeError, match="k Tensor on the host"):
        rp.attention(q, k.cpu(), v, backend="cuda")
    with pytest.raises(rp.RelposTypeError, match=r'q: .*use backend="cuda"'):
        rp.attention(q, k, v, backend="numba")
