"""Run an implementation on seeded cases, family by family, and say what is wrong with it and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relpos_np._contract import check
from relpos_np.conform.formats import DTYPES, Format, format_of
from relpos_np.conform.frameworks import Framework, framework_of, loaded
from relpos_np.conform.implementation import Implementation
from relpos_np.conform.report import Family, Finding, Report
from relpos_np.conform.suspects import Suspect, suspects
from relpos_np.conform.yardstick import Truth, distance, truth
from relpos_np.errors import RelposError, RelposTypeError, RelposValueError
from relpos_np.schemes.registry import SCHEMES
from relpos_np.testing.arguments import changed
from relpos_np.testing.cases import checked_families, checked_features
from relpos_np.testing.example import Example
from relpos_np.testing.families import FAMILIES, of_family
from relpos_np.types import Array

# How much nearer to a suspect's output than to the truth an answer is, for the suspect to be the cause.
_NEARER = 0.02
# Cosine of the errors with those of a suspect that rounds.
_ALIKE = 0.7


def conform(
    function: str | Callable[..., Any],
    scheme: str,
    *,
    variant: str | None = None,
    framework: str | None = None,
    dtype: str = "float32",
    grad: bool = False,
    families: str | Iterable[str] | None = None,
    supports: Iterable[str] | None = None,
    always: Mapping[str, Any] | None = None,
    layout: str = "bhld",
    device: str | None = None,
    seed: int = 0,
) -> Report:
    r"""Test an implementation of attention in any framework against a scheme.

    It is called as ``function(q, k, v, ...)`` with further arguments by name: the arrays and numbers of the scheme
    under the names of its constructor (``table`` of `T5`, ``slopes`` of `ALiBi`), options under those of
    `relpos_np.attention`. What it does not name it is not given, and cases that need it are reported as not run.

    Parameters
    ----------
    function : callable or str
        The implementation, or ``"package.module:name"``, or the path of an ONNX model whose inputs have these names.
    scheme : str
        Key in `relpos_np.SCHEMES`, but for those that are added to inputs.
    variant : str, optional
        One of the scheme's variants; default the first.
    framework : {"numpy", "torch", "jax", "onnx"}, optional
        Whose arrays it takes; default the one that the function's file imports. Results may be arrays of any package
        that has DLPack.
    dtype : {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
        Of the arrays it gets. With float8 only q, k and v are of it, and all else, with the output, of bfloat16.
    grad : bool
        Whether to compare gradients of q, k, v and of the scheme's arrays, by autograd of torch or JAX.
    families : str or iterable of str, optional
        Which of `testing.FAMILIES` it must pass: a case of these that is refused or cannot be run is an error. Default
        all that it can run, found out by trying.
    supports : iterable of str, optional
        What it supports, as in `testing.cases`: other cases are not tried, and raising an error in these is wrong.
    always : mapping, optional
        What it does as if it had been told: ``{"scale": 1.0}`` where it does not scale, ``{"causal": True}``.
    layout : {"bhld", "blhd"}
        Axes of q, k, v and of the output: batch, heads, length and head_dim, or length before heads.
    device : str, optional
        Of torch, default "cpu".
    seed : int
        Of the numbers.

    Returns
    -------
    Report
        ``report.ok``; ``print(report.text())`` for people.

    Raises
    ------
    RelposError
        If the arguments cannot be used, or a package is missing; errors of the function are reported, and not raised.

    Notes
    -----
    An answer in a dtype is compared with the exact one for the same numbers, and may be 2 times as far from it,
    gradients 3 times, as a straightforward implementation in that dtype, which stores every intermediate result; and
    one rounding further. These are the factors of FlashAttention's tests: sums in another order have errors of the same
    size, and rarely more than that between the largest of each. float32 that was rounded to half precision on the way
    fails.

    A wrong answer is compared with what known mistakes lead to: another variant, another alignment, a scale that is
    missing. `Report.causes` are those that give the same numbers.
    """
    check.choice("scheme", scheme, tuple(SCHEMES))
    if SCHEMES[scheme].kind == "absolute":
        raise RelposValueError(f"scheme: {scheme} is added to inputs before attention; expected a scheme of attention")
    variants = SCHEMES[scheme].variants
    if variant is not None:
        check.choice("variant", variant, variants)
    chosen = variant or next(iter(variants), None)
    stored = format_of(dtype)
    wanted = tuple(FAMILIES) if families is None else checked_families(families)
    able = None if supports is None else checked_features(supports)
    if isinstance(function, str):
        subject, function = function, loaded(function, framework)
        framework = "onnx" if framework is None and subject.endswith(".onnx") else framework
    else:
        if not callable(function):
            raise RelposTypeError(f"function: expected a callable, found {type(function).__name__}")
        subject = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
    home = framework_of(framework, function, device)
    if check.flag("grad", grad):
        _can_differentiate(home, stored)
    tested = Implementation(function, scheme, home, stored, always or {}, layout)
    bench = _Bench(tested, stored, grad, check.integer("seed", seed, 0))
    known = suspects(scheme, chosen, format_of(stored.computed))
    found = []
    for name in FAMILIES:
        if name not in wanted:
            continue
        cases = list(of_family(name, scheme, variant=chosen, dtype=np.float64, seed=seed))
        if cases:
            found.append(bench.family(name, cases, able, required=families is not None))
        elif families is not None:
            raise RelposValueError(f"families: {scheme} has no case of {name}")
    told = tuple(bench.explained(one, known) for one in found)
    return Report(subject, scheme, chosen, home.name, home.version, dtype, grad, told, seed)


def _can_differentiate(home: Framework, stored: Format) -> None:
    if not home.differentiates:
        raise RelposValueError(f"grad: {home.name} has no autograd; expected framework torch or jax")
    if stored.name != stored.computed:
        raise RelposValueError(f"grad: {stored.name} only stores numbers; expected one of {', '.join(DTYPES[:4])}")


@dataclass(frozen=True, eq=False)
class Answer:
    """A case, what was returned for it by name, what is right, and how far off that may be."""

    example: Example
    returned: Mapping[str, Array]
    expected: Mapping[str, Array]
    allowed: Mapping[str, float]


class _Bench:
    """Runs cases of one implementation, and keeps wrong answers to be explained."""

    def __init__(self, tested: Implementation, stored: Format, grad: bool, seed: int) -> None:
        self.tested, self.stored, self.grad, self.seed = tested, stored, grad, seed
        # Wrong ones, by edge.
        self.answers: dict[str, Answer] = {}

    def family(self, name: str, cases: list[Example], able: frozenset[str] | None, *, required: bool) -> Family:
        """Run the cases of one family."""
        found = [self._finding(name, one, able) for one in cases]
        return Family(name, tuple(sorted(found, key=lambda one: one.work)), required=required)

    def _finding(self, family: str, raw: Example, able: frozenset[str] | None) -> Finding:
        one = self._stored(raw)
        (batch, heads, q_len, dim), (_, kv_heads, k_len, v_dim) = one.q.shape, one.v.shape
        where = f"batch={batch}, H={heads}, H_kv={kv_heads}, L_q={q_len}, L_k={k_len}, D={dim}, D_v={v_dim}"
        about = (family, one.edge, where, batch * heads * q_len * k_len * (dim + v_dim))
        if able is not None and not one.needs <= able:
            missing = ", ".join(sorted(one.needs - able))
            return Finding(*about, "not run", reason=f"supports leaves out {missing}")
        fitted, reason = self.tested.fitted(one)
        if fitted is None:
            return Finding(*about, "not run", reason=reason)
        grad_out = None
        if self.grad:
            rng = np.random.default_rng([self.seed, q_len])
            kept = format_of(self.stored.computed)
            grad_out = kept.rounded(rng.standard_normal((batch, heads, q_len, v_dim)))
        try:
            with np.errstate(all="ignore"):
                returned = self.tested.run(fitted, grad_out)
        except RelposError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the function raises is what is to be reported
            reason = f"raises {type(error).__name__}: {' '.join(str(error).split())[:160]}".rstrip(": ")
            return Finding(*about, "refused" if able is None else "wrong", reason=reason)
        trained = tuple(self.tested.arrays(fitted))
        right = truth(fitted, self.stored, grad_out, trained)
        answers = {name: x for name, (x, _) in returned.items() if name in right.expected}
        errors = {name: distance(x, right.expected[name]) for name, x in answers.items()}
        allowed = {name: right.allowed(name, returned[name][1]) for name in answers}
        reason = self._in_words(answers, right, errors, allowed)
        verdict = "right" if all(errors[name] <= allowed[name] for name in errors) else "wrong"
        if verdict == "wrong":
            self.answers[one.edge] = Answer(fitted, answers, right.expected, allowed)
        return Finding(*about, verdict, errors, allowed, reason if verdict == "wrong" else "")

    def _stored(self, one: Example) -> Example:
        """The case with numbers that the format holds."""
        q, k, v = (self.stored.rounded(x) for x in (one.q, one.k, one.v))
        return replace(one, q=q, k=k, v=v, kwargs=changed(one.kwargs, format_of(self.stored.computed).rounded))

    @staticmethod
    def _in_words(
        answers: Mapping[str, Array], right: Truth, errors: Mapping[str, float], allowed: Mapping[str, float]
    ) -> str:
        """What can be seen without a suspect."""
        for name, x in answers.items():
            if errors[name] <= allowed[name]:
                continue
            expected = right.expected[name]
            if x.shape != expected.shape:
                return f"{name} has shape {x.shape}, expected {expected.shape}"
            empty = ~np.isfinite(right.expected["lse"])
            if np.isnan(x).any():
                rows = np.isnan(x) if x.ndim == empty.ndim else np.isnan(x).any(axis=-1)
                if rows.shape == empty.shape and not (rows & ~empty).any():
                    return (
                        f"{name} is NaN for queries that may attend no key, expected {0 if name == 'out' else '-inf'}"
                    )
                return f"{name} holds NaN"
            if np.isinf(x[np.isfinite(expected)]).any():
                return f"{name} holds infinities"
            if name.startswith("grad_"):
                factor = float((x * expected).sum() / max(float((expected * expected).sum()), 1e-300))
                if not 0.9 < factor < 1.1 and distance(x, factor * expected) <= 2 * allowed[name]:
                    return f"{name} is {factor:.4g} times what it should be"
        return ""

    def explained(self, one: Family, known: list[Suspect]) -> Family:
        """The family with the first suspect that gives all its wrong answers, if there is one."""
        wrong = [
            self.answers[case.edge] for case in one.findings if case.verdict == "wrong" and case.edge in self.answers
        ]
        if not wrong:
            return one
        causes = [(self._matches(suspect), suspect.cause) for suspect in known if self._gives(suspect, wrong)]
        if causes:
            most = max(count for count, _ in causes)
            cause = next(words for count, words in causes if count == most)
        else:
            cause = self._seen(wrong)
        return Family(one.name, one.findings, cause, one.required)

    def _matches(self, suspect: Suspect) -> int:
        """How many wrong answers of all families it gives."""
        return sum(self._gives(suspect, [answer]) for answer in self.answers.values() if not answer.example.long)

    @staticmethod
    def _gives(suspect: Suspect, wrong: list[Answer]) -> bool:
        """Whether it explains these answers: gives what was returned where it makes a difference, at least once."""
        some = False
        for one in wrong:
            out, expected, allowed = one.returned["out"], one.expected["out"], one.allowed["out"]
            off = distance(out, expected)
            if off <= allowed:
                continue  # only gradients or the log-sum-exp are wrong
            other = suspect.output(one.example)
            if other is None:
                return False
            if suspect.rough:
                apart, meant = out - expected, other - expected
                size = float(np.sqrt((apart**2).sum() * (meant**2).sum()))
                if not (apart * meant).sum() > _ALIKE * size:
                    return False
            elif not distance(out, other) <= max(2 * allowed, _NEARER * off if np.isfinite(off) else 0.0):
                return False
            some = True
        return some

    @staticmethod
    def _seen(wrong: list[Answer]) -> str:
        """What a kind of case alone shows, where no suspect gives the numbers."""
        one, out, expected = wrong[0].example, wrong[0].returned["out"], wrong[0].expected["out"]
        empty = ~np.isfinite(wrong[0].expected["lse"])
        if one.family == "large_scores" and not np.isfinite(out).all():
            return "the exponential overflows: the largest score is not subtracted first"
        if one.family == "nan_excluded" and np.isnan(out).any():
            return "values of excluded keys are multiplied by 0, and 0 times NaN is NaN"
        if one.family == "excluded_rows" and empty.any() and out.shape == expected.shape:
            if np.isnan(out[empty]).any():
                return "divides by a sum of 0 for queries that may attend no key"
            if np.isfinite(out[empty]).all() and distance(out[~empty], expected[~empty]) < np.inf:
                return (
                    "gives queries that may attend no key an average of values: a large negative number stands for -inf"
                )
        return ""
