"""Reading files that somebody else wrote: regular files only, at most the allowed number of bytes, strict JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from typing import Any, BinaryIO

import numpy as np

from relpos_np.errors import RelposValueError
from relpos_np.types import Array

# Opening a pipe must not wait for a writer, and opening a terminal must not make it this process's own.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
# Characters of a number. Turning digits into an integer takes time that grows with their square.
_DIGITS = 1000


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, opened for reading bytes, which the caller closes.

    An OSError says that there is none, or that it is a folder, a pipe, a device or a socket: reading such may never
    end.
    """
    try:
        handle = os.open(path, _FLAGS)
    except ValueError as error:
        # A null character, or one that the file system's encoding lacks.
        raise OSError(errno.EINVAL, str(error)) from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "not a regular file")


def whole(path: str | os.PathLike[str], limit: int) -> bytes:
    """All bytes of a file, or a RelposValueError if they are more than `limit`; for an OSError see `opened`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Python reserves what it is asked to read, so that a limit far beyond the file would cost memory.
        data = file.read(max(0, min(limit, size)) + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise RelposValueError(f"longer than {limit} bytes")
    return data


def exactly(file: Any, count: int) -> Array:
    """So many bytes of an open file, aligned for any dtype; a RelposValueError if it ends before.

    Memory for them is taken at once: the caller has compared their number with the length of the file.
    """
    found = np.empty(count, np.uint8)
    view, at = found.data, 0
    while at < count:
        # In pieces: a compressed member is unpacked into memory of its own first.
        got = file.readinto(view[at : at + (1 << 20)])
        if not got:
            raise RelposValueError(f"ends {count - at} bytes early")
        at += got
    return found


def parsed(data: bytes, *, infinities: bool = False) -> dict[str, Any]:
    """The object that a JSON text in UTF-8 holds: with finite numbers, and no key given twice.

    With `infinities` also Infinity and NaN, which Python writes into configurations of models.

    A RelposValueError says that it is something else, too deep, or has numbers of absurd length.
    """
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_constant=float if infinities else _no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except RelposValueError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise RelposValueError(f"not readable as JSON: {str(error) or type(error).__name__}") from error
    if not isinstance(found, dict):
        raise RelposValueError("expected a JSON object")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RelposValueError("not readable as JSON: a key is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise RelposValueError(f"not readable as JSON: {name} is no number in JSON")


def _short(text: str) -> str:
    if len(text) > _DIGITS:
        raise RelposValueError(f"not readable as JSON: a number of {len(text)} digits")
    return text


def _integer(text: str) -> int:
    return int(_short(text))


def _float(text: str) -> float:
    value = float(_short(text))
    if not math.isfinite(value):
        raise RelposValueError(f"not readable as JSON: {text[:30]} is too large")
    return value
