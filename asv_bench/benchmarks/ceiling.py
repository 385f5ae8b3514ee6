"""The register-only FMA loop: the 100 % mark of every kernel, measured in the same process."""

from __future__ import annotations

import time

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.target import TARGET
from relpos_np.kernels._numba.vectors import Vectors, index

_ACCUMULATORS = 24 if TARGET.vector_bytes == 64 else 12
OPERATIONS_PER_TURN = 2 * _ACCUMULATORS * TARGET.lanes(4)


@intrinsic
def _turns(typingctx, count, x):
    def generate(context, builder, signature, args):
        v = Vectors(builder, 32)
        factor = v.splat(args[1])
        start = [factor] * _ACCUMULATORS
        sums = v.loop(index(0), args[0], 1, start, lambda _, acc: [v.fma(a, factor, factor) for a in acc])
        total = sums[0]
        for other in sums[1:]:
            total = builder.fadd(total, other)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64, types.float32), generate


@numba.njit(nogil=True)
def _one(count, x):
    return _turns(count, x)


@numba.njit(parallel=True, nogil=True)
def _loop(count, x, threads):
    out = np.zeros(threads, np.float32)
    for thread in numba.prange(threads):
        out[thread] = _one(count, x)
    return out


def fma_seconds(turns, threads):
    """Run the loop once; return its time."""
    started = time.perf_counter()
    _loop(turns, np.float32(0.5), threads)
    return time.perf_counter() - started


def turns_for(seconds, threads):
    """How many turns take about this long, so that both sides of a ratio see the same noise."""
    fma_seconds(1000, threads)
    turns = 200_000
    return max(1000, int(turns * seconds / min(fma_seconds(turns, threads) for _ in range(5))))


def rate(turns, threads, seconds):
    """Operations per second."""
    return OPERATIONS_PER_TURN * turns * threads / seconds
