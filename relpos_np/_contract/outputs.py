"""Arrays that callers pass as `out`: what results are written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relpos_np._contract.check import DeviceOperand
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array

# What most options are, of which no array need be looked for.
_NO_ARRAYS = frozenset({type(None), bool, int, float, str})


def check(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: Sequence[Any]) -> None:
    """Check `out=`: right shape and dtype, writeable, and no memory shared with an input."""
    host = type(out) is np.ndarray
    if not host and not isinstance(out, DeviceOperand):
        raise RelposTypeError(f"out: expected a NumPy array, found {type(out).__name__}")
    if out.shape != shape:
        raise RelposValueError(f"out: expected shape {shape}, found {out.shape}")
    if out.dtype != dtype:
        raise RelposTypeError(f"out: expected dtype {dtype}, found {out.dtype}")
    if not out.flags.writeable if host else out.readonly:
        raise RelposValueError("out: the array is read-only")
    if not out.flags.c_contiguous and _repeats(out) if host else out.repeats:
        raise RelposValueError("out: elements of the array share memory")
    if not host:
        overlaps = any(out.overlaps(x) for x in inputs)
    else:
        overlaps = False
        for x in inputs:
            # What nearly all operands are is asked first, since small calls take no longer than such questions do.
            kind = type(x)
            for own in (x,) if kind is np.ndarray else () if kind in _NO_ARRAYS else arrays_within(x):
                overlaps = overlaps or np.may_share_memory(out, own)
    if overlaps:
        raise RelposValueError("out: the array overlaps an input")


def arrays_within(value: Any, depth: int = 8) -> Iterator[Array]:
    """The NumPy arrays among operands and options, and those that schemes hold, also within one another."""
    if isinstance(value, np.ndarray):
        yield value
    elif depth and isinstance(value, tuple | list):
        for entry in value:
            yield from arrays_within(entry, depth - 1)
    elif depth and hasattr(value, "lower") and hasattr(value, "__dict__"):
        yield from arrays_within([*vars(value).values()], depth - 1)


def _repeats(x: Array) -> bool:
    """Whether elements share memory, or lie between one another; NumPy gives arrays without elements strides of 0."""
    axes = [(abs(stride), size) for size, stride in zip(x.shape, x.strides, strict=True) if size > 1]
    reach = x.itemsize
    for stride, size in sorted(axes):
        if stride < reach:
            return x.size > 0
        reach += stride * (size - 1)
    return False
