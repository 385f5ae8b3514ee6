"""The record of a call, field by field, except how its work is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relpos_np._contract.problem import Problem, name_of
from relpos_np.kernels._numba.forward_pass.work import BRAIN, CODE, DELTA, HALF, LOG2E, OWN
from relpos_np.kernels._numba.launch.arrays import address_of, batch_offsets, strides
from relpos_np.kernels._numba.launch.records import ADD, BATCH_GRAD, BATCH_ROWS, SCALE_FIELDS, VALUE, table
from relpos_np.kernels._numba.plan.biases import fuse_tables
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.kernels._numba.plan.gather import key_add, query_add, table_add, value_records
from relpos_np.kernels._numba.plan.masks import add_masks
from relpos_np.kernels._numba.plan.skew import add_skewed
from relpos_np.kernels._numba.simd.target import CONVERTS_HALF
from relpos_np.kernels._numba.simd.vectors import CODE_BITS, CODE_UNITS
from relpos_np.types import Array

KINDS = {"float16": HALF, "bfloat16": BRAIN, **dict.fromkeys(CODE_BITS, CODE)}


def readable(problem: Problem) -> bool:
    """Whether kernels read the operands as they are stored."""
    stored = (problem.stored_q, problem.stored_k, problem.stored_v)
    return CONVERTS_HALF or all(name_of(x.dtype) != "float16" for x in stored)


def fill(call: Call, out: Array, lse: Array | None, *, stored: bool, windowed: bool = False) -> None:
    """Set every field of a call's record but those that divide the work.

    `out` and `lse` are C-contiguous; with a gradient of the output, `out` has a number for each of its rows, and `lse`
    is two arrays: the second has what the rounding of the first has lost. `stored`:
    operands are read in half precision, if they are stored so. `windowed`: the kernel for windows will run.
    """
    problem, site, f, count = call.problem, call.site, call.fields, call.count
    batches = np.zeros((len(BATCH_ROWS), count), np.int64)
    f["batches"], f["count"] = call.keep(batches), count
    operands = call.operands(out, lse, stored=stored)
    for name, x in zip(("q", "k", "v", "out"), (*operands, out), strict=True):
        f[name + "_kind"] = KINDS.get(name_of(x.dtype), OWN)
    for row, (name, x) in enumerate(zip("qkv", operands, strict=True)):
        f[name + "_head"], f[name + "_row"] = x.strides[-3] // x.itemsize, x.strides[-2] // x.itemsize
        if count > 1:
            batches[row] = batch_offsets(x, len(site.batch))
    if call.grad_out is not None and lse is not None:
        _add_gradient(call, call.grad_out, batches)
        f["lse_low"] = lse.size // 2
    width = site.v_dim if call.grad_out is None else 1
    f["q_rows"], f["k_rows"] = operands[0].shape[-2], operands[1].shape[-2]
    f["out_batch"], f["out_head"], f["out_row"] = site.heads * f["q_rows"] * width, f["q_rows"] * width, width
    f["heads"], f["v_group"] = site.heads, site.heads // max(site.kv_heads, 1)
    f["k_group"] = site.heads // max(operands[1].shape[-3], 1)
    f["q_len"], f["k_len"], f["depth"], f["v_depth"] = site.q_len, site.k_len, operands[0].shape[-1], site.v_dim
    f["steps"] = f["depth"]
    f["offset"], f["left"], f["right"] = site.offset, problem.left, problem.right
    f["scale"] = site.scale * LOG2E
    if problem.softcap:
        f["cap"], f["cap_inverse"] = problem.softcap * LOG2E, 1 / (problem.softcap * LOG2E)
        f["cap_content"] = int(problem.cap_content)
    if problem.keep is not None:
        f["keep"], f["keep_scale"] = call.keep(problem.keep), problem.keep_scale
    add_masks(call, batches, windowed=windowed)
    _add_gathered(call, windowed=windowed)


def scale_fields(
    scales: Sequence[Array], codes: Sequence[Array], dtype: np.dtype[Any], *, in_pages: bool = False
) -> tuple[dict[str, int], list[Array]]:
    """The fields of a record of decoding that say where the scales of keys and values lie, and the arrays they name.

    Scales `in_pages` are (pages, H_kv, P, 1) of keys, (1, H_kv, 1, D) of channels.
    """
    found, kept = dict.fromkeys(SCALE_FIELDS, 0), []
    for name, scale, x in zip(("k_scale", "v_scale"), scales, codes, strict=True):
        if in_pages and (scale.shape[0] > 1 or scale.shape[-2] > 1):
            own = np.require(scale, dtype, "A")
            # An axis of length 1 is that of all pages, heads or keys.
            page, head, row = (0 if n == 1 else step for n, step in zip(own.shape[:3], strides(own)[:3], strict=True))
            found |= {f"{name}_head": head, f"{name}_row": 1, f"{name}_page_row": row, f"{name}_page": page}
        else:
            batch = (1,) if in_pages else x.shape[:-3]
            by_key = scale.shape[-2] > 1
            shape = (*batch, x.shape[-3], x.shape[-2], 1) if by_key else (*batch, x.shape[-3], 1, x.shape[-1])
            own = np.ascontiguousarray(np.broadcast_to(scale, shape), dtype)
            if name_of(x.dtype) in CODE_UNITS:
                own = own * dtype.type(CODE_UNITS[name_of(x.dtype)])
            found |= {f"{name}_head": own.shape[-2] * own.shape[-1], f"{name}_row": int(by_key)}
        found[name] = address_of(own)
        kept.append(own)
    return found, kept


def _add_gradient(call: Call, grad_out: Array, batches: Array) -> None:
    """Set the fields of the output's gradient, whose rows the kernel multiplies with those of the output."""
    f = call.fields
    f["grad_out"], f["grad_kind"], f["out_kind"] = call.keep(grad_out), KINDS.get(name_of(grad_out.dtype), OWN), DELTA
    *_, f["grad_head"], f["grad_row"], _ = strides(grad_out)
    if call.count > 1:
        batches[BATCH_GRAD] = batch_offsets(grad_out, len(call.site.batch))


def _add_gathered(call: Call, *, windowed: bool) -> None:
    """Set the fields of all terms: fused or multiplied tile by tile where possible, gathered otherwise."""
    terms, f = call.terms, call.fields
    adds = [table_add(call, term) for term in fuse_tables(call, windowed=windowed)]
    adds += [query_add(call, t.query, t.weights, t.index, LOG2E) for t in terms.queries if t not in call.skewed]
    if call.skewed:
        add_skewed(call, call.skewed)
    adds += [key_add(call, term) for term in terms.keys]
    values = value_records(call)
    f["add_count"], f["value_count"] = len(adds), len(values)
    if adds:
        call.adds = table(ADD, adds)
        f["adds"] = call.keep(call.adds)
    if values:
        call.values = table(VALUE, values)
        f["values"] = call.keep(call.values)
