"""How an array may lie in memory: the same numbers with other strides, bytes or rights."""

import numpy as np


def _misaligned(x):
    raw = np.empty(x.nbytes + 1, np.uint8)
    out = raw[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def _read_only(x):
    out = x.copy()
    out.flags.writeable = False
    return out


def _reversed(x):
    if x.ndim == 1:
        return x[::-1].copy()[::-1]
    return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]


def _spaced(x):
    # Between numbers that cannot be NaN lie some that no index may be.
    between = np.nan if x.dtype.kind == "f" else np.iinfo(x.dtype).min if x.dtype.kind == "i" else 1
    out = np.full((*x.shape[:-1], 2 * x.shape[-1]), between, x.dtype)[..., ::2]
    out[...] = x
    return out


def _transposed(x):
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if x.ndim > 1 else x


def _heads_inside(x):
    """(..., L, H, D) in memory, as projections leave it."""
    return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2) if x.ndim > 2 else x


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "transposed": _transposed,
    "heads inside": _heads_inside,
    "negative strides": _reversed,
    "every other": _spaced,
    "read-only": _read_only,
    "misaligned": _misaligned,
    "fortran": np.asfortranarray,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}
