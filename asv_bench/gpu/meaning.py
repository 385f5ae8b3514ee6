"""What each instruction of the kernels' machine code means, for all threads of a block at once.

NVIDIA documents the names of instructions (CUDA Binary Utilities, "Instruction Set Reference"), not what they compute
to the bit. Meanings here follow from how the compiler uses them. That a whole block's results agree with the float64
reference is what says that they are right: `predict.py` checks that for every row.
"""

from __future__ import annotations

import operator
import re

import numpy as np

from gpu.registers import CONSTANT, F32, F64, LOW, THIRTY_TWO, U64, ZERO, Registers

_COMPARE = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
# What does nothing to a thread on its own.
NOTHING = {"BSSY", "BSYNC", "BMOV", "BREAK", "WARPSYNC", "NOP", "DEPBAR", "YIELD", "ERRBAR", "MEMBAR", "CCTL"}


def rounded(exact, name):
    """Float32 from float64, by the rounding that an instruction's name asks for."""
    found = exact.astype(F32)
    if ".SAT" in name:
        found = np.clip(found, F32(0), F32(1))
    if ".RM" in name:
        found = np.where(found.astype(F64) > exact, np.nextafter(found, F32(-np.inf)), found)
    elif ".RP" in name:
        found = np.where(found.astype(F64) < exact, np.nextafter(found, F32(np.inf)), found)
    elif ".RZ" in name:
        found = np.where(np.abs(found.astype(F64)) > np.abs(exact), np.nextafter(found, F32(0)), found)
    return found.astype(F32)


class Operations(Registers):
    """A method for each instruction, named after it in lower case."""

    def action(self, one):
        """Whether an instruction is "plain", a "jump", a "barrier" or an "exit", and a function that does it."""
        base = one.base
        if base in NOTHING:
            return "plain", lambda mask, whole: None
        if base == "EXIT":
            return "exit", lambda mask: (mask, None)
        if one.name == "BRA.DIV":
            # Taken where lanes of a warp have parted, which `shfl` checks.
            return "jump", lambda mask: (np.zeros_like(mask), None)
        if base in ("BRA", "CALL"):
            target = np.full(self.threads, self.place(one.operands[-1]))
            further = [self.predicate] if len(one.operands) > 1 else []

            def jump(mask):
                for read in further:
                    mask = mask & read(one.operands[0])
                return mask, target

            return "jump", jump
        if base == "RET":
            back = self.integer(one.operands[0])
            return "jump", lambda mask: (mask, back().astype(np.int64))
        if base == "BAR":
            if "RED" in one.name:

                def vote(mask):
                    np.copyto(self.voted, self.predicate(one.operands[1]), where=mask)
                    return mask, None

                return "barrier", vote
            return "barrier", lambda mask: (mask, None)
        method = getattr(self, base.lower().removeprefix("u"), None) or getattr(self, base.lower(), None)
        if method is None:
            raise NotImplementedError(f"no meaning for {one.name} {', '.join(one.operands)}")
        return "plain", method(one)

    def _sorted(self, one, sources):
        """Targets and sources of an instruction that may have predicates after its target."""
        target, rest = one.operands[0], one.operands[1:]
        carries = []
        while rest and self.is_predicate(rest[0]):
            carries.append(rest.pop(0))
        return target, carries, rest[:sources], rest[sources:]

    def iadd3(self, one):
        target, carries, sources, before = self._sorted(one, 3)
        wide = [self._term(words) for words in sources]
        added = before if ".X" in one.name else []

        def act(mask, whole):
            total = wide[0]() + wide[1]() + wide[2]()
            for words in added:
                total = total + self.predicate(words)
            for n, words in enumerate(carries):
                self.put_predicate(words, mask, (total >> THIRTY_TWO) > n)
            self.put(target, mask, whole, total & LOW)

        return act

    def _term(self, words):
        """A source of a sum with a carry: what is subtracted is added as its complement, and one."""
        if words.startswith("-"):
            found = self.integer("~" + words[1:]) if not re.match(r"-(0x|\d)", words) else self.integer(words)
            one = U64(0 if re.match(r"-(0x|\d)", words) else 1)
            return lambda: np.asarray(found()).astype(U64) + one
        found = self.integer(words)
        return lambda: np.asarray(found()).astype(U64)

    def viadd(self, one):
        a, b = map(self.integer, one.operands[1:3])
        return lambda mask, whole: self.put(one.operands[0], mask, whole, a() + b())

    def imad(self, one):
        target, carries, sources, before = self._sorted(one, 3)
        if "WIDE" in one.name or ".HI" in one.name:
            return self._imad_wide(one, target, carries, sources, before)
        a, b, c = map(self.integer, sources)
        if ".X" in one.name:
            return lambda mask, whole: self.put(
                target, mask, whole, a() * b() + c() + self.predicate(before[0]).astype(np.uint32)
            )
        return lambda mask, whole: self.put(target, mask, whole, a() * b() + c())

    def _imad_wide(self, one, target, carries, sources, before):
        a, b = map(self.integer, sources[:2])
        c = self.wide(sources[2])
        signed = ".U32" not in one.name

        def act(mask, whole):
            x, y = np.asarray(a()), np.asarray(b())
            if signed:
                product = (x.view(np.int32).astype(np.int64) * y.view(np.int32).astype(np.int64)).view(U64)
            else:
                product = x.astype(U64) * y.astype(U64)
            added = c()
            total = product + added
            carry = total < product
            if ".X" in one.name:
                more = self.predicate(before[0]).astype(U64)
                carry = carry | (total + more < total)
                total = total + more
            for words in carries:
                self.put_predicate(words, mask, carry)
            if ".HI" in one.name:
                self.put(target, mask, whole, total >> THIRTY_TWO)
            else:
                self.put_wide(target, mask, whole, total)

        return act

    def lea(self, one):
        target, carries, rest, _ = self._sorted(one, 9)
        before = rest.pop() if ".X" in one.name else None
        shift = U64(int(rest.pop(), 16))
        a, b = self.integer(rest[0]), self._term(rest[1])
        high = self.integer(rest[2]) if len(rest) > 2 else None

        def act(mask, whole):
            low = np.asarray(a()).astype(U64)
            if ".HI" in one.name:
                if ".SX32" in one.name:
                    low = low.astype(np.uint32).view(np.int32).astype(np.int64).view(U64)
                else:
                    low = low | (np.asarray(high()).astype(U64) << THIRTY_TWO)
                part = (low << shift) >> THIRTY_TWO & LOW
            else:
                part = low << shift & LOW
            total = part + b()
            if before is not None:
                total = total + self.predicate(before)
            for words in carries:
                self.put_predicate(words, mask, total >> THIRTY_TWO > 0)
            self.put(target, mask, whole, total & LOW)

        return act

    def shf(self, one):
        target, low, amount, high = one.operands
        a, s, b = self.integer(low), self.integer(amount), self.integer(high)
        signed, wide = ".S" in one.name, "64" in one.name
        left, upper = ".L" in one.name, ".HI" in one.name

        def act(mask, whole):
            x, y = np.asarray(a()).astype(U64), np.asarray(b()).astype(U64)
            shift = np.minimum(np.asarray(s()), 63 if wide else 32).astype(U64)
            both = y << THIRTY_TWO | x
            if left:
                # Without wrapping: only what a word of the pair's size holds.
                found = both << shift if wide else (x << shift if not upper else both << shift)
                found = found >> THIRTY_TWO if upper else found
            elif upper:
                found = (y.astype(np.uint32).view(np.int32).astype(np.int64) >> shift.astype(np.int64)).view(U64)
                found = found if signed else y >> shift
            else:
                found = (both.view(np.int64) >> shift.astype(np.int64)).view(U64) if signed else both >> shift
            self.put(target, mask, whole, found & LOW)

        return act

    def lop3(self, one):
        flags = []
        rest = list(one.operands)
        while self.is_predicate(rest[0]):
            flags.append(rest.pop(0))
        target, rest = rest[0], rest[1:]
        a, b, c = map(self.integer, rest[:3])
        table = int(rest[3], 16)

        def act(mask, whole):
            x, y, z = a(), b(), c()
            found = np.zeros(self.threads, np.uint32)
            for n in range(8):
                if table >> n & 1:
                    found |= (x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z)
            for words in flags:
                self.put_predicate(words, mask, (found != 0) | self.predicate(rest[4]))
            self.put(target, mask, whole, found)

        return act

    def plop3(self, one):
        first, second, a, b, c, table, other = one.operands

        def act(mask, whole):
            index = self.predicate(a) * 4 + self.predicate(b) * 2 + self.predicate(c)
            values = [(int(words, 16) >> index & 1).astype(bool) for words in (table, other)]
            self.put_predicate(first, mask, values[0])
            self.put_predicate(second, mask, values[1])

        return act

    def isetp(self, one):
        first, second, *sources = one.operands
        a, b = map(self.integer, sources[:2])
        parts = one.name.split(".")
        compare, join = _COMPARE[parts[1]], "OR" if "OR" in parts else "AND"
        unsigned = "U32" in parts

        def act(mask, whole):
            x, y = np.asarray(a()), np.asarray(b())
            if not unsigned:
                x, y = x.view(np.int32), y.view(np.int32)
            found = compare(x, y)
            if "EX" in parts:
                lower, same = self.predicate(sources[3]), x == y
                if parts[1] == "NE":
                    found = found | lower
                elif parts[1] == "EQ":
                    found = found & lower
                else:
                    found = np.where(same, lower, found)
            given = self.predicate(sources[2])
            values = [found | given, ~found | given] if join == "OR" else [found & given, ~found & given]
            self.put_predicate(first, mask, values[0])
            self.put_predicate(second, mask, values[1])

        return act

    def fsetp(self, one):
        first, second, *sources = one.operands
        a, b = map(self.real, sources[:2])
        parts = one.name.split(".")
        unordered = parts[1].endswith("U") and len(parts[1]) == 3
        compare = _COMPARE[parts[1][:2]]

        def act(mask, whole):
            x, y = a(), b()
            nan = np.isnan(x) | np.isnan(y)
            found = np.where(nan, unordered, compare(x, y))
            given = self.predicate(sources[2])
            values = [found | given, ~found | given] if "OR" in parts else [found & given, ~found & given]
            self.put_predicate(first, mask, values[0])
            self.put_predicate(second, mask, values[1])

        return act

    def sel(self, one):
        a, b = map(self.integer, one.operands[1:3])
        choice = one.operands[3]
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, np.where(self.predicate(choice), a(), b()).astype(np.uint32)
        )

    def fsel(self, one):
        a, b = map(self.real, one.operands[1:3])
        choice = one.operands[3]
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, np.where(self.predicate(choice), a(), b()).astype(F32)
        )

    def fmnmx(self, one):
        a, b = map(self.real, one.operands[1:3])
        choice = one.operands[3]
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, np.where(self.predicate(choice), np.fmin(a(), b()), np.fmax(a(), b()))
        )

    def ffma(self, one):
        a, b, c = map(self.real, one.operands[1:4])
        return lambda mask, whole: self.put(
            one.operands[0],
            *(mask, whole, rounded(a().astype(F64) * b().astype(F64) + c().astype(F64), one.name)),
        )

    def fmul(self, one):
        a, b = map(self.real, one.operands[1:3])
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, rounded(a().astype(F64) * b().astype(F64), one.name)
        )

    def fadd(self, one):
        a, b = map(self.real, one.operands[1:3])
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, rounded(a().astype(F64) + b().astype(F64), one.name)
        )

    def mufu(self, one):
        x = self.real(one.operands[1])
        found = {
            "EX2": np.exp2, "RCP": lambda n: 1 / n, "LG2": np.log2, "RSQ": lambda n: 1 / np.sqrt(n),
            "SQRT": np.sqrt, "TANH": np.tanh,
        }[one.name.split(".")[1]]  # fmt: skip
        return lambda mask, whole: self.put(one.operands[0], mask, whole, found(x().astype(F64)).astype(F32))

    def fchk(self, one):
        """Whether a quotient needs the slow way: operands near the ends of the range."""
        a, b = map(self.real, one.operands[1:3])

        def act(mask, whole):
            sizes = [np.abs(x()) for x in (a, b)]
            plain = (sizes[1] > 2.0**-100) & (sizes[1] < 2.0**100) & (sizes[0] < 2.0**100)
            plain &= (sizes[0] > 2.0**-100) | (sizes[0] == 0)
            self.put_predicate(one.operands[0], mask, ~plain)

        return act

    def dadd(self, one):
        a, b = (self._double(words) for words in one.operands[1:3])
        return lambda mask, whole: self.put_wide(one.operands[0], mask, whole, (a() + b()).view(U64))

    def _double(self, words):
        bits = self.wide(words.lstrip("-"))
        sign = -1.0 if words.startswith("-") else 1.0
        return lambda: bits().view(F64) * sign

    def f2f(self, one):
        x = self.real(one.operands[1])
        return lambda mask, whole: self.put_wide(one.operands[0], mask, whole, x().astype(F64).view(U64))

    def i2f(self, one):
        source = (self.wide if "64" in one.name else self.integer)(one.operands[1])
        return lambda mask, whole: self.put(
            one.operands[0],
            *(mask, whole, rounded(np.broadcast_to(source(), self.threads).astype(F64), one.name)),
        )

    def i2fp(self, one):
        x = self.integer(one.operands[1])
        kind = np.int32 if ".S32" in one.name else np.uint32
        return lambda mask, whole: self.put(one.operands[0], mask, whole, np.asarray(x()).view(kind).astype(F32))

    def f2i(self, one):
        x = self.real(one.operands[1])
        most = 2.0**64 - 2.0**40 if "64" in one.name else 2.0**32 - 1
        put = self.put_wide if "64" in one.name else self.put
        return lambda mask, whole: put(
            one.operands[0], mask, whole, np.clip(np.nan_to_num(x().astype(F64)), 0, most).astype(U64)
        )

    def f2fp(self, one):
        a, b = map(self.real, one.operands[1:3])

        def half(x):
            x = np.broadcast_to(x, self.threads).astype(F32)
            if ".BF16" in one.name:
                bits = x.view(np.uint32).astype(U64)
                near = (bits + U64(0x7FFF) + (bits >> U64(16) & U64(1))) >> U64(16)
                return np.where(np.isnan(x), U64(0x7FFF), near).astype(np.uint32)
            return x.astype(np.float16).view(np.uint16).astype(np.uint32)

        return lambda mask, whole: self.put(one.operands[0], mask, whole, half(a()) << np.uint32(16) | half(b()))

    def hadd2(self, one):
        assert one.name == "HADD2.F32", one.name
        assert one.operands[1] == "-RZ", one.operands
        x = self.integer(one.operands[2])
        return lambda mask, whole: self.put(
            one.operands[0], mask, whole, x().astype(np.uint16).view(np.float16).astype(F32)
        )

    def hfma2(self, one):
        """Here always a constant in disguise: two halves of a word, the upper first."""
        assert one.operands[1:3] == ["-RZ", "RZ"], one.operands
        upper, lower = (int(np.float16(words).view(np.uint16)) for words in one.operands[3:5])
        value = np.uint32(upper << 16 | lower)
        return lambda mask, whole: self.put(one.operands[0], mask, whole, value)

    def prmt(self, one):
        """Bytes of two words, chosen by the digits of the third operand's number; the second is the choice."""
        a, choice, b = map(self.integer, one.operands[1:4])
        assert one.name == "PRMT", one.name

        def act(mask, whole):
            both = np.broadcast_to(a(), self.threads).astype(U64)
            both |= np.broadcast_to(b(), self.threads).astype(U64) << THIRTY_TWO
            picked, found = np.broadcast_to(choice(), self.threads).astype(U64), np.zeros(self.threads, U64)
            for n in range(4):
                digit = picked >> U64(4 * n) & U64(15)
                byte = both >> (digit & U64(7)) * U64(8) & U64(255)
                byte = np.where(digit & U64(8), np.where(byte & U64(128), U64(255), U64(0)), byte)
                found |= byte << U64(8 * n)
            self.put(one.operands[0], mask, whole, found)

        return act

    def shfl(self, one):
        """The register of the lane whose number differs by an exclusive or; all lanes of a warp take part."""
        assert one.name == "SHFL.BFLY", one.name
        assert one.operands[4] == "0x1f", one.operands
        x, other = self.integer(one.operands[2]), int(one.operands[3], 16)
        lanes = np.arange(self.threads) ^ other

        def act(mask, whole):
            assert mask[lanes][mask].all(), "a lane is asked that does not take part"
            self.put(one.operands[1], mask, whole, np.broadcast_to(x(), self.threads)[lanes])

        return act

    def hmma(self, one):
        """Products of matrices, whose parts are in the registers of a warp's lanes as the PTX ISA has them."""
        assert one.name in ("HMMA.16816.F32", "HMMA.16816.F32.BF16"), one.name
        d, *sources = (self.number(words) for words in one.operands)
        brain = one.name.endswith("BF16")

        def halves(row):
            words = self.registers[row].reshape(-1, 8, 4)
            parts = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1).astype(np.uint16)
            # Of each warp, 8 groups of lanes with 8 neighbours.
            parts = parts.reshape(-1, 8, 8)
            if brain:
                return (parts.astype(np.uint32) << np.uint32(16)).view(F32).astype(F64)
            return parts.view(np.float16).astype(F64)

        def reals(row):
            if row == ZERO:
                return np.zeros((self.threads // 32, 8, 8)), np.zeros((self.threads // 32, 8, 8))
            first = [self.registers[row + n].view(F32).astype(F64).reshape(-1, 8, 4) for n in range(4)]
            return tuple(np.stack(first[n : n + 2], axis=-1).reshape(-1, 8, 8) for n in (0, 2))

        def act(mask, whole):
            assert (mask.reshape(-1, 32).all(axis=1) == mask.reshape(-1, 32).any(axis=1)).all()
            a, b, c = sources
            upper = np.concatenate([halves(a), halves(a + 2)], axis=2)
            lower = np.concatenate([halves(a + 1), halves(a + 3)], axis=2)
            right = np.swapaxes(np.concatenate([halves(b), halves(b + 1)], axis=2), 1, 2)
            for n, (left, added) in enumerate(zip((upper, lower), reals(c), strict=True)):
                found = (left @ right + added).astype(F32).reshape(-1, 4, 2)
                for m in range(2):
                    self.put(f"R{d + 2 * n + m}", mask, whole, np.ascontiguousarray(found[:, :, m]).reshape(-1))

        return act

    def mov(self, one):
        x = self.integer(one.operands[1])
        return lambda mask, whole: self.put(one.operands[0], mask, whole, x())

    r2ur = mov

    def s2r(self, one):
        value = self.special[one.operands[1]]
        return lambda mask, whole: self.put(one.operands[0], mask, whole, np.uint32(value))

    s2ur = s2r

    def cs2r(self, one):
        assert one.operands[1] == "SRZ", one.operands
        put = self.put if ".32" in one.name else self.put_wide
        return lambda mask, whole: put(one.operands[0], mask, whole, np.zeros(self.threads, U64))

    def p2r(self, one):
        picked = int(one.operands[3], 16)
        first = 8 if one.base.startswith("U") else 0
        weights = (1 << np.arange(7, dtype=np.uint32)) & np.uint32(picked)

        def act(mask, whole):
            self.put(one.operands[0], mask, whole, (self.predicates[first : first + 7].T * weights).sum(axis=1))

        return act

    up2ur = p2r

    def b2r(self, one):
        return lambda mask, whole: self.put_predicate(one.operands[1], mask, np.full(self.threads, self.result))

    # memory ----------------------------------------------------------------------------------------

    def ldc(self, one):
        at = int(CONSTANT.match(one.operands[1])[2], 16)
        size = 8 if ".64" in one.name else 4
        value = self.constants[at : at + size].view(f"u{size}")[0]
        put = self.put_wide if size == 8 else self.put
        return lambda mask, whole: put(one.operands[0], mask, whole, np.full(self.threads, value, f"u{size}"))

    @staticmethod
    def _size(one):
        parts = one.name.split(".")
        return next((n for n in (1, 2) if f"U{8 * n}" in parts or f"S{8 * n}" in parts), 0) or next(
            (n // 8 for n in (64, 128) if str(n) in parts), 4
        )

    def _count(self, space, addresses, size, warps):
        """Count sectors of 32 bytes, or turns of shared memory."""
        if space == "shared":
            least, most = self.conflicts(addresses, size, warps)
            self.trace.turns_least += least
            self.trace.turns_most += most
        else:
            self.trace.sectors += len(np.unique((warps.astype(np.int64) << 52) + addresses // 32))

    def _load(self, one, space):
        where, size, target = self.address(one.operands[1]), self._size(one), one.operands[0]
        row = self.number(target)

        def act(mask, whole):
            addresses = where()[mask]
            self._count(space, addresses, size, self.warps[mask])
            if space == "shared":
                words = self.shared.view(f"u{min(size, 4)}")
                index = addresses // min(size, 4)
                rows = [words[index + n] for n in range(max(size // 4, 1))]
            else:
                rows = self.memory.load(addresses, size)
            if row != ZERO:
                for n, values in enumerate(rows):
                    self.registers[row + n][mask] = values

        return act

    def _store(self, one, space):
        where, size, source = self.address(one.operands[0]), self._size(one), one.operands[1]
        row = self.number(source)

        def act(mask, whole):
            addresses = where()[mask]
            self._count(space, addresses, size, self.warps[mask])
            rows = [self.registers[row + n if row != ZERO else ZERO][mask] for n in range(max(size // 4, 1))]
            if space == "shared":
                words = self.shared.view(f"u{min(size, 4)}")
                for n, values in enumerate(rows):
                    words[addresses // min(size, 4) + n] = values
            else:
                self.memory.store(addresses, rows, size)

        return act

    def lds(self, one):
        return self._load(one, "shared")

    def sts(self, one):
        return self._store(one, "shared")

    def ldg(self, one):
        return self._load(one, "global")

    def stg(self, one):
        return self._store(one, "global")
