"""Machine code of a kernel as text: nvdisasm's listing, read into instructions with what the assembler scheduled.

The upper of an instruction's two words says how long its warp waits before the next one, and which of six scoreboards
it waits for or sets (bits 41-57; known since Jia et al., arXiv:1804.06826, chapter 2, for Volta, and unchanged).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

REMEDY = "pip install 'nvidia-cuda-nvdisasm==13.*'"

_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* (0x[0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")
_PREDICATE = re.compile(r"@(!?)(U?P\w)\s+(.*)")


@dataclass
class Instruction:
    """One instruction: its predicate, its name with modifiers, its operands, and what the assembler scheduled."""

    place: int
    predicate: tuple[bool, str] | None
    name: str
    operands: list[str]
    stall: int = 1
    writes: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()

    @property
    def base(self):
        """The name without modifiers."""
        return self.name.partition(".")[0]

    def schedule(self, word):
        """Take what the upper word says."""
        self.stall = max((word >> 41) & 15, 1)
        writes, reads, waits = (word >> 46) & 7, (word >> 49) & 7, (word >> 52) & 63
        self.writes, self.reads = (None if n == 7 else n for n in (writes, reads))
        self.waits = tuple(n for n in range(6) if waits >> n & 1)


@dataclass
class Program:
    """All functions of a cubin in a row; `entry`: where the kernel begins; `labels` are places of functions too."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    entry: int = 0


def _split(words):
    """Operands, which commas separate, but not within brackets."""
    found, depth, start = [], 0, 0
    for n, letter in enumerate(words):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            found.append(words[start:n].strip())
            start = n + 1
    last = words[start:].strip()
    return [*found, last] if last else found


def read(listing):
    """A program from what ``nvdisasm -c -hex`` prints; its kernel is the longest function."""
    program, starts, second = Program(), {}, None
    code = program.instructions
    for line in listing.splitlines():
        if found := _FUNCTION.match(line):
            starts[found[1]] = program.labels[found[1]] = len(code)
        elif found := _LABEL.match(line):
            program.labels[found[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            words, predicate = found[2].rstrip(" ;"), None
            if given := _PREDICATE.match(words):
                predicate, words = (not given[1], given[2]), given[3]
            name, _, operands = words.partition(" ")
            second = Instruction(len(code), predicate, name, _split(operands))
            code.append(second)
        elif second is not None and (found := _SECOND.match(line)):
            second.schedule(int(found[1], 16))
            second = None
    if not code:
        raise ValueError("the listing holds no instruction")
    ends = [*list(starts.values())[1:], len(code)]
    sizes = {name: end - start for (name, start), end in zip(starts.items(), ends, strict=True)}
    program.entry = starts[max(sizes, key=sizes.get)]
    return program


def nvdisasm():
    """The path of the program, on PATH or from its package, or None."""
    packaged = (found for folder in sys.path for found in Path(folder or ".").glob("nvidia/cu*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next((str(path) for path in packaged), None)


def disassembled(cubin):
    """The program in a cubin, given as bytes."""
    program = nvdisasm()
    if program is None:
        raise FileNotFoundError(f"nvdisasm: not found; {REMEDY}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run([program, "-c", "-hex", str(path)], capture_output=True, text=True, check=True)
    return read(run.stdout)
