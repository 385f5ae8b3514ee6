"""Arrays in files that any language reads: .npz with the same bytes each time, .safetensors for bfloat16; no pickle."""

from __future__ import annotations

import io
import reprlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from relpos_np._files import npz as npzfile
from relpos_np._files import safetensors as tensorfile
from relpos_np._files.safetensors import INSTALL, bfloat16
from relpos_np.errors import RelposImportError, RelposMemoryError, RelposTypeError, RelposValueError
from relpos_np.types import Array

# What a file may hold, by its name in the JSON beside it; all numbers are little-endian.
DTYPES = ("bool", "int32", "int64", "float16", "float32", "float64", "bfloat16")
# The earliest date that a zip archive can name; a real one would change the bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


class DamagedError(RelposValueError):
    """A file that does not hold what it should."""


@contextmanager
def new_folder(folder: Any) -> Iterator[Path]:
    """A folder to write to, which must not exist or be empty."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise RelposValueError(f"{target}: the folder is not empty")
        yield target
    except OSError as error:
        raise RelposValueError(f"{target}: cannot be written: {error.strerror or error}") from error


def npz(arrays: Mapping[str, Array]) -> bytes:
    """An uncompressed .npz archive with fixed dates, so that the same arrays give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            member = zipfile.ZipInfo(f"{name}.npy", _DATE)
            # As on Unix, whatever the machine.
            member.create_system, member.external_attr = 3, 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, _little(name, arrays[name]), version=(1, 0), allow_pickle=False)
            archive.writestr(member, content.getvalue())
    return buffer.getvalue()


def _little(name: str, x: Array) -> Array:
    if x.dtype.name not in DTYPES:
        raise RelposTypeError(f"{name}: expected dtype {', '.join(DTYPES)}; found {x.dtype}")
    # ascontiguousarray would give a single number an axis.
    return np.array(x, x.dtype.newbyteorder("<"), order="C")


def read_npz(data: bytes, declared: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of an archive that `npz` wrote, each of the dtype and shape that are declared for it."""
    try:
        found = npzfile.read(io.BytesIO(data), len(data), len(data))
    except (RelposMemoryError, RelposValueError) as error:
        raise DamagedError(f"not a readable .npz archive: {error}") from error
    _same_names(list(found), declared)
    for name, x in found.items():
        dtype, shape = declaration(name, declared[name])
        if (x.dtype, x.shape) != (dtype, shape) or not x.flags.c_contiguous:
            raise DamagedError(f"{name}: found {x.dtype} {x.shape}, expected {dtype.name} {shape} in row-major order")
        x.flags.writeable = False
    return found


def _same_names(found: Sequence[str], declared: Mapping[str, Any]) -> None:
    if sorted(found) != sorted(declared):
        raise DamagedError(f"holds {reprlib.repr(sorted(found))}; expected {reprlib.repr(sorted(declared))}")


def declaration(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of an array from its JSON."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape"} or entry["dtype"] not in DTYPES:
        raise DamagedError(f"{name}: expected a dtype and a shape, found {reprlib.repr(entry)}")
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 32 for n in shape):
        raise DamagedError(f"{name}: expected a shape, found {reprlib.repr(shape)}")
    if entry["dtype"] == "bfloat16":
        return np.dtype(bfloat16()), tuple(shape)
    return np.dtype(entry["dtype"]).newbyteorder("<"), tuple(shape)


def safetensors(arrays: Mapping[str, Array]) -> bytes:
    """A .safetensors file."""
    _package()
    from safetensors.numpy import save

    return bytes(save({name: _little(name, arrays[name]) for name in sorted(arrays)}))


def read_safetensors(data: bytes, declared: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of a .safetensors file, each of the dtype and shape that are declared for it."""
    try:
        entries, file = tensorfile.from_bytes(data)
    except RelposValueError as error:
        raise DamagedError(f"not a readable .safetensors file: {error}") from error
    _same_names(list(entries), declared)
    found = {}
    for name, entry in entries.items():
        dtype, shape = declaration(name, declared[name])
        if (_name(entry.dtype), entry.shape) != (dtype.name, shape):
            raise DamagedError(f"{name}: found {entry.dtype} {entry.shape}, expected {dtype.name} {shape}")
        found[name] = tensorfile.tensor(file, name, entry, "the file")
        found[name].flags.writeable = False
    return found


def _name(tag: str) -> str | None:
    """NumPy's name of what safetensors calls so, if a file here may hold it."""
    kind = tensorfile.DTYPES.get(tag)
    name = "bfloat16" if kind == "bfloat16" else None if kind is None else np.dtype(kind).name
    return name if name in DTYPES else None


def _package() -> Any:
    try:
        import safetensors as package
    except ImportError as error:
        raise RelposImportError(f"files with bfloat16 need the package safetensors; {INSTALL}") from error
    return package
