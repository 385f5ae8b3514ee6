"""Is an answer right? Tolerances by dtype and assertions that other packages use."""

from __future__ import annotations

from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.types import Array

# Rounding errors in this unit: eps * sum_j p_j |v_j| * (1 + max |logit|). Every float kernel promises four.
_PROMISE = 4.0
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# The smallest numbers, by which what is close to 0 is rounded.
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
# Relative and absolute tolerances of torch.testing.assert_close.
_TORCH = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}


def largest(x: Array) -> float:
    """The largest finite number."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def ratio(actual: Array, expected: Array, tolerated: Any) -> float:
    """The largest of |actual - expected| / tolerated; equal elements, also infinities, count 0."""
    if actual.shape != expected.shape:
        return np.inf
    actual = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio = np.where(actual == expected, 0.0, np.abs(actual - expected) / tolerated)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


def typical(x: Array) -> float:
    """The median over rows, which are the last axis, of the root mean square of finite numbers: a few are no matter."""
    if not x.size:
        return 0.0
    squares = np.where(np.isfinite(x), x, 0.0).astype(np.float64) ** 2
    return float(np.sqrt(np.median(squares.reshape(-1, x.shape[-1] if x.ndim else 1).mean(axis=-1))))


def tolerance(dtype: Any, *, logit_bound: float, depth: int = 64, magnitude: Any = 1.0) -> Any:
    r"""Rounding error that attention may have.

    .. math::

        4\, \varepsilon\, \sqrt{\max(1, D / 64)}\, (1 + \max |s|) \sum_j p_j |v_j|

    A logit's rounding error is relative to the size of what it is a sum of, the exponential makes an absolute error
    of it a relative one, and sums of D products gain the root. Half precision is computed in float32 and
    rounded once more at the end, which near 0 costs half of the smallest number.

    Parameters
    ----------
    dtype : dtype
        float16, bfloat16, float32 or float64.
    logit_bound : float
        The largest score, in absolute value; of a score that several parts are added to, the sum of their absolute
        values, as in `Example.logit_bound`.
    depth : int
        Products D in a score: head_dim, and more where positions have vectors, as in `Example.products`.
    magnitude : float or ndarray
        The sum of :math:`p_j |v_j|`; the largest absolute value will do.

    Returns
    -------
    float or ndarray
        Largest tolerable difference from the exact answer; shaped as `magnitude`.

    Raises
    ------
    RelposTypeError
        If the dtype is none of these.
    """
    name = np.dtype(dtype).name
    if name not in EPS:
        raise RelposTypeError(f"dtype: expected one of {', '.join(EPS)}; found {name}")
    half = EPS[name] > EPS["float32"]
    eps = EPS["float32"] if half else EPS[name]
    factor = _PROMISE * eps * np.sqrt(max(1.0, depth / 64)) * (1.0 + logit_bound)
    return (factor + (EPS[name] if half else 0.0)) * magnitude + (SMALLEST[name] / 2 if half else 0.0)


def assert_matches(actual: Any, expected: Any, *, dtype: Any = None) -> None:
    """Assert that an answer is right, with the tolerances that PyTorch uses by default.

    Parameters
    ----------
    actual : array_like
        What an implementation returned.
    expected : array_like
        What it should be, such as the float64 output of ``backend="numpy"``.
    dtype : dtype, optional
        Precision that is asked for; default that of `actual`. Relative and absolute tolerances are 1e-3
        and 1e-5 for float16, 1.6e-2 and 1e-5 for bfloat16, 1.3e-6 and 1e-5 for float32, 1e-7 and
        1e-7 for float64; other dtypes must be equal.

    Raises
    ------
    AssertionError
        If shapes differ, an element is off by more than ``atol + rtol * |expected|``, or one is NaN.
    """
    found, wanted = np.asarray(actual), np.asarray(expected)
    if found.shape != wanted.shape:
        raise AssertionError(f"shapes differ: found {found.shape}, expected {wanted.shape}")
    rtol, atol = _TORCH.get((found.dtype if dtype is None else np.dtype(dtype)).name, (0.0, 0.0))
    if rtol:
        # Sums of low precision, as in the message, would be useless.
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, equal_nan=False)


def assert_no_worse_than(
    actual: Any, other: Any, expected: Any, *, factor: float = 2.0, floor: float | None = None
) -> None:
    r"""Assert that an implementation is not much less exact than one that is trusted, such as a framework's own.

    .. math::

        \max |a - e| \le c \max |o - e| + f

    for the answer a, the other implementation's answer o in the same precision, and the exact answer e. A test of this
    form needs no tolerance chosen by hand: the hardware's and the format's errors are in o.

    Parameters
    ----------
    actual : array_like
        What the implementation under test returned.
    other : array_like
        What the trusted one returned for the same inputs in the same dtype.
    expected : array_like
        The exact answer, such as `Example.expected`, in float64.
    factor : float
        The factor c, at least 1.
    floor : float, optional
        Error f that is always allowed, for the case that the other answer happens to be exact; default one rounding
        of the largest number, :math:`\varepsilon \max |e|`, with the machine epsilon of the dtype of `actual`.

    Raises
    ------
    AssertionError
        If shapes differ, the error is larger, or an element is NaN or infinite where the exact answer is not.
    RelposValueError
        If `factor` is below 1 or `floor` is negative.
    RelposTypeError
        If the dtype of `actual` is not a float and `floor` is not given.

    References
    ----------
    Dao et al., "FlashAttention", NeurIPS 2022, and its successors: their published tests have this form.
    """
    if not check.real("factor", factor) >= 1:
        raise RelposValueError(f"factor: expected at least 1, found {factor}")
    found, trusted, wanted = (np.asarray(x) for x in (actual, other, expected))
    for name, x in (("actual", found), ("other", trusted)):
        if x.shape != wanted.shape:
            raise AssertionError(f"shapes differ: {name} {x.shape}, expected {wanted.shape}")
    if floor is None:
        if found.dtype.name not in EPS:
            raise RelposTypeError(f"actual: expected one of {', '.join(EPS)}, or a floor; found {found.dtype}")
        floor = EPS[found.dtype.name] * largest(wanted)
    elif check.real("floor", floor) < 0:
        raise RelposValueError(f"floor: expected a number from 0 on, found {floor}")
    wanted = wanted.astype(np.float64)
    error, allowed = (ratio(x, wanted, 1.0) for x in (found, trusted))
    if not np.isfinite(allowed):
        raise AssertionError("other: not finite where the exact answer is, so that nothing can be compared with it")
    if error > factor * allowed + floor:
        raise AssertionError(
            f"the error {error:.3g} is {error / allowed if allowed else np.inf:.3g} times that of the other "
            f"implementation, {allowed:.3g}; allowed are {factor:g} times and {floor:.3g}"
        )
