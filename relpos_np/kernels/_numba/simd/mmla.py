"""Products of pairs of bfloat16 by 2 x 4 and 4 x 2 matrices in the registers of vectors, as Arm's BFMMLA makes them.

They take the place of the loop in `tiles.py` over products of single rows and steps, on the same buffers: two rows of
queries and two steps of depth at a time. Segments of four elements hold a matrix each, whatever the vectors are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from relpos_np.kernels._numba.simd.target import UNIT
from relpos_np.kernels._numba.simd.vectors import BF16_EIGHT, I32, Vectors, index

_BFMMLA = "llvm.aarch64.neon.bfmmla"


def _shuffled(v: Vectors, x: ir.Value, y: ir.Value, order: list[int]) -> ir.Value:
    """In every segment, so many of the elements of x (0 ... 3) and of y (4 ... 7) there."""
    lanes = [s + (n if n < 4 else v.lanes + n - 4) for s in range(0, v.lanes, 4) for n in order]
    return v.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, v.lanes), lanes))


def _multiply(v: Vectors, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """Add to z = [c00, c01, c10, c11] the product of rows [a00, a01, a10, a11] and columns [b00, b10, b01, b11].

    Elements of a and b are pairs of bfloat16. The processor adds the products of the first step, and then those of the
    second: both round as `Vectors.dot` does on Arm.
    """
    b = v.b
    if UNIT == "mmla":
        kinds = [v.vector, BF16_EIGHT, BF16_EIGHT]
        function = b.module.globals.get(_BFMMLA) or ir.Function(b.module, ir.FunctionType(v.vector, kinds), _BFMMLA)
        return b.call(function, [z, b.bitcast(x, BF16_EIGHT), b.bitcast(y, BF16_EIGHT)])
    for step in range(2):
        rows, columns = [step, step, 2 + step, 2 + step], [step, 2 + step, step, 2 + step]
        z = v.dot(_shuffled(v, x, x, rows), _shuffled(v, y, y, columns), z)
    return z


def product(
    v: Vectors,
    shape: tuple[int, int],
    left: Callable[[int, ir.Value], ir.Value],
    b: ir.Value,
    ldb: ir.Value,
    depth: ir.Value,
    *,
    transposed: bool,
    unroll: int,
) -> list[Any]:
    """A[rows, depth] @ B[depth, vectors * lanes] in registers; ``left(i, k)`` is the address of A[i, k].

    `transposed`: neighbours in memory are rows of A, and not steps. `unroll`: steps of one turn of the loop, even.
    """
    (rows, vectors), builder = shape, v.b
    two = ir.VectorType(v.scalar, 2)

    def both(i: int, k: ir.Value) -> ir.Value:
        """An element of A and its neighbour in memory."""
        return builder.load(builder.bitcast(left(i, k), two.as_pointer()), align=v.bits // 8)

    def rows_of(i: int, k: ir.Value, second: ir.Value | None) -> ir.Value:
        """Rows i and i + 1 of A, of which the last may be alone, at step k and, if there is one, the second step."""
        other = min(i + 1, rows - 1)
        if second is None:
            zero, parts = v.const(0), [v.splat(builder.load(left(r, k))) for r in (i, other)]
            return _shuffled(v, _shuffled(v, parts[0], zero, [0, 4, 0, 4]), parts[1], [0, 1, 4, 1])
        halves = both(i, k), both(i, second) if transposed else both(other, k)
        order = [0, 2, 1, 3] if transposed else [0, 1, 2, 3]
        return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, v.lanes), order * (v.lanes // 4)))

    def step(k: ir.Value, acc: list[Any], alone: bool = False) -> list[Any]:
        second = None if alone else builder.add(k, index(1))
        sides = [rows_of(i, k, second) for i in range(0, rows, 2)]
        lines = [v.at(b, builder.mul(n, ldb)) for n in (k, second) if n is not None]
        out = list(acc)
        for j in range(vectors):
            found = [v.load(line, index(j * v.lanes)) for line in lines]
            x, y = (found[0], v.const(0)) if alone else found
            for half, order in enumerate(([0, 4, 1, 5], [2, 6, 3, 7])):
                right = _shuffled(v, x, y, order)
                for r, side in enumerate(sides):
                    n = (r * vectors + j) * 2 + half
                    out[n] = _multiply(v, side, right, out[n])
        return out

    def steps(k: ir.Value, acc: list[Any]) -> list[Any]:
        for u in range(0, unroll, 2):
            acc = step(builder.add(k, index(u)), acc)
        return acc

    acc = [v.const(0)] * (2 * vectors * -(-rows // 2))
    start = index(0)
    if unroll > 2:
        start = v.whole(depth, unroll)
        acc = v.loop(index(0), start, unroll, acc, steps)
    even = v.whole(depth, 2)
    acc = v.loop(start, even, 2, acc, step)
    acc = v.loop(even, depth, 1, acc, lambda k, c: step(k, c, alone=True))
    # Of two rows by two columns each, as rows.
    halves = [acc[(r // 2 * vectors + j) * 2 :][:2] for r in range(rows) for j in range(vectors)]
    orders = [[2, 3, 6, 7] if r % 2 else [0, 1, 4, 5] for r in range(rows) for _ in range(vectors)]
    return [_shuffled(v, low, high, order) for (low, high), order in zip(halves, orders, strict=True)]
