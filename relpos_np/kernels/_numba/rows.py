"""Vector passes over rows of scores and blocks of keys and values, as Numba intrinsics over raw pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.target import SUM_VECTORS, TARGET
from relpos_np.kernels._numba.vectors import I8, I64, Vectors, index

_i8 = types.int64


@intrinsic
def pointer_like(typingctx: Any, like: Any, address: Any) -> Any:
    """An address as a pointer of the same type as `like`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return like(like, _i8), generate


def _typed(kind: Any) -> Any:
    """Build the intrinsic that takes an address as a pointer to `kind`."""

    @intrinsic
    def typed(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return kind(_i8), generate

    return typed


floats, doubles = _typed(types.CPointer(types.float32)), _typed(types.CPointer(types.float64))
bytes_, integers, longs = (_typed(types.CPointer(kind)) for kind in (types.uint8, types.int32, types.int64))
# Bits of float16 and of bfloat16, told apart by the sign of the integer.
halves, brains = (_typed(types.CPointer(kind)) for kind in (types.int16, types.uint16))
opaque = _typed(types.voidptr)


@intrinsic
def at(typingctx: Any, base: Any, offset: Any) -> Any:
    """The pointer `offset` elements further."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return base(base, _i8), generate


@intrinsic
def lanes_of(typingctx: Any, base: Any) -> Any:
    """The elements that a vector register holds of a pointer's type, as a constant."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return index(TARGET.lanes(signature.args[0].dtype.bitwidth // 8))

    return _i8(base), generate


@intrinsic
def get(typingctx: Any, base: Any, offset: Any) -> Any:
    """The element at `offset`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]]))

    return base.dtype(base, _i8), generate


@intrinsic
def put(typingctx: Any, base: Any, offset: Any, value: Any) -> Any:
    """Store an element at `offset`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(base, _i8, base.dtype), generate


@intrinsic
def take(typingctx: Any, counter: Any) -> Any:
    """Atomically add 1 to the int64 at an address and return its old value: the next piece of work."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return _i8(_i8), generate


@intrinsic
def prefetch(typingctx: Any, base: Any, offset: Any) -> Any:
    """Ask for the cache line of an element to be brought into the second-level cache."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        Vectors(b, 32).prefetch(*args)
        return context.get_dummy_value()

    return types.void(base, _i8), generate


def _each(v: Vectors, n: ir.Value, vector: Callable[[ir.Value], None], scalar: Callable[[ir.Value], None]) -> None:
    """Run `vector` on every whole vector of n elements and `scalar` on each one that remains."""

    def wide(k: ir.Value, _: list[Any]) -> list[Any]:
        vector(k)
        return []

    def narrow(k: ir.Value, _: list[Any]) -> list[Any]:
        scalar(k)
        return []

    whole = v.whole(n, v.lanes)
    v.loop(index(0), whole, v.lanes, [], wide)
    v.loop(whole, n, 1, [], narrow)


@intrinsic
def scale_row(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] = x[:n] * factor; `out` may be `x`."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, x, n, factor = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        wide = v.splat(factor)
        _each(
            v,
            n,
            lambda k: v.store(b.fmul(v.load(x, k), wide), out, k),
            lambda k: v.put(b.fmul(v.get(x, k), factor), out, k),
        )
        return context.get_dummy_value()

    return types.void(out, x, _i8, out.dtype), generate


@intrinsic
def add_row(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] += x[:n] * factor."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, x, n, factor = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        wide = v.splat(factor)
        _each(
            v,
            n,
            lambda k: v.store(v.fma(v.load(x, k), wide, v.load(out, k)), out, k),
            lambda k: v.put(v.fma(v.get(x, k), factor, v.get(out, k)), out, k),
        )
        return context.get_dummy_value()

    return types.void(out, x, _i8, out.dtype), generate


@intrinsic
def add_mask(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] += x[:n] * factor, and -inf wherever x is -inf, even where out is NaN."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, x, n, factor = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        wide = v.splat(factor)
        shut, narrow = v.const(float("-inf")), ir.Constant(v.scalar, float("-inf"))

        def vector(k: ir.Value) -> None:
            m = v.load(x, k)
            total = v.fma(m, wide, v.load(out, k))
            v.store(b.select(b.fcmp_ordered("==", m, shut), shut, total), out, k)

        def scalar(k: ir.Value) -> None:
            m = v.get(x, k)
            total = v.fma(m, factor, v.get(out, k))
            v.put(b.select(b.fcmp_ordered("==", m, narrow), narrow, total), out, k)

        _each(v, n, vector, scalar)
        return context.get_dummy_value()

    return types.void(out, x, _i8, out.dtype), generate


@intrinsic
def add_constant(typingctx: Any, out: Any, n: Any, value: Any) -> Any:
    """out[:n] += value."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, n, value = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        wide = v.splat(value)
        _each(
            v,
            n,
            lambda k: v.store(b.fadd(v.load(out, k), wide), out, k),
            lambda k: v.put(b.fadd(v.get(out, k), value), out, k),
        )
        return context.get_dummy_value()

    return types.void(out, _i8, out.dtype), generate


@intrinsic
def fill_row(typingctx: Any, out: Any, start: Any, stop: Any, value: Any) -> Any:
    """out[start:stop] = value."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, start, stop, value = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        base, wide = b.gep(out, [start]), v.splat(value)
        _each(v, b.sub(stop, start), lambda k: v.store(wide, base, k), lambda k: v.put(value, base, k))
        return context.get_dummy_value()

    return types.void(out, _i8, _i8, out.dtype), generate


@intrinsic
def mask_row(typingctx: Any, out: Any, allowed: Any, n: Any, value: Any) -> Any:
    """out[j] = value where the byte allowed[j] is 0."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, allowed, n, value = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        wide = v.splat(value)
        kind = ir.VectorType(I8, v.lanes)

        def vector(k: ir.Value) -> None:
            given = b.load(b.bitcast(b.gep(allowed, [k]), kind.as_pointer()), align=1)
            shut = b.icmp_unsigned("==", given, ir.Constant(kind, [0] * v.lanes))
            v.store(b.select(shut, wide, v.load(out, k)), out, k)

        def scalar(k: ir.Value) -> None:
            shut = b.icmp_unsigned("==", b.load(b.gep(allowed, [k])), ir.Constant(I8, 0))
            v.put(b.select(shut, value, v.get(out, k)), out, k)

        _each(v, n, vector, scalar)
        return context.get_dummy_value()

    return types.void(out, allowed, _i8, out.dtype), generate


@intrinsic
def sum_row(typingctx: Any, x: Any, n: Any) -> Any:
    """The sum of x[:n], in a fixed order."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, n = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        whole = v.whole(n, v.lanes)
        (lanes,) = v.loop(index(0), whole, v.lanes, [v.const(0)], lambda k, c: [b.fadd(c[0], v.load(x, k))])
        (rest,) = v.loop(whole, n, 1, [v.zero()], lambda k, c: [b.fadd(c[0], v.get(x, k))])
        return b.fadd(v.reduce(lanes, b.fadd), rest)

    return x.dtype(x, _i8), generate


@intrinsic
def max_row(typingctx: Any, x: Any, n: Any, top: Any) -> Any:
    """Raise the running maxima top[:lanes] by x[:n]; n is a multiple of the lanes."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, n, top = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        start = v.load(top, index(0))
        (best,) = v.loop(index(0), n, v.lanes, [start], lambda k, c: [v.maximum(v.load(x, k), c[0])])
        v.store(best, top, index(0))
        return context.get_dummy_value()

    return types.void(x, _i8, top), generate


@intrinsic
def lane_max(typingctx: Any, top: Any) -> Any:
    """The largest of the running maxima of one row."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        return v.reduce(v.load(args[0], index(0)), v.maximum)

    return top.dtype(top), generate


@intrinsic
def lane_sum(typingctx: Any, total: Any) -> Any:
    """The sum of the partial sums of one row."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        return v.reduce(v.load(args[0], index(0)), b.fadd)

    return total.dtype(total), generate


@intrinsic
def advance(typingctx: Any, best: Any, top: Any, fade: Any, n: Any) -> Any:
    """Fold a block's row maxima into the running ones; n is a multiple of the lanes.

    best[i] becomes the value to subtract before exponentiation (0 for a row that has seen no key),
    top[i] the running maximum, fade[i] the factor for what was summed before.
    """

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        best, top, fade, n = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        nothing = v.const(float("-inf"))

        def body(k: ir.Value, _: list[Any]) -> list[Any]:
            old = v.load(top, k)
            new = v.maximum(v.load(best, k), old)
            reference = b.select(b.fcmp_ordered("==", new, nothing), v.const(0), new)
            v.store(new, top, k)
            v.store(reference, best, k)
            v.store(v.exp2(b.fsub(old, reference)), fade, k)
            return []

        v.loop(index(0), n, v.lanes, [], body)
        return context.get_dummy_value()

    return types.void(best, top, fade, _i8), generate


@intrinsic
def exp2_row(typingctx: Any, x: Any, n: Any, reference: Any, total: Any, fade: Any) -> Any:
    """x[:n] = 2**(x - reference); total[:lanes] = total * fade + partial sums; n fills whole groups of SUM_VECTORS."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, n, reference, total, fade = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        shift = v.splat(reference)

        def step(k: ir.Value, sums: list[Any]) -> list[Any]:
            out = []
            for u, before in enumerate(sums):
                o = b.add(k, index(u * v.lanes))
                p = v.exp2(b.fsub(v.load(x, o), shift))
                v.store(p, x, o)
                out.append(b.fadd(before, p))
            return out

        start = b.fmul(v.load(total, index(0)), v.splat(fade))
        sums = v.loop(index(0), n, SUM_VECTORS * v.lanes, [start] + [v.const(0)] * (SUM_VECTORS - 1), step)
        pairs = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3]))
        v.store(pairs, total, index(0))
        return context.get_dummy_value()

    return types.void(x, _i8, x.dtype, total, x.dtype), generate


@intrinsic
def soften_row(typingctx: Any, s: Any, dp: Any, n: Any, lse: Any, delta: Any) -> Any:
    """s[:n] = p = 2**(s - lse), 0 for -inf; dp[:n] = p * (dp - delta), 0 where p is; n is a multiple of the lanes."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        s, dp, n, lse, delta = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        shift, mean, nothing, shut = v.splat(lse), v.splat(delta), v.const(0), v.const(float("-inf"))

        def body(k: ir.Value, _: list[Any]) -> list[Any]:
            x = v.load(s, k)
            # What is excluded has no share of a row whose log-sum-exp is not a number, either.
            p = b.select(b.fcmp_ordered("==", x, shut), nothing, v.exp2(b.fsub(x, shift)))
            ds = b.fmul(p, b.fsub(v.load(dp, k), mean))
            v.store(p, s, k)
            # What is excluded may hold anything, and so may its products.
            v.store(b.select(b.fcmp_ordered("==", p, nothing), nothing, ds), dp, k)
            return []

        v.loop(index(0), n, v.lanes, [], body)
        return context.get_dummy_value()

    return types.void(s, dp, _i8, s.dtype, s.dtype), generate


@intrinsic
def copy_block(typingctx: Any, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> Any:
    """Copy x[:rows, :depth] to out[:rows, :width], padded with 0; return 0, or NaN if an element is not finite.

    `width` is `depth` rounded up to whole vectors. 0 * x is NaN exactly for infinity and NaN. x may be of half
    precision: int16 for float16, uint16 for bfloat16.
    """

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, width, x, stride, rows, depth = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        whole, kind = v.whole(depth, v.lanes), signature.args[2].dtype

        def row(r: ir.Value, carried: list[Any]) -> list[Any]:
            source, target = b.gep(x, [b.mul(r, stride)]), b.gep(out, [b.mul(r, width)])

            def wide(k: ir.Value, c: list[Any]) -> list[Any]:
                y = v.widened(source, k, kind)
                v.store(y, target, k)
                return [v.fma(y, v.const(0), c[0])]

            def narrow(k: ir.Value, c: list[Any]) -> list[Any]:
                y = v.wide(source, k, kind)
                v.put(y, target, k)
                return [v.fma(y, v.zero(), c[0])]

            def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                v.put(v.zero(), target, k)
                return []

            (lanes,) = v.loop(index(0), whole, v.lanes, carried[:1], wide)
            (rest,) = v.loop(whole, depth, 1, carried[1:], narrow)
            v.loop(depth, width, 1, [], pad)
            return [lanes, rest]

        lanes, rest = v.loop(index(0), rows, 1, [v.const(0), v.zero()], row)
        return b.fadd(v.reduce(lanes, b.fadd), rest)

    return out.dtype(out, _i8, x, _i8, _i8, _i8), generate


@intrinsic
def transpose_square(typingctx: Any, out: Any, ldo: Any, x: Any, ldx: Any) -> Any:
    """out[:lanes, :lanes] = x[:lanes, :lanes] transposed."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        out, ldo, x, ldx = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        rows = [v.load(x, b.mul(index(i), ldx)) for i in range(v.lanes)]
        for i, row in enumerate(v.transpose(rows)):
            v.store(row, out, b.mul(index(i), ldo))
        return context.get_dummy_value()

    return types.void(out, _i8, x, _i8), generate


# A single query's keys and values come from memory, and faster if each row is asked for so many rows early.
ROWS_AHEAD = 16


def _dots(rows: int, keys: int) -> Any:
    """Build the intrinsic that multiplies `rows` queries with all keys, `keys` of them at a time."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        q, ldq, k, ldk, cols, depth, s, lds = args
        v = Vectors(b, signature.args[0].dtype.bitwidth)
        whole, kind = v.whole(depth, v.lanes), signature.args[2].dtype

        def tile(count: int) -> Any:
            def step(j: ir.Value, _: list[Any]) -> list[Any]:
                lines = [b.gep(k, [b.mul(b.add(j, index(n)), ldk)]) for n in range(count)]
                queries = [b.gep(q, [b.mul(index(r), ldq)]) for r in range(rows)]

                def wide(c: ir.Value, acc: list[Any]) -> list[Any]:
                    for y in lines:
                        v.prefetch(y, b.add(c, b.mul(ldk, index(ROWS_AHEAD))), level=3)
                    xs, ys = [v.load(x, c) for x in queries], [v.widened(y, c, kind) for y in lines]
                    return [v.fma(x, y, acc[r * count + n]) for r, x in enumerate(xs) for n, y in enumerate(ys)]

                def narrow(c: ir.Value, acc: list[Any]) -> list[Any]:
                    xs, ys = [v.get(x, c) for x in queries], [v.wide(y, c, kind) for y in lines]
                    return [v.fma(x, y, acc[r * count + n]) for r, x in enumerate(xs) for n, y in enumerate(ys)]

                lanes = v.loop(index(0), whole, v.lanes, [v.const(0)] * (rows * count), wide)
                rest = v.loop(whole, depth, 1, [v.zero()] * (rows * count), narrow)
                for r in range(rows):
                    for n in range(count):
                        at = r * count + n
                        total = b.fadd(v.reduce(lanes[at], b.fadd), rest[at])
                        v.put(total, s, b.add(b.mul(index(r), lds), b.add(j, index(n))))
                return []

            return step

        most = v.whole(cols, keys)
        v.loop(index(0), most, keys, [], tile(keys))
        v.loop(most, cols, 1, [], tile(1))
        return context.get_dummy_value()

    @intrinsic
    def dots(typingctx: Any, q: Any, ldq: Any, k: Any, ldk: Any, cols: Any, depth: Any, s: Any, lds: Any) -> Any:
        """S[rows, cols] = Q[rows, depth] @ K[cols, depth].T, both as they lie in memory; K may be of half precision."""
        return types.void(q, _i8, k, _i8, _i8, _i8, s, _i8), generate

    return dots


# Accumulators enough to hide the latency of an FMA, and few enough for 16 registers.
dots_of_one, dots_of_four = _dots(1, 8), _dots(4, 2)


def _mixes(rows: int, vectors: int) -> Any:
    """Build the intrinsic that adds weighted values to `rows` outputs, `vectors` vectors of columns at a time."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        p, ldp, x, ldx, cols, width, out, ldo, fade = args
        v, kind = Vectors(b, signature.args[0].dtype.bitwidth), signature.args[2].dtype

        def columns(count: int) -> Any:
            def strip(c: ir.Value, _: list[Any]) -> list[Any]:
                def step(j: ir.Value, acc: list[Any]) -> list[Any]:
                    line = b.gep(x, [b.add(b.mul(j, ldx), c)])
                    for n in range(count):
                        v.prefetch(line, b.add(b.mul(ldx, index(ROWS_AHEAD)), index(n * v.lanes)), level=3)
                    ys = [v.widened(line, index(n * v.lanes), kind) for n in range(count)]
                    ws = [v.splat(v.get(p, b.add(b.mul(index(r), ldp), j))) for r in range(rows)]
                    return [v.fma(w, y, acc[r * count + n]) for r, w in enumerate(ws) for n, y in enumerate(ys)]

                acc = v.loop(index(0), cols, 1, [v.const(0)] * (rows * count), step)
                for r in range(rows):
                    before = v.splat(v.get(fade, index(r)))
                    for n in range(count):
                        at = b.add(b.mul(index(r), ldo), b.add(c, index(n * v.lanes)))
                        v.store(v.fma(v.load(out, at), before, acc[r * count + n]), out, at)
                return []

            return strip

        def single(c: ir.Value, _: list[Any]) -> list[Any]:
            def step(j: ir.Value, acc: list[Any]) -> list[Any]:
                y = v.wide(x, b.add(b.mul(j, ldx), c), kind)
                return [v.fma(v.get(p, b.add(b.mul(index(r), ldp), j)), y, acc[r]) for r in range(rows)]

            for r, total in enumerate(v.loop(index(0), cols, 1, [v.zero()] * rows, step)):
                at = b.add(b.mul(index(r), ldo), c)
                v.put(v.fma(v.get(out, at), v.get(fade, index(r)), total), out, at)
            return []

        most, whole = v.whole(width, vectors * v.lanes), v.whole(width, v.lanes)
        v.loop(index(0), most, vectors * v.lanes, [], columns(vectors))
        v.loop(most, whole, v.lanes, [], columns(1))
        v.loop(whole, width, 1, [], single)
        return context.get_dummy_value()

    @intrinsic
    def mixes(
        typingctx: Any, p: Any, ldp: Any, x: Any, ldx: Any, cols: Any, width: Any, out: Any, ldo: Any, fade: Any
    ) -> Any:
        """OUT[r, :width] = OUT[r] * fade[r] + P[r, :cols] @ X[:cols, :width], X as it lies, maybe of half precision."""
        return types.void(p, _i8, x, _i8, _i8, _i8, out, _i8, fade), generate

    return mixes


mixes_of_one, mixes_of_four = _mixes(1, 8), _mixes(4, 2)
