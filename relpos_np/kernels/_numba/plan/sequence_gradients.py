"""Gradients of many sequences in one call as one list of work, as `sequences` has it for the forward pass.

Gradients of queries, keys and values are the bits of calls of their own. What all sequences share, as tables, is added
up in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import Sequences
from relpos_np._contract.terms import Terms, nothing
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of
from relpos_np.kernels._numba.plan.backward_job import (
    AT,
    BLOCK_QUERIES,
    PACKED,
    PIECES,
    SOFT_FLOPS,
    BackwardJob,
)
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.ends import added
from relpos_np.kernels._numba.plan.gradients import FEW, SKEWED, Sums
from relpos_np.kernels._numba.plan.sequence_records import Layout, Records, first_distance
from relpos_np.kernels._numba.plan.sequences import alike, in_calls, is_skewed
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, ROW_QUANTUM
from relpos_np.types import Array, Int64

# Bytes of sums by distance, one for each head of each sequence, that are held at once.
PARTIAL_BYTES = 1 << 26


def backward(
    problem: Problem,
    terms: Terms,
    lse: Array,
    delta: Array,
    grad_out: Array,
    grad_lse: Array | None,
    *,
    stored: bool,
) -> tuple[Terms, Array]:
    """Gradients of the terms and of v, from what `BackwardJob` wants to know of the forward pass."""
    sequences, found = problem.sequences, None
    assert sequences is not None
    skewed = [is_skewed(problem, term, sequences) for term in terms.queries]
    for one, own in alike(sequences, (sequences.k_len > 0, *skewed)):
        if one & 1:
            tiled = [term for n, term in enumerate(terms.queries) if one >> 1 + n & 1]
            job = _Job(problem, terms, lse, delta, grad_out, grad_lse, stored=stored, skewed=tiled)
            job.run_all(own)
            grads = job.gradients()
            found = grads if found is None else (added(found[0], grads[0]), found[1] + grads[1])
    return nothing(terms, problem.q, problem.k, problem.v) if found is None else found


class _Sums(Sums):
    """Sums of all sequences: those by distance are added up in float64."""

    def __init__(self, call: Call, group: int, *, stored: bool) -> None:
        super().__init__(call, 0, group, stored=stored)
        by_distance = (call.site.heads, self.span)
        self.totals = {
            "diag": np.zeros(by_distance if self.diag.ndim > 1 else 0),
            "skew_dw": np.zeros((*by_distance, self.skew_dw.shape[-1]) if self.skew_dw.ndim > 1 else 0),
        }

    def _by_distance(self, name: str) -> Array:
        return self.totals[name]


class _Job(BackwardJob):
    """The backward pass of sequences whose query terms are multiplied in the same way."""

    sums: _Sums

    def _sums(self, *, stored: bool) -> Sums:
        return _Sums(self.call, self.group, stored=stored)

    def run_all(self, sequences: Sequences) -> None:
        """Fill the sums."""
        # What takes longest is done first, and what is as long follows, so that its sums lie side by side.
        work = sequences.q_len * sequences.k_len
        s = self.sequences = sequences.some(np.lexsort((sequences.offset, sequences.k_len, -work)))
        self._divide_all()
        read, start = self.call.read, np.frombuffer(self.pack(), np.int64)
        assert read is not None
        self.records = Records(Layout(self.call, start, AT, read, None, kind="gradients", has_lse=True), s, read)
        self._place()
        size = self.workspace(int(self.block.max()), int(self.span.max()), int(s.q_len.max()), int(s.k_len.max()))
        for own in self._chunks():
            partial = self._place_partial(own)
            self._run_some(own, size)
            for name, (sums, low) in partial.items():
                self._add_partial(name, own, sums, low)

    def _divide_all(self) -> None:
        """Blocks, ranges and pieces of each sequence."""
        s, heads, threads, group = self.sequences, self.call.site.heads, self.call.threads, self.group
        self.block = np.minimum(BLOCK_QUERIES, -(-s.q_len // ROW_QUANTUM) * ROW_QUANTUM)
        # Ranges of queries and of keys score every pair twice: for heads that others would wait for.
        one = (s.q_len + PACKED) * s.k_len * group
        total = int(one.sum()) * heads // group
        parts = np.where(one * (2 * threads) > total, -(-one * (PIECES * threads) // total), 1)
        self.query_step = -(-s.q_len // (parts * self.block)) * self.block
        self.key_step = -(-s.k_len // (parts * BLOCK_KEYS)) * BLOCK_KEYS
        ranges = np.maximum(-(-s.q_len // self.query_step), -(-s.k_len // self.key_step))
        self.parts = np.where(parts > 1, ranges, 1)
        self.span = np.where(self.parts > 1, self.query_step, s.q_len)
        self.tasks = heads * self.parts
        self.pieces = self.tasks // group + np.where(self.parts == 1, 0, self.tasks)
        per_pair = self.per_pair + SOFT_FLOPS
        keys = np.minimum(self.key_step, s.k_len)
        self.cost = per_pair * heads * (s.q_len + PACKED) * s.k_len
        self.largest = per_pair * np.maximum((self.span + PACKED) * s.k_len, (s.q_len + PACKED) * keys)

    def _place(self) -> None:
        """Where gradients of each sequence are, and how its work is divided."""
        r, s, f, item = self.records, self.sequences, self.call.fields, self.call.dtype.itemsize
        for name, x in (
            ("block_queries", self.block),
            ("blocks", 1),
            ("count", 1),
            ("parts", self.parts),
            ("query_step", self.query_step),
            ("key_step", self.key_step),
            ("stop", self.pieces),
        ):
            r.set(name, x)
        keys = s.item * (f["heads"] // self.group * f["k_rows"]) + s.k_start
        r.add("delta", r.rows * item)
        for name, rows, width in (
            ("dq", r.rows, f["depth"]),
            ("dk", keys, f["depth"]),
            ("dv", keys, f["v_depth"]),
            ("skew_dq", r.rows, f["skew_depth"]),
        ):
            r.add(name, rows * (width * getattr(self.sums, name).itemsize))
        if "dp_adds" in self.gathered:
            r.place_table("dp_adds", self.gathered["dp_adds"], "src")
        if "sinks" in self.gathered:
            table = self.gathered["sinks"]
            own = r.place_table("sinks", table, "dst")
            # What sums of many numbers lose is kept where a call of its own would keep it.
            count = np.where(table["of_keys"], s.q_len[:, None], s.k_len[:, None])
            few = np.minimum(FEW * np.array(self.sums.sink_rows), SKEWED)
            kept = (table["runs"] != 0) | (count > few)
            own["low"] = np.where(kept & (table["low"] != 0), table["low"] + own["dst"] - table["dst"], 0)

    def _sizes(self) -> dict[str, tuple[Int64, Int64, Array]]:
        """Of each kind of sums by distance the elements of a task, of all, and whether their rounding is kept."""
        s, found = self.sequences, {}
        distances, each = s.q_len + s.k_len - 1, np.minimum(s.q_len, s.k_len)
        if self.sums.totals["diag"].size:
            found["diag"] = distances, self.tasks * distances, each > FEW
        if self.sums.totals["skew_dw"].size:
            task = (distances + ROW_QUANTUM) * self.sums.skew_dw.shape[-1]
            found["skew_dw"] = task, self.tasks * task, each > SKEWED
        return found

    def _chunks(self) -> Iterator[slice]:
        """Sequences whose sums by distance are held at once."""
        sizes = self._sizes().values()
        done = np.cumsum(sum((total * (1 + low) for _, total, low in sizes), np.zeros(len(self.sequences), np.int64)))
        start, most = 0, PARTIAL_BYTES // self.call.dtype.itemsize
        while start < len(done):
            before = done[start - 1] if start else 0
            stop = max(int(np.searchsorted(done, before + most, "right")), start + 1)
            yield slice(start, stop)
            start = stop

    def _place_partial(self, own: slice) -> dict[str, tuple[Array, Array]]:
        """Sums by distance of some sequences, and what these lose to rounding, where their records say."""
        found, records = {}, self.records.records[own]
        for name, (task, total, low) in self._sizes().items():
            ends, dtype = np.cumsum(total[own]), self.call.dtype
            sums = np.zeros(int(ends[-1]), dtype)
            lost = np.zeros(sums.size if low[own].any() else 0, dtype)
            starts = (ends - total[own]) * dtype.itemsize
            records[:, AT[name]] = address_of(sums) + starts
            records[:, AT[name + "_low"]] = np.where(low[own], address_of(lost) + starts, 0)
            records[:, AT[name + "_task"]] = task[own]
            found[name] = sums, lost
        return found

    def _run_some(self, own: slice, size: int) -> None:
        """Run the kernel; pieces that take long are cut, one sequence after the other."""
        records, heads, s = self.records.records[own], self.call.site.heads, self.sequences
        pieces, cost, largest = self.pieces[own], self.cost[own], self.largest[own]
        flops = self.per_pair * heads * s.q_len[own] * s.k_len[own]
        threads, most = self.call.threads, launcher.call_flops(self.call.dtype.itemsize)
        is_long = np.maximum(cost / pieces, self.group * largest) > most
        for n in np.flatnonzero(is_long).tolist():
            count = int(pieces[n])
            self.run_cuts(records[n], count, size, cost[n] / most, largest[n] / most, min(threads, count))
        if not is_long.all():
            records, pieces, flops = records[~is_long], pieces[~is_long], flops[~is_long] / launcher.SERIAL_FLOPS
            work = float(flops.sum())
            several = 1 if work < 1.0 else min(threads, int(pieces.sum()))
            calls = in_calls(pieces, flops, np.zeros_like(pieces), several * most / launcher.SERIAL_FLOPS)
            launcher.run_linked(self.kernel, records, calls, several, size, work)

    def _add_partial(self, name: str, own: slice, sums: Array, low: Array) -> None:
        """Add sums of some sequences to those of all; equal ones, which lie side by side, together."""
        if low.size:
            np.add(sums, low, out=sums)
        s, heads, at = self.sequences.some(own), self.call.site.heads, 0
        first, task = first_distance(self.call.problem, s), self._sizes()[name][0][own]
        form = np.stack([s.q_len, s.k_len, s.offset], axis=1)
        ends = [*(np.flatnonzero((form[1:] != form[:-1]).any(axis=1)) + 1).tolist(), len(s)]
        start = 0
        for stop in ends:
            parts, span, total = int(self.parts[own][start]), int(task[start]), self.sums.totals[name]
            size = (stop - start) * heads * parts * span
            split = sums[at : at + size].reshape(stop - start, heads, parts, -1, *total.shape[2:])
            distances = int(s.q_len[start] + s.k_len[start]) - 1
            total[:, first[start] : first[start] + distances] += split[:, :, :, :distances].sum(
                axis=(0, 2), dtype=np.float64
            )
            start, at = stop, at + size
