"""What the 32 threads of a warp do together: products on matrix units, and exchanges of numbers.

In the simulator, which has no warps, threads meet at a barrier of the block instead: all threads of a block must come
to the same calls.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numba import cuda, types

from relpos_np.kernels._cuda.launch.device import inline, simulated
from relpos_np.kernels._cuda.simd.intrinsics import converters

WARP = 32
# Rows and columns of a product on matrix units, and how many products each of its sums has.
ROWS, COLUMNS, STEPS = 16, 8, 16
# Names of the two halves of a word in PTX.
_NAMES = {"bfloat16": "bf16", "float16": "f16"}

# What threads have brought, by turn and thread: the simulator runs one block at a time.
_board: dict[Any, Any] = {}


def _meet(given: Any) -> tuple[int, int, int]:
    """Bring something to the other threads of the warp; returns the turn, the warp's first thread, and the lane."""
    thread: Any = threading.current_thread()
    turn = getattr(thread, "relpos_turn", 0)
    # Whoever comes to the turn after the next has seen that all have left this one.
    thread.relpos_turn = 1 - turn
    me = thread.threadIdx.x
    first = me // WARP * WARP
    _board.pop((turn, first, "product"), None)
    _board[turn, me] = given
    thread.syncthreads()
    return turn, first, me - first


def _swap(x: Any, other: int) -> Any:
    turn, first, lane = _meet(x)
    return _board[turn, first + (lane ^ other)]


def _device_swap(x: Any, other: Any) -> Any:
    return cuda.shfl_xor_sync(0xFFFFFFFF, x, other)


# The number of the thread whose lane differs by an exclusive or.
swap: Any = _swap if simulated() else inline(_device_swap)


def _halves(word: Any, half: str) -> tuple[float, float]:
    """The two numbers in a word, the lower first."""
    if half == "float16":
        low, high = np.array([word], np.uint32).view(np.float16)
    else:
        low, high = np.array([int(word) << 16 & 0xFFFFFFFF, int(word) & 0xFFFF0000], np.uint32).view(np.float32)
    return float(low), float(high)


def product_of(given: list[Any], half: str) -> Any:
    """What `mma.sync.aligned.m16n8k16.row.col` makes of the operands of each lane, four sums and six words: (16, 8).

    Which lane holds which elements is said in the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
    type": with g = lane // 4 and t = lane % 4, the two numbers of words 0 to 3 of the left matrix are at rows g, g + 8,
    g, g + 8 and columns 2 t, 2 t, 2 t + 8, 2 t + 8 and the ones after; those of the right matrix at rows 2 t and
    2 t + 8, column g; and the four sums at rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1, 2 t, 2 t + 1.
    """
    left, right, total = np.empty((ROWS, STEPS)), np.empty((STEPS, COLUMNS)), np.empty((ROWS, COLUMNS))
    for lane, operands in enumerate(given):
        g, t = divmod(lane, 4)
        for n in range(4):
            row, column = g + 8 * (n % 2), 2 * t + 8 * (n // 2)
            left[row, column : column + 2] = _halves(operands[4 + n], half)
            total[g + 8 * (n // 2), 2 * t + n % 2] = operands[n]
        for n in range(2):
            right[2 * t + 8 * n : 2 * t + 8 * n + 2, g] = _halves(operands[8 + n], half)
    # Sums are "at least" of single precision, in any order: here exact and rounded once.
    with np.errstate(all="ignore"):
        return (left @ right + total).astype(np.float32)


def _simulated_product(half: str) -> Any:
    def multiply(c: Any, a: Any, b: Any) -> Any:
        turn, first, lane = _meet((*c, *a, *b))
        key = turn, first, "product"
        if key not in _board:
            _board[key] = product_of([_board[turn, first + n] for n in range(WARP)], half)
        found, (g, t) = _board[key], divmod(lane, 4)
        return tuple(found[g + 8 * (n // 2), 2 * t + n % 2] for n in range(4))

    return multiply


def _device_product(half: str) -> Any:
    ir, extending, name = import_module("llvmlite.ir"), import_module("numba.cuda.extending"), _NAMES[half]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
    )

    # The names of the arguments are Numba's.
    @extending.intrinsic
    def multiply(typingctx: Any, c: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, bits = ir.FloatType(), ir.IntType(32)
            kind = ir.FunctionType(ir.LiteralStructType([number] * 4), [number] * 4 + [bits] * 6)
            constraints = ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 6)
            sizes = zip(args, (4, 4, 2), strict=True)
            each = [builder.extract_value(x, n) for x, size in sizes for n in range(size)]
            # Of all threads of a warp: not to be moved into a branch.
            found = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), each)
            parts = [builder.extract_value(found, n) for n in range(4)]
            return context.make_tuple(builder, signature.return_type, parts)

        sums, word = types.UniTuple(types.float32, 4), types.uint32
        return sums(sums, types.UniTuple(word, 4), types.UniTuple(word, 2)), codegen

    return multiply


@cache
def product(half: str) -> Any:
    """The function of four sums, four words of the left matrix and two of the right one that returns the new sums.

    Words are pairs of neighbours in the direction of the sum: "bfloat16" or "float16".
    """
    return (_simulated_product if simulated() else _device_product)(half)


def _simulated_pack(half: str) -> Any:
    _, narrow = converters(half)

    def pack(low: Any, high: Any) -> Any:
        with np.errstate(over="ignore"):
            below, above = (int(np.asarray(narrow(np.float32(x))).view(np.uint16)) for x in (low, high))
        return np.uint32(above << 16 | below)

    return pack


def _device_pack(half: str) -> Any:
    ir, extending = import_module("llvmlite.ir"), import_module("numba.cuda.extending")
    text = f"cvt.rn.{_NAMES[half]}x2.f32 $0, $2, $1;"

    @extending.intrinsic
    def pack(typingctx: Any, low: Any, high: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            kind = ir.FunctionType(ir.IntType(32), [ir.FloatType()] * 2)
            return builder.call(ir.InlineAsm(kind, text, "=r,f,f", side_effect=False), args)

        return types.uint32(types.float32, types.float32), codegen

    return pack


@cache
def packed(half: str) -> Any:
    """The function that rounds two float32 to the halves of a word, the first to the lower one."""
    return (_simulated_pack if simulated() else _device_pack)(half)


def _words(x: Any, at: int) -> Any:
    if at % 8:
        raise IndexError(f"a kernel reads 16 bytes from element {at} on")
    return tuple(np.ascontiguousarray(x[at : at + 8]).view(np.uint32))


def _device_words() -> Any:
    ir, extending = import_module("llvmlite.ir"), import_module("numba.cuda.extending")
    array = import_module("numba.cuda.np.arrayobj")

    @extending.intrinsic
    def words(typingctx: Any, x: Any, at: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            start = builder.gep(array.make_array(x)(context, builder, args[0]).data, [args[1]])
            kind = ir.VectorType(ir.IntType(32), 4)
            found = builder.load(builder.bitcast(start, kind.as_pointer()))
            found.align = 16
            parts = [builder.extract_element(found, ir.IntType(32)(n)) for n in range(4)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.uint32, 4)(x, at), codegen

    return words


@cache
def words() -> Any:
    """The function of an array of half precision and an index, a multiple of 8, that loads the four words there."""
    return _words if simulated() else _device_words()


def _low(word: Any) -> Any:
    return np.uint32(word << np.uint32(16)).view(np.float32)


def _high(word: Any) -> Any:
    return np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)


# The two numbers of bfloat16 in a word, as float32.
low, high = inline(_low), inline(_high)


def _bits(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


def _from_bits(word: Any) -> Any:
    return np.uint32(word).view(np.float32)


# The bits of a float32, and back.
bits, from_bits = inline(_bits), inline(_from_bits)


@cache
def repeated(step: Any, count: int) -> Any:
    """A function that calls step(n, x) for `count` numbers n from the first on: code without a loop.

    The compiler unrolls no loop of this size by itself, and what an index that is not constant picks is no register.
    """
    if count == 1:
        return step
    half = count // 2
    first, second = repeated(step, half), repeated(step, count - half)

    def run(n, x):  # type: ignore[no-untyped-def]
        first(n, x)
        second(n + half, x)

    return inline(run)
