"""rel_shift as a parallel copy: each row of the result is one run of the input, or two around a zero."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from relpos_np.kernels._numba.launch.arrays import address_of
from relpos_np.kernels._numba.launch.build import Kernel, helper
from relpos_np.kernels._numba.launch.launcher import available_threads, run_pieces
from relpos_np.kernels._numba.launch.records import SHIFT
from relpos_np.kernels._numba.simd.rows import opaque, take
from relpos_np.kernels._numba.simd.target import TARGET
from relpos_np.kernels._numba.simd.vectors import I8, I64, Vectors, index
from relpos_np.types import Array

# Results below this many bytes are copied by the calling thread alone.
SERIAL_BYTES = 1 << 18
# Bytes of one piece of work.
PIECE_BYTES = 1 << 18
# Bytes that one thread moves between two looks at signals: less than a tenth of a second, also in new memory.
CALL_BYTES = 1 << 26
# Results of at least so many bytes are written past the caches, from which they would only drive out other things.
STREAM_BYTES = 1 << 25


@intrinsic
def _copy(typingctx: Any, out: Any, x: Any, size: Any) -> Any:
    """Copy bytes between addresses that do not overlap."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, x, size = args
        kind = I8.as_pointer()
        copy = builder.module.declare_intrinsic("llvm.memcpy", [kind, kind, I64])
        builder.call(
            copy, [builder.inttoptr(out, kind), builder.inttoptr(x, kind), size, ir.Constant(ir.IntType(1), 0)]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _stream(typingctx: Any, out: Any, x: Any, size: Any) -> Any:
    """As `_copy`, past the caches where whole cache lines are written: what is not read first need not be fetched."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, x, size = args
        v, step = Vectors(builder, 32), TARGET.vector_bytes
        past = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])

        def move(kind: ir.Type, aligned: int, k: ir.Value) -> Any:
            from_, to = (builder.inttoptr(builder.add(start, k), kind.as_pointer()) for start in (x, out))
            return builder.store(builder.load(from_, align=1), to, align=aligned)

        def byte(k: ir.Value, _: list[Any]) -> list[Any]:
            move(I8, 1, k)
            return []

        def vector(k: ir.Value, _: list[Any]) -> list[Any]:
            move(v.vector, step, k).set_metadata("nontemporal", past)
            return []

        # Up to the first whole vector of the target, then vectors, then the rest.
        gap = builder.and_(builder.neg(out), index(step - 1))
        head = builder.select(builder.icmp_signed("<", gap, size), gap, size)
        whole = builder.add(head, v.whole(builder.sub(size, head), step))
        v.loop(index(0), head, 1, [], byte)
        v.loop(head, whole, step, [], vector)
        v.loop(whole, size, 1, [], byte)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _settle(typingctx: Any) -> Any:
    """Let stores past the caches be seen before anything that follows."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@helper
def _move(past: int, out: int, x: int, size: int) -> None:
    """Copy bytes, past the caches if `past`."""
    if past:
        _stream(out, x, size)
    else:
        _copy(out, x, size)


@intrinsic
def _clear(typingctx: Any, out: Any, size: Any) -> Any:
    """Set bytes at an address to 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = I8.as_pointer()
        fill = builder.module.declare_intrinsic("llvm.memset", [kind, I64])
        builder.call(
            fill, [builder.inttoptr(args[0], kind), ir.Constant(I8, 0), args[1], ir.Constant(ir.IntType(1), 0)]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _shift(arrays: Any, lengths: Any, steps: Any, call: int) -> None:
    p = carray(opaque(call), 1, SHIFT)[0]
    unit, rows, columns = p.itemsize, p.rows, p.columns
    piece = take(call)
    while piece < p.stop:
        for row in range(piece * p.step, min((piece + 1) * p.step, p.lines)):
            i = row % rows
            source = p.x + row * columns * unit
            target = p.out + row * p.k_len * unit
            if p.wrapped:
                # Transformer-XL: the row's own products, a zero, and the start of the next row's.
                own = columns - rows + 1 + i
                _move(p.past, target, source + (rows - 1 - i) * unit, own * unit)
                if own < columns:
                    _clear(target + own * unit, unit)
                    _move(p.past, target + (own + 1) * unit, source + columns * unit, (columns - own - 1) * unit)
            else:
                _move(p.past, target, source + (columns - p.k_len - i) * unit, p.k_len * unit)
        piece = take(call)
    if p.past:
        _settle()


shift = Kernel(_shift, __name__)
_PACK = struct.Struct(f"<{len(SHIFT.names or ())}q").pack


def rel_shift(x: Array, out: Array, variant: str, *, used: bool = False) -> None:
    """Fill `out` (..., L_q, L_k), C-contiguous, for a variant that moves rows; any dtype.

    If `used`, much memory is written past the caches. New memory has just been cleared by the system and lies in the
    caches already.
    """
    if not out.size:
        return
    x = np.ascontiguousarray(x, out.dtype)
    rows, columns = x.shape[-2:]
    k_len = out.shape[-1]
    step = max(1, PIECE_BYTES // (k_len * out.itemsize))
    wrapped = variant in ("transformer_xl", "espnet_legacy")
    past = used and out.nbytes >= STREAM_BYTES
    lines = out.size // k_len
    f = {"counter": 0, "stop": 0, "step": step, "lines": lines, "x": address_of(x), "out": address_of(out)}
    f |= {"itemsize": out.itemsize, "rows": rows, "columns": columns, "k_len": k_len, "wrapped": wrapped, "past": past}
    pieces = -(-lines // step)
    threads = 1 if out.nbytes < SERIAL_BYTES else available_threads()
    chunk = threads * CALL_BYTES // (step * k_len * out.itemsize)
    size = out.nbytes / SERIAL_BYTES
    run_pieces(shift, bytearray(_PACK(*f.values())), pieces, chunk, threads, size=size)
