"""Each kind of case: what is drawn, what is called, and how the answer is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

import relpos_np as rp
from relpos_np.backend import WITH_KERNELS
from relpos_np.errors import RelposError
from relpos_np.formulas.relshift import VARIANTS as SHIFTS
from relpos_np.testing import Example, tolerance
from relpos_np.testing.arguments import rebuilt
from relpos_np.testing.compare import EPS, ratio
from relpos_np.testing.records import gradients
from tests import layouts
from tests.soaking import calls
from tests.soaking.calls import BACKENDS, pick
from tests.soaking.interruption import Lines


@dataclass
class Report:
    """What one case found."""

    where: str = ""
    problems: list[str] = field(default_factory=list)
    # (backend, dtype, error in units of what is tolerated)
    errors: list[tuple[str, str, float]] = field(default_factory=list)
    calls: int = 0

    def judge(self, backend: str, dtype: str, error: float, what: str = "") -> None:
        self.errors.append((backend, dtype, error))
        if not error <= 1.0:
            self.problems.append(f"{what or 'output'} of {backend} in {dtype}: {error:.3g} times the tolerance")

    def expect(self, fine: Any, problem: str) -> None:
        if not fine:
            self.problems.append(problem)


def blur(one: Example) -> float:
    """How far float64 may be from the truth itself, in units of what is tolerated.

    Twice for two answers. A distance of n has an angle with an error of n/2 eps, in each of them, whose cosine counts
    as much as the part of the scores that it belongs to: n eps together, of which a unit is 4. Sums of n numbers, one
    after the other, are as exact, those of a gradient too.
    """
    (q_len, k_len), offset = (one.q.shape[-2], one.k.shape[-2]), one.kwargs.get("offset") or 0
    return 2 + (q_len + k_len + abs(offset)) / 4


def fair(backend: str, error: float, k_len: int) -> float:
    """An error in units of what kernels promise, 4 eps, as it may be found.

    A dense backend adds one number after the other, which may cost half an eps per key beside, most of all where all
    probabilities are the same.
    """
    return error if backend in WITH_KERNELS else error / (1 + k_len / 8)


def cancelled(name: str, summed: dict[str, Any], dtype: str) -> float:
    """What gradients of values and of their tables may be off, which are sums of weights times the output's gradient.

    These may cancel one another; `summed` are those of the magnitudes.
    """
    of_values = name.rpartition(".")[2] == "v" or "value" in name
    return 4 * EPS[dtype] * float(summed[name].max(initial=0)) if of_values else 0.0


def bits(*results: Any) -> bytes:
    """Everything in some results, for comparison bit by bit."""
    return b"".join(np.ascontiguousarray(x).tobytes() for x in results)


def forward(rng: np.random.Generator, report: Report) -> None:
    """Output and log-sum-exp, in a new array or a given one; the same bits again; operands stay as they are."""
    call, backend = calls.call(rng), pick(rng, BACKENDS)
    report.where = call.where
    before = bits(*call.operands)
    out, lse = call.run(backend, return_lse=True)
    error, one = call.error(out, lse), call.example
    error = error / blur(one) if call.dtype == "float64" else fair(backend, error, one.k.shape[-2])
    report.judge(backend, call.dtype, error)
    report.expect(bits(*call.operands) == before, f"{backend} wrote to an operand")
    target = np.full((*out.shape[:-1], out.shape[-1] + 2), 7.0, out.dtype)
    inner = target[..., 1:-1] if rng.random() < 0.5 else np.full(out.shape, np.nan, out.dtype)
    again = call.run(backend, out=inner)
    report.expect(again is inner, "out= was not returned")
    report.expect(bits(again) == bits(out), f"{backend} gave other bits when called again with out=")
    report.expect((target[..., [0, -1]] == 7.0).all(), "the memory beside out= was written to")
    report.calls += 2


# Of schemes that begin anew in each sequence.
_RESTARTING: tuple[Callable[[np.random.Generator, int], Any], ...] = (
    lambda rng, heads: None,
    lambda rng, heads: rp.T5(rng.standard_normal((8, heads)), max_distance=20),
    lambda rng, heads: rp.Shaw(rng.standard_normal((9, 8)), rng.standard_normal((9, 8))),
    lambda rng, heads: (rp.Rotary(8), rp.ALiBi()),
)


def packed(rng: np.random.Generator, report: Report) -> None:
    """Sequences one after the other, or items with offsets of their own: the bits of separate calls, and back."""
    backend, dtype = pick(rng, BACKENDS), pick(rng, ("float16", "float32", "float64"))
    counts = rng.integers(0, 80, int(rng.integers(1, 7)))
    bounds, length = np.cumsum([0, *counts]), int(counts.sum())
    q, k, v = (rng.standard_normal((2, heads, length, 8)).astype(dtype) for heads in (4, 2, 2))
    call: dict[str, Any] = {"position": pick(rng, _RESTARTING)(rng, 4), "backend": backend}
    if isinstance(call["position"], rp.Scheme):
        call["position"] = rebuilt(call["position"], np.dtype(dtype))
    call |= {"causal": bool(rng.integers(2)), "softcap": pick(rng, (None, 3.0)), "window": pick(rng, (None, 11))}
    by_offset = rng.random() < 0.3
    report.where = f"{'offsets' if by_offset else 'segments'} {bounds.tolist()}, {dtype}, {backend}: {call}"
    if by_offset:
        given: dict[str, Any] = {"offset": rng.integers(-3, 4, 2)}
        parts = [((slice(b, b + 1),), {"offset": int(given["offset"][b])}) for b in range(2)]
    else:
        given = {"segments": bounds}
        parts = [((..., slice(a, b), slice(None)), {}) for a, b in pairwise(bounds)]
    out = rp.attention(q, k, v, **given, **call)
    grads = rp.attention_vjp(q, k, v, grad_out=v.repeat(2, axis=1), **given, **call)
    for at, own in parts:
        operands = [x[at] for x in (q, k, v)]
        report.expect(bits(out[at]) == bits(rp.attention(*operands, **own, **call)), f"other bits at {at}")
        one = rp.attention_vjp(*operands, grad_out=v[at].repeat(2, axis=1), **own, **call)
        for name in "qkv":
            same = bits(getattr(grads, name)[at]) == bits(getattr(one, name))
            report.expect(same, f"other bits of the gradient of {name} at {at}")
        report.calls += 2


def gradient(rng: np.random.Generator, report: Report) -> None:
    """Gradients of operands and of every trained array: no worse than NumPy's, or within a few roundings."""
    call, backend = calls.call(rng), pick(rng, ("numba", "numba", "numba", "terms"))
    report.where = call.where
    one = call.example
    grad_out = rng.standard_normal((*one.q.shape[:-1], one.v.shape[-1])).astype(one.q.dtype)

    def found(by: str, one_call: calls.Call, **more: Any) -> dict[str, Any]:
        more = {"grad_out": grad_out.astype(one_call.dtype)} | more
        return gradients(rp.attention_vjp(*one_call.operands, backend=by, **one_call.options(), **more))

    wide = call.cast("float64")
    expected, trusted = found("numpy", wide), found("numpy", call)
    # Scores have the gradient p (dp - delta), delta = g . o, and both may be large where the difference is 0. What
    # delta is rounded by is added to all scores of a row, as the gradient of their log-sum-exp would be.
    values = np.nan_to_num(np.abs(one.v.astype(np.float64)), posinf=0.0)
    delta = np.abs(grad_out.astype(np.float64)).sum(-1) * values.max(initial=0.0)
    rounded = found("numpy", wide, grad_out=np.zeros(grad_out.shape), grad_lse=delta)
    summed = found("numpy", wide, grad_out=np.abs(grad_out).astype(np.float64))
    for name, actual in found(backend, call).items():
        largest = max(1.0, *(float(np.abs(x[name]).max(initial=0.0)) for x in (expected, rounded)))
        floor = 2 * tolerance(
            call.dtype, logit_bound=one.logit_bound, depth=one.products, magnitude=largest / (1 - call.dropout)
        )
        floor *= blur(one) if call.dtype == "float64" else 1
        allowed = floor + 4 * ratio(trusted[name], expected[name], 1.0) + cancelled(name, summed, call.dtype)
        report.judge(backend, call.dtype, ratio(actual, expected[name], allowed), name)
    report.calls += 2


def shift(rng: np.random.Generator, report: Report) -> None:
    """rel_shift of any variant, dtype and layout: exactly what NumPy's views give."""
    variant = pick(rng, SHIFTS)
    q_len, k_len = pick(rng, calls.SHORT + calls.LONG), pick(rng, calls.SHORT + calls.LONG)
    k_len = max(k_len, q_len)
    columns = {"conformer": q_len + k_len - 1, "xlnet": q_len + k_len, "xlnet_uni": k_len + 1}.get(variant, k_len)
    lead = pick(rng, ((), (2,), (2, 3)))
    dtype = pick(rng, ("float16", "bfloat16", "float32", "float64", "int64", "complex64"))
    x = (rng.standard_normal((*lead, q_len, columns)) * 100).astype(dtype)
    # bfloat16 has one byte order, and integers have no NaN to put between elements.
    unusable = {"bfloat16": {"big-endian"}, "int64": {"every other"}}.get(dtype, set())
    layout = pick(rng, sorted(layouts.LAYOUTS.keys() - unusable))
    x = layouts.LAYOUTS[layout](x)
    report.where = f"rel_shift {variant}, {dtype}, {layout}: {x.shape}"
    expected = rp.rel_shift(x, variant=variant, backend="numpy")
    actual = rp.rel_shift(x, variant=variant, backend="numba")
    same = actual.shape == expected.shape and bits(actual) == bits(expected.astype(actual.dtype))
    report.judge("numba", str(dtype), 0.0 if same else np.inf, "rel_shift")
    report.calls += 1


def interrupted(rng: np.random.Generator, report: Report) -> None:
    """A Ctrl-C or a failed allocation at any line of the library; the next call has the bits it had before."""
    call, error = calls.call(rng), pick(rng, (KeyboardInterrupt, MemoryError))
    backend = pick(rng, BACKENDS)
    grad = rng.standard_normal((*call.example.q.shape[:-1], call.example.v.shape[-1])).astype(call.example.q.dtype)
    backward = rng.random() < 0.4
    report.where = f"{call.where}, {error.__name__}{' in the backward pass' if backward else ''}"

    def run() -> bytes:
        if not backward:
            return bits(*call.run(backend, return_lse=True))
        found = rp.attention_vjp(*call.operands, grad_out=grad, backend=backend, **call.options())
        return bits(found.q, found.k, found.v, *found.position.values())

    counted = Lines()
    first, before = counted.run(run), bits(*call.operands)
    planted = Lines(int(rng.integers(1, counted.seen + 1)), error)
    try:
        planted.run(run)
    except error as caught:
        report.expect("planted" in str(caught), f"{caught!r} was not the one that was planted")
    except RelposError as caught:
        # A failed allocation may be reported as the library's own.
        report.expect(isinstance(caught, MemoryError), f"{caught!r} in place of {error.__name__}")
    else:
        # What was cached by then takes fewer lines.
        report.expect(planted.seen < planted.at, f"{error.__name__} at line {planted.at} was swallowed")
    report.expect(run() == first, f"{backend} gave other bits after {error.__name__}")
    report.expect(bits(*call.operands) == before, f"{backend} wrote to an operand")
    report.calls += 3


Kind = Callable[[np.random.Generator, Report], None]
