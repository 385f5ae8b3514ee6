"""Arrays of a device: what is refused, whose stream is used, and what is said when the device fails."""

import gc
import importlib
import sys
import weakref
from types import SimpleNamespace

import ml_dtypes
import numba.cuda
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.launch import device
from tests.cuda.doubles import FAILURE, KERNEL, Packed, There, draw, there

# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numba", "numpy", "terms", None])
def test_other_backends_name_the_one_that_takes_them(name, rng):
    q, k, v = there(*draw(rng))
    with pytest.raises(rp.RelposTypeError, match=r'q: .*found There on a CUDA device.*use backend="cuda"'):
        rp.attention(q, k, v, backend=name)
    with pytest.raises(rp.RelposTypeError, match=r'q: .*found There on a CUDA device.*use backend="cuda"'):
        rp.attention_vjp(q, k, v, grad_out=v, backend=name)


def test_where_device_arrays_are_not_taken_at_all(rng):
    q, k, v = draw(rng)
    for call in (
        lambda: rp.logits(*there(q, k), backend="cuda"),
        lambda: rp.T5(There(np.zeros((8, 2)))),
        lambda: rp.attention(q, k, v, mask=There(np.ones((5, 7), bool)), backend="cuda"),
        lambda: rp.attention(q, k, v, mask=numba.cuda.to_device(np.ones((5, 7), bool)), backend="cuda"),
    ):
        with pytest.raises(rp.RelposTypeError, match=r"expected a NumPy array, found .* on a CUDA device"):
            call()


@pytest.mark.parametrize("far", ["q", "k", "v", "qk"])
def test_mixtures_say_which_is_where(far, rng):
    named = {n: There(x) if n in far else x for n, x in zip("qkv", draw(rng), strict=True)}
    words = ", ".join(f"{n} {'There on a CUDA device' if n in far else 'ndarray on the host'}" for n in "qkv")
    with pytest.raises(
        rp.RelposTypeError, match=f"q, k, v: expected all of them on a CUDA device or none, found {words}"
    ):
        rp.attention(*named.values(), backend="cuda")


def test_what_kernels_cannot_read(rng):
    q, k, v = draw(rng)
    odd = np.zeros(q.nbytes + 2, np.uint8)[2:].view(np.float32)[: q.size].reshape(q.shape)
    cases = {
        r"q: expected strides .* not negative, found \(60, 30, 6, -1\)": q[..., ::-1],
        r"q: expected the byte order of this machine, found dtype >f4": q.astype(">f4"),
        r"q, k, v: expected one dtype, found q float64, k float32, v float32": q.astype(np.float64),
        r"q: expected dtype float16, bfloat16, float32 or float64, found int32": q.astype(np.int32),
        r"q: the address of the array is no multiple of 4": odd,
        r"k: head_dim 6 differs from q's 5": q[..., :5],
    }
    for message, x in cases.items():
        others = (k, v) if x.dtype != np.int32 else (k.astype(np.int32), v.astype(np.int32))
        with pytest.raises(rp.RelposError, match=message):
            rp.attention(*there(x, *others), backend="cuda")


def test_row_45_another_device_is_refused_before_it_is_read(rng):
    q, k, v = draw(rng)

    class Other(Packed):
        number = 3

        def __dlpack__(self, **options):
            raise AssertionError("exported")

        @property
        def __cuda_array_interface__(self):
            raise AttributeError

    with pytest.raises(
        rp.RelposValueError, match=r"k: wrong device: .* device 3, and the current one is 0.*select_device\(3\)"
    ):
        rp.attention(Packed(q), Other(k), Packed(v), backend="cuda")


def test_bfloat16_needs_its_package(rng, monkeypatch):
    q, k, v = (np.asarray(x).view("V2") for x in draw(rng, "bfloat16"))
    found = rp.attention(*there(q, k, v), backend="cuda")
    assert found.dtype == ml_dtypes.bfloat16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(rp.RelposImportError, match=r"q: bfloat16 needs the package ml_dtypes.*pip install ml_dtypes"):
        rp.attention(*there(q, k, v), backend="cuda")


# Streams ---------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """The streams that launches were given."""
    found = []
    configured = KERNEL.__getitem__

    def recorded(self, configuration):
        found.append(configuration[2])
        return configured(self, configuration)

    monkeypatch.setattr(KERNEL, "__getitem__", recorded)
    return found


class Tensor(There):
    """Something like a tensor of torch, which names no stream itself."""

    device = "cuda:0"


@pytest.mark.parametrize(
    ("named", "stream"), [((None, None, None), 1), ((11, 11, 11), 11), ((None, 12, 13), 12), ((0, 12, None), 1)]
)
def test_everything_runs_on_the_stream_of_the_first_operand_that_names_one(named, stream, launches, rng):
    operands = [There(x) if n is None else There(x, stream=n) for x, n in zip(draw(rng, "float16"), named, strict=True)]
    position = rp.Rotary()
    out, lse = rp.attention(*operands, position=position, backend="cuda", return_lse=True)
    assert len(launches) > 2
    assert set(launches) == {stream}
    assert out.stream == lse.stream == stream
    assert device.current_stream() == 1


def test_torch_says_which_stream_it_is_on(launches, monkeypatch, rng):
    streams = {"cuda:0": SimpleNamespace(cuda_stream=21)}
    torch = SimpleNamespace(Tensor=Tensor, cuda=SimpleNamespace(current_stream=streams.__getitem__))
    monkeypatch.setitem(sys.modules, "torch", torch)
    x = Tensor(rng.standard_normal((3, 4)))
    assert rp.rel_shift(x, backend="cuda").stream == 21
    streams["cuda:0"] = SimpleNamespace(cuda_stream=0)
    assert rp.rel_shift(x, backend="cuda").stream == 1
    assert launches == [21, 1]


def test_arrays_of_the_host_use_the_default_stream(launches, rng):
    rp.rel_shift(rng.standard_normal((3, 4)), backend="cuda")
    assert launches == [0]


def test_a_given_array_waits_on_its_own_stream(monkeypatch, rng):
    waits = []
    monkeypatch.setattr(device, "follow", lambda later, earlier: waits.append((later, earlier)))
    x, out = rng.standard_normal((2, 3, 4))
    rp.rel_shift(There(x, stream=31), backend="cuda", out=There(out, stream=32))
    assert waits == [(32, 31)]
    result = rp.rel_shift(There(x, stream=31), backend="cuda")
    with device.on(40):
        Operand.of(result, "x")
    assert waits[1:] == [(40, 31)]


# Errors of the device --------------------------------------------------------------------------------


def failing(action, count, code):
    """The same action, which fails so many times first."""
    left = [count]

    def called(*args, **options):
        if left[0]:
            left[0] -= 1
            raise FAILURE(f"[2] Call to something results in CUDA_ERROR_{code}")
        return action(*args, **options)

    return called


@pytest.mark.parametrize("where", ["device_array", "to_device"])
def test_row_45_no_memory(where, monkeypatch, rng):
    x = rng.standard_normal((3, 4))
    given = x if where == "to_device" else There(x)
    expected = rp.rel_shift(x, backend="numpy")
    released = []
    monkeypatch.setattr(device, "release", lambda: released.append(1))
    whole = getattr(numba.cuda, where)
    # What nobody uses any more is given back, and the second time there is room.
    monkeypatch.setattr(numba.cuda, where, failing(whole, 1, "OUT_OF_MEMORY"))
    np.testing.assert_array_equal(np.asarray(rp.rel_shift(given, backend="cuda")), expected)
    assert len(released) == 1
    monkeypatch.setattr(numba.cuda, where, failing(whole, 1000, "OUT_OF_MEMORY"))
    with pytest.raises(rp.RelposMemoryError, match=r"96 bytes.*CUDA_ERROR_OUT_OF_MEMORY") as caught:
        rp.rel_shift(given, backend="cuda")
    assert isinstance(caught.value, MemoryError)
    monkeypatch.setattr(numba.cuda, where, whole)
    np.testing.assert_array_equal(np.asarray(rp.rel_shift(given, backend="cuda")), expected)


def test_row_45_after_an_error_nothing_is_held(monkeypatch, rng):
    made = []
    device_array, call = numba.cuda.device_array, KERNEL.__call__

    def recorded(*args, **options):
        x = device_array(*args, **options)
        made.append(weakref.ref(x))
        return x

    monkeypatch.setattr(numba.cuda, "device_array", recorded)
    monkeypatch.setattr(KERNEL, "__call__", failing(call, 2, "OUT_OF_MEMORY"))
    operands = there(*draw(rng))
    with pytest.raises(rp.RelposMemoryError, match=r"a kernel of .* blocks") as caught:
        rp.attention(*operands, position=rp.Rotary(), backend="cuda")
    gc.collect()
    # While the error is still held.
    assert made
    assert not [x for x in made if x() is not None]
    del caught


def test_row_45_a_kernel_that_fails(monkeypatch, rng):
    x = There(rng.standard_normal((3, 4)))
    whole = KERNEL.__call__
    monkeypatch.setattr(KERNEL, "__call__", failing(whole, 1, "ILLEGAL_ADDRESS"))
    with pytest.raises(rp.RelposError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*its context is lost.*new process") as caught:
        rp.rel_shift(x, backend="cuda")
    assert isinstance(caught.value.__cause__, FAILURE)
    monkeypatch.setattr(KERNEL, "__call__", failing(whole, 1, "INVALID_VALUE"))
    with pytest.raises(rp.RelposError, match=r"reports an error.*CUDA_ERROR_INVALID_VALUE") as caught:
        rp.rel_shift(x, backend="cuda")
    assert "lost" not in str(caught.value)


CAUSES = {
    "package": "backend 'cuda' cannot be imported .No module named 'numba.cuda'.",
    "driver": r"backend 'cuda' finds no usable GPU .CUDA driver library cannot be found\. Ensure that one is there",
    "compiler": "backend 'cuda' finds no usable GPU .the compiler library NVVM is missing",
}


@pytest.mark.parametrize("missing", CAUSES)
@pytest.mark.parametrize("far", [True, False])
def test_row_45_what_is_missing_is_named(far, missing, monkeypatch, rng):
    said = "\nCUDA driver library cannot be found.\nEnsure that one is there.\n" if missing == "driver" else None
    monkeypatch.setattr(numba.cuda, "is_available", lambda: False)
    monkeypatch.setattr(numba.cuda, "cuda_error", lambda: said, raising=False)
    if missing == "package":
        find = importlib.import_module

        def absent(name, *rest):
            if name == "numba.cuda":
                raise ModuleNotFoundError("No module named 'numba.cuda'")
            return find(name, *rest)

        monkeypatch.setattr(importlib, "import_module", absent)
    for name in ("compiler", "module"):
        monkeypatch.setattr(device, name, getattr(device, name).__wrapped__)
    operands = there(*draw(rng)) if far else draw(rng)
    with pytest.raises(rp.RelposImportError, match=CAUSES[missing]) as caught:
        rp.attention(*operands, backend="cuda")
    assert device.REMEDY in str(caught.value)
