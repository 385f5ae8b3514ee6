"""Vector passes over rows of scores and blocks of keys and values, as Numba intrinsics over raw pointers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from relpos_np.kernels._numba.simd.target import SUM_VECTORS, TARGET
from relpos_np.kernels._numba.simd.vectors import (
    BFLOAT16_BITS,
    CODE_BITS,
    FLOAT16_BITS,
    FORMATS,
    I8,
    I32,
    I64,
    Vectors,
    index,
)

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
halves, brains = (_typed(types.CPointer(getattr(types, bits))) for bits in (FLOAT16_BITS, BFLOAT16_BITS))
opaque = _typed(types.voidptr)


class _Code(types.Type):  # type: ignore[misc]
    """Eight bits that stand for a number, of a format that the name says."""


@register_model(_Code)
class _CodeModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, I8)


int8s, e4m3s, e5m2s = (_typed(types.CPointer(_Code(name))) for name in CODE_BITS)


@intrinsic
def address_of(typingctx: Any, base: Any) -> Any:
    """The address of a pointer."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], I64)

    return _i8(base), generate


@intrinsic
def copy_bytes(typingctx: Any, out: Any, x: Any, n: Any) -> Any:
    """Copy n bytes from one address to another one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, I8.as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(_i8, _i8, _i8), generate


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
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line of a byte, which need not exist, to be brought into the second-level cache."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        Vectors(b, 32).prefetch(b.inttoptr(args[0], I8.as_pointer()), ir.Constant(I64, 0))
        return context.get_dummy_value()

    return types.void(_i8), generate


def code(generate: Callable[..., Any]) -> Any:
    """``generate(v, *args)``, with vectors v of the first argument's type, as the function that Numba wants."""

    def adapted(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        made = generate(Vectors(builder, signature.args[0].dtype.bitwidth), *args)
        return context.get_dummy_value() if made is None else made

    return adapted


@intrinsic
def scale_row(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] = x[:n] * factor; `out` may be `x`."""

    def generate(v: Vectors, out: Any, x: Any, n: Any, factor: Any) -> None:
        v.each(n, lambda u, k: u.store(u.b.fmul(u.load(x, k), u.splat(factor)), out, k))

    return types.void(out, x, _i8, out.dtype), code(generate)


@intrinsic
def add_row(typingctx: Any, out: Any, x: Any, n: Any, factor: Any) -> Any:
    """out[:n] += x[:n] * factor."""

    def generate(v: Vectors, out: Any, x: Any, n: Any, factor: Any) -> None:
        v.each(n, lambda u, k: u.store(u.fma(u.load(x, k), u.splat(factor), u.load(out, k)), out, k))

    return types.void(out, x, _i8, out.dtype), code(generate)


@intrinsic
def add_sum(typingctx: Any, out: Any, low: Any, x: Any, n: Any) -> Any:
    """out[:n] += x[:n] + low[:n]; what that loses to rounding is put into low[:n], and 0 where it is no number."""

    def generate(v: Vectors, out: Any, low: Any, x: Any, n: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            b, old = u.b, u.load(out, k)
            new = b.fadd(u.load(x, k), u.load(low, k))
            total = b.fadd(old, new)
            part = b.fsub(total, old)
            lost = b.fadd(b.fsub(old, b.fsub(total, part)), b.fsub(new, part))
            u.store(total, out, k)
            u.store(b.select(b.fcmp_ordered("ord", lost, lost), lost, u.const(0.0)), low, k)

        v.each(n, body)

    return types.void(out, low, x, _i8), code(generate)


@intrinsic
def add_mask(typingctx: Any, out: Any, x: Any, n: Any, least: Any, factor: Any) -> Any:
    """out[:n] += max(x[:n], least) * factor, and -inf wherever x is -inf, even where out is NaN."""

    def generate(v: Vectors, out: Any, x: Any, n: Any, least: Any, factor: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            mask, bound, shut = u.load(x, k), u.splat(least), u.const(float("-inf"))
            bounded = u.b.select(u.b.fcmp_ordered("<", mask, bound), bound, mask)
            total = u.fma(bounded, u.splat(factor), u.load(out, k))
            u.store(u.b.select(u.b.fcmp_ordered("==", mask, shut), shut, total), out, k)

        v.each(n, body)

    return types.void(out, x, _i8, out.dtype, out.dtype), code(generate)


@intrinsic
def cap_row(typingctx: Any, out: Any, n: Any, cap: Any, inverse: Any, slopes: Any, sloped: Any) -> Any:
    """out[:n] = cap * tanh(out * inverse); where `sloped` is not 0, slopes[:n] is the derivative."""

    def generate(v: Vectors, out: Any, n: Any, cap: Any, inverse: Any, slopes: Any, sloped: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            t = u.tanh(u.b.fmul(u.load(out, k), u.splat(inverse)))
            u.store(u.b.fmul(t, u.splat(cap)), out, k)
            with u.b.if_then(u.b.icmp_signed("!=", sloped, index(0))):
                u.store(u.fma(u.b.fneg(t), t, u.const(1.0)), slopes, k)

        v.each(n, body)

    return types.void(out, _i8, out.dtype, out.dtype, out, _i8), code(generate)


@intrinsic
def multiply_row(typingctx: Any, out: Any, x: Any, n: Any) -> Any:
    """out[:n] *= x[:n], but what is 0 stays 0, whatever x is."""

    def generate(v: Vectors, out: Any, x: Any, n: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            own = u.load(out, k)
            nothing = u.b.fcmp_ordered("==", own, u.const(0.0))
            u.store(u.b.select(nothing, own, u.b.fmul(own, u.load(x, k))), out, k)

        v.each(n, body)

    return types.void(out, x, _i8), code(generate)


@intrinsic
def shut_row(typingctx: Any, out: Any, x: Any, n: Any) -> Any:
    """out[:n] = -inf where x is -inf."""

    def generate(v: Vectors, out: Any, x: Any, n: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            shut = u.const(float("-inf"))
            closed = u.b.fcmp_ordered("==", u.load(x, k), shut)
            u.store(u.b.select(closed, shut, u.load(out, k)), out, k)

        v.each(n, body)

    return types.void(out, x, _i8), code(generate)


@intrinsic
def add_constant(typingctx: Any, out: Any, n: Any, value: Any, factor: Any) -> Any:
    """out[:n] += value * factor, rounded as `add_row` and `add_mask` do."""

    def generate(v: Vectors, out: Any, n: Any, value: Any, factor: Any) -> None:
        v.each(n, lambda u, k: u.store(u.fma(u.splat(value), u.splat(factor), u.load(out, k)), out, k))

    return types.void(out, _i8, out.dtype, out.dtype), code(generate)


@intrinsic
def fill_row(typingctx: Any, out: Any, start: Any, stop: Any, value: Any) -> Any:
    """out[start:stop] = value."""

    def generate(v: Vectors, out: Any, start: Any, stop: Any, value: Any) -> None:
        base = v.at(out, start)
        v.each(v.b.sub(stop, start), lambda u, k: u.store(u.splat(value), base, k))

    return types.void(out, _i8, _i8, out.dtype), code(generate)


@intrinsic
def mask_row(typingctx: Any, out: Any, allowed: Any, n: Any, value: Any) -> Any:
    """out[j] = value where the byte allowed[j] is 0."""

    def generate(v: Vectors, out: Any, allowed: Any, n: Any, value: Any) -> None:
        def body(u: Vectors, k: ir.Value) -> None:
            given = u.b.load(u.b.bitcast(u.at(allowed, k), u.of(I8).as_pointer()), align=1)
            shut = u.b.icmp_unsigned("==", given, u.alike(I8, 0))
            u.store(u.b.select(shut, u.splat(value), u.load(out, k)), out, k)

        v.each(n, body)

    return types.void(out, allowed, _i8, out.dtype), code(generate)


@intrinsic
def sum_row(typingctx: Any, x: Any, n: Any) -> Any:
    """The sum of x[:n], in a fixed order, which is the same with any number of zeros behind them."""

    def generate(v: Vectors, x: Any, n: Any) -> ir.Value:
        b, whole = v.b, v.whole(n, v.lanes)
        up = ir.Constant(v.of(I32), [v.lanes, *range(v.lanes - 1)])

        def place(k: ir.Value, c: list[Any]) -> list[Any]:
            """From the last element on, each goes to the first lane, and those behind it one up: as in a vector."""
            element = v.get(x, b.sub(b.sub(n, index(1)), k))
            return [b.shuffle_vector(c[0], v.splat(element), up)]

        (lanes,) = v.loop(index(0), whole, v.lanes, [v.const(0)], lambda k, c: [b.fadd(c[0], v.load(x, k))])
        (rest,) = v.loop(index(0), b.sub(n, whole), 1, [v.const(0)], place)
        return v.reduce(b.fadd(lanes, rest), b.fadd)

    return x.dtype(x, _i8), code(generate)


@intrinsic
def max_row(typingctx: Any, x: Any, n: Any, top: Any) -> Any:
    """Raise the running maxima top[:lanes] by x[:n]; n is a multiple of the lanes."""

    def generate(v: Vectors, x: Any, n: Any, top: Any) -> None:
        start = v.load(top, index(0))
        (best,) = v.loop(index(0), n, v.lanes, [start], lambda k, c: [v.maximum(v.load(x, k), c[0])])
        v.store(best, top, index(0))

    return types.void(x, _i8, top), code(generate)


@intrinsic
def lane_max(typingctx: Any, top: Any) -> Any:
    """The largest of the running maxima of one row."""
    return top.dtype(top), code(lambda v, top: v.reduce(v.load(top, index(0)), v.maximum))


@intrinsic
def lane_sum(typingctx: Any, total: Any) -> Any:
    """The sum of the partial sums of one row."""
    return total.dtype(total), code(lambda v, total: v.reduce(v.load(total, index(0)), v.b.fadd))


@intrinsic
def advance(typingctx: Any, best: Any, top: Any, fade: Any, n: Any) -> Any:
    """Fold a block's row maxima into the running ones; n is a multiple of the lanes.

    best[i] becomes the value to subtract before exponentiation (0 for a row that has seen no key),
    top[i] the running maximum, fade[i] the factor for what was summed before.
    """

    def generate(v: Vectors, best: Any, top: Any, fade: Any, n: Any) -> None:
        def body(k: ir.Value, _: list[Any]) -> list[Any]:
            old = v.load(top, k)
            new = v.maximum(v.load(best, k), old)
            reference = v.b.select(v.b.fcmp_ordered("==", new, v.const(float("-inf"))), v.const(0), new)
            v.store(new, top, k)
            v.store(reference, best, k)
            v.store(v.exp2(v.b.fsub(old, reference)), fade, k)
            return []

        v.loop(index(0), n, v.lanes, [], body)

    return types.void(best, top, fade, _i8), code(generate)


@intrinsic
def exp2_row(typingctx: Any, x: Any, n: Any, reference: Any, total: Any, fade: Any) -> Any:
    """x[:n] = 2**(x - reference); total[:lanes] = total * fade + partial sums; n is a multiple of the lanes.

    Rows end with whole groups of SUM_VECTORS vectors where many are summed; those of a few vectors need not.
    """

    def generate(v: Vectors, x: Any, n: Any, reference: Any, total: Any, fade: Any) -> None:
        b, shift = v.b, v.splat(reference)

        def step(k: ir.Value, sums: list[Any]) -> list[Any]:
            out = []
            for u, before in enumerate(sums):
                o = b.add(k, index(u * v.lanes))
                p = v.exp2(b.fsub(v.load(x, o), shift))
                v.store(p, x, o)
                out.append(b.fadd(before, p))
            return out

        start, whole = b.fmul(v.load(total, index(0)), v.splat(fade)), v.whole(n, SUM_VECTORS * v.lanes)
        sums = v.loop(index(0), whole, SUM_VECTORS * v.lanes, [start] + [v.const(0)] * (SUM_VECTORS - 1), step)
        sums[:1] = v.loop(whole, n, v.lanes, sums[:1], step)
        pairs = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3]))
        v.store(pairs, total, index(0))

    return types.void(x, _i8, x.dtype, total, x.dtype), code(generate)


@intrinsic
def soften_row(typingctx: Any, s: Any, dp: Any, n: Any, lse: Any, low: Any, delta: Any) -> Any:
    """s[:n] = p = 2**(s - lse - low), 0 for -inf; dp[:n] = p * (dp - delta), 0 where p is; n: a multiple of the lanes.

    `low` is what the rounding of lse has lost: beside scores of 1e9 all digits of the sum.
    """

    def generate(v: Vectors, s: Any, dp: Any, n: Any, lse: Any, low: Any, delta: Any) -> None:
        b, shift, mean, nothing, shut = v.b, v.splat(lse), v.splat(delta), v.const(0), v.const(float("-inf"))
        lost = v.splat(low)

        def body(k: ir.Value, _: list[Any]) -> list[Any]:
            x = v.load(s, k)
            # An excluded key has no share of a row whose log-sum-exp is NaN, either.
            p = b.select(b.fcmp_ordered("==", x, shut), nothing, v.exp2(b.fsub(b.fsub(x, shift), lost)))
            ds = b.fmul(p, b.fsub(v.load(dp, k), mean))
            v.store(p, s, k)
            # An excluded key may hold anything, and so may its products.
            v.store(b.select(b.fcmp_ordered("==", p, nothing), nothing, ds), dp, k)
            return []

        v.loop(index(0), n, v.lanes, [], body)

    return types.void(s, dp, _i8, s.dtype, s.dtype, s.dtype), code(generate)


@intrinsic
def copy_block(typingctx: Any, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> Any:
    """Copy x[:rows, :depth] to out[:rows, :width], padded with 0; return 0, or NaN if an element is not finite.

    `width` is `depth` rounded up to whole vectors. 0 * x is NaN exactly for infinity and NaN. x may hold bits of half
    precision.
    """
    kind = x.dtype

    def generate(v: Vectors, out: Any, width: Any, x: Any, stride: Any, rows: Any, depth: Any) -> ir.Value:
        one = v.single()

        def row(r: ir.Value, carried: list[Any]) -> list[Any]:
            source, target = v.at(x, v.b.mul(r, stride)), v.at(out, v.b.mul(r, width))

            def copy(u: Vectors, k: ir.Value, c: list[Any]) -> list[Any]:
                y = u.widened(source, k, kind)
                u.store(y, target, k)
                return [u.fma(y, u.const(0), c[0])]

            def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                one.store(one.const(0), target, k)
                return []

            (lanes,), (rest,) = v.sums(depth, (carried[:1], carried[1:]), copy)
            v.loop(depth, width, 1, [], pad)
            return [lanes, rest]

        lanes, rest = v.loop(index(0), rows, 1, [v.const(0), one.const(0)], row)
        return v.b.fadd(v.reduce(lanes, v.b.fadd), rest)

    return out.dtype(out, _i8, x, _i8, _i8, _i8), code(generate)


@intrinsic
def transpose_square(typingctx: Any, out: Any, ldo: Any, x: Any, ldx: Any) -> Any:
    """out[:lanes, :lanes] = x[:lanes, :lanes] transposed."""

    def generate(v: Vectors, out: Any, ldo: Any, x: Any, ldx: Any) -> None:
        rows = [v.load(x, v.b.mul(index(i), ldx)) for i in range(v.lanes)]
        for i, row in enumerate(v.transpose(rows)):
            v.store(row, out, v.b.mul(index(i), ldo))

    return types.void(out, _i8, x, _i8), code(generate)


# Keys and values of few queries come from memory, which processors read two or three times as fast in the order of
# addresses as in that of the products, which take several rows at once. So while a row is multiplied, another one is
# asked for, long before it is needed and as a whole. Tables say where rows begin, and those to ask for, or a number of
# elements between rows does.
def _place(v: Vectors, rows: ir.Value, j: ir.Value) -> ir.Value:
    """Where row j begins."""
    if isinstance(rows.type, ir.PointerType):
        return v.get(rows, j)
    return v.b.mul(j, rows)


def _fetch(v: Vectors, kind: Any, x: ir.Value, early: ir.Value, j: ir.Value, width: ir.Value) -> None:
    """Ask for a row, which need not exist."""
    bits = 8 if kind.name in CODE_BITS else 16 if kind.name in FORMATS else v.bits
    row = v.b.gep(x, [_place(v, early, j)])

    def ask(c: ir.Value, _: list[Any]) -> list[Any]:
        v.prefetch(row, c)
        return []

    v.loop(index(0), width, 8 * 64 // bits, [], ask)


def _rows(given: Any) -> Any:
    """The type of what says where rows begin."""
    return given if isinstance(given, types.CPointer) else _i8


def _dots(rows: int, keys: int) -> Any:
    """Build the intrinsic that multiplies `rows` queries with all keys, `keys` of them at a time."""

    def generate(kind: Any, v: Vectors, q: Any, ldq: Any, k: Any, at: Any, early: Any, *rest: Any) -> None:
        b, one, (cols, depth, s, lds) = v.b, v.single(), rest

        def tile(count: int) -> Any:
            def step(j: ir.Value, _: list[Any]) -> list[Any]:
                for n in range(count):
                    _fetch(v, kind, k, early, b.add(j, index(n)), depth)
                lines = [b.gep(k, [_place(v, at, b.add(j, index(n)))]) for n in range(count)]
                queries = [b.gep(q, [b.mul(index(r), ldq)]) for r in range(rows)]

                def multiply(u: Vectors, c: ir.Value, acc: list[Any]) -> list[Any]:
                    xs, ys = [u.load(x, c) for x in queries], [u.widened(y, c, kind) for y in lines]
                    return [u.fma(x, y, acc[r * count + n]) for r, x in enumerate(xs) for n, y in enumerate(ys)]

                starts = [[u.const(0)] * (rows * count) for u in (v, one)]
                lanes, rest = v.sums(depth, starts, multiply)
                own = [b.gep(s, [b.add(b.mul(index(r), lds), j)]) for r in range(rows)]
                places, some = [(line, index(n)) for line in own for n in range(count)], min(count, v.lanes)
                for n in range(0, rows * count, some):
                    Vectors(b, v.bits, some).store(v.totals(lanes[n : n + some]), *places[n])
                with b.if_then(b.icmp_signed("!=", v.whole(depth, v.lanes), depth)):
                    for place, x in zip(places, rest, strict=True):
                        one.store(b.fadd(one.load(*place), x), *place)
                return []

            return step

        most = v.whole(cols, keys)
        v.loop(index(0), most, keys, [], tile(keys))
        v.loop(most, cols, 1, [], tile(1))

    @intrinsic
    def dots(
        typingctx: Any, q: Any, ldq: Any, k: Any, at: Any, early: Any, cols: Any, depth: Any, s: Any, lds: Any
    ) -> Any:
        """S[rows, cols] = Q[rows, depth] @ K[cols, depth].T, both as they lie in memory; K may be of half precision."""
        signature = types.void(q, _i8, k, _rows(at), _rows(early), _i8, _i8, s, _i8)
        return signature, code(partial(generate, k.dtype))

    return dots


# Accumulators enough to hide the latency of an FMA, and few enough for 16 registers.
dots_of_one, dots_of_four = _dots(1, 8), _dots(4, 2)


def _mixes(rows: int, vectors: int) -> Any:
    """Build the intrinsic that adds weighted values to `rows` sums, at most `vectors` vectors of columns at a time."""

    def generate(kind: Any, v: Vectors, p: Any, ldp: Any, x: Any, at: Any, early: Any, *rest: Any) -> None:
        b, (cols, width, out, ldo) = v.b, rest

        def columns(u: Vectors, count: int) -> Any:
            def strip(c: ir.Value, _: list[Any]) -> list[Any]:
                def step(j: ir.Value, acc: list[Any]) -> list[Any]:
                    with b.if_then(b.icmp_signed("==", c, index(0))):
                        _fetch(v, kind, x, early, j, width)
                    line = b.gep(x, [b.add(_place(v, at, j), c)])
                    ys = [u.widened(line, index(n * u.lanes), kind) for n in range(count)]
                    ws = [u.splat(v.get(p, b.add(b.mul(index(r), ldp), j))) for r in range(rows)]
                    return [u.fma(w, y, acc[r * count + n]) for r, w in enumerate(ws) for n, y in enumerate(ys)]

                starts = [b.add(c, index(n * u.lanes)) for n in range(count)]
                own = [b.add(b.mul(index(r), ldo), start) for r in range(rows) for start in starts]
                acc = v.loop(index(0), cols, 1, [u.load(out, place) for place in own], step)
                for place, total in zip(own, acc, strict=True):
                    u.store(total, out, place)
                return []

            return strip

        done, count = index(0), vectors
        while count:
            left = v.whole(width, count * v.lanes)
            v.loop(done, left, count * v.lanes, [], columns(v, count))
            done, count = left, count // 2
        v.loop(done, width, 1, [], columns(v.single(), 1))

    @intrinsic
    def mixes(
        typingctx: Any, p: Any, ldp: Any, x: Any, at: Any, early: Any, cols: Any, width: Any, out: Any, ldo: Any
    ) -> Any:
        """OUT[r, :width] += P[r, :cols] @ X[:cols, :width], one row of X after the other, as they lie."""
        signature = types.void(p, _i8, x, _rows(at), _rows(early), _i8, _i8, out, _i8)
        return signature, code(partial(generate, x.dtype))

    return mixes


mixes_of_one, mixes_of_four = _mixes(1, 8), _mixes(4, 4 if TARGET.accumulators >= 16 else 2)
