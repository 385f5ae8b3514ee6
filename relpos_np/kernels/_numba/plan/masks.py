"""Masks and key lengths in a call's record: ranges of keys if those say it all, else the mask itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relpos_np.kernels._numba.launch.arrays import batch_offsets, strides
from relpos_np.kernels._numba.launch.records import BATCH_INNER, BATCH_MASK, KEY_BEGIN, KEY_END
from relpos_np.kernels._numba.plan.call import Call
from relpos_np.types import Array


def add_masks(call: Call, batches: Array, *, windowed: bool) -> None:
    """Set the mask's fields and each batch item's range of keys; the kernel for windows takes no ranges."""
    problem, site, f = call.problem, call.site, call.fields
    batches[KEY_END] = site.k_len
    if problem.key_lengths is not None:
        batches[KEY_END] = problem.key_lengths.ravel()
    _add_rule(call)
    mask = problem.mask
    if problem.softcap and not problem.cap_content:
        _add_inner(call, batches)
    else:
        mask = _with_biases(call, mask)
    if mask is None or not mask.size:
        return
    if mask.dtype == np.bool_ and problem.mask_of_keys and not windowed:
        keys = mask[..., 0, 0, :].reshape(-1, site.k_len)
        seen = keys.any(axis=1)
        begin = np.where(seen, keys.argmax(axis=1), site.k_len)
        end = np.where(seen, site.k_len - keys[:, ::-1].argmax(axis=1), 0)
        batches[KEY_BEGIN] = begin
        batches[KEY_END] = np.minimum(batches[KEY_END], end)
        if (keys.sum(axis=1) == np.maximum(end - begin, 0)).all():
            return
    adjacent = {mask.itemsize} if windowed else {0, mask.itemsize}
    if mask.shape[-1] > 1 and mask.strides[-1] not in adjacent:
        mask = np.ascontiguousarray(mask)
    f["allowed" if mask.dtype == np.bool_ else "soft"] = call.keep(mask)
    f["mask_head"], f["mask_row"], f["mask_col"] = strides(mask)[-3:]
    if mask.shape[-1] == 1:
        f["mask_col"] = 1
    batches[BATCH_MASK] = batch_offsets(mask, len(site.batch))


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
        f["ranges_batch"] = 2 * call.site.q_len
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
