"""What PyTorch was told about precision, and its autocast: attention follows where nobody chose for this library."""

import threading
from contextlib import nullcontext

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from relpos_np.interop.torch import attention, trained  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def settings(calls):
    """Nothing was chosen before; PyTorch's settings are put back; gradients are on."""
    before = torch.get_float32_matmul_precision()
    with torch.enable_grad():
        yield
    torch.set_float32_matmul_precision(before)
    torch.compiler.reset()


def told(calls):
    """The dtype and the precision of each call, in their order: forward passes, then backward passes with "grad"."""
    kinds = {"attention": (), "attention_vjp": ("grad",)}
    return [(str(one.operands[0].dtype), one.precision, *kinds[one.function]) for one in calls]


def operands(dtype=torch.float32):
    return [torch.randn(1, 2, 40, 16).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_float32_follows_the_setting_of_torch(calls, word):
    torch.set_float32_matmul_precision(word)
    q, k, v = operands()
    out, lse = attention(q, k, v, return_lse=True)
    torch.set_float32_matmul_precision("highest")
    # The backward pass is that of the call, also on a thread that knows nothing of it.
    thread = threading.Thread(target=(out.sum() + lse.sum()).backward)
    thread.start()
    thread.join()
    assert told(calls) == [("float32", word), ("float32", word, "grad")]
    again = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = attention(*again, precision=word)
    assert torch.equal(out, expected)
    expected, lse = attention(*again, precision=word, return_lse=True)
    (expected.sum() + lse.sum()).backward()
    for x, y in zip((q, k, v), again, strict=True):
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_do_not(calls, dtype):
    q, k, v = operands(dtype)
    expected = attention(q, k, v)
    for word in ("high", "medium"):
        torch.set_float32_matmul_precision(word)
        out = attention(q, k, v)
        assert torch.equal(out, expected)
    # What a scheme is made of does not count.
    attention(q, k, v, position=trained(rp.T5, torch.zeros(32, 2)))
    assert {chosen for _, chosen in told(calls)} == {None}


@pytest.mark.parametrize("chosen", [None, "high"])
def test_the_backward_pass_keeps_what_the_call_has_found(calls, chosen):
    """Also that nobody had chosen, so that bfloat16 is multiplied as such."""
    q, k, v = operands(torch.bfloat16)
    with nullcontext() if chosen is None else rp.use_precision(chosen):
        out = attention(q, k, v)
    with rp.use_precision("highest"):
        out.sum().backward()
    assert told(calls) == [("bfloat16", chosen), ("bfloat16", chosen, "grad")]


def test_what_was_chosen_here_counts_more(calls, monkeypatch):
    torch.set_float32_matmul_precision("medium")
    q, k, v = operands()
    monkeypatch.setenv("RELPOS_PRECISION", "high")
    attention(q, k, v)
    try:
        rp.set_precision("highest")
        attention(q, k, v)
        with rp.use_precision("high"):
            attention(q, k, v)
            attention(q, k, v, precision="highest")
    finally:
        rp.set_precision(None)
    monkeypatch.delenv("RELPOS_PRECISION")
    attention(q, k, v)
    assert [chosen for _, chosen in told(calls)] == ["high", "highest", "high", "highest", "medium"]
    with pytest.raises(
        rp.RelposValueError, match="precision: expected one of 'highest', 'high', 'medium'; found 'tf32'"
    ):
        attention(q, k, v, precision="tf32")


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        ("bf16", "ieee", "medium"),
        ("tf32", "ieee", "high"),
        ("ieee", "tf32", "highest"),
        ("none", "tf32", None),  # what was told about GPUs says nothing about tensors on the host
    ],
)
def test_settings_by_backend_have_no_common_name(calls, host, device, expected):
    own, other = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = own.fp32_precision, other.fp32_precision
    try:
        own.fp32_precision, other.fp32_precision = host, device
        with pytest.raises(RuntimeError, match="mix"):
            torch.get_float32_matmul_precision()
        attention(*operands())
    finally:
        own.fp32_precision, other.fp32_precision = before
    assert told(calls) == [("float32", expected)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given", [torch.float32, *HALVES], ids=str)
def test_autocast_as_torch_has_it(calls, dtype, given):
    """Rounded once, as PyTorch's own attention rounds; gradients come in the dtypes of what was given."""
    torch.set_float32_matmul_precision("medium")  # which is about float32 alone
    inputs = operands(given)
    grad = torch.randn(1, 2, 40, 16)
    results = []
    for f in (attention, sdpa):
        with torch.autocast("cpu", dtype=dtype):
            out = f(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
    wide = [x.detach().to(dtype).double().requires_grad_() for x in inputs]
    out = sdpa(*wide)
    exact = (out, *torch.autograd.grad(out, wide, grad.to(dtype).double()))
    eps = torch.finfo(dtype).eps
    for ours, theirs, true in zip(*results, exact, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=4 * eps * true.abs().max().item())
    assert told(calls) == [(str(dtype).removeprefix("torch."), None), (str(dtype).removeprefix("torch."), None, "grad")]


def test_autocast_leaves_float64_and_other_devices_alone(calls):
    q, k, v = operands(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype is sdpa(q, k, v).dtype is torch.float64
        with pytest.raises(rp.RelposTypeError, match="found q float64, k bfloat16, v float64"):
            attention(q, k.float(), v)
        with torch.autocast("cpu", enabled=False):
            assert attention(q.float(), k.float(), v.float()).dtype is torch.float32
    torch.set_autocast_enabled("cuda", True)
    try:
        assert attention(q.float(), k.float(), v.float()).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert {dtype for dtype, _ in told(calls)} == {"float64", "float32"}


def test_autocast_of_mixed_dtypes_and_of_what_is_beside_them(calls):
    """q, k and v alone are cast, to one dtype; a precision is then about the products of that."""
    q, k, v = operands()
    own = [torch.randn(32, 2), torch.randn(40, 40), torch.randn(2), torch.rand(40)]
    table, mask, sinks, factors = (x.requires_grad_() for x in own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(
            q.half(),
            k,
            v.bfloat16(),
            position=trained(rp.T5, table),
            mask=mask,
            sinks=sinks,
            query_scale=factors,
            return_lse=True,
            precision="highest",
        )
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v, table, mask, sinks, factors))
    assert {x.dtype for x in grads} == {torch.float32}
    assert all(x.abs().max() > 1e-3 for x in grads)
    assert told(calls) == [("bfloat16", "highest"), ("bfloat16", "highest", "grad")]


def in_autocast(q):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attention(2 * q, q, q).float()


def in_a_block(q):
    with rp.use_precision("medium"):
        return attention(2 * q, q, q) + 1


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
@pytest.mark.parametrize(
    ("function", "expected"), [(in_autocast, ("bfloat16", None)), (in_a_block, ("float32", "medium"))]
)
def test_compiled_functions_follow_as_others(calls, function, expected):
    q, *_ = operands()
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        compiled(q).sum().backward()
    assert told(calls) == [expected, (*expected, "grad")] * 2


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_follow_what_is_around_their_call(calls):
    q, *_ = operands()
    compiled = torch.compile(lambda q: attention(2 * q, q, q) + 1, backend="aot_eager")
    compiled(q)
    with torch.autocast("cpu", dtype=torch.float16):
        compiled(q)
    with rp.use_precision("medium"):
        compiled(q)
    torch.set_float32_matmul_precision("high")
    compiled(q)
    assert told(calls) == [("float32", "highest"), ("float16", None), ("float32", "medium"), ("float32", "high")]


def test_checkpoints_remember_autocast(calls):
    q, *_ = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(lambda x: attention(2 * x, x, x) ** 2, q, use_reentrant=False)
    out.float().sum().backward()
    assert [dtype for dtype, *_ in told(calls)] == ["bfloat16"] * 3


# Models whose attention goes through transformers' interface, and those that are patched.
REGISTERED, PATCHED = ("Llama", "Bert"), ("T5Encoder", "MPNet", "Bloom")


def model_of(name):
    """A model of one layer, and a block in which its attention is done here."""
    from relpos_np.interop.transformers import patched, register
    from tests.parity.small import small

    layers = {"T5Encoder": "num_layers", "Bloom": "n_layer"}.get(name, "num_hidden_layers")
    model = small(name, **{layers: 1})
    return model, lambda: patched(model) if name in PATCHED else nullcontext(register(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*REGISTERED, *PATCHED])
def test_models_follow_blocks_settings_and_autocast(calls, name):
    model, here = model_of(name)

    def states():
        with torch.no_grad():
            return model(torch.arange(1, 41)[None]).last_hidden_state

    exact = states()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = states()
    with here():
        states()
        with rp.use_precision("medium"):
            states()
        torch.set_float32_matmul_precision("high")
        states()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = states()
    assert told(calls) == [("float32", "highest"), ("float32", "medium"), ("float32", "high"), ("bfloat16", None)]
    # About as far off as the model's own attention, in bfloat16 too.
    assert 0 < (out - exact).abs().max() <= 2 * (eager - exact).abs().max()
    with here(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.train()
        model(torch.arange(1, 41)[None]).last_hidden_state.square().sum().backward()
    assert told(calls)[-1][0] == "bfloat16"
    assert told(calls)[-1][-1] == "grad"
    assert all(x.grad.dtype is torch.float32 for x in model.parameters() if x.grad is not None)


@pytest.mark.parametrize("name", ["Llama", "T5Encoder"])
def test_a_model_that_hands_its_arguments_on_takes_a_precision(calls, name):
    model, here = model_of(name)
    with here(), torch.no_grad():
        for one in ("medium", None):
            model(torch.arange(1, 41)[None], precision=one)
        with pytest.raises(rp.RelposValueError, match="precision: expected one of"):
            model(torch.arange(1, 41)[None], precision="low")
    assert [chosen for _, chosen in told(calls)] == ["medium", "highest"]
