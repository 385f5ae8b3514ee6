"""What is asked of cuda.core and of Numba on a device, with stand-ins for both, which prove nothing of the answers."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.arrays.result import DeviceArray
from relpos_np.kernels._cuda.launch import device
from tests.cuda.doubles import FAKE, There


class View:
    """What cuda.core says of an array."""

    def __init__(self, x, **entries):
        self.shape, self.dtype, self.ptr = x.shape, x.dtype, x.ctypes.data
        self.strides = tuple(n // x.itemsize for n in x.strides)
        self.device_id, self.readonly, self.x = 0, False, x
        self.__dict__.update(entries)


class Event:
    def __init__(self, seen):
        self.seen = seen

    def record(self, stream):
        self.seen.append(("record", stream))

    def wait(self, stream):
        self.seen.append(("wait", stream))


@pytest.fixture
def on_a_device(monkeypatch):
    """The package believes that it is on a device; arrays are the host's."""
    seen = SimpleNamespace(streams=[], described=[], events=[], synchronized=[])

    def from_any_interface(x, stream_ptr):
        seen.streams.append(stream_ptr)
        found = x.answer
        if isinstance(found, Exception):
            raise found
        return found

    def from_cuda_array_interface(described, owner, sync):
        assert sync is False
        seen.described.append(described)
        flat = FAKE(owner[0].x.reshape(-1))
        flat.owner = owner
        flat.__dict__["__cuda_array_interface__"] = described
        return flat

    def external_stream(pointer):
        return SimpleNamespace(pointer=pointer, synchronize=lambda: seen.synchronized.append(pointer))

    utils = ModuleType("cuda.core.utils")
    utils.StridedMemoryView = SimpleNamespace(from_any_interface=from_any_interface)
    numba_cuda = importlib.import_module("numba.cuda")
    cuda = SimpleNamespace(
        current_context=lambda: None,
        get_current_device=lambda: SimpleNamespace(id=0),
        from_cuda_array_interface=from_cuda_array_interface,
        external_stream=external_stream,
        event=lambda timing: Event(seen.events),
        device_array=numba_cuda.device_array,
    )
    for name in ("cuda", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.core.utils", utils)
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(device, "module", lambda: cuda)
    return seen


class Far(There):
    """An array with the answer that cuda.core gives for it."""

    def __init__(self, x, answer=None, **entries):
        super().__init__(x, **entries)
        self.answer = View(x) if answer is None else answer


def test_an_array_is_viewed_in_the_order_of_the_stream(on_a_device, rng):
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    far = Far(x, stream=7)
    for pointer in (9, 7):
        with device.on(pointer):
            found = Operand.of(far, "q")
    # What is on the same stream need not be waited for.
    assert on_a_device.streams == [9, -1]
    assert (found.shape, found.strides, found.dtype) == ((2, 3, 4), (12, 4, 1), np.float32)
    assert found.flat.owner == (far.answer, far)
    expected = {"shape": (24,), "typestr": "<f4", "data": (x.ctypes.data, False), "strides": None, "stream": None}
    assert on_a_device.described[-1] == expected | {"version": 3}


def test_layouts_that_cuda_core_leaves_open(on_a_device):
    x = np.zeros((2, 3), ml_dtypes.bfloat16)
    for answer in (View(x), View(x, strides=None), View(x, dtype=np.dtype("V2"))):
        found = Operand.of(Far(x, answer), "q")
        assert (found.strides, found.dtype) == ((3, 1), ml_dtypes.bfloat16)
        assert on_a_device.described[-1]["typestr"] == "<u2"
    empty = np.zeros((2, 0), np.float32)
    assert Operand.of(Far(empty, View(empty, ptr=0)), "q").shape == (2, 0)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (BufferError("only version 3 is supported"), rp.RelposTypeError, "q: Far cannot be read .only version 3"),
        (RuntimeError("aoti failed"), rp.RelposTypeError, "q: Far cannot be read .aoti failed"),
        (View(np.zeros(3), device_id=2), rp.RelposValueError, "q: wrong device: .* device 2, and the current one is 0"),
        (View(np.zeros(3), strides=(-1,)), rp.RelposValueError, "q: expected strides .* not negative"),
        (View(np.zeros(3), ptr=4), rp.RelposValueError, "q: the address of the array is no multiple of 8"),
    ],
)
def test_what_cannot_be_read(answer, kind, message, on_a_device):
    with pytest.raises(kind, match=message):
        Operand.of(Far(np.zeros(3), answer), "q")


def test_what_torch_leaves_for_later(on_a_device):
    far = Far(np.zeros(3))
    far.is_neg = lambda: True
    with pytest.raises(rp.RelposTypeError, match="q: the memory of the Far holds other numbers"):
        Operand.of(far, "q")


def test_dtypes_that_numpy_lacks(on_a_device, monkeypatch):
    class Lacking(View):
        @property
        def dtype(self):
            raise NotImplementedError("bfloat16 requires ml_dtypes")

        @dtype.setter
        def dtype(self, value):
            pass

    far = Far(np.zeros(3, ml_dtypes.bfloat16), Lacking(np.zeros(3, ml_dtypes.bfloat16)))
    assert Operand.of(far, "q").dtype == ml_dtypes.bfloat16
    far.dtype = "torch.float8_e5m2"
    with pytest.raises(rp.RelposTypeError, match=r"q: dtype torch\.float8_e5m2 cannot be read"):
        Operand.of(far, "q")
    far.dtype = "torch.bfloat16"
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(rp.RelposImportError, match="q: bfloat16 needs the package ml_dtypes"):
        Operand.of(far, "q")


def test_without_cuda_core(on_a_device, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    with pytest.raises(rp.RelposImportError, match=r"q: device arrays need the package cuda-core.*relpos-np\[cuda\]"):
        Operand.of(Far(np.zeros(3)), "q")


def test_streams_wait_for_each_other(on_a_device):
    device.follow(5, 5)
    assert on_a_device.events == []
    device.follow(5, 6)
    assert [(what, stream.pointer) for what, stream in on_a_device.events] == [("record", 6), ("wait", 5)]


def test_a_copy_to_the_host_waits_for_its_stream(on_a_device):
    x = np.arange(6.0)
    flat = FAKE(x)
    there = DeviceArray(Operand(flat, (2, 3), (3, 1), np.float64), 8)
    np.testing.assert_array_equal(there.copy_to_host(), x.reshape(2, 3))
    assert on_a_device.synchronized == [8]


@pytest.mark.parametrize(("asked", "waits"), [(None, 1), (1, 1), (8, None), (-1, None), (4, 4)])
def test_consumers_wait_for_the_stream_of_a_result(asked, waits, on_a_device, monkeypatch):
    made = []

    def from_handle(pointer, size, owner):
        made.append((pointer, size, owner))
        return "buffer"

    def from_buffer(buffer, **options):
        made.append((buffer, options))
        return np.zeros((2, 3), np.float32)

    monkeypatch.setattr(sys.modules["cuda.core"], "Buffer", SimpleNamespace(from_handle=from_handle), raising=False)
    monkeypatch.setattr(sys.modules["cuda.core.utils"].StridedMemoryView, "from_buffer", from_buffer, raising=False)
    flat = FAKE(np.zeros(6, np.float32))
    flat.__dict__["__cuda_array_interface__"] = {"data": (4096, False)}
    there = DeviceArray(Operand(flat, (2, 3), (3, 1), np.float32), 8)
    assert there.__dlpack_device__() == (2, 0)
    assert "dltensor" in repr(there.__dlpack__(stream=asked))
    assert made[0] == (4096, 24, flat)
    options = {"shape": (2, 3), "strides": (3, 1), "dtype": np.dtype(np.float32), "is_readonly": False}
    assert made[1] == ("buffer", options)
    found = [(what, stream.pointer) for what, stream in on_a_device.events]
    assert found == ([] if waits is None else [("record", 8), ("wait", waits)])
