"""The 100 % marks, measured in the same process: FMA instructions on registers, and memory read by all threads.

Numba and the kernels are imported when first used: asv forks its benchmarks from a process that has imported this
module, and a forked child may not use the parent's threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from relpos_np.types import Array


@cache
def _kernels() -> tuple[Any, Any, int]:
    """The loop of FMAs, the loop that reads, and the operations of one turn of the first."""
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from relpos_np.kernels._numba.simd.target import TARGET
    from relpos_np.kernels._numba.simd.vectors import Vectors, index

    accumulators = 24 if TARGET.vector_bytes == 64 else 12

    @intrinsic
    def turns(typingctx: Any, count: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            v = Vectors(builder, 32)
            factor = v.splat(args[1])
            start = [factor] * accumulators
            sums = v.loop(index(0), args[0], 1, start, lambda _, acc: [v.fma(a, factor, factor) for a in acc])
            total = sums[0]
            for other in sums[1:]:
                total = builder.fadd(total, other)
            return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

        return types.float32(types.int64, types.float32), generate

    @numba.njit(nogil=True)
    def one(count: Any, x: Any) -> Any:
        return turns(count, x)

    @numba.njit(parallel=True, nogil=True)
    def multiply(count: Any, x: Any, threads: Any) -> Any:
        out = np.zeros(threads, np.float32)
        for thread in numba.prange(threads):
            out[thread] = one(count, x)
        return out

    # Vectors need leave to reassociate the sum, and an index that cannot be negative.
    @numba.njit(nogil=True, fastmath={"reassoc", "contract"})
    def add(x: Any) -> Any:
        total = np.float32(0)
        for n in range(len(x)):
            total += x[n]
        return total

    @numba.njit(parallel=True, nogil=True)
    def read(x: Any, threads: Any) -> Any:
        out = np.zeros(threads, np.float32)
        size = len(x)
        for thread in numba.prange(threads):
            t = np.int64(thread)
            out[t] = add(x[size * t // threads : size * (t + 1) // threads])
        return out

    return multiply, read, 2 * accumulators * TARGET.lanes(4)


def fma_seconds(turns: int, threads: int) -> float:
    """Run the loop once; return its time."""
    multiply = _kernels()[0]
    started = time.perf_counter()
    multiply(turns, np.float32(0.5), threads)
    return time.perf_counter() - started


def turns_for(seconds: float, threads: int) -> int:
    """How many turns take about this long, so that both sides of a ratio see the same noise."""
    fma_seconds(1000, threads)
    turns = 200_000
    return max(1000, int(turns * seconds / min(fma_seconds(turns, threads) for _ in range(5))))


def rate(turns: int, threads: int, seconds: float) -> float:
    """Operations per second."""
    return _kernels()[2] * turns * threads / seconds


def to_read(arrays: Sequence[Array]) -> Array:
    """The arrays' bytes one after the other for read_seconds, as float32 whatever they hold.

    Two numbers of half precision make one float32. Those that are drawn here are neither infinite nor so small that
    a processor would add them slowly.
    """
    return np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.float32) for x in arrays])


def read_seconds(x: Array, threads: int) -> float:
    """Time to read what to_read made once."""
    read = _kernels()[1]
    started = time.perf_counter()
    read(x, threads)
    return time.perf_counter() - started
