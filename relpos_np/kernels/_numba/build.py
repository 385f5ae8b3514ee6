"""Compilation of kernels to C functions, and a disk cache of the machine code that knows when it is stale.

Numba's own cache looks only at the file of the function it stores, so that an edit in a callee
would run old code; it unpickles what it finds; and loading from it costs half a second, most of it
in preparing a compiler that is then not used. Here an entry is an object file behind a digest,
its name holds a digest of every kernel source, the versions and the processor, and llvmlite links it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types

from relpos_np.kernels._numba.target import TARGET, host_features

log = logging.getLogger("relpos_np")

# A kernel has the signature of a NumPy inner loop, which Numba's thread pools call:
# (addresses of arrays, lengths, steps, data). Its one array holds thread numbers, data is the record.
_SIGNATURE = types.void(
    types.CPointer(types.CPointer(types.int64)), types.CPointer(types.int64), types.CPointer(types.int64), types.int64
)


# Compiling, loading and starting pools, one at a time. A fork waits for it: a child that was forked in the midst of
# it would find locks of Numba and LLVM that nobody ever opens again.
preparing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=preparing.acquire, after_in_parent=preparing.release, after_in_child=preparing.release)


class CacheWarning(UserWarning):
    """The kernel cache cannot be used; kernels are compiled in every process."""


@cache
def cache_folder() -> Path | None:
    """Folder of compiled kernels: `RELPOS_CACHE_DIR`, else in the user's cache folder; None if it cannot be written."""
    chosen = os.environ.get("RELPOS_CACHE_DIR")
    if chosen:
        folder = Path(chosen)
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or tempfile.gettempdir()) / "relpos_np"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "relpos_np"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}); "
            "set RELPOS_CACHE_DIR to a folder that can be written",
            CacheWarning,
            stacklevel=2,
        )
        return None


@cache
def _stamp() -> str:
    """Digest of everything that decides the machine code."""
    versions = (numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine())
    processor = (llvm.get_host_cpu_name(), sorted(host_features().items()), TARGET, numba.config.OPT)
    digest = hashlib.sha256(repr((versions, processor)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _read(path: Path) -> tuple[str, list[str], bytes] | None:
    """Entry point, needed symbols and object code of an entry; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        log.warning("the damaged entry %s of the kernel cache is replaced", path)
        return None
    header, _, code = content[32:].partition(b"\n")
    name, needed = json.loads(header)
    return name, needed, code


def _write(path: Path, name: str, needed: list[str], code: bytes) -> None:
    """Store an entry; other processes see all of it or nothing."""
    content = json.dumps([name, needed]).encode() + b"\n" + code
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("a compiled kernel could not be kept: %s", error)


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

    It becomes a C function that holds no GIL, cannot raise and has no fast-math.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._address = 0
        self._owner: Any = None

    @property
    def address(self) -> int:
        """Address of the C function."""
        if not self._address:
            with preparing:
                if not self._address:
                    self._address = self._load() or self._compile()
        return self._address

    def _path(self) -> Path | None:
        folder = cache_folder()
        return None if folder is None else folder / f"{self.function.__name__.strip('_')}-{_stamp()}.bin"

    def _load(self) -> int:
        path = self._path()
        entry = None if path is None else _read(path)
        if entry is None:
            return 0
        name, needed, code = entry
        if not all(_resolve(symbol) for symbol in needed):
            return 0
        self._owner = _Linked(code)
        return int(self._owner.address(name))

    def _compile(self) -> int:
        log.info("compiling %s for %s, which takes some seconds", self.function.__name__, TARGET.name)
        started = time.perf_counter()
        compiled = numba.cfunc(_SIGNATURE, nopython=True, error_model="numpy")(self.function)
        log.info("compiled %s in %.1f s", self.function.__name__, time.perf_counter() - started)
        path = self._path()
        if path is not None:
            module = llvm.parse_assembly(compiled.inspect_llvm())
            symbols = [*module.functions, *module.global_variables]
            needed = [s.name for s in symbols if s.is_declaration and not s.name.startswith("llvm.")]
            _write(path, compiled.native_name, needed, compiled._library._get_compiled_object())
        self._owner = compiled
        return int(compiled.address)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function as part of the one kernel that calls it, so that it is optimised once."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)
