"""Many sequences in one call as one list of work, in which all threads take pieces of the longest sequence first."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import Sequences, in_rows
from relpos_np._contract.terms import QueryTerm, Terms, Toeplitz
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.forward_pass.decode import merge
from relpos_np.kernels._numba.forward_pass.work import LOG2
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, broadcast, rowwise
from relpos_np.kernels._numba.launch.records import CALL, DECODE, places
from relpos_np.kernels._numba.plan import ends, job
from relpos_np.kernels._numba.plan.call import SKEW_SHARE, Call
from relpos_np.kernels._numba.plan.division import (
    RUNS,
    SERIAL_DECODE_FLOPS,
    block_of,
    block_workspace,
    decode_workspace,
    heads_beside,
    heads_together,
    key_parts,
    pair_flops,
)
from relpos_np.kernels._numba.plan.prepared import Form
from relpos_np.kernels._numba.plan.sequence_records import Layout, Operands, Records, first_distance
from relpos_np.types import Array, Int64

_CALL, _DECODE = places(CALL), places(CALL, DECODE)


def attention(
    problem: Problem,
    terms: Terms,
    out: Array,
    lse: Array | None,
    unit: float,
    grad_out: Array | None = None,
    *,
    watched: bool = True,
) -> None:
    """As `job.attention`, of a call whose sequences are attended each alone."""
    met = ends.watch() if watched else 0
    common, sequences = Call(problem, terms, launcher.available_threads(), grad_out, skewed=()), problem.sequences
    assert sequences is not None
    for way, own in _ways(common, sequences):
        _Template(common, way, out, lse, unit).run(own, out, lse, met)
    if watched and grad_out is None:
        ends.mend(attention, problem, terms, out, lse, unit)


class _Way(NamedTuple):
    """How sequences are attended: by which kernel, and which query terms are multiplied tile by tile."""

    kind: Literal["decoding", "windows", "blocks"]
    tiled: tuple[int, ...]


def _ways(common: Call, sequences: Sequences) -> Iterator[tuple[_Way, Sequences]]:
    """Sequences that the same kernel does in the same way."""
    problem, terms, work = common.problem, common.terms, sequences.q_len * sequences.k_len
    # What takes longest is done first, so that no thread is left alone with it.
    if (work[1:] > work[:-1]).any():
        sequences = sequences.some(np.argsort(-work, kind="stable"))
    some = common.grad_out is None and not terms.queries and sequences.q_len.all()
    if some and job.may_decode(common, sequences.q_len.max(), np.False_):
        # Nothing but decoding, which is short and often.
        yield _Way("decoding", ()), sequences
        return
    skewed = [is_skewed(problem, term, sequences) for term in terms.queries]
    decoded = windowed = np.False_
    if common.grad_out is None:
        decoded = job.may_decode(common, sequences.q_len, reduce(np.logical_or, skewed, np.False_))
    if not sequences.has_ends and sequences.pages is None and not decoded.all():
        windowed = ~decoded & job.may_be_windowed(common, sequences.q_len, sequences.k_len, sequences.offset)
    for one, own in alike(sequences, (decoded, windowed, *skewed)):
        tiled = tuple(n for n in range(len(terms.queries)) if one >> 2 + n & 1)
        yield _Way("decoding" if one & 1 else "windows" if one & 2 else "blocks", tiled), own


def alike(sequences: Sequences, ways: SequenceABC[Any]) -> Iterator[tuple[int, Sequences]]:
    """Sequences with queries of which the same is true, as bits of a number; `ways`: of all, or of each."""
    form = np.zeros(len(sequences), np.int64)
    for n, own in enumerate(ways):
        form += own * np.int64(1 << n)
    # Without queries there is nothing to do.
    form[sequences.q_len == 0] = -1
    kinds = set(form.tolist())
    for one in kinds - {-1}:
        yield one, sequences if len(kinds) == 1 else sequences.some(form == one)


def is_skewed(problem: Problem, term: QueryTerm, sequences: Sequences) -> Any:
    """Of which sequences a query term is multiplied tile by tile, as `call.is_skewed` says of one."""
    assert isinstance(term.index, Toeplitz)
    lookup, first = term.index.lookup, first_distance(problem, sequences)
    changed = np.concatenate([[0], np.cumsum(lookup[1:] != lookup[:-1])])
    length = sequences.q_len + sequences.k_len - 1
    last = np.clip(first + length - 1, 0, len(lookup) - 1)
    return changed[last] - changed[np.clip(first, 0, len(lookup) - 1)] + 1 > SKEW_SHARE * length


def in_calls(pieces: Int64, flops: Array, units: Int64, most: float) -> list[tuple[int, int, int]]:
    """Calls of the kernel of at most so many operations: what `run_linked` wants to know of them.

    Of each record are its pieces, its operations, and pieces that are taken as one, or 0.
    """
    done, calls, first = np.cumsum(flops), [], 0
    while first < len(pieces):
        count, size = int(pieces[first]), float(flops[first])
        if size > most:
            # It is done alone, in several calls.
            unit = max(int(units[first]), 1)
            share = max(int(count * most / size) // unit, 1) * unit
            calls += [(first, start // unit, min(start + share, count)) for start in range(0, count, share)]
            first += 1
        else:
            calls.append((first, 0, count))
            first = max(int(np.searchsorted(done, done[first] - size + most, "right")), first + 1)
    return calls


class _Template:
    """What sequences have in common that are attended in one way: their kernel, and a record of nobody's."""

    def __init__(self, common: Call, way: _Way, out: Array, lse: Array | None, unit: float) -> None:
        tiled = [common.terms.queries[n] for n in way.tiled]
        self.call = call = Call(common.problem, common.terms, common.threads, common.grad_out, skewed=tiled)
        self.kind, self.unit, self.fields = way.kind, unit, _DECODE if way.kind == "decoding" else _CALL
        if way.kind == "decoding":
            self.kernel, _ = job.decoding(call, out, lse)
        else:
            self.kernel, _ = job.streaming(call, out, lse, windowed=way.kind == "windows")
        call.fields["count"], call.fields["lse_unit"] = 1, unit
        self.record = np.frombuffer(call.pack().ljust(len(self.fields) * 8, b"\0"), np.int64)

    def run(self, sequences: Sequences, out: Array, lse: Array | None, met: int) -> None:
        """Attend sequences of the call that this is made for; `met`: as `_Group.run` has it."""
        assert self.call.read is not None
        group = _Group(self, sequences, self.call.read, out, lse)
        group.run(out, lse, met, self.call.problem.scales, self.call.read[1:])


class _Group(Records):
    """Sequences that one kernel attends."""

    def __init__(
        self,
        template: _Template,
        sequences: Sequences,
        read: Operands,
        out: Array,
        lse: Array | None,
    ) -> None:
        self.template, self.kind = template, template.kind
        common, places = (template.call, template.record, template.fields), (read, sequences.pages)
        layout = Layout(*common, *places, kind=self.kind, has_lse=lse is not None)
        super().__init__(layout, sequences, read, out, lse)
        decoding = self.kind == "decoding"
        self.pieces, flops, self.workspace = self._divide_keys(read[1]) if decoding else self._divide_queries()
        self.size = float(flops.sum())
        self.threads = 1 if self.size < 1.0 else min(self.call.threads, int(self.pieces.sum()))
        serial = SERIAL_DECODE_FLOPS if decoding else launcher.SERIAL_FLOPS
        most = self.threads * launcher.call_flops(self.item) / serial
        self.calls = in_calls(self.pieces, flops, self.records[:, self.at["run"]], most)
        self.parted = self._parted() if decoding else []

    def _divide_queries(self) -> tuple[Int64, Array, int]:
        """Pieces and operations of each sequence, and bytes of a workspace: blocks of queries."""
        call, s, f = self.call, self.sequences, self.call.fields
        windowed, heads = self.windowed, call.site.heads
        block = block_of(call, int(s.q_len.max()), int(s.k_len.max()), len(s) * heads, windowed=windowed)
        blocks = -(-s.q_len // block)
        rows = -(-s.q_len // blocks) if windowed else np.full(len(s), block)
        self.set("block_queries", rows)
        self.set("blocks", blocks)
        pieces = heads * blocks
        if windowed:
            self.set("run", np.minimum(pieces, max(int(pieces.sum()) // (RUNS * call.threads), 1)))
        flops = pair_flops(call) * pieces * rows * np.minimum(s.k_len, f["left"] + f["right"] + rows)
        return pieces, flops / launcher.SERIAL_FLOPS, block_workspace(call, int(rows.max()))

    def _divide_keys(self, k: Array) -> tuple[Int64, Array, int]:
        """The same of ranges of keys."""
        call, s, f = self.call, self.sequences, self.call.fields
        self.parts = key_parts(s.k_len)
        kv_heads = call.site.heads // f["k_group"]
        beside = heads_beside(k.strides[-3], k.strides[-2], kv_heads)
        together = heads_together(beside, kv_heads * int(self.parts.sum()), call.threads)
        self.set("parts", self.parts)
        self.set("together", together)
        flops = s.q_len * s.k_len * (2 * call.site.heads * (f["depth"] + call.site.v_dim) / SERIAL_DECODE_FLOPS)
        pieces = -(-kv_heads // together) * self.parts
        workspace = decode_workspace(f["depth"], call.site.v_dim, f["turn"], self.item, together)
        return pieces, flops, workspace

    def _parted(self) -> list[tuple[Int64, int, Int64]]:
        """For every number of parts above 1: its sequences, that number, and the rows of each of them."""
        s, heads, found = self.sequences, self.call.site.heads, []
        for parts in set(self.parts.tolist()) - {1}:
            which = np.flatnonzero(self.parts == parts)
            rows = [
                (np.arange(heads)[:, None] + item * heads) * self.q_rows + np.arange(start, start + length)
                for item, start, length in zip(s.item[which], s.q_start[which], s.q_len[which], strict=True)
            ]
            found.append((which, parts, np.concatenate([own.ravel() for own in rows])))
        return found

    def run(
        self,
        out: Array,
        lse: Array | None,
        met: int,
        scales: SequenceABC[Array] | None = None,
        codes: SequenceABC[Array] = (),
    ) -> None:
        """Do all of it, into the results that records name; `met`: where to say which kinds of rows there are, or 0.

        `scales`: of `codes`, which are keys and values.
        """
        kept = self.place_scales(scales, codes) if scales else []
        self.set("ends", met)
        self.set("counter", 0)
        self.set("stop", self.pieces)
        sums = [self._partial(which, parts) for which, parts, _ in self.parted]
        launcher.run_linked(self.template.kernel, self.records, self.calls, self.threads, self.workspace, self.size)
        del kept
        for (_, _, rows), own in zip(self.parted, sums, strict=True):
            self._merge(rows, own, out, lse)

    def _partial(self, which: Int64, parts: int) -> Array:
        """Where some sequences leave the sums of so many parts."""
        counts = self.call.site.heads * self.sequences.q_len[which]
        ends = np.cumsum(counts)
        sums = np.empty((int(ends[-1]), parts, 2 + self.call.site.v_dim), self.call.dtype)
        self.records[which, self.at["partial"]] = address_of(sums) + (ends - counts) * sums.strides[0]
        return sums

    def _merge(self, rows: Int64, sums: Array, into: Array, into_lse: Array | None) -> None:
        """Combine the parts of some rows."""
        out = np.empty((len(rows), into.shape[-1]), into.dtype)
        lse = None if into_lse is None else np.empty(len(rows), into_lse.dtype)
        ends.see(sums[..., 0].max(axis=1))
        merge(sums, out, lse, self.template.unit)
        into.reshape(-1, out.shape[-1])[rows] = out
        if into_lse is not None and lse is not None:
            into_lse.reshape(-1)[rows] = lse


class PreparedSequences:
    """A call whose sequences may have other lengths, and stand elsewhere, every time.

    Terms are those of all positions that a sequence can have; nothing in them is made of operands. What the sequences
    have in common that are attended in one way is planned once.
    """

    takes_lengths = True

    def __init__(self, problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> None:
        self.threads, form = launcher.available_threads(), Form(problem, terms, ())
        # Of the result only the shape and the dtype are planned with.
        out = np.broadcast_to(np.empty((), dtype), problem.out_shape)
        call = Call(problem, terms, self.threads, skewed=())
        assert problem.sequences is not None
        self.templates = {way: _Template(call, way, out, None, LOG2) for way, _ in _ways(call, problem.sequences)}
        # Whether kernels read operands where they are. None of them is kept.
        planned = [template.call for template in self.templates.values()]
        self.in_place = all(x is y for one in planned for x, y in zip(one.read or (), problem.stored, strict=True))
        self.kept = [x for one in planned for x in one.kept if not any(x is own for own in (*problem.stored, out))]
        for one in planned:
            one.problem, one.terms, one.read, one.kept = form.problem, form.terms, None, []
        self.common = Call(form.problem, form.terms, self.threads, skewed=())

    def fits(self) -> bool:
        """Whether a call may still use the threads that the plan is for."""
        return launcher.available_threads() == self.threads

    def of(self, sequences: Sequences) -> PlannedSequences:
        """Calls whose sequences stand where these do."""
        return PlannedSequences(self, sequences)

    def problem(self, read: SequenceABC[Array], sequences: Sequences, scales: SequenceABC[Array]) -> Problem:
        """The call of these operands."""
        q, k, v = _rows(read, sequences)
        given = tuple(scales) or None
        return replace(self.common.problem, stored_q=q, stored_k=k, stored_v=v, sequences=sequences, scales=given)

    def groups(
        self, read: Operands, sequences: Sequences, scales: SequenceABC[Array], out: Array, lse: Array | None
    ) -> tuple[list[_Group], bool]:
        """The call of these operands, and whether it holds none of them."""
        found, lasts = [], True
        for way, own in _ways(self.common, sequences):
            template = self.templates.get(way)
            if template is None:
                problem, lasts = self.problem(read, sequences, scales), False
                template = _Template(Call(problem, self.common.terms, self.threads, skewed=()), way, out, lse, LOG2)
            found.append(_Group(template, own, read, out, lse))
        return found, lasts


class PlannedSequences:
    """Calls whose sequences stand at the same places, such as those of one layer after the other.

    What kernels read of a call is written for the first of them; later ones have their operands elsewhere.
    """

    def __init__(self, prepared: PreparedSequences, sequences: Sequences) -> None:
        self._prepared, self._sequences, self.fits = prepared, sequences, prepared.fits
        # What the last call leaves for the next one, with log-sum-exps and without. Who makes a call takes it.
        self._left: dict[bool, list[_Group]] = {}

    def run(
        self,
        operands: tuple[Array, Array, Array],
        _: None,
        out: Array,
        lse: Array | None,
        vectors: SequenceABC[Array] = (),
        scales: SequenceABC[Array] = (),
    ) -> None:
        """Fill `out` and `lse`, both C-contiguous."""
        assert not vectors
        prepared, sequences = self._prepared, self._sequences
        # They may have more rows or fewer than those that were planned with. Pages are those of all items.
        count = 3 if sequences.pages is None else 1
        q, k, v = (
            broadcast(x if x.ndim > 2 else x[None], (*own.shape[:-2], *x.shape[-2:])) if n < count else x
            for n, (x, own) in enumerate(zip(operands, prepared.common.problem.stored, strict=True))
        )
        read, has_lse, met = (q, k, v), lse is not None, ends.watch()
        groups, lasts = self._left.pop(has_lse, None), True
        if groups is None:
            groups, lasts = prepared.groups(read, sequences, scales, out, lse)
        else:
            for group in groups:
                group.move(read, out, lse)
        codes = _rows(read, sequences)[1:] if scales else ()
        for group in groups:
            group.run(out, lse, met, scales, codes)
        if lasts:
            self._left[has_lse] = groups
        if ends.met():
            ends.mend(attention, prepared.problem(read, sequences, scales), prepared.common.terms, out, lse, LOG2)


def _rows(read: SequenceABC[Array], sequences: Sequences) -> SequenceABC[Array]:
    """Queries, and what stands for keys and values that are one after the other."""
    if sequences.pages is None:
        return read
    return read[0], *(in_rows(x, len(read[0]), int(sequences.k_len.max())) for x in read[1:])


def prepare_sequences(problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> PreparedSequences | None:
    """A call for which that can be done: it has work, reads operands where they are, and terms hand none of them on."""
    made = () if isinstance(terms.query, Turned) else terms.vectors()
    if made or terms.queries or terms.keys or terms.values or terms.biases or problem.mask is not None:
        return None
    if not problem.site.k_len or 0 in problem.out_shape or any(rowwise(x) is not x for x in problem.stored):
        return None
    found = PreparedSequences(problem, terms, dtype)
    return found if found.in_place else None
