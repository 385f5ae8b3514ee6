"""What the host's vector unit offers, and every size the CPU kernels derive from it.

This is the one place where vector width, register tiles and cache blocks are chosen.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm

from relpos_np.errors import RelposValueError
from relpos_np.kernels._numba.simd import level as _level  # noqa: F401  (chosen before features are asked for)


@dataclass(frozen=True)
class Target:
    """A vector unit: its register size and count, and the tiles that fit its registers.

    A register tile of ``rows x vectors`` accumulators needs that many registers, one for each
    vector of the right-hand operand and one for the broadcast element of the left-hand one.
    """

    name: str
    vector_bytes: int
    score_rows: int
    score_vectors: int
    value_vectors: int
    accumulators: int

    def lanes(self, itemsize: int) -> int:
        """Elements in one vector register."""
        return self.vector_bytes // itemsize

    def panel(self, itemsize: int) -> int:
        """Keys in one packed panel: the width of a score tile."""
        return self.score_vectors * self.lanes(itemsize)

    def value_rows(self, vectors: int) -> int:
        """Rows of a value tile that is `vectors` registers wide."""
        return self.accumulators // vectors

    def window_rows(self, vectors: int) -> int:
        """The same for windows, mostly of 7 x 7 rows: the height that covers them with the fewest rows to spare."""
        most = self.value_rows(vectors)
        return min(range(most, most * 2 // 3, -1), key=lambda rows: -(-49 // rows) * rows)

    def least_rows(self, width: int) -> int:
        """Rows that a window must have: those of the highest tile that makes results of `width` vectors."""
        strips = [self.value_vectors] * (width >= self.value_vectors) + [width % self.value_vectors]
        return max([self.score_rows, *(self.window_rows(vectors) for vectors in strips if vectors)])


# 24 accumulators leave 8 of 32 registers for operands; 12 leave 4 of 16.
AVX512 = Target("avx512", 64, 6, 4, 4, 24)
NEON = Target("neon", 16, 6, 4, 4, 24)
AVX2 = Target("avx2", 32, 4, 3, 2, 12)
SIMD128 = Target("simd128", 16, 4, 3, 2, 12)

# Vectors of a panel that is narrower than the others.
NARROW = (1, 2)
# Keys per block, which `check_sizes` relates to the tiles above.
BLOCK_KEYS = 192
# Rows of scores are padded to a multiple of this many vectors, which are summed side by side.
SUM_VECTORS = 4
# Bytes that one thread's working set may take; half of the smallest second-level cache in use.
CACHE_BUDGET = 512 * 1024


ARM = platform.machine().lower() in ("aarch64", "arm64")


def _system_says_bf16() -> bool:
    """Whether Linux tells programs that an Arm processor has the extension BF16: both BFDOT and BFMMLA."""
    if sys.platform != "linux":
        return False
    ask, capabilities, brain_float = ctypes.CDLL(None).getauxval, 26, 1 << 14
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(ask(capabilities) & brain_float)


def host_features() -> dict[str, bool]:
    """Features that the compiler will use, which the environment may restrict."""
    from numba.core import config

    listed = config.CPU_FEATURES
    if listed is None:
        if config.CPU_NAME not in (None, "", "host"):
            return {}
        found = dict(llvm.get_host_cpu_features())
        if ARM and llvm.get_host_cpu_name() != "generic" and _system_says_bf16():
            # LLVM does not list it, but uses it where it knows the processor's name.
            found["bf16"] = True
        return found
    return {item[1:]: item.startswith("+") for item in listed.split(",") if item}


def detect() -> Target:
    """Choose the widest target that the host's features allow."""
    features = host_features()
    if os.environ.get("RELPOS_MATRIX_UNIT") == "emulated tiles":
        return AVX512  # a row of a tile is a vector of this one, which the compiler makes of narrower ones
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512dq"):
        return AVX512
    if features.get("avx2") and features.get("fma"):
        return AVX2
    return NEON if ARM or features.get("neon") else SIMD128


TARGET = detect()

# How products of bfloat16 are made, with sums in float32: on matrix tiles, on small matrices in vectors, two at a time
# on vectors, by emulations of each that are slow and for tests, or not at all, so that bfloat16 is widened.
UNITS = ("tiles", "mmla", "dot", "emulated tiles", "emulated mmla", "emulated", "none")
TILES = ("tiles", "emulated tiles")


def _allows_tiles() -> bool:
    """Ask the system for this process's permission to use tile registers, which it has to save for every thread."""
    if sys.platform != "linux":
        return False
    system_call, arch_prctl, request, tile_data = ctypes.CDLL(None).syscall, 158, 0x1023, 18
    return bool(system_call(arch_prctl, request, tile_data) == 0)


def detect_unit() -> str:
    """One of UNITS: `RELPOS_MATRIX_UNIT`, else "tiles" by AMX-BF16, "mmla" by Arm's BF16, "dot" by AVX512-BF16."""
    features, able = host_features(), dict.fromkeys(UNITS, True)
    able["dot"] = bool(features.get({"avx512": "avx512bf16", "neon": "bf16"}.get(TARGET.name, "")))
    able["mmla"] = TARGET is NEON and able["dot"]
    able["tiles"] = TARGET is AVX512 and able["dot"] and bool(features.get("amx-bf16"))
    chosen = os.environ.get("RELPOS_MATRIX_UNIT") or "auto"
    if chosen == "auto":
        able["tiles"] = able["tiles"] and _allows_tiles()
        return next(name for name in ("tiles", "mmla", "dot", "none") if able[name])
    if not able.get(chosen):
        allowed = ["auto", *(name for name in UNITS if able[name])]
        raise RelposValueError(f"RELPOS_MATRIX_UNIT: expected one of {', '.join(allowed)} here, found {chosen!r}")
    if chosen == "tiles" and not _allows_tiles():
        raise RelposValueError("RELPOS_MATRIX_UNIT: the system does not allow this process to use 'tiles'")
    return chosen


UNIT = detect_unit()
TILED = UNIT in TILES
# Whether tiles were asked for by name: then they multiply float32 too where no less than its own precision will do. The
# six products are exact enough, and take 1.15 to 1.6 times as long as FMA on an Emerald Rapids (docs/backends.md).
ASKED = os.environ.get("RELPOS_MATRIX_UNIT") in TILES
MATRICES = UNIT in ("mmla", "emulated mmla")
# Where pairs are multiplied, rows of queries and steps of a sum come in as many as this.
PAIR_ROWS, PAIR_STEPS = (16, 16) if TILED else (TARGET.score_rows, 1)
# Rows of a block are padded to this many, a multiple of every tile height, as `check_sizes` makes sure.
ROW_QUANTUM = 48 if TILED else 24
# Whether the processor converts float16: without the instruction each element would be a call into a library.
CONVERTS_HALF = bool(host_features().get("f16c")) or TARGET is NEON


# Queries per block at most. Half as many for a narrow band, where a larger block would mostly be empty, and where
# buffers per distance would not fit the cache.
MOST_QUERIES = 384


def require_multiple(name: str, size: int, unit: int, what: str) -> None:
    """Raise an error unless a size is a multiple of `unit`: kernels would read and write past the ends of buffers."""
    if size <= 0 or size % unit:
        raise RelposValueError(f"{name} is {size}, which is not a multiple of {unit}, the number of {what}")


def check_sizes(
    target: Target = TARGET,
    *,
    block_keys: int = BLOCK_KEYS,
    row_quantum: int = ROW_QUANTUM,
    most_queries: int = MOST_QUERIES,
    sum_vectors: int = SUM_VECTORS,
    pair_rows: int = PAIR_ROWS,
    pair_steps: int = PAIR_STEPS,
) -> None:
    """Raise an error if these sizes do not fit together, which would give wrong numbers and no message.

    Kernels read and write whole tiles of rows, whole panels and whole groups of vectors; buffers hold as many.
    """
    if sum_vectors != 4:
        raise RelposValueError(f"SUM_VECTORS is {sum_vectors}, but `exp2_row` adds up 4 vectors")
    if target.value_vectors & (target.value_vectors - 1):
        raise RelposValueError(f"value_vectors of {target.name} is {target.value_vectors}, which is not a power of 2")
    if max(NARROW) >= target.score_vectors:
        raise RelposValueError(f"score_vectors of {target.name} is {target.score_vectors}, no more than {max(NARROW)}")
    gradients = {target.value_rows(vectors) for vectors in range(1, target.value_vectors + 1)}
    for rows in sorted({target.score_rows, pair_rows} | gradients):
        require_multiple("ROW_QUANTUM", row_quantum, rows, f"rows of a register tile of {target.name}")
    for rows in sorted(gradients):
        require_multiple("BLOCK_KEYS", block_keys, rows, f"keys of a register tile of gradients of {target.name}")
    for itemsize in (4, 8):
        lanes = target.lanes(itemsize)
        require_multiple("BLOCK_KEYS", block_keys, target.panel(itemsize), f"keys of a panel of {target.name}")
        require_multiple("BLOCK_KEYS", block_keys, sum_vectors * lanes, "keys that are summed side by side")
    require_multiple("BLOCK_KEYS", block_keys, 2 * pair_steps, "keys of a step of products of pairs")
    require_multiple("MOST_QUERIES", most_queries, 4 * row_quantum, "rows that two steps of `block_queries` have")


check_sizes()


def block_queries(
    q_len: int, depth: int, v_depth: int, itemsize: int, problems: int, threads: int, *, narrow: bool
) -> int:
    """Queries per block, a multiple of `ROW_QUANTUM`; the blocks of one head are about equal.

    Larger blocks amortise packing the keys; smaller ones keep the working set in the cache and
    leave at least four blocks per thread, so that no thread waits long for the last.
    """
    step = 2 * ROW_QUANTUM
    rows = MOST_QUERIES // 2 if narrow else MOST_QUERIES
    while rows > step and (rows + BLOCK_KEYS) * (depth + v_depth + BLOCK_KEYS // 2) * itemsize > 2 * CACHE_BUDGET:
        rows -= step
    while rows > step and problems * -(-q_len // rows) < 4 * threads:
        rows -= step
    rows = -(-q_len // -(-q_len // rows))
    return -(-rows // step) * step
