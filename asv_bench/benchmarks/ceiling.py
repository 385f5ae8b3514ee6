"""How near calls come to the 100 % marks that `relpos bench` measures, in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .limit import fma_seconds, rate, read_seconds, to_read, turns_for

# Rounds of a figure that is a ratio, fewer for slow calls. The tests, which only see that benchmarks run, ask for one.
ROUNDS, ROUNDS_IF_SLOW, SLOW = 7, 3, 0.2
# What takes turns for a best time: at least so many rounds of at least so many seconds each, for so many seconds.
TURNS, TURN_SECONDS, STEADY_SECONDS = 9, 2e-3, 3.0


def timed(call: Callable[[], Any]) -> float:
    """One call's time."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def rounds_for(seconds: float) -> int:
    """How many rounds of a call that takes so long."""
    return min(ROUNDS, ROUNDS_IF_SLOW) if seconds > SLOW else ROUNDS


def fraction_of_fma(call: Callable[[], Any], operations: float) -> float:
    """Median over alternating rounds of speed / speed of the FMA loop, each for as long as the other."""
    import numba

    threads = numba.get_num_threads()
    seconds = timed(call)
    turns = turns_for(seconds, threads)
    ratios = []
    for _ in range(rounds_for(seconds)):
        limit = rate(turns, threads, fma_seconds(turns, threads))
        ratios.append(operations / timed(call) / limit)
    return float(np.median(ratios))


def fraction_of_read(call: Callable[[], Any], arrays: Sequence[np.ndarray], rounds: int | None = None) -> float:
    """Median over alternating rounds of the time to read the arrays once / time of the call."""
    import numba

    threads = numba.get_num_threads()
    whole = to_read(arrays)
    read_seconds(whole, threads)
    call()
    ratios = []
    for _ in range(rounds or ROUNDS):
        limit = read_seconds(whole, threads)
        ratios.append(limit / timed(call))
    return float(np.median(ratios))


def _best(call: Callable[[], Any], limit: Callable[[], float], one: float) -> float:
    """The best time of a call, of about `one` second, over the best of the limit's, in turns."""
    count = max(1, int(TURN_SECONDS / one))

    def several() -> None:
        for _ in range(count):
            call()

    calls: list[float] = []
    limits: list[float] = []
    start = time.perf_counter()
    while len(calls) < min(TURNS, ROUNDS) or (ROUNDS > 1 and time.perf_counter() - start < STEADY_SECONDS):
        limits.append(limit())
        calls.append(timed(several) / count)
    return min(calls) / min(limits)


def in_fma(call: Callable[[], Any], operations: float) -> float:
    """Best time of a call over the best time of as many operations by the FMA loop."""
    import numba

    threads = numba.get_num_threads()
    call()
    one = timed(call)
    turns = turns_for(max(one, TURN_SECONDS), threads)
    return _best(call, lambda: operations / rate(turns, threads, fma_seconds(turns, threads)), one)
