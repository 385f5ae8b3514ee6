"""Every array of NumPy beside memory that may not be touched, filled with what would be seen in a result.

NumPy lets its allocator be replaced (NEP 49). This one maps pages of its own for each array, between two pages that may
not be touched, so that to read or write past it is a segmentation fault, and so is to touch it once it is freed. New
memory is NaN in every floating-point type. The rest of an array's pages is looked at when it is freed.
"""

import ctypes
import mmap
import sys

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PAGE, _POISON = mmap.PAGESIZE, 0xFF

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_REALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Handler(ctypes.Structure):
    """`PyDataMem_Handler` of NumPy's C API, version 1."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", _MALLOC),
        ("calloc", _CALLOC),
        ("realloc", _REALLOC),
        ("free", _FREE),
    )


# Numbers of `PyDataMem_SetHandler` in the table of NumPy's C API, and of pages that may be read and written.
_SET_HANDLER, _READ_WRITE = 304, 3


class Guarded:
    """Arrays that are made while this is installed end, or begin, where their memory does."""

    def __init__(self, at_end):
        self.at_end, self.made, self.damaged = at_end, 0, []
        # By address: the pages of an array, and how many bytes of them are its own.
        self._pages = {}
        self._handler = _Handler(
            b"guarded",
            1,
            None,
            _MALLOC(self._malloc),
            _CALLOC(self._calloc),
            _REALLOC(self._realloc),
            _FREE(self._free),
        )

    def _malloc(self, _, size):
        return self._new(size, _POISON)

    def _calloc(self, _, count, size):
        return self._new(count * size, 0)

    def _realloc(self, _, old, size):
        new = self._new(size, _POISON)
        if old:
            ctypes.memmove(new, old, min(size, self._pages[old][2]))
            self._free(None, old, 0)
        return new

    def _new(self, size, fill):
        self.made += 1
        pages = -(-max(size, 1) // _PAGE) * _PAGE
        start = _LIBC.mmap(None, pages + 2 * _PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        inner = start + _PAGE
        if start in (None, ctypes.c_void_p(-1).value) or _LIBC.mprotect(inner, pages, _READ_WRITE):
            return None
        ctypes.memset(inner, _POISON, pages)
        address = inner + pages - size if self.at_end else inner
        ctypes.memset(address, fill, size)
        self._pages[address] = start, pages, size
        return address

    def _free(self, _, address, __):
        start, pages, size = self._pages.pop(address)
        inner = start + _PAGE
        for begin, end in ((inner, address), (address + size, inner + pages)):
            if ctypes.string_at(begin, end - begin).strip(bytes([_POISON])):
                self.damaged.append(f"beside an array of {size} bytes")
        _LIBC.munmap(start, pages + 2 * _PAGE)

    def install(self):
        """For what this thread makes from now on; there is no way back."""
        api = np._core._multiarray_umath._ARRAY_API
        table = ctypes.pythonapi.PyCapsule_GetPointer
        table.restype, table.argtypes = ctypes.POINTER(ctypes.c_void_p), (ctypes.py_object, ctypes.c_char_p)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table(api, None)[_SET_HANDLER])
        set_handler(capsule(ctypes.addressof(self._handler), b"mem_handler", None))
        _tighten()
        return self


def _tighten():
    """Let kernels' own memory begin on a cache line because it ends on one, without room behind it."""
    names = [name for name in sys.modules if name.startswith("relpos_np.kernels._numba")]
    launch = sys.modules["relpos_np.kernels._numba.launch.launcher"]
    address_of, before = launch.address_of, sys.modules["relpos_np.kernels._numba.launch.arrays"].aligned

    def workspace(size):
        kept = np.empty(-(-size // 64) * 64, np.uint8)
        return kept, address_of(kept)

    def aligned(shape, dtype, fill):
        x = np.empty(shape, dtype)
        if address_of(x) % 64:
            return before(shape, dtype, fill)
        if fill is not None:
            x.fill(fill)
        return x

    launch._workspace = workspace
    for name in names:
        if hasattr(sys.modules[name], "aligned"):
            sys.modules[name].aligned = aligned
