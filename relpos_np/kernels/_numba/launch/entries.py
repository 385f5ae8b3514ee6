"""Entry points of kernels: for each dtype one C function, which calls the kernel's body for each of its threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import carray

from relpos_np.kernels._numba.launch.build import Kernel
from relpos_np.kernels._numba.simd.float_state import begin_floats, end_floats
from relpos_np.kernels._numba.simd.rows import get, opaque


def _entry(module: str, name: str, record: np.dtype[Any], pointer: Any, body: Any) -> Kernel:
    """The kernel of one dtype: each thread does what is left of one record after the other."""

    def entry(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
        # The same bits whatever the caller, or the library of a pool's threads, has made of the state.
        former = begin_floats()
        for n in range(get(lengths, 0)):
            one = call
            while one:
                p = carray(opaque(one), 1, record)[0]
                body(one, pointer(p.work + get(get(arrays, 0), n) * p.work_stride))
                one = p.next
        end_floats(former)

    # What it is called in the cache and in messages.
    entry.__name__ = entry.__qualname__ = name
    return Kernel(entry, module)


def entry_points(
    module: str, name: str, record: np.dtype[Any], bodies: Mapping[str, tuple[Any, Any]]
) -> dict[str, Kernel]:
    """Kernels of a module by dtype, of the type of pointer to the workspace of each and its body.

    A body, which is compiled in, gets the record's address and a pointer to the thread's workspace. What else differs
    between dtypes it knows as a closure.
    """
    return {dtype: _entry(module, f"{name}_{dtype}", record, *each) for dtype, each in bodies.items()}
