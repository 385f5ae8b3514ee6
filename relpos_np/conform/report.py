"""What a test of conformance found, by family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relpos_np.conform.arithmetic import IN_FLOAT32

# Exit codes: every case that ran is right; one is wrong; (2: unusable arguments;) nothing ran.
CONFORMS, WRONG, NOTHING_RAN = 0, 1, 3
# By how a cause begins, and of another variant: what to say of an implementation that is meant to do that.
_FLAGS = {
    "scale missing": "--always scale=1.0",
    "ignores causal": "--except causal",
    "aligns the causal mask top-left": "--conventions torch",
    "makes products of q, k and v in TF32": "--arithmetic tf32",
    "makes products of q, k and v in bfloat16": "--arithmetic half_products",
    "has keys and values stored in int8": "--arithmetic int8_cache",
    "has keys and values stored in float8": "--arithmetic float8_cache",
    "sums over keys in": "--arithmetic half_sums",
    IN_FLOAT32: "--arithmetic float32",
    "takes (batch, length, heads, head_dim)": "--layout blhd",
    "takes (batch, heads, length, head_dim)": "--layout bhld",
}
_VARIANT = re.compile(r"that is variant '(\w+)'")
# Of a reason in a table.
_WIDTH = 72


@dataclass(frozen=True)
class Finding:
    """One case.

    Attributes
    ----------
    family, edge : str
        Of the `Example`.
    where : str
        Its sizes.
    work : int
        Scores times head_dim: what "smallest" goes by.
    verdict : {"right", "wrong", "convention", "refused", "not run"}
        "convention": it does what some frameworks do where no result is the right one. "refused": the function raised
        an error. "not run": it does not take what the case needs.
    errors, allowed : mapping of str to float
        Largest error of each result, and what is allowed.
    reason : str
        Why it was refused or not run, or what is wrong in words.
    proves : bool
        Whether a right answer proves anything: with one key every output is its value.
    rough : mapping of str to float
        Typical errors of output and log-sum-exp, if these have enough numbers, in units of what is allowed: the median
        over queries of the root mean square.
    whose : tuple of str
        Who has the convention: names for ``conventions=``.
    accepted : bool
        Whether it was asked for.
    """

    family: str
    edge: str
    where: str
    work: int
    verdict: str
    errors: Mapping[str, float] = field(default_factory=dict)
    allowed: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    proves: bool = True
    rough: Mapping[str, float] = field(default_factory=dict)
    whose: tuple[str, ...] = ()
    accepted: bool = False

    @property
    def ratio(self) -> float:
        """The largest error in units of what is allowed, or the typical one if that alone is too large."""
        largest = max((_ratio(self.errors[name], self.allowed[name]) for name in self.errors), default=0.0)
        rough = max(self.rough.values(), default=0.0)
        return rough if largest <= 1 < rough else largest

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of the results that are wrong."""
        return tuple(n for n, error in self.errors.items() if not error <= self.allowed[n] or self.rough.get(n, 0) > 1)


def _ratio(error: float, allowed: float) -> float:
    return error / allowed if allowed else (np.inf if error else 0.0)


@dataclass(frozen=True)
class Family:
    """The cases of one family, and why they are wrong.

    Attributes
    ----------
    name : str
        Key in `testing.FAMILIES`.
    findings : tuple of Finding
        Smallest first.
    cause : str
        What the wrong answers equal instead; empty if nothing that is known.
    required : bool
        Whether it was asked for, so that not running it is an error.
    shrunk : Finding, optional
        A smaller case than any of these that fails in the same way.
    """

    name: str
    findings: tuple[Finding, ...]
    cause: str = ""
    required: bool = False
    shrunk: Finding | None = None

    def _of(self, *verdicts: str) -> list[Finding]:
        return [one for one in self.findings if one.verdict in verdicts]

    @property
    def ran(self) -> int:
        """How many cases gave an answer."""
        return len(self._of("right", "wrong", "convention"))

    @property
    def smallest(self) -> Finding | None:
        """The smallest case that is wrong, or else differs by convention."""
        found = self._of("wrong") or self._of("convention")
        return self.shrunk or min(found, key=lambda one: one.work, default=None)

    @property
    def verdict(self) -> str:
        """One of "right", "wrong", "convention", "partly" (right where it ran), "not run"."""
        if self._of("wrong") or (self.required and self.ran < len(self.findings)):
            return "wrong"
        if self._of("convention"):
            return "convention"
        if not self.ran:
            return "not run"
        return "partly" if self._of("refused", "not run") else "right"

    @property
    def reason(self) -> str:
        """Why cases did not run: the first reason, and how many others there are."""
        found = dict.fromkeys(one.reason for one in self._of("refused", "not run"))
        first = next(iter(found), "")
        return f"{first} (and {len(found) - 1} more)" if len(found) > 1 else first

    @property
    def ratio(self) -> float:
        """The largest error of its cases in units of what is allowed."""
        return max((one.ratio for one in self._of("right", "wrong", "convention")), default=0.0)

    @property
    def differs(self) -> tuple[str, ...]:
        """Who has a convention that was not asked for: names for ``conventions=``."""
        return next((one.whose for one in self._of("convention") if not one.accepted), ())


@dataclass(frozen=True)
class Report:
    """What `conform` found.

    Attributes
    ----------
    subject : str
        Name of the function.
    scheme, variant : str
        What it was compared with; variant is None for a scheme without.
    framework, version, dtype : str
        What ran it, and the format of its operands.
    grad : bool
        Whether gradients were compared.
    families : tuple of Family
        In their order.
    seed : int
        Of the numbers.
    arithmetic : str
        How it computes, in words: what was asked for, or the finest that its errors are explained by.
    """

    subject: str
    scheme: str
    variant: str | None
    framework: str
    version: str
    dtype: str
    grad: bool
    families: tuple[Family, ...]
    seed: int = 0
    arithmetic: str = ""

    @property
    def ran(self) -> int:
        """How many cases gave an answer."""
        return sum(one.ran for one in self.families)

    @property
    def unproven(self) -> str:
        """Why right answers prove nothing, or nothing."""
        findings = [one for family in self.families for one in family.findings]
        right = [one for one in findings if one.verdict == "right" or one.accepted]
        if not any(one.proves for one in right):
            return "NOTHING RAN: no case proves anything; the reasons are above"
        plain = next((one for one in self.families if one.name == "self"), None)
        if plain is not None and plain.verdict == "partly":
            return (
                f"NOTHING PROVEN: self-attention ran in {plain.ran} of {len(plain.findings)} cases ({plain.reason}); "
                "say which sizes it takes (head_dim, lengths, heads, batch)"
            )
        if plain is not None and plain.verdict == "not run":
            return f"NOTHING PROVEN: self-attention did not run ({plain.reason}); ask for the families that it has"
        return ""

    @property
    def exit_code(self) -> int:
        """0 if all that ran is right, 1 if something is wrong, 3 if nothing ran, or nothing that proves anything.

        A difference of convention is 1 unless it was asked for.
        """
        if any(one.verdict == "wrong" or one.differs for one in self.families):
            return WRONG
        return NOTHING_RAN if self.unproven else CONFORMS

    @property
    def ok(self) -> bool:
        """Whether something ran, and all of it is right."""
        return self.exit_code == CONFORMS

    @property
    def causes(self) -> tuple[str, ...]:
        """What wrong answers equal instead, each once."""
        return tuple(dict.fromkeys(one.cause for one in self.families if one.cause))

    def family(self, name: str) -> Family:
        """One family.

        Parameters
        ----------
        name : str
            Key in `testing.FAMILIES`.

        Returns
        -------
        Family
            Its cases.

        Raises
        ------
        KeyError
            If it was not asked for, or the scheme has no such case.
        """
        return {one.name: one for one in self.families}[name]

    @property
    def title(self) -> str:
        """What was compared with what."""
        scheme = f"{self.scheme} ({self.variant})" if self.variant else self.scheme
        what = "output and gradients" if self.grad else "output"
        return f"{self.subject} against {scheme}: {what} in {self.dtype}, {self.framework} {self.version}"

    @property
    def summary(self) -> str:
        """One line."""

        def named(verdict: str) -> list[str]:
            return [one.name for one in self.families if one.verdict == verdict]

        wrong, differing = named("wrong"), named("convention")
        if not wrong and not differing and self.unproven:
            return self.unproven
        kinds = {"in part": named("partly"), "not run": named("not run")}
        if wrong or not any(one.differs for one in self.families):
            kinds["by another convention"] = differing
        tail = "".join(f"; {words}: {', '.join(names)}" for words, names in kinds.items() if names)
        if wrong:
            return f"WRONG in {', '.join(wrong)} ({self.ran} cases ran{tail})"
        if "by another convention" not in kinds:
            return f"right but for a difference of convention in {', '.join(differing)} ({self.ran} cases ran{tail})"
        return f"conforms in {self.ran} cases of {sum(bool(one.ran) for one in self.families)} families{tail}"

    def text(self) -> str:
        """A table of families, and what to know of each that is wrong.

        Returns
        -------
        str
            Several lines.
        """
        rows = [("family", "cases", "verdict", "error", "")]
        for one in self.families:
            error = f"{one.ratio:.2g} of allowed" if one.ran else ""
            verdict = one.verdict.upper() if one.verdict == "wrong" else one.verdict
            reason = one.reason if len(one.reason) <= _WIDTH else one.reason[: _WIDTH - 1] + "…"
            rows.append((one.name, f"{one.ran}/{len(one.findings)}", verdict, error, reason))
        widths = [max(len(row[n]) for row in rows) for n in range(4)]
        lines = [self.title, ""]
        lines += ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows]
        for cause in dict.fromkeys(one.cause for one in self.families if one.smallest is not None):
            lines += ["", *_explained(cause, [one for one in self.families if one.cause == cause and one.smallest])]
        computes = [f"computes with {self.arithmetic}"] if self.arithmetic else []
        return "\n".join([*lines, "", *computes, self.summary])

    def as_dict(self) -> dict[str, Any]:
        """The same for programs.

        Returns
        -------
        dict
            Of strings, numbers, lists and dicts.
        """

        def told(one: Any, *names: str) -> dict[str, Any]:
            return {name: getattr(one, name) for name in names}

        families = []
        for family in self.families:
            cases = []
            for one in family.findings:
                results = {n: {"error": error, "allowed": one.allowed[n]} for n, error in one.errors.items()}
                cases.append(told(one, "edge", "where", "verdict", "reason") | {"results": results})
            families.append(told(family, "name", "verdict", "ran", "cause", "reason") | {"cases": cases})
        head = ("ok", "exit_code", "ran", *(name for name in self.__dataclass_fields__ if name != "families"))
        return told(self, *head) | {"families": families}


def _explained(cause: str, families: list[Family]) -> list[str]:
    """Families that are wrong for one reason, and their smallest case."""
    smallest = min((one.smallest for one in families if one.smallest is not None), key=lambda one: one.work)
    lines = [f"{', '.join(one.name for one in families)}: {cause or 'no known mistake gives these numbers'}"]
    lines.append(f"    the smallest case: {smallest.edge} ({smallest.where})")
    for name in smallest.wrong:
        off, allowed, rough = smallest.errors[name], smallest.allowed[name], smallest.rough.get(name, 0.0)
        more = f"; its typical error is {rough:.2g} times what is allowed" if off <= allowed else ""
        lines.append(f"    {name} is off by {off:.3g}, allowed {allowed:.3g}{more}")
    lines += [f"    {smallest.reason}"] if smallest.reason and smallest.reason != cause else []
    hint = next((flag for words, flag in _FLAGS.items() if cause.startswith(words)), "")
    if smallest.verdict == "convention":
        lines.append(f"    a difference of convention, as in {' and '.join(smallest.whose)}")
        hint = "" if smallest.accepted else f"--conventions {smallest.whose[0]}"
    hint = f"--variant {variant[1]}" if (variant := _VARIANT.search(cause)) else hint
    return [*lines, f"    if that is meant, say {hint}"] if hint else lines
