"""Calls that must be refused: with a RelposError, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.errors import RelposError
from tests.soaking import calls
from tests.soaking.calls import BACKENDS, pick
from tests.soaking.kinds import Report, bits

# By what is wrong: the arguments in place of the right ones, given q, k, v and the right keyword arguments.
Wrong = Callable[[Any, Any, Any], Mapping[str, Any]]


WRONG: Mapping[str, Wrong] = {
    "integer queries": lambda q, k, v: {"q": q.astype(np.int64)},
    "complex keys": lambda q, k, v: {"k": k.astype(np.complex64)},
    "long double values": lambda q, k, v: {"v": v.astype(np.longdouble)},
    "mixed dtypes": lambda q, k, v: {"v": v.astype(np.float64 if v.dtype != np.float64 else np.float32)},
    "a masked array": lambda q, k, v: {"k": np.ma.MaskedArray(np.asarray(k, np.float64))},
    "a list": lambda q, k, v: {"q": q.tolist()},
    "objects": lambda q, k, v: {"q": q.astype(object)},
    "a matrix": lambda q, k, v: {"q": q[0, 0].view(np.matrix)},
    "another head_dim": lambda q, k, v: {"k": np.concatenate([k, k], axis=-1)},
    "no head_dim": lambda q, k, v: {"q": q[..., :0], "k": k[..., :0]},
    "more keys than values": lambda q, k, v: {"k": np.concatenate([k, k], axis=-2)},
    "heads that do not divide": lambda q, k, v: {"k": np.repeat(k, 7, axis=1), "v": np.repeat(v, 7, axis=1)},
    "batches that do not broadcast": lambda q, k, v: {
        "k": np.repeat(k, 3, axis=0)[:5],
        "v": np.repeat(v, 3, axis=0)[:5],
    },
    "one axis": lambda q, k, v: {"q": q.reshape(-1)},
    "an integer mask": lambda q, k, v: {"mask": np.ones((q.shape[-2], k.shape[-2]), np.int64)},
    "a mask of another shape": lambda q, k, v: {"mask": np.ones((q.shape[-2] + 1, k.shape[-2] + 1), bool)},
    "a mask of too many axes": lambda q, k, v: {"mask": np.ones((2, 1, 1, 1, 1), bool)},
    "negative key_lengths": lambda q, k, v: {"key_lengths": -1},
    "key_lengths beyond the keys": lambda q, k, v: {"key_lengths": k.shape[-2] + 1},
    "key_lengths of floats": lambda q, k, v: {"key_lengths": 1.0},
    "a negative window": lambda q, k, v: {"window": -1},
    "a window of three": lambda q, k, v: {"window": (1, 2, 3)},
    "a scale that is NaN": lambda q, k, v: {"scale": float("nan")},
    "a scale that is text": lambda q, k, v: {"scale": "1"},
    "an offset that is no integer": lambda q, k, v: {"offset": 0.5},
    "an offset beyond any array": lambda q, k, v: {"offset": 1 << 63},
    "causal as a number": lambda q, k, v: {"causal": 1},
    "dropout without a source": lambda q, k, v: {"dropout": 0.5},
    "dropout of everything": lambda q, k, v: {"dropout": 1.0, "rng": np.random.default_rng(0)},
    "an unknown backend": lambda q, k, v: {"backend": "fortran"},
    "out of another shape": lambda q, k, v: {"out": np.zeros(3, q.dtype)},
    "out that is read-only": lambda q, k, v: {"out": _locked((*q.shape[:-1], v.shape[-1]), q.dtype)},
    "out that is an operand": lambda q, k, v: {"out": q if q.shape[-1] == v.shape[-1] else q[..., :1]},
    "something else as a position": lambda q, k, v: {"position": "t5"},
    "an encoding as a position": lambda q, k, v: {"position": rp.Sinusoidal(4)},
    "a table for other heads": lambda q, k, v: {"position": rp.T5(np.zeros((32, q.shape[1] + 1), np.float32))},
}


def _locked(shape: tuple[int, ...], dtype: Any) -> Any:
    out = np.full(shape, 7, dtype)
    out.flags.writeable = False
    return out


def refused(rng: np.random.Generator, report: Report) -> None:
    """One wrong argument; the right call before and after gives the same bits."""
    one = calls.plain_example(rng)
    what, backend = pick(rng, sorted(WRONG)), pick(rng, BACKENDS)
    report.where = f"{one.where}, {what}"
    right = {"q": one.q, "k": one.k, "v": one.v, "position": one.position, "backend": backend, **one.kwargs}
    wrong = WRONG[what](one.q, one.k, one.v)
    expected = bits(rp.attention(**right))
    target = np.full((*one.q.shape[:-1], one.v.shape[-1]), 7, one.q.dtype)
    given = {**right, "out": target, **wrong}
    before = bits(one.q, one.k, one.v)
    try:
        rp.attention(**given)
    except RelposError as error:
        report.expect(len(str(error)) > 10, f"{what}: the message says nothing: {error}")
    except Exception as error:  # noqa: BLE001  (anything else is what is looked for)
        report.problems.append(f"{what}: {type(error).__name__} in place of a RelposError: {error}")
    else:
        report.problems.append(f"{what}: accepted")
    report.expect((target == 7).all(), f"{what}: out= was written to")
    report.expect(bits(one.q, one.k, one.v) == before, f"{what}: an operand was written to")
    report.expect(bits(rp.attention(**right)) == expected, f"{what}: other bits afterwards")
    report.calls += 3
