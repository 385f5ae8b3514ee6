"""Which unit of the device multiplies, and in what precision."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np.errors import RelposValueError
from relpos_np.kernels._cuda.forward_pass.attend import WIDTHS, width_of
from relpos_np.kernels._cuda.forward_pass.decode import word_of
from relpos_np.kernels._cuda.launch import device
from relpos_np.kernels._cuda.simd.planes import Source
from relpos_np.types import Array

VARIABLE = "RELPOS_CUDA_UNIT"
# "auto" is "fma" until somebody has run "mma" on a device.
UNITS = ("auto", "fma", "mma")
# The oldest devices whose matrix units multiply bfloat16.
CAPABILITY = (8, 0)


class Multiplied(NamedTuple):
    """What products are made of: numbers of half precision, so many for each operand."""

    half: str
    planes: int


def chosen() -> str:
    """One of UNITS but "auto"; a RelposValueError names what the device lacks."""
    found = os.environ.get(VARIABLE) or "auto"
    if found not in UNITS:
        raise RelposValueError(f"{VARIABLE}: expected one of {', '.join(UNITS)}, found {found!r}")
    if found == "mma" and not device.simulated():
        capability = tuple(device.module().get_current_device().compute_capability)
        if capability < CAPABILITY:
            has, needs = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
            raise RelposValueError(f"{VARIABLE}: 'mma' needs compute capability {needs}; this device has {has}")
    return "fma" if found == "auto" else found


def multiplied(problem: Problem, terms: Terms, formats: tuple[str, str, str]) -> Multiplied | None:
    """What matrix units multiply for a call; None: they do not."""
    if chosen() != "mma" or problem.site.dtype.itemsize != 4:
        return None
    half = "float16" if set(formats) == {"float16"} else "bfloat16"
    # What a scheme has made of queries or keys, by turning them too, would be rounded once more.
    stored = len(set(formats)) == 1 and formats[0] == half and terms.query is None and terms.key is None
    if problem.precision == "medium" or (stored and problem.precision is None):
        return Multiplied(half, 1)
    return Multiplied("bfloat16", 2 if problem.precision == "high" else 3)


def value_width(v_dim: int) -> int:
    """How many value channels one block makes; in the simulator its tiles are smaller."""
    return width_of(v_dim, 64 if device.simulated() else WIDTHS[-1])


def source(x: Any, stored: str, depth: int, steps: Array) -> Source:
    """How kernels read an operand on the device."""
    return Source(stored, word_of(x, stored, depth, steps) > 1)
