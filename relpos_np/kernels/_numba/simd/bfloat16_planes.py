"""float32 as planes of bfloat16, numbers whose sum it is, as Numba intrinsics over raw pointers.

A plane rounds what the planes before it have left: of numbers with 24 bits two planes keep 16, and three all. They are
written in pairs, as `half_precision.py` has them, which a matrix unit multiplies.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd.rows import code
from relpos_np.kernels._numba.simd.vectors import I16, Vectors, index

# Planes have the exponents of float32, but products and sums of them overflow and lose subnormal numbers where float32
# does not. From FAR on that may happen to products of two numbers; NaN and infinity are beyond it too.
FAR, NEAR = 2.0**56, 2.0**-56

_i8 = types.int64


def _planes(u: Vectors, x: ir.Value, count: int) -> list[ir.Value]:
    """Bits of float32 numbers whose lower halves are 0 and whose sum is x, but for the rounding of the last."""
    b, found = u.b, []
    for _ in range(count):
        # Half a unit of the upper half is added, and the upper half kept: rounded to nearest. NaN need not stay NaN.
        near = b.add(b.bitcast(x, u.integers), u.alike(ir.IntType(u.bits), 0x8000))
        kept = b.and_(near, u.alike(ir.IntType(u.bits), -65536))
        found.append(kept)
        x = b.fsub(x, b.bitcast(kept, u.vector))
    return found


def _by_count(b: ir.IRBuilder, planes: ir.Value, emit: Any) -> None:
    """Emit code for two planes and for three, of which the number of planes chooses."""
    for count in (2, 3):
        with b.if_then(b.icmp_signed("==", planes, index(count))):
            emit(count)


@intrinsic
def split_rows(
    typingctx: Any, out: Any, plane: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any, wide: Any, planes: Any
) -> Any:
    """out[n, :rows] = plane n of x[:rows, :depth], pairs of neighbours, padded with 0 up to `wide` numbers.

    Planes are `plane` elements apart, and their rows `width`.
    """

    def generate(
        v: Vectors, out: Any, plane: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any, wide: Any, planes: Any
    ) -> None:
        b, one = v.b, v.single()
        bits = b.bitcast(out, I16.as_pointer())
        apart = b.mul(plane, index(2))

        def emit(count: int) -> None:
            def row(r: ir.Value, _: list[Any]) -> list[Any]:
                source = v.at(x, b.mul(r, stride))
                first = b.mul(b.mul(r, width), index(2))
                lines = [v.at(bits, b.add(first, b.mul(apart, index(n)))) for n in range(count)]

                def body(u: Vectors, k: ir.Value) -> None:
                    shift = u.alike(ir.IntType(u.bits), 16)
                    for line, own in zip(lines, _planes(u, u.load(source, k), count), strict=True):
                        u.store_bits(b.trunc(b.lshr(own, shift), u.of(I16)), line, k)

                def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                    for line in lines:
                        one.store_bits(ir.Constant(I16, 0), line, k)
                    return []

                v.each(depth, body)
                v.loop(depth, wide, 1, [], pad)
                return []

            v.loop(index(0), rows, 1, [], row)

        _by_count(b, planes, emit)

    return types.void(out, _i8, _i8, x, _i8, _i8, _i8, _i8, _i8), code(generate)


@intrinsic
def split_pairs(
    typingctx: Any, out: Any, plane: Any, width: Any, x: Any, stride: Any, rows: Any, cols: Any, planes: Any
) -> Any:
    """out[n, r, c] = plane n of the pair of x[2r, c] and x[2r + 1, c], with 0 behind an odd number of rows.

    Planes are `plane` elements apart, and their rows `width`; `cols` is a multiple of the lanes.
    """

    def generate(
        v: Vectors, out: Any, plane: Any, width: Any, x: Any, stride: Any, rows: Any, cols: Any, planes: Any
    ) -> None:
        b = v.b
        shift, whole = v.alike(ir.IntType(v.bits), 16), v.whole(rows, 2)

        def emit(count: int) -> None:
            def line(both: bool) -> Any:
                def pair(r: ir.Value, _: list[Any]) -> list[Any]:
                    first, target = v.at(x, b.mul(r, stride)), v.at(out, b.mul(b.lshr(r, index(1)), width))
                    second = v.at(first, stride)

                    def column(k: ir.Value, _: list[Any]) -> list[Any]:
                        made = [b.lshr(own, shift) for own in _planes(v, v.load(first, k), count)]
                        if both:
                            upper = _planes(v, v.load(second, k), count)
                            made = [b.or_(low, high) for low, high in zip(made, upper, strict=True)]
                        for n, own in enumerate(made):
                            place = b.add(k, b.mul(plane, index(n)))
                            v.store(b.bitcast(own, v.vector), target, place)
                        return []

                    v.loop(index(0), cols, v.lanes, [], column)
                    return []

                return pair

            v.loop(index(0), whole, 2, [], line(True))
            v.loop(whole, rows, 2, [], line(False))

        _by_count(b, planes, emit)

    return types.void(out, _i8, _i8, x, _i8, _i8, _i8, _i8), code(generate)


def _odd(u: Vectors, x: ir.Value, least: ir.Value | None) -> ir.Value:
    """1 where a number is not finite, or from FAR on, or below `least` without being 0; else 0."""
    b = u.b
    size = b.bitcast(b.and_(b.bitcast(x, u.integers), u.alike(ir.IntType(u.bits), 2**31 - 1)), u.vector)
    odd = b.fcmp_unordered(">=", size, u.const(FAR))
    if least is not None:
        small = b.fcmp_ordered("<", size, u.splat(least))
        odd = b.or_(odd, b.and_(small, b.fcmp_ordered(">", size, u.const(0))))
    return b.select(odd, u.const(1), u.const(0))


@intrinsic
def odd_rows(typingctx: Any, out: Any, x: Any, stride: Any, rows: Any, depth: Any, least: Any) -> Any:
    """out[r] = how many of x[r, :depth] planes do not stand for: from FAR on, or below `least`; return their sum."""

    def generate(v: Vectors, out: Any, x: Any, stride: Any, rows: Any, depth: Any, least: Any) -> ir.Value:
        b, one = v.b, v.single()

        def row(r: ir.Value, total: list[Any]) -> list[Any]:
            source = v.at(x, b.mul(r, stride))

            def count(u: Vectors, k: ir.Value, c: list[Any]) -> list[Any]:
                return [b.fadd(c[0], _odd(u, u.load(source, k), least))]

            (lanes,), (rest,) = v.sums(depth, ([v.const(0)], [one.const(0)]), count)
            own = b.fadd(v.reduce(lanes, b.fadd), rest)
            one.store(own, out, r)
            return [b.fadd(total[0], own)]

        return v.loop(index(0), rows, 1, [one.const(0)], row)[0]

    return out.dtype(out, x, _i8, _i8, _i8, out.dtype), code(generate)


@intrinsic
def odd_columns(typingctx: Any, out: Any, x: Any, stride: Any, rows: Any, cols: Any) -> Any:
    """out[c] = how many of x[:rows, c] planes do not stand for; return their sum; `cols` is a multiple of the lanes."""

    def generate(v: Vectors, out: Any, x: Any, stride: Any, rows: Any, cols: Any) -> ir.Value:
        b = v.b

        def column(c: ir.Value, total: list[Any]) -> list[Any]:
            def count(r: ir.Value, found: list[Any]) -> list[Any]:
                return [b.fadd(found[0], _odd(v, v.load(x, b.add(b.mul(r, stride), c)), None))]

            (own,) = v.loop(index(0), rows, 1, [v.const(0)], count)
            v.store(own, out, c)
            return [b.fadd(total[0], own)]

        (lanes,) = v.loop(index(0), cols, v.lanes, [v.const(0)], column)
        return v.reduce(lanes, b.fadd)

    return out.dtype(out, x, _i8, _i8, _i8), code(generate)
