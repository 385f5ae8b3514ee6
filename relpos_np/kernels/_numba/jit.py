"""Compilation: one decorator, and a disk cache that knows when its entries are stale.

Numba's own cache looks only at the file of the function it stores, so an edit in a callee would
run old code; and it raises at import where its folder cannot be written. This one is keyed by
every kernel source and by the vector target, lives in one folder, and falls back to compiling.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from relpos_np.kernels._numba.target import TARGET

log = logging.getLogger("relpos_np")


class CacheWarning(UserWarning):
    """The kernel cache cannot be used; kernels are compiled in every process."""


@cache
def cache_folder() -> Path | None:
    """Folder of compiled kernels: `RELPOS_CACHE_DIR`, else the user's cache folder; None if neither can be written."""
    chosen = os.environ.get("RELPOS_CACHE_DIR")
    if chosen:
        candidates = [Path(chosen)]
    elif sys.platform == "win32":
        candidates = [Path(os.environ.get("LOCALAPPDATA", tempfile.gettempdir())) / "relpos_np"]
    else:
        candidates = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relpos_np"]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    warnings.warn(
        f"compiled kernels cannot be kept in {candidates[0]}; set RELPOS_CACHE_DIR to a folder that can be written",
        CacheWarning,
        stacklevel=2,
    )
    return None


@cache
def source_stamp() -> str:
    """A digest of every kernel source, the target and Numba's version: entries of another stamp are stale."""
    digest = hashlib.sha256(f"{numba.__version__} {TARGET}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tells Numba where entries live and which source they belong to."""

    def get_cache_path(self) -> str:
        return str((cache_folder() or Path()) / source_stamp())

    def get_source_stamp(self) -> str:
        return source_stamp()

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        return cls() if cache_folder() else None


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's function cache with our folder; a damaged entry is compiled again instead of raising."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            log.warning("a damaged entry of the kernel cache is compiled again", exc_info=True)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            log.warning("a compiled kernel could not be kept in %s", self.cache_path, exc_info=True)


def kernel(*, parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function in nopython mode without the GIL and without fast-math, cached if possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(nogil=True, parallel=parallel, error_model="numpy")(function)
        if cache_folder() is not None:
            compiled._cache = _KernelCache(function)
        return compiled

    return decorate


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call; it is stored inside theirs."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def announce(dispatcher: Any, arguments: tuple[Any, ...]) -> Any:
    """Call a kernel; log a compilation that takes more than a second."""
    known = len(dispatcher.overloads)
    if known:
        return dispatcher(*arguments)
    started = time.perf_counter()
    if cache_folder() is None or not (cache_folder() / source_stamp()).is_dir():  # type: ignore[operator]
        log.info("compiling %s for %s; later processes load it from the cache", dispatcher.__name__, TARGET.name)
    result = dispatcher(*arguments)
    log.debug("first call of %s took %.1f s", dispatcher.__name__, time.perf_counter() - started)
    return result
