"""A backward pass as work for its kernel: the record, how the work is divided, and the calls of the kernel."""

from __future__ import annotations

import math
import struct
from itertools import product

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.terms import Terms
from relpos_np.kernels._numba.backward_pass.kernel import back_layout, backward
from relpos_np.kernels._numba.forward_pass.work import OWN, pair_steps
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of, aligned, rowwise
from relpos_np.kernels._numba.launch.records import ADD, BACKWARD, SINK, table
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.fields import KINDS, fill, readable
from relpos_np.kernels._numba.plan.gather import query_add
from relpos_np.kernels._numba.plan.gradients import Sums
from relpos_np.kernels._numba.plan.job import in_pairs
from relpos_np.kernels._numba.simd.target import BLOCK_KEYS, CONVERTS_HALF, ROW_QUANTUM, TARGET, require_multiple
from relpos_np.types import Array

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

_EMPTY = dict.fromkeys(BACKWARD.names or (), 0)
_PACK = struct.Struct(f"<{len(_EMPTY)}q").pack


def part_count(heads: int, threads: int) -> int:
    """Ranges of queries, and of keys, that each head is divided into; 1 if there are heads enough for all threads."""
    return 1 if heads >= 2 * threads else -(-PIECES * threads // heads)


def group_of(problem: Problem, terms: Terms, threads: int) -> int:
    """Heads of queries whose piece of work is one, because they share keys and values; else they add these up later."""
    site, count = problem.site, math.prod(problem.batch)
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
    `grad_out`; `stored` is that of `backward`.
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
    ) -> None:
        self.call = call = Call(problem, terms, launcher.available_threads(), grad_out=grad_out)
        fill(call, delta, lse, stored=readable(problem))
        call.fields["cap_slopes"] = int(problem.softcap > 0)
        self.grad_out, self.paired = grad_out, in_pairs(problem, terms)
        self.kernel = backward["bfloat16" if self.paired else problem.site.dtype.name]
        self.delta = delta if grad_lse is None else np.ascontiguousarray(delta - grad_lse)
        self.extra, self.group = _EMPTY.copy(), group_of(problem, terms, call.threads)
        self.sums = Sums(call, self._divide(), self.group, stored=stored)
        self.pieces = self.sums.tasks // self.group + (0 if self.extra["parts"] == 1 else self.sums.tasks)
        self._fill()

    def _divide(self) -> int:
        """Set the fields that divide the work; the number of parts."""
        site, e, call = self.call.site, self.extra, self.call
        block = min(BLOCK_QUERIES, -(-site.q_len // ROW_QUANTUM) * ROW_QUANTUM)
        parts = part_count(call.count * site.heads // self.group, call.threads)
        e["query_step"] = -(-site.q_len // (parts * block)) * block
        e["key_step"] = -(-site.k_len // (parts * BLOCK_KEYS)) * BLOCK_KEYS
        if parts > 1:
            parts = max(-(-site.q_len // e["query_step"]), -(-site.k_len // e["key_step"]))
        call.fields["block_queries"], call.fields["blocks"] = block, 1
        e["parts"], e["cuts"], e["group"], e["stop_head"] = parts, 1, self.group, self.group
        return parts

    def _fill(self) -> None:
        """Set the fields that name arrays."""
        call, sums, e = self.call, self.sums, self.extra
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
        if sums.sinks:
            e["sinks"] = call.keep(table(SINK, sums.sinks))
        if dp_adds:
            e["dp_adds"] = call.keep(table(ADD, dp_adds))

    def pack(self) -> bytearray:
        """The record's bytes."""
        return self.call.pack() + _PACK(*self.extra.values())

    def run(self) -> None:
        """Fill the sums."""
        call, site, f, e, item = self.call, self.call.site, self.call.fields, self.extra, self.call.dtype.itemsize
        span = e["query_step"] if e["parts"] > 1 else site.q_len
        lanes, skew = TARGET.lanes(item), f["skew_depth"]
        steps = [pair_steps.py_func(n) if self.paired else 0 for n in (f["depth"], site.v_dim)]
        sizes = f["depth"], site.v_dim, skew, f["cap_slopes"], lanes, *steps
        size = back_layout.py_func(f["block_queries"], span, site.q_len, site.k_len, *sizes).end * item
        pairs = call.count * site.heads * site.q_len * site.k_len
        flops = 2.0 * pairs * (3 * f["depth"] + 2 * site.v_dim + 3 * skew)
        threads = 1 if flops < launcher.SERIAL_FLOPS else min(call.threads, self.pieces)
        most, per_pair = launcher.call_flops(item), flops / pairs + SOFT_FLOPS
        cost = per_pair * call.count * site.heads * (site.q_len + PACKED) * site.k_len
        # A range of queries meets all keys, and one of keys all queries.
        queries, keys = min(span, site.q_len), min(e["key_step"], site.k_len)
        largest = per_pair * max((queries + PACKED) * site.k_len, (site.q_len + PACKED) * keys)
        if max(cost / self.pieces, self.group * largest) > most:
            self._run_cuts(size, cost / most, largest / most, threads)
            return
        largest *= self.group
        # As many as take that long if each were as long as the largest.
        chunk = int(threads * most / largest)
        work = flops / launcher.SERIAL_FLOPS
        launcher.run_pieces(self.kernel, self.pack(), self.pieces, chunk, threads, workspace=size, size=work)

    def _run_cuts(self, size: int, calls: float, least: float, threads: int) -> None:
        """Cut pieces of work that take long by their keys; each has a workspace, where its sums wait between calls.

        `calls`: as many as all pieces would take one thread; `least`: as many as the largest does.
        """
        call, f, e, pieces = self.call, self.call.fields, self.extra, self.pieces
        # Pieces of one head take as long as one another; its ranges do not, so that several per thread are under way.
        chunk, most = threads if e["parts"] == 1 else MOST_CUT * threads, max(2, -(-call.site.k_len // BLOCK_KEYS))
        # With few keys there are few cuts, and then fewer pieces in each call.
        chunk = min(chunk, max(int(most * pieces * self.group / max(calls, 1)), 1) * threads, pieces)
        stride = -(-size // 64) * 64
        # Memory of their own: whoever calls from a signal's handler in between would use the thread's.
        memory = aligned((chunk * stride // call.dtype.itemsize,), call.dtype, None)
        f["work"], f["work_stride"] = address_of(memory), stride
        cuts = -(-int(calls * chunk) // (pieces * threads * self.group))
        e["cuts"] = min(max(2, cuts, math.ceil(least)), most)
        for start in range(0, pieces, chunk):
            e["origin"] = start
            for head, cut in product(range(self.group), range(e["cuts"])):
                e["first_head"], e["stop_head"], e["cut"] = head, head + 1, cut
                f["counter"], f["stop"] = start, min(start + chunk, pieces)
                launcher.run(self.kernel, self.pack(), threads)

    def gradients(self) -> tuple[Terms, Array]:
        """Gradients of the terms and of v."""
        return self.sums.gradients(self.grad_out)
