"""The memory that interpreted kernels may touch: pointers that know their array, and every access checked.

A pointer belongs to the array in which its address lies when it is made, as pointers of C do, and may be moved
anywhere, but only the elements of that array are legal: neither what lies between the rows of a view, nor a
neighbour, nor inputs when it is written to, nor what another piece of work has written.
"""

from __future__ import annotations

import bisect
import ctypes
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
INT16, UINT16, UINT32 = np.dtype(np.int16), np.dtype(np.uint16), np.dtype(np.uint32)
# Not an element type of a kernel: an array of addresses of int64.
ADDRESS = np.dtype("V8")
# Codes of eight bits, by their format.
CODES = {
    name: np.dtype(kind)
    for name, kind in (("int8s", np.int8), ("e4m3s", ml_dtypes.float8_e4m3fn), ("e5m2s", ml_dtypes.float8_e5m2))
}
_CODES = {
    "float32": "f",
    "float64": "d",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
}
_STRUCTS = {np.dtype(name): struct.Struct("=" + code) for name, code in _CODES.items()} | {ADDRESS: struct.Struct("=q")}


class Fault(AssertionError):
    """An access that compiled code would have made without a word."""


class Region:
    """Bytes at an address. `legal` marks those that may be touched; None: all of them."""

    def __init__(self, name, start, size, *, legal=None, writable=False, shared=False):
        self.name, self.start, self.size = name, start, size
        self.legal, self.writable = legal, writable
        # Legal addresses for whoever is at work.
        self.first, self.last = start, start + size
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)) if size else np.zeros(0, "u1")
        # Which piece of work wrote a byte of a result.
        self.owner = np.zeros(size, np.int32) if shared else None

    def __repr__(self):
        return f"{self.name} ({self.size} bytes)"


class Place(int):
    """An offset into a thread's workspace that stays within the buffer it was made for: elements first ... last - 1."""

    def __new__(cls, value, first, last):
        self = super().__new__(cls, value)
        self.first, self.last = first, last
        return self

    def __add__(self, other):
        return Place(int(self) + other, self.first, self.last)

    __radd__ = __add__

    @classmethod
    def all_of(cls, layout):
        """The offsets that a layout returns, of which the last is the end."""
        ends = sorted(set(layout))
        made = (cls(n, n, ends[min(bisect.bisect_right(ends, n), len(ends) - 1)]) for n in layout)
        return layout._make(made) if hasattr(layout, "_make") else tuple(made)


class Pointer:
    """An address inside a region, and the type of what lies there; `first` and `last` bound the legal addresses."""

    __slots__ = ("address", "first", "kind", "last", "region", "size")

    def __init__(self, region, address, kind, first, last):
        self.region, self.address, self.kind = region, address, kind
        self.first, self.last, self.size = first, last, kind.itemsize

    def moved(self, offset):
        """The pointer `offset` elements further; in one buffer of it if the offset is one's `Place`."""
        first, last = self.first, self.last
        if type(offset) is Place:
            first, last = self.address + offset.first * self.size, self.address + offset.last * self.size
        return Pointer(self.region, self.address + offset * self.size, self.kind, first, last)

    def seen_as(self, kind):
        """The same place with elements of another type."""
        return Pointer(self.region, self.address, kind, self.first, self.last)


class Memory:
    """All regions of one launch, and who is at work."""

    def __init__(self, kernel):
        self.kernel, self.piece = kernel, 0
        self.regions: list[Region] = []
        self.starts: list[int] = []
        self._null = Region("no array", 0, 0)

    def add(self, region):
        """Make a region legal; it overlaps no other."""
        at = bisect.bisect(self.starts, region.start)
        self.regions.insert(at, region)
        self.starts.insert(at, region.start)
        return region

    def find(self, address):
        """The region that holds an address, or None."""
        at = bisect.bisect(self.starts, address) - 1
        region = self.regions[at] if at >= 0 else None
        return region if region is not None and address < region.start + region.size else None

    def pointer(self, address, kind):
        """An address as a pointer; 0 is one that may not be followed."""
        address = int(address)
        region = self._null if address == 0 else self.find(address)
        if region is None:
            raise self.fault(f"an address in no array, {address:#x}", address)
        return Pointer(region, address, kind, region.first, region.last)

    def fault(self, what, address, region=None):
        """The error that says who did what, where, and which array is nearest."""
        frame, steps = sys._getframe(1), []
        while frame is not None and len(steps) < 4:
            path = Path(frame.f_code.co_filename)
            if "_numba" in path.parts or path.name == "vectors.py":
                steps.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        place = ""
        known = self.regions if region is None or region.size == 0 else [region]
        if known:
            near = min(known, key=lambda r: max(r.start - address, address - r.start - r.size + 1, 0))
            place = f", {address - near.start} bytes from the start of {near!r}"
        return Fault(f"{self.kernel}: {what} at {address:#x}{place}; in {' < '.join(steps)}")

    def check(self, pointer, low, high, *, write):
        """Refuse bytes low ... high - 1 if they are not the pointer's to read, or to write."""
        region = pointer.region
        if low < pointer.first or high > pointer.last:
            if region.start <= low and high <= region.start + region.size:
                raise self.fault(
                    f"an access to {high - low} bytes, beyond a buffer of {pointer.last - pointer.first} bytes that "
                    f"begins {low - pointer.first} bytes before,",
                    low,
                    region,
                )
            raise self.fault(f"an access to {high - low} bytes out of bounds", low, region)
        if write and not region.writable:
            raise self.fault("a write to an input", low, region)

    def row(self, pointer, offset, count, *, write=False):
        """`count` adjacent elements as an array."""
        return self.grid(pointer, offset, 1, 0, count, write=write)[0]

    def grid(self, pointer, offset, rows, step, columns, *, write=False):
        """Rows of elements, `step` elements apart, as an array of the memory itself."""
        if type(offset) is Place:
            pointer, offset = pointer.moved(offset), 0
        size, region = pointer.size, pointer.region
        if rows <= 0 or columns <= 0:
            return np.empty((max(rows, 0), max(columns, 0)), pointer.kind)
        start = pointer.address + offset * size
        reach = (rows - 1) * step * size
        self.check(pointer, start + min(reach, 0), start + max(reach, 0) + columns * size, write=write)
        at, strides = start - region.start, (step * size, size)
        if region.legal is not None:
            legal = np.ndarray((rows, columns * size), np.uint8, region.legal, at, (step * size, 1))
            if not legal.all():
                row, column = np.argwhere(legal == 0)[0]
                where = start + int(row) * step * size + int(column)
                raise self.fault(f"an access to an element that is excluded (row {row} of {rows})", where, region)
        if region.owner is not None:
            shape, apart = (rows, columns * size), (step * size * 4, 4)
            owner = np.ndarray(shape, np.int32, region.owner, at * 4, apart)
            others = owner[(owner != 0) & (owner != self.piece)]
            if others.size:
                raise self.fault(f"piece {self.piece} touches what piece {others[0]} wrote", start, region)
            if write:
                owner[...] = self.piece
        return np.ndarray((rows, columns), pointer.kind, region.bytes, at, strides)

    def get(self, pointer, offset):
        """One element, as a number of Python."""
        if type(offset) is Place:
            pointer, offset = pointer.moved(offset), 0
        low = pointer.address + offset * pointer.size
        region = pointer.region
        self.check(pointer, low, low + pointer.size, write=False)
        if region.legal is not None or region.owner is not None:
            self.grid(pointer, offset, 1, 0, 1)
        return _STRUCTS[pointer.kind].unpack_from(region.bytes, low - region.start)[0]

    def put(self, pointer, offset, value):
        """Store one element."""
        if type(offset) is Place:
            pointer, offset = pointer.moved(offset), 0
        low = pointer.address + offset * pointer.size
        region = pointer.region
        self.check(pointer, low, low + pointer.size, write=True)
        if region.legal is not None or region.owner is not None:
            self.grid(pointer, offset, 1, 0, 1, write=True)
        if pointer.kind == FLOAT32:
            value = ctypes.c_float(value).value
        _STRUCTS[pointer.kind].pack_into(region.bytes, low - region.start, value)


def bounds(x):
    """First address of an array and the one behind its last byte."""
    return np.lib.array_utils.byte_bounds(x)


def marks(low, high, arrays):
    """Which of the bytes low ... high - 1 belong to elements of the arrays; None if all do."""
    found = np.zeros(high - low, np.uint8)
    for x in arrays:
        kind = np.dtype((np.void, x.itemsize))
        view = np.ndarray(x.shape, kind, found, x.__array_interface__["data"][0] - low, x.strides)
        view[...] = np.void(b"\1" * x.itemsize)
    return None if found.all() else found
