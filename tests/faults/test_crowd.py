"""Where processors are taken, one thread does small work, with the same bits, and large work has all threads."""

import subprocess
import sys

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.kernels._numba.launch import launcher, thread_backoff
from tests.processes import child


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(thread_backoff, "time", found)
    return found


LATE, TIME = 2 * thread_backoff.LATE, thread_backoff.LATE / 10


def test_late_threads_are_tried_less_and_less_often(clock):
    """In ten seconds of a crowd late work is a small share, and soon after it threads are back."""
    one, late, end = thread_backoff.Crowd(), 0, clock.now + 10
    while clock.now < end:
        threads = one.threads(2)
        seconds = LATE if threads == 2 else TIME
        late += threads == 2
        one.took("kernel", threads, 5.0, seconds)
        clock.now += seconds
    assert 5 < late < 15
    clock.now += thread_backoff.LONGEST
    assert one.threads(2) == 2


def test_a_slow_processor_is_no_crowd(clock):
    """Small work takes long on any number of threads: once one thread's time is known, threads are not late."""
    one, alone = thread_backoff.Crowd(), 0
    for _ in range(1000):
        threads = one.threads(4)
        alone += threads == 1
        seconds = 10 * thread_backoff.LATE / threads
        one.took("kernel", threads, 5.0, seconds)
        clock.now += seconds
    assert 0 < alone < 10
    # Another kernel's time says nothing, and a longer wait is one all the same.
    one.took("kernel", 4, 5.0, 21 * thread_backoff.LATE)
    assert one.threads(4) == 1


def calls(rng):
    """Small work of every kind, as functions of the number of threads that gives arrays."""
    q, k, v = rng.standard_normal((3, 2, 4, 160, 32)).astype(np.float32)
    few, cache = rng.standard_normal((2, 4, 1, 64)), rng.standard_normal((2, 4, 1500, 64))
    window = rng.standard_normal((300, 2, 16, 16))
    x = rng.standard_normal((4, 160, 319))
    t5, shaw = rp.T5(rng.standard_normal((32, 4))), rp.Shaw(rng.standard_normal((9, 32)), rng.standard_normal((9, 32)))
    yield "attention", lambda: [rp.attention(q, k, v, position=t5)]
    yield "decoding", lambda: [rp.attention(few, cache, cache)]
    yield "windows", lambda: [rp.attention(window, window, window)]
    yield "rel_shift", lambda: [rp.rel_shift(x, variant="conformer")]

    def gradients():
        found = rp.attention_vjp(q, k, v, grad_out=v, position=shaw, causal=True)
        return [found.q, found.k, found.v, *found.position.values()]

    yield "gradients", gradients


def test_a_crowd_changes_threads_and_no_bit(rng, monkeypatch):
    used, run = [], launcher.run
    monkeypatch.setattr(
        launcher, "run", lambda kernel, record, threads: used.append(threads) or run(kernel, record, threads)
    )
    for name, call in calls(rng):
        found = {}
        call()  # what is compiled or loaded by it is not timed
        for state, until in (("alone", -1.0), ("crowd", float("inf"))):
            one = thread_backoff.Crowd()
            one._until = until
            monkeypatch.setattr(launcher, "crowd", one)
            used.clear()
            found[state] = call(), set(used)
        for a, b in zip(found["alone"][0], found["crowd"][0], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
        assert found["crowd"][1] == {1}, name
        if launcher.available_threads() > 1:
            assert max(found["alone"][1]) > 1, name


def test_large_work_has_all_threads(rng, monkeypatch):
    used, run, one = [], launcher.run, thread_backoff.Crowd()
    one._until = float("inf")
    monkeypatch.setattr(
        launcher, "run", lambda kernel, record, threads: used.append(threads) or run(kernel, record, threads)
    )
    monkeypatch.setattr(launcher, "crowd", one)
    q = rng.standard_normal((8, 512, 64), dtype=np.float32)
    # What is compiled or loaded by a call is no small work, whatever its size.
    for _ in range(2):
        rp.attention(q, q, q)
    assert used == 2 * [min(launcher.available_threads(), 8 * 6)]


BUSY = """
import time
q, k, v = rng.standard_normal((3, 8, 192, 64)).astype(np.float32)
found, out = {1: [], 2: []}, np.empty_like(q)
stop = time.perf_counter() + 8
while time.perf_counter() < stop:
    for threads, times in found.items():
        with rp.threads(threads):
            for _ in range(20):
                start = time.perf_counter()
                rp.attention(q, k, v, out=out)
                times.append(time.perf_counter() - start)
alone, both = (np.median(x) for x in found.values())
print(both < 5 * alone, alone, both)
"""


@pytest.mark.stress
def test_two_threads_among_busy_programs():
    """Without the remedy the median of calls with two threads is twenty times that with one."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        status, said, errors = child(BUSY, OMP_WAIT_POLICY="ACTIVE")
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert status == 0, errors
    assert said.startswith("True"), said
