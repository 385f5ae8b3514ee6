"""What terms hold stays on the device between calls, and is found again by its content."""

import importlib
import threading

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.launch import device, shared_copies

pytestmark = pytest.mark.skipif(not device.simulated(), reason="counts transfers of the simulator")


@pytest.fixture(autouse=True)
def nothing_kept():
    shared_copies.forget()
    yield
    shared_copies.forget()


def draw(rng):
    shapes = ((1, 2, 5, 8), (1, 1, 9, 8), (1, 1, 9, 8))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


POSITIONS = {
    "none": lambda rng: None,
    "table": lambda rng: rp.T5(rng.standard_normal((32, 2), dtype=np.float32)),
    "key table": lambda rng: rp.Shaw(rng.standard_normal((7, 8), dtype=np.float32)),
    "turned": lambda rng: rp.Rotary(4),
    "key and value tables": lambda rng: rp.Shaw(*rng.standard_normal((2, 7, 8), dtype=np.float32)),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_call_again_sends_nothing(name, rng, transfers):
    operands, position = draw(rng), POSITIONS[name](rng)
    expected = rp.attention(*operands, position=position, causal=True, backend="numpy")
    sent = [Operand.uploaded(x).flat.reshape(x.shape) for x in operands]
    for again in (False, True):
        del transfers.up[:]
        found = rp.attention(*sent, position=position, causal=True, backend="cuda").copy_to_host()
        np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2.0**-23)
        assert bool(transfers.up) != again


@pytest.mark.parametrize("unit", ["fma", "mma"])
@pytest.mark.parametrize(("name", "q_len"), [("none", 5), ("table", 5), ("none", 20), ("table", 20)])
def test_a_call_again_with_out_asks_the_device_for_nothing(name, q_len, unit, rng, transfers, monkeypatch):
    """No memory, no copy and no wait: what a CUDA graph may hold."""
    monkeypatch.setenv("RELPOS_CUDA_UNIT", unit)
    shapes, position = ((1, 2, q_len, 8), (1, 1, 9, 8), (1, 1, 9, 8)), POSITIONS[name](rng)
    operands = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    sent = [Operand.uploaded(x).flat.reshape(x.shape) for x in (*operands, np.zeros(shapes[0], np.float32))]
    for again in (False, True):
        if again:
            del transfers.up[:]
            for made in ("device_array", "to_device"):
                monkeypatch.setattr(importlib.import_module("numba.cuda"), made, lambda *_, **__: pytest.fail("asked"))
        rp.attention(*sent[:3], position=position, causal=True, backend="cuda", out=sent[3])
    assert not transfers.up
    assert not transfers.down
    expected = rp.attention(*operands, position=position, causal=True, backend="numpy")
    np.testing.assert_allclose(sent[3].copy_to_host(), expected, rtol=0, atol=64 * 2.0**-23)


def test_a_table_that_has_changed_is_sent(rng):
    operands, table = draw(rng), rng.standard_normal((32, 2), dtype=np.float32)
    for _ in range(2):
        position = rp.T5(table)
        expected = rp.attention(*operands, position=position, backend="numpy")
        found = rp.attention(*operands, position=position, backend="cuda")
        np.testing.assert_allclose(found, expected, rtol=0, atol=64 * 2.0**-23)
        table[:] = table[::-1].copy()


def test_gradients_of_a_call_again(rng):
    """Kernels of the backward pass do not write to what is kept."""
    operands, position = draw(rng), rp.Shaw(rng.standard_normal((7, 8), dtype=np.float32))
    grad = rng.standard_normal((1, 2, 5, 8), dtype=np.float32)
    first, second = (rp.attention_vjp(*operands, grad_out=grad, position=position, backend="cuda") for _ in range(2))
    for one, other in zip((first.q, first.k, first.v), (second.q, second.k, second.v), strict=True):
        np.testing.assert_array_equal(one, other)
    for name, one in first.position.items():
        np.testing.assert_array_equal(one, second.position[name])


def test_streams_share_nothing(transfers):
    x = np.arange(5, dtype=np.float32)
    found = []
    for stream in (1, 2, 1):
        with device.on(stream):
            found.append(shared_copies.kept(x)[0])
    assert len(transfers.up) == 2
    assert found[0] is found[2]
    assert found[0] is not found[1]
    np.testing.assert_array_equal(found[1].copy_to_host(), x)


def test_dtypes_and_parts_of_equal_bytes_are_told_apart(transfers):
    x = np.arange(4, dtype=np.float32)
    (whole,) = shared_copies.kept(x)
    (words,) = shared_copies.kept(x.view(np.int32))
    parts = shared_copies.kept(x[:2], x[2:])
    assert (whole.dtype, words.dtype) == (np.float32, np.int32)
    assert [part.size for part in parts] == [2, 2]
    assert len(transfers.up) == 3


def test_numbers_that_differ_at_the_end_are_told_apart():
    x = np.arange(300, dtype=np.float32)
    shared_copies.kept(x)
    x[-1] = -1
    np.testing.assert_array_equal(shared_copies.kept(x)[0].copy_to_host(), x)


def test_the_oldest_go_first_and_large_ones_are_never_kept(monkeypatch, transfers):
    monkeypatch.setattr(shared_copies, "MOST_BYTES", 64)
    monkeypatch.setattr(shared_copies, "LARGEST", 32)
    first, second, third = (np.full(6, n, np.float32) for n in range(3))
    for x in (first, second, first, third, first):
        shared_copies.kept(x)
    # The second made room for the third: the first was used after it.
    assert len(transfers.up) == 3
    shared_copies.kept(second)
    assert len(transfers.up) == 4
    for _ in range(2):
        shared_copies.kept(np.zeros(9, np.float32))
    assert len(transfers.up) == 6


def test_memory_that_runs_out_is_given_back(monkeypatch):
    shared_copies.kept(np.zeros(3, np.float32))
    assert shared_copies._stores
    monkeypatch.setattr(device, "simulated", lambda: False)
    monkeypatch.setattr(device, "module", lambda: pytest.fail("reached") if shared_copies._stores else _Module())
    device.release()
    assert not shared_copies._stores


class _Module:
    """Numba's context, which has nothing to give back."""

    def current_context(self):
        return self

    @property
    def deallocations(self):
        return {}


def test_many_threads_at_once():
    arrays, wrong = [np.full(50, n, np.float32) for n in range(8)], []

    def work(seed):
        order = np.random.default_rng(seed)
        found = ((n, shared_copies.kept(arrays[n])[0].copy_to_host()) for n in order.integers(0, 8, 200))
        wrong.extend(n for n, x in found if (x != n).any())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    (store,) = shared_copies._stores.values()
    assert store.size == sum(x.nbytes for x in arrays)
