"""Threads of PyTorch's GNU OpenMP library, where kernels would otherwise run on a second pool of threads.

PyTorch's wheel has such a library of its own, and Numba is linked with the system's: each has a pool. After a parallel
loop its threads go on waiting for more in a loop for some milliseconds, on the processors that the other pool needs
then. So kernels run on PyTorch's pool where it has one. (Where Numba's was loaded first, PyTorch shares that.)
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

# What a thread of the pool runs: it asks for its number, and calls the kernel as Numba's own pool would.
_THREAD = """
define void @relpos_np_thread(ptr %call) {
entry:
  %number_at = getelementptr i64, ptr %call, i64 5
  %number_function = load ptr, ptr %number_at
  %number = call i32 %number_function()
  %kernel = load ptr, ptr %call
  %numbers_at = getelementptr i64, ptr %call, i64 1
  %numbers = load ptr, ptr %numbers_at
  %lengths_at = getelementptr i64, ptr %call, i64 2
  %lengths = load ptr, ptr %lengths_at
  %steps_at = getelementptr i64, ptr %call, i64 3
  %steps = load ptr, ptr %steps_at
  %record_at = getelementptr i64, ptr %call, i64 4
  %record = load ptr, ptr %record_at
  %own = getelementptr i64, ptr %numbers, i32 %number
  %arguments = alloca ptr
  store ptr %own, ptr %arguments
  call void %kernel(ptr %arguments, ptr %lengths, ptr %steps, ptr %record)
  ret void
}
"""
_CALL = struct.Struct("6q")


def torch_library() -> str | None:
    """The GNU OpenMP library that PyTorch brought, if Numba has another; only Linux tells."""
    maps = Path("/proc/self/maps")
    if not sys.platform.startswith("linux") or not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    own = [path for path in paths if "/torch" in path]
    return own[0] if own and len(paths) > 1 else None


class Pool:
    """Threads of the GNU OpenMP library at a path, which is in the process already."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.path = path
        # void GOMP_parallel(function, data, threads, flags)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._number = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p).value or 0
        module = llvm.parse_assembly(_THREAD)
        self._engine: Any = llvm.create_mcjit_compiler(
            module, llvm.Target.from_default_triple().create_target_machine()
        )
        self._engine.finalize_object()
        self._thread = self._engine.get_function_address("relpos_np_thread")

    def run(self, kernel: int, numbers: int, lengths: int, steps: int, record: int, threads: int) -> None:
        """Call a kernel on at most so many threads, each with the address of its number; return when all are done."""
        call = ctypes.create_string_buffer(_CALL.pack(kernel, numbers, lengths, steps, record, self._number))
        self._parallel(self._thread, ctypes.addressof(call), threads, 0)
