"""One number of threads for our kernels, Numba and BLAS: in blocks, threads of Python, tasks and children."""

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import relpos_np as rp

numba = pytest.importorskip("numba")
threadpoolctl = pytest.importorskip("threadpoolctl")
launch = pytest.importorskip("relpos_np.kernels._numba.launch.launcher")
MOST = numba.config.NUMBA_NUM_THREADS


def blas():
    """Numbers of threads of the BLAS libraries."""
    return {library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}


def counts():
    """What each of the parties would use now, and here."""
    return rp.get_num_threads(), launch.available_threads(), numba.get_num_threads(), *sorted(blas())


@pytest.fixture(autouse=True)
def as_before():
    """No test leaves a choice behind."""
    before = counts()
    yield
    rp.set_num_threads(None)
    assert counts() == before


def test_one_number_for_all_in_a_block_and_as_before_behind_it():
    before = counts()
    with rp.threads(1):
        assert set(counts()) == {1}
        with rp.threads(2):
            assert set(counts()) == {2}
            with pytest.raises(ZeroDivisionError), rp.threads(1):
                raise ZeroDivisionError(*counts())
            assert set(counts()) == {2}
        assert set(counts()) == {1}
    assert counts() == before


def test_for_the_process_and_back():
    before = counts()
    rp.set_num_threads(1)
    assert set(counts()) == {1}
    with rp.threads(2):
        assert set(counts()) == {2}
        rp.set_num_threads(2)
        rp.set_num_threads(1)
        assert set(counts()) == {2}  # the block counts more
    assert set(counts()) == {1}
    rp.set_num_threads(np.int64(2))
    assert set(counts()) == {2}
    rp.set_num_threads(None)
    assert counts() == before


def test_the_process_s_number_holds_in_every_thread():
    """Numba's own belongs to the thread that set it: a server's other threads would use all processors."""
    rp.set_num_threads(1)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: launch.available_threads(), range(16))) == {1}
        assert set(pool.map(lambda _: rp.get_num_threads(), range(16))) == {1}


def test_a_block_is_this_thread_s_own_but_for_blas():
    with ThreadPoolExecutor(1) as pool, rp.threads(1):
        assert pool.submit(launch.available_threads).result() == MOST
        copied = contextvars.copy_context()
        assert pool.submit(copied.run, launch.available_threads).result() == 1


def test_blas_can_be_left_alone():
    before = blas()
    with rp.threads(1, blas=False):
        assert counts()[:3] == (1, 1, 1)
        assert blas() == before
    rp.set_num_threads(1, blas=False)
    assert counts()[:3] == (1, 1, 1)
    assert blas() == before


CHOICES = (rp.set_num_threads, lambda n: rp.threads(n).__enter__())


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("n", [0, -1, MOST + 1, 2**70, True, False, 1.0, "1", np.ones(2, int), [1]], ids=repr)
def test_numbers_that_no_pool_has_and_what_is_no_number(n, choose):
    if type(n) is int:
        with pytest.raises(rp.RelposValueError, match=rf"n: expected 1 to {MOST} threads.*NUMBA_NUM_THREADS.*{n}"):
            choose(n)
    else:
        with pytest.raises(rp.RelposTypeError, match="n: expected"):
            choose(n)
    with pytest.raises(rp.RelposTypeError):
        rp.threads(None).__enter__()


def test_without_threadpoolctl_an_error_names_the_remedy_and_nothing_changes(monkeypatch):
    before = counts()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "threadpoolctl", None)
        for choose in CHOICES:
            with pytest.raises(rp.RelposImportError, match=r'pip install "relpos-np\[threads\]".*blas=False'):
                choose(1)
        assert (rp.get_num_threads(), launch.available_threads(), numba.get_num_threads()) == before[:3]
        with rp.threads(1, blas=False):
            assert launch.available_threads() == 1


def test_without_numba_an_error_names_the_remedy(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        for choose in (rp.get_num_threads, lambda: rp.set_num_threads(1), lambda: rp.threads(1).__enter__()):
            with pytest.raises(rp.RelposImportError, match="pip install numba"):
                choose()


def test_blocks_of_several_threads_at_once_leave_everything_as_it_was():
    """They close in another order than they opened; each thread has its own number, BLAS some open block's."""
    before = counts()
    barrier, wrong = threading.Barrier(6), []

    def work(n):
        barrier.wait()
        for m in range(60):
            with rp.threads(1 + (n + m) % 2):
                if launch.available_threads() != 1 + (n + m) % 2 or numba.get_num_threads() != 1 + (n + m) % 2:
                    wrong.append((n, m))
                if not blas() <= {1, 2}:
                    wrong.append(blas())

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert counts() == before


def test_tasks_have_their_own_number_and_backend():
    """Tasks share a thread, and leave their blocks in any order; `to_thread` takes its task's choices along."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 70, 8)).astype(np.float32)
    expected = {name: rp.attention(q, k, v, backend=name) for name in ("numpy", "numba")}
    assert (expected["numpy"] != expected["numba"]).any()  # else it would not show which one answered
    before = counts()

    async def task(n):
        name, number = ("numpy", "numba")[n % 2], 1 + n // 2 % 2
        with rp.use_backend(name), rp.threads(number):
            for m in range(5):
                await asyncio.sleep(0.001 * ((n * 7 + m * 3) % 4))
                np.testing.assert_array_equal(rp.attention(q, k, v), expected[name])
                assert rp.get_num_threads() == launch.available_threads() == number
                found, there = await asyncio.to_thread(lambda: (rp.attention(q, k, v), launch.available_threads()))
                np.testing.assert_array_equal(found, expected[name])
                assert there == number
                assert blas() <= {1, 2}

    async def main():
        await asyncio.gather(*(task(n) for n in range(8)))

    asyncio.run(main())
    assert counts() == before
