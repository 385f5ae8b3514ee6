"""Memory of results is used again when nobody holds it any more, and never before."""

import gc
import os
import threading

import ml_dtypes
import numpy as np
import pytest

from relpos_np._runtime import results
from tests.processes import child

SIZE = results.LEAST


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """An empty one."""
    monkeypatch.setattr(results, "_free", {})
    monkeypatch.setattr(results, "_chosen", 8 * SIZE)


def address(x):
    return x.__array_interface__["data"][0]


def test_memory_is_used_again():
    first, used = results.empty((SIZE,), np.dtype(np.uint8))
    assert not used
    where = address(first)
    del first
    for shape, dtype in (((SIZE // 4,), np.float32), ((2, SIZE // 16), np.float64), ((SIZE // 2,), ml_dtypes.bfloat16)):
        again, used = results.empty(shape, np.dtype(dtype))
        assert used
        assert address(again) == where
        assert (again.shape, again.dtype, type(again)) == (shape, dtype, np.ndarray)
        assert again.flags.writeable
        assert again.flags.c_contiguous
        del again


HOLDS = {
    "slice": lambda x: x[5:9],
    "copyless reshape": lambda x: x.T.reshape(-1, order="F")[::3],
    "dtype": lambda x: x.view(np.uint16),
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "memoryview": lambda x: memoryview(x)[3:],
    "strides": lambda x: np.lib.stride_tricks.as_strided(x, (3,), (4,)),
    "DLPack": lambda x: np.from_dlpack(x)[1:],
    "subclass": lambda x: x.view(type("Mine", (np.ndarray,), {}))[2:],
    "iterator": iter,
    "flat": lambda x: x.flat,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_it_is_never_lent_while_anybody_holds_it(hold):
    x, _ = results.empty((SIZE // 4,), np.dtype(np.float32))
    where, held = address(x), hold(x)
    del x
    gc.collect(1)
    for _ in range(3):
        assert address(results.empty((SIZE // 4,), np.dtype(np.float32))[0]) != where
    del held
    gc.collect(1)
    found = [results.empty((SIZE // 4,), np.dtype(np.float32))[0] for _ in range(2)]
    assert where in map(address, found)


def test_small_and_very_large_results_are_left_to_numpy():
    for size in (0, 1, SIZE - 1, 8 * SIZE + 1):
        results.empty((size,), np.dtype(np.uint8))
    assert not results._free


def test_what_is_kept_is_limited():
    """The memory of other sizes makes way."""

    def kept():
        return sum(size * len(found) for size, found in results._free.items())

    for n in (1, 2, 4, 3, 8, 5, 1):
        many = [results.empty((n * SIZE,), np.dtype(np.uint8))[0] for _ in range(5)]
        del many
        assert n * SIZE <= kept() <= 8 * SIZE
        assert results._free[n * SIZE]


def test_threads_take_and_give_back(rng):
    """Numbers of a thread stay its own."""
    wrong = []

    def work(n):
        for turn in range(200):
            x, _ = results.empty((SIZE // 8,), np.dtype(np.float64))
            x[:: SIZE // 80] = mine = 1000 * n + turn
            y, _ = results.empty((SIZE // 8,), np.dtype(np.float64))
            y[:: SIZE // 80] = -mine
            if not (x[:: SIZE // 80] == mine).all():
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_writes_into_memory_of_its_own():
    kept, _ = results.empty((SIZE,), np.dtype(np.uint8))
    kept[:] = 1
    free, _ = results.empty((SIZE,), np.dtype(np.uint8))
    free[:] = 2
    del free
    number = os.fork()
    if not number:
        kept[:] = 7
        mine, used = results.empty((SIZE,), np.dtype(np.uint8))
        mine[:] = 7
        os._exit(0 if used else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
    assert (kept == 1).all()
    free, used = results.empty((SIZE,), np.dtype(np.uint8))
    assert used
    assert (free == 2).all()


OFF = """
from relpos_np._runtime import results
x = np.ones((2, 2, 1024, 64), np.float32)
rp.attention(*x[[0, 1, 0]]) if not {more} else None
try:
    out = [rp.attention(x, x, x) for _ in range(3)]
    del out
    print(sorted(results._free.items()))
except rp.RelposValueError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "printed"), [("0", "[]"), ("many", "RELPOS_RESULT_POOL: expected bytes as an integer, 0 for none")]
)
def test_the_variable(value, printed):
    status, out, log = child(OFF.format(more=1), RELPOS_RESULT_POOL=value)
    assert status == 0, log
    assert out.startswith(printed)
