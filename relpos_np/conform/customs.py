"""Customs: what frameworks disagree on where no result is the right one, and which of them do what.

Rows without keys, NaN behind a mask and the alignment of more queries than keys are told as differences of convention,
and not as mistakes. An answer that follows one is right everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from relpos_np.conform.altered import call_of, remade, seen
from relpos_np.conform.yardstick import Answer
from relpos_np.formulas.softmax import repeat_heads
from relpos_np.testing.compare import largest
from relpos_np.testing.example import Example
from relpos_np.types import Array

CONVENTIONS = ("torch", "flash", "onnx")


@dataclass(frozen=True)
class Custom:
    """What is done, who does it, and whether a wrong answer follows it."""

    words: str
    whose: tuple[str, ...]
    followed: Callable[[Answer], bool]


def custom_of(answer: Answer, meant: str | None) -> Custom | None:
    """The custom that makes an answer wrong, those that are meant first; None where it is wrong otherwise too."""
    if any(x.shape != answer.expected[name].shape for name, x in answer.returned.items()):
        return None
    fewer = answer.example.q.shape[2] < answer.example.k.shape[2]
    for custom in sorted(CUSTOMS, key=lambda each: meant not in each.whose):
        # With fewer queries than keys, who aligns them top-left is mistaken, or says so.
        if custom.followed is _top_left and fewer and meant not in custom.whose:
            continue
        if custom.followed(answer):
            return custom
    return None


def may_apply(one: Example, expected: Mapping[str, Array]) -> bool:
    """Whether there is anything in a case that a custom decides."""
    odd = any(np.isnan(x).any() for x in (one.k, one.v)) or not np.isfinite(expected["lse"]).all()
    return bool(odd or one.q.shape[2] != one.k.shape[2] or one.family == "borders")


def _right(x: Array, expected: Array, allowed: float) -> Array:
    """Which elements are right."""
    with np.errstate(invalid="ignore"):
        return np.asarray((x == expected) | (np.abs(x - expected) <= allowed))


def _but_for(answer: Answer, rows: Array, there: Mapping[str, Array]) -> bool:
    """Whether everything is right but for some rows (B, H, L_q), which are `there`; gradients may be NaN."""
    for name, x in answer.returned.items():
        right = _right(x, answer.expected[name], answer.allowed[name])
        if name in there:
            right = right | (there[name] & (rows if name == "lse" else rows[..., None]))
        elif name.startswith("grad_"):
            right = right | np.isnan(x)
        if not right.all():
            return False
    return bool(rows.any())


def _of_results(answer: Answer, test: Callable[[Array], Array]) -> dict[str, Array]:
    return {name: test(x) for name, x in answer.returned.items() if name in ("out", "lse")}


def _nan_rows(answer: Answer) -> bool:
    return _but_for(answer, ~np.isfinite(answer.expected["lse"]), _of_results(answer, lambda x: ~np.isfinite(x)))


def _averaged_rows(answer: Answer) -> bool:
    one, slack, out = answer.example, answer.allowed["out"], answer.returned["out"]
    v = np.nan_to_num(repeat_heads(one.v, one.q.shape[1]))
    least, most = (edge(axis=-2, keepdims=True) for edge in (v.min, v.max))
    there = _of_results(answer, np.isfinite) | {"out": (out >= least - slack) & (out <= most + slack)}
    return _but_for(answer, ~np.isfinite(answer.expected["lse"]), there)


def _infinite_lse(answer: Answer) -> bool:
    there = {name: np.isposinf(x) for name, x in answer.returned.items() if name == "lse"}
    return _but_for(answer, np.isneginf(answer.expected["lse"]), there)


def _nan_values(answer: Answer) -> bool:
    one = answer.example
    holds = np.asarray(np.isnan(one.k).any(axis=(2, 3)) | np.isnan(one.v).any(axis=(2, 3)))[..., None, None]
    rows = np.broadcast_to(repeat_heads(holds, one.q.shape[1])[..., 0], answer.expected["lse"].shape)
    return _but_for(answer, rows, _of_results(answer, np.isnan))


def _top_left(answer: Answer) -> bool:
    one, call = answer.example, call_of(answer.example)
    if not call.causal or call.q_len == call.k_len or call.offset is not None:
        return False
    options = {name: value for name, value in one.kwargs.items() if name != "causal"}
    other = replace(one, kwargs=options | {"mask": seen(one, hidden=0)})
    results = dict(zip(("out", "lse"), other.run("numpy"), strict=True))
    found = [name for name in results if name in answer.returned]
    # Of fewer keys the averages are larger, and so are their roundings.
    larger = {name: max(1.0, largest(results[name]) / (largest(answer.expected[name]) or 1.0)) for name in found}
    return all(_right(answer.returned[n], results[n], larger[n] * answer.allowed[n]).all() for n in found)


def _exact_borders(answer: Answer) -> bool:
    one = answer.example
    if one.family != "borders" or getattr(one.position, "rounding", "") != "float32":
        return False
    other = remade(one, rounding="exact")
    return bool(_right(answer.returned["out"], other, answer.allowed["out"]).all())


# On a border of buckets the last bit of a logarithm in float32 decides, and vector code has another than scalar code.
BORDERS = Custom("decides buckets exactly where float32 is meant: that is variant 'exact'", CONVENTIONS, _exact_borders)
CUSTOMS = (
    BORDERS,
    Custom(
        "divides by a sum of 0 for queries that may attend no key: their output is NaN", ("torch", "onnx"), _nan_rows
    ),
    Custom(
        "gives queries that may attend no key an average of values: a large negative number stands for -inf",
        ("torch", "onnx"),
        _averaged_rows,
    ),
    Custom("the log-sum-exp of queries that may attend no key is +inf", ("flash",), _infinite_lse),
    Custom("values of excluded keys are multiplied by 0, and 0 times NaN is NaN", CONVENTIONS, _nan_values),
    Custom(
        "aligns the causal mask top-left: query i attends keys up to i, not up to i + L_k - L_q",
        ("torch", "onnx"),
        _top_left,
    ),
)
