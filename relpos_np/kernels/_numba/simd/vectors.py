"""LLVM vector instructions on one IR builder: the vocabulary in which the intrinsics are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from relpos_np.kernels._numba.simd.target import NEON, TARGET, UNIT

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)

# exp2 on [-1/2, 1/2]: minimax polynomials for the relative error (Remez), highest power first.
# Largest relative error before rounding: 1.9e-9 and 3.1e-18.
EXP2_F32 = (
    0.0001534581242594868, 0.0013399930903688073, 0.009618489071726799, 0.05550328642129898,
    0.24022646248340607, 0.6931471824645996, 1.0,
)  # fmt: skip
EXP2_F64 = (
    4.435282706957277e-10, 7.074105613508143e-09, 1.0178198021671931e-07, 1.32154330896764e-06,
    1.5252733489988525e-05, 0.00015403530462514432, 0.0013333558146789923, 0.009618129107588335,
    0.055504108664819925, 0.24022650695910155, 0.6931471805599453, 1.0,
)  # fmt: skip
# (tanh(x) - x) / x**3 by z = x**2 up to `TANH_EDGE`, minimax for the relative error of tanh: 4.4e-9 and 1.0e-17.
TANH_EDGE = 0.625
TANH_F32 = (
    -0.005704986931368763, 0.020639087399740654, -0.05373971522107966, 0.1333144220116632, -0.33333281942174076,
)  # fmt: skip
TANH_F64 = (
    -1.607255806442461e-05, 7.714434161920185e-05, -0.00022856418780151208, 0.0005863165280429431,
    -0.0014549588739536188, 0.0035919891729625764, -0.008863221002514418, 0.021869487576084687, -0.05396825393126721,
    0.1333333333326209, -0.33333333333332854,
)  # fmt: skip


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, for which llvmlite has no name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


# The operands of the processor's own instructions for bfloat16.
PAIRS, BF16_EIGHT = ir.VectorType(_BFloat(), 32), ir.VectorType(_BFloat(), 8)
_BFDOT = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"


def index(value: int) -> ir.Constant:
    """An int64 constant."""
    return ir.Constant(I64, value)


class Vectors:
    """Vector operations of one element type, emitted through `builder`; on vectors of one lane they are scalar.

    Nothing here carries fast-math flags: rounding tricks, NaN and infinities keep their meaning.
    """

    def __init__(self, builder: ir.IRBuilder, bits: int, lanes: int = 0) -> None:
        self.b = builder
        self.bits = bits
        self.lanes = lanes or TARGET.lanes(bits // 8)
        self.scalar: ir.Type = ir.FloatType() if bits == 32 else ir.DoubleType()
        self.vector, self.integers = self.of(self.scalar), self.of(ir.IntType(bits))

    def of(self, kind: ir.Type) -> ir.Type:
        """The vector type with elements of a kind."""
        return kind if self.lanes == 1 else ir.VectorType(kind, self.lanes)

    def alike(self, kind: ir.Type, value: float) -> ir.Constant:
        """A constant with the same value of a kind in every lane."""
        return ir.Constant(self.of(kind), value if self.lanes == 1 else [value] * self.lanes)

    def single(self) -> Vectors:
        """The same operations on single elements."""
        return Vectors(self.b, self.bits, 1)

    # constants, loads and stores -------------------------------------------------------------

    def const(self, value: float) -> ir.Constant:
        """A vector with the same constant in every lane."""
        return self.alike(self.scalar, float(value))

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A vector with a scalar in every lane."""
        if self.lanes == 1:
            return scalar
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def at(self, base: ir.Value, offset: ir.Value) -> ir.Value:
        """The address of an element."""
        return self.b.gep(base, [offset])

    def load(self, base: ir.Value, offset: ir.Value) -> ir.Value:
        """An unaligned vector load."""
        pointer = self.b.bitcast(self.at(base, offset), self.vector.as_pointer())
        return self.b.load(pointer, align=self.bits // 8)

    def widened(self, base: ir.Value, offset: ir.Value, kind: Any) -> ir.Value:
        """An unaligned vector load of the own type, or of fewer bits, which have a type of `FORMATS`."""
        if kind.name not in FORMATS:
            return self.load(base, offset)
        return FORMATS[kind.name].widen(self, self.load_bits(base, offset, I8 if kind.name in CODE_BITS else I16))

    def from_int8(self, codes: ir.Value) -> ir.Value:
        """Numbers of the own type from integers."""
        return self.b.sitofp(codes, self.vector)

    def from_float8_e5m2(self, codes: ir.Value) -> ir.Value:
        """The same of bits of float8_e5m2, which is the upper half of a float16."""
        return self.from_float16(self.b.shl(self.b.zext(codes, self.of(I16)), self.alike(I16, 8)))

    def from_float8_e4m3(self, codes: ir.Value) -> ir.Value:
        """The same of bits of float8_e4m3fn, divided by its unit: of a float16, whose exponent has a bias of 8 more."""
        b = self.b
        bits = b.and_(b.shl(b.sext(codes, self.of(I16)), self.alike(I16, 7)), self.alike(I16, -0x4001))
        nan = b.icmp_signed("==", b.and_(codes, self.alike(I8, 0x7F)), self.alike(I8, 0x7F))
        return b.select(nan, self.const(float("nan")), self.from_float16(bits))

    def from_float16(self, bits: ir.Value) -> ir.Value:
        """Numbers of the own type from bits of float16."""
        return self.b.fpext(self.b.bitcast(bits, self.of(ir.HalfType())), self.vector)

    def from_bfloat16(self, bits: ir.Value) -> ir.Value:
        """Numbers of the own type from bits of bfloat16, which is the upper half of a float32."""
        b = self.b
        single = b.bitcast(b.shl(b.zext(bits, self.of(I32)), self.alike(I32, 16)), self.of(ir.FloatType()))
        return single if self.bits == 32 else b.fpext(single, self.vector)

    def load_bits(self, base: ir.Value, offset: ir.Value, kind: ir.Type = I16) -> ir.Value:
        """An unaligned vector load of integers."""
        pointer = self.b.bitcast(self.at(base, offset), self.of(kind).as_pointer())
        return self.b.load(pointer, align=kind.width // 8)

    def store_bits(self, value: ir.Value, base: ir.Value, offset: ir.Value) -> None:
        """An unaligned vector store of 16-bit integers."""
        self.b.store(value, self.b.bitcast(self.at(base, offset), value.type.as_pointer()), align=2)

    def single_precision(self, x: ir.Value) -> ir.Value:
        """Convert x to float32, if it is not."""
        kind = self.of(ir.FloatType())
        return x if x.type == kind else self.b.fptrunc(x, kind)

    def to_float16(self, x: ir.Value) -> ir.Value:
        """Bits of the nearest float16, ties to even."""
        return self.b.bitcast(self.b.fptrunc(self.single_precision(x), self.of(ir.HalfType())), self.of(I16))

    def rounded(self, x: ir.Value) -> ir.Value:
        """Bits of the nearest bfloat16, ties to even; a NaN stays one."""
        b, x = self.b, self.single_precision(x)
        bits = b.bitcast(x, self.of(I32))
        odd = b.and_(b.lshr(bits, self.alike(I32, 16)), self.alike(I32, 1))
        nearest = b.add(bits, b.add(odd, self.alike(I32, 0x7FFF)))
        quiet = b.or_(bits, self.alike(I32, 0x400000))
        kept = b.select(b.fcmp_unordered("uno", x, x), quiet, nearest)
        return b.trunc(b.lshr(kept, self.alike(I32, 16)), self.of(I16))

    def store(self, value: ir.Value, base: ir.Value, offset: ir.Value) -> None:
        """An unaligned vector store."""
        pointer = self.b.bitcast(self.at(base, offset), self.vector.as_pointer())
        self.b.store(value, pointer, align=self.bits // 8)

    def get(self, base: ir.Value, offset: ir.Value) -> ir.Value:
        """A scalar load."""
        return self.b.load(self.at(base, offset))

    def prefetch(self, base: ir.Value, offset: ir.Value, level: int = 2) -> None:
        """Ask for the cache line of an element, which need not exist; level 3 is the first cache, 2 the second."""
        kinds = [I8.as_pointer(), I32, I32, I32]
        module, name = self.b.module, "llvm.prefetch.p0"
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name=name)
        line = self.b.bitcast(self.at(base, offset), kinds[0])
        self.b.call(function, [line, ir.Constant(I32, 0), ir.Constant(I32, level), ir.Constant(I32, 1)])

    # arithmetic ------------------------------------------------------------------------------

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x*y + z with one rounding."""
        name = f"llvm.fma.f{self.bits}" if self.lanes == 1 else f"llvm.fma.v{self.lanes}f{self.bits}"
        module, kind = self.b.module, self.vector
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind] * 3), name=name)
        return self.b.call(function, [x, y, z])

    def dot(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Add x0*y0 + x1*y1 to z, of pairs of bfloat16 in the bits of x and y; subnormal numbers may count as 0."""
        b, kind = self.b, self.vector
        if UNIT in ("dot", "tiles") and self.lanes == TARGET.lanes(4):
            name, pairs = (_BFDOT, BF16_EIGHT) if TARGET is NEON else ("llvm.x86.avx512bf16.dpbf16ps.512", PAIRS)
            kinds = [kind, pairs, pairs]
            function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(kind, kinds), name=name)
            return b.call(function, [z, b.bitcast(x, pairs), b.bitcast(y, pairs)])
        (x0, x1), (y0, y1) = self.halves_of(x), self.halves_of(y)
        return self.fma(x1, y1, self.fma(x0, y0, z))

    def halves_of(self, pair: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The two bfloat16 of each element as float32, the lower one first."""
        b, kind = self.b, ir.IntType(self.bits)
        bits = b.bitcast(pair, self.integers)
        low, high = b.shl(bits, self.alike(kind, 16)), b.and_(bits, self.alike(kind, -65536))
        return b.bitcast(low, self.vector), b.bitcast(high, self.vector)

    def maximum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The larger one; `y` where either is NaN, so that a NaN in `x` is passed over."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2**x for x <= 0; exactly 0 below the smallest normal number; NaN stays NaN.

        Adding 1.5 * 2**mantissa + bias rounds x to an integer n and leaves n + bias in the low bits,
        which the shift turns into the float 2**n.
        """
        b = self.b
        mantissa, bias = (23, 127) if self.bits == 32 else (52, 1023)
        magic = self.const(1.5 * 2.0**mantissa + bias)
        shifted = b.fadd(x, magic)
        r = b.fsub(x, b.fsub(shifted, magic))
        coefficients = EXP2_F32 if self.bits == 32 else EXP2_F64
        p: ir.Value = self.const(coefficients[0])
        for c in coefficients[1:]:
            p = self.fma(p, r, self.const(c))
        shift = self.alike(ir.IntType(self.bits), mantissa)
        power = b.bitcast(b.shl(b.bitcast(shifted, self.integers), shift), self.vector)
        normal = b.fcmp_unordered(">=", x, self.const(1.0 - bias))
        return b.select(normal, b.fmul(p, power), self.const(0.0))

    def tanh(self, x: ir.Value) -> ir.Value:
        """The hyperbolic tangent: a polynomial for small x, else (1 - e) / (1 + e) with e = exp(-2 |x|)."""
        b, one = self.b, self.const(1.0)
        z = b.fmul(x, x)
        coefficients = TANH_F32 if self.bits == 32 else TANH_F64
        p: ir.Value = self.const(coefficients[0])
        for c in coefficients[1:]:
            p = self.fma(p, z, self.const(c))
        near = self.fma(b.fmul(x, z), p, x)
        negative = b.fcmp_ordered("<", x, self.const(0.0))
        size = b.select(negative, b.fneg(x), x)
        e = self.exp2(b.fmul(size, self.const(-2.0 / math.log(2.0))))
        far = b.fdiv(b.fsub(one, e), b.fadd(one, e))
        far = b.select(negative, b.fneg(far), far)
        return b.select(b.fcmp_ordered("<", size, self.const(TANH_EDGE)), near, far)

    def reduce(self, vector: ir.Value, operation: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine all lanes by halving, in a fixed order."""
        width = self.lanes
        while width > 1:
            width //= 2
            turn = ir.Constant(ir.VectorType(I32, self.lanes), [(i + width) % self.lanes for i in range(self.lanes)])
            vector = operation(vector, self.b.shuffle_vector(vector, vector, turn))
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def totals(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """The sum of each of some vectors, as `reduce` adds it up, side by side; as many as a power of two up to lanes.

        Two vectors fold into one, which takes half the operations.
        """
        vectors, width, b = list(vectors), self.lanes, self.b
        kind, count, lanes = ir.VectorType(I32, width), len(vectors), range(width)

        def fold(x: ir.Value, y: ir.Value) -> ir.Value:
            """Halves of x added up in lanes without the bit `width`, and those of y in the others."""
            low = [k - width + self.lanes if k & width else k for k in lanes]
            high = [k + self.lanes if k & width else k + width for k in lanes]
            return b.fadd(*(b.shuffle_vector(x, y, ir.Constant(kind, half)) for half in (low, high)))

        while width > 1:
            width //= 2
            if len(vectors) > 1:
                half = len(vectors) // 2
                vectors = [fold(*pair) for pair in zip(vectors[:half], vectors[half:], strict=True)]
            else:
                turn = ir.Constant(kind, [k ^ width for k in lanes])
                vectors = [b.fadd(vectors[0], b.shuffle_vector(vectors[0], vectors[0], turn))]
        if count == 1:
            return b.extract_element(vectors[0], ir.Constant(I32, 0))
        own = ir.Constant(ir.VectorType(I32, count), [n * (self.lanes // count) for n in range(count)])
        return b.shuffle_vector(vectors[0], vectors[0], own)

    def transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Transpose a square of `lanes` vectors by exchanging ever smaller blocks."""
        kind = ir.VectorType(I32, self.lanes)
        width = self.lanes
        while width > 1:
            width //= 2
            low = [k if not k & width else self.lanes + k - width for k in range(self.lanes)]
            high = [k + width if not k & width else self.lanes + k for k in range(self.lanes)]
            out = list(rows)
            for i in range(self.lanes):
                if not i & width:
                    pair = rows[i], rows[i + width]
                    out[i] = self.b.shuffle_vector(*pair, ir.Constant(kind, low))
                    out[i + width] = self.b.shuffle_vector(*pair, ir.Constant(kind, high))
            rows = out
        return rows

    # control ---------------------------------------------------------------------------------

    def loop(
        self,
        start: ir.Value,
        stop: ir.Value,
        step: int,
        carried: Sequence[ir.Value],
        body: Callable[[ir.Value, list[Any]], Sequence[ir.Value]],
    ) -> list[Any]:
        """``while start < stop: carried = body(start, carried); start += step``; returns the last carried values."""
        b, entry = self.b, self.b.block
        head = b.append_basic_block("loop.head")
        inside = b.append_basic_block("loop.body")
        done = b.append_basic_block("loop.done")
        b.branch(head)
        b.position_at_end(head)
        k = b.phi(I64)
        k.add_incoming(start, entry)
        phis = []
        for value in carried:
            phi = b.phi(value.type)
            phi.add_incoming(value, entry)
            phis.append(phi)
        b.cbranch(b.icmp_signed("<", k, stop), inside, done)
        b.position_at_end(inside)
        new = body(k, phis)
        k.add_incoming(b.add(k, index(step)), b.block)
        for phi, value in zip(phis, new, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(done)
        return phis

    def each(self, n: ir.Value, body: Callable[[Vectors, ir.Value], None]) -> None:
        """Run ``body(v, k)`` on every whole vector of n elements and then on each one that remains; both begin at k."""

        def step(v: Vectors, k: ir.Value, _: list[Any]) -> list[Any]:
            body(v, k)
            return []

        self.sums(n, ([], []), step)

    def sums(
        self, n: ir.Value, starts: Sequence[Sequence[ir.Value]], body: Callable[..., list[Any]]
    ) -> tuple[list[Any], list[Any]]:
        """As `each`, with what ``body(v, k, values)`` carries on: values for whole vectors, and for single elements."""
        whole, one = self.whole(n, self.lanes), self.single()
        wide = self.loop(index(0), whole, self.lanes, starts[0], lambda k, c: body(self, k, c))
        return wide, self.loop(whole, n, 1, starts[1], lambda k, c: body(one, k, c))

    def whole(self, count: ir.Value, unit: int) -> ir.Value:
        """The largest multiple of `unit`, a power of two, that is not above `count`."""
        return self.b.and_(count, index(-unit))


class Format(NamedTuple):
    """A dtype of fewer bits: how `Vectors` makes numbers of them, and bits of numbers, if kernels write it."""

    widen: Callable[[Vectors, ir.Value], ir.Value]
    narrow: Callable[[Vectors, ir.Value], ir.Value] | None = None


# Codes of eight bits, by the dtype that NumPy and ml_dtypes call so. What widened ones are to be multiplied by:
# numbers of float8_e4m3fn have been divided, which saves an operation for each.
CODE_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
CODE_UNITS = {"float8_e4m3fn": 256.0}
# By the name of the Numba type that its bits have, which tells those of one width apart.
FLOAT16_BITS, BFLOAT16_BITS = "int16", "uint16"
FORMATS = {
    FLOAT16_BITS: Format(Vectors.from_float16, Vectors.to_float16),
    BFLOAT16_BITS: Format(Vectors.from_bfloat16, Vectors.rounded),
    "int8": Format(Vectors.from_int8),
    "float8_e4m3fn": Format(Vectors.from_float8_e4m3),
    "float8_e5m2": Format(Vectors.from_float8_e5m2),
}
