"""A record for each of many sequences: what it would have in a call of its own, so that it gets the same bits.

Records differ in little but addresses and lengths. Each of these is a sum: what it is for a sequence of zeros, and the
numbers of the sequence, each times a factor. So one product of matrices fills the records of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from functools import cache
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import NUMBERS, Pages, Sequences
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets, batch_step
from relpos_np.kernels._numba.launch.records import BATCH_MASK, BATCH_ROWS, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.plan import masks
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.fields import KINDS, scale_fields
from relpos_np.kernels._numba.simd.target import TARGET
from relpos_np.types import Array, Int64

# Queries, keys and values as a kernel reads them.
Operands = tuple[Array, Array, Array]


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


class Layout:
    """How records follow from the numbers of their sequences, for operands of some strides.

    `start`: what all have in common, which is the record of a sequence of zeros but for addresses of operands. `at`:
    where its fields are. `has_lse`: whether log-sum-exps are written.
    """

    def __init__(
        self,
        call: Call,
        start: Int64,
        at: dict[str, int],
        read: Operands,
        pages: Pages | None,
        *,
        kind: str,
        has_lse: bool,
    ) -> None:
        self.call, self.start, self.at, self.kind = call, start.copy(), at, kind
        self._factors: dict[str, list[int]] = {}
        # Operands whose items do not lie at equal distances.
        self.uneven: list[str] = []
        self._place_operands(read, has_pages=pages is not None)
        self._place_results(read[0].shape[-2], has_lse=has_lse)
        self._place_terms()
        if pages is not None:
            self._place_pages(pages)
        self._columns = np.array([at[name] for name in self._factors])
        self._matrix = np.array([*self._factors.values()]).T

    def _set(self, name: str, value: int) -> None:
        self.start[self.at[name]] = value

    def _vary(self, name: str, **factors: int) -> None:
        """What the numbers of a sequence add to a field, each so many times."""
        self._factors[name] = [factors.get(number, 0) for number in NUMBERS]

    def _place_operands(self, read: Operands, *, has_pages: bool) -> None:
        """Lengths, and where operands begin."""
        call, (q, k, v) = self.call, read
        self._set("q_rows", q.shape[-2])
        self._set("k_rows", k.shape[-2])
        for name in ("q_len", "k_len", "offset"):
            self._set(name, 0)
            self._vary(name, **{name: 1})
        named = [("q", q, "q_start"), ("k", k, "k_start"), ("v", v, "k_start")]
        for name, x, _ in named:
            self._set(f"{name}_head", x.strides[-3] // x.itemsize)
            self._set(f"{name}_row", x.strides[-2] // x.itemsize)
        if call.grad_out is not None:
            named.append(("grad_out", call.grad_out, "q_start"))
        for name, x, start in named:
            # All items share the pages.
            step = 0 if has_pages and name in "kv" else batch_step(x, len(call.site.batch))
            if step is None:
                self.uneven.append(name)
            self._vary(name, item=step or 0, **{start: x.strides[-2]})

    def _place_results(self, q_rows: int, *, has_lse: bool) -> None:
        """Where results begin, and what else has rows as they do."""
        f, item, heads = self.call.fields, self.call.dtype.itemsize, self.call.site.heads
        width, size = f["out_row"], 2 if f["out_kind"] in KINDS.values() else item
        self._set("out_head", q_rows * width)
        self._set("out_batch", heads * q_rows * width)
        rows = {"out": width * size, "lse": item * has_lse, "skew_q": f["skew_depth"] * item}
        for name, row in rows.items():
            if row:
                self._vary(name, item=heads * q_rows * row, q_start=row)
        if f["ranges"]:
            # Pairs of integers of eight bytes.
            self._vary("ranges", item=f["ranges_batch"] * 8, q_start=2 * 8)

    def _place_terms(self) -> None:
        """Where biases, maps and turns of all have those of a sequence."""
        f, site, item = self.call.fields, self.call.site, self.call.dtype.itemsize
        if f["bias_row"]:
            self._by_position("bias", item)
        elif self.kind == "windows":
            self._vary("bias", k_len=-item)
        if f["turn"]:
            self._by_position("q_turn", -2 * f["turn_pairs"] * item)
        if f["skew_depth"]:
            self._by_position("skew_index", 4)
            self.start[self.at["skew_index"]] += site.q_len * 4
            self._factors["skew_index"][NUMBERS.index("q_len")] = -4

    def _by_position(self, name: str, step: int) -> None:
        """A field that is so much further for each position that a sequence begins earlier."""
        self.start[self.at[name]] += self.call.site.offset * step
        self._vary(name, offset=-step)

    def _place_pages(self, pages: Pages) -> None:
        """What is attended in blocks is copied to rows without gaps."""
        call = self.call
        self._vary("pages", item=pages.table.strides[0])
        self._set("page_keys", pages.size)
        for name, step, depth in (("k", pages.k_step, call.fields["depth"]), ("v", pages.v_step, call.site.v_dim)):
            self._set(f"{name}_page", step)
            self._set(f"{name}_page_row", int(self.start[self.at[f"{name}_row"]]))
            if self.kind == "blocks":
                self._set(f"{name}_row", depth)

    def records(self, sequences: Sequences, addresses: dict[str, int]) -> Int64:
        """The records of sequences whose operands and results lie there."""
        start = self.start.copy()
        start[[self.at[name] for name in addresses]] = list(addresses.values())
        found = np.empty((len(sequences), len(start)), np.int64)
        found[:] = start
        found[:, self._columns] += sequences.numbers.T @ self._matrix
        return found


def _addresses(read: Operands, out: Array | None, lse: Array | None) -> dict[str, int]:
    """Where operands and results lie."""
    found = {name: address_of(x) for name, x in zip("qkv", read, strict=True)}
    if out is not None:
        found["out"], found["lse"] = address_of(out), 0 if lse is None else address_of(lse)
    return found


class Records:
    """A record for each sequence, and the arrays that these name.

    `read`: queries, keys and values. `out`, `lse`: results; of a gradient, what `BackwardJob` has of them is named by
    the layout.
    """

    def __init__(
        self, layout: Layout, sequences: Sequences, read: Operands, out: Array | None = None, lse: Array | None = None
    ) -> None:
        self.layout, self.call, self.sequences = layout, layout.call, sequences
        self.at, self.item, self.q_rows = layout.at, self.call.dtype.itemsize, read[0].shape[-2]
        self.kept: list[Array] = []
        # One batch item each, whose arrays begin where the record says.
        self.batches = np.zeros((len(sequences), len(BATCH_ROWS)), np.int64)
        self.batches[:, KEY_END] = sequences.k_end
        self._named = _addresses(read, out, lse)
        self.records = layout.records(sequences, self._named | self._of_all())
        self._place_each("batches", self.batches)
        for name in layout.uneven:
            x = self.call.grad_out if name == "grad_out" else read["qkv".index(name)]
            assert x is not None
            self.add(name, batch_offsets(x, len(self.call.site.batch))[sequences.item] * x.itemsize)
        if self.call.problem.mask is not None:
            self._place_mask(self.call.problem.mask)
        if self.call.adds is not None:
            self.place_table("adds", self.call.adds, "src")
        if self.call.values is not None:
            self.place_table("values", self.call.values)

    def _of_all(self) -> dict[str, int]:
        """Where that lies which all sequences share, and calls of one layout do not."""
        found = {}
        if self.sequences.pages is not None:
            found["pages"] = self.keep(self.sequences.pages.table)
        if self.windowed and not self.call.fields["bias_row"]:
            longest = int(self.sequences.k_len.max())
            row = self.keep(_cut_off(self.call.dtype, longest, TARGET.panel(self.item)))
            found["bias"] = row + longest * self.item
        return found

    def move(self, read: Operands, out: Array, lse: Array | None) -> None:
        """Name other operands and results, which lie as those do that were named."""
        now = _addresses(read, out, lse)
        for name, address in now.items():
            self.add(name, address - self._named[name])
        self._named = now

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

    @property
    def windowed(self) -> bool:
        """Whether the kernel for windows reads them."""
        return self.layout.kind == "windows"

    @property
    def rows(self) -> Int64:
        """The first row of each sequence among those of all heads and items."""
        s = self.sequences
        found: Int64 = s.item * (self.call.site.heads * self.q_rows) + s.q_start
        return found

    def _place_each(self, name: str, x: Array) -> None:
        """Each sequence has one of these."""
        self.set(name, self.keep(x) + np.arange(len(x)) * x.strides[0])

    def _place_mask(self, mask: Array) -> None:
        """Where the mask of all has that of each, and ranges of keys where these say the same."""
        call, s, windowed, batches = self.call, self.sequences, self.windowed, self.batches
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

    def place_table(self, name: str, table: Array, source: str = "") -> Array:
        """A table of gathered terms for each sequence: where its maps begin, and its rows of what they select."""
        s, own = self.sequences, np.repeat(table[None], len(self.sequences), axis=0)
        own["map_origin"] += (self.call.site.offset - s.offset)[:, None]
        if source:
            starts = s.item[:, None] * own[source + "_batch"] + s.q_start[:, None] * own[source + "_row"]
            own[source] += (starts + s.k_start[:, None] * own[source + "_col"]) * self.item
        self._place_each(name, own)
        return own

    def place_scales(self, scales: SequenceABC[Array], codes: SequenceABC[Array]) -> list[Array]:
        """Where the scales of keys and values are, in the order of items and heads: what must be kept until it ran."""
        s, heads, in_pages = self.sequences, self.call.site.kv_heads, self.sequences.pages is not None
        fields, kept = scale_fields(scales, codes, self.call.dtype, in_pages=in_pages)
        for name, x in fields.items():
            self.set(name, x)
        if not in_pages:
            for name in ("k_scale", "v_scale"):
                head, row = fields[f"{name}_head"], fields[f"{name}_row"]
                self.add(name, (s.item * heads * head + s.k_start * row) * self.item)
        return kept
