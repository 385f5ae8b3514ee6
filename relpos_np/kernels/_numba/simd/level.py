"""The level of instructions that kernels are compiled for, where it is not all that this processor has."""

from __future__ import annotations

import os

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

from relpos_np.errors import RelposValueError

# What each level has of what matters here, by LLVM's names: of the features that decide the tiles, all.
LEVELS: dict[str, tuple[str, ...]] = {"x86-64-v3": ("avx2", "fma", "f16c")}
LEVELS["x86-64-v4"] = (*LEVELS["x86-64-v3"], "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def choose() -> str:
    """Tell Numba's compiler the level that `RELPOS_CPU_LEVEL` names; return what kernels are compiled for.

    That is the level, what `NUMBA_CPU_NAME` says, or LLVM's name of this processor.
    """
    level = os.environ.get("RELPOS_CPU_LEVEL")
    if level:
        if level not in LEVELS:
            raise RelposValueError(f"RELPOS_CPU_LEVEL: expected one of {', '.join(LEVELS)}, found {level!r}")
        there = llvm.get_host_cpu_features()
        lacking = [name for name in LEVELS[level] if not there.get(name)]
        if lacking:
            raise RelposValueError(f"RELPOS_CPU_LEVEL: {level} needs {', '.join(lacking)}; this processor has none")
        config.CPU_NAME, config.CPU_FEATURES = level, ",".join(f"+{name}" for name in LEVELS[level])
    return str(config.CPU_NAME) if config.CPU_NAME not in (None, "", "host") else str(llvm.get_host_cpu_name())


COMPILED_FOR = choose()


def check_compiler() -> None:
    """Raise an error if Numba's compiler was made for something else, before the level was chosen."""
    if os.environ.get("RELPOS_CPU_LEVEL") and cpu_target.target_context.codegen()._tm_features != config.CPU_FEATURES:
        raise RelposValueError(
            "RELPOS_CPU_LEVEL: Numba has compiled for another processor in this process before; set "
            f"NUMBA_CPU_NAME={config.CPU_NAME} and NUMBA_CPU_FEATURES={config.CPU_FEATURES} as well"
        )
