"""Kernels that measure the device: a loop of FMA instructions on registers, and one that does nothing."""

from __future__ import annotations

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.device import jit

CHAINS = 8
# Each turn of the loop has so many steps of every chain.
STEPS = 8


@jit(fastmath=True)
def multiply_add(out, turns, factor, summand):
    """Eight independent chains a thread: more than one instruction's latency needs, with enough threads."""
    a0 = factor * np.float32(cuda.threadIdx.x)
    a1, a2, a3 = a0 + factor, a0 - factor, a0 + summand
    a4, a5, a6, a7 = a1 + summand, a2 + summand, a3 + factor, a3 - summand
    for _ in range(turns):
        for _ in range(8):
            a0 = a0 * factor + summand
            a1 = a1 * factor + summand
            a2 = a2 * factor + summand
            a3 = a3 * factor + summand
            a4 = a4 * factor + summand
            a5 = a5 * factor + summand
            a6 = a6 * factor + summand
            a7 = a7 * factor + summand
    out[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))


@jit()
def nothing(x):
    """As cheap as a launch can be."""


@jit()
def nothing_of_ten(a, b, c, d, e, f, g, h, i, j):
    """A launch with ten arrays."""
