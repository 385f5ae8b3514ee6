"""Reading .npz archives: every size is checked before memory is taken, and nothing is evaluated or unpickled."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from typing import Any, BinaryIO

import numpy as np

from relpos_np._contract import check
from relpos_np._files import untrusted as reading
from relpos_np.errors import RelposMemoryError, RelposTypeError, RelposValueError
from relpos_np.types import Array

# The directory at the archive's end is read at once; this is room for some ten thousand arrays.
_PIECE = 1 << 20
# Of a .npy file; that of an array with 64 axes has a third of this.
_HEADER = 4096
# One byte of deflated data holds at most this many.
_RATIO = 1032
# What a compressed archive may unpack to: so many bytes, or so many times its own size.
_UNPACKED = 1 << 28
_TIMES = 16
_ADVICE = "; numpy.savez, which does not compress, writes a file that may have any size"
_FIELD = re.compile(
    r"\s*['\"](descr|fortran_order|shape)['\"]\s*:\s*"
    r"(?:['\"]([^'\"]*)['\"]|(True|False)|\(([0-9L,\s]*)\))\s*,?\s*"
)
_DTYPE = re.compile(r"[<>|=]?(?:[?]|b1|[iufcUSV][0-9]{1,9})")


class _Pieces:
    """A file that returns at most a piece at a time, because `zipfile` reads as much as an archive says."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self._file = file

    def read(self, count: int = -1) -> bytes:
        asked = _PIECE + 1 if count < 0 else count
        found = self._file.read(min(asked, _PIECE + 1))
        if len(found) > _PIECE:
            raise RelposValueError(f"its directory is longer than {_PIECE} bytes")
        return found

    def close(self) -> None:
        """Leave the file open: it belongs to the caller."""


def load_npz(source: bytes | str | os.PathLike[str], *, limit: int | None = None) -> dict[str, Array]:
    """All arrays of an untrusted .npz archive, whose sizes are checked before memory is allocated.

    Parameters
    ----------
    source : bytes or path
        The archive itself, such as the body of a request, or where it is: a regular file.
    limit : int, optional
        Bytes that its arrays may have in all, as its directory and their headers state them. Default: 256 MiB, or 16
        times the size of the archive where that is more, which an archive that is not compressed never reaches.

    Returns
    -------
    dict of str to ndarray
        The arrays by name, in the order of the archive.

    Raises
    ------
    RelposMemoryError
        If its arrays have more bytes than the limit.
    RelposValueError
        If it is damaged or missing, or holds anything but arrays of numbers and strings. Nothing is unpickled.
    RelposTypeError
        If `source` is neither bytes nor a path, or `limit` no integer.

    See Also
    --------
    relpos_np.memory_limit : The same for what a call then allocates.

    Examples
    --------
    >>> import io, numpy as np, relpos_np as rp
    >>> file = io.BytesIO()
    >>> np.savez_compressed(file, q=np.zeros((4, 1000, 1000)))
    >>> len(file.getvalue()) < 100_000
    True
    >>> rp.load_npz(file.getvalue(), limit=2**20)
    Traceback (most recent call last):
    ...
    relpos_np.errors.RelposMemoryError: source: not a readable .npz archive: its arrays have 32000128 bytes, and ...
    """
    if limit is not None:
        limit = check.integer("limit", limit, 0)
    if isinstance(source, bytes):
        return _read(io.BytesIO(source), len(source), limit, "source")
    if not isinstance(source, str | os.PathLike):
        raise RelposTypeError(f"source: expected bytes or a path, found {type(source).__name__}")
    where = f"source: {os.fspath(source)}"
    try:
        with reading.opened(source) as file:
            return _read(file, os.fstat(file.fileno()).st_size, limit, where)
    except FileNotFoundError:
        raise RelposValueError(f"{where}: no such file") from None
    except OSError as error:
        raise RelposValueError(f"{where}: not a readable .npz archive: {error.strerror or error}") from error


def _read(file: BinaryIO, size: int, limit: int | None, where: str) -> dict[str, Array]:
    if file.read(6) == b"\x93NUMPY":
        raise RelposValueError(
            f"{where}: not a readable .npz archive: it is a single array; write arrays by name with numpy.savez"
        )
    file.seek(0)
    try:
        return read(file, size, max(_UNPACKED, _TIMES * size), _ADVICE) if limit is None else read(file, size, limit)
    except (RelposValueError, RelposMemoryError) as error:
        raise type(error)(f"{where}: not a readable .npz archive: {error}") from error


def read(file: BinaryIO, size: int, limit: int, advice: str = "") -> dict[str, Array]:
    """All arrays of an archive by name, in its order.

    The file has `size` bytes, and its arrays may have `limit` bytes in all; `advice` is for those that have more. A
    RelposValueError says that it is damaged or holds something else than arrays of numbers and strings, a
    RelposMemoryError that they have more.
    """
    try:
        with zipfile.ZipFile(_Pieces(file)) as archive:
            members = archive.infolist()
            _sizes(members, size, limit, advice)
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except (RelposValueError, RelposMemoryError):
        raise
    except MemoryError as error:
        raise RelposValueError("there is not enough memory for its arrays") from error
    except Exception as error:
        # zipfile, zlib, struct and NumPy report a damaged archive in many ways.
        raise RelposValueError(str(error) or type(error).__name__) from error


def _sizes(members: list[zipfile.ZipInfo], size: int, limit: int, advice: str) -> None:
    """Check what the directory says, before anything is unpacked."""
    names = set()
    for member in members:
        name = member.filename
        if not name.isprintable() or name in names:
            raise RelposValueError(f"{name!r}: an unusable name, or one that is there twice")
        names.add(name)
        if not name.endswith(".npy"):
            raise RelposValueError(f"{name} is not an array")
        if member.flag_bits & 0x1:
            raise RelposValueError(f"{name} is encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise RelposValueError(f"{name}: compressed in another way than numpy.savez_compressed does it")
        ratio = _RATIO if member.compress_type == zipfile.ZIP_DEFLATED else 1
        if not 0 <= member.compress_size <= size or not 0 <= member.file_size <= ratio * member.compress_size:
            raise RelposValueError(
                f"{name}: {member.compress_size} bytes in a file of {size} cannot hold {member.file_size}"
            )
    total = sum(member.file_size for member in members)
    if total > limit:
        raise RelposMemoryError(f"its arrays have {total} bytes, and {limit} are allowed for a file of {size}{advice}")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    name = member.filename
    with archive.open(member) as file:
        start = reading.exactly(file, min(10, member.file_size)).tobytes()
        if len(start) < 10 or start[:6] != b"\x93NUMPY" or start[6:8] not in (b"\x01\x00", b"\x02\x00"):
            raise RelposValueError(f"{name} is not an array")
        if start[6] == 1:
            length, used = int.from_bytes(start[8:], "little"), 10
        else:
            length, used = int.from_bytes(start[8:] + reading.exactly(file, 2).tobytes(), "little"), 12
        if length > _HEADER:
            raise RelposValueError(f"{name}: a header of {length} bytes, and {_HEADER} are allowed")
        dtype, by_columns, shape = _header(name, reading.exactly(file, length).tobytes().decode("latin-1"))
        count = math.prod(shape) * dtype.itemsize
        if used + length + count != member.file_size:
            raise RelposValueError(f"{name}: {member.file_size} bytes cannot be {dtype} {shape}")
        data = reading.exactly(file, count)
        # At the end the checksum is compared.
        if file.read(1):
            raise RelposValueError(f"{name}: longer than it says")
    x: Array = np.ndarray(shape, dtype, data, order="F" if by_columns else "C")
    return x


def _header(name: str, text: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """Dtype, order and shape; the header is Python's notation of a dict, which is read without Python."""
    body = text.strip()
    found: dict[str, str] = {}
    at = 1
    while entry := _FIELD.match(body, at):
        found[entry[1]] = entry[entry.lastindex or 0]
        at = entry.end()
    descr, by_columns, shape = (found.get(key, "") for key in ("descr", "fortran_order", "shape"))
    if "O" in descr:
        raise RelposValueError(f"{name}: holds pickled objects, which are never loaded")
    if body[:1] + body[at:] != "{}" or len(found) != 3 or by_columns not in ("True", "False"):
        raise RelposValueError(f"{name}: expected the header of an array of numbers, found {text[:80]!r}")
    if not _DTYPE.fullmatch(descr):
        raise RelposValueError(f"{name}: expected numbers or strings, found dtype {descr[:20]!r}")
    axes = [axis.strip().removesuffix("L") for axis in shape.split(",")]
    if axes[-1] == "":
        axes.pop()
    if not all(axis.isdecimal() and len(axis) < 20 for axis in axes) or len(axes) > 64:
        raise RelposValueError(f"{name}: expected a shape, found ({shape[:80]})")
    return np.dtype(descr), by_columns == "True", tuple(int(axis) for axis in axes)
