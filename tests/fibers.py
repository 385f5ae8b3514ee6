"""Numba's simulator without threads of the system, which take turns so slowly that most of its time is spent on them.

Threads of a block become greenlets, which a shuffled list runs from barrier to barrier: a barrier that is missing gives
wrong numbers in nearly every order, and the same ones each time.
"""

from __future__ import annotations

import os
import random
import threading

import numpy as np


def install():
    """Replace the simulator's threads, where this process runs it."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        return
    from greenlet import getcurrent, greenlet
    from numba.cuda.simulator import kernel

    class Fiber(greenlet):
        """A thread of a block, with what Numba's own has and kernels see."""

        syncthreads_count = kernel.BlockThread.syncthreads_count
        syncthreads_and = kernel.BlockThread.syncthreads_and
        syncthreads_or = kernel.BlockThread.syncthreads_or

        def __init__(self, function, manager, block, thread):
            super().__init__(self._call)
            self._function, self._manager = function, manager
            self.blockIdx, self.threadIdx = kernel.Dim3(*block), kernel.Dim3(*thread)
            size = kernel.Dim3(*manager._block_dim)
            self.thread_id = thread[0] + size.x * (thread[1] + size.y * thread[2])

        def _call(self, *args):
            try:
                self._function(*args)
            except Exception as error:
                where = f"tid={list(self.threadIdx)} ctaid={list(self.blockIdx)}"
                raise type(error)(f"{where}: {error}") from error

        def syncthreads(self):
            self.parent.switch()

    def run(manager, block, *args):
        order = random.Random(repr(block))
        threads = [Fiber(manager._f, manager, block, thread) for thread in np.ndindex(*manager._block_dim)]
        order.shuffle(threads)
        for thread in threads:
            thread.switch(*args)
        while threads := [thread for thread in threads if not thread.dead]:
            order.shuffle(threads)
            for thread in threads:
                thread.switch()

    system = threading.current_thread

    def current_thread():
        here = getcurrent()
        return here if isinstance(here, Fiber) else system()

    kernel.BlockManager.run, threading.current_thread = run, current_thread
