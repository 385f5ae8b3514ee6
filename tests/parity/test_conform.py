"""`conform` on attention in PyTorch, JAX and ONNX: right ones pass, each known mistake is found and named."""

import importlib
import importlib.util

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.conform import conform

FRAMEWORKS = ("torch", "jax")

# Name of the function, scheme, variant, dtype, a family that must fail, words of the cause.
WRONG = [
    ("buckets_in_float32", "t5", "exact", "float32", "borders", "rounds buckets in float32"),
    ("causal_top_left", "plain", None, "float32", "decoding", "top-left"),
    ("clips", "shaw", "zero", "float32", "self", "clips distances beyond the table"),
    ("scale_missing", "plain", None, "bfloat16", "self", "scale missing"),
    ("scale_twice", "plain", None, "float32", "self", "scale twice"),
    ("other_layout", "rotary", "half", "float32", "self", "neighbouring channels"),
    ("window_off_by_one", "plain", None, "float32", "windows", "window off by one: one key"),
    ("swapped", "transformer_xl", "conformer", "float32", "self", "u and v swapped"),
    ("shift_keeps_its_first_row", "transformer_xl", "conformer", "float32", "self", "rel_shift keeps its first row"),
    ("masked_late", "plain", None, "float32", "masks", "mask after the softmax"),
    ("sums_in_half", "plain", None, "bfloat16", "long", "sums over keys in bfloat16"),
]
RIGHT = [
    ("plain", "plain", None),
    ("t5", "t5", "exact"),
    ("shaw", "shaw", "clip"),
    ("rotary", "rotary", "half"),
    ("conformer", "transformer_xl", "conformer"),
]


def lacks(name):
    """What a function is not meant to take."""
    return () if name in ("plain", "t5", "rotary") else ("grouped_heads",)


@pytest.fixture(params=FRAMEWORKS)
def subjects(request):
    """The functions of one framework."""
    pytest.importorskip(request.param)
    return importlib.import_module(f"tests.parity.conform_{request.param}")


@pytest.mark.parametrize(("name", "scheme", "variant", "dtype", "family", "words"), WRONG, ids=str)
def test_each_mistake_is_found_and_named(subjects, name, scheme, variant, dtype, family, words):
    # JAX compiles every operation for every shape: minutes for all families.
    families = family if "jax" in subjects.__name__ else None
    report = conform(
        getattr(subjects, name), scheme, variant=variant, dtype=dtype, families=families, excluded=lacks(name)
    )
    assert report.exit_code == 1
    assert not report.ok
    assert report.family(family).verdict == "wrong"
    assert words in report.family(family).cause
    text = report.text()
    assert f"{name} against {scheme}" in text
    assert words in text
    smallest = min((one.smallest for one in report.families if one.cause), key=lambda one: one.work)
    assert smallest.edge in text


# Of these no case is left out by any of the functions.
COMMON = ("self", "cross", "large_scores", "long")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "scheme", "variant"), RIGHT)
def test_what_is_right_passes(subjects, name, scheme, variant, dtype):
    families = COMMON if "jax" in subjects.__name__ else None
    report = conform(
        getattr(subjects, name), scheme, variant=variant, dtype=dtype, families=families, excluded=lacks(name)
    )
    assert report.ok, report.text()
    assert report.family("self").verdict == report.family("long").verdict == "right"


@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize(("name", "scheme", "variant"), RIGHT)
def test_what_is_right_passes_with_other_numbers(name, scheme, variant, seed):
    pytest.importorskip("torch")
    function = getattr(importlib.import_module("tests.parity.conform_torch"), name)
    for dtype in ("float32", "bfloat16"):
        report = conform(function, scheme, variant=variant, dtype=dtype, seed=seed, excluded=lacks(name))
        assert report.ok, report.text()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "scheme", "variant"), RIGHT)
def test_what_is_right_passes_with_room_to_spare(name, scheme, variant, dtype):
    """Where scores are large, one query may decide how wrong a right implementation is: luck must not."""
    pytest.importorskip("torch")
    function = getattr(importlib.import_module("tests.parity.conform_torch"), name)
    for seed in range(8):
        report = conform(function, scheme, variant=variant, dtype=dtype, families="large_scores", seed=seed)
        assert report.family("large_scores").ratio <= 0.8, report.text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "scheme", "variant"), RIGHT)
def test_gradients(subjects, name, scheme, variant, dtype):
    function, families = getattr(subjects, name), ("self", "large_scores")
    report = conform(function, scheme, variant=variant, dtype=dtype, grad=True, families=families)
    assert report.ok, report.text()
    assert {"grad_q", "grad_k", "grad_v"} <= set(report.family("self").findings[0].errors)


def test_without_grouped_heads(subjects):
    report = conform(subjects.ordinary, "plain", supports=["causal"])
    assert report.ok
    assert report.family("self").verdict == report.family("causal").verdict == "right"
    assert report.family("grouped_heads").verdict == "not run"
    assert "supports leaves out grouped_heads" in report.family("grouped_heads").reason
    assert "grouped_heads" in report.text().splitlines()[-1]
    # Otherwise that is a crash, and said to be one.
    tried = conform(subjects.ordinary, "plain", families=("self", "grouped_heads"))
    assert tried.exit_code == 1
    assert "crashes, only with several shared key heads" in tried.family("grouped_heads").cause
    assert "--except grouped_heads" in tried.family("grouped_heads").cause


def test_gradients_of_a_kernel_that_keeps_the_log_sum_exp():
    """FlashAttention's way back makes weights of it, and of scores that are computed again."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def flash(q, k, v, scale=None):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    excluded = ("grouped_heads", "value_dim")
    report = conform(flash, "plain", framework="torch", grad=True, families=("self", "large_scores"), excluded=excluded)
    assert report.ok, report.text()


def test_gradients_without_their_sums():
    torch = pytest.importorskip("torch")

    class Expanded(torch.autograd.Function):
        @staticmethod
        def forward(context, x, heads):
            context.group = heads // x.shape[1]
            return x.repeat_interleave(context.group, 1)

        @staticmethod
        def backward(context, grad):
            return grad[:, :: context.group], None

    class Items(torch.autograd.Function):
        @staticmethod
        def forward(context, x, batch):
            return x.expand(batch, *x.shape)

        @staticmethod
        def backward(context, grad):
            return grad[0], None

    def grouped(q, k, v):
        k, v = (Expanded.apply(x, q.shape[1]) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def biased(q, k, v, table):
        rows = of_torch.buckets(of_torch.distances(q, k), len(table), 128)
        bias = Items.apply(table[rows].movedim(-1, 0), len(q))
        return torch.softmax(of_torch.products(q, k) + bias, -1) @ v

    of_torch = importlib.import_module("tests.parity.conform_torch")
    report = conform(grouped, "plain", framework="torch", grad=True, families=("self", "grouped_heads"))
    told = report.family("grouped_heads").cause
    assert told == "grad_k and grad_v: that of the first query head of each group alone"
    report = conform(biased, "t5", framework="torch", grad=True, families="self")
    assert report.causes == ("grad_table: that of the first batch item alone",)


def changed(torch, forward, backward):
    """A step whose gradient is another one."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(context, x, *given):
            return forward(x, *given)

        @staticmethod
        def backward(context, grad):
            return backward(grad), None

    return Step.apply


def test_gradients_without_the_derivative_of_the_cap():
    torch = pytest.importorskip("torch")
    cap = changed(torch, lambda s, c: c * torch.tanh(s / c), lambda grad: grad)

    def attend(q, k, v, softcap=None):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return (s if softcap is None else cap(s, softcap)).softmax(-1) @ v

    report = conform(attend, "plain", framework="torch", grad=True, families=("self", "options"), lengths=33)
    assert report.causes == ("grad_k and grad_q: the derivative of softcap is missing",)


def test_gradients_of_a_head_that_are_0():
    torch = pytest.importorskip("torch")
    cut = changed(torch, lambda v, _: v.clone(), lambda grad: grad * (torch.arange(grad.shape[1])[:, None, None] > 0))

    def attend(q, k, v):
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError
        return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ cut(v, 0)

    report = conform(attend, "plain", framework="torch", grad=True, families="self", lengths=33)
    assert report.causes == ("grad_v: 0 for the first head alone",)


def test_a_gradient_that_is_wrong():
    torch = pytest.importorskip("torch")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            return 2 * grad

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, Doubled.apply(k), v)

    report = conform(attend, "plain", framework="torch", grad=True, families="self")
    assert report.exit_code == 1
    assert report.family("self").smallest.wrong == ("grad_k",)
    assert "grad_k: 2 times what it should be" in report.text()
    assert conform(attend, "plain", framework="torch", families="self").ok


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_torchs_own_attention(dtype):
    torch = pytest.importorskip("torch")

    def attend(q, k, v, mask=None, causal=False):
        if causal:
            shown = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
            mask = shown if mask is None else mask & shown
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    report = conform(attend, "plain", framework="torch", dtype=dtype)
    wrong = [one.name for one in report.families if one.verdict not in ("right", "partly", "not run")]
    # NaN times a probability of 0 is NaN there; nothing else is amiss.
    assert wrong == ["nan_excluded"], report.text()
    assert report.family("nan_excluded").verdict == "convention"
    assert report.exit_code == 1
    assert "--conventions torch" in report.text()
    if dtype == "float32":
        assert conform(attend, "plain", framework="torch", dtype=dtype, conventions="torch").exit_code == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jaxs_own_attention_has_lengths_before_heads(dtype):
    jax = pytest.importorskip("jax")

    def attend(q, k, v, mask=None):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    report = conform(attend, "plain", framework="jax", dtype=dtype, layout="blhd", families=["self", "cross", "long"])
    assert report.ok, report.text()
    assert conform(attend, "plain", framework="jax", families="self").exit_code == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_operands_that_are_stored_in_8_bits(dtype):
    torch = pytest.importorskip("torch")
    subjects = importlib.import_module("tests.parity.conform_torch")

    def attend(q, k, v, table):
        assert str(q.dtype) == f"torch.{dtype}"
        assert table.dtype == torch.bfloat16
        return subjects.t5(*(x.float() for x in (q, k, v)), table.float()).bfloat16()

    report = conform(attend, "t5", framework="torch", dtype=dtype)
    assert report.ok, report.text()

    def unscaled(q, k, v, table):
        return attend((q.float() * 2).to(q.dtype), k, v, table)

    assert conform(unscaled, "t5", framework="torch", dtype=dtype).exit_code == 1
    with pytest.raises(rp.RelposValueError, match="only stores"):
        conform(attend, "t5", framework="torch", dtype=dtype, grad=True)


def test_an_onnx_model(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper

    path = tmp_path / "attention.onnx"
    shape = ["B", "H", None, None]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("q", "k", "v", "out")]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [8**-0.5])
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["out"]),
    ]
    graph = helper.make_graph(nodes, "attention", tensors[:3], tensors[3:], initializer=[scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    report = conform(str(path), "plain", head_dim=8, excluded="grouped_heads")
    assert report.framework == "onnx"
    assert report.ok, report.text()
    assert report.family("self").verdict == report.family("long").verdict == "right"
    # Its scale is that of 8 channels alone.
    other = conform(str(path), "plain", head_dim=(8, 16), excluded="grouped_heads")
    assert other.causes == ("the scale is 0.3536, whatever is meant",)
    with pytest.raises(rp.RelposValueError, match="ONNX Runtime"):
        conform(str(path), "plain", dtype="bfloat16")
    with pytest.raises(rp.RelposValueError, match="cannot open"):
        conform(str(tmp_path / "none.onnx"), "plain")
    assert np.isfinite(report.family("self").ratio)
