"""An interpreter of a block's machine code: it computes what a device would, and counts what a device would do.

All threads of a block go together as rows of NumPy arrays. Where they part, those at the lowest place go first, until
they meet again. Each warp has a clock too, which knows the assembler's stalls and scoreboards and the latencies of
memory, but no other block and no busy pipe: it says how long a block takes that has a multiprocessor to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gpu.meaning import Operations

WARP = 32
# Where parameters begin in the constant bank.
PARAMETERS = 0x210
SHARED_START = 0x400

# Cycles until a result is there, for instructions whose latency is not fixed. Shared and global memory: 29, and 263 for
# what the second-level cache has, on an H100 (Luo et al., arXiv:2402.13499, table of memory latencies); the others are
# rounded guesses from the same kind of measurement.
LATENCY = {
    "LDS": 29, "LDG": 263, "LDC": 35, "MUFU": 24, "S2R": 25, "S2UR": 25, "R2UR": 12, "F2I": 20, "I2F": 20, "F2F": 20,
    "B2R": 25, "FCHK": 20, "DADD": 20, "DMUL": 20, "DFMA": 20, "STS": 20, "STG": 20, "P2R": 12,
}  # fmt: skip
# Products on matrix units, and exchanges within a warp: guesses too.
LATENCY |= {"HMMA": 33, "SHFL": 24}
# Cycles that a barrier costs beyond waiting for the last warp: a guess.
BARRIER = 20


class Memory:
    """Arrays of a device, each at an address of its own, with room between them that nothing may touch."""

    def __init__(self):
        self.starts, self.arrays = [], []
        self.next = 1 << 20

    def add(self, x):
        """The address of an array, which is read and written in place."""
        flat = x.reshape(-1).view(np.uint8)
        assert flat.base is not None, "a copy would not be written back"
        address, self.next = self.next, (self.next + flat.size + (2 << 20)) >> 20 << 20
        self.starts.append(address)
        self.arrays.append(flat)
        return address

    def _of(self, addresses, size):
        """The array that addresses lie in, and where in it."""
        n = int(np.searchsorted(self.starts, int(addresses[0]), side="right")) - 1
        where = addresses - np.int64(self.starts[n])
        if n < 0 or where.min() < 0 or where.max() + size > self.arrays[n].size or (where % size).any():
            raise IndexError(f"an access of {size} bytes outside of every array, at {addresses[0]:#x}")
        return self.arrays[n], where

    def load(self, addresses, size):
        """Elements of `size` bytes as rows of 32 bits, or fewer."""
        word = min(size, 4)
        rows = np.empty((max(size // 4, 1), len(addresses)), f"u{word}")
        for group, chosen in self._groups(addresses):
            flat, where = self._of(group, size)
            words = flat[: flat.size // word * word].view(f"u{word}")
            for n, row in enumerate(rows):
                row[chosen] = words[where // word + n]
        return rows

    def store(self, addresses, rows, size):
        """Write rows of 32 bits, or fewer."""
        word = min(size, 4)
        for group, chosen in self._groups(addresses):
            flat, where = self._of(group, size)
            words = flat[: flat.size // word * word].view(f"u{word}")
            for n, row in enumerate(rows):
                words[where // word + n] = row[chosen].astype(f"u{word}")

    def _groups(self, addresses):
        """Addresses by the array that they lie in."""
        which = np.searchsorted(self.starts, addresses, side="right")
        if (which == which[0]).all():
            yield addresses, slice(None)
            return
        for n in np.unique(which):
            chosen = np.flatnonzero(which == n)
            yield addresses[chosen], chosen


@dataclass
class Trace:
    """What a block did: warps that issued each instruction, bytes, turns of shared memory, and its clock."""

    issued: np.ndarray
    sectors: int = 0
    # If the quarters of a warp's wide access share a turn where they can, and if none do.
    turns_least: int = 0
    turns_most: int = 0
    barriers: int = 0
    cycles: int = 0
    names: dict = field(default_factory=dict)

    def by_name(self, program):
        """Warp instructions by name."""
        found = {}
        for count, one in zip(self.issued.tolist(), program.instructions, strict=True):
            if count:
                found[one.base] = found.get(one.base, 0) + count
        return found


def conflicts(addresses, size, warps):
    """Turns that shared memory takes for an access of active threads: fewest and most."""
    least = most = 0
    for warp in np.unique(warps):
        own = addresses[warps == warp] // 4
        words = np.unique((own[:, None] + np.arange(max(size // 4, 1))).reshape(-1))
        least += int(np.bincount(words % 32, minlength=32).max())
        step = max(1, 32 // max(size // 4, 1))
        for start in range(0, len(own), step):
            part = np.unique((own[start : start + step, None] + np.arange(max(size // 4, 1))).reshape(-1))
            most += int(np.bincount(part % 32, minlength=32).max())
    return least, most


class Block(Operations):
    """One block of a launch."""

    conflicts = staticmethod(conflicts)

    def __init__(self, program, parameters, memory, sizes, block, shared_bytes=48 << 10):
        blocks, threads = sizes
        self.program, self.memory, self.threads = program, memory, threads
        self.constants = np.zeros(PARAMETERS + len(parameters) + 16, np.uint8)
        self.constants[PARAMETERS : PARAMETERS + len(parameters)] = np.frombuffer(parameters, np.uint8)
        # Threads of a block, then blocks, both along three axes.
        self.constants[:24].view(np.uint32)[:] = threads, 1, 1, blocks, 1, 1
        self.registers = np.zeros((320, threads), np.uint32)
        self.predicates = np.zeros((16, threads), bool)
        self.predicates[7] = self.predicates[15] = True
        self.shared = np.full(SHARED_START + shared_bytes, 0xFF, np.uint8)
        self.special = {"SR_TID.X": np.arange(threads, dtype=np.uint32), "SR_CTAID.X": block, "SR_CgaCtaId": 0}
        self.special["SR_LANEID"] = np.arange(threads, dtype=np.uint32) % WARP
        self.warps = np.arange(threads) // WARP
        self.voted = np.zeros(threads, bool)
        self.trace = Trace(np.zeros(len(program.instructions), np.int64))
        n_warps = -(-threads // WARP)
        self.clock, self.boards = [0] * n_warps, [[0] * 6 for _ in range(n_warps)]
        self.actions = {}

    def _tick(self, one, active):
        """Advance the clocks of warps that have active threads."""
        for warp in active:
            boards, now = self.boards[warp], self.clock[warp]
            for board in one.waits:
                now = max(now, boards[board])
            done = now + LATENCY.get(one.base, 6)
            if one.writes is not None:
                boards[one.writes] = max(boards[one.writes], done)
            if one.reads is not None:
                boards[one.reads] = max(boards[one.reads], now + 10)
            self.clock[warp] = now + one.stall

    def run(self):
        """Run the block to its end."""
        code, everyone = self.program.instructions, np.ones(self.threads, bool)
        groups, waiting, alive = {self.program.entry: everyone}, {}, self.threads
        while groups or waiting:
            if not groups:
                arrived = sum(int(mask.sum()) for mask in waiting.values())
                assert arrived == alive, "threads have left while others wait"
                groups, waiting = waiting, {}
                self.trace.barriers += 1
                self.clock = [max(self.clock) + BARRIER] * len(self.clock)
                self.result = bool(self.voted.any())
            place = min(groups)
            mask = groups.pop(place)
            following = min(groups, default=len(code))
            active = np.unique(self.warps[mask]).tolist()
            while True:
                if place >= following:
                    groups[place] = groups[place] | mask if place in groups else mask
                    break
                one = code[place]
                self.trace.issued[place] += len(active)
                self._tick(one, active)
                if place not in self.actions:
                    self.actions[place] = self.action(one)
                kind, act = self.actions[place]
                chosen = mask
                if one.predicate is not None:
                    sign, name = one.predicate
                    held = self.predicate(name)
                    chosen = mask & (held if sign else ~held)
                if kind == "plain":
                    if one.predicate is None or chosen.any():
                        act(chosen, chosen.all())
                    place += 1
                    continue
                leaving, target = act(chosen)
                if not leaving.any():
                    place += 1
                    continue
                staying = mask & ~leaving
                if kind == "exit":
                    alive -= int(leaving.sum())
                elif kind == "barrier":
                    waiting[place + 1] = waiting[place + 1] | leaving if place + 1 in waiting else leaving
                else:
                    for to in np.unique(target[leaving]).tolist():
                        going = leaving & (target == to)
                        groups[to] = groups[to] | going if to in groups else going
                if staying.any():
                    groups[place + 1] = groups[place + 1] | staying if place + 1 in groups else staying
                break
        self.trace.cycles = max(self.clock)
        return self.trace
