"""Operands of matrix units: pairs of half precision in shared memory, or planes of bfloat16 whose sum is a float32.

A plane rounds what the planes before it have left: of numbers with 24 bits one plane keeps 8, two 16 and three all.
Products are made of planes i and j with i + j below their number, so that three planes have six products.

Keys and queries are rows of pairs of channels, plane behind plane. Values are rows of pairs of keys: a pair's row is
`Block.turns` rows of the shared tile, which keeps the threads of a warp on different banks.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from relpos_np.kernels._cuda.launch.device import inline, simulated
from relpos_np.kernels._cuda.simd.intrinsics import FORMATS, converters, neighbours, u32, u64
from relpos_np.kernels._cuda.simd.tile import PAD, Tiling
from relpos_np.kernels._cuda.simd.warp import STEPS, bits, from_bits, high, low, packed, words

# Words that a thread holds on their way from global to shared memory.
HELD = 32
# Planes have the exponents of float32, but products of them overflow, and differences of infinities are NaN, where
# float32 has neither. Scores of vectors with a number from FAR on, and the share of such a value, are made of float32.
FAR_SCORES, FAR_VALUES = np.float32(2.0**56), np.float32(2.0**127)
# What a block may have without asking the driver for more, less what else it has there.
SHARED = 48 * 1024 - 1400


class Source(NamedTuple):
    """How an operand is stored, and whether 16 bytes of it can be loaded at once."""

    stored: str
    wide: bool


class Block(NamedTuple):
    """What a block multiplies: `half` precision in so many `planes`, `depth` channels, `width` value channels."""

    tiling: Tiling
    half: str
    planes: int
    depth: int
    width: int
    skewed: bool
    query: Source
    key: Source
    value: Source

    def is_raw(self, source: Source) -> bool:
        """Whether an operand is multiplied as it is stored."""
        return self.planes == 1 and source.stored == self.half

    def group(self, source: Source) -> int:
        """Channels that a thread takes at a time: four words, or numbers."""
        return 8 if self.is_raw(source) else 4

    @property
    def channels(self) -> int:
        """Channels of queries and keys that are in shared memory at a time."""
        group = min(self.group(self.query), self.group(self.key))
        room = min(2 * self.tiling.rows // self.planes, HELD * group // 4 * self.tiling.threads // self.tiling.rows)
        return min(room, -(-self.depth // STEPS) * STEPS) // STEPS * STEPS

    @property
    def chunks(self) -> int:
        """How often that is all channels."""
        return -(-self.depth // self.channels)

    @property
    def turns(self) -> int:
        """Rows of the shared tile that a pair of values takes."""
        return max(2, self.width // self.tiling.rows)

    @property
    def keys(self) -> int:
        """Keys whose values are in shared memory at a time."""
        return 2 * self.tiling.rows // (self.turns * self.planes) // STEPS * STEPS

    @property
    def _own_words(self) -> int:
        """Words of a query's row if all of it stays."""
        return self.planes * self.chunks * self.channels // 2 + PAD

    @property
    def resident(self) -> bool:
        """Whether queries stay in shared memory."""
        return 4 * self.tiling.rows * (self._own_words + self.tiling.rows + PAD) + self.spare <= SHARED

    @property
    def spare(self) -> int:
        """Bytes of the tiles with which products by relative position are made."""
        return 4 * 2 * 16 * (self.tiling.rows + PAD) if self.skewed else 0

    @property
    def left_words(self) -> int:
        """Words of a query's row in shared memory."""
        return self._own_words if self.resident else self.planes * self.channels // 2 + PAD


def tiling_for(width: int, planes: int, *, crowded: bool) -> Tiling:
    """Threads and rows of a block; `crowded`: registers are scarce, as they are with several planes."""
    small = simulated() and planes == 1 and width <= 64
    threads = 64 if small or (width <= 64 and planes == 1 and not crowded) else 128
    return Tiling(np.dtype(np.float32), threads, 32 if small else 64, True)


@cache
def _load(source: Source, raw: bool) -> Any:
    """Load a group of channels from an element on, the first `count` of them, and 0 in place of others, into held."""
    widen, _ = converters(source.stored)
    size = 8 if raw else 4
    pack = packed(source.stored if raw else "bfloat16")
    four, four_words = neighbours(4), words()
    plain = np.float32(0)

    def load_words(held, at, x, where, count):  # type: ignore[no-untyped-def]
        if count >= 8:
            found = four_words(x, u64(where))
            for n in range(4):
                held[at + n] = from_bits(found[n])
        else:
            for n in range(4):
                held[at + n] = plain

    def load_pairs(held, at, x, where, count):  # type: ignore[no-untyped-def]
        for n in range(4):
            first = second = plain
            if 2 * n < count:
                first = widen(x[u64(where + 2 * n)])
            if 2 * n + 1 < count:
                second = widen(x[u64(where + 2 * n + 1)])
            held[at + n] = from_bits(pack(first, second))

    def load_four(held, at, x, where, count):  # type: ignore[no-untyped-def]
        if count >= 4:
            found = four(x, u64(where))
            for n in range(4):
                held[at + n] = found[n]
        else:
            for n in range(4):
                held[at + n] = plain

    def load_numbers(held, at, x, where, count):  # type: ignore[no-untyped-def]
        for n in range(4):
            value = plain
            if n < count:
                value = widen(x[u64(where + n)])
            held[at + n] = value

    if raw:
        return inline(load_words if source.wide else load_pairs)
    return inline(load_four if source.wide and FORMATS[source.stored][1].itemsize * size == 16 else load_numbers)


@cache
def fetch_rows(block: Block, source: Source) -> Any:
    """Load channels from `channel` on of a tile's rows into registers, for `store_rows`."""
    group, threads = block.group(source), block.tiling.threads
    across = block.channels // group
    turns, load = block.tiling.rows * across // threads, _load(source, block.is_raw(source))

    def fetch(held, x, channel, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            n = turn * threads + me
            row, d = x.first + n // across, channel + n % across * group
            count = 0
            if row < x.end:
                count = x.depth - d
            load(held, 4 * turn, x.array, x.start[0] + row * x.start[1] + d, count)

    return inline(fetch)


@cache
def _split(block: Block) -> Any:
    """Round two numbers to a word of the next plane; returns it and what it leaves of them."""
    pack, last = packed(block.half), block.planes == 1

    def split(first, second):  # type: ignore[no-untyped-def]
        word = pack(first, second)
        if not last:
            first, second = first - low(word), second - high(word)
        return word, first, second

    return inline(split)


@cache
def store_rows(block: Block, source: Source, *, as_words: bool) -> Any:
    """Write what was fetched to shared[row, at + pair of channels]: words, `as_words` or as float32 with their bits.

    Where there are several planes, odd[row] becomes 1 if a number is too large for them, which is then 0.
    """
    group, threads, planes = block.group(source), block.tiling.threads, block.planes
    across, apart = block.channels // group, block.channels // 2
    turns, raw, split = block.tiling.rows * across // threads, block.is_raw(source), _split(block)
    far, plain = FAR_SCORES, np.float32(0)

    def put_word(shared, row, column, word):  # type: ignore[no-untyped-def]
        shared[row, u32(column)] = word

    def put_real(shared, row, column, word):  # type: ignore[no-untyped-def]
        shared[row, u32(column)] = from_bits(word)

    put = inline(put_word if as_words else put_real)

    def store(shared, at, held, odd, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            n = turn * threads + me
            row, d = n // across, n % across * (group // 2)
            if raw:
                for i in range(4):
                    put(shared, row, at + d + i, bits(held[4 * turn + i]))
            else:
                if planes > 1:
                    for i in range(4):
                        if not abs(held[4 * turn + i]) < far:
                            odd[row] = 1
                            held[4 * turn + i] = plain
                for i in range(2):
                    first, second = held[4 * turn + 2 * i], held[4 * turn + 2 * i + 1]
                    for p in range(planes):
                        word, first, second = split(first, second)
                        put(shared, row, at + p * apart + d + i, word)

    return inline(store)


@cache
def fetch_values(block: Block, source: Source) -> Any:
    """Load the channels that a block makes of `Block.keys` values, after the first `skip` of a tile, into registers."""
    group, threads = block.group(source), block.tiling.threads
    across = block.width // group
    groups, load = block.keys // 2 * across, _load(source, block.is_raw(source))
    turns = -(-groups // threads)

    def fetch(held, x, skip, channel, me):  # type: ignore[no-untyped-def]
        for turn in range(turns):
            # Where there are more threads than groups, some do what others do too.
            n = (turn * threads + me) % groups
            row, d = x.first + skip + 2 * (n // across), channel + n % across * group
            where, count = x.start[0] + row * x.start[1] + d, x.depth - d
            load(held, 8 * turn, x.array, where, count if row < x.end else 0)
            load(held, 8 * turn + 4, x.array, where + x.start[1], count if row + 1 < x.end else 0)

    return inline(fetch)


@cache
def store_values(block: Block, source: Source) -> Any:
    """Write what was fetched to shared, in pairs of keys; what is not finite, or too large, becomes 0.

    Returns 1 if there was such a number.
    """
    group, threads, planes, rows = block.group(source), block.tiling.threads, block.planes, block.tiling.rows
    across, high_row, apart = block.width // group, block.turns, block.keys // 2 * block.turns
    groups, raw, split = block.keys // 2 * across, block.is_raw(source), _split(block)
    turns = -(-groups // threads)
    # An exponent of ones, in both halves of a word; one unit of it more goes over into the sign.
    exponent, unit = (0x7C007C00, 0x04000400) if block.half == "float16" else (0x7F807F80, 0x00800080)
    exponents, units, signs = np.uint32(exponent), np.uint32(unit), np.uint32(0x80008000)
    lower, upper, none, sixteen = np.uint32(0xFFFF), np.uint32(0xFFFF0000), np.uint32(0), np.uint32(16)
    far, plain = FAR_VALUES, np.float32(0)

    def cleared(word):  # type: ignore[no-untyped-def]
        over = ((word & exponents) + units) & signs
        if over & lower != none:
            word &= upper
        if over & upper != none:
            word &= lower
        return word

    clear = inline(cleared)

    def store(shared, held, me):  # type: ignore[no-untyped-def]
        odd = 0
        for turn in range(turns):
            n = (turn * threads + me) % groups
            pair, d = n // across, n % across * group
            row, column, at = pair * high_row + d // rows, d % rows, 8 * turn
            if raw:
                over = none
                for i in range(8):
                    over |= ((bits(held[at + i]) & exponents) + units) & signs
                if over != none:
                    odd = 1
                    for i in range(8):
                        held[at + i] = from_bits(clear(bits(held[at + i])))
                for i in range(4):
                    first, second = bits(held[at + i]), bits(held[at + 4 + i])
                    below = np.uint32((first & lower) | (second << sixteen))
                    above = np.uint32((first >> sixteen) | (second & upper))
                    shared[row, column + 2 * i] = from_bits(below)
                    shared[row, column + 2 * i + 1] = from_bits(above)
            else:
                for i in range(8):
                    if not abs(held[at + i]) < far:
                        odd = 1
                        held[at + i] = plain
                for i in range(4):
                    first, second = held[at + i], held[at + 4 + i]
                    for p in range(planes):
                        word, first, second = split(first, second)
                        shared[row + p * apart, column + i] = from_bits(word)
        return odd

    return inline(store)
