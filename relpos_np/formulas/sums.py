"""Sums whose errors do not grow with the number of terms: what the reference adds up over keys and queries.

Sums of float32 are made in float64. Those of float64 are made in blocks of a few terms, and what each addition of
blocks loses to rounding is kept and added at the end. So the error of a sum is a few units in the last place of the sum
of the sizes of its terms, however many there are and however equal they are.
"""

from __future__ import annotations

import itertools

import numpy as np

from relpos_np.types import Array

# Terms that a BLAS may add up one after the other, and elements of blocks that are held at once: so that they stay in a
# processor's cache.
_BLOCK, _HELD = 8, 1 << 16
# Bytes that a product holds at most beside its operands and its result: blocks, and what pairs of them make.
HELD_BYTES = 4 * 8 * _HELD
# Terms of float32 that are copied to float64 at once.
_COPIED = 512
_WIDE = np.dtype(np.float64)


def _added(a: Array, b: Array) -> tuple[Array, Array]:
    """A sum, and what it lost to rounding."""
    both = a + b
    of_b = both - a
    return both, (a - (both - of_b)) + (b - of_b)


def _whole(added: Array, lost: Array) -> Array:
    """The sum; beyond the largest number, what it lost is none."""
    return np.asarray(np.where(np.isfinite(lost), added + lost, added))


def _in_pairs(x: Array) -> tuple[Array, Array]:
    """The sum over the first axis, which is not empty, and what it lost."""
    lost = np.zeros(x.shape[1:], x.dtype)
    while len(x) > 1:
        half = len(x) // 2
        pairs, less = _added(x[:half], x[half : 2 * half])
        lost = lost + less.sum(axis=0)
        x = np.concatenate([pairs, x[2 * half :]]) if len(x) % 2 else pairs
    return x[0], lost


def total(x: Array, axis: int = -1) -> Array:
    """Sum over an axis.

    Parameters
    ----------
    x : ndarray of floats
        The terms.
    axis : int, default -1
        What to sum over.

    Returns
    -------
    ndarray
        The sums, in the dtype of the terms.
    """
    if x.dtype.itemsize < _WIDE.itemsize:
        return np.asarray(x.sum(axis=axis, dtype=_WIDE), x.dtype)
    if not x.shape[axis]:
        return np.asarray(x.sum(axis=axis))
    return _whole(*_in_pairs(np.moveaxis(x, axis, 0)))


def _products_of_blocks(a: Array, b: Array) -> Array:
    """Products of the blocks of a's columns with those of b's rows, of which there are whole ones or one."""
    n = a.shape[-1]
    size = min(_BLOCK, n)
    left = np.moveaxis(a.reshape(*a.shape[:-1], n // size, size), -2, 0)
    right = np.moveaxis(b.reshape(*b.shape[:-2], n // size, size, b.shape[-1]), -3, 0)
    return np.asarray(np.matmul(left, right))


def product(a: Array, b: Array) -> Array:
    """Product of matrices.

    Parameters
    ----------
    a : ndarray of floats, shape (..., M, N)
        Left-hand matrices.
    b : ndarray, shape (..., N, D)
        Right-hand matrices, of the same dtype.

    Returns
    -------
    ndarray, shape (..., M, D)
        The products.
    """
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*lead, a.shape[-2], b.shape[-1]), a.dtype)
    _multiply(np.broadcast_to(a, (*lead, *a.shape[-2:])), np.broadcast_to(b, (*lead, *b.shape[-2:])), out)
    return out


def _multiply(a: Array, b: Array, out: Array) -> None:
    """Fill `out` with the product, part by part, so that little is held besides."""
    longest = max(out.shape[:-1])
    if out.size > _HELD and longest > 1:
        axis = out.shape.index(longest)
        for half in (slice(longest // 2), slice(longest // 2, None)):
            own = (*[slice(None)] * axis, half)
            _multiply(a[own], b if axis == out.ndim - 2 else b[own], out[own])
        return
    add = _multiply_wide if a.dtype.itemsize < _WIDE.itemsize else _multiply_blocks
    add(a, b, out)


def _multiply_wide(a: Array, b: Array, out: Array) -> None:
    """Fill `out`, its sums in float64."""
    added = np.zeros(out.shape, _WIDE)
    for j in range(0, a.shape[-1], _COPIED):
        own = slice(j, j + _COPIED)
        added += np.matmul(a[..., own].astype(_WIDE), b[..., own, :].astype(_WIDE))
    out[...] = added


def _multiply_blocks(a: Array, b: Array, out: Array) -> None:
    """Fill `out`, its sums in blocks with what each of them loses."""
    n = a.shape[-1]
    added, lost = np.zeros(out.shape, out.dtype), np.zeros(out.shape, out.dtype)
    step, whole = _BLOCK * max(1, _HELD // max(added.size, 1)), n // _BLOCK * _BLOCK
    ends = [*range(0, whole, step), *([whole] if whole < n else []), n]
    for start, stop in itertools.pairwise(ends):
        block, less = _in_pairs(_products_of_blocks(a[..., start:stop], b[..., start:stop, :]))
        added, more = _added(added, block)
        lost += less
        lost += more
    out[...] = _whole(added, lost)


def sum_of_pairs(p: Array, a: Array) -> Array:
    """Sum of p (..., L_q, L_k) times a (..., L_q, L_k, D) over keys, in blocks with what each of them loses."""
    shape = (*np.broadcast_shapes(p.shape[:-1], a.shape[:-2]), a.shape[-1])
    added, lost = np.zeros(shape, p.dtype), np.zeros(shape, p.dtype)
    for j in range(0, p.shape[-1], _BLOCK):
        own = slice(j, j + _BLOCK)
        block = np.einsum("...ij,...ijd->...id", p[..., own], a[..., own, :])
        added, less = _added(added, block)
        lost += less
    return _whole(added, lost)
