"""Many sequences in one call as one list of work, in which all threads take pieces of the longest sequence first.

Each sequence has a record of its own: what it would have in a call of its own, so that it gets the same bits. Records
differ in little but addresses and lengths, which are set for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import Sequences
from relpos_np._contract.terms import QueryTerm, Terms, Toeplitz
from relpos_np.kernels._numba.forward_pass.decode import merge
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets
from relpos_np.kernels._numba.launch.records import BATCH_ROWS, CALL, DECODE, KEY_END
from relpos_np.kernels._numba.plan import ends, job
from relpos_np.kernels._numba.plan.call import SKEW_SHARE, Call
from relpos_np.kernels._numba.plan.division import (
    RUNS,
    SERIAL_DECODE_FLOPS,
    block_of,
    block_workspace,
    decode_workspace,
    key_parts,
    pair_flops,
)
from relpos_np.kernels._numba.simd.target import TARGET
from relpos_np.types import Array, Int64

# Where the fields of a record are, in integers; those of decoding follow.
_AT = {name: n for n, name in enumerate(CALL.names or ())}
_WIDTH = len(_AT)
_PARTS, _PARTIAL = _WIDTH, _WIDTH + 1


def attention(
    problem: Problem, terms: Terms, out: Array, lse: Array | None, unit: float, *, watched: bool = True
) -> None:
    """As `job.attention`, of a call whose sequences are attended each alone."""
    sequences = problem.sequences
    assert sequences is not None
    met = ends.watch() if watched else 0
    for call, own, kind in _groups(problem, terms, sequences):
        call.fields["ends"] = met
        _Group(call, own, kind, out, lse, unit).run()
    if watched:
        ends.mend(attention, problem, terms, out, lse, unit)


def _groups(problem: Problem, terms: Terms, sequences: Sequences) -> Iterator[tuple[Call, Sequences, str]]:
    """Sequences that the same kernel does in the same way, with the call that they have in common."""
    threads = launcher.available_threads()
    skewed = [_is_skewed(problem, term, sequences) for term in terms.queries]
    common = Call(problem, terms, threads, skewed=())
    none = np.zeros(len(sequences), bool)
    decoded = none | job.may_decode(common, sequences.q_len, np.logical_or.reduce([none, *skewed]))
    windowed = ~decoded & job.may_be_windowed(common, sequences.q_len, sequences.k_len, sequences.offset)
    form = sum(own.astype(np.int64) << n for n, own in enumerate((decoded, windowed, *skewed)))
    # Without queries there is nothing to do.
    form = np.where(sequences.q_len > 0, form, -1)
    for one in np.unique(form[form >= 0]).tolist():
        tiled = [term for n, term in enumerate(terms.queries) if one >> 2 + n & 1]
        which = np.flatnonzero(form == one)
        # What takes longest is done first, so that no thread is left alone with it.
        order = np.argsort(-sequences.q_len[which] * sequences.k_len[which], kind="stable")
        kind = "decoding" if one & 1 else "windows" if one & 2 else "blocks"
        yield Call(problem, terms, threads, skewed=tiled), sequences.some(which[order]), kind


def _is_skewed(problem: Problem, term: QueryTerm, sequences: Sequences) -> Any:
    """Of which sequences a query term is multiplied tile by tile, as `call.is_skewed` says of one."""
    assert isinstance(term.index, Toeplitz)
    lookup, first = term.index.lookup, _first_distance(problem, sequences)
    changed = np.concatenate([[0], np.cumsum(lookup[1:] != lookup[:-1])])
    length = sequences.q_len + sequences.k_len - 1
    last = np.clip(first + length - 1, 0, len(lookup) - 1)
    return changed[last] - changed[np.clip(first, 0, len(lookup) - 1)] + 1 > SKEW_SHARE * length


def _first_distance(problem: Problem, sequences: Sequences) -> Int64:
    """Where the maps of all have the lowest distance of each sequence."""
    site = problem.site
    found: Int64 = site.q_len - sequences.q_len + site.offset - sequences.offset
    return found


@cache
def _cut_off(dtype: np.dtype[Any], k_len: int, panel: int) -> Array:
    """A bias of nothing for so many keys, and -inf behind them."""
    row = np.zeros(k_len + panel, dtype)
    row[k_len:] = -np.inf
    return row


class _Group:
    """Sequences with records that differ in addresses and lengths alone."""

    def __init__(self, call: Call, sequences: Sequences, kind: str, out: Array, lse: Array | None, unit: float) -> None:
        self.call, self.sequences, self.kind, self.out, self.lse, self.unit = call, sequences, kind, out, lse, unit
        if kind == "decoding":
            self.kernel, _ = job.decoding(call, out, lse)
        else:
            self.kernel, _ = job.streaming(call, out, lse, windowed=kind == "windows")
        call.fields["count"], call.fields["lse_unit"] = 1, unit
        template = np.frombuffer(call.pack(), np.int64)
        decoding = kind == "decoding"
        self.records = np.empty((len(sequences), _WIDTH + len(DECODE.names or ()) * decoding), np.int64)
        self.records[:, :_WIDTH] = template
        self.item = call.dtype.itemsize
        self._place_operands()
        self._place_terms()
        self.pieces, self.flops, self.workspace = self._divide_keys() if decoding else self._divide_queries()
        self.records[:, _AT["stop"]] = self.pieces

    def _add(self, name: str, x: Any) -> None:
        self.records[:, _AT[name]] += x

    def _set(self, name: str, x: Any) -> None:
        self.records[:, _AT[name]] = x

    def _place_operands(self) -> None:
        """Lengths, and where operands and results begin."""
        call, s = self.call, self.sequences
        assert call.read is not None
        for name, x, start in zip("qkv", call.read, (s.q_start, s.k_start, s.k_start), strict=True):
            items = batch_offsets(x, len(call.site.batch))[s.item]
            self._add(name, items * x.itemsize + start * x.strides[-2])
        rows = s.item * (call.site.heads * call.fields["q_rows"]) + s.q_start
        self._add("out", rows * (call.site.v_dim * self.out.itemsize))
        if self.lse is not None:
            self._add("lse", rows * self.lse.itemsize)
        self._add("skew_q", rows * (call.fields["skew_depth"] * self.item))
        for name in ("q_len", "k_len", "offset"):
            self._set(name, getattr(s, name))
        pages = call.problem.pages
        if pages is not None:
            self._set("pages", call.keep(pages.table) + s.item * pages.table.strides[0])
            self._set("page_keys", pages.size)
            self._set("k_page", pages.k_step)
            self._set("v_page", pages.v_step)
        # One batch item each, whose arrays begin where the record says.
        batches = np.zeros((len(s), len(BATCH_ROWS)), np.int64)
        batches[:, KEY_END] = s.k_end
        self._set("batches", call.keep(batches) + np.arange(len(s)) * batches.strides[0])

    def _place_terms(self) -> None:
        """Where biases, maps and turns of all have those of each sequence."""
        call, s, f = self.call, self.sequences, self.call.fields
        moved = call.site.offset - s.offset
        if f["bias_row"]:
            self._add("bias", moved * self.item)
        elif self.kind == "windows":
            panel, longest = TARGET.panel(self.item), int(s.k_len.max())
            row = call.keep(_cut_off(call.dtype, longest, panel))
            self._set("bias", row + (longest - s.k_len) * self.item)
        if f["turn"]:
            self._add("q_turn", -moved * (2 * f["turn_pairs"] * self.item))
        self._add("skew_index", _first_distance(call.problem, s) * 4 * bool(f["skew_depth"]))
        for name, gathered in (("adds", call.adds), ("values", call.values)):
            if gathered is None:
                continue
            own = np.repeat(gathered[None], len(s), axis=0)
            own["map_origin"] += moved[:, None]
            if name == "adds":
                starts = s.item[:, None] * own["src_batch"] + s.q_start[:, None] * own["src_row"]
                own["src"] += (starts + s.k_start[:, None] * own["src_col"]) * self.item
            self._set(name, call.keep(own) + np.arange(len(s)) * own.strides[0])

    def _divide_queries(self) -> tuple[Int64, Array, int]:
        """Pieces and operations of each sequence, and bytes of a workspace: blocks of queries."""
        call, s, f = self.call, self.sequences, self.call.fields
        windowed, heads = self.kind == "windows", call.site.heads
        block = block_of(call, int(s.q_len.max()), int(s.k_len.max()), len(s) * heads, windowed=windowed)
        blocks = -(-s.q_len // block)
        rows = -(-s.q_len // blocks) if windowed else np.full(len(s), block)
        self._set("block_queries", rows)
        self._set("blocks", blocks)
        pieces = heads * blocks
        if windowed:
            self._set("run", np.minimum(pieces, max(int(pieces.sum()) // (RUNS * call.threads), 1)))
        flops = pair_flops(call) * pieces * rows * np.minimum(s.k_len, f["left"] + f["right"] + rows)
        return pieces, flops / launcher.SERIAL_FLOPS, block_workspace(call, int(rows.max()))

    def _divide_keys(self) -> tuple[Int64, Array, int]:
        """The same of ranges of keys."""
        call, s, f = self.call, self.sequences, self.call.fields
        self.parts = key_parts(s.k_len)
        self.records[:, _PARTS], self.records[:, _PARTIAL] = self.parts, 0
        flops = 2.0 * call.site.heads * s.q_len * s.k_len * (f["depth"] + call.site.v_dim)
        return call.site.heads // f["k_group"] * self.parts, flops / SERIAL_DECODE_FLOPS, decode_workspace(call)

    def run(self) -> None:
        """Do all of it."""
        size = float(self.flops.sum())
        threads = 1 if size < 1.0 else min(self.call.threads, int(self.pieces.sum()))
        parts = self._partial() if self.kind == "decoding" else []
        launcher.run_linked(self.kernel, self.records, self._calls(threads), threads, self.workspace, size)
        for rows, sums in parts:
            self._merge(rows, sums)

    def _calls(self, threads: int) -> list[tuple[int, int, int]]:
        """Calls of the kernel that each take a fraction of a second: what `run_linked` wants to know of them."""
        serial = SERIAL_DECODE_FLOPS if self.kind == "decoding" else launcher.SERIAL_FLOPS
        most = threads * launcher.call_flops(self.item) / serial
        done, calls, first = np.cumsum(self.flops), [], 0
        while first < len(self.records):
            pieces, flops, unit = (
                int(self.pieces[first]),
                float(self.flops[first]),
                int(self.records[first, _AT["run"]]),
            )
            if flops > most:
                # It is done alone, in several calls.
                unit = max(unit, 1)
                share = max(int(pieces * most / flops) // unit, 1) * unit
                calls += [(first, start // unit, min(start + share, pieces)) for start in range(0, pieces, share)]
                first += 1
            else:
                calls.append((first, 0, pieces))
                first = max(int(np.searchsorted(done, done[first] - flops + most, "right")), first + 1)
        return calls

    def _partial(self) -> list[tuple[Array, Array]]:
        """For every number of parts the rows of sequences with several, and where these leave their sums."""
        s, site, found = self.sequences, self.call.site, []
        for parts in np.unique(self.parts[self.parts > 1]).tolist():
            which = np.flatnonzero(self.parts == parts)
            counts = site.heads * s.q_len[which]
            ends = np.cumsum(counts)
            sums = np.empty((int(ends[-1]), parts, 2 + site.v_dim), self.call.dtype)
            self.records[which, _PARTIAL] = address_of(sums) + (ends - counts) * sums.strides[0]
            rows = [
                (np.arange(site.heads)[:, None] + item * site.heads) * self.call.fields["q_rows"]
                + np.arange(start, start + length)
                for item, start, length in zip(s.item[which], s.q_start[which], s.q_len[which], strict=True)
            ]
            found.append((np.concatenate([own.ravel() for own in rows]), sums))
        return found

    def _merge(self, rows: Array, sums: Array) -> None:
        """Combine the parts of some rows."""
        out = np.empty((len(rows), self.out.shape[-1]), self.out.dtype)
        lse = None if self.lse is None else np.empty(len(rows), self.lse.dtype)
        ends.see(sums[..., 0].max(axis=1))
        merge(sums, out, lse, self.unit)
        self.out.reshape(-1, out.shape[-1])[rows] = out
        if self.lse is not None and lse is not None:
            self.lse.reshape(-1)[rows] = lse
