"""Instructions on matrix tiles, carried out where the processor has none: what it reports as illegal is interpreted.

The machine code that the compiler makes for a processor with AMX-BF16 runs as it is. A handler of the signal SIGILL,
compiled ahead of it, decodes the instruction, does what Intel's manual says it does ("Intel 64 and IA-32 Architectures
Software Developer's Manual", volume 2, of TDPBF16PS and its family), and goes on behind it. What would be an error on
such a processor, such as a product before LDTILECFG, ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# The registers of threads, found by the address of each: who it is, whether LDTILECFG has been executed, and how often
# each kind of instruction has; rows and bytes of a row, and the contents of eight registers.
THREADS = 256
COUNTED = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
# At 0 stands who it is.
_OPEN, _COUNTS = 1, 2
_NUMBERS = np.zeros((THREADS, 2 + len(COUNTED)), np.int64)
_SHAPES = np.zeros((THREADS, 8, 2), np.int64)
_CONTENTS = np.zeros((THREADS, 8, 16, 16), np.uint32)
# Every bfloat16, of which the subnormal ones are taken as 0.
with np.errstate(invalid="ignore"):
    _WIDE = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
_WIDE[abs(_WIDE) < 2.0**-126] = 0
NUMBERS, SHAPES, CONTENTS, WIDE = (x.ctypes.data for x in (_NUMBERS, _SHAPES, _CONTENTS, _WIDE))

# Registers in the order of instructions (rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 ...), as Linux stores them.
_STORED = np.array([13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7])
_REGISTERS, _NEXT = 40, 16

_self = types.ExternalFunction("pthread_self", types.uint64())
_abort = types.ExternalFunction("abort", types.void())


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _claim(typingctx: Any, address: Any, owner: Any) -> Any:
    """Write `owner` where 0 is; return what was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        place = builder.inttoptr(args[0], word.as_pointer())
        return builder.extract_value(
            builder.cmpxchg(place, ir.Constant(word, 0), args[1], "seq_cst", failordering="seq_cst"), 0
        )

    return types.int64(types.int64, types.int64), generate


@numba.njit
def _thread():
    """The place of this thread's registers, which it takes when it first needs one."""
    own = np.int64(_self())
    for n in range(THREADS):
        found = _claim(NUMBERS + n * 8 * (2 + len(COUNTED)), own)
        if found in (0, own):
            return n
    _abort()
    return 0


@numba.njit
def _flushed(x):
    """A float32 as 0 where it is subnormal."""
    return np.float32(0) if abs(x) < np.float32(2.0**-126) else x


@numba.njit
def _multiply(thread, sums, left, right, rows, steps, columns):
    """TDPBF16PS. A product is exact in float64; to round its sum with a float32 to float64 first changes nothing."""
    halves = numba.carray(_pointer(CONTENTS), (THREADS, 8, 16, 32), np.uint16)[thread]
    numbers = numba.carray(_pointer(CONTENTS), (THREADS, 8, 16, 16), np.float32)[thread]
    wide = numba.carray(_pointer(WIDE), 1 << 16, np.float64)
    for i in range(rows):
        for n in range(columns):
            low, high = np.float32(0), np.float32(0)
            for k in range(steps):
                a, b = halves[left, i], halves[right, k]
                low = _flushed(np.float32(np.float64(low) + wide[a[2 * k]] * wide[b[2 * n]]))
                high = _flushed(np.float32(np.float64(high) + wide[a[2 * k + 1]] * wide[b[2 * n + 1]]))
            numbers[sums, i, n] = _flushed(_flushed(numbers[sums, i, n]) + _flushed(low + high))
    for i in range(16):
        for n in range(columns if i < rows else 0, 16):
            numbers[sums, i, n] = 0


@numba.njit
def _signed(code, at, size):
    """A displacement of one or four bytes."""
    if size == 1:
        return np.int64(np.int8(code[at]))
    bits = np.uint32(0)
    for n in range(4):
        bits |= np.uint32(code[at + n]) << np.uint32(8 * n)
    return np.int64(np.int32(bits))


@numba.njit
def _carry_out(context):
    """Interpret the instruction at which a thread has stopped; return whether it is one of those."""
    stored = numba.carray(_pointer(context + _REGISTERS), 17, np.int64)
    code = numba.carray(_pointer(stored[_NEXT]), 16, np.uint8)
    # Three bytes of a VEX prefix, in the second map of instructions, for 128 bits and with no wide operand.
    if code[0] != 0xC4 or code[1] & 0x1F != 2 or code[2] & 0x84 != 0:
        return False
    more_index, more_base = (code[1] >> 6 & 1) ^ 1, (code[1] >> 5 & 1) ^ 1
    prefix, third = code[2] & 3, (code[2] >> 3 & 15) ^ 15
    operation, form = code[3], code[4]
    mode, tile, low = form >> 6, np.int64(form >> 3 & 7), np.int64(form & 7)
    size = 5

    n = _thread()
    numbers = numba.carray(_pointer(NUMBERS), (THREADS, 2 + len(COUNTED)), np.int64)[n]
    shapes = numba.carray(_pointer(SHAPES), (THREADS, 8, 2), np.int64)[n]
    tiles = numba.carray(_pointer(CONTENTS), (THREADS, 8, 16, 16), np.uint32)[n]
    kind = -1

    address, stride = np.int64(0), np.int64(0)
    if mode != 3:
        if low == 4:
            scale, index, base = code[5] >> 6, code[5] >> 3 & 7 | more_index << 3, np.int64(code[5] & 7)
            size = 6
            stride = np.int64(0) if index == 4 else stored[_STORED[index]] << np.int64(scale)
        else:
            base = low
        wide = mode == 2 or (mode == 0 and base == 5)
        if wide or mode == 1:
            address = _signed(code, size, 4 if wide else 1)
            size += 4 if wide else 1
        if mode == 0 and low == 5:
            address += stored[_NEXT] + size
        elif not (mode == 0 and base == 5):
            address += stored[_STORED[base | more_base << 3]]

    if operation == 0x49 and prefix == 0 and tile == 0 and mode != 3:
        kind = 0
        given = numba.carray(_pointer(address), 64, np.uint8)
        # The only palette there is; neither reserved bytes nor registers that it lacks.
        if given[0] != 1 or given[1:16].any() or given[32:48].any() or given[56:].any():
            _abort()
        for t in range(8):
            shapes[t, 0], shapes[t, 1] = given[48 + t], given[16 + 2 * t] | given[17 + 2 * t] << 8
            if shapes[t, 0] > 16 or shapes[t, 1] > 64 or (shapes[t, 0] == 0) != (shapes[t, 1] == 0):
                _abort()
            tiles[t] = 0
        numbers[_OPEN] = 1
    elif operation == 0x49 and prefix == 0 and form == 0xC0:
        kind = 1
        numbers[_OPEN] = 0
    elif numbers[_OPEN] == 0 or shapes[tile, 0] == 0:
        # Where registers have no shape, any other is an error.
        _abort()
    elif operation == 0x49 and prefix == 3 and mode == 3 and low == 0:
        kind = 2
        tiles[tile] = 0
    elif operation == 0x4B and mode != 3 and low == 4 and prefix in (1, 2, 3):
        rows, columns = shapes[tile, 0], shapes[tile, 1] // 4
        kind = 4 if prefix == 2 else 3
        if kind == 3:
            tiles[tile] = 0
        for r in range(rows):
            line = numba.carray(_pointer(address + r * stride), columns, np.uint32)
            for c in range(columns):
                if kind == 3:
                    tiles[tile, r, c] = line[c]
                else:
                    line[c] = tiles[tile, r, c]
    elif operation == 0x5C and prefix == 2 and mode == 3 and third < 8:
        kind = 5
        left, right = low, np.int64(third)
        # All three differ, and their shapes fit.
        if tile in (left, right) or left == right or shapes[left, 0] != shapes[tile, 0]:
            _abort()
        if shapes[right, 1] != shapes[tile, 1] or shapes[left, 1] != 4 * shapes[right, 0]:
            _abort()
        _multiply(n, tile, left, right, shapes[tile, 0], shapes[left, 1] // 4, shapes[tile, 1] // 4)
    else:
        return False
    numbers[_COUNTS + kind] += 1
    stored[_NEXT] += size
    return True


@functools.cache
def _handler():
    """What the system calls at an illegal instruction; compiled where it is needed, which takes seconds."""

    @numba.cfunc("void(int32, int64, int64)")
    def handler(number, information, context):
        if not _carry_out(context):
            _abort()

    return handler


class _Action(ctypes.Structure):
    """What `sigaction` of the C library on Linux takes, for this family of processors."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def install() -> None:
    """Carry out instructions on tiles in this process, on all of its threads."""
    with_information = 4
    action = _Action(handler=_handler().address, flags=with_information)
    library = ctypes.CDLL(None, use_errno=True)
    if library.sigaction(int(signal.SIGILL), ctypes.byref(action), None):
        raise OSError(ctypes.get_errno(), "sigaction")


# VDPBF16PS and VCVTNE2PS2BF16 of the register 0, and a return.
_PAIRS = bytes.fromhex("62f27e4852c0 62f27f4872c0 c5f877 c3")
_TRIAL = f"""
import ctypes, mmap
code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write({_PAIRS!r})
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""


@functools.cache
def _multiplies_pairs() -> bool:
    """Whether the processor carries out AVX512-BF16, which virtual machines may hide though it is there."""
    if llvmlite.binding.get_host_cpu_features().get("avx512bf16"):
        return True
    return subprocess.run([sys.executable, "-I", "-S", "-c", _TRIAL], check=False).returncode == 0


def environment(unit: str = "tiles") -> dict[str, str] | None:
    """What makes the compiler use matrix tiles on this machine; None where it cannot run other parts of the code."""
    features = dict(llvmlite.binding.get_host_cpu_features())
    if not all(features.get(name) for name in ("avx512f", "avx512vl", "avx512dq")) or not _multiplies_pairs():
        return None
    features["avx512bf16"] = features["amx-tile"] = features["amx-bf16"] = True
    return {
        "NUMBA_CPU_NAME": llvmlite.binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join("-+"[there] + name for name, there in features.items()),
        "RELPOS_MATRIX_UNIT": unit,
    }


def begin() -> None:
    """Have kernels made for matrix tiles, in a process of that environment, and carry out their instructions."""
    if not llvmlite.binding.get_host_cpu_features().get("amx-bf16"):
        install()
        # The system cannot allow what the processor lacks.
        allowed = SimpleNamespace(syscall=lambda *_: 0)
        mock.patch("ctypes.CDLL", return_value=allowed).start()
    importlib.import_module("relpos_np.kernels._numba.simd.target")
    mock.patch.stopall()


def counts() -> dict[str, int]:
    """How many instructions of each kind have been carried out."""
    return dict(zip(COUNTED, _NUMBERS[:, _COUNTS:].sum(0).tolist(), strict=True))


def left_open() -> int:
    """How many threads have tiles that were not released, which the system would go on saving for them."""
    return int(_NUMBERS[:, _OPEN].sum())
