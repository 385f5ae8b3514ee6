r"""rel_shift: from products with one row per distance to one score per key, in each published variant."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from numpy.lib.stride_tricks import as_strided

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array, Shift

VARIANTS: tuple[str, ...] = get_args(Shift)
# Of these the result lies in an input in C order as it is: no kernel moves anything.
UNMOVED = ("wenet", "xlnet_uni")


def shifted_length(shape: tuple[int, ...], variant: str) -> int:
    """Number of keys L_k that a variant makes of an input of this shape; raises if there is none."""
    if len(shape) < 2:
        raise RelposValueError(f"x: expected shape (..., L_q, columns), found {shape}")
    rows, columns = shape[-2:]
    if variant in ("conformer", "xlnet"):
        k_len = columns - rows + (1 if variant == "conformer" else 0)
        least = "L_q + L_k - 1" if variant == "conformer" else "L_q + L_k"
        if rows and k_len < 0:
            raise RelposValueError(f"x: variant {variant!r} needs {least} columns, found shape {shape}")
        return max(k_len, 0)
    if variant == "xlnet_uni":
        if rows and columns <= rows:
            raise RelposValueError(f"x: variant 'xlnet_uni' needs more columns than rows, found shape {shape}")
        return max(columns - 1, 0)
    if variant != "wenet" and columns < rows:
        raise RelposValueError(f"x: variant {variant!r} needs at least as many columns as rows, found shape {shape}")
    return columns


def checked(x: Any, variant: Any) -> tuple[int, ...]:
    """The shape of the result, for an array of the host or an opened one of a device."""
    if x.dtype.kind not in "fiuc" and x.dtype.name != "bfloat16":
        raise RelposTypeError(f"x: expected numbers, found dtype {x.dtype}")
    return (*x.shape[:-1], shifted_length(x.shape, check.choice("variant", variant, VARIANTS)))


def rel_shift(
    x: Array,
    variant: Shift = "transformer_xl",
) -> Array:
    """`relpos_np.rel_shift` in NumPy.

    Parameters
    ----------
    x : ndarray, shape (..., L_q, columns)
        Products with one row per distance.
    variant : {"transformer_xl", "espnet_legacy", "conformer", "xlnet", "wenet", "xlnet_uni"}
        See `relpos_np.rel_shift`.

    Returns
    -------
    ndarray, shape (..., L_q, L_k)
        A read-only view where no element is made up.
    """
    k_len = shifted_length(x.shape, variant)
    *lead, rows, columns = x.shape
    if variant in UNMOVED:
        out = x.view()
        if variant == "xlnet_uni":
            # Without the first L_q products, read in rows of one less.
            out = out.reshape(*lead, rows * columns)[..., rows:].reshape(*lead, rows, k_len)
        out.flags.writeable = False
        return out
    if variant in ("conformer", "xlnet"):
        if not rows or not k_len:
            return np.empty((*lead, rows, k_len), x.dtype)
        # Row i starts at column L_q - 1 - i (conformer) or L_q - i (xlnet): one element less per row.
        start = x[..., rows - 1 if variant == "conformer" else rows :]
        down, across = x.strides[-2:]
        return as_strided(start, (*lead, rows, k_len), (*x.strides[:-2], down - across, across), writeable=False)
    # A column of zeros in front, read again with the axes' lengths exchanged, and without its first row.
    padded = np.concatenate([np.zeros((*lead, rows, 1), x.dtype), x], axis=-1)
    return padded.reshape(*lead, columns + 1, rows)[..., 1:, :].reshape(*lead, rows, columns)
