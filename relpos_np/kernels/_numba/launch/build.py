"""Compilation of kernels to C functions, or linking of what an earlier process compiled."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types

from relpos_np._runtime.forks import preparing
from relpos_np.kernels._numba.launch import cache
from relpos_np.kernels._numba.launch.compiler import KernelCompiler, PartCompiler
from relpos_np.kernels._numba.simd.level import check_compiler
from relpos_np.kernels._numba.simd.target import TARGET

log = logging.getLogger("relpos_np")

# A kernel has the signature of a NumPy inner loop, which Numba's thread pools call:
# (addresses of arrays, lengths, steps, data). Its one array holds thread numbers, data is the record.
_SIGNATURE = types.void(
    types.CPointer(types.CPointer(types.int64)), types.CPointer(types.int64), types.CPointer(types.int64), types.int64
)


@contextmanager
def _no_signal_lost() -> Iterator[None]:
    """Raise at the end what Ctrl-C raised where nobody could see it: in a callback of the compiler."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    lost: list[BaseException] = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except BaseException as error:
            lost.append(error)
            raise

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if lost:
        raise lost[0]


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Say what is waited for on a terminal, after a second, unless `RELPOS_QUIET` is set."""
    if os.environ.get("RELPOS_QUIET") or not sys.stderr.isatty():
        yield
        return
    folder = cache.cache_folder()
    kept = "for this process alone" if folder is None else f"once, and kept in {folder}"
    words = f"relpos_np: the kernel {name} is compiled {kept} ..."
    timer = threading.Timer(1.0, print, (words,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would visit millions of objects, all in use, over and over."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _resolve(symbol: str) -> bool:
    """Make sure that the linker will find a symbol; Numba's own are registered only when it compiles."""
    if llvm.address_of_symbol(symbol) is not None:
        return True
    from numba import _helperlib
    from numba.core.runtime import _nrt_python

    for prefix, module in (("numba_", _helperlib), ("NRT_", _nrt_python)):
        helpers: dict[str, int] = getattr(module, "c_helpers", {})
        address = helpers.get(symbol.removeprefix(prefix)) if symbol.startswith(prefix) else None
        if address is not None:
            llvm.add_symbol(symbol, address)
            return True
    return False


class _Linked:
    """Object code in memory, kept alive with its engine."""

    def __init__(self, code: bytes) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self.engine.get_function_address(name))


class Kernel:
    """A function (threads, count, steps, record) that is compiled, or loaded, when it is first run.

    It becomes a C function that holds no GIL, cannot raise and has no fast-math. The cache keeps it for as long as its
    module, and what that imports, stay as they are.
    """

    def __init__(self, function: Callable[..., None], module: str) -> None:
        self.function, self.module = function, module
        self._address = 0
        self._owner: Any = None

    @property
    def address(self) -> int:
        """Address of the C function."""
        if not self._address:
            with preparing:
                if not self._address:
                    self._address = self._load()
                if not self._address:
                    with _no_signal_lost():
                        compiled = self._compile()
                    # Before it is stored, because that may fail where warnings are errors.
                    self._owner, self._address = compiled, int(compiled.address)
                    self._store(compiled)
        return self._address

    @property
    def ready(self) -> bool:
        """Whether it is compiled or loaded already."""
        return bool(self._address)

    @property
    def name(self) -> str:
        """What it is called in the cache."""
        return self.function.__name__.strip("_")

    def _load(self) -> int:
        entry = cache.read(self.name, self.module)
        if entry is None:
            return 0
        name, needed, code = entry
        if not all(_resolve(symbol) for symbol in needed):
            return 0
        self._owner = _Linked(code)
        return int(self._owner.address(name))

    def _compile(self) -> Any:
        check_compiler()
        log.info("compiling %s for %s, which takes some seconds", self.function.__name__, TARGET.name)
        started = time.perf_counter()
        with _announced(self.name), _uncollected():
            compiled = numba.cfunc(_SIGNATURE, nopython=True, error_model="numpy", pipeline_class=KernelCompiler)(
                self.function
            )
        log.info("compiled %s in %.1f s", self.function.__name__, time.perf_counter() - started)
        return compiled

    def _store(self, compiled: Any) -> None:
        module = llvm.parse_assembly(compiled.inspect_llvm())
        symbols = [*module.functions, *module.global_variables]
        needed = [s.name for s in symbols if s.is_declaration and not s.name.startswith("llvm.")]
        code = compiled._library._get_compiled_object()
        cache.write(self.name, self.module, compiled.native_name, needed, code)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call, as a part of each of them."""
    return numba.njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=PartCompiler
    )(function)
