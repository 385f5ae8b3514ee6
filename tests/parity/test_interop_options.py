"""Options of a call on tensors of PyTorch: the numbers and gradients of a plain formula."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
pytest.importorskip("numba")
pytestmark = pytest.mark.usefixtures("with_gradients")

from relpos_np.interop.torch import attention, trained  # noqa: E402

LENGTH = 10
SEGMENTS = torch.tensor([0, 4, 4, 7, 10])


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def eager(q, k, v, bias=0.0, *, seen=None, scale=None, factors=None, cap=None, cap_bias=False, added=0.0, sinks=None):
    """The formula in PyTorch, with all pairs: output and log-sum-exp."""
    q = q if factors is None else q * factors[..., None]
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s + bias if cap_bias else s
    s = s if cap is None else cap * (s / cap).tanh()
    s = (s if cap_bias else s + bias) + added
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return s.softmax(-1) @ v, s.logsumexp(-1)
    z = (sinks[:, None] if sinks.ndim == 1 else sinks).expand(s.shape[:-1])[..., None]
    s = torch.cat([s, z], -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


def causal(offset=0):
    return torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None] + offset


def same_segment():
    own = (torch.arange(LENGTH)[:, None] >= SEGMENTS[1:]).sum(-1)
    return own[:, None] == own


def selected_seen(index):
    one_more = torch.zeros(*index.shape[:-1], LENGTH + 1, dtype=torch.bool)
    return one_more.scatter(-1, index.where(index >= 0, LENGTH), True)[..., :-1]


INDEX = torch.tensor(np.random.default_rng(5).integers(0, LENGTH, (2, LENGTH, 4)))
INDEX[..., 3] = -1
CHUNKS = torch.arange(LENGTH)[:, None] // 4 == torch.arange(LENGTH) // 4
# The options of a call, those of the formula, and the shapes of tensors that both get.
CASES = {
    "sinks": ({"causal": True}, {"seen": causal()}, {"sinks": (4,)}),
    "sinks of queries": ({}, {}, {"sinks": (2, 4, LENGTH)}),
    "sinks of items": ({}, {}, {"sinks": (2, 1, 1)}),
    "query_scale": ({"scale": 0.3}, {"scale": 0.3}, {"query_scale": (LENGTH,)}),
    "query_scale of heads": ({}, {}, {"query_scale": (4, 1)}),
    "softcap": ({"softcap": 1.5}, {"cap": 1.5}, {}),
    "softcap and mask": ({"softcap": 1.5}, {"cap": 1.5}, {"mask": (4, LENGTH, LENGTH), "sinks": (4,)}),
    "rule": ({"rule": rp.Chunked(4), "causal": True}, {"seen": CHUNKS & causal()}, {"sinks": (4,)}),
    "selected": ({"selected": INDEX}, {"seen": selected_seen(INDEX)[:, None]}, {"query_scale": (2, 4, LENGTH)}),
    "segments": (
        {"segments": SEGMENTS, "causal": True},
        {"seen": same_segment() & causal()},
        {"sinks": (2, 4, LENGTH), "query_scale": (LENGTH,)},
    ),
    "pair of segments": ({"segments": (SEGMENTS, SEGMENTS.int())}, {"seen": same_segment()}, {"sinks": (4,)}),
    "offsets": (
        {"offset": torch.tensor([0, 2]), "causal": True},
        {"seen": torch.stack([causal(), causal(2)])[:, None]},
        {"sinks": (4,), "query_scale": (2, 1, LENGTH)},
    ),
    "everything": (
        {"softcap": 2.0, "causal": True, "window": (5, 0), "selected": INDEX.int(), "rule": rp.Dilated(2)},
        {
            "cap": 2.0,
            "seen": (
                selected_seen(INDEX)[:, None]
                & causal()
                & ~causal(-6)
                & ((torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]) % 2 == 0)
            ),
        },
        {"sinks": (4,), "query_scale": (4, LENGTH), "mask": (2, 1, 1, LENGTH)},
    ),
}
NAMES = {"query_scale": "factors", "mask": "added"}


@pytest.mark.parametrize("name", CASES)
def test_options_of_torch_as_a_formula_has_them(name):
    """Output, log-sum-exp and all gradients in float64, to 1e-12."""
    options, formula, shapes = CASES[name]
    q, k, v = random(2, 4, LENGTH, 8), random(2, 2, LENGTH, 8), random(2, 2, LENGTH, 6)
    own = {key: random(*shape) for key, shape in shapes.items()}
    out, lse = attention(q, k, v, return_lse=True, **options, **own)
    expected, log_sum = eager(q, k, v, **formula, **{NAMES.get(key, key): x for key, x in own.items()})
    # A row without any key: 0 by the library's own word, where a softmax has no answer.
    full = log_sum.isfinite()
    assert full.any()
    weights, weights_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = [
        torch.autograd.grad((x * weights)[full].sum() + (y * weights_lse)[full].sum(), (q, k, v, *own.values()))
        for x, y in ((out, lse), (expected.nan_to_num(), log_sum))
    ]
    pairs = [(out[full], expected[full]), (lse[full], log_sum[full]), *zip(*grads, strict=True)]
    for x, y in pairs:
        assert y.isfinite().all()
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    for x in grads[0]:
        assert x.abs().max() > 1e-3
    # Without gradients, where nothing is kept.
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v, **options, **own)[full], out[full], rtol=0, atol=1e-12)


def test_options_beside_trained_positions_and_a_mask():
    """T5's table, sinks, temperatures and a mask at once; the cap is for products alone."""
    q, k, v = (random(2, 4, LENGTH, 8) for _ in range(3))
    table, sinks, factors, mask = random(32, 4), random(4), random(LENGTH), random(LENGTH, LENGTH)
    options = {"softcap": 1.5, "cap_order": "content", "return_lse": True}
    found = attention(q, k, v, position=trained(rp.T5, table), sinks=sinks, query_scale=factors, mask=mask, **options)
    distances = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
    bias = table[torch.from_numpy(rp.reference.t5_bucket(distances))].permute(2, 0, 1)
    expected = eager(q, k, v, bias, cap=1.5, sinks=sinks, factors=factors, added=mask)
    ends = (q, k, v, table, sinks, factors, mask)
    grads = [torch.autograd.grad(x.square().sum() + y.sum(), ends) for x, y in (found, expected)]
    for x, y in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"segments": SEGMENTS}, {"offset": torch.tensor([0, 2])}], ids=str)
def test_gradcheck_with_dropout(options):
    """By differences, with the same probabilities dropped every time: sinks are never dropped."""
    q, k, v = (random(2, 2, LENGTH, 3) for _ in range(3))
    sinks, factors = random(2), random(LENGTH)

    def call(q, k, v, sinks, factors):
        source = torch.Generator().manual_seed(3)
        given = {"dropout": 0.3, "generator": source, "softcap": 2.0, "causal": True, "return_lse": True} | options
        return attention(q, k, v, sinks=sinks, query_scale=factors, **given)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, factors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_of_sinks(dtype):
    """Gradients come in the dtype of what they belong to."""
    q, k, v = (random(2, 4, LENGTH, 8).detach().to(dtype).requires_grad_() for _ in range(3))
    for own in (dtype, torch.float32):
        sinks = random(4).detach().to(own).requires_grad_()
        out = attention(q, k, v, sinks=sinks)
        (grad,) = torch.autograd.grad(out.float().square().sum(), sinks)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
        expected, _ = eager(*wide[:3], sinks=wide[3])
        (wide_grad,) = torch.autograd.grad(expected.square().sum(), wide[3])
        assert (out.dtype, grad.dtype) == (dtype, own)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=4 * eps, atol=8 * eps)
        torch.testing.assert_close(grad.double(), wide_grad, rtol=8 * eps, atol=64 * eps)


def test_what_is_refused():
    q, sinks, mask = random(2, 4, LENGTH, 8), random(4), random(LENGTH, LENGTH)
    for options, message in (
        ({"sinks": sinks.detach().numpy()}, "sinks: expected a torch.Tensor, found ndarray"),
        ({"sinks": sinks.int()}, "sinks: expected dtype float16"),
        ({"sinks": sinks[:3]}, "sinks: shape"),
        ({"query_scale": [1.0] * LENGTH}, "query_scale: expected a torch.Tensor, found list"),
        ({"selected": INDEX.to_sparse()}, "selected: expected a dense tensor"),
        ({"selected": INDEX.double()}, "selected: expected integers"),
        ({"segments": (SEGMENTS.to("meta"), SEGMENTS)}, "segments: expected a tensor on 'cpu' or 'cuda'"),
        ({"segments": SEGMENTS, "mask": mask}, "mask: no gradient of a float mask with segments"),
        ({"offset": torch.tensor([0, 1]), "mask": mask}, "mask: no gradient of a float mask with segments or offsets"),
        ({"softcap": 2.0, "position": rp.ALiBi(), "mask": mask}, "mask: no gradient where a cap"),
        ({"softcap": 0.0}, "softcap: expected a positive number"),
        ({"sink": sinks}, "sink: attention has no such argument; did you mean 'sinks'"),
    ):
        with pytest.raises(rp.RelposError, match=message):
            attention(q, q, q, **options)
    # Without a gradient for the mask there is nothing to refuse.
    attention(q, q, q, segments=SEGMENTS, mask=mask.detach())
    attention(q, q, q, softcap=2.0, position=rp.ALiBi(), mask=mask.detach())


@pytest.mark.parametrize("name", ["sinks", "query_scale", "selected", "segments"])
def test_options_inside_of_a_transformation_are_refused(name):
    q = random(2, 4, LENGTH, 8).detach()
    values = {"sinks": torch.zeros(3, 4), "query_scale": torch.ones(3, LENGTH), "segments": SEGMENTS.expand(3, -1)}
    value = (values | {"selected": INDEX.expand(3, 2, -1, -1)})[name]
    with pytest.raises(rp.RelposTypeError, match=rf"^{name}: .*torch\.func"):
        torch.vmap(lambda x: attention(q, q, q, **{name: x}))(value)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_and_checkpointed_functions_train_sinks():
    q, sinks = random(2, 4, LENGTH, 8), random(4)

    def model(q):
        return (attention(2 * q, q, q, sinks=sinks, softcap=3.0, segments=SEGMENTS) ** 2).sum()

    (expected,) = torch.autograd.grad(model(q), sinks)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    repeated = torch.utils.checkpoint.checkpoint(model, q, use_reentrant=False)
    for loss in (compiled(q), repeated):
        assert torch.equal(torch.autograd.grad(loss, sinks)[0], expected)
    torch.compiler.reset()
