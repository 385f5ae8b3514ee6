"""Reading .safetensors files: a header in JSON, then numbers; every size is checked before memory is taken."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from relpos_np._files import untrusted as reading
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError
from relpos_np.types import Array

# The format's names for the types that NumPy can hold, with ml_dtypes for BF16. 8-bit floats and packed types
# have no exact counterpart.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "bfloat16",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
    "C64": "<c8",
}
# The header of a checkpoint with a hundred thousand tensors has a third of this.
_HEADER = 1 << 25
INSTALL = "install it with `pip install relpos-np[safetensors]`"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as the header describes it; `start` and `stop` count bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def bfloat16() -> Any:
    """The dtype, which NumPy does not have by itself: that of ml_dtypes; a RelposImportError without that package."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise RelposImportError(f"bfloat16 needs the package ml_dtypes; {INSTALL}") from error
    return ml_dtypes.bfloat16


def entries(file: BinaryIO, size: int) -> dict[str, Entry]:
    """What the header of a file of `size` bytes says, by the tensors' names and in its order; reads from the beginning.

    A RelposValueError says that the header is damaged, or that its tensors are not exactly what follows it: without
    holes or overlaps, and as long as their shapes say.
    """
    if size < 8:
        raise RelposValueError(f"{size} bytes are too few for a header")
    length = int.from_bytes(reading.exactly(file, 8).tobytes(), "little")
    if length > min(_HEADER, size - 8):
        raise RelposValueError(f"a header of {length} bytes; the file has {size}, and {_HEADER} are allowed")
    header = reading.parsed(reading.exactly(file, length).tobytes())
    about = header.pop("__metadata__", {})
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise RelposValueError("__metadata__: expected texts by name")
    found = {name: _entry(name, given, 8 + length) for name, given in header.items()}
    end = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise RelposValueError(f"{name!r}: starts at byte {entry.start}; what precedes it ends at {end}")
        end = entry.stop
    if end != size:
        raise RelposValueError(f"the tensors end at byte {end}, the file at {size}")
    return found


def _entry(name: str, given: Any, start: int) -> Entry:
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise RelposValueError(f"{name!r}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or not dtype.isprintable():
        raise RelposValueError(f"{name!r}: expected the name of a dtype")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise RelposValueError(f"{name!r}: expected a shape, and offsets from low to high")
    if dtype in DTYPES:
        itemsize = 2 if dtype == "BF16" else np.dtype(DTYPES[dtype]).itemsize
        if math.prod(shape) * itemsize != offsets[1] - offsets[0]:
            raise RelposValueError(f"{name!r}: {offsets[1] - offsets[0]} bytes cannot be {dtype} {shape}")
    return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _counts(value: Any) -> bool:
    """Whether it is a short list of numbers of bytes or elements."""
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def tensor(file: BinaryIO, name: str, entry: Entry, source: str) -> Array:
    """The numbers of a tensor, in the dtype that is stored; `name` and `source` are for messages.

    Raises a RelposTypeError if NumPy has no such type, a RelposImportError for bfloat16 without ml_dtypes, and a
    RelposValueError if the file ends before.
    """
    if entry.dtype not in DTYPES:
        raise RelposTypeError(f"{name}: {source} holds it as {entry.dtype}, expected one of {', '.join(DTYPES)}")
    dtype = np.dtype(bfloat16() if entry.dtype == "BF16" else DTYPES[entry.dtype])
    file.seek(entry.start)
    try:
        x: Array = reading.exactly(file, entry.stop - entry.start).view(dtype).reshape(entry.shape)
    except ValueError as error:
        # It ends early; or one axis is empty, and others are longer than NumPy allows.
        raise RelposValueError(f"{name}: {source}: {error}") from error
    return x


def half(bits: Array) -> Array:
    """Numbers of bfloat16 from their bits; without ml_dtypes in float32, which has the same numbers."""
    try:
        return bits.view(bfloat16())
    except RelposImportError:
        return (bits.astype(np.uint32) << 16).view(np.float32)


class TensorFile(Mapping[str, Array]):
    """A .safetensors file; a tensor is read when it is asked for. A missing or damaged file is a RelposValueError.

    The file is opened anew for each tensor. It is not mapped into memory: a mapped file that becomes shorter would end
    the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with reading.opened(path) as file:
                status = os.fstat(file.fileno())
                self._version = _version(status)
                self._entries = entries(file, status.st_size)
        except FileNotFoundError:
            raise RelposValueError(f"source: {path}: no such file") from None
        except OSError as error:
            raise RelposValueError(
                f"source: {path}: not a readable .safetensors file: {error.strerror or error}"
            ) from error
        except RelposValueError as error:
            raise RelposValueError(f"source: {path}: not a readable .safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Array:
        entry = self._entries[name]
        try:
            with reading.opened(self._path) as file:
                if _version(os.fstat(file.fileno())) != self._version:
                    raise RelposValueError(f"{name}: {self._path} has changed since it was opened")
                if entry.dtype == "BF16":
                    return half(tensor(file, name, replace(entry, dtype="U16"), str(self._path)))
                return tensor(file, name, entry, str(self._path))
        except OSError as error:
            raise RelposValueError(f"{name}: {self._path} cannot be read: {error.strerror or error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"{self._path} ({len(self)} tensors)"


class Shards(Mapping[str, Array]):
    """The files of a sharded checkpoint, which an index beside them names; each is opened when one is asked for."""

    def __init__(self, index: Path) -> None:
        self._index = index
        try:
            listed = reading.parsed(reading.whole(index, _HEADER)).get("weight_map")
        except (OSError, RelposValueError) as error:
            raise RelposValueError(f"source: {index}: not a readable index: {error}") from error
        if not isinstance(listed, dict) or not all(map(_beside, listed.values())):
            raise RelposValueError(f"source: {index}: expected a weight_map, of names of files beside it")
        self._files: dict[str, str] = listed
        self._open: dict[str, TensorFile] = {}

    def __getitem__(self, name: str) -> Array:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = TensorFile(self._index.with_name(file))
        if name not in self._open[file]:
            raise RelposValueError(f"{name}: {self._index} says that it is in {file}, which does not have it")
        return self._open[file][name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _beside(name: Any) -> bool:
    """Whether it is the name of a .safetensors file, without a folder."""
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def checkpoint(path: Path) -> Mapping[str, Array]:
    """A .safetensors file, the index of several, or the folder of either."""
    if os.path.isdir(path):  # noqa: PTH112 -- False for a name that no file can have
        ends = (".safetensors.index.json", ".safetensors")
        found = next((names for end in ends if (names := sorted(path.glob(f"*{end}")))), [])
        if len(found) != 1:
            raise RelposValueError(
                f"source: {path}: expected a folder with one .safetensors file or one index of several, found "
                f"{', '.join(name.name for name in found) or 'none'}"
            )
        path = found[0]
    return Shards(path) if path.name.endswith(".safetensors.index.json") else TensorFile(path)


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def from_bytes(data: bytes) -> tuple[dict[str, Entry], BinaryIO]:
    """What the header says of a file that has been read, and a file for `tensor`."""
    file = io.BytesIO(data)
    return entries(file, len(data)), file
