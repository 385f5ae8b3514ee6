"""How results are compared: within a tolerance of each number, and with a message that says where they differ.

A message names the worst element, what was found and expected there, the backend, and the call that repeats it.
"""

import tracemalloc

import numpy as np
import pytest

from relpos_np._runtime.memory import memory_limit
from relpos_np.errors import RelposError
from tests.strategies import float64_tolerance

EPS32 = np.finfo(np.float32).eps


def _raise_where(wrong, actual, expected, allowed, what, repeat=""):
    """An error about the worst of the elements that are wrong, if any are."""
    if not np.any(wrong):
        return
    with np.errstate(all="ignore"):
        times = np.where(wrong, np.abs(actual.astype(np.float64) - expected.astype(np.float64)) / allowed, -1.0)
    at = tuple(map(int, np.unravel_index(np.argmax(np.where(np.isnan(times), np.inf, times)), times.shape)))
    raise AssertionError(
        f"{what}{list(at)} is {actual[at]!r}, expected {expected[at]!r} within {allowed[at]:.3g}: "
        f"{times[at]:.3g} times the tolerance, {np.count_nonzero(wrong)} of {times.size} outside{repeat}"
    )


def assert_close(actual, expected, tolerance, what="result", repeat=""):
    """Equal up to `tolerance`, infinities and shapes included; NaN is never right here."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape} {repeat}"
    allowed = np.broadcast_to(tolerance, actual.shape)
    # The shapes agree, so that inf - inf is only met where both are infinite.
    with np.errstate(invalid="ignore"):
        right = (actual == expected) | (np.abs(actual.astype(np.float64) - expected) <= allowed)
    _raise_where(~right, actual, expected, allowed, what, repeat)


def assert_same_bits(found, expected, what="result"):
    """Arrays in pairs: the same dtypes, shapes and bytes."""
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{what} {n}"
        if np.ascontiguousarray(x).tobytes() != np.ascontiguousarray(y).tobytes():
            own, other = np.atleast_1d(x), np.atleast_1d(y)
            bits = [np.ascontiguousarray(a)[..., None].view(np.uint8) for a in (own, other)]
            _raise_where((bits[0] != bits[1]).any(axis=-1), own, other, np.zeros(own.shape), f"{what} {n} ")


def repeated(case, dtype, backend):
    """The call of a case, to be pasted."""
    if backend is None:
        return ""
    return f"\nbackend {backend}, seed {case.seed}; again: {case}.attention(np.{dtype}, {backend!r})"


def assert_same(actual, expected, case, backend=None, tolerance=None):
    """Output and log-sum-exp agree in float64."""
    again = repeated(case, "float64", backend)
    tolerance = tolerance or float64_tolerance(case)
    for name, x, y, allowed in zip(("out", "lse"), actual, expected, tolerance, strict=True):
        assert_close(x, y, allowed, name, again)


def assert_backends(case, expected, backends, tolerance=None):
    """Each of the backends gives output and log-sum-exp of a case as expected."""
    tolerance = tolerance or float64_tolerance(case)  # which takes longer than most calls: once for all backends
    for backend in backends:
        assert_same(case.attention(np.float64, backend), expected, case, backend, tolerance)


def assert_float32_promise(case):
    """Error <= 4 eps sum_j p |v| (1 + |logit|) against the float64 oracle of the same float32 numbers.

    The log-sum-exp may exceed every logit by log L_k, and is rounded itself: its error is relative to both.
    """
    expected, lse = case.attention(np.float64, "numpy", rounded=np.float32)
    actual, actual_lse = case.attention(np.float32, "numba")
    assert actual.dtype == actual_lse.dtype == np.float32
    top, weight = case.sizes(np.float32)
    # All products of PoPE's magnitudes have one sign: their sum is off by more the more there are, as a random walk is.
    polar = any(position.name == "pope" for position in case.positions)
    units, again = max(4.0, (2 * case.depth) ** 0.5) if polar else 4.0, repeated(case, "float32", "numba")
    tolerance = np.maximum(units * EPS32 * (1 + top)[..., None] * weight, np.finfo(np.float32).tiny)
    assert_close(actual, expected, tolerance, "out", again)
    size = np.maximum(top, np.abs(np.where(np.isneginf(lse), 0.0, lse)))
    assert_close(actual_lse, lse, units * EPS32 * (1 + size), "lse", again)


def slope(loss, step):
    """Fourth-order central difference of loss(t) at 0."""
    return (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step)


def assert_is_slope(grad, direction, loss, what="gradient"):
    """The gradient's product with a direction is the loss's slope along it.

    At a step of 1e-4 the stencil's own error is about 1e-16 times the fifth derivative, and rounding contributes
    1e-12 of the loss. Where a formula has kinks, two steps differ, and the answer is known that much less well.
    """
    found = float((grad * direction).sum())
    wide, narrow = slope(loss, 1e-4), slope(loss, 5e-5)
    scale = abs(loss(0.0)) + float(np.sqrt(np.square(grad * direction).sum())) + 1.0
    known = 1e-9 * scale + 4 * abs(wide - narrow)
    assert known <= 1e-5 * scale, "the difference quotients say too little"
    assert abs(found - narrow) <= known, f"{what} {found}, difference quotient {narrow}, within {known:.3g}"


def close(found, expected, atol=1e-13, rtol=0.0):
    """Numbers of about 1, up to a few roundings, or as far off as is said; NaN where NaN is expected."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape or not (found.ndim and expected.ndim), (found.shape, expected.shape)
    found, expected = np.broadcast_arrays(found, expected)
    with np.errstate(invalid="ignore"):
        allowed = atol + rtol * np.abs(expected)
        right = (found == expected) | (np.abs(found - expected) <= allowed) | (np.isnan(found) & np.isnan(expected))
    _raise_where(~right, found, expected, allowed, "result")


def assert_refused(*cases, kind=RelposError):
    """Calls without arguments, each with a pattern of what its error says."""
    for call, words in cases:
        with pytest.raises(kind, match=words):
            call()


def assert_error_names(call, words):
    """The call's error holds every one of the words."""
    with pytest.raises(RelposError) as raised:
        call()
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, str(raised.value)


def assert_memory_below(call, most):
    """A call is not refused with a limit of so many bytes, and allocates fewer."""
    with memory_limit(most):
        tracemalloc.start()
        try:
            call()
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()
