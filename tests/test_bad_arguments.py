"""Every argument of every scheme, changed in every way: it is named in an error, or loops understand it the same way.

Nothing is listed: schemes come from the register, arguments from their constructors, changes from what an argument is.
"""

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing.arguments import arguments
from tests.compare import assert_backends, assert_same
from tests.strategies import EVERY, Case, Position

SIZES = {"kv_heads": 1, "group": 2, "q_len": 4, "k_len": 5, "depth": 4, "v_dim": 4}
FAR = 1e30
WORDS = ("no such word", 10**30, np.nan, np.inf, -1, 0, 0.5, 3, True, None, (), [1.0])


def changed(x):
    """What an argument might be by mistake, by name."""
    if not isinstance(x, np.ndarray):
        return {repr(wrong): wrong for wrong in WORDS}
    found = {
        "one more axis": x[None],
        "an axis behind": x[..., None],
        "not a number": np.full(x.shape, np.nan),
        "infinite": np.full(x.shape, -np.inf),
        "negative": -np.abs(x.astype(np.float64)),
        "far": np.full(x.shape, FAR),
        "zero": np.zeros_like(x),
        "other numbers": x.astype(np.int64 if x.dtype.kind == "f" else np.float64),
        "list": x.tolist(),
    }
    for axis in range(x.ndim):
        if x.dtype != np.bool_:  # which may be without their first axes, as loops may not
            found[f"without axis {axis}"] = x.take(0, axis)
        found[f"one less along {axis}"] = np.delete(x, 0, axis)
        found[f"one more along {axis}"] = np.concatenate([x, x.take([0], axis)], axis)
        found[f"none along {axis}"] = x.take([], axis)
        found[f"one along {axis}"] = x.take([0], axis)
    return found


def case_of(position, **lengths):
    return Case(1, ((),) * 3, (), **(SIZES | lengths), positions=(position,))


def places():
    """Names of schemes in every form, with each of their arguments."""
    return [(name, at) for name in EVERY for at in arguments(case_of(EVERY[name]).schemes(np.float64)[0])]


@pytest.mark.parametrize(("name", "argument"), places())
def test_arguments_are_refused_or_understood(name, argument):
    """By an error that names an argument; numbers that are not finite may be in tables, and are then in the answer."""
    case = case_of(EVERY[name])
    scheme = case.schemes(np.float64)[0]
    given = arguments(scheme)
    for how, wrong in changed(given[argument]).items():
        try:
            other = type(scheme)(**{**given, argument: wrong})
            found = rp.attention(*case.operands(np.float64), position=other, backend="terms", return_lse=True)
        except rp.RelposError as error:
            said = str(error)
            if not any(one in said for one in given):
                pytest.fail(f"{how}: {said}")
            continue
        if isinstance(wrong, np.ndarray):
            if not (np.abs(wrong) < FAR).all():
                continue
            if np.array_equal(wrong.ravel(), given[argument].ravel()):  # axes of one entry, as files have them
                assert_same(found, case.attention(np.float64, "terms"), case)
                continue
        position = Position(EVERY[name].name, make=lambda _, other=other: other)
        again = case_of(position, q_len=case.q_len, k_len=case.k_len)
        assert_backends(again, again.naive(), ("terms",))
