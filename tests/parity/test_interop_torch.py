"""Tensors of PyTorch: the same numbers as its own attention, the same gradients as its autograd, and no copies."""

import subprocess
import sys

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
pytest.importorskip("numba")
pytestmark = pytest.mark.usefixtures("with_gradients")

from relpos_np.interop.torch import attention, trained  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


def operands(*, heads=4, kv_heads=None, q_len=9, k_len=9, dim=8, dtype=torch.float64, grad=True):
    shapes = ((2, heads, q_len, dim), *[(2, kv_heads or heads, k_len, dim)] * 2)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def test_the_same_as_torch_attention():
    q, k, v = operands(grad=False)
    mask = torch.rand(2, 1, 9, 9) < 0.7
    mask[..., 0] = True
    torch.testing.assert_close(attention(q, k, v, mask=mask), sdpa(q, k, v, attn_mask=mask), rtol=1e-12, atol=1e-12)
    added = torch.randn(4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(attention(q, k, v, mask=added), sdpa(q, k, v, attn_mask=added), rtol=1e-12, atol=1e-12)
    expected = sdpa(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(attention(q, k, v, causal=True, scale=0.3), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_grouped_heads(dtype):
    q, k, v = (x.to(dtype) for x in operands(kv_heads=2, q_len=5, grad=False))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.dtype is dtype
    assert lse.dtype is torch.float32
    expected = sdpa(q.double(), k.double(), v.double(), enable_gqa=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=4 * eps, atol=8 * eps)


def test_host_tensors_are_read_where_they_lie(monkeypatch):
    q, k, v = operands(dtype=torch.float32)
    table = torch.randn(32, 4, requires_grad=True)
    seen = {}

    def record(*arrays, **options):
        seen.update(zip("qkv", arrays, strict=True))
        seen["table"] = options["position"][0].table
        return original(*arrays, **options)

    original = rp.attention
    monkeypatch.setattr(rp, "attention", record)
    # As models have them: heads lie between the positions and the vectors.
    straight = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    attention(straight, k, v, position=trained(rp.T5, table))
    for name, x in (("q", straight), ("k", k), ("v", v), ("table", table)):
        assert seen[name].ctypes.data == x.data_ptr(), name
    bf16 = k.detach().bfloat16()
    from relpos_np.interop.torch import _array, _tensor

    assert _array(bf16).ctypes.data == bf16.data_ptr()
    assert _tensor(_array(bf16)).data_ptr() == bf16.data_ptr()
    assert torch.equal(_tensor(_array(bf16)), bf16)


def leaves(**shapes):
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


CASES = {
    "t5": (rp.T5, {"table": (32, 4)}, {"max_distance": 16}),
    "alibi": (rp.ALiBi, {"slopes": (4,)}, {}),
    "shaw": (rp.Shaw, {"key_table": (7, 8), "value_table": (7, 8)}, {}),
    "tisa": (rp.TISA, {"amplitudes": (3, 4), "sharpness": (3, 4), "offsets": (3, 4)}, {}),
    "kerple": (rp.KERPLE, {"a": (4,), "b": (4,)}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    cls, shapes, settings = CASES[name]
    own = leaves(**shapes)
    if name in ("kerple", "tisa"):
        own = {key: x.detach().abs().add(0.5).requires_grad_() for key, x in own.items()}
    q, k, v = operands(q_len=5, k_len=6)

    def call(q, k, v, *tensors):
        scheme = trained(cls, **dict(zip(own, tensors, strict=True)), **settings)
        return attention(q, k, v, position=(scheme, rp.ALiBi()), causal=True, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, *own.values()))


def test_gradients_of_a_float_mask():
    q, k, v = operands(q_len=5, k_len=6)
    mask = torch.randn(4, 5, 6, dtype=torch.float64)
    mask[:, 1, 3:] = -torch.inf
    ours, theirs = (mask.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    results = []
    for f, m, name in ((attention, ours, "mask"), (sdpa, theirs, "attn_mask")):
        out = f(q, k, v, **{name: m})
        results.append((out, *torch.autograd.grad(out, (q, k, v, m), grad)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # One that is broadcast collects from all that read it.
    small = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m: attention(q, k, v, mask=m), (small,))


def test_gradients_of_the_log_sum_exp_alone():
    """Values with other dimensions than keys, which get no gradient from it."""
    q, k, _ = operands()
    v = torch.randn(2, 4, 9, 3, dtype=torch.float64, requires_grad=True)
    lse = attention(q, k, v, return_lse=True)[1]
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    expected = torch.autograd.grad(torch.logsumexp(q @ k.mT * 8**-0.5, -1).sum(), (q, k))
    for x, y in zip(found, (*expected, torch.zeros_like(v)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_tensors_with_a_lazy_negation():
    q, k, v = operands(grad=False)
    lazy = torch.complex(q, -q).conj().imag
    assert lazy.is_neg()
    torch.testing.assert_close(attention(lazy, k, v), attention(q, k, v), rtol=0, atol=0)


def test_a_table_changed_before_backward_is_an_error():
    q, k, v = operands()
    table = torch.zeros(32, 4, dtype=torch.float64, requires_grad=True)
    out = attention(q, k, v, position=trained(rp.T5, table))
    with torch.no_grad():
        table.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dropout_repeats_with_the_seed_and_in_backward():
    q, k, v = operands()

    def run(seed):
        out = attention(q, k, v, dropout=0.4, generator=torch.Generator().manual_seed(seed))
        return out, torch.autograd.grad(out.sum(), v)[0]

    (a, da), (b, db), (c, _) = run(1), run(1), run(2)
    assert torch.equal(a, b)
    assert torch.equal(da, db)
    assert not torch.equal(a, c)
    # The output is linear in v: what v receives adds up to the output only if the same probabilities were dropped.
    torch.testing.assert_close((da * v).sum(), a.sum(), rtol=1e-12, atol=1e-12)


def test_key_lengths_of_any_kind():
    q, k, v = operands(grad=False)
    lengths = torch.tensor([[4], [9]])
    expected = sdpa(q, k, v, attn_mask=(torch.arange(9) < lengths)[:, None, None])
    for given in (lengths[:, 0], lengths[:, 0].numpy(), lengths[:, 0].int()):
        torch.testing.assert_close(attention(q, k, v, key_lengths=given), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attention(q, k, v, key_lengths=4)[0], expected[0], rtol=1e-12, atol=1e-12)


def test_repr_shows_shapes_and_no_numbers():
    assert repr(trained(rp.T5, torch.zeros(32, 4), max_distance=64)) == "trained(T5, table=(32, 4), max_distance=64)"


def test_errors_name_what_was_found():
    q, k, v = operands(dtype=torch.float32)
    for bad, message in (
        (q.detach().numpy(), r"q: expected a torch.Tensor, found ndarray"),
        (q.to("meta"), "q: expected a tensor on 'cpu' or 'cuda', found one on 'meta'"),
        (q.int(), "q: expected dtype float16, bfloat16, float32 or float64, found torch.int32"),
        (q.detach().to_sparse(), "q: expected a dense tensor"),
    ):
        with pytest.raises(rp.RelposTypeError, match=message):
            attention(bad, k, v)
    with pytest.raises(rp.RelposTypeError, match="scheme: expected the class of a scheme"):
        trained(rp.T5(np.zeros((32, 4))))
    with pytest.raises(rp.RelposTypeError, match="T5 cannot be called like that"):
        trained(rp.T5, tables=torch.zeros(32, 4))
    with pytest.raises(rp.RelposValueError, match="the call has 4"):
        attention(q, k, v, position=trained(rp.T5, torch.zeros(32, 3)))
    with pytest.raises(rp.RelposValueError, match="mask: shape"):
        attention(q, k, v, mask=torch.zeros(3, 9, 9, requires_grad=True))


THREADS = """
import multiprocessing, sys, warnings
import numpy as np, relpos_np as rp
x = np.random.default_rng(0).standard_normal((1, 4, 256, 64)).astype(np.float32)
expected = rp.attention(x, x, x, backend="numpy")
FIRST
from relpos_np.kernels._numba.launch import launcher as launch
found = rp.attention(x, x, x)
assert np.abs(found - expected).max() < 1e-5
with open("/proc/self/maps") as maps:
    libraries = {line.split()[-1] for line in maps if "libgomp" in line}
shared = launch._shared()
assert len(libraries) == 1 or "/torch" in shared.path, libraries
print(len(libraries), shared is not None)
y = torch.ones(512, 512)
y @ y, rp.attention(x, x, x), y @ y
warnings.simplefilter("ignore")
with multiprocessing.get_context("fork").Pool(1) as pool:  # where a pool of GNU OpenMP would hang or be killed
    again = pool.apply_async(rp.attention, (x, x, x)).get(60)
assert np.array_equal(again, found)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU OpenMP is that of Linux")
@pytest.mark.parametrize("first", ["import torch", "rp.attention(x, x, x); import torch"])
def test_one_pool_of_threads_whoever_comes_first(first):
    """Either PyTorch finds Numba's library and takes it, or kernels run on the threads of PyTorch's."""
    code = THREADS.replace("FIRST", first)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() in (["1", "False"], ["2", "True"]), run.stdout
