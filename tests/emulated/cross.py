"""Compiles kernels for an Arm processor elsewhere, which stdin describes: ``python -m tests.emulated.cross KERNEL``.

An emulated compiler takes ten times as long. It is the same compiler with the same source, and it is told what it
would find out there: the machine, the processor's name and features, and Python's version, which name the entries of
the kernel cache. The machine code is linked here, too, but never run.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
from types import SimpleNamespace

import llvmlite.binding as llvm
from llvmlite.binding.targets import FeatureMap


def pretend(there: dict) -> None:
    """Answer every question about this machine with what is said of another one."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = there["triple"]
    from_triple = llvm.Target.from_triple
    llvm.get_process_triple = llvm.get_default_triple = lambda: triple
    llvm.Target.from_default_triple = lambda: from_triple(triple)
    llvm.get_host_cpu_name = lambda: there["name"]
    llvm.get_host_cpu_features = lambda: FeatureMap(there["features"])
    platform.machine = lambda: there["machine"]
    platform.python_version = lambda: there["python"]


def main() -> None:
    """Compile the kernels that are named and put them into the cache."""
    there = json.load(sys.stdin)
    pretend(there)
    libraries = ctypes.CDLL
    ctypes.CDLL = lambda name: SimpleNamespace(getauxval=lambda kind: there["auxiliary"])
    from relpos_np.kernels._numba import target

    ctypes.CDLL = libraries
    target._system_says_bf16 = lambda: there["bf16"]
    assert there["unit"] == target.UNIT
    from relpos_np.backend import kernels
    from relpos_np.kernels._numba import cache

    for name in sys.argv[1:]:
        kernel = kernels("numba").KERNELS[name]
        if cache.read(kernel.name) is None:
            kernel._store(kernel._compile())


if __name__ == "__main__":
    main()
