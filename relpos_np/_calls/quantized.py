"""Calls of which keys and values are codes: read as they are where the kernel for few queries does the call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from relpos_np import backend as _backend
from relpos_np._calls.call import Call
from relpos_np._calls.packed import PackedCall, attend, attend_sequences, is_packed, result_shape
from relpos_np._contract import check, outputs
from relpos_np._contract.options import Options
from relpos_np._contract.quantized import Quantized
from relpos_np._runtime import memory
from relpos_np.schemes.base import Position
from relpos_np.types import Array


def attention(
    compute: Callable[..., Any],
    operands: tuple[Array, Any, Any],
    position: Position,
    given: Options,
    out: Array | None,
    form: Hashable | None,
    **returned: bool,
) -> Any:
    """`relpos_np.attention`, which is `compute`, with keys or values that are codes; `form`: of the call as it is."""
    q, k, v = check.array("q", operands[0]), *operands[1:]
    result = None
    if not returned["return_bound"]:
        result = _in_place(q, k, v, position, given, out, returned["return_lse"], form)
    if result is not None:
        return result
    dtype = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    size = sum(dtype.itemsize * x.codes.size for x in (k, v) if isinstance(x, Quantized))
    memory.require("attention", {"numbers of codes": size})
    # All in the dtype of the computation: products of half precision would round what is not a code.
    wide = [_numbers(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))]
    if q.dtype == dtype:
        return compute(*wide, position=position, out=out, **returned, **given)
    if out is not None:
        read = (q, *(x.codes if isinstance(x, Quantized) else x for x in (k, v)), *given.values(), position)
        outputs.check(out, result_shape(*wide), q.dtype, read)
    found = compute(*wide, position=position, **returned, **given)
    first, *rest = found if isinstance(found, tuple) else (found,)
    result = first.astype(q.dtype.newbyteorder("=")) if out is None else out
    if out is not None:
        out[...] = first
    return (result, *rest) if rest else result


def _numbers(name: str, x: Any, dtype: np.dtype[Any]) -> Array:
    """An operand in the dtype of the computation."""
    return x.dequantized(dtype) if isinstance(x, Quantized) else check.floating(name, x)


def readable(q: Array, k: Any, v: Any, given: Options, keys: int = -2) -> bool:
    """Whether a kernel reads such keys and values: codes of one dtype, with scales by token or by channel.

    `keys`: which axis is that of keys. Memory is counted, and dropout drawn, by the call that has their numbers.
    """
    if memory.limit() is not None or type(given["dropout"]) is not float or given["dropout"]:
        return False
    if not (isinstance(k, Quantized) and isinstance(v, Quantized)) or min(q.ndim, k.codes.ndim, v.codes.ndim) < 3:
        return False
    if q.dtype == np.float64 or k.codes.dtype != v.codes.dtype or _backend.current(given["backend"]) != "numba":
        return False
    by_one = not any(x.scale.shape[keys] > 1 and x.scale.shape[-1] > 1 for x in (k, v))
    return by_one and bool(_backend.kernels("numba").decodes(k.codes.dtype, 1))


def stand_in(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """What a call is checked and lowered with instead of keys or values that only a kernel reads; takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _in_place(
    q: Array,
    k: Any,
    v: Any,
    position: Position,
    given: Options,
    out: Array | None,
    return_lse: bool,
    form: Hashable | None,
) -> Array | tuple[Array, Array] | None:
    """Attention that reads codes where they lie; None if the kernel for few queries does not do the call."""
    if not readable(q, k, v, given):
        return None
    found: Array | tuple[Array, Array] | None
    codes, scales = (q, k.codes, v.codes), (k.scale, v.scale)
    operands = q, stand_in(k.codes.shape, q.dtype), stand_in(v.codes.shape, q.dtype)

    def decoding(call: Call) -> Call | None:
        if not call.reads_in_place(few=True):
            return None
        call.read(k.codes, v.codes, scales)
        call.check_output(out)
        return call

    if is_packed(given):
        packed = PackedCall(*operands, position, given)
        sequences = packed.sequences()
        if sequences is None:
            return None

        def of_all() -> Call | None:
            return decoding(packed.at_once("attention", sequences))

        found = attend_sequences(codes, position, given, sequences, of_all, out, return_lse, scales, form)
        return found

    call = decoding(Call("attention", operands, position, given))
    return None if call is None else attend(form, call, out, return_lse)
