"""The checker notices: each kind of illegal access, in pointers and in kernels that are wrong on purpose."""

import math

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, TARGET
from tests.interpreted.machine import KINDS_OF_ORDER, MODULES, interpreted
from tests.interpreted.memory import FLOAT32, Fault, Memory, Place, Region, bounds, marks
from tests.interpreted.vectors import Vectors


def region(name, x, **options):
    low, high = bounds(x)
    return Region(name, low, high - low, legal=marks(low, high, [x]), **options)


@pytest.fixture
def memory():
    return Memory("a kernel")


def test_bounds_of_an_array(memory):
    x = np.arange(12, dtype=np.float32)
    memory.add(region("x", x[2:10]))
    pointer = memory.pointer(x[2:].ctypes.data, FLOAT32)
    assert memory.get(pointer, 7) == 9.0
    np.testing.assert_array_equal(memory.row(pointer.moved(3), 1, 4), x[6:10])
    for offset in (-1, 8):
        with pytest.raises(Fault, match=r"a kernel: an access to 4 bytes out of bounds .* of x \(32 bytes\)"):
            memory.get(pointer, offset)
    with pytest.raises(Fault, match="out of bounds"):
        memory.grid(pointer, 0, 3, 3, 3)
    assert memory.row(pointer, 100, 0).size == 0
    with pytest.raises(Fault, match="an address in no array"):
        memory.pointer(x.ctypes.data, FLOAT32)
    with pytest.raises(Fault, match="out of bounds"):
        memory.get(memory.pointer(0, FLOAT32), 0)


def test_a_pointer_belongs_to_one_array(memory):
    x = np.arange(12, dtype=np.float32)
    memory.add(region("low", x[:6]))
    memory.add(region("high", x[6:]))
    with pytest.raises(Fault, match="low"):
        memory.get(memory.pointer(x.ctypes.data, FLOAT32), 6)


def test_inputs_are_not_written_to(memory):
    x = np.zeros(4, np.float32)
    memory.add(region("x", x))
    pointer = memory.pointer(x.ctypes.data, FLOAT32)
    for write in (lambda: memory.put(pointer, 0, 1.0), lambda: memory.row(pointer, 0, 2, write=True)):
        with pytest.raises(Fault, match="a write to an input"):
            write()


def test_what_lies_between_the_rows_of_a_view(memory):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    memory.add(region("x", x[:, :3]))
    pointer = memory.pointer(x.ctypes.data, FLOAT32)
    np.testing.assert_array_equal(memory.grid(pointer, 0, 3, 4, 3), x[:, :3])
    np.testing.assert_array_equal(memory.grid(pointer, 8, 3, -4, 3), x[::-1, :3])
    for access in (lambda: memory.row(pointer, 0, 4), lambda: memory.get(pointer, 3)):
        with pytest.raises(Fault, match="excluded"):
            access()


def test_results_belong_to_one_piece_of_work(memory):
    x = np.zeros(4, np.float32)
    memory.add(region("out", x, writable=True, shared=True))
    pointer = memory.pointer(x.ctypes.data, FLOAT32)
    memory.piece = 1
    memory.put(pointer, 0, 1e39)
    assert x[0] == np.inf
    memory.row(pointer, 0, 2, write=True)[...] = 2
    memory.piece = 2
    for access in (lambda: memory.get(pointer, 1), lambda: memory.put(pointer, 0, 1.0)):
        with pytest.raises(Fault, match="piece 2 touches what piece 1 wrote"):
            access()
    memory.put(pointer, 2, 1.0)


def test_buffers_of_a_workspace(memory):
    x = np.zeros(8, np.float32)
    memory.add(region("work", x, writable=True))
    base = memory.pointer(x.ctypes.data, FLOAT32)
    first, second, end = Place.all_of((0, 3, 8))
    assert (first.first, first.last, second.first, second.last) == (0, 3, 3, 8)
    assert end == 8
    memory.put(base, second + 4, 1.0)
    memory.row(base, first, 3)
    for access in (
        lambda: memory.get(base, second + -1),
        lambda: memory.get(base, first + 3),
        lambda: memory.row(base.moved(first), 1, 3),
        lambda: memory.put(base.moved(3 + second), 2, 0.0),
    ):
        with pytest.raises(Fault):
            access()


def test_a_row_is_not_moved_up_onto_itself(memory):
    x = np.arange(6, dtype=np.float32)
    memory.add(region("work", x, writable=True))
    unit, pointer = Vectors(memory, None), memory.pointer(x.ctypes.data, FLOAT32)
    unit.scale_row(pointer, pointer.moved(2), 4, 1.0)
    np.testing.assert_array_equal(x, [2, 3, 4, 5, 4, 5])
    with pytest.raises(Fault, match="moved up onto itself"):
        unit.scale_row(pointer.moved(1), pointer, 4, 1.0)


# ---------------------------------------------------------------------------------------------- kernels that are wrong


def call(**options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 5)) for n in (9, BLOCK_KEYS + 9, BLOCK_KEYS + 9))
    position = rp.ALiBi(np.array([0.5, 0.25]))
    with interpreted(**options):
        return rp.attention(q, k, v, position=position, causal=True, backend="numba")


def wrong(patch, module, name, change):
    """Replace a helper by one that changes its arguments or its result."""
    right = getattr(MODULES[module], name)
    patch.setattr(MODULES[module], name, staticmethod(change(right.py_func)).__func__)


@pytest.mark.parametrize(
    ("module", "name", "change", "match"),
    [
        # One key too many: behind the last one, and among those that no query may attend.
        ("pack", "pack_panels", lambda f: lambda o, x, r, a, b, n, *z: f(o, x, r, a, b + 1, n + 1, *z), "access"),
        ("pack", "load_rows", lambda f: lambda o, w, x, r, n, d, s: f(o, w, x, r, n + 1, d, s), "out of bounds"),
        ("pack", "load_rows", lambda f: lambda o, w, x, r, n, d, s: f(x, w, o, r, n, d, s), "a write to an input"),
        ("pack", "round_up", lambda f: lambda n, unit: f(n, unit) + 8 * TARGET.vector_bytes, "beyond a buffer"),
        (
            "attend",
            "layout",
            lambda f: lambda *a: f(*a)._make(x - 64 * (x == f(*a).end) for x in f(*a)),
            "out of bounds|beyond a buffer",
        ),
    ],
)
def test_a_wrong_kernel_is_caught(module, name, change, match, monkeypatch):
    assert np.isfinite(call()).all()
    wrong(monkeypatch, module, name, change)
    with pytest.raises(Fault, match=match):
        call()


def test_a_forgotten_row_is_seen(monkeypatch):
    """What a kernel does not write is not a number, and neither is what it makes of memory that it did not fill."""
    wrong(monkeypatch, "pack", "load_rows", lambda f: lambda *a: None)
    assert np.isnan(call()).all()
    monkeypatch.undo()
    wrong(monkeypatch, "attend", "finish_rows", lambda f: lambda *a: f(*a[:-1], a[-1] - 1))
    assert np.isnan(call()[:, -1]).all()


def test_results_of_two_pieces_do_not_overlap(monkeypatch):
    def change(function):
        def finish(p, *rest):
            p.out_head = 0
            function(p, *rest)

        return finish

    wrong(monkeypatch, "attend", "finish_rows", change)
    with pytest.raises(Fault, match="piece 2 touches what piece 1 wrote"):
        call()


def test_arrays_that_nobody_keeps(monkeypatch):
    monkeypatch.setattr(Call, "keep", lambda self, x: x.ctypes.data)
    with pytest.raises(Fault, match="an address that nobody keeps alive"):
        call()


def test_excluded_keys_may_not_be_read():
    shut = np.zeros((1, BLOCK_KEYS + 9), bool)
    shut[0, 3] = True
    with pytest.raises(Fault, match=r"excluded .* bytes from the start of (k|v) "):
        call(excluded=shut)
    shut[0, 3], shut[0, -1] = False, True
    with pytest.raises(Fault, match="excluded"):
        call(excluded=shut)


@pytest.mark.parametrize("order", KINDS_OF_ORDER)
def test_the_order_of_pieces_changes_nothing(order):
    expected = call(threads=3, order="in turn")
    assert not math.isnan(expected.sum())
    np.testing.assert_array_equal(call(threads=3, order=order), expected)
    # Nor does what memory held before.
    np.testing.assert_array_equal(call(threads=3, order=order, poison=0x4B), expected)
