"""Keys and values of eight bits: codes, and the scales that make numbers of them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from relpos_np._runtime import memory
from relpos_np.errors import RelposImportError, RelposTypeError, RelposValueError, shown
from relpos_np.types import Array

# Dtypes of codes, with the largest number of each.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_AXES = {"token": -1, "channel": -2}


class Quantized:
    r"""Keys or values as codes of eight bits with scales, an operand of `attention` and `paged_attention`.

    .. math::

        x_{\ldots c} = s_{\ldots c}\; n_{\ldots c},

    rounded once to the dtype in which the call computes: float32, or float64 beside queries of float64.

    Parameters
    ----------
    codes : ndarray of int8, float8_e4m3fn or float8_e5m2, shape (..., H_kv, L_k, D)
        Codes n; the two formats of float8 are those of the package ml_dtypes. Pages are (pages, P, H_kv, D).
    scale : ndarray of float
        Scales s, which broadcast to the shape of the codes: (..., H_kv, L_k, 1) by token, (..., H_kv, 1, D) by channel.

    Raises
    ------
    RelposError
        If dtypes are others, or the scales do not broadcast.

    See Also
    --------
    quantize : Makes codes and scales.

    Notes
    -----
    In decoding, with up to 8 query heads times queries to a key head, the CPU kernels read codes where they lie, for
    queries of float32 and half precision and schemes that add a number for each distance or turn vectors; keys and
    values must then be codes of one dtype, with scales by token or by channel. Every other call makes numbers of all
    codes first, which takes the memory of keys and values in float32, and its results are those of a call with these.
    Scales in another dtype than float32 are copied in every call.

    Gradients, `logits`, `prepare` and calls on a device take no codes: pass `dequantized` arrays.

    References
    ----------
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022, doi:10.48550/arXiv.2209.05433.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> x = rp.Quantized(np.array([[[2, -4]]], np.int8), np.array([[[0.5]]], np.float32))
    >>> x.dequantized()
    array([[[ 1., -2.]]], dtype=float32)
    """

    __slots__ = ("codes", "scale")

    def __init__(self, codes: Array, scale: Array) -> None:
        given: dict[str, Any] = {"codes": codes, "scale": scale}
        for name, x in given.items():
            if not isinstance(x, np.ndarray):
                raise RelposTypeError(f"{name}: expected a NumPy array, found {type(x).__name__}")
        if codes.dtype.name not in LARGEST:
            raise RelposTypeError(f"codes: expected dtype {', '.join(LARGEST)}, found {codes.dtype}")
        if codes.ndim < 2:
            raise RelposValueError(f"codes: expected shape (..., H_kv, L_k, D), found {codes.shape}")
        if scale.dtype.kind != "f":
            raise RelposTypeError(f"scale: expected float16, float32 or float64, found {scale.dtype}")
        try:
            fits = np.broadcast_shapes(scale.shape, codes.shape) == codes.shape
        except ValueError:
            fits = False
        if not fits:
            raise RelposValueError(f"scale: shape {scale.shape} does not broadcast to {codes.shape}, that of the codes")
        self.codes = codes
        self.scale = scale.reshape((1,) * (codes.ndim - scale.ndim) + scale.shape)

    def __repr__(self) -> str:
        return f"Quantized({self.codes.dtype} {self.codes.shape}, scale {self.scale.shape})"

    def dequantized(self, dtype: Any = np.float32) -> Array:
        """The numbers that the codes stand for.

        Parameters
        ----------
        dtype : {float32, float64}
            In which they are wanted.

        Returns
        -------
        ndarray
            Of the shape of the codes.
        """
        kind = np.dtype(dtype)
        if kind not in (np.float32, np.float64):
            raise RelposTypeError(f"dtype: expected float32 or float64, found {shown(dtype)}")
        found: Array = self.codes.astype(kind)
        with np.errstate(all="ignore"):
            found *= self.scale.astype(kind, copy=False)
        return found


def stored(k: Any, v: Any) -> tuple[Array, Array, tuple[Array, ...]]:
    """What kernels read of keys and values that are both codes, or numbers, and the scales of codes."""
    return (k.codes, v.codes, (k.scale, v.scale)) if type(k) is Quantized else (k, v, ())


def quantize(
    x: Array,
    dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2"] = "int8",
    *,
    by: Literal["token", "channel"] = "token",
    scale: Array | None = None,
) -> Quantized:
    r"""Round keys or values to codes of eight bits.

    .. math::

        s = \max_c |x_{\ldots c}| / M, \qquad n = \mathrm{round}(x / s),

    with the largest number M of the format: 127 of int8, 448 of float8_e4m3fn, 57344 of float8_e5m2. The maximum is
    over the channels of a token, or over the tokens of a channel; where all are 0, s is 1.

    Parameters
    ----------
    x : ndarray of float, shape (..., L, D)
        Keys or values.
    dtype : {"int8", "float8_e4m3fn", "float8_e5m2"}
        Format of the codes; float8 needs the package ml_dtypes.
    by : {"token", "channel"}
        What has a scale of its own: a token, so that new ones can be added to a cache, or a channel, which keeps more
        of keys, some channels of which are large in every token. Ignored with `scale`.
    scale : ndarray of float, optional
        Scales s to use, which broadcast to x, for instance those of a cache; numbers beyond M s become M s.

    Returns
    -------
    Quantized
        With scales in float32, (..., L, 1) or (..., 1, D), or `scale` as it was given.

    Raises
    ------
    RelposError
        If x holds a number that is not finite, or a scale is not positive.

    Notes
    -----
    Codes of int8 are within s / 2 of x, by rounding to even, and an ulp of x. A number of float8_e4m3fn is within
    2\ :sup:`-4` of its size, of float8_e5m2 within 2\ :sup:`-3`, unless it is subnormal.

    References
    ----------
    Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024,
    doi:10.48550/arXiv.2402.02750, on keys by channel and values by token.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), np.float32)
    >>> exact = rp.attention(q[:, -1:], k, v, position=rp.ALiBi())
    >>> out = rp.attention(q[:, -1:], rp.quantize(k), rp.quantize(v), position=rp.ALiBi())
    >>> np.abs(out - exact).max() < 0.02
    np.True_
    """
    given: Any = x
    if not isinstance(given, np.ndarray) or not (x.dtype.kind == "f" or x.dtype.name == "bfloat16"):
        raise RelposTypeError(f"x: expected an array of floating-point numbers, found {shown(given)}")
    if x.ndim < 2:
        raise RelposValueError(f"x: expected shape (..., L, D), found {x.shape}")
    if dtype not in LARGEST:
        raise RelposValueError(f"dtype: expected one of {', '.join(LARGEST)}, found {shown(dtype)}")
    if by not in _AXES:
        raise RelposValueError(f"by: expected 'token' or 'channel', found {shown(by)}")
    size = x.size * (8 if x.dtype == np.float64 else 4)
    memory.require("quantize", {"numbers": 3 * size, "codes": x.size})
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    if not np.isfinite(wide).all():
        raise RelposValueError("x: expected finite numbers")
    most = LARGEST[dtype]
    if scale is None:
        largest = np.abs(wide).max(axis=_AXES[by], keepdims=True, initial=0.0)
        if largest.max(initial=0.0) > np.finfo(np.float32).max:
            raise RelposValueError("x: expected numbers that float32 can hold, as scales are")
        # No less than a normal number, or codes of the smallest numbers would be infinite.
        least = np.finfo(np.float32).tiny
        scale = np.where(largest == 0, 1.0, np.maximum(largest / most, least)).astype(np.float32)
    elif getattr(scale, "dtype", np.dtype(object)).kind != "f" or not (scale > 0).all():
        raise RelposValueError(f"scale: expected an array of positive numbers, found {shown(scale)}")
    codes = np.clip(wide / scale, -most, most)
    if dtype == "int8":
        return Quantized(np.rint(codes).astype(np.int8), scale)
    return Quantized(codes.astype(small_float(dtype)), scale)


def small_float(name: str) -> np.dtype[Any]:
    """The dtype of that name which NumPy lacks and ml_dtypes has."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise RelposImportError(
            f"dtype: {name} needs the package ml_dtypes; install it with `pip install ml_dtypes`"
        ) from error
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found
