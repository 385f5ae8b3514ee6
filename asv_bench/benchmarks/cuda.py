"""The CUDA backend on a GPU, with operands that are there; all of it is skipped where there is none.

`asv_bench/gpu.py` compares with other libraries and keeps a record; these only follow a project's history.
"""

from __future__ import annotations

import numpy as np

import relpos_np as rp

from .rel_shift import products
from .shapes import case

LETTERS = ("A", "B", "C", "D", "F", "G", "H")
GRADIENTS = ("A", "B")


def needs_gpu():
    """Raise what asv takes for "skip this", in the driver's own words."""
    if reason := rp.backend.available()[1].get("cuda"):
        raise NotImplementedError(reason)
    from relpos_np.kernels._cuda.launch.device import simulated

    if simulated():
        raise NotImplementedError("the simulator's times mean nothing")


class OnDevice:
    """What all of these do: arrays to the device, and wait for the result there."""

    timeout = 180

    def place(self, *arrays):
        from numba import cuda

        self.cuda = cuda
        return [cuda.to_device(x) for x in arrays]

    def wait(self, found):
        self.cuda.synchronize()
        return found


class Attention(OnDevice):
    """Forward, at the shapes of the CPU's benchmarks."""

    params = list(LETTERS)
    param_names = ["shape"]

    def setup(self, shape):
        needs_gpu()
        self.case = case(shape)
        self.operands = self.place(self.case.q, self.case.k, self.case.v)
        self.time_attention(shape)

    def time_attention(self, shape):
        return self.wait(rp.attention(*self.operands, backend="cuda", **self.case.kwargs))


class Backward(OnDevice):
    """Gradients, forward pass included."""

    params = list(GRADIENTS)
    param_names = ["shape"]

    def setup(self, shape):
        needs_gpu()
        self.case = case(shape)
        *self.operands, self.gradient = self.place(self.case.q, self.case.k, self.case.v, self.case.grad_out)
        self.time_vjp(shape)

    def time_vjp(self, shape):
        options = self.case.kwargs | {"backend": "cuda"}
        return self.wait(rp.attention_vjp(*self.operands, grad_out=self.gradient, **options))


class RelShift(OnDevice):
    """Products with distances of 2048 queries and keys."""

    params = ["conformer", "transformer_xl"]
    param_names = ["variant"]

    def setup(self, variant):
        needs_gpu()
        (self.x,) = self.place(products(variant))
        self.time_rel_shift(variant)

    def time_rel_shift(self, variant):
        return self.wait(rp.rel_shift(self.x, variant=variant, backend="cuda"))

    def track_gb_per_s(self, variant):
        """Bytes of the result, read and written, over the median time by events."""
        start, end = self.cuda.event(), self.cuda.event()
        times = []
        for _ in range(10):
            start.record()
            found = self.time_rel_shift(variant)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 2 * 4 * float(np.prod(found.shape)) / np.median(times) / 1e6

    track_gb_per_s.unit = "GB/s"
