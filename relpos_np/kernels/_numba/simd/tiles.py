"""Register-tiled matrix products: the two loops in which attention spends its time.

Every function here is a Numba intrinsic over raw pointers of float32 or float64. Callers own the
bounds; see `forward_pass/attend.py` for the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd import amx, mmla
from relpos_np.kernels._numba.simd.rows import code
from relpos_np.kernels._numba.simd.target import MATRICES, NARROW, TARGET, TILED
from relpos_np.kernels._numba.simd.vectors import Vectors, index

# Steps of depth per turn of the inner loop: counting and branching compete with FMA for its ports.
_UNROLL = 4


def _product(
    v: Vectors,
    shape: tuple[int, int],
    left: Any,
    b: Any,
    ldb: Any,
    depth: Any,
    *,
    pairs: bool,
    transposed: bool = False,
    unrolled: bool = True,
) -> list[Any]:
    """A[rows, depth] @ B[depth, vectors * lanes] in registers; ``left(i, k)`` is the address of A[i, k]."""
    if pairs and MATRICES:
        unroll = _UNROLL if unrolled else 2
        return mmla.product(v, shape, left, b, ldb, depth, transposed=transposed, unroll=unroll)
    rows, vectors = shape
    multiply = v.dot if pairs else v.fma

    def step(k: ir.Value, acc: list[Any]) -> list[Any]:
        at = v.b.mul(k, ldb)
        right = [v.load(b, v.b.add(at, index(j * v.lanes))) for j in range(vectors)]
        out = []
        for i in range(rows):
            x = v.splat(v.b.load(left(i, k)))
            out += [multiply(x, right[j], acc[i * vectors + j]) for j in range(vectors)]
        return out

    def steps(k: ir.Value, acc: list[Any]) -> list[Any]:
        for u in range(_UNROLL):
            acc = step(v.b.add(k, index(u)), acc)
        return acc

    start = [v.const(0)] * (rows * vectors)
    if not unrolled:
        return v.loop(index(0), depth, 1, start, step)
    whole = v.whole(depth, _UNROLL)
    return v.loop(whole, depth, 1, v.loop(index(0), whole, _UNROLL, start, steps), step)


def _tile_start(v: Vectors, i: ir.Value, count: ir.Value, rows: int) -> ir.Value:
    """The first row of a tile that would begin at row i, moved up so that the tile ends within `count` rows."""
    last = v.b.sub(count, index(rows))
    return v.b.select(v.b.icmp_signed("<", i, last), i, last)


def _by_width(v: Vectors, cols: ir.Value, emit: Callable[[int], None]) -> None:
    """Emit code for as many vectors as hold `cols` columns, or a few more: see `whole_columns`."""
    b, below = v.b, 0
    for vectors in (*NARROW, TARGET.score_vectors):
        enough = b.icmp_signed(">", cols, index(below * v.lanes))
        if vectors < TARGET.score_vectors:
            enough = b.and_(enough, b.icmp_signed("<=", cols, index(vectors * v.lanes)))
        with b.if_then(enough):
            emit(vectors)
        below = vectors


def _score_panel(with_bias: bool, inside: bool = False, pairs: bool = False) -> Any:
    """Build the intrinsic that scores a block of queries against one packed panel of keys."""
    scaled = inside or pairs
    rows = TARGET.score_rows

    def generate(
        v: Vectors, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any, *fused: Any
    ) -> None:
        builder, rest = v.b, list(fused)
        width = index(TARGET.score_vectors * v.lanes)
        scale = v.splat(rest.pop()) if scaled else None

        def block(vectors: int, i: ir.Value, _: list[Any]) -> list[Any]:
            if inside:
                i = _tile_start(v, i, count, rows)
            line = builder.gep(a, [builder.mul(i, lda)])

            def left(r: int, k: ir.Value) -> ir.Value:
                return builder.gep(line, [builder.add(builder.mul(index(r), lda), k)])

            full = vectors == TARGET.score_vectors
            acc = _product(v, (rows, vectors), left, b, width, depth, pairs=pairs, unrolled=full)
            for r in range(rows):
                row = builder.add(i, index(r))
                at = builder.mul(row, ldc)
                if with_bias:
                    bias, bias_row, top = rest
                    slot = builder.mul(row, index(v.lanes))
                    best = v.load(top, slot)
                    shift = builder.mul(row, bias_row)
                for j in range(vectors):
                    x = acc[r * vectors + j]
                    y = v.load(bias, builder.add(shift, index(j * v.lanes))) if with_bias else None
                    if inside:
                        x = v.fma(x, scale, y)
                    else:
                        # Two roundings, as of tiles that masks or bands cut, whose biases are added later.
                        x = builder.fmul(x, scale) if scaled else x
                        x = builder.fadd(x, y) if with_bias else x
                    if with_bias:
                        best = v.maximum(x, best)
                    v.store(x, c, builder.add(at, index(j * v.lanes)))
                if with_bias:
                    v.store(best, top, slot)
            return []

        def all_rows(vectors: int) -> None:
            v.loop(index(0), count, rows, [], partial(block, vectors))

        _by_width(v, cols, all_rows)

    return code(generate)


_score_plain, _score_fused = _score_panel(with_bias=False), _score_panel(with_bias=True)
_score_inside = _score_panel(with_bias=True, inside=True)
_of_pairs = amx.score_panel if TILED else partial(_score_panel, pairs=True)
_pairs_plain, _pairs_fused = _of_pairs(with_bias=False), _of_pairs(with_bias=True)
_pairs_inside = _of_pairs(with_bias=True, inside=True)


@intrinsic
def score_panel(typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any) -> Any:
    """C[count, cols] = A[count, depth] @ B[depth, cols] of a panel; whole tiles of rows are read and written.

    Columns are as many as `whole_columns` makes of `cols`, here and in the functions that follow.
    """
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8), _score_plain


@intrinsic
def score_panel_max(
    typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any,
    bias: Any, bias_row: Any, top: Any,
) -> Any:  # fmt: skip
    """As `score_panel`, plus a bias row per query (rows `bias_row` apart) and a running maximum per row and lane."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, bias, i8, top), _score_fused


@intrinsic
def score_panel_inside(
    typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any,
    bias: Any, bias_row: Any, top: Any, scale: Any,
) -> Any:  # fmt: skip
    """As `score_panel_max`, of A * scale, touching `count` rows only, which must be a tile's rows at least."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, bias, i8, top, a.dtype), _score_inside


@intrinsic
def pair_panel(
    typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any, scale: Any
) -> Any:
    """As `score_panel`, of A * scale, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, a.dtype), _pairs_plain


@intrinsic
def pair_panel_max(
    typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any,
    bias: Any, bias_row: Any, top: Any, scale: Any,
) -> Any:  # fmt: skip
    """As `score_panel_max`, of A * scale, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, bias, i8, top, a.dtype), _pairs_fused


@intrinsic
def pair_panel_inside(
    typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, count: Any, cols: Any,
    bias: Any, bias_row: Any, top: Any, scale: Any,
) -> Any:  # fmt: skip
    """As `score_panel_inside`, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, bias, i8, top, a.dtype), _pairs_inside


def _accumulation(transposed: bool, inside: bool = False, pairs: bool = False) -> Any:
    """Build the intrinsic that adds the product of a tile, or of its transpose, with rows of values."""

    def generate(v: Vectors, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, *args: Any) -> None:
        builder, (*fades, count, width, depth) = v.b, args

        def columns(vectors: int) -> Any:
            rows = TARGET.window_rows(vectors) if inside else TARGET.value_rows(vectors)

            def strip(col: ir.Value, _: list[Any]) -> list[Any]:
                right = builder.gep(b, [col])

                def block(i: ir.Value, _: list[Any]) -> list[Any]:
                    if inside:
                        i = _tile_start(v, i, count, rows)
                    line = builder.gep(a, [i if transposed else builder.mul(i, lda)])

                    def left(r: int, k: ir.Value) -> ir.Value:
                        along, across = (index(r), k) if transposed else (k, index(r))
                        return builder.gep(line, [builder.add(builder.mul(across, lda), along)])

                    out = builder.gep(c, [builder.add(builder.mul(i, ldc), col)])
                    # Narrow strips only finish a ragged width: not worth the time to compile them unrolled.
                    full = inside or vectors == TARGET.value_vectors
                    shape, how = (rows, vectors), {"pairs": pairs, "transposed": transposed, "unrolled": full}
                    acc = _product(v, shape, left, right, ldb, depth, **how)
                    for r in range(rows):
                        before = [v.splat(v.get(fade, builder.add(i, index(r)))) for fade in fades]
                        for j in range(vectors):
                            at = builder.add(builder.mul(index(r), ldc), index(j * v.lanes))
                            new = acc[r * vectors + j]
                            if inside:
                                v.store(builder.fmul(new, before[0]), out, at)
                                continue
                            old = v.load(out, at)
                            v.store(v.fma(old, before[0], new) if before else builder.fadd(old, new), out, at)
                    return []

                v.loop(index(0), count, rows, [], block)
                return []

            return strip

        # Full strips first, then one narrower strip for what is left.
        strip = TARGET.value_vectors * v.lanes
        whole = v.whole(width, strip)
        v.loop(index(0), whole, strip, [], columns(TARGET.value_vectors))
        left = builder.sub(width, whole)
        for vectors in range(1, TARGET.value_vectors):
            with builder.if_then(builder.icmp_signed("==", left, index(vectors * v.lanes))):
                columns(vectors)(whole, [])

    return code(generate)


_accumulate, _accumulate_transposed = _accumulation(transposed=False), _accumulation(transposed=True)
_average = _accumulation(transposed=False, inside=True)
_sums_of_pairs = amx.accumulation if TILED else partial(_accumulation, transposed=False, pairs=True)
_accumulate_pairs, _average_pairs = _sums_of_pairs(), _sums_of_pairs(inside=True)
# No tile can be loaded transposed: vectors make this product on every unit.
_transposed_pairs = _accumulation(transposed=True, pairs=True)


@intrinsic
def accumulate(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, fade: Any, count: Any, width: Any, depth: Any
) -> Any:
    """C[i, :width] = C[i] * fade[i] + A[i, :depth] @ B[:depth, :width] for i < count.

    The product is summed from 0 and then added, so that no sum is longer than a block and the number of blocks.
    `width` is a multiple of the lanes; `count` is rounded up to the tile's rows, which the buffers must hold.
    """
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, fade, i8, i8, i8), _accumulate


@intrinsic
def accumulate_transposed(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, count: Any, width: Any, depth: Any
) -> Any:
    """C[i, :width] += A[:depth, i] @ B[:depth, :width] for i < count; else as `accumulate`."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, i8), _accumulate_transposed


@intrinsic
def average(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, share: Any, count: Any, width: Any, depth: Any
) -> Any:
    """C[i, :width] = share[i] * (A[i, :depth] @ B[:depth, :width]) for i < count, touching those rows only.

    `width` is a multiple of the lanes; `count` must be the rows of the highest tile at least.
    """
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, share, i8, i8, i8), _average


@intrinsic
def accumulate_pairs(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, fade: Any, count: Any, width: Any, depth: Any
) -> Any:
    """As `accumulate`, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, fade, i8, i8, i8), _accumulate_pairs


@intrinsic
def accumulate_transposed_pairs(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, count: Any, width: Any, depth: Any
) -> Any:
    """As `accumulate_transposed`, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, i8, i8, i8), _transposed_pairs


@intrinsic
def average_pairs(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, share: Any, count: Any, width: Any, depth: Any
) -> Any:
    """As `average`, where each element of A and B is a pair of bfloat16."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, share, i8, i8, i8), _average_pairs


_plane_panel, _accumulate_planes = amx.plane_panel(), amx.accumulation(split=True)


@intrinsic
def plane_panel(
    typingctx: Any, a: Any, lda: Any, left: Any, b: Any, right: Any, depth: Any, c: Any, ldc: Any, count: Any,
    cols: Any, planes: Any,
) -> Any:  # fmt: skip
    """As `score_panel`, of planes whose elements are pairs of bfloat16: those of A are `left` apart, of B `right`."""
    i8 = types.int64
    return types.void(a, i8, i8, b, i8, i8, c, i8, i8, i8, i8), _plane_panel


@intrinsic
def accumulate_planes(
    typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, fade: Any, count: Any, width: Any,
    depth: Any, planes: Any, left: Any, right: Any,
) -> Any:  # fmt: skip
    """As `accumulate`, of planes whose elements are pairs of bfloat16: those of A are `left` apart, of B `right`."""
    i8 = types.int64
    return types.void(a, i8, b, i8, c, i8, fade, i8, i8, i8, i8, i8, i8), _accumulate_planes
