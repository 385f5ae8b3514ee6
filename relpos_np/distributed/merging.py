"""Putting together what parts of the keys gave: outputs, each with the log-sum-exp of its scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array


def _checked(pair: Any, number: int) -> tuple[Array, Array]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RelposTypeError(f"parts: expected pairs (out, lse), found {type(pair).__name__} as number {number}")
    out, lse = check.floating("out", pair[0]), check.floating("lse", pair[1])
    if out.shape[:-1] != lse.shape or not out.ndim:
        raise RelposValueError(f"parts: out {out.shape} and lse {lse.shape} of number {number} do not belong together")
    return out, lse


def merge(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    r"""Attention over several disjoint sets of keys, from the attention over each.

    .. math::

        \mathrm{lse} = \ln \sum_p e^{\mathrm{lse}_p}, \qquad
        o = \sum_p e^{\mathrm{lse}_p - \mathrm{lse}}\, o_p

    Parameters
    ----------
    *parts : tuple of ndarray
        Pairs of an output (..., L_q, D_v) and its log-sum-exp (..., L_q), as `partial` returns them, all of the same
        shapes and dtype.

    Returns
    -------
    out : ndarray, shape (..., L_q, D_v)
        The output for all keys together.
    lse : ndarray, shape (..., L_q)
        Its log-sum-exp.

    Raises
    ------
    RelposTypeError
        If there are no parts, one is not a pair of arrays of floats, or dtypes differ.
    RelposValueError
        If shapes differ.

    Notes
    -----
    Sums run in the order of the arguments, so that the same call gives the same bits. Another order or grouping
    gives the same numbers up to rounding: the operation is associative and commutative, and a part without keys,
    with output 0 and log-sum-exp -inf, changes nothing, not even a bit. A row that has keys in one part only is
    that part's, bit by bit; a row that has none in any part gets 0 and -inf.
    """
    if not parts:
        raise RelposTypeError("parts: expected at least one pair (out, lse), found none")
    pairs = [_checked(pair, number) for number, pair in enumerate(parts)]
    first = pairs[0]
    for number, (out, lse) in enumerate(pairs):
        if out.shape != first[0].shape:
            raise RelposValueError(f"parts: out of number {number} has shape {out.shape}, the first {first[0].shape}")
        if not out.dtype == lse.dtype == first[0].dtype:
            raise RelposTypeError(
                f"parts: expected {first[0].dtype} throughout, found {out.dtype} and {lse.dtype} in number {number}"
            )
    with np.errstate(all="ignore"):
        top = np.maximum.reduce([lse for _, lse in pairs])
        # Without keys the maximum is -inf, from which nothing may be subtracted.
        safe = np.where(np.isneginf(top), first[1].dtype.type(0), top)
        weights = [np.exp(lse - safe) for _, lse in pairs]
        total = sum(weights[1:], weights[0])
        lse = safe + np.log(total)
        merged = np.zeros_like(first[0])
        for (out, own), weight in zip(pairs, weights, strict=True):
            share = (weight / np.where(total == 0, total.dtype.type(1), total))[..., None]
            # A part without keys is ignored, whatever its output holds.
            merged = np.where(np.isneginf(own)[..., None], merged, merged + share * out)
    return merged, lse
