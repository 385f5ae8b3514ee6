"""Operands of machine code: registers, predicates, constants and addresses of all threads of a block."""

from __future__ import annotations

import re

import numpy as np

ZERO, UNIFORM = 255, 256
_REGISTER = re.compile(r"([-~|]*)(U?R)(\d+|Z)(?:\.(?!reuse)(\w+))?(?:\.reuse)?\|?(?:\.reuse)?$")
CONSTANT = re.compile(r"([-~|]*)c\[0x0\]\[(0x[0-9a-f]+)\]\|?$")
_PREDICATE = re.compile(r"(!?)(U?P)([0-6T])$")
_ADDRESS = re.compile(r"(?:desc\[UR\d+\])?\[(.*)\]$")
_LABEL = re.compile(r"(\.L_x_\d+)")
F32, F64, U64 = np.float32, np.float64, np.uint64
LOW, THIRTY_TWO = U64(0xFFFFFFFF), U64(32)


class Registers:
    """Reading and writing of operands; who has them has `registers`, `predicates`, `constants` and `program`."""

    def predicate(self, words):
        """A predicate of all threads, such as P0, !P0, UP1 or PT."""
        sign, kind, number = _PREDICATE.match(words).groups()
        row = (8 if kind == "UP" else 0) + (7 if number == "T" else int(number))
        found = self.predicates[row]
        return ~found if sign else found

    def is_predicate(self, words):
        return bool(_PREDICATE.match(words))

    def number(self, words):
        """The row of a register."""
        _, kind, number, _ = _REGISTER.match(words).groups()
        if number == "Z":
            return ZERO
        return int(number) + (UNIFORM if kind == "UR" else 0)

    def _bits(self, words):
        """A function that returns the 32 bits of a source before any sign."""
        if found := _REGISTER.match(words):
            row = self.number(words)
            if found[4] in ("H0_H0", "H1_H1"):
                shift = np.uint32(16 if found[4] == "H1_H1" else 0)
                return lambda: (self.registers[row] >> shift) & np.uint32(0xFFFF)
            return lambda: self.registers[row]
        if found := CONSTANT.match(words):
            at = int(found[2], 16)
            word = self.constants[at : at + 4].view(np.uint32)[0]
            return lambda: word
        if "32@" in words or words.startswith("`"):
            place = self.place(words) if "32@hi" not in words else 0
            return lambda: np.uint32(place)
        raise NotImplementedError(f"operand {words}")

    def place(self, words):
        """The place that a label, or a function's name, stands for."""
        found = _LABEL.search(words)
        name = found[1] if found else words.strip("`()")
        return self.program.labels[name]

    def integer(self, words):
        """A function that returns a source as 32 bits, its sign applied."""
        if re.match(r"-?(0x[0-9a-f]+|\d+)$", words):
            value = np.uint32(int(words, 0) & 0xFFFFFFFF)
            return lambda: value
        bits = self._bits(words)
        if words.startswith("-"):
            return lambda: ~bits() + np.uint32(1)
        if words.startswith("~"):
            return lambda: ~bits()
        return bits

    def real(self, words):
        """A function that returns a source as float32, its signs applied."""
        try:
            value = F32(words.replace("QNAN", "nan"))
        except ValueError:
            bits = self._bits(words)
        else:
            return lambda: value

        def find():
            found = np.asarray(bits()).view(F32)
            if "|" in words:
                found = np.abs(found)
            return -found if words.startswith("-") else found

        return find

    def wide(self, words):
        """A function that returns a pair of registers as 64 bits."""
        if re.match(r"-?0x[0-9a-f]+$", words):
            value = U64(int(words, 16) & 0xFFFFFFFFFFFFFFFF)
            return lambda: value
        row = self.number(words)
        if row == ZERO:
            return lambda: np.zeros(self.threads, U64)
        return lambda: self.registers[row].astype(U64) | (self.registers[row + 1].astype(U64) << THIRTY_TWO)

    def put(self, words, mask, whole, value):
        """Write 32 bits, or a float32, where a mask says so."""
        row = self.number(words)
        if row == ZERO:
            return
        value = np.asarray(value)
        value = value.view(np.uint32) if value.dtype == F32 else value.astype(np.uint32, copy=False)
        if whole:
            self.registers[row] = value
        else:
            np.copyto(self.registers[row], value, where=mask)

    def put_wide(self, words, mask, whole, value):
        """Write 64 bits to a pair of registers."""
        if (row := self.number(words)) != ZERO:
            prefix = "UR" if row >= UNIFORM else "R"
            base = row - UNIFORM if row >= UNIFORM else row
            self.put(f"{prefix}{base}", mask, whole, value & LOW)
            self.put(f"{prefix}{base + 1}", mask, whole, value >> THIRTY_TWO)

    def put_predicate(self, words, mask, value):
        """Write a predicate where a mask says so."""
        _, kind, number = _PREDICATE.match(words).groups()
        if number != "T":
            np.copyto(self.predicates[(8 if kind == "UP" else 0) + int(number)], value, where=mask)

    def address(self, words):
        """A function that returns addresses, of 64 bits where registers say so."""
        inside = _ADDRESS.match(words)[1]
        offset, parts = 0, []
        for part in inside.split("+"):
            if re.match(r"-?0x[0-9a-f]+$", part):
                offset += int(part, 16)
            elif part.endswith(".64"):
                parts.append(self.wide(part.removesuffix(".64")))
            else:
                parts.append(self.integer(part.removesuffix(".X4").removesuffix(".X8")))
                assert ".X" not in part, part

        def find():
            total = np.full(self.threads, offset, np.int64)
            for part in parts:
                total = total + part().astype(np.int64)
            return total

        return find
