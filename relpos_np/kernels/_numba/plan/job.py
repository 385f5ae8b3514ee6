"""A call of attention as work for a kernel: which kernel, its record, how many pieces on how many threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem, name_of
from relpos_np._contract.terms import Dense, Terms
from relpos_np.kernels._numba.forward_pass.attend import attend
from relpos_np.kernels._numba.forward_pass.decode import MOST_ROWS, PACK_DECODE, decode, merge
from relpos_np.kernels._numba.forward_pass.window import windows
from relpos_np.kernels._numba.forward_pass.work import OWN, pair_steps
from relpos_np.kernels._numba.launch import launcher
from relpos_np.kernels._numba.launch.arrays import address_of
from relpos_np.kernels._numba.launch.build import Kernel
from relpos_np.kernels._numba.launch.records import SCALE_FIELDS
from relpos_np.kernels._numba.plan import biases, ends
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.division import Division, into_blocks, into_parts
from relpos_np.kernels._numba.plan.fields import fill, readable, scale_fields
from relpos_np.kernels._numba.simd.target import ASKED, BLOCK_KEYS, PAIR_ROWS, TARGET, TILES, UNIT
from relpos_np.types import Array


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How the work of a call is divided, and the kernel that does it; `stored` is that of `fill`.

    `scales`: of keys and values that are codes, the fields in a record of decoding, which name the arrays in `kept`.
    """

    kernel: Kernel
    division: Division
    stored: bool
    windowed: bool = False
    scales: tuple[int, ...] = (0,) * len(SCALE_FIELDS)
    kept: Sequence[Array] = ()


def with_scales(plan: Plan, scales: Sequence[Array] | None, codes: Sequence[Array], dtype: np.dtype[Any]) -> Plan:
    """The plan of a call whose keys and values are codes with these scales."""
    if not scales:
        return plan
    fields, kept = scale_fields(scales, codes, dtype)
    return replace(plan, scales=tuple(fields.values()), kept=kept)


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
    """Fill `out` and `lse`, of a call that has queries, keys and values; lse in units of log 2, times `unit`.

    With `grad_out`, `out` (..., H, L_q) becomes the product of each row of the output with that of its gradient, and
    `lse` is two arrays: what the rounding of each sum has lost is the other. Rows near the ends of the dtype are
    `watched` for, and then right too unless there is a gradient.
    """
    plan, call = planned(problem, terms, out, lse, grad_out)
    call.fields["lse_unit"], call.fields["ends"] = unit, ends.watch() if watched else 0
    run_plan(plan, call.pack(), call.dtype, out, lse, unit)
    if watched and grad_out is None:
        ends.mend(attention, problem, terms, out, lse, unit)


def run_plan(plan: Plan, record: bytearray, dtype: np.dtype[Any], out: Array, lse: Array | None, unit: float) -> None:
    """Do the work that a record describes; `dtype` is that of the computation."""
    d, parts = plan.division, None
    if d.parts:
        if d.parts > 1:
            parts = np.empty((math.prod(out.shape[:-1]), d.parts, 2 + out.shape[-1]), dtype)
        record += PACK_DECODE(d.parts, 0 if parts is None else address_of(parts), d.together, *plan.scales)
    launcher.run_pieces(
        plan.kernel, record, d.pieces, d.chunk, d.threads, unit=d.unit, workspace=d.workspace, size=d.size
    )
    if parts is not None:
        ends.see(parts[..., 0].max(axis=1))
        merge(parts, out, lse, unit)


def planned(
    problem: Problem, terms: Terms, out: Array, lse: Array | None, grad_out: Array | None = None
) -> tuple[Plan, Call]:
    """The plan of a call, and its record with the arrays that it names."""
    call = Call(problem, terms, launcher.available_threads(), grad_out=grad_out)
    site = problem.site
    if grad_out is None and may_decode(call, site.q_len, bool(call.skewed)):
        kernel, stored = decoding(call, out, lse)
        return with_scales(Plan(kernel, into_parts(call), stored), problem.scales, problem.stored[1:], call.dtype), call
    windowed = bool(may_be_windowed(call, site.q_len, site.k_len, site.offset))
    kernel, stored = streaming(call, out, lse, windowed=windowed)
    return Plan(kernel, into_blocks(call, windowed=windowed), stored, windowed), call


def may_decode(call: Call, q_len: Any, skewed: Any) -> Any:
    """Whether there are so few queries for each key that packing the keys would not pay, for one call or arrays.

    `skewed`: query terms are multiplied tile by tile.
    """
    site, terms = call.site, call.terms
    heads = site.kv_heads if terms.key is None else terms.key.shape[-3]
    if heads != site.kv_heads or terms.values or call.problem.keep is not None:
        return np.logical_and(False, skewed)
    return (site.heads // max(heads, 1) * q_len <= MOST_ROWS) & np.logical_not(skewed)


def may_be_windowed(call: Call, q_len: Any, k_len: Any, offset: Any) -> Any:
    """Whether the kernel for windows does it, for one call or arrays of lengths.

    Keys must be few, and all of them for every query, and of biases there is one at most, which is fused.
    """
    site, problem, terms, item = call.site, call.problem, call.terms, call.dtype.itemsize
    lanes = TARGET.lanes(item)
    grids = any(isinstance(term.index, Dense) for term in terms.tables)
    fits = (k_len <= BLOCK_KEYS) & (q_len >= max(TARGET.least_rows(site.v_dim // lanes), PAIR_ROWS))
    # The last query must reach the first key, and the first query the last key.
    fits = fits & (q_len - 1 + offset <= problem.left) & (k_len - 1 - offset <= problem.right)
    # A bias of every pair is gathered.
    fits = fits & ((not grids) | (site.heads * q_len * k_len * item <= biases.GATHER_BYTES // 2))
    # A mask of keys alone becomes a range of keys. The lengths decide, never the strides: layouts change no bits.
    fits = fits & ((problem.mask is None) | ((q_len > 1) & (k_len > 1)))
    return fits & (k_len > 0) & _may_be_windowed(problem, terms, lanes)


def _may_be_windowed(problem: Problem, terms: Terms, lanes: int) -> bool:
    """What lengths do not decide of it."""
    if terms.queries or terms.keys or terms.values or terms.biases or problem.keep is not None:
        return False
    if problem.softcap or problem.ranges is not None or problem.step > 1:
        return False
    if problem.site.v_dim % lanes or problem.key_lengths is not None:
        return False
    # One bias serves all batch items: maps that differ between them are gathered, which its kernel does not do.
    return not any(isinstance(term.index, Dense) and term.index.index.ndim > 2 for term in terms.tables)


def in_pairs(problem: Problem, terms: Terms) -> bool:
    """Whether products are made of pairs of bfloat16: where queries and keys are stored so, or if it is allowed."""
    if UNIT == "none" or problem.site.dtype.itemsize != 4:
        return False
    # What a scheme has made of queries or keys, by turning them too, would be rounded once more, and with it the
    # log-sum-exp.
    stored = name_of(problem.stored_q.dtype) == "bfloat16" and terms.query is None and terms.key is None
    return problem.precision == "medium" or (stored and problem.precision is None)


def planes_of(problem: Problem, terms: Terms) -> int:
    """Planes of bfloat16 in which matrix tiles multiply float32: as many as the precision needs, or 0 for none."""
    if UNIT not in TILES or problem.site.dtype.itemsize != 4 or in_pairs(problem, terms):
        return 0
    if problem.precision == "high":
        return 2
    return 3 if ASKED or UNIT == "emulated tiles" else 0


def streaming(call: Call, out: Array, lse: Array | None, *, windowed: bool) -> tuple[Kernel, bool]:
    """The kernel of blocks of queries, or of whole windows, for which the record is filled; `Plan.stored`."""
    assert call.problem.scales is None  # `Call.reads_in_place` has seen to it
    stored, f = readable(call.problem), call.fields
    fill(call, out, lse, stored=stored, windowed=windowed)
    name = name_of(call.dtype)
    if in_pairs(call.problem, call.terms):
        name, f["steps"] = "bfloat16", pair_steps.py_func(f["depth"])
    elif not windowed and call.grad_out is None:
        # Gradients are of the scores that their own kernel makes, of products of float32.
        f["planes"] = planes_of(call.problem, call.terms)
        name = "planes" if f["planes"] else name
    if windowed:
        # Where it makes results that are rounded, and a panel of a bias that ends behind the last key.
        panel = TARGET.panel(call.dtype.itemsize) if f["bias_row"] < 0 else 0
        f["bins"] = max(call.site.v_dim if f["out_kind"] != OWN else 0, panel)
    return (windows if windowed else attend)[name], stored


def decoding(call: Call, out: Array, lse: Array | None) -> tuple[Kernel, bool]:
    """The same of the kernel that reads keys and values once, in half precision if they are stored so and it can."""
    problem, dtype = call.problem, call.dtype
    if problem.scales is not None:
        fill(call, out, lse, stored=True)
        return decode[name_of(problem.stored_k.dtype)], True
    kernel, stores = decode[name_of(dtype)], False
    stored = problem.stored_k.dtype
    # Terms that were made of the keys hold them in the dtype of the computation.
    made = isinstance(call.terms.key, np.ndarray)
    if stored is not dtype and stored == problem.stored_v.dtype != dtype and not made:
        stores = name_of(stored) in decode
        kernel = decode.get(name_of(stored), kernel)
    fill(call, out, lse, stored=stores)
    return kernel, stores
