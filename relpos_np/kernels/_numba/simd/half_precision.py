"""Rows of half precision, and rows of pairs of bfloat16, as Numba intrinsics over raw pointers.

The processor multiplies pairs of bfloat16 (`Vectors.dot`). A pair takes the place of one float32 in the buffers of a
kernel, of which the pointers below are: two channels of a query or key, or a channel of the values of two keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd.rows import code
from relpos_np.kernels._numba.simd.target import SUM_VECTORS, UNIT
from relpos_np.kernels._numba.simd.vectors import BFLOAT16_BITS, FORMATS, I8, I16, I32, PAIRS, Vectors, index

_i8 = types.int64


def _bits(u: Vectors, x: ir.Value, offset: ir.Value, kind: Any) -> ir.Value:
    """A vector of bfloat16 from elements of any kind, rounded where they are of another one."""
    return u.load_bits(x, offset) if kind.name == BFLOAT16_BITS else u.rounded(u.widened(x, offset, kind))


@intrinsic
def narrow_row(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] = x[:n] * factor, rounded to the half precision of `out`."""
    narrow: Any = FORMATS[out.dtype.name].narrow

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        target, source, count, times = args

        def body(u: Vectors, k: ir.Value) -> None:
            u.store_bits(narrow(u, u.b.fmul(u.load(source, k), u.splat(times))), target, k)

        Vectors(builder, signature.args[1].dtype.bitwidth).each(count, body)
        return context.get_dummy_value()

    return types.void(out, x, _i8, x.dtype), generate


@intrinsic
def copy_pairs(typingctx: Any, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> Any:
    """out[:rows, :width] = pairs of the channels x[:rows, :depth], padded with 0."""
    kind = x.dtype

    def generate(v: Vectors, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> None:
        b, one = v.b, v.single()
        bits = b.bitcast(out, I16.as_pointer())

        def row(r: ir.Value, _: list[Any]) -> list[Any]:
            channels = b.mul(width, index(2))
            source, target = v.at(x, b.mul(r, stride)), v.at(bits, b.mul(r, channels))
            v.each(depth, lambda u, k: u.store_bits(_bits(u, source, k, kind), target, k))

            def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                one.store_bits(ir.Constant(I16, 0), target, k)
                return []

            v.loop(depth, channels, 1, [], pad)
            return []

        v.loop(index(0), rows, 1, [], row)

    return types.void(out, _i8, x, _i8, _i8, _i8), code(generate)


@intrinsic
def pair_rows(typingctx: Any, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> Any:
    """out[r, c] = the pair of x[2r, c] and x[2r + 1, c], padded with 0; return NaN, and not 0, if any is not finite."""
    kind = x.dtype

    def generate(v: Vectors, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> ir.Value:
        b, one = v.b, v.single()

        def line(both: bool, r: ir.Value, carried: list[Any]) -> list[Any]:
            first, target = v.at(x, b.mul(r, stride)), v.at(out, b.mul(b.lshr(r, index(1)), width))
            second = v.at(first, stride)

            def pair(u: Vectors, k: ir.Value, c: list[Any]) -> list[Any]:
                if both and u is v and kind.name == "float32":
                    made = _beside(v, v.load(first, k), v.load(second, k))
                    v.store(made, target, k)
                    low, high = v.halves_of(made)
                    return [v.fma(high, v.const(0), v.fma(low, v.const(0), c[0]))]
                low = b.zext(_bits(u, first, k, kind), u.integers)
                made = low
                if both:
                    high = b.zext(_bits(u, second, k, kind), u.integers)
                    made = b.or_(low, b.shl(high, u.alike(ir.IntType(u.bits), 16)))
                made = b.bitcast(made, u.vector)
                u.store(made, target, k)
                low, high = u.halves_of(made)
                return [u.fma(high, u.const(0), u.fma(low, u.const(0), c[0]))]

            def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                one.store(one.const(0), target, k)
                return []

            (lanes,), (rest,) = v.sums(depth, (carried[:1], carried[1:]), pair)
            v.loop(depth, width, 1, [], pad)
            return [lanes, rest]

        whole = v.whole(rows, 2)
        start = [v.const(0), one.const(0)]
        found = v.loop(index(0), whole, 2, start, partial(line, True))
        lanes, rest = v.loop(whole, rows, 1, found, partial(line, False))
        return b.fadd(v.reduce(lanes, b.fadd), rest)

    return out.dtype(out, _i8, x, _i8, _i8, _i8), code(generate)


@intrinsic
def halve_row(typingctx: Any, x: Any, n: Any) -> Any:
    """Round x[:n] to bfloat16, pairs of neighbours, in place; n fills whole groups of SUM_VECTORS."""

    def generate(v: Vectors, x: Any, n: Any) -> None:
        b, raw = v.b, v.b.bitcast(x, I8.as_pointer())

        def step(k: ir.Value, _: list[Any]) -> list[Any]:
            found = [v.load(x, b.add(k, index(u * v.lanes))) for u in range(SUM_VECTORS)]
            for u in range(0, SUM_VECTORS, 2):
                at = b.add(b.mul(k, index(2)), index(2 * u * v.lanes))
                made = _pairs(v, found[u], found[u + 1])
                b.store(made, b.bitcast(b.gep(raw, [at]), made.type.as_pointer()), align=2)
            return []

        v.loop(index(0), n, SUM_VECTORS * v.lanes, [], step)

    return types.void(x, _i8), code(generate)


def _pairs(v: Vectors, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two vectors, one after the other, as bfloat16."""
    b = v.b
    if UNIT in ("dot", "tiles") and v.lanes == 16:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        kinds = ir.FunctionType(PAIRS, [v.vector, v.vector])
        function = b.module.globals.get(name) or ir.Function(b.module, kinds, name=name)
        return b.call(function, [y, x])
    both = ir.Constant(ir.VectorType(I32, 2 * v.lanes), list(range(2 * v.lanes)))
    return b.shuffle_vector(v.rounded(x), v.rounded(y), both)


def _beside(v: Vectors, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two vectors as bfloat16 in each other's elements, the first in the lower halves."""
    b, lanes = v.b, v.lanes
    made = b.bitcast(_pairs(v, x, y), ir.VectorType(I16, 2 * lanes))
    order = ir.Constant(ir.VectorType(I32, 2 * lanes), [n // 2 + lanes * (n % 2) for n in range(2 * lanes)])
    return b.bitcast(b.shuffle_vector(made, made, order), v.vector)


@intrinsic
def as_integers(typingctx: Any, base: Any) -> Any:
    """A pointer to pairs as one to their bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint32)(base), generate
