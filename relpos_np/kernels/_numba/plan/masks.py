"""Masks and key lengths in a call's record: ranges of keys if those say it all, else the mask itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relpos_np._contract.problem import Problem
from relpos_np._contract.sequences import Sequences
from relpos_np.kernels._numba.launch.arrays import batch_offsets, strides
from relpos_np.kernels._numba.launch.records import BATCH_INNER, BATCH_MASK, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.types import Array, Bools, Int64


def add_masks(call: Call, batches: Array, *, windowed: bool) -> None:
    """Set the mask's fields and each batch item's range of keys; the kernel for windows takes no ranges."""
    problem, site = call.problem, call.site
    batches[KEY_END] = site.k_len
    if problem.key_lengths is not None:
        batches[KEY_END] = problem.key_lengths.ravel()
    _add_rule(call)
    # Sequences have each their own part of a mask.
    mask = problem.mask if problem.sequences is None else None
    if problem.softcap and not problem.cap_content:
        _add_inner(call, batches)
    else:
        mask = _with_biases(call, mask)
    if mask is None or not mask.size:
        return
    if mask.dtype == np.bool_ and problem.mask_of_keys and not windowed:
        call.mask_rows = mask[..., 0, 0, :].reshape(-1, site.k_len)
        batches[KEY_BEGIN], batches[KEY_END], whole = range_in_rows(call.mask_rows, batches[KEY_END])
        if whole.all():
            return
    batches[BATCH_MASK] = batch_offsets(set_mask(call, mask, windowed=windowed), len(site.batch))


def range_in_rows(keys: Bools, lengths: Int64) -> tuple[Int64, Int64, Bools]:
    """The first key that each row leaves, of so many, the one after the last, and whether it leaves all between."""
    count = keys.shape[1]
    # What a mask says of keys that do not exist changes no bit.
    keys = keys & (np.arange(count) < lengths[:, None])
    seen = keys.any(axis=1)
    begin = np.where(seen, keys.argmax(axis=1), count)
    end = np.where(seen, count - keys[:, ::-1].argmax(axis=1), 0)
    return begin, end, keys.sum(axis=1) == np.maximum(end - begin, 0)


def set_mask(call: Call, mask: Array, *, windowed: bool) -> Array:
    """Set the fields of a mask that the kernel reads; the mask as it lies there."""
    f, adjacent = call.fields, {mask.itemsize} if windowed else {0, mask.itemsize}
    if mask.shape[-1] > 1 and mask.strides[-1] not in adjacent:
        mask = np.ascontiguousarray(mask)
    f["allowed" if mask.dtype == np.bool_ else "soft"] = call.keep(mask)
    f["mask_head"], f["mask_row"], f["mask_col"] = strides(mask)[-3:]
    if mask.shape[-1] == 1:
        f["mask_col"] = 1
    return mask


def ranges_of_keys(problem: Problem, sequences: Sequences) -> tuple[Int64, Int64, Bools]:
    """The first key of each sequence that the mask leaves, the one after the last, and whether it leaves all between.

    As of calls of their own: where it has one row for all heads and queries.
    """
    mask, (count, k_len) = problem.mask, (len(sequences), sequences.k_len)
    assert mask is not None
    if mask.dtype != np.bool_ or not problem.mask_of_heads:
        return np.zeros(count, np.int64), k_len, np.zeros(count, np.bool_)
    if problem.mask_of_keys:
        return _ranges_in_rows(mask[..., 0, 0, :].reshape(-1, mask.shape[-1]), sequences)
    begin, end, whole = np.zeros(count, np.int64), k_len.copy(), np.zeros(count, np.bool_)
    for n in np.flatnonzero(sequences.q_len == 1).tolist():
        item, start = np.unravel_index(sequences.item[n], mask.shape[:-3]), sequences.k_start[n]
        seen = np.flatnonzero(mask[(*item, 0, sequences.q_start[n])][start : start + sequences.k_end[n]])
        begin[n], end[n] = (seen[0], seen[-1] + 1) if seen.size else (k_len[n], 0)
        whole[n] = seen.size == max(end[n] - begin[n], 0)
    return begin, end, whole


def _ranges_in_rows(keys: Bools, sequences: Sequences) -> tuple[Int64, Int64, Bools]:
    """The same where every batch item has one row of keys."""
    at, (count, length) = np.arange(keys.shape[1]), keys.shape
    item, start, stop = sequences.item, sequences.k_start, sequences.k_start + sequences.k_end
    # For every key the next one that is left, the number of those before it, and the last one of these.
    following = np.full((count, length + 1), length)
    following[:, :-1] = np.minimum.accumulate(np.where(keys, at, length)[:, ::-1], axis=1)[:, ::-1]
    before, last = np.zeros((2, count, length + 1), np.int64)
    np.cumsum(keys, axis=1, out=before[:, 1:])
    np.maximum.accumulate(np.where(keys, at + 1, 0), axis=1, out=last[:, 1:])
    seen = before[item, stop] - before[item, start]
    begin = np.where(seen > 0, following[item, start] - start, sequences.k_len)
    end = np.where(seen > 0, last[item, stop] - start, 0)
    return begin, end, seen == np.maximum(end - begin, 0)


def _add_rule(call: Call) -> None:
    """Set each query's range of keys, and the distance between keys."""
    problem, f = call.problem, call.fields
    f["step"] = problem.step
    ranges = problem.ranges
    if ranges is None:
        return
    lead = ranges.shape[:-2]
    if all(stride == 0 or size == 1 for size, stride in zip(lead, ranges.strides, strict=False)):
        ranges = ranges[(0,) * len(lead)] if 0 not in lead else ranges
    else:
        f["ranges_batch"] = 2 * ranges.shape[-2]
    f["ranges"] = call.keep(np.ascontiguousarray(ranges))


def _add_inner(call: Call, batches: Array) -> None:
    """Set the bias of every pair that is within the cap."""
    if not call.terms.biases:
        return
    total = _total(call.terms.biases)
    if total.shape[-1] != call.site.k_len or total.strides[-1] != total.itemsize:
        total = np.ascontiguousarray(np.broadcast_to(total, (*total.shape[:-1], call.site.k_len)))
    total = np.broadcast_to(total, call.shape(call.site.q_len, call.site.k_len))
    f = call.fields
    f["inner"] = call.keep(total)
    f["inner_head"], f["inner_row"], _ = strides(total)[-3:]
    batches[BATCH_INNER] = batch_offsets(total, len(call.site.batch))


def _total(biases: Sequence[Array]) -> Array:
    """Their sum, where the -inf of one excludes a pair, also if another is NaN or infinity there."""
    total = biases[0]
    for bias in biases[1:]:
        total, former = total + bias, total
        for one in (former, bias):
            np.copyto(total, one.dtype.type(-np.inf), where=one == -np.inf)
    return total


def _with_biases(call: Call, mask: Array | None) -> Array | None:
    """Biases of every pair are read like a float mask, and together with one."""
    if not call.terms.biases:
        return mask
    total = _total(call.terms.biases)
    if mask is not None:
        if mask.dtype == np.bool_:
            total = np.where(mask, total, call.dtype.type(-np.inf))
        else:
            total = np.where(mask == -np.inf, mask, total + mask)
    return np.broadcast_to(total, call.shape(call.site.q_len, call.site.k_len))
