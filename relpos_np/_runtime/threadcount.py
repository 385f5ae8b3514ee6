"""How many threads a call may use: one number for our kernels, for Numba and for the BLAS below NumPy and SciPy."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from relpos_np._runtime.forks import preparing
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError, shown

# Numba's number belongs to one thread and BLAS's to the process; ours to the process, or to a thread's or task's block.
_default: int | None = None
_scoped: ContextVar[int | None] = ContextVar("relpos_np_threads", default=None)


def chosen() -> int | None:
    """The number that the innermost block or `set_num_threads` asks for; None if nobody asked."""
    return _scoped.get() or _default


def _numba() -> Any:
    try:
        with preparing:
            import numba
    except ImportError as error:
        raise RelposImportError(
            f"threads: numba cannot be imported ({error}), and nothing but its kernels has threads of its own; "
            "install it with `pip install numba`"
        ) from error
    return numba


def _checked(n: Any, most: int) -> int:
    if isinstance(n, bool):
        raise RelposTypeError(f"n: expected a number of threads, found {shown(n)}")
    try:
        count = operator.index(n)
    except TypeError:
        raise RelposTypeError(f"n: expected an integer, found {type(n).__name__} {shown(n)}") from None
    if not 1 <= count <= most:
        raise RelposValueError(
            f"n: expected 1 to {most} threads (processors, or NUMBA_NUM_THREADS before Python starts), "
            f"found {shown(count)}"
        )
    return count


class _Open:
    """Numbers of the open blocks, in the order in which they were opened; they may close in any order."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []

    def add(self, n: int) -> tuple[int, int]:
        entry = (n, threading.get_ident())
        self.entries.append(entry)
        return entry

    def remove(self, entry: tuple[int, int]) -> None:
        self.entries = [other for other in self.entries if other is not entry]

    def last(self, otherwise: int | None) -> int | None:
        return self.entries[-1][0] if self.entries else otherwise


class _ThisThread(threading.local):
    """Blocks of one thread; asyncio's tasks share one, and leave their blocks in any order."""

    def __init__(self) -> None:
        self.open = _Open()
        self.before = 0


_here = _ThisThread()


class _Blas:
    """The libraries found so far, and how many threads each had before it was first told."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = _Open()
        self.default: int | None = None
        self._found: list[Any] = []
        self._modules = 0
        self._before: dict[str, int] = {}

    def libraries(self) -> list[Any]:
        """Found again if a module was imported since the last time, because it may have loaded one."""
        try:
            import threadpoolctl
        except ImportError as error:
            raise RelposImportError(
                "threads: the BLAS below NumPy and SciPy is told through threadpoolctl, which is not installed; "
                'pip install "relpos-np[threads]", or leave BLAS alone with blas=False'
            ) from error
        if self._modules != len(sys.modules):
            self._found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
            self._modules = len(sys.modules)
        return self._found

    def tell(self) -> None:
        """Give each library the number of the last open block, the process's or its own, in this order."""
        wanted = self.open.last(self.default)
        for library in self.libraries():
            own = self._before.setdefault(library.filepath, library.get_num_threads())
            library.set_num_threads(own if wanted is None else wanted)
        if wanted is None:
            self._before.clear()


_blas = _Blas()


def _after_fork() -> None:
    """Blocks of threads that the child does not have are closed; nobody holds the lock."""
    _blas.lock = threading.RLock()
    mine = threading.get_ident()
    _blas.open.entries = [entry for entry in _blas.open.entries if entry[1] == mine]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def get_num_threads() -> int:
    """Threads that a call of a kernel may use here and now.

    Returns
    -------
    int
        The number of the innermost `threads` block, of `set_num_threads`, or Numba's own of the calling thread.

    Raises
    ------
    RelposImportError
        If numba is missing.

    Examples
    --------
    >>> import relpos_np as rp
    >>> rp.get_num_threads() >= 1
    True
    """
    return chosen() or int(_numba().get_num_threads())


def set_num_threads(n: int | None, *, blas: bool = True) -> None:
    """Choose how many threads all later calls in this process use, whichever thread of Python makes them.

    Parameters
    ----------
    n : int or None
        From 1 to NUMBA_NUM_THREADS, by default the number of processors. None returns to what holds without a
        choice: Numba's number, and for BLAS the one it had.
    blas : bool
        Whether the BLAS below NumPy and SciPy gets the same number, for the whole process: it does the work of
        backends "numpy" and "terms", and of the projections of layers.

    Raises
    ------
    RelposTypeError
        If n is no integer.
    RelposValueError
        If n is below 1 or above NUMBA_NUM_THREADS.
    RelposImportError
        If `blas` is asked for and threadpoolctl is not installed, or if numba is missing.

    See Also
    --------
    threads : For a block only.

    Notes
    -----
    Our kernels follow this number in every thread, on PyTorch's pool as well. Numba's own number belongs to a thread:
    it is set for the calling one, for other functions compiled with Numba. PyTorch's own operations keep theirs
    (``torch.set_num_threads``). A child that is forked inherits the choice, one that is spawned does not. Of BLAS
    libraries those are told that are in the process: NumPy's is, SciPy's only once ``scipy.linalg`` was imported.

    Examples
    --------
    >>> import relpos_np as rp
    >>> rp.set_num_threads(1)
    >>> rp.get_num_threads()
    1
    >>> rp.set_num_threads(None)  # as before
    """
    global _default
    numba = _numba()
    most = numba.config.NUMBA_NUM_THREADS
    count = None if n is None else _checked(n, most)
    with _blas.lock:
        if blas:
            _blas.libraries()
        _default = count
        if _here.open.entries:
            _here.before = count or most
        else:
            numba.set_num_threads(count or most)
        if blas:
            _blas.default = count
            _blas.tell()


@contextmanager
def threads(n: int, *, blas: bool = True) -> Iterator[None]:
    """Choose the number of threads inside a ``with`` block.

    Parameters
    ----------
    n : int
        From 1 to NUMBA_NUM_THREADS, by default the number of processors.
    blas : bool
        Whether the BLAS below NumPy and SciPy gets the same number. See Notes.

    Raises
    ------
    RelposError
        As `set_num_threads`.

    See Also
    --------
    set_num_threads : For the whole process.

    Notes
    -----
    Our kernels follow the number in the current thread or asyncio task only, and in calls that ``asyncio.to_thread``
    makes from there. Numba's own number is set for the current thread. BLAS has one number for the whole process:
    where blocks of several threads are open at once, the one opened last counts, and when the last is closed
    everything is as before. A library that is imported later is told with the next block. For servers,
    `set_num_threads` is the better choice.

    Examples
    --------
    >>> import relpos_np as rp
    >>> with rp.threads(1):
    ...     rp.get_num_threads()
    1
    """
    numba = _numba()
    count = _checked(n, numba.config.NUMBA_NUM_THREADS)
    if blas:
        with _blas.lock:
            _blas.libraries()
    here = _here
    if not here.open.entries:
        here.before = numba.get_num_threads()
    token = _scoped.set(count)
    opened = here.open
    mine = opened.add(count)
    process = None
    try:
        numba.set_num_threads(count)
        if blas:
            with _blas.lock:
                process = _blas.open.add(count)
                _blas.tell()
        yield
    finally:
        if process is not None:
            with _blas.lock:
                _blas.open.remove(process)
                _blas.tell()
        opened.remove(mine)
        numba.set_num_threads(opened.last(here.before))
        _scoped.reset(token)
