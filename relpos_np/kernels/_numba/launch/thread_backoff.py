"""Threads that wait for a processor: while others take the processors, small work is done by its own thread alone.

A parallel loop ends when its last thread has ended. Where other programs take the processors, that one first waits for
its turn, for milliseconds, in which GNU OpenMP lets the others spin: work of 0.2 ms then takes 16. Nothing says in
advance whether a processor is free, so that small work is timed. Once it took far longer than it can by itself, such
work is done by one thread for a while, and longer if it is late again; then threads are tried anew. A wrong decision
costs little, since large work always has all threads. Bits do not change: how the work is divided stays as it was.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

# Work is small below so many times of that from which on there are threads: one thread takes about a millisecond.
SMALL = 10.0
# Small work that took so many seconds has waited, unless one thread alone takes half of that.
LATE = 0.003
# Seconds for which one thread does small work, at first and at most; twice as many each time that threads are late.
FIRST, LONGEST = 0.05, 2.0
# What remains of these seconds for the next time, after work in time.
FORGET = 0.9


class Crowd:
    """What small work took lately. Threads of Python share one: what they overwrite of each other is only out of date.

    `size` is the work in units of that from which on there are threads.
    """

    def __init__(self) -> None:
        self._until = self._pause = 0.0
        # Seconds per size of each kernel with one thread, at best: on a slow processor small work may take long, too.
        self._alone: dict[Hashable, float] = {}

    def threads(self, threads: int) -> int:
        """How many threads should do small work, of those that it may have."""
        return 1 if time.perf_counter() < self._until else threads

    def took(self, kernel: Hashable, threads: int, size: float, seconds: float) -> None:
        """Small work took so long with so many threads."""
        if threads == 1:
            self._alone[kernel] = min(seconds / size, self._alone.get(kernel, seconds / size))
        elif seconds > LATE and seconds > 2 * size * self._alone.get(kernel, 0.0):
            self._pause = min(max(2 * self._pause, FIRST), LONGEST)
            self._until = time.perf_counter() + self._pause
        else:
            self._pause *= FORGET


crowd = Crowd()
