"""Many sequences in one call as one list of work, in which all threads take pieces of the longest sequence first.

Each sequence has a record of its own: what it would have in a call of its own, so that it gets the same bits. Records
differ in little but addresses and lengths, which are set for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import Pages, Sequences
from relpos_np._contract.terms import QueryTerm, Terms, Toeplitz
from relpos_np._contract.turned import Turned
from relpos_np.kernels._numba.forward_pass.decode import merge
from relpos_np.kernels._numba.forward_pass.work import LOG2
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets, broadcast, rowwise
from relpos_np.kernels._numba.launch.records import (
    BATCH_MASK,
    BATCH_ROWS,
    CALL,
    DECODE,
    KEY_BEGIN,
    KEY_END,
    places,
)
from relpos_np.kernels._numba.plan import ends, job, masks
from relpos_np.kernels._numba.plan.call import SKEW_SHARE, Call
from relpos_np.kernels._numba.plan.division import (
    RUNS,
    SERIAL_DECODE_FLOPS,
    block_of,
    block_workspace,
    decode_workspace,
    heads_together,
    key_parts,
    pair_flops,
)
from relpos_np.kernels._numba.plan.fields import KINDS, scale_fields
from relpos_np.kernels._numba.plan.prepared import Form
from relpos_np.kernels._numba.simd.target import TARGET
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
        _Group(_Template(common, way, out, lse, unit), own, out, lse).run(met)
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
    skewed = [is_skewed(problem, term, sequences) for term in terms.queries]
    decoded = windowed = none = np.zeros(len(sequences), bool)
    if common.grad_out is None:
        decoded = none | job.may_decode(common, sequences.q_len, np.logical_or.reduce([none, *skewed]))
    if sequences.k_end is None and sequences.pages is None and not decoded.all():
        windowed = ~decoded & job.may_be_windowed(common, sequences.q_len, sequences.k_len, sequences.offset)
    for one, which in alike(sequences, (decoded, windowed, *skewed)):
        tiled = tuple(n for n in range(len(terms.queries)) if one >> 2 + n & 1)
        way = _Way("decoding" if one & 1 else "windows" if one & 2 else "blocks", tiled)
        yield way, sequences if len(which) == len(sequences) else sequences.some(which)


def alike(sequences: Sequences, ways: SequenceABC[Array]) -> Iterator[tuple[int, Array]]:
    """Sequences with queries of which the same is true, as bits of a number, by their indices."""
    form = np.zeros(len(sequences), np.int64)
    for n, own in enumerate(ways):
        form |= own.astype(np.int64) << n
    # Without queries there is nothing to do.
    form[sequences.q_len == 0] = -1
    for one in set(form.tolist()) - {-1}:
        yield one, np.flatnonzero(form == one)


def is_skewed(problem: Problem, term: QueryTerm, sequences: Sequences) -> Any:
    """Of which sequences a query term is multiplied tile by tile, as `call.is_skewed` says of one."""
    assert isinstance(term.index, Toeplitz)
    lookup, first = term.index.lookup, first_distance(problem, sequences)
    changed = np.concatenate([[0], np.cumsum(lookup[1:] != lookup[:-1])])
    length = sequences.q_len + sequences.k_len - 1
    last = np.clip(first + length - 1, 0, len(lookup) - 1)
    return changed[last] - changed[np.clip(first, 0, len(lookup) - 1)] + 1 > SKEW_SHARE * length


def first_distance(problem: Problem, sequences: Sequences) -> Int64:
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


class Records:
    """A record for each sequence; they differ in addresses and lengths alone.

    `template`: what all have in common, as its call has it. `at`: where its fields are. `read`: queries, keys and
    values, if they are others than those of the call.
    """

    def __init__(
        self,
        call: Call,
        sequences: Sequences,
        template: bytes | bytearray,
        at: dict[str, int],
        read: tuple[Array, Array, Array] | None = None,
    ) -> None:
        self.call, self.sequences, self.item, self.at = call, sequences, call.dtype.itemsize, at
        self.read = call.read if read is None else read
        # Arrays that the records name.
        self.kept: list[Array] = []
        self.records = np.empty((len(sequences), len(at)), np.int64)
        self.records[:] = np.frombuffer(template, np.int64)
        self._place_operands()
        self._place_terms()

    def keep(self, x: Array) -> int:
        """Keep an array alive and return its address."""
        self.kept.append(x)
        return address_of(x)

    def add(self, name: str, x: Any) -> None:
        """Move a field of every record by so much."""
        self.records[:, self.at[name]] += x

    def set(self, name: str, x: Any) -> None:
        """Set a field of every record."""
        self.records[:, self.at[name]] = x

    def _place_operands(self) -> None:
        """Lengths, and where operands and results begin."""
        call, s, f = self.call, self.sequences, self.call.fields
        assert self.read is not None
        q, k, v = self.read
        named = [("q", q, s.q_start), ("k", k, s.k_start), ("v", v, s.k_start)]
        if call.grad_out is not None:
            named.append(("grad_out", call.grad_out, s.q_start))
        for name, x, start in named:
            items = batch_offsets(x, len(call.site.batch))[s.item]
            self.add(name, items * x.itemsize + start * x.strides[-2])
        self.rows = s.item * (call.site.heads * q.shape[-2]) + s.q_start
        size = 2 if f["out_kind"] in KINDS.values() else self.item
        self.add("out", self.rows * (f["out_row"] * size))
        self.add("lse", self.rows * (self.item * bool(f["lse"])))
        self.add("skew_q", self.rows * (f["skew_depth"] * self.item))
        if f["ranges"]:
            # Pairs of integers of eight bytes.
            self.add("ranges", (s.item * f["ranges_batch"] + s.q_start * 2) * 8)
        for name in ("q_len", "k_len", "offset"):
            self.set(name, getattr(s, name))
        # One batch item each, whose arrays begin where the record says.
        self.batches = batches = np.zeros((len(s), len(BATCH_ROWS)), np.int64)
        batches[:, KEY_END] = s.k_len if s.k_end is None else s.k_end
        if call.problem.mask is not None:
            self._place_mask(call.problem.mask, batches)
        self.set("batches", self.keep(batches) + np.arange(len(s)) * batches.strides[0])

    def _place_mask(self, mask: Array, batches: Array) -> None:
        """Where the mask of all has that of each, and ranges of keys where these say the same."""
        call, s, windowed = self.call, self.sequences, self.windowed
        whole, same = np.zeros(len(s), np.bool_), mask.strides[-1] == 0
        if not windowed:
            begin, end, whole = masks.ranges_of_keys(call.problem, s)
            batches[:, KEY_BEGIN], batches[:, KEY_END] = begin, np.minimum(batches[:, KEY_END], end)
        elif same:
            # All columns are the same one, and a copy needs no more than the longest sequence has.
            mask = mask[..., : int(s.k_len.max())]
        mask = masks.set_mask(call, mask, windowed=windowed)
        row, column = (step // mask.itemsize for step in mask.strides[-2:])
        starts = s.q_start * row + s.k_start * (0 if same else column)
        batches[:, BATCH_MASK] = batch_offsets(mask, len(call.site.batch))[s.item] + starts
        for name in ("allowed", "soft"):
            self.set(name, np.where(whole, 0, call.fields[name]))
        for name in ("mask_head", "mask_row", "mask_col"):
            self.set(name, call.fields[name])

    @property
    def windowed(self) -> bool:
        """Whether the kernel for windows reads them."""
        return False

    def _place_terms(self) -> None:
        """Where biases, maps and turns of all have those of each sequence."""
        call, s, f = self.call, self.sequences, self.call.fields
        self.moved = call.site.offset - s.offset
        if f["bias_row"]:
            self.add("bias", self.moved * self.item)
        elif self.windowed:
            panel, longest = TARGET.panel(self.item), int(s.k_len.max())
            row = self.keep(_cut_off(call.dtype, longest, panel))
            self.set("bias", row + (longest - s.k_len) * self.item)
        if f["turn"]:
            self.add("q_turn", -self.moved * (2 * f["turn_pairs"] * self.item))
        self.add("skew_index", first_distance(call.problem, s) * 4 * bool(f["skew_depth"]))
        if call.adds is not None:
            self.place_table("adds", call.adds, "src")
        if call.values is not None:
            self.place_table("values", call.values)

    def place_table(self, name: str, table: Array, source: str = "") -> Array:
        """A table of gathered terms for each sequence: where its maps begin, and its rows of what they select."""
        s, own = self.sequences, np.repeat(table[None], len(self.sequences), axis=0)
        own["map_origin"] += self.moved[:, None]
        if source:
            starts = s.item[:, None] * own[source + "_batch"] + s.q_start[:, None] * own[source + "_row"]
            own[source] += (starts + s.k_start[:, None] * own[source + "_col"]) * self.item
        self.set(name, self.keep(own) + np.arange(len(s)) * own.strides[0])
        return own


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
        self.record = call.pack().ljust(len(self.fields) * 8, b"\0")


class _Group(Records):
    """Sequences that one kernel attends."""

    def __init__(
        self,
        template: _Template,
        sequences: Sequences,
        out: Array,
        lse: Array | None,
        read: tuple[Array, Array, Array] | None = None,
        scales: SequenceABC[Array] | None = None,
    ) -> None:
        self.template, self.kind, self.out, self.lse = template, template.kind, out, lse
        super().__init__(template.call, sequences, template.record, template.fields, read)
        if read is not None:
            self._move(read)
        decoding = self.kind == "decoding"
        self.pieces, self.flops, self.workspace = self._divide_keys() if decoding else self._divide_queries()
        self.set("stop", self.pieces)
        if sequences.pages is not None:
            self._place_pages(sequences.pages)
        scales = template.call.problem.scales if scales is None else scales
        if scales:
            self._place_scales(scales)

    def _move(self, read: tuple[Array, Array, Array]) -> None:
        """Let records name other operands and results than those of the template."""
        f, out, lse = self.template.call.fields, self.out, self.lse
        for name, x in zip("qkv", read, strict=True):
            self.add(name, address_of(x) - f[name])
            self.set(f"{name}_head", x.strides[-3] // x.itemsize)
            self.set(f"{name}_row", x.strides[-2] // x.itemsize)
        q_rows, k_rows = read[0].shape[-2], read[1].shape[-2]
        self.add("out", address_of(out) - f["out"])
        self.set("lse", 0 if lse is None else address_of(lse) + self.rows * self.item)
        for name, count in (
            ("q_rows", q_rows),
            ("k_rows", k_rows),
            ("out_head", q_rows * f["out_row"]),
            ("out_batch", f["heads"] * q_rows * f["out_row"]),
        ):
            self.set(name, count)

    def _place_pages(self, pages: Pages) -> None:
        """Where the table has the pages of each sequence. What is attended in blocks is copied to rows without gaps."""
        call, table = self.call, pages.table
        self.set("pages", self.keep(table) + self.sequences.item * table.strides[0])
        self.set("page_keys", pages.size)
        for name, step, depth in (("k", pages.k_step, call.fields["depth"]), ("v", pages.v_step, call.site.v_dim)):
            self.set(f"{name}_page", step)
            self.set(f"{name}_page_row", self.records[:, self.at[f"{name}_row"]])
            if self.kind == "blocks":
                self.set(f"{name}_row", depth)

    def _place_scales(self, scales: SequenceABC[Array]) -> None:
        """Where the scales of codes are."""
        assert self.read is not None
        s, heads = self.sequences, self.call.site.kv_heads
        fields, kept = scale_fields(scales, self.read[1:], self.call.dtype)
        self.kept += kept
        for name, x in fields.items():
            self.set(name, x)
        for name in ("k_scale", "v_scale"):
            head, row = (self.records[:, self.at[name + part]] for part in ("_head", "_row"))
            self.add(name, (s.item * heads * head + s.k_start * row) * self.item)

    @property
    def windowed(self) -> bool:
        """Whether it is the kernel for windows."""
        return self.kind == "windows"

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

    def _divide_keys(self) -> tuple[Int64, Array, int]:
        """The same of ranges of keys."""
        call, s, f = self.call, self.sequences, self.call.fields
        self.parts = key_parts(s.k_len)
        kv_heads = call.site.heads // f["k_group"]
        together = heads_together(call, kv_heads * int(self.parts.sum()))
        self.set("parts", self.parts)
        self.set("together", together)
        flops = 2.0 * call.site.heads * s.q_len * s.k_len * (f["depth"] + call.site.v_dim)
        pieces = -(-kv_heads // together) * self.parts
        workspace = decode_workspace(f["depth"], call.site.v_dim, f["turn"], self.item, together)
        return pieces, flops / SERIAL_DECODE_FLOPS, workspace

    def run(self, met: int) -> None:
        """Do all of it; `met`: where to say which kinds of rows there are, or 0."""
        self.set("ends", met)
        size = float(self.flops.sum())
        threads = 1 if size < 1.0 else min(self.call.threads, int(self.pieces.sum()))
        parts = self._partial() if self.kind == "decoding" else []
        serial = SERIAL_DECODE_FLOPS if self.kind == "decoding" else launcher.SERIAL_FLOPS
        most = threads * launcher.call_flops(self.item) / serial
        calls = in_calls(self.pieces, self.flops, self.records[:, self.at["run"]], most)
        launcher.run_linked(self.template.kernel, self.records, calls, threads, self.workspace, size)
        for rows, sums in parts:
            self._merge(rows, sums)

    def _partial(self) -> list[tuple[Array, Array]]:
        """For every number of parts the rows of sequences with several, and where these leave their sums."""
        s, site, found = self.sequences, self.call.site, []
        for parts in set(self.parts.tolist()) - {1}:
            which = np.flatnonzero(self.parts == parts)
            counts = site.heads * s.q_len[which]
            ends = np.cumsum(counts)
            sums = np.empty((int(ends[-1]), parts, 2 + site.v_dim), self.call.dtype)
            self.records[which, self.at["partial"]] = address_of(sums) + (ends - counts) * sums.strides[0]
            rows = [
                (np.arange(site.heads)[:, None] + item * site.heads) * self.out.shape[-2]
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
        merge(sums, out, lse, self.template.unit)
        self.out.reshape(-1, out.shape[-1])[rows] = out
        if self.lse is not None and lse is not None:
            self.lse.reshape(-1)[rows] = lse


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

    def run(
        self,
        operands: tuple[Array, Array, Array],
        sequences: Sequences | None,
        out: Array,
        lse: Array | None,
        vectors: SequenceABC[Array] = (),
        scales: SequenceABC[Array] = (),
    ) -> None:
        """Fill `out` and `lse`, both C-contiguous, where sequences stand as `sequences` says."""
        assert sequences is not None
        assert not vectors
        # They may have more rows or fewer than those that were planned with.
        q, k, v = (
            broadcast(x if x.ndim > 2 else x[None], (*own.shape[:-2], *x.shape[-2:]))
            for x, own in zip(operands, self.common.problem.stored, strict=True)
        )
        met, terms = ends.watch(), self.common.terms
        for way, own in _ways(self.common, sequences):
            template = self.templates.get(way)
            if template is None:
                common = Call(self._problem((q, k, v), sequences, scales), terms, self.threads, skewed=())
                _Group(_Template(common, way, out, lse, LOG2), own, out, lse).run(met)
            else:
                _Group(template, own, out, lse, (q, k, v), scales).run(met)
        if ends.met():
            ends.mend(attention, self._problem((q, k, v), sequences, scales), terms, out, lse, LOG2)

    def _problem(
        self, operands: tuple[Array, Array, Array], sequences: Sequences, scales: SequenceABC[Array]
    ) -> Problem:
        """The call of these operands."""
        q, k, v = operands
        problem, given = self.common.problem, tuple(scales) or None
        return replace(problem, stored_q=q, stored_k=k, stored_v=v, sequences=sequences, scales=given)


def prepare_sequences(problem: Problem, terms: Terms, dtype: np.dtype[Any]) -> PreparedSequences | None:
    """A call for which that can be done: it has work, reads operands where they are, and terms hand none of them on."""
    made = () if isinstance(terms.query, Turned) else terms.vectors()
    if made or terms.queries or terms.keys or terms.values or terms.biases or problem.mask is not None:
        return None
    if not problem.site.k_len or 0 in problem.out_shape or any(rowwise(x) is not x for x in problem.stored):
        return None
    found = PreparedSequences(problem, terms, dtype)
    return found if found.in_place else None
