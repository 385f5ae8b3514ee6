"""What every intrinsic of the kernels means, in NumPy, touching exactly the memory that the machine code touches.

Whole vectors and whole register tiles are read and written where the compiled code does so. Sums may be rounded in
another order, and products twice.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from relpos_np.kernels._numba.simd.bfloat16_planes import FAR
from relpos_np.kernels._numba.simd.target import NARROW, PAIR_ROWS, PAIR_STEPS, SUM_VECTORS, TARGET, TILED
from relpos_np.kernels._numba.simd.vectors import CODE_UNITS
from tests.interpreted.memory import ADDRESS, CODES, FLOAT32, FLOAT64, INT16, UINT16, UINT32, Fault, Pointer

TINY_EXPONENT = {4: -126.0, 8: -1022.0}


def up(n, unit):
    """The smallest multiple of `unit` that is not below n, which a loop in steps of `unit` reaches."""
    return max(-(-n // unit) * unit, 0)


def maximum(x, y):
    """The larger one; y where either is NaN."""
    return np.where(x > y, x, y)


def exp2(x):
    """2**x; 0 instead of subnormal numbers; NaN where rounding to an integer would be infinite."""
    p = np.exp2(x)
    p[x < TINY_EXPONENT[x.itemsize]] = 0
    p[x == np.inf] = np.nan
    return p


def widened(x):
    """Bits of float16 (int16) and of bfloat16 (uint16), and codes, as float32; other types as they are."""
    if x.dtype == INT16:
        return x.view(np.float16).astype(np.float32)
    if x.dtype == UINT16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    if x.dtype in CODES.values():
        return x.astype(np.float32) / np.float32(CODE_UNITS.get(x.dtype.name, 1))
    return x


def rounded(x):
    """Bits of the nearest bfloat16 of float32."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def unpaired(x, axis):
    """Pairs of bfloat16, in elements of float32, side by side along an axis."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    both = [widened((part & 0xFFFF).astype(np.uint16)) for part in (bits, bits >> 16)]
    return np.stack(both, axis + 1).reshape([n * (2 if a == axis else 1) for a, n in enumerate(x.shape)])


class Vectors:
    """The intrinsics, by their names, on one launch's memory."""

    def __init__(self, memory, take):
        self.m, self._take = memory, take

    # pointers and single elements --------------------------------------------------------------

    def pointer_like(self, like, address):
        return self.m.pointer(address, like.kind)

    def floats(self, address):
        return self.m.pointer(address, FLOAT32)

    def doubles(self, address):
        return self.m.pointer(address, FLOAT64)

    def bytes_(self, address):
        return self.m.pointer(address, np.dtype(np.uint8))

    def integers(self, address):
        return self.m.pointer(address, np.dtype(np.int32))

    def longs(self, address):
        return self.m.pointer(address, np.dtype(np.int64))

    def halves(self, address):
        return self.m.pointer(address, INT16)

    def brains(self, address):
        return self.m.pointer(address, UINT16)

    def int8s(self, address):
        return self.m.pointer(address, CODES["int8s"])

    def e4m3s(self, address):
        return self.m.pointer(address, CODES["e4m3s"])

    def e5m2s(self, address):
        return self.m.pointer(address, CODES["e5m2s"])

    def opaque(self, address):
        return self.m.pointer(address, np.dtype(np.uint8))

    def address_of(self, base):
        return base.address

    def copy_bytes(self, out, x, n):
        source, target = (self.m.pointer(address, np.dtype(np.uint8)) for address in (x, out))
        self.m.row(target, 0, n, write=True)[...] = self.m.row(source, 0, n)

    def at(self, base, offset):
        return base.moved(offset)

    def lanes_of(self, base):
        return TARGET.lanes(base.size)

    def get(self, base, offset):
        found = self.m.get(base, offset)
        return self.longs(found) if base.kind == ADDRESS else found

    def put(self, base, offset, value):
        self.m.put(base, offset, value)

    def take(self, counter):
        return self._take(self.longs(counter))

    def begin_floats(self):
        """NumPy has one state."""
        return 0

    def end_floats(self, former):
        assert former == 0

    def prefetch(self, address):
        """Nothing: the address need not exist."""

    # rows --------------------------------------------------------------------------------------

    def scale_row(self, out, x, n, factor):
        source, target = self.m.row(x, 0, n), self.m.row(out, 0, n, write=True)
        if x.address < out.address < x.address + n * x.size:
            raise self.m.fault("a row moved up onto itself", out.address, out.region)
        target[...] = source * source.dtype.type(factor)

    def add_row(self, out, x, n, factor):
        source, target = self.m.row(x, 0, n), self.m.row(out, 0, n, write=True)
        target += source * source.dtype.type(factor)

    def add_sum(self, out, low, x, n):
        kept, target = self.m.row(low, 0, n, write=True), self.m.row(out, 0, n, write=True)
        old, new = target.copy(), self.m.row(x, 0, n) + kept
        target += new
        part = target - old
        lost = (old - (target - part)) + (new - part)
        kept[...] = np.where(np.isnan(lost), 0, lost)

    def add_mask(self, out, x, n, least, factor):
        source, target = self.m.row(x, 0, n), self.m.row(out, 0, n, write=True)
        real = source.dtype.type
        bounded = np.where(source < real(least), real(least), source)
        target[...] = np.where(source == -np.inf, source, target + bounded * real(factor))

    def cap_row(self, out, n, cap, inverse, slopes, sloped):
        target = self.m.row(out, 0, n, write=True)
        real = target.dtype.type
        bent = np.tanh(target * real(inverse))
        target[...] = bent * real(cap)
        if sloped:
            self.m.row(slopes, 0, n, write=True)[...] = 1 - bent * bent

    def multiply_row(self, out, x, n):
        source, target = self.m.row(x, 0, n), self.m.row(out, 0, n, write=True)
        target[...] = np.where(target == 0, target, target * source)

    def shut_row(self, out, x, n):
        source, target = self.m.row(x, 0, n), self.m.row(out, 0, n, write=True)
        target[...] = np.where(source == -np.inf, source, target)

    def add_constant(self, out, n, value, factor):
        self.m.row(out, 0, n, write=True)[...] += out.kind.type(value) * out.kind.type(factor)

    def fill_row(self, out, start, stop, value):
        self.m.row(out, start, int(stop) - int(start), write=True)[...] = value

    def mask_row(self, out, allowed, n, value):
        shut = self.m.row(allowed, 0, n) == 0
        self.m.row(out, 0, n, write=True)[shut] = value

    def sum_row(self, x, n):
        return float(self.m.row(x, 0, n).sum())

    def max_row(self, x, n, top):
        lanes = TARGET.lanes(x.size)
        best = self.m.row(top, 0, lanes, write=True)
        for part in self.m.row(x, 0, up(n, lanes)).reshape(-1, lanes):
            best[...] = maximum(part, best)

    def lane_max(self, top):
        return float(np.fmax.reduce(self.m.row(top, 0, TARGET.lanes(top.size))))

    def lane_sum(self, total):
        return float(self.m.row(total, 0, TARGET.lanes(total.size)).sum())

    def advance(self, best, top, fade, n):
        n = up(n, TARGET.lanes(best.size))
        best, top, fade = (self.m.row(x, 0, n, write=True) for x in (best, top, fade))
        new = maximum(best, top)
        reference = np.where(new == -np.inf, new.dtype.type(0), new)
        fade[...] = exp2(top - reference)
        top[...] = new
        best[...] = reference

    def exp2_row(self, x, n, reference, total, fade):
        lanes = TARGET.lanes(x.size)
        row = self.m.row(x, 0, up(n, lanes), write=True)
        sums = self.m.row(total, 0, lanes, write=True)
        row[...] = exp2(row - row.dtype.type(reference))
        sums[...] = sums * sums.dtype.type(fade) + row.reshape(-1, lanes).sum(axis=0, dtype=row.dtype)

    def soften_row(self, s, dp, n, lse, low, delta):
        n = up(n, TARGET.lanes(s.size))
        p, ds = self.m.row(s, 0, n, write=True), self.m.row(dp, 0, n, write=True)
        p[...] = np.where(p == -np.inf, p.dtype.type(0), exp2(p - p.dtype.type(lse) - p.dtype.type(low)))
        ds[...] = np.where(p == 0, p.dtype.type(0), p * (ds - p.dtype.type(delta)))

    # blocks ------------------------------------------------------------------------------------

    def copy_block(self, out, width, x, stride, rows, depth):
        source = widened(self.m.grid(x, 0, rows, stride, depth))
        target = self.m.grid(out, 0, rows, width, max(width, depth), write=True)
        target[:, :depth] = source
        target[:, depth:] = 0
        return 0.0 if np.isfinite(source).all() else float("nan")

    def narrow_row(self, out, x, n, factor):
        source = self.m.row(x, 0, n)
        source = source * source.dtype.type(factor)
        bits = source.astype(np.float16).view(np.int16) if out.kind == INT16 else rounded(source)
        self.m.row(out, 0, n, write=True)[...] = bits

    def _bits(self, x):
        return x if x.dtype == UINT16 else rounded(widened(x))

    def copy_pairs(self, out, width, x, stride, rows, depth):
        source = self._bits(self.m.grid(x, 0, rows, stride, depth))
        target = self.m.grid(out, 0, rows, width, width, write=True)
        made = np.zeros((rows, 2 * width), np.uint16)
        made[:, :depth] = source
        target[...] = made.view(np.float32)

    def turn_rows(self, out, width, x, stride, turns, rows, depth, pairs, first, blocks, neighbours, sign):
        source = widened(self.m.grid(x, 0, rows, stride, depth)).copy()
        cos, sin = np.split(self.m.grid(turns, 0, rows, 2 * pairs, 2 * pairs), 2, axis=1)
        sin = sin * source.dtype.type(sign)
        channels = first + np.arange(2 * pairs)
        # Neighbours, or halves of each block.
        one, other = (
            channels.reshape(-1, 2).T if neighbours else channels.reshape(blocks, 2, -1).swapaxes(0, 1).reshape(2, -1)
        )
        made = source.copy()
        made[:, one] = source[:, one] * cos - source[:, other] * sin
        made[:, other] = source[:, one] * sin + source[:, other] * cos
        target = self.m.grid(out, 0, rows, width, max(width, depth), write=True)
        target[:, :depth] = made
        target[:, depth:] = 0

    def pair_rows(self, out, width, x, stride, rows, depth):
        made = np.zeros((rows + rows % 2, width), np.uint16)
        made[:rows, :depth] = self._bits(self.m.grid(x, 0, rows, stride, depth))
        pairs = made[0::2].astype(np.uint32) | made[1::2].astype(np.uint32) << 16
        self.m.grid(out, 0, len(pairs), width, max(width, depth), write=True)[...] = pairs.view(np.float32)
        return 0.0 if np.isfinite(widened(made)).all() else float("nan")

    def halve_row(self, x, n):
        n = up(n, SUM_VECTORS * TARGET.lanes(x.size))
        row = self.m.row(x, 0, n, write=True)
        row[: n // 2] = rounded(row).view(np.float32)

    # float32 as planes of bfloat16 -----------------------------------------------------------------

    def _planes(self, x, count):
        """Bits of the planes of x, one after another."""
        for _ in range(count):
            bits = (x.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
            yield (bits >> 16).astype(np.uint16)
            x = x - bits.view(np.float32)

    def split_rows(self, out, plane, width, x, stride, rows, depth, wide, planes):
        source = self.m.grid(x, 0, rows, stride, depth).copy()
        for n, bits in enumerate(self._planes(source, planes)):
            made = np.zeros((rows, wide), np.uint16)
            made[:, :depth] = bits
            self.m.grid(out.moved(n * plane), 0, rows, width, wide // 2, write=True)[...] = made.view(np.float32)

    def split_pairs(self, out, plane, width, x, stride, rows, cols, planes):
        source = np.zeros((rows + rows % 2, cols), np.float32)
        source[:rows] = self.m.grid(x, 0, rows, stride, cols)
        for n, bits in enumerate(self._planes(source, planes)):
            pairs = bits[0::2].astype(np.uint32) | bits[1::2].astype(np.uint32) << 16
            self.m.grid(out.moved(n * plane), 0, len(pairs), width, cols, write=True)[...] = pairs.view(np.float32)

    def _odd(self, x, least):
        size = np.abs(x)
        return ~(size < FAR) | ((size < least) & (size > 0))

    def odd_rows(self, out, x, stride, rows, depth, least):
        found = self._odd(self.m.grid(x, 0, rows, stride, depth), least).sum(axis=1)
        self.m.row(out, 0, rows, write=True)[...] = found
        return float(found.sum())

    def odd_columns(self, out, x, stride, rows, cols):
        found = self._odd(self.m.grid(x, 0, rows, stride, cols), 0.0).sum(axis=0)
        self.m.row(out, 0, cols, write=True)[...] = found
        return float(found.sum())

    def _of_planes(self, left, right, planes):
        """The sum of the products that are made; ``left(n)`` and ``right(n)`` are plane n of either side."""
        made = [(x, y) for x in range(planes) for y in range(planes) if x + y < planes]
        return sum(unpaired(left(x), 1) @ unpaired(right(y), 0) for x, y in made)

    def plane_panel(self, a, lda, left, b, right, depth, c, ldc, count, cols, planes):
        rows, width, depth = up(count, PAIR_ROWS), TARGET.panel(a.size), up(depth, PAIR_STEPS)
        made = max(self._columns(cols, TARGET.lanes(a.size)), 2 * PAIR_ROWS if TILED else 0)
        self.m.grid(c, 0, rows, ldc, made, write=True)[...] = self._of_planes(
            lambda n: self.m.grid(a.moved(n * left), 0, rows, lda, depth),
            lambda n: self.m.grid(b.moved(n * right), 0, depth, width, made),
            planes,
        )

    def accumulate_planes(self, a, lda, b, ldb, c, ldc, fade, count, width, depth, planes, left, right):
        rows, depth = up(count, PAIR_ROWS), up(depth, PAIR_STEPS)
        target = self.m.grid(c, 0, rows, ldc, width, write=True)
        target[...] = target * self.m.row(fade, 0, rows)[:, None] + self._of_planes(
            lambda n: self.m.grid(a.moved(n * left), 0, rows, lda, depth),
            lambda n: self.m.grid(b.moved(n * right), 0, depth, ldb, width),
            planes,
        )

    def as_integers(self, base):
        return base.seen_as(UINT32)

    def transpose_square(self, out, ldo, x, ldx):
        lanes = TARGET.lanes(x.size)
        square = self.m.grid(x, 0, lanes, ldx, lanes).T.copy()
        self.m.grid(out, 0, lanes, ldo, lanes, write=True)[...] = square

    def _rows_at(self, x, places, early, rows, width):
        """Rows that are so many elements apart, or begin where a table says; those to ask for need not exist."""
        if not isinstance(places, Pointer):
            return widened(self.m.grid(x, 0, rows, places, width))
        self.m.row(early, 0, rows)
        return np.concatenate([widened(self.m.grid(x, at, 1, 0, width)) for at in self.m.row(places, 0, rows).tolist()])

    def _dots(self, rows, q, ldq, k, at, early, cols, depth, s, lds):
        queries, keys = self.m.grid(q, 0, rows, ldq, depth), self._rows_at(k, at, early, cols, depth)
        self.m.grid(s, 0, rows, lds, cols, write=True)[...] = queries @ keys.T

    def dots_of_one(self, *args):
        self._dots(1, *args)

    def dots_of_four(self, *args):
        self._dots(4, *args)

    def _mixes(self, rows, p, ldp, x, at, early, cols, width, out, ldo):
        weights, values = self.m.grid(p, 0, rows, ldp, cols), self._rows_at(x, at, early, cols, width)
        self.m.grid(out, 0, rows, ldo, width, write=True)[...] += weights @ values

    def mixes_of_one(self, *args):
        self._mixes(1, *args)

    def mixes_of_four(self, *args):
        self._mixes(4, *args)

    # register tiles ------------------------------------------------------------------------------

    def _columns(self, cols, lanes):
        """The vectors of a panel, or a few, that hold so many columns."""
        return next(n * lanes for n in (*NARROW, TARGET.score_vectors) if cols <= n * lanes)

    def score_panel(self, a, lda, b, depth, c, ldc, count, cols):
        rows, width = up(count, TARGET.score_rows), TARGET.panel(a.size)
        made = self._columns(cols, TARGET.lanes(a.size))
        left, right = self.m.grid(a, 0, rows, lda, depth), self.m.grid(b, 0, depth, width, made)
        self.m.grid(c, 0, rows, ldc, made, write=True)[...] = left @ right

    def pair_panel(self, a, lda, b, depth, c, ldc, count, cols, scale):
        rows, width, depth = up(count, PAIR_ROWS), TARGET.panel(a.size), up(depth, PAIR_STEPS)
        made = self._columns(cols, TARGET.lanes(a.size))
        if TILED:
            made = max(made, 2 * PAIR_ROWS)
        left, right = self.m.grid(a, 0, rows, lda, depth), self.m.grid(b, 0, depth, width, made)
        self.m.grid(c, 0, rows, ldc, made, write=True)[...] = unpaired(left, 1) @ unpaired(right, 0) * np.float32(scale)

    def _panel_max(self, first, rows, a, lda, b, depth, c, ldc, cols, bias, bias_row, top, scale, pairs=False):
        width, lanes, depth = TARGET.panel(a.size), TARGET.lanes(a.size), up(depth, PAIR_STEPS if pairs else 1)
        made = self._columns(cols, lanes)
        left, right = self.m.grid(a, first * lda, rows, lda, depth), self.m.grid(b, 0, depth, width, made)
        if pairs:
            left, right = unpaired(left, 1), unpaired(right, 0)
        if pairs and TILED:  # tiles come in pairs
            self.m.grid(c, first * ldc, rows, ldc, max(made, 2 * PAIR_ROWS), write=True)[...] = np.nan
        x = (left @ right) * a.kind.type(scale) + self.m.grid(bias, first * bias_row, rows, bias_row, made)
        self.m.grid(c, first * ldc, rows, ldc, made, write=True)[...] = x
        best = self.m.grid(top, first * lanes, rows, lanes, lanes, write=True)
        for j in range(0, made, lanes):
            best[...] = maximum(x[:, j : j + lanes], best)

    def score_panel_max(self, a, lda, b, depth, c, ldc, count, cols, bias, bias_row, top):
        self._panel_max(0, up(count, TARGET.score_rows), a, lda, b, depth, c, ldc, cols, bias, bias_row, top, 1.0)

    def pair_panel_max(self, a, lda, b, depth, c, ldc, count, cols, bias, bias_row, top, scale):
        rows = up(count, PAIR_ROWS)
        self._panel_max(0, rows, a, lda, b, depth, c, ldc, cols, bias, bias_row, top, scale, True)

    def score_panel_inside(self, a, lda, b, depth, c, ldc, count, cols, bias, bias_row, top, scale, pairs=False):
        rows = PAIR_ROWS if pairs else TARGET.score_rows
        for i in range(0, count, rows):
            first = min(i, count - rows)
            self._panel_max(first, rows, a, lda, b, depth, c, ldc, cols, bias, bias_row, top, scale, pairs)

    def pair_panel_inside(self, *args):
        self.score_panel_inside(*args, True)

    def _strips(self, width, lanes):
        """First column and vectors of every strip of columns."""
        whole = width // (TARGET.value_vectors * lanes) * TARGET.value_vectors
        yield from ((n * lanes, TARGET.value_vectors) for n in range(0, whole, TARGET.value_vectors))
        left, rest = divmod(width - whole * lanes, lanes)
        if left and not rest:
            yield whole * lanes, left

    def _accumulate(self, left, b, ldb, c, ldc, fade, count, width, depth, pairs=False):
        lanes = TARGET.lanes(b.size)
        for column, vectors in self._strips(width, lanes):
            tiled = pairs and TILED
            rows, columns = up(count, PAIR_ROWS if tiled else TARGET.value_rows(vectors)), vectors * lanes
            depth = up(depth, PAIR_STEPS if pairs else 1)
            right = self.m.grid(b, column, depth, ldb, columns)
            target = self.m.grid(c, column, rows, ldc, columns, write=True)
            factor = 1 if fade is None else self.m.row(fade, 0, rows)[:, None]
            product = unpaired(left(rows, depth), 1) @ unpaired(right, 0) if pairs else left(rows, depth) @ right
            target[...] = target * factor + product

    def accumulate(self, a, lda, b, ldb, c, ldc, fade, count, width, depth):
        self._accumulate(lambda n, k: self.m.grid(a, 0, n, lda, k), b, ldb, c, ldc, fade, count, width, depth)

    def accumulate_pairs(self, a, lda, b, ldb, c, ldc, fade, count, width, depth):
        self._accumulate(lambda n, k: self.m.grid(a, 0, n, lda, k), b, ldb, c, ldc, fade, count, width, depth, True)

    def accumulate_transposed(self, a, lda, b, ldb, c, ldc, count, width, depth):
        self._accumulate(lambda n, k: self.m.grid(a, 0, k, lda, n).T, b, ldb, c, ldc, None, count, width, depth)

    def accumulate_transposed_pairs(self, a, lda, b, ldb, c, ldc, count, width, depth):
        lanes = TARGET.lanes(b.size)
        for column, vectors in self._strips(width, lanes):
            rows, columns = up(count, TARGET.value_rows(vectors)), vectors * lanes
            left, right = self.m.grid(a, 0, depth, lda, rows), self.m.grid(b, column, depth, ldb, columns)
            target = self.m.grid(c, column, rows, ldc, columns, write=True)
            target[...] = target + unpaired(left, 0).T @ unpaired(right, 0)

    def average_pairs(self, *args):
        self.average(*args, True)

    def average(self, a, lda, b, ldb, c, ldc, share, count, width, depth, pairs=False):
        lanes = TARGET.lanes(b.size)
        for column, vectors in self._strips(width, lanes):
            rows, columns = PAIR_ROWS if pairs and TILED else TARGET.window_rows(vectors), vectors * lanes
            depth = up(depth, PAIR_STEPS if pairs else 1)
            for i in range(0, count, rows):
                first = min(i, count - rows)
                left, right = self.m.grid(a, first * lda, rows, lda, depth), self.m.grid(b, column, depth, ldb, columns)
                if pairs:
                    left, right = unpaired(left, 1), unpaired(right, 0)
                target = self.m.grid(c, first * ldc + column, rows, ldc, columns, write=True)
                target[...] = (left @ right) * self.m.row(share, first, rows)[:, None]

    # bytes ---------------------------------------------------------------------------------------

    def copy(self, out, x, size):
        if size < 0:
            raise Fault(f"{self.m.kernel}: a copy of {size} bytes")
        if size:
            source, target = self.m.row(self.opaque(x), 0, size), self.m.row(self.opaque(out), 0, size, write=True)
            target[...] = source

    stream = copy

    def clear(self, out, size):
        self.m.row(self.opaque(out), 0, size, write=True)[...] = 0

    # matrix tiles --------------------------------------------------------------------------------

    def open_tiles(self):
        """Nothing: what a product needs is opened with it."""

    close_tiles = open_tiles

    def settle(self):
        """Nothing: one thread runs at a time."""
