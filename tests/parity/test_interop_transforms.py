"""Tracers, compilers and transformations of PyTorch around attention: they work, or are refused in plain words."""

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)

from relpos_np.interop.torch import attention, trained  # noqa: E402

SIZE = (2, 2, 6, 8)


class Layer(torch.nn.Module):
    """Causal attention with something of PyTorch's around it."""

    def forward(self, q):
        return attention(2 * q, q, q, causal=True) + 1


def llama():
    """A model that runs here, and its inputs."""
    from relpos_np.interop.transformers import register
    from tests.parity.small import small

    model = small("Llama", use_cache=False)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    register(model)
    return model, ids, expected


def layer():
    q = torch.randn(SIZE)
    with torch.no_grad():
        return Layer(), q, Layer()(q)


def forward_mode(model, q):
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))


REFUSED = {
    "trace": (torch.jit.trace, r"torch\.jit\.trace would record"),
    "export": (lambda model, q: torch.export.export(model, (q,), strict=False), r"torch\.export would record"),
    "make_fx": (lambda model, q: torch.fx.experimental.proxy_tensor.make_fx(model)(q), r"torch\.fx and"),
    "symbolic": (lambda model, _: torch.fx.symbolic_trace(model), r"expected a torch\.Tensor, found Proxy"),
    "vmap": (lambda model, q: torch.vmap(model)(q), r"inside of torch\.func \(vmap"),
    "grad": (lambda model, q: torch.func.grad(lambda x: model(x).sum())(q), r"inside of torch\.func"),
    "jvp": (lambda model, q: torch.func.jvp(model, (q,), (q,)), r"inside of torch\.func"),
    "forward mode": (forward_mode, "there is no forward mode"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_transformations_of_a_call_are_refused(how):
    transform, message = REFUSED[how]
    module, q, _ = layer()
    with pytest.raises(rp.RelposTypeError, match=f"^q: .*{message}"):
        transform(module, q)


def test_each_operand_is_looked_at():
    q, table = torch.randn(SIZE), torch.randn(32, 2)
    with pytest.raises(rp.RelposTypeError, match=r"^mask: .*torch\.func"):
        torch.vmap(lambda mask: attention(q, q, q, mask=mask))(torch.zeros(3, 6, 6))
    with pytest.raises(rp.RelposTypeError, match=r"^position: .*torch\.func"):
        torch.func.grad(lambda table: attention(q, q, q, position=trained(rp.T5, table)).sum())(table)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(rp.RelposTypeError, match=r"^q: .*FakeTensor"):
        attention(*[mode.from_tensor(q)] * 3)


@pytest.mark.parametrize("make", [layer, llama])
def test_compile_breaks_the_graph_at_the_call(make):
    module, x, expected = make()
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        found = compiled(x)
    found = getattr(found, "last_hidden_state", found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.compiler.reset()
    with pytest.raises(Exception, match="relpos_np computes attention in kernels of its own"):
        torch.compile(module, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda model, x: torch.jit.trace(model, x, strict=False), "torch.jit.trace would record"),
        (lambda model, x: torch.export.export(model, (x,), strict=False), "torch.export would record"),
        (lambda model, x: torch.vmap(lambda y: model(y[None]).last_hidden_state)(x), "inside of torch.func"),
    ],
    ids=["trace", "export", "vmap"],
)
def test_transformations_of_a_model_are_refused(transform, message):
    model, x, expected = llama()
    with torch.no_grad(), pytest.raises(rp.RelposTypeError, match=message):
        transform(model, x)
    # Nothing of it is left over.
    with torch.no_grad():
        torch.testing.assert_close(model(x).last_hidden_state, expected, rtol=0, atol=1e-5)
