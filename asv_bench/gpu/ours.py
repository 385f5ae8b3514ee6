"""Calls of this library on the device, with several sets of operands so that the cache does not hold them."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
from benchmarks.shapes import as_mapping, lacking

import relpos_np as rp

from . import device


@cache
def refusal():
    """Why arrays on the device are not taken, with which the calls are timed with NumPy's; empty if they are."""
    if device.simulated():
        return "the simulator has no arrays on a device"
    x = device.upload(np.ones((1, 2, 8), np.float32))
    try:
        found = rp.attention(x, x, x, backend="cuda")
    except Exception as error:  # noqa: BLE001 - whatever it says is the answer
        return f"{type(error).__name__}: {error}"[:400]
    return "the result is a NumPy array" if isinstance(found, np.ndarray) else ""


def operands(*arrays):
    """Arrays as a call gets them, and what they are in words."""
    if refusal():
        return list(arrays), "NumPy arrays" + ("" if device.simulated() else ", copied to the device and back")
    torch, _ = device.torch_on_device()
    if torch is None and any(x.dtype.name == "bfloat16" for x in arrays):
        return list(arrays), "NumPy arrays, copied to the device and back"
    return [device.upload(x) for x in arrays], "torch tensors" if torch is not None else "numba.cuda arrays"


class Prepared:
    """Calls on sets of operands in turn; `of` makes the call of one set."""

    def __init__(self, of, sets, to_numpy):
        self.of, self.sets, self.to_numpy = of, sets, to_numpy
        self.turn = 0

    def __call__(self):
        self.turn = (self.turn + 1) % len(self.sets)
        return self.of(*self.sets[self.turn])

    def answer(self):
        """The result for the first set, on the host."""
        return self.to_numpy(self.of(*self.sets[0]))


def sets_for(amount):
    """How many sets of so many bytes no cache holds: two at least."""
    cache = 0 if device.simulated() else device.cuda().get_current_device().L2_CACHE_SIZE
    return int(min(max(2, -(-2 * cache // max(amount, 1)) + 1), 48))


def on_unit(unit, call):
    """A call whose products are made by a unit."""

    def run(*operands):
        os.environ["RELPOS_CUDA_UNIT"] = unit
        return call(*operands)

    return run


def prepare(row, subject, count):
    """The row's call, and what its operands are in words."""
    if row.task == "rel_shift":
        sets, words = several(count, subject)
        variant = row.shape.variant
        return Prepared(lambda x: rp.rel_shift(x, variant=variant, backend="cuda"), sets, device.download), words
    if reason := lacking(subject.shape):
        raise RuntimeError(reason)
    options = subject.kwargs | {"backend": "cuda"}
    if row.task == "backward":
        sets, words = several(count, subject.q, subject.k, subject.v, subject.grad_out)

        def gradient(q, k, v, grad_out):
            return rp.attention_vjp(q, k, v, grad_out=grad_out, **options)

        return Prepared(gradient, sets, gradients), words
    sets, words = several(count, subject.q, subject.k, subject.v)
    call = on_unit(row.unit, lambda q, k, v: rp.attention(q, k, v, **options))
    return Prepared(call, sets, device.download), words


def several(count, *arrays):
    """So many sets of operands with the same numbers in different places."""
    sets = []
    for _ in range(count):
        made, words = operands(*arrays)
        sets.append([x.copy() if isinstance(x, np.ndarray) else x for x in made])
    return sets, words


def gradients(found):
    """Gradients by name, on the host."""
    return {name: device.download(x) for name, x in as_mapping(found).items()}
