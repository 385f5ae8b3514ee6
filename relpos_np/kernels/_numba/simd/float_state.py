"""The floating-point state of a thread: how it rounds, and whether subnormal numbers count as 0."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd.target import ARM
from relpos_np.kernels._numba.simd.vectors import I8, I32, I64

# What a process begins with: the nearest number, subnormal ones as they are, no trap. MXCSR on x86, FPCR on ARM.
_BEGIN = 0 if ARM else 0x1F80


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [x.type for x in args])
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name=name)
    return b.call(function, args)


def _read(b: ir.IRBuilder) -> ir.Value:
    if ARM:
        return _call(b, "llvm.aarch64.get.fpcr", I64)
    slot = cgutils.alloca_once(b, I32)
    _call(b, "llvm.x86.sse.stmxcsr", ir.VoidType(), b.bitcast(slot, I8.as_pointer()))
    return b.zext(b.load(slot), I64)


def _write(b: ir.IRBuilder, state: ir.Value) -> None:
    if ARM:
        _call(b, "llvm.aarch64.set.fpcr", ir.VoidType(), state)
        return
    slot = cgutils.alloca_once(b, I32)
    b.store(b.trunc(state, I32), slot)
    _call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), b.bitcast(slot, I8.as_pointer()))


@intrinsic
def begin_floats(typingctx: Any) -> Any:
    """Set the state that a process begins with; return the former."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        former = _read(b)
        _write(b, ir.Constant(I64, _BEGIN))
        return former

    return types.int64(), generate


@intrinsic
def end_floats(typingctx: Any, former: Any) -> Any:
    """Give the former state back."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _write(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate
