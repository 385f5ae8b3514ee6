"""Sinks on the device: what `_calls/sinks.py` says of outputs, log-sum-exps and gradients, a thread per query."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.arrays.operand import Operand
from relpos_np.kernels._cuda.backward_pass.sums import THREADS, blocks_for, delta_kernel
from relpos_np.kernels._cuda.launch.device import inline, jit, launch
from relpos_np.kernels._cuda.simd.elementwise import elementwise
from relpos_np.kernels._cuda.simd.intrinsics import u64


@cache
def _shares(dtype: np.dtype[Any]) -> Any:
    """The function from a log-sum-exp and a sink to the shares of the keys and the sink, and ln of their sum."""
    real = dtype.type
    zero, one, least = real(0), real(1), real(-np.inf)

    def shares(lse, own):  # type: ignore[no-untyped-def]
        apart = zero if lse == own else lse - own
        # Of the smaller one by its exponential, so that neither share is rounded to 0 or 1 before it must be.
        e = real(math.exp(-abs(apart)))
        small, large = e / (one + e), one / (one + e)
        if lse == least and own == least:
            return zero, zero, least
        if lse >= own:
            return large, small, lse + real(math.log1p(e))
        return small, large, own + real(math.log1p(e))

    return inline(shares)


@cache
def sink_kernel(dtype: np.dtype[Any]) -> Any:
    """The kernel that replaces log-sum-exps by those with sinks, and writes the shares of the keys."""
    shares = _shares(dtype)

    @jit()
    def kernel(lse, sinks, keys, size):  # type: ignore[no-untyped-def]
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < size:
            at = u64(n)
            keys[at], _, lse[at] = shares(lse[at], sinks[at])
            n += cuda.gridDim.x * THREADS

    return kernel


@cache
def before_kernel(dtype: np.dtype[Any]) -> Any:
    """The kernel for the gradients of log-sum-exps and sinks, and the shares of the keys."""
    shares, zero = _shares(dtype), dtype.type(0)

    @jit()
    def kernel(result, sinks, upstream, grads, size, v_dim, given):  # type: ignore[no-untyped-def]
        out, lse = result
        grad_out, grad_lse = upstream
        keys, to_lse, to_sinks = grads
        n = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while n < size:
            at = u64(n)
            of_keys, own, _ = shares(lse[at], sinks[at])
            moved = zero
            for d in range(v_dim):
                # A row whose values are not finite, but which nobody asks about, has no gradient.
                if grad_out[u64(n * v_dim + d)] != zero:
                    moved += grad_out[u64(n * v_dim + d)] * out[u64(n * v_dim + d)]
            moved *= of_keys * own
            keys[at], to_lse[at], to_sinks[at] = of_keys, moved, -moved
            if given != 0:
                to_lse[at] += of_keys * grad_lse[at]
                to_sinks[at] += own * grad_lse[at]
            n += cuda.gridDim.x * THREADS

    return kernel


def _column(x: Operand) -> Operand:
    """Numbers of queries as vectors of one channel."""
    return Operand(x.flat, (*x.shape, 1), (*x.strides, 0), x.dtype)


def sink(out: Operand, lse: Operand, sinks: Operand, target: Operand) -> None:
    """Fill `target` with what `out` (..., L_q, D_v) is with sinks (..., L_q), and make `lse` that with them."""
    if not lse.size:
        return
    own, keys = sinks.contiguous(lse.dtype), Operand.empty(lse.shape, lse.dtype)
    launch(sink_kernel(lse.dtype), blocks_for(lse.size), THREADS, lse.flat, own.flat, keys.flat, lse.size)
    shares = _column(keys).broadcast_to(out.shape)
    elementwise("multiply", out.shape, *(x._given() for x in (out, shares, target)))


def before_sinks(
    out: Operand, lse: Operand, sinks: Operand, grad_out: Operand, grad_lse: Operand | None
) -> tuple[Operand, Operand, Operand]:
    """Gradients of the output and log-sum-exp without sinks, and of the sinks, from those with them."""
    keys, to_lse, to_sinks = (Operand.empty(lse.shape, lse.dtype) for _ in range(3))
    if not lse.size:
        return grad_out, to_lse, to_sinks
    own, incoming = sinks.contiguous(lse.dtype), lse if grad_lse is None else grad_lse
    launch(
        *(before_kernel(lse.dtype), blocks_for(lse.size), THREADS),
        *((out.flat, lse.flat), own.flat, (grad_out.flat, incoming.flat), (keys.flat, to_lse.flat, to_sinks.flat)),
        *(lse.size, out.shape[-1], int(grad_lse is not None)),
    )
    return grad_out * _column(keys), to_lse, to_sinks


def scaled(x: Operand, factors: Operand) -> Operand:
    """Vectors (..., L_q, D) times a factor each, (..., L_q)."""
    found: Operand = x * _column(factors)
    return found


def products(x: Operand, y: Operand) -> Operand:
    """The product of each vector of x with that of y, (..., L_q), in the dtype of x."""
    x, y = x.contiguous(x.real), y.contiguous(x.real)
    found = Operand.empty(x.shape[:-1], x.dtype)
    if found.size:
        launch(
            *(delta_kernel(x.dtype), blocks_for(found.size), THREADS, x.flat, y.flat, found.flat, found.flat),
            *(found.size, x.shape[-1], 0),
        )
    return found
