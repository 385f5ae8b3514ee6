"""Running one kernel on several threads: Numba's pool where that is safe, else threads of Python."""

from __future__ import annotations

import _thread
import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np

from relpos_np._runtime.forks import preparing
from relpos_np._runtime.threadcount import chosen
from relpos_np.errors import RelposImportError
from relpos_np.kernels._numba.launch.arrays import address_of
from relpos_np.kernels._numba.launch.build import Kernel
from relpos_np.kernels._numba.launch.openmp import Pool, torch_library
from relpos_np.kernels._numba.launch.thread_backoff import SMALL, crowd
from relpos_np.kernels._numba.simd.target import TARGET
from relpos_np.types import Int64

# Work below this many operations is done by the calling thread alone: waking others costs more.
SERIAL_FLOPS = 1e7
# Operations of one thread between two looks at signals: less than a tenth of a second, on vectors of 16 elements.
CALL_FLOPS = 1e10
# A workspace of up to this many bytes is kept for the thread's next call.
KEEP_BYTES = 64 * 1024 * 1024

_home = os.getpid()
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)
# void parallel_for(kernel, arrays, lengths, steps, data, inner dimensions, arrays, threads)
_POOL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, *[ctypes.c_ssize_t] * 3)
# Threads of a call at most.
MOST_THREADS = 4096
# Thread numbers, one array of them per kernel call, eight bytes apart; and how many there are, at its own place.
_threads = np.arange(MOST_THREADS + 1, dtype=np.int64)
_arrays = np.array([address_of(_threads)], dtype=np.int64)
_steps = np.array([8], dtype=np.int64)
_ARRAYS, _STEPS, _NUMBERS = address_of(_arrays), address_of(_steps), address_of(_threads)
_local = threading.local()
_PACK_WORK = struct.Struct("<2q").pack_into
_PAIR = struct.calcsize("<2q")
# Where records of kernels have a workspace, and the record that follows.
_WORK, _NEXT = 2, 4


def _workspace(size: int) -> tuple[Any, int]:
    """At least `size` bytes, and the address of the first cache line in them."""
    kept, address, room = getattr(_local, "workspace", (None, 0, -1))
    if room < size:
        kept = np.empty(size + 64, np.uint8)
        address = address_of(kept) + -address_of(kept) % 64
        if size <= KEEP_BYTES:
            _local.workspace = kept, address, size
    return kept, address


def lend(size: int, threads: int) -> tuple[Any, int, int]:
    """`size` bytes for each thread of a call: what must be kept until it has run; address; bytes between threads."""
    stride = -(-size // 64) * 64
    memory, address = _workspace(threads * stride)
    return memory, address, stride


def _length(threads: int) -> int:
    """Address of an array that holds a number: never one of its own, which another thread's cache could replace."""
    return _NUMBERS + 8 * threads


_ONE = _length(1)


def _symbol(name: str) -> int | None:
    """Address of a function of Numba's pool, which is started unless it runs."""
    with preparing:
        from numba.np.ufunc.parallel import _launch_threads

        try:
            _launch_threads()
        except ValueError as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise RelposImportError(
                f"backend 'numba': Numba's threading layer {numba.config.THREADING_LAYER!r} does not start ({said}); "
                "install it (`pip install tbb` for 'tbb'), or unset NUMBA_THREADING_LAYER"
            ) from error
        address: int | None = llvm.address_of_symbol(name)
        return address


@cache
def _pool() -> Any:
    """Numba's thread pool as a C function; None if it must not be entered by several threads at once."""
    address = _symbol("numba_parallel_for")
    if address is None or numba.threading_layer() == "workqueue":
        return None
    return _POOL(address)


@cache
def _torch_pool() -> Pool | None:
    with preparing:
        path = torch_library()
        return None if path is None else Pool(path)


def _shared() -> Pool | None:
    """PyTorch's pool, if it is in the process and not Numba's own; it may be imported after the first call."""
    return _torch_pool() if "torch" in sys.modules else None


@cache
def _function(address: int) -> Any:
    return _KERNEL(address)


@cache
def _thread_count() -> Any:
    """Numba's own counter as a C function, which is much cheaper to ask than `numba.get_num_threads`."""
    address = _symbol("get_num_threads")
    return numba.get_num_threads if address is None else ctypes.CFUNCTYPE(ctypes.c_int)(address)


def available_threads() -> int:
    """Threads that a call may use: what was chosen for this library, else what Numba has in this thread."""
    return min(chosen() or int(_thread_count()()), MOST_THREADS)


def run(kernel: Kernel, record: bytearray | memoryview, threads: int) -> None:
    """Call a kernel with a record, once for each of `threads` threads."""
    address = kernel.address
    call = ctypes.addressof(ctypes.c_char.from_buffer(record))
    if threads == 1:
        _function(address)(_ARRAYS, _ONE, _STEPS, call)
        return
    # GNU OpenMP kills a forked child that enters the parent's pool; Numba's own "workqueue" aborts
    # the process when two threads enter it. Threads of Python have neither flaw, and start slower.
    home = os.getpid() == _home
    pool = _pool() if home else None
    shared = _shared() if home else None
    if shared is not None:
        shared.run(address, _NUMBERS, _ONE, _STEPS, call, threads)
    elif pool is not None:
        pool(address, _ARRAYS, _length(threads), _STEPS, call, 0, 1, threads)
    else:
        _run_on_python_threads(_function(address), call, threads)


def call_flops(itemsize: int) -> float:
    """Operations of one thread in one call of a kernel; Python sees signals, such as Ctrl-C, between calls."""
    return CALL_FLOPS * TARGET.lanes(itemsize) / 16


def run_pieces(
    kernel: Kernel,
    record: bytearray,
    pieces: int,
    chunk: int,
    threads: int,
    *,
    unit: int = 1,
    workspace: int = 0,
    size: float = SMALL,
) -> None:
    """Run a kernel on so many pieces of work, in calls of about `chunk` pieces, as many for each thread.

    The record begins with a counter, in units of `unit` pieces, of which `chunk` is a multiple, and its limit. If the
    kernel needs a `workspace` of so many bytes for each thread, where that lies follows. `size`: all work, in units of
    that from which on there are threads; where processors are taken, one thread does small work.
    """
    if threads == 1 and pieces <= chunk:
        # Such calls take microseconds, of which the rest of this function would be a good part.
        memory = None
        if workspace:
            memory, address, stride = lend(workspace, 1)
            _PACK_WORK(record, _PAIR, address, stride)
        _PACK_WORK(record, 0, 0, pieces)
        run(kernel, record, 1)
        return
    with _timed(kernel, threads, size) as several:
        memory = None
        if workspace:
            memory, address, stride = lend(workspace, several)
            _PACK_WORK(record, _PAIR, address, stride)
        chunk = max(chunk // several, 1) * several
        for start in range(0, pieces, chunk):
            _PACK_WORK(record, 0, start // unit, min(start + chunk, pieces))
            run(kernel, record, several)
        del memory


@contextmanager
def _timed(kernel: Kernel, threads: int, size: float) -> Iterator[int]:
    """How many threads do work of that size: where processors are taken, one thread does small work."""
    # To compile or load a kernel is not timed.
    if threads == 1 or size >= SMALL or not kernel.ready:
        yield threads
        return
    threads, started = crowd.threads(threads), time.perf_counter()
    yield threads
    crowd.took(kernel, threads, size, time.perf_counter() - started)


def run_linked(
    kernel: Kernel, records: Int64, calls: Sequence[tuple[int, int, int]], threads: int, workspace: int, size: float
) -> None:
    """Run a kernel on many records, rows of integers, in few calls, between which Python sees signals.

    `calls`: the first record of each, whose counter begins where that says and stops there; all up to the first record
    of the next follow. Threads work on a record together, and each goes on to the next when nothing is left of it.
    """
    with _timed(kernel, threads, size) as several:
        memory, records[:, _WORK], records[:, _WORK + 1] = lend(workspace, several)
        own, stride = address_of(records), records.strides[0]
        records[:, _NEXT] = own + stride * np.arange(1, len(records) + 1)
        records[[first - 1 for first, _, _ in calls], _NEXT] = 0
        for first, records[first, 0], records[first, 1] in calls:
            run(kernel, records[first].data, several)
        del memory


def _run_on_python_threads(function: Any, call: int, threads: int) -> None:
    """The calling thread is one of them; fewer do the work if the system, or a closing interpreter, starts no more."""
    arrays = [np.array([_length(n)], dtype=np.int64) for n in range(threads)]
    length = _length(1)
    crew = _Crew(lambda n: function(address_of(arrays[n]), length, _STEPS, call))
    try:
        for n in range(1, threads):
            if not crew.start(n):
                break
        function(address_of(arrays[0]), length, _STEPS, call)
    finally:
        crew.wait()


class _Crew:
    """Threads that write to memory which the caller is about to free: all are waited for, whatever signals arrive.

    A signal's handler may raise between any two steps of the calling thread. `threading.Thread` is of no use then: it
    takes a thread for dead whose `join` was interrupted, or whose `start` was (CPython issue 90882, up to Python 3.12).
    """

    def __init__(self, work: Callable[[int], object]) -> None:
        self._work = work
        # Who claimed each piece of work first: its thread, or the caller that waits (0), so that nobody will do it.
        self._taken: dict[int, int] = {}
        self._bells: dict[int, Any] = {}
        self._done: set[int] = set()

    def start(self, n: int) -> bool:
        """Start the thread with this number, from 1 on; whether there is one."""
        bell = _thread.allocate_lock()
        bell.acquire()
        self._bells[n] = bell
        try:
            _thread.start_new_thread(self._run, (n, bell))
        except RuntimeError:
            return False
        return True

    def _run(self, n: int, bell: Any) -> None:
        try:
            if self._taken.setdefault(n, n) == n:
                self._work(n)
        finally:
            self._done.add(n)
            bell.release()

    def wait(self) -> None:
        """Return when no thread works, or will: one that has not begun by now finds no work left."""
        interrupt: BaseException | None = None
        while True:
            try:
                for n, bell in self._bells.items():
                    while self._taken.setdefault(n, 0) == n and n not in self._done:
                        bell.acquire()
                break
            except BaseException as error:  # noqa: BLE001  (whatever a handler raises: it waits its turn)
                interrupt = error
        if interrupt is not None:
            raise interrupt
