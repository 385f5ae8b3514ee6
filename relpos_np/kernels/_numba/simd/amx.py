"""Products of pairs of bfloat16 on matrix tiles, as Intel's AMX has them: eight registers of 16 rows of 16 pairs.

They take the place of the register tiles of `tiles.py`, on the same buffers: a tile of 16 rows of queries, and one of
16 steps of a packed panel. Sums are stored before vectors add to them, since nothing but a product can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd.rows import code
from relpos_np.kernels._numba.simd.target import TARGET, UNIT
from relpos_np.kernels._numba.simd.vectors import I8, I64, Vectors, index

# Rows of a tile, and elements of its rows: pairs of operands, or sums.
SIDE = 16
# A group of products has two tiles on either side, so that each that is loaded is used twice.
_SUMS, _LEFT, _RIGHT = 0, 4, 6
# Products of planes, from the smallest on: while sums are small, so are their roundings.
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))


class _Instructions:
    """The operations on tiles: what the processor does."""

    def __init__(self, v: Vectors) -> None:
        self.b = v.b

    def _call(self, name: str, kinds: list[ir.Type], args: list[ir.Value]) -> None:
        module, name = self.b.module, f"llvm.x86.{name}"
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name=name)
        self.b.call(function, args)

    def _registers(self, name: str, *tiles: int) -> None:
        self._call(name, [I8] * len(tiles), [ir.Constant(I8, n) for n in tiles])

    def _memory(self, name: str, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        raw = self.b.bitcast(pointer, I8.as_pointer())
        self._call(name, [I8, raw.type, I64], [ir.Constant(I8, tile), raw, self.b.shl(stride, index(2))])

    def clear(self, tile: int) -> None:
        """Make all sums of a tile 0."""
        self._registers("tilezero", tile)

    def load(self, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        """Load rows that are so many elements apart."""
        self._memory("tileloadd64", tile, pointer, stride)

    def store(self, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        """Store rows that are so many elements apart."""
        self._memory("tilestored64", tile, pointer, stride)

    def multiply(self, sums: int, left: int, right: int) -> None:
        """Add to sums[i, j] both products of left[i, k] and right[k, j] for every k; subnormal numbers count as 0."""
        self._registers("tdpbf16ps", sums, left, right)


class _Emulated(_Instructions):
    """The same operations on registers in memory, with vectors: for processors without, and for tests."""

    def __init__(self, v: Vectors) -> None:
        super().__init__(v)
        self.v = Vectors(v.b, 32, SIDE)
        registers = cgutils.alloca_once(v.b, ir.ArrayType(v.scalar, 8 * SIDE * SIDE))
        self.registers = v.b.bitcast(registers, v.scalar.as_pointer())

    def _row(self, tile: int, k: ir.Value) -> ir.Value:
        return self.b.add(index(tile * SIDE * SIDE), self.b.mul(k, index(SIDE)))

    def _each_row(self, body: Callable[[ir.Value], None]) -> None:
        def step(k: ir.Value, _: list[Any]) -> list[Any]:
            body(k)
            return []

        self.v.loop(index(0), index(SIDE), 1, [], step)

    def clear(self, tile: int) -> None:
        self._each_row(lambda k: self.v.store(self.v.const(0), self.registers, self._row(tile, k)))

    def load(self, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        v, at = self.v, self.registers
        self._each_row(lambda k: v.store(v.load(pointer, self.b.mul(k, stride)), at, self._row(tile, k)))

    def store(self, tile: int, pointer: ir.Value, stride: ir.Value) -> None:
        v, at = self.v, self.registers
        self._each_row(lambda k: v.store(v.load(at, self._row(tile, k)), pointer, self.b.mul(k, stride)))

    def _normal(self, x: ir.Value) -> ir.Value:
        """A subnormal number as 0, as the processor takes and leaves it."""
        size = self.b.select(self.b.fcmp_ordered("<", x, self.v.const(0)), self.b.fneg(x), x)
        return self.b.select(self.b.fcmp_ordered("<", size, self.v.const(2.0**-126)), self.v.const(0), x)

    def multiply(self, sums: int, left: int, right: int) -> None:
        v, at = self.v, self.registers

        def row(i: ir.Value) -> None:
            def step(k: ir.Value, acc: list[Any]) -> list[Any]:
                x = v.splat(v.get(at, self.b.add(self._row(left, i), k)))
                both = zip(v.halves_of(x), v.halves_of(v.load(at, self._row(right, k))), acc, strict=True)
                return [self._normal(v.fma(self._normal(p), self._normal(q), z)) for p, q, z in both]

            # The first and the second products of pairs are summed apart.
            parts = v.loop(index(0), index(SIDE), 1, [v.const(0)] * 2, step)
            total = self.b.fadd(v.load(at, self._row(sums, i)), self._normal(self.b.fadd(*parts)))
            v.store(self._normal(total), at, self._row(sums, i))

        self._each_row(row)


def _tiles(v: Vectors) -> _Instructions:
    return _Instructions(v) if UNIT == "tiles" else _Emulated(v)


def _product(
    v: Vectors,
    shape: tuple[int, int],
    a: ir.Value,
    lda: ir.Value,
    b: ir.Value,
    ldb: ir.Value,
    depth: ir.Value,
    c: ir.Value,
    ldc: ir.Value,
    planes: tuple[ir.Value, ir.Value, ir.Value] | None = None,
) -> None:
    """C = A[16 * shape[0], depth] @ B[depth, 16 * shape[1]], where depth is rounded up to whole tiles.

    `planes`: how many of them A and B have, and how far apart these are; the products of planes are summed.
    """
    builder, tiles = v.b, _tiles(v)
    rows, columns = (range(n) for n in shape)

    def whole(a: ir.Value, b: ir.Value) -> None:
        def step(k: ir.Value, _: list[Any]) -> list[Any]:
            for r in rows:
                tiles.load(_LEFT + r, v.at(a, builder.add(builder.mul(index(SIDE * r), lda), k)), lda)
            for n in columns:
                tiles.load(_RIGHT + n, v.at(b, builder.add(builder.mul(k, ldb), index(SIDE * n))), ldb)
            for r in rows:
                for n in columns:
                    tiles.multiply(_SUMS + 2 * r + n, _LEFT + r, _RIGHT + n)
            return []

        v.loop(index(0), depth, SIDE, [], step)

    for r in rows:
        for n in columns:
            tiles.clear(_SUMS + 2 * r + n)
    if planes is None:
        whole(a, b)
    else:
        _each_product(v, planes, lambda left, right: whole(v.at(a, left), v.at(b, right)))
    for r in rows:
        for n in columns:
            tiles.store(
                _SUMS + 2 * r + n, v.at(c, builder.add(builder.mul(index(SIDE * r), ldc), index(SIDE * n))), ldc
            )


def _each_product(
    v: Vectors, planes: tuple[ir.Value, ir.Value, ir.Value], body: Callable[[ir.Value, ir.Value], None]
) -> None:
    """Run ``body(offset in A, offset in B)`` for every product of planes that is made, the smallest first."""
    b, (count, *apart) = v.b, planes
    tables = [sum(pair[side] << 2 * n for n, pair in enumerate(PRODUCTS)) for side in range(2)]

    def product(n: ir.Value, _: list[Any]) -> list[Any]:
        twice = b.mul(n, index(2))
        chosen = [b.and_(b.lshr(index(table), twice), index(3)) for table in tables]
        body(*(b.mul(plane, step) for plane, step in zip(chosen, apart, strict=True)))
        return []

    # Three planes make all of them, and two planes the last three.
    v.loop(b.mul(b.sub(index(3), count), index(3)), index(len(PRODUCTS)), 1, [], product)


def _groups(v: Vectors, count: ir.Value, inside: bool, group: Callable[[ir.Value, int], None]) -> None:
    """Run ``group(first row, tiles)`` on two tiles of rows at a time, and then on one that remains.

    `inside`: that one begins early enough to end with the rows.
    """
    pairs = v.whole(count if inside else v.b.add(count, index(SIDE - 1)), 2 * SIDE)

    def two(i: ir.Value, _: list[Any]) -> list[Any]:
        group(i, 2)
        return []

    def one(i: ir.Value, _: list[Any]) -> list[Any]:
        if inside:
            last = v.b.sub(count, index(SIDE))
            i = v.b.select(v.b.icmp_signed("<", i, last), i, last)
        group(i, 1)
        return []

    v.loop(index(0), pairs, 2 * SIDE, [], two)
    v.loop(pairs, count, SIDE, [], one)


def _rows(v: Vectors, i: ir.Value, tiles: int, body: Callable[[ir.Value, ir.Value], None]) -> None:
    """Run ``body(row, row of the group)`` on every row of a group that begins at i."""

    def step(r: ir.Value, _: list[Any]) -> list[Any]:
        body(v.b.add(i, r), r)
        return []

    v.loop(index(0), index(SIDE * tiles), 1, [], step)


def score_panel(with_bias: bool, inside: bool = False) -> Any:
    """Build the intrinsic that scores a block of queries against one packed panel of keys; see `tiles.py`."""

    def generate(
        v: Vectors, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any, *fused: Any
    ) -> None:
        builder, (*rest, factor) = v.b, fused
        scale, width = v.splat(factor), index(SIDE * TARGET.score_vectors)
        # Two tiles or four; vectors pass over one, two or four.
        few = builder.icmp_signed("<=", cols, index(2 * SIDE))
        narrow = builder.select(builder.icmp_signed("<=", cols, index(SIDE)), index(SIDE), index(2 * SIDE))
        made, passed = builder.select(few, index(2 * SIDE), width), builder.select(few, narrow, width)

        def group(i: ir.Value, tiles: int) -> None:
            line, out = v.at(a, builder.mul(i, lda)), v.at(c, builder.mul(i, ldc))

            def columns(j: ir.Value, _: list[Any]) -> list[Any]:
                _product(v, (tiles, 2), line, lda, v.at(b, j), width, depth, v.at(out, j), ldc)
                return []

            v.loop(index(0), made, 2 * SIDE, [], columns)

            def row(i: ir.Value, _: ir.Value) -> None:
                at = builder.mul(i, ldc)
                if not with_bias:

                    def scaled(j: ir.Value, _: list[Any]) -> list[Any]:
                        place = builder.add(at, j)
                        v.store(builder.fmul(v.load(c, place), scale), c, place)
                        return []

                    v.loop(index(0), passed, SIDE, [], scaled)
                    return
                bias, bias_row, top = rest
                slot, added = builder.mul(i, index(SIDE)), builder.mul(i, bias_row)

                def biased(j: ir.Value, best: list[Any]) -> list[Any]:
                    place = builder.add(at, j)
                    x, y = v.load(c, place), v.load(bias, builder.add(added, j))
                    # As in `tiles.py`.
                    x = v.fma(x, scale, y) if inside else builder.fadd(builder.fmul(x, scale), y)
                    v.store(x, c, place)
                    return [v.maximum(x, best[0])]

                (best,) = v.loop(index(0), passed, SIDE, [v.load(top, slot)], biased)
                v.store(best, top, slot)

            _rows(v, i, tiles, row)

        _groups(v, count, inside, group)

    return code(generate)


def plane_panel() -> Any:
    """Build the intrinsic that scores a block of queries by planes; see `tiles.py`."""

    def generate(
        v: Vectors, a: Any, lda: Any, left: Any, b: Any, right: Any, depth: Any, c: Any, ldc: Any, *args: Any
    ) -> None:
        builder, (count, cols, planes) = v.b, args
        width = index(SIDE * TARGET.score_vectors)
        made = builder.select(builder.icmp_signed("<=", cols, index(2 * SIDE)), index(2 * SIDE), width)

        def group(i: ir.Value, tiles: int) -> None:
            line, out = v.at(a, builder.mul(i, lda)), v.at(c, builder.mul(i, ldc))

            def columns(j: ir.Value, _: list[Any]) -> list[Any]:
                shape = (tiles, 2)
                _product(v, shape, line, lda, v.at(b, j), width, depth, v.at(out, j), ldc, (planes, left, right))
                return []

            v.loop(index(0), made, 2 * SIDE, [], columns)

        _groups(v, count, False, group)

    return code(generate)


def accumulation(inside: bool = False, split: bool = False) -> Any:
    """Build the intrinsic that adds the product of a tile with rows of values; see `tiles.py`."""

    def generate(v: Vectors, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, *args: Any) -> None:
        builder, (factors, count, width, depth, *planes) = v.b, args
        made = cgutils.alloca_once(builder, ir.ArrayType(v.scalar, 4 * SIDE * SIDE))
        sums, stride = builder.bitcast(made, v.scalar.as_pointer()), index(2 * SIDE)

        def columns(tiles_across: int) -> Any:
            def strip(col: ir.Value, _: list[Any]) -> list[Any]:
                def group(i: ir.Value, tiles: int) -> None:
                    line = v.at(a, builder.mul(i, lda))
                    shape, apart = (tiles, tiles_across), tuple(planes) if split else None
                    _product(v, shape, line, lda, v.at(b, col), ldb, depth, sums, stride, apart)

                    def row(i: ir.Value, r: ir.Value) -> None:
                        factor, at = v.splat(v.get(factors, i)), builder.add(builder.mul(i, ldc), col)
                        for j in range(0, SIDE * tiles_across, SIDE):
                            place = builder.add(at, index(j))
                            new = v.load(sums, builder.add(builder.mul(r, stride), index(j)))
                            changed = builder.fmul(new, factor) if inside else v.fma(v.load(c, place), factor, new)
                            v.store(changed, c, place)

                    _rows(v, i, tiles, row)

                _groups(v, count, inside, group)
                return []

            return strip

        whole = v.whole(width, 2 * SIDE)
        v.loop(index(0), whole, 2 * SIDE, [], columns(2))
        v.loop(whole, width, SIDE, [], columns(1))

    return code(generate)


@intrinsic
def open_tiles(typingctx: Any) -> Any:
    """Give the thread's tile registers their shape: eight of 16 rows of 64 bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if UNIT == "tiles":
            shape = bytearray(64)
            shape[0] = 1  # palette
            shape[16:32] = (4 * SIDE).to_bytes(2, "little") * 8
            shape[48:56] = bytes([SIDE] * 8)
            place = cgutils.global_constant(builder, "tile_shape", ir.Constant(ir.ArrayType(I8, 64), shape))
            _Instructions(Vectors(builder, 32))._call(
                "ldtilecfg", [I8.as_pointer()], [builder.bitcast(place, I8.as_pointer())]
            )
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def close_tiles(typingctx: Any) -> Any:
    """Release the tile registers, which the system would save at every change of threads."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if UNIT == "tiles":
            _Instructions(Vectors(builder, 32))._call("tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), generate
