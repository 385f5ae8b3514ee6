"""Batched products of matrices with any strides, summed in the same order on every device."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from relpos_np.kernels._cuda.forward_pass.attend import tiling
from relpos_np.kernels._cuda.launch.device import empty, inline, jit, launch, simulated
from relpos_np.kernels._cuda.simd.intrinsics import converters, elements, u32, u64
from relpos_np.kernels._cuda.simd.tile import ALIGNED, DEPTH, PAD, STEPS, Space, Tiling, outer, thread_of

# Independent loads of a thread before it stores any.
LOADS = 4
# Enough blocks to fill a device: sums are split until there are this many.
BLOCKS = 1024
# A part of a split sum has at least this many tiles of `DEPTH` products.
LEAST = 16
# Threads of a block that adds parts.
THREADS = 64


class Product(NamedTuple):
    """The integers of one product: c[b, h, m, n] is a sum of a[b, h, o, m, k] * b[b, h, o, k, n] over o and k."""

    a_at: int
    a_batch: int
    a_head: int
    a_outer: int
    a_row: int
    a_inner: int
    a_group: int
    b_at: int
    b_batch: int
    b_head: int
    b_outer: int
    b_inner: int
    b_column: int
    # Where the result goes, or that of the first part; other parts follow `c_part` apart.
    c_at: int
    c_batch: int
    c_head: int
    c_row: int
    c_column: int
    c_part: int
    batch: int
    heads: int
    rows: int
    columns: int
    outer: int
    inner: int
    parts: int


@cache
def _stage(tiling: Tiling, stored: str) -> Any:
    """Fill shared[k, row] with `DEPTH` elements of each row of a tile, 0 where there are none.

    Neighbouring threads read neighbours in memory: `way` says where a thread begins and how it goes on.
    """
    zero = tiling.dtype.type(0)
    widen, _ = converters(stored)

    def stage(shared, x, at, by_row, by_inner, end, depth, held, way):  # type: ignore[no-untyped-def]
        d, row, next_d, next_row, turns = way
        where, step = at + row * by_row + d * by_inner, next_row * by_row + next_d * by_inner
        for _ in range(turns):
            # Independent loads first.
            for n in range(LOADS):
                held[n] = zero
                if row + n * next_row < end and d + n * next_d < depth:
                    held[n] = widen(x[u64(where)])
                where += step
            for n in range(LOADS):
                shared[u32(d + n * next_d), u32(row + n * next_row)] = held[n]
            row += LOADS * next_row
            d += LOADS * next_d

    return inline(stage)


@cache
def _way(tiling: Tiling) -> Any:
    """Where a thread begins in a tile, its steps and turns, along the axis whose elements are neighbours in memory."""
    rows, threads = tiling.rows, tiling.threads

    def way(me, by_row, by_inner, depth):  # type: ignore[no-untyped-def]
        if abs(by_row) < abs(by_inner):
            height = threads // rows
            # No deeper than there are products.
            return me // rows, me % rows, height, 0, (min(depth, DEPTH) + LOADS * height - 1) // (LOADS * height)
        return me % DEPTH, me // DEPTH, 0, threads // DEPTH, rows * DEPTH // (threads * LOADS)

    return inline(way)


@cache
def product(tiling: Tiling, stored: str) -> Any:
    """The kernel for a tiling and the format of `a`; a block makes one part of the sums of one tile."""
    rows, kind, high, wide, low = tiling.rows, tiling.kind, tiling.high, tiling.wide, tiling.low
    run, shape, fragment = tiling.run, (DEPTH, rows + PAD), (high, wide)
    zero = tiling.dtype.type(0)
    stage_a, stage_b = _stage(tiling, stored), _stage(tiling, tiling.dtype.name)
    way, add, number = _way(tiling), outer(tiling, wide), thread_of(tiling)

    @jit()
    def kernel(x, y, z, call):  # type: ignore[no-untyped-def]
        x, y, z = elements(x), elements(y), elements(z)
        xs = cuda.shared.array(shape, kind, ALIGNED)
        ys = cuda.shared.array(shape, kind, ALIGNED)
        total = cuda.local.array(fragment, kind)
        a = cuda.local.array(high, kind)
        b = cuda.local.array(wide, kind)

        me = u32(cuda.threadIdx.x)
        thread, space = number(me), Space(xs, ys, total, a, b)
        tall, broad = (call.rows + rows - 1) // rows, (call.columns + rows - 1) // rows
        block = cuda.blockIdx.x
        row, block = block % tall * rows, block // tall
        column, block = block % broad * rows, block // broad
        part, block = block % call.parts, block // call.parts
        head, batch = block % call.heads, block // call.heads

        chunks = (call.inner + DEPTH - 1) // DEPTH
        turns = call.outer * chunks
        turn, end = turns * part // call.parts, turns * (part + 1) // call.parts
        o, k = 0, 0
        if turns > 0:
            o, k = turn // chunks, turn % chunks * DEPTH
        x_at = call.a_at + batch * call.a_batch + head // call.a_group * call.a_head + row * call.a_row
        y_at = call.b_at + batch * call.b_batch + head * call.b_head + column * call.b_column
        x_at += o * call.a_outer + k * call.a_inner
        y_at += o * call.b_outer + k * call.b_inner
        x_way = way(me, call.a_row, call.a_inner, call.inner)
        y_way = way(me, call.b_column, call.b_inner, call.inner)

        for r in range(high):
            for c in range(wide):
                total[r, c] = zero
        while turn < end:
            depth = min(DEPTH, call.inner - k)
            stage_a(xs, x, x_at, call.a_row, call.a_inner, call.rows - row, depth, a, x_way)
            stage_b(ys, y, y_at, call.b_column, call.b_inner, call.columns - column, depth, a, y_way)
            cuda.syncthreads()
            for d in range(0, depth, STEPS):
                add(space, d, d, thread)
            cuda.syncthreads()
            turn += 1
            k += DEPTH
            x_at += DEPTH * call.a_inner
            y_at += DEPTH * call.b_inner
            if k >= call.inner:
                x_at += call.a_outer - k * call.a_inner
                y_at += call.b_outer - k * call.b_inner
                k = 0

        z_at = call.c_at + part * call.c_part + batch * call.c_batch + head * call.c_head
        for r in range(high):
            m = row + (r // run) * low + thread.down + r % run
            for c in range(wide):
                n = column + (c // 4) * 32 + thread.across + c % 4
                if m < call.rows and n < call.columns:
                    z[u64(z_at + m * call.c_row + n * call.c_column)] = total[r, c]

    return kernel


@cache
def joined(dtype: np.dtype[Any]) -> Any:
    """The kernel that adds the parts of each element, in their order."""
    zero = dtype.type(0)

    @jit()
    def kernel(work, z, size, call):  # type: ignore[no-untyped-def]
        work, z = elements(work), elements(z)
        at = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        while at < size:
            total = zero
            for part in range(call.parts):
                total += work[u64(part * size + at)]
            n, rest = at % call.columns, at // call.columns
            m, rest = rest % call.rows, rest // call.rows
            head, batch = rest % call.heads, rest // call.heads
            where = call.c_at + batch * call.c_batch + head * call.c_head + m * call.c_row + n * call.c_column
            z[u64(where)] = total
            at += cuda.gridDim.x * THREADS

    return kernel


def fold(call: Product) -> Product:
    """The same product with heads and batch items taken as rows where possible, so that tiles are full."""
    for axis in ("heads", "batch"):
        size = getattr(call, axis)
        name = axis.removesuffix("s")
        by_a, by_b, by_c = (getattr(call, f"{matrix}_{name}") for matrix in "abc")
        if size > 1:
            follows = by_a == call.rows * call.a_row and by_c == call.rows * call.c_row
            if by_b or not (follows or call.rows == 1) or (axis == "heads" and call.a_group > 1):
                break
            if call.rows == 1:
                call = call._replace(a_row=by_a, c_row=by_c)
            call = call._replace(rows=call.rows * size)
        call = call._replace(**{axis: 1, f"a_{name}": 0, f"c_{name}": 0})
    return call


def gemm(
    a: Any,
    a_at: int,
    a_steps: tuple[int, int, int, int, int],
    b: Any,
    b_at: int,
    b_steps: tuple[int, int, int, int, int],
    c: Any,
    c_at: int,
    c_steps: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int, int, int],
    *,
    a_group: int = 1,
    stored: str | None = None,
) -> None:
    """Write c[b, h, m, n], the sum of a[b, h, o, m, k] * b[b, h, o, k, n] over o and k, in an order that is fixed.

    Parameters
    ----------
    a, b, c : device arrays
        Flat; `b` and `c` of the dtype that is computed in.
    a_at, b_at, c_at : int
        Where the first element of each is.
    a_steps, b_steps, c_steps : tuple of int
        Steps in elements, 0 where an axis repeats: of `a` along (batch, head, outer, row, inner), of `b` along (batch,
        head, outer, inner, column), of `c` along (batch, head, row, column).
    sizes : tuple of int
        Batch items, heads, rows, columns, and the sizes of the outer and the inner axis that are summed over.
    a_group : int
        Heads that share a head of `a`: head h reads head h // a_group.
    stored : str, optional
        The format of `a`, a key of `intrinsics.FORMATS`, if it is not the dtype of `c`.
    """
    if not math.prod(sizes[:4]):
        return
    dtype = np.dtype(c.dtype)
    tile = tiling(dtype, 64)
    _, heads, rows, columns, outer_size, inner = sizes
    call = Product(a_at, *a_steps, a_group, b_at, *b_steps, c_at, *c_steps, 0, *sizes, 1)
    # Not on the batch, so that an item's result does not depend on how many there are.
    tiles = heads * -(-rows // tile.rows) * -(-columns // tile.rows)
    call = call._replace(parts=max(1, min(-(-BLOCKS // tiles), outer_size * -(-inner // DEPTH) // LEAST)))
    target, to = c, call
    size = math.prod(sizes[:4])
    if call.parts > 1:
        # Parts lie one after the other, each as (batch, heads, rows, columns).
        target = empty(size * call.parts, dtype)
        dense = {"c_at": 0, "c_batch": size // sizes[0], "c_head": rows * columns, "c_row": columns, "c_column": 1}
        to = call._replace(c_part=size, **dense)
    to = fold(to)
    blocks = to.batch * to.heads * -(-to.rows // tile.rows) * -(-to.columns // tile.rows) * to.parts
    launch(product(tile, stored or dtype.name), blocks, tile.threads, a, b, target, to)
    if call.parts > 1:
        blocks = min(-(-size // THREADS), 2 if simulated() else 1 << 16)
        launch(joined(dtype), blocks, THREADS, target, c, size, call)
