"""A kernel's code for Hopper devices, and what the assembler says of it."""

import re
from typing import NamedTuple

import numpy as np
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, types

from relpos_np.kernels._cuda.launch.records import Operands, Scales, Tables

CAPABILITY = (9, 0)


class Code(NamedTuple):
    """What a kernel came to: its text for the assembler, registers of a thread, bytes."""

    ptx: str
    registers: int
    spilled: int
    shared: int

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the text."""
        return len(re.findall(rf"\b{re.escape(instruction)}\b", self.ptx))

    def reads_wide(self, numbers: int, dtype: np.dtype) -> bool:
        """Whether so many numbers, or all but a sixteenth, are read from shared memory by loads of 16 bytes.

        The compiler splits one such load into three now and then, in about one of twenty runs on the same kernel.
        """
        found = self.count("ld.shared.v2.f64" if dtype == np.float64 else "ld.shared.v4.f32")
        loads = numbers * dtype.itemsize // 16
        return found >= loads - loads // 16


def flat(kind):
    """Numba's type of a contiguous array with one axis."""
    return types.Array(kind, 1, "C")


def integers(names):
    """Numba's type of a named tuple of integers."""
    return types.NamedUniTuple(types.int64, len(names._fields), names)


def record(kind, *kinds):
    """Numba's type of a named tuple of numbers or arrays."""
    return types.NamedTuple(kinds, kind) if len(set(kinds)) > 1 else types.NamedUniTuple(kinds[0], len(kinds), kind)


TABLES = flat(types.int32), flat(types.uint8), flat(types.int64)


def arguments(operand, real):
    """Numba's types of the operands and tables of a call."""
    return record(Operands, operand, operand, operand), record(Tables, real, *TABLES)


def scales(kind):
    """Numba's type of the factors of a call."""
    return record(Scales, kind, kind, kind)


def compiled(kernel, *kinds):
    """Compile a kernel for arguments of some types, and assemble it; neither needs a driver."""
    signature = types.void(*kinds)
    text, _ = cuda.compile(kernel.py_func, signature, device=False, abi="numba", cc=CAPABILITY, output="ptx")
    ptx = text if isinstance(text, str) else text.decode()
    arch = "sm_{}{}".format(*CAPABILITY)
    linker = Linker(
        ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=arch, verbose=True, ptxas_options=["-v"])
    )
    linker.link("cubin")
    said = linker.get_info_log() + linker.get_error_log()

    def number(pattern):
        found = re.search(pattern, said)
        return int(found.group(1)) if found else None

    spilled, registers = number(r"(\d+) bytes spill stores"), number(r"Used (\d+) registers")
    assert spilled is not None, said
    assert registers is not None, said
    return Code(ptx, registers, spilled + number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem") or 0)
