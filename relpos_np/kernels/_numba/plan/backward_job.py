"""A backward pass as work for its kernel: the record, how the work is divided, and the calls of the kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import product

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import QueryTerm, Terms
from relpos_np.kernels._numba.backward_pass.kernel import back_layout, backward
from relpos_np.kernels._numba.forward_pass.work import OWN, pair_steps
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, aligned, rowwise
from relpos_np.kernels._numba.launch.records import ADD, BACKWARD, CALL, SINK, places, table
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.fields import KINDS, fill, readable
from relpos_np.kernels._numba.plan.gather import query_add
from relpos_np.kernels._numba.plan.gradients import Sums
from relpos_np.kernels._numba.plan.job import in_pairs
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, CONVERTS_HALF, ROW_QUANTUM, TARGET, require_multiple
from relpos_np.types import Array, Int64

# Queries of one tile: two tiles of scores, their operands and their gradients together fill the cache.
BLOCK_QUERIES = 96
require_multiple("BLOCK_QUERIES", BLOCK_QUERIES, ROW_QUANTUM, "rows that blocks are padded to")
# Pieces of work per thread where one per head would leave threads without any.
PIECES = 4
# Pieces per thread that are under way at once where they are cut.
MOST_CUT = 4
# Operations of the softmax and its slopes for each pair; and how many queries of a block take as long as the block's
# keys and values do to be packed and their gradients to be added.
SOFT_FLOPS, PACKED = 80.0, 64

# Where fields of a record are, in integers.
AT = places(CALL, BACKWARD)
_EMPTY = dict.fromkeys(BACKWARD.names or (), 0)
_PACK = struct.Struct(f"<{len(_EMPTY)}q").pack


def part_count(heads: int, threads: int) -> int:
    """Ranges of queries, and of keys, that each head is divided into; 1 if there are heads enough for all threads."""
    return 1 if heads >= 2 * threads else -(-PIECES * threads // heads)


def group_of(problem: Problem, terms: Terms, threads: int) -> int:
    """Heads of queries whose piece of work is one, because they share keys and values; else they add these up later."""
    site = problem.site
    count = math.prod(problem.batch) if problem.sequences is None else len(problem.sequences)
    keys = site.kv_heads if terms.key is None else terms.key.shape[-3]
    group = site.heads // site.kv_heads if keys == site.kv_heads else 1
    # Ranges of queries and of keys, where there are too few heads of either, score every pair twice.
    return 1 if count * site.kv_heads < 2 * threads <= count * site.heads else group


def readable_gradient(problem: Problem, terms: Terms, grad_out: Array) -> Array:
    """The gradient of the output as kernels read it, in half precision if it is stored so and no term multiplies it."""
    own = problem.site.dtype
    reads = own.itemsize == 4 and not terms.values and (CONVERTS_HALF or grad_out.dtype.name != "float16")
    if not (reads and grad_out.dtype.name in KINDS):
        grad_out = grad_out.astype(own, copy=False)
    return rowwise(np.broadcast_to(grad_out, problem.out_shape))


class BackwardJob:
    """One backward pass.

    Of the forward pass are `lse`, in units of log 2, and `delta`, the product of each row of the output with that of
    `grad_out`; `stored` is that of `backward`, and `skewed` that of `Call`.
    """

    def __init__(
        self,
        problem: Problem,
        terms: Terms,
        lse: Array,
        delta: Array,
        grad_out: Array,
        grad_lse: Array | None,
        *,
        stored: bool,
        skewed: Sequence[QueryTerm] | None = None,
    ) -> None:
        self.call = call = Call(problem, terms, launcher.available_threads(), grad_out, skewed)
        fill(call, delta, lse, stored=readable(problem))
        call.fields["cap_slopes"] = int(problem.softcap > 0)
        self.grad_out, self.paired = grad_out, in_pairs(problem, terms)
        self.kernel = backward["bfloat16" if self.paired else problem.site.dtype.name]
        self.delta = delta if grad_lse is None else np.ascontiguousarray(delta - grad_lse)
        self.extra, self.group = _EMPTY.copy(), group_of(problem, terms, call.threads)
        self.sums = self._sums(stored=stored)
        self.gathered = self._fill()

    def _sums(self, *, stored: bool) -> Sums:
        """Divide the work, and allocate what it fills."""
        return Sums(self.call, self._divide(), self.group, stored=stored)

    def _divide(self) -> int:
        """Set the fields that divide the work; the number of parts."""
        site, e, call = self.call.site, self.extra, self.call
        block = min(BLOCK_QUERIES, -(-site.q_len // ROW_QUANTUM) * ROW_QUANTUM)
        parts = part_count(call.count * site.heads // self.group, call.threads)
        e["query_step"] = -(-site.q_len // (parts * block)) * block
        e["key_step"] = -(-site.k_len // (parts * BLOCK_KEYS)) * BLOCK_KEYS
        if parts > 1:
            parts = max(-(-site.q_len // e["query_step"]), -(-site.k_len // e["key_step"]))
        call.fields["block_queries"], call.fields["blocks"], e["parts"] = block, 1, parts
        return parts

    def _fill(self) -> dict[str, Array]:
        """Set the fields that name arrays; the tables of gathered terms among these."""
        call, sums, e = self.call, self.sums, self.extra
        e["cuts"], e["group"], e["stop_head"] = 1, self.group, self.group
        e["delta"] = call.keep(self.delta)
        for name in ("dq", "dk", "dv", "diag", "diag_low", "dense", "skew_dq", "skew_dw", "skew_dw_low"):
            x = getattr(sums, name)
            e[name] = call.keep(x) if x.size else 0
            if name + "_kind" in e:
                e[name + "_kind"] = KINDS.get(x.dtype.name, OWN)
        if sums.diag.size:
            e["diag_task"] = sums.diag.shape[1]
        if sums.skew_dw.size:
            e["skew_dw_task"] = sums.skew_dw[0].size
        dp_adds = [query_add(call, self.grad_out, t.weights, t.index, 1.0) for t in call.terms.values]
        e["sink_count"], e["dp_add_count"] = len(sums.sinks), len(dp_adds)
        gathered = {}
        if sums.sinks:
            gathered["sinks"] = table(SINK, sums.sinks)
        if dp_adds:
            gathered["dp_adds"] = table(ADD, dp_adds)
        for name, own in gathered.items():
            e[name] = call.keep(own)
        return gathered

    def pack(self) -> bytearray:
        """The record's bytes."""
        return self.call.pack() + _PACK(*self.extra.values())

    @property
    def per_pair(self) -> float:
        """Operations for each pair of query and key that are products."""
        f = self.call.fields
        return 2.0 * float(3 * f["depth"] + 2 * self.call.site.v_dim + 3 * f["skew_depth"])

    def workspace(self, block: int, span: int, q_len: int, k_len: int) -> int:
        """Bytes of a workspace for blocks of so many queries, and ranges of at most `span`."""
        f, item, v_dim = self.call.fields, self.call.dtype.itemsize, self.call.site.v_dim
        steps = [pair_steps.py_func(n) if self.paired else 0 for n in (f["depth"], v_dim)]
        sizes = f["depth"], v_dim, f["skew_depth"], f["cap_slopes"], TARGET.lanes(item), *steps
        size: int = back_layout.py_func(block, span, q_len, k_len, *sizes).end * item
        return size

    def run(self) -> None:
        """Fill the sums."""
        call, site, e = self.call, self.call.site, self.extra
        span = e["query_step"] if e["parts"] > 1 else site.q_len
        size = self.workspace(call.fields["block_queries"], span, site.q_len, site.k_len)
        pieces = self.sums.tasks // self.group + (0 if e["parts"] == 1 else self.sums.tasks)
        flops = self.per_pair * call.count * site.heads * site.q_len * site.k_len
        threads = 1 if flops < launcher.SERIAL_FLOPS else min(call.threads, pieces)
        most, per_pair = launcher.call_flops(call.dtype.itemsize), self.per_pair + SOFT_FLOPS
        cost = per_pair * call.count * site.heads * (site.q_len + PACKED) * site.k_len
        # A range of queries meets all keys, and one of keys all queries.
        queries, keys = min(span, site.q_len), min(e["key_step"], site.k_len)
        largest = per_pair * max((queries + PACKED) * site.k_len, (site.q_len + PACKED) * keys)
        if max(cost / pieces, self.group * largest) > most:
            self.run_cuts(np.frombuffer(self.pack(), np.int64), pieces, size, cost / most, largest / most, threads)
            return
        largest *= self.group
        # As many as take that long if each were as long as the largest.
        chunk = int(threads * most / largest)
        work = flops / launcher.SERIAL_FLOPS
        launcher.run_pieces(self.kernel, self.pack(), pieces, chunk, threads, workspace=size, size=work)

    def run_cuts(self, record: Int64, pieces: int, size: int, calls: float, least: float, threads: int) -> None:
        """Cut pieces of work that take long by their keys; each has a workspace, where its sums wait between calls.

        `calls`: as many as all pieces would take one thread; `least`: as many as the largest does.
        """
        parts, most = int(record[AT["parts"]]), max(2, -(-int(record[AT["k_len"]]) // BLOCK_KEYS))
        # Pieces of one head take as long as one another; its ranges do not, so that several per thread are under way.
        chunk = threads if parts == 1 else MOST_CUT * threads
        # With few keys there are few cuts, and then fewer pieces in each call.
        chunk = min(chunk, max(int(most * pieces * self.group / max(calls, 1)), 1) * threads, pieces)
        stride = -(-size // 64) * 64
        # Memory of their own: whoever calls from a signal's handler in between would use the thread's.
        memory = aligned((chunk * stride // self.call.dtype.itemsize,), self.call.dtype, None)
        record[AT["work"]], record[AT["work_stride"]] = address_of(memory), stride
        cuts = -(-int(calls * chunk) // (pieces * threads * self.group))
        record[AT["cuts"]] = cuts = min(max(2, cuts, math.ceil(least)), most)
        for start in range(0, pieces, chunk):
            record[AT["origin"]] = start
            for head, cut in product(range(self.group), range(cuts)):
                record[AT["first_head"]], record[AT["stop_head"]], record[AT["cut"]] = head, head + 1, cut
                record[AT["counter"]], record[AT["stop"]] = start, min(start + chunk, pieces)
                launcher.run(self.kernel, record.data, threads)

    def gradients(self) -> tuple[Terms, Array]:
        """Gradients of the terms and of v."""
        return self.sums.gradients(self.grad_out)
