"""Rows whose pairs of channels turn while they are copied, as rotary positions have it."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from relpos_np.kernels._numba.simd.rows import code
from relpos_np.kernels._numba.simd.vectors import I32, Vectors, index

_i8 = types.int64


def _halves(u: Vectors, x: ir.Value, k: ir.Value, pairs: ir.Value, kind: Any) -> tuple[ir.Value, ir.Value]:
    """The first channels of pairs from k on, and the second ones, where channel p belongs to p + `pairs`."""
    return u.widened(x, k, kind), u.widened(x, u.b.add(k, pairs), kind)


def _neighbours(u: Vectors, x: ir.Value, k: ir.Value, kind: Any) -> tuple[ir.Value, ir.Value]:
    """The same where channel 2 p belongs to 2 p + 1."""
    at = u.b.mul(k, index(2))
    low, high = u.widened(x, at, kind), u.widened(x, u.b.add(at, index(u.lanes)), kind)
    if u.lanes == 1:
        return low, high
    even, odd = (ir.Constant(ir.VectorType(I32, u.lanes), list(range(n, 2 * u.lanes, 2))) for n in (0, 1))
    return u.b.shuffle_vector(low, high, even), u.b.shuffle_vector(low, high, odd)


def _store_neighbours(u: Vectors, first: ir.Value, second: ir.Value, out: ir.Value, k: ir.Value) -> None:
    at, size = u.b.mul(k, index(2)), u.lanes
    if size > 1:
        order = [[n // 2 + size * (n % 2) for n in range(start, start + size)] for start in (0, size)]
        masks = [ir.Constant(ir.VectorType(I32, size), places) for places in order]
        first, second = (u.b.shuffle_vector(first, second, mask) for mask in masks)
    u.store(first, out, at)
    u.store(second, out, u.b.add(at, index(size)))


@intrinsic
def turn_rows(
    typingctx: Any, out: Any, width: Any, x: Any, stride: Any, turns: Any, rows: Any, depth: Any, pairs: Any,
    first: Any, blocks: Any, neighbours: Any, sign: Any,
) -> Any:  # fmt: skip
    """out[r, :depth] = x[r, :depth], padded with 0 to `width`, `pairs` pairs from channel `first` on turned.

    They are in `blocks` equal parts, in each of which pairs are laid out on their own. Row r of `turns` has the cosines
    of its pairs, then their sines; `sign` is -1 to turn back. `out` may be `x`. Products are rounded before they are
    added, as NumPy does it.
    """
    kind = x.dtype

    def generate(
        v: Vectors, out: Any, width: Any, x: Any, stride: Any, turns: Any, rows: Any, depth: Any, pairs: Any,
        start: Any, blocks: Any, near: Any, sign: Any,
    ) -> None:  # fmt: skip
        b, one, turning = v.b, v.single(), v.b.mul(pairs, index(2))
        size, stop = b.sdiv(pairs, blocks), v.b.add(start, turning)

        def row(beside: bool, r: ir.Value, _: list[Any]) -> list[Any]:
            source, target = v.at(x, b.mul(r, stride)), v.at(out, b.mul(r, width))
            line = v.at(turns, b.mul(r, turning))

            def block(n: ir.Value, _: list[Any]) -> list[Any]:
                cosines, where = v.at(line, b.mul(n, size)), b.add(start, b.mul(n, b.mul(size, index(2))))
                sines, own, to = v.at(cosines, pairs), v.at(source, where), v.at(target, where)

                def turn(u: Vectors, k: ir.Value) -> None:
                    c, s = u.load(cosines, k), b.fmul(u.load(sines, k), u.splat(sign))
                    p, q = _neighbours(u, own, k, kind) if beside else _halves(u, own, k, size, kind)
                    first = b.fadd(b.fmul(q, b.fneg(s)), b.fmul(p, c))
                    second = b.fadd(b.fmul(p, s), b.fmul(q, c))
                    if beside:
                        _store_neighbours(u, first, second, to, k)
                    else:
                        u.store(first, to, k)
                        u.store(second, to, b.add(k, size))

                v.each(size, turn)
                return []

            def keep(u: Vectors, k: ir.Value) -> None:
                u.store(u.widened(source, k, kind), target, k)

            def keep_last(u: Vectors, k: ir.Value) -> None:
                keep(u, b.add(stop, k))

            def pad(k: ir.Value, _: list[Any]) -> list[Any]:
                one.store(one.const(0), target, k)
                return []

            v.each(start, keep)
            v.loop(index(0), blocks, 1, [], block)
            v.each(b.sub(depth, stop), keep_last)
            v.loop(depth, width, 1, [], pad)
            return []

        for beside in (False, True):
            with b.if_then(b.icmp_signed("==", near, index(int(beside)))):
                v.loop(index(0), rows, 1, [], partial(row, beside))

    return types.void(out, _i8, x, _i8, turns, _i8, _i8, _i8, _i8, _i8, _i8, out.dtype), code(generate)
