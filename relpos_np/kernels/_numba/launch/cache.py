"""Machine code of kernels on disk: where it is, how it is named, what is read back, and what is not trusted.

Numba's own cache looks only at the file of the function it stores, so that an edit in a callee
would run old code; it unpickles what it finds; and loading from it costs half a second, most of it
in preparing a compiler that is then not used. Here an entry is an object file behind a digest, and
its name holds a digest of every kernel source, the versions and the processor.

What an entry holds is run as it is, so that it and its folder must belong to this user or to root, and nobody else may
write to them; a link to a file elsewhere is not followed. The digest tells damage, not intent: LLVM would crash on code
that is none behind a digest that is right.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import stat
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba

from relpos_np.kernels._numba.simd.target import TARGET, UNIT, host_features

log = logging.getLogger("relpos_np")

_not_kept = False

# Where the sources of kernels are; `plan` decides what they are told, and nothing of their code.
_SOURCES = "simd", "launch", "forward_pass", "backward_pass"
# Numba's settings that decide the machine code, beside the versions and the processor.
_SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "CPU_NAME", "CPU_FEATURES",
    "ENABLE_AVX", "DISABLE_INTEL_SVML", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS",
    "EXTEND_VARIABLE_LIFETIMES", "ENABLE_PROFILING",
)  # fmt: skip


class CacheWarning(UserWarning):
    """A compiled kernel cannot be kept; kernels are compiled in every process."""


@cache
def _folder() -> Path | None:
    """`RELPOS_CACHE_DIR`, else a folder in the user's cache folder; None for a user without a home."""
    chosen = os.environ.get("RELPOS_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or tempfile.gettempdir()) / "relpos_np"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()).absolute() / "relpos_np"
    except RuntimeError:
        return None


def cache_folder() -> Path | None:
    """Where compiled kernels are, in `RELPOS_CACHE_DIR` or the user's cache folder; None if one could not be kept."""
    return None if _not_kept else _folder()


@cache
def _stamp() -> str:
    """Digest of everything that decides the machine code."""
    versions = (numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine())
    processor = (llvm.get_host_cpu_name(), sorted(host_features().items()), TARGET, UNIT)
    settings = [str(getattr(numba.config, name, None)) for name in _SETTINGS]
    digest = hashlib.sha256(repr((versions, processor, settings)).encode())
    for folder in _SOURCES:
        for path in sorted((Path(__file__).parent.parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _path(kernel: str) -> Path | None:
    folder = _folder()
    return None if folder is None else folder / f"{kernel}-{_stamp()}.bin"


def _distrust(found: os.stat_result) -> str | None:
    """Why somebody else may have written to a file, or put one into a folder."""
    if not hasattr(os, "geteuid"):
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}"
    # In a folder like /tmp nobody replaces what is another's, and each file's owner is looked at.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    return "others may write to it" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky else None


@cache
def _warn(folder: Path, why: str) -> None:
    log.warning("the kernel cache %s is not used: %s", folder, why)


def _content(path: Path) -> bytes | None:
    """The bytes of a file; None if there is none, or one that another user may have written."""
    # A pipe in its place would be waited for.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        if why := _distrust(path.parent.stat()):
            _warn(path.parent, why)
            return None
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        if why := _distrust(found):
            log.warning("the entry %s of the kernel cache is not used: %s", path, why)
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parsed(content: bytes, stem: str) -> tuple[str, list[str], bytes]:
    """Entry point, needed symbols and object code of a name's entry; ValueError or TypeError if it is not one."""
    header, _, code = content[32:].partition(b"\n")
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ValueError("its digest is not that of its content")
    of, name, needed = json.loads(header)
    if of != stem:
        raise ValueError("it is another kernel's")
    if not all(isinstance(symbol, str) for symbol in (name, *needed)):
        raise TypeError("its symbols have no names")
    return name, needed, code


def read(kernel: str) -> tuple[str, list[str], bytes] | None:
    """Entry point, needed symbols and object code of a kernel; None if they are missing or damaged."""
    path = _path(kernel)
    content = None if path is None else _content(path)
    if path is None or content is None:
        return None
    try:
        return _parsed(content, path.stem)
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("the damaged entry %s of the kernel cache is replaced: %s", path, error)
        return None


def write(kernel: str, name: str, needed: list[str], code: bytes) -> None:
    """Store an entry; other processes see all of it or nothing."""
    global _not_kept
    path = _path(kernel)
    try:
        if path is None:
            raise FileNotFoundError(0, "no home folder")
        _store(path, json.dumps([path.stem, name, needed]).encode() + b"\n" + code)
    except OSError as error:
        if not _not_kept:
            _not_kept = True
            warnings.warn(
                f"compiled kernels cannot be kept in {'a cache' if path is None else path.parent} "
                f"({error.strerror or error}); set RELPOS_CACHE_DIR to a folder that can be written",
                CacheWarning,
                stacklevel=2,
            )


def _store(path: Path, content: bytes) -> None:
    if os.environ.get("RELPOS_CACHE_DIR"):
        # Whoever chose it may mean others to read it, as an image does that root has made.
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := _distrust(path.parent.stat()):
        raise PermissionError(0, f"it would not be trusted: {why}")
    begun = path.parent / f".{path.stem}-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(begun, flags, 0o644), "wb") as file:  # noqa: PTH123
            file.write(hashlib.sha256(content).digest() + content)
        begun.replace(path)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
